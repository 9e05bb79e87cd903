/* Functions of _core for stillframe.trace, which writes a timeline of saves and training steps to a
 * file. They start and stop the recording, and record the spans of Python: calls, gates and
 * optimizer steps. */
#include "module.h"

#include "trace/trace.h"

static PyObject *trace_start(PyObject *module, PyObject *path)
{
	const char *bytes = PyBytes_AsString(path);
	int rc;

	if (!bytes)
		return NULL;
	rc = sfr_py_unlocked(sfr_trace_start(bytes));
	if (rc < 0)
		return sfr_py_raise(sfr_py_state(module), rc);
	Py_RETURN_NONE;
}

static PyObject *trace_stop(PyObject *module, PyObject *unused)
{
	struct sfr_trace_result result;
	int rc = sfr_py_unlocked(sfr_trace_stop(&result));

	if (rc < 0)
		Py_RETURN_NONE;
	return Py_BuildValue("(KKi)", (unsigned long long)result.nr_events,
			     (unsigned long long)result.nr_dropped, -result.error);
}

static PyObject *trace_name_thread(PyObject *module, PyObject *args)
{
	unsigned long long tid;
	const char *name;

	if (!PyArg_ParseTuple(args, "Ky:trace_name_thread", &tid, &name))
		return NULL;
	sfr_py_unlocked_void(sfr_trace_name_thread(tid, name));
	Py_RETURN_NONE;
}

static PyObject *trace_begin(PyObject *module, PyObject *unused)
{
	uint64_t now = sfr_trace_get_start_ns();

	return PyLong_FromUnsignedLongLong(now);
}

static PyObject *trace_end(PyObject *module, PyObject *args)
{
	unsigned long long start, save, number; /* as sfr_trace_record_span describes them */
	int kind;

	if (!PyArg_ParseTuple(args, "iKKK:trace_end", &kind, &start, &save, &number))
		return NULL;
	/* Only the core records the first kind, SFR_TRACE_SAVE. */
	if (kind <= SFR_TRACE_SAVE || kind >= SFR_NR_TRACE_KINDS) {
		PyErr_SetString(PyExc_ValueError, "no such kind of span");
		return NULL;
	}
	sfr_trace_record_span((enum sfr_trace_kind)kind, start, save, number);
	Py_RETURN_NONE;
}

/* Is called at each step, so it is fast: the object's address identifies the optimizer. */
static PyObject *trace_step_begins(PyObject *module, PyObject *optimizer)
{
	sfr_trace_step((uint64_t)(uintptr_t)optimizer, false);
	Py_RETURN_NONE;
}

static PyObject *trace_step_ends(PyObject *module, PyObject *optimizer)
{
	sfr_trace_step((uint64_t)(uintptr_t)optimizer, true);
	Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
	{ "trace_start", trace_start, METH_O,
	  "trace_start(path): creates the file and starts recording. BusyError if a trace is being "
	  "written." },
	{ "trace_stop", trace_stop, METH_NOARGS,
	  "trace_stop() -> (events written, events lost, errno of the file or 0): stops recording "
	  "and completes the file. None if this process writes no trace." },
	{ "trace_name_thread", trace_name_thread, METH_VARARGS,
	  "trace_name_thread(tid, name): names the row of a thread in the timeline." },
	{ "trace_begin", trace_begin, METH_NOARGS,
	  "trace_begin() -> int: the start of a span; 0 if no trace is being written." },
	{ "trace_end", trace_end, METH_VARARGS,
	  "trace_end(kind, start, save, number): records a span from `start`, the result of "
	  "trace_begin, until now. Does nothing if `start` is 0. `save` is the number of the save. "
	  "SFR_TRACE_LIST (trace/trace.h) says what `number` counts." },
	{ "trace_step_begins", trace_step_begins, METH_O,
	  "trace_step_begins(optimizer): records the beginning of a step." },
	{ "trace_step_ends", trace_step_ends, METH_O,
	  "trace_step_ends(optimizer): records the end of a step." },
	{ NULL, NULL, 0, NULL },
};

int sfr_py_add_trace(PyObject *module)
{
	return PyModule_AddFunctions(module, functions);
}
