/* The functions by which a source (source.c) reads an arriving file, whose bytes are still on their
 * way. See arrivals.c. */
#ifndef SFR__ARRIVALS_H
#define SFR__ARRIVALS_H

#include "sfr/arrivals.h"

struct sfr__arriving;

/* Returns the arriving file with this descriptor, or NULL if the descriptor is of another kind of
 * file. The file stays open until sfr__arriving_put. */
struct sfr__arriving *sfr__arriving_get(int fd);
void sfr__arriving_put(struct sfr__arriving *f); /* accepts NULL */
/* Allocates a reader's counts: for each chunk, how many bytes of it the reader has read. The caller
 * frees them. NULL: no memory. */
uint32_t *sfr__arriving_counts(const struct sfr__arriving *f);
/* Waits until the `len` bytes at `off` are in memory, and keeps them there until the caller calls
 * sfr__arriving_unpin with the same range. The wait ignores bytes after the end of the file.
 * `counts` are the reader's (sfr__arriving_counts), or NULL. Returns 0; SFR_EAGAIN when the slice
 * has passed; SFR_EFORK; -EIO if the bytes cannot be fetched; -EBADF if the file was closed. */
int sfr__arriving_pin(struct sfr__arriving *f, const uint32_t *counts, uint64_t off, uint64_t len,
		      uint64_t slice_ns);
void sfr__arriving_unpin(struct sfr__arriving *f, uint64_t off, uint64_t len);
/* Announces that the bytes [off, end) will be read soon, so that the first SFR_ARRIVALS_WINDOW of
 * their chunks are fetched. Chunks that the reader has read completely are left out. */
void sfr__arriving_ahead(struct sfr__arriving *f, const uint32_t *counts, uint64_t off,
			 uint64_t end);
/* Records that the reader with these counts has read bytes, and will not read them again. The
 * memory of chunks that it has read completely may be given back to the system. If such a chunk is
 * read again, it is fetched again. */
void sfr__arriving_done(struct sfr__arriving *f, uint32_t *counts, uint64_t off, uint64_t len);

#endif
