/* _core.Parts: a file in the making, part by part. See archive/parts.c. */
#include "module.h"
#include "core/objects.h"
#include "sfr/parts.h"

#include <errno.h>

#define MAX_DIMS 64

static PyObject *parts_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	struct sfr_py_parts *self;
	int rc;

	if (kwargs && PyDict_Size(kwargs) > 0) {
		PyErr_SetString(PyExc_TypeError, "Parts takes no keywords");
		return NULL;
	}
	if (!PyArg_ParseTuple(args, ":Parts"))
		return NULL;
	self = (struct sfr_py_parts *)sfr_py_alloc(type);
	if (!self)
		return NULL;
	rc = sfr_parts_new(&self->parts);
	if (rc == 0)
		return (PyObject *)self;
	Py_DECREF(self);
	return sfr_py_raise(PyType_GetModuleState(type), rc);
}

static void parts_dealloc(PyObject *object)
{
	sfr_parts_free(((struct sfr_py_parts *)object)->parts);
	sfr_py_free(object);
}

/* Reads a tuple of ints. Their number, or -1 with an exception set. */
static int read_ints(PyObject *tuple, int64_t out[MAX_DIMS])
{
	Py_ssize_t nr = PyTuple_Size(tuple);

	if (nr > MAX_DIMS) {
		PyErr_SetString(PyExc_ValueError, "a tensor of so many dimensions");
		return -1;
	}
	for (Py_ssize_t i = 0; i < nr; i++) {
		out[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
		if (out[i] == -1 && PyErr_Occurred())
			return -1;
	}
	return (int)nr;
}

/* Adds (storage, numel, sizes, strides, address, nbytes). 0, -1 with an exception set, or a code. */
static int add_tensor(struct sfr_parts *parts, PyObject *item)
{
	int64_t sizes[MAX_DIMS], strides[MAX_DIMS];
	struct sfr_tensor tensor = { .sizes = sizes, .strides = strides };
	PyObject *size_tuple, *stride_tuple;
	unsigned long long numel, addr, nbytes;
	int nr;

	if (!PyArg_ParseTuple(item, "sKO!O!KK:tensor", &tensor.storage, &numel, &PyTuple_Type,
			      &size_tuple, &PyTuple_Type, &stride_tuple, &addr, &nbytes))
		return -1;
	nr = read_ints(size_tuple, sizes);
	if (nr < 0 || read_ints(stride_tuple, strides) != nr) {
		if (!PyErr_Occurred())
			PyErr_SetString(PyExc_ValueError, "as many strides as sizes are needed");
		return -1;
	}
	tensor.numel = numel;
	tensor.addr = addr;
	tensor.nbytes = nbytes;
	tensor.ndim = (uint32_t)nr;
	return sfr_parts_tensor(parts, &tensor);
}

static int add_bytes(struct sfr_parts *parts, PyObject *item)
{
	Py_buffer view;
	int rc;

	if (PyObject_GetBuffer(item, &view, PyBUF_SIMPLE) < 0)
		return -1;
	rc = sfr_parts_bytes(parts, view.buf, (size_t)view.len);
	PyBuffer_Release(&view);
	return rc;
}

static PyObject *parts_append(ARGS)
{
	struct sfr_parts *parts = ((struct sfr_py_parts *)object)->parts;
	PyObject *places, *fast;

	(void)kwnames;
	if (nargs != 1) {
		PyErr_SetString(PyExc_TypeError, "append takes a sequence of items");
		return NULL;
	}
	fast = PySequence_Fast(args[0], "append takes a sequence of items");
	places = fast ? PyList_New(0) : NULL;
	for (Py_ssize_t i = 0; places && i < PySequence_Size(fast); i++) {
		PyObject *item = PySequence_GetItem(fast, i), *place = NULL;
		uint64_t off = sfr_parts_len(parts);
		int rc = !item               ? -1 :
			 PyTuple_Check(item) ? add_tensor(parts, item) :
					       add_bytes(parts, item);

		Py_XDECREF(item);
		if (rc == 0)
			place = Py_BuildValue("KK", (unsigned long long)off,
					      (unsigned long long)(sfr_parts_len(parts) - off));
		else if (!PyErr_Occurred())
			(void)sfr_py_raise(PyType_GetModuleState(cls), rc); /* always NULL */
		if (!place || PyList_Append(places, place) < 0)
			Py_CLEAR(places);
		Py_XDECREF(place);
	}
	Py_XDECREF(fast);
	return places;
}

static PyObject *parts_source(ARGS)
{
	unsigned long long addr, nbytes;
	int rc;

	(void)kwnames;
	if (nargs != 2) {
		PyErr_SetString(PyExc_TypeError, "source takes an address and a length");
		return NULL;
	}
	addr = PyLong_AsUnsignedLongLong(args[0]);
	nbytes = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[1]);
	if (PyErr_Occurred())
		return NULL;
	rc = sfr_parts_source(((struct sfr_py_parts *)object)->parts, addr, nbytes);
	if (rc < 0)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	Py_RETURN_NONE;
}

static PyObject *parts_crc(ARGS)
{
	unsigned long source;
	int rc;

	(void)kwnames;
	if (nargs != 1) {
		PyErr_SetString(PyExc_TypeError, "crc takes the number of a source");
		return NULL;
	}
	source = PyLong_AsUnsignedLong(args[0]);
	if (PyErr_Occurred())
		return NULL;
	rc = source > UINT32_MAX ?
		     -EINVAL :
		     sfr_parts_crc(((struct sfr_py_parts *)object)->parts, (uint32_t)source);
	if (rc < 0)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	Py_RETURN_NONE;
}

static PyObject *parts_nbytes(PyObject *object, void *closure)
{
	(void)closure;
	return PyLong_FromUnsignedLongLong(sfr_parts_len(((struct sfr_py_parts *)object)->parts));
}

static PyMethodDef methods[] = {
	METHOD("append", parts_append,
	       "append(items) -> [(offset, length)]: adds bytes-like objects as they are, and tuples"
	       " (storage, numel, sizes, strides, address, nbytes) as archives of a tensor."),
	METHOD("source", parts_source,
	       "source(address, nbytes): adds memory, which stays as it is until the save has"
	       " ended."),
	METHOD("crc", parts_crc, "crc(source): adds four bytes, the CRC-32 of an earlier source."),
	{ NULL, NULL, 0, NULL },
};

static PyGetSetDef getset[] = {
	{ "nbytes", parts_nbytes, NULL, "the file's length so far", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot slots[] = {
	{ Py_tp_new, parts_new },
	{ Py_tp_dealloc, parts_dealloc },
	{ Py_tp_methods, methods },
	{ Py_tp_getset, getset },
	{ Py_tp_doc, "Parts(): a file in the making, in the order of the file" },
	{ 0, NULL },
};

static PyType_Spec spec = {
	.name = "stillframe._core.Parts",
	.basicsize = sizeof(struct sfr_py_parts),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = slots,
};

int sfr_py_add_parts(PyObject *module)
{
	return sfr_py_add_type(module, &spec, &sfr_py_state(module)->parts_type);
}
