/* Address space and the memory behind it.
 *
 * A range is reserved once, with no access and so no memory; parts of it are given memory and
 * lose it again. The address space stays, so an address that a driver or a copy was told of never
 * becomes somebody else's.
 *
 * Memory is populated before anybody uses it: the first touch of a page costs more than the copy
 * into it, and is better taken here, on a thread that nobody waits for. Nothing here has state or
 * a lock; callers see to it that no two threads give and take memory of the same pages.
 *
 * Shared memory is the pages of an unnamed file (memfd_create), mapped at the same place: one
 * descriptor, whose holders can map any part of it. It differs where a file does:
 *
 *   - memory goes by punching a hole: to unmap a page would leave it in the file;
 *   - a page that the system has no memory for is a signal when it is touched, so none is touched
 *     that is not there;
 *   - RLIMIT_FSIZE bounds its length, and going beyond it is a signal too;
 *   - it lives as long as anybody has it open: a forked child has the descriptor, without having
 *     asked for it, so the end of the range takes all memory out of the file first.
 *
 * It counts as the process's in its cgroup (as shmem), and lies in no mounted file system: the size
 * of /dev/shm, which containers keep small, does not bound it.
 */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>

#include "memory/range.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

/* A file as long as the range. The descriptor, or -errno. */
static int make_file(uint64_t len)
{
	struct rlimit limit;
	int fd, rc;

	if (sfr_sys.get_limit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < len)
		return -EFBIG;
	fd = sfr_sys.memfd("stillframe", MFD_CLOEXEC);
	if (fd < 0)
		return -errno;
	if (sfr_sys.ftruncate(fd, (off_t)len) == 0)
		return fd;
	rc = -errno;
	(void)sfr_sys.close(fd); /* an empty file */
	return rc;
}

static int map_file(struct sfr__range *range)
{
	int fd = make_file(range->len);

	if (fd < 0)
		return fd;
	range->file = fd;
	if (sfr_sys.mmap(range->base, (size_t)range->len, PROT_NONE,
			 MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, 0) == MAP_FAILED)
		return -errno;
	return 0;
}

/* The kernel says EAGAIN, too, where it has no memory for a mapping more (madvise(2)): to everybody
 * else here that means a thread (errors.c). */
static int refused(void)
{
	return errno == EAGAIN ? -ENOMEM : -errno;
}

int sfr__memory_inherit(char *mem, size_t len, bool yes)
{
	return sfr_sys.madvise(mem, len, yes ? MADV_DOFORK : MADV_DONTFORK) != 0 ? refused() : 0;
}

int sfr__memory_reserve(struct sfr__range *range, uint64_t len, bool shared)
{
	size_t map_len = (size_t)(len + SFR__HUGE_BYTES);
	char *map;
	int rc = 0;

	*range = (struct sfr__range){ 0 };
	map = sfr_sys.mmap(NULL, map_len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
			   -1, 0);
	if (map == MAP_FAILED)
		return -errno;
	range->map = map;
	range->map_len = map_len;
	range->base = map + (sfr__round_up((uintptr_t)map, SFR__HUGE_BYTES) - (uintptr_t)map);
	range->len = len;
	range->file = -1;
	if (shared)
		rc = map_file(range);
	/* A child that copied these pages on write would cost their memory a second time, and a
	 * device that writes into them would write past the copy; shared ones it would have while
	 * they become somebody else's. */
	if (rc == 0)
		rc = sfr__memory_inherit(map, map_len, false);
	if (rc != 0) {
		sfr__memory_release(range);
		return rc;
	}
	/* Only faster; a kernel built without huge pages says EINVAL. */
	(void)sfr_sys.madvise(map, map_len, MADV_HUGEPAGE);
	return 0;
}

void sfr__memory_release(struct sfr__range *range)
{
	if (range->map != NULL) {
		(void)sfr_sys.munmap(range->map, range->map_len); /* a whole mapping of ours */
		if (range->file >= 0) {
			/* Where that is refused, the memory goes with the last who has it open. */
			(void)sfr_sys.fallocate(range->file,
						FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
						(off_t)range->len);
			(void)sfr_sys.close(range->file); /* nothing is written back */
		}
	}
	*range = (struct sfr__range){ 0 };
}

/* Has the file take pages for what is about to be touched. 0 or -errno. */
static int allocate(const struct sfr__range *range, const char *mem, size_t len)
{
	int rc;

	do
		rc = sfr_sys.fallocate(range->file, 0, (off_t)(mem - range->base), (off_t)len);
	while (rc != 0 && errno == EINTR); /* then it has taken none */
	return rc == 0 ? 0 : errno == ENOSPC ? -ENOMEM : -errno;
}

int sfr__memory_open(char *mem, size_t len)
{
	return sfr_sys.mprotect(mem, len, PROT_READ | PROT_WRITE) != 0 ? -errno : 0;
}

int sfr__memory_populate(const struct sfr__range *range, char *mem, size_t len)
{
	const bool shared = range->file >= 0;
	char zero;
	int rc;

	if (sfr_sys.madvise(mem, len, MADV_POPULATE_WRITE) == 0)
		return 0;
	if (shared && errno == EFAULT) /* a touch would be a signal: there is no memory */
		return -ENOMEM;
	/* An older kernel or a sandbox does not know the advice; a signal ends it early. */
	if (errno != EINVAL && errno != ENOSYS && errno != EPERM && errno != EINTR)
		return refused();
	rc = shared ? allocate(range, mem, len) : 0;
	if (rc != 0)
		return rc;
	/* A write that changes nothing, whatever another thread has put there meanwhile. */
	for (size_t off = 0; off < len; off += SFR_PAGE) {
		zero = 0;
		(void)__atomic_compare_exchange_n(mem + off, &zero, 0, false, __ATOMIC_RELAXED,
						  __ATOMIC_RELAXED);
	}
	return 0;
}

int sfr__memory_decommit(const struct sfr__range *range, char *mem, size_t len)
{
	if (sfr_sys.madvise(mem, len, range->file >= 0 ? MADV_REMOVE : MADV_DONTNEED) != 0)
		return refused();
	/* The memory is gone already. Pages left accessible by a refusal (it takes a mapping entry
	 * more, of which a process has a limited number) are touched by nobody. */
	(void)sfr_sys.mprotect(mem, len, PROT_NONE);
	return 0;
}
