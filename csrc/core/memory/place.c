/* Decides where in the pool the items of a lease go.
 *
 * The items go one after another into one *window*, which is a row of just enough adjacent blocks.
 * Of all windows, the one whose blocks already have the most memory is taken. If there is no
 * window, each item goes into the first gap between used blocks that has room. */
#include "memory/pool_int.h"

/* With `later`, every block outside held leases is usable: all of them will return. */
static bool is_usable(const struct sfr__block *block, bool later)
{
	if (block->state == SFR__BLOCK_RETIRED)
		return false;
	return later ? !block->held : !sfr__block_is_owned(block->state);
}

static uint32_t nr_usable_locked(const struct sfr__pool *pool, bool later)
{
	uint32_t nr = 0;

	for (uint32_t i = 0; i < pool->nr_blocks; i++)
		if (is_usable(&pool->blocks[i], later))
			nr++;
	return nr;
}

/* Returns the first block of the window with the most memory, or nr_blocks if there is none. */
static uint32_t find_window_locked(const struct sfr__pool *pool, uint64_t nr, bool later)
{
	uint64_t committed = 0, best_committed = 0;
	uint32_t best = pool->nr_blocks, len = 0;

	for (uint32_t i = 0; i < pool->nr_blocks; i++) {
		const struct sfr__block *block = &pool->blocks[i];

		if (!is_usable(block, later)) {
			len = 0;
			committed = 0;
			continue;
		}
		committed += block->committed;
		if (++len > nr) { /* the first block drops out of the window */
			committed -= pool->blocks[i - nr].committed;
			len--;
		}
		if (len == nr && (best == pool->nr_blocks || committed > best_committed)) {
			best = i + 1 - (uint32_t)nr;
			best_committed = committed;
		}
	}
	return best;
}

static void find_gaps_locked(const struct sfr__pool *pool, bool later,
			     struct sfr__placement *placement)
{
	placement->nr_gaps = 0;
	for (uint32_t i = 0; i < pool->nr_blocks; i++) {
		uint32_t first = i;

		while (i < pool->nr_blocks && is_usable(&pool->blocks[i], later))
			i++;
		if (i > first)
			placement->gaps[placement->nr_gaps++] =
				(struct sfr__gap){ first * pool->block_bytes,
						   first * pool->block_bytes,
						   i * pool->block_bytes };
	}
}

/* Puts each item into the first gap with room. Returns false if an item does not fit. */
static bool fill_gaps(const struct sfr__pool *pool, struct sfr__placement *placement)
{
	for (uint32_t i = 0; i < placement->nr; i++) {
		uint64_t len = sfr__round_up(placement->lens[i], SFR_ALIGN);
		uint32_t g = 0;

		placement->addrs[i] = NULL;
		if (len == 0)
			continue;
		while (g < placement->nr_gaps &&
		       placement->gaps[g].end - placement->gaps[g].at < len)
			g++;
		if (g == placement->nr_gaps)
			return false;
		placement->addrs[i] = pool->range.base + placement->gaps[g].at;
		placement->gaps[g].at += len;
	}
	return true;
}

static uint64_t nr_blocks_used(const struct sfr__pool *pool, const struct sfr__placement *placement)
{
	uint64_t nbytes = 0;

	for (uint32_t g = 0; g < placement->nr_gaps; g++) {
		const struct sfr__gap *gap = &placement->gaps[g];

		nbytes += sfr__round_up(gap->at - gap->begin, pool->block_bytes);
	}
	return nbytes / pool->block_bytes;
}

bool sfr__pool_place_locked(const struct sfr__pool *pool, struct sfr__placement *placement,
			    bool later, bool spare)
{
	uint64_t nr = sfr__round_up(placement->total, pool->block_bytes) / pool->block_bytes;
	uint64_t nr_usable = nr_usable_locked(pool, later), nr_spare = spare ? 1 : 0;
	uint32_t first;

	if (nr + nr_spare > nr_usable)
		return false;
	first = nr == 0 ? 0 : find_window_locked(pool, nr, later);
	if (first < pool->nr_blocks) {
		uint64_t begin = first * pool->block_bytes;

		placement->nr_gaps = 1;
		placement->gaps[0] =
			(struct sfr__gap){ begin, begin, begin + nr * pool->block_bytes };
		return fill_gaps(pool, placement);
	}
	find_gaps_locked(pool, later, placement);
	return fill_gaps(pool, placement) &&
	       nr_blocks_used(pool, placement) + nr_spare <= nr_usable;
}
