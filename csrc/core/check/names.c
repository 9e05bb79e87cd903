/* Finds names that occur twice in a long list.
 *
 * A directory may name millions of records. So the names stay in the file, and only a hash and the
 * offset of each are kept. In a list sorted by hash, equal names are neighbours. The list grows by
 * doubling as names are read, never to a length that a file merely claims.
 *
 * A hostile file may choose the order and the hashes. Heap sort has no slow case, needs no memory,
 * and can be interrupted after any move. Only neighbours are compared, so a different name with the
 * same hash can hide that two names are equal. That harms only the author of the file. */
#include <errno.h>

#include "check/names.h"
#include "base/base.h"

/* 64-bit FNV-1a. */
static uint64_t hash_name(const unsigned char *name, size_t len)
{
	uint64_t hash = UINT64_C(0xcbf29ce484222325);

	for (size_t i = 0; i < len; i++)
		hash = (hash ^ name[i]) * UINT64_C(0x100000001b3);
	return hash;
}

int sfr__names_add(struct sfr__names *names, const unsigned char *name, size_t len, uint64_t offset)
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
	names->v[names->nr++].offset = offset;
	return 0;
}

/* The order of the list: by hash, then by offset. */
static bool is_before(const struct sfr__named *a, const struct sfr__named *b)
{
	return a->hash != b->hash ? a->hash < b->hash : a->offset < b->offset;
}

/* Puts `moved` into the heap v[0, end), whose element `at` is free. Larger descendants of `at` move
 * up first. */
static void sift_down(struct sfr__named *v, uint64_t at, uint64_t end, struct sfr__named moved)
{
	for (;;) {
		uint64_t child = 2 * at + 1;

		if (child >= end)
			break;
		if (child + 1 < end && is_before(&v[child], &v[child + 1]))
			child++;
		if (!is_before(&moved, &v[child]))
			break;
		v[at] = v[child];
		at = child;
	}
	v[at] = moved;
}

/* Heap sort. First heap_from decreases to 0; the elements from heap_from on are a heap. Then the
 * largest element repeatedly goes to the end of the heap, and heap_to, its end, decreases. */
bool sfr__names_sort(struct sfr__names *names, uint64_t moves)
{
	struct sfr__named *v = names->v;

	if (!names->sorting) {
		names->sorting = true;
		names->heap_from = names->nr / 2;
		names->heap_to = names->nr;
	}
	for (; names->heap_to > 1 && moves != 0; moves--) {
		if (names->heap_from > 0) {
			names->heap_from--;
			sift_down(v, names->heap_from, names->heap_to, v[names->heap_from]);
		} else {
			struct sfr__named moved = v[--names->heap_to];

			v[names->heap_to] = v[0];
			sift_down(v, 0, names->heap_to, moved);
		}
	}
	return names->heap_to <= 1;
}

bool sfr__names_suspect(const struct sfr__names *names, uint64_t *it, uint64_t *first,
			uint64_t *second)
{
	while (++*it < names->nr) {
		if (names->v[*it].hash != names->v[*it - 1].hash)
			continue;
		*first = names->v[*it - 1].offset;
		*second = names->v[*it].offset;
		return true;
	}
	return false;
}

bool sfr__names_find(const struct sfr__names *names, const char *name, size_t len, uint64_t *it,
		     uint64_t *offset)
{
	const uint64_t hash = hash_name((const unsigned char *)name, len);
	uint64_t from = sfr__lower_bound(i, *it, names->nr, names->v[i].hash < hash);

	if (from == names->nr || names->v[from].hash != hash)
		return false;
	*offset = names->v[from].offset;
	*it = from + 1;
	return true;
}

void sfr__names_fini(struct sfr__names *names)
{
	sfr_sys.free(names->v);
	*names = (struct sfr__names){ 0 };
}
