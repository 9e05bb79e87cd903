/* A list of names for finding a name, and names that occur twice. Takes 16 bytes a name. */
#ifndef SFR_NAMES_H
#define SFR_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A name: its hash, and the offset at which the caller can read the name again. */
struct sfr__hashed_name {
	uint64_t hash, offset;
};

/* A list of names; all zero is an empty list. */
struct sfr__names {
	struct sfr__hashed_name *entries; /* `nr` names, with memory for `cap` */
	uint64_t nr, cap;
	uint64_t heap_from, heap_to; /* progress of the heap sort */
	bool sorting;
};

/* Adds a name, of which only hash and offset are kept. Returns 0 or -ENOMEM. */
int sfr__names_add(struct sfr__names *names, const unsigned char *name, size_t len,
		   uint64_t offset);
/* Continues to sort the list by hash, with at most `moves` moves of one name each. Called when all
 * names are added. Returns whether the list is sorted. */
bool sfr__names_continue_sort(struct sfr__names *names, uint64_t moves);
/* Finds the next two names with the same hash in a sorted list, and sets *first and *second to
 * their offsets, *first < *second. The names may differ: the caller compares them. *pos is the
 * position in the list, 0 before the first call. Returns false at the end. */
bool sfr__names_next_same_hash(const struct sfr__names *names, uint64_t *pos, uint64_t *first,
			       uint64_t *second);
/* Finds the next name with the hash of `name` in a sorted list, and sets *offset to its offset. The
 * found name may differ from `name`: the caller compares them. *pos is the position in the list, 0
 * before the first call. Returns false at the end. */
bool sfr__names_find_hash_match(const struct sfr__names *names, const char *name, size_t len,
				uint64_t *pos, uint64_t *offset);
void sfr__names_fini(struct sfr__names *names);

#endif
