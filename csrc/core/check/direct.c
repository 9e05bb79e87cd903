/* Reads whole pages of a file past the page cache.
 *
 * Reading a large file once through the page cache would evict what a training on the machine reads
 * again and again. It would also copy every byte, and believe bytes that the disk does not have. So
 * the file is opened once more, with O_DIRECT. If the system refuses that, or part of it, the page
 * cache is used, which only costs time. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h> /* snprintf */

#include "check/direct.h"
#include "base/base.h"

int sfr__direct_open(int fd)
{
	char path[32];

	(void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return sfr__fd_open(path, O_RDONLY | O_NONBLOCK | O_DIRECT, 0);
}

int sfr__direct_read(int fd, int direct_fd, char *buf, size_t len, uint64_t off)
{
	bool direct = direct_fd >= 0;
	size_t done = 0;

	while (done < len) {
		size_t want = len - done;
		ssize_t n;

		direct = direct && done % SFR_PAGE == 0; /* a short read may end anywhere */
		if (direct) /* whole pages; the last page of the file returns what it has */
			want = (size_t)sfr__round_up(want, SFR_PAGE);
		n = sfr_sys.pread(direct ? direct_fd : fd, buf + done, want, (off_t)(off + done));
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && direct && (errno == EINVAL || errno == EOPNOTSUPP)) {
			direct = false;
			continue;
		}
		if (n < 0)
			return -errno;
		if (n == 0)
			return SFR_ECORRUPT;
		done += (size_t)n;
	}
	return 0;
}
