/* Reads torch's tensors through the getter functions that torch's types publish in their slots.
 *
 * A DTensor only wraps a local tensor, which has the memory. Optimizers refer to the DTensor, so
 * the observer's table has the DTensor, but with the address and bytes of the local tensor.
 *
 * Each of the two tensors has a version counter. The DTensor's counter misses writes to the local
 * tensor, and the local tensor's counter misses writes by the DTensor's operators. So both counters
 * are compared. */
#include "observer/observer.h"
#include "torch/slots.h"
#include "torch/words.h"

#include <string.h>

struct sfr_py_torch sfr_py_torch;

/* ---- reading ------------------------------------------------------------ */

enum { ATTRIBUTE, METHOD }; /* values of sfr_py_accessor.is_method */

/* Prepares reading the attribute or calling the method `name` of objects of `type`. Reads will call
 * the C function of the base class `base`. If `base` has none, or `type` overrides the name, each
 * read looks the name up. */
static int accessor_init(struct sfr_py_accessor *access, PyObject *type, PyObject *base,
			 const char *name, int is_method)
{
	PyObject *in_type = PyObject_GetAttrString(type, name);
	PyObject *in_base = PyObject_GetAttrString(base, name);
	const int is_inherited = in_type && in_type == in_base;
	const PyGetSetDef *def;

	memset(access, 0, sizeof(*access));
	PyErr_Clear();
	access->is_method = is_method;
	access->name = PyUnicode_InternFromString(name);
	if (is_inherited && is_method) {
		access->call = sfr_py_method_of((PyTypeObject *)base, name);
	} else if (is_inherited) {
		def = sfr_py_getter_of((PyTypeObject *)base, name);
		access->get = def ? def->get : NULL;
		access->closure = def ? def->closure : NULL;
	}
	Py_XDECREF(in_type);
	Py_XDECREF(in_base);
	return access->name ? 0 : -1;
}

/* A getter that always returns -1: the tensor is not on a CUDA device. */
static PyObject *get_no_device(PyObject *tensor, void *closure)
{
	(void)tensor, (void)closure;
	return PyLong_FromLong(-1);
}

/* Prepares reading the number of a tensor's CUDA device. In a build of torch without CUDA, such as
 * the one for AMD, the number is always -1 (although that one calls its devices "cuda" too). */
static int device_accessor_init(struct sfr_py_accessor *access, PyObject *torch, PyObject *tensor,
				PyObject *base)
{
	PyObject *version = PyObject_GetAttrString(torch, "version");
	PyObject *cuda = version ? PyObject_GetAttrString(version, "cuda") : NULL;
	int is_cuda = cuda && cuda != Py_None;

	Py_XDECREF(version);
	Py_XDECREF(cuda);
	PyErr_Clear();
	if (accessor_init(access, tensor, base, "get_device", METHOD))
		return -1;
	if (!is_cuda)
		access->get = get_no_device;
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
	/* After a failed look-up, all that follow are skipped and give NULL. */
	torch = PyImport_ImportModule("torch");
	nn = torch ? PyImport_ImportModule("torch.nn") : NULL;
	binding = nn ? PyImport_ImportModule("torch._C") : NULL;
	tensor = binding ? PyObject_GetAttrString(torch, "Tensor") : NULL;
	parameter = tensor ? PyObject_GetAttrString(nn, "Parameter") : NULL;
	storage = parameter ? PyObject_GetAttrString(torch, "UntypedStorage") : NULL;
	tensor_base = storage ? PyObject_GetAttrString(binding, "TensorBase") : NULL;
	storage_base = tensor_base ? PyObject_GetAttrString(binding, "StorageBase") : NULL;
	free_weak = storage_base ? PyObject_GetAttrString(storage, "_free_weak_ref") : NULL;
	if (!free_weak || !PyType_Check(tensor) || !PyType_Check(parameter) ||
	    !PyType_Check(tensor_base) || !PyType_Check(storage_base))
		goto out;
	if (accessor_init(&t->version, tensor, tensor_base, "_version", ATTRIBUTE) ||
	    accessor_init(&t->requires_grad, tensor, tensor_base, "requires_grad", ATTRIBUTE) ||
	    accessor_init(&t->is_cpu, tensor, tensor_base, "is_cpu", ATTRIBUTE) ||
	    device_accessor_init(&t->device, torch, tensor, tensor_base) ||
	    accessor_init(&t->grad, tensor, tensor_base, "grad", ATTRIBUTE) ||
	    accessor_init(&t->impl, tensor, tensor_base, "_cdata", ATTRIBUTE) ||
	    accessor_init(&t->storage, tensor, tensor_base, "untyped_storage", METHOD) ||
	    accessor_init(&t->cdata, storage, storage_base, "_cdata", ATTRIBUTE) ||
	    accessor_init(&t->nbytes, storage, storage_base, "nbytes", METHOD) ||
	    accessor_init(&t->data_ptr, storage, storage_base, "data_ptr", METHOD) ||
	    accessor_init(&t->is_shared, storage, storage_base, "is_shared", METHOD) ||
	    accessor_init(&t->weak_ref, storage, storage_base, "_weak_ref", METHOD))
		goto out;
	t->str_params = PyUnicode_InternFromString("params");
	if (!t->str_params)
		goto out;
	t->tensor = (PyTypeObject *)tensor;
	t->parameter = (PyTypeObject *)parameter;
	t->free_weak = free_weak;
	tensor = parameter = free_weak = NULL; /* `t` keeps these references */
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

/* A getter for tests: calls the Python function with the object. */
static PyObject *call_function(PyObject *object, void *function)
{
	return PyObject_CallFunctionObjArgs(function, object, NULL);
}

int sfr_py_torch_override(PyObject *name, PyObject *function)
{
	static struct {
		const char *name;
		struct sfr_py_accessor *access;  /* how the attribute is read now */
		struct sfr_py_accessor original; /* how it is read without a test's function */
		PyObject *function;              /* the test's function, or NULL */
	} overrides[] = {
		{ .name = "is_cpu", .access = &sfr_py_torch.is_cpu },
		{ .name = "is_shared", .access = &sfr_py_torch.is_shared },
		{ .name = "device_index", .access = &sfr_py_torch.device },
		{ .name = "data_ptr", .access = &sfr_py_torch.data_ptr },
	};

	for (size_t i = 0; i < sizeof(overrides) / sizeof(overrides[0]); i++) {
		if (PyUnicode_CompareWithASCIIString(name, overrides[i].name) != 0)
			continue;
		if (!overrides[i].function) /* torch's own attribute is read now */
			overrides[i].original = *overrides[i].access;
		*overrides[i].access = overrides[i].original;
		Py_CLEAR(overrides[i].function);
		if (function != Py_None) {
			overrides[i].function = Py_NewRef(function);
			overrides[i].access->get = call_function;
			overrides[i].access->closure = function;
		}
		return 0;
	}
	PyErr_Format(PyExc_ValueError, "nothing of torch's is called %R here", name);
	return -1;
}

PyObject *sfr_py_read_attribute(const struct sfr_py_accessor *access, PyObject *object)
{
	PyObject *attribute, *result;

	if (access->get)
		return access->get(object, access->closure);
	if (access->call)
		return access->call(object, NULL);
	attribute = PyObject_GetAttr(object, access->name);
	if (!attribute || !access->is_method)
		return attribute;
	result = PyObject_CallNoArgs(attribute);
	Py_DECREF(attribute);
	return result;
}

int sfr_py_read_u64(const struct sfr_py_accessor *access, PyObject *object, uint64_t *out)
{
	PyObject *value = sfr_py_read_attribute(access, object);

	if (!value)
		return -1;
	*out = PyLong_AsUnsignedLongLong(value);
	Py_DECREF(value);
	return *out == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

int sfr_py_read_flag(const struct sfr_py_accessor *access, PyObject *object)
{
	PyObject *value = sfr_py_read_attribute(access, object);
	int flag;

	if (!value)
		return -1;
	flag = PyObject_IsTrue(value);
	Py_DECREF(value);
	return flag;
}

/* ---- tensors that wrap another one ---------------------------------------- */

static int is_exact_tensor(PyObject *object)
{
	PyTypeObject *type = Py_TYPE(object);

	return type == sfr_py_torch.tensor || type == sfr_py_torch.parameter;
}

int sfr_py_declare_wrapper(PyTypeObject *wrapper, PyObject *name)
{
	PyTypeObject *old = sfr_py_torch.wrapper;
	PyObject *old_name = sfr_py_torch.str_local;

	if (wrapper == old)
		return 0;
	if (!PyType_IsSubtype(wrapper, sfr_py_torch.tensor)) {
		PyErr_SetString(PyExc_TypeError, "what is seen through is a class of tensors");
		return -1;
	}
	sfr_py_torch.str_local = Py_NewRef(name);
	sfr_py_torch.wrapper = (PyTypeObject *)Py_NewRef((PyObject *)wrapper);
	Py_XDECREF((PyObject *)old);
	Py_XDECREF(old_name);
	return 0;
}

PyObject *sfr_py_unwrap_tensor(PyObject *tensor)
{
	PyObject *local;

	if (is_exact_tensor(tensor))
		return Py_NewRef(tensor);
	if (!sfr_py_torch.wrapper || Py_TYPE(tensor) != sfr_py_torch.wrapper)
		return NULL;
	/* bypasses __getattribute__ and __torch_function__ */
	local = PyObject_GenericGetAttr(tensor, sfr_py_torch.str_local);
	if (local && !is_exact_tensor(local))
		Py_CLEAR(local);
	PyErr_Clear();
	return local;
}

int sfr_py_has_memory(PyObject *tensor)
{
	PyObject *memory = sfr_py_unwrap_tensor(tensor);

	Py_XDECREF(memory);
	return memory != NULL;
}

PyObject *sfr_py_storage_of(PyObject *tensor)
{
	PyObject *memory = sfr_py_unwrap_tensor(tensor), *storage;

	if (!memory) {
		PyErr_SetString(PyExc_TypeError, "a tensor without memory of its own");
		return NULL;
	}
	storage = sfr_py_read_attribute(&sfr_py_torch.storage, memory);
	Py_DECREF(memory);
	return storage;
}

uint64_t sfr_py_storage_cdata_of(PyObject *tensor)
{
	PyObject *memory = sfr_py_unwrap_tensor(tensor), *storage = NULL;
	uint64_t cdata = 0;

	/* If torch's memory layout is known, a word of the tensor is read, which is much faster. */
	if (memory && sfr_py_word_offsets.known)
		cdata = sfr_py_storage_impl_of(memory);
	else if (memory)
		storage = sfr_py_read_attribute(&sfr_py_torch.storage, memory);
	if (storage && sfr_py_read_u64(&sfr_py_torch.cdata, storage, &cdata))
		cdata = 0;
	PyErr_Clear();
	Py_XDECREF(storage);
	Py_XDECREF(memory);
	return cdata;
}

int sfr_py_version_of(PyObject *tensor, uint64_t *out)
{
	PyObject *memory = sfr_py_unwrap_tensor(tensor);
	uint64_t outer, inner = 0;
	int ret;

	if (!memory) {
		PyErr_SetString(PyExc_TypeError, "a tensor without memory of its own");
		return -1;
	}
	ret = sfr_py_read_u64(&sfr_py_torch.version, tensor, &outer);
	if (!ret && memory != tensor) /* a wrapper: the inner tensor has its own counter */
		ret = sfr_py_read_u64(&sfr_py_torch.version, memory, &inner);
	/* Counters only grow, so a change of either changes the sum. */
	if (!ret)
		*out = outer + inner;
	Py_DECREF(memory);
	return ret;
}
