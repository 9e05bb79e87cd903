/* Which names of a long list occur twice.
 *
 * A directory may name millions of records, and its names are still in the file: so only a hash of
 * each name is kept, and where it stands. Sorted by hash, equal names are neighbours. The list
 * grows by doubling as names really turn up, never to a length that a file merely claims.
 *
 * The order and the hashes may be chosen by someone hostile. Heap sort has no slow case, needs no
 * memory and is short; a hash table would have a slow case. Different names with one hash cost two
 * small reads and may hide a pair that occurs twice, which harms nobody but their maker.
 */
#include <errno.h>

#include "check/names.h"
#include "base/sfr_internal.h"

/* 64-bit FNV-1a. */
static uint64_t hash_name(const unsigned char *name, size_t len)
{
	uint64_t hash = UINT64_C(0xcbf29ce484222325);

	for (size_t i = 0; i < len; i++)
		hash = (hash ^ name[i]) * UINT64_C(0x100000001b3);
	return hash;
}

int sfr__names_add(struct sfr__names *names, const unsigned char *name, size_t len, uint64_t place)
{
	if (names->nr == names->cap) {
		uint64_t cap = names->cap == 0 ? 256 : 2 * names->cap;
		struct sfr__named *v = sfr_sys.realloc(names->v, cap * sizeof(*v));

		if (v == NULL)
			return -ENOMEM;
		names->v = v;
		names->cap = cap;
	}
	names->v[names->nr].hash = hash_name(name, len);
	names->v[names->nr++].place = place;
	return 0;
}

static bool less(const struct sfr__named *a, const struct sfr__named *b)
{
	return a->hash != b->hash ? a->hash < b->hash : a->place < b->place;
}

/* Heap sort. While `start` goes down the heap is built; then the largest goes to the end, again
 * and again. In both phases one element sinks from a hole at `start` to where it belongs. */
void sfr__names_sort(struct sfr__names *names)
{
	struct sfr__named *v = names->v;

	for (uint64_t start = names->nr / 2, end = names->nr; end > 1;) {
		struct sfr__named moved;
		uint64_t at, child;

		if (start > 0) {
			moved = v[--start];
		} else {
			moved = v[--end];
			v[end] = v[0];
		}
		for (at = start; (child = 2 * at + 1) < end; at = child) {
			if (child + 1 < end && less(&v[child], &v[child + 1]))
				child++;
			if (!less(&moved, &v[child]))
				break;
			v[at] = v[child];
		}
		v[at] = moved;
	}
}

bool sfr__names_suspect(const struct sfr__names *names, uint64_t *it, uint64_t *first,
			uint64_t *second)
{
	while (++*it < names->nr) {
		if (names->v[*it].hash != names->v[*it - 1].hash)
			continue;
		*first = names->v[*it - 1].place;
		*second = names->v[*it].place;
		return true;
	}
	return false;
}

void sfr__names_fini(struct sfr__names *names)
{
	sfr_sys.free(names->v);
	*names = (struct sfr__names){ 0 };
}
