/* Copies from a device into memory of the host: blocks, samples, checksums.
 *
 * A block's headers and padding are written at once, its tensor bytes by copies that are queued:
 * small ones in batches, since one call costs 2.3 us and a batch not much more. Every so many
 * bytes a piece flies: an event is recorded behind what was queued, for the lane to watch. The
 * block's last piece has the block, and is made before anything is queued, so that nothing can
 * ever be in flight with nobody to hear of its end.
 *
 * Samples are the same copies, of single cache lines, right into the array that the staged bytes
 * are later compared with. That array is pinned and kept from save to save.
 *
 * A device that fails a call fails the save; what it had been given before is still watched.
 */
#include <errno.h>
#include <string.h>

#include "save/parts.h"

/* ---- queueing one block ----------------------------------------------------------- */

/* A block on its way: what stands in the batch, and the piece that will watch it. */
struct staging {
	struct sfr__cuda_part *part;
	const struct sfr__run *run;
	struct sfr__block *block;
	uint32_t blk;
	bool pinned;
	bool queued;                  /* the device was given a copy */
	struct sfr__cuda_piece *last; /* made beforehand */
	uint64_t bytes;               /* of the piece so far */
	size_t nr;                    /* in the batch */
	CUdeviceptr dst[SFR__CUDA_BATCH], src[SFR__CUDA_BATCH];
	size_t len[SFR__CUDA_BATCH];
	struct sfr_err err;
};

/* Copies what stands in the batch. */
static void copy_batch_locked(struct staging *s)
{
	struct sfr__cuda_lane *lane = s->part->lane;

	if (s->nr == 0 || lane->dead || s->err.code)
		return;
	s->queued = true; /* what a call that fails has done is not known */
	sfr__cuda_copies_locked(lane, s->dst, s->src, s->len, s->nr, s->pinned, &s->err);
}

/* Records the event of what was queued and lets the piece fly. It always does: where no event can
 * be had or recorded, the stream as a whole is asked. */
static void fly_locked(struct staging *s, struct sfr__cuda_piece *piece, bool last)
{
	struct sfr__cuda_lane *lane = s->part->lane;
	CUresult rc;

	*piece = (struct sfr__cuda_piece){
		.landing = &s->part->landing,
		.run = s->run,
		.blk = s->blk,
		.block = last ? s->block : NULL,
		.landed = lane->dead ? NULL : sfr__cuda_event_get_locked(lane),
	};
	if (piece->landed) {
		rc = lane->cu->event_record(piece->landed, lane->stream);
		if (rc != CUDA_SUCCESS) {
			(void)sfr__cuda_failed_locked(lane, "cuEventRecord", rc, &s->err);
			if (!lane->dead)
				sfr__cuda_event_put_locked(lane, piece->landed);
			piece->landed = NULL;
		}
	}
	s->part->nr_out++;
	sfr__cuda_fly_locked(lane, piece);
}

/* Queues what stands in the batch, and has a piece fly behind it. */
static void flush(struct staging *s)
{
	struct sfr__cuda_lane *lane = s->part->lane;
	/* Without memory for one the copies have no event of their own: the last piece's, which is
	 * behind them and was made before anything was queued, will do. */
	struct sfr__cuda_piece *piece = sfr__cuda_piece_get(lane);

	sfr__lock(&lane->mu);
	copy_batch_locked(s);
	if (piece)
		fly_locked(s, piece, false);
	sfr__unlock(&lane->mu);
	s->nr = 0;
	s->bytes = 0;
}

/* The same with the last piece. On a dead device to which nothing was given of this block, no
 * copy can be running: the block goes back. */
static void flush_last(struct staging *s)
{
	struct sfr__cuda_lane *lane = s->part->lane;
	struct sfr_ticket *t = s->part->ticket;
	bool unused;

	sfr__lock(&lane->mu);
	copy_batch_locked(s);
	unused = lane->dead && !s->queued;
	if (unused) {
		sfr__err_set(&s->err, -EIO, SFR_PHASE_STAGE, lane->why);
		s->last->next = lane->free_pieces;
		lane->free_pieces = s->last;
	} else {
		fly_locked(s, s->last, true);
	}
	sfr__unlock(&lane->mu);
	if (unused && s->block) {
		sfr__lock(&t->engine->mu);
		t->flight.blocks_held--;
		sfr__unlock(&t->engine->mu);
		sfr__pool_put(t->engine->pool, s->block);
	}
}

/* Starts a block, or samples (no block). False without memory: then nothing is queued. */
static bool staging_init(struct staging *s, struct sfr__cuda_part *part, const struct sfr__run *run)
{
	s->part = part;
	s->run = run;
	s->block = NULL;
	s->blk = 0;
	s->bytes = 0;
	s->nr = 0;
	s->queued = false;
	s->err = (struct sfr_err){ .index = -1 };
	s->last = sfr__cuda_piece_get(part->lane);
	if (!s->last)
		sfr__err_set(&s->err, -ENOMEM, SFR_PHASE_STAGE, NULL);
	return s->last != NULL;
}

/* On the lane's thread, before more is queued: few in flight, unless a gate waits for this save. */
void sfr__cuda_throttle(struct sfr__cuda_part *part)
{
	struct sfr__cuda_lane *lane = part->lane;

	sfr__cuda_poll(lane);
	sfr__lock(&lane->mu);
	while (lane->nr_in_flight >= sfr__cuda_nr_in_flight && part->ticket->seq > lane->rush_seq &&
	       !lane->dead) {
		(void)sfr__cond_wait(&lane->cv, &lane->mu, sfr__deadline(50 * 1000));
		sfr__unlock(&lane->mu);
		sfr__cuda_poll(lane);
		sfr__lock(&lane->mu);
	}
	sfr__unlock(&lane->mu);
}

static void add_copy(struct staging *s, char *dst, const char *src, size_t len, bool slowly)
{
	/* Large copies gain nothing from a batch, and some drivers stage what is in one. */
	if (s->nr == SFR__CUDA_BATCH || (s->nr > 0 && len >= SFR__CUDA_SMALL)) {
		struct sfr__cuda_lane *lane = s->part->lane;

		sfr__lock(&lane->mu);
		copy_batch_locked(s);
		sfr__unlock(&lane->mu);
		s->nr = 0;
	}
	s->dst[s->nr] = (CUdeviceptr)(uintptr_t)dst;
	s->src[s->nr] = (CUdeviceptr)(uintptr_t)src;
	s->len[s->nr++] = len;
	s->bytes += len;
	if (s->bytes >= sfr__cuda_piece_bytes) {
		flush(s);
		if (slowly)
			sfr__cuda_throttle(s->part);
	}
}

/* Fills one block: headers and padding at once, tensor bytes by copies that are queued. The block
 * is the lane's from here on. `slowly`: on the lane's thread, with few pieces in flight. */
void sfr__cuda_stage_block(struct sfr__cuda_part *part, const struct sfr__run *run, uint32_t blk,
			   struct sfr__block *block, bool slowly)
{
	struct sfr_ticket *t = part->ticket;
	struct staging s;
	struct sfr__seg_iter it;
	struct sfr__seg seg;

	if (!staging_init(&s, part, run)) {
		sfr__lock(&t->engine->mu);
		t->flight.blocks_held--;
		sfr__ticket_fail_locked(t, &s.err);
		sfr__unlock(&t->engine->mu);
		sfr__pool_put(t->engine->pool, block);
		return;
	}
	s.block = block;
	s.blk = blk;
	s.pinned = sfr__pin_is_pinned(block);
	sfr__seg_iter_init(&it, &t->img, run, blk);
	while (sfr__seg_next(&it, &seg)) {
		const char *src;

		switch (seg.kind) {
		case SFR__SEG_HEADER:
			sfr__image_put_header(&t->img, seg.entry, seg.off, seg.len,
					      block->mem + seg.pos);
			break;
		case SFR__SEG_DATA:
			src = t->img.entries[seg.entry].src + seg.off;
			for (size_t done = 0, len; done < seg.len && !s.err.code; done += len) {
				uint64_t room = sfr__cuda_piece_bytes - s.bytes;

				len = seg.len - done < room ? seg.len - done : (size_t)room;
				add_copy(&s, block->mem + seg.pos + done, src + done, len, slowly);
			}
			break;
		case SFR__SEG_DESC:
		case SFR__SEG_PAD:
			memset(block->mem + seg.pos, 0, seg.len); /* as stage.c does */
			break;
		}
	}
	flush_last(&s);
	if (s.err.code)
		sfr__ticket_fail(t, &s.err);
}

/* ---- samples ---------------------------------------------------------------------- */

/* Memory for samples of the part's deferred sources, as many as there can be. */
static int store_get(struct sfr__cuda_part *part)
{
	if (part->store.range.map)
		return 0;
	return sfr__cuda_store_get(part->lane,
				   part->deferred->nr_entries *
					   sfr__samples_per_entry(part->ticket) *
					   sizeof(*part->samples.items),
				   &part->store);
}

/* Queues copies of the sampled lines, right into the samples. */
void sfr__cuda_take_samples(struct sfr__cuda_part *part)
{
	struct sfr_ticket *t = part->ticket;
	struct staging s;
	int rc = store_get(part);

	if (rc < 0) {
		s.err = (struct sfr_err){ .index = -1 };
		sfr__err_set(&s.err, rc, SFR_PHASE_STAGE, NULL);
	} else if (staging_init(&s, part, part->deferred)) {
		part->samples.items = (struct sfr__sample *)(void *)part->store.range.base;
		s.pinned = part->store.pinned;
		sfr__place_samples(t, part->deferred, &part->samples);
		for (uint32_t k = 0; k < part->samples.nr && !s.err.code; k++) {
			struct sfr__sample *sample = &part->samples.items[k];

			add_copy(&s, (char *)sample->bytes,
				 t->img.entries[sample->entry].src + sample->off, sample->len,
				 false);
		}
		flush_last(&s);
	}
	if (s.err.code)
		sfr__ticket_fail(t, &s.err);
}

int64_t sfr__cuda_check(struct sfr__cuda_part *part, const struct sfr__cuda_piece *piece)
{
	struct sfr_ticket *t = part->ticket;
	struct sfr__seg_iter it;
	struct sfr__seg seg;
	int64_t torn = -1;

	sfr__seg_iter_init(&it, &t->img, piece->run, piece->blk);
	while (torn < 0 && sfr__seg_next(&it, &seg)) {
		const char *staged = piece->block->mem + seg.pos;

		if (seg.kind != SFR__SEG_DATA)
			continue;
		torn = sfr__check_piece(t, &part->samples, seg.entry, seg.off, staged, seg.len);
		if (torn < 0 && t->sums)
			torn = sfr__check_sum(t, seg.entry, seg.off, staged, seg.len);
	}
	return torn;
}

/* ---- checksums ------------------------------------------------------------------ */

void sfr__cuda_sum(struct sfr__cuda_part *part)
{
	struct sfr_ticket *t = part->ticket;
	const struct sfr__run *run = part->deferred;
	struct sfr_err err = { .index = -1 };
	int rc = store_get(part);

	if (rc < 0)
		sfr__err_set(&err, rc, SFR_PHASE_STAGE, NULL);
	for (uint32_t i = 0; i < run->nr_entries && !err.code; i++) {
		const struct sfr__entry *entry = &t->img.entries[run->first_entry + i];

		(void)sfr__cuda_sum_through(part->lane, &part->store, entry->src, entry->nbytes,
					    &t->sums[run->first_entry + i], &err);
	}
	if (err.code)
		sfr__ticket_fail(t, &err);
}
