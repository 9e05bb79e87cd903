/* The storages of found tensors.
 *
 * A storage gets its number when it is first met: when torch itself pickles it, or as the storage
 * of a plain tensor. It is asked for its address and length once.
 *
 * torch.save refuses to save bytes that are viewed as two dtypes, and identifies bytes by their
 * address. sfr_py_require_same_dtype does the same. */
#include "skeleton/skeleton.h"
#include "torch/words.h"

enum { NR_WORDS = 4096 }; /* words of one struct sfr_py_row_memory: rows of a few hundred tensors */

int sfr_py_grow_array(void **array, size_t new_room, size_t *room, size_t item_len)
{
	void *grown = PyMem_Realloc(*array, new_room * item_len);

	if (grown == NULL)
		return sfr_py_set_memory_error();
	*array = grown;
	*room = new_room;
	return 0;
}

int sfr_py_find_or_add_storage(struct sfr_py_collector *c, PyObject *storage, uint64_t storage_impl,
			       bool on_host, size_t *number)
{
	const uint64_t *known = sfr_py_map_find(&c->numbers->map, storage_impl);
	struct sfr_py_storage entry = { 0 };

	if (known) {
		*number = (size_t)*known;
		return 0;
	}
	entry.storage_impl = storage_impl;
	entry.on_host = on_host;
	if (c->nr_storages >= UINT32_MAX) {
		PyErr_SetString(PyExc_OverflowError, "too many storages");
		return -1;
	}
	if (sfr_py_make_room((void **)&c->storages, c->nr_storages, &c->storages_room,
			     sizeof(entry)) != 0 ||
	    PyList_Append(c->storage_list, storage) != 0)
		return -1;
	*number = c->nr_storages;
	c->storages[c->nr_storages++] = entry;
	return sfr_py_map_add(&c->numbers->map, storage_impl, *number);
}

int sfr_py_require_same_dtype(struct sfr_py_collector *c, uint64_t addr, PyObject *dtype)
{
	const uint64_t *known;

	if (addr == 0 || c->mixed_dtypes_allowed)
		return 0;
	known = sfr_py_map_find(&c->dtype_by_addr, addr);
	if (!known)
		return sfr_py_map_add(&c->dtype_by_addr, addr, (uint64_t)(uintptr_t)dtype);
	if (*known == (uint64_t)(uintptr_t)dtype)
		return 0;
	PyErr_SetString(PyExc_RuntimeError, "Cannot save multiple tensors or storages that "
					    "view the same data as different types");
	return -1;
}

/* Asks a storage of `nbytes` bytes for its address. A copy-on-write storage then gets its own
 * memory, as in torch.save. Fails if the storage has a length but no memory. */
static int ask_address(const struct sfr_py_collector *c, PyObject *storage, uint64_t nbytes,
		       uint64_t *addr)
{
	if (sfr_py_ask_u64(c->torch, SFR_PY_DATA_PTR, storage, addr) != 0)
		return -1;
	if (*addr != 0 || nbytes == 0)
		return 0;
	PyErr_SetString(PyExc_RuntimeError, "a storage has a length and no memory");
	return -1;
}

int sfr_py_ask_storage_range(struct sfr_py_collector *c, size_t number)
{
	struct sfr_py_storage *entry = &c->storages[number];
	PyObject *storage = PyList_GetItem(c->storage_list, (Py_ssize_t)number);

	if (storage == NULL ||
	    sfr_py_ask_u64(c->torch, SFR_PY_NBYTES, storage, &entry->nbytes) != 0)
		return -1;
	/* A meta tensor's storage refuses to give an address. */
	if ((entry->on_host || entry->device_plus_1 != 0) &&
	    ask_address(c, storage, entry->nbytes, &entry->addr) != 0)
		return -1;
	entry->range_known = true;
	return 0;
}

/* Asks torch for the storage's location tag. */
static PyObject *ask_torch_for_location(const struct sfr_py_collector *c, size_t number)
{
	PyObject *storage = PyList_GetItem(c->storage_list, (Py_ssize_t)number);
	PyObject *location =
		PyObject_CallFunctionObjArgs(c->torch->item[SFR_PY_LOCATION], storage, NULL);

	if (location == NULL)
		return NULL;
	if (!PyUnicode_CheckExact(location)) {
		PyErr_SetString(PyExc_TypeError, "a location tag is a str");
		Py_DECREF(location);
		return NULL;
	}
	PyUnicode_InternInPlace(&location); /* pickle_splice.c compares tags by address */
	return location;
}

/* Sets the location tag of a plain tensor's storage, unless it has one. With plain_cpu or
 * plain_cuda torch need not be asked: the tag is "cpu", or that of the last storage on the same
 * device. */
static int set_location_tag(struct sfr_py_collector *c, size_t number)
{
	struct sfr_py_storage *entry = &c->storages[number];
	const struct sfr_py_storage *last = &c->storages[c->last_tagged_storage];
	bool same_device = entry->device_plus_1 != 0 && last->device_plus_1 == entry->device_plus_1;
	PyObject *location;

	if (entry->location != NULL)
		return 0;
	if (entry->on_host && c->plain_cpu)
		location = Py_NewRef(c->torch->cpu);
	else if (c->plain_cuda && same_device && last->location != NULL)
		location = Py_NewRef(last->location);
	else
		location = ask_torch_for_location(c, number);
	/* `entry` may be stale: Python code that ask_torch_for_location runs may add storages */
	c->storages[number].location = location;
	if (c->storages[number].device_plus_1 != 0) /* not in host memory */
		c->last_tagged_storage = number;
	return location != NULL ? 0 : -1;
}

/* Sets the CUDA device of a storage outside host memory, unless it is set. `tensor` is a tensor of
 * that storage. */
static int ask_and_set_storage_device(struct sfr_py_collector *c, size_t number, PyObject *tensor)
{
	PyObject *answer;
	long index;

	if (c->storages[number].on_host || c->storages[number].device_plus_1 != 0)
		return 0;
	answer = PyObject_CallFunctionObjArgs(c->torch->item[SFR_PY_DEVICE_INDEX], tensor, NULL);
	if (answer == NULL)
		return -1;
	index = PyLong_AsLong(answer);
	Py_DECREF(answer);
	if (index == -1 && PyErr_Occurred())
		return -1;
	c->storages[number].device_plus_1 = index < 0 ? 0 : (uint32_t)index + 1;
	return 0;
}

/* Fails if a plain tensor views its storage as another dtype than an earlier tensor did. */
static int check_tensor_dtype(struct sfr_py_collector *c, const struct sfr_py_found_tensor *tensor)
{
	PyObject *dtype = c->torch->dtype[tensor->dtype].dtype;
	struct sfr_py_storage *entry = &c->storages[tensor->storage];

	if (!entry->range_known && sfr_py_ask_storage_range(c, tensor->storage) != 0)
		return -1;
	if (entry->dtype == dtype)
		return 0;
	entry->dtype = dtype;
	return sfr_py_require_same_dtype(c, entry->addr, dtype);
}

/* Returns the address of the memory of the tensor's storage, or 0 if the caller has to ask the
 * storage: the bridge cannot tell the address, or data_ptr is not torch's own method, as in
 * tests. */
static uint64_t storage_address_from_bridge(const struct sfr_py_collector *c,
					    const struct sfr_py_found_tensor *tensor)
{
	uint64_t itemsize = c->torch->dtype[tensor->dtype].itemsize;

	if (c->torch->c_method[SFR_PY_DATA_PTR] == NULL)
		return 0;
	return sfr_py_bridge_storage_address(sfr_py_handle_of(tensor->object),
					     itemsize * (uint64_t)tensor->row[SFR_ROW_OFFSET]);
}

/* Adds the storage of a plain tensor, which is met for the first time. Returns 1; 0 if the storage
 * has no memory, for example zeros that torch has not allocated; -1 with an exception set. */
static int add_new_storage(struct sfr_py_collector *c, const struct sfr_py_found_tensor *tensor,
			   uint64_t storage_impl, size_t *number)
{
	PyObject *storage = sfr_py_ask_torch(c->torch, SFR_PY_UNTYPED_STORAGE, tensor->object);
	uint64_t nbytes = (uint64_t)tensor->row[SFR_ROW_NBYTES],
		 addr = storage_address_from_bridge(c, tensor);
	int rc = -1;

	if (storage == NULL || (addr == 0 && ask_address(c, storage, nbytes, &addr) != 0)) {
		rc = sfr_py_clear_ordinary_error(); /* 0: torch refuses, as if without memory */
	} else if (sfr_py_find_or_add_storage(c, storage, storage_impl, tensor->on_host, number) ==
		   0) {
		c->storages[*number].addr = addr;
		c->storages[*number].nbytes = nbytes;
		c->storages[*number].range_known = true;
		rc = 1;
	}
	Py_XDECREF(storage); /* storage_list has its own reference */
	return rc;
}

/* Finds a plain tensor's storage, or adds it. Sets the tensor's storage number, and the storage's
 * device and location tag. Returns 1; 0 if the storage has no memory; -1 with an exception set. */
static int find_or_add_storage(struct sfr_py_collector *c, struct sfr_py_found_tensor *tensor)
{
	uint64_t storage_impl = sfr_py_storage_impl_of(tensor->object);
	const uint64_t *known;
	size_t number = 0;
	int rc;

	if (storage_impl == 0)
		return 0; /* the tensor has no storage */
	known = sfr_py_map_find(&c->numbers->map, storage_impl);
	if (known) {
		number = (size_t)*known;
	} else {
		rc = add_new_storage(c, tensor, storage_impl, &number);
		if (rc <= 0)
			return rc;
	}
	tensor->storage = (uint32_t)number;
	if ((!tensor->on_host && ask_and_set_storage_device(c, number, tensor->object) != 0) ||
	    set_location_tag(c, number) != 0 || check_tensor_dtype(c, tensor) != 0)
		return -1;
	return 1;
}

/* Returns room for a row of `words` words, or NULL with an exception set. The caller adds the words
 * that it writes to c->rows->used. */
static int64_t *reserve_row(struct sfr_py_collector *c, int64_t words)
{
	struct sfr_py_row_memory *rows = c->rows;

	if (rows == NULL || rows->room - rows->used < (size_t)words) {
		size_t room = words < NR_WORDS ? NR_WORDS : (size_t)words;

		rows = PyMem_Malloc(sizeof(*rows) + room * sizeof(rows->words[0]));
		if (rows == NULL) {
			(void)PyErr_NoMemory(); /* always NULL */
			return NULL;
		}
		rows->next = c->rows;
		rows->used = 0;
		rows->room = room;
		c->rows = rows;
	}
	return rows->words + rows->used;
}

/* Makes the tensor's row through the bridge. Returns 1; 0 if torch refuses; -1 with an exception
 * set. */
static int write_row(struct sfr_py_collector *c, struct sfr_py_found_tensor *tensor)
{
	struct AtenTensorOpaque *handle = sfr_py_handle_of(tensor->object);
	enum { NDIM = 3 };                         /* most tensors have no more dimensions */
	int64_t words = SFR_ROW_HEADER + 2 * NDIM; /* 2: a size and a stride for each dimension */
	int64_t room, *row;

	do {
		room = words;
		row = reserve_row(c, room);
		if (row == NULL)
			return -1;
		words = sfr_py_bridge_describe_tensor(handle, row, room);
	} while (words > room); /* nothing was written: try again with more room */
	tensor->row = row;
	if (words <= 0)
		return 0;
	c->rows->used += (size_t)words;
	return 1;
}

/* Returns 1 + the index of a row's dtype in torch->dtype; 0 if the dtype is not there. */
static uint8_t dtype_index_plus_1(const struct sfr_py_collector *c, const int64_t *row)
{
	const int64_t number = row[SFR_ROW_DTYPE];

	return number >= 0 && number < SFR_PY_MAX_DTYPE_NUMBERS ?
		       c->torch->dtype_index_plus_1[number] :
		       0;
}

int sfr_py_describe_tensor(struct sfr_py_collector *c, struct sfr_py_found_tensor *tensor)
{
	int rc = write_row(c, tensor); /* 0: torch refuses to describe the tensor */
	uint8_t index_plus_1 = rc > 0 ? dtype_index_plus_1(c, tensor->row) : 0;

	if (index_plus_1 != 0) {
		tensor->dtype = (uint8_t)(index_plus_1 - 1);
		rc = find_or_add_storage(c, tensor);
	}
	tensor->plain = index_plus_1 != 0 && rc > 0;
	if (!tensor->plain) {
		tensor->row = NULL;
		return rc < 0 ? -1 : 0;
	}
	return sfr_py_prefetch_order_add(c, tensor->object,
					 PyList_GetItem(c->storage_list,
							(Py_ssize_t)tensor->storage),
					 &c->storages[tensor->storage]);
}
