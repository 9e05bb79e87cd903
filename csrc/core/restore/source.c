/* Reads a file from the page cache where it is cached, else past it from the disk.
 *
 * A checkpoint that was just written, or that another rank reads too, is in the page cache; reading
 * it from the disk again would take several times as long. A checkpoint that is not cached is large
 * and read once: going through the page cache would cost a copy and evict what others read again.
 *
 * mincore tells what is cached without reading anything. It tells the truth to users who own the
 * file or may write to it. To all others it reports everything as cached, and they read through the
 * page cache. (preadv2 with RWF_NOWAIT tells it too, but a refused read starts the kernel's
 * readahead. On Linux 6.18, asking so about a gigabyte that was not cached read all of it into the
 * page cache.)
 *
 * Processes that read the file at about the same time share the page cache: the first to need a
 * page reads it from the disk, and the others wait for that. */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check/direct.h"
#include "restore/plan.h"
#include "base/base.h"

#define NR_PAGES (SFR__RESTORE_PIECE_MAX / SFR_PAGE)
#define WORTH_CACHE 16u /* pages; fewer cached pages in a row are not worth a call of their own */

/* The mapping for mincore covers the whole file. To map or unmap takes the process's address space
 * exclusively, and would wait for every reader that fills new memory. */
static void map(struct sfr__source *s)
{
	struct stat st;

	s->map = MAP_FAILED;
	if (s->direct_fd < 0 || sfr_sys.fstat(s->fd, &st) < 0)
		return;
	if (st.st_uid != geteuid() && geteuid() != 0)
		return;
	s->map_len = (size_t)st.st_size;
	s->map = sfr_sys.mmap(NULL, s->map_len, PROT_READ, MAP_SHARED, s->fd, 0);
}

void sfr__source_open(struct sfr__source *s, int fd, bool shared)
{
	s->fd = fd;
	s->direct_fd = shared ? -1 : sfr__direct_open(fd);
	map(s);
}

void sfr__source_unmap(struct sfr__source *s)
{
	if (s->map != MAP_FAILED)
		(void)sfr_sys.munmap(s->map, s->map_len); /* our own mapping, whole */
	s->map = MAP_FAILED;
}

void sfr__source_close(struct sfr__source *s)
{
	if (s->direct_fd >= 0)
		(void)sfr__fd_close(s->direct_fd); /* nothing was written to it */
	s->direct_fd = -1;
}

/* Gets the pages that are cached. False if that is not known. */
static bool ask(const struct sfr__source *s, uint64_t off, size_t len, unsigned char *there)
{
	return s->map != MAP_FAILED && off + len <= s->map_len &&
	       sfr_sys.mincore((char *)s->map + off, len, there) == 0;
}

/* Counts the cached pages from `at` on. */
static size_t cached_run(const unsigned char *there, size_t at, size_t nr)
{
	size_t to = at;

	while (to < nr && (there[to] & 1) != 0)
		to++;
	return to - at;
}

/* Returns how many pages from `at` on are read in the same way, and which way. */
static size_t alike(const unsigned char *there, size_t at, size_t nr, bool *cached)
{
	size_t run = cached_run(there, at, nr), to = at;

	*cached = run >= WORTH_CACHE || run == nr - at;
	if (*cached)
		return run;
	for (; to < nr && run < WORTH_CACHE; run = cached_run(there, to, nr))
		to += run + 1;
	return (to < nr ? to : nr) - at;
}

int sfr__source_read(const struct sfr__source *s, char *buf, size_t len, uint64_t off)
{
	const size_t nr = (len + SFR_PAGE - 1) / SFR_PAGE;
	const int direct_fd = s->map != MAP_FAILED ? s->direct_fd : -1;
	unsigned char there[NR_PAGES];
	int rc = 0;

	if (nr > NR_PAGES || !ask(s, off, len, there))
		return sfr__direct_read(s->fd, direct_fd, buf, len, off);
	for (size_t at = 0; at < nr && rc == 0;) {
		bool cached;
		size_t pages = alike(there, at, nr, &cached), from = at * SFR_PAGE;
		size_t some = at + pages == nr ? len - from : pages * SFR_PAGE;

		rc = sfr__direct_read(s->fd, cached ? -1 : s->direct_fd, buf + from, some,
				      off + from);
		at += pages;
	}
	return rc;
}
