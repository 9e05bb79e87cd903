/* The prefetch order: the addresses of the last save's tensors, in the pickler's order.
 *
 * Between two saves the training evicts the tensors from the processor's caches. A save reads a
 * dozen cache lines of each tensor, and waiting for them takes longer than all its other work. Two
 * saves meet the same tensors in the same order. So a save prefetches the lines of later tensors by
 * the addresses that the last save kept. A stale address only loads a useless line, because
 * prefetching cannot fault.
 *
 * Measured with `benchmarks/plan.py --tensors 1600`, on a busy machine, in three runs each of
 * builds with and without this file: at best 1.08 to 1.18 ms of CPU time with it, 1.33 to 1.59
 * without. */
#include "skeleton/skeleton.h"
#include "torch/words.h"

enum {
	AHEAD = 12,          /* how many tensors ahead to prefetch */
	LINE = 64,           /* bytes of a cache line */
	GC_HEADER = 16,      /* bytes of the garbage collector's header before a dict */
	NR_IMPL_LINES = 4,   /* lines of a TensorImpl */
	NR_DICT_LINES = 2,   /* lines of a dict and its header */
	NR_STORAGE_LINES = 2 /* lines of a StorageImpl */
};

static void prefetch_lines(uintptr_t address, int nr_lines)
{
	int i;

	for (i = 0; i < nr_lines; i++)
		sfr_py_prefetch(address + (uintptr_t)(i * LINE));
}

/* Prefetches what a save reads of one tensor and its storage, and their slots in the maps. */
static void prefetch_entry(const struct sfr_py_collector *c,
			   const struct sfr_py_prefetch_entry *entry)
{
	if (entry->last_dict != 0)
		prefetch_lines(entry->last_dict - GC_HEADER, NR_DICT_LINES);
	prefetch_lines(entry->tensor, 1);
	prefetch_lines(entry->impl, NR_IMPL_LINES);
	prefetch_lines(entry->wrapper, 1);
	prefetch_lines(entry->storage, NR_STORAGE_LINES);
	sfr_py_map_prefetch(&c->index_by_tensor, entry->tensor);
	sfr_py_map_prefetch(&c->numbers->map, entry->storage);
	sfr_py_map_prefetch(&c->dtype_by_addr, entry->memory);
}

void sfr_py_prefetch_order_take(struct sfr_py_collector *c)
{
	size_t i;

	c->old_order = c->torch->order;
	c->torch->order = (struct sfr_py_prefetch_order){ 0 };
	for (i = 0; i < AHEAD && i < c->old_order.nr; i++)
		prefetch_entry(c, &c->old_order.entries[i]);
}

void sfr_py_prefetch_later_tensor(const struct sfr_py_collector *c)
{
	if (c->nr_found + AHEAD < c->old_order.nr)
		prefetch_entry(c, &c->old_order.entries[c->nr_found + AHEAD]);
}

int sfr_py_prefetch_order_add(struct sfr_py_collector *c, PyObject *tensor, PyObject *wrapper,
			      const struct sfr_py_storage *storage)
{
	const struct sfr_py_prefetch_entry entry = { .tensor = (uintptr_t)tensor,
						     .impl = sfr_py_tensor_impl_of(tensor),
						     .wrapper = (uintptr_t)wrapper,
						     .storage = (uintptr_t)storage->storage_impl,
						     .memory = storage->addr,
						     .last_dict = c->last_dict };

	/* The index of an entry is the tensor's number. So tensors that are not plain, for which
	 * this function is not called, get empty entries. */
	while (c->new_order.nr <= c->nr_found) {
		if (sfr_py_make_room((void **)&c->new_order.entries, c->new_order.nr,
				     &c->new_order.room, sizeof(entry)) != 0)
			return -1;
		c->new_order.entries[c->new_order.nr++] = (struct sfr_py_prefetch_entry){ 0 };
	}
	c->new_order.entries[c->nr_found] = entry;
	return 0;
}

void sfr_py_prefetch_order_store(struct sfr_py_collector *c)
{
	if (c->new_order.nr != 0) {
		sfr_py_prefetch_order_fini(&c->torch->order);
		c->torch->order = c->new_order;
		c->new_order = (struct sfr_py_prefetch_order){ 0 };
	}
}

void sfr_py_prefetch_order_fini(struct sfr_py_prefetch_order *order)
{
	PyMem_Free(order->entries);
	*order = (struct sfr_py_prefetch_order){ 0 };
}
