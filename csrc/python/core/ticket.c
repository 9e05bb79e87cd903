/* _core.Ticket: a reference to a struct sfr_ticket, the core's object for one save (sfr/save.h). */
#include "module.h"
#include "core/objects.h"
#include "sfr/parts.h"

#include <stdbool.h>

struct sfr_py_ticket {
	PyObject_HEAD
	struct sfr_ticket *ticket;
	PyObject *skeleton; /* the core reads its bytes until the save is staged or has ended */
};

/* Makes a Ticket. Takes over the caller's reference to `ticket`, even if it fails. `skeleton` is a
 * bytes, or NULL for a save of Parts. */
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

/* Returns whether the buffer is an array of structs of `size` bytes, fewer than UINT32_MAX. If not,
 * sets a ValueError. */
static bool require_struct_array(const Py_buffer *buffer, size_t size)
{
	if ((size_t)buffer->len % size == 0 && (size_t)buffer->len / size < UINT32_MAX)
		return true;
	PyErr_SetString(PyExc_ValueError, "rows or members is no array of such structs");
	return false;
}

static PyObject *ticket_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "engine", "dir", "name",    "skeleton", "rows",
				 "flags",  "fs",  "members", NULL };
	static const struct sfr_member no_members;
	struct sfr_py_state *state = PyType_GetModuleState(type);
	struct sfr_ticket *ticket = NULL;
	PyObject *engine, *skeleton;
	const char *dir, *name;
	Py_buffer rows, members = { 0 };
	unsigned int flags;
	unsigned long long fs = 0;
	int rc;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!yyO!y*I|Kz*:Ticket", names,
					 state->engine_type, &engine, &dir, &name, &PyBytes_Type,
					 &skeleton, &rows, &flags, &fs, &members))
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
		/* NULL means torch's format, so an empty array needs an address too */
		.members = members.obj != NULL && members.len == 0 ? &no_members : members.buf,
		.nr_members = (uint32_t)((size_t)members.len / sizeof(struct sfr_member)),
	};
	if (require_struct_array(&rows, sizeof(struct sfr_source)) &&
	    require_struct_array(&members, sizeof(struct sfr_member)))
		rc = sfr_save_new(((struct sfr_py_engine *)engine)->engine, &desc, &ticket);
	else
		rc = SFR_PY_RAISED;
	PyBuffer_Release(&rows);
	PyBuffer_Release(&members);
	return rc != 0 ? sfr_py_raise(state, rc) : ticket_wrap(type, ticket, skeleton);
}

static PyObject *ticket_new_of_parts(PyObject *type, PyObject *args)
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

	sfr_py_unlocked_void(sfr_ticket_put(self->ticket));
	Py_XDECREF(self->skeleton);
	sfr_py_free(object);
}

/* The stages of submit(), each a function sfr_save_*. */
enum stage { BEGIN, ADMIT, CAPTURE, LAUNCH };

struct submission {
	struct sfr_ticket *ticket;
	struct sfr_device_stream streams[SFR_PY_MAX_STREAMS];
	int nr_streams;
	enum stage stage; /* the stage to begin or to continue */
};

/* Carries out the stages from s->stage on. A stage waits at most `slice_ns`. Returns 0 when the
 * save is launched, or:
 *   SFR_EAGAIN    s->stage has to wait longer: call again
 *   another code  s->stage failed */
static int continue_submission(struct submission *s, uint64_t slice_ns)
{
	for (;; s->stage++) {
		int rc = 0; /* also for BEGIN without streams, which has nothing to do */

		if (s->stage == BEGIN && s->nr_streams > 0)
			rc = sfr_save_begin_transfers(s->ticket, s->streams,
						      (uint32_t)s->nr_streams);
		else if (s->stage == ADMIT)
			rc = sfr_save_admit(s->ticket, slice_ns);
		else if (s->stage == CAPTURE)
			rc = sfr_save_capture(s->ticket, slice_ns);
		else if (s->stage == LAUNCH)
			return sfr_save_launch(s->ticket);
		if (rc < 0)
			return rc;
	}
}

static struct sfr_ticket *ticket_of(PyObject *object)
{
	return ((struct sfr_py_ticket *)object)->ticket;
}

static PyObject *ticket_submit(PyObject *object, PyObject *args)
{
	struct submission s = { .ticket = ticket_of(object) };
	struct sfr_py_wait_state w = sfr_py_wait_state(NULL);
	PyObject *tuple = NULL;

	if (!PyArg_ParseTuple(args, "|O:submit", &tuple))
		return NULL;
	if (tuple)
		s.nr_streams = sfr_py_read_streams(tuple, s.streams);
	if (s.nr_streams < 0)
		return NULL;
	while (sfr_py_begin_next_slice(&w))
		w.rc = sfr_py_unlocked(continue_submission(&s, w.slice_ns));
	/* Abandon a save that failed before its launch, so that nobody waits for it. After
	 * SFR_ESTATE do not: the save may be in flight, because submit() was called before. */
	if (s.stage != LAUNCH && w.rc != SFR_ESTATE)
		sfr_py_unlocked_void(sfr_save_abandon(s.ticket));
	return sfr_py_none_or_raise(object, w.rc);
}

static PyObject *ticket_wait(PyObject *object, PyObject *args)
{
	struct sfr_ticket *t = ticket_of(object);
	PyObject *timeout = NULL;
	struct sfr_py_wait_state w;
	bool is_fast;
	int what;

	if (!PyArg_ParseTuple(args, "i|O:wait", &what, &timeout))
		return NULL;
	if (what < SFR_WAIT_COPIED || what > SFR_WAIT_ENDED) {
		PyErr_SetString(PyExc_ValueError, "no such state to wait for");
		return NULL;
	}
	w = sfr_py_wait_state(timeout);
	/* Ask with the interpreter lock held if the state is reached already, or if this call with
	 * timeout 0 only asks whether the save has ended. */
	is_fast = sfr_save_has_reached(t, (enum sfr_wait_for)what) ||
		  (what == SFR_WAIT_ENDED && w.left_ns == 0);
	if (is_fast && w.rc != SFR_PY_RAISED) /* raised for a bad timeout */
		w.rc = sfr_save_wait(t, (enum sfr_wait_for)what, 0);
	while (sfr_py_begin_next_slice(&w))
		w.rc = sfr_py_unlocked(sfr_save_wait(t, (enum sfr_wait_for)what, w.slice_ns));
	/* The core no longer reads the skeleton. Free it now, because users may keep the handle of
	 * an ended save for long. */
	if (w.rc == 0 && what == SFR_WAIT_ENDED)
		Py_CLEAR(((struct sfr_py_ticket *)object)->skeleton);
	return sfr_py_bool_or_raise(object, w.rc, SFR_EAGAIN); /* SFR_EAGAIN: the timeout passed */
}

static PyObject *ticket_gate(PyObject *object, PyObject *tuple)
{
	struct sfr_ticket *t = ticket_of(object);
	struct sfr_device_stream streams[SFR_PY_MAX_STREAMS];
	int nr = sfr_py_read_streams(tuple, streams), copied = 0;
	struct sfr_py_wait_state w = sfr_py_wait_state(NULL);

	if (nr < 0)
		return NULL;
	while (sfr_py_begin_next_slice(&w)) {
		Py_BEGIN_ALLOW_THREADS
		w.rc = sfr_save_gate(t, streams, (uint32_t)nr, w.slice_ns);
		/* a wait of 0 ns: asks whether all copies have ended already */
		copied = w.rc == 0 && sfr_save_wait(t, SFR_WAIT_COPIED, 0) == 0;
		Py_END_ALLOW_THREADS
	}
	if (w.rc != 0) /* a signal handler has raised an exception, for example */
		return sfr_py_raise(sfr_py_state_of(object), w.rc);
	/* The step may begin. If not everything is copied, its streams wait for the copies. */
	return PyBool_FromLong(copied);
}

static PyObject *ticket_give_verdict(PyObject *object, PyObject *index)
{
	long long torn_index = PyLong_AsLongLong(index); /* -1: no source is torn */

	if (torn_index == -1 && PyErr_Occurred())
		return NULL;
	/* SFR_ESTATE: the verdict was confirmed before */
	return sfr_py_bool_or_raise(object,
				    sfr_py_unlocked(sfr_save_give_verdict(ticket_of(object),
									  torn_index)),
				    SFR_ESTATE);
}

static PyObject *ticket_cancel(PyObject *object, PyObject *unused)
{
	int rc = sfr_py_unlocked(sfr_save_cancel(ticket_of(object)));

	return rc < 0 ? sfr_py_none_or_raise(object, rc) : PyBool_FromLong(rc);
}

static PyObject *ticket_abandon(PyObject *object, PyObject *unused)
{
	sfr_py_unlocked_void(sfr_save_abandon(ticket_of(object)));
	Py_RETURN_NONE;
}

static PyObject *ticket_state(PyObject *object, PyObject *unused)
{
	enum sfr_state state;
	int staged, rc = sfr_save_state(ticket_of(object), &state, &staged);

	return rc < 0 ? sfr_py_none_or_raise(object, rc) :
			PyUnicode_FromString(sfr_state_name(state));
}

static PyObject *ticket_is_staged(PyObject *object, PyObject *unused)
{
	enum sfr_state state;
	int staged, rc = sfr_save_state(ticket_of(object), &state, &staged);

	return rc < 0 ? sfr_py_none_or_raise(object, rc) : PyBool_FromLong(staged);
}

static PyObject *ticket_progress(PyObject *object, PyObject *unused)
{
	uint64_t written, nbytes;
	int rc = sfr_save_progress(ticket_of(object), &written, &nbytes);

	if (rc < 0)
		return sfr_py_none_or_raise(object, rc);
	return Py_BuildValue("KK", (unsigned long long)written, (unsigned long long)nbytes);
}

static PyObject *ticket_report(PyObject *object, PyObject *unused)
{
	struct sfr_ticket *t = ticket_of(object);
	struct sfr_report r;
	int rc;

	/* Before the save has ended, sfr_save_report takes the engine's lock, so it may wait. */
	if (sfr_save_wait(t, SFR_WAIT_ENDED, 0) == 0)
		rc = sfr_save_report(t, &r);
	else
		rc = sfr_py_unlocked(sfr_save_report(t, &r));
	return rc < 0 ? sfr_py_none_or_raise(object, rc) : sfr_py_report_as_dict(&r);
}

static PyObject *ticket_next_piece(PyObject *object, PyObject *args)
{
	PyObject *timeout = NULL;

	if (!PyArg_ParseTuple(args, "|O:next_piece", &timeout))
		return NULL;
	return sfr_py_next_piece(PyType_GetModuleState(Py_TYPE(object)), ticket_of(object),
				 timeout);
}

static PyObject *ticket_number(PyObject *object, void *closure)
{
	return PyLong_FromUnsignedLongLong(sfr_ticket_number(ticket_of(object)));
}

static PyMethodDef methods[] = {
	{ "submit", ticket_submit, METH_VARARGS,
	  "submit(streams=()): records an event on the current stream of each device, takes a slot,"
	  " copies the captured sources and launches the save. `streams`: pairs (device, handle)." },
	{ "gate", ticket_gate, METH_O,
	  "gate(streams) -> bool: makes the step on these streams wait for every copy. True if all"
	  " copies have ended already." },
	{ "wait", ticket_wait, METH_VARARGS,
	  "wait(what, timeout=None) -> bool: waits for one of WAIT_*. False if the timeout passed." },
	{ "confirm", ticket_give_verdict, METH_O,
	  "confirm(torn) -> bool: reports the index of a source whose version counter shows that it"
	  " changed before its copy, or -1. False if the save needs no such report now." },
	{ "cancel", ticket_cancel, METH_NOARGS,
	  "cancel() -> bool: cancels the save; False if it is too late." },
	{ "abandon", ticket_abandon, METH_NOARGS,
	  "abandon(): cancels a save that was not launched and never will be." },
	{ "state", ticket_state, METH_NOARGS, "state() -> str: the name of the save's state." },
	{ "is_staged", ticket_is_staged, METH_NOARGS,
	  "is_staged() -> bool: whether the save is staged and has not failed since." },
	{ "progress", ticket_progress, METH_NOARGS,
	  "progress() -> (bytes written so far, bytes of the whole file)." },
	{ "report", ticket_report, METH_NOARGS,
	  "report() -> dict: struct sfr_report (sfr/save.h), with times since the save's creation." },
	{ "next_piece", ticket_next_piece, METH_VARARGS,
	  "next_piece(timeout=None) -> Piece: the next bytes of a save with SAVE_STREAM, in the order"
	  " of the file. An empty Piece at the end; None if the timeout passed. Raises StillframeError"
	  " if the save has failed." },
	{ "of_parts", ticket_new_of_parts, METH_VARARGS | METH_CLASS,
	  "of_parts(engine, dir, name, parts, flags, fs=0) -> Ticket: a save of Parts, which it takes"
	  " over. The memory of their sources must not change until the save has ended." },
	{ NULL, NULL, 0, NULL },
};

static PyGetSetDef getset[] = {
	{ "number", ticket_number, NULL,
	  "the number of the save in notice_wait() and in a timeline", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot slots[] = {
	{ Py_tp_new, ticket_new },
	{ Py_tp_dealloc, ticket_dealloc },
	{ Py_tp_methods, methods },
	{ Py_tp_getset, getset },
	{ Py_tp_doc,
	  "Ticket(engine, dir, name, skeleton, rows, flags, fs=0, members=None): one save. The "
	  "arguments are the fields of struct sfr_save_desc; `rows` and `members` are arrays of "
	  "struct sfr_source and sfr_member." },
	{ 0, NULL },
};

SFR_PY_TYPE(spec, "Ticket", struct sfr_py_ticket, 0, slots);

int sfr_py_add_ticket(PyObject *module)
{
	return sfr_py_add_type(module, &spec, &sfr_py_state(module)->ticket_type);
}
