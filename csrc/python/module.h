/* The extension module `stillframe._core`: thin over the core, limited API (CPython 3.11+).
 *
 * Each file adds its types and functions to the module with one sfr_py_add_* function.
 * Nothing but the library call stands between releasing and taking the interpreter lock.
 * One function turns codes into exceptions (errors.c).
 */
#ifndef SFR_PY_MODULE_H
#define SFR_PY_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "sfr/err.h"

/* Module state: types and the exception classes of stillframe.errors, borrowed from nowhere:
 * strong references, visited and cleared by the module. */
struct sfr_py_state {
	PyTypeObject *engine_type, *ticket_type, *load_type; /* engine.c, ticket.c, log.c */
	PyTypeObject *work_type, *restore_type;              /* work.c, restore.c */
	PyTypeObject *collector_type, *kinds_type;           /* skeleton.c, kinds.c */
	PyTypeObject *parts_type;                            /* parts.c */
	PyTypeObject *observer_type;                         /* observer.c */
	PyTypeObject *snapshot_type, *memory_type;           /* snapshot.c, memory.c */
	PyTypeObject *onload_type;                           /* onload.c */
	PyObject *stillframe_error, *fork_error, *busy_error, *pool_exhausted_error;
	PyObject *corrupt_error, *torn_error, *save_error;
};
struct sfr_py_state *sfr_py_state(PyObject *module);

/* Raises what `code` (negative) stands for; always returns NULL. */
PyObject *sfr_py_raise(struct sfr_py_state *state, int code);
/* What it says, as a str; "" where nothing failed. */
PyObject *sfr_py_sentence(const struct sfr_err *err);
/* The same for what the operating system said: OSError, for -EINVAL and -ENOMEM too. */
PyObject *sfr_py_raise_os(struct sfr_py_state *state, int code);

/* A Restore of a check that has run and is its from now on; None where there can be none. */
struct sfr_check;
PyObject *sfr_py_restore_new(struct sfr_py_state *state, struct sfr_check *check, int fd,
			     unsigned flags);

/* An object of the type, all zero, or NULL with an exception set; and its end. */
PyObject *sfr_py_alloc(PyTypeObject *type);
void sfr_py_free(PyObject *object);
/* Makes a type of the module and puts it into the state's slot. */
int sfr_py_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **slot);

/* Waits go in slices, so that signals are answered: a timeout in seconds or None becomes
 * nanoseconds left; each turn answers signals (-1 when a handler raised) and takes a slice. */
#define SFR_PY_SLICE_NS UINT64_C(50000000)
int sfr_py_timeout(PyObject *timeout, uint64_t *left_ns);
int sfr_py_slice(uint64_t *left_ns, uint64_t *slice_ns);

/* Starts loading the line of memory at `address`, which may be a stale one: prefetching cannot
 * fault. GCC takes a function of nothing but prefetches for one without effects, and drops the
 * calls of it, so this one has an effect. */
static inline void sfr_py_prefetch(uintptr_t address)
{
	__builtin_prefetch((const void *)address);
	__asm__ volatile("");
}

/* Each adds types and functions; 0, or -1 with an exception set. */
int sfr_py_add_engine(PyObject *module);   /* engine.c */
int sfr_py_add_ticket(PyObject *module);   /* ticket.c */
int sfr_py_add_parts(PyObject *module);    /* parts.c */
int sfr_py_add_snapshot(PyObject *module); /* snapshot.c */
int sfr_py_add_memory(PyObject *module);   /* memory.c */
int sfr_py_add_onload(PyObject *module);   /* onload.c */
int sfr_py_add_look(PyObject *module);     /* look.c */
int sfr_py_add_steps(PyObject *module);    /* steps.c */
int sfr_py_add_log(PyObject *module);      /* log.c: log, notices, fork */
int sfr_py_add_work(PyObject *module);     /* work.c: work in the log's order */
int sfr_py_add_inject(PyObject *module);   /* inject.c: the call table, for tests */
int sfr_py_add_reader(PyObject *module);   /* reader.c: check, crc32 */
int sfr_py_add_file(PyObject *module);     /* file.c, called by reader.c */
int sfr_py_add_restore(PyObject *module);  /* restore.c, likewise */
int sfr_py_add_skeleton(PyObject *module); /* skeleton.c */
int sfr_py_add_rebuild(PyObject *module);  /* rebuild.c */
int sfr_py_add_observer(PyObject *module); /* observer.c */
int sfr_py_add_trace(PyObject *module);    /* trace.c */

#endif
