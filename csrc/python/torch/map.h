/* A map from addresses to numbers. map.c implements it. */
#ifndef SFR_PY_MAP_H
#define SFR_PY_MAP_H

#include "module.h"

/* An empty map is all zero. Keys are addresses, and not 0. */
struct sfr_py_map {
	struct {
		uint64_t key, value;
	} *slots;
	size_t used; /* number of keys */
	size_t room; /* number of slots: a power of two, or 0 */
};
/* Returns a pointer to the key's value, valid until a key is added. NULL: the map lacks the key. */
uint64_t *sfr_py_map_find(const struct sfr_py_map *map, uint64_t key);
/* Loads the key's slot into the processor's caches, for a find or add that follows soon. */
void sfr_py_map_prefetch(const struct sfr_py_map *map, uint64_t key);
/* Adds a key that the map does not have. */
int sfr_py_map_add(struct sfr_py_map *map, uint64_t key, uint64_t value);
/* Makes room for `nr` keys in all. */
int sfr_py_map_reserve(struct sfr_py_map *map, size_t nr);
/* Frees the slots. The map is empty afterwards. */
void sfr_py_map_fini(struct sfr_py_map *map);

#endif
