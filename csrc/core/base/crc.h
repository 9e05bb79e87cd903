/* The ways in which crc.c computes a CRC, for its test, which also covers those that a faster one
 * hides on this machine. Everyone else calls sfr_crc32 (sfr/crc.h). */
#ifndef SFR_CRC_H
#define SFR_CRC_H

#include <stddef.h>
#include <stdint.h>

struct sfr__crc_way {
	const char *name;
	uint32_t (*crc32)(uint32_t crc, const void *buf, size_t len);
	uint32_t (*copy)(uint32_t crc, void *dst, const void *src, size_t len);
};

/* Returns the n-th way this CPU supports, slowest first, or NULL after the last. 0 is the portable
 * one, and the last one serves sfr_crc32. */
const struct sfr__crc_way *sfr__crc_way(size_t n);

#endif
