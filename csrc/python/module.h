/* The extension module `stillframe._core`: a thin layer over the core, limited API (CPython 3.11+).
 *
 * Each file adds its types and functions with one sfr_py_add_* function. Only the core's own call
 * runs between releasing and taking the interpreter lock. One function turns codes into exceptions
 * (errors.c). */
#ifndef SFR_PY_MODULE_H
#define SFR_PY_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "sfr/err.h"

/* CPython fixes the arguments of these functions, used or not. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

/* The module's types, and the exceptions of stillframe.errors with their names there and the codes
 * they are raised for (0: none). */
/* clang-format off */
#define SFR_PY_TYPES(X)                                                                            \
	X(engine) X(slot) X(folder) X(ticket) X(piece) X(parts) X(snapshot) X(memory) X(onload) X(load) X(work)       \
	X(restore) X(arrivals) X(torch_types) X(collector) X(observer)
/* clang-format on */
#define SFR_PY_ERRORS(X)                                                                           \
	X(stillframe_error, "StillframeError", 0)                                                  \
	X(fork_error, "ForkError", SFR_EFORK)                                                      \
	X(busy_error, "BusyError", SFR_EBUSY)                                                      \
	X(pool_exhausted_error, "PoolExhaustedError", SFR_EEXHAUSTED)                              \
	X(corrupt_error, "CorruptCheckpointError", SFR_ECORRUPT)                                   \
	X(torn_error, "TornSnapshotError", SFR_ETORN)

/* Module state: strong references, visited and cleared by the module. */
struct sfr_py_state {
#define X(name) PyTypeObject *name##_type;
	SFR_PY_TYPES(X)
#undef X
#define X(member, name, code) PyObject *member;
	SFR_PY_ERRORS(X)
#undef X
};
struct sfr_py_state *sfr_py_state(PyObject *module);
/* Returns the state for an object of one of the types, which have no subclasses. */
struct sfr_py_state *sfr_py_state_of(PyObject *object);

/* Raises the exception for `code` (negative); always returns NULL. */
PyObject *sfr_py_raise(struct sfr_py_state *state, int code);
/* Returns the error's message as a str; "" if nothing failed. */
PyObject *sfr_py_error_text(const struct sfr_err *err);
/* Raises an error of the operating system: OSError, also for -EINVAL and -ENOMEM. */
PyObject *sfr_py_raise_os(struct sfr_py_state *state, int code);

/* Makes a Restore that takes over a finished check; None if the file cannot be restored that
 * way. */
struct sfr_check;
PyObject *sfr_py_restore_new(struct sfr_py_state *state, struct sfr_check *check, int fd,
			     unsigned flags);
/* The same for the stretches of a file that is no archive. */
struct sfr_stretch;
PyObject *sfr_py_restore_new_bare(struct sfr_py_state *state, const struct sfr_stretch *v,
				  uint64_t nr, uint64_t end, int fd, unsigned flags);

/* Allocate a zeroed object of the type, or NULL with an exception set; and free it. */
PyObject *sfr_py_alloc(PyTypeObject *type);
void sfr_py_free(PyObject *object);
/* Makes a type of the module and stores it in the state. */
int sfr_py_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **slot);

/* Defines a final type of the module. `more` are flags beyond the common ones. */
#define SFR_PY_TYPE(variable, type_name, layout, more, of_slots)                                   \
	static PyType_Spec variable = {                                                            \
		.name = "stillframe._core." type_name,                                             \
		.basicsize = sizeof(layout),                                                       \
		.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | (more),                   \
		.slots = (of_slots),                                                               \
	}

/* Returns what a call of the core returns; releases the interpreter lock around it. */
#define sfr_py_unlocked(call)                                                                      \
	__extension__({                                                                            \
		PyThreadState *sfr_py_thread = PyEval_SaveThread();                                \
		__auto_type sfr_py_answer = (call);                                                \
		PyEval_RestoreThread(sfr_py_thread);                                               \
		sfr_py_answer;                                                                     \
	})

/* The same for a call that returns nothing. */
#define sfr_py_unlocked_void(call)                                                                 \
	do {                                                                                       \
		PyThreadState *sfr_py_thread = PyEval_SaveThread();                                \
		(call);                                                                            \
		PyEval_RestoreThread(sfr_py_thread);                                               \
	} while (0)

/* Returns None, or raises the exception for a negative code. `object` is the method's own. */
PyObject *sfr_py_none_or_raise(PyObject *object, int rc);
/* Returns True, or False for the code `no`; raises for other negative codes. SFR_PY_RAISED: an
 * exception is set already. */
PyObject *sfr_py_true_unless(PyObject *object, int rc, int no);
/* Makes a str of the core's text. Bytes that are not UTF-8 are replaced. */
PyObject *sfr_py_text(const char *text);
/* Reads a 64-bit number. 0, or -1 with an exception set. */
int sfr_py_u64(PyObject *number, uint64_t *out);

/* A wait that answers signals. It consists of slices, each of which may release the interpreter
 * lock.
 *
 *     struct sfr_py_wait w = sfr_py_wait(timeout);       seconds; None or NULL: forever
 *     while (sfr_py_goes_on(&w))                         once at least
 *             w.rc = ...(w.slice_ns);
 *
 * It ends when the code is not SFR_EAGAIN, the time has passed, or a signal handler has raised. */
enum { SFR_PY_BEGINS = 1, SFR_PY_RAISED };
struct sfr_py_wait {
	uint64_t left_ns, slice_ns;
	int rc; /* a code of the core, or one of the above */
};
struct sfr_py_wait sfr_py_wait(PyObject *timeout);
/* Returns whether another slice follows, and sets its length. Answers signals before it. */
int sfr_py_goes_on(struct sfr_py_wait *wait);

/* Starts loading the cache line at `address`, which may be stale: prefetching cannot fault. GCC
 * treats a function that only prefetches as free of effects and drops its calls, so this one has an
 * effect. */
static inline void sfr_py_prefetch(uintptr_t address)
{
	__builtin_prefetch((const void *)address);
	__asm__ volatile("");
}

/* The functions that add types and functions to the module, each in the file of its name; 0, or -1
 * with an exception set. log.c also has notices and forks, reader.c calls those of file.c and
 * restore.c, and inject.c has the call table, for tests. */
/* clang-format off */
#define SFR_PY_FILES(X)                                                                            \
	X(engine) X(slot) X(folder) X(ticket) X(piece) X(parts) X(snapshot) X(memory) X(onload) X(path) \
	X(steps) X(cpus) X(signals) X(log) X(work) X(inject) X(reader) X(arrivals) X(skeleton) X(containers)   \
	X(observer) X(trace)
/* clang-format on */
#define X(name) int sfr_py_add_##name(PyObject *module);
SFR_PY_FILES(X)
#undef X
int sfr_py_add_file(PyObject *module);
int sfr_py_add_restore(PyObject *module);

#endif
