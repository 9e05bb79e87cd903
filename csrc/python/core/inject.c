/* Fault injection for tests, used by stillframe.testing. The core calls the system through a table
 * (base/sys.h), in which tests install wrappers that count calls and make them fail. These
 * functions never wait, so they keep the interpreter lock. */
#include "module.h"

#include <errno.h>

#include "base/sys.h"
#include "device/lane.h"
#include "sfr/limits.h"
#include "sfr/log.h"

PyDoc_STRVAR(install_doc, "inject_install()\n--\n\n"
			  "Puts counting wrappers into the core's call table. Must not be called "
			  "while the core is at work in other threads.");

static PyObject *install_injection(PyObject *self, PyObject *unused)
{
	(void)sfr_inject_install(); /* cannot fail */
	Py_RETURN_NONE;
}

/* Reads the six fields of a fault. The string fault->call lives as long as `args`. */
static int parse_fault_arguments(PyObject *args, struct sfr_fault *fault)
{
	unsigned long long nth, delay_ns;
	long long limit;

	if (!PyArg_ParseTuple(args, "sKpiLK", &fault->call, &nth, &fault->sticky, &fault->err,
			      &limit, &delay_ns))
		return -1;
	fault->nth = nth;
	fault->limit = limit;
	fault->delay_ns = delay_ns;
	return 0;
}

PyDoc_STRVAR(set_doc, "inject_set(call, nth, sticky, err, limit, delay_ns, /)\n--\n\n"
		      "Adds a fault; struct sfr_fault describes the fields. Raises ValueError for an "
		      "impossible fault, RuntimeError if there are too many.");

static PyObject *set_fault(PyObject *self, PyObject *args)
{
	struct sfr_fault fault;
	int rc;

	if (parse_fault_arguments(args, &fault) < 0)
		return NULL;
	rc = sfr_inject_add_fault(&fault);
	if (rc == -EINVAL)
		return PyErr_Format(PyExc_ValueError, "no such fault can be put on call '%s'",
				    fault.call);
	if (rc < 0)
		return PyErr_Format(PyExc_RuntimeError, "too many faults at a time");
	Py_RETURN_NONE;
}

PyDoc_STRVAR(drop_doc, "inject_drop(call, nth, sticky, err, limit, delay_ns, /)\n--\n\n"
		       "Removes a fault with these fields, but keeps the counters. Returns whether "
		       "there was one.");

static PyObject *drop_fault(PyObject *self, PyObject *args)
{
	struct sfr_fault fault;

	if (parse_fault_arguments(args, &fault) < 0)
		return NULL;
	return PyBool_FromLong(sfr_inject_remove_fault(&fault) == 0);
}

PyDoc_STRVAR(clear_doc, "inject_clear()\n--\n\nRemoves all faults and sets all counters to zero.");

static PyObject *clear_faults(PyObject *self, PyObject *unused)
{
	sfr_inject_clear();
	Py_RETURN_NONE;
}

PyDoc_STRVAR(calls_doc, "inject_calls(call, /)\n--\n\n"
			"Returns how often a call was made since the last inject_clear; '*' counts all "
			"calls that can fail.");

static PyObject *count_calls(PyObject *self, PyObject *args)
{
	const char *call;

	if (!PyArg_ParseTuple(args, "s", &call))
		return NULL;
	return PyLong_FromUnsignedLongLong(sfr_inject_count_calls(call));
}

PyDoc_STRVAR(hits_doc, "inject_hits()\n--\n\n"
		       "Returns how often a fault has acted since the last inject_clear.");

static PyObject *count_hits(PyObject *self, PyObject *unused)
{
	return PyLong_FromUnsignedLongLong(sfr_inject_hits());
}

PyDoc_STRVAR(tune_doc, "cuda_tune(portion_bytes, nr_in_flight)\n--\n\n"
		       "Sets how many bytes of a device are copied at a time (a portion), and how "
		       "many portions may be in flight; 0 leaves a value as it is. Only while no "
		       "save is in flight.");

static PyObject *tune_cuda(PyObject *module, PyObject *args)
{
	unsigned long long portion_bytes, nr_in_flight;

	if (!PyArg_ParseTuple(args, "KK:cuda_tune", &portion_bytes, &nr_in_flight))
		return NULL;
	sfr__cuda_set_portion_limits(portion_bytes, nr_in_flight);
	Py_RETURN_NONE;
}

PyDoc_STRVAR(log_tune_doc, "log_tune(patience_ns)\n--\n\nSets how long a file system may take before "
			   "the log no longer waits for it; 0 restores the default.");

static PyObject *tune_log(PyObject *module, PyObject *args)
{
	unsigned long long patience_ns;

	if (!PyArg_ParseTuple(args, "K:log_tune", &patience_ns))
		return NULL;
	sfr_log_set_patience(patience_ns);
	Py_RETURN_NONE;
}

PyDoc_STRVAR(limits_doc,
"_set_limits(*, zip64_bytes, zip64_records, reader_chunk_bytes, check_chunk_bytes, ahead_bytes)\n--\n\n"
"Lowers size thresholds for tests; sfr/limits.h explains them. An argument that is left out gets the\n"
"default. Only while no save, check or load is under way. Raises ValueError for a value outside its\n"
"range.");

static PyObject *set_limits(PyObject *module, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "zip64_bytes",       "zip64_records", "reader_chunk_bytes",
				 "check_chunk_bytes", "ahead_bytes",   NULL };
	unsigned long long values[5];
	struct sfr_limits limits;

	sfr_limits_reset(); /* to the defaults, for the arguments that are left out */
	values[0] = sfr_limits.zip64_bytes;
	values[1] = sfr_limits.zip64_records;
	values[2] = sfr_limits.reader_chunk_bytes;
	values[3] = sfr_limits.check_chunk_bytes;
	values[4] = sfr_limits.ahead_bytes;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$KKKKK:_set_limits", names, &values[0],
					 &values[1], &values[2], &values[3], &values[4]))
		return NULL;
	limits = (struct sfr_limits){ values[0], values[1], values[2], values[3], values[4] };
	if (sfr_limits_set(&limits) < 0) {
		PyErr_SetString(PyExc_ValueError, "a limit is outside its range");
		return NULL;
	}
	Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
	{ "_set_limits", (PyCFunction)(void (*)(void))set_limits, METH_VARARGS | METH_KEYWORDS,
	  limits_doc },
	{ "log_tune", tune_log, METH_VARARGS, log_tune_doc },
	{ "cuda_tune", tune_cuda, METH_VARARGS, tune_doc },
	{ "inject_install", install_injection, METH_NOARGS, install_doc },
	{ "inject_set", set_fault, METH_VARARGS, set_doc },
	{ "inject_drop", drop_fault, METH_VARARGS, drop_doc },
	{ "inject_clear", clear_faults, METH_NOARGS, clear_doc },
	{ "inject_calls", count_calls, METH_VARARGS, calls_doc },
	{ "inject_hits", count_hits, METH_NOARGS, hits_doc },
	{ NULL, NULL, 0, NULL },
};

int sfr_py_add_inject(PyObject *module)
{
	return PyModule_AddFunctions(module, methods);
}
