/* Turns the core's codes into Python exceptions.
 *
 * The error of a failed save is not raised here: core_save.py builds it from the save's report.
 *
 * This file also has small functions that all files of csrc/python use. */
#include "module.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

/* A negative code is -errno, or one of SFR_E*, which begin at -1001. */
#define IS_ERRNO(code) ((code) > -1000)

/* Raises the package's error for a thread that could not start. The core reports -EAGAIN for that,
 * but the system's text for EAGAIN would not help the user. Always returns NULL. */
static PyObject *raise_cannot_start_thread(void)
{
	PyObject *threads = PyImport_ImportModule("stillframe._base.threads");
	PyObject *error =
		threads ? PyObject_CallMethod(threads, "thread_refused_error", NULL) : NULL;

	if (error)
		PyErr_SetObject((PyObject *)Py_TYPE(error), error);
	Py_XDECREF(error);
	Py_XDECREF(threads);
	return NULL;
}

PyObject *sfr_py_raise(struct sfr_py_state *state, int code)
{
	PyObject *type = state->stillframe_error;

	if (code == SFR_PY_RAISED) /* an exception is set already */
		return NULL;
#define X(member, name, its_code)                                                                  \
	if (code == (its_code))                                                                    \
		type = state->member;
	SFR_PY_ERRORS(X)
#undef X
	if (code == -ENOMEM)
		return PyErr_NoMemory();
	if (code == -EINVAL)
		type = PyExc_ValueError;
	else if (IS_ERRNO(code))
		return sfr_py_raise_os(state, code);
	PyErr_SetString(type, sfr_code_message(code));
	return NULL;
}

PyObject *sfr_py_error_text(const struct sfr_err *err)
{
	if (err->code == 0)
		return PyUnicode_FromString("");
	if (err->note[0])
		return sfr_py_decode_text(err->note);
	return PyUnicode_FromString(sfr_code_message(err->code));
}

PyObject *sfr_py_raise_os(struct sfr_py_state *state, int code)
{
	if (!IS_ERRNO(code) || code >= 0)
		return sfr_py_raise(state, code);
	if (code == -EAGAIN)
		return raise_cannot_start_thread();
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

struct sfr_py_state *sfr_py_state_of(PyObject *object)
{
	return PyType_GetModuleState(Py_TYPE(object));
}

PyObject *sfr_py_none_or_raise(PyObject *object, int rc)
{
	if (rc != 0)
		return sfr_py_raise(sfr_py_state_of(object), rc);
	Py_RETURN_NONE;
}

PyObject *sfr_py_bool_or_raise(PyObject *object, int rc, int false_code)
{
	if (rc != 0 && rc != false_code)
		return sfr_py_raise(sfr_py_state_of(object), rc);
	return PyBool_FromLong(rc == 0);
}

PyObject *sfr_py_decode_text(const char *text)
{
	return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

int sfr_py_int_to_u64(PyObject *number, uint64_t *out)
{
	*out = PyLong_AsUnsignedLongLong(number);
	return *out == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

#define SLICE_NS UINT64_C(50000000) /* 50 ms: the longest time until a signal is answered */

struct sfr_py_wait_state sfr_py_wait_state(PyObject *timeout)
{
	struct sfr_py_wait_state wait = { .left_ns = SFR_FOREVER, .rc = SFR_PY_BEGINS };
	double seconds;

	if (timeout == NULL || timeout == Py_None)
		return wait;
	/* NaN, 0 and negative numbers do not wait. More than 1e9 seconds is forever. */
	seconds = PyFloat_AsDouble(timeout);
	if (seconds == -1.0 && PyErr_Occurred())
		wait.rc = SFR_PY_RAISED;
	else if (!(seconds > 0))
		wait.left_ns = 0;
	else if (seconds <= 1e9)
		wait.left_ns = (uint64_t)(seconds * 1e9);
	return wait;
}

int sfr_py_begin_next_slice(struct sfr_py_wait_state *wait)
{
	const bool first = wait->rc == SFR_PY_BEGINS;
	const bool again = wait->rc == SFR_EAGAIN && wait->left_ns > 0;

	if (!first && !again)
		return 0;
	/* Only a call that waits runs signal handlers. */
	if (wait->left_ns > 0 && PyErr_CheckSignals() < 0) {
		wait->rc = SFR_PY_RAISED;
		return 0;
	}
	wait->slice_ns = wait->left_ns < SLICE_NS ? wait->left_ns : SLICE_NS;
	if (wait->left_ns != SFR_FOREVER)
		wait->left_ns -= wait->slice_ns;
	return 1;
}
