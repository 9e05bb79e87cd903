/* Objects of torch, and which tensors are plain.
 *
 * A TorchTypes holds the objects of torch that every save needs: types, functions, and descriptors
 * of attributes. skeleton.py makes it and passes these objects by name. The C functions behind
 * descriptors and methods are called directly (torch/slots.c).
 *
 * A tensor is plain when it is known in advance what torch.save writes for it:
 *
 *   _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, OrderedDict())
 *
 * wrapped in _rebuild_parameter(.., requires_grad, OrderedDict()) for a Parameter. A plain tensor
 *
 *   - is of the class Tensor or Parameter itself, on the CPU or a CUDA device,
 *   - is strided and not nested, and has memory and a dtype with a legacy storage class,
 *   - has no Python attributes, names, metadata (the conj and neg bits), or hooks. torch drops the
 *     hooks of a Parameter, so a Parameter may have hooks.
 *
 * All other tensors, and errors, are left to the tensor's own __reduce_ex__.
 *
 * The dispatch keys are a set of bits by which torch chooses the functions for a tensor. Layout,
 * nesting, conj, neg, names and kind of device are the same for all tensors with the same keys. So
 * Python is asked only about the first tensor with a given set of keys (the function `where`). The
 * tensor itself is asked for its attributes, hooks and requires_grad. Its dtype and shape come from
 * the bridge (torch/bridge.c).
 *
 * None of this releases the interpreter lock: while another thread computes, each release may cost
 * a switch interval. */
#include "skeleton/skeleton.h"
#include "torch/slots.h"
#include "torch/words.h"

static const char *const item_names[] = {
#define X(name, keyword) keyword,
	SFR_PY_ITEM_LIST(X)
#undef X
};

PyObject *sfr_py_ask_torch(const struct sfr_py_torch_types *torch, enum sfr_py_torch_item item,
			   PyObject *object)
{
	PyObject *function = torch->item[item];   /* or a getset descriptor */
	PyTypeObject *type = torch->c_type[item]; /* NULL: there is no C function */
	const PyGetSetDef *def = torch->c_getter[item];

	if (type != NULL && PyType_IsSubtype(Py_TYPE(object), type)) {
		if (def != NULL)
			return def->get(object, def->closure);
		if (torch->c_method[item] != NULL)
			return torch->c_method[item](object, NULL);
	}
	if (item >= SFR_PY_FIRST_GETTER)
		return torch->descr_get[item](function, object, (PyObject *)Py_TYPE(object));
	return PyObject_CallFunctionObjArgs(function, object, NULL);
}

/* Returns the truth of sfr_py_ask_torch's result: 1, 0 (also for None), or -1 with an exception
 * set. */
static int ask_bool(const struct sfr_py_torch_types *torch, enum sfr_py_torch_item item,
		    PyObject *object)
{
	PyObject *value = sfr_py_ask_torch(torch, item, object);
	int truth;

	if (value == NULL)
		return -1;
	truth = PyObject_IsTrue(value);
	Py_DECREF(value);
	return truth;
}

int sfr_py_ask_u64(const struct sfr_py_torch_types *torch, enum sfr_py_torch_item item,
		   PyObject *object, uint64_t *out)
{
	PyObject *value = sfr_py_ask_torch(torch, item, object);

	if (value == NULL)
		return -1;
	*out = PyLong_AsUnsignedLongLong(value);
	Py_DECREF(value);
	return *out == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

/* Returns 0 if the exception is cleared, -1 if it must propagate and stays set. */
int sfr_py_clear_ordinary_error(void)
{
	if (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError))
		return -1;
	PyErr_Clear();
	return 0;
}

/* Asks Python where tensors with the dispatch keys of `tensor` are. Sets keys->where and remembers
 * *keys. If Python raises an exception, keys->where is NOT_PLAIN and nothing is remembered. Returns
 * -1 only if the exception must propagate. */
static int ask_where_tensor_is(struct sfr_py_torch_types *torch, PyObject *tensor,
			       struct sfr_py_known_dispatch_keys *keys)
{
	PyObject *answer = PyObject_CallFunctionObjArgs(torch->item[SFR_PY_WHERE], tensor, NULL);
	long value = answer != NULL ? PyLong_AsLong(answer) : -1;

	Py_XDECREF(answer);
	keys->where = SFR_PY_NOT_PLAIN;
	if (PyErr_Occurred())
		return sfr_py_clear_ordinary_error();
	if (value == SFR_PY_ON_HOST || value == SFR_PY_ON_DEVICE)
		keys->where = (enum sfr_py_memory_kind)value;
	if (torch->nr_known_keys < SFR_PY_MAX_KNOWN_KEYS)
		torch->known_keys[torch->nr_known_keys++] = *keys;
	return 0;
}

/* Sets *where for a tensor, from known_keys or by asking Python. Returns -1 only if an exception
 * must propagate. */
static int find_where_tensor_is(struct sfr_py_torch_types *torch, PyObject *tensor,
				enum sfr_py_memory_kind *where)
{
	struct sfr_py_known_dispatch_keys known = { .keys = sfr_py_dispatch_keys_of(tensor) };
	int rc = 0;
	uint32_t i = 0;

	while (i < torch->nr_known_keys && torch->known_keys[i].keys != known.keys)
		i++;
	if (i < torch->nr_known_keys)
		known = torch->known_keys[i];
	else
		rc = ask_where_tensor_is(torch, tensor, &known);
	*where = known.where;
	return rc;
}

/* Returns whether a tensor has Python attributes or hooks that torch.save would write: 1, 0, or -1
 * with an exception set. */
static int has_attributes_or_hooks(const struct sfr_py_torch_types *torch,
				   const struct sfr_py_found_tensor *found)
{
	/* __getstate__ returns None without attributes. Reading __dict__ would create it. */
	int yes = ask_bool(torch, SFR_PY_GETSTATE, found->object);

	if (yes == 0 && !found->parameter) /* torch drops the hooks of a Parameter */
		yes = ask_bool(torch, SFR_PY_BACKWARD_HOOKS, found->object);
	return yes;
}

int sfr_py_examine_tensor(struct sfr_py_torch_types *torch, struct sfr_py_found_tensor *found)
{
	enum sfr_py_memory_kind where;
	int yes;

	found->parameter = (PyObject *)Py_TYPE(found->object) == torch->item[SFR_PY_PARAMETER];
	if (find_where_tensor_is(torch, found->object, &where) != 0)
		return -1;
	if (where == SFR_PY_NOT_PLAIN)
		return 0; /* found->plain stays false, here and below */
	found->on_host = where == SFR_PY_ON_HOST;
	yes = has_attributes_or_hooks(torch, found);
	if (yes < 0)
		return sfr_py_clear_ordinary_error();
	if (yes > 0)
		return 0;
	yes = ask_bool(torch, SFR_PY_REQUIRES_GRAD, found->object);
	if (yes < 0)
		return sfr_py_clear_ordinary_error();
	found->requires_grad = yes > 0;
	found->plain = true;
	return 0;
}

static int types_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct sfr_py_torch_types *torch = (struct sfr_py_torch_types *)self;
	uint32_t i;

	Py_VISIT(Py_TYPE(self));
	for (i = 0; i < SFR_PY_NR_ITEMS; i++)
		Py_VISIT(torch->item[i]);
	for (i = 0; i < torch->nr_dtypes; i++)
		Py_VISIT(torch->dtype[i].dtype);
	return 0;
}

/* There is no tp_clear, because the items of a live object must never be NULL. */
static void types_dealloc(PyObject *self)
{
	struct sfr_py_torch_types *torch = (struct sfr_py_torch_types *)self;
	uint32_t i;

	PyObject_GC_UnTrack(self);
	for (i = 0; i < SFR_PY_NR_ITEMS; i++)
		Py_CLEAR(torch->item[i]);
	for (i = 0; i < torch->nr_dtypes; i++) {
		Py_CLEAR(torch->dtype[i].dtype);
		Py_CLEAR(torch->dtype[i].storage_class);
	}
	Py_CLEAR(torch->cpu);
	sfr_py_prefetch_order_fini(&torch->order);
	sfr_py_free(self);
}

/* Takes the argument of TorchTypes() for an item. */
static int read_item_argument(struct sfr_py_torch_types *torch, PyObject *kwargs,
			      enum sfr_py_torch_item item)
{
	PyObject *value = PyDict_GetItemString(kwargs, item_names[item]);

	if (value == NULL) {
		PyErr_Format(PyExc_TypeError, "TorchTypes() needs the argument '%s'",
			     item_names[item]);
		return -1;
	}
	if (item >= SFR_PY_FIRST_GETTER) {
		torch->descr_get[item] =
			(descrgetfunc)PyType_GetSlot(Py_TYPE(value), Py_tp_descr_get);
		if (torch->descr_get[item] == NULL) {
			PyErr_Format(PyExc_TypeError, "'%s' is not a descriptor", item_names[item]);
			return -1;
		}
	}
	torch->item[item] = Py_NewRef(value);
	return 0;
}

/* Finds the C functions behind descriptors and methods that belong to a type. */
static void find_functions(struct sfr_py_torch_types *torch)
{
	for (int item = SFR_PY_FIRST_METHOD; item < SFR_PY_NR_ITEMS; item++) {
		PyObject *type = PyObject_GetAttrString(torch->item[item], "__objclass__");
		PyObject *name =
			type ? PyObject_GetAttrString(torch->item[item], "__name__") : NULL;
		const char *text = name ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;

		PyErr_Clear(); /* a Python function has no __objclass__ */
		if (text != NULL && PyType_Check(type)) {
			torch->c_type[item] = (PyTypeObject *)type; /* the item has a reference */
			if (item >= SFR_PY_FIRST_GETTER)
				torch->c_getter[item] = sfr_py_getter_of(torch->c_type[item], text);
			else if (item <= SFR_PY_LAST_METHOD)
				torch->c_method[item] = sfr_py_method_of(torch->c_type[item], text);
		}
		Py_XDECREF(type);
		Py_XDECREF(name);
	}
}

/* Sets dtype_index_plus_1 for the dtype with the index nr_dtypes. `sample` is a tensor of that
 * dtype with one dimension. */
static int read_dtype_number(struct sfr_py_torch_types *torch, PyObject *sample)
{
	int64_t row[SFR_ROW_HEADER + 2] = { 0 }, number; /* 2: one size and one stride */

	if (!sfr_py_word_offsets.known)
		return 0; /* no tensor is plain, so torch's numbers of dtypes are not used */
	/* if this fails, the row stays zero */
	(void)sfr_py_bridge_describe_tensor(sfr_py_handle_of(sample), row, SFR_ROW_HEADER + 2);
	number = row[SFR_ROW_DTYPE];
	if (row[SFR_ROW_NDIM] != 1 || number < 0 || number >= SFR_PY_MAX_DTYPE_NUMBERS) {
		PyErr_SetString(PyExc_ValueError, "torch could not describe a sample");
		return -1;
	}
	torch->dtype_index_plus_1[number] = (uint8_t)(torch->nr_dtypes + 1);
	return 0;
}

/* Takes the argument `dtypes`: a list of (dtype, name of its storage class, item size, a sample
 * tensor). */
static int read_dtypes(struct sfr_py_torch_types *torch, PyObject *kwargs)
{
	PyObject *list = PyDict_GetItemString(kwargs, "dtypes");
	Py_ssize_t i, len;

	if (list == NULL || !PyList_Check(list) || PyList_Size(list) > SFR_PY_MAX_DTYPES) {
		PyErr_Format(PyExc_TypeError, "TorchTypes() needs a list of at most %d dtypes",
			     SFR_PY_MAX_DTYPES);
		return -1;
	}
	len = PyList_Size(list);
	for (i = 0; i < len; i++) {
		struct sfr_py_dtype *entry = &torch->dtype[i];
		PyObject *item = PyList_GetItem(list, i);
		PyObject *dtype, *storage_class, *sample;
		unsigned int itemsize;
		Py_ssize_t name_len;

		if (item == NULL || !PyTuple_Check(item)) {
			PyErr_SetString(PyExc_TypeError, "a dtype's entry is a tuple");
			return -1;
		}
		if (!PyArg_ParseTuple(item, "OUIO!", &dtype, &storage_class, &itemsize,
				      torch->item[SFR_PY_TENSOR], &sample) ||
		    read_dtype_number(torch, sample) != 0)
			return -1;
		if (itemsize == 0) {
			PyErr_SetString(PyExc_ValueError, "a dtype's items have bytes");
			return -1;
		}
		entry->name = PyUnicode_AsUTF8AndSize(storage_class, &name_len);
		if (entry->name == NULL)
			return -1;
		entry->name_len = (size_t)name_len;
		entry->dtype = Py_NewRef(dtype);
		entry->storage_class = Py_NewRef(storage_class);
		entry->itemsize = itemsize;
		torch->nr_dtypes++;
	}
	return 0;
}

static PyObject *types_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	struct sfr_py_torch_types *torch;
	int item;

	if (PyTuple_Size(args) != 0 || kwargs == NULL) {
		PyErr_SetString(PyExc_TypeError, "TorchTypes() takes keyword arguments only");
		return NULL;
	}
	torch = (struct sfr_py_torch_types *)sfr_py_alloc(type); /* zeroed */
	if (torch == NULL)
		return NULL;
	for (item = 0; item < SFR_PY_NR_ITEMS; item++)
		if (read_item_argument(torch, kwargs, (enum sfr_py_torch_item)item) != 0)
			goto fail;
	if (sfr_py_bridge_load() != 0 || read_dtypes(torch, kwargs) != 0)
		goto fail;
	find_functions(torch);
	torch->cpu = PyUnicode_InternFromString("cpu");
	if (torch->cpu == NULL)
		goto fail;
	return (PyObject *)torch;
fail:
	Py_DECREF(torch);
	return NULL;
}

static PyType_Slot types_slots[] = {
	{ Py_tp_doc, (void *)"The objects of torch that the skeleton is made with." },
	{ Py_tp_new, (void *)types_new },
	{ Py_tp_dealloc, (void *)types_dealloc },
	{ Py_tp_traverse, (void *)types_traverse },
	{ 0, NULL },
};

SFR_PY_TYPE(types_spec, "TorchTypes", struct sfr_py_torch_types, Py_TPFLAGS_HAVE_GC, types_slots);

static PyObject *learn_words(PyObject *module, PyObject *samples)
{
	if (sfr_py_learn_word_offsets(samples) != 0)
		return NULL;
	return PyBool_FromLong(sfr_py_word_offsets.known);
}

static PyMethodDef functions[] = {
	{ "learn_words", learn_words, METH_O,
	  "learn_words(samples) -> bool: finds where torch keeps the words that are read from every "
	  "tensor (torch/words.h). False if they are not found." },
	{ NULL, NULL, 0, NULL },
};

int sfr_py_add_torch_types(PyObject *module)
{
	if (PyModule_AddFunctions(module, functions) < 0)
		return -1;
	return sfr_py_add_type(module, &types_spec, &sfr_py_state(module)->torch_types_type);
}
