/* Reading a part of a file into memory that somebody has just allocated.
 *
 * A gigabyte of new memory is a quarter of a million page faults, taken one by one inside the
 * copy out of the page cache; they cost as much as the copy itself. A piece's faults are asked
 * for in one call before it is read, which costs less; and a piece is short enough that its new
 * pages, zeroed by the kernel, are still in a core's own cache when they are written.
 *
 * No huge pages. Faults of the heap cannot bring them (the allocator's headers have touched every
 * one before), and with MADV_COLLAPSE they are a sixth of the cost where the kernel has them at hand
 * (0.03 s of a processor for half a gigabyte in place of 0.19). But nobody can know before whether
 * it has, or compacts memory first; and the host of a virtual machine takes free ones back, so that
 * each costs the guest several times as much as its 512 small ones (0.93 s). Where the kernel does not know
 * the advice, the read takes the faults as it always did.
 */
#include <errno.h>
#include <sys/mman.h>

#include "check/check.h"
#include "base/base.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define PIECE (1u << 20)
#define WORTH_ADVICE (256u << 10) /* below, the memory is mostly not new */

/* The page that a piece shares with the piece before has been written to. */
void sfr__populate(char *buf, size_t len)
{
	char *from = buf + (SFR_PAGE - (uintptr_t)buf % SFR_PAGE) % SFR_PAGE;
	char *to = buf + len - (uintptr_t)(buf + len) % SFR_PAGE;

	if (from < to)
		(void)sfr_sys.madvise(from, (size_t)(to - from), MADV_POPULATE_WRITE); /* see top */
}

int64_t sfr_fill(int fd, void *buf, size_t len, uint64_t off)
{
	size_t done = 0, prepared = len < WORTH_ADVICE ? len : 0;

	while (done < len) {
		size_t want = len - done < PIECE ? len - done : PIECE;
		ssize_t n;

		if (done + want > prepared) {
			sfr__populate((char *)buf + prepared, done + want - prepared);
			prepared = done + want;
		}
		n = sfr_sys.pread(fd, (char *)buf + done, want, (off_t)(off + done));
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		if (n == 0)
			break;
		done += (size_t)n;
	}
	return (int64_t)done;
}
