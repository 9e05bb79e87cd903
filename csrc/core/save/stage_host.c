/* Stages the sources of a save that are in host memory: copies them to blocks of the pool.
 *
 * A block is filled front to back with local headers, tensor bytes and zeros for padding. Data
 * descriptors contain a CRC, so a writer fills them in later. Captured sources are copied in the
 * call. Deferred sources are copied by the lane, and by threads that wait for them (stage/host.c).
 *
 * While no thread waits, the same pass copies deferred bytes and computes their CRC: a second pass
 * would take half as much CPU time again (crc.c). The writers compute the CRC of captured blocks,
 * and of blocks that were begun while a thread waited.
 *
 * This file also detects torn copies. At the call, some cache lines of every deferred storage are
 * kept as samples. The thread that has copied bytes compares the copy with these samples. If they
 * differ, somebody wrote to the storage after the call, and the save fails. */
#include <errno.h>
#include <string.h>

#include "sfr/crc.h"
#include "save/stage.h"
#include "save/stream.h"
#include "trace/trace.h"

/* ---- samples ---- */

struct sfr__source_to_sample *sfr__extent_list_sources(const struct sfr_ticket *t,
						       const struct sfr__extent *extent)
{
	struct sfr__source_to_sample *sources =
		sfr_sys.malloc(extent->nr_lane_entries * sizeof(*sources));

	if (!sources)
		return NULL;
	for (uint32_t i = 0; i < extent->nr_lane_entries; i++) {
		const struct sfr__image_entry *entry =
			&t->plan.img.entries[extent->first_entry + i];

		sources[i] =
			(struct sfr__source_to_sample){ .entry = extent->first_entry + i,
							.addr = (uint64_t)(uintptr_t)entry->src,
							.nbytes = entry->nbytes };
	}
	return sources;
}

int sfr__take_samples(struct sfr_ticket *t)
{
	const struct sfr__extent *extent = t->staging.deferred.extent;
	struct sfr__source_to_sample *sources;
	int rc;

	SFR__TRACE(SFR_TRACE_SAMPLES, t->number, 0);
	if (extent == NULL)
		return 0;
	sources = sfr__extent_list_sources(t, extent);
	if (!sources)
		return -ENOMEM;
	rc = sfr__samples_take(&t->staging.samples, sources, extent->nr_lane_entries,
			       t->seq + t->report.created_ns); /* a seed: other lines each time */
	sfr_sys.free(sources);
	if (rc < 0 || !t->staging.check_crcs)
		return rc;
	for (uint32_t i = extent->first_entry; i < extent->first_entry + extent->nr_lane_entries;
	     i++)
		t->staging.check_crcs[i] =
			sfr_crc32(0, t->plan.img.entries[i].src, t->plan.img.entries[i].nbytes);
	return 0;
}

int64_t sfr__find_torn_source(const struct sfr_ticket *t, const struct sfr__samples *samples,
			      uint32_t entry, uint64_t off, const char *staged, size_t len)
{
	if (sfr__samples_agree(samples, entry, off, staged, len))
		return -1;
	return t->plan.img.entries[entry].source;
}

int64_t sfr__find_torn_by_crc(struct sfr_ticket *t, uint32_t entry, uint64_t off,
			      const char *staged, size_t len)
{
	const struct sfr__image_entry *checked = &t->plan.img.entries[entry];
	/* The array has a CRC at the call for each entry, and behind these the copies' CRCs. */
	uint32_t *copy_crc = &t->staging.check_crcs[t->plan.img.nr_entries + entry];

	*copy_crc = sfr_crc32(*copy_crc, staged, len);
	if (off + len != checked->nbytes || *copy_crc == t->staging.check_crcs[entry])
		return -1; /* not torn so far: more bytes follow, or the CRCs are equal */
	return checked->source;
}

/* ---- filling a block ---- */

void sfr__prefetch_entry(const struct sfr_ticket *t, uint32_t entry)
{
	if (entry < t->plan.img.nr_entries)
		sfr__host_prefetch_first_lines(t->plan.img.entries[entry].src,
					       t->plan.img.entries[entry].nbytes);
}

void sfr__stage_non_data(struct sfr_ticket *t, const struct sfr__seg *seg, char *dst)
{
	if (seg->kind == SFR__SEG_HEADER)
		sfr__image_put_header(&t->plan.img, seg->entry, seg->off, seg->len, dst);
	else
		/* The pool's memory may still have bytes of another file. */
		memset(dst, 0, seg->len);
}

/* Returns whether [from, to) of the file contains the entry's data and descriptor. A thread that
 * copies this whole range is then the only user of the entry. */
static bool range_contains_entry(const struct sfr__image_entry *entry, uint64_t from, uint64_t to)
{
	return entry->data_off >= from && entry->data_off + entry->nbytes + entry->desc_len <= to;
}

/* Copies a segment's bytes. `is_sole_user`: no other thread uses the entry, so no lock is needed.
 * `with_crc`: also computes their CRC. Returns the index of the source if it is torn, else -1. */
static int64_t copy_segment_and_check_torn(struct sfr_ticket *t, const struct sfr__seg *seg,
					   char *dst, bool is_sole_user, bool with_crc)
{
	struct sfr__image_entry *entry = &t->plan.img.entries[seg->entry];
	const char *src = entry->src + seg->off;
	bool is_complete = true; /* entry->crc is the CRC of the whole entry */
	uint32_t crc;

	SFR__TRACE(SFR_TRACE_STORAGE, 0, seg->len);
	if (!with_crc) {
		sfr_sys.capture_copy(dst, src, seg->len);
		return sfr__find_torn_source(t, &t->staging.samples, seg->entry, seg->off, dst,
					     seg->len);
	}
	crc = sfr_sys.lane_copy(0, dst, src, seg->len); /* copies, and computes the CRC from 0 on */
	if (is_sole_user) {
		entry->crc = crc;
		entry->crc_len = seg->len;
	} else {
		is_complete = sfr__add_crc(t, seg, crc);
	}
	if (is_complete && t->staging.check_crcs && entry->crc != t->staging.check_crcs[seg->entry])
		return entry->source;
	return sfr__find_torn_source(t, &t->staging.samples, seg->entry, seg->off, dst, seg->len);
}

/* ---- callbacks for stage/host.c; struct sfr__host_copy_ops has their contracts ---- */

static struct sfr__extent_copy *extent_copy_of(struct sfr__host_copy *copy)
{
	return sfr__container(copy, struct sfr__extent_copy, copy);
}

static struct sfr__job *job_of(struct sfr__host_copy *copy, uint32_t blk)
{
	struct sfr__extent_copy *extent_copy = extent_copy_of(copy);

	return sfr__block_job(extent_copy->ticket, extent_copy->extent, blk);
}

static struct sfr__host_block_state *block_state(struct sfr__host_copy *copy, uint32_t blk)
{
	return &job_of(copy, blk)->staged;
}

static size_t block_len(struct sfr__host_copy *copy, uint32_t blk)
{
	struct sfr__extent_copy *extent_copy = extent_copy_of(copy);

	return sfr__image_block_len(&extent_copy->ticket->plan.img, extent_copy->extent, blk);
}

static bool may_lease_locked(struct sfr__host_copy *copy, uint32_t blk)
{
	struct sfr__extent_copy *extent_copy = extent_copy_of(copy);

	return sfr__stream_may_lease_locked(extent_copy->ticket, extent_copy->extent, blk);
}

static void assign_leased_block_locked(struct sfr__host_copy *copy, uint32_t blk,
				       struct sfr__block *leased)
{
	struct sfr_ticket *t = extent_copy_of(copy)->ticket;
	struct sfr__job *job = job_of(copy, blk);

	sfr__ticket_count_block_locked(t);
	job->block = leased;
	/* Decides in advance whether copy_chunk computes the CRCs, or a writer does it later.
	 * Copies in the call, or for which a thread waits, leave it to the writer. But check_crcs
	 * can only be compared while deferred bytes are copied. */
	job->crc_done = copy->is_deferred && (t->engine->nr_waiters == 0 || t->staging.check_crcs);
}

/* Copies the bytes [off, off + len) of a block. Returns the first torn source, or -1. */
static int64_t copy_chunk(struct sfr__host_copy *copy, uint32_t blk, size_t off, size_t len,
			  bool hurried)
{
	struct sfr__extent_copy *extent_copy = extent_copy_of(copy);
	const struct sfr__job *job = job_of(copy, blk);
	struct sfr_ticket *t = extent_copy->ticket;
	struct sfr__seg_iter it;
	struct sfr__seg seg;
	int64_t first_torn = -1, torn_source; /* indices of sources; -1: not torn */
	bool is_sole_user;
	uint64_t from;

	(void)hurried; /* assign_leased_block_locked has already decided whether to compute CRCs */
	sfr__seg_iter_init(&it, &t->plan.img, extent_copy->extent, blk);
	it.off += off; /* only the chunk, not the whole block */
	from = it.off;
	it.end = from + len;
	while (sfr__seg_next(&it, &seg)) {
		char *dst = job->staged.mem + seg.pos;

		if (seg.kind != SFR__SEG_DATA) {
			sfr__stage_non_data(t, &seg, dst);
			continue;
		}
		sfr__prefetch_entry(t, seg.entry + 2); /* the next entry was prefetched before */
		is_sole_user = range_contains_entry(&t->plan.img.entries[seg.entry], from, it.end);
		torn_source =
			copy_segment_and_check_torn(t, &seg, dst, is_sole_user, job->crc_done);
		if (first_torn < 0)
			first_torn = torn_source;
	}
	return first_torn;
}

static bool is_failing_locked(struct sfr__host_copy *copy)
{
	return sfr__ticket_is_failing_locked(extent_copy_of(copy)->ticket);
}

static void fail_locked(struct sfr__host_copy *copy, int code, int64_t source)
{
	struct sfr_err err = { .index = -1 };

	sfr__err_set_if_unset(&err, code, SFR_PHASE_STAGE, code == SFR_ETORN ? "samples" : NULL);
	err.index = source;
	sfr__ticket_fail_locked(extent_copy_of(copy)->ticket, &err);
}

static void filled_locked(struct sfr__host_copy *copy, uint32_t blk)
{
	const struct sfr__job *job = job_of(copy, blk);
	struct sfr__extent_copy *extent_copy = extent_copy_of(copy);

	sfr__push_block_locked(extent_copy->ticket, extent_copy->extent, blk, job->block,
			       job->crc_done);
}

/* Called when no thread reads the deferred sources in host memory any more. */
static void finish_host_copy(struct sfr__host_copy *copy)
{
	struct sfr_ticket *t = extent_copy_of(copy)->ticket;
	struct sfr_engine *engine = t->engine;

	sfr__lock(&engine->mu);
	t->work.host_copying = false;
	sfr__ticket_set_copied_if_done_locked(t);
	sfr__ticket_advance_state_locked(t);
	sfr__unlock(&engine->mu);
}

static const struct sfr__host_copy_ops ops = {
	.block = block_state,
	.block_len = block_len,
	.may_lease_locked = may_lease_locked,
	.leased_locked = assign_leased_block_locked,
	.copy = copy_chunk,
	.is_failing_locked = is_failing_locked,
	.fail_locked = fail_locked,
	.filled_locked = filled_locked,
	.over = finish_host_copy,
};

static void extent_copy_init(struct sfr__extent_copy *extent_copy, struct sfr_ticket *t,
			     const struct sfr__extent *extent)
{
	extent_copy->ticket = t;
	extent_copy->extent = extent;
	extent_copy->copy =
		(struct sfr__host_copy){ .engine = t->engine,
					 .ops = &ops,
					 .nr_blocks = extent ? extent->nr_lane_blocks : 0,
					 .seq = t->seq, /* saves get blocks in this order */
					 .number = t->number };
}

void sfr__host_copies_init(struct sfr_ticket *t)
{
	/* Extent 0 has the captured sources. In a file of parts nothing is staged. */
	const struct sfr__extent *captured = t->plan.in_place ? NULL : &t->plan.img.extents[0];

	extent_copy_init(&t->staging.captured, t, captured);
	extent_copy_init(&t->staging.deferred, t,
			 sfr__image_find_extent(&t->plan.img, SFR_LANE_HOST, 0));
}
