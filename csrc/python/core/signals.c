/* _core.leave_signal: makes a forked worker ignore a signal while its parent lives
 * (sfr/signals.h). */
#include "module.h"
#include "sfr/signals.h"

static PyObject *leave_signal(PyObject *module, PyObject *args)
{
	int signum, at_once, rc;

	if (!PyArg_ParseTuple(args, "ip:leave_signal", &signum, &at_once))
		return NULL;
	rc = sfr_signals_leave_to_parent(signum, at_once != 0);
	if (rc < 0)
		return sfr_py_raise_os(sfr_py_state(module), rc);
	Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
	{ "leave_signal", leave_signal, METH_VARARGS,
	  "leave_signal(signum, at_once): while the parent lives, ignores this signal unless the parent "
	  "sends it. The kernel kills this process when the parent ends: from the first ignored signal "
	  "on, or from now on if `at_once` is true." },
	{ NULL, NULL, 0, NULL },
};

int sfr_py_add_signals(PyObject *module)
{
	return PyModule_AddFunctions(module, functions);
}
