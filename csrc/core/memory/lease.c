/* Leases: contiguous pool memory for snapshots.
 *
 * A snapshot needs all its memory at once and keeps it as long as its users like. Each of its
 * *items*, such as the copy of one source, must be contiguous, even if it is longer than a block.
 * place.c decides where the items go. A *run* is a row of adjacent blocks. A lease takes whole
 * blocks of the pool that saves use, so it counts against the same cap.
 *
 * Waiting. A request waits until no thread waits for a single block. It owns nothing meanwhile, so
 * saves can finish and return their blocks. A snapshot's blocks return only when its users release
 * them, and the waiting thread may be such a user. So these blocks are marked `user_held`: no
 * thread waits for them. A request that fits only with held blocks fails at once with
 * SFR_EEXHAUSTED. When the last user has released them, sfr__pool_set_user_held removes the mark.
 *
 * Saves. While a save needs blocks, a lease leaves one block free, which is enough for progress.
 * Every attempt checks this, because a save may begin while a request waits. Two kinds of saves do
 * not count:
 * - A save that the waiting thread has interrupted, in a signal handler. It goes on only after the
 *   request.
 * - A save whose blocks are all written. It waits for its entry in the log, and an earlier entry
 *   may be external work that waits for this lease.
 *
 * Devices. A run must be contiguous, so its blocks are pinned at their own addresses or not at all.
 * If a block uses memory that the driver allocated, that memory is freed first. */
#include <errno.h>
#include <sys/mman.h>

#include "memory/pool_int.h"

/* Returns how many bytes of memory block number `i` of a run must have for this lease. */
static uint64_t bytes_needed_of_block(const struct sfr__pool *pool, const struct sfr__lease *lease,
				      const struct sfr__run_of_blocks *run, uint32_t i)
{
	uint64_t left = run->len - i * pool->block_bytes;

	if (lease->whole || left > pool->block_bytes)
		return pool->block_bytes;
	return left;
}

/* Visits every block of a lease. In the body, run->first + i is the block's index in the pool. */
#define FOR_EACH_BLOCK(pool, lease, run, i)                                                        \
	for (const struct sfr__run_of_blocks *run = (lease)->runs;                                 \
	     run != (lease)->runs + (lease)->nr_runs; run++)                                       \
		for (uint32_t i = 0; (uint64_t)i * (pool)->block_bytes < run->len; i++)

static void wake_waiters_locked(struct sfr__pool *pool)
{
	if (pool->waiters != NULL)
		(void)pthread_cond_broadcast(&pool->cv); /* cannot fail on our own object */
}

/* Takes for the lease the blocks in which place.c has placed items: of each gap, the bytes [begin,
 * used_end). A block becomes GROWING if it needs other or more memory, and LEASED otherwise. */
static void take_placed_locked(struct sfr__pool *pool, const struct sfr__placement *placement,
			       struct sfr__lease *lease)
{
	uint32_t end = 0; /* the index after the lease's last block in the pool */

	lease->nr_runs = lease->nr_blocks = 0;
	for (uint32_t g = 0; g < placement->nr_gaps; g++) {
		const struct sfr__gap *gap = &placement->gaps[g];

		if (gap->used_end != gap->begin) /* items were placed in this gap */
			lease->runs[lease->nr_runs++] = (struct sfr__run_of_blocks){
				.first = (uint32_t)(gap->begin / pool->block_bytes),
				.len = gap->used_end - gap->begin,
			};
	}
	FOR_EACH_BLOCK(pool, lease, run, i)
	{
		if (run->first + i + 1 > end)
			end = run->first + i + 1;
	}
	while (pool->nr_ever_used < end)
		sfr__pool_push(&pool->reserved, sfr__pool_take_never_used_locked(pool));
	FOR_EACH_BLOCK(pool, lease, run, i)
	{
		struct sfr__block *block = &pool->blocks[run->first + i];
		bool ready = block->committed >= bytes_needed_of_block(pool, lease, run, i) &&
			     !sfr__pin_is_driver_memory(block);

		sfr__pool_move_locked(pool, block, ready ? SFR__BLOCK_LEASED : SFR__BLOCK_GROWING);
		/* not counted again: saves cannot use a block that a user holds */
		sfr__pool_uncount_if_whole_locked(pool, block);
		block->user_held = true;
		lease->nr_blocks++;
	}
	pool->nr_user_held += lease->nr_blocks;
	/* the taken blocks are owned now, but still in these lists */
	sfr__list_remove_owned(&pool->reserved);
	sfr__list_remove_owned(&pool->partial);
	sfr__list_remove_owned(&pool->whole);
	wake_waiters_locked(pool);
}

/* Sets whether only a user can give the lease's blocks back. */
static void set_user_held_locked(struct sfr__pool *pool, const struct sfr__lease *lease, bool held)
{
	FOR_EACH_BLOCK(pool, lease, run, i)
	{
		struct sfr__block *block = &pool->blocks[run->first + i];

		if (held && !block->user_held)
			pool->nr_user_held++;
		if (!held && block->user_held)
			pool->nr_user_held--;
		sfr__pool_uncount_if_whole_locked(pool, block);
		block->user_held = held;
		sfr__pool_count_if_whole_locked(pool, block);
	}
	wake_waiters_locked(pool);
}

static void return_blocks_locked(struct sfr__pool *pool, const struct sfr__lease *lease)
{
	set_user_held_locked(pool, lease, false);
	FOR_EACH_BLOCK(pool, lease, run, i)
	{
		struct sfr__block *block = &pool->blocks[run->first + i];

		if (lease->retired) {
			sfr__pool_move_locked(pool, block, SFR__BLOCK_RETIRED);
			continue;
		}
		pool->nr_returned++;
		sfr__pool_disown_locked(pool, block);
	}
}

/* Replaces the driver's memory of a block by the pool's own. Releases the mutex meanwhile. Returns
 * 0, or:
 *     -EIO          the block keeps the driver's memory
 *     other -errno  the block has no memory now */
static int replace_driver_memory_locked(struct sfr__pool *pool, struct sfr__block *block)
{
	int rc;

	sfr__unlock(&pool->mu);
	block->next = NULL; /* sfr__pin_release_regions takes a list: this one has one block */
	sfr__pin_release_regions(&pool->pin, block);
	if (sfr__pin_is_driver_memory(block)) {
		sfr__lock(&pool->mu);
		return -EIO; /* the driver refused to release its memory */
	}
	rc = sfr__pool_commit_memory(pool, block, 0, block->committed);
	sfr__lock(&pool->mu);
	if (rc != 0)
		sfr__pool_set_committed_locked(pool, block, 0);
	return rc;
}

/* Called by sfr__pool_grow_all for each block. A block that got no memory stays GROWING until
 * grow_lease_locked returns an error. */
static void grown_locked(struct sfr__pool *pool, struct sfr__block *block, int rc)
{
	if (rc == 0)
		sfr__pool_move_locked(pool, block, SFR__BLOCK_LEASED);
}

/* Makes the missing memory of a lease, and releases the mutex meanwhile. Returns 0 or -errno. After
 * an error all blocks are free again and keep the memory that they got. */
static int grow_lease_locked(struct sfr__pool *pool, const struct sfr__lease *lease)
{
	struct sfr__block_list work = { NULL };
	int rc = 0;

	FOR_EACH_BLOCK(pool, lease, run, i)
	{
		struct sfr__block *block = &pool->blocks[run->first + i];

		if (block->state != SFR__BLOCK_GROWING || rc != 0)
			continue; /* the block has its memory, or an earlier one got none */
		if (sfr__pin_is_driver_memory(block))
			rc = replace_driver_memory_locked(pool, block);
		block->target_bytes =
			sfr__pool_block_bytes_to_commit(pool,
							bytes_needed_of_block(pool, lease, run, i));
		if (block->committed < bytes_needed_of_block(pool, lease, run, i))
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
	/* nr_returned is not increased: these blocks have no memory for a thread that lacks it. */
	set_user_held_locked(pool, lease, false);
	FOR_EACH_BLOCK(pool, lease, run, i)
	{
		sfr__pool_disown_locked(pool, &pool->blocks[run->first + i]);
	}
	return rc;
}

/* Waits until this request is first in the queue and there is room, and takes the room. Returns 0,
 * SFR_EAGAIN or SFR_EEXHAUSTED. `returned_at_failure`: see sfr__pool_may_retry_locked. */
static int wait_for_room_locked(struct sfr__pool *pool, struct sfr__placement *placement,
				uint32_t nr_blocked_saves, uint64_t deadline_ns,
				const uint64_t *returned_at_failure, struct sfr__lease *lease)
{
	struct sfr__pool_waiter me = { .seq = UINT64_MAX }; /* after the requests of all saves */
	bool timed_out = deadline_ns == 0;                  /* there is no time left to wait */
	int rc;

	sfr__pool_enqueue_locked(pool, &me);
	for (;;) {
		bool keep_one_free = pool->nr_saves > nr_blocked_saves;

		if (pool->waiters == &me && sfr__pool_may_retry_locked(pool, returned_at_failure) &&
		    sfr__pool_place_locked(pool, placement, false, keep_one_free)) {
			take_placed_locked(pool, placement, lease);
			rc = 0;
			break;
		}
		/* Waiting cannot help if the items do not fit into all blocks outside held leases
		 * (after_wait is true), even without a block kept free (keep_one_free is false). */
		if (!sfr__pool_place_locked(pool, placement, true, false)) {
			rc = SFR_EEXHAUSTED;
			break;
		}
		rc = SFR_EAGAIN;
		if (timed_out)
			break;
		timed_out = sfr__cond_wait(&pool->cv, &pool->mu, deadline_ns) != 0;
	}
	sfr__pool_dequeue_locked(pool, &me);
	return rc;
}

int sfr__pool_lease(struct sfr__pool *pool, const uint64_t *lens, uint32_t nr, bool whole,
		    uint32_t nr_blocked_saves, uint64_t slice_ns, char **addrs,
		    struct sfr__lease *out)
{
	uint64_t deadline_ns = slice_ns == 0 ? 0 : sfr__deadline(slice_ns), nr_returned_before;
	struct sfr__placement placement = { .lens = lens, .nr = nr, .addrs = addrs };
	const uint32_t nr_gaps_max = pool->nr_blocks / 2 + 1; /* if every second block is in use */
	const uint64_t *returned_at_failure = NULL;
	struct sfr__lease lease = { .whole = whole };
	int rc;

	*out = (struct sfr__lease){ 0 };
	for (uint32_t i = 0; i < nr; i++) {
		/* no pool is that large; without this limit the sum could overflow */
		if (lens[i] > UINT64_MAX / 4 || placement.total > UINT64_MAX / 4)
			return SFR_EEXHAUSTED;
		placement.total += sfr__round_up(lens[i], SFR_ALIGN);
	}
	placement.gaps = sfr_sys.malloc(nr_gaps_max * sizeof(*placement.gaps));
	lease.runs = sfr_sys.malloc(nr_gaps_max * sizeof(*lease.runs));
	rc = -ENOMEM;
	if (placement.gaps == NULL || lease.runs == NULL)
		goto fail;
	sfr__lock(&pool->mu);
	for (;;) {
		rc = wait_for_room_locked(pool, &placement, nr_blocked_saves, deadline_ns,
					  returned_at_failure, &lease);
		if (rc != 0)
			break;
		nr_returned_before = pool->nr_returned;
		rc = grow_lease_locked(pool, &lease);
		if (rc == 0)
			break;
		/* Give up if only users can return a block, and none has returned meanwhile. */
		if (pool->nr_owned == pool->nr_user_held && pool->nr_returned == nr_returned_before)
			break;
		returned_at_failure = &nr_returned_before;
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

void sfr__pool_set_user_held(struct sfr__pool *pool, const struct sfr__lease *lease, bool held)
{
	sfr__lock(&pool->mu);
	set_user_held_locked(pool, lease, held);
	sfr__unlock(&pool->mu);
}

void sfr__pool_unlease(struct sfr__pool *pool, struct sfr__lease *lease)
{
	if (lease->runs == NULL)
		return;
	FOR_EACH_BLOCK(pool, lease, run, i)
	{
		if (lease->retired)
			sfr__pin_never_release(&pool->pin, &pool->blocks[run->first + i]);
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
	bool all_pinned = true;

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
		len = sfr__pool_count_adjacent(blocks + i, nr - i);
		sfr__pin_in_place(&pool->pin, blocks + i, len, pool->block_bytes);
	}
	sfr_sys.free(blocks);
	FOR_EACH_BLOCK(pool, lease, run, i)
	{
		if (pool->blocks[run->first + i].region == NULL)
			all_pinned = false;
	}
	return all_pinned;
}

int sfr__pool_get_file_and_offset(const struct sfr__pool *pool, const char *mem, uint64_t *off)
{
	*off = (uint64_t)(mem - pool->range.base);
	return pool->range.file;
}

bool sfr__pool_has(const struct sfr__pool *pool, const char *mem)
{
	return mem >= pool->range.base &&
	       (uint64_t)(mem - pool->range.base) < pool->nr_blocks * pool->block_bytes;
}

size_t sfr__pool_len_for_one_copy(const struct sfr__pool *pool, const char *mem, size_t len,
				  bool *pinned)
{
	uint64_t off = (uint64_t)(mem - pool->range.base);
	uint32_t i = (uint32_t)(off / pool->block_bytes);
	const struct sfr__block *first = &pool->blocks[i];
	uint64_t span_end = (i + 1) * pool->block_bytes; /* grows block by block */

	*pinned = sfr__pin_is_pinned(first);
	while (span_end < off + len) {
		const struct sfr__block *next = &pool->blocks[span_end / pool->block_bytes];

		if (*pinned && next->region != first->region)
			break; /* one copy must not touch two regions */
		if (!*pinned && sfr__pin_is_pinned(next))
			break; /* the span is not pinned, but the next block is */
		span_end += pool->block_bytes;
	}
	return span_end - off < len ? (size_t)(span_end - off) : len;
}

int sfr__pool_set_inheritable(struct sfr__pool *pool, const struct sfr__lease *lease, bool shared)
{
	for (uint32_t r = 0; r < lease->nr_runs; r++) {
		const struct sfr__run_of_blocks *run = &lease->runs[r];
		char *mem = pool->range.base + run->first * pool->block_bytes;
		int rc =
			sfr__memory_set_inheritable(mem, sfr__round_up(run->len, SFR_PAGE), shared);

		if (rc != 0)
			return rc;
	}
	return 0;
}
