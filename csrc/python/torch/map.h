/* A map from addresses to numbers. See map.c. */
#ifndef SFR_PY_MAP_H
#define SFR_PY_MAP_H

#include "module.h"

/* All zero is an empty one. */
struct sfr_py_map {
	struct {
		uint64_t key, value;
	} *slots;
	size_t used, room;
};
/* The key's value, NULL where the key is not there; stays where it is until one is added. */
uint64_t *sfr_py_map_find(const struct sfr_py_map *map, uint64_t key);
/* Adds a key that is not there. 0, or -1 with MemoryError set. */
int sfr_py_map_add(struct sfr_py_map *map, uint64_t key, uint64_t value);
/* Makes room for `nr` keys in all at once. 0, or -1 with MemoryError set. */
int sfr_py_map_reserve(struct sfr_py_map *map, size_t nr);
void sfr_py_map_fini(struct sfr_py_map *map);

#endif
