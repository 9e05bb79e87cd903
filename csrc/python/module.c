/* The module stillframe._core: its state, and the files that add to it. */
#include "module.h"
#include "sfr/log.h"
#include "sfr/notice.h"
#include "sfr/save.h"
#include "sfr/snapshot.h"
#include "trace/trace.h"

struct sfr_py_state *sfr_py_state(PyObject *module)
{
	return PyModule_GetState(module);
}

/* Imports stillframe.errors, and stores its exceptions in the state. */
static int import_exception_types(PyObject *module)
{
	struct sfr_py_state *state = sfr_py_state(module);
	PyObject *errors = PyImport_ImportModule("stillframe.errors");
#define X(member, name, code)                                                                      \
	if (!PyErr_Occurred())                                                                     \
		state->member = PyObject_GetAttrString(errors, name);
	SFR_PY_ERRORS(X)
#undef X
	Py_XDECREF(errors);
	return PyErr_Occurred() ? -1 : 0;
}

/* Adds the core's constants to the module, without the prefix SFR_. */
static int add_constants_to_module(PyObject *module)
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
		CONSTANT(SAVE_NO_WAIT),    CONSTANT(SAVE_UNORDERED),  CONSTANT(SAVE_STREAM),
		CONSTANT(WAIT_COPIED),     CONSTANT(WAIT_STAGED),     CONSTANT(WAIT_ENDED),
		CONSTANT(NOTICE_COPIED),   CONSTANT(NOTICE_ENDED),    CONSTANT(NOTICE_TEXT),
		CONSTANT(NOTICE_STOP),     CONSTANT(NOTICE_SNAPSHOT), CONSTANT(SNAPSHOT_SHARED),
		CONSTANT(SNAPSHOT_LEAVES), CONSTANT(COPY_ALIGN),      CONSTANT(WORK_SAVE),
		CONSTANT(WORK_REMOVE),     CONSTANT(WORK_LINK),       CONSTANT(WORK_DIRECTORY),
		CONSTANT(TRACE_CALL),      CONSTANT(TRACE_PLAN),      CONSTANT(TRACE_GATE),
		CONSTANT(ETORN),           CONSTANT(EEXHAUSTED),      CONSTANT(ECANCELLED),
		CONSTANT(ECORRUPT),
	};

	for (size_t i = 0; i < sizeof(constants) / sizeof(constants[0]); i++)
		if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0)
			return -1;
	return 0;
}

/* ---- garbage collection: visits and drops the references in the state ---- */

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
	{ Py_mod_exec, import_exception_types },
	{ Py_mod_exec, add_constants_to_module },
/* clang-format off */
#define X(name) { Py_mod_exec, sfr_py_add_##name },
	SFR_PY_FILES(X)
#undef X
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

PyMODINIT_FUNC PyInit__core(void); /* -Wmissing-prototypes asks for it */
PyMODINIT_FUNC PyInit__core(void)
{
	return PyModuleDef_Init(&definition);
}
