/* A range of address space and its memory, for the pool. range.c implements it. */
#ifndef SFR_RANGE_H
#define SFR_RANGE_H

#include "base/base.h"

#define SFR__HUGE_BYTES ((uint64_t)2 << 20)

struct sfr__range {
	char *base; /* a multiple of 2 MiB; NULL: none */
	char *map;  /* the mapping that base is in */
	size_t map_len;
	uint64_t len;
	int file; /* the file of shared memory, from base on; -1: private memory */
};

/* Reserves address space for `len` bytes without memory; `shared`: of a file that other processes
 * can map. On failure the range is empty. -ENOMEM; with `shared`, -errno of memfd_create, or -EFBIG
 * where the process may not have a file of that length. */
int sfr__memory_reserve(struct sfr__range *range, uint64_t len, bool shared);
/* Releases the range and all its memory, even if others have the file. Accepts an empty range. */
void sfr__memory_release(struct sfr__range *range);
/* Sets whether a forked child has these whole pages; at first it does not. 0, -ENOMEM, -errno. */
int sfr__memory_inherit(char *mem, size_t len, bool yes);
/* Give memory to whole pages in two steps: open makes them accessible, populate makes them present,
 * in any number of parts. Neither changes existing bytes, so two threads may do this at once.
 * -errno: some pages may have memory. */
int sfr__memory_open(char *mem, size_t len);
int sfr__memory_populate(const struct sfr__range *range, char *mem, size_t len);
/* Takes the memory of whole pages and closes them; nobody may be populating them. -errno: they keep
 * it. */
int sfr__memory_decommit(const struct sfr__range *range, char *mem, size_t len);

#endif
