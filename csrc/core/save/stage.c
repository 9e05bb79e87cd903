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

#include "save/save.h"
#include "trace/trace.h"

enum {
	PREFETCH_AHEAD = 24,
	COPY_PIECE = 4 << 20, /* between looks at the clock of a test, and at a cancel */
};

/* ---- samples ---- */

uint64_t sfr__samples_per_entry(const struct sfr_ticket *t)
{
	uint32_t nr = 0;

	for (uint32_t r = 1; r < t->img.nr_runs; r++)
		if (t->img.runs[r].lane != SFR_CAPTURED)
			nr += t->img.runs[r].nr_entries;
	return sfr__samples_each(nr);
}

void sfr__place_samples(const struct sfr_ticket *t, const struct sfr__run *run,
			struct sfr__samples *samples)
{
	uint64_t random = t->seq + t->created_ns, per_entry = sfr__samples_per_entry(t);
	uint32_t k = 0;

	for (uint32_t i = run->first_entry; i < run->first_entry + run->nr_entries; i++)
		k += sfr__samples_place(samples->items + k, i, t->img.entries[i].nbytes, per_entry,
					&random);
	samples->nr = k;
}

static const char *sample_src(const struct sfr_ticket *t, uint32_t k)
{
	return t->img.entries[t->samples.items[k].entry].src + t->samples.items[k].off;
}

int sfr__take_samples(struct sfr_ticket *t)
{
	const struct sfr__run *run = sfr__image_run(&t->img, SFR_LANE_HOST, 0);
	struct sfr__samples *samples = &t->samples;

	SFR__TRACE(SFR_TRACE_SAMPLES, t->number, 0);
	if (run == NULL)
		return 0;
	samples->items = sfr_sys.malloc(run->nr_entries * sfr__samples_per_entry(t) *
					sizeof(*samples->items));
	if (!samples->items)
		return -ENOMEM;
	sfr__place_samples(t, run, samples);
	/* Each line is a cache miss; asked for ahead of time they overlap. */
	for (uint32_t k = 0; k < samples->nr; k++) {
		if (k + PREFETCH_AHEAD < samples->nr)
			__builtin_prefetch(sample_src(t, k + PREFETCH_AHEAD));
		memcpy(samples->items[k].bytes, sample_src(t, k), samples->items[k].len);
	}
	for (uint32_t i = run->first_entry; t->sums && i < run->first_entry + run->nr_entries; i++)
		t->sums[i] = sfr_crc32(0, t->img.entries[i].src, t->img.entries[i].nbytes);
	return 0;
}

/* Entries and offsets come in ascending order, so the position in the samples only moves on. */
int64_t sfr__check_piece(struct sfr_ticket *t, struct sfr__samples *samples, uint32_t i,
			 uint64_t off, const char *staged, size_t len)
{
	const struct sfr__entry *entry = &t->img.entries[i];
	uint32_t *sum = t->sums ? &t->sums[t->img.nr_entries + i] : NULL;

	for (; samples->pos < samples->nr; samples->pos++) {
		const struct sfr__sample *s = &samples->items[samples->pos];
		uint64_t from = s->off > off ? s->off : off;
		uint64_t to = s->off + s->len < off + len ? s->off + s->len : off + len;

		if (s->entry > i || (s->entry == i && s->off >= off + len))
			break;
		if (s->entry == i && from < to &&
		    memcmp(staged + (from - off), s->bytes + (from - s->off), to - from))
			return entry->source;
		if (s->entry == i && s->off + s->len > off + len)
			break; /* goes on in the next piece */
	}
	if (!sum)
		return -1;
	*sum = sfr_crc32(*sum, staged, len);
	return off + len == entry->nbytes && *sum != t->sums[i] ? entry->source : -1;
}

/* ---- filling a block ---- */

/* A small storage begins with a cache miss; asked for ahead of time these overlap. */
static void prefetch_entry(const struct sfr_ticket *t, uint32_t i)
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

	prefetch_entry(t, seg->entry + 2);

	for (size_t done = 0, len; done < seg->len; done += len) {
		len = seg->len - done < COPY_PIECE ? seg->len - done : COPY_PIECE;
		SFR__TRACE(SFR_TRACE_PIECE, 0, len);
		sfr_sys.capture_copy(dst + done, src + done, len);
	}
}

/* A run's pieces come in the order of its entries, all by this thread, and no writer looks at an
 * entry before its last block is pushed: no lock is needed for the CRC. */
static void lane_piece(struct sfr_ticket *t, const struct sfr__seg *seg, char *dst, int64_t *torn)
{
	struct sfr__entry *entry = &t->img.entries[seg->entry];
	const char *src = entry->src + seg->off;

	for (size_t done = 0, len; done < seg->len; done += len) {
		len = seg->len - done < COPY_PIECE ? seg->len - done : COPY_PIECE;
		SFR__TRACE(SFR_TRACE_PIECE, 0, len);
		entry->crc = sfr_sys.lane_copy(entry->crc, dst + done, src + done, len);
		entry->crc_len += len;
	}
	if (*torn < 0)
		*torn = sfr__check_piece(t, &t->samples, seg->entry, seg->off, dst, seg->len);
}

void sfr__stage_block(struct sfr_ticket *t, const struct sfr__run *run, uint32_t blk, char *dst,
		      enum sfr__stager by, int64_t *torn)
{
	struct sfr__seg_iter it;
	struct sfr__seg seg;

	SFR__TRACE(SFR_TRACE_COPY, t->number, sfr__image_block_len(&t->img, run, blk));
	sfr__seg_iter_init(&it, &t->img, run, blk);
	while (sfr__seg_next(&it, &seg)) {
		switch (seg.kind) {
		case SFR__SEG_HEADER:
			sfr__image_put_header(&t->img, seg.entry, seg.off, seg.len, dst + seg.pos);
			break;
		case SFR__SEG_DATA:
			if (by == SFR__BY_LANE)
				lane_piece(t, &seg, dst + seg.pos, torn);
			else
				capture_piece(t, &seg, dst + seg.pos);
			break;
		case SFR__SEG_DESC:
		case SFR__SEG_PAD:
			/* Descriptors are put in by the writer; old bytes of the pool, which may
			 * be another file's, must not reach the disk in either. */
			memset(dst + seg.pos, 0, seg.len);
			break;
		}
	}
	sfr__copy_fence();
}

/* ---- on the lane ---- */

static void copy_ticket(struct sfr_ticket *t)
{
	const uint64_t slice_ns = 50 * 1000 * 1000; /* a cancel is seen at the latest then */

	for (uint32_t r = 1; r < t->img.nr_runs; r++) {
		const struct sfr__run *run = &t->img.runs[r];

		if (run->device != 0 || run->lane == SFR_CAPTURED)
			continue; /* another lane's */
		for (uint32_t blk = 0; blk < run->nr_blocks;) {
			if (sfr__ticket_failing(t))
				return;
			if (sfr__stage_next(t, run, blk, SFR__BY_LANE, slice_ns) == 0)
				blk++;
		}
	}
}

static void run(struct sfr__task *task)
{
	struct sfr_ticket *t = sfr__container(task, struct sfr_ticket, copying);
	struct sfr_engine *engine = t->engine;

	copy_ticket(t);
	sfr__lock(&engine->mu);
	t->lane_owns = false;
	sfr__ticket_released_locked(t);
	sfr__ticket_step_locked(t);
	sfr__unlock(&engine->mu);
}

void sfr__stage_push_locked(struct sfr_ticket *t)
{
	t->lane_owns = true;
	t->copying.run = run;
	sfr__task_push_locked(t->engine, SFR__LANE, &t->copying);
}
