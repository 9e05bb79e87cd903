/* The extension module `stillframe._core`: a thin layer over the core, limited API (CPython 3.11+).
 *
 * Each file adds its types and functions with one sfr_py_add_* function. The docstrings in its
 * method tables are the contracts of the functions that Python calls; the core's headers have the
 * details. While the interpreter lock is released, only a function of the core runs. One function
 * turns the core's codes into exceptions (errors.c). */
#ifndef SFR_PY_MODULE_H
#define SFR_PY_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "sfr/err.h"

/* CPython prescribes the parameters of methods, and many methods do not use all of them. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

/* SFR_PY_TYPES: the module's types. SFR_PY_ERRORS: for each exception, its field in the state, its
 * name in stillframe.errors, and the code for which it is raised; 0: the base class, for codes that
 * have no exception of their own. */
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

/* The module's state: strong references to its types and exceptions. */
struct sfr_py_state {
#define X(name) PyTypeObject *name##_type;
	SFR_PY_TYPES(X)
#undef X
#define X(member, name, code) PyObject *member;
	SFR_PY_ERRORS(X)
#undef X
};
struct sfr_py_state *sfr_py_state(PyObject *module);
/* Returns the module's state for an object of one of the types above, which have no subclasses. */
struct sfr_py_state *sfr_py_state_of(PyObject *object);

/* Raises the exception for `code`, which is SFR_E* or -errno: MemoryError for -ENOMEM, ValueError
 * for -EINVAL, OSError for any other errno. Always returns NULL. */
PyObject *sfr_py_raise(struct sfr_py_state *state, int code);
/* Returns the error's message as a str; "" if nothing failed. */
PyObject *sfr_py_error_text(const struct sfr_err *err);
/* Does the same as sfr_py_raise, except that OSError is raised for -EINVAL and -ENOMEM too: for
 * codes that come from the operating system. */
PyObject *sfr_py_raise_os(struct sfr_py_state *state, int code);

/* Makes a Restore of an archive. Takes over `check`, a finished check with SFR_CHECK_KEEP, on
 * failure too; the caller keeps `fd` open. `flags` are SFR_RESTORE_*. Returns None if the archive's
 * records are not where torch and stillframe put them, or NULL with an exception set. */
struct sfr_check;
PyObject *sfr_py_restore_new(struct sfr_py_state *state, struct sfr_check *check, int fd,
			     unsigned flags);
/* Makes a Restore of a file of another format, whose records are the `nr` stretches in `v`, up to
 * offset `end`. `v` is only read in the call. Other arguments and results are as above. */
struct sfr_stretch;
PyObject *sfr_py_restore_new_bare(struct sfr_py_state *state, const struct sfr_stretch *v,
				  uint64_t nr, uint64_t end, int fd, unsigned flags);

/* Returns a new, zeroed object of the type, or NULL with an exception set. */
PyObject *sfr_py_alloc(PyTypeObject *type);
/* Frees an object's memory, at the end of its tp_dealloc. */
void sfr_py_free(PyObject *object);
/* Makes a type, adds it to the module and stores it in *slot, a field of the state. 0, or -1 with
 * an exception set. */
int sfr_py_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **slot);

/* Defines the spec of a type that cannot be subclassed. `layout` is the struct of its objects;
 * `more` are flags beyond the common ones. */
#define SFR_PY_TYPE(variable, type_name, layout, more, of_slots)                                   \
	static PyType_Spec variable = {                                                            \
		.name = "stillframe._core." type_name,                                             \
		.basicsize = sizeof(layout),                                                       \
		.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | (more),                   \
		.slots = (of_slots),                                                               \
	}

/* Evaluates `call`, a call of the core, without the interpreter lock, and gives its result. */
#define sfr_py_unlocked(call)                                                                      \
	__extension__({                                                                            \
		PyThreadState *sfr_py_thread = PyEval_SaveThread();                                \
		__auto_type sfr_py_answer = (call);                                                \
		PyEval_RestoreThread(sfr_py_thread);                                               \
		sfr_py_answer;                                                                     \
	})

/* Does the same for a call that returns nothing. */
#define sfr_py_unlocked_void(call)                                                                 \
	do {                                                                                       \
		PyThreadState *sfr_py_thread = PyEval_SaveThread();                                \
		(call);                                                                            \
		PyEval_RestoreThread(sfr_py_thread);                                               \
	} while (0)

/* Returns None, or raises the exception for a negative code. `object` is the method's `self`. */
PyObject *sfr_py_none_or_raise(PyObject *object, int rc);
/* Returns True for 0 and False for the code `no`; raises for other negative codes. Returns NULL for
 * SFR_PY_RAISED, with which an exception is set already. */
PyObject *sfr_py_true_unless(PyObject *object, int rc, int no);
/* Makes a str of a text of the core, in which bytes that are not UTF-8 are replaced. */
PyObject *sfr_py_text(const char *text);
/* Converts a Python int to *out. 0, or -1 with an exception set. */
int sfr_py_u64(PyObject *number, uint64_t *out);

/* A wait that answers signals. It is made of slices: calls into the core that return SFR_EAGAIN
 * after slice_ns, and may run without the interpreter lock.
 *
 *     struct sfr_py_wait w = sfr_py_wait(timeout);       seconds; None or NULL: forever
 *     while (sfr_py_next_slice(&w))                         once at least
 *             w.rc = ...(w.slice_ns);
 *
 * The wait ends when the code is not SFR_EAGAIN, the time has passed, or an exception is set. */
enum {
	SFR_PY_BEGINS = 1, /* no slice has run yet */
	SFR_PY_RAISED,     /* an exception is set: a signal handler raised, or a bad timeout */
};
struct sfr_py_wait {
	uint64_t left_ns;  /* the time after this slice; SFR_FOREVER: without bound */
	uint64_t slice_ns; /* the length of this slice */
	int rc;            /* the last slice's result, or one of the two values above */
};
struct sfr_py_wait sfr_py_wait(PyObject *timeout);
/* Returns whether another slice follows, and sets its length. Runs Python's signal handlers
 * first. */
int sfr_py_next_slice(struct sfr_py_wait *wait);

/* Starts loading the cache line at `address`. The address may be stale, because prefetching cannot
 * fault. Without the empty asm, GCC would see no effect in this function and drop its calls. */
static inline void sfr_py_prefetch(uintptr_t address)
{
	__builtin_prefetch((const void *)address);
	__asm__ volatile("");
}

/* Each of these files has a function sfr_py_add_* that adds the file's types and functions to the
 * module: 0, or -1 with an exception set. sfr_py_add_reader also calls sfr_py_add_file and
 * sfr_py_add_restore. */
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
