/* _core.resolve resolves the path of a save or load. _core.read_text reads a small file of /proc or
 * /sys. */
#include "module.h"
#include "sfr/target.h"

/* resolve(path, follow_link) -> (parent, name, mode, readable, st_dev), or None if a component is
 * missing or cannot be examined.
 *   parent    real path of the parent
 *   name      last component
 *   mode      st_mode of the path; 0: nothing exists there
 *   readable  whether the parent is readable
 *   st_dev    of the parent */
static PyObject *resolve_path(PyObject *module, PyObject *args)
{
	struct sfr_target target;
	const char *path;
	int follow_link, rc;

	if (!PyArg_ParseTuple(args, "yp:resolve", &path, &follow_link))
		return NULL;
	rc = sfr_py_unlocked(sfr_resolve(path, follow_link, &target));
	if (rc < 0)
		Py_RETURN_NONE;
	return Py_BuildValue("yyINK", target.parent, target.name, (unsigned int)target.mode,
			     PyBool_FromLong((long)target.readable), (unsigned long long)target.fs);
}

enum { TEXT_BYTES = 8192 }; /* /proc/meminfo has about 1,600, memory.stat less than 4,000 */

/* Keeps the interpreter lock: the kernel makes such a file in microseconds, but getting the lock
 * back from a busy Python thread takes milliseconds. */
static PyObject *read_text(PyObject *module, PyObject *path)
{
	const char *name = PyBytes_AsString(path);
	char text[TEXT_BYTES];

	if (!name)
		return NULL;
	sfr_read_text(name, text, sizeof(text));
	return PyBytes_FromString(text);
}

static PyMethodDef functions[] = {
	{ "resolve", resolve_path, METH_VARARGS,
	  "resolve(path, follow_link) -> (parent, name, mode or 0, readable, st_dev), or None if a "
	  "component is missing or cannot be examined." },
	{ "read_text", read_text, METH_O,
	  "read_text(path) -> bytes: the first 8 KiB of a file of /proc or /sys; b'' if it cannot be "
	  "read." },
	{ NULL, NULL, 0, NULL },
};

int sfr_py_add_path(PyObject *module)
{
	return PyModule_AddFunctions(module, functions);
}
