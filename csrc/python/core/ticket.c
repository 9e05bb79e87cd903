/* _core.Ticket: a handle on struct sfr_ticket. */
#include "module.h"
#include "core/objects.h"
#include "sfr/notice.h"
#include "sfr/parts.h"

struct sfr_py_ticket {
	PyObject_HEAD
	struct sfr_ticket *ticket;
	PyObject *skeleton; /* the core reads its bytes until the save is staged or has ended */
};

/* A new object, which takes the ticket over; `skeleton` may be NULL. */
static PyObject *ticket_wrap(PyTypeObject *type, struct sfr_ticket *ticket, PyObject *skeleton)
{
	struct sfr_py_ticket *self = (struct sfr_py_ticket *)sfr_py_alloc(type);

	if (!self) {
		sfr_ticket_put(ticket);
		return NULL;
	}
	self->ticket = ticket;
	self->skeleton = Py_XNewRef(skeleton);
	return (PyObject *)self;
}

static PyObject *ticket_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "engine", "dir", "name", "skeleton", "rows", "flags", "fs", NULL };
	struct sfr_py_state *state = PyType_GetModuleState(type);
	struct sfr_ticket *ticket = NULL;
	PyObject *engine, *skeleton;
	const char *dir, *name;
	Py_buffer rows;
	unsigned int flags;
	unsigned long long fs = 0;
	int rc;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!yyO!y*I|K:Ticket", names,
					 state->engine_type, &engine, &dir, &name, &PyBytes_Type,
					 &skeleton, &rows, &flags, &fs))
		return NULL;
	const struct sfr_save_desc desc = {
		.dir = dir,
		.name = name,
		.fs = fs,
		.skeleton = PyBytes_AsString(skeleton),
		.skeleton_len = (uint64_t)PyBytes_Size(skeleton),
		.sources = rows.buf,
		.nr_sources = (uint32_t)((size_t)rows.len / sizeof(struct sfr_source)),
		.flags = flags,
	};
	if ((size_t)rows.len % sizeof(struct sfr_source) ||
	    (size_t)rows.len / sizeof(struct sfr_source) >= UINT32_MAX) {
		PyErr_SetString(PyExc_ValueError, "rows is no array of struct sfr_source");
		PyBuffer_Release(&rows);
		return NULL;
	}
	rc = sfr_save_new(((struct sfr_py_engine *)engine)->engine, &desc, &ticket);
	PyBuffer_Release(&rows);
	if (rc < 0)
		return sfr_py_raise(state, rc);
	return ticket_wrap(type, ticket, skeleton);
}

static PyObject *ticket_of_parts(PyObject *type, PyObject *args)
{
	struct sfr_py_state *state = PyType_GetModuleState((PyTypeObject *)type);
	struct sfr_save_desc desc = { .flags = 0 };
	struct sfr_ticket *ticket = NULL;
	PyObject *engine, *parts;
	unsigned long long fs = 0;
	unsigned int flags;
	int rc;

	if (!PyArg_ParseTuple(args, "O!yyO!I|K:of_parts", state->engine_type, &engine, &desc.dir,
			      &desc.name, state->parts_type, &parts, &flags, &fs))
		return NULL;
	desc.flags = flags;
	desc.fs = fs;
	rc = sfr_save_new_parts(((struct sfr_py_engine *)engine)->engine, &desc,
				((struct sfr_py_parts *)parts)->parts, &ticket);
	if (rc < 0)
		return sfr_py_raise(state, rc);
	return ticket_wrap((PyTypeObject *)type, ticket, NULL);
}

static void ticket_dealloc(PyObject *object)
{
	struct sfr_py_ticket *self = (struct sfr_py_ticket *)object;

	Py_BEGIN_ALLOW_THREADS
	sfr_ticket_put(self->ticket);
	Py_END_ALLOW_THREADS
	Py_XDECREF(self->skeleton);
	sfr_py_free(object);
}

/* From a laid out save to one in flight. */
enum stage { BEGIN, ADMIT, CAPTURE, LAUNCH };

struct submission {
	struct sfr_ticket *ticket;
	struct sfr_stream streams[SFR_PY_MAX_STREAMS];
	int nr_streams;
	enum stage stage; /* the next one, or the one that waits */
};

/* Goes as far as `slice` lets it, without the interpreter lock: so a save that waits for nothing
 * lets go of it once. */
static int submit_on(struct submission *s, uint64_t slice)
{
	int rc;

	if (s->stage == BEGIN) {
		if (s->nr_streams > 0) {
			rc = sfr_save_begin(s->ticket, s->streams, (uint32_t)s->nr_streams);
			if (rc < 0)
				return rc;
		}
		s->stage = ADMIT;
	}
	if (s->stage == ADMIT) {
		rc = sfr_save_admit(s->ticket, slice);
		if (rc < 0)
			return rc;
		s->stage = CAPTURE;
	}
	if (s->stage == CAPTURE) {
		rc = sfr_save_capture(s->ticket, slice);
		if (rc < 0)
			return rc;
		s->stage = LAUNCH;
	}
	return sfr_save_launch(s->ticket);
}

static void abandon(struct sfr_ticket *t)
{
	Py_BEGIN_ALLOW_THREADS
	sfr_save_abandon(t);
	Py_END_ALLOW_THREADS
}

static PyObject *ticket_submit(ARGS)
{
	struct submission s = { .ticket = ((struct sfr_py_ticket *)object)->ticket };
	uint64_t left = SFR_FOREVER, slice;
	int rc;

	(void)kwnames;
	if (nargs > 0)
		s.nr_streams = sfr_py_streams(args[0], s.streams);
	if (s.nr_streams < 0)
		return NULL;
	do {
		if (sfr_py_slice(&left, &slice) < 0) {
			if (s.stage == CAPTURE)
				abandon(s.ticket);
			return NULL;
		}
		Py_BEGIN_ALLOW_THREADS
		rc = submit_on(&s, slice);
		Py_END_ALLOW_THREADS
	} while (rc == SFR_EAGAIN);
	if (rc == SFR_EEXHAUSTED && s.stage == CAPTURE)
		abandon(s.ticket);
	if (rc < 0)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	Py_RETURN_NONE;
}

static PyObject *ticket_wait(ARGS)
{
	struct sfr_ticket *t = ((struct sfr_py_ticket *)object)->ticket;
	uint64_t left, slice;
	long what;
	int rc;

	(void)kwnames;
	if (nargs < 1 || nargs > 2) {
		PyErr_SetString(PyExc_TypeError, "wait takes what to wait for, and a timeout");
		return NULL;
	}
	what = PyLong_AsLong(args[0]);
	if (what == -1 && PyErr_Occurred())
		return NULL;
	if (what < SFR_WAIT_COPIED || what > SFR_WAIT_ENDED) {
		PyErr_SetString(PyExc_ValueError, "no such state to wait for");
		return NULL;
	}
	if (sfr_py_timeout(nargs > 1 ? args[1] : NULL, &left) < 0)
		return NULL;
	/* Mostly it is known, and the lock need not be let go of to see that. */
	if (sfr_save_reached(t, (enum sfr_wait_for)what) || (what == SFR_WAIT_ENDED && left == 0)) {
		rc = sfr_save_wait(t, (enum sfr_wait_for)what, 0);
	} else {
		do {
			slice = 0;
			if (left > 0 && sfr_py_slice(&left, &slice) < 0)
				return NULL;
			Py_BEGIN_ALLOW_THREADS
			rc = sfr_save_wait(t, (enum sfr_wait_for)what, slice);
			Py_END_ALLOW_THREADS
		} while (rc == SFR_EAGAIN && left > 0);
	}
	if (rc < 0 && rc != SFR_EAGAIN)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	if (rc == 0 && what == SFR_WAIT_ENDED) /* the core reads it no more; handles are kept */
		Py_CLEAR(((struct sfr_py_ticket *)object)->skeleton);
	return PyBool_FromLong(rc == 0);
}

static PyObject *ticket_gate(ARGS)
{
	struct sfr_ticket *t = ((struct sfr_py_ticket *)object)->ticket;
	struct sfr_stream streams[SFR_PY_MAX_STREAMS];
	uint64_t left = SFR_FOREVER, slice;
	int rc, nr_streams, copied = 0;

	(void)kwnames;
	if (nargs != 1) {
		PyErr_SetString(PyExc_TypeError, "gate takes a tuple of (device, stream)");
		return NULL;
	}
	nr_streams = sfr_py_streams(args[0], streams);
	if (nr_streams < 0)
		return NULL;
	do {
		if (sfr_py_slice(&left, &slice) < 0)
			return NULL;
		Py_BEGIN_ALLOW_THREADS
		rc = sfr_save_gate(t, streams, (uint32_t)nr_streams, slice);
		copied = rc == 0 && sfr_save_wait(t, SFR_WAIT_COPIED, 0) == 0;
		Py_END_ALLOW_THREADS
	} while (rc == SFR_EAGAIN);
	if (rc < 0)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	return PyBool_FromLong(copied);
}

static PyObject *ticket_confirm(ARGS)
{
	struct sfr_ticket *t = ((struct sfr_py_ticket *)object)->ticket;
	long long torn;
	int rc;

	(void)kwnames;
	if (nargs != 1) {
		PyErr_SetString(PyExc_TypeError, "confirm takes the index of a torn source, or -1");
		return NULL;
	}
	torn = PyLong_AsLongLong(args[0]);
	if (torn == -1 && PyErr_Occurred())
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	rc = sfr_save_confirm(t, torn);
	Py_END_ALLOW_THREADS
	if (rc < 0 && rc != SFR_ESTATE)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	return PyBool_FromLong(rc == 0);
}

static PyObject *ticket_cancel(ARGS)
{
	struct sfr_ticket *t = ((struct sfr_py_ticket *)object)->ticket;
	int rc;

	UNUSED_ARGS;
	Py_BEGIN_ALLOW_THREADS
	rc = sfr_save_cancel(t);
	Py_END_ALLOW_THREADS
	if (rc < 0)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	return PyBool_FromLong(rc);
}

static PyObject *ticket_state(ARGS)
{
	enum sfr_state state;
	int staged, rc = sfr_save_state(((struct sfr_py_ticket *)object)->ticket, &state, &staged);

	UNUSED_ARGS;
	if (rc < 0)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	return PyUnicode_FromString(sfr_state_name(state));
}

static PyObject *ticket_is_staged(ARGS)
{
	enum sfr_state state;
	int staged, rc = sfr_save_state(((struct sfr_py_ticket *)object)->ticket, &state, &staged);

	UNUSED_ARGS;
	if (rc < 0)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	return PyBool_FromLong(staged);
}

static PyObject *ticket_progress(ARGS)
{
	uint64_t written, nbytes;
	int rc = sfr_save_progress(((struct sfr_py_ticket *)object)->ticket, &written, &nbytes);

	UNUSED_ARGS;
	if (rc < 0)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	return Py_BuildValue("KK", (unsigned long long)written, (unsigned long long)nbytes);
}

static PyObject *ticket_report(ARGS)
{
	struct sfr_ticket *t = ((struct sfr_py_ticket *)object)->ticket;
	struct sfr_report r;
	int rc;

	UNUSED_ARGS;
	if (sfr_save_wait(t, SFR_WAIT_ENDED, 0) == 0) {
		rc = sfr_save_report(t, &r);
	} else { /* which waits for the engine's lock */
		Py_BEGIN_ALLOW_THREADS
		rc = sfr_save_report(t, &r);
		Py_END_ALLOW_THREADS
	}
	if (rc < 0)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	return sfr_py_report(&r);
}

static PyObject *ticket_number(PyObject *object, void *closure)
{
	(void)closure;
	return PyLong_FromUnsignedLongLong(sfr_ticket_number(((struct sfr_py_ticket *)object)
								     ->ticket));
}

static PyMethodDef methods[] = {
	METHOD("submit", ticket_submit,
	       "submit(streams=()): marks the state on the current stream of each device, takes a"
	       " slot, captures, launches."),
	METHOD("gate", ticket_gate,
	       "gate(streams) -> bool: the step on these streams comes after every copy; True when"
	       " all have ended."),
	METHOD("wait", ticket_wait,
	       "wait(what, timeout=None) -> bool: False when the timeout passed."),
	METHOD("confirm", ticket_confirm,
	       "confirm(torn) -> bool: the verdict on versions, given once."),
	METHOD("cancel", ticket_cancel, "cancel() -> bool: the save ends as cancelled."),
	METHOD("state", ticket_state, "state() -> str."),
	METHOD("is_staged", ticket_is_staged, "is_staged() -> bool: and has not failed."),
	METHOD("progress", ticket_progress, "progress() -> (bytes written, bytes in all)."),
	METHOD("report", ticket_report, "report() -> dict."),
	{ "of_parts", ticket_of_parts, METH_VARARGS | METH_CLASS,
	  "of_parts(engine, dir, name, parts, flags, fs=0) -> Ticket: a save of Parts, which are empty"
	  " afterwards. What they refer to stays as it is until the save has ended." },
	{ NULL, NULL, 0, NULL },
};

static PyGetSetDef getset[] = {
	{ "number", ticket_number, NULL, "what notice_wait() and a timeline name the save by",
	  NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot slots[] = {
	{ Py_tp_new, ticket_new },
	{ Py_tp_dealloc, ticket_dealloc },
	{ Py_tp_methods, methods },
	{ Py_tp_getset, getset },
	{ Py_tp_doc, "Ticket(engine, dir, name, skeleton, rows, flags): one save" },
	{ 0, NULL },
};

static PyType_Spec spec = {
	.name = "stillframe._core.Ticket",
	.basicsize = sizeof(struct sfr_py_ticket),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = slots,
};

static int add_constants(PyObject *module)
{
	static const struct {
		const char *name;
		long value;
	} constants[] = {
		{ "SAVE_DURABLE", SFR_SAVE_DURABLE },
		{ "SAVE_NESTED", SFR_SAVE_NESTED },
		{ "SAVE_CHECK_BYTES", SFR_SAVE_CHECK_BYTES },
		{ "SAVE_NO_WAIT", SFR_SAVE_NO_WAIT },
		{ "SAVE_UNORDERED", SFR_SAVE_UNORDERED },
		{ "WAIT_COPIED", SFR_WAIT_COPIED },
		{ "WAIT_STAGED", SFR_WAIT_STAGED },
		{ "WAIT_ENDED", SFR_WAIT_ENDED },
		{ "NOTICE_COPIED", SFR_NOTICE_COPIED },
		{ "NOTICE_ENDED", SFR_NOTICE_ENDED },
		{ "NOTICE_TEXT", SFR_NOTICE_TEXT },
		{ "NOTICE_STOP", SFR_NOTICE_STOP },
		{ "ETORN", SFR_ETORN },
		{ "EEXHAUSTED", SFR_EEXHAUSTED },
		{ "ECANCELLED", SFR_ECANCELLED },
	};

	for (size_t i = 0; i < sizeof(constants) / sizeof(constants[0]); i++)
		if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0)
			return -1;
	return 0;
}

int sfr_py_add_ticket(PyObject *module)
{
	if (add_constants(module) < 0)
		return -1;
	return sfr_py_add_type(module, &spec, &sfr_py_state(module)->ticket_type);
}
