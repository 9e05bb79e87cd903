/* Which names of a long list occur twice, in 16 bytes a name. See names.c. */
#ifndef SFR_NAMES_H
#define SFR_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct sfr__named {
	uint64_t hash, place;
};

struct sfr__names { /* zeroed is an empty list */
	struct sfr__named *v;
	uint64_t nr, cap;
	uint64_t heap_from, heap_to; /* how far the sort is: names.c */
	bool sorting;
};

/* `place` is where the caller finds the name again. -ENOMEM. */
int sfr__names_add(struct sfr__names *names, const unsigned char *name, size_t len, uint64_t place);
/* Once all are there: does `moves` moves of a sort, each of them short, and says whether it is
 * done. Then sfr__names_suspect can be called. */
bool sfr__names_sort(struct sfr__names *names, uint64_t moves);
/* The next two places whose names have one hash, the smaller place first; *it starts as 0. The
 * names are almost certainly the same: the caller compares them. False at the end. */
bool sfr__names_suspect(const struct sfr__names *names, uint64_t *it, uint64_t *first,
			uint64_t *second);
/* The place of the first name with this one's hash, at or behind *it, which starts as 0 and moves
 * on; false when there is none. Only once they are sorted. */
bool sfr__names_find(const struct sfr__names *names, const char *name, size_t len, uint64_t *it,
		     uint64_t *place);
void sfr__names_fini(struct sfr__names *names);

#endif
