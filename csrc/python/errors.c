/* From the core's codes to Python's exceptions: the only place that does it.
 *
 * A failed save is not raised here: its error belongs to the handle, which builds it from the
 * report (core_save.py) with path, phase and errno.
 */
#include "module.h"

#include <errno.h>
#include <string.h>

PyObject *sfr_py_raise(struct sfr_py_state *state, int code)
{
	PyObject *type = state->stillframe_error;

	switch (code) {
	case SFR_EFORK:
		type = state->fork_error;
		break;
	case SFR_EBUSY:
		type = state->busy_error;
		break;
	case SFR_ECORRUPT:
		type = state->corrupt_error;
		break;
	case SFR_ETORN:
		type = state->torn_error;
		break;
	case SFR_EEXHAUSTED:
		type = state->pool_exhausted_error;
		break;
	case -ENOMEM:
		return PyErr_NoMemory();
	case -EINVAL:
		type = PyExc_ValueError;
		break;
	default:
		if (code > -1000) {
			errno = -code;
			return PyErr_SetFromErrno(PyExc_OSError);
		}
		break;
	}
	PyErr_SetString(type, sfr_code_message(code));
	return NULL;
}

PyObject *sfr_py_sentence(const struct sfr_err *err)
{
	if (err->code == 0)
		return PyUnicode_FromString("");
	if (err->note[0])
		return PyUnicode_DecodeUTF8(err->note, (Py_ssize_t)strlen(err->note), "replace");
	return PyUnicode_FromString(err->code > -1000 ? strerror(-err->code) :
							sfr_code_message(err->code));
}

PyObject *sfr_py_raise_os(struct sfr_py_state *state, int code)
{
	if (code <= -1000 || code >= 0)
		return sfr_py_raise(state, code);
	errno = -code;
	return PyErr_SetFromErrno(PyExc_OSError);
}

PyObject *sfr_py_alloc(PyTypeObject *type)
{
	return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

void sfr_py_free(PyObject *object)
{
	PyTypeObject *type = Py_TYPE(object);

	((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
	Py_DECREF(type);
}

int sfr_py_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **slot)
{
	*slot = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
	return *slot ? PyModule_AddType(module, *slot) : -1;
}

int sfr_py_timeout(PyObject *timeout, uint64_t *left_ns)
{
	double seconds;

	if (timeout == NULL || timeout == Py_None) {
		*left_ns = SFR_FOREVER;
		return 0;
	}
	seconds = PyFloat_AsDouble(timeout);
	if (seconds == -1.0 && PyErr_Occurred())
		return -1;
	if (!(seconds > 0))
		*left_ns = 0;
	else
		*left_ns = seconds > 1e9 ? SFR_FOREVER : (uint64_t)(seconds * 1e9);
	return 0;
}

int sfr_py_slice(uint64_t *left_ns, uint64_t *slice_ns)
{
	if (PyErr_CheckSignals() < 0)
		return -1;
	*slice_ns = *left_ns < SFR_PY_SLICE_NS ? *left_ns : SFR_PY_SLICE_NS;
	if (*left_ns != SFR_FOREVER)
		*left_ns -= *slice_ns;
	return 0;
}
