/* _core.Arrivals: a group of files in memory, whose bytes threads of Python fetch when a reader
 * needs them. _core.arrive waits until all bytes of such a file are fetched (sfr/arrivals.h). */
#include "module.h"
#include "sfr/arrivals.h"

struct sfr_py_arrivals {
	PyObject_HEAD
	struct sfr_arrivals *arrivals;
};

static PyObject *arrivals_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { NULL };
	struct sfr_py_arrivals *self;
	int rc;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":Arrivals", names))
		return NULL;
	self = (struct sfr_py_arrivals *)sfr_py_alloc(type);
	if (self == NULL)
		return NULL;
	rc = sfr_arrivals_new(&self->arrivals);
	if (rc == 0)
		return (PyObject *)self;
	Py_DECREF(self);
	return sfr_py_raise(PyType_GetModuleState(type), rc);
}

static struct sfr_arrivals *arrivals_of(PyObject *object)
{
	return ((struct sfr_py_arrivals *)object)->arrivals;
}

static void arrivals_dealloc(PyObject *object)
{
	Py_BEGIN_ALLOW_THREADS
	sfr_arrivals_free(arrivals_of(object));
	Py_END_ALLOW_THREADS
	sfr_py_free(object);
}

static PyObject *arrivals_make_file(PyObject *object, PyObject *args)
{
	unsigned long long len, chunk;
	uint64_t number = 0;
	int fd;

	if (!PyArg_ParseTuple(args, "KK:open", &len, &chunk))
		return NULL;
	fd = sfr_py_unlocked(sfr_arrivals_open(arrivals_of(object), len, chunk, &number));
	if (fd < 0)
		return sfr_py_raise_os(sfr_py_state_of(object), fd);
	return Py_BuildValue("(Ki)", (unsigned long long)number, fd);
}

static PyObject *arrivals_next_wanted_range(PyObject *object, PyObject *unused)
{
	struct sfr_arrivals_wanted_range range;
	/* Waits without a limit: this is not the main thread, so signals need not end the wait. */
	int rc = sfr_py_unlocked(sfr_arrivals_next(arrivals_of(object), SFR_FOREVER, &range));

	if (rc == SFR_ECLOSED) /* end() was called */
		Py_RETURN_NONE;
	if (rc < 0)
		return sfr_py_raise(sfr_py_state_of(object), rc);
	return Py_BuildValue("(KKK)", (unsigned long long)range.number,
			     (unsigned long long)range.off,
			     (unsigned long long)(range.off + range.len));
}

static PyObject *arrivals_put(PyObject *object, PyObject *args)
{
	unsigned long long number, off;
	Py_buffer data;
	int rc;

	if (!PyArg_ParseTuple(args, "KKy*:put", &number, &off, &data))
		return NULL;
	rc = sfr_py_unlocked(sfr_arrivals_put(arrivals_of(object), number, off, data.buf,
					      (size_t)data.len));
	PyBuffer_Release(&data);
	if (rc < 0 && rc != SFR_ECLOSED) /* SFR_ECLOSED: nobody needs the bytes any more */
		return sfr_py_raise(sfr_py_state_of(object), rc);
	Py_RETURN_NONE;
}

static PyObject *arrivals_fail_file(PyObject *object, PyObject *number)
{
	uint64_t file_number;

	if (sfr_py_int_to_u64(number, &file_number) < 0)
		return NULL;
	sfr_arrivals_fail(arrivals_of(object), file_number);
	Py_RETURN_NONE;
}

static PyObject *arrivals_close(PyObject *object, PyObject *number)
{
	uint64_t file_number;

	if (sfr_py_int_to_u64(number, &file_number) < 0)
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	sfr_arrivals_close(arrivals_of(object), file_number);
	Py_END_ALLOW_THREADS
	Py_RETURN_NONE;
}

static PyObject *arrivals_close_all(PyObject *object, PyObject *unused)
{
	Py_BEGIN_ALLOW_THREADS
	sfr_arrivals_end(arrivals_of(object));
	Py_END_ALLOW_THREADS
	Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
	{ "open", arrivals_make_file, METH_VARARGS,
	  "open(nbytes, chunk_bytes) -> (number, fd): makes a file whose bytes are fetched in chunks when "
	  "they are read. `number` names the file in the other calls. This object closes `fd`." },
	{ "next", arrivals_next_wanted_range, METH_NOARGS,
	  "next() -> (number, start, end): waits until a reader needs bytes of a file. The caller fetches "
	  "these bytes, then calls put() or fail(). Returns None after end()." },
	{ "put", arrivals_put, METH_VARARGS,
	  "put(number, start, data): hands over the bytes that next() asked for." },
	{ "fail", arrivals_fail_file, METH_O,
	  "fail(number): the file's bytes cannot be fetched. Reads that wait for them raise OSError." },
	{ "close", arrivals_close, METH_O, "close(number): closes one file." },
	{ "end", arrivals_close_all, METH_NOARGS,
	  "end(): closes all files, and makes next return None." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot slots[] = {
	{ Py_tp_new, arrivals_new },
	{ Py_tp_dealloc, arrivals_dealloc },
	{ Py_tp_methods, methods },
	{ Py_tp_doc, "Arrivals(): a group of files whose bytes are fetched when they are read" },
	{ 0, NULL },
};

SFR_PY_TYPE(spec, "Arrivals", struct sfr_py_arrivals, 0, slots);

static PyObject *arrive(PyObject *module, PyObject *args)
{
	PyObject *timeout = NULL;
	struct sfr_py_wait_state w;
	int fd;

	if (!PyArg_ParseTuple(args, "i|O:arrive", &fd, &timeout))
		return NULL;
	w = sfr_py_wait_state(timeout);
	while (sfr_py_begin_next_slice(&w))
		w.rc = sfr_py_unlocked(sfr_arrivals_wait_for_whole_file(fd, w.slice_ns));
	if (w.rc != 0 && w.rc != SFR_EAGAIN) /* SFR_EAGAIN: the timeout passed */
		return sfr_py_raise_os(sfr_py_state(module), w.rc);
	return PyBool_FromLong(w.rc == 0);
}

static PyMethodDef functions[] = {
	{ "arrive", arrive, METH_VARARGS,
	  "arrive(fd, timeout=None) -> bool: waits until all bytes of a file of Arrivals are in memory. "
	  "False if the timeout passed. With timeout 0 it only starts to fetch." },
	{ NULL, NULL, 0, NULL },
};

int sfr_py_add_arrivals(PyObject *module)
{
	if (PyModule_AddFunctions(module, functions) < 0)
		return -1;
	return sfr_py_add_type(module, &spec, &sfr_py_state(module)->arrivals_type);
}
