/* Shared by parts.c and tensor.c only. */
#ifndef SFR_PARTS_LIST_H
#define SFR_PARTS_LIST_H

#include "sfr/parts.h"
#include "base/base.h"

#define SFR__FIELD_LEN 4u

/* Keeps the first error, and returns it. */
int sfr__parts_fail(struct sfr_parts *parts, int rc);
/* Returns the number of sources so far, which is the next one's number. */
uint32_t sfr__parts_nr_sources(const struct sfr_parts *parts);
/* Adds a field for a source's CRC over bytes of glue at offset `off` of the file; offsets ascend.
 * 0, or the kept error. */
int sfr__parts_field(struct sfr_parts *parts, uint64_t off, uint32_t source);

#endif
