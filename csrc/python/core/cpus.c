/* _core.set_cpus: sets the CPUs on which the core's threads run. */
#include "module.h"
#include "sfr/cpus.h"

#include <limits.h>

/* Reads `nr` numbers from a tuple into `cpus`. A number that no CPU can have becomes -1, which the
 * core refuses. */
static int read_cpus(PyObject *tuple, int *cpus, Py_ssize_t nr)
{
	for (Py_ssize_t i = 0; i < nr; i++) {
		long cpu = PyLong_AsLong(PyTuple_GetItem(tuple, i));

		if (cpu == -1 && PyErr_Occurred())
			return -1;
		cpus[i] = cpu < 0 || cpu > INT_MAX ? -1 : (int)cpu;
	}
	return 0;
}

static PyObject *set_cpus(PyObject *module, PyObject *args)
{
	PyObject *tuple;
	Py_ssize_t nr;
	int *cpus, rc;

	if (!PyArg_ParseTuple(args, "O!:set_cpus", &PyTuple_Type, &tuple))
		return NULL;
	nr = PyTuple_Size(tuple);
	cpus = PyMem_Calloc((size_t)nr + 1, sizeof(*cpus)); /* + 1: never empty */
	if (!cpus)
		return PyErr_NoMemory();
	rc = read_cpus(tuple, cpus, nr);
	if (rc == 0 && sfr_cpus_set_for_new_threads(cpus, (size_t)nr) < 0) {
		PyErr_SetString(PyExc_ValueError, "no CPU has this number");
		rc = -1;
	}
	PyMem_Free(cpus);
	if (rc < 0)
		return NULL;
	Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
	{ "set_cpus", set_cpus, METH_VARARGS,
	  "set_cpus(numbers): sets the CPUs of threads that start from now on. `numbers` is a tuple. "
	  "With () a thread inherits the CPUs of the thread that starts it." },
	{ NULL, NULL, 0, NULL },
};

int sfr_py_add_cpus(PyObject *module)
{
	return PyModule_AddFunctions(module, functions);
}
