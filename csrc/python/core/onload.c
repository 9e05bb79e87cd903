/* _core.Onload: a handle on struct sfr_onload, started when it is made. */
#include "module.h"
#include "core/objects.h"
#include "offload/offload.h"

#include <string.h>

struct sfr_py_onload {
	PyObject_HEAD
	struct sfr_onload *onload;
};

/* Starts it; where the host has to wait for the sources first, it does so in slices. */
static int start(struct sfr_engine *engine, uint32_t device, uint64_t stream, const Py_buffer *rows,
		 struct sfr_snapshot *from, struct sfr_onload **out)
{
	const uint32_t nr = (uint32_t)((size_t)rows->len / sizeof(struct sfr_onload_copy));
	uint64_t left = SFR_FOREVER, slice;
	int64_t torn;
	int rc;

	for (;;) {
		Py_BEGIN_ALLOW_THREADS
		rc = sfr_onload_start(engine, device, stream, rows->buf, nr, from, out);
		Py_END_ALLOW_THREADS
		if (rc != SFR_EAGAIN)
			return rc;
		if (sfr_py_slice(&left, &slice) < 0)
			return SFR_EAGAIN;
		Py_BEGIN_ALLOW_THREADS
		rc = sfr_snapshot_wait(from, slice, &torn);
		Py_END_ALLOW_THREADS
		if (rc < 0 && rc != SFR_EAGAIN)
			return rc;
	}
}

static PyObject *onload_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "engine", "device", "stream", "rows", "snapshot", NULL };
	struct sfr_py_state *state = PyType_GetModuleState(type);
	struct sfr_snapshot *from = NULL;
	struct sfr_py_onload *self;
	PyObject *engine, *snapshot;
	unsigned long long stream;
	unsigned int device;
	Py_buffer rows;
	int rc;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!IKy*O:Onload", names, state->engine_type,
					 &engine, &device, &stream, &rows, &snapshot))
		return NULL;
	self = NULL;
	if ((size_t)rows.len % sizeof(struct sfr_onload_copy) != 0)
		PyErr_SetString(PyExc_ValueError, "rows is no array of struct sfr_onload_copy");
	else if (snapshot != Py_None && Py_TYPE(snapshot) != state->snapshot_type)
		PyErr_SetString(PyExc_TypeError, "snapshot has to be a Snapshot or None");
	else
		self = (struct sfr_py_onload *)sfr_py_alloc(type);
	if (self) {
		if (snapshot != Py_None)
			from = ((struct sfr_py_snapshot *)snapshot)->snapshot;
		rc = start(((struct sfr_py_engine *)engine)->engine, device, stream, &rows, from,
			   &self->onload);
		if (rc < 0) {
			if (rc != SFR_EAGAIN) /* then a signal handler has raised */
				(void)sfr_py_raise(state, rc);
			Py_DECREF((PyObject *)self);
			self = NULL;
		}
	}
	PyBuffer_Release(&rows);
	return (PyObject *)self;
}

static void onload_dealloc(PyObject *object)
{
	Py_BEGIN_ALLOW_THREADS
	sfr_onload_put(((struct sfr_py_onload *)object)->onload);
	Py_END_ALLOW_THREADS
	sfr_py_free(object);
}

/* order(stream) -> whether that stream waits for the copies; else the caller has to */
static PyObject *onload_order(ARGS)
{
	struct sfr_onload *onload = ((struct sfr_py_onload *)object)->onload;
	unsigned long long stream;
	int rc;

	(void)kwnames;
	if (nargs != 1) {
		PyErr_SetString(PyExc_TypeError, "order takes a stream's handle");
		return NULL;
	}
	stream = PyLong_AsUnsignedLongLong(args[0]);
	if (stream == (unsigned long long)-1 && PyErr_Occurred())
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	rc = sfr_onload_order(onload, stream);
	Py_END_ALLOW_THREADS
	if (rc < 0 && rc != SFR_EAGAIN)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	return PyBool_FromLong(rc == 0);
}

/* wait(timeout=None) -> False when the timeout passed */
static PyObject *onload_wait(ARGS)
{
	struct sfr_onload *onload = ((struct sfr_py_onload *)object)->onload;
	uint64_t left, slice;
	int rc;

	(void)kwnames;
	if (sfr_py_timeout(nargs > 0 ? args[0] : NULL, &left) < 0)
		return NULL;
	rc = sfr_onload_wait(onload, 0);
	while (rc == SFR_EAGAIN && left > 0) {
		if (sfr_py_slice(&left, &slice) < 0)
			return NULL;
		Py_BEGIN_ALLOW_THREADS
		rc = sfr_onload_wait(onload, slice);
		Py_END_ALLOW_THREADS
	}
	if (rc < 0 && rc != SFR_EAGAIN)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	return PyBool_FromLong(rc == 0);
}

/* error() -> a sentence on what a device failed with, or "" */
static PyObject *onload_error(ARGS)
{
	struct sfr_err err;

	(void)cls;
	UNUSED_ARGS;
	sfr_onload_error(((struct sfr_py_onload *)object)->onload, &err);
	return sfr_py_sentence(&err);
}

/* times() -> (seconds of the copies, seconds that a stream waited), or None: not known yet */
static PyObject *onload_times(ARGS)
{
	uint64_t copying_ns, waited_ns;
	int rc =
		sfr_onload_times(((struct sfr_py_onload *)object)->onload, &copying_ns, &waited_ns);

	UNUSED_ARGS;
	if (rc == SFR_EAGAIN)
		Py_RETURN_NONE;
	if (rc < 0)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	return Py_BuildValue("dd", (double)copying_ns / 1e9, (double)waited_ns / 1e9);
}

static PyMethodDef methods[] = {
	METHOD("order", onload_order, "order(stream) -> bool: False when the host has to wait."),
	METHOD("wait", onload_wait, "wait(timeout=None) -> bool: False when the timeout passed."),
	METHOD("times", onload_times, "times() -> (seconds copied, seconds waited) or None."),
	METHOD("error", onload_error, "error() -> str: what a device failed with, or ''."),
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot slots[] = {
	{ Py_tp_new, onload_new },
	{ Py_tp_dealloc, onload_dealloc },
	{ Py_tp_methods, methods },
	{ Py_tp_doc, "Onload(engine, device, stream, rows, snapshot): copies to a device, queued" },
	{ 0, NULL },
};

static PyType_Spec spec = {
	.name = "stillframe._core.Onload",
	.basicsize = sizeof(struct sfr_py_onload),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = slots,
};

int sfr_py_add_onload(PyObject *module)
{
	return sfr_py_add_type(module, &spec, &sfr_py_state(module)->onload_type);
}
