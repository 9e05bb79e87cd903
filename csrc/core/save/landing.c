/* Handles the completed copies of a save: passes blocks to the writers.
 *
 * Runs on the lane's thread. Deferred bytes are compared with the samples first; the samples'
 * copies have completed before theirs. After a device has died, the contents of its blocks are
 * unknown: those blocks are retired, and the save fails.
 *
 * A device's part of the save is over when three things hold: the capturing thread is done with it,
 * nothing more will be queued, and nothing is in flight. The caller that makes the last of them
 * true settles the part and does not touch it afterwards, because another thread may free the
 * ticket. */
#include <errno.h>
#include <string.h>

#include "save/parts.h"

/* Compares one block with the samples, and with the checksums if there are any. Returns the index
 * of a torn source, or -1. */
static int64_t check(struct sfr__cuda_part *part, const struct sfr__run *run, uint32_t blk,
		     const struct sfr__block *block)
{
	struct sfr_ticket *t = part->ticket;
	struct sfr__seg_iter it;
	struct sfr__seg seg;
	int64_t torn = -1;

	sfr__seg_iter_init(&it, &t->plan.img, run, blk);
	while (torn < 0 && sfr__seg_next(&it, &seg)) {
		const char *staged = block->mem + seg.pos;

		if (seg.kind != SFR__SEG_DATA)
			continue;
		torn = sfr__check_piece(t, &part->samples, seg.entry, seg.off, staged, seg.len);
		if (torn < 0 && t->staging.sums)
			torn = sfr__check_sum(t, seg.entry, seg.off, staged, seg.len);
	}
	return torn;
}

static void end_block(struct sfr__cuda_part *part, const struct sfr__run *run, uint32_t blk,
		      struct sfr__block *block, bool ok)
{
	struct sfr_ticket *t = part->ticket;
	struct sfr_err err = { .index = -1 };
	int64_t torn = ok && run == part->deferred ? check(part, run, blk, block) : -1;

	if (!ok)
		/* constant once the lane is dead */
		sfr__err_set(&err, -EIO, SFR_PHASE_STAGE, part->lane->why);
	if (torn >= 0) {
		sfr__err_set(&err, SFR_ETORN, SFR_PHASE_STAGE, "samples");
		err.index = torn;
	}
	sfr__lock(&t->engine->mu);
	if (err.code)
		sfr__ticket_fail_locked(t, &err);
	if (ok)
		sfr__push_block_locked(t, run, blk, block, false);
	else
		t->flight.blocks_held--;
	sfr__unlock(&t->engine->mu);
	/* Last, because a waiter for blocks that finds none left looks for the error. */
	if (!ok)
		sfr__pool_retire(t->engine->pool, block);
}

static bool is_over_locked(struct sfr__cuda_part *part)
{
	if (!part->called || !part->submitted || part->nr_out != 0 || part->over)
		return false;
	part->over = true;
	sfr__cuda_staged_over_locked(part->lane, &part->staged);
	return true;
}

static void settle(struct sfr__cuda_part *part)
{
	struct sfr_ticket *t = part->ticket;
	char note[sizeof(t->report.fallback[0])] = "";

	sfr__cuda_copies_note(part->lane, note, sizeof(note));
	sfr__cuda_store_put(part->lane, &part->store);
	sfr__lock(&t->engine->mu);
	t->sharing.cuda_out--;
	sfr__pin_note(sfr__pool_pin(t->engine->pool), t->report.fallback[SFR_FALLBACK_PAGEABLE],
		      sizeof(t->report.fallback[0]));
	if (note[0])
		memcpy(t->report.fallback[SFR_FALLBACK_COPIES], note, sizeof(note));
	sfr__ticket_released_locked(t);
	sfr__ticket_step_locked(t);
	sfr__unlock(&t->engine->mu);
}

void sfr__cuda_part_landed(struct sfr__cuda_landing *landing, struct sfr__cuda_piece *piece,
			   bool ok)
{
	struct sfr__cuda_part *part = sfr__container(landing, struct sfr__cuda_part, landing);
	struct sfr__block *block = piece->blocks, *next;
	struct sfr_err err = { .index = -1 };
	uint32_t blk = piece->first_blk;
	bool over;

	for (; block; block = next, blk++) {
		next = block->next;
		end_block(part, piece->run, blk, block, ok);
	}
	if (!ok) {
		sfr__err_set(&err, -EIO, SFR_PHASE_STAGE, part->lane->why);
		sfr__ticket_fail(part->ticket, &err);
	}
	sfr__lock(&part->lane->mu);
	part->nr_out--;
	over = is_over_locked(part);
	sfr__unlock(&part->lane->mu);
	if (over)
		settle(part);
}

void sfr__cuda_part_called(struct sfr__cuda_part *part)
{
	sfr__lock(&part->lane->mu);
	part->called = true;
	sfr__unlock(&part->lane->mu);
}

void sfr__cuda_part_submitted(struct sfr__cuda_part *part)
{
	struct sfr_ticket *t = part->ticket;
	bool over;

	sfr__lock(&t->engine->mu);
	t->sharing.cuda_unsubmitted--;
	pthread_cond_broadcast(&t->engine->cv_state); /* the gate may now use S */
	sfr__unlock(&t->engine->mu);
	sfr__lock(&part->lane->mu);
	part->submitted = true;
	over = is_over_locked(part);
	sfr__unlock(&part->lane->mu); /* the ticket may be freed from here on */
	if (over)
		settle(part);
}
