/* Saves of files of parts: writers read the sources directly when they write them.
 *
 *   direct extent   source and file have the same alignment, so the source's memory is written
 *   other extents   sources and the bytes between them are copied to a buffer, which is written;
 *                   the same pass computes the CRC
 *
 * Only a few blocks of such a save are in the writers' queue at a time. So blocks of other saves
 * are written between them, and a few buffers are enough. A buffer is a block of the pool if one is
 * free. Otherwise it is mapped: the sources are often a snapshot, which may fill the whole pool.
 * The caller of a stream keeps each block until the store has acknowledged it. So a stream has as
 * many blocks in use as its caller sends at a time.
 *
 * A block that contains the CRC of a source waits ("is parked") until that CRC is known. The blocks
 * with the source's bytes are queued before it, so at least one block can always proceed. */
#include <errno.h>
#include <sys/mman.h>

#include "save/stage.h"
#include "save/write.h"
#include "trace/trace.h"

enum {
	NR_AHEAD = 2, /* blocks in the queue besides one for each writer */
	/* larger buffers cost memory, and larger writes are not faster */
	MAX_BLOCK_BYTES = 4u << 20,
	/* a caller has six requests of 16 MiB: four are being sent, two are being filled */
	STREAM_BYTES = 96u << 20,
};

uint64_t sfr__in_place_block_bytes(const struct sfr_engine *engine)
{
	if (engine->opts.block_bytes < MAX_BLOCK_BYTES)
		return engine->opts.block_bytes;
	return MAX_BLOCK_BYTES;
}

/* Queues the next block. Returns false if there is none, or if the save is failing. */
static bool push_next_block_locked(struct sfr_ticket *t)
{
	const struct sfr__extent *extent;
	struct sfr__job *job;

	/* Skip extents without further blocks. */
	while (t->work.next_extent < t->plan.img.nr_extents &&
	       t->work.next_blk == t->plan.img.extents[t->work.next_extent].nr_blocks) {
		t->work.next_extent++;
		t->work.next_blk = 0;
	}
	if (t->work.next_extent == t->plan.img.nr_extents || sfr__ticket_is_failing_locked(t))
		return false;
	extent = &t->plan.img.extents[t->work.next_extent];
	job = sfr__block_job(t, extent, t->work.next_blk);
	*job = (struct sfr__job){
		.ticket = t, .kind = SFR__JOB_BLOCK, .extent = extent, .blk = t->work.next_blk
	};
	t->work.next_blk++;
	sfr__job_push_locked(job);
	t->work.pushed_nbytes += sfr__image_block_len(&t->plan.img, extent, job->blk);
	return true;
}

/* Returns whether a stream has queued as many bytes as its caller sends at a time. Bytes of a
 * stream count as written when the caller has given them back. */
static bool has_queued_enough_locked(const struct sfr_ticket *t)
{
	return t->work.pushed_nbytes >= t->facts.written_nbytes + STREAM_BYTES;
}

void sfr__in_place_queue_more_blocks_locked(struct sfr_ticket *t)
{
	bool pushed = true;

	if (!sfr__ticket_is_stream(t)) {
		(void)push_next_block_locked(t); /* false: no block is left */
		return;
	}
	while (pushed && !has_queued_enough_locked(t))
		pushed = push_next_block_locked(t);
}

void sfr__in_place_queue_first_blocks_locked(struct sfr_ticket *t)
{
	for (uint32_t i = 0; i < t->engine->opts.nr_writers + NR_AHEAD; i++)
		sfr__in_place_queue_more_blocks_locked(t);
}

/* Sets job->mem to a block of the pool if one is free, else to a new mapping. Returns 0 or
 * -ENOMEM. */
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
	job->mapped_len = len;
	return 0;
}

/* Copies a block's bytes to the job's memory, and adds their CRCs to the CRCs of the entries. */
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
		/* copies the bytes, and computes their CRC from 0 on */
		crc = sfr_sys.lane_copy(0, job->mem + seg.pos, src, seg.len);
		(void)sfr__add_crc(t, &seg, crc);
	}
	sfr__copy_fence();
}

int sfr__in_place_prepare_block(struct sfr_ticket *t, struct sfr__job *job, struct sfr_err *err)
{
	size_t len = sfr__image_block_len(&t->plan.img, job->extent, job->blk);
	int rc;

	if (job->extent->direct_src != NULL) {
		/* Casts `const` away, but nothing writes to this memory: only blocks with a CRC
		 * field are changed, and a direct extent has none. */
		job->mem = (char *)(uintptr_t)job->extent->direct_src +
			   job->blk * t->plan.img.block_bytes;
		return 0; /* job->crc_done stays false, so the caller computes the CRC */
	}
	rc = get_buffer(t, job, len);
	if (rc < 0) {
		sfr__err_set_if_unset(err, rc, SFR_PHASE_WRITE, "no memory for a buffer");
		return -1;
	}
	fill_buffer(t, job);
	job->crc_done = true;
	return 0;
}

void sfr__in_place_unmap(struct sfr__job *job)
{
	if (job->mapped_len != 0) /* munmap of a whole mapping cannot fail */
		(void)sfr_sys.munmap(job->mem, job->mapped_len);
	job->mapped_len = 0;
}
