/* The lane: copies the deferred bytes of saves into blocks, on a thread of its own.
 *
 * A block is filled front to back: local headers are generated, tensor bytes copied, padding
 * zeroed; only data descriptors stay open until a writer knows their CRC. Saves are served in
 * the order of launch and their blocks in ascending order, and nothing is held while waiting
 * for a block, so a pool of one block is enough.
 *
 * The CRC is made in the same pass as the copy: a second pass over the bytes costs the training
 * half as much again (crc.c).
 *
 * The lane is also where one of the two detectors sits. At the call, sfr__take_samples keeps
 * some cache lines of every deferred storage; when the lane has copied a piece it compares
 * the *staged* bytes with them. A difference means that somebody wrote between the call and
 * the copy: what is staged is no state the training was ever in, and the save fails.
 */
#include <errno.h>
#include <string.h>

#include "sfr/crc.h"
#include "save/save.h"
#include "trace/trace.h"

enum {
	COPY_PIECE = 4 << 20, /* between looks at the clock of a test, and at a cancel */
};

/* ---- samples ---- */

struct sfr__sampled *sfr__run_sources(const struct sfr_ticket *t, const struct sfr__run *run)
{
	struct sfr__sampled *sources = sfr_sys.malloc(run->nr_entries * sizeof(*sources));

	for (uint32_t i = 0; sources && i < run->nr_entries; i++) {
		const struct sfr__entry *entry = &t->img.entries[run->first_entry + i];

		sources[i] = (struct sfr__sampled){ .entry = run->first_entry + i,
						    .addr = (uint64_t)(uintptr_t)entry->src,
						    .nbytes = entry->nbytes };
	}
	return sources;
}

int sfr__take_samples(struct sfr_ticket *t)
{
	const struct sfr__run *run = sfr__image_run(&t->img, SFR_LANE_HOST, 0);
	struct sfr__sampled *sources;
	int rc;

	SFR__TRACE(SFR_TRACE_SAMPLES, t->number, 0);
	if (run == NULL)
		return 0;
	sources = sfr__run_sources(t, run);
	if (!sources)
		return -ENOMEM;
	rc = sfr__samples_take(&t->samples, sources, run->nr_entries, t->seq + t->created_ns);
	sfr_sys.free(sources);
	if (rc < 0)
		return rc;
	for (uint32_t i = run->first_entry; t->sums && i < run->first_entry + run->nr_entries; i++)
		t->sums[i] = sfr_crc32(0, t->img.entries[i].src, t->img.entries[i].nbytes);
	return 0;
}

int64_t sfr__check_piece(const struct sfr_ticket *t, const struct sfr__samples *samples, uint32_t i,
			 uint64_t off, const char *staged, size_t len)
{
	return sfr__samples_agree(samples, i, off, staged, len) ? -1 : t->img.entries[i].source;
}

int64_t sfr__check_sum(struct sfr_ticket *t, uint32_t i, uint64_t off, const char *staged,
		       size_t len)
{
	const struct sfr__entry *entry = &t->img.entries[i];
	uint32_t *sum = &t->sums[t->img.nr_entries + i];

	*sum = sfr_crc32(*sum, staged, len);
	return off + len == entry->nbytes && *sum != t->sums[i] ? entry->source : -1;
}

/* ---- filling a block ---- */

/* A small storage begins with a cache miss; asked for ahead of time these overlap. */
void sfr__prefetch_entry(const struct sfr_ticket *t, uint32_t i)
{
	enum { LINE = 64, MOST = 8 };

	if (i >= t->img.nr_entries)
		return;
	for (uint64_t off = 0; off < t->img.entries[i].nbytes && off < MOST * LINE; off += LINE)
		__builtin_prefetch(t->img.entries[i].src + off);
}

static void capture_piece(struct sfr_ticket *t, const struct sfr__seg *seg, char *dst)
{
	const char *src = t->img.entries[seg->entry].src + seg->off;

	sfr__prefetch_entry(t, seg->entry + 2);

	for (size_t done = 0, len; done < seg->len; done += len) {
		len = seg->len - done < COPY_PIECE ? seg->len - done : COPY_PIECE;
		SFR__TRACE(SFR_TRACE_PIECE, 0, len);
		sfr_sys.capture_copy(dst + done, src + done, len);
	}
}

void sfr__stage_rest(struct sfr_ticket *t, const struct sfr__seg *seg, char *dst)
{
	if (seg->kind == SFR__SEG_HEADER)
		sfr__image_put_header(&t->img, seg->entry, seg->off, seg->len, dst);
	else
		/* Descriptors are put in by the writer; old bytes of the pool, which may be another
		 * file's, must not reach the disk in them nor in padding. */
		memset(dst, 0, seg->len);
}

void sfr__stage_block(struct sfr_ticket *t, const struct sfr__run *run, uint32_t blk, char *dst)
{
	struct sfr__seg_iter it;
	struct sfr__seg seg;

	SFR__TRACE(SFR_TRACE_COPY, t->number, sfr__image_block_len(&t->img, run, blk));
	sfr__seg_iter_init(&it, &t->img, run, blk);
	while (sfr__seg_next(&it, &seg))
		if (seg.kind == SFR__SEG_DATA)
			capture_piece(t, &seg, dst + seg.pos);
		else
			sfr__stage_rest(t, &seg, dst + seg.pos);
	sfr__copy_fence();
}
