/* A persistent pool of equal blocks.
 *
 * One range of address space is reserved for the whole cap and divided into blocks. So a block's
 * address never changes, and a driver can register large regions. A block keeps its memory between
 * saves, so the cost of first touches is paid once.
 *
 * The states of a block. "take" is take_block_locked, "put" is sfr__pool_put:
 *
 *                  take         memory made
 *     RESERVED ------------> GROWING ------> LEASED
 *        ^ ^                 |  |  ^         |    ^
 *        | +---- failed -----+  |  |         |    |
 *        |                      |  | take    |    |
 *        |      warmed, failed  |  | (more)  |    |
 *        |                      v  |         |    |
 *        |                      FREE <- put -+    |
 *        |                      |  |              |
 *        | memory taken         |  +---- take ----+
 *        |        trim          |
 *     SHRINKING <---------------+
 *               --- refused -->
 *
 *     from       to         by
 *     RESERVED   GROWING    take_block_locked (get), warm_up, supply
 *     FREE       GROWING    take_block_locked, warm_up, when the block has too little memory
 *     FREE       LEASED     take_block_locked, when it has enough
 *     GROWING    LEASED     get, when the memory is there
 *     GROWING    FREE       warm_up, supply, when the memory is there; get, when the system has no
 *                           memory and the block keeps what it had
 *     GROWING    RESERVED   get, warm_up, supply, when the system has no memory and the block had
 *                           none
 *     LEASED     FREE       put
 *     FREE       SHRINKING  trim
 *     SHRINKING  RESERVED   trim
 *     SHRINKING  FREE       trim, when the system refuses, or when the block's region also has
 *                           blocks in use
 *     FREE       GROWING    warm_up, which owns the block while it pins it, and back
 *     LEASED     RETIRED    retire: a copy into the block may never end
 *
 * Leases of contiguous blocks (lease.c) use the same arrows as get and put. warm_up and trim are in
 * grow.c; supply.c makes memory for the next save.
 *
 * pool->mu guards the lists, states and counters. No system call is made under it. While a block
 * gains or loses memory (GROWING, SHRINKING), it is in no list and belongs to one thread.
 *
 * Order: threads wait in a queue sorted by `seq`, and only its head may take a block. Otherwise the
 * saves could divide a small pool's blocks among them so that none has enough to go on.
 *
 * The table of blocks is outside the pool's range, because a forked child does not inherit the
 * range. */
#include <errno.h>

#include "memory/range.h"
#include "memory/pin.h"
#include "memory/pool_int.h"

/* ---- lists and states, with the lock -------------------------------------- */

/* Returns the first block that has `need` bytes of memory, or NULL. */
static struct sfr__block *pop_with_memory(struct sfr__block_list *list, size_t need)
{
	for (struct sfr__block **at = &list->head; *at != NULL; at = &(*at)->next) {
		struct sfr__block *block = *at;

		if (block->committed >= need) {
			*at = block->next;
			return block;
		}
	}
	return NULL;
}

/* Returns a block without memory, or NULL. */
static struct sfr__block *pop_reserved_locked(struct sfr__pool *pool)
{
	struct sfr__block *block = sfr__pool_list_pop(&pool->reserved);

	return block != NULL ? block : sfr__pool_take_never_used_locked(pool);
}

/* Takes a block for `need` bytes, or returns NULL. The block becomes LEASED, or GROWING if it needs
 * more memory. Prefers, in this order:
 * - a partial block that has enough memory;
 * - while the pool lacks whole blocks and `need` is less than a block: a block without memory, so
 *   that whole blocks stay for saves that fill them;
 * - a whole block, a block without memory, a partial block with too little memory. */
static struct sfr__block *take_block_locked(struct sfr__pool *pool, size_t need)
{
	struct sfr__block *block = pop_with_memory(&pool->partial, need);

	if (block == NULL && !sfr__pool_fills_block(pool, need) &&
	    sfr__pool_needs_whole_blocks_locked(pool))
		block = pop_reserved_locked(pool);
	if (block == NULL)
		block = sfr__pool_list_pop(&pool->whole);
	if (block == NULL)
		block = pop_reserved_locked(pool);
	if (block == NULL)
		block = sfr__pool_list_pop(&pool->partial);
	if (block != NULL) {
		/* a block without memory is not ready, even if nothing is needed */
		bool ready = block->committed >= need && block->committed != 0;

		sfr__pool_move_locked(pool, block, ready ? SFR__BLOCK_LEASED : SFR__BLOCK_GROWING);
	}
	return block;
}

/* ---- the queue ------------------------------------------------------------ */

void sfr__pool_enqueue_locked(struct sfr__pool *pool, struct sfr__pool_waiter *me)
{
	struct sfr__pool_waiter **at = &pool->waiters;

	while (*at != NULL && (*at)->seq <= me->seq)
		at = &(*at)->next;
	me->next = *at;
	*at = me;
}

void sfr__pool_dequeue_locked(struct sfr__pool *pool, struct sfr__pool_waiter *me)
{
	struct sfr__pool_waiter **at = &pool->waiters;

	while (*at != me)
		at = &(*at)->next;
	*at = me->next;
	if (pool->waiters != NULL)
		(void)pthread_cond_broadcast(&pool->cv); /* the new head checks again */
}

/* Waits to be first in the queue and takes a block. Returns 0, SFR_EAGAIN, SFR_EEXHAUSTED or
 * -ENOMEM, as sfr__pool_get does. `returned_at_failure`: see sfr__pool_may_retry_locked. */
static int wait_for_block_locked(struct sfr__pool *pool, uint64_t seq, size_t need,
				 uint64_t deadline_ns, const uint64_t *returned_at_failure,
				 struct sfr__block **out)
{
	struct sfr__pool_waiter me = { .seq = seq };
	bool timed_out = deadline_ns == 0; /* there is no time left to wait */
	bool all_retired, none_returns;

	sfr__pool_enqueue_locked(pool, &me);
	for (;;) {
		*out = NULL;
		if (pool->waiters == &me && sfr__pool_may_retry_locked(pool, returned_at_failure))
			*out = take_block_locked(pool, need);
		all_retired = pool->nr_retired == pool->nr_blocks;
		/* users hold all blocks that are not retired: waiting is no use */
		none_returns = pool->nr_user_held + pool->nr_retired == pool->nr_blocks;
		if (*out != NULL || all_retired || none_returns || timed_out)
			break;
		timed_out = sfr__cond_wait(&pool->cv, &pool->mu, deadline_ns) != 0;
	}
	sfr__pool_dequeue_locked(pool, &me);
	if (all_retired)
		return -ENOMEM;
	if (*out != NULL)
		return 0;
	return none_returns ? SFR_EEXHAUSTED : SFR_EAGAIN;
}

int sfr__pool_get(struct sfr__pool *pool, uint64_t seq, size_t need, uint64_t slice_ns,
		  struct sfr__block **out)
{
	uint64_t deadline_ns = slice_ns == 0 ? 0 : sfr__deadline(slice_ns);
	uint64_t nr_returned_before; /* pool->nr_returned before the last commit */
	/* &nr_returned_before if the last commit failed */
	const uint64_t *returned_at_failure = NULL;
	struct sfr__block *block;
	int rc;

	*out = NULL;
	if (need > pool->block_bytes)
		return -EINVAL;
	sfr__lock(&pool->mu);
	/* Take a block and make its missing memory without the lock. If the system has no memory,
	 * put the block back, and try again when another block has returned. */
	for (;;) {
		size_t target_bytes = sfr__pool_block_bytes_to_commit(pool, need);

		rc = wait_for_block_locked(pool, seq, need, deadline_ns, returned_at_failure,
					   &block);
		if (rc != 0 || block->state == SFR__BLOCK_LEASED)
			break;
		nr_returned_before = pool->nr_returned;
		/* no whole block was free: writers are to make more of them */
		if (sfr__pool_fills_block(pool, need)) {
			sfr__pool_raise_whole_target_locked(pool);
			pool->nr_whole_growing++;
		}
		sfr__unlock(&pool->mu);
		rc = sfr__pool_commit_memory(pool, block, block->committed, target_bytes);
		sfr__lock(&pool->mu);
		if (sfr__pool_fills_block(pool, need))
			pool->nr_whole_growing--;
		if (rc == 0) {
			sfr__pool_set_committed_locked(pool, block, target_bytes);
			sfr__pool_move_locked(pool, block, SFR__BLOCK_LEASED);
			break;
		}
		sfr__pool_disown_locked(pool, block);
		/* Give up if only users can return a block, and none has returned meanwhile. */
		if (pool->nr_owned == pool->nr_user_held && pool->nr_returned == nr_returned_before)
			break;
		returned_at_failure = &nr_returned_before;
	}
	sfr__unlock(&pool->mu);
	if (rc == 0)
		*out = block;
	return rc;
}

void sfr__pool_put(struct sfr__pool *pool, struct sfr__block *block)
{
	sfr__lock(&pool->mu);
	pool->nr_returned++;
	sfr__pool_move_locked(pool, block, SFR__BLOCK_FREE);
	sfr__unlock(&pool->mu);
}

void sfr__pool_retire(struct sfr__pool *pool, struct sfr__block *block)
{
	sfr__pin_never_release(&pool->pin, block);
	sfr__lock(&pool->mu);
	sfr__pool_move_locked(pool, block, SFR__BLOCK_RETIRED);
	sfr__unlock(&pool->mu);
}

struct sfr__pin *sfr__pool_get_pin(struct sfr__pool *pool)
{
	return &pool->pin;
}

/* ---- the pool itself -------------------------------------------------------- */

int sfr__pool_new(uint64_t pool_bytes, uint64_t block_bytes, bool shared, struct sfr__pool **out)
{
	struct sfr__pool *pool;
	uint64_t nr_blocks;
	int rc;

	*out = NULL;
	if (block_bytes == 0 || block_bytes % SFR_PAGE != 0 || pool_bytes < block_bytes)
		return -EINVAL;
	nr_blocks = pool_bytes / block_bytes;
	if (nr_blocks > UINT32_MAX || pool_bytes > SIZE_MAX / 2) /* later sums must not overflow */
		return -EINVAL;
	pool = sfr_sys.calloc(1, sizeof(*pool));
	if (pool == NULL)
		return -ENOMEM;
	pool->block_bytes = block_bytes;
	pool->nr_blocks = (uint32_t)nr_blocks;
	sfr__mutex_init(&pool->mu, SFR__LOCK_POOL);
	sfr__pin_init(&pool->pin);
	rc = sfr__cond_init(&pool->cv);
	if (rc != 0) {
		sfr_sys.free(pool);
		return rc;
	}
	/* calloc gives an entry memory only when it is first written */
	pool->blocks = sfr_sys.calloc(pool->nr_blocks, sizeof(*pool->blocks));
	if (pool->blocks == NULL)
		rc = -ENOMEM;
	else
		rc = sfr__memory_reserve(&pool->range, nr_blocks * block_bytes, shared);
	if (rc != 0) {
		sfr__pool_free(pool);
		return rc;
	}
	*out = pool;
	return 0;
}

void sfr__pool_free(struct sfr__pool *pool)
{
	if (pool == NULL)
		return;
	/* A device may still write to retired blocks, and to regions that the driver did not
	 * release. Then the range stays mapped until the process ends, so that nothing else gets
	 * their addresses. */
	if (sfr__pin_fini(&pool->pin) && pool->nr_retired == 0)
		sfr__memory_release(&pool->range);
	sfr__pools_add_committed_bytes(-(int64_t)pool->committed_bytes);
	(void)pthread_cond_destroy(&pool->cv); /* the caller guarantees that nobody waits */
	sfr__mutex_fini(&pool->mu);
	sfr_sys.free(pool->blocks);
	sfr_sys.free(pool);
}

void sfr__pool_stats(struct sfr__pool *pool, struct sfr__pool_stats *out)
{
	sfr__lock(&pool->mu);
	*out = (struct sfr__pool_stats){
		.pool_bytes = pool->nr_blocks * pool->block_bytes,
		.block_bytes = pool->block_bytes,
		.committed_bytes = pool->committed_bytes,
		.leased_bytes = pool->leased_bytes,
		.retired_bytes = pool->retired_bytes,
	};
	for (const struct sfr__pool_waiter *w = pool->waiters; w != NULL; w = w->next)
		out->nr_waiters++;
	sfr__unlock(&pool->mu);
}

uint64_t sfr__pool_nr_moves(struct sfr__pool *pool, enum sfr__block_state from,
			    enum sfr__block_state to)
{
	return sfr__under(&pool->mu, pool->moves[from][to]);
}
