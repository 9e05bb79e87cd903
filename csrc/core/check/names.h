/* A list of names that finds names, and those that occur twice, with 16 bytes a name. */
#ifndef SFR_NAMES_H
#define SFR_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A name: its hash, and the offset at which the caller can read the name again. */
struct sfr__named {
	uint64_t hash, offset;
};

/* A list of names; all zero is an empty list. */
struct sfr__names {
	struct sfr__named *v; /* `nr` names, with memory for `cap` */
	uint64_t nr, cap;
	uint64_t heap_from, heap_to; /* progress of the heap sort */
	bool sorting;
};

/* Adds a name, of which only hash and offset are kept. Returns 0 or -ENOMEM. */
int sfr__names_add(struct sfr__names *names, const unsigned char *name, size_t len,
		   uint64_t offset);
/* Goes on sorting the list by hash, by at most `moves` moves of one name each. Called when all
 * names are added. Returns whether the list is sorted. */
bool sfr__names_sort(struct sfr__names *names, uint64_t moves);
/* For a sorted list: finds the next two names with the same hash, and sets *first < *second to
 * their offsets. The caller compares the names. *it is the position, 0 before the first call.
 * Returns false at the end. */
bool sfr__names_suspect(const struct sfr__names *names, uint64_t *it, uint64_t *first,
			uint64_t *second);
/* For a sorted list: finds the next name with the hash of `name`, and sets *offset to the offset of
 * the found name. *it is the position, 0 before the first call. Returns false at the end. */
bool sfr__names_find(const struct sfr__names *names, const char *name, size_t len, uint64_t *it,
		     uint64_t *offset);
void sfr__names_fini(struct sfr__names *names);

#endif
