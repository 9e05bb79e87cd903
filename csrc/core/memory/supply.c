/* Memory made before somebody needs it: what makes saves after the first one cheap.
 *
 * The first touch of memory takes several times as long as a copy into it. A save says at its
 * beginning how many whole blocks it could use at a time (sfr__pool_join), and as long as the pool
 * has fewer (it lacks some), any thread that has nothing better to do makes them
 * (sfr__pool_supply): in the first save ahead of those who copy, and afterwards until every block
 * is there that the save could have used. From the second save on nobody waits for new memory.
 * Saves that overlap may want more than each of them alone: who finds no block with memory then
 * raises what is wanted to all that the saves in flight could use.
 *
 * Idle threads are niced, and on a busy machine they get nowhere. So writers keep pace
 * (sfr__pool_keep_pace): of what is lacking there is never more than blocks are left to be written,
 * and when the last is written the memory for the next save is there. Where the idle ones are as
 * quick as the disk that costs a look.
 *
 *     nr_wanted   whole blocks that saves could use; a trim sets it to nothing until the next save
 *     nr_full     blocks that have all their memory and are no snapshot's and not retired
 *     nr_filling  blocks in hand that will be
 *
 * Nobody waits for such a thread longer than for 2 MiB of memory: after each piece it asks whether
 * anybody wants a block, or itself. What it has made by then stays with the block, which is first
 * to be gone on with. For a pool that a driver knows it is the same: blocks are pinned by those who
 * use them, which is quicker with memory that is there.
 */
#include "memory/numa.h"
#include "memory/pin.h"
#include "memory/pool_int.h"
#include "memory/range.h"

static bool is_unfinished(const struct sfr__block *block)
{
	return block->committed < block->want;
}

struct sfr__block *sfr__pool_pop_unfinished(struct sfr__pool *pool)
{
	for (struct sfr__block **at = &pool->partial.head; *at != NULL; at = &(*at)->next) {
		struct sfr__block *block = *at;

		if (is_unfinished(block)) {
			*at = block->next;
			return block;
		}
	}
	return NULL;
}

bool sfr__pool_lacks_locked(const struct sfr__pool *pool)
{
	if (pool->nr_full + pool->nr_filling >= pool->nr_wanted)
		return false;
	if (pool->reserved.head != NULL || pool->nr_known < pool->nr_blocks)
		return true;
	for (const struct sfr__block *b = pool->partial.head; b != NULL; b = b->next)
		if (is_unfinished(b))
			return true;
	return false;
}

bool sfr__pool_lacks(struct sfr__pool *pool)
{
	bool lacks;

	sfr__lock(&pool->mu);
	lacks = sfr__pool_lacks_locked(pool);
	sfr__unlock(&pool->mu);
	return lacks;
}

static void want_locked(struct sfr__pool *pool, uint32_t nr)
{
	if (nr > pool->nr_blocks)
		nr = pool->nr_blocks;
	if (nr > pool->nr_wanted)
		pool->nr_wanted = nr;
}

void sfr__pool_missed_locked(struct sfr__pool *pool)
{
	if (pool->nr_wanted != 0) /* or it was trimmed under the saves in flight */
		want_locked(pool, pool->nr_expected);
}

void sfr__pool_join(struct sfr__pool *pool, uint32_t nr_whole)
{
	sfr__lock(&pool->mu);
	pool->nr_saves++;
	pool->nr_expected += nr_whole;
	want_locked(pool, nr_whole);
	sfr__unlock(&pool->mu);
}

void sfr__pool_leave(struct sfr__pool *pool, uint32_t nr_whole)
{
	sfr__lock(&pool->mu);
	pool->nr_saves--;
	pool->nr_expected -= nr_whole;
	if (pool->waiters != NULL)
		(void)pthread_cond_broadcast(&pool->cv); /* a run may take the last block now */
	sfr__unlock(&pool->mu);
}

/* ---- making it ---- */

static struct sfr__block *take_locked(struct sfr__pool *pool)
{
	struct sfr__block *block;

	if (pool->waiters != NULL || !sfr__pool_lacks_locked(pool))
		return NULL;
	block = sfr__pool_pop_unfinished(pool);
	if (block == NULL)
		block = sfr__pool_pop(&pool->reserved);
	if (block == NULL)
		block = sfr__pool_fresh_locked(pool);
	sfr__pool_move_locked(pool, block, SFR__BLOCK_GROWING);
	block->want = pool->block_bytes;
	pool->nr_filling++;
	pool->nr_supplying++;
	return block;
}

/* Piece by piece, for as long as nobody minds. -errno. */
static int fill_locked(struct sfr__pool *pool, struct sfr__block *block, bool (*go_on)(void *arg),
		       void *arg)
{
	int rc = 0;

	while (rc == 0 && block->committed < block->want && pool->waiters == NULL &&
	       pool->nr_wanted != 0) {
		size_t now = sfr__pool_memory_for(pool, block->committed + 1);
		bool yes;

		sfr__unlock(&pool->mu);
		yes = go_on(arg);
		if (yes)
			rc = sfr__memory_populate(&pool->range, block->mem + block->committed,
						  now - block->committed);
		sfr__lock(&pool->mu);
		if (!yes)
			break;
		if (rc == 0)
			sfr__pool_recount_locked(pool, block, now);
	}
	return rc;
}

static void give_back_locked(struct sfr__pool *pool, struct sfr__block *block)
{
	pool->nr_filling--;
	pool->nr_supplying--;
	pool->nr_returned += block->committed != 0;
	sfr__pool_move_locked(pool, block,
			      block->committed != 0 ? SFR__BLOCK_FREE : SFR__BLOCK_RESERVED);
	(void)pthread_cond_broadcast(&pool->cv); /* trim waits in no queue */
}

bool sfr__pool_supply(struct sfr__pool *pool, bool (*go_on)(void *arg), void *arg)
{
	struct sfr__block *block;
	struct sfr__near near;
	size_t had;
	bool made;
	int rc;

	sfr__lock(&pool->mu);
	block = take_locked(pool);
	if (block == NULL) {
		sfr__unlock(&pool->mu);
		return false;
	}
	had = block->committed;
	sfr__unlock(&pool->mu);
	sfr__near_begin(&near, sfr__pin_node(&pool->pin));
	/* Once for the whole block: it excludes all who make memory in this process. */
	rc = sfr__memory_open(block->mem + had, pool->block_bytes - had);
	sfr__lock(&pool->mu);
	if (rc == 0)
		rc = fill_locked(pool, block, go_on, arg);
	made = block->committed != had;
	if (rc != 0) /* the next save may have better luck */
		pool->nr_wanted = 0;
	give_back_locked(pool, block);
	sfr__unlock(&pool->mu);
	sfr__near_end(&near);
	return made;
}

/* Whether the save's own blocks are all there but one that another thread has in hand. */
static bool is_awaited_locked(const struct sfr__pool *pool, uint32_t nr_whole)
{
	uint32_t nr = nr_whole < pool->nr_wanted ? nr_whole : pool->nr_wanted;

	return pool->nr_full < nr && pool->nr_supplying != 0 && pool->waiters == NULL;
}

void sfr__pool_keep_pace(struct sfr__pool *pool, uint32_t nr_left, uint32_t nr_whole,
			 bool (*go_on)(void *arg), void *arg)
{
	bool behind;

	sfr__lock(&pool->mu);
	behind = pool->nr_full + pool->nr_filling + nr_left < pool->nr_wanted;
	sfr__unlock(&pool->mu);
	if (behind)
		(void)sfr__pool_supply(pool, go_on, arg);
	if (nr_left != 0)
		return;
	sfr__lock(&pool->mu);
	while (is_awaited_locked(pool, nr_whole))
		(void)sfr__cond_wait(&pool->cv, &pool->mu, SFR_FOREVER);
	sfr__unlock(&pool->mu);
}

void sfr__pool_stop_supply_locked(struct sfr__pool *pool)
{
	pool->nr_wanted = 0;
	while (pool->nr_supplying != 0)
		(void)sfr__cond_wait(&pool->cv, &pool->mu, SFR_FOREVER);
}
