/* A range of a file in memory, read forward in large aligned chunks. */
#ifndef SFR_WINDOW_H
#define SFR_WINDOW_H

#include "reader/source.h"

struct sfr__window {
	struct sfr__source source;
	char *mem;          /* the allocation, which contains buf */
	char *buf;          /* the bytes of the file; page aligned */
	size_t cap;         /* bytes that buf has room for */
	size_t chunk_bytes; /* bytes to read at a time, unless a call needs more */
	uint64_t off; /* offset in the file of the first byte in buf, a multiple of SFR_PAGE */
	size_t len;   /* bytes of the file in buf */
};

/* Makes an empty window. `fd`, `base` and `way` are those of sfr__source_open. `cap` is the largest
 * `len` for sfr__window_get plus a page, or the file's length if that is less. `chunk_bytes` is at
 * most `cap`, unless `cap` is the file's length. Returns 0 or -ENOMEM. */
int sfr__window_init(struct sfr__window *w, int fd, uint64_t base, enum sfr__read_way way,
		     size_t cap, size_t chunk_bytes);
void sfr__window_fini(struct sfr__window *w); /* accepts one that is all zero */
/* Sets *out to the address of the bytes [off, off + len) of the file, which is valid until the next
 * call. Sets *avail, unless it is NULL, to how many bytes there are in memory from `off` on: at
 * least `len`. Reads no byte from offset `limit` on; off + len <= limit. Returns 0 or an error of
 * sfr__source_read. */
int sfr__window_get(struct sfr__window *w, uint64_t off, size_t len, uint64_t limit,
		    const unsigned char **out, size_t *avail);

#endif
