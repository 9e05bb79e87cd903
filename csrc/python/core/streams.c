/* Reads a Python tuple of the devices' current streams, which several methods take. */
#include "module.h"
#include "core/objects.h"

int sfr_py_read_streams(PyObject *tuple, struct sfr_device_stream streams[SFR_PY_MAX_STREAMS])
{
	Py_ssize_t nr = PyTuple_Size(tuple);

	if (nr < 0)
		return -1;
	if (nr > SFR_PY_MAX_STREAMS) {
		PyErr_SetString(PyExc_ValueError, "too many devices");
		return -1;
	}
	for (Py_ssize_t i = 0; i < nr; i++) {
		PyObject *pair = PyTuple_GetItem(tuple, i);
		unsigned int device;
		unsigned long long handle;

		if (!pair || !PyArg_ParseTuple(pair, "IK", &device, &handle))
			return -1;
		streams[i] = (struct sfr_device_stream){ .handle = handle, .device = device };
	}
	return (int)nr;
}
