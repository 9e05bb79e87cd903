/* _core.take_steps carries out a list of directory changes. _core.names lists a directory. Each
 * releases the interpreter lock only once; Python's os functions release it for each step or
 * entry. */
#include "module.h"
#include "sfr/steps.h"

#include <string.h>

/* Reads a step from a tuple. The path and the bytes are borrowed. */
static int read_step(PyObject *item, struct sfr_directory_step *step)
{
	Py_ssize_t len;
	int kind;

	if (!PyTuple_Check(item)) {
		PyErr_SetString(PyExc_TypeError, "a step is a tuple");
		return -1;
	}
	if (!PyArg_ParseTuple(item, "iyy#:step", &kind, &step->path, &step->bytes, &len))
		return -1;
	step->kind = (enum sfr_directory_step_kind)kind;
	step->len = (size_t)len;
	/* The bytes of a rename are the new name, which must be a C string. */
	if (step->kind == SFR_STEP_RENAME && strlen(step->bytes) != step->len) {
		PyErr_SetString(PyExc_ValueError, "embedded null byte");
		return -1;
	}
	return 0;
}

static PyObject *take_steps(PyObject *module, PyObject *args)
{
	PyObject *list, *result = NULL;
	struct sfr_directory_step *steps;
	size_t nr_done = 0;
	Py_ssize_t nr;
	int rc = 0;

	if (!PyArg_ParseTuple(args, "O:take_steps", &list))
		return NULL;
	list = PySequence_Tuple(list); /* other threads cannot change a tuple */
	if (!list)
		return NULL;
	nr = PyTuple_Size(list);
	steps = PyMem_Calloc((size_t)nr + 1, sizeof(*steps)); /* + 1: never empty */
	if (!steps) {
		Py_DECREF(list);
		return PyErr_NoMemory();
	}
	for (Py_ssize_t i = 0; i < nr; i++)
		if (read_step(PyTuple_GetItem(list, i), &steps[i]) < 0)
			goto out;
	rc = sfr_py_unlocked(sfr_directory_steps_carry_out(steps, (size_t)nr, &nr_done));
	result = Py_BuildValue("(ni)", (Py_ssize_t)nr_done, -rc);
out:
	PyMem_Free(steps);
	Py_DECREF(list);
	return result;
}

static PyObject *list_directory_names(PyObject *module, PyObject *args)
{
	const char *path;
	PyObject *result;
	char *list; /* zero-terminated names, `len` bytes in all */
	size_t len;
	int rc;

	if (!PyArg_ParseTuple(args, "y:names", &path))
		return NULL;
	rc = sfr_py_unlocked(sfr_list_directory(path, &list, &len));
	result = Py_BuildValue("(y#i)", list ? list : "", (Py_ssize_t)len, -rc); /* -rc: errno */
	sfr_directory_names_free(list);
	return result;
}

static PyMethodDef functions[] = {
	{ "take_steps", take_steps, METH_VARARGS,
	  "take_steps([(kind, path, bytes), ...]) -> (steps taken, errno of the step that failed, "
	  "or 0). The kinds are STEP_* (sfr/steps.h)." },
	{ "names", list_directory_names, METH_VARARGS,
	  "names(directory) -> (bytes with all names, each ended by a zero byte; errno or 0)" },
	{ NULL, NULL, 0, NULL },
};

int sfr_py_add_steps(PyObject *module)
{
	if (PyModule_AddIntConstant(module, "STEP_WRITE", SFR_STEP_WRITE) < 0 ||
	    PyModule_AddIntConstant(module, "STEP_WRITE_SYNCED", SFR_STEP_WRITE_SYNCED) < 0 ||
	    PyModule_AddIntConstant(module, "STEP_SYNC", SFR_STEP_SYNC) < 0 ||
	    PyModule_AddIntConstant(module, "STEP_RENAME", SFR_STEP_RENAME) < 0 ||
	    PyModule_AddIntConstant(module, "STEP_UNLINK", SFR_STEP_UNLINK) < 0)
		return -1;
	return PyModule_AddFunctions(module, functions);
}
