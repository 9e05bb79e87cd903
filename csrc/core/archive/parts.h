/* Shared by parts.c and tensor.c only. */
#ifndef SFR_PARTS_LIST_H
#define SFR_PARTS_LIST_H

#include "sfr/parts.h"
#include "base/base.h"

#define SFR__CRC_FIELD_LEN 4u /* bytes of a CRC-32 */

/* Stores `rc` as the error of the parts, unless they already have an error. Returns their error. */
int sfr__parts_fail(struct sfr_parts *parts, int rc);
/* Returns how many sources the parts have, which is also the number of the next source. */
uint32_t sfr__parts_nr_sources(const struct sfr_parts *parts);
/* Says that the CRC of source number `source` will replace SFR__CRC_FIELD_LEN bytes at offset `off`
 * of the file. Offsets ascend from call to call. Returns 0, or the parts' first error. */
int sfr__parts_add_crc_field(struct sfr_parts *parts, uint64_t off, uint32_t source);

#endif
