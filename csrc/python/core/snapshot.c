/* _core.Snapshot: a reference to a struct sfr_snapshot (sfr/snapshot.h). */
#include "module.h"
#include "core/objects.h"
#include "sfr/snapshot.h"

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
	sfr_py_unlocked_void(sfr_snapshot_put(((struct sfr_py_snapshot *)object)->snapshot));
	sfr_py_free(object);
}

static struct sfr_snapshot *snapshot_of(PyObject *object)
{
	return ((struct sfr_py_snapshot *)object)->snapshot;
}

/* Raises PoolExhaustedError after the timeout. */
static PyObject *snapshot_lease(PyObject *object, PyObject *args)
{
	struct sfr_snapshot *s = snapshot_of(object);
	PyObject *timeout = NULL;
	struct sfr_py_wait_state w;

	if (!PyArg_ParseTuple(args, "|O:lease", &timeout))
		return NULL;
	w = sfr_py_wait_state(timeout);
	while (sfr_py_begin_next_slice(&w))
		w.rc = sfr_py_unlocked(sfr_snapshot_lease(s, w.slice_ns));
	if (w.rc == 0)
		return sfr_py_snapshot_memory_new(sfr_py_state_of(object), s);
	return sfr_py_none_or_raise(object, w.rc == SFR_EAGAIN ? SFR_EEXHAUSTED : w.rc);
}

static PyObject *snapshot_start(PyObject *object, PyObject *args)
{
	struct sfr_snapshot *s = snapshot_of(object);
	struct sfr_device_stream streams[SFR_PY_MAX_STREAMS];
	PyObject *tuple = NULL;
	struct sfr_err err;
	int rc = 0, nr = 0;

	if (!PyArg_ParseTuple(args, "|O:start", &tuple))
		return NULL;
	if (tuple)
		nr = sfr_py_read_streams(tuple, streams);
	if (nr < 0)
		return NULL;
	if (nr > 0)
		rc = sfr_snapshot_set_streams(s, streams, (uint32_t)nr);
	Py_BEGIN_ALLOW_THREADS
	if (rc == 0)
		rc = sfr_snapshot_start(s);
	sfr_snapshot_error(s, &err);
	Py_END_ALLOW_THREADS
	if (err.code != 0)
		rc = 0; /* a device failed: error() reports it, once the error is final */
	return sfr_py_none_or_raise(object, rc);
}

static PyObject *snapshot_gate(PyObject *object, PyObject *tuple)
{
	struct sfr_snapshot *s = snapshot_of(object);
	struct sfr_device_stream streams[SFR_PY_MAX_STREAMS];
	int nr = sfr_py_read_streams(tuple, streams), copied = 0;
	struct sfr_py_wait_state w = sfr_py_wait_state(NULL);
	int64_t torn;

	if (nr < 0)
		return NULL;
	while (sfr_py_begin_next_slice(&w)) {
		Py_BEGIN_ALLOW_THREADS
		w.rc = sfr_snapshot_gate(s, streams, (uint32_t)nr, w.slice_ns);
		/* a wait of 0 ns: asks whether all copies have ended already */
		copied = w.rc == 0 && sfr_snapshot_wait(s, 0, &torn) == 0;
		Py_END_ALLOW_THREADS
	}
	if (w.rc != 0) /* a signal handler has raised an exception, for example */
		return sfr_py_raise(sfr_py_state_of(object), w.rc);
	/* The step may begin. If not everything is copied, its streams wait for the copies. */
	return PyBool_FromLong(copied);
}

static PyObject *snapshot_error(PyObject *object, PyObject *unused)
{
	struct sfr_snapshot *s = snapshot_of(object);
	struct sfr_err err;
	int64_t torn;

	if (sfr_snapshot_wait(s, 0, &torn) == 0)
		sfr_snapshot_error(s, &err);
	else /* takes the engine's lock, so it may wait */
		sfr_py_unlocked_void(sfr_snapshot_error(s, &err));
	return sfr_py_error_text(&err);
}

static PyObject *snapshot_offsets(PyObject *object, PyObject *unused)
{
	struct sfr_py_snapshot *self = (struct sfr_py_snapshot *)object;
	PyObject *list = PyList_New((Py_ssize_t)self->nr_sources);

	for (uint32_t i = 0; list && i < self->nr_sources; i++) {
		PyObject *off = PyLong_FromUnsignedLongLong(sfr_snapshot_offset(self->snapshot, i));

		if (!off || PyList_SetItem(list, (Py_ssize_t)i, off) < 0) /* takes the reference */
			Py_CLEAR(list);
	}
	return list;
}

static PyObject *snapshot_wait(PyObject *object, PyObject *args)
{
	struct sfr_snapshot *s = snapshot_of(object);
	PyObject *timeout = NULL, *copied;
	struct sfr_py_wait_state w;
	int64_t torn = -1;

	if (!PyArg_ParseTuple(args, "|O:wait", &timeout))
		return NULL;
	w = sfr_py_wait_state(timeout);
	/* Ask first without releasing the interpreter lock: faster if the copies have ended. */
	if (w.rc != SFR_PY_RAISED) /* raised for a bad timeout */
		w.rc = sfr_snapshot_wait(s, 0, &torn);
	while (sfr_py_begin_next_slice(&w))
		w.rc = sfr_py_unlocked(sfr_snapshot_wait(s, w.slice_ns, &torn));
	copied = sfr_py_bool_or_raise(object, w.rc, SFR_EAGAIN); /* SFR_EAGAIN: timeout */
	return copied ? Py_BuildValue("NL", copied, (long long)torn) : NULL;
}

static PyObject *snapshot_add_hold(PyObject *object, PyObject *unused)
{
	/* SFR_ESTATE: the memory has been returned */
	return sfr_py_bool_or_raise(object,
				    sfr_py_unlocked(sfr_snapshot_add_hold(snapshot_of(object))),
				    SFR_ESTATE);
}

static PyObject *snapshot_remove_hold(PyObject *object, PyObject *unused)
{
	sfr_py_unlocked_void(sfr_snapshot_remove_hold(snapshot_of(object)));
	Py_RETURN_NONE;
}

static PyObject *snapshot_add_view(PyObject *object, PyObject *unused)
{
	return sfr_py_none_or_raise(object,
				    sfr_py_unlocked(sfr_snapshot_add_view(snapshot_of(object))));
}

static PyObject *snapshot_remove_view(PyObject *object, PyObject *unused)
{
	sfr_py_unlocked_void(sfr_snapshot_remove_view(snapshot_of(object)));
	Py_RETURN_NONE;
}

static PyObject *snapshot_locate_in_file(PyObject *object, PyObject *unused)
{
	struct sfr_snapshot *s = snapshot_of(object);
	uint64_t off, len;
	char *base;
	int rc, fd;

	rc = sfr_py_unlocked(sfr_snapshot_locate_in_file(s, &fd, &off));
	if (rc == SFR_ESTATE) /* the memory is private or has been returned */
		Py_RETURN_NONE;
	if (rc < 0)
		return sfr_py_none_or_raise(object, rc);
	sfr_snapshot_memory(s, &base, &len);
	return Py_BuildValue("iKKK", fd, (unsigned long long)off,
			     (unsigned long long)(uintptr_t)base, (unsigned long long)len);
}

/* Says whether the memory will return to the pool by itself. If so, other calls wait for it. */
static PyObject *snapshot_set_will_return(PyObject *object, PyObject *truth)
{
	int will_return = PyObject_IsTrue(truth);

	if (will_return < 0)
		return NULL;
	sfr_py_unlocked_void(sfr_snapshot_set_will_return(snapshot_of(object), will_return));
	Py_RETURN_NONE;
}

static PyObject *snapshot_is_leased(PyObject *object, PyObject *unused)
{
	int rc = sfr_py_unlocked(sfr_snapshot_is_leased(snapshot_of(object)));

	return rc < 0 ? sfr_py_none_or_raise(object, rc) : PyBool_FromLong(rc); /* rc is 0 or 1 */
}

static PyObject *snapshot_number(PyObject *object, void *closure)
{
	return PyLong_FromUnsignedLongLong(sfr_snapshot_number(snapshot_of(object)));
}

static PyObject *snapshot_copying_s(PyObject *object, void *closure)
{
	return PyFloat_FromDouble((double)sfr_snapshot_copying_ns(snapshot_of(object)) / 1e9);
}

static PyMethodDef methods[] = {
	{ "lease", snapshot_lease, METH_VARARGS,
	  "lease(timeout=None) -> SnapshotMemory: leases the memory. If there is too little, waits "
	  "until saves return some." },
	{ "start", snapshot_start, METH_VARARGS,
	  "start(streams=()): copies the captured sources, and starts the copies of the others. "
	  "`streams`: (device, handle of its current stream) of each device with sources." },
	{ "gate", snapshot_gate, METH_O,
	  "gate(streams) -> bool: returns when the next step may begin on these streams. True if "
	  "everything is copied." },
	{ "error", snapshot_error, METH_NOARGS,
	  "error() -> str: the error of the device, or ''; final when the copies have ended." },
	{ "offsets", snapshot_offsets, METH_NOARGS,
	  "offsets() -> list: the offset of each copy in the memory." },
	{ "wait", snapshot_wait, METH_VARARGS,
	  "wait(timeout=None) -> (whether the copies have ended, index of a torn source or -1)." },
	{ "hold", snapshot_add_hold, METH_NOARGS,
	  "hold() -> bool: keeps the memory until unhold(), for a process or a future. False if the "
	  "memory has been returned." },
	{ "unhold", snapshot_remove_hold, METH_NOARGS, "unhold(): ends one hold()." },
	{ "view", snapshot_add_view, METH_NOARGS,
	  "view(): keeps the memory until unview(), for tensors over it." },
	{ "unview", snapshot_remove_view, METH_NOARGS, "unview(): ends one view()." },
	{ "file", snapshot_locate_in_file, METH_NOARGS,
	  "file() -> (descriptor, offset in it, address, length): for another process that maps the "
	  "memory. None if the memory is private or has been returned." },
	{ "will_return", snapshot_set_will_return, METH_O,
	  "will_return(yes): says whether the memory will return to the pool by itself. If so, a call "
	  "that needs memory waits for it." },
	{ "leased", snapshot_is_leased, METH_NOARGS,
	  "leased() -> bool: whether the memory has not been returned yet." },
	{ NULL, NULL, 0, NULL },
};

static PyGetSetDef getset[] = {
	{ "copying_s", snapshot_copying_s, NULL,
	  "device time, in seconds, of the copies that leave a device", NULL },
	{ "number", snapshot_number, NULL,
	  "the number under which notice_wait() reports the snapshot", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot slots[] = {
	{ Py_tp_new, snapshot_new },
	{ Py_tp_dealloc, snapshot_dealloc },
	{ Py_tp_methods, methods },
	{ Py_tp_getset, getset },
	{ Py_tp_doc,
	  "Snapshot(engine, rows, flags): one snapshot. `rows` is an array of struct sfr_source; "
	  "`flags` are SNAPSHOT_*." },
	{ 0, NULL },
};

SFR_PY_TYPE(spec, "Snapshot", struct sfr_py_snapshot, 0, slots);

int sfr_py_add_snapshot(PyObject *module)
{
	return sfr_py_add_type(module, &spec, &sfr_py_state(module)->snapshot_type);
}
