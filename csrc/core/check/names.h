/* Finds names that occur twice in a long list, with 16 bytes a name. See names.c. */
#ifndef SFR_NAMES_H
#define SFR_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct sfr__named {
	uint64_t hash, offset;
};

struct sfr__names { /* a zeroed one is an empty list */
	struct sfr__named *v;
	uint64_t nr, cap;
	uint64_t heap_from, heap_to; /* progress of the sort: names.c */
	bool sorting;
};

/* `offset` is the offset at which the caller finds the name again. -ENOMEM. */
int sfr__names_add(struct sfr__names *names, const unsigned char *name, size_t len,
		   uint64_t offset);
/* Sorts by at most `moves` short moves, once all names are added. Returns whether the sort is done;
 * then sfr__names_suspect may be called. */
bool sfr__names_sort(struct sfr__names *names, uint64_t moves);
/* Returns the next two offsets whose names have the same hash, the smaller first; *it starts as 0.
 * The names are almost certainly equal, and the caller compares them. False at the end. */
bool sfr__names_suspect(const struct sfr__names *names, uint64_t *it, uint64_t *first,
			uint64_t *second);
/* Returns the offset of the first name with the hash of `name`, at or after *it, which starts as 0
 * and moves on. False if there is none. Only after the sort. */
bool sfr__names_find(const struct sfr__names *names, const char *name, size_t len, uint64_t *it,
		     uint64_t *offset);
void sfr__names_fini(struct sfr__names *names);

#endif
