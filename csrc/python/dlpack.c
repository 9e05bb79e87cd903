/* _core.dlpack: a tensor to be, over a buffer, as torch takes it from other libraries.
 *
 * torch.frombuffer makes tensors of one dimension; giving them their shape costs more than making
 * them. A DLPack capsule has the shape in it, and torch makes a tensor of one in less time than
 * frombuffer takes. The structs are those of the DLPack standard, version 0, which every torch
 * reads (https://dmlc.github.io/dlpack/latest/c_api.html).
 *
 * The capsule, and then the tensor's storage, holds a reference to the buffer's object. It is given
 * up by whatever thread drops the storage's last tensor, so that thread takes the interpreter lock.
 */
#include "module.h"

struct dl_tensor {
	void *data;
	struct {
		int32_t type, id;
	} device;
	int32_t ndim;
	struct {
		uint8_t code, bits;
		uint16_t lanes;
	} dtype;
	int64_t *shape, *strides;
	uint64_t byte_offset;
};

struct dl_managed {
	struct dl_tensor tensor;
	void *owner; /* a reference to the buffer's object */
	void (*deleter)(struct dl_managed *self);
	int64_t dims[]; /* shape, then strides */
};

enum { DL_CPU = 1, MAX_DIM = 64 };

static const char unused_name[] = "dltensor"; /* torch renames it when it takes the tensor over */

static void delete_managed(struct dl_managed *self)
{
	PyGILState_STATE gil;

	if (!Py_IsInitialized())
		return; /* the process ends, and everything with it */
	gil = PyGILState_Ensure();
	Py_DECREF((PyObject *)self->owner);
	PyMem_Free(self);
	PyGILState_Release(gil);
}

static void delete_capsule(PyObject *capsule)
{
	if (PyCapsule_IsValid(capsule, unused_name))
		delete_managed(PyCapsule_GetPointer(capsule, unused_name));
}

/* Reads `ndim` integers that are not negative. */
static int read_dims(PyObject *tuple, Py_ssize_t ndim, int64_t *out)
{
	for (Py_ssize_t i = 0; i < ndim; i++) {
		out[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
		if (out[i] < 0) {
			if (!PyErr_Occurred())
				PyErr_SetString(PyExc_ValueError, "a size or stride is negative");
			return -1;
		}
	}
	return 0;
}

/* Whether all elements lie within `room` bytes. */
static int fits(const struct dl_tensor *tensor, uint64_t room)
{
	uint64_t last = 0, product;

	for (int32_t i = 0; i < tensor->ndim; i++) {
		if (tensor->shape[i] == 0)
			return 1;
		if (__builtin_mul_overflow((uint64_t)tensor->shape[i] - 1,
					   (uint64_t)tensor->strides[i], &product) ||
		    __builtin_add_overflow(last, product, &last))
			return 0;
	}
	if (__builtin_add_overflow(last, 1, &last) ||
	    __builtin_mul_overflow(last, tensor->dtype.bits / 8, &last))
		return 0;
	return last <= room;
}

static PyObject *dlpack(PyObject *module, PyObject *args)
{
	PyObject *owner, *size, *stride, *capsule;
	struct dl_managed *managed;
	unsigned char code, bits;
	Py_ssize_t offset, ndim;
	Py_buffer view;

	(void)module;
	if (!PyArg_ParseTuple(args, "OnbbO!O!:dlpack", &owner, &offset, &code, &bits, &PyTuple_Type,
			      &size, &PyTuple_Type, &stride))
		return NULL;
	ndim = PyTuple_Size(size);
	if (ndim > MAX_DIM || PyTuple_Size(stride) != ndim) {
		PyErr_SetString(PyExc_ValueError, "size and stride do not go together");
		return NULL;
	}
	managed = PyMem_Malloc(sizeof(*managed) + 2 * (size_t)ndim * sizeof(int64_t));
	if (!managed)
		return PyErr_NoMemory();
	managed->tensor = (struct dl_tensor){
		.device = { DL_CPU, 0 },
		.ndim = (int32_t)ndim,
		.dtype = { code, bits, 1 },
		.shape = managed->dims,
		.strides = managed->dims + ndim,
	};
	managed->deleter = delete_managed;
	if (read_dims(size, ndim, managed->tensor.shape) < 0 ||
	    read_dims(stride, ndim, managed->tensor.strides) < 0 ||
	    PyObject_GetBuffer(owner, &view, PyBUF_WRITABLE) < 0)
		goto fail;
	managed->tensor.data = (char *)view.buf + offset;
	if (offset < 0 || offset > view.len ||
	    !fits(&managed->tensor, (uint64_t)(view.len - offset))) {
		PyBuffer_Release(&view);
		PyErr_SetString(PyExc_ValueError, "the tensor is not within the buffer");
		goto fail;
	}
	/* The owner's memory stays where it is as long as the owner lives. */
	PyBuffer_Release(&view);
	capsule = PyCapsule_New(managed, unused_name, delete_capsule);
	if (!capsule)
		goto fail;
	Py_INCREF(owner);
	managed->owner = owner;
	return capsule;
fail:
	PyMem_Free(managed);
	return NULL;
}

static PyMethodDef methods[] = {
	{ "dlpack", dlpack, METH_VARARGS,
	  "dlpack(buffer, offset, code, bits, size, stride) -> a DLPack capsule over the buffer." },
	{ NULL, NULL, 0, NULL },
};

int sfr_py_add_dlpack(PyObject *module)
{
	return PyModule_AddFunctions(module, methods);
}
