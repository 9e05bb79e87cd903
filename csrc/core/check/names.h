/* Finds names that occur twice in a long list, with 16 bytes a name. See names.c. */
#ifndef SFR_NAMES_H
#define SFR_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A name: its hash, and the offset at which the caller finds the name again. */
struct sfr__named {
	uint64_t hash, offset;
};

/* A list of names; all zero is an empty list. */
struct sfr__names {
	struct sfr__named *v; /* `nr` names, with memory for `cap` */
	uint64_t nr, cap;
	uint64_t heap_from, heap_to; /* progress of the heap sort; see sfr__names_sort */
	bool sorting;
};

/* Adds a name. Only its hash and `offset` are kept, at which the caller finds the name again.
 * Returns 0 or -ENOMEM. */
int sfr__names_add(struct sfr__names *names, const unsigned char *name, size_t len,
		   uint64_t offset);
/* Goes on sorting the list by hash, by at most `moves` moves of one name each, once all names are
 * added. Returns whether the list is sorted. */
bool sfr__names_sort(struct sfr__names *names, uint64_t moves);
/* Finds the next two names with the same hash in a sorted list, and sets *first < *second to their
 * offsets. *it is the position, 0 before the first call. The names are almost certainly equal, and
 * the caller compares them. Returns false at the end. */
bool sfr__names_suspect(const struct sfr__names *names, uint64_t *it, uint64_t *first,
			uint64_t *second);
/* Finds the next name with the hash of `name` in a sorted list, and sets *offset to its offset. *it
 * is the position, 0 before the first call. Returns false at the end. */
bool sfr__names_find(const struct sfr__names *names, const char *name, size_t len, uint64_t *it,
		     uint64_t *offset);
void sfr__names_fini(struct sfr__names *names);

#endif
