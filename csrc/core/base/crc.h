/* The implementations of CRC-32 in crc.c. This header is for the test of crc.c, which compares all
 * implementations that the CPU supports. sfr_crc32 (sfr/crc.h) uses only the fastest. */
#ifndef SFR_CRC_H
#define SFR_CRC_H

#include <stddef.h>
#include <stdint.h>

/* One implementation. Both functions return `crc` extended by `len` bytes, and `copy` also copies
 * these bytes to `dst`. */
struct sfr__crc_way {
	const char *name;
	uint32_t (*crc32)(uint32_t crc, const void *buf, size_t len);
	uint32_t (*copy)(uint32_t crc, void *dst, const void *src, size_t len);
};

/* Returns the n-th implementation that this CPU supports, slowest first, or NULL after the last.
 * Number 0 is the portable one; sfr_crc32 uses the last one. */
const struct sfr__crc_way *sfr__crc_way(size_t n);

#endif
