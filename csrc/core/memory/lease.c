/* Leases: contiguous pool memory for snapshots.
 *
 * A save needs one block at a time and returns it soon. A snapshot needs all its memory at once and
 * keeps it as long as its users like. Each of its *items*, such as the copy of one source, must be
 * contiguous, even if it is longer than a block. A lease consists of whole blocks of the pool that
 * saves use. So it counts against the same cap, and its blocks may already have memory and be
 * registered with the driver.
 *
 * place.c decides where the items go. A *run* is a row of adjacent blocks.
 *
 * Order. A request for a lease waits until no request for a single block is waiting. A save returns
 * each block when it is written, and a request owns nothing while it waits, so a wait for saves
 * ends. A snapshot's memory returns when its users release it, and the waiting thread may be such a
 * user. So the blocks of a lease are `held`: only a user can return them. When the last user has
 * let go, sfr__pool_hold removes this mark; from then on they return without a user. A request that
 * would have to wait for held blocks fails at once with SFR_EEXHAUSTED.
 *
 * Saves are protected too: while any save still needs blocks, a lease leaves them one block, which
 * is enough for progress. This is checked under the pool's lock at every attempt, so a save that
 * begins while a request waits counts. A save that the waiting thread itself has interrupted, in a
 * signal handler, does not count, because that save goes on only after the request. A save whose
 * blocks are all written does not count either. It waits for its entry in the log, and an earlier
 * entry may be external work that waits for this lease.
 *
 * Devices. A run must be contiguous, so its blocks are pinned at their own addresses or not at all.
 * If a block uses memory that the driver allocated (pin.c), that memory is freed first. */
#include <errno.h>
#include <sys/mman.h>

#include "memory/pool_int.h"

/* Returns how many bytes of memory the block number `i` of a run needs. */
static uint64_t need_of(const struct sfr__pool *pool, const struct sfr__lease *lease,
			const struct sfr__run_of_blocks *run, uint32_t i)
{
	uint64_t left = run->len - i * pool->block_bytes;

	return left < pool->block_bytes && !lease->whole ? left : pool->block_bytes;
}

/* Visits every block of a lease. In the body, `run` is the block's run, and run->first + i is the
 * block's index in the pool. */
#define FOR_EACH_BLOCK(pool, lease, run, i)                                                        \
	for (const struct sfr__run_of_blocks *run = (lease)->runs;                                 \
	     run != (lease)->runs + (lease)->nr_runs; run++)                                       \
		for (uint32_t i = 0; (uint64_t)i * (pool)->block_bytes < run->len; i++)

/* Makes waiting threads check again whether there is room, or anything left to wait for. */
static void wake_waiters_locked(struct sfr__pool *pool)
{
	if (pool->waiters != NULL)
		(void)pthread_cond_broadcast(&pool->cv); /* cannot fail on our own object */
}

/* Takes the blocks of the placed items for the lease. A block becomes LEASED. It becomes GROWING if
 * it lacks memory, or if its memory is the driver's. */
static void take_placed_locked(struct sfr__pool *pool, const struct sfr__placement *placement,
			       struct sfr__lease *lease)
{
	uint32_t end = 0; /* the index after the lease's last block */

	lease->nr_runs = lease->nr_blocks = 0;
	for (uint32_t g = 0; g < placement->nr_gaps; g++) {
		const struct sfr__gap *gap = &placement->gaps[g];

		if (gap->at != gap->begin) /* items were put into this gap */
			lease->runs[lease->nr_runs++] = (struct sfr__run_of_blocks){
				(uint32_t)(gap->begin / pool->block_bytes), gap->at - gap->begin
			};
	}
	FOR_EACH_BLOCK(pool, lease, run, i)
	{
		if (run->first + i + 1 > end)
			end = run->first + i + 1;
	}
	while (pool->nr_known < end)
		sfr__pool_push(&pool->reserved, sfr__pool_fresh_locked(pool));
	FOR_EACH_BLOCK(pool, lease, run, i)
	{
		struct sfr__block *block = &pool->blocks[run->first + i];

		sfr__pool_move_locked(pool, block,
				      block->committed >= need_of(pool, lease, run, i) &&
						      !sfr__pin_is_foreign(block) ?
					      SFR__BLOCK_LEASED :
					      SFR__BLOCK_GROWING);
		sfr__pool_uncount_locked(pool, block); /* a held block never counts as full */
		block->held = true;
		lease->nr_blocks++;
	}
	pool->nr_held += lease->nr_blocks;
	/* the taken blocks are still in these lists */
	sfr__pool_filter(&pool->reserved);
	sfr__pool_filter(&pool->partial);
	sfr__pool_filter(&pool->whole);
	wake_waiters_locked(pool);
}

/* Sets whether the blocks are held. Only a user can return a held block, so no thread waits for
 * it. */
static void set_held_locked(struct sfr__pool *pool, const struct sfr__lease *lease, bool held)
{
	FOR_EACH_BLOCK(pool, lease, run, i)
	{
		struct sfr__block *block = &pool->blocks[run->first + i];

		if (held && !block->held)
			pool->nr_held++;
		if (!held && block->held)
			pool->nr_held--;
		sfr__pool_uncount_locked(pool, block);
		block->held = held;
		sfr__pool_count_locked(pool, block);
	}
	wake_waiters_locked(pool);
}

/* Makes the lease's blocks free, or RETIRED if lease->retired is set. */
static void return_blocks_locked(struct sfr__pool *pool, const struct sfr__lease *lease)
{
	set_held_locked(pool, lease, false);
	FOR_EACH_BLOCK(pool, lease, run, i)
	{
		struct sfr__block *block = &pool->blocks[run->first + i];

		if (lease->retired) {
			sfr__pool_move_locked(pool, block, SFR__BLOCK_RETIRED);
			continue;
		}
		pool->nr_returned++;
		sfr__pool_move_locked(pool, block,
				      block->committed != 0 ? SFR__BLOCK_FREE :
							      SFR__BLOCK_RESERVED);
	}
}

/* Replaces the driver's memory of a block by as much memory in the pool's own range. Returns 0;
 * -EIO if the block keeps the driver's memory; or another -errno if it has no memory afterwards.
 * Releases the mutex meanwhile. */
static int return_to_range_locked(struct sfr__pool *pool, struct sfr__block *block)
{
	int rc;

	sfr__unlock(&pool->mu);
	block->next = NULL; /* a list of one */
	sfr__pin_drop(&pool->pin, block);
	if (sfr__pin_is_foreign(block)) {
		sfr__lock(&pool->mu);
		return -EIO; /* the driver does not release its memory */
	}
	rc = sfr__pool_commit(pool, block, 0, block->committed);
	sfr__lock(&pool->mu);
	if (rc != 0)
		sfr__pool_recount_locked(pool, block, 0);
	return rc;
}

/* For sfr__pool_grow_all: makes a block LEASED once it has its memory. A block that got none stays
 * GROWING until the whole lease fails. */
static void grown_locked(struct sfr__pool *pool, struct sfr__block *block, int rc)
{
	if (rc == 0)
		sfr__pool_move_locked(pool, block, SFR__BLOCK_LEASED);
}

/* Makes the missing memory of a lease; releases the mutex meanwhile. Returns 0 when all blocks are
 * LEASED, or -errno. On failure all blocks are free again and keep the memory that they got. */
static int grow_lease_locked(struct sfr__pool *pool, const struct sfr__lease *lease)
{
	struct sfr__list work = { NULL };
	int rc = 0;

	FOR_EACH_BLOCK(pool, lease, run, i)
	{
		struct sfr__block *block = &pool->blocks[run->first + i];

		if (block->state != SFR__BLOCK_GROWING || rc != 0)
			continue;
		if (sfr__pin_is_foreign(block))
			rc = return_to_range_locked(pool, block);
		block->want = sfr__pool_memory_for(pool, need_of(pool, lease, run, i));
		if (block->committed < need_of(pool, lease, run, i))
			sfr__pool_push(&work, block);
		else if (rc == 0)
			sfr__pool_move_locked(pool, block, SFR__BLOCK_LEASED);
	}
	if (rc == 0 && work.head != NULL) {
		sfr__unlock(&pool->mu);
		rc = sfr__pool_grow_all(pool, work, grown_locked);
		sfr__lock(&pool->mu);
	}
	if (rc == 0)
		return 0;
	/* nr_returned stays as it is, because a thread that tried again would find no memory
	 * either. */
	set_held_locked(pool, lease, false);
	FOR_EACH_BLOCK(pool, lease, run, i)
	{
		struct sfr__block *block = &pool->blocks[run->first + i];

		sfr__pool_move_locked(pool, block,
				      block->committed != 0 ? SFR__BLOCK_FREE :
							      SFR__BLOCK_RESERVED);
	}
	return rc;
}

/* Waits until this request is first in the queue and there is room, then takes the room. `starved`
 * is NULL at the first attempt. After an attempt for which the system had no memory, it points to
 * the value that nr_returned had then. The next attempt is made only when a block has returned
 * since, or when only users could still return one. Returns 0, SFR_EAGAIN or SFR_EEXHAUSTED. */
static int wait_for_room_locked(struct sfr__pool *pool, struct sfr__placement *placement,
				uint32_t nr_own, uint64_t deadline_ns, const uint64_t *starved,
				struct sfr__lease *lease)
{
	struct sfr__waiter me = { .seq = UINT64_MAX };
	bool late = deadline_ns == 0; /* there is no time left to wait */
	int rc;

	sfr__pool_enqueue_locked(pool, &me);
	for (;;) {
		bool worth_trying = starved == NULL || *starved != pool->nr_returned ||
				    pool->nr_owned == pool->nr_held;
		bool spare = pool->nr_saves > nr_own;

		if (pool->waiters == &me && worth_trying &&
		    sfr__pool_place_locked(pool, placement, false, spare)) {
			take_placed_locked(pool, placement, lease);
			rc = 0;
			break;
		}
		/* Would the items fit if all blocks outside held leases had returned? */
		rc = sfr__pool_place_locked(pool, placement, true, false) ? SFR_EAGAIN :
									    SFR_EEXHAUSTED;
		if (rc == SFR_EEXHAUSTED || late)
			break;
		late = sfr__cond_wait(&pool->cv, &pool->mu, deadline_ns) != 0;
	}
	sfr__pool_dequeue_locked(pool, &me);
	return rc;
}

int sfr__pool_lease(struct sfr__pool *pool, const uint64_t *lens, uint32_t nr, bool whole,
		    uint32_t nr_own, uint64_t slice_ns, char **addrs, struct sfr__lease *out)
{
	uint64_t deadline_ns = slice_ns == 0 ? 0 : sfr__deadline(slice_ns), returned;
	struct sfr__placement placement = { .lens = lens, .nr = nr, .addrs = addrs };
	/* the largest number of gaps: every second block is in use */
	const uint32_t most_gaps = pool->nr_blocks / 2 + 1;
	const uint64_t *starved = NULL;
	struct sfr__lease lease = { .whole = whole };
	int rc;

	*out = (struct sfr__lease){ 0 };
	for (uint32_t i = 0; i < nr; i++) {
		/* so that the sum does not overflow */
		if (lens[i] > UINT64_MAX / 4 || placement.total > UINT64_MAX / 4)
			return SFR_EEXHAUSTED;
		placement.total += sfr__round_up(lens[i], SFR_ALIGN);
	}
	placement.gaps = sfr_sys.malloc(most_gaps * sizeof(*placement.gaps));
	lease.runs = sfr_sys.malloc(most_gaps * sizeof(*lease.runs));
	rc = placement.gaps != NULL && lease.runs != NULL ? 0 : -ENOMEM;
	if (rc != 0)
		goto fail;
	sfr__lock(&pool->mu);
	for (;;) {
		rc = wait_for_room_locked(pool, &placement, nr_own, deadline_ns, starved, &lease);
		if (rc != 0)
			break;
		returned = pool->nr_returned;
		rc = grow_lease_locked(pool, &lease);
		if (rc == 0)
			break;
		/* Give up if only users could still return a block and none has returned
		 * meanwhile. */
		if (pool->nr_owned == pool->nr_held && pool->nr_returned == returned)
			break;
		starved = &returned;
	}
	sfr__unlock(&pool->mu);
	if (rc != 0)
		goto fail;
	sfr_sys.free(placement.gaps);
	*out = lease;
	return 0;
fail:
	sfr_sys.free(placement.gaps);
	sfr_sys.free(lease.runs);
	return rc;
}

void sfr__pool_hold(struct sfr__pool *pool, const struct sfr__lease *lease, bool held)
{
	sfr__lock(&pool->mu);
	set_held_locked(pool, lease, held);
	sfr__unlock(&pool->mu);
}

void sfr__pool_unlease(struct sfr__pool *pool, struct sfr__lease *lease)
{
	if (lease->runs == NULL)
		return;
	FOR_EACH_BLOCK(pool, lease, run, i)
	{
		if (lease->retired)
			sfr__pin_keep(&pool->pin, &pool->blocks[run->first + i]);
	}
	sfr__lock(&pool->mu);
	return_blocks_locked(pool, lease);
	sfr__unlock(&pool->mu);
	sfr_sys.free(lease->runs);
	*lease = (struct sfr__lease){ 0 };
}

bool sfr__pool_pin_lease(struct sfr__pool *pool, const struct sfr__lease *lease)
{
	struct sfr__block **blocks = sfr_sys.malloc(lease->nr_blocks * sizeof(struct sfr__block *));
	uint32_t nr = 0;
	bool all = true;

	/* The caller owns the blocks and their regions, so no lock is needed. */
	FOR_EACH_BLOCK(pool, lease, run, i)
	{
		struct sfr__block *block = &pool->blocks[run->first + i];

		if (block->region != NULL)
			continue;
		if (blocks == NULL) /* no memory for a list: pin blocks one by one */
			sfr__pin_in_place(&pool->pin, &block, 1, pool->block_bytes);
		else
			blocks[nr++] = block;
	}
	for (uint32_t i = 0, len; i < nr; i += len) {
		len = 1;
		while (i + len < nr && blocks[i + len]->index == blocks[i]->index + len)
			len++;
		sfr__pin_in_place(&pool->pin, blocks + i, len, pool->block_bytes);
	}
	sfr_sys.free(blocks);
	FOR_EACH_BLOCK(pool, lease, run, i)
	{
		if (pool->blocks[run->first + i].region == NULL)
			all = false;
	}
	return all;
}

int sfr__pool_file(const struct sfr__pool *pool, const char *mem, uint64_t *off)
{
	*off = (uint64_t)(mem - pool->range.base);
	return pool->range.file;
}

bool sfr__pool_has(const struct sfr__pool *pool, const char *mem)
{
	return mem >= pool->range.base &&
	       (uint64_t)(mem - pool->range.base) < pool->nr_blocks * pool->block_bytes;
}

size_t sfr__pool_span(const struct sfr__pool *pool, const char *mem, size_t len, bool *pinned)
{
	uint64_t off = (uint64_t)(mem - pool->range.base);
	uint32_t i = (uint32_t)(off / pool->block_bytes);
	const struct sfr__block *first = &pool->blocks[i];
	uint64_t end = (i + 1) * pool->block_bytes;

	*pinned = sfr__pin_is_pinned(first);
	/* A pinned span ends with its region. Unpinned blocks are one span, because no region
	 * limits a copy to them. */
	while (end < off + len &&
	       (*pinned ? pool->blocks[end / pool->block_bytes].region == first->region :
			  !sfr__pin_is_pinned(&pool->blocks[end / pool->block_bytes])))
		end += pool->block_bytes;
	return end - off < len ? (size_t)(end - off) : len;
}

int sfr__pool_share(struct sfr__pool *pool, const struct sfr__lease *lease, bool shared)
{
	for (uint32_t r = 0; r < lease->nr_runs; r++) {
		const struct sfr__run_of_blocks *run = &lease->runs[r];
		char *mem = pool->range.base + run->first * pool->block_bytes;
		int rc = sfr__memory_inherit(mem, sfr__round_up(run->len, SFR_PAGE), shared);

		if (rc != 0)
			return rc;
	}
	return 0;
}
