/* Memory for the next save, made by the writers of this one.
 *
 * The first touch of memory takes several times as long as a copy into it. So writers make blocks
 * whole (give them all their memory) while the pool *lacks* whole blocks (pool.h). A writer that
 * has written a block makes another one if the pool lacks more blocks than the save has left to
 * write. So writes come first, and when the last block is written, the pool has all the memory that
 * the save could have used. Copiers that have nothing to copy make memory, too.
 *
 * Saves that overlap may need more blocks than each save alone. So a save that finds no block with
 * memory raises nr_whole_target to what all saves in flight could use together.
 *
 * The thread that makes a block's memory owns the block meanwhile. It does not pin the block: the
 * block's first user does, if a device copies to it.
 *
 * Measured with 800 MB that are copied in the call: the calls of the second and third save took 41
 * and 39 ms (medians of six engines) with memory made ahead, and 55 and 51 ms without it. The first
 * save took equally long. `benchmarks/vs_peers.py --only unowned --state 800MB --peers stillframe`
 * shows these calls. */
#include "memory/pool_int.h"

bool sfr__pool_needs_whole_blocks_locked(const struct sfr__pool *pool)
{
	bool has_reserved = pool->reserved.head != NULL || pool->nr_ever_used < pool->nr_blocks;

	return has_reserved &&
	       pool->nr_whole_for_saves + pool->nr_whole_growing < pool->nr_whole_target;
}

static void raise_whole_target_to_locked(struct sfr__pool *pool, uint32_t nr)
{
	if (nr > pool->nr_blocks)
		nr = pool->nr_blocks;
	if (nr > pool->nr_whole_target)
		pool->nr_whole_target = nr;
}

void sfr__pool_raise_whole_target_locked(struct sfr__pool *pool)
{
	/* 0: after a trim, or if memory was refused, no block is made until the next save begins */
	if (pool->nr_whole_target != 0)
		raise_whole_target_to_locked(pool, pool->nr_whole_useful);
}

void sfr__pool_add_save(struct sfr__pool *pool, uint32_t nr_whole)
{
	sfr__lock(&pool->mu);
	pool->nr_saves++;
	pool->nr_whole_useful += nr_whole;
	raise_whole_target_to_locked(pool, nr_whole);
	sfr__unlock(&pool->mu);
}

void sfr__pool_remove_save(struct sfr__pool *pool, uint32_t nr_whole)
{
	sfr__lock(&pool->mu);
	pool->nr_saves--;
	pool->nr_whole_useful -= nr_whole;
	if (pool->waiters != NULL)
		(void)pthread_cond_broadcast(&pool->cv); /* a lease may now take the last block */
	sfr__unlock(&pool->mu);
}

/* Takes a block without memory and makes it GROWING. Returns NULL if a thread waits for a block, or
 * if later calls, each of which makes one block, are enough for the blocks that the pool lacks. */
static struct sfr__block *take_block_to_grow_locked(struct sfr__pool *pool, uint32_t nr_later_calls)
{
	/* how many whole blocks there will be if this call makes none */
	uint32_t nr_expected = pool->nr_whole_for_saves + pool->nr_whole_growing + nr_later_calls;
	struct sfr__block *block;

	if (pool->waiters != NULL || !sfr__pool_needs_whole_blocks_locked(pool) ||
	    nr_expected >= pool->nr_whole_target)
		return NULL;
	block = sfr__pool_list_pop(&pool->reserved);
	if (block == NULL)
		block = sfr__pool_take_never_used_locked(pool);
	sfr__pool_move_locked(pool, block, SFR__BLOCK_GROWING);
	pool->nr_whole_growing++;
	return block;
}

/* Makes one block whole, and releases the mutex meanwhile. Returns false if no block is to be made
 * whole. Returns true even if the system had no memory. */
static bool make_block_whole_locked(struct sfr__pool *pool, uint32_t nr_later_calls)
{
	const size_t len = (size_t)pool->block_bytes;
	struct sfr__block *block = take_block_to_grow_locked(pool, nr_later_calls);
	int rc;

	if (block == NULL)
		return false;
	sfr__unlock(&pool->mu);
	rc = sfr__pool_commit_memory(pool, block, 0, len);
	sfr__lock(&pool->mu);
	pool->nr_whole_growing--;
	if (rc == 0) {
		sfr__pool_set_committed_locked(pool, block, len);
		pool->nr_returned++; /* a thread that found no memory may try again */
	} else {
		pool->nr_whole_target = 0; /* give up until the next save */
	}
	sfr__pool_move_locked(pool, block, rc == 0 ? SFR__BLOCK_FREE : SFR__BLOCK_RESERVED);
	return true;
}

bool sfr__pool_make_one_whole_block(struct sfr__pool *pool)
{
	return sfr__under(&pool->mu, make_block_whole_locked(pool, 0)); /* no later calls */
}

void sfr__pool_make_whole_blocks(struct sfr__pool *pool, uint32_t nr_later_calls)
{
	sfr__lock(&pool->mu);
	while (make_block_whole_locked(pool, nr_later_calls))
		;
	sfr__unlock(&pool->mu);
}
