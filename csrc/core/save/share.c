/* Deferred bytes of host memory: copied by the lane, and by everybody who waits for them.
 *
 * A save's deferred blocks are handed out front to back in pieces. Who has time takes the next one,
 * copies it and comes back; who copies the last piece of a block gives the block to the writers.
 *
 *     copy_blk ------------------v
 *     block    [done] [.XXX......] [      ]     X: pieces that somebody is copying
 *                      ^ begun      memory when the first piece is taken
 *
 *   the lane       always, at low priority: as long as nobody waits, it is alone
 *   a gate, and whoever waits until all is copied, on the waiting thread itself
 *   idle writers   as long as somebody waits
 *
 * A thread that waits would rather not wait for a niced one that another process keeps from
 * running, and a thread cannot be made less nice again without privileges. So the pieces are small,
 * and what the lane has in hand when somebody arrives is all that is waited for.
 *
 * While nobody waits the CRC is made in the same pass as the copy: a second pass over the bytes
 * costs the training half as much again (crc.c). Blocks that are begun while somebody waits leave it
 * to the writers, as captured ones do.
 *
 * Memory for a block is fetched by one thread at a time, and nothing is held meanwhile, so that a
 * pool of one block is enough; the others sleep until it is there.
 *
 * The second detector sits here too. At the call, sfr__take_samples keeps some cache lines of every
 * deferred storage; who has copied a piece compares the *staged* bytes with them. A difference means
 * that somebody wrote between the call and the copy: what is staged is no state the training was
 * ever in, and the save fails.
 */
#include "save/save.h"
#include "trace/trace.h"

#define FETCH_SLICE_NS (UINT64_C(50) * 1000 * 1000) /* a cancel is seen at the latest then */

enum { PIECE = 1 << 20 };

/* Whether the piece [from, to) of the file has the entry's data and descriptor: then nobody else
 * knows of it. */
static bool is_own(const struct sfr__entry *entry, uint64_t from, uint64_t to)
{
	return entry->data_off >= from && entry->data_off + entry->nbytes + entry->desc_len <= to;
}

/* Copies one storage's part of a piece; -1, or the source that was torn. */
static int64_t copy_data(struct sfr_ticket *t, const struct sfr__seg *seg, char *dst, bool own,
			 bool summed)
{
	struct sfr__entry *entry = &t->img.entries[seg->entry];
	const char *src = entry->src + seg->off;
	bool whole = own;
	uint32_t crc;

	SFR__TRACE(SFR_TRACE_PIECE, 0, seg->len);
	if (!summed) {
		sfr_sys.capture_copy(dst, src, seg->len);
		return sfr__check_piece(t, &t->samples, seg->entry, seg->off, dst, seg->len);
	}
	crc = sfr_sys.lane_copy(0, dst, src, seg->len);
	if (own) {
		entry->crc = crc;
		entry->crc_len = seg->len;
	} else {
		whole = sfr__add_crc(t, seg, crc);
	}
	if (whole && t->sums && entry->crc != t->sums[seg->entry])
		return entry->source;
	return sfr__check_piece(t, &t->samples, seg->entry, seg->off, dst, seg->len);
}

/* Fills [off, off + len) of a block. */
static int64_t copy_piece(struct sfr_ticket *t, const struct sfr__job *job, size_t off, size_t len)
{
	char *mem = job->block->mem;
	struct sfr__seg_iter it;
	struct sfr__seg seg;
	int64_t torn = -1, found;
	uint64_t from;

	SFR__TRACE(SFR_TRACE_COPY, t->number, len);
	sfr__seg_iter_init(&it, &t->img, job->run, job->blk);
	from = it.off += off;
	it.end = from + len;
	while (sfr__seg_next(&it, &seg)) {
		if (seg.kind != SFR__SEG_DATA) {
			sfr__stage_rest(t, &seg, mem + seg.pos);
			continue;
		}
		sfr__prefetch_entry(t, seg.entry + 2);
		found = copy_data(t, &seg, mem + seg.pos,
				  is_own(&t->img.entries[seg.entry], from, from + len),
				  job->summed);
		if (torn < 0)
			torn = found;
	}
	sfr__copy_fence();
	return torn;
}

/* ---- handing out ---- */

static struct sfr__job *next_job(struct sfr_ticket *t)
{
	return sfr__block_job(t, t->deferred, t->copy_blk);
}

/* When nothing is handed out any more and nobody has a piece of it, the sources are free. */
static void settle_locked(struct sfr_ticket *t)
{
	bool failing = sfr__ticket_failing_locked(t);
	struct sfr__job *job;

	if (!failing && t->copy_blk < t->deferred->nr_blocks)
		return;
	sfr__shared_remove_locked(t->engine, &t->copying);
	if (t->nr_copying != 0 || t->fetching || !t->lane_owns)
		return;
	if (t->copy_blk < t->deferred->nr_blocks) {
		job = next_job(t); /* a part of it is copied, for nothing: a writer puts it back */
		t->copy_blk = t->deferred->nr_blocks;
		if (job->block)
			sfr__push_block_locked(t, job->run, job->blk, job->block, job->summed);
	}
	t->lane_owns = false;
	sfr__ticket_released_locked(t);
	sfr__ticket_step_locked(t);
}

/* Memory for the next block, if there is any within the slice; or the save has failed. */
static void fetch_locked(struct sfr_ticket *t)
{
	struct sfr_engine *engine = t->engine;
	struct sfr__job *job = next_job(t);
	size_t need = sfr__image_block_len(&t->img, t->deferred, t->copy_blk);
	struct sfr_err err = { .index = -1 };
	struct sfr__block *block;
	int rc;

	t->fetching = true;
	sfr__unlock(&engine->mu);
	rc = sfr__pool_get(engine->pool, t->seq, need, 0, &block);
	if (rc == SFR_EAGAIN) {
		SFR__TRACE(SFR_TRACE_POOL_WAIT, t->number, 0);
		rc = sfr__pool_get(engine->pool, t->seq, need, FETCH_SLICE_NS, &block);
	}
	sfr__lock(&engine->mu);
	t->fetching = false;
	if (rc == 0) {
		sfr__ticket_take_block_locked(t);
		*job = (struct sfr__job){ .ticket = t,
					  .block = block,
					  .run = t->deferred,
					  .blk = t->copy_blk,
					  .left = need,
					  .summed = engine->nr_awaiting == 0 || t->sums };
	} else if (rc != SFR_EAGAIN) {
		sfr__err_set(&err, rc, SFR_PHASE_STAGE, NULL);
		sfr__ticket_fail_locked(t, &err);
	}
	sfr__shared_wake_locked(engine); /* it is there, or somebody else's turn to fetch it */
}

static void copy_next_locked(struct sfr_ticket *t)
{
	struct sfr__job *job = next_job(t);
	size_t all = sfr__image_block_len(&t->img, t->deferred, t->copy_blk);
	size_t off = job->begun, len = all - off < PIECE ? all - off : PIECE;
	struct sfr_err err = { .index = -1 };
	int64_t torn;

	job->begun += len;
	t->copy_blk += job->begun == all;
	t->nr_copying++;
	sfr__unlock(&t->engine->mu);
	torn = copy_piece(t, job, off, len);
	if (torn >= 0) {
		sfr__err_set(&err, SFR_ETORN, SFR_PHASE_STAGE, "samples");
		err.index = torn;
	}
	sfr__lock(&t->engine->mu);
	t->nr_copying--;
	if (err.code)
		sfr__ticket_fail_locked(t, &err);
	job->left -= len;
	if (job->left == 0)
		sfr__push_block_locked(t, job->run, job->blk, job->block, job->summed);
}

static bool turn_locked(struct sfr__shared *work, bool may_wait)
{
	struct sfr_ticket *t = sfr__container(work, struct sfr_ticket, copying);

	if (!sfr__ticket_failing_locked(t) && t->copy_blk < t->deferred->nr_blocks) {
		if (next_job(t)->block)
			copy_next_locked(t);
		else if (t->fetching || !may_wait)
			return false;
		else
			fetch_locked(t);
	}
	settle_locked(t);
	return true;
}

void sfr__share_begin_locked(struct sfr_ticket *t)
{
	t->lane_owns = true;
	t->copying.turn_locked = turn_locked;
	sfr__shared_push_locked(t->engine, &t->copying);
}

bool sfr__share_help_locked(struct sfr_ticket *t)
{
	struct sfr__shared *first = t->engine->shared.head;

	/* Older saves come first: they have the blocks. */
	if (!first || !t->lane_owns || t->copy_blk == t->deferred->nr_blocks)
		return false;
	return first->turn_locked(first, true);
}
