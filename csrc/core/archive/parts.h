/* Private to parts.c and tensor.c. */
#ifndef SFR_PARTS_LIST_H
#define SFR_PARTS_LIST_H

#include "sfr/parts.h"
#include "base/base.h"

#define SFR__FIELD_LEN 4u

/* Keeps the first failure, and returns it. */
int sfr__parts_fail(struct sfr_parts *parts, int rc);
/* Sources so far: the number that the next one gets. */
uint32_t sfr__parts_nr_sources(const struct sfr_parts *parts);
/* Has a source's CRC put over bytes of glue at `off` of the file; ascending. 0, or what failed. */
int sfr__parts_field(struct sfr_parts *parts, uint64_t off, uint32_t source);

#endif
