/* Checks that a pool's counters agree with its blocks. Any thread may call this at any time. */
#ifndef POOL_FIGURES_H
#define POOL_FIGURES_H

#include "memory/pool_int.h"
#include "check.h"

static inline uint32_t pool__nr_listed(const struct sfr__block_list *list,
				       enum sfr__block_state state)
{
	uint32_t nr = 0;

	for (const struct sfr__block *block = list->head; block; block = block->next, nr++)
		CHECK_EQ(block->state, state);
	return nr;
}

static inline void pool_figures_agree(struct sfr__pool *pool)
{
	uint32_t nr_whole = 0, nr_owned = 0, nr_of[SFR__NR_BLOCK_STATES] = { 0 };
	uint64_t committed = 0, leased = 0, retired = 0;

	sfr__lock(&pool->mu);
	for (uint32_t i = 0; i < pool->nr_ever_used; i++) {
		const struct sfr__block *block = &pool->blocks[i];

		nr_of[block->state]++;
		if (sfr__block_is_whole_for_saves(pool, block))
			nr_whole++;
		if (sfr__block_is_owned(block->state))
			nr_owned++;
		committed += block->committed;
		leased += block->state == SFR__BLOCK_LEASED ? block->committed : 0;
		retired += block->state == SFR__BLOCK_RETIRED ? block->committed : 0;
	}
	CHECK_EQ(pool->nr_whole_for_saves, nr_whole);
	CHECK_EQ(pool->nr_owned, nr_owned);
	CHECK_EQ(pool->nr_retired, nr_of[SFR__BLOCK_RETIRED]);
	CHECK_EQ(pool->committed_bytes, committed);
	CHECK_EQ(pool->leased_bytes, leased);
	CHECK_EQ(pool->retired_bytes, retired);
	CHECK(pool->nr_whole_growing <= nr_of[SFR__BLOCK_GROWING]);
	CHECK_EQ(pool__nr_listed(&pool->reserved, SFR__BLOCK_RESERVED), nr_of[SFR__BLOCK_RESERVED]);
	CHECK_EQ(pool__nr_listed(&pool->whole, SFR__BLOCK_FREE) +
			 pool__nr_listed(&pool->partial, SFR__BLOCK_FREE),
		 nr_of[SFR__BLOCK_FREE]);
	sfr__unlock(&pool->mu);
}

/* Does the same when no thread has a block. */
static inline void pool_is_at_rest(struct sfr__pool *pool)
{
	pool_figures_agree(pool);
	CHECK_EQ(pool->nr_owned, 0);
	CHECK_EQ(pool->nr_whole_growing, 0);
	CHECK_EQ(pool->nr_user_held, 0);
	CHECK(pool->waiters == NULL);
	CHECK_EQ(pool->nr_saves, 0);
	CHECK_EQ(pool->nr_whole_useful, 0);
}

#endif
