/* CRC-32. See base/crc.c. */
#ifndef SFR_CRC_PUBLIC_H
#define SFR_CRC_PUBLIC_H

#include <stddef.h>
#include <stdint.h>

/* zlib's CRC-32 (polynomial 0xedb88320): crc of `len` bytes appended to what
 * `crc` stands for; 0 starts. Any thread, no lock. */
uint32_t sfr_crc32(uint32_t crc, const void *buf, size_t len);
/* The same of `len` bytes while they are copied; `src` is read once. */
uint32_t sfr_crc32_copy(uint32_t crc, void *dst, const void *src, size_t len);
uint32_t sfr_crc32_portable(uint32_t crc, const void *buf, size_t len);
/* CRC of A followed by B, from crc(A), crc(B) and B's length. */
uint32_t sfr_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t len_b);

#endif
