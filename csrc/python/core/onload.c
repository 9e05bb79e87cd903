/* _core.Onload: copies from host memory to a device, which start when the object is made
 * (offload/offload.h). */
#include "module.h"
#include "core/objects.h"
#include "offload/offload.h"

struct sfr_py_onload {
	PyObject_HEAD
	struct sfr_onload *onload;
};

/* Starts the copies that the rows describe. If the snapshot `from` is still being filled and the
 * device cannot wait for that, this function waits. Returns 0, a code of sfr_onload_start, or
 * SFR_PY_RAISED. */
static int start_onload(struct sfr_engine *engine, uint32_t device, uint64_t stream,
			const Py_buffer *rows, struct sfr_snapshot *from, struct sfr_onload **out)
{
	const uint32_t nr = (uint32_t)((size_t)rows->len / sizeof(struct sfr_onload_copy));
	struct sfr_py_wait_state w = sfr_py_wait_state(NULL);
	int64_t torn;

	while (sfr_py_begin_next_slice(&w)) {
		Py_BEGIN_ALLOW_THREADS
		w.rc = sfr_onload_start(engine, device, stream, rows->buf, nr, from, out);
		if (w.rc == SFR_EAGAIN)
			/* no result needed: the next sfr_onload_start asks again */
			(void)sfr_snapshot_wait(from, w.slice_ns, &torn);
		Py_END_ALLOW_THREADS
	}
	return w.rc;
}

static PyObject *onload_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "engine", "device", "stream", "rows", "snapshot", NULL };
	struct sfr_py_state *state = PyType_GetModuleState(type);
	struct sfr_snapshot *from = NULL;
	struct sfr_py_onload *self = NULL;
	PyObject *engine, *snapshot;
	unsigned long long stream;
	unsigned int device;
	Py_buffer rows;
	int rc;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!IKy*O:Onload", names, state->engine_type,
					 &engine, &device, &stream, &rows, &snapshot))
		return NULL;
	if ((size_t)rows.len % sizeof(struct sfr_onload_copy) != 0) {
		PyErr_SetString(PyExc_ValueError, "rows is no array of struct sfr_onload_copy");
		goto out;
	}
	if (snapshot != Py_None && Py_TYPE(snapshot) != state->snapshot_type) {
		PyErr_SetString(PyExc_TypeError, "snapshot has to be a Snapshot or None");
		goto out;
	}
	if (snapshot != Py_None)
		from = ((struct sfr_py_snapshot *)snapshot)->snapshot;
	self = (struct sfr_py_onload *)sfr_py_alloc(type);
	if (!self)
		goto out;
	rc = start_onload(((struct sfr_py_engine *)engine)->engine, device, stream, &rows, from,
			  &self->onload);
	if (rc != 0) {
		(void)sfr_py_raise(state, rc); /* always NULL */
		Py_CLEAR(self);
	}
out:
	PyBuffer_Release(&rows);
	return (PyObject *)self;
}

static void onload_dealloc(PyObject *object)
{
	sfr_py_unlocked_void(sfr_onload_wait_and_free(((struct sfr_py_onload *)object)->onload));
	sfr_py_free(object);
}

static struct sfr_onload *onload_of(PyObject *object)
{
	return ((struct sfr_py_onload *)object)->onload;
}

static PyObject *onload_make_stream_wait(PyObject *object, PyObject *handle)
{
	uint64_t stream;

	if (sfr_py_int_to_u64(handle, &stream) < 0)
		return NULL;
	/* SFR_EAGAIN: the stream cannot wait for the copies */
	return sfr_py_bool_or_raise(object,
				    sfr_py_unlocked(sfr_onload_make_stream_wait(onload_of(object),
										stream)),
				    SFR_EAGAIN);
}

static PyObject *onload_wait(PyObject *object, PyObject *args)
{
	PyObject *timeout = NULL;
	struct sfr_py_wait_state w;

	if (!PyArg_ParseTuple(args, "|O:wait", &timeout))
		return NULL;
	w = sfr_py_wait_state(timeout);
	/* Ask first without releasing the interpreter lock: faster if the copies have ended. */
	if (w.rc != SFR_PY_RAISED)
		w.rc = sfr_onload_wait(onload_of(object), 0);
	while (sfr_py_begin_next_slice(&w))
		w.rc = sfr_py_unlocked(sfr_onload_wait(onload_of(object), w.slice_ns));
	return sfr_py_bool_or_raise(object, w.rc, SFR_EAGAIN); /* SFR_EAGAIN: the timeout passed */
}

static PyObject *onload_error(PyObject *object, PyObject *unused)
{
	struct sfr_err err;

	sfr_onload_error(onload_of(object), &err);
	return sfr_py_error_text(&err);
}

static PyObject *onload_times(PyObject *object, PyObject *unused)
{
	uint64_t copying_ns, waited_ns;
	int rc = sfr_onload_times(onload_of(object), &copying_ns, &waited_ns);

	if (rc == SFR_EAGAIN) /* the times are not known yet */
		Py_RETURN_NONE;
	if (rc < 0)
		return sfr_py_none_or_raise(object, rc);
	return Py_BuildValue("dd", (double)copying_ns / 1e9, (double)waited_ns / 1e9);
}

static PyMethodDef methods[] = {
	{ "order", onload_make_stream_wait, METH_O,
	  "order(stream) -> bool: makes the stream wait for the copies. False if the stream cannot: "
	  "then call wait()." },
	{ "wait", onload_wait, METH_VARARGS,
	  "wait(timeout=None) -> bool: waits until no copy is running; False if the timeout passed." },
	{ "times", onload_times, METH_NOARGS,
	  "times() -> (seconds that the copies took, seconds that a stream waited for them), or None "
	  "if the times are not known yet." },
	{ "error", onload_error, METH_NOARGS,
	  "error() -> str: the error of the device, or ''; final once wait() has returned True." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot slots[] = {
	{ Py_tp_new, onload_new },
	{ Py_tp_dealloc, onload_dealloc },
	{ Py_tp_methods, methods },
	{ Py_tp_doc,
	  "Onload(engine, device, stream, rows, snapshot): copies to a device, after the work on "
	  "the stream. `rows` is an array of struct sfr_onload_copy. `snapshot` owns the sources, or "
	  "is None." },
	{ 0, NULL },
};

SFR_PY_TYPE(spec, "Onload", struct sfr_py_onload, 0, slots);

int sfr_py_add_onload(PyObject *module)
{
	return sfr_py_add_type(module, &spec, &sfr_py_state(module)->onload_type);
}
