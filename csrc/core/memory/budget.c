/* Two sums over the pools of this process: their default caps, and the memory they have.
 *
 *     a default pool's cap = budget - the caps of other default pools, at least one block
 *
 * A default pool is one whose cap the user did not choose. Each sum is one 64-bit word: a number of
 * pages, and the fork generation in which they were counted. A sum of an older generation counts as
 * zero, because a forked child has none of its parent's pools. So the child needs no lock. */
#include <stdatomic.h>

#include "sfr/engine.h"
#include "memory/pool.h"

#define PAGES_BITS 48 /* pages in the low bits, generation in the high ones */
#define PAGES_MASK ((UINT64_C(1) << PAGES_BITS) - 1)

static _Atomic uint64_t sum_of_caps;   /* the caps of default pools */
static _Atomic uint64_t sum_of_memory; /* the memory of all pools */

/* Returns the pages of a sum, or 0 if they were counted in another fork generation. */
static uint64_t pages_if_counted_in(uint64_t sum, uint64_t generation)
{
	return sum >> PAGES_BITS == generation ? sum & PAGES_MASK : 0;
}

/* Returns the fork generation, cut to the bits that a sum has for it. */
static uint64_t this_fork_generation(void)
{
	return sfr_fork_generation() & (UINT64_MAX >> PAGES_BITS);
}

/* Adds bytes to a sum. A negative number wraps within the low bits, and so subtracts. */
static void add_bytes(_Atomic uint64_t *sum, int64_t bytes)
{
	uint64_t generation = this_fork_generation(), old = atomic_load(sum), new;
	int64_t pages = bytes / (int64_t)SFR_PAGE;

	do
		new = ((pages_if_counted_in(old, generation) + (uint64_t)pages) & PAGES_MASK) |
		      generation << PAGES_BITS;
	while (!atomic_compare_exchange_weak(sum, &old, new));
}

/* Returns the cap of a new default pool. `taken` is the sum of the caps of the others, in bytes. */
static uint64_t default_cap(const struct sfr_engine_opts *opts, uint64_t taken)
{
	uint64_t left = opts->budget_bytes > taken ? opts->budget_bytes - taken : 0;

	if (opts->most_bytes < left)
		left = opts->most_bytes;
	if (left < opts->block_bytes)
		return opts->block_bytes;
	return left / opts->block_bytes * opts->block_bytes;
}

uint64_t sfr__budget_take_default_cap(const struct sfr_engine_opts *opts)
{
	uint64_t generation = this_fork_generation(), old = atomic_load(&sum_of_caps), new, bytes;
	uint64_t pages_taken;

	do {
		pages_taken = pages_if_counted_in(old, generation);
		bytes = default_cap(opts, pages_taken * SFR_PAGE);
		new = (pages_taken + bytes / SFR_PAGE) | generation << PAGES_BITS;
	} while (!atomic_compare_exchange_weak(&sum_of_caps, &old, new));
	return bytes;
}

void sfr__budget_give_back(uint64_t bytes)
{
	add_bytes(&sum_of_caps, -(int64_t)bytes);
}

void sfr__pools_add_committed_bytes(int64_t bytes)
{
	add_bytes(&sum_of_memory, bytes);
}

uint64_t sfr_pools_committed_bytes(void)
{
	return pages_if_counted_in(atomic_load(&sum_of_memory), this_fork_generation()) * SFR_PAGE;
}
