/* _core.check checks an open file. _core.restore and restore_bare prepare reading its records
 * (restore.c). _core.crc32 computes a checksum. */
#include "check/check.h"
#include "restore/restore.h"
#include "module.h"
#include "sfr/crc.h"

#define SLICE_NS 100000000u /* 0.1 s: how often a check answers signals and reports progress */
/* For fewer bytes crc32() keeps the interpreter lock: it takes only microseconds, but getting the
 * lock back from a busy Python thread takes milliseconds. */
#define CRC_UNLOCK_NBYTES 65536

/* Returns a list of (name, reason) of damaged records. */
static PyObject *bad_records_as_list(const struct sfr_check_result *result)
{
	PyObject *list = PyList_New((Py_ssize_t)result->nr_listed);

	for (uint32_t i = 0; list != NULL && i < result->nr_listed; i++) {
		/* A damaged name may have any bytes. */
		PyObject *pair = Py_BuildValue("(Ns)", sfr_py_decode_text(result->bad[i].name),
					       result->bad[i].reason);

		if (pair == NULL || PyList_SetItem(list, (Py_ssize_t)i, pair) != 0)
			Py_CLEAR(list);
	}
	return list;
}

/* Returns the dict that check() returns. */
static PyObject *result_as_dict(const struct sfr_check_result *result)
{
	static const char *const formats[] = {
		[SFR_FORMAT_FOREIGN] = "foreign",
		[SFR_FORMAT_ARCHIVE] = "archive",
		[SFR_FORMAT_LEGACY] = "legacy",
	};
	PyObject *error = result->error[0] ? sfr_py_decode_text(result->error) : Py_NewRef(Py_None);

	/* If one of the values is NULL, this returns NULL and releases the others. */
	return Py_BuildValue("{s:O,s:O,s:N,s:s,s:K,s:K,s:K,s:K,s:K,s:K,s:N}", "ok",
			     result->ok ? Py_True : Py_False, "headers",
			     result->headers ? Py_True : Py_False, "error", error, "format",
			     formats[result->format], "nbytes", (unsigned long long)result->nbytes,
			     "num_records", (unsigned long long)result->nr_records, "num_unchecked",
			     (unsigned long long)result->nr_unchecked, "num_compressed",
			     (unsigned long long)result->nr_compressed, "num_trailing",
			     (unsigned long long)result->nr_trailing, "num_bad",
			     (unsigned long long)result->nr_bad, "bad_records",
			     bad_records_as_list(result));
}

/* Runs Python's signal handlers, and calls `progress` unless it is None. */
static int check_signals_and_report(const struct sfr_check *check, PyObject *progress)
{
	PyObject *answer;

	if (PyErr_CheckSignals() != 0)
		return -1;
	if (progress == Py_None)
		return 0;
	answer = PyObject_CallFunction(progress, "KK",
				       (unsigned long long)sfr_check_bytes_done(check),
				       (unsigned long long)sfr_check_result(check)->nbytes);
	if (answer == NULL)
		return -1;
	Py_DECREF(answer);
	return 0;
}

/* Runs a check to its end, in slices without the interpreter lock. */
static int run_check(PyObject *module, struct sfr_check *run, PyObject *progress)
{
	int rc;

	for (;;) {
		rc = sfr_py_unlocked(sfr_check_run(run, SLICE_NS));
		if (rc != SFR_EAGAIN)
			break;
		if (check_signals_and_report(run, progress) != 0)
			return -1;
	}
	if (rc != 0 && sfr_check_has_os_error(run))
		(void)sfr_py_raise_os(sfr_py_state(module), rc); /* always returns NULL */
	else if (rc != 0)
		(void)sfr_py_raise(sfr_py_state(module), rc); /* always returns NULL */
	return rc == 0 ? 0 : -1;
}

PyDoc_STRVAR(check_doc,
"check(fd, verify, progress=None, direct=False, directory=False,\n"
"      later=False, offset=0, nbytes=None)\n--\n\n"
"Checks whether an open file is a complete checkpoint. Raises OSError if the file cannot be read.\n"
"The file's position is neither used nor moved. `progress(bytes_done, nbytes)` is called every 0.1 s.\n\n"
"  verify          compare every record's CRC\n"
"  direct          with `verify`: read past the page cache if the file system can\n"
"  directory       without `verify`: check only the directory, not the records' own headers\n"
"  later           without `verify`: if the records are long, do the same as for `directory`\n"
"  offset, nbytes  the checkpoint is only this part of the file\n\n"
"Returns a dict:\n\n"
"  ok, error       error: None, or a sentence about the file\n"
"  format          \"archive\", \"legacy\" (torch's old format: nothing to check) or \"foreign\"\n"
"  headers         whether the records' own headers were checked\n"
"  nbytes          length of the file or of the part\n"
"  num_records\n"
"  num_unchecked   records without a CRC, and compressed ones\n"
"  num_compressed  compressed records\n"
"  num_trailing    bytes after the archive's end\n"
"  num_bad, bad_records    damaged records; pairs of name and reason, at most 1000");

static PyObject *check(PyObject *module, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "fd",    "verify", "progress", "direct", "directory",
				 "later", "offset", "nbytes",   NULL };
	PyObject *progress = Py_None, *dict = NULL, *nbytes = Py_None;
	unsigned long long off = 0, len = SFR_CHECK_WHOLE;
	struct sfr_check *run;
	int fd, verify, direct = 0, directory = 0, later = 0, rc;
	unsigned flags;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ip|OpppKO:check", names, &fd, &verify,
					 &progress, &direct, &directory, &later, &off, &nbytes))
		return NULL;
	if (nbytes != Py_None) {
		len = PyLong_AsUnsignedLongLong(nbytes);
		if (PyErr_Occurred())
			return NULL;
	}
	flags = (verify ? SFR_CHECK_BYTES : 0) | (direct ? SFR_CHECK_DIRECT : 0) |
		(directory ? SFR_CHECK_DIRECTORY : 0) | (later ? SFR_CHECK_LATER : 0);
	rc = sfr_check_new_part(fd, off, len, flags, &run);
	if (rc != 0)
		return sfr_py_raise(sfr_py_state(module), rc);
	if (run_check(module, run, progress) == 0)
		dict = result_as_dict(sfr_check_result(run));
	sfr_check_free(run);
	return dict;
}

PyDoc_STRVAR(restore_doc,
"restore(fd, verify, shared=False)\n--\n\n"
"Reads an open archive's directory, and prepares reading its records. Returns (the dict that `check`\n"
"returns, a Restore). Instead of the Restore there is None if the file is not complete, is no archive,\n"
"or has records at other offsets than torch and stillframe choose.\n\n"
"  verify  compare the CRC of every record\n"
"  shared  read through the page cache, because other processes read the file too");

static PyObject *restore(PyObject *module, PyObject *args)
{
	PyObject *dict, *object;
	struct sfr_check *run;
	int fd, verify, rc, shared = 0;
	unsigned flags;

	if (!PyArg_ParseTuple(args, "ip|p:restore", &fd, &verify, &shared))
		return NULL;
	rc = sfr_check_new(fd, SFR_CHECK_DIRECTORY | SFR_CHECK_KEEP, &run);
	if (rc != 0)
		return sfr_py_raise(sfr_py_state(module), rc);
	dict = run_check(module, run, Py_None) == 0 ? result_as_dict(sfr_check_result(run)) : NULL;
	if (dict == NULL) {
		sfr_check_free(run);
		return NULL;
	}
	flags = (verify ? SFR_RESTORE_VERIFY : 0) | (shared ? SFR_RESTORE_SHARED : 0);
	object = sfr_py_restore_new(sfr_py_state(module), run, fd, flags); /* takes over `run` */
	if (object == NULL) {
		Py_DECREF(dict);
		return NULL;
	}
	return Py_BuildValue("(NN)", dict, object);
}

PyDoc_STRVAR(restore_bare_doc,
"restore_bare(fd, stretches, end, shared=False) -> Restore\n--\n\n"
"Prepares reading stretches of a file that is no archive, as records without names and CRCs.\n\n"
"  stretches  buffer of pairs of uint64: offset and length, ascending and without overlap\n"
"  end        the stretches end at or before this offset");

static PyObject *restore_bare(PyObject *module, PyObject *args)
{
	PyObject *object = NULL;
	unsigned long long end;
	Py_buffer stretches;
	int fd, shared = 0;

	if (!PyArg_ParseTuple(args, "iy*K|p:restore_bare", &fd, &stretches, &end, &shared))
		return NULL;
	if ((size_t)stretches.len % sizeof(struct sfr_file_range) != 0)
		PyErr_SetString(PyExc_ValueError, "a stretch is two numbers of 8 bytes");
	else
		object = sfr_py_restore_new_bare(sfr_py_state(module), stretches.buf,
						 (size_t)stretches.len /
							 sizeof(struct sfr_file_range),
						 end, fd, shared ? SFR_RESTORE_SHARED : 0);
	PyBuffer_Release(&stretches);
	return object;
}

PyDoc_STRVAR(crc32_doc,
"crc32(data, value=0, /)\n--\n\n"
"Returns zlib's CRC-32 of a bytes-like object. `value` is the CRC of the bytes before it.");

static PyObject *crc32(PyObject *module, PyObject *args)
{
	Py_buffer data;
	unsigned int value = 0;
	uint32_t crc;

	if (!PyArg_ParseTuple(args, "y*|I:crc32", &data, &value))
		return NULL;
	if (data.len < CRC_UNLOCK_NBYTES)
		crc = sfr_crc32(value, data.buf, (size_t)data.len);
	else
		crc = sfr_py_unlocked(sfr_crc32(value, data.buf, (size_t)data.len));
	PyBuffer_Release(&data);
	return PyLong_FromUnsignedLong(crc);
}

static PyMethodDef functions[] = {
	{ "check", (PyCFunction)(void (*)(void))check, METH_VARARGS | METH_KEYWORDS, check_doc },
	{ "restore", restore, METH_VARARGS, restore_doc },
	{ "restore_bare", restore_bare, METH_VARARGS, restore_bare_doc },
	{ "crc32", crc32, METH_VARARGS, crc32_doc },
	{ NULL, NULL, 0, NULL },
};

int sfr_py_add_reader(PyObject *module)
{
	if (PyModule_AddFunctions(module, functions) < 0 || sfr_py_add_restore(module) < 0)
		return -1;
	return sfr_py_add_file(module);
}
