/* Where the items of a lease go.
 *
 * Between saves every block is free, and the items go one after another into one window of adjacent
 * blocks. The window with the most memory wins, so that little has to be made. If blocks in use
 * leave no such window, items go into the free runs, first fit. */
#include "memory/pool_int.h"

/* Returns whether the block can be taken; with `ever`, once everything has returned that does so by
 * itself. */
static bool usable(const struct sfr__block *block, bool ever)
{
	/* A copy into a retired block may run forever. */
	if (block->state == SFR__BLOCK_RETIRED)
		return false;
	return ever ? !block->held : !sfr__pool_in_hand(block->state);
}

static uint32_t nr_usable_locked(const struct sfr__pool *pool, bool ever)
{
	uint32_t nr = 0;

	for (uint32_t i = 0; i < pool->nr_blocks; i++)
		nr += usable(&pool->blocks[i], ever);
	return nr;
}

/* Returns the first block of the window of `nr` usable blocks with the most memory, or nr_blocks if
 * there is none. */
static uint32_t find_window_locked(const struct sfr__pool *pool, uint64_t nr, bool ever)
{
	uint64_t committed = 0, best_committed = 0;
	uint32_t best = pool->nr_blocks, run = 0;

	for (uint32_t i = 0; i < pool->nr_blocks; i++) {
		const struct sfr__block *block = &pool->blocks[i];

		if (!usable(block, ever)) {
			run = 0;
			committed = 0;
			continue;
		}
		committed += block->committed;
		if (++run > nr) {
			committed -= pool->blocks[i - nr].committed;
			run--;
		}
		if (run == nr && (best == pool->nr_blocks || committed > best_committed)) {
			best = i + 1 - (uint32_t)nr;
			best_committed = committed;
		}
	}
	return best;
}

/* Finds the rows of adjacent usable blocks. */
static void find_extents_locked(const struct sfr__pool *pool, bool ever, struct sfr__plan *plan)
{
	plan->nr_extents = 0;
	for (uint32_t i = 0; i < pool->nr_blocks; i++) {
		uint32_t first = i;

		while (i < pool->nr_blocks && usable(&pool->blocks[i], ever))
			i++;
		if (i > first)
			plan->extents[plan->nr_extents++] =
				(struct sfr__extent){ first * pool->block_bytes,
						      first * pool->block_bytes,
						      i * pool->block_bytes };
	}
}

/* Puts each item into the first extent with room for it. False if one does not fit. */
static bool fill_extents(const struct sfr__pool *pool, struct sfr__plan *plan)
{
	for (uint32_t i = 0; i < plan->nr; i++) {
		uint64_t len = sfr__round_up(plan->lens[i], SFR_ALIGN);
		uint32_t e = 0;

		plan->addrs[i] = NULL;
		if (len == 0)
			continue;
		while (e < plan->nr_extents && plan->extents[e].end - plan->extents[e].at < len)
			e++;
		if (e == plan->nr_extents)
			return false;
		plan->addrs[i] = pool->range.base + plan->extents[e].at;
		plan->extents[e].at += len;
	}
	return true;
}

/* Counts the blocks that the placed items touch. */
static uint64_t nr_touched(const struct sfr__pool *pool, const struct sfr__plan *plan)
{
	uint64_t nr = 0;

	for (uint32_t e = 0; e < plan->nr_extents; e++)
		nr += sfr__round_up(plan->extents[e].at - plan->extents[e].begin,
				    pool->block_bytes) /
		      pool->block_bytes;
	return nr;
}

bool sfr__pool_plan_locked(const struct sfr__pool *pool, struct sfr__plan *plan, bool ever,
			   bool spare)
{
	uint64_t nr = sfr__round_up(plan->total, pool->block_bytes) / pool->block_bytes;
	uint64_t left = nr_usable_locked(pool, ever), leave = spare ? 1 : 0;
	uint32_t first;

	if (nr + leave > left)
		return false;
	first = nr == 0 ? 0 : find_window_locked(pool, nr, ever);
	if (first < pool->nr_blocks) {
		uint64_t begin = first * pool->block_bytes;

		plan->nr_extents = 1;
		plan->extents[0] =
			(struct sfr__extent){ begin, begin, begin + nr * pool->block_bytes };
		return fill_extents(pool, plan);
	}
	find_extents_locked(pool, ever, plan);
	return fill_extents(pool, plan) && nr_touched(pool, plan) + leave <= left;
}
