/* Lengths of zip records, which layout.c lays files out with. See archive/write.c; the functions that make
 * the records' bytes are sfr__image_put_* in layout.h. */
#ifndef SFR_WRITE_H
#define SFR_WRITE_H

#include "archive/layout.h"

/* An entry's local header, from its hdr_off to where its data may begin; the padding that
 * aligns the data comes on top. name, nbytes and hdr_off must be set, as for the next one. */
uint64_t sfr__zip_header_len(const struct sfr__entry *e);
/* The descriptor behind its data. */
uint32_t sfr__zip_desc_len(const struct sfr__entry *e);
/* The tail of an image whose entries are placed and whose tail_off is set: a multiple of 4096. */
uint64_t sfr__zip_tail_len(const struct sfr__image *img);

#endif
