/* budget.c: the pools of a process share one budget; a forked child has its own. */
#include <errno.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "sfr.h"
#include "base/sys.h"
#include "memory/pool.h"
#include "check.h"

#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)

static struct sfr_engine_opts opts_with(uint64_t budget, uint64_t most)
{
	return (struct sfr_engine_opts){ .block_bytes = 16 * MIB,
					 .nr_writers = 1,
					 .max_in_flight = 1,
					 .budget_bytes = budget,
					 .most_bytes = most };
}

static uint64_t take(uint64_t budget, uint64_t most)
{
	struct sfr_engine_opts opts = opts_with(budget, most);

	return sfr__budget_take_default_cap(&opts);
}

/* Returns what the next default pool would get. */
static uint64_t next_cap(uint64_t budget)
{
	uint64_t bytes = take(budget, 1024 * GIB);

	sfr__budget_give_back(bytes);
	return bytes;
}

TEST(default_caps_share_one_budget)
{
	uint64_t first, second, third;

	first = take(4 * GIB, 1024 * GIB);
	CHECK_EQ(first, 4 * GIB);
	second = take(4 * GIB, 1024 * GIB); /* one block, although nothing is left */
	CHECK_EQ(second, 16 * MIB);
	sfr__budget_give_back(first);
	CHECK_EQ(next_cap(4 * GIB), 4 * GIB - 16 * MIB);
	third = take(GIB, 1024 * GIB);
	CHECK_EQ(third, GIB - 16 * MIB);
	sfr__budget_give_back(second);
	sfr__budget_give_back(third);
	CHECK_EQ(next_cap(GIB), GIB);
}

TEST(a_cap_is_whole_blocks_and_at_least_one)
{
	CHECK_EQ(next_cap(0), 16 * MIB);
	CHECK_EQ(next_cap(33 * MIB), 32 * MIB);
}

TEST(each_default_pool_is_limited_to_most_bytes)
{
	uint64_t first = take(4 * GIB, 768 * MIB), second = take(4 * GIB, 384 * MIB);

	CHECK_EQ(first, 768 * MIB);
	CHECK_EQ(second, 384 * MIB); /* the limit is for each pool */
	sfr__budget_give_back(first);
	sfr__budget_give_back(second);
}

TEST(the_memory_of_all_pools_is_summed)
{
	uint64_t before = sfr_pools_committed_bytes();
	struct sfr__pool *pool = NULL;

	CHECK_EQ(sfr__pool_new(64 * MIB, 16 * MIB, false, &pool), 0);
	CHECK_EQ(sfr_pools_committed_bytes(), before);
	CHECK_EQ(sfr__pool_warm_up(pool, 64 * MIB), 0);
	CHECK_EQ(sfr_pools_committed_bytes(), before + 64 * MIB);
	CHECK_EQ(sfr__pool_trim(pool), 0);
	CHECK_EQ(sfr_pools_committed_bytes(), before);
	CHECK_EQ(sfr__pool_warm_up(pool, 32 * MIB), 0);
	sfr__pool_free(pool);
	CHECK_EQ(sfr_pools_committed_bytes(), before);
}

TEST(a_child_has_a_budget_of_its_own)
{
	uint64_t taken;
	int status = 1;
	pid_t child;

	CHECK_EQ(sfr_fork_init(), 0);
	taken = take(4 * GIB, 1024 * GIB);
	sfr__pools_add_committed_bytes((int64_t)GIB);
	child = fork();
	if (child == 0) {
		bool ok = sfr_pools_committed_bytes() == 0 &&
			  take(4 * GIB, 1024 * GIB) == 4 * GIB && next_cap(4 * GIB) == 16 * MIB;

		sfr__budget_give_back(4 * GIB);
		_exit(ok && next_cap(4 * GIB) == 4 * GIB ? 0 : 1);
	}
	CHECK_EQ(waitpid(child, &status, 0), child);
	CHECK_EQ(status, 0);
	CHECK_EQ(sfr_pools_committed_bytes(), GIB);
	sfr__pools_add_committed_bytes(-(int64_t)GIB);
	sfr__budget_give_back(taken);
	CHECK_EQ(next_cap(4 * GIB), 4 * GIB);
}

static uint64_t space; /* the largest mapping that mmap allows */

static void *tight_mmap(void *addr, size_t len, int prot, int flags, int fd, off_t off)
{
	if (len > space) {
		errno = ENOMEM;
		return MAP_FAILED;
	}
	return mmap(addr, len, prot, flags, fd, off);
}

TEST(a_default_pool_is_halved_until_it_can_be_mapped)
{
	struct sfr_engine_opts opts = opts_with(4 * GIB, 1024 * GIB);
	struct sfr_sys plain = sfr_sys;
	struct sfr_engine *engine;
	struct sfr_stats stats;

	sfr_sys.mmap = tight_mmap;
	space = 600 * MIB;
	CHECK_EQ(sfr_engine_new(&opts, &engine), 0);
	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK_EQ(stats.pool_bytes, 512 * MIB);
	CHECK_EQ(next_cap(4 * GIB), 4 * GIB - 512 * MIB);
	sfr_engine_put(engine);
	CHECK_EQ(next_cap(4 * GIB), 4 * GIB);
	opts.pool_bytes = GIB; /* a size that the user gave is not halved */
	CHECK_EQ(sfr_engine_new(&opts, &engine), -ENOMEM);
	opts.pool_bytes = 0;
	space = 0;
	CHECK_EQ(sfr_engine_new(&opts, &engine), -ENOMEM);
	CHECK_EQ(next_cap(4 * GIB), 4 * GIB);
	sfr_sys = plain;
}
