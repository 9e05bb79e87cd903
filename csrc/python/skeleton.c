/* The skeleton: an object's pickle, and the storages that its tensors live in.
 *
 * skeleton.py gives the C pickler (protocol 2) a Collector's persistent_id. For each object
 * that the pickler comes to, it answers
 *
 *   a number   for a plain tensor (kinds.c): the tensor's place in the list of found ones;
 *   a tuple    for a storage: torch's own id, made by a Python function (the general road);
 *   None       for everything else: the pickler goes on. A tensor that is not plain reduces
 *              itself, and its storages and inner tensors come by here in their turn.
 *
 * When the pickler is done, finish() has the bridge describe all plain tensors in one call,
 * finds their storages, and lays the storages out as rows of struct sfr_source. splice() then
 * writes the tensors into the pickle (splice.c).
 *
 * A storage is known by the address of its StorageImpl, never by that of its bytes. Every
 * tensor and storage found is held, so that none that a __reduce__ made for the moment dies
 * before it is described and no address is met twice. The pickler refers to the collector
 * and the collector not to the pickler: there is no cycle, and both go at once.
 *
 * A collector serves one save and is used by one thread. Python code that runs inside a call
 * of it (a __getstate__, a finalizer, a signal handler) makes collectors of its own.
 */
#include <string.h>

#include "skeleton.h"

/* Numbers or addresses, none 0, to numbers: open addressing in a power of two. */
struct map {
	struct {
		uint64_t key, value;
	} *slots;
	size_t used, room;
};

struct collector {
	PyObject_HEAD
	struct sfr_py_kinds *kinds;
	bool plain_road; /* false: something is in force that only the general road obeys */
	bool plain_cpu;  /* true: nobody has changed what torch tags host storages with */
	struct sfr_py_found *found;
	size_t nr_found, found_room;
	struct map found_at; /* tensor -> number */
	struct sfr_py_storage *storages;
	size_t nr_storages, storages_room;
	struct map storage_at;   /* StorageImpl -> number */
	struct map dtype_at;     /* address of bytes -> dtype they are seen as (borrowed) */
	PyObject *storage_list;  /* list of UntypedStorage, by number */
	int64_t *rows;           /* the bridge's words */
};

/* ---- map ------------------------------------------------------------------ */

static size_t map_slot(const struct map *map, uint64_t key)
{
	size_t i = (size_t)((key >> 4) * UINT64_C(0x9e3779b97f4a7c15) >> 20) & (map->room - 1);

	while (map->slots[i].key != 0 && map->slots[i].key != key)
		i = (i + 1) & (map->room - 1);
	return i;
}

static bool map_get(const struct map *map, uint64_t key, uint64_t *value)
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

/* Adds a key that is not there. 0, or -1 with MemoryError set. */
static int map_add(struct map *map, uint64_t key, uint64_t value)
{
	size_t i;

	if (2 * (map->used + 1) > map->room) {
		struct map grown = {NULL, map->used, map->room == 0 ? 64 : 4 * map->room};

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

/* Doubles an array that is full. 0, or -1 with MemoryError set. */
static int make_room(void **array, size_t used, size_t *room, size_t item)
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

/* ---- the pickler's questions ------------------------------------------------ */

/* Enters a tensor met for the first time; *number is its place. 0 or -1. */
static int add_found(struct collector *c, PyObject *object, bool exact, size_t *number)
{
	struct sfr_py_found found = {0};

	found.object = object;
	if (exact && c->plain_road && sfr_py_examine(c->kinds, &found) != 0)
		return -1;
	if (c->nr_found >= INT32_MAX) {
		PyErr_SetString(PyExc_OverflowError, "too many tensors");
		return -1;
	}
	if (make_room((void **)&c->found, c->nr_found, &c->found_room, sizeof(found)) != 0 ||
	    map_add(&c->found_at, (uint64_t)(uintptr_t)object, c->nr_found) != 0)
		return -1;
	Py_INCREF(object);
	*number = c->nr_found;
	c->found[c->nr_found++] = found;
	return 0;
}

/* 1 for what torch.save takes for a storage, 0 for other objects, -1 with an exception set. */
static int is_storage(const struct collector *c, PyObject *object)
{
	int yes = PyObject_IsInstance(object, c->kinds->part[SFR_PY_TYPED_STORAGE]);

	if (yes != 0)
		return yes;
	return PySet_Contains(c->kinds->part[SFR_PY_STORAGE_CLASSES],
			      (PyObject *)Py_TYPE(object));
}

static PyObject *collector_persistent_id(PyObject *self, PyObject *object)
{
	struct collector *c = (struct collector *)self;
	PyTypeObject *type = Py_TYPE(object);
	PyObject *const *part = c->kinds->part;
	bool exact = (PyObject *)type == part[SFR_PY_TENSOR] ||
		     (PyObject *)type == part[SFR_PY_PARAMETER];
	uint64_t known;
	size_t number;
	int yes;

	if (!exact) {
		if (type == &PyUnicode_Type || type == &PyLong_Type || type == &PyDict_Type ||
		    type == &PyTuple_Type || type == &PyList_Type || type == &PyFloat_Type ||
		    type == &PyBool_Type || type == &PyBytes_Type || object == Py_None)
			Py_RETURN_NONE;
		if (!PyType_IsSubtype(type, (PyTypeObject *)part[SFR_PY_TENSOR])) {
			yes = is_storage(c, object);
			if (yes < 0)
				return NULL;
			if (yes == 0)
				Py_RETURN_NONE;
			return PyObject_CallFunctionObjArgs(part[SFR_PY_STORAGE_TUPLE], self,
							    object, NULL);
		}
	}
	/* What was plain at its first occurrence stays so, and what was not too: the pickler's
	 * memo or the splice's keeps the tensor one. */
	if (map_get(&c->found_at, (uint64_t)(uintptr_t)object, &known))
		number = (size_t)known;
	else if (add_found(c, object, exact, &number) != 0)
		return NULL;
	if (!c->found[number].plain)
		Py_RETURN_NONE;
	return PyLong_FromSize_t(number);
}

/* ---- storages --------------------------------------------------------------- */

/* The number of a storage, new or known. 0 or -1. */
static int enter_storage(struct collector *c, PyObject *storage, uint64_t identity, bool on_host,
			 size_t *number)
{
	struct sfr_py_storage entry = {0};
	uint64_t known;

	if (map_get(&c->storage_at, identity, &known)) {
		*number = (size_t)known;
		return 0;
	}
	entry.identity = identity;
	entry.on_host = on_host;
	if (c->nr_storages >= UINT32_MAX) {
		PyErr_SetString(PyExc_OverflowError, "too many storages");
		return -1;
	}
	if (make_room((void **)&c->storages, c->nr_storages, &c->storages_room, sizeof(entry)) != 0 ||
	    PyList_Append(c->storage_list, storage) != 0)
		return -1;
	*number = c->nr_storages;
	c->storages[c->nr_storages++] = entry;
	return map_add(&c->storage_at, identity, *number);
}

/* Refuses bytes that are seen as two dtypes, in torch's words. 0 or -1. */
static int check_dtype(struct collector *c, uint64_t addr, PyObject *dtype)
{
	uint64_t known;

	if (addr == 0)
		return 0;
	if (!map_get(&c->dtype_at, addr, &known))
		return map_add(&c->dtype_at, addr, (uint64_t)(uintptr_t)dtype);
	if (known == (uint64_t)(uintptr_t)dtype)
		return 0;
	PyErr_SetString(PyExc_RuntimeError, "Cannot save multiple tensors or storages that "
					    "view the same data as different types");
	return -1;
}

/* add_storage(storage, identity, on_host, addr, dtype) -> number: one storage of the general
 * road, seen as `dtype` (torch never frees one). An addr of 0 takes no part in the check of
 * types. */
static PyObject *collector_add_storage(PyObject *self, PyObject *args)
{
	struct collector *c = (struct collector *)self;
	unsigned long long identity, addr;
	PyObject *storage, *dtype;
	size_t number;
	int on_host;

	if (!PyArg_ParseTuple(args, "OKpKO:add_storage", &storage, &identity, &on_host, &addr,
			      &dtype))
		return NULL;
	if (identity == 0) {
		PyErr_SetString(PyExc_ValueError, "a storage has an address");
		return NULL;
	}
	if (check_dtype(c, addr, dtype) != 0 ||
	    enter_storage(c, storage, identity, on_host, &number) != 0)
		return NULL;
	return PyLong_FromSize_t(number);
}

/* Asks a storage for its address and length. 0 or -1. */
static int ask_storage(struct collector *c, size_t number)
{
	struct sfr_py_storage *entry = &c->storages[number];
	PyObject *storage = PyList_GetItem(c->storage_list, (Py_ssize_t)number);
	uint64_t addr = 0, nbytes;

	if (storage == NULL)
		return -1;
	if (sfr_py_ask_u64(c->kinds, SFR_PY_NBYTES, storage, &nbytes) != 0)
		return -1;
	/* A general road's meta storage refuses to tell; a plain tensor's device does not. */
	if ((entry->on_host || entry->location != NULL) &&
	    sfr_py_ask_u64(c->kinds, SFR_PY_DATA_PTR, storage, &addr) != 0)
		return -1;
	if (entry->on_host && addr == 0 && nbytes != 0) {
		PyErr_SetString(PyExc_RuntimeError, "a host storage has a length and no memory");
		return -1;
	}
	entry->addr = addr;
	entry->nbytes = nbytes;
	entry->known = true;
	return 0;
}

/* The location tag of a plain tensor's storage, unless it is known. 0 or -1. */
static int ask_location(struct collector *c, size_t number, bool on_host)
{
	PyObject *location;

	if (c->storages[number].location != NULL)
		return 0;
	if (on_host && c->plain_cpu) {
		location = c->kinds->cpu;
		Py_INCREF(location);
	} else {
		location = PyObject_CallFunctionObjArgs(
			c->kinds->part[SFR_PY_LOCATION],
			PyList_GetItem(c->storage_list, (Py_ssize_t)number), NULL);
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

/* ---- after the pickler -------------------------------------------------------- */

/* The plain tensors, as a list. A new reference. */
static PyObject *plain_tensors(const struct collector *c)
{
	PyObject *list = PyList_New(0);
	size_t i;

	if (list == NULL)
		return NULL;
	for (i = 0; i < c->nr_found; i++) {
		if (c->found[i].plain && PyList_Append(list, c->found[i].object) != 0) {
			Py_DECREF(list);
			return NULL;
		}
	}
	return list;
}

/* Has the bridge fill c->rows; *words is what it wrote. 0 or -1. */
static int ask_bridge(struct collector *c, PyObject *describe, PyObject *tensors, size_t *words)
{
	size_t room = 10 * (size_t)PyList_Size(tensors); /* three dimensions each; tried twice */
	int tries;

	for (tries = 0; tries < 2; tries++) {
		PyObject *answer;

		PyMem_Free(c->rows);
		c->rows = PyMem_Malloc(room * sizeof(*c->rows) + 1);
		if (c->rows == NULL) {
			(void)PyErr_NoMemory(); /* always NULL */
			return -1;
		}
		answer = PyObject_CallFunction(describe, "OKn", tensors,
					       (unsigned long long)(uintptr_t)c->rows,
					       (Py_ssize_t)room);
		if (answer == NULL)
			return -1;
		*words = PyLong_AsSize_t(answer);
		Py_DECREF(answer);
		if (*words == (size_t)-1 && PyErr_Occurred())
			return -1;
		if (*words <= room)
			return 0;
		room = *words;
	}
	PyErr_SetString(PyExc_RuntimeError, "a tensor was reshaped while it was saved");
	return -1;
}

/* Finds the storage of a plain tensor. 0 or -1. */
static int find_storage(struct collector *c, struct sfr_py_found *tensor)
{
	PyObject *storage = PyObject_CallFunctionObjArgs(c->kinds->part[SFR_PY_UNTYPED_STORAGE],
							 tensor->object, NULL);
	uint64_t identity;
	size_t number = 0;
	int rc = -1;

	if (storage == NULL)
		return -1;
	if (sfr_py_ask_u64(c->kinds, SFR_PY_CDATA, storage, &identity) == 0 &&
	    enter_storage(c, storage, identity, tensor->on_host, &number) == 0)
		rc = ask_location(c, number, tensor->on_host);
	tensor->storage = (uint32_t)number;
	Py_DECREF(storage);
	return rc;
}

/* Takes from a plain tensor's row what it tells of the tensor's storage. 0 or -1. */
static int read_row(struct collector *c, const struct sfr_py_found *tensor, const int64_t *row)
{
	const struct sfr_py_dtype *dtype = &c->kinds->dtype[tensor->dtype];
	struct sfr_py_storage *entry = &c->storages[tensor->storage];

	if (!entry->known) {
		/* The address is there only if the tensor has elements. */
		if (row[0] != 0) {
			entry->addr = (uint64_t)row[0] - (uint64_t)row[1] * dtype->itemsize;
			entry->nbytes = (uint64_t)row[2];
			entry->known = true;
		} else if (ask_storage(c, tensor->storage) != 0) {
			return -1;
		}
	}
	if (entry->dtype == dtype->dtype)
		return 0;
	entry->dtype = dtype->dtype;
	return check_dtype(c, entry->addr, dtype->dtype);
}

/* Describes every plain tensor and places it. 0 or -1. */
static int place_tensors(struct collector *c, PyObject *describe)
{
	PyObject *tensors;
	size_t words = 0, at = 0, i;
	int rc;

	/* First, since a tensor without a storage is refused here in torch's words. */
	for (i = 0; i < c->nr_found; i++)
		if (c->found[i].plain && find_storage(c, &c->found[i]) != 0)
			return -1;
	tensors = plain_tensors(c);
	if (tensors == NULL)
		return -1;
	rc = PyList_Size(tensors) == 0 ? 0 : ask_bridge(c, describe, tensors, &words);
	Py_DECREF(tensors);
	for (i = 0; rc == 0 && i < c->nr_found; i++) {
		struct sfr_py_found *tensor = &c->found[i];
		const int64_t *row = c->rows + at;

		if (!tensor->plain)
			continue;
		at += 4 + 2 * (size_t)row[3];
		rc = read_row(c, tensor, row);
		if (rc == 0)
			tensor->row = row;
	}
	return rc;
}

/* Tensors that were found as objects of the tree. Where a tensor has reduced itself, those
 * that nobody but the collector holds were made for the moment and are not counted. */
static size_t count_tensors(const struct collector *c)
{
	size_t count = 0, i;
	bool general = false;

	for (i = 0; i < c->nr_found; i++)
		general = general || !c->found[i].plain;
	for (i = 0; i < c->nr_found; i++)
		count += !general || Py_REFCNT(c->found[i].object) > 1;
	return count;
}

/* finish(describe) -> (storages, identities, rows, elsewhere, number of tensors). `elsewhere`
 * lists the numbers of the storages that are not in host memory; their rows have no address. */
static PyObject *collector_finish(PyObject *self, PyObject *describe)
{
	struct collector *c = (struct collector *)self;
	PyObject *identities = NULL, *elsewhere = NULL, *rows = NULL, *result = NULL, *number;
	struct sfr_source *sources;
	size_t general = c->nr_storages, i;
	int rc = 0;

	if (c->rows != NULL) {
		PyErr_SetString(PyExc_RuntimeError, "the collector has finished");
		return NULL;
	}
	for (i = 0; i < general; i++)
		if (ask_storage(c, i) != 0)
			return NULL;
	if (place_tensors(c, describe) != 0)
		return NULL;
	identities = PyList_New((Py_ssize_t)c->nr_storages);
	elsewhere = PyList_New(0);
	rows = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(c->nr_storages * sizeof(*sources)));
	if (identities == NULL || elsewhere == NULL || rows == NULL)
		goto fail;
	sources = (struct sfr_source *)(void *)PyByteArray_AsString(rows);
	for (i = 0; i < c->nr_storages; i++) {
		const struct sfr_py_storage *entry = &c->storages[i];

		sources[i] = (struct sfr_source){entry->on_host ? entry->addr : 0, entry->nbytes,
						 SFR_CAPTURED, 0};
		number = PyLong_FromUnsignedLongLong(entry->identity);
		if (number == NULL)
			goto fail;
		if (PyList_SetItem(identities, (Py_ssize_t)i, number) != 0) /* takes it over */
			goto fail;
		if (entry->on_host)
			continue;
		number = PyLong_FromSize_t(i);
		if (number == NULL)
			goto fail;
		rc = PyList_Append(elsewhere, number);
		Py_DECREF(number);
		if (rc != 0)
			goto fail;
	}
	result = Py_BuildValue("OOOOn", c->storage_list, identities, rows, elsewhere,
			       (Py_ssize_t)count_tensors(c));
fail:
	Py_XDECREF(identities);
	Py_XDECREF(elsewhere);
	Py_XDECREF(rows);
	return result;
}

/* splice(pickle) -> data.pkl. After finish(). */
static PyObject *collector_splice(PyObject *self, PyObject *pickle)
{
	struct collector *c = (struct collector *)self;
	struct sfr_py_splice job = {
		.kinds = c->kinds, .found = c->found, .nr_found = c->nr_found,
		.storages = c->storages,
	};
	char *bytes;
	Py_ssize_t len;

	if (PyBytes_AsStringAndSize(pickle, &bytes, &len) != 0)
		return NULL;
	job.in = (const unsigned char *)bytes;
	job.len = (size_t)len;
	return sfr_py_splice(&job);
}

/* ---- types -------------------------------------------------------------------- */

static int collector_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct collector *c = (struct collector *)self;
	size_t i;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(c->kinds);
	Py_VISIT(c->storage_list);
	for (i = 0; i < c->nr_found; i++)
		Py_VISIT(c->found[i].object);
	return 0;
}

static int collector_clear(PyObject *self)
{
	struct collector *c = (struct collector *)self;

	while (c->nr_found != 0) /* the array is whole whenever a finalizer runs */
		Py_DECREF(c->found[--c->nr_found].object);
	while (c->nr_storages != 0)
		Py_XDECREF(c->storages[--c->nr_storages].location);
	Py_CLEAR(c->storage_list);
	return 0;
}

static void collector_dealloc(PyObject *self)
{
	struct collector *c = (struct collector *)self;
	PyTypeObject *type = Py_TYPE(self);
	freefunc free_self = (freefunc)PyType_GetSlot(type, Py_tp_free);

	PyObject_GC_UnTrack(self);
	(void)collector_clear(self); /* always 0 */
	Py_CLEAR(c->kinds);
	PyMem_Free(c->found);
	PyMem_Free(c->found_at.slots);
	PyMem_Free(c->storages);
	PyMem_Free(c->storage_at.slots);
	PyMem_Free(c->dtype_at.slots);
	PyMem_Free(c->rows);
	free_self(self);
	Py_DECREF(type);
}

/* Collector(kinds, plain_road, plain_cpu) */
static PyObject *collector_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = {"kinds", "plain_road", "plain_cpu", NULL};
	allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
	struct sfr_py_state *state = PyType_GetModuleState(type);
	struct collector *c;
	PyObject *kinds;
	int plain_road, plain_cpu;

	if (state == NULL)
		return NULL;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!pp:Collector", names, state->kinds_type,
					 &kinds, &plain_road, &plain_cpu))
		return NULL;
	c = (struct collector *)alloc(type, 0); /* zeroed */
	if (c == NULL)
		return NULL;
	Py_INCREF(kinds);
	c->kinds = (struct sfr_py_kinds *)kinds;
	c->plain_road = plain_road;
	c->plain_cpu = plain_cpu;
	c->storage_list = PyList_New(0);
	if (c->storage_list == NULL) {
		Py_DECREF(c);
		return NULL;
	}
	return (PyObject *)c;
}

static PyMethodDef collector_methods[] = {
	{"persistent_id", collector_persistent_id, METH_O,
	 "The pickler's question: a number, a tuple or None."},
	{"add_storage", collector_add_storage, METH_VARARGS,
	 "add_storage(storage, identity, on_host, addr, dtype) -> its number."},
	{"finish", collector_finish, METH_O,
	 "finish(describe) -> (storages, identities, rows, elsewhere, number of tensors)."},
	{"splice", collector_splice, METH_O, "splice(pickle) -> the file's data.pkl."},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot collector_slots[] = {
	{Py_tp_doc, (void *)"Finds the tensors and storages of one object while it is pickled."},
	{Py_tp_new, (void *)collector_new},
	{Py_tp_dealloc, (void *)collector_dealloc},
	{Py_tp_traverse, (void *)collector_traverse},
	{Py_tp_clear, (void *)collector_clear},
	{Py_tp_methods, collector_methods},
	{0, NULL},
};

static PyType_Spec collector_spec = {
	.name = "stillframe._core.Collector",
	.basicsize = sizeof(struct collector),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = collector_slots,
};

int sfr_py_add_skeleton(PyObject *module)
{
	struct sfr_py_state *state = sfr_py_state(module);

	if (sfr_py_add_kinds(module) != 0)
		return -1;
	state->collector_type =
		(PyTypeObject *)PyType_FromModuleAndSpec(module, &collector_spec, NULL);
	if (state->collector_type == NULL)
		return -1;
	return PyModule_AddType(module, state->collector_type);
}
