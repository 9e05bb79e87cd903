/* _core.Engine: a reference to a struct sfr_engine (sfr/engine.h). */
#include "module.h"
#include "core/objects.h"
#include "offload/offload.h"

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "pool_bytes",    "block_bytes",   "writer_threads",
				 "max_in_flight", "shared_memory", "copiers",
				 "budget_bytes",  "most_bytes",    NULL };
	struct sfr_py_state *state = PyType_GetModuleState(type);
	/* struct sfr_engine_opts describes these values, under the same names */
	unsigned long long pool_bytes, block_bytes, budget_bytes = 0, most_bytes = 0;
	unsigned int writers, in_flight, copiers = 0;
	int shared = 0;
	struct sfr_engine *engine;
	struct sfr_py_engine *self;
	int rc;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKII|pIKK:Engine", names, &pool_bytes,
					 &block_bytes, &writers, &in_flight, &shared, &copiers,
					 &budget_bytes, &most_bytes))
		return NULL;
	const struct sfr_engine_opts opts = { .pool_bytes = pool_bytes,
					      .block_bytes = block_bytes,
					      .nr_writers = writers,
					      .max_in_flight = in_flight,
					      .shared_memory = (uint32_t)shared,
					      .nr_copiers = copiers,
					      .budget_bytes = budget_bytes,
					      .most_bytes = most_bytes };
	rc = sfr_engine_new(&opts, &engine); /* never waits, so the interpreter lock is kept */
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

	/* If this was the last reference, the call waits for the engine's threads to end. */
	sfr_py_unlocked_void(sfr_engine_put(engine));
	sfr_py_free(object);
}

static struct sfr_engine *engine_of(PyObject *object)
{
	return ((struct sfr_py_engine *)object)->engine;
}

static PyObject *engine_close(PyObject *object, PyObject *args)
{
	PyObject *timeout = NULL;
	struct sfr_py_wait_state w;

	if (!PyArg_ParseTuple(args, "|O:close", &timeout))
		return NULL;
	w = sfr_py_wait_state(timeout);
	while (sfr_py_begin_next_slice(&w))
		w.rc = sfr_py_unlocked(sfr_engine_close(engine_of(object), w.slice_ns));
	return sfr_py_bool_or_raise(object, w.rc, SFR_EAGAIN); /* SFR_EAGAIN: the timeout passed */
}

static PyObject *engine_warm_up(PyObject *object, PyObject *number)
{
	uint64_t nbytes;

	if (sfr_py_int_to_u64(number, &nbytes) < 0)
		return NULL;
	return sfr_py_none_or_raise(object,
				    sfr_py_unlocked(sfr_engine_warm_up(engine_of(object), nbytes)));
}

static PyObject *engine_trim(PyObject *object, PyObject *unused)
{
	return sfr_py_none_or_raise(object, sfr_py_unlocked(sfr_engine_trim(engine_of(object))));
}

static PyObject *engine_stats(PyObject *object, PyObject *unused)
{
	struct sfr_stats stats;
	int rc = sfr_py_unlocked(sfr_engine_stats(engine_of(object), &stats));

	if (rc < 0)
		return sfr_py_none_or_raise(object, rc);
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

static PyObject *engine_use_device(PyObject *object, PyObject *number)
{
	char why[256];
	long device;
	int rc;

	device = PyLong_AsLong(number);
	if (device == -1 && PyErr_Occurred())
		return NULL;
	rc = sfr_py_unlocked(sfr_engine_use_device(engine_of(object), (uint32_t)device, why,
						   sizeof(why)));
	if (rc < 0 && !why[0]) /* the failure has nothing to do with the device */
		return sfr_py_none_or_raise(object, rc);
	return PyUnicode_FromString(why); /* '' after a success */
}

static PyObject *engine_has_pinned_address(PyObject *object, PyObject *number)
{
	uint64_t address;

	if (sfr_py_int_to_u64(number, &address) < 0)
		return NULL;
	return PyBool_FromLong(sfr_engine_is_addr_pinned(engine_of(object), address));
}

static PyObject *engine_describe_driver(PyObject *object, PyObject *unused)
{
	char text[1024];
	int rc = sfr_py_unlocked(sfr_engine_describe_driver(engine_of(object), text, sizeof(text)));

	return rc < 0 ? sfr_py_none_or_raise(object, rc) : sfr_py_decode_text(text);
}

static PyObject *pools_hold(PyObject *module, PyObject *unused)
{
	return PyLong_FromUnsignedLongLong(sfr_pools_committed_bytes());
}

static PyMethodDef functions[] = {
	{ "pools_hold", pools_hold, METH_NOARGS,
	  "pools_hold() -> int: bytes of memory that all pools of the process have now." },
	{ NULL, NULL, 0, NULL },
};

static PyMethodDef methods[] = {
	{ "close", engine_close, METH_VARARGS,
	  "close(timeout=None) -> bool: makes new saves fail, waits for the others, then stops the "
	  "threads and frees the pool. False if the timeout passed." },
	{ "warm_up", engine_warm_up, METH_O,
	  "warm_up(nbytes): gets memory from the system for the first `nbytes` bytes of the pool." },
	{ "trim", engine_trim, METH_NOARGS,
	  "trim(): returns the memory of free blocks to the system." },
	{ "stats", engine_stats, METH_NOARGS,
	  "stats() -> dict of int: the fields of struct sfr_stats." },
	{ "use_device", engine_use_device, METH_O,
	  "use_device(number) -> str: makes the lane (thread and stream) that copies from the device, "
	  "and lets warm_up pin memory for it. Returns '', or why the device cannot be used." },
	{ "has_pinned", engine_has_pinned_address, METH_O,
	  "has_pinned(address) -> bool: whether the address is in pinned memory of the pool." },
	{ "driver", engine_describe_driver, METH_NOARGS,
	  "driver() -> str: a sentence about the CUDA driver and dead devices." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot slots[] = {
	{ Py_tp_new, engine_new },
	{ Py_tp_dealloc, engine_dealloc },
	{ Py_tp_methods, methods },
	{ Py_tp_doc,
	  "Engine(pool_bytes, block_bytes, writer_threads, max_in_flight, shared_memory=False, "
	  "copiers=0, budget_bytes=0, most_bytes=0): struct sfr_engine_opts describes the options" },
	{ 0, NULL },
};

SFR_PY_TYPE(spec, "Engine", struct sfr_py_engine, 0, slots);

int sfr_py_add_engine(PyObject *module)
{
	if (PyModule_AddFunctions(module, functions) < 0)
		return -1;
	return sfr_py_add_type(module, &spec, &sfr_py_state(module)->engine_type);
}
