/* Lengths of zip records, from which layout.c computes offsets. See archive/write.c; the functions
 * that write the records' bytes are sfr__image_put_* in layout.h. */
#ifndef SFR_WRITE_H
#define SFR_WRITE_H

#include "archive/layout.h"

/* Returns the length of a local header at `hdr_off` as stillframe writes it, without the bytes that
 * align the data. The reader of such files (reader/plan.c) uses it too. */
uint64_t sfr__zip_local_len(uint64_t name_len, uint64_t nbytes, uint64_t hdr_off);
/* Return the length of an entry's local header, without the padding that aligns the data, and the
 * length of its descriptor. The entry's name, nbytes and hdr_off must be set. */
uint64_t sfr__zip_header_len(const struct sfr__entry *e);
uint32_t sfr__zip_desc_len(const struct sfr__entry *e);
/* Returns the length of an image's tail, a multiple of 4096. The offsets of all entries and
 * tail_off must be set. */
uint64_t sfr__zip_tail_len(const struct sfr__image *img);

/* For tensor.c, whose archives are within a file: each function writes one record at `dst` and
 * returns the record's length. `pad` is the number of padding bytes that align the data.
 * `central_off` and `size` are the offset and length of the directory, which has `nr` records;
 * offsets count from the start of the archive. */
size_t sfr__zip_put_local(void *dst, const char *name, uint64_t nbytes, size_t pad);
size_t sfr__zip_put_desc(void *dst, uint32_t crc, uint64_t nbytes);
size_t sfr__zip_put_central(void *dst, const char *name, uint32_t crc, uint64_t nbytes,
			    uint64_t hdr_off);
size_t sfr__zip_put_end(void *dst, uint64_t nr, uint64_t central_off, uint64_t size);
#define SFR__ZIP_LOCAL_MAX 128u /* longest records, without padding, for names below 32 bytes */
#define SFR__ZIP_CENTRAL_MAX 128u
#define SFR__ZIP_END_LEN 98u
#define SFR__ZIP_DESC_CRC 4u /* offset of the CRC in a descriptor, and in a central record */
#define SFR__ZIP_CENTRAL_CRC 16u

#endif
