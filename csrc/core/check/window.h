/* A part of a file in memory, read forward in large aligned chunks. See window.c. */
#ifndef SFR_WINDOW_H
#define SFR_WINDOW_H

#include <stddef.h>
#include <stdint.h>

struct sfr__ahead;

struct sfr__window {
	int fd;
	unsigned char *mem; /* as allocated */
	unsigned char *buf; /* page-aligned address inside mem */
	size_t cap, piece;  /* `piece`: bytes to read if fewer are asked for */
	uint64_t off;       /* offset of buf in the file, a multiple of SFR_PAGE */
	size_t len;
	struct sfr__ahead *ahead; /* answers forward requests; NULL if there is no read-ahead */
};

/* `cap` is the most that can be asked for plus a page, or the file's length if that is less; it
 * also bounds `piece`, the bytes read at a time. -ENOMEM. */
int sfr__window_init(struct sfr__window *w, int fd, size_t cap, size_t piece);
void sfr__window_fini(struct sfr__window *w); /* a zeroed one is allowed */
/* Makes [off, off + len) of the file available, and points *out at it until the next call. *got, if
 * wanted, receives how much is available from off on, at least len. Nothing at or after `limit` is
 * read, and the range must be below it. -errno of pread; SFR_ECORRUPT if the file ends before. */
int sfr__window_get(struct sfr__window *w, uint64_t off, size_t len, uint64_t limit,
		    const unsigned char **out, size_t *got);

#endif
