/* The module stillframe._core: its state, and the files that make it up. */
#include "module.h"

#include <string.h>

/* Single-phase look-ups of the module's state; the module outlives its types. */
struct sfr_py_state *sfr_py_state(PyObject *module)
{
	return PyModule_GetState(module);
}

static int get_error(PyObject *errors, const char *name, PyObject **slot)
{
	*slot = PyObject_GetAttrString(errors, name);
	return *slot ? 0 : -1;
}

static int exec_errors(PyObject *module)
{
	struct sfr_py_state *state = sfr_py_state(module);
	PyObject *errors = PyImport_ImportModule("stillframe.errors");
	int rc = -1;

	if (!errors)
		return -1;
	if (get_error(errors, "StillframeError", &state->stillframe_error) == 0 &&
	    get_error(errors, "ForkError", &state->fork_error) == 0 &&
	    get_error(errors, "BusyError", &state->busy_error) == 0 &&
	    get_error(errors, "PoolExhaustedError", &state->pool_exhausted_error) == 0 &&
	    get_error(errors, "CorruptCheckpointError", &state->corrupt_error) == 0 &&
	    get_error(errors, "TornSnapshotError", &state->torn_error) == 0 &&
	    get_error(errors, "SaveError", &state->save_error) == 0)
		rc = 0;
	Py_DECREF(errors);
	return rc;
}

static int traverse(PyObject *module, visitproc visit, void *arg)
{
	struct sfr_py_state *state = sfr_py_state(module);

	Py_VISIT(state->engine_type);
	Py_VISIT(state->ticket_type);
	Py_VISIT(state->parts_type);
	Py_VISIT(state->load_type);
	Py_VISIT(state->work_type);
	Py_VISIT(state->restore_type);
	Py_VISIT(state->kinds_type);
	Py_VISIT(state->collector_type);
	Py_VISIT(state->observer_type);
	Py_VISIT(state->snapshot_type);
	Py_VISIT(state->memory_type);
	Py_VISIT(state->onload_type);
	Py_VISIT(state->stillframe_error);
	Py_VISIT(state->fork_error);
	Py_VISIT(state->busy_error);
	Py_VISIT(state->pool_exhausted_error);
	Py_VISIT(state->corrupt_error);
	Py_VISIT(state->torn_error);
	Py_VISIT(state->save_error);
	return 0;
}

static int clear(PyObject *module)
{
	struct sfr_py_state *state = sfr_py_state(module);

	Py_CLEAR(state->engine_type);
	Py_CLEAR(state->ticket_type);
	Py_CLEAR(state->parts_type);
	Py_CLEAR(state->load_type);
	Py_CLEAR(state->work_type);
	Py_CLEAR(state->restore_type);
	Py_CLEAR(state->kinds_type);
	Py_CLEAR(state->collector_type);
	Py_CLEAR(state->observer_type);
	Py_CLEAR(state->snapshot_type);
	Py_CLEAR(state->memory_type);
	Py_CLEAR(state->onload_type);
	Py_CLEAR(state->stillframe_error);
	Py_CLEAR(state->fork_error);
	Py_CLEAR(state->busy_error);
	Py_CLEAR(state->pool_exhausted_error);
	Py_CLEAR(state->corrupt_error);
	Py_CLEAR(state->torn_error);
	Py_CLEAR(state->save_error);
	return 0;
}

static void module_free(void *module)
{
	(void)clear(module);
}

static PyModuleDef_Slot slots[] = {
	/* one a line: what is added does not move the others */
	/* clang-format off */
	{ Py_mod_exec, exec_errors },
	{ Py_mod_exec, sfr_py_add_engine },
	{ Py_mod_exec, sfr_py_add_ticket },
	{ Py_mod_exec, sfr_py_add_parts },
	{ Py_mod_exec, sfr_py_add_snapshot },
	{ Py_mod_exec, sfr_py_add_memory },
	{ Py_mod_exec, sfr_py_add_onload },
	{ Py_mod_exec, sfr_py_add_look },
	{ Py_mod_exec, sfr_py_add_steps },
	{ Py_mod_exec, sfr_py_add_log },
	{ Py_mod_exec, sfr_py_add_work },
	{ Py_mod_exec, sfr_py_add_inject },
	{ Py_mod_exec, sfr_py_add_reader },
	{ Py_mod_exec, sfr_py_add_skeleton },
	{ Py_mod_exec, sfr_py_add_rebuild },
	{ Py_mod_exec, sfr_py_add_observer },
	{ Py_mod_exec, sfr_py_add_trace },
	/* clang-format on */
	{ 0, NULL },
};

static struct PyModuleDef definition = {
	PyModuleDef_HEAD_INIT,
	.m_name = "stillframe._core",
	.m_doc = "The C core of stillframe. Private: use the package's public names.",
	.m_size = sizeof(struct sfr_py_state),
	.m_slots = slots,
	.m_traverse = traverse,
	.m_clear = clear,
	.m_free = module_free,
};

PyMODINIT_FUNC PyInit__core(void);
PyMODINIT_FUNC PyInit__core(void)
{
	return PyModuleDef_Init(&definition);
}
