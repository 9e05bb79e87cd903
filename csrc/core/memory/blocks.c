/* Blocks of a pool: their states and lists, their memory, what is counted of them. See pool.c for the
 * diagram; whoever calls has the pool's mutex where a name ends in `_locked`, or the block in hand.
 */
#include <errno.h>

#include "memory/numa.h"
#include "memory/pool_int.h"

int sfr__pool_grow(struct sfr__pool *pool, const struct sfr__block *block, size_t want)
{
	struct sfr__near near;
	int rc;

	sfr__near_begin(&near, sfr__pin_node(&pool->pin));
	rc = sfr__memory_commit(&pool->range, block->mem + block->committed,
				want - block->committed);
	sfr__near_end(&near);
	return rc;
}

void sfr__pool_push(struct sfr__list *list, struct sfr__block *block)
{
	block->next = list->head;
	list->head = block;
}

struct sfr__block *sfr__pool_pop(struct sfr__list *list)
{
	struct sfr__block *block = list->head;

	if (block != NULL)
		list->head = block->next;
	return block;
}

bool sfr__pool_in_hand(enum sfr__block_state state)
{
	return state != SFR__BLOCK_RESERVED && state != SFR__BLOCK_FREE &&
	       state != SFR__BLOCK_RETIRED;
}

/* Every change of a block's state. A block in hand is in no list, the others are in theirs. */
void sfr__pool_move_locked(struct sfr__pool *pool, struct sfr__block *block,
			   enum sfr__block_state to)
{
	enum sfr__block_state from = block->state;

	pool->moves[from][to]++;
	if (from == SFR__BLOCK_LEASED)
		pool->leased_bytes -= block->committed;
	if (to == SFR__BLOCK_LEASED)
		pool->leased_bytes += block->committed;
	pool->nr_in_hand += sfr__pool_in_hand(to);
	pool->nr_in_hand -= sfr__pool_in_hand(from);
	sfr__pool_uncount_locked(pool, block);
	block->state = to;
	sfr__pool_count_locked(pool, block);
	if (sfr__pool_in_hand(to))
		return;
	if (to == SFR__BLOCK_RETIRED) {
		pool->nr_retired++;
		pool->retired_bytes += block->committed;
		(void)pthread_cond_broadcast(&pool->cv); /* it may have been the last one */
		return;
	}
	sfr__pool_push(to == SFR__BLOCK_RESERVED             ? &pool->reserved :
		       block->committed == pool->block_bytes ? &pool->whole :
							       &pool->partial,
		       block);
	if (pool->waiters != NULL)
		(void)pthread_cond_broadcast(&pool->cv); /* fails only on a foreign object */
}

void sfr__pool_recount_locked(struct sfr__pool *pool, struct sfr__block *block, size_t now)
{
	pool->committed_bytes += now - block->committed;
	sfr__budget_hold((int64_t)now - (int64_t)block->committed);
	sfr__pool_uncount_locked(pool, block);
	block->committed = now;
	sfr__pool_count_locked(pool, block);
}

/* The first block that was never used; NULL when each has been. */
struct sfr__block *sfr__pool_fresh_locked(struct sfr__pool *pool)
{
	struct sfr__block *block;

	if (pool->nr_known == pool->nr_blocks)
		return NULL;
	block = &pool->blocks[pool->nr_known];
	block->index = pool->nr_known++;
	block->mem = pool->range.base + block->index * pool->block_bytes;
	return block;
}

/* Memory that a lease of `need` bytes gives a block: huge pages whole, never more than it. */
size_t sfr__pool_memory_for(const struct sfr__pool *pool, uint64_t need)
{
	uint64_t want = sfr__round_up(need != 0 ? need : 1, SFR__HUGE_BYTES);

	return (size_t)(want < pool->block_bytes ? want : pool->block_bytes);
}

bool sfr__pool_is_whole(const struct sfr__pool *pool, size_t need)
{
	return sfr__pool_memory_for(pool, need) == pool->block_bytes;
}
