/* Address space and the memory behind it.
 *
 * A range is reserved once, with no access and so no memory; parts of it are given memory and
 * lose it again. The address space stays, so an address that a driver or a copy was told of never
 * becomes somebody else's.
 *
 * Memory is populated before anybody uses it: the first touch of a page costs more than the copy
 * into it, and is better taken here, on a thread that nobody waits for. Nothing here has state or
 * a lock; callers see to it that no two threads give and take memory of the same pages.
 */
#include <errno.h>
#include <sys/mman.h>

#include "memory/range.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

int sfr__memory_reserve(struct sfr__range *range, uint64_t len)
{
	size_t map_len = (size_t)(len + SFR__HUGE_BYTES);
	char *map;
	int rc;

	*range = (struct sfr__range){ 0 };
	map = sfr_sys.mmap(NULL, map_len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
			   -1, 0);
	if (map == MAP_FAILED)
		return -errno;
	/* A child that copied these pages on write would cost their memory a second time, and a
	 * device that writes into them would write past the copy. */
	if (sfr_sys.madvise(map, map_len, MADV_DONTFORK) != 0) {
		rc = -errno;
		(void)sfr_sys.munmap(map, map_len); /* a whole mapping of ours */
		return rc;
	}
	/* Only faster; a kernel built without huge pages says EINVAL. */
	(void)sfr_sys.madvise(map, map_len, MADV_HUGEPAGE);
	range->map = map;
	range->map_len = map_len;
	range->base = map + (sfr__round_up((uintptr_t)map, SFR__HUGE_BYTES) - (uintptr_t)map);
	return 0;
}

void sfr__memory_release(struct sfr__range *range)
{
	if (range->map != NULL)
		(void)sfr_sys.munmap(range->map, range->map_len); /* a whole mapping of ours */
	*range = (struct sfr__range){ 0 };
}

int sfr__memory_open(char *mem, size_t len)
{
	return sfr_sys.mprotect(mem, len, PROT_READ | PROT_WRITE) != 0 ? -errno : 0;
}

int sfr__memory_populate(char *mem, size_t len)
{
	char zero;

	if (sfr_sys.madvise(mem, len, MADV_POPULATE_WRITE) == 0)
		return 0;
	/* An older kernel or a sandbox does not know the advice; a signal ends it early. */
	if (errno != EINVAL && errno != ENOSYS && errno != EPERM && errno != EINTR)
		return -errno;
	/* A write that changes nothing, whatever another thread has put there meanwhile. */
	for (size_t off = 0; off < len; off += SFR_PAGE) {
		zero = 0;
		(void)__atomic_compare_exchange_n(mem + off, &zero, 0, false, __ATOMIC_RELAXED,
						  __ATOMIC_RELAXED);
	}
	return 0;
}

int sfr__memory_commit(char *mem, size_t len)
{
	int rc = sfr__memory_open(mem, len);

	if (rc != 0)
		return rc;
	rc = sfr__memory_populate(mem, len);
	if (rc != 0)
		/* Part of it may be there. Where the system refuses to take that back, it is
		 * used by the next commit of these pages. */
		(void)sfr__memory_decommit(mem, len);
	return rc;
}

int sfr__memory_decommit(char *mem, size_t len)
{
	if (sfr_sys.madvise(mem, len, MADV_DONTNEED) != 0)
		return -errno;
	/* The memory is gone already. Pages left accessible by a refusal (it takes a mapping entry
	 * more, of which a process has a limited number) are touched by nobody. */
	(void)sfr_sys.mprotect(mem, len, PROT_NONE);
	return 0;
}
