/* A part of a file in memory, read forward in big aligned pieces. See window.c. */
#ifndef SFR_WINDOW_H
#define SFR_WINDOW_H

#include <stddef.h>
#include <stdint.h>

struct sfr__ahead;

struct sfr__window {
	int fd;
	unsigned char *mem; /* as allocated */
	unsigned char *buf; /* in it, page aligned */
	size_t cap, piece;  /* `piece`: how much to read where less is asked for */
	uint64_t off;       /* of buf in the file, a multiple of SFR_PAGE */
	size_t len;
	struct sfr__ahead *ahead; /* reads for it what goes forward; NULL: nobody does */
};

/* `cap`: the most that can be asked for plus a page, or the file's length if that is less; then
 * `piece` is what is read at a time, at most. -ENOMEM. */
int sfr__window_init(struct sfr__window *w, int fd, size_t cap, size_t piece);
void sfr__window_fini(struct sfr__window *w); /* zeroed is fine */
/* Makes [off, off + len) of the file present and points *out at it, until the next call; *got (if
 * wanted) is how much is there from off on, at least len. Nothing at `limit` or behind is asked of
 * the file, and the range lies below it. -errno of pread; SFR_ECORRUPT: the file ends before. */
int sfr__window_get(struct sfr__window *w, uint64_t off, size_t len, uint64_t limit,
		    const unsigned char **out, size_t *got);

#endif
