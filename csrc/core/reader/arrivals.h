/* How a source reads an arriving file, whose bytes are still on their way. See arrivals.c. */
#ifndef SFR__ARRIVALS_H
#define SFR__ARRIVALS_H

#include "sfr/arrivals.h"

struct sfr__arriving;

/* Returns the arriving file with this descriptor, or NULL for any other file. The file stays open
 * until sfr__arriving_put. */
struct sfr__arriving *sfr__arriving_get(int fd);
void sfr__arriving_put(struct sfr__arriving *f); /* accepts NULL */
/* Allocates a reader's counts: for each chunk, how many of its bytes the reader has read. The
 * caller frees them. NULL: no memory. */
uint32_t *sfr__arriving_counts(const struct sfr__arriving *f);
/* Waits until the `len` bytes at `off` are in memory, and keeps them there until
 * sfr__arriving_unpin with the same range. Bytes after the end of the file are ignored. `counts`
 * are the reader's, or NULL. Returns 0, or:
 *     SFR_EAGAIN  the slice has passed
 *     SFR_EFORK   the file belongs to a parent process
 *     -EIO        the bytes cannot be fetched
 *     -EBADF      the file was closed */
int sfr__arriving_pin(struct sfr__arriving *f, const uint32_t *counts, uint64_t off, uint64_t len,
		      uint64_t slice_ns);
void sfr__arriving_unpin(struct sfr__arriving *f, uint64_t off, uint64_t len);
/* Announces that the bytes [off, end) will be read soon, so that their first SFR_ARRIVALS_WINDOW
 * chunks are fetched, except chunks that the reader has read completely. */
void sfr__arriving_ahead(struct sfr__arriving *f, const uint32_t *counts, uint64_t off,
			 uint64_t end);
/* Records that the reader with these counts has read bytes. Chunks that it has read completely may
 * lose their memory; they are fetched again if they are read again. */
void sfr__arriving_done(struct sfr__arriving *f, uint32_t *counts, uint64_t off, uint64_t len);

#endif
