/* Blocks of a pool: their states, lists, memory and counters. A function without `_locked` in its
 * name needs no mutex, because its caller owns the block. */
#include <errno.h>

#include "memory/pool_int.h"

int sfr__pool_commit_memory(struct sfr__pool *pool, const struct sfr__block *block, size_t from,
			    size_t to)
{
	char *mem = sfr__pool_block_addr(pool, block) + from;
	int rc = sfr__memory_make_accessible(mem, to - from);

	if (rc == 0)
		rc = sfr__memory_populate(&pool->range, mem, to - from);
	if (rc != 0)
		/* Some pages may have memory now. If this fails, they keep it, and the next commit
		 * finds it there. */
		(void)sfr__pool_decommit(pool, block, from, to);
	return rc;
}

int sfr__pool_decommit(struct sfr__pool *pool, const struct sfr__block *block, size_t from,
		       size_t to)
{
	return sfr__memory_decommit(&pool->range, sfr__pool_block_addr(pool, block) + from,
				    to - from);
}

void sfr__pool_pin_blocks(struct sfr__pool *pool, struct sfr__block *const *blocks, uint32_t nr)
{
	sfr__pin_blocks(&pool->pin, blocks, nr, pool->block_bytes);
	for (uint32_t i = 0; i < nr; i++)
		if (sfr__pin_is_driver_memory(blocks[i]))
			/* The block now uses the driver's memory. Its own pages are not needed any
			 * more. */
			(void)sfr__pool_decommit(pool, blocks[i], 0, (size_t)pool->block_bytes);
}

void sfr__pool_push(struct sfr__block_list *list, struct sfr__block *block)
{
	block->next = list->head;
	list->head = block;
}

struct sfr__block *sfr__pool_list_pop(struct sfr__block_list *list)
{
	struct sfr__block *block = list->head;

	if (block != NULL)
		list->head = block->next;
	return block;
}

void sfr__list_remove_owned(struct sfr__block_list *list)
{
	struct sfr__block **at = &list->head;

	while (*at != NULL)
		if (sfr__block_is_owned((*at)->state))
			*at = (*at)->next;
		else
			at = &(*at)->next;
}

bool sfr__block_is_owned(enum sfr__block_state state)
{
	return state != SFR__BLOCK_RESERVED && state != SFR__BLOCK_FREE &&
	       state != SFR__BLOCK_RETIRED;
}

void sfr__pool_move_locked(struct sfr__pool *pool, struct sfr__block *block,
			   enum sfr__block_state to)
{
	enum sfr__block_state from = block->state;

	pool->moves[from][to]++;
	if (from == SFR__BLOCK_LEASED)
		pool->leased_bytes -= block->committed;
	if (to == SFR__BLOCK_LEASED)
		pool->leased_bytes += block->committed;
	if (sfr__block_is_owned(to))
		pool->nr_owned++;
	if (sfr__block_is_owned(from))
		pool->nr_owned--;
	sfr__pool_uncount_if_whole_locked(pool, block);
	block->state = to;
	sfr__pool_count_if_whole_locked(pool, block);
	if (sfr__block_is_owned(to))
		return; /* an owned block is in no list */
	if (to == SFR__BLOCK_RETIRED) {
		pool->nr_retired++;
		pool->retired_bytes += block->committed;
		(void)pthread_cond_broadcast(&pool->cv); /* if all are retired, waiters give up */
		return;
	}
	if (to == SFR__BLOCK_RESERVED)
		sfr__pool_push(&pool->reserved, block);
	else if (block->committed == pool->block_bytes)
		sfr__pool_push(&pool->whole, block);
	else
		sfr__pool_push(&pool->partial, block);
	if (pool->waiters != NULL)
		(void)pthread_cond_broadcast(&pool->cv); /* cannot fail on our own object */
}

void sfr__pool_set_committed_locked(struct sfr__pool *pool, struct sfr__block *block, size_t nbytes)
{
	/* the sums are unsigned: if the block shrinks, the addition wraps and so subtracts */
	pool->committed_bytes += nbytes - block->committed;
	sfr__pools_add_committed_bytes((int64_t)nbytes - (int64_t)block->committed);
	if (block->state == SFR__BLOCK_LEASED)
		pool->leased_bytes += nbytes - block->committed;
	if (block->state == SFR__BLOCK_RETIRED)
		pool->retired_bytes += nbytes - block->committed;
	sfr__pool_uncount_if_whole_locked(pool, block);
	block->committed = nbytes;
	sfr__pool_count_if_whole_locked(pool, block);
}

struct sfr__block *sfr__pool_take_never_used_locked(struct sfr__pool *pool)
{
	struct sfr__block *block;

	if (pool->nr_ever_used == pool->nr_blocks)
		return NULL;
	block = &pool->blocks[pool->nr_ever_used];
	block->index = pool->nr_ever_used++;
	block->mem = sfr__pool_block_addr(pool, block);
	return block;
}

size_t sfr__pool_block_bytes_to_commit(const struct sfr__pool *pool, uint64_t need)
{
	/* at least one huge page, even if nothing is needed */
	uint64_t nbytes = sfr__round_up(need != 0 ? need : 1, SFR__HUGE_BYTES);

	return (size_t)(nbytes < pool->block_bytes ? nbytes : pool->block_bytes);
}

bool sfr__pool_fills_block(const struct sfr__pool *pool, size_t need)
{
	return sfr__pool_block_bytes_to_commit(pool, need) == pool->block_bytes;
}
