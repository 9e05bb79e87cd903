/* Saves of parts: writers read the sources when they write them.
 *
 *   direct extent   source and file are aligned alike: the source's memory is written as it is
 *   other extents   sources and the bytes between them are copied to a buffer, and the CRC is
 *                   computed in that pass
 *
 * Only a few blocks of such a save are in the writers' queue at a time. So blocks of other saves
 * are written between them, and a few buffers are enough. A buffer is a block of the pool if one is
 * free at once, else memory of its own: the sources are often a snapshot, which may fill the pool.
 * The client of a stream keeps each block until the store has acknowledged it, so a stream has as
 * many blocks in use as its client sends at a time.
 *
 * A block that contains the CRC of a source is parked until that CRC is known. The blocks with the
 * source's bytes are queued before it, so at least one block can always proceed. */
#include <errno.h>
#include <sys/mman.h>

#include "save/stage.h"
#include "save/write.h"
#include "trace/trace.h"

enum {
	AHEAD = 2, /* blocks in the queue besides one for each writer */
	/* larger buffers cost memory, and larger writes are not faster */
	MOST_BLOCK_BYTES = 4u << 20,
	STREAM_BYTES = 96u << 20, /* requests of 16 MiB: four on their way, two being filled */
};

uint64_t sfr__in_place_block_bytes(const struct sfr_engine *engine)
{
	if (engine->opts.block_bytes < MOST_BLOCK_BYTES)
		return engine->opts.block_bytes;
	return MOST_BLOCK_BYTES;
}

/* Queues the next block. Returns false if there is none, or if the save is failing. */
static bool push_next_block_locked(struct sfr_ticket *t)
{
	const struct sfr__extent *extent;
	struct sfr__job *job;

	while (t->sharing.next_extent < t->plan.img.nr_extents &&
	       t->sharing.next_blk == t->plan.img.extents[t->sharing.next_extent].nr_blocks) {
		t->sharing.next_extent++;
		t->sharing.next_blk = 0;
	}
	if (t->sharing.next_extent == t->plan.img.nr_extents || sfr__ticket_failing_locked(t))
		return false;
	extent = &t->plan.img.extents[t->sharing.next_extent];
	job = sfr__block_job(t, extent, t->sharing.next_blk);
	*job = (struct sfr__job){
		.ticket = t, .kind = SFR__JOB_BLOCK, .extent = extent, .blk = t->sharing.next_blk
	};
	t->sharing.next_blk++;
	sfr__job_push_locked(job);
	t->sharing.pushed_nbytes += sfr__image_block_len(&t->plan.img, extent, job->blk);
	return true;
}

/* Returns whether a stream has queued as many bytes as its client sends at a time. A stream's bytes
 * count as written when the client has given them back. */
static bool has_queued_enough_locked(const struct sfr_ticket *t)
{
	return t->sharing.pushed_nbytes >= t->facts.written_nbytes + STREAM_BYTES;
}

void sfr__in_place_next_locked(struct sfr_ticket *t)
{
	bool pushed = true;

	if (!sfr__ticket_is_stream(t)) {
		(void)push_next_block_locked(t); /* there may be none */
		return;
	}
	while (pushed && !has_queued_enough_locked(t))
		pushed = push_next_block_locked(t);
}

void sfr__in_place_begin_locked(struct sfr_ticket *t)
{
	for (uint32_t i = 0; i < t->engine->opts.nr_writers + AHEAD; i++)
		sfr__in_place_next_locked(t);
}

/* Uses a block of the pool if one is free. Returns 0 or -ENOMEM. */
static int get_buffer(struct sfr_ticket *t, struct sfr__job *job, size_t len)
{
	struct sfr_engine *engine = t->engine;

	if (sfr__pool_get(engine->pool, t->seq, len, 0, &job->block) == 0) {
		job->mem = job->block->mem;
		sfr__lock(&engine->mu);
		sfr__ticket_count_block_locked(t);
		sfr__unlock(&engine->mu);
		return 0;
	}
	job->mem =
		sfr_sys.mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (job->mem == MAP_FAILED) {
		job->mem = NULL;
		return -ENOMEM;
	}
	job->own_len = len;
	return 0;
}

/* Copies a block's bytes to the job's memory, and adds their CRCs to those of their entries. */
static void fill_buffer(struct sfr_ticket *t, const struct sfr__job *job)
{
	struct sfr__seg_iter it;
	struct sfr__seg seg;

	SFR__TRACE(SFR_TRACE_COPY, t->number,
		   sfr__image_block_len(&t->plan.img, job->extent, job->blk));
	sfr__seg_iter_init(&it, &t->plan.img, job->extent, job->blk);
	while (sfr__seg_next(&it, &seg)) {
		const char *src = t->plan.img.entries[seg.entry].src + seg.off;
		uint32_t crc;

		if (seg.kind != SFR__SEG_DATA) {
			sfr__stage_non_data(t, &seg, job->mem + seg.pos);
			continue;
		}
		sfr__prefetch_entry(t, seg.entry + 2); /* the next entry was prefetched before */
		crc = sfr_sys.lane_copy(0, job->mem + seg.pos, src, seg.len);
		(void)sfr__add_crc(t, &seg, crc);
	}
	sfr__copy_fence();
}

int sfr__in_place_prepare(struct sfr_ticket *t, struct sfr__job *job, struct sfr_err *err)
{
	size_t len = sfr__image_block_len(&t->plan.img, job->extent, job->blk);
	int rc;

	if (job->extent->direct != NULL) {
		/* The cast drops `const`, but nothing writes: the block has no CRC field. */
		job->mem =
			(char *)(uintptr_t)job->extent->direct + job->blk * t->plan.img.block_bytes;
		return 0; /* job->summed is false: the caller computes the CRC */
	}
	rc = get_buffer(t, job, len);
	if (rc < 0) {
		sfr__err_set(err, rc, SFR_PHASE_WRITE, "no memory for a buffer");
		return -1;
	}
	fill_buffer(t, job);
	job->summed = true;
	return 0;
}

void sfr__in_place_release(struct sfr__job *job)
{
	if (job->own_len != 0)
		(void)sfr_sys.munmap(job->mem, job->own_len); /* cannot fail: a whole mapping */
	job->own_len = 0;
}
