/* A map from numbers to numbers, for the collector.
 *
 * Keys are addresses (of tensors, of StorageImpls, of bytes), never 0, which marks an empty
 * slot. Open addressing in a power of two, at most half full; nothing is ever taken out. A
 * Python dict would do the same with an int object made for each question.
 */
#include "skeleton/skeleton.h"

static size_t map_slot(const struct sfr_py_map *map, uint64_t key)
{
	size_t i = (size_t)((key >> 4) * UINT64_C(0x9e3779b97f4a7c15) >> 20) & (map->room - 1);

	while (map->slots[i].key != 0 && map->slots[i].key != key)
		i = (i + 1) & (map->room - 1);
	return i;
}

bool sfr_py_map_get(const struct sfr_py_map *map, uint64_t key, uint64_t *value)
{
	size_t i;

	if (map->room == 0)
		return false;
	i = map_slot(map, key);
	if (map->slots[i].key == 0)
		return false;
	*value = map->slots[i].value;
	return true;
}

int sfr_py_map_add(struct sfr_py_map *map, uint64_t key, uint64_t value)
{
	size_t i;

	if (2 * (map->used + 1) > map->room) {
		struct sfr_py_map grown = { NULL, map->used, map->room == 0 ? 64 : 4 * map->room };

		grown.slots = PyMem_Calloc(grown.room, sizeof(*grown.slots));
		if (grown.slots == NULL) {
			(void)PyErr_NoMemory(); /* always NULL */
			return -1;
		}
		for (i = 0; i < map->room; i++)
			if (map->slots[i].key != 0)
				grown.slots[map_slot(&grown, map->slots[i].key)] = map->slots[i];
		PyMem_Free(map->slots);
		*map = grown;
	}
	i = map_slot(map, key);
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
