/* A part of a file in memory, read forward in large aligned chunks. See window.c. */
#ifndef SFR_WINDOW_H
#define SFR_WINDOW_H

#include "reader/source.h"

struct sfr__window {
	struct sfr__source source;
	char *mem;               /* as allocated */
	char *buf;               /* page-aligned address inside mem */
	size_t cap, chunk_bytes; /* the most bytes in buf; the bytes to read if fewer are wanted */
	uint64_t off;            /* offset of buf in the file, a multiple of SFR_PAGE */
	size_t len;              /* bytes in buf */
};

/* `fd`, `base` and `way` as for sfr__source_open. `cap` is the most that can be asked for plus a
 * page, or the file's length if that is less; it also bounds `chunk_bytes`.
 * -ENOMEM. */
int sfr__window_init(struct sfr__window *w, int fd, uint64_t base, enum sfr__way way, size_t cap,
		     size_t chunk_bytes);
void sfr__window_fini(struct sfr__window *w); /* a zeroed one is allowed */
/* Makes [off, off + len) of the file available, and points *out at it until the next call. *got, if
 * wanted, receives how much is available from off on, at least len. Nothing at or after `limit` is
 * used, and the range must be below it. -errno of pread; SFR_ECORRUPT if the file ends before. */
int sfr__window_get(struct sfr__window *w, uint64_t off, size_t len, uint64_t limit,
		    const unsigned char **out, size_t *got);

#endif
