/* _core.resolve resolves a path. */
#include "module.h"
#include "sfr/place.h"

/* resolve(path, follow_link) -> (parent, name, mode, readable, st_dev): the parent's real path,
 * the last component, the mode of what exists or 0, whether the parent is readable, and its st_dev.
 * None if a component is missing or cannot be examined. */
static PyObject *resolve_path(PyObject *module, PyObject *args)
{
	struct sfr_place place;
	const char *path;
	int follow_link, rc;

	if (!PyArg_ParseTuple(args, "yp:resolve", &path, &follow_link))
		return NULL;
	rc = sfr_py_unlocked(sfr_look(path, follow_link, &place));
	if (rc < 0)
		Py_RETURN_NONE;
	return Py_BuildValue("yyINK", place.parent, place.name, (unsigned int)place.mode,
			     PyBool_FromLong((long)place.readable), (unsigned long long)place.fs);
}

static PyMethodDef functions[] = {
	{ "resolve", resolve_path, METH_VARARGS,
	  "resolve(path, follow_link) -> (parent, name, mode or 0, readable, st_dev), or None: examine "
	  "the rest in Python." },
	{ NULL, NULL, 0, NULL },
};

int sfr_py_add_path(PyObject *module)
{
	return PyModule_AddFunctions(module, functions);
}
