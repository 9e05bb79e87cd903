/* A map from addresses to numbers: a hash table with open addressing, at most half full. Key 0
 * marks an empty slot. A Python dict would need a new int object for each look-up. */
#include "torch/map.h"

#include <stdbool.h>

/* Returns the index of the first slot where the key may be. The map must have slots. */
static size_t first_slot_of(const struct sfr_py_map *map, uint64_t key)
{
	/* Fibonacci hashing. Drops the lowest four bits: objects are at least 16 bytes apart. */
	return (size_t)((key >> 4) * UINT64_C(0x9e3779b97f4a7c15) >> 20) & (map->room - 1);
}

/* Returns the index of the key's slot, or of the empty slot for it. The map must have slots. */
static size_t find_key_slot(const struct sfr_py_map *map, uint64_t key)
{
	size_t i = first_slot_of(map, key);

	while (map->slots[i].key != 0 && map->slots[i].key != key)
		i = (i + 1) & (map->room - 1);
	return i;
}

uint64_t *sfr_py_map_find(const struct sfr_py_map *map, uint64_t key)
{
	size_t i;

	if (map->room == 0)
		return NULL;
	i = find_key_slot(map, key);
	return map->slots[i].key == 0 ? NULL : &map->slots[i].value;
}

void sfr_py_map_prefetch(const struct sfr_py_map *map, uint64_t key)
{
	if (map->room != 0)
		sfr_py_prefetch((uintptr_t)&map->slots[first_slot_of(map, key)]);
}

int sfr_py_map_reserve(struct sfr_py_map *map, size_t nr)
{
	struct sfr_py_map larger = { NULL, map->used, 64 };

	while (larger.room < 2 * nr)
		larger.room *= 2;
	if (larger.room <= map->room)
		return 0;
	larger.slots = PyMem_Calloc(larger.room, sizeof(*larger.slots));
	if (larger.slots == NULL)
		return sfr_py_set_memory_error();
	for (size_t i = 0; i < map->room; i++)
		if (map->slots[i].key != 0)
			larger.slots[find_key_slot(&larger, map->slots[i].key)] = map->slots[i];
	PyMem_Free(map->slots);
	*map = larger;
	return 0;
}

int sfr_py_map_add(struct sfr_py_map *map, uint64_t key, uint64_t value)
{
	size_t nr = map->used + 1, i;
	bool too_full = 2 * nr > map->room;

	/* room for twice as many, so that a growing map is rarely copied */
	if (too_full && sfr_py_map_reserve(map, 2 * nr) != 0)
		return -1;
	i = find_key_slot(map, key);
	map->slots[i].key = key;
	map->slots[i].value = value;
	map->used++;
	return 0;
}

void sfr_py_map_fini(struct sfr_py_map *map)
{
	PyMem_Free(map->slots);
	*map = (struct sfr_py_map){ NULL, 0, 0 };
}
