/* _core.Parts: a file that is described part by part, for Ticket.of_parts (sfr/parts.h). */
#include "module.h"
#include "core/objects.h"
#include "sfr/parts.h"

#include <errno.h>

#define MAX_DIMS 64 /* most dimensions of a tensor */

static PyObject *parts_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { NULL };
	struct sfr_py_parts *self;
	int rc;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":Parts", names))
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

/* Reads a tuple of ints into `out`. Returns their number, or -1 with an exception set. */
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

/* Appends a tensor in host memory as an archive of its own. `item` is a tuple (torch's name of the
 * storage type, number of elements of the storage, sizes, strides, address, nbytes). Returns 0, -1
 * with an exception set, or an error code of the core without an exception. */
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
	return sfr_parts_add_tensor(parts, &tensor);
}

/* Appends a copy of the bytes of a bytes-like object. Returns 0, -1 with an exception set, or an
 * error code of the core without an exception. */
static int add_bytes(struct sfr_parts *parts, PyObject *item)
{
	Py_buffer view;
	int rc;

	if (PyObject_GetBuffer(item, &view, PyBUF_SIMPLE) < 0)
		return -1;
	rc = sfr_parts_add_bytes(parts, view.buf, (size_t)view.len);
	PyBuffer_Release(&view);
	return rc;
}

static PyObject *parts_append(PyObject *object, PyObject *items)
{
	struct sfr_parts *parts = ((struct sfr_py_parts *)object)->parts;
	PyObject *ranges, *sequence;

	sequence = PySequence_Fast(items, "append takes a sequence of items");
	ranges = sequence ? PyList_New(0) : NULL;
	for (Py_ssize_t i = 0; ranges && i < PySequence_Size(sequence); i++) {
		PyObject *item = PySequence_GetItem(sequence, i), *range = NULL;
		uint64_t off = sfr_parts_file_len(parts);
		int rc = -1;

		if (item)
			rc = PyTuple_Check(item) ? add_tensor(parts, item) : add_bytes(parts, item);
		Py_XDECREF(item);
		if (rc == 0)
			range = Py_BuildValue("KK", (unsigned long long)off,
					      (unsigned long long)(sfr_parts_file_len(parts) -
								   off));
		else if (!PyErr_Occurred())
			(void)sfr_py_raise(sfr_py_state_of(object), rc); /* always NULL */
		if (!range || PyList_Append(ranges, range) < 0)
			Py_CLEAR(ranges); /* ends the loop */
		Py_XDECREF(range);
	}
	Py_XDECREF(sequence);
	return ranges;
}

static PyObject *parts_append_source(PyObject *object, PyObject *args)
{
	unsigned long long addr, nbytes;

	if (!PyArg_ParseTuple(args, "KK:source", &addr, &nbytes))
		return NULL;
	return sfr_py_none_or_raise(object,
				    sfr_parts_add_source(((struct sfr_py_parts *)object)->parts,
							 addr, nbytes));
}

static PyObject *parts_append_crc_field(PyObject *object, PyObject *number)
{
	uint64_t source;
	int rc = -EINVAL;

	if (sfr_py_int_to_u64(number, &source) < 0)
		return NULL;
	if (source <= UINT32_MAX)
		rc = sfr_parts_add_crc(((struct sfr_py_parts *)object)->parts, (uint32_t)source);
	return sfr_py_none_or_raise(object, rc);
}

static PyObject *parts_nbytes(PyObject *object, void *closure)
{
	return PyLong_FromUnsignedLongLong(sfr_parts_file_len(((struct sfr_py_parts *)object)
								      ->parts));
}

static PyMethodDef methods[] = {
	{ "append", parts_append, METH_O,
	  "append(items) -> [(offset, length)], the offset and length of each item in the file. An item"
	  " is a bytes-like object, or a tuple (storage, numel, sizes, strides, address, nbytes): a"
	  " tensor, which is appended as an archive of its own." },
	{ "source", parts_append_source, METH_VARARGS,
	  "source(address, nbytes): appends memory, which must not change until the save has "
	  "ended." },
	{ "crc", parts_append_crc_field, METH_O,
	  "crc(source): appends four bytes for the CRC-32 of an earlier source." },
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
	{ Py_tp_doc, "Parts(): the contents of a file to be written, in order" },
	{ 0, NULL },
};

SFR_PY_TYPE(spec, "Parts", struct sfr_py_parts, 0, slots);

int sfr_py_add_parts(PyObject *module)
{
	return sfr_py_add_type(module, &spec, &sfr_py_state(module)->parts_type);
}
