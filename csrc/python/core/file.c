/* _core.File: an open file for torch.load, with seek, tell, read and readinto.
 *
 * torch reads a record in two or three small reads and a long one, and seeks before each. Python's
 * buffered file turns each seek into a system call and drops its buffer. This one only notes the
 * position, serves small reads from a window that it keeps, and reads long ones directly into their
 * destination. The descriptor stays its owner's. */
#include <errno.h>
#include <string.h>

#include "reader/source.h"
#include "module.h"
#include "core/objects.h"

#define WINDOW (128u << 10)
#define SLICE (64u << 20) /* between two checks for signals */

struct sfr_py_file {
	PyObject_HEAD
	int fd;
	uint64_t len, at;
	uint64_t win_off; /* the window contains [win_off, win_off + win_len) of the file */
	size_t win_len;
	char *win;
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
	self->fd = fd;
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
	PyMem_Free(((struct sfr_py_file *)object)->win);
	sfr_py_free(object);
}

static int raise_io(int64_t code)
{
	errno = (int)-code;
	(void)PyErr_SetFromErrno(PyExc_OSError); /* always NULL */
	return -1;
}

/* Returns how many of the `len` bytes at the position the file has. */
static size_t clip(const struct sfr_py_file *self, size_t len)
{
	uint64_t left = self->at < self->len ? self->len - self->at : 0;

	return len < left ? len : (size_t)left;
}

/* Fills the window from the position on. -1: an exception. */
static int fill_window(struct sfr_py_file *self)
{
	uint64_t at = self->at;
	size_t want = clip(self, WINDOW);
	int64_t got;

	self->win_len = 0; /* empty for another thread that reads meanwhile */
	got = sfr_py_unlocked(sfr_fill(self->fd, self->win, want, at));
	if (got < 0)
		return raise_io(got);
	self->win_off = at;
	self->win_len = (size_t)got;
	return 0;
}

/* Reads exactly `len` bytes at the position into `to` and advances it. -1: an exception. */
static int take(struct sfr_py_file *self, char *to, size_t len)
{
	int64_t got;

	if (len <= WINDOW / 4) {
		if ((self->at < self->win_off || self->at + len > self->win_off + self->win_len) &&
		    fill_window(self) < 0)
			return -1;
		if (self->at < self->win_off || self->at + len > self->win_off + self->win_len)
			goto shorter;
		memcpy(to, self->win + (self->at - self->win_off), len);
		self->at += len;
		return 0;
	}
	while (len) {
		size_t some = len < SLICE ? len : SLICE;

		got = sfr_py_unlocked(sfr_fill(self->fd, to, some, self->at));
		if (got < 0)
			return raise_io(got);
		if ((size_t)got < some)
			goto shorter;
		self->at += some;
		to += some;
		len -= some;
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
	long long off, from;
	int whence = 0;

	if (!PyArg_ParseTuple(args, "L|i:seek", &off, &whence))
		return NULL;
	from = whence == 0 ? 0 : whence == 1 ? (long long)self->at : (long long)self->len;
	if (whence < 0 || whence > 2 || off < -from || off > INT64_MAX - from) {
		PyErr_SetString(PyExc_ValueError, "there is no such place in a file");
		return NULL;
	}
	self->at = (uint64_t)(from + off);
	return PyLong_FromUnsignedLongLong(self->at);
}

static PyObject *file_tell(PyObject *object, PyObject *unused)
{
	return PyLong_FromUnsignedLongLong(((struct sfr_py_file *)object)->at);
}

static PyObject *file_readinto(PyObject *object, PyObject *buffer)
{
	struct sfr_py_file *self = (struct sfr_py_file *)object;
	Py_buffer to;
	size_t len;
	int rc;

	if (PyObject_GetBuffer(buffer, &to, PyBUF_WRITABLE) < 0)
		return NULL;
	len = clip(self, (size_t)to.len);
	rc = take(self, to.buf, len);
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
	len = clip(self, want < 0 ? SIZE_MAX : (size_t)want);
	bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)len);
	if (bytes && take(self, PyBytes_AsString(bytes), len) < 0)
		Py_CLEAR(bytes);
	return bytes;
}

static PyMethodDef methods[] = {
	{ "seek", file_seek, METH_VARARGS, "seek(offset, whence=0) -> int." },
	{ "tell", file_tell, METH_NOARGS, "tell() -> int." },
	{ "read", file_read, METH_VARARGS, "read(nbytes=-1) -> bytes: fewer only at the end." },
	{ "readinto", file_readinto, METH_O, "readinto(buffer) -> int: fewer only at the end." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot slots[] = {
	{ Py_tp_new, file_new },
	{ Py_tp_dealloc, file_dealloc },
	{ Py_tp_methods, methods },
	{ Py_tp_doc, "File(fd, nbytes): a file to read, as torch.load wants it" },
	{ 0, NULL },
};

SFR_PY_TYPE(spec, "File", struct sfr_py_file, 0, slots);

int sfr_py_add_file(PyObject *module)
{
	PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
	int rc;

	if (!type)
		return -1;
	rc = PyModule_AddType(module, (PyTypeObject *)type);
	Py_DECREF(type);
	return rc;
}
