/* The skeleton: an object's pickle, and the storages of its tensors.
 *
 * skeleton.py gives the C pickler (protocol 2) a Collector's persistent_id, which returns for each
 * object
 *
 *   a number   for a plain tensor (torch_types.c): its index in the list of found tensors;
 *   a tuple    for a storage: torch's own id, made by a Python function (torch's own path);
 *   None       for everything else: the pickler goes on. The storages and inner tensors of a
 *              tensor that is not plain come here later.
 *
 * When the pickler is done, finish() lays the storages out as rows of struct sfr_source, and
 * splice() writes the tensors into the pickle (pickle_splice.c). A snapshot has no pickler: its
 * walk gives the tensors to the collector (copies.c).
 *
 * A storage is identified by the address of its StorageImpl, torch's C++ object of a storage. The
 * collector keeps every tensor and storage alive that it finds. Otherwise a temporary one, made by
 * a __reduce__, could be freed and its address used again.
 *
 * A collector serves one save on one thread. */
#include "skeleton/skeleton.h"
#include "torch/words.h"
#include "sfr/source.h"

/* ---- persistent_id ----------------------------------------------------------- */

int sfr_py_collector_add_tensor(struct sfr_py_collector *c, PyObject *object, bool exact,
				size_t *number)
{
	struct sfr_py_found_tensor found = { 0 };

	found.object = object;
	sfr_py_prefetch_later_tensor(c);
	if (exact && c->fast_path && sfr_py_examine_tensor(c->torch, &found) != 0)
		return -1;
	if (found.plain && sfr_py_describe_tensor(c, &found) != 0)
		return -1;
	if (c->nr_found >= INT32_MAX) {
		PyErr_SetString(PyExc_OverflowError, "too many tensors");
		return -1;
	}
	if (sfr_py_make_room((void **)&c->found, c->nr_found, &c->found_room, sizeof(found)) != 0 ||
	    sfr_py_map_add(&c->index_by_tensor, (uint64_t)(uintptr_t)object, c->nr_found) != 0)
		return -1;
	Py_INCREF(object);
	*number = c->nr_found;
	c->found[c->nr_found++] = found;
	return 0;
}

/* Returns 1 if torch.save treats the object as a storage, 0 if not, -1 with an exception set. */
static int is_storage(const struct sfr_py_collector *c, PyObject *object)
{
	int yes = PyObject_IsInstance(object, c->torch->item[SFR_PY_TYPED_STORAGE]);

	if (yes != 0)
		return yes;
	return PySet_Contains(c->torch->item[SFR_PY_STORAGE_CLASSES], (PyObject *)Py_TYPE(object));
}

/* Returns whether the type is a frequent one that is neither a tensor nor a storage. */
static bool is_builtin(const PyTypeObject *type)
{
	return type == &PyUnicode_Type || type == &PyLong_Type || type == &PyDict_Type ||
	       type == &PyTuple_Type || type == &PyList_Type || type == &PyFloat_Type ||
	       type == &PyBool_Type || type == &PyBytes_Type || type == Py_TYPE(Py_None);
}

/* Returns the id of a tensor: a number, or None if the tensor is not plain. A tensor that was met
 * before gets the same id again. */
static PyObject *find_or_add_tensor_id(struct sfr_py_collector *c, PyObject *object, bool exact)
{
	const uint64_t *known = sfr_py_map_find(&c->index_by_tensor, (uintptr_t)object);
	size_t number;

	if (known)
		number = (size_t)*known;
	else if (sfr_py_collector_add_tensor(c, object, exact, &number) != 0)
		return NULL;
	if (!c->found[number].plain)
		Py_RETURN_NONE;
	return PyLong_FromSize_t(number);
}

static PyObject *collector_persistent_id(PyObject *self, PyObject *object)
{
	struct sfr_py_collector *c = (struct sfr_py_collector *)self;
	PyTypeObject *type = Py_TYPE(object);
	PyObject *const *item = c->torch->item;
	int yes;

	if ((PyObject *)type == item[SFR_PY_TENSOR] || (PyObject *)type == item[SFR_PY_PARAMETER])
		return find_or_add_tensor_id(c, object, true);
	if (type == &PyDict_Type) /* probably the container of the next tensors, see prefetch.c */
		c->last_dict = (uintptr_t)object;
	if (is_builtin(type))
		Py_RETURN_NONE;
	if (PyType_IsSubtype(type, (PyTypeObject *)item[SFR_PY_TENSOR]))
		return find_or_add_tensor_id(c, object, false);
	yes = is_storage(c, object);
	if (yes < 0)
		return NULL;
	if (yes == 0)
		Py_RETURN_NONE;
	return PyObject_CallFunctionObjArgs(item[SFR_PY_STORAGE_TUPLE], self, object, NULL);
}

/* add_storage(storage, storage_impl, device_plus_1, addr, dtype) -> number. Adds a storage that
 * torch itself pickles, viewed as `dtype`.
 *   storage_impl   address of the StorageImpl
 *   device_plus_1  0: host memory; n: CUDA device n - 1; -1: elsewhere
 *   addr           address of the bytes; 0: the dtype is not checked */
static PyObject *collector_add_storage(PyObject *self, PyObject *args)
{
	struct sfr_py_collector *c = (struct sfr_py_collector *)self;
	unsigned long long storage_impl, addr;
	PyObject *storage, *dtype;
	size_t number;
	int device_plus_1;

	if (!PyArg_ParseTuple(args, "OKiKO:add_storage", &storage, &storage_impl, &device_plus_1,
			      &addr, &dtype))
		return NULL;
	if (storage_impl == 0) {
		PyErr_SetString(PyExc_ValueError, "a storage has an address");
		return NULL;
	}
	if (sfr_py_require_same_dtype(c, addr, dtype) != 0 ||
	    sfr_py_find_or_add_storage(c, storage, storage_impl, device_plus_1 == 0, &number) != 0)
		return NULL;
	if (device_plus_1 > 0)
		c->storages[number].device_plus_1 = (uint32_t)device_plus_1;
	return PyLong_FromSize_t(number);
}

/* ---- after the pickler -------------------------------------------------------- */

/* Returns the number of tensors in the pickled object. Temporary tensors, made by the __reduce_ex__
 * of a tensor that is not plain, do not count. Only the collector still refers to them. */
static size_t count_tensors(const struct sfr_py_collector *c)
{
	size_t count = 0, i;
	bool all_plain = true;

	for (i = 0; i < c->nr_found; i++)
		if (!c->found[i].plain)
			all_plain = false;
	if (all_plain)
		return c->nr_found;
	for (i = 0; i < c->nr_found; i++)
		if (Py_REFCNT(c->found[i].object) > 1)
			count++;
	return count;
}

/* Returns the numbers of the CUDA devices with storages, as a tuple. */
static PyObject *list_devices_of_storages(const struct sfr_py_collector *c)
{
	enum { MAX_DEVICES = 1024 }; /* torch has at most 256 */
	bool seen[MAX_DEVICES] = { false };
	PyObject *list = PyList_New(0), *number, *tuple;
	size_t i;

	for (i = 0; list != NULL && i < c->nr_storages; i++) {
		uint32_t device_plus_1 = c->storages[i].device_plus_1, device = device_plus_1 - 1;

		if (device_plus_1 == 0 || device_plus_1 > MAX_DEVICES || seen[device])
			continue;
		seen[device] = true;
		number = PyLong_FromUnsignedLong(device);
		if (number == NULL || PyList_Append(list, number) != 0)
			Py_CLEAR(list);
		Py_XDECREF(number);
	}
	tuple = list != NULL ? PyList_AsTuple(list) : NULL;
	Py_XDECREF(list);
	return tuple;
}

/* finish() -> (storages, numbers, rows, elsewhere, number of tensors, devices).
 *   storages   list
 *   numbers    Numbers
 *   rows       bytearray of struct sfr_source, by number of the storage
 *   elsewhere  list of the numbers of storages that are neither in host memory nor on a CUDA
 *              device; their rows have no address
 *   devices    tuple of the numbers of CUDA devices with storages */
static PyObject *collector_finish(PyObject *self, PyObject *unused)
{
	struct sfr_py_collector *c = (struct sfr_py_collector *)self;
	PyObject *elsewhere = NULL, *rows = NULL, *result = NULL, *number;
	struct sfr_source *sources;
	size_t i;
	int rc = 0;

	if (c->finished) {
		PyErr_SetString(PyExc_RuntimeError, "the collector has finished");
		return NULL;
	}
	c->finished = true;
	sfr_py_prefetch_order_store(c);
	for (i = 0; i < c->nr_storages; i++)
		if (!c->storages[i].range_known && sfr_py_ask_storage_range(c, i) != 0)
			return NULL;
	elsewhere = PyList_New(0);
	rows = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(c->nr_storages * sizeof(*sources)));
	if (elsewhere == NULL || rows == NULL)
		goto end;
	sources = (struct sfr_source *)(void *)PyByteArray_AsString(rows);
	for (i = 0; i < c->nr_storages; i++) {
		const struct sfr_py_storage *entry = &c->storages[i];
		/* the core can read the bytes; if not, Python has to, and the row has no address */
		bool readable = entry->on_host || entry->device_plus_1 != 0;

		sources[i] = (struct sfr_source){ readable ? entry->addr : 0, entry->nbytes,
						  SFR_CAPTURED, entry->device_plus_1 };
		if (readable)
			continue;
		number = PyLong_FromSize_t(i);
		if (number == NULL)
			goto end;
		rc = PyList_Append(elsewhere, number);
		Py_DECREF(number);
		if (rc != 0)
			goto end;
	}
	result = Py_BuildValue("OOOOnN", c->storage_list, c->numbers, rows, elsewhere,
			       (Py_ssize_t)count_tensors(c), list_devices_of_storages(c));
end:
	Py_XDECREF(elsewhere);
	Py_XDECREF(rows);
	return result;
}

/* splice(pickle) -> data.pkl: the pickle with each plain tensor's number replaced by the opcodes
 * that rebuild the tensor. Called after finish(). */
static PyObject *collector_splice(PyObject *self, PyObject *pickle)
{
	struct sfr_py_collector *c = (struct sfr_py_collector *)self;
	struct sfr_py_splice job = {
		.torch = c->torch,
		.found = c->found,
		.nr_found = c->nr_found,
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
	struct sfr_py_collector *c = (struct sfr_py_collector *)self;
	size_t i;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(c->torch);
	Py_VISIT(c->storage_list);
	for (i = 0; i < c->nr_found; i++)
		Py_VISIT(c->found[i].object);
	return 0;
}

static int collector_clear(PyObject *self)
{
	struct sfr_py_collector *c = (struct sfr_py_collector *)self;

	/* An item leaves the array before its reference is dropped, because that may run Python
	 * code which uses the collector. */
	while (c->nr_found != 0)
		Py_DECREF(c->found[--c->nr_found].object);
	while (c->nr_storages != 0)
		Py_XDECREF(c->storages[--c->nr_storages].location);
	Py_CLEAR(c->storage_list);
	return 0;
}

static void collector_dealloc(PyObject *self)
{
	struct sfr_py_collector *c = (struct sfr_py_collector *)self;

	PyObject_GC_UnTrack(self);
	(void)collector_clear(self); /* always 0 */
	Py_CLEAR(c->torch);
	PyMem_Free(c->found);
	sfr_py_map_fini(&c->index_by_tensor);
	PyMem_Free(c->storages);
	Py_CLEAR(c->numbers);
	sfr_py_map_fini(&c->dtype_by_addr);
	sfr_py_prefetch_order_fini(&c->old_order);
	sfr_py_prefetch_order_fini(&c->new_order);
	while (c->rows != NULL) {
		struct sfr_py_row_memory *rows = c->rows;

		c->rows = rows->next;
		PyMem_Free(rows);
	}
	sfr_py_free(self);
}

/* Makes room for as many tensors as the previous save had. */
static int make_room_as_before(struct sfr_py_collector *c)
{
	size_t nr = c->old_order.nr;

	if (nr == 0)
		return 0;
	if (sfr_py_map_reserve(&c->index_by_tensor, nr) != 0 ||
	    sfr_py_map_reserve(&c->numbers->map, nr) != 0 ||
	    sfr_py_map_reserve(&c->dtype_by_addr, c->mixed_dtypes_allowed ? 0 : nr) != 0)
		return -1;
	if (sfr_py_grow_array((void **)&c->found, nr, &c->found_room, sizeof(*c->found)) != 0 ||
	    sfr_py_grow_array((void **)&c->storages, nr, &c->storages_room, sizeof(*c->storages)) !=
		    0 ||
	    sfr_py_grow_array((void **)&c->new_order.entries, nr, &c->new_order.room,
			      sizeof(*c->new_order.entries)) != 0)
		return -1;
	return 0;
}

/* Collector(types, fast_path, plain_cpu, plain_cuda, any_dtypes=False); struct sfr_py_collector
 * explains the flags. */
static PyObject *collector_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = {
		"types", "fast_path", "plain_cpu", "plain_cuda", "any_dtypes", NULL
	};
	struct sfr_py_state *state = PyType_GetModuleState(type);
	struct sfr_py_collector *c;
	PyObject *torch;
	int fast_path, plain_cpu, plain_cuda, any_dtypes = 0;

	if (state == NULL)
		return NULL;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!ppp|p:Collector", names,
					 state->torch_types_type, &torch, &fast_path, &plain_cpu,
					 &plain_cuda, &any_dtypes))
		return NULL;
	c = (struct sfr_py_collector *)sfr_py_alloc(type); /* zeroed */
	if (c == NULL)
		return NULL;
	c->torch = (struct sfr_py_torch_types *)Py_NewRef(torch);
	c->fast_path = fast_path && sfr_py_word_offsets.known;
	c->plain_cpu = plain_cpu;
	c->plain_cuda = plain_cuda;
	c->mixed_dtypes_allowed = any_dtypes;
	c->storage_list = PyList_New(0);
	c->numbers = sfr_py_storage_numbers_new();
	if (c->storage_list == NULL || c->numbers == NULL) {
		Py_DECREF(c);
		return NULL;
	}
	sfr_py_prefetch_order_take(c);
	if (make_room_as_before(c) != 0)
		Py_CLEAR(c);
	return (PyObject *)c;
}

static PyMethodDef collector_methods[] = {
	{ "persistent_id", collector_persistent_id, METH_O,
	  "persistent_id(object) -> a number, a tuple or None: the pickler's persistent_id." },
	{ "add_storage", collector_add_storage, METH_VARARGS,
	  "add_storage(storage, storage_impl, device_plus_1, addr, dtype) -> the storage's number." },
	{ "finish", collector_finish, METH_NOARGS,
	  "finish() -> (storages, numbers, rows, elsewhere, number of tensors, devices); "
	  "collector_finish describes them." },
	{ "splice", collector_splice, METH_O, "splice(pickle) -> the file's data.pkl." },
	{ "collect", sfr_py_collector_collect_tensors, METH_O,
	  "collect(nodes) -> the nodes that are neither plain tensors, which the collector keeps, "
	  "nor objects that contain no tensor." },
	{ "walk", sfr_py_collector_walk_containers, METH_VARARGS,
	  "walk(nodes, seen) -> the nodes that are not plain tensors. Also walks into plain "
	  "dicts, lists and tuples among them, each once." },
	{ "copies", sfr_py_collector_make_copies, METH_VARARGS,
	  "copies(memory, offsets, with_bridge) -> (new tensors by id of the old ones, the first "
	  "tensor of each storage, tensors left to Python)." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot collector_slots[] = {
	{ Py_tp_doc, (void *)"Finds the tensors and storages of one object while it is pickled." },
	{ Py_tp_new, (void *)collector_new },
	{ Py_tp_dealloc, (void *)collector_dealloc },
	{ Py_tp_traverse, (void *)collector_traverse },
	{ Py_tp_clear, (void *)collector_clear },
	{ Py_tp_methods, collector_methods },
	{ 0, NULL },
};

SFR_PY_TYPE(collector_spec, "Collector", struct sfr_py_collector, Py_TPFLAGS_HAVE_GC,
	    collector_slots);

int sfr_py_add_skeleton(PyObject *module)
{
	if (sfr_py_add_torch_types(module) != 0 || sfr_py_add_numbers(module) != 0)
		return -1;
	return sfr_py_add_type(module, &collector_spec, &sfr_py_state(module)->collector_type);
}
