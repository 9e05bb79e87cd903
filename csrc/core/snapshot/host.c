/* Copies a snapshot's sources in host memory, through stage/host.c.
 *
 * All memory is leased before the first byte is copied, so all captured sources form one block, and
 * all deferred ones another. A chunk may end inside a source, and may contain many small ones. */
#include <errno.h>

#include "snapshot/snapshot.h"

static struct sfr__snapshot_run *run_of(struct sfr__host_copy *copy)
{
	return sfr__container(copy, struct sfr__snapshot_run, copy);
}

static struct sfr__host_block *block(struct sfr__host_copy *copy, uint32_t blk)
{
	(void)blk; /* there is only one */
	return &run_of(copy)->block;
}

static size_t block_len(struct sfr__host_copy *copy, uint32_t blk)
{
	const struct sfr__snapshot_run *run = run_of(copy);

	(void)blk;
	return (size_t)run->starts[run->snapshot->nr_sources];
}

/* Copies bytes of one source. Returns its index if it was torn, else -1. */
static int64_t copy_range(struct sfr_snapshot *s, uint32_t i, uint64_t off, size_t len,
			  bool hurried)
{
	const char *src = sfr__bytes_of(&s->sources[i]) + off;
	char *dst = s->copies[i] + off;

	/* The CRC is not used. While no thread waits, lane_copy's CRC costs nothing, and its stores
	 * bypass the caches for small sources too. */
	if (hurried)
		sfr_sys.capture_copy(dst, src, len);
	else
		(void)sfr_sys.lane_copy(0, dst, src, len);
	return sfr__samples_agree(&s->samples, i, off, dst, len) ? -1 : (int64_t)i;
}

static int64_t copy_chunk(struct sfr__host_copy *copy, uint32_t blk, size_t off, size_t len,
			  bool hurried)
{
	const struct sfr__snapshot_run *run = run_of(copy);
	struct sfr_snapshot *s = run->snapshot;
	uint64_t at = off;
	int64_t torn = -1;
	/* The first source that ends after the beginning of the chunk. */
	uint32_t i = (uint32_t)sfr__lower_bound(k, 0, s->nr_sources, run->starts[k + 1] <= at);

	(void)blk;
	for (; at < off + len; i++) {
		uint64_t end = run->starts[i + 1] < off + len ? run->starts[i + 1] : off + len;
		int64_t found;

		if (end == at)
			continue; /* not in this run */
		if (i + 1 < s->nr_sources && run->starts[i + 2] > run->starts[i + 1])
			sfr__host_prefetch(sfr__bytes_of(&s->sources[i + 1]),
					   s->sources[i + 1].nbytes);
		found = copy_range(s, i, at - run->starts[i], (size_t)(end - at), hurried);
		if (torn < 0)
			torn = found;
		at = end;
	}
	return torn;
}

static bool is_failing_locked(struct sfr__host_copy *copy)
{
	return run_of(copy)->snapshot->abandoned;
}

static void fail_locked(struct sfr__host_copy *copy, int code, int64_t source)
{
	struct sfr_snapshot *s = run_of(copy)->snapshot;

	(void)code; /* always SFR_ETORN: no memory is leased */
	if (s->torn < 0 || source < s->torn)
		s->torn = source;
}

static void filled_locked(struct sfr__host_copy *copy, uint32_t blk)
{
	(void)copy; /* all waiters wait for the whole copy */
	(void)blk;
}

static void over(struct sfr__host_copy *copy)
{
	sfr__snapshot_copy_ended(run_of(copy)->snapshot, -1, NULL);
}

static const struct sfr__host_ops ops = {
	.block = block,
	.block_len = block_len,
	.copy = copy_chunk,
	.is_failing_locked = is_failing_locked,
	.fail_locked = fail_locked,
	.filled_locked = filled_locked,
	.over = over,
};

/* Makes a run of the captured or the deferred sources. 0 or -ENOMEM. */
static int run_new(struct sfr_snapshot *s, struct sfr__snapshot_run *run, bool captured)
{
	uint64_t all = 0;

	run->starts = sfr_sys.malloc(((size_t)s->nr_sources + 1) * sizeof(*run->starts));
	if (!run->starts)
		return -ENOMEM;
	for (uint32_t i = 0; i < s->nr_sources; i++) {
		const struct sfr_source *source = &s->sources[i];

		run->starts[i] = all;
		/* A source without an address is memory that the caller fills. */
		if (source->device == 0 && source->addr != 0 &&
		    (source->lane == SFR_CAPTURED) == captured)
			all += source->nbytes;
	}
	run->starts[s->nr_sources] = all;
	run->snapshot = s;
	run->copy = (struct sfr__host_copy){
		.engine = s->engine, .ops = &ops, .nr_blocks = all != 0, .number = s->notice.number
	};
	return 0;
}

int sfr__snapshot_runs_new(struct sfr_snapshot *s)
{
	int rc = run_new(s, &s->captured, true);

	return rc < 0 ? rc : run_new(s, &s->deferred, false);
}

void sfr__snapshot_runs_free(struct sfr_snapshot *s)
{
	sfr_sys.free(s->captured.starts);
	sfr_sys.free(s->deferred.starts);
}

/* Sets where the run's copies go: the snapshot's leased memory. */
static void set_destination(struct sfr__snapshot_run *run)
{
	run->block = (struct sfr__host_block){ .mem = run->snapshot->base,
					       .left = block_len(&run->copy, 0) };
}

void sfr__snapshot_copy_now(struct sfr_snapshot *s, bool all)
{
	set_destination(&s->captured);
	(void)sfr__host_copy_now(&s->captured.copy, SFR_FOREVER); /* waits for nothing */
	if (!all)
		return;
	set_destination(&s->deferred);
	(void)sfr__host_copy_now(&s->deferred.copy, SFR_FOREVER); /* waits for nothing */
}

void sfr__snapshot_defer_locked(struct sfr_snapshot *s)
{
	set_destination(&s->deferred);
	sfr__host_begin_locked(&s->deferred.copy, true);
}
