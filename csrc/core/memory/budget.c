/* The default cap of a pool: how much memory a pool may use when the user sets no limit.
 *
 *     budget = (what the system leaves + what our pools hold already) / 2 / local ranks
 *     a default pool's cap = budget - the caps of other default pools, at least one block
 *
 * "What the system leaves" is the least of MemAvailable and, for the process's memory cgroup and
 * each of its parents (v1 and v2), limit - usage + inactive file pages. The kernel reclaims those
 * pages before memory runs short, and a machine that writes checkpoints has many. The memory of our
 * own pools is added first. Otherwise a second engine would subtract it twice: as used memory, and
 * as a cap already taken.
 *
 * A limit of address space (ulimit -v, which batch systems set) works differently: a reservation
 * counts against it without using memory, and it applies to this process alone. A cap is at most
 * half of what it leaves.
 *
 * Both sums are per process. Each is a count of pages in one 64-bit word together with its fork
 * generation. So a child, which has none of its parent's pools, starts from zero without a lock
 * that another thread could have held at the fork.
 *
 * A missing or unexpected file under /proc or /sys counts as no limit. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sfr/engine.h"
#include "memory/pool.h"

#define NO_LIMIT UINT64_MAX
#define PAGES_BITS 48 /* pages in the low bits, generation in the high ones */
#define PAGES_MASK ((UINT64_C(1) << PAGES_BITS) - 1)

static _Atomic uint64_t caps_taken; /* caps that default pools have taken */
static _Atomic uint64_t held;       /* memory of all pools */

static uint64_t pages_now(uint64_t word, uint64_t generation)
{
	return word >> PAGES_BITS == generation ? word & PAGES_MASK : 0;
}

static uint64_t this_generation(void)
{
	return sfr_fork_generation() & (UINT64_MAX >> PAGES_BITS);
}

static uint64_t counter_bytes(_Atomic uint64_t *counter)
{
	return pages_now(atomic_load(counter), this_generation()) * SFR_PAGE;
}

static void counter_add(_Atomic uint64_t *counter, int64_t bytes)
{
	uint64_t generation = this_generation(), old = atomic_load(counter), new;
	int64_t pages = bytes / (int64_t)SFR_PAGE;

	do
		new = ((pages_now(old, generation) + (uint64_t)pages) & PAGES_MASK) |
		      generation << PAGES_BITS;
	while (!atomic_compare_exchange_weak(counter, &old, new));
}

/* ---- the system's limits --------------------------------------------------- */

/* Reads a small file into a string, as far as the buffer goes: the keys wanted from meminfo, cgroup
 * and memory.stat are in the first pages. 0 or -errno. */
static int slurp(const char *path, char *buf, size_t size)
{
	size_t len = 0;
	int fd, rc = 0;

	fd = sfr_sys.open(AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
	if (fd < 0)
		return -errno;
	while (len < size - 1) {
		ssize_t got = sfr_sys.pread(fd, buf + len, size - 1 - len, (off_t)len);

		if (got < 0)
			rc = -errno;
		if (got <= 0)
			break;
		len += (size_t)got;
	}
	(void)sfr_sys.close(fd); /* nothing to lose: it was only read */
	buf[len] = '\0';
	return rc;
}

/* Finds the number that follows `key` at the start of a line. */
static bool find_number(const char *text, const char *key, uint64_t *value)
{
	size_t len = strlen(key);

	for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
		line += *line == '\n';
		if (strncmp(line, key, len) == 0)
			return sscanf(line + len, "%" SCNu64, value) == 1;
	}
	return false;
}

static uint64_t mem_available(void)
{
	char text[4096];
	uint64_t kib;

	if (slurp("/proc/meminfo", text, sizeof(text)) != 0 ||
	    !find_number(text, "MemAvailable:", &kib))
		return NO_LIMIT;
	return kib * 1024;
}

/* The same three values in both versions of the cgroup interface. */
struct cgroup_files {
	const char *limit, *usage, *inactive;
};
static const struct cgroup_files v1 = { "memory.limit_in_bytes", "memory.usage_in_bytes",
					"total_inactive_file " };
static const struct cgroup_files v2 = { "memory.max", "memory.current", "inactive_file " };

static bool cgroup_number(const char *dir, const char *file, const char *key, uint64_t *value)
{
	char path[PATH_MAX], text[8192];
	int len = snprintf(path, sizeof(path), "%s/%s", dir, file);

	return len > 0 && (size_t)len < sizeof(path) && slurp(path, text, sizeof(text)) == 0 &&
	       find_number(text, key, value);
}

/* Returns what one group leaves. "max" is not a number, and v1's largest number exceeds any
 * machine. */
static uint64_t group_leaves(const char *dir, const struct cgroup_files *files)
{
	uint64_t limit, usage, inactive;

	if (!cgroup_number(dir, files->limit, "", &limit) ||
	    !cgroup_number(dir, files->usage, "", &usage))
		return NO_LIMIT;
	if (cgroup_number(dir, "memory.stat", files->inactive, &inactive))
		usage -= inactive < usage ? inactive : usage;
	return usage < limit ? limit - usage : 0;
}

/* Returns the least that a group or one of its parents leaves. Inside a container `group` may be
 * the host's name for it, which does not exist below the container's mount. Then one of the
 * parents, in the end the mount itself, is the container's group. */
static uint64_t groups_leave(const char *mount, const char *group, const struct cgroup_files *files)
{
	uint64_t least = NO_LIMIT;
	char dir[PATH_MAX];
	size_t mount_len = strlen(mount);
	int len = snprintf(dir, sizeof(dir), "%s%s", mount, group);

	if (len < 0 || (size_t)len >= sizeof(dir))
		return NO_LIMIT;
	for (;;) {
		char *slash = strrchr(dir, '/');
		uint64_t leaves = group_leaves(dir, files);

		if (leaves < least)
			least = leaves;
		if (slash == NULL || slash < dir + mount_len)
			return least;
		*slash = '\0';
	}
}

/* Returns whether a line's list of controllers contains memory. */
static bool has_memory(const char *list)
{
	for (;;) {
		size_t len = strcspn(list, ",");

		if (len == strlen("memory") && strncmp(list, "memory", len) == 0)
			return true;
		if (list[len] == '\0')
			return false;
		list += len + 1;
	}
}

/* Lines of /proc/self/cgroup are "number:controllers:/group". v2's has number 0 and no
 * controllers. */
static uint64_t cgroups_leave(void)
{
	uint64_t least = NO_LIMIT, leaves;
	char text[4096], *rest = text, *line;

	if (slurp("/proc/self/cgroup", text, sizeof(text)) != 0)
		return NO_LIMIT;
	while ((line = strsep(&rest, "\n")) != NULL) {
		char *number = strsep(&line, ":"), *list = strsep(&line, ":");

		if (list == NULL || line == NULL)
			continue;
		if (*list != '\0') {
			leaves = has_memory(list) ?
					 groups_leave("/sys/fs/cgroup/memory", line, &v1) :
					 NO_LIMIT;
		} else if (strcmp(number, "0") == 0) {
			uint64_t hybrid = groups_leave("/sys/fs/cgroup/unified", line, &v2);

			leaves = groups_leave("/sys/fs/cgroup", line, &v2);
			leaves = hybrid < leaves ? hybrid : leaves;
		} else {
			leaves = NO_LIMIT;
		}
		least = leaves < least ? leaves : least;
	}
	return least;
}

/* Returns the number of ranks on this machine, which torchrun sets. */
static uint64_t local_ranks(void)
{
	const char *text = getenv("LOCAL_WORLD_SIZE");
	uint64_t nr = 0;

	if (text != NULL)
		(void)sscanf(text, "%" SCNu64, &nr); /* leaves 0 if it is not a number */
	return nr != 0 ? nr : 1;
}

/* Returns what RLIMIT_AS leaves. The first number of statm is the pages in use. */
static uint64_t address_space_left(void)
{
	uint64_t used = 0;
	struct rlimit limit;
	char text[256];

	if (sfr_sys.get_limit(RLIMIT_AS, &limit) < 0 || limit.rlim_cur == RLIM_INFINITY)
		return NO_LIMIT;
	if (slurp("/proc/self/statm", text, sizeof(text)) == 0 && find_number(text, "", &used))
		used *= SFR_PAGE;
	return used < limit.rlim_cur ? limit.rlim_cur - used : 0;
}

/* ---- the budget ---------------------------------------------------------- */

static uint64_t budget(void)
{
	uint64_t least = mem_available(), leaves = cgroups_leave();

	if (leaves < least)
		least = leaves;
	/* A system without any figures gets pools of one block: slow, but safe. */
	if (least == NO_LIMIT)
		return 0;
	return (least + counter_bytes(&held)) / 2 / local_ranks();
}

/* Both limits of a cap: the budget that default caps share, and the address space left to this
 * process. */
struct left {
	uint64_t budget, space;
};

static struct left look(void)
{
	return (struct left){ budget(), address_space_left() / 2 };
}

static uint64_t cap(struct left all, uint64_t taken, uint64_t block_bytes)
{
	uint64_t left = all.budget > taken ? all.budget - taken : 0;

	if (all.space < left)
		left = all.space;
	return left < block_bytes ? block_bytes : left / block_bytes * block_bytes;
}

uint64_t sfr_default_pool_bytes(uint64_t block_bytes)
{
	return cap(look(), counter_bytes(&caps_taken), block_bytes);
}

uint64_t sfr__budget_take(uint64_t block_bytes)
{
	uint64_t generation = this_generation(), old = atomic_load(&caps_taken), bytes, taken;
	const struct left all = look();

	do {
		taken = pages_now(old, generation);
		bytes = cap(all, taken * SFR_PAGE, block_bytes);
	} while (!atomic_compare_exchange_weak(&caps_taken, &old,
					       (taken + bytes / SFR_PAGE) | generation
										    << PAGES_BITS));
	return bytes;
}

void sfr__budget_give(uint64_t bytes)
{
	counter_add(&caps_taken, -(int64_t)bytes);
}

void sfr__budget_hold(int64_t bytes)
{
	counter_add(&held, bytes);
}
