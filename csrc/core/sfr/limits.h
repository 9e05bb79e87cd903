/* Size thresholds that decide which code a file meets.
 *
 * The product never changes them. A test lowers them, so that a file of a few kilobytes takes the
 * way of one past 4 GiB, and puts them back with sfr_limits_reset. Change them only while no save,
 * check or restore is under way: each of these reads them more than once.
 */
#ifndef SFR_LIMITS_H
#define SFR_LIMITS_H

#include <stdint.h>

struct sfr_limits {
	uint64_t zip64_bytes;        /* the writer puts sizes and offsets from here on into zip64
					 fields; at least 4096 */
	uint64_t zip64_records;      /* and this many records; at least 1 */
	uint64_t reader_piece_bytes; /* a thread reads at a time; 4096 to 1 MiB, whole pages */
	uint64_t check_piece_bytes;  /* a check without threads reads at a time; as above */
	uint64_t ahead_bytes;        /* a check of the bytes of so long a file reads on threads */
};

extern struct sfr_limits sfr_limits;

/* 0, or -EINVAL when a limit is outside its range; then nothing changes. */
int sfr_limits_set(const struct sfr_limits *limits);
void sfr_limits_reset(void);

#endif
