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

#include "snapshot.h"
#include "ticket.h"

enum {
	MAX_SAMPLES = SFR__MAX_SAMPLES,
	SAMPLE_LEN = SFR__SAMPLE_LEN,
	PREFETCH_AHEAD = 24,
	COPY_PIECE = 4 << 20, /* between looks at the clock of a test, and at a cancel */
};

/* ---- samples ---- */

/* The i-th of n sampled lines of an entry with nr_lines lines: the first, the last, and one at
 * a place of its own in each stratum between them, so that no stride goes unseen for ever. */
uint64_t sfr__sample_line(uint64_t i, uint64_t n, uint64_t nr_lines, uint64_t *random)
{
	uint64_t from, to;

	if (n >= nr_lines)
		return i;
	if (n == 1)
		return nr_lines / 2;
	if (i == 0)
		return 0;
	if (i == n - 1)
		return nr_lines - 1;
	if (n % 2 == 1 && i == n / 2)
		return nr_lines / 2;
	from = nr_lines * i / n;
	to = nr_lines * (i + 1) / n;
	*random = *random * 6364136223846793005u + 1442695040888963407u;
	return from + (*random >> 33) % (to > from ? to - from : 1);
}

static void place_samples(struct sfr_ticket *t, uint32_t first, uint64_t per_entry)
{
	uint64_t random = t->seq + t->created_ns;
	uint32_t k = 0;

	for (uint32_t i = first; i < t->img.nr_entries; i++) {
		const struct sfr__entry *entry = &t->img.entries[i];
		uint64_t nr_lines = (entry->nbytes + SAMPLE_LEN - 1) / SAMPLE_LEN;
		uint64_t n = nr_lines < per_entry ? nr_lines : per_entry, last = 0;

		for (uint64_t j = 0; j < n; j++) {
			uint64_t line = sfr__sample_line(j, n, nr_lines, &random);

			if (j > 0 && line <= last)
				line = last + 1; /* strictly ascending */
			if (line >= nr_lines)
				break;
			last = line;
			t->samples[k].entry = i;
			t->samples[k].off = line * SAMPLE_LEN;
			t->samples[k].len =
				(uint32_t)(entry->nbytes - line * SAMPLE_LEN < SAMPLE_LEN ?
						   entry->nbytes - line * SAMPLE_LEN :
						   SAMPLE_LEN);
			k++;
		}
	}
	t->nr_samples = k;
}

static const char *sample_src(const struct sfr_ticket *t, uint32_t k)
{
	return t->img.entries[t->samples[k].entry].src + t->samples[k].off;
}

int sfr__take_samples(struct sfr_ticket *t)
{
	uint32_t first, nr_entries;
	uint64_t per_entry;

	if (t->img.nr_runs < 2)
		return 0;
	first = t->img.runs[1].first_entry;
	nr_entries = t->img.nr_entries - first;
	per_entry = MAX_SAMPLES / nr_entries;
	if (per_entry == 0)
		per_entry = 1;
	t->samples = sfr_sys.malloc(nr_entries * per_entry * sizeof(*t->samples));
	if (!t->samples)
		return -ENOMEM;
	place_samples(t, first, per_entry);
	/* Each line is a cache miss; asked for ahead of time they overlap. */
	for (uint32_t k = 0; k < t->nr_samples; k++) {
		if (k + PREFETCH_AHEAD < t->nr_samples)
			__builtin_prefetch(sample_src(t, k + PREFETCH_AHEAD));
		memcpy(t->samples[k].bytes, sample_src(t, k), t->samples[k].len);
	}
	if (!(t->flags & SFR_SAVE_CHECK_BYTES))
		return 0;
	t->sums = sfr_sys.calloc(t->img.nr_entries, sizeof(*t->sums));
	if (!t->sums)
		return -ENOMEM;
	for (uint32_t i = first; i < t->img.nr_entries; i++)
		t->sums[i] = sfr_crc32(0, t->img.entries[i].src, t->img.entries[i].nbytes);
	return 0;
}

/* Compares what now stands in the block with samples and sums. Entries and offsets come in
 * ascending order, so the position in the samples only moves on. */
static int64_t check_piece(struct sfr_ticket *t, uint32_t i, uint64_t off, const char *staged,
			   size_t len)
{
	const struct sfr__entry *entry = &t->img.entries[i];

	for (; t->sample_pos < t->nr_samples; t->sample_pos++) {
		const struct sfr__sample *s = &t->samples[t->sample_pos];
		uint64_t from = s->off > off ? s->off : off;
		uint64_t to = s->off + s->len < off + len ? s->off + s->len : off + len;

		if (s->entry > i || (s->entry == i && s->off >= off + len))
			break;
		if (from < to &&
		    memcmp(staged + (from - off), s->bytes + (from - s->off), to - from))
			return entry->source;
		if (s->entry == i && s->off + s->len > off + len)
			break; /* goes on in the next piece */
	}
	if (t->sums && entry->crc_len == entry->nbytes && entry->crc != t->sums[i])
		return entry->source;
	return -1;
}

/* ---- filling a block ---- */

static void capture_piece(struct sfr_ticket *t, const struct sfr__seg *seg, char *dst)
{
	const char *src = t->img.entries[seg->entry].src + seg->off;

	for (size_t done = 0, len; done < seg->len; done += len) {
		len = seg->len - done < COPY_PIECE ? seg->len - done : COPY_PIECE;
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
		entry->crc = sfr_sys.lane_copy(entry->crc, dst + done, src + done, len);
		entry->crc_len += len;
	}
	if (*torn < 0)
		*torn = check_piece(t, seg->entry, seg->off, dst, seg->len);
}

void sfr__stage_block(struct sfr_ticket *t, const struct sfr__run *run, uint32_t blk, char *dst,
		      enum sfr__stager by, int64_t *torn)
{
	struct sfr__seg_iter it;
	struct sfr__seg seg;

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
}

/* ---- the thread ---- */

void sfr__lane_push_locked(struct sfr_engine *engine, struct sfr_ticket *t)
{
	t->lane_next = NULL;
	if (engine->lane_tail)
		engine->lane_tail->lane_next = t;
	else
		engine->lane_head = t;
	engine->lane_tail = t;
	pthread_cond_signal(&engine->cv_lane);
}

static bool give_up(struct sfr_ticket *t)
{
	bool failing;

	pthread_mutex_lock(&t->engine->mu);
	failing = sfr__ticket_failing(t);
	pthread_mutex_unlock(&t->engine->mu);
	return failing;
}

static void copy_ticket(struct sfr_ticket *t)
{
	const uint64_t slice_ns = 50 * 1000 * 1000; /* a cancel is seen at the latest then */

	for (uint32_t r = 1; r < t->img.nr_runs; r++) {
		const struct sfr__run *run = &t->img.runs[r];

		for (uint32_t blk = 0; blk < run->nr_blocks;) {
			if (give_up(t))
				return;
			if (sfr__stage_next(t, run, blk, SFR__BY_LANE, slice_ns) == 0)
				blk++;
		}
	}
}

void *sfr__lane_main(void *arg)
{
	struct sfr_engine *engine = arg;

	pthread_mutex_lock(&engine->mu);
	for (;;) {
		struct sfr_ticket *t = engine->lane_head;

		/* A snapshot has its memory already: it never waits, and what waits for it, waits
		 * for the saves too. */
		if (engine->snapshot_head) {
			sfr__snapshot_copy_locked(engine);
			continue;
		}
		if (!t && engine->stopping)
			break;
		if (!t) {
			(void)sfr__cond_wait(&engine->cv_lane, &engine->mu, SFR_FOREVER);
			continue;
		}
		engine->lane_head = t->lane_next;
		if (!engine->lane_head)
			engine->lane_tail = NULL;
		pthread_mutex_unlock(&engine->mu);
		copy_ticket(t);
		pthread_mutex_lock(&engine->mu);
		t->lane_owns = false;
		if (!sfr__ticket_failing(t)) {
			t->copied = true;
			t->copied_ns = sfr__now_ns();
		}
		/* Waiters for "copied" look at a failed save too: its sources are free now. */
		pthread_cond_broadcast(&engine->cv_state);
		sfr_ticket_get(t);
		sfr__notice_post(&t->notice_copied);
		sfr__ticket_step_locked(t);
	}
	pthread_mutex_unlock(&engine->mu);
	return NULL;
}
