/* A range of address space and the memory mapped there.
 *
 * A range is reserved once, without access and so without memory. Parts of it gain memory and lose
 * it again. The address space stays reserved, so an address known to a driver or to a running copy
 * is never used for something else. Memory is populated before use, because the first touch of a
 * page costs more than the copy into it.
 *
 * There is no state and no lock here. Callers ensure that no thread takes the memory of a page
 * while another thread gives memory to it.
 *
 * Shared memory consists of the pages of an unnamed file (memfd_create), mapped over the range. Its
 * rules differ from those of private memory:
 *
 *   - memory is freed by punching a hole, because unmapping a page leaves it in the file;
 *   - touching a page for which the system has no memory raises a signal, so only pages that
 *     exist are touched;
 *   - RLIMIT_FSIZE bounds the file's length, and a longer file raises a signal, too;
 *   - the file lives while any process has it open, and a forked child inherits the descriptor,
 *     so releasing the range first frees all memory of the file;
 *   - the kernel charges the memory to the process's cgroup (as shmem); the size of /dev/shm does
 *     not bound it. */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>

#include "memory/range.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

/* Returns a descriptor or -errno. */
static int make_memory_file(uint64_t len)
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
	(void)sfr_sys.close(fd); /* the file is empty */
	return rc;
}

/* Maps a new file over the range. Returns 0 or -errno; the range owns the file in both cases. */
static int map_file(struct sfr__memory_range *range)
{
	int fd = make_memory_file(range->len);

	if (fd < 0)
		return fd;
	range->file = fd;
	if (sfr_sys.mmap(range->base, (size_t)range->len, PROT_NONE,
			 MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, 0) == MAP_FAILED)
		return -errno;
	return 0;
}

/* EAGAIN means that the kernel has no memory for another mapping. It becomes -ENOMEM: elsewhere
 * -EAGAIN means that a thread could not be started. */
static int madvise_error(void)
{
	return errno == EAGAIN ? -ENOMEM : -errno;
}

int sfr__memory_set_inheritable(char *mem, size_t len, bool inherit)
{
	if (sfr_sys.madvise(mem, len, inherit ? MADV_DOFORK : MADV_DONTFORK) != 0)
		return madvise_error();
	return 0;
}

int sfr__memory_reserve(struct sfr__memory_range *range, uint64_t len, bool shared)
{
	size_t map_len = (size_t)(len + SFR__HUGE_BYTES);
	char *map;
	int rc = 0;

	*range = (struct sfr__memory_range){ 0 };
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
	/* Forked children get no page of the range: a device might write into the child's copy of a
	 * private page, and shared pages would change while the child reads them. */
	if (rc == 0)
		rc = sfr__memory_set_inheritable(map, map_len, false);
	if (rc != 0) {
		sfr__memory_release(range);
		return rc;
	}
	/* may fail, because huge pages only affect speed: some kernels have none */
	(void)sfr_sys.madvise(map, map_len, MADV_HUGEPAGE);
	return 0;
}

void sfr__memory_release(struct sfr__memory_range *range)
{
	if (range->map != NULL) {
		/* cannot fail: a whole mapping of ours */
		(void)sfr_sys.munmap(range->map, range->map_len);
		if (range->file >= 0) {
			/* If refused, the memory lives until the last descriptor is closed. */
			(void)sfr_sys.fallocate(range->file,
						FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
						(off_t)range->len);
			(void)sfr_sys.close(range->file); /* nothing is written back */
		}
	}
	*range = (struct sfr__memory_range){ 0 };
}

/* Allocates pages of the file, so that touching them raises no signal. Returns 0 or -errno. */
static int allocate_pages(const struct sfr__memory_range *range, const char *mem, size_t len)
{
	int rc;

	do
		rc = sfr_sys.fallocate(range->file, 0, (off_t)(mem - range->base), (off_t)len);
	while (rc != 0 && errno == EINTR); /* an interrupted call has allocated nothing */
	if (rc == 0)
		return 0;
	return errno == ENOSPC ? -ENOMEM : -errno;
}

int sfr__memory_make_accessible(char *mem, size_t len)
{
	return sfr_sys.mprotect(mem, len, PROT_READ | PROT_WRITE) != 0 ? -errno : 0;
}

int sfr__memory_populate(const struct sfr__memory_range *range, char *mem, size_t len)
{
	const bool shared = range->file >= 0;
	char zero;
	int rc;

	if (sfr_sys.madvise(mem, len, MADV_POPULATE_WRITE) == 0)
		return 0;
	if (shared && errno == EFAULT) /* no memory; a touch would raise a signal */
		return -ENOMEM;
	/* The pages are touched one by one if an older kernel or a sandbox does not know the advice
	 * (EINVAL, ENOSYS, EPERM), or if a signal came (EINTR). */
	if (errno != EINVAL && errno != ENOSYS && errno != EPERM && errno != EINTR)
		return madvise_error();
	rc = shared ? allocate_pages(range, mem, len) : 0;
	if (rc != 0)
		return rc;
	/* Touch each page by a write that changes no byte, even if another thread writes there: if
	 * the first byte is 0, set it to 0. */
	for (size_t off = 0; off < len; off += SFR_PAGE) {
		zero = 0;
		(void)__atomic_compare_exchange_n(mem + off, &zero, 0, false, __ATOMIC_RELAXED,
						  __ATOMIC_RELAXED);
	}
	return 0;
}

int sfr__memory_decommit(const struct sfr__memory_range *range, char *mem, size_t len)
{
	if (sfr_sys.madvise(mem, len, range->file >= 0 ? MADV_REMOVE : MADV_DONTNEED) != 0)
		return madvise_error();
	/* The memory is gone already. If mprotect is refused because there are too many mappings,
	 * the pages stay accessible, but no code touches them. */
	(void)sfr_sys.mprotect(mem, len, PROT_NONE);
	return 0;
}
