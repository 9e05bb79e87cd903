/* budget.c: what the default cap makes of the files in which the system tells what it has. The
 * files are ours: open() of /proc and /sys is led to a directory of the test's. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "sfr.h"
#include "base/sys.h"
#include "memory/pool.h"
#include "memory/pool_int.h"
#include "check.h"
#include "fix_system.h"

#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)

static int redirected_open(int dir, const char *path, int flags, mode_t mode)
{
	return openat(dir, system_path(path), flags, mode);
}

static void forget_system(void)
{
	char command[64];

	(void)snprintf(command, sizeof(command), "rm -rf %s/proc %s/sys", root, root);
	CHECK_EQ(system(command), 0);
	CHECK_EQ(unsetenv("LOCAL_WORLD_SIZE"), 0);
}

static void tell_8_gib_are_available(void)
{
	forget_system();
	tell("/proc/meminfo", "MemTotal:       16777216 kB\nMemFree:         1000000 kB\n"
			      "MemAvailable:    8388608 kB\nBuffers:             10 kB\n");
}

static uint64_t default_cap(void)
{
	return sfr_default_pool_bytes(16 * MIB);
}

static void half_of_what_is_available_is_the_default(void)
{
	tell_8_gib_are_available();
	CHECK_EQ(default_cap(), 4 * GIB);
	CHECK_EQ(sfr_default_pool_bytes(3 * GIB), 3 * GIB); /* whole blocks */
	CHECK_EQ(sfr_default_pool_bytes(5 * GIB), 5 * GIB); /* one at least */
}

static void the_ranks_of_a_machine_share_it(void)
{
	static const struct {
		const char *text;
		uint64_t bytes;
	} cases[] = { { "8", GIB / 2 },
		      { "1", 4 * GIB },
		      { "0", 4 * GIB },
		      { "", 4 * GIB },
		      { "many", 4 * GIB } };

	tell_8_gib_are_available();
	for (int i = 0; i < 5; i++) {
		CHECK_EQ(setenv("LOCAL_WORLD_SIZE", cases[i].text, 1), 0);
		CHECK_EQ(default_cap(), cases[i].bytes);
	}
}

static void a_system_that_tells_nothing_gives_one_block(void)
{
	forget_system();
	CHECK_EQ(default_cap(), 16 * MIB);
	tell("/proc/meminfo", "");
	CHECK_EQ(default_cap(), 16 * MIB);
	tell("/proc/meminfo", "MemAvailable: none\nxMemAvailable: 5 kB");
	tell("/proc/self/cgroup", "\n:::\nx\n0\n0:\n7:memory\n");
	CHECK_EQ(default_cap(), 16 * MIB);
}

static void a_v2_group_and_its_parents_limit_it(void)
{
	tell_8_gib_are_available();
	tell("/proc/self/cgroup", "0::/job.slice/task-3\n");
	tell("/sys/fs/cgroup/job.slice/task-3/memory.max", "max\n");
	tell("/sys/fs/cgroup/job.slice/task-3/memory.current", "1000\n");
	CHECK_EQ(default_cap(), 4 * GIB);
	tell("/sys/fs/cgroup/job.slice/task-3/memory.max", "4294967296\n"); /* 4 GiB */
	tell("/sys/fs/cgroup/job.slice/task-3/memory.current", "1073741824\n");
	CHECK_EQ(default_cap(), 3 * GIB / 2);
	tell("/sys/fs/cgroup/job.slice/memory.max", "3221225472\n"); /* 3 GiB, 2 used */
	tell("/sys/fs/cgroup/job.slice/memory.current", "2147483648\n");
	CHECK_EQ(default_cap(), GIB / 2);
	/* Of which 1 GiB is files that nobody has looked at lately. */
	tell("/sys/fs/cgroup/job.slice/memory.stat",
	     "anon 1073741824\ninactive_anon 77\nactive_file 5\ninactive_file 1073741824\n");
	CHECK_EQ(default_cap(), GIB);
	/* More than used: the two files are not read at the same moment. */
	tell("/sys/fs/cgroup/job.slice/memory.stat", "inactive_file 99999999999\n");
	CHECK_EQ(default_cap(), 3 * GIB / 2);
	tell("/sys/fs/cgroup/job.slice/memory.current", "9999999999\n");
	tell("/sys/fs/cgroup/job.slice/memory.stat", "inactive_file 0\n");
	CHECK_EQ(default_cap(), 16 * MIB); /* beyond its limit already */
}

static void a_v1_group_limits_it(void)
{
	tell_8_gib_are_available();
	tell("/proc/self/cgroup",
	     "9:name=systemd:/x\n5:cpu,memory:/docker/abc\n3:cpuset:/\n0::/\n");
	tell("/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "9223372036854771712\n");
	tell("/sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", "1073741824\n");
	CHECK_EQ(default_cap(), 4 * GIB);
	tell("/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "4294967296\n");
	CHECK_EQ(default_cap(), 3 * GIB / 2);
	tell("/sys/fs/cgroup/memory/docker/abc/memory.stat",
	     "inactive_file 5\ntotal_inactive_file 1073741824\n");
	CHECK_EQ(default_cap(), 2 * GIB);
	tell("/proc/self/cgroup", "9:memoryless:/docker/abc\n5:cpu,memory2:/docker/abc\n");
	CHECK_EQ(default_cap(), 4 * GIB);
}

static void in_a_container_the_mount_is_the_group(void)
{
	tell_8_gib_are_available();
	tell("/proc/self/cgroup", "4:memory:/docker/name-on-the-host\n");
	tell("/sys/fs/cgroup/memory/memory.limit_in_bytes", "2147483648\n");
	tell("/sys/fs/cgroup/memory/memory.usage_in_bytes", "0\n");
	CHECK_EQ(default_cap(), GIB);
	tell("/proc/self/cgroup", "0::/\n");
	tell("/sys/fs/cgroup/memory.max", "1073741824\n");
	tell("/sys/fs/cgroup/memory.current", "0\n");
	CHECK_EQ(default_cap(), GIB / 2);
	tell("/proc/self/cgroup", "0::/a\n"); /* v2 beside v1 */
	tell("/sys/fs/cgroup/unified/a/memory.max", "536870912\n");
	tell("/sys/fs/cgroup/unified/a/memory.current", "0\n");
	CHECK_EQ(default_cap(), GIB / 4);
}

static void default_caps_share_one_budget(void)
{
	uint64_t first, second, third;

	tell_8_gib_are_available();
	first = sfr__budget_take(16 * MIB);
	CHECK_EQ(first, 4 * GIB);
	CHECK_EQ(default_cap(), 16 * MIB);
	second = sfr__budget_take(16 * MIB); /* a block, though nothing is left */
	CHECK_EQ(second, 16 * MIB);
	sfr__budget_give(first);
	CHECK_EQ(default_cap(), 4 * GIB - 16 * MIB);
	CHECK_EQ(setenv("LOCAL_WORLD_SIZE", "4", 1), 0);
	third = sfr__budget_take(16 * MIB);
	CHECK_EQ(third, GIB - 16 * MIB);
	sfr__budget_give(second);
	sfr__budget_give(third);
	CHECK_EQ(default_cap(), GIB);
}

/* Memory that a pool of ours holds is no longer available: counting it as gone and its pool's
 * cap as taken would count it twice. */
static void what_pools_hold_is_not_counted_twice(void)
{
	struct sfr__pool *pool = NULL;
	uint64_t taken;

	tell_8_gib_are_available();
	CHECK_EQ(sfr__pool_new(64 * MIB, 16 * MIB, false, &pool), 0);
	taken = sfr__budget_take(16 * MIB);
	CHECK_EQ(sfr__pool_warm_up(pool, 64 * MIB), 0);
	tell("/proc/meminfo", "MemAvailable:    8323072 kB\n"); /* 64 MiB less */
	CHECK_EQ(default_cap(), 16 * MIB);
	sfr__budget_give(taken);
	CHECK_EQ(default_cap(), 4 * GIB);
	CHECK_EQ(sfr__pool_trim(pool), 0);
	CHECK_EQ(default_cap(), 4 * GIB - 32 * MIB);
	CHECK_EQ(sfr__pool_warm_up(pool, 64 * MIB), 0);
	sfr__pool_free(pool);
	CHECK_EQ(default_cap(), 4 * GIB - 32 * MIB);
}

static void a_child_has_a_budget_of_its_own(void)
{
	uint64_t taken;
	int status = 1;
	pid_t child;

	tell_8_gib_are_available();
	CHECK_EQ(sfr_fork_init(), 0);
	taken = sfr__budget_take(16 * MIB);
	sfr__budget_hold((int64_t)GIB);
	child = fork();
	if (child == 0) {
		bool ok = default_cap() == 4 * GIB && sfr__budget_take(16 * MIB) == 4 * GIB &&
			  default_cap() == 16 * MIB;

		sfr__budget_give(4 * GIB);
		_exit(ok && default_cap() == 4 * GIB ? 0 : 1);
	}
	CHECK_EQ(waitpid(child, &status, 0), child);
	CHECK_EQ(status, 0);
	sfr__budget_hold(-(int64_t)GIB);
	sfr__budget_give(taken);
	CHECK_EQ(default_cap(), 4 * GIB);
}

static void unreadable_files_are_no_limit(void)
{
	tell_8_gib_are_available();
	tell("/proc/self/cgroup", "0::/a\n");
	tell("/sys/fs/cgroup/a/memory.max", "1073741824\n");
	tell("/sys/fs/cgroup/a/memory.current", "0\n");
	FOR_EVERY_FAILURE(run, "*", EIO)
	{
		uint64_t cap = default_cap();

		CHECK(cap == GIB / 2 || (check_acted(&run) && (cap == 4 * GIB || cap == 16 * MIB)));
	}
}

static struct rlimit as_limit;

static int redirected_get_limit(int resource, struct rlimit *limit)
{
	CHECK_EQ(resource, RLIMIT_AS);
	*limit = as_limit;
	return 0;
}

static void a_limit_of_address_space_leaves_at_least_half_of_itself(void)
{
	struct sfr_sys plain = sfr_sys;
	uint64_t first, second;

	tell_8_gib_are_available();
	sfr_sys.get_limit = redirected_get_limit;
	as_limit.rlim_cur = 2 * GIB;
	tell("/proc/self/statm", "131072 1000 1000 1 0 1000 0\n"); /* 512 MiB */
	CHECK_EQ(default_cap(), 768 * MIB);
	CHECK_EQ(setenv("LOCAL_WORLD_SIZE", "2", 1), 0);
	CHECK_EQ(default_cap(), 768 * MIB); /* each process has a limit of its own */
	CHECK_EQ(unsetenv("LOCAL_WORLD_SIZE"), 0);
	first = sfr__budget_take(16 * MIB);
	tell("/proc/self/statm", "327680 1000 1000 1 0 1000 0\n"); /* and that pool */
	second = sfr__budget_take(16 * MIB);
	CHECK_EQ(first, 768 * MIB);
	CHECK_EQ(second, 384 * MIB);
	sfr__budget_give(first);
	sfr__budget_give(second);
	tell("/proc/self/statm", "1048576 1000 1000 1 0 1000 0\n"); /* more than there may be */
	CHECK_EQ(default_cap(), 16 * MIB);
	as_limit.rlim_cur = RLIM_INFINITY;
	CHECK_EQ(default_cap(), 4 * GIB);
	sfr_sys = plain;
}

static uint64_t space; /* that one mapping may take */

static void *tight_mmap(void *addr, size_t len, int prot, int flags, int fd, off_t off)
{
	if (len > space) {
		errno = ENOMEM;
		return MAP_FAILED;
	}
	return mmap(addr, len, prot, flags, fd, off);
}

static void a_default_pool_is_halved_until_it_can_be_mapped(void)
{
	struct sfr_engine_opts opts = { .block_bytes = 16 * MIB,
					.nr_writers = 1,
					.max_in_flight = 1 };
	struct sfr_sys plain = sfr_sys;
	struct sfr_engine *engine;
	struct sfr_stats stats;
	uint64_t before;

	tell_8_gib_are_available();
	before = sfr_default_pool_bytes(16 * MIB);
	CHECK_EQ(before, 4 * GIB);
	sfr_sys.mmap = tight_mmap;
	space = 600 * MIB;
	CHECK_EQ(sfr_engine_new(&opts, &engine), 0);
	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK_EQ(stats.pool_bytes, 512 * MIB);
	CHECK_EQ(sfr_default_pool_bytes(16 * MIB), before - 512 * MIB);
	sfr_engine_put(engine);
	CHECK_EQ(sfr_default_pool_bytes(16 * MIB), before);
	opts.pool_bytes = GIB; /* what was asked for is had, or refused */
	CHECK_EQ(sfr_engine_new(&opts, &engine), -ENOMEM);
	opts.pool_bytes = 0;
	space = 0;
	CHECK_EQ(sfr_engine_new(&opts, &engine), -ENOMEM);
	CHECK_EQ(sfr_default_pool_bytes(16 * MIB), before);
	sfr_sys = plain;
}

int main(void)
{
	if (mkdtemp(root) == NULL)
		return CHECK_SKIPPED;
	sfr_sys.open = redirected_open;
	RUN(half_of_what_is_available_is_the_default);
	RUN(the_ranks_of_a_machine_share_it);
	RUN(a_system_that_tells_nothing_gives_one_block);
	RUN(a_v2_group_and_its_parents_limit_it);
	RUN(a_v1_group_limits_it);
	RUN(in_a_container_the_mount_is_the_group);
	RUN(default_caps_share_one_budget);
	RUN(what_pools_hold_is_not_counted_twice);
	RUN(a_child_has_a_budget_of_its_own);
	RUN(a_limit_of_address_space_leaves_at_least_half_of_itself);
	RUN(a_default_pool_is_halved_until_it_can_be_mapped);
	RUN(unreadable_files_are_no_limit);
	forget_system();
	CHECK_EQ(rmdir(root), 0);
	return check_done();
}
