/* Decides where in the pool the items of a lease go.
 *
 * All items go one after another into one *window*: a row of adjacent usable blocks that is just
 * long enough for them. Of all windows, the one whose blocks already have the most memory is taken.
 * If no row is long enough, each item goes into the first *gap*, a row between used blocks, that
 * has room for it. */
#include "memory/pool_int.h"

/* Returns whether items may be placed in the block: now, or after a wait that needs no user to give
 * memory back. */
static bool is_usable(const struct sfr__block *block, bool after_wait)
{
	if (block->state == SFR__BLOCK_RETIRED)
		return false;
	return after_wait ? !block->user_held : !sfr__block_is_owned(block->state);
}

static uint32_t count_usable_blocks_locked(const struct sfr__pool *pool, bool after_wait)
{
	uint32_t nr = 0;

	for (uint32_t i = 0; i < pool->nr_blocks; i++)
		if (is_usable(&pool->blocks[i], after_wait))
			nr++;
	return nr;
}

/* Returns the first block of the window of `nr` blocks with the most memory, or pool->nr_blocks if
 * there is no window. */
static uint32_t find_window_locked(const struct sfr__pool *pool, uint64_t nr, bool after_wait)
{
	uint64_t committed = 0, best_committed = 0;
	uint32_t best = pool->nr_blocks;
	uint32_t len = 0; /* usable blocks in a row up to block i, but at most `nr` */

	for (uint32_t i = 0; i < pool->nr_blocks; i++) {
		const struct sfr__block *block = &pool->blocks[i];

		if (!is_usable(block, after_wait)) {
			len = 0;
			committed = 0;
			continue;
		}
		committed += block->committed;
		if (len == nr) /* the window's first block drops out */
			committed -= pool->blocks[i - nr].committed;
		else
			len++;
		if (len == nr && (best == pool->nr_blocks || committed > best_committed)) {
			best = i + 1 - (uint32_t)nr;
			best_committed = committed;
		}
	}
	return best;
}

/* Fills placement->gaps with all rows of usable blocks. */
static void find_gaps_locked(const struct sfr__pool *pool, bool after_wait,
			     struct sfr__placement *placement)
{
	placement->nr_gaps = 0;
	for (uint32_t i = 0; i < pool->nr_blocks; i++) {
		uint32_t first = i;

		while (i < pool->nr_blocks && is_usable(&pool->blocks[i], after_wait))
			i++;
		if (i > first) /* blocks [first, i) are usable */
			placement->gaps[placement->nr_gaps++] =
				(struct sfr__gap){ first * pool->block_bytes,
						   first * pool->block_bytes,
						   i * pool->block_bytes };
	}
}

/* Puts each item into the first gap with room. Returns false if an item does not fit. */
static bool place_items_in_gaps(const struct sfr__pool *pool, struct sfr__placement *placement)
{
	for (uint32_t i = 0; i < placement->nr; i++) {
		uint64_t len = sfr__round_up(placement->lens[i], SFR_ALIGN);
		uint32_t g = 0;

		placement->addrs[i] = NULL;
		if (len == 0)
			continue;
		while (g < placement->nr_gaps &&
		       placement->gaps[g].end - placement->gaps[g].used_end < len)
			g++;
		if (g == placement->nr_gaps)
			return false;
		placement->addrs[i] = pool->range.base + placement->gaps[g].used_end;
		placement->gaps[g].used_end += len;
	}
	return true;
}

/* Returns the number of blocks into which place_items_in_gaps has put items. */
static uint64_t nr_blocks_used(const struct sfr__pool *pool, const struct sfr__placement *placement)
{
	uint64_t nbytes = 0;

	for (uint32_t g = 0; g < placement->nr_gaps; g++) {
		const struct sfr__gap *gap = &placement->gaps[g];

		nbytes += sfr__round_up(gap->used_end - gap->begin, pool->block_bytes);
	}
	return nbytes / pool->block_bytes;
}

bool sfr__pool_place_locked(const struct sfr__pool *pool, struct sfr__placement *placement,
			    bool after_wait, bool keep_one_free)
{
	uint64_t nr_needed = sfr__round_up(placement->total, pool->block_bytes) / pool->block_bytes;
	uint64_t nr_usable = count_usable_blocks_locked(pool, after_wait);
	uint64_t nr_kept_free = keep_one_free ? 1 : 0;
	uint32_t first = 0; /* if all items are empty */

	if (nr_needed + nr_kept_free > nr_usable)
		return false;
	if (nr_needed != 0)
		first = find_window_locked(pool, nr_needed, after_wait);
	if (first < pool->nr_blocks) { /* there is a window */
		uint64_t begin = first * pool->block_bytes;

		placement->nr_gaps = 1;
		placement->gaps[0] =
			(struct sfr__gap){ begin, begin, begin + nr_needed * pool->block_bytes };
		return place_items_in_gaps(pool, placement);
	}
	find_gaps_locked(pool, after_wait, placement);
	return place_items_in_gaps(pool, placement) &&
	       nr_blocks_used(pool, placement) + nr_kept_free <= nr_usable;
}
