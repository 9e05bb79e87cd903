/* Lengths of zip records, for layout.c, and the records themselves, for archives within a file. */
#ifndef SFR_WRITE_H
#define SFR_WRITE_H

#include "archive/layout.h"

/* Returns the length of a local header at `hdr_off` without the padding that aligns the data. */
uint64_t sfr__zip_local_header_len(uint64_t name_len, uint64_t nbytes, uint64_t hdr_off);
/* Return the length of an entry's local header (without that padding), and of its descriptor. The
 * entry's name, nbytes and hdr_off must be set. */
uint64_t sfr__zip_header_len(const struct sfr__image_entry *e);
uint32_t sfr__zip_desc_len(const struct sfr__image_entry *e);
/* Returns the length of an image's tail, a multiple of 4096. The offsets of all entries and
 * tail_off must be set. */
uint64_t sfr__zip_tail_len(const struct sfr__image *img);

/* For archives within a file (tensor.c). Each function writes one zip record to `dst` and returns
 * the record's length. Offsets count from the start of the archive.
 *   pad                           bytes of padding that align the data
 *   nr_records, dir_off, dir_len  the directory's number of records, offset and length */
size_t sfr__zip_put_local_header(void *dst, const char *name, uint64_t nbytes, size_t pad);
size_t sfr__zip_put_desc(void *dst, uint32_t crc, uint64_t nbytes);
size_t sfr__zip_put_central(void *dst, const char *name, uint32_t crc, uint64_t nbytes,
			    uint64_t hdr_off);
size_t sfr__zip_put_end(void *dst, uint64_t nr_records, uint64_t dir_off, uint64_t dir_len);
/* bytes of the longest records, without padding, for names below 32 bytes */
#define SFR__ZIP_LOCAL_MAX 128u
#define SFR__ZIP_CENTRAL_MAX 128u
#define SFR__ZIP_END_LEN 98u
#define SFR__ZIP_DESC_CRC 4u     /* offset of the CRC in a descriptor */
#define SFR__ZIP_CENTRAL_CRC 16u /* offset of the CRC in a directory record */

#endif
