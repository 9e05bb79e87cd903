/* What becomes of a save's pieces when their copies have ended, on a device's lane.
 *
 * A block whose last piece has landed is compared with the samples and goes on to the writers. On a
 * dead device nobody can know whether a copy still runs: the block is retired, and the save fails.
 * When nothing of a part is queued or in flight any more, the part is over, which is said once.
 */
#include <errno.h>
#include <stdio.h>

#include "save/parts.h"

/* A save's piece: its block goes on to the writers, or is lost. */
static void end_block(struct sfr__cuda_part *part, const struct sfr__cuda_piece *piece, bool landed)
{
	struct sfr__cuda_lane *lane = part->lane;
	struct sfr_ticket *t = part->ticket;
	struct sfr_err err = { .index = -1 };
	int64_t torn = -1;

	if (!landed)
		sfr__err_set(&err, -EIO, SFR_PHASE_STAGE, lane->why); /* constant once dead */
	else if (piece->block && piece->run == part->deferred)
		torn = sfr__cuda_check(part, piece);
	if (torn >= 0) {
		sfr__err_set(&err, SFR_ETORN, SFR_PHASE_STAGE, "samples");
		err.index = torn;
	}
	if (piece->block || err.code) {
		sfr__lock(&t->engine->mu);
		if (err.code)
			sfr__ticket_fail_locked(t, &err);
		if (piece->block && landed)
			sfr__push_block_locked(t, piece->run, piece->blk, piece->block, false);
		else if (piece->block)
			t->flight.blocks_held--;
		sfr__unlock(&t->engine->mu);
	}
	/* Only now: who waits for a block and hears that there is none looks for the reason. */
	if (piece->block && !landed)
		sfr__pool_retire(t->engine->pool, piece->block);
}

void sfr__cuda_part_landed(struct sfr__cuda_landing *landing, const struct sfr__cuda_piece *piece,
			   bool ok)
{
	struct sfr__cuda_part *part = sfr__container(landing, struct sfr__cuda_part, landing);
	struct sfr__cuda_lane *lane = part->lane;
	bool over;

	end_block(part, piece, ok);
	sfr__lock(&lane->mu);
	part->nr_out--;
	over = sfr__cuda_part_over_locked(part);
	sfr__unlock(&lane->mu);
	if (over)
		sfr__cuda_part_settle(part);
}

bool sfr__cuda_part_over_locked(struct sfr__cuda_part *part)
{
	struct sfr__cuda_lane *lane = part->lane;

	if (!part->called || !part->submitted || part->nr_out != 0 || part->over)
		return false;
	part->over = true;
	if (!lane->dead)
		sfr__cuda_event_put_locked(lane, part->staged);
	part->staged = NULL;
	return true;
}

void sfr__cuda_part_settle(struct sfr__cuda_part *part)
{
	struct sfr__cuda_lane *lane = part->lane;
	struct sfr_ticket *t = part->ticket;
	bool single;

	sfr__lock(&lane->mu);
	single = lane->single_copies;
	sfr__unlock(&lane->mu);
	sfr__cuda_store_put(lane, &part->store);
	sfr__lock(&t->engine->mu);
	t->cuda_out--;
	sfr__pin_note(sfr__pool_pin(t->engine->pool), t->fallback[2], sizeof(t->fallback[2]));
	if (single)
		(void)snprintf(t->fallback[3], sizeof(t->fallback[3]),
			       "Device %u refuses batched copies: small tensors are copied one "
			       "by one.",
			       lane->device);
	sfr__ticket_released_locked(t);
	sfr__ticket_step_locked(t);
	sfr__unlock(&t->engine->mu);
}
