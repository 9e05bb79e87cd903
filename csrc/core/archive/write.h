/* Lengths of zip records, which layout.c lays files out with. See archive/write.c; the functions
 * that write the records' bytes are sfr__image_put_* in layout.h. */
#ifndef SFR_WRITE_H
#define SFR_WRITE_H

#include "archive/layout.h"

/* Length of a local header at `hdr_off` as stillframe writes it, without the bytes that align its
 * data. The reader of such files (reader/plan.c) uses it too. */
uint64_t sfr__zip_local_len(uint64_t name_len, uint64_t nbytes, uint64_t hdr_off);
/* Length of an entry's local header: from its hdr_off to the earliest start of its data. The
 * padding that aligns the data is not included. name, nbytes and hdr_off must be set, also for the
 * next function. */
uint64_t sfr__zip_header_len(const struct sfr__entry *e);
/* Length of the descriptor after its data. */
uint32_t sfr__zip_desc_len(const struct sfr__entry *e);
/* Length of the tail of an image whose entries have offsets and whose tail_off is set: a multiple
 * of 4096. */
uint64_t sfr__zip_tail_len(const struct sfr__image *img);

/* Records of an archive within a file, for tensor.c: each function writes one at `dst` and returns
 * its length. `pad`: bytes after the tag of the field that aligns the data. */
size_t sfr__zip_put_local(void *dst, const char *name, uint64_t nbytes, size_t pad);
size_t sfr__zip_put_desc(void *dst, uint32_t crc, uint64_t nbytes);
size_t sfr__zip_put_central(void *dst, const char *name, uint32_t crc, uint64_t nbytes,
			    uint64_t hdr_off);
size_t sfr__zip_put_end(void *dst, uint64_t nr, uint64_t central_off, uint64_t size);
#define SFR__ZIP_LOCAL_MAX 128u /* each without its padding; names of at most 31 bytes */
#define SFR__ZIP_CENTRAL_MAX 128u
#define SFR__ZIP_END_LEN 98u
#define SFR__ZIP_DESC_CRC 4u /* offset of the CRC in a descriptor, and in a central record */
#define SFR__ZIP_CENTRAL_CRC 16u

#endif
