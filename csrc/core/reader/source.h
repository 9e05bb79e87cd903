/* Reads a file through the page cache, directly from the disk, or from memory if its bytes are
 * still on their way. */
#ifndef SFR_SOURCE_H
#define SFR_SOURCE_H

#include <stddef.h>
#include <stdint.h>

#include "base/base.h"

/* Where bytes come from. Reads that O_DIRECT refuses go through the page cache. */
enum sfr__read_way {
	SFR__WAY_CACHE,  /* the page cache */
	SFR__WAY_DISK,   /* the disk */
	SFR__WAY_EITHER, /* the page cache for bytes that it has, the disk for others */
};

struct sfr__arriving_file;

struct sfr__source {
	struct sfr__arriving_file *arriving; /* NULL unless the file's bytes are on their way */
	uint32_t *bytes_read; /* of each chunk of `arriving`; NULL: there is no memory for this */
	int fd;               /* the caller's */
	int direct_fd;        /* the same file opened with O_DIRECT; negative: none */
	uint64_t base;        /* offset in the file of the source's first byte */
	void *map;            /* the whole file, mapped for mincore; NULL without SFR__WAY_EITHER */
	size_t map_len;
	uint64_t fork_generation; /* a child has no direct_fd: the fork handler has closed it */
};

/* Prepares to read a file. `fd` stays the caller's and must stay open. The offsets passed to the
 * functions below count from `base`. If `base` is not a multiple of a page, everything is read
 * through the page cache. */
void sfr__source_open(struct sfr__source *s, int fd, uint64_t base, enum sfr__read_way way);
void sfr__source_close(struct sfr__source *s); /* accepts one that is all zero */
/* Reads `len` bytes at `off`. Unless the way is SFR__WAY_CACHE, `off` and the address `buf` are
 * multiples of a page, and the rest of the last page of `buf` may be written to. Returns 0, or:
 *     -errno
 *     SFR_ECORRUPT  the file ends before
 *     SFR_EAGAIN    the bytes are still on their way: call again */
int sfr__source_read(const struct sfr__source *s, char *buf, size_t len, uint64_t off);
/* Reads up to `len` bytes at any offset, through the page cache. Returns their number, -errno, or
 * SFR_EAGAIN as above. */
int64_t sfr__source_read_some(const struct sfr__source *s, void *buf, size_t len, uint64_t off);
/* Announce that the bytes [off, end) will be read soon, or that `len` bytes at `off` were read and
 * will not be read again. Do nothing unless the file's bytes are on their way. */
void sfr__source_announce_read(const struct sfr__source *s, uint64_t off, uint64_t end);
void sfr__source_discard_read_range(const struct sfr__source *s, uint64_t off, uint64_t len);

/* Reads [off, off + len) of a file into new memory. Returns the bytes read, fewer than `len` only
 * at the end of the file, or -errno. */
int64_t sfr_fill_from_file(int fd, void *buf, size_t len, uint64_t off);
/* Returns the first address from `mem` on that is a multiple of a page. */
static inline char *sfr__round_up_to_page(char *mem)
{
	return mem + (sfr__round_up((uintptr_t)mem, SFR_PAGE) - (uintptr_t)mem);
}
/* Populates the pages that are entirely in [buf, buf + len) with one call, so that writing to them
 * takes no page faults. */
void sfr__prefault_pages(char *buf, size_t len);

#endif
