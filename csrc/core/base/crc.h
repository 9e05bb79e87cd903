/* The ways crc.c has to compute a CRC, one by one: for its test, which has to see those too
 * that a better one hides on the machine at hand. Everyone else calls sfr_crc32 (sfr/crc.h). */
#ifndef SFR_CRC_H
#define SFR_CRC_H

#include <stddef.h>
#include <stdint.h>

struct sfr__crc_way {
	const char *name;
	uint32_t (*crc32)(uint32_t crc, const void *buf, size_t len);
	uint32_t (*copy)(uint32_t crc, void *dst, const void *src, size_t len);
};

/* The n-th way this CPU can take, slowest first: 0 is the portable one, the last one serves
 * sfr_crc32. NULL behind the last. */
const struct sfr__crc_way *sfr__crc_way(size_t n);

#endif
