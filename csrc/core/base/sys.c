/* The plain system-call table, and helpers that call it.
 *
 * The table is not atomic: only a test writes it, while no thread is inside the core. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h> /* rename */
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sfr/crc.h"
#include "base/base.h"

#define NS_PER_S 1000000000u
#ifndef RENAME_EXCHANGE
#define RENAME_EXCHANGE (1 << 1)
#endif
/* The longest that sfr__cond_wait sleeps without a wake-up. Tests that look for missing wake-ups
 * set this to an hour. */
#ifndef SFR_WAKE_UP_NS
#define SFR_WAKE_UP_NS NS_PER_S
#endif

static int plain_open(int dir, const char *name, int flags, mode_t mode)
{
	return openat(dir, name, flags, mode);
}

static int plain_lstat(int dir, const char *name, struct stat *st)
{
	return fstatat(dir, name, st, AT_SYMLINK_NOFOLLOW);
}

static int plain_rename(int dir, const char *from, const char *to)
{
	return renameat(dir, from, dir, to);
}

/* Makes the system call itself, because the C library has renameat2 only since 2.28. */
static int plain_exchange(int dir, const char *one, const char *other)
{
	return (int)syscall(SYS_renameat2, dir, one, dir, other, RENAME_EXCHANGE);
}

static int plain_unlink(int dir, const char *name)
{
	return unlinkat(dir, name, 0);
}

static int plain_set_flags(int fd, int flags)
{
	return fcntl(fd, F_SETFL, flags);
}

/* With the id of a thread, Linux sets the nice value of that thread alone. */
static int plain_set_nice(int nice_value)
{
	return setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), nice_value);
}

static int plain_set_slack(unsigned long ns)
{
	return prctl(PR_SET_TIMERSLACK, ns, 0, 0, 0);
}

static int plain_set_affinity(const cpu_set_t *cpus)
{
	return sched_setaffinity(0, sizeof(*cpus), cpus);
}

static int plain_get_limit(int resource, struct rlimit *limit)
{
	return getrlimit((__rlimit_resource_t)resource, limit);
}

struct sfr_sys sfr_sys = {
	.open = plain_open,
	.close = close,
	.pread = pread,
	.pwrite = pwrite,
	.fdatasync = fdatasync,
	.fsync = fsync,
	.fallocate = fallocate,
	.ftruncate = ftruncate,
	.flock = flock,
	.set_flags = plain_set_flags,
	.fstat = fstat,
	.lstat = plain_lstat,
	.realpath = realpath,
	.faccessat = faccessat,
	.mkdir = mkdirat,
	.rename = plain_rename,
	.exchange = plain_exchange,
	.unlink = plain_unlink,
	.rmdir = rmdir,
	.opendir = opendir,
	.readdir = readdir,
	.closedir = closedir,
	.memfd = memfd_create,
	.mmap = mmap,
	.munmap = munmap,
	.mprotect = mprotect,
	.madvise = madvise,
	.mincore = mincore,
	.get_limit = plain_get_limit,
	.malloc = malloc,
	.calloc = calloc,
	.realloc = realloc,
	.free = free,
	.thread_create = pthread_create,
	.thread_join = pthread_join,
	.set_nice = plain_set_nice,
	.set_slack = plain_set_slack,
	.set_affinity = plain_set_affinity,
	.clock_gettime = clock_gettime,
	.capture_copy = sfr__copy_bypassing_caches,
	.lane_copy = sfr_crc32_copy,
};

uint64_t sfr__now_ns(void)
{
	struct timespec ts = { 0, 0 };

	(void)sfr_sys.clock_gettime(CLOCK_MONOTONIC, &ts); /* this clock always exists on Linux */
	return (uint64_t)ts.tv_sec * NS_PER_S + (uint64_t)ts.tv_nsec;
}

uint64_t sfr__deadline(uint64_t slice_ns)
{
	uint64_t now;

	if (slice_ns == SFR_FOREVER)
		return SFR_FOREVER;
	now = sfr__now_ns();
	/* a sum that would overflow means no limit */
	return slice_ns >= SFR_FOREVER - now ? SFR_FOREVER : now + slice_ns;
}

uint64_t sfr__time_left(uint64_t deadline_ns)
{
	uint64_t now;

	if (deadline_ns == SFR_FOREVER)
		return SFR_FOREVER;
	now = sfr__now_ns();
	return deadline_ns > now ? deadline_ns - now : 0;
}

int sfr__write_all(int fd, const char *bytes, size_t len, uint64_t off, size_t *done)
{
	int stalled = 0; /* calls in a row without progress */

	for (*done = 0; *done < len;) {
		ssize_t put = sfr_sys.pwrite(fd, bytes + *done, len - *done, (off_t)(off + *done));

		if (put == 0) /* pwrite wrote nothing and reported no error */
			return -EIO;
		if (put > 0) {
			*done += (size_t)put;
			stalled = 0;
		} else if (errno != EINTR || ++stalled == SFR__EINTR_TRIES) {
			return -errno;
		}
	}
	return 0;
}

char *sfr__text_copy(const char *text)
{
	size_t len = strlen(text) + 1;
	char *copy = sfr_sys.malloc(len);

	if (copy)
		memcpy(copy, text, len);
	return copy;
}

int sfr__cond_init(pthread_cond_t *cond)
{
	pthread_condattr_t attr;
	int rc = pthread_condattr_init(&attr);

	if (rc != 0)
		return -rc;
	rc = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	if (rc == 0)
		rc = pthread_cond_init(cond, &attr);
	(void)pthread_condattr_destroy(&attr); /* cannot fail on a valid object */
	return -rc;
}

/* Returns 0 after SFR_WAKE_UP_NS even without a wake-up, because glibc can lose a wake-up (bug
 * 25847). So every caller waits in a loop and checks its condition each time. */
int sfr__cond_wait(pthread_cond_t *cond, struct sfr__mutex *mu, uint64_t deadline_ns)
{
	uint64_t now = sfr__now_ns(), until = now + SFR_WAKE_UP_NS;
	struct timespec ts;
	int rc;

	sfr__lock_check_holds_only(mu->rank);
	/* The kernel would add its timer slack of 50 us to a deadline in the past. */
	if (deadline_ns <= now)
		return SFR_EAGAIN;
	if (deadline_ns < until)
		until = deadline_ns;
	ts.tv_sec = (time_t)(until / NS_PER_S);
	ts.tv_nsec = (long)(until % NS_PER_S);
	rc = pthread_cond_timedwait(cond, &mu->mu, &ts);
	/* a time-out before the deadline only ends a sleep of SFR_WAKE_UP_NS */
	return rc == ETIMEDOUT && until == deadline_ns ? SFR_EAGAIN : 0;
}
