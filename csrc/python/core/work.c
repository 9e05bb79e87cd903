/* _core.LogWork and log_work_next: external work that Python does in the log's order
 * (sfr/log.h). */
#include "module.h"
#include "core/objects.h"
#include "sfr/log.h"

struct sfr_py_work {
	PyObject_HEAD
	struct sfr_external_work *work;
};

static PyObject *work_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "key", "kind", NULL };
	struct sfr_external_work *work;
	struct sfr_py_work *self;
	const char *key;
	int kind, rc;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "yi:LogWork", names, &key, &kind))
		return NULL;
	rc = sfr_external_work_new(key, (enum sfr_external_work_kind)kind, &work);
	if (rc < 0)
		return sfr_py_raise(PyType_GetModuleState(type), rc);
	self = (struct sfr_py_work *)sfr_py_alloc(type);
	if (!self) {
		sfr_external_work_put(work);
		return NULL;
	}
	self->work = work;
	return (PyObject *)self;
}

static void work_dealloc(PyObject *object)
{
	sfr_external_work_put(((struct sfr_py_work *)object)->work);
	sfr_py_free(object);
}

static PyObject *work_append(PyObject *object, PyObject *unused)
{
	return sfr_py_none_or_raise(object,
				    sfr_external_work_append(((struct sfr_py_work *)object)->work));
}

static PyObject *work_end(PyObject *object, PyObject *ok)
{
	int truth = PyObject_IsTrue(ok);

	if (truth < 0)
		return NULL;
	sfr_external_work_mark_ended(((struct sfr_py_work *)object)->work, truth);
	Py_RETURN_NONE;
}

static PyObject *work_number(PyObject *object, void *unused)
{
	return PyLong_FromUnsignedLongLong(sfr_external_work_number(((struct sfr_py_work *)object)
									    ->work));
}

static PyMethodDef work_methods[] = {
	{ "append", work_append, METH_NOARGS,
	  "append(): appends the entry to the log. May be called once." },
	{ "end", work_end, METH_O,
	  "end(ok): records that the work has ended, so that the log goes on. `ok` says whether it "
	  "succeeded. Later calls do nothing." },
	{ NULL, NULL, 0, NULL },
};

static PyGetSetDef work_getset[] = {
	{ "number", work_number, NULL, "the number by which log_work_next names this work", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot work_slots[] = {
	{ Py_tp_new, work_new },
	{ Py_tp_dealloc, work_dealloc },
	{ Py_tp_methods, work_methods },
	{ Py_tp_getset, work_getset },
	{ Py_tp_doc,
	  "LogWork(key, kind): an entry of the log whose work Python does. `key` is the real path "
	  "as bytes, `kind` one of WORK_*." },
	{ 0, NULL },
};

SFR_PY_TYPE(work_spec, "LogWork", struct sfr_py_work, 0, work_slots);

static PyObject *log_work_next(PyObject *module, PyObject *unused)
{
	uint64_t number;
	int rc, after_good; /* 0: the last save before the work failed */

	/* Waits without a limit: this is not the main thread, so signals need not end the wait. */
	rc = sfr_py_unlocked(sfr_external_work_take_next(SFR_FOREVER, &number, &after_good));
	if (rc == SFR_ECLOSED) /* the log is being stopped */
		Py_RETURN_NONE;
	if (rc < 0)
		return sfr_py_raise(sfr_py_state(module), rc);
	return Py_BuildValue("(NN)", PyLong_FromUnsignedLongLong(number),
			     PyBool_FromLong(after_good));
}

static PyMethodDef functions[] = {
	{ "log_work_next", log_work_next, METH_NOARGS,
	  "log_work_next() -> (number, after_good): waits until external work is at the head of "
	  "the log. `after_good` is False if the last save before the work failed. None if the log "
	  "is being stopped." },
	{ NULL, NULL, 0, NULL },
};

int sfr_py_add_work(PyObject *module)
{
	if (PyModule_AddFunctions(module, functions) < 0)
		return -1;
	return sfr_py_add_type(module, &work_spec, &sfr_py_state(module)->work_type);
}
