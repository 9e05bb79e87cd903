/* Reads a file through the page cache, directly from the disk, or from memory if its bytes are
 * still on their way.
 *
 * A load reads cached bytes from the page cache, and the rest from the disk. A checkpoint that was
 * just written, or that another rank reads too, is cached; the disk would take several times as
 * long. A checkpoint that is not cached is large and read once: the page cache would cost a copy
 * and evict what others read again. `stillframe verify` reads only from the disk, to check the
 * bytes that are really there.
 *
 * For direct reads the file is opened once more, with O_DIRECT. If the system refuses the open or a
 * read, the page cache is used.
 *
 * mincore tells what is cached, but only to users who own the file or may write to it. To all
 * others it reports everything as cached, so their reads go through the page cache. (preadv2 with
 * RWF_NOWAIT starts the kernel's readahead: on Linux 6.18 it read an uncached gigabyte into the
 * page cache.)
 *
 * A file whose bytes are still on their way (arrivals.c) is in memory. A read waits for its bytes,
 * but only for a while, so that its caller can answer signals. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h> /* snprintf */
#include <sys/mman.h>
#include <unistd.h>

#include "reader/arrivals.h"
#include "reader/reader.h"
#include "reader/source.h"
#include "base/base.h"

#define NR_PAGES (SFR__READER_CHUNK_MAX / SFR_PAGE) /* pages of the longest chunk */
#define SLICE_NS UINT64_C(50000000) /* the longest wait for bytes before SFR_EAGAIN */
#define CACHED_RUN_MIN 16u /* pages; shorter rows of cached pages are read from the disk, too */

/* Returns a descriptor of the same file, or -errno. */
static int open_direct(int fd)
{
	char path[32];

	(void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return sfr__fd_open(path, O_RDONLY | O_NONBLOCK | O_DIRECT, 0);
}

/* Maps the whole file for mincore, or leaves s->map NULL. Mapping each chunk would take the lock of
 * the address space (mmap_lock) each time, and wait for threads that handle page faults. */
static void map_file(struct sfr__source *s)
{
	struct stat st;
	void *mem;

	if (s->direct_fd < 0 || sfr_sys.fstat(s->fd, &st) < 0)
		return;
	if (st.st_uid != geteuid() && geteuid() != 0)
		return; /* mincore would report all pages as cached */
	s->map_len = (size_t)st.st_size;
	mem = sfr_sys.mmap(NULL, s->map_len, PROT_READ, MAP_SHARED, s->fd, 0);
	s->map = mem == MAP_FAILED ? NULL : mem;
}

static void close_direct(struct sfr__source *s)
{
	if (s->direct_fd >= 0 && s->fork_generation == sfr_fork_generation())
		(void)sfr__fd_close(s->direct_fd); /* nothing was written */
	s->direct_fd = -1;
}

void sfr__source_open(struct sfr__source *s, int fd, uint64_t base, enum sfr__read_way way)
{
	*s = (struct sfr__source){ .fd = fd, .base = base, .direct_fd = -1 };
	s->arriving = sfr__arriving_get(fd);
	if (s->arriving != NULL)
		s->bytes_read = sfr__arriving_new_read_counts(s->arriving);
	if (s->arriving != NULL || way == SFR__WAY_CACHE)
		return;
	if (base % SFR_PAGE != 0) /* direct reads begin at whole pages */
		return;
	if (sfr_fork_init() < 0) /* without a fork handler, a child would keep direct_fd */
		return;
	s->fork_generation = sfr_fork_generation();
	s->direct_fd = open_direct(fd);
	if (way == SFR__WAY_DISK)
		return;
	map_file(s);
	if (s->map == NULL) /* it is not known what is cached: read all through the page cache */
		close_direct(s);
}

void sfr__source_close(struct sfr__source *s)
{
	if (s->map != NULL)
		(void)sfr_sys.munmap(s->map, s->map_len); /* our own mapping, whole */
	s->map = NULL;
	close_direct(s);
	sfr__arriving_put(s->arriving);
	sfr_sys.free(s->bytes_read);
	s->arriving = NULL;
	s->bytes_read = NULL;
}

/* Reads `len` bytes through direct_fd, or through the page cache if direct_fd is negative or
 * refuses. Returns 0, -errno, or SFR_ECORRUPT at the end of the file. */
static int read_all(const struct sfr__source *s, int direct_fd, char *buf, size_t len, uint64_t off)
{
	bool direct = direct_fd >= 0;
	size_t done = 0;

	while (done < len) {
		size_t want = len - done;
		ssize_t n;

		direct = direct && done % SFR_PAGE == 0; /* a short read may end within a page */
		if (direct) /* whole pages, which `buf` has room for; the file may end earlier */
			want = (size_t)sfr__round_up(want, SFR_PAGE);
		n = sfr_sys.pread(direct ? direct_fd : s->fd, buf + done, want,
				  (off_t)(s->base + off + done));
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && direct && (errno == EINVAL || errno == EOPNOTSUPP)) {
			direct = false;
			continue;
		}
		if (n < 0)
			return -errno;
		if (n == 0) /* the end of the file */
			return SFR_ECORRUPT;
		done += (size_t)n;
	}
	return 0;
}

/* Sets bit 0 of in_cache[i] if page i of a range is cached. Returns false if that is not known. */
static bool find_cached_pages(const struct sfr__source *s, uint64_t off, size_t len,
			      unsigned char *in_cache)
{
	return s->map != NULL && off + len <= s->map_len &&
	       sfr_sys.mincore((char *)s->map + off, len, in_cache) == 0;
}

/* Returns how many of the `nr` pages are cached in a row, from page `first` on. */
static size_t count_leading_cached_pages(const unsigned char *in_cache, size_t first, size_t nr)
{
	size_t end = first;

	while (end < nr && (in_cache[end] & 1) != 0)
		end++;
	return end - first;
}

/* Returns how many of the `nr` pages, from page `first` on, to read with one read. Sets *cached to
 * whether it reads the page cache. It does so for at least CACHED_RUN_MIN cached pages, or for
 * cached pages up to the end of the range. */
static size_t pages_of_next_read(const unsigned char *in_cache, size_t first, size_t nr,
				 bool *cached)
{
	size_t nr_cached = count_leading_cached_pages(in_cache, first, nr), end = first;

	*cached = nr_cached >= CACHED_RUN_MIN || nr_cached == nr - first;
	if (*cached)
		return nr_cached;
	/* a read from the disk, up to the next row of cached pages that is long enough */
	while (end < nr && nr_cached < CACHED_RUN_MIN) {
		end += nr_cached + 1; /* a row that is too short, and the uncached page after it */
		nr_cached = count_leading_cached_pages(in_cache, end, nr);
	}
	return (end < nr ? end : nr) - first;
}

/* Keeps a range of an arriving file in memory until unpin, after waiting for its bytes for SLICE_NS
 * at most. Returns 0 or an error of sfr__arriving_wait_and_pin. For any other file returns 0. */
static int wait_and_hold_arriving_range(const struct sfr__source *s, size_t len, uint64_t off)
{
	if (s->arriving == NULL)
		return 0;
	return sfr__arriving_wait_and_pin(s->arriving, s->bytes_read, s->base + off, len, SLICE_NS);
}

static void release_arriving_range(const struct sfr__source *s, size_t len, uint64_t off)
{
	if (s->arriving != NULL)
		sfr__arriving_unpin(s->arriving, s->base + off, len);
}

/* Reads from the page cache, or from an arriving file. Returns as sfr__source_read. */
static int read_through_page_cache(const struct sfr__source *s, char *buf, size_t len, uint64_t off)
{
	int rc = wait_and_hold_arriving_range(s, len, off);

	if (rc == 0) {
		rc = read_all(s, -1, buf, len, off);
		release_arriving_range(s, len, off);
	}
	return rc;
}

int sfr__source_read(const struct sfr__source *s, char *buf, size_t len, uint64_t off)
{
	const bool is_child = s->fork_generation != sfr_fork_generation();
	const int direct_fd = is_child ? -1 : s->direct_fd; /* a child has no direct_fd */
	const size_t nr = (len + SFR_PAGE - 1) / SFR_PAGE;
	unsigned char in_cache[NR_PAGES]; /* as mincore sets it */
	int rc = 0;

	if (direct_fd < 0)
		return read_through_page_cache(s, buf, len, off);
	/* with SFR__WAY_DISK, or if it is not known what is cached: all from the disk */
	if (nr > NR_PAGES || !find_cached_pages(s, s->base + off, len, in_cache))
		return read_all(s, direct_fd, buf, len, off);
	/* one read for each row of cached pages, and one for the pages between them */
	for (size_t at = 0; at < nr && rc == 0;) {
		bool cached;
		size_t pages = pages_of_next_read(in_cache, at, nr, &cached), from = at * SFR_PAGE;
		/* the last page may be shorter */
		size_t nbytes = at + pages == nr ? len - from : pages * SFR_PAGE;

		rc = read_all(s, cached ? -1 : direct_fd, buf + from, nbytes, off + from);
		at += pages;
	}
	return rc;
}

int64_t sfr__source_read_some(const struct sfr__source *s, void *buf, size_t len, uint64_t off)
{
	int64_t got = wait_and_hold_arriving_range(s, len, off);

	if (got == 0) {
		got = sfr_fill_from_file(s->fd, buf, len, s->base + off);
		release_arriving_range(s, len, off);
	}
	return got;
}

void sfr__source_announce_read(const struct sfr__source *s, uint64_t off, uint64_t end)
{
	if (s->arriving != NULL)
		sfr__arriving_request_range(s->arriving, s->bytes_read, s->base + off,
					    s->base + end);
}

void sfr__source_discard_read_range(const struct sfr__source *s, uint64_t off, uint64_t len)
{
	if (s->arriving != NULL)
		sfr__arriving_discard_read_range(s->arriving, s->bytes_read, s->base + off, len);
}
