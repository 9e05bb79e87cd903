/* _core.Engine: a handle on struct sfr_engine. */
#include "module.h"
#include "core/objects.h"
#include "offload/offload.h"

#include <string.h>

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "pool_bytes",    "block_bytes",   "writer_threads",
				 "max_in_flight", "shared_memory", NULL };
	struct sfr_py_state *state = PyType_GetModuleState(type);
	unsigned long long pool_bytes, block_bytes;
	unsigned int writers, in_flight;
	int shared = 0;
	struct sfr_engine *engine;
	struct sfr_py_engine *self;
	int rc;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKII|p:Engine", names, &pool_bytes,
					 &block_bytes, &writers, &in_flight, &shared))
		return NULL;
	const struct sfr_engine_opts opts = { .pool_bytes = pool_bytes,
					      .block_bytes = block_bytes,
					      .nr_writers = writers,
					      .max_in_flight = in_flight,
					      .shared_memory = (uint32_t)shared };
	/* With the interpreter lock: what it reads is the kernel's, and nothing there waits. */
	rc = sfr_engine_new(&opts, &engine);
	if (rc < 0)
		return sfr_py_raise(state, rc);
	self = (struct sfr_py_engine *)sfr_py_alloc(type);
	if (!self) {
		sfr_engine_put(engine);
		return NULL;
	}
	self->engine = engine;
	return (PyObject *)self;
}

static void engine_dealloc(PyObject *object)
{
	struct sfr_engine *engine = ((struct sfr_py_engine *)object)->engine;

	/* The last reference joins idle threads, none of which ever wants the lock. */
	Py_BEGIN_ALLOW_THREADS
	sfr_engine_put(engine);
	Py_END_ALLOW_THREADS
	sfr_py_free(object);
}

static PyObject *engine_close(ARGS)
{
	struct sfr_py_engine *self = (struct sfr_py_engine *)object;
	uint64_t left, slice;
	int rc;

	(void)kwnames;
	if (sfr_py_timeout(nargs > 0 ? args[0] : NULL, &left) < 0)
		return NULL;
	do {
		if (sfr_py_slice(&left, &slice) < 0)
			return NULL;
		Py_BEGIN_ALLOW_THREADS
		rc = sfr_engine_close(self->engine, slice);
		Py_END_ALLOW_THREADS
	} while (rc == SFR_EAGAIN && left > 0);
	if (rc < 0 && rc != SFR_EAGAIN)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	return PyBool_FromLong(rc == 0);
}

static PyObject *engine_warm_up(ARGS)
{
	struct sfr_py_engine *self = (struct sfr_py_engine *)object;
	unsigned long long nbytes;
	int rc;

	(void)kwnames;
	if (nargs != 1) {
		PyErr_SetString(PyExc_TypeError, "warm_up takes the number of bytes");
		return NULL;
	}
	nbytes = PyLong_AsUnsignedLongLong(args[0]);
	if (nbytes == (unsigned long long)-1 && PyErr_Occurred())
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	rc = sfr_engine_warm_up(self->engine, nbytes);
	Py_END_ALLOW_THREADS
	if (rc < 0)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	Py_RETURN_NONE;
}

static PyObject *engine_trim(ARGS)
{
	struct sfr_py_engine *self = (struct sfr_py_engine *)object;
	int rc;

	UNUSED_ARGS;
	Py_BEGIN_ALLOW_THREADS
	rc = sfr_engine_trim(self->engine);
	Py_END_ALLOW_THREADS
	if (rc < 0)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	Py_RETURN_NONE;
}

static PyObject *engine_stats(ARGS)
{
	struct sfr_py_engine *self = (struct sfr_py_engine *)object;
	struct sfr_stats stats;
	int rc;

	UNUSED_ARGS;
	Py_BEGIN_ALLOW_THREADS
	rc = sfr_engine_stats(self->engine, &stats);
	Py_END_ALLOW_THREADS
	if (rc < 0)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	return Py_BuildValue("{sK sK sK sK sK sK sK sK}", "pool_bytes",
			     (unsigned long long)stats.pool_bytes, "block_bytes",
			     (unsigned long long)stats.block_bytes, "committed_bytes",
			     (unsigned long long)stats.committed_bytes, "leased_bytes",
			     (unsigned long long)stats.leased_bytes, "save_bytes",
			     (unsigned long long)stats.save_bytes, "retired_bytes",
			     (unsigned long long)stats.retired_bytes, "saves_in_flight",
			     (unsigned long long)stats.saves_in_flight, "saves_total",
			     (unsigned long long)stats.saves_total);
}

static PyObject *engine_use_device(ARGS)
{
	struct sfr_py_engine *self = (struct sfr_py_engine *)object;
	char why[256];
	long device;
	int rc;

	(void)kwnames;
	if (nargs != 1) {
		PyErr_SetString(PyExc_TypeError, "use_device takes a device's number");
		return NULL;
	}
	device = PyLong_AsLong(args[0]);
	if (device == -1 && PyErr_Occurred())
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	rc = sfr_engine_use_device(self->engine, (uint32_t)device, why, sizeof(why));
	Py_END_ALLOW_THREADS
	if (rc < 0 && !why[0])
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	return PyUnicode_FromString(why);
}

static PyObject *engine_has_pinned(ARGS)
{
	unsigned long long address;

	(void)cls, (void)kwnames;
	if (nargs != 1) {
		PyErr_SetString(PyExc_TypeError, "has_pinned takes an address");
		return NULL;
	}
	address = PyLong_AsUnsignedLongLong(args[0]);
	if (address == (unsigned long long)-1 && PyErr_Occurred())
		return NULL;
	return PyBool_FromLong(sfr_engine_has_pinned(((struct sfr_py_engine *)object)->engine,
						     address));
}

static PyObject *engine_driver(ARGS)
{
	struct sfr_py_engine *self = (struct sfr_py_engine *)object;
	char text[1024];
	int rc;

	UNUSED_ARGS;
	Py_BEGIN_ALLOW_THREADS
	rc = sfr_engine_driver(self->engine, text, sizeof(text));
	Py_END_ALLOW_THREADS
	if (rc < 0)
		return sfr_py_raise(PyType_GetModuleState(cls), rc);
	return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

static PyMethodDef methods[] = {
	METHOD("close", engine_close,
	       "close(timeout=None) -> bool: False when the timeout passed."),
	METHOD("warm_up", engine_warm_up,
	       "warm_up(nbytes): gives memory to that much of the pool."),
	METHOD("trim", engine_trim, "trim(): gives the memory of free blocks back."),
	METHOD("stats", engine_stats, "stats() -> dict of int."),
	METHOD("use_device", engine_use_device,
	       "use_device(number) -> str: makes its lane, has warm_up pin; why not, or ''."),
	METHOD("has_pinned", engine_has_pinned,
	       "has_pinned(address) -> bool: it lies in the pool, where a driver knows it."),
	METHOD("driver", engine_driver, "driver() -> str: a sentence on CUDA."),
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot slots[] = {
	{ Py_tp_new, engine_new },
	{ Py_tp_dealloc, engine_dealloc },
	{ Py_tp_methods, methods },
	{ Py_tp_doc,
	  "Engine(pool_bytes, block_bytes, writer_threads, max_in_flight, shared_memory=False)" },
	{ 0, NULL },
};

static PyType_Spec spec = {
	.name = "stillframe._core.Engine",
	.basicsize = sizeof(struct sfr_py_engine),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = slots,
};

int sfr_py_add_engine(PyObject *module)
{
	return sfr_py_add_type(module, &spec, &sfr_py_state(module)->engine_type);
}
