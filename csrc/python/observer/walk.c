/* What an optimizer owns: reading torch's tensors, and walking param_groups and state.
 *
 * An optimizer of 400 parameters has 1,600 tensors, and the walk over them happens inside saves
 * and steps, so both reading and walking avoid the interpreter: attributes are read through the
 * getter functions that torch's types publish in their slots, containers through the C API.
 *
 * The walk takes strong references to everything it finds before anything is read that could
 * allocate: an allocation may start a garbage collection, and with it any Python code.
 */
#include "observer/observer.h"

#include <string.h>

struct sfr_py_torch sfr_py_torch;

/* ---- reading ------------------------------------------------------------ */

/* Finds `name` in the table of `base`, whose meaning `type` (a subclass) may have replaced.
 * 0, or -1 with an exception set. */
static int access_init(struct sfr_py_access *access, PyObject *type, PyObject *base,
		       const char *name, int is_method)
{
	PyObject *own = PyObject_GetAttrString(type, name);
	PyObject *inherited = PyObject_GetAttrString(base, name);
	PyGetSetDef *getset;
	PyMethodDef *method;

	memset(access, 0, sizeof(*access));
	PyErr_Clear();
	access->is_method = is_method;
	access->name = PyUnicode_InternFromString(name);
	if (own && own == inherited) {
		getset = PyType_GetSlot((PyTypeObject *)base, Py_tp_getset);
		for (; !is_method && getset && getset->name; getset++) {
			if (strcmp(getset->name, name) == 0) {
				access->get = getset->get;
				access->closure = getset->closure;
				break;
			}
		}
		method = PyType_GetSlot((PyTypeObject *)base, Py_tp_methods);
		for (; is_method && method && method->ml_name; method++) {
			if (strcmp(method->ml_name, name) == 0) {
				if (method->ml_flags == METH_NOARGS)
					access->call = method->ml_meth;
				break;
			}
		}
		PyErr_Clear(); /* a type without the slot's table takes the ordinary way */
	}
	Py_XDECREF(own);
	Py_XDECREF(inherited);
	return access->name ? 0 : -1;
}

/* The number of the device of a tensor that is not the host's, -1 for any that is not CUDA's: a build
 * of torch for AMD's calls them "cuda" too, and the driver behind is another one. */
static PyObject *no_device(PyObject *tensor, void *closure)
{
	(void)tensor, (void)closure;
	return PyLong_FromLong(-1);
}

static int device_init(struct sfr_py_access *access, PyObject *torch, PyObject *tensor,
		       PyObject *base)
{
	PyObject *version = PyObject_GetAttrString(torch, "version");
	PyObject *cuda = version ? PyObject_GetAttrString(version, "cuda") : NULL;
	int is_cuda = cuda && cuda != Py_None;

	Py_XDECREF(version);
	Py_XDECREF(cuda);
	PyErr_Clear();
	if (access_init(access, tensor, base, "get_device", 1))
		return -1;
	if (!is_cuda)
		access->get = no_device;
	return 0;
}

int sfr_py_torch_init(void)
{
	struct sfr_py_torch *t = &sfr_py_torch;
	PyObject *torch = NULL, *nn = NULL, *binding = NULL, *tensor = NULL, *parameter = NULL;
	PyObject *storage = NULL, *tensor_base = NULL, *storage_base = NULL, *free_weak = NULL;
	int ret = -1;

	if (t->ready)
		return 0;
	torch = PyImport_ImportModule("torch");
	nn = PyImport_ImportModule("torch.nn");
	binding = PyImport_ImportModule("torch._C");
	if (!torch || !nn || !binding)
		goto out;
	tensor = PyObject_GetAttrString(torch, "Tensor");
	parameter = PyObject_GetAttrString(nn, "Parameter");
	storage = PyObject_GetAttrString(torch, "UntypedStorage");
	tensor_base = PyObject_GetAttrString(binding, "TensorBase");
	storage_base = PyObject_GetAttrString(binding, "StorageBase");
	if (!tensor || !parameter || !storage || !tensor_base || !storage_base)
		goto out;
	free_weak = PyObject_GetAttrString(storage, "_free_weak_ref");
	if (!free_weak || !PyType_Check(tensor) || !PyType_Check(parameter) ||
	    !PyType_Check(tensor_base) || !PyType_Check(storage_base))
		goto out;
	if (access_init(&t->version, tensor, tensor_base, "_version", 0) ||
	    access_init(&t->requires_grad, tensor, tensor_base, "requires_grad", 0) ||
	    access_init(&t->is_cpu, tensor, tensor_base, "is_cpu", 0) ||
	    device_init(&t->device, torch, tensor, tensor_base) ||
	    access_init(&t->grad, tensor, tensor_base, "grad", 0) ||
	    access_init(&t->impl, tensor, tensor_base, "_cdata", 0) ||
	    access_init(&t->storage, tensor, tensor_base, "untyped_storage", 1) ||
	    access_init(&t->cdata, storage, storage_base, "_cdata", 0) ||
	    access_init(&t->nbytes, storage, storage_base, "nbytes", 1) ||
	    access_init(&t->data_ptr, storage, storage_base, "data_ptr", 1) ||
	    access_init(&t->is_shared, storage, storage_base, "is_shared", 1) ||
	    access_init(&t->weak_ref, storage, storage_base, "_weak_ref", 1))
		goto out;
	t->str_params = PyUnicode_InternFromString("params");
	if (!t->str_params)
		goto out;
	t->tensor = (PyTypeObject *)tensor;
	t->parameter = (PyTypeObject *)parameter;
	t->free_weak = free_weak;
	tensor = parameter = free_weak = NULL;
	t->ready = 1;
	ret = 0;
out:
	if (ret && !PyErr_Occurred())
		PyErr_SetString(PyExc_ImportError, "torch lacks what the observer reads");
	Py_XDECREF(torch);
	Py_XDECREF(nn);
	Py_XDECREF(binding);
	Py_XDECREF(tensor);
	Py_XDECREF(parameter);
	Py_XDECREF(storage);
	Py_XDECREF(tensor_base);
	Py_XDECREF(storage_base);
	Py_XDECREF(free_weak);
	return ret;
}

static PyObject *ask_function(PyObject *object, void *function)
{
	return PyObject_CallFunctionObjArgs(function, object, NULL);
}

int sfr_py_torch_present(PyObject *name, PyObject *function)
{
	static struct {
		const char *name;
		struct sfr_py_access *access, was;
		PyObject *function; /* NULL: torch answers */
	} presented[] = {
		{ .name = "is_cpu", .access = &sfr_py_torch.is_cpu },
		{ .name = "is_shared", .access = &sfr_py_torch.is_shared },
		{ .name = "device_index", .access = &sfr_py_torch.device },
		{ .name = "data_ptr", .access = &sfr_py_torch.data_ptr },
	};

	for (size_t i = 0; i < sizeof(presented) / sizeof(presented[0]); i++) {
		if (PyUnicode_CompareWithASCIIString(name, presented[i].name) != 0)
			continue;
		if (!presented[i].function)
			presented[i].was = *presented[i].access;
		*presented[i].access = presented[i].was;
		Py_CLEAR(presented[i].function);
		if (function != Py_None) {
			presented[i].function = Py_NewRef(function);
			presented[i].access->get = ask_function;
			presented[i].access->closure = function;
		}
		return 0;
	}
	PyErr_Format(PyExc_ValueError, "nothing of torch's is called %R here", name);
	return -1;
}

PyObject *sfr_py_read(const struct sfr_py_access *access, PyObject *object)
{
	PyObject *value, *bound;

	if (access->get)
		return access->get(object, access->closure);
	if (access->call)
		return access->call(object, NULL);
	value = PyObject_GetAttr(object, access->name);
	if (!value || !access->is_method)
		return value;
	bound = value;
	value = PyObject_CallNoArgs(bound);
	Py_DECREF(bound);
	return value;
}

int sfr_py_read_u64(const struct sfr_py_access *access, PyObject *object, uint64_t *out)
{
	PyObject *value = sfr_py_read(access, object);

	if (!value)
		return -1;
	*out = PyLong_AsUnsignedLongLong(value);
	Py_DECREF(value);
	return *out == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

int sfr_py_read_flag(const struct sfr_py_access *access, PyObject *object)
{
	PyObject *value = sfr_py_read(access, object);
	int flag;

	if (!value)
		return -1;
	flag = PyObject_IsTrue(value);
	Py_DECREF(value);
	return flag;
}

int sfr_py_is_plain_tensor(PyObject *object)
{
	PyTypeObject *type = Py_TYPE(object);

	return type == sfr_py_torch.tensor || type == sfr_py_torch.parameter;
}

/* ---- the map ------------------------------------------------------------ */

static size_t map_slot(const struct sfr_py_index *map, uintptr_t key)
{
	/* Fibonacci hashing; objects are at least 16 bytes apart. */
	return (size_t)(((uint64_t)(key >> 4) * 0x9e3779b97f4a7c15u) >> 32) & map->mask;
}

int sfr_py_index_init(struct sfr_py_index *map, size_t nr)
{
	size_t len = 16;

	while (len < nr * 2)
		len *= 2;
	map->mask = len - 1;
	map->nr = 0;
	map->keys = PyMem_Calloc(len, sizeof(*map->keys));
	map->values = PyMem_Malloc(len * sizeof(*map->values));
	if (map->keys && map->values)
		return 0;
	sfr_py_index_fini(map);
	return -1;
}

void sfr_py_index_fini(struct sfr_py_index *map)
{
	PyMem_Free(map->keys);
	PyMem_Free(map->values);
	memset(map, 0, sizeof(*map));
}

uint32_t *sfr_py_index_find(const struct sfr_py_index *map, uintptr_t key)
{
	size_t slot;

	if (!map->keys)
		return NULL;
	for (slot = map_slot(map, key); map->keys[slot]; slot = (slot + 1) & map->mask) {
		if (map->keys[slot] == key)
			return &map->values[slot];
	}
	return NULL;
}

void sfr_py_index_add(struct sfr_py_index *map, uintptr_t key, uint32_t value)
{
	size_t slot = map_slot(map, key);

	while (map->keys[slot])
		slot = (slot + 1) & map->mask;
	map->keys[slot] = key;
	map->values[slot] = value;
	map->nr++;
}

/* ---- the walk ----------------------------------------------------------- */

/* State deeper than this is nothing that an optimizer of torch builds; it also ends cycles. */
#define WALK_DEPTH 8

static int refs_push(struct sfr_py_refs *refs, PyObject *object)
{
	if (refs->nr == refs->cap) {
		size_t cap = refs->cap ? refs->cap * 2 : 64;
		PyObject **items = PyMem_Realloc(refs->items, cap * sizeof(*items));

		if (!items) {
			PyErr_NoMemory();
			return -1;
		}
		refs->items = items;
		refs->cap = cap;
	}
	refs->items[refs->nr++] = Py_NewRef(object);
	return 0;
}

static void refs_fini(struct sfr_py_refs *refs)
{
	size_t i;

	for (i = 0; i < refs->nr; i++)
		Py_DECREF(refs->items[i]);
	PyMem_Free(refs->items);
	memset(refs, 0, sizeof(*refs));
}

/* Borrowed: the list or tuple of one group's parameters, or NULL. */
static PyObject *group_params(PyObject *groups, Py_ssize_t i)
{
	PyObject *group = PyList_GetItem(groups, i), *params;

	if (!group || !PyDict_Check(group))
		return NULL;
	params = PyDict_GetItemWithError(group, sfr_py_torch.str_params);
	return params && PyList_Check(params) ? params : NULL;
}

static int walk_state(PyObject *value, struct sfr_py_refs *found, int depth);

/* A subclass that wraps other tensors (quantized states are such) has them as attributes. */
static int walk_wrapper(PyObject *tensor, struct sfr_py_refs *found, int depth)
{
	PyObject *attributes = PyObject_GenericGetDict(tensor, NULL);
	int ret;

	if (!attributes) {
		PyErr_Clear();
		return 0;
	}
	ret = walk_state(attributes, found, depth);
	Py_DECREF(attributes);
	return ret;
}

/* Pushes every plain tensor of a parameter's state. */
static int walk_state(PyObject *value, struct sfr_py_refs *found, int depth)
{
	PyObject *key, *item;
	Py_ssize_t i, pos = 0;

	if (sfr_py_is_plain_tensor(value))
		return refs_push(found, value);
	if (depth == WALK_DEPTH)
		return 0;
	if (PyType_IsSubtype(Py_TYPE(value), sfr_py_torch.tensor))
		return walk_wrapper(value, found, depth + 1);
	if (PyDict_Check(value)) {
		while (PyDict_Next(value, &pos, &key, &item)) {
			if (walk_state(item, found, depth + 1))
				return -1;
		}
	} else if (PyList_Check(value)) {
		for (i = 0; i < PyList_Size(value); i++) {
			if (walk_state(PyList_GetItem(value, i), found, depth + 1))
				return -1;
		}
	} else if (PyTuple_Check(value)) {
		for (i = 0; i < PyTuple_Size(value); i++) {
			if (walk_state(PyTuple_GetItem(value, i), found, depth + 1))
				return -1;
		}
	}
	return 0;
}

/* Every tensor of the groups, in order. */
static int walk_groups(PyObject *groups, struct sfr_py_refs *params)
{
	Py_ssize_t i, j;

	for (i = 0; i < PyList_Size(groups); i++) {
		PyObject *list = group_params(groups, i);

		for (j = 0; list && j < PyList_Size(list); j++) {
			if (refs_push(params, PyList_GetItem(list, j)))
				return -1;
		}
	}
	PyErr_Clear();
	return 0;
}

int sfr_py_walk(PyObject *groups, PyObject *state, struct sfr_py_walk *walk)
{
	struct sfr_py_refs params = { 0 };
	struct sfr_py_index trained = { 0 };
	PyObject *key, *value;
	Py_ssize_t pos = 0;
	size_t i;
	int ret = -1;

	memset(walk, 0, sizeof(*walk));
	if (!PyList_Check(groups) || !PyDict_Check(state))
		return 0;
	walk->stateless = PyDict_Size(state) == 0;
	if (walk_groups(groups, &params))
		goto out;
	if (sfr_py_index_init(&trained, params.nr)) {
		PyErr_NoMemory();
		goto out;
	}
	for (i = 0; i < params.nr; i++) {
		uintptr_t address = (uintptr_t)params.items[i];
		int flag = sfr_py_is_plain_tensor(params.items[i]) ?
				   sfr_py_read_flag(&sfr_py_torch.requires_grad, params.items[i]) :
				   0;

		PyErr_Clear();
		if (flag > 0 && !sfr_py_index_find(&trained, address))
			sfr_py_index_add(&trained, address, 0);
	}
	while (!walk->stateless && PyDict_Next(state, &pos, &key, &value)) {
		uint32_t *has_state = sfr_py_index_find(&trained, (uintptr_t)key);

		if (!has_state)
			continue;
		*has_state = 1;
		if (refs_push(&walk->found, key) || walk_state(value, &walk->found, 0))
			goto out;
	}
	for (i = 0; i < params.nr; i++) {
		uint32_t *has_state = sfr_py_index_find(&trained, (uintptr_t)params.items[i]);

		if (has_state && *has_state)
			continue;
		if (refs_push(has_state && walk->stateless ? &walk->found : &walk->others,
			      params.items[i]))
			goto out;
	}
	ret = 0;
out:
	refs_fini(&params);
	sfr_py_index_fini(&trained);
	return ret;
}

void sfr_py_walk_fini(struct sfr_py_walk *walk)
{
	refs_fini(&walk->found);
	refs_fini(&walk->others);
}

uint64_t sfr_py_walk_size(PyObject *groups, PyObject *state)
{
	uint64_t params = 0;
	Py_ssize_t i;

	if (!PyList_Check(groups) || !PyDict_Check(state))
		return 0;
	for (i = 0; i < PyList_Size(groups); i++) {
		PyObject *list = group_params(groups, i);

		/* Weighted by the group's place: a parameter that moves between groups counts. */
		if (list)
			params += (uint64_t)PyList_Size(list) * (uint64_t)(2 * i + 1);
	}
	PyErr_Clear();
	return (params << 24) ^ ((uint64_t)PyDict_Size(state) << 1) ^ 1;
}
