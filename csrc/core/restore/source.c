/* Where the bytes of a file are taken from: the page cache as far as they are in it, else the disk
 * past it.
 *
 * A checkpoint that was just written, or that another rank reads too, is in the page cache, and
 * read from the disk again it would come several times as late. One that is not there is large and
 * is read once: going through the page cache costs a copy and pushes out what others read again.
 *
 * mincore tells what is there without touching anything. (preadv2 with RWF_NOWAIT tells it too, but
 * a refused read starts the kernel's readahead: asking so for a cold gigabyte read all of it into
 * the page cache, on Linux 6.18.) It answers truthfully to those who own the file or may write to
 * it, and to all others that all is there: for them the page cache reads the file.
 *
 * Where several processes read the file at about the same time, they share the page cache: who comes
 * to a page first has the disk read it, and the others wait for that.
 */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check/direct.h"
#include "restore/plan.h"
#include "base/base.h"

#define NR_PAGES (SFR__RESTORE_PIECE_MAX / SFR_PAGE)
#define WORTH_CACHE 16u /* pages: fewer in one place are not worth a call of their own */

/* The mapping that mincore asks for. One for the whole file: whoever maps or unmaps has to have the
 * process's address space to himself, and would wait for every reader that fills new memory. */
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
		(void)sfr_sys.munmap(s->map, s->map_len); /* a mapping of ours, whole */
	s->map = MAP_FAILED;
}

void sfr__source_close(struct sfr__source *s)
{
	if (s->direct_fd >= 0)
		(void)sfr__fd_close(s->direct_fd); /* nothing was written to it */
	s->direct_fd = -1;
}

/* Which pages are in the page cache; false: it cannot be told. */
static bool ask(const struct sfr__source *s, uint64_t off, size_t len, unsigned char *there)
{
	return s->map != MAP_FAILED && off + len <= s->map_len &&
	       sfr_sys.mincore((char *)s->map + off, len, there) == 0;
}

/* Pages in the page cache from `at` on. */
static size_t cached_run(const unsigned char *there, size_t at, size_t nr)
{
	size_t to = at;

	while (to < nr && (there[to] & 1) != 0)
		to++;
	return to - at;
}

/* How many pages from `at` on are to be read in the same way, and which. */
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
