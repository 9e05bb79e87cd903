/* Size thresholds that decide which code handles a file.
 *
 * The product never changes them. A test lowers them, so that a file of a few kilobytes is handled
 * like one larger than 4 GiB, and restores them with sfr_limits_reset. Change them only while no
 * save, check or restore is under way: each of these reads them more than once.
 */
#ifndef SFR_LIMITS_H
#define SFR_LIMITS_H

#include <stdint.h>

struct sfr_limits {
	/* The least size or offset that the writer puts into a zip64 field; at least 4096. */
	uint64_t zip64_bytes;
	/* The least number of records that the writer puts into the zip64 end record alone; at
	 * least 1. */
	uint64_t zip64_records;
	/* Bytes that a reading thread reads with one call; whole pages, 4096 to 1 MiB. */
	uint64_t reader_chunk_bytes;
	/* The same for a check that reads by itself, without threads. */
	uint64_t check_chunk_bytes;
	/* The least length of a file whose bytes are read on threads during a check. */
	uint64_t ahead_bytes;
};

extern struct sfr_limits sfr_limits;

/* Sets all limits. Returns 0, or -EINVAL when one is outside its range; then nothing changes. */
int sfr_limits_set(const struct sfr_limits *limits);
void sfr_limits_reset(void);

#endif
