/* _core.File: an open file for torch.load, with seek, tell, read and readinto. _core.read_at reads
 * bytes of an open file. If a remote file is still being fetched (sfr/arrivals.h), both wait for
 * the bytes. The caller owns the descriptor and keeps it open.
 *
 * torch reads a record in two or three small reads and a long one, and seeks before each. A seek of
 * Python's buffered file is a system call and drops the buffer. A seek of a File only sets the
 * position. Small reads are served from a window of the file, long ones go directly into their
 * destination. */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "reader/source.h"
#include "module.h"
#include "core/objects.h"

#define WINDOW (128u << 10)     /* bytes of the window */
#define SMALL_READ (WINDOW / 4) /* bytes; longer reads bypass the window */
#define SLICE (64u << 20)       /* bytes read between two checks for signals */

struct sfr_py_file {
	PyObject_HEAD
	struct sfr__source source;
	uint64_t len; /* the file's length in bytes */
	uint64_t pos; /* the position, which may be past the end */
	char *win;    /* the window: the bytes [win_off, win_off + win_len) of the file */
	uint64_t win_off;
	size_t win_len;
};

static PyObject *file_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "fd", "nbytes", NULL };
	struct sfr_py_file *self;
	unsigned long long len;
	int fd;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iK:File", names, &fd, &len))
		return NULL;
	self = (struct sfr_py_file *)sfr_py_alloc(type);
	if (!self)
		return NULL;
	sfr__source_open(&self->source, fd, 0 /* the file's start */, SFR__WAY_CACHE);
	self->len = len;
	self->win = PyMem_Malloc(WINDOW);
	if (!self->win) {
		Py_DECREF(self);
		return PyErr_NoMemory();
	}
	return (PyObject *)self;
}

static void file_dealloc(PyObject *object)
{
	struct sfr_py_file *self = (struct sfr_py_file *)object;

	sfr__source_close(&self->source);
	PyMem_Free(self->win);
	sfr_py_free(object);
}

/* Reads up to `len` bytes at `off`. Returns the number of bytes read, or -1 with an exception set.
 * The number is less than `len` only at the end of the file. */
static int64_t read_some(struct sfr_py_state *state, const struct sfr__source *source, char *to,
			 size_t len, uint64_t off)
{
	int64_t got = SFR_EAGAIN;

	/* SFR_EAGAIN: the bytes are still being fetched. */
	while (got == SFR_EAGAIN) {
		got = sfr_py_unlocked(sfr__source_read_some(source, to, len, off));
		if (got == SFR_EAGAIN && PyErr_CheckSignals() < 0)
			return -1;
	}
	if (got >= 0)
		return got;
	(void)sfr_py_raise_os(state, (int)got); /* always NULL */
	return -1;
}

/* Reads as read_some does, at the file's position. Does not advance the position. */
static int64_t read_at_position(struct sfr_py_file *self, char *to, size_t len)
{
	return read_some(sfr_py_state_of((PyObject *)self), &self->source, to, len, self->pos);
}

/* Returns how many of the `len` bytes from the position on exist in the file. */
static size_t clip_to_end(const struct sfr_py_file *self, size_t len)
{
	uint64_t left = self->pos < self->len ? self->len - self->pos : 0;

	return len < left ? len : (size_t)left;
}

/* Returns whether the window has the `len` bytes at the position. */
static bool is_in_window(const struct sfr_py_file *self, size_t len)
{
	return self->pos >= self->win_off && self->pos + len <= self->win_off + self->win_len;
}

/* Fills the window from the position on. */
static int fill_window(struct sfr_py_file *self)
{
	uint64_t start = self->pos;
	size_t want = clip_to_end(self, WINDOW);
	int64_t got;

	/* The read releases the interpreter lock: other threads must find the window empty. */
	self->win_len = 0;
	got = read_at_position(self, self->win, want);
	if (got < 0)
		return -1;
	self->win_off = start;
	self->win_len = (size_t)got;
	return 0;
}

/* Reads exactly `len` bytes at the position into `to`, and advances the position. Sets
 * CorruptCheckpointError if the file has become shorter. */
static int read_exactly(struct sfr_py_file *self, char *to, size_t len)
{
	int64_t got;

	if (len <= SMALL_READ) {
		if (!is_in_window(self, len) && fill_window(self) < 0)
			return -1;
		if (!is_in_window(self, len))
			goto shorter;
		memcpy(to, self->win + (self->pos - self->win_off), len);
		self->pos += len;
		return 0;
	}
	while (len) {
		size_t slice = len < SLICE ? len : SLICE;

		/* announces all that follows, so that a remote file can be fetched in advance */
		sfr__source_announce_read(&self->source, self->pos, self->pos + len);
		got = read_at_position(self, to, slice);
		if (got < 0)
			return -1;
		if ((size_t)got < slice)
			goto shorter;
		self->pos += slice;
		to += slice;
		len -= slice;
		if (len && PyErr_CheckSignals() < 0)
			return -1;
	}
	return 0;
shorter:
	PyErr_SetString(sfr_py_state_of((PyObject *)self)->corrupt_error,
			"the file became shorter while it was read");
	return -1;
}

static PyObject *file_seek(PyObject *object, PyObject *args)
{
	struct sfr_py_file *self = (struct sfr_py_file *)object;
	long long off, from = 0;
	int whence = 0;

	if (!PyArg_ParseTuple(args, "L|i:seek", &off, &whence))
		return NULL;
	if (whence == SEEK_CUR)
		from = (long long)self->pos;
	else if (whence == SEEK_END)
		from = (long long)self->len;
	if (whence < SEEK_SET || whence > SEEK_END || off < -from || off > INT64_MAX - from) {
		PyErr_SetString(PyExc_ValueError, "a file has no such offset");
		return NULL;
	}
	self->pos = (uint64_t)(from + off);
	return PyLong_FromUnsignedLongLong(self->pos);
}

static PyObject *file_tell(PyObject *object, PyObject *unused)
{
	return PyLong_FromUnsignedLongLong(((struct sfr_py_file *)object)->pos);
}

static PyObject *file_readinto(PyObject *object, PyObject *buffer)
{
	struct sfr_py_file *self = (struct sfr_py_file *)object;
	Py_buffer to;
	size_t len;
	int rc;

	if (PyObject_GetBuffer(buffer, &to, PyBUF_WRITABLE) < 0)
		return NULL;
	len = clip_to_end(self, (size_t)to.len);
	rc = read_exactly(self, to.buf, len);
	PyBuffer_Release(&to);
	return rc < 0 ? NULL : PyLong_FromSize_t(len);
}

static PyObject *file_read(PyObject *object, PyObject *args)
{
	struct sfr_py_file *self = (struct sfr_py_file *)object;
	PyObject *number = Py_None, *bytes;
	long long want = -1;
	size_t len;

	if (!PyArg_ParseTuple(args, "|O:read", &number))
		return NULL;
	if (number != Py_None)
		want = PyLong_AsLongLong(number);
	if (want == -1 && PyErr_Occurred())
		return NULL;
	len = clip_to_end(self, want < 0 ? SIZE_MAX : (size_t)want);
	bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)len);
	if (bytes && read_exactly(self, PyBytes_AsString(bytes), len) < 0)
		Py_CLEAR(bytes);
	return bytes;
}

static PyMethodDef methods[] = {
	{ "seek", file_seek, METH_VARARGS, "seek(offset, whence=0) -> int: the new position." },
	{ "tell", file_tell, METH_NOARGS, "tell() -> int: the position." },
	{ "read", file_read, METH_VARARGS,
	  "read(nbytes=-1) -> bytes: `nbytes` bytes, fewer only at the file's end. -1 or None reads "
	  "the rest of the file." },
	{ "readinto", file_readinto, METH_O,
	  "readinto(buffer) -> int: fills the buffer, and returns how many bytes were read: fewer "
	  "only at the file's end." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot slots[] = {
	{ Py_tp_new, file_new },
	{ Py_tp_dealloc, file_dealloc },
	{ Py_tp_methods, methods },
	{ Py_tp_doc,
	  "File(fd, nbytes): an open file of `nbytes` bytes as an object that torch.load can read" },
	{ 0, NULL },
};

SFR_PY_TYPE(spec, "File", struct sfr_py_file, 0, slots);

PyDoc_STRVAR(read_at_doc,
"read_at(fd, nbytes, offset) -> bytes\n--\n\n"
"Reads bytes of an open file, fewer only at the file's end. Raises OSError.");

static PyObject *read_at(PyObject *module, PyObject *args)
{
	unsigned long long off;
	struct sfr__source source;
	PyObject *bytes, *shorter;
	Py_ssize_t len;
	int64_t got;
	int fd;

	if (!PyArg_ParseTuple(args, "inK:read_at", &fd, &len, &off))
		return NULL;
	bytes = PyBytes_FromStringAndSize(NULL, len);
	if (bytes == NULL)
		return NULL;
	sfr__source_open(&source, fd, 0 /* the file's start */, SFR__WAY_CACHE);
	sfr__source_announce_read(&source, off, off + (uint64_t)len);
	got = read_some(sfr_py_state(module), &source, PyBytes_AsString(bytes), (size_t)len, off);
	sfr__source_close(&source);
	if (got == len)
		return bytes;
	shorter = got < 0 ? NULL : PyBytes_FromStringAndSize(PyBytes_AsString(bytes), got);
	Py_DECREF(bytes);
	return shorter;
}

static PyMethodDef functions[] = {
	{ "read_at", read_at, METH_VARARGS, read_at_doc },
	{ NULL, NULL, 0, NULL },
};

int sfr_py_add_file(PyObject *module)
{
	PyTypeObject *type = NULL;
	int rc = PyModule_AddFunctions(module, functions);

	if (rc == 0)
		rc = sfr_py_add_type(module, &spec, &type);
	Py_XDECREF((PyObject *)type); /* the module has its own reference */
	return rc;
}
