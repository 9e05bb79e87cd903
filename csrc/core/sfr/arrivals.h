/* Arriving files, whose bytes are fetched when they are read. See reader/arrivals.c.
 *
 *     sfr_arrivals_new(&group);
 *     fd = sfr_arrivals_open(group, len, chunk, &number);     checks and restores read this file
 *
 *     on the threads that fetch:
 *     while (sfr_arrivals_next(group, SFR_FOREVER, &wanted) == 0)
 *             sfr_arrivals_put(group, wanted.number, wanted.off, bytes, wanted.len);
 *
 *     sfr_arrivals_end(group);                                the threads that fetch return
 *     sfr_arrivals_free(group);
 *
 * Any thread may call these functions. In a forked child a group has no files, and its calls return
 * SFR_EFORK. */
#ifndef SFR_ARRIVALS_H
#define SFR_ARRIVALS_H

#include <stddef.h>
#include <stdint.h>

/* How many chunks are fetched ahead of a reader. While more chunks than this are in memory, those
 * that were read completely are freed. */
#define SFR_ARRIVALS_WINDOW 8u

struct sfr_arrivals; /* a group of files that the same threads fetch */

/* Bytes of a file that a reader waits for. */
struct sfr_arrivals_wanted_range {
	uint64_t number;   /* identifies the file; sfr_arrivals_open has returned it */
	uint64_t off, len; /* the range in the file */
};

int sfr_arrivals_new(struct sfr_arrivals **out); /* 0 or -ENOMEM */
/* Makes a file of `len` bytes, fetched `chunk` bytes at a time (whole pages). *number identifies
 * it. Returns a descriptor, which the group closes, or -errno, SFR_EFORK or SFR_ECLOSED. */
int sfr_arrivals_open(struct sfr_arrivals *group, uint64_t len, uint64_t chunk, uint64_t *number);
/* Waits until a reader needs bytes that no thread is fetching. Returns 0 if a reader does: then the
 * caller must fetch them, and call sfr_arrivals_put or sfr_arrivals_fail. Else returns SFR_EAGAIN,
 * SFR_EFORK, or SFR_ECLOSED when the group has ended. */
int sfr_arrivals_next(struct sfr_arrivals *group, uint64_t slice_ns,
		      struct sfr_arrivals_wanted_range *out);
/* Hands over the bytes that sfr_arrivals_next has asked for. Returns 0, or:
 *
 *   SFR_ECLOSED    nobody needs the bytes any more
 *   -EINVAL        other bytes were asked for
 *   other -errno   the bytes could not be written to memory
 *   SFR_EFORK
 *
 * After any -errno the file has failed, as with sfr_arrivals_fail. */
int sfr_arrivals_put(struct sfr_arrivals *group, uint64_t number, uint64_t off, const void *bytes,
		     size_t len);
/* Fails the file: every wait for its bytes, now or later, ends with -EIO. */
void sfr_arrivals_fail(struct sfr_arrivals *group, uint64_t number);
/* Closes a file, once nothing in the core reads it any more. */
void sfr_arrivals_close(struct sfr_arrivals *group, uint64_t number);
/* Closes all files of the group. A waiting sfr_arrivals_next returns SFR_ECLOSED. */
void sfr_arrivals_end(struct sfr_arrivals *group);
void sfr_arrivals_free(struct sfr_arrivals *group); /* ends the group first; accepts NULL */

/* Waits until all bytes of an arriving file have been fetched, and keeps them in memory. Returns 0,
 * SFR_EAGAIN, -EIO or SFR_EFORK. For any other descriptor returns 0 at once. */
int sfr_arrivals_wait_for_whole_file(int fd, uint64_t slice_ns);

#endif
