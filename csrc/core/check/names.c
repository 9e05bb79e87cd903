/* Finds names that occur twice in a long list.
 *
 * A directory may name millions of records. So the names stay in the file, and only a hash and the
 * offset of each are kept. In a list sorted by hash, equal names are neighbours. The list grows by
 * doubling as names are read, never to a length that a file merely claims.
 *
 * A hostile file may choose the order and the hashes. Heap sort has no slow case, needs no memory,
 * and can be interrupted after any move. Only neighbours are compared. So if a different name with
 * the same hash is between two equal names, they are not found. That harms only the author of the
 * file. */
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
		struct sfr__hashed_name *entries =
			sfr_sys.realloc(names->entries, cap * sizeof(*entries));

		if (entries == NULL)
			return -ENOMEM;
		names->entries = entries;
		names->cap = cap;
	}
	names->entries[names->nr].hash = hash_name(name, len);
	names->entries[names->nr++].offset = offset;
	return 0;
}

/* The order of the list: by hash, then by offset. */
static bool is_before(const struct sfr__hashed_name *a, const struct sfr__hashed_name *b)
{
	return a->hash != b->hash ? a->hash < b->hash : a->offset < b->offset;
}

/* Puts `moved` into the heap v[0, end), in which index `at` is free. Moves descendants of `at` that
 * are larger than `moved` up to make the heap valid. */
static void sift_down(struct sfr__hashed_name *v, uint64_t at, uint64_t end,
		      struct sfr__hashed_name moved)
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

/* Heap sort. The heap is [heap_from, heap_to). First heap_from decreases from the middle to 0. Then
 * the largest element repeatedly goes to the end of the heap, and heap_to decreases. */
bool sfr__names_continue_sort(struct sfr__names *names, uint64_t moves)
{
	struct sfr__hashed_name *v = names->entries;

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
			struct sfr__hashed_name moved = v[--names->heap_to];

			v[names->heap_to] = v[0]; /* the largest element */
			sift_down(v, 0, names->heap_to, moved);
		}
	}
	return names->heap_to <= 1;
}

bool sfr__names_next_same_hash(const struct sfr__names *names, uint64_t *pos, uint64_t *first,
			       uint64_t *second)
{
	while (++*pos < names->nr) {
		if (names->entries[*pos].hash != names->entries[*pos - 1].hash)
			continue;
		*first = names->entries[*pos - 1].offset;
		*second = names->entries[*pos].offset;
		return true;
	}
	return false;
}

bool sfr__names_find_hash_match(const struct sfr__names *names, const char *name, size_t len,
				uint64_t *pos, uint64_t *offset)
{
	const uint64_t hash = hash_name((const unsigned char *)name, len);
	/* the first name from index *pos on whose hash is not lower */
	uint64_t index = sfr__lower_bound(i, *pos, names->nr, names->entries[i].hash < hash);

	if (index == names->nr || names->entries[index].hash != hash)
		return false;
	*offset = names->entries[index].offset;
	*pos = index + 1; /* where the caller's next search begins */
	return true;
}

void sfr__names_fini(struct sfr__names *names)
{
	sfr_sys.free(names->entries);
	*names = (struct sfr__names){ 0 };
}
