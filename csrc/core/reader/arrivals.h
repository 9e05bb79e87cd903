/* Reading of arriving files, whose bytes are still on their way (see arrivals.c). */
#ifndef SFR__ARRIVALS_H
#define SFR__ARRIVALS_H

#include "sfr/arrivals.h"

struct sfr__arriving_file;

/* Returns the arriving file with this descriptor, or NULL for any other file. The file stays open
 * until sfr__arriving_put. */
struct sfr__arriving_file *sfr__arriving_get(int fd);
void sfr__arriving_put(struct sfr__arriving_file *f); /* accepts NULL */
/* Allocates a reader's array `bytes_read`: for each chunk, how many of its bytes the reader has
 * read. The caller frees the array. Returns NULL if there is no memory. */
uint32_t *sfr__arriving_new_read_counts(const struct sfr__arriving_file *f);
/* Waits until the `len` bytes at `off` are in memory, and keeps them there until
 * sfr__arriving_unpin with the same range. Bytes after the end of the file are ignored.
 * `bytes_read` is the reader's array, or NULL. Returns 0, or:
 *     SFR_EAGAIN  the slice has passed
 *     SFR_EFORK   the file belongs to a parent process
 *     -EIO        the bytes cannot be fetched
 *     -EBADF      the file was closed */
int sfr__arriving_wait_and_pin(struct sfr__arriving_file *f, const uint32_t *bytes_read,
			       uint64_t off, uint64_t len, uint64_t slice_ns);
void sfr__arriving_unpin(struct sfr__arriving_file *f, uint64_t off, uint64_t len);
/* Announces that the bytes [off, end) will be read soon. Their first SFR_ARRIVALS_WINDOW chunks are
 * fetched, except chunks that the reader has already read completely. */
void sfr__arriving_request_range(struct sfr__arriving_file *f, const uint32_t *bytes_read,
				 uint64_t off, uint64_t end);
/* Adds the bytes [off, off + len) to the reader's array. Chunks that the reader has read completely
 * may lose their memory; if they are read again, they are fetched again. Does nothing if the array
 * is NULL. */
void sfr__arriving_discard_read_range(struct sfr__arriving_file *f, uint32_t *bytes_read,
				      uint64_t off, uint64_t len);

#endif
