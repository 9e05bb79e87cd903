/* _core.leave_signal: signals that a forked worker leaves to its parent. */
#include "module.h"
#include "sfr/signals.h"

/* leave_signal(signum). */
static PyObject *leave_signal(PyObject *module, PyObject *number)
{
	long signum = PyLong_AsLong(number);
	int rc;

	if (signum == -1 && PyErr_Occurred())
		return NULL;
	rc = sfr_signals_leave(signum < 0 || signum > 64 ? 0 : (int)signum);
	if (rc < 0)
		return sfr_py_raise_os(sfr_py_state(module), rc);
	Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
	{ "leave_signal", leave_signal, METH_O,
	  "leave_signal(signum): ignore it while the parent lives, unless the parent sends it." },
	{ NULL, NULL, 0, NULL },
};

int sfr_py_add_signals(PyObject *module)
{
	return PyModule_AddFunctions(module, functions);
}
