/* Memory for the next save, made by the writers of this one.
 *
 * The first touch of memory takes several times as long as a copy into it. A save announces how
 * many whole blocks (blocks with all their memory) it could use at a time (sfr__pool_join). While
 * the pool has fewer, it *lacks* the others. Writers make them: each time a writer has written a
 * block, it makes a whole block if more are lacking than the save has blocks left to write. So
 * writes come first. When the last block is written, the pool has all the memory that the save
 * could have used, and later saves do not wait for new memory. Saves that overlap may need more
 * blocks than each save alone. So a save that finds no block with memory raises nr_wanted to the
 * number that all saves in flight could use together. Copiers that have nothing to copy make
 * memory, too.
 *
 *     nr_wanted   whole blocks that saves could use; a trim sets it to zero until the next save
 *     nr_full     blocks that have all their memory, are not held by snapshots and not retired
 *     nr_filling  blocks that threads are giving the rest of their memory
 *
 * The thread that makes a block's memory owns the block meanwhile. If device copies use the block,
 * its first user pins it, which is faster when the memory exists.
 *
 * Measured with 800 MB that are copied in the call, on a busy machine. Six engines made memory
 * ahead, and six, run alternately with them, did not. The calls of the second and third save took
 * 41 and 39 ms (medians) with memory made ahead. They took 55 and 51 ms without it, because the
 * pool was still growing. The first save took equally long. `benchmarks/vs_peers.py --only unowned
 * --state 800MB --peers stillframe` shows these calls. */
#include "memory/pool_int.h"

bool sfr__pool_lacks_locked(const struct sfr__pool *pool)
{
	return pool->nr_full + pool->nr_filling < pool->nr_wanted &&
	       (pool->reserved.head != NULL || pool->nr_known < pool->nr_blocks);
}

/* Raises nr_wanted to `nr`, but at most to the number of blocks. */
static void raise_wanted_locked(struct sfr__pool *pool, uint32_t nr)
{
	if (nr > pool->nr_blocks)
		nr = pool->nr_blocks;
	if (nr > pool->nr_wanted)
		pool->nr_wanted = nr;
}

void sfr__pool_want_more_locked(struct sfr__pool *pool)
{
	/* 0: a trim, or a refusal of the system, has stopped this until the next save begins. */
	if (pool->nr_wanted != 0)
		raise_wanted_locked(pool, pool->nr_expected);
}

void sfr__pool_join(struct sfr__pool *pool, uint32_t nr_whole)
{
	sfr__lock(&pool->mu);
	pool->nr_saves++;
	pool->nr_expected += nr_whole;
	raise_wanted_locked(pool, nr_whole);
	sfr__unlock(&pool->mu);
}

void sfr__pool_leave(struct sfr__pool *pool, uint32_t nr_whole)
{
	sfr__lock(&pool->mu);
	pool->nr_saves--;
	pool->nr_expected -= nr_whole;
	if (pool->waiters != NULL)
		(void)pthread_cond_broadcast(&pool->cv); /* a lease may now take the last block */
	sfr__unlock(&pool->mu);
}

/* Takes a block that needs memory. Returns NULL if a thread waits for a block, or if the pool lacks
 * at most `nr_left` blocks, because the calls that follow can make these. */
static struct sfr__block *take_lacking_locked(struct sfr__pool *pool, uint32_t nr_left)
{
	struct sfr__block *block;

	if (pool->waiters != NULL || !sfr__pool_lacks_locked(pool) ||
	    pool->nr_full + pool->nr_filling + nr_left >= pool->nr_wanted)
		return NULL;
	block = sfr__pool_pop(&pool->reserved);
	if (block == NULL)
		block = sfr__pool_fresh_locked(pool);
	sfr__pool_move_locked(pool, block, SFR__BLOCK_GROWING);
	pool->nr_filling++;
	return block;
}

/* Makes memory for the block that take_lacking_locked returns, and releases the mutex meanwhile.
 * Returns false if there was no such block. Returns true even if the system had no memory. */
static bool make_block_locked(struct sfr__pool *pool, uint32_t nr_left)
{
	const size_t len = (size_t)pool->block_bytes;
	struct sfr__block *block = take_lacking_locked(pool, nr_left);
	int rc;

	if (block == NULL)
		return false;
	sfr__unlock(&pool->mu);
	rc = sfr__pool_commit(pool, block, 0, len);
	sfr__lock(&pool->mu);
	pool->nr_filling--;
	if (rc == 0) {
		sfr__pool_recount_locked(pool, block, len);
		pool->nr_returned++;
	} else {
		pool->nr_wanted = 0; /* give up until the next save, which may succeed */
	}
	sfr__pool_move_locked(pool, block, rc == 0 ? SFR__BLOCK_FREE : SFR__BLOCK_RESERVED);
	return true;
}

bool sfr__pool_make_block(struct sfr__pool *pool)
{
	return sfr__under(&pool->mu, make_block_locked(pool, 0));
}

void sfr__pool_keep_pace(struct sfr__pool *pool, uint32_t nr_left)
{
	sfr__lock(&pool->mu);
	while (make_block_locked(pool, nr_left))
		;
	sfr__unlock(&pool->mu);
}
