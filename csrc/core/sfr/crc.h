/* CRC-32; base/crc.c implements it. */
#ifndef SFR_CRC_PUBLIC_H
#define SFR_CRC_PUBLIC_H

#include <stddef.h>
#include <stdint.h>

/* Returns the CRC of a message with `len` bytes appended. `crc` is that of the message so far, 0 if
 * it is empty. This is zlib's CRC-32, polynomial 0xedb88320. Any thread may call it. */
uint32_t sfr_crc32(uint32_t crc, const void *buf, size_t len);
/* Does the same, and copies the bytes to `dst`. Reads `src` once. */
uint32_t sfr_crc32_copy(uint32_t crc, void *dst, const void *src, size_t len);
/* Does the same as sfr_crc32 without special instructions of the CPU. */
uint32_t sfr_crc32_portable(uint32_t crc, const void *buf, size_t len);
/* Returns the CRC of A followed by B, given both CRCs and B's length. */
uint32_t sfr_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t len_b);

#endif
