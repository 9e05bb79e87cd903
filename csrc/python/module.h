/* The extension module `stillframe._core`: a thin layer over the core, limited API (CPython 3.11+).
 *
 * Each file adds its types and functions with one sfr_py_add_* function. The docstrings in its
 * method tables are the contracts of the functions that Python calls; the core's headers have the
 * details. While the interpreter lock is released, only a function of the core runs. errors.c turns
 * the core's codes into exceptions.
 *
 * Unless a comment says otherwise, C functions here follow CPython's conventions. They return 0 or
 * a new reference, or set an exception and return -1 or NULL. */
#ifndef SFR_PY_MODULE_H
#define SFR_PY_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "sfr/err.h"

/* CPython prescribes the parameters of methods, and many methods do not use all of them. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

/* SFR_PY_TYPES: the module's types. SFR_PY_ERRORS: its exceptions, as X(field in the state, name in
 * stillframe.errors, the core's code). StillframeError is for all codes without another class. */
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

/* Raises the exception for `code`: SFR_E* or -errno. -ENOMEM raises MemoryError, -EINVAL
 * ValueError, any other errno OSError. Does nothing for SFR_PY_RAISED. Always returns NULL. */
PyObject *sfr_py_raise(struct sfr_py_state *state, int code);
/* Returns the error's message as a str; "" if nothing failed. */
PyObject *sfr_py_error_text(const struct sfr_err *err);
/* Raises as sfr_py_raise does, for a code that comes from the operating system: here -EINVAL and
 * -ENOMEM raise OSError too. */
PyObject *sfr_py_raise_os(struct sfr_py_state *state, int code);

/* Makes a Restore of an archive. `check` is a finished check with SFR_CHECK_KEEP, which this
 * function takes over even if it fails. The caller keeps `fd` open. `flags` are SFR_RESTORE_*.
 * Returns None if the archive's records are not where torch and stillframe put them. */
struct sfr_check;
PyObject *sfr_py_restore_new(struct sfr_py_state *state, struct sfr_check *check, int fd,
			     unsigned flags);
/* Makes a Restore of a file of another format. Its records are the `nr` stretches in `v`, which end
 * at or before the offset `end`. The call does not keep `v`. */
struct sfr_file_range;
PyObject *sfr_py_restore_new_bare(struct sfr_py_state *state, const struct sfr_file_range *v,
				  uint64_t nr, uint64_t end, int fd, unsigned flags);

/* Sets MemoryError. Always returns -1. */
static inline int sfr_py_set_memory_error(void)
{
	(void)PyErr_NoMemory(); /* always NULL */
	return -1;
}

/* Returns a new object of the type, whose fields are all zero. */
PyObject *sfr_py_alloc(PyTypeObject *type);
/* Frees an object's memory, at the end of its tp_dealloc. */
void sfr_py_free(PyObject *object);
/* Makes a type, adds it to the module and stores it in *slot, a field of the state. */
int sfr_py_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **slot);

/* Defines the spec of a type that cannot be subclassed. `layout` is the struct of its objects.
 * `more` are flags besides the usual ones, or 0. */
#define SFR_PY_TYPE(variable, type_name, layout, more, of_slots)                                   \
	static PyType_Spec variable = {                                                            \
		.name = "stillframe._core." type_name,                                             \
		.basicsize = sizeof(layout),                                                       \
		.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | (more),                   \
		.slots = (of_slots),                                                               \
	}

/* Calls the core without the interpreter lock. The macro's value is the result of the call. */
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

/* Returns None for 0, or raises as sfr_py_raise. `object` is the method's `self`. */
PyObject *sfr_py_none_or_raise(PyObject *object, int rc);
/* Returns True for 0 and False for `false_code`, or raises as sfr_py_raise. */
PyObject *sfr_py_bool_or_raise(PyObject *object, int rc, int false_code);
/* Makes a str of a text of the core. Bytes that are not UTF-8 are replaced. */
PyObject *sfr_py_decode_text(const char *text);
/* Converts a Python int to *out. */
int sfr_py_int_to_u64(PyObject *number, uint64_t *out);

/* A wait that answers signals. It is made of slices: calls into the core that return SFR_EAGAIN
 * after slice_ns, and may run without the interpreter lock.
 *
 *     struct sfr_py_wait_state w = sfr_py_wait_state(timeout);       seconds; None or NULL: forever
 *     while (sfr_py_begin_next_slice(&w))                            at least once
 *             w.rc = ...(w.slice_ns);
 *
 * The wait ends when the code is not SFR_EAGAIN, the time has passed, or an exception is set. */
enum {
	SFR_PY_BEGINS = 1, /* no slice has run yet */
	SFR_PY_RAISED,     /* an exception is set, by a signal handler or for a bad timeout */
};
struct sfr_py_wait_state {
	uint64_t left_ns;  /* time after this slice, or SFR_FOREVER */
	uint64_t slice_ns; /* length of this slice */
	int rc;            /* the last slice's result, or one of the two values above */
};
struct sfr_py_wait_state sfr_py_wait_state(PyObject *timeout);
/* Runs Python's signal handlers. Returns whether another slice follows, and sets its length. */
int sfr_py_begin_next_slice(struct sfr_py_wait_state *wait);

/* Starts to load the cache line at `address`. The address may be invalid, because a prefetch cannot
 * fault. The asm statement keeps GCC from dropping calls of this function. */
static inline void sfr_py_prefetch(uintptr_t address)
{
	__builtin_prefetch((const void *)address);
	__asm__ volatile("");
}

/* Each of these files has a function sfr_py_add_*, which adds the file's types and functions to the
 * module. */
/* clang-format off */
#define SFR_PY_FILES(X)                                                                            \
	X(engine) X(slot) X(folder) X(ticket) X(piece) X(parts) X(snapshot) X(memory) X(onload) X(path) \
	X(steps) X(cpus) X(signals) X(log) X(work) X(inject) X(reader) X(arrivals) X(skeleton) X(containers)   \
	X(observer) X(trace)
/* clang-format on */
#define X(name) int sfr_py_add_##name(PyObject *module);
SFR_PY_FILES(X)
#undef X
/* not in the list, because sfr_py_add_reader calls them */
int sfr_py_add_file(PyObject *module);
int sfr_py_add_restore(PyObject *module);

#endif
