/* Size thresholds that decide which code handles a file.
 *
 * Only tests change them, so that a file of a few kilobytes is handled like one larger than 4 GiB.
 * They may change only while no save, check or restore is under way.
 */
#ifndef SFR_LIMITS_H
#define SFR_LIMITS_H

#include <stdint.h>

struct sfr_limits {
	/* The writer uses zip64 fields from this size or offset on; at least 4096. */
	uint64_t zip64_bytes;
	/* The writer puts a record count of this or more only into the zip64 end record; >= 1. */
	uint64_t zip64_records;
	/* Bytes that a reading thread reads with one call; whole pages, 4096 to 1 MiB. */
	uint64_t reader_chunk_bytes;
	/* Bytes that a check without threads reads with one call; the same range. */
	uint64_t check_chunk_bytes;
	/* A check of a file of at least this length starts threads that read ahead. */
	uint64_t ahead_bytes;
};

extern struct sfr_limits sfr_limits;

/* Sets all limits. Returns 0; or -EINVAL, with nothing changed, if one is outside its range. */
int sfr_limits_set(const struct sfr_limits *limits);
void sfr_limits_reset(void);

#endif
