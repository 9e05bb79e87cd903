/* The implementations of CRC-32 in crc.c, for the test that compares them. */
#ifndef SFR_CRC_H
#define SFR_CRC_H

#include <stddef.h>
#include <stdint.h>

/* One implementation. The functions do the same as sfr_crc32 and sfr_crc32_copy. */
struct sfr__crc_impl {
	const char *name;
	uint32_t (*crc32)(uint32_t crc, const void *buf, size_t len);
	uint32_t (*copy)(uint32_t crc, void *dst, const void *src, size_t len);
};

/* Returns the n-th implementation that this CPU supports, slowest first, or NULL after the last.
 * sfr_crc32 uses the last one. */
const struct sfr__crc_impl *sfr__crc_impl(size_t n);

#endif
