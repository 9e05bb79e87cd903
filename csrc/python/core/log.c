/* The process's log (sfr/log.h), the core's notices (sfr/notice.h) and the count of forks
 * (sfr/fork.h), as functions. _core.LogLoad is a load's entry in the log. */
#include "module.h"
#include "core/objects.h"
#include "sfr/fork.h"
#include "sfr/log.h"
#include "sfr/save.h"
#include "sfr/snapshot.h"
#include "sfr/notice.h"

#include <unistd.h>

/* ---- log ---- */

static PyObject *log_remove(PyObject *module, PyObject *key)
{
	const char *path = PyBytes_AsString(key);
	int rc;

	if (!path)
		return NULL;
	rc = sfr_py_unlocked(sfr_log_append_remove(path, NULL));
	if (rc < 0)
		return sfr_py_raise(sfr_py_state(module), rc);
	Py_RETURN_NONE;
}

static PyObject *log_exists(PyObject *module, PyObject *key)
{
	const char *path = PyBytes_AsString(key);

	return path ? PyLong_FromLong(sfr_log_will_exist(path)) : NULL;
}

static PyObject *log_drain(PyObject *module, PyObject *timeout)
{
	struct sfr_py_wait_state w = sfr_py_wait_state(timeout);
	uint64_t last_entry = 0; /* the first slice sets it: all slices wait for this entry */

	while (sfr_py_begin_next_slice(&w))
		w.rc = sfr_py_unlocked(sfr_log_drain(&last_entry, w.slice_ns));
	if (w.rc != 0 && w.rc != SFR_EAGAIN) /* SFR_EAGAIN: the timeout passed */
		return sfr_py_raise(sfr_py_state(module), w.rc);
	return PyBool_FromLong(w.rc == 0);
}

static PyObject *log_pending(PyObject *module, PyObject *unused)
{
	return PyLong_FromUnsignedLongLong(sfr_log_pending());
}

static PyObject *log_unanswered(PyObject *module, PyObject *unused)
{
	char text[1024];

	if (!sfr_log_describe_hang(text, sizeof(text)))
		text[0] = '\0';
	return PyUnicode_DecodeFSDefault(text);
}

static PyObject *log_stop(PyObject *module, PyObject *unused)
{
	(void)sfr_py_unlocked(sfr_log_stop()); /* always 0 */
	Py_RETURN_NONE;
}

/* ---- notices ---- */

static PyObject *notice_wait(PyObject *module, PyObject *unused)
{
	struct sfr_notice notice;
	PyObject *sentence, *result = NULL;
	int rc;

	Py_BEGIN_ALLOW_THREADS
	/* Waits without a limit: this is not the main thread, so signals need not end the wait. */
	rc = sfr_notice_wait(&notice, SFR_FOREVER);
	/* Python needs no references, because it finds the save or snapshot by its number. */
	sfr_ticket_put(notice.ticket);
	sfr_snapshot_put(notice.snapshot);
	Py_END_ALLOW_THREADS
	if (rc < 0)
		return sfr_py_raise(sfr_py_state(module), rc);
	sentence = sfr_py_decode_text(notice.text);
	if (sentence)
		result = Py_BuildValue("(IKN)", notice.what, (unsigned long long)notice.number,
				       sentence);
	if (!result) { /* no memory: post the notice again, because the exit waits for it */
		notice.ticket = NULL;
		notice.snapshot = NULL;
		sfr_notice_put_back(&notice);
	}
	return result;
}

static PyObject *notice_stop(PyObject *module, PyObject *unused)
{
	sfr_notice_post_stop();
	Py_RETURN_NONE;
}

static PyObject *fork_generation(PyObject *module, PyObject *unused)
{
	return PyLong_FromUnsignedLongLong(sfr_fork_generation());
}

/* ---- LogLoad ---- */

struct sfr_py_log_load {
	PyObject_HEAD
	struct sfr_log_load *load;
	int fd; /* descriptor of the opened file; -1: not opened yet, or closed */
};

static PyObject *load_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "key", NULL };
	struct sfr_log_load *load;
	struct sfr_py_log_load *self;
	const char *key;
	int rc;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y:LogLoad", names, &key))
		return NULL;
	rc = sfr_log_load_new(key, &load);
	if (rc < 0)
		return sfr_py_raise(PyType_GetModuleState(type), rc);
	self = (struct sfr_py_log_load *)sfr_py_alloc(type);
	if (!self) {
		sfr_log_load_free(load);
		return NULL;
	}
	self->load = load;
	self->fd = -1;
	return (PyObject *)self;
}

static void close_file(struct sfr_py_log_load *self)
{
	const int fd = self->fd;

	self->fd = -1;
	if (fd >= 0)
		(void)close(fd); /* nothing was written to it */
}

static PyObject *load_close(PyObject *object, PyObject *unused)
{
	close_file((struct sfr_py_log_load *)object);
	Py_RETURN_NONE;
}

static PyObject *load_fileno(PyObject *object, PyObject *unused)
{
	return PyLong_FromLong(((struct sfr_py_log_load *)object)->fd);
}

static void load_dealloc(PyObject *object)
{
	close_file((struct sfr_py_log_load *)object);
	sfr_log_load_free(((struct sfr_py_log_load *)object)->load);
	sfr_py_free(object);
}

static PyObject *load_wait_and_open_file(PyObject *object, PyObject *unused)
{
	struct sfr_py_log_load *self = (struct sfr_py_log_load *)object;
	struct sfr_py_wait_state w = sfr_py_wait_state(NULL);

	while (sfr_py_begin_next_slice(&w))
		w.rc = sfr_py_unlocked(sfr_log_load_wait(self->load, w.slice_ns, &self->fd));
	if (w.rc != 0)
		return sfr_py_raise_os(sfr_py_state_of(object), w.rc);
	Py_RETURN_NONE;
}

static PyMethodDef load_methods[] = {
	{ "open", load_wait_and_open_file, METH_NOARGS,
	  "open(): waits for the saves and removes of the path that were submitted before this load, "
	  "then opens the file. May be called once." },
	{ "fileno", load_fileno, METH_NOARGS,
	  "fileno() -> int: the descriptor, which the object closes; -1 if it is not open." },
	{ "close", load_close, METH_NOARGS, "close(): closes the descriptor." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot load_slots[] = {
	{ Py_tp_new, load_new },
	{ Py_tp_dealloc, load_dealloc },
	{ Py_tp_methods, load_methods },
	{ Py_tp_doc, "LogLoad(key): a load's entry in the log" },
	{ 0, NULL },
};

SFR_PY_TYPE(load_spec, "LogLoad", struct sfr_py_log_load, 0, load_slots);

static PyMethodDef functions[] = {
	{ "log_remove", log_remove, METH_O,
	  "log_remove(key): appends a remove to the log. A key is the real path as bytes." },
	{ "log_exists", log_exists, METH_O,
	  "log_exists(key) -> int: whether the path will exist when the log is empty. 1: yes; 0: no; "
	  "2: the pending save of a directory above it decides; -1: ask the file system." },
	{ "log_drain", log_drain, METH_O,
	  "log_drain(timeout) -> bool: waits until everything submitted before the call has ended; "
	  "False if the timeout passed." },
	{ "log_pending", log_pending, METH_NOARGS,
	  "log_pending() -> int: how many saves and removes have not ended." },
	{ "log_unanswered", log_unanswered, METH_NOARGS,
	  "log_unanswered() -> a sentence about a file system that does not answer, or ''." },
	{ "log_stop", log_stop, METH_NOARGS,
	  "log_stop(): waits until the log is empty, then ends its threads." },
	{ "notice_wait", notice_wait, METH_NOARGS,
	  "notice_wait() -> (NOTICE_*, number of the save or snapshot, sentence): waits for the next notice." },
	{ "notice_stop", notice_stop, METH_NOARGS,
	  "notice_stop(): makes one call of notice_wait return NOTICE_STOP." },
	{ "fork_generation", fork_generation, METH_NOARGS,
	  "fork_generation() -> int: a number that differs between a process and its forked children." },
	{ NULL, NULL, 0, NULL },
};

int sfr_py_add_log(PyObject *module)
{
	int rc = sfr_fork_init();

	if (rc < 0) {
		sfr_py_raise(sfr_py_state(module), rc);
		return -1;
	}
	if (PyModule_AddFunctions(module, functions) < 0)
		return -1;
	return sfr_py_add_type(module, &load_spec, &sfr_py_state(module)->load_type);
}
