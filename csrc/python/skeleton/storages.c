/* Where the found tensors live.
 *
 * A storage is known by the address of its StorageImpl and has a number from the moment it is
 * met: in a persistent id (the general road), or under a plain tensor, as long as that is in the
 * processor's cache. Its address and length are asked for once: there, or, where only the general
 * road has met it, when the pickler is done.
 *
 * torch.save refuses bytes that are seen as two dtypes, going by the address of the bytes. So
 * does check_dtype, whichever road the two came by.
 */
#include "skeleton/skeleton.h"

/* Doubles an array that is full. 0, or -1 with MemoryError set. */
int sfr_py_make_room(void **array, size_t used, size_t *room, size_t item)
{
	size_t wanted = *room == 0 ? 64 : 2 * *room;
	void *grown;

	if (used < *room)
		return 0;
	grown = PyMem_Realloc(*array, wanted * item);
	if (grown == NULL) {
		(void)PyErr_NoMemory(); /* always NULL */
		return -1;
	}
	*array = grown;
	*room = wanted;
	return 0;
}

/* The number of a storage, new or known. 0 or -1. */
int sfr_py_enter_storage(struct sfr_py_collector *c, PyObject *storage, uint64_t identity,
			 bool on_host, size_t *number)
{
	const uint64_t *known = sfr_py_map_find(&c->storage_at, identity);
	struct sfr_py_storage entry = { 0 };

	if (known) {
		*number = (size_t)*known;
		return 0;
	}
	entry.identity = identity;
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
	return sfr_py_map_add(&c->storage_at, identity, *number);
}

/* Refuses bytes that are seen as two dtypes, in torch's words. 0 or -1. */
int sfr_py_check_dtype(struct sfr_py_collector *c, uint64_t addr, PyObject *dtype)
{
	const uint64_t *known;

	if (addr == 0 || c->any_dtypes)
		return 0;
	known = sfr_py_map_find(&c->dtype_at, addr);
	if (!known)
		return sfr_py_map_add(&c->dtype_at, addr, (uint64_t)(uintptr_t)dtype);
	if (*known == (uint64_t)(uintptr_t)dtype)
		return 0;
	PyErr_SetString(PyExc_RuntimeError, "Cannot save multiple tensors or storages that "
					    "view the same data as different types");
	return -1;
}

/* Asks a storage for its length and the address of its memory, which makes a copy-on-write one own
 * its memory, as torch.save does too. 0 or -1. */
static int ask_memory(const struct sfr_py_collector *c, PyObject *storage, uint64_t *addr,
		      uint64_t *nbytes)
{
	if (sfr_py_ask_u64(c->kinds, SFR_PY_NBYTES, storage, nbytes) != 0 ||
	    sfr_py_ask_u64(c->kinds, SFR_PY_DATA_PTR, storage, addr) != 0)
		return -1;
	if (*addr != 0 || *nbytes == 0)
		return 0;
	PyErr_SetString(PyExc_RuntimeError, "a storage has a length and no memory");
	return -1;
}

/* Asks a storage that only the general road has met. 0 or -1. */
int sfr_py_ask_storage(struct sfr_py_collector *c, size_t number)
{
	struct sfr_py_storage *entry = &c->storages[number];
	PyObject *storage = PyList_GetItem(c->storage_list, (Py_ssize_t)number);
	int rc;

	if (storage == NULL)
		return -1;
	/* That of a meta tensor refuses to tell where it is. */
	if (entry->on_host || entry->device != 0)
		rc = ask_memory(c, storage, &entry->addr, &entry->nbytes);
	else
		rc = sfr_py_ask_u64(c->kinds, SFR_PY_NBYTES, storage, &entry->nbytes);
	entry->known = rc == 0;
	return rc;
}

/* The location tag of a plain tensor's storage, unless it is known. 0 or -1. */
static int ask_location(struct sfr_py_collector *c, size_t number, bool on_host)
{
	PyObject *location;

	if (c->storages[number].location != NULL)
		return 0;
	if (on_host && c->plain_cpu) {
		location = c->kinds->cpu;
		Py_INCREF(location);
	} else {
		location = PyObject_CallFunctionObjArgs(c->kinds->part[SFR_PY_LOCATION],
							PyList_GetItem(c->storage_list,
								       (Py_ssize_t)number),
							NULL);
		if (location == NULL)
			return -1;
		if (!PyUnicode_CheckExact(location)) {
			PyErr_SetString(PyExc_TypeError, "a location tag is a str");
			Py_DECREF(location);
			return -1;
		}
		PyUnicode_InternInPlace(&location); /* the splice compares addresses */
	}
	c->storages[number].location = location;
	return 0;
}

/* The plain tensors from `from` on, as a list. A new reference. */
static PyObject *plain_tensors(const struct sfr_py_collector *c, size_t from)
{
	PyObject *list = PyList_New(0);
	size_t i;

	if (list == NULL)
		return NULL;
	for (i = from; i < c->nr_found; i++) {
		if (c->found[i].plain && PyList_Append(list, c->found[i].object) != 0) {
			Py_DECREF(list);
			return NULL;
		}
	}
	return list;
}

/* Has the bridge write the rows of some tensors, kept in c->rows. NULL with an exception set. */
static const int64_t *ask_bridge(struct sfr_py_collector *c, void *const *tensors, size_t nr)
{
	size_t room = (SFR_ROW_HEADER + 6) * nr; /* three dimensions each; tried twice */
	int tries;

	for (tries = 0; tries < 2; tries++) {
		struct sfr_py_rows *rows;
		int64_t words;

		rows = PyMem_Malloc(sizeof(*rows) + room * sizeof(rows->words[0]));
		if (rows == NULL) {
			(void)PyErr_NoMemory(); /* always NULL */
			return NULL;
		}
		rows->next = c->rows;
		c->rows = rows;
		words = sfr_py_bridge_describe(tensors, nr, rows->words, (int64_t)room);
		if (words < 0) {
			PyErr_SetString(PyExc_RuntimeError, "torch could not describe a tensor");
			return NULL;
		}
		if ((size_t)words <= room)
			return rows->words;
		room = (size_t)words;
	}
	PyErr_SetString(PyExc_RuntimeError, "a tensor was reshaped while it was saved");
	return NULL;
}

/* The rows of some tensors, which are alive. Neither torch nor the bridge lets go of the interpreter
 * lock meanwhile. NULL with an exception set. */
static const int64_t *describe(struct sfr_py_collector *c, PyObject *tensors)
{
	PyObject *capsules =
		PyObject_CallFunctionObjArgs(c->kinds->part[SFR_PY_TO_HANDLES], tensors, NULL);
	size_t nr = capsules != NULL && PyList_Check(capsules) ? (size_t)PyList_Size(capsules) : 0;
	void **handles = PyMem_Malloc((nr + 1) * sizeof(*handles));
	const int64_t *rows = NULL;
	size_t i = 0;

	if (handles == NULL)
		(void)PyErr_NoMemory(); /* always NULL */
	else if (capsules != NULL && nr != (size_t)PyList_Size(tensors))
		PyErr_SetString(PyExc_RuntimeError, "torch gave no handles of tensors");
	if (PyErr_Occurred())
		goto end; /* whatever it gave is lost */
	for (; i < nr; i++) {
		handles[i] = PyCapsule_GetPointer(PyList_GetItem(capsules, (Py_ssize_t)i), NULL);
		if (handles[i] == NULL)
			break;
	}
	if (i == nr)
		rows = ask_bridge(c, handles, nr);
	sfr_py_bridge_drop(handles, i);
end:
	PyMem_Free(handles);
	Py_XDECREF(capsules);
	return rows;
}

/* On which CUDA device a storage lives that is not the host's, from a tensor over it. 0 or -1. */
static int ask_device(struct sfr_py_collector *c, size_t number, PyObject *tensor)
{
	PyObject *answer;
	long index;

	if (c->storages[number].on_host || c->storages[number].device != 0)
		return 0;
	answer = PyObject_CallFunctionObjArgs(c->kinds->part[SFR_PY_DEVICE_INDEX], tensor, NULL);
	if (answer == NULL)
		return -1;
	index = PyLong_AsLong(answer);
	Py_DECREF(answer);
	if (index == -1 && PyErr_Occurred())
		return -1;
	c->storages[number].device = index < 0 ? 0 : (uint32_t)index + 1;
	return 0;
}

int sfr_py_find_storage(struct sfr_py_collector *c, struct sfr_py_found *tensor)
{
	PyObject *storage = sfr_py_ask(c->kinds, SFR_PY_UNTYPED_STORAGE, tensor->object);
	uint64_t identity, addr = 0, nbytes = 0;
	size_t number = 0;
	bool is_new;
	int rc = -1;

	if (storage == NULL)
		return -1;
	if (sfr_py_ask_u64(c->kinds, SFR_PY_CDATA, storage, &identity) != 0)
		goto end;
	is_new = !sfr_py_map_find(&c->storage_at, identity);
	if (is_new && ask_memory(c, storage, &addr, &nbytes) != 0) {
		tensor->plain = false; /* zeros that are nowhere, for one */
		rc = sfr_py_refused();
		goto end;
	}
	if (sfr_py_enter_storage(c, storage, identity, tensor->on_host, &number) != 0)
		goto end;
	if (is_new) {
		c->storages[number].addr = addr;
		c->storages[number].nbytes = nbytes;
		c->storages[number].known = true;
	}
	rc = ask_location(c, number, tensor->on_host);
	if (rc == 0 && !tensor->on_host)
		rc = ask_device(c, number, tensor->object);
	if (rc == 0)
		rc = sfr_py_trail_add(c, tensor->object, storage, identity);
	tensor->storage = (uint32_t)number;
end:
	Py_DECREF(storage);
	return rc;
}

/* Refuses a plain tensor that sees its storage as another dtype than one before. 0 or -1. */
static int check_tensor(struct sfr_py_collector *c, const struct sfr_py_found *tensor)
{
	const struct sfr_py_dtype *dtype = &c->kinds->dtype[tensor->dtype];
	struct sfr_py_storage *entry = &c->storages[tensor->storage];

	if (!entry->known && sfr_py_ask_storage(c, tensor->storage) != 0)
		return -1;
	if (entry->dtype == dtype->dtype)
		return 0;
	entry->dtype = dtype->dtype;
	return sfr_py_check_dtype(c, entry->addr, dtype->dtype);
}

int sfr_py_place_tensors(struct sfr_py_collector *c)
{
	PyObject *tensors = plain_tensors(c, c->nr_placed);
	const int64_t *row = NULL;
	size_t from = c->nr_placed;
	int rc = 0;

	if (tensors == NULL)
		return -1;
	c->nr_placed = c->nr_found; /* the bridge may run Python code that comes back here */
	if (PyList_Size(tensors) != 0) {
		row = describe(c, tensors);
		rc = row == NULL ? -1 : 0;
	}
	Py_DECREF(tensors);
	for (; rc == 0 && from < c->nr_placed; from++) {
		struct sfr_py_found *tensor = &c->found[from];

		if (!tensor->plain)
			continue;
		rc = check_tensor(c, tensor);
		tensor->row = row;
		row += SFR_ROW_HEADER + 2 * (size_t)row[SFR_ROW_NDIM];
	}
	return rc;
}
