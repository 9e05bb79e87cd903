/* A range of address space and its memory, for the pool. */
#ifndef SFR_RANGE_H
#define SFR_RANGE_H

#include "base/base.h"

#define SFR__HUGE_BYTES ((uint64_t)2 << 20) /* bytes of a huge page */

struct sfr__memory_range {
	char *base; /* a multiple of 2 MiB; NULL: the range is empty */
	char *map;  /* the mapping that contains the range; longer, so that base can be aligned */
	size_t map_len;
	uint64_t len;
	/* for shared memory: the file that is mapped at base; otherwise -1 */
	int file;
};

/* Reserves `len` bytes of address space without memory. With `shared`, the range maps a file that
 * other processes can map, too. On failure the range is empty. Returns 0, or:
 *     -ENOMEM
 *     -EFBIG   `shared`: the process may not have a file of that length
 *     -errno   `shared`: memfd_create failed */
int sfr__memory_reserve(struct sfr__memory_range *range, uint64_t len, bool shared);
/* Releases the range and all its memory, even if other processes have the file open. Accepts an
 * empty range. */
void sfr__memory_release(struct sfr__memory_range *range);
/* Sets whether forked children inherit these whole pages; at first they do not. Returns 0 or
 * -errno. */
int sfr__memory_set_inheritable(char *mem, size_t len, bool inherit);
/* Give memory to whole pages in two steps: make_accessible, then populate. Neither step changes
 * existing bytes, so two threads may do this to the same pages at once. Return 0 or -errno; after
 * an error some pages may have memory. */
int sfr__memory_make_accessible(char *mem, size_t len);
int sfr__memory_populate(const struct sfr__memory_range *range, char *mem, size_t len);
/* Returns the memory of whole pages to the system and makes the pages inaccessible. No other thread
 * may use or populate them meanwhile. Returns 0, or -errno if they keep their memory. */
int sfr__memory_decommit(const struct sfr__memory_range *range, char *mem, size_t len);

#endif
