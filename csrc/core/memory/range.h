/* Address space and the memory behind it, for the pool. See range.c. */
#ifndef SFR_RANGE_H
#define SFR_RANGE_H

#include "base/base.h"

#define SFR__HUGE_BYTES ((uint64_t)2 << 20)

struct sfr__range {
	char *base; /* a multiple of 2 MiB; NULL = none */
	char *map;  /* what mmap gave, which base lies in */
	size_t map_len;
	uint64_t len;
	int file; /* whose pages the memory is, from base on; -1 = private memory */
};

/* Reserves address space for `len` bytes, without memory; `shared`: of a file that other processes
 * can map. On failure the range is empty. -ENOMEM; shared, -errno of memfd_create, and -EFBIG where
 * the process may not have files of that length. */
int sfr__memory_reserve(struct sfr__range *range, uint64_t len, bool shared);
/* Gives it back, with all memory in it, whoever has the file. An empty range is fine. */
void sfr__memory_release(struct sfr__range *range);
/* Whether a child that is forked has whole pages of a range: none at first. 0, -ENOMEM, -errno. */
int sfr__memory_inherit(char *mem, size_t len, bool yes);
/* Gives whole pages of a range memory, in two steps: opened first, they are present once populated, in
 * any number of parts. Neither changes a byte that is there, so two threads may do so at a time.
 * -errno: a part may have memory. */
int sfr__memory_open(char *mem, size_t len);
int sfr__memory_populate(const struct sfr__range *range, char *mem, size_t len);
/* Takes the memory of whole pages, which nobody may be populating: they are not open any more.
 * -errno, and then they still have it. */
int sfr__memory_decommit(const struct sfr__range *range, char *mem, size_t len);

#endif
