/* Reads a file front to back on threads of its own, ahead of the caller that uses the bytes. See
 * ahead.c. */
#ifndef SFR_AHEAD_H
#define SFR_AHEAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SFR__AHEAD_PIECE_MAX (2u << 20) /* sfr_limits may ask for less */
#define SFR__AHEAD_MOST (3u << 16)      /* most bytes that one get may ask for */

struct sfr__ahead;

/* Begins to read [0, end) of the file; `direct`: past the page cache where the file system can.
 * `fd` stays the caller's, and open until the stop. -errno if there is no memory or no thread. */
int sfr__ahead_start(int fd, uint64_t end, bool direct, struct sfr__ahead **out);
/* Whether a get of `off` goes forward, and this process made the object. */
bool sfr__ahead_can(const struct sfr__ahead *a, uint64_t off, uint64_t limit);
/* As sfr__window_get. */
int sfr__ahead_get(struct sfr__ahead *a, uint64_t off, size_t len, const unsigned char **out,
		   size_t *got);
/* Waits for the reads in flight, at most one a thread. NULL is allowed. */
void sfr__ahead_stop(struct sfr__ahead *a);

#endif
