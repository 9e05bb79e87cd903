/* _core.Folder: a directory that is filled under a temporary name and then renamed; _core.tidy.
 * sfr/folder.h describes the steps.
 *
 * The methods do not raise if a step fails: the save's handle makes the exception later. Each
 * returns a tuple (result, code, phase, note):
 *   code   0, or the error
 *   phase  the phase of the save in which the error happened
 *   note   a fact about the error, or "" */
#include "module.h"
#include "core/objects.h"
#include "sfr/folder.h"

struct sfr_py_folder {
	PyObject_HEAD
	struct sfr_folder *folder;
};

static struct sfr_folder *folder_of(PyObject *object)
{
	return ((struct sfr_py_folder *)object)->folder;
}

static PyObject *folder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "dir", "name", "durable", NULL };
	struct sfr_py_folder *self;
	struct sfr_folder *folder;
	const char *dir, *name;
	int durable, rc;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "yyp:Folder", names, &dir, &name, &durable))
		return NULL;
	rc = sfr_folder_new(dir, name, durable, &folder);
	if (rc < 0)
		return sfr_py_raise(PyType_GetModuleState(type), rc);
	self = (struct sfr_py_folder *)sfr_py_alloc(type);
	if (!self) {
		sfr_folder_free(folder);
		return NULL;
	}
	self->folder = folder;
	return (PyObject *)self;
}

static void folder_dealloc(PyObject *object)
{
	/* Also does the work of clear(), if clear() was not called. */
	sfr_py_unlocked_void(sfr_folder_free(folder_of(object)));
	sfr_py_free(object);
}

/* Returns (result, code, phase, note), and takes over the reference to `result`. */
static PyObject *result_tuple(PyObject *result, const struct sfr_err *err)
{
	return Py_BuildValue("(NisN)", result, err->code, sfr_phase_name(err->phase),
			     sfr_py_decode_text(err->note)); /* file names need not be UTF-8 */
}

static PyObject *folder_make_temporary(PyObject *object, PyObject *unused)
{
	struct sfr_err err = { .index = -1 };
	int rc = sfr_py_unlocked(sfr_folder_make_temporary(folder_of(object), &err));
	PyObject *path =
		rc < 0 ? Py_NewRef(Py_None) :
			 PyUnicode_DecodeFSDefault(sfr_folder_temporary_path(folder_of(object)));

	return path ? result_tuple(path, &err) : NULL;
}

static PyObject *folder_sync(PyObject *object, PyObject *unused)
{
	struct sfr_err err = { .index = -1 };
	uint64_t nbytes = 0;
	PyObject *number;

	/* the result is dropped here and in the next two methods, because `err` has the code too */
	(void)sfr_py_unlocked(sfr_folder_sync(folder_of(object), &nbytes, &err));
	number = PyLong_FromUnsignedLongLong(nbytes);
	return number ? result_tuple(number, &err) : NULL;
}

static PyObject *folder_commit(PyObject *object, PyObject *unused)
{
	struct sfr_err err = { .index = -1 };

	(void)sfr_py_unlocked(sfr_folder_commit(folder_of(object), &err));
	return result_tuple(Py_NewRef(Py_None), &err);
}

static PyObject *folder_remove_leftovers(PyObject *object, PyObject *unused)
{
	struct sfr_err err = { .index = -1 };

	(void)sfr_py_unlocked(sfr_folder_end_and_clean_up(folder_of(object), &err));
	return result_tuple(Py_NewRef(Py_None), &err);
}

static PyMethodDef methods[] = {
	{ "open", folder_make_temporary, METH_NOARGS,
	  "open() -> (path or None, code, phase, note): makes the temporary directory." },
	{ "sync", folder_sync, METH_NOARGS,
	  "sync() -> (bytes of all files, code, phase, note): syncs all files and directories." },
	{ "commit", folder_commit, METH_NOARGS,
	  "commit() -> (None, code, phase, note): gives the directory its name and syncs the "
	  "parent." },
	{ "clear", folder_remove_leftovers, METH_NOARGS,
	  "clear() -> (None, code, phase, note): before commit() removes the new directory. After it "
	  "removes the old directory, which the new one has replaced." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot slots[] = {
	{ Py_tp_new, folder_new },
	{ Py_tp_dealloc, folder_dealloc },
	{ Py_tp_methods, methods },
	{ Py_tp_doc,
	  "Folder(dir, name, durable): the directory `name` in `dir`, put in place in one step" },
	{ 0, NULL },
};

SFR_PY_TYPE(spec, "Folder", struct sfr_py_folder, 0, slots);

static PyObject *tidy(PyObject *module, PyObject *path)
{
	const char *dir = PyBytes_AsString(path);

	if (!dir)
		return NULL;
	sfr_py_unlocked_void(sfr_clean_up_after_dead_writers(dir));
	Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
	{ "tidy", tidy, METH_O,
	  "tidy(directory): removes the temporary files and directories of dead writers." },
	{ NULL, NULL, 0, NULL },
};

int sfr_py_add_folder(PyObject *module)
{
	if (PyModule_AddFunctions(module, functions) < 0)
		return -1;
	return sfr_py_add_type(module, &spec, &sfr_py_state(module)->folder_type);
}
