/* _core.Restore: reads a file's records into memory.
 *
 * Records are numbered in the order of the file. The caller owns the memory into which a record is
 * read. This memory must be valid until the caller has waited for the record or closed the
 * restore. */
#include <errno.h>

#include "check/check.h"
#include "restore/restore.h"
#include "module.h"

struct sfr_py_restore {
	PyObject_HEAD
	struct sfr_restore *restore; /* NULL if closed */
};

/* Turns the result `rc` of making a restore into a Python object: a Restore that owns `restore`, or
 * None for -EOPNOTSUPP, which means that the file cannot be read in this way. */
static PyObject *wrap_restore_or_none(struct sfr_py_state *state, int rc,
				      struct sfr_restore *restore)
{
	struct sfr_py_restore *self;

	if (rc == -EOPNOTSUPP)
		return Py_NewRef(Py_None);
	if (rc == -ENOMEM)
		return PyErr_NoMemory();
	if (rc < 0)
		return sfr_py_raise_os(state, rc);
	self = (struct sfr_py_restore *)sfr_py_alloc(state->restore_type);
	if (self == NULL) {
		sfr_restore_free(restore);
		return NULL;
	}
	self->restore = restore;
	return (PyObject *)self;
}

PyObject *sfr_py_restore_new(struct sfr_py_state *state, struct sfr_check *check, int fd,
			     unsigned flags)
{
	struct sfr_py_wait_state w = sfr_py_wait_state(NULL);
	struct sfr_restore *restore;

	while (sfr_py_begin_next_slice(&w))
		w.rc = sfr_py_unlocked(sfr_restore_new(check, fd, flags, &restore));
	if (w.rc == SFR_PY_RAISED) { /* a signal handler raised before the core took the check */
		sfr_check_free(check);
		return NULL;
	}
	return wrap_restore_or_none(state, w.rc, restore);
}

PyObject *sfr_py_restore_new_bare(struct sfr_py_state *state, const struct sfr_file_range *v,
				  uint64_t nr, uint64_t end, int fd, unsigned flags)
{
	struct sfr_restore *restore;
	int rc = sfr_restore_new_bare(v, nr, end, fd, flags, &restore);

	return wrap_restore_or_none(state, rc, restore);
}

/* Waits until no read is in flight, and closes the restore. Does nothing if it is closed. */
static void close_restore(struct sfr_py_restore *self)
{
	struct sfr_restore *restore = self->restore;

	self->restore = NULL;
	sfr_py_unlocked_void(sfr_restore_free(restore));
}

static void restore_dealloc(PyObject *object)
{
	close_restore((struct sfr_py_restore *)object);
	sfr_py_free(object);
}

/* Returns the core's restore; NULL with a ValueError if it is closed. */
static struct sfr_restore *require_open_restore(PyObject *object)
{
	struct sfr_restore *restore = ((struct sfr_py_restore *)object)->restore;

	if (restore == NULL)
		PyErr_SetString(PyExc_ValueError, "the restore is closed");
	return restore;
}

/* Returns 0 if there is a record `index`, else -1 with an IndexError. */
static int require_record(const struct sfr_restore *restore, uint64_t index)
{
	if (index < sfr_restore_nr_records(restore))
		return 0;
	PyErr_SetString(PyExc_IndexError, "there are fewer records");
	return -1;
}

static PyObject *restore_close(PyObject *object, PyObject *unused)
{
	close_restore((struct sfr_py_restore *)object);
	Py_RETURN_NONE;
}

static PyObject *restore_sizes(PyObject *object, PyObject *args)
{
	struct sfr_restore *restore = require_open_restore(object);
	unsigned long long first, least;
	uint64_t sum = 0;
	PyObject *list;

	if (restore == NULL || !PyArg_ParseTuple(args, "KK:sizes", &first, &least))
		return NULL;
	list = PyList_New(0);
	for (uint64_t i = first; list != NULL && i < sfr_restore_nr_records(restore) && sum < least;
	     i++) {
		PyObject *size = PyLong_FromUnsignedLongLong(sfr_restore_nbytes(restore, i));

		if (size == NULL || PyList_Append(list, size) < 0)
			Py_CLEAR(list);
		Py_XDECREF(size);
		/* + 1, so that the list stays short even if all records are empty */
		sum += sfr_restore_nbytes(restore, i) + 1;
	}
	return list;
}

static PyObject *restore_set_destinations(PyObject *object, PyObject *args)
{
	struct sfr_restore *restore = require_open_restore(object);
	unsigned long long first;
	PyObject *addresses;

	if (restore == NULL ||
	    !PyArg_ParseTuple(args, "KO!:into", &first, &PyList_Type, &addresses))
		return NULL;
	for (Py_ssize_t i = 0; i < PyList_Size(addresses); i++) {
		void *mem = PyLong_AsVoidPtr(PyList_GetItem(addresses, i));

		if (mem == NULL && PyErr_Occurred())
			return NULL;
		if (require_record(restore, first + (uint64_t)i) < 0)
			return NULL;
		sfr_restore_set_destination(restore, first + (uint64_t)i, mem);
	}
	Py_RETURN_NONE;
}

/* Does not raise if the device cannot be used, but returns the reason. */
static PyObject *restore_use_device(PyObject *object, PyObject *args)
{
	struct sfr_restore *restore = require_open_restore(object);
	unsigned long long stream;
	unsigned int device;
	char why[160] = "";
	int rc;

	if (restore == NULL || !PyArg_ParseTuple(args, "IK:device", &device, &stream))
		return NULL;
	rc = sfr_py_unlocked(sfr_restore_prepare_device(restore, device, stream, why, sizeof(why)));
	if (rc == 0)
		Py_RETURN_NONE;
	return PyUnicode_FromString(why[0] != '\0' ? why : sfr_code_message(rc));
}

static PyObject *restore_set_device_destination(PyObject *object, PyObject *args)
{
	struct sfr_restore *restore = require_open_restore(object);
	unsigned long long index, mem;
	unsigned int device;

	if (restore == NULL || !PyArg_ParseTuple(args, "KIK:into_device", &index, &device, &mem) ||
	    require_record(restore, index) < 0)
		return NULL;
	sfr_restore_set_device_destination(restore, index, device, mem);
	Py_RETURN_NONE;
}

static PyObject *restore_allow_records(PyObject *object, PyObject *upto)
{
	struct sfr_restore *restore = require_open_restore(object);
	unsigned long long nr = PyLong_AsUnsignedLongLong(upto);
	int rc;

	if (restore == NULL || PyErr_Occurred())
		return NULL;
	rc = sfr_py_unlocked(sfr_reader_allow_records(sfr_restore_reader(restore), nr));
	if (rc == -ENOMEM)
		return PyErr_NoMemory();
	return rc < 0 ? sfr_py_raise_os(sfr_py_state_of(object), rc) : Py_NewRef(Py_None);
}

static PyObject *restore_find(PyObject *object, PyObject *name)
{
	struct sfr_restore *restore = require_open_restore(object);
	const char *text;
	Py_ssize_t len;
	uint64_t index;

	if (restore == NULL)
		return NULL;
	text = PyUnicode_AsUTF8AndSize(name, &len);
	if (text == NULL)
		return NULL;
	index = sfr_restore_find(restore, text, (size_t)len);
	if (index == sfr_restore_nr_records(restore))
		return PyLong_FromLong(-1);
	return PyLong_FromUnsignedLongLong(index);
}

/* Returns how many records must have destinations before record `number` can be read. */
static PyObject *restore_count_needed_records(PyObject *object, PyObject *number)
{
	struct sfr_restore *restore = require_open_restore(object);
	unsigned long long index = PyLong_AsUnsignedLongLong(number);

	if (restore == NULL || PyErr_Occurred() || require_record(restore, index) < 0)
		return NULL;
	return PyLong_FromUnsignedLongLong(
		sfr_reader_count_records_to_allow(sfr_restore_reader(restore), index));
}

/* Stops reading after the last bytes that record `number` needs, until the next call. */
static PyObject *restore_stop_after_record(PyObject *object, PyObject *number)
{
	struct sfr_restore *restore = require_open_restore(object);
	unsigned long long index = PyLong_AsUnsignedLongLong(number);

	if (restore == NULL || PyErr_Occurred() || require_record(restore, index) < 0)
		return NULL;
	sfr_reader_stop_after(sfr_restore_reader(restore), index);
	Py_RETURN_NONE;
}

static PyObject *restore_wait(PyObject *object, PyObject *number)
{
	struct sfr_restore *restore = require_open_restore(object);
	unsigned long long index = PyLong_AsUnsignedLongLong(number);
	struct sfr_py_wait_state w = sfr_py_wait_state(NULL);

	if (restore == NULL || PyErr_Occurred())
		return NULL;
	/* The number of records, as an index, means all records. */
	if (index != sfr_restore_nr_records(restore) && require_record(restore, index) < 0)
		return NULL;
	/* Ask first without releasing the interpreter lock: faster if the record is read. */
	w.rc = sfr_reader_wait(sfr_restore_reader(restore), index, 0);
	while (sfr_py_begin_next_slice(&w))
		w.rc = sfr_py_unlocked(sfr_reader_wait(sfr_restore_reader(restore), index,
						       w.slice_ns));
	/* SFR_EUNPLACED: go() was not called for this record, so it would never be read. */
	if (w.rc == SFR_EUNPLACED || w.rc == SFR_PY_RAISED)
		return sfr_py_raise(sfr_py_state_of(object), w.rc);
	return PyBool_FromLong(w.rc == 0); /* False: the restore failed; failure() tells why */
}

static PyObject *restore_failure(PyObject *object, PyObject *unused)
{
	struct sfr_restore *restore = require_open_restore(object);
	const struct sfr_reader_failure *failure;
	const char *name;
	size_t len;

	if (restore == NULL)
		return NULL;
	failure = sfr_reader_failure(sfr_restore_reader(restore));
	name = sfr_restore_name(restore, failure->index, &len);
	return Py_BuildValue("(iNKs)", failure->code,
			     PyUnicode_DecodeUTF8(name, (Py_ssize_t)len, "replace"),
			     (unsigned long long)failure->off, failure->reason);
}

static PyObject *restore_bytes_read(PyObject *object, PyObject *unused)
{
	struct sfr_restore *restore = require_open_restore(object);

	if (restore == NULL)
		return NULL;
	return PyLong_FromUnsignedLongLong(sfr_reader_bytes_read(sfr_restore_reader(restore)));
}

static PyObject *restore_nr_records(PyObject *object, void *unused)
{
	struct sfr_restore *restore = require_open_restore(object);

	return restore == NULL ? NULL :
				 PyLong_FromUnsignedLongLong(sfr_restore_nr_records(restore));
}

static PyMethodDef methods[] = {
	{ "sizes", restore_sizes, METH_VARARGS,
	  "sizes(first, least) -> list: the lengths in bytes of the records from `first` on, until "
	  "the sum of length + 1 reaches `least`." },
	{ "into", restore_set_destinations, METH_VARARGS,
	  "into(first, addresses): sets the destinations of the records from `first` on. A record "
	  "with address 0 is only checked." },
	{ "device", restore_use_device, METH_VARARGS,
	  "device(number, stream) -> None, or why the device cannot be used. Call it before "
	  "into_device. Records are written to the device after the work that is on the stream now." },
	{ "into_device", restore_set_device_destination, METH_VARARGS,
	  "into_device(index, device, address): sets the destination of one record in a "
	  "device's memory." },
	{ "go", restore_allow_records, METH_O,
	  "go(upto): lets the first `upto` records be read. Their destinations must be set." },
	{ "find", restore_find, METH_O, "find(name) -> the index of a record, or -1." },
	{ "reach", restore_count_needed_records, METH_O,
	  "reach(index) -> how many records need destinations before this one can be read." },
	{ "until", restore_stop_after_record, METH_O,
	  "until(index): reads only as far as this record needs, until the next call of until." },
	{ "wait", restore_wait, METH_O,
	  "wait(index) -> bool: waits until the record is read and checked, or with index `nr` every "
	  "record. False if the restore has failed. Raises StillframeError if the record is not among "
	  "those that go() and until() let be read." },
	{ "failure", restore_failure, METH_NOARGS,
	  "failure() -> (code, record's name, offset in the file, reason or None) of the first "
	  "failure; the code is 0, -errno or ECORRUPT." },
	{ "done", restore_bytes_read, METH_NOARGS,
	  "done() -> int: bytes of the file that were read." },
	{ "close", restore_close, METH_NOARGS,
	  "close(): waits for the reads in flight, and ends the restore. Other methods then raise." },
	{ NULL, NULL, 0, NULL },
};

static PyGetSetDef getset[] = {
	{ "nr", restore_nr_records, NULL, "the number of records", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot slots[] = {
	{ Py_tp_dealloc, restore_dealloc },
	{ Py_tp_methods, methods },
	{ Py_tp_getset, getset },
	{ Py_tp_doc, "A file's records on their way into memory; made by `restore`" },
	{ 0, NULL },
};

SFR_PY_TYPE(spec, "Restore", struct sfr_py_restore, Py_TPFLAGS_DISALLOW_INSTANTIATION, slots);

int sfr_py_add_restore(PyObject *module)
{
	return sfr_py_add_type(module, &spec, &sfr_py_state(module)->restore_type);
}
