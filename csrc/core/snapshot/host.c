/* Copies a snapshot's sources in host memory, through stage/host.c.
 *
 * The captured sources are one set, the deferred sources another. For stage/host.c a set is a
 * single block, in which the sources follow each other. A chunk of this block may contain many
 * small sources, and may begin and end inside a source. */
#include <errno.h>

#include "snapshot/snapshot.h"

static struct sfr__host_source_set *host_source_set_of(struct sfr__host_copy *copy)
{
	return sfr__container(copy, struct sfr__host_source_set, copy);
}

/* ---- callbacks for stage/host.c; struct sfr__host_copy_ops has their contracts ---- */

static struct sfr__host_block_state *block_state(struct sfr__host_copy *copy, uint32_t blk)
{
	(void)blk; /* always 0 */
	return &host_source_set_of(copy)->block;
}

static size_t block_len(struct sfr__host_copy *copy, uint32_t blk)
{
	const struct sfr__host_source_set *set = host_source_set_of(copy);

	(void)blk;
	return (size_t)set->starts[set->snapshot->nr_sources];
}

/* Copies the bytes [off, off + len) of source i. Returns i if the source was torn, else -1. */
static int64_t copy_source_and_check_torn(struct sfr_snapshot *s, uint32_t i, uint64_t off,
					  size_t len, bool hurried)
{
	const char *src = sfr__bytes_of(&s->sources[i]) + off;
	char *dst = s->copies[i] + off;

	/* While no thread waits, lane_copy is better: its stores bypass the caches. It also
	 * computes a CRC, which is not needed here but takes no extra time. */
	if (hurried)
		sfr_sys.capture_copy(dst, src, len);
	else
		(void)sfr_sys.lane_copy(0, dst, src, len);
	return sfr__samples_agree(&s->samples, i, off, dst, len) ? -1 : (int64_t)i;
}

static int64_t copy_chunk(struct sfr__host_copy *copy, uint32_t blk, size_t off, size_t len,
			  bool hurried)
{
	const struct sfr__host_source_set *set = host_source_set_of(copy);
	struct sfr_snapshot *s = set->snapshot;
	const uint64_t chunk_end = off + len;
	uint64_t at = off;
	int64_t first_torn = -1; /* index of a source; -1: none is torn */
	/* Binary search, in which the macro declares k: the first source that ends after `off`. */
	uint32_t i = (uint32_t)sfr__lower_bound(k, 0, s->nr_sources, set->starts[k + 1] <= at);

	(void)blk;
	/* Each round copies the bytes [at, end) of the block, which are in source i. */
	for (; at < chunk_end; i++) {
		const uint64_t source_end = set->starts[i + 1];
		uint64_t end = source_end < chunk_end ? source_end : chunk_end;
		int64_t torn_source;

		if (end == at)
			continue; /* the source is not in this set, or is empty */
		/* Prefetch the next source if it has bytes in this set. */
		if (i + 1 < s->nr_sources && set->starts[i + 2] > source_end)
			sfr__host_prefetch_first_lines(sfr__bytes_of(&s->sources[i + 1]),
						       s->sources[i + 1].nbytes);
		torn_source = copy_source_and_check_torn(s, i, at - set->starts[i],
							 (size_t)(end - at), hurried);
		if (first_torn < 0)
			first_torn = torn_source;
		at = end;
	}
	return first_torn;
}

static bool is_failing_locked(struct sfr__host_copy *copy)
{
	return host_source_set_of(copy)->snapshot->abandoned;
}

static void fail_locked(struct sfr__host_copy *copy, int code, int64_t source)
{
	struct sfr_snapshot *s = host_source_set_of(copy)->snapshot;

	(void)code; /* always SFR_ETORN */
	if (s->torn_source < 0 || source < s->torn_source)
		s->torn_source = source;
}

static void filled_locked(struct sfr__host_copy *copy, uint32_t blk)
{
	(void)copy;
	(void)blk; /* finish_host_copy is enough */
}

static void finish_host_copy(struct sfr__host_copy *copy)
{
	/* -1 and NULL: fail_locked has recorded any torn source, and there is no other error */
	sfr__snapshot_note_copy_end(host_source_set_of(copy)->snapshot, -1, NULL);
}

static const struct sfr__host_copy_ops ops = {
	.block = block_state,
	.block_len = block_len,
	.copy = copy_chunk,
	.is_failing_locked = is_failing_locked,
	.fail_locked = fail_locked,
	.filled_locked = filled_locked,
	.over = finish_host_copy,
};

/* ---- functions for the snapshot ---- */

/* Makes a set of the captured sources in host memory, or of the deferred ones. Returns 0 or
 * -ENOMEM. */
static int host_source_set_new(struct sfr_snapshot *s, struct sfr__host_source_set *set,
			       bool captured)
{
	uint64_t total = 0; /* bytes of the set so far */

	set->starts = sfr_sys.malloc(((size_t)s->nr_sources + 1) * sizeof(*set->starts));
	if (!set->starts)
		return -ENOMEM;
	for (uint32_t i = 0; i < s->nr_sources; i++) {
		const struct sfr_source *source = &s->sources[i];

		set->starts[i] = total;
		/* The caller itself fills the copy of a source without an address. */
		if (source->device == 0 && source->addr != 0 &&
		    (source->lane == SFR_CAPTURED) == captured)
			total += source->nbytes;
	}
	set->starts[s->nr_sources] = total;
	set->snapshot = s;
	set->copy = (struct sfr__host_copy){
		.engine = s->engine,
		.ops = &ops,
		.nr_blocks = total != 0 ? 1 : 0,
		.number = s->notice.number,
	};
	return 0;
}

int sfr__host_source_sets_new(struct sfr_snapshot *s)
{
	int rc = host_source_set_new(s, &s->captured, true);

	return rc < 0 ? rc : host_source_set_new(s, &s->deferred, false);
}

void sfr__host_source_sets_free(struct sfr_snapshot *s)
{
	sfr_sys.free(s->captured.starts);
	sfr_sys.free(s->deferred.starts);
}

/* Prepares the set's block for copying: its memory is the leased memory, and none of its bytes are
 * copied yet. */
static void reset_block_for_copying(struct sfr__host_source_set *set)
{
	set->block = (struct sfr__host_block_state){ .mem = set->snapshot->base,
						     .left = block_len(&set->copy, 0) };
}

void sfr__snapshot_copy_host_sources(struct sfr_snapshot *s, bool all)
{
	reset_block_for_copying(&s->captured);
	/* Neither call waits for memory or returns an error: all memory is leased. */
	(void)sfr__host_copy_now(&s->captured.copy, SFR_FOREVER);
	if (!all)
		return;
	reset_block_for_copying(&s->deferred);
	(void)sfr__host_copy_now(&s->deferred.copy, SFR_FOREVER);
}

void sfr__snapshot_defer_host_copy_locked(struct sfr_snapshot *s)
{
	reset_block_for_copying(&s->deferred);
	sfr__host_begin_deferred_locked(&s->deferred.copy,
					true); /* true: no block need be leased */
}
