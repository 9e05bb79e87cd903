/* The module stillframe._core: its state, and the files that add to it. */
#include "module.h"
#include "sfr/log.h"
#include "sfr/notice.h"
#include "sfr/save.h"
#include "sfr/snapshot.h"
#include "trace/trace.h"

/* The module outlives its types, so its state is always there. */
struct sfr_py_state *sfr_py_state(PyObject *module)
{
	return PyModule_GetState(module);
}

static int exec_errors(PyObject *module)
{
	struct sfr_py_state *state = sfr_py_state(module);
	PyObject *errors = PyImport_ImportModule("stillframe.errors");
	int all = errors != NULL;

#define X(member, name, code)                                                                      \
	all = all && (state->member = PyObject_GetAttrString(errors, name)) != NULL;
	SFR_PY_ERRORS(X)
#undef X
	Py_XDECREF(errors);
	return all ? 0 : -1;
}

/* Constants that the package uses under their names in the core. */
static int exec_constants(PyObject *module)
{
#define CONSTANT(name)                                                                             \
	{                                                                                          \
		#name, SFR_##name                                                                  \
	}
	static const struct {
		const char *name;
		long value;
	} constants[] = {
		CONSTANT(SAVE_DURABLE),    CONSTANT(SAVE_NESTED),     CONSTANT(SAVE_CHECK_BYTES),
		CONSTANT(SAVE_NO_WAIT),    CONSTANT(SAVE_UNORDERED),  CONSTANT(WAIT_COPIED),
		CONSTANT(WAIT_STAGED),     CONSTANT(WAIT_ENDED),      CONSTANT(NOTICE_COPIED),
		CONSTANT(NOTICE_ENDED),    CONSTANT(NOTICE_TEXT),     CONSTANT(NOTICE_STOP),
		CONSTANT(NOTICE_SNAPSHOT), CONSTANT(SNAPSHOT_SHARED), CONSTANT(SNAPSHOT_LEAVES),
		CONSTANT(APART),           CONSTANT(WORK_SAVE),       CONSTANT(WORK_REMOVE),
		CONSTANT(WORK_LINK),       CONSTANT(WORK_DIRECTORY),  CONSTANT(TRACE_CALL),
		CONSTANT(TRACE_PLAN),      CONSTANT(TRACE_GATE),      CONSTANT(ETORN),
		CONSTANT(EEXHAUSTED),      CONSTANT(ECANCELLED),      CONSTANT(ECORRUPT),
	};

	for (size_t i = 0; i < sizeof(constants) / sizeof(constants[0]); i++)
		if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0)
			return -1;
	return 0;
}

static int traverse(PyObject *module, visitproc visit, void *arg)
{
	struct sfr_py_state *state = sfr_py_state(module);

#define X(name) Py_VISIT(state->name##_type);
	SFR_PY_TYPES(X)
#undef X
#define X(member, name, code) Py_VISIT(state->member);
	SFR_PY_ERRORS(X)
#undef X
	return 0;
}

static int clear(PyObject *module)
{
	struct sfr_py_state *state = sfr_py_state(module);

#define X(name) Py_CLEAR(state->name##_type);
	SFR_PY_TYPES(X)
#undef X
#define X(member, name, code) Py_CLEAR(state->member);
	SFR_PY_ERRORS(X)
#undef X
	return 0;
}

static void module_free(void *module)
{
	(void)clear(module);
}

static PyModuleDef_Slot slots[] = {
	/* one a line, so that an addition does not move the others */
	/* clang-format off */
	{ Py_mod_exec, exec_errors },
	{ Py_mod_exec, exec_constants },
	{ Py_mod_exec, sfr_py_add_engine },
	{ Py_mod_exec, sfr_py_add_slot },
	{ Py_mod_exec, sfr_py_add_folder },
	{ Py_mod_exec, sfr_py_add_ticket },
	{ Py_mod_exec, sfr_py_add_parts },
	{ Py_mod_exec, sfr_py_add_snapshot },
	{ Py_mod_exec, sfr_py_add_memory },
	{ Py_mod_exec, sfr_py_add_onload },
	{ Py_mod_exec, sfr_py_add_path },
	{ Py_mod_exec, sfr_py_add_steps },
	{ Py_mod_exec, sfr_py_add_cpus },
	{ Py_mod_exec, sfr_py_add_signals },
	{ Py_mod_exec, sfr_py_add_log },
	{ Py_mod_exec, sfr_py_add_work },
	{ Py_mod_exec, sfr_py_add_inject },
	{ Py_mod_exec, sfr_py_add_reader },
	{ Py_mod_exec, sfr_py_add_arrivals },
	{ Py_mod_exec, sfr_py_add_skeleton },
	{ Py_mod_exec, sfr_py_add_containers },
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
