/* _core.Snapshot: a handle on struct sfr_snapshot. */
#include "module.h"
#include "core/objects.h"
#include "sfr/notice.h"
#include "sfr/snapshot.h"

#include <string.h>

static PyObject *snapshot_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "engine", "rows", "flags", NULL };
	struct sfr_py_state *state = PyType_GetModuleState(type);
	struct sfr_snapshot *snapshot = NULL;
	struct sfr_py_snapshot *self;
	PyObject *engine;
	Py_buffer rows;
	unsigned int flags;
	size_t nr;
	int rc;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!y*I:Snapshot", names, state->engine_type,
					 &engine, &rows, &flags))
		return NULL;
	nr = (size_t)rows.len / sizeof(struct sfr_source);
	if ((size_t)rows.len % sizeof(struct sfr_source) || nr >= UINT32_MAX) {
		PyErr_SetString(PyExc_ValueError, "rows is no array of struct sfr_source");
		PyBuffer_Release(&rows);
		return NULL;
	}
	rc = sfr_snapshot_new(((struct sfr_py_engine *)engine)->engine, rows.buf, (uint32_t)nr,
			      flags, &snapshot);
	PyBuffer_Release(&rows);
	if (rc < 0)
		return sfr_py_raise(state, rc);
	self = (struct sfr_py_snapshot *)sfr_py_alloc(type);
	if (!self) {
		sfr_snapshot_put(snapshot);
		return NULL;
	}
	self->snapshot = snapshot;
	self->nr_sources = (uint32_t)nr;
	return (PyObject *)self;
}

static void snapshot_dealloc(PyObject *object)
{
	Py_BEGIN_ALLOW_THREADS
	sfr_snapshot_put(((struct sfr_py_snapshot *)object)->snapshot);
	Py_END_ALLOW_THREADS
	sfr_py_free(object);
}

/* lease(timeout=None). Answers signals while it waits: nothing is held then. To one that does not
 * wait, a pool that is busy is a pool that is exhausted. */
static PyObject *snapshot_lease(ARGS)
{
	struct sfr_snapshot *s = ((struct sfr_py_snapshot *)object)->snapshot;
	struct sfr_py_state *state = PyType_GetModuleState(cls);
	uint64_t left, slice = 0;
	int rc;

	(void)kwnames;
	if (sfr_py_timeout(nargs > 0 ? args[0] : Py_None, &left) < 0)
		return NULL;
	do {
		if (left > 0 && sfr_py_slice(&left, &slice) < 0)
			return NULL;
		Py_BEGIN_ALLOW_THREADS
		rc = sfr_snapshot_lease(s, slice);
		Py_END_ALLOW_THREADS
	} while (rc == SFR_EAGAIN && left > 0);
	if (rc == SFR_EAGAIN)
		rc = SFR_EEXHAUSTED;
	return rc < 0 ? sfr_py_raise(state, rc) : sfr_py_memory(state, s);
}

/* start(streams=()): what a device failed with is error()'s to say, and only the end of the copy
 * makes it final; so it is not raised here. */
static PyObject *snapshot_start(ARGS)
{
	struct sfr_snapshot *s = ((struct sfr_py_snapshot *)object)->snapshot;
	struct sfr_stream streams[SFR_PY_MAX_STREAMS];
	struct sfr_err err;
	int rc = 0, nr = 0;

	(void)kwnames;
	if (nargs > 0)
		nr = sfr_py_streams(args[0], streams);
	if (nr < 0)
		return NULL;
	if (nr > 0)
		rc = sfr_snapshot_streams(s, streams, (uint32_t)nr);
	Py_BEGIN_ALLOW_THREADS
	if (rc == 0)
		rc = sfr_snapshot_start(s);
	sfr_snapshot_error(s, &err);
	Py_END_ALLOW_THREADS
	if (rc < 0 && err.code == 0)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	Py_RETURN_NONE;
}

/* gate(streams) -> whether every byte is copied */
static PyObject *snapshot_gate(ARGS)
{
	struct sfr_snapshot *s = ((struct sfr_py_snapshot *)object)->snapshot;
	struct sfr_stream streams[SFR_PY_MAX_STREAMS];
	uint64_t left = SFR_FOREVER, slice;
	int64_t torn;
	int rc, nr, copied = 0;

	(void)kwnames;
	if (nargs != 1) {
		PyErr_SetString(PyExc_TypeError, "gate takes a tuple of (device, stream)");
		return NULL;
	}
	nr = sfr_py_streams(args[0], streams);
	if (nr < 0)
		return NULL;
	do {
		if (sfr_py_slice(&left, &slice) < 0)
			return NULL;
		Py_BEGIN_ALLOW_THREADS
		rc = sfr_snapshot_gate(s, streams, (uint32_t)nr, slice);
		copied = rc == 0 && sfr_snapshot_wait(s, 0, &torn) == 0;
		Py_END_ALLOW_THREADS
	} while (rc == SFR_EAGAIN);
	if (rc < 0)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	return PyBool_FromLong(copied);
}

/* error() -> a sentence on what a device failed with, or "" */
static PyObject *snapshot_error(ARGS)
{
	struct sfr_snapshot *s = ((struct sfr_py_snapshot *)object)->snapshot;
	struct sfr_err err;
	int64_t torn;

	(void)cls;
	UNUSED_ARGS;
	if (sfr_snapshot_wait(s, 0, &torn) == 0) {
		sfr_snapshot_error(s, &err);
	} else { /* which waits for the engine's lock */
		Py_BEGIN_ALLOW_THREADS
		sfr_snapshot_error(s, &err);
		Py_END_ALLOW_THREADS
	}
	return sfr_py_sentence(&err);
}

static PyObject *snapshot_offsets(ARGS)
{
	struct sfr_py_snapshot *self = (struct sfr_py_snapshot *)object;
	PyObject *list = PyList_New((Py_ssize_t)self->nr_sources);

	(void)cls;
	UNUSED_ARGS;
	for (uint32_t i = 0; list && i < self->nr_sources; i++) {
		PyObject *off = PyLong_FromUnsignedLongLong(sfr_snapshot_offset(self->snapshot, i));

		if (!off || PyList_SetItem(list, (Py_ssize_t)i, off) < 0) /* takes it over */
			Py_CLEAR(list);
	}
	return list;
}

/* wait(timeout=None) -> (copied, torn) */
static PyObject *snapshot_wait(ARGS)
{
	struct sfr_snapshot *s = ((struct sfr_py_snapshot *)object)->snapshot;
	uint64_t left, slice;
	int64_t torn;
	int rc;

	(void)kwnames;
	if (sfr_py_timeout(nargs > 0 ? args[0] : NULL, &left) < 0)
		return NULL;
	rc = sfr_snapshot_wait(s, 0, &torn);
	while (rc == SFR_EAGAIN && left > 0) {
		if (sfr_py_slice(&left, &slice) < 0)
			return NULL;
		Py_BEGIN_ALLOW_THREADS
		rc = sfr_snapshot_wait(s, slice, &torn);
		Py_END_ALLOW_THREADS
	}
	if (rc < 0 && rc != SFR_EAGAIN)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	return Py_BuildValue("NL", PyBool_FromLong(rc == 0), (long long)torn);
}

static PyObject *snapshot_hold(ARGS)
{
	struct sfr_snapshot *s = ((struct sfr_py_snapshot *)object)->snapshot;
	int rc;

	UNUSED_ARGS;
	Py_BEGIN_ALLOW_THREADS
	rc = sfr_snapshot_hold(s);
	Py_END_ALLOW_THREADS
	if (rc < 0 && rc != SFR_ESTATE)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	return PyBool_FromLong(rc == 0);
}

static PyObject *snapshot_unhold(ARGS)
{
	struct sfr_snapshot *s = ((struct sfr_py_snapshot *)object)->snapshot;

	(void)cls;
	UNUSED_ARGS;
	Py_BEGIN_ALLOW_THREADS
	sfr_snapshot_unhold(s);
	Py_END_ALLOW_THREADS
	Py_RETURN_NONE;
}

static PyObject *snapshot_view(ARGS)
{
	struct sfr_snapshot *s = ((struct sfr_py_snapshot *)object)->snapshot;
	int rc;

	UNUSED_ARGS;
	Py_BEGIN_ALLOW_THREADS
	rc = sfr_snapshot_view(s);
	Py_END_ALLOW_THREADS
	if (rc < 0)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	Py_RETURN_NONE;
}

static PyObject *snapshot_unview(ARGS)
{
	struct sfr_snapshot *s = ((struct sfr_py_snapshot *)object)->snapshot;

	(void)cls;
	UNUSED_ARGS;
	Py_BEGIN_ALLOW_THREADS
	sfr_snapshot_unview(s);
	Py_END_ALLOW_THREADS
	Py_RETURN_NONE;
}

/* file() -> (descriptor, offset in it, address, length), or None: no process can map it */
static PyObject *snapshot_file(ARGS)
{
	struct sfr_snapshot *s = ((struct sfr_py_snapshot *)object)->snapshot;
	uint64_t off, len;
	char *base;
	int rc, fd;

	UNUSED_ARGS;
	Py_BEGIN_ALLOW_THREADS
	rc = sfr_snapshot_file(s, &fd, &off);
	Py_END_ALLOW_THREADS
	if (rc == SFR_ESTATE)
		Py_RETURN_NONE;
	if (rc < 0)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	sfr_snapshot_memory(s, &base, &len);
	return Py_BuildValue("iKKK", fd, (unsigned long long)off,
			     (unsigned long long)(uintptr_t)base, (unsigned long long)len);
}

static PyObject *snapshot_will_return(ARGS)
{
	struct sfr_snapshot *s = ((struct sfr_py_snapshot *)object)->snapshot;
	int yes = nargs == 1 ? PyObject_IsTrue(args[0]) : -1;

	(void)cls, (void)kwnames;
	if (yes < 0)
		return nargs == 1 ? NULL : PyErr_Format(PyExc_TypeError, "will_return(yes)");
	Py_BEGIN_ALLOW_THREADS
	sfr_snapshot_will_return(s, yes);
	Py_END_ALLOW_THREADS
	Py_RETURN_NONE;
}

static PyObject *snapshot_leased(ARGS)
{
	struct sfr_snapshot *s = ((struct sfr_py_snapshot *)object)->snapshot;
	int rc;

	UNUSED_ARGS;
	Py_BEGIN_ALLOW_THREADS
	rc = sfr_snapshot_leased(s);
	Py_END_ALLOW_THREADS
	if (rc < 0)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	return PyBool_FromLong(rc);
}

static PyObject *snapshot_number(PyObject *object, void *closure)
{
	(void)closure;
	return PyLong_FromUnsignedLongLong(sfr_snapshot_number(((struct sfr_py_snapshot *)object)
								       ->snapshot));
}

static PyMethodDef methods[] = {
	METHOD("lease", snapshot_lease,
	       "lease(timeout=None) -> SnapshotMemory: waits for saves if need be."),
	METHOD("start", snapshot_start,
	       "start(streams=()): copies what is captured, queues the rest."),
	METHOD("gate", snapshot_gate,
	       "gate(streams) -> bool: the next step may begin; True when all is copied."),
	METHOD("error", snapshot_error, "error() -> str: what a device failed with, or ''."),
	METHOD("offsets", snapshot_offsets, "offsets() -> where each copy is in the memory."),
	METHOD("wait", snapshot_wait,
	       "wait(timeout=None) -> (False when the timeout passed, torn source or -1)."),
	METHOD("hold", snapshot_hold, "hold() -> bool: False when the memory has gone back."),
	METHOD("unhold", snapshot_unhold, "unhold(): ends one hold."),
	METHOD("view", snapshot_view, "view(): the memory is in somebody's hands once more."),
	METHOD("unview", snapshot_unview, "unview(): ends one view."),
	METHOD("file", snapshot_file,
	       "file() -> (descriptor, offset in it, address, length), None: it is private, or gone."),
	METHOD("will_return", snapshot_will_return,
	       "will_return(yes): others wait for its memory from now on, or do not any more."),
	METHOD("leased", snapshot_leased, "leased() -> bool."),
	{ NULL, NULL, 0, NULL },
};

static PyObject *snapshot_copying_s(PyObject *object, void *closure)
{
	(void)closure;
	return PyFloat_FromDouble((double)sfr_snapshot_copying_ns(((struct sfr_py_snapshot *)object)
									  ->snapshot) /
				  1e9);
}

static PyGetSetDef getset[] = {
	{ "copying_s", snapshot_copying_s, NULL, "what devices took for what leaves", NULL },
	{ "number", snapshot_number, NULL, "what notice_wait() names the snapshot by", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot slots[] = {
	{ Py_tp_new, snapshot_new },
	{ Py_tp_dealloc, snapshot_dealloc },
	{ Py_tp_methods, methods },
	{ Py_tp_getset, getset },
	{ Py_tp_doc, "Snapshot(engine, rows, flags): one snapshot" },
	{ 0, NULL },
};

static PyType_Spec spec = {
	.name = "stillframe._core.Snapshot",
	.basicsize = sizeof(struct sfr_py_snapshot),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = slots,
};

int sfr_py_add_snapshot(PyObject *module)
{
	struct sfr_py_state *state = sfr_py_state(module);

	if (PyModule_AddIntConstant(module, "SNAPSHOT_SHARED", SFR_SNAPSHOT_SHARED) < 0 ||
	    PyModule_AddIntConstant(module, "SNAPSHOT_LEAVES", SFR_SNAPSHOT_LEAVES) < 0 ||
	    PyModule_AddIntConstant(module, "APART", SFR_APART) < 0 ||
	    PyModule_AddIntConstant(module, "NOTICE_SNAPSHOT", SFR_NOTICE_SNAPSHOT) < 0)
		return -1;
	return sfr_py_add_type(module, &spec, &state->snapshot_type);
}
