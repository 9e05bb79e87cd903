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

/* CPython says which arguments a function is called with, wanted or not. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

/* The module's types, and the exceptions of stillframe.errors: what each is called there, and the code
 * that it is raised for (0: none of its own). */
/* clang-format off */
#define SFR_PY_TYPES(X)                                                                            \
	X(engine) X(ticket) X(parts) X(snapshot) X(memory) X(onload) X(load) X(work) X(restore)    \
	X(torch_types) X(collector) X(observer)
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
/* The same by an object of one of the types, which have no subclasses. */
struct sfr_py_state *sfr_py_state_of(PyObject *object);

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

/* A type of the module: final. `more` are flags beyond those that all have. */
#define SFR_PY_TYPE(variable, type_name, layout, more, of_slots)                                   \
	static PyType_Spec variable = {                                                            \
		.name = "stillframe._core." type_name,                                             \
		.basicsize = sizeof(layout),                                                       \
		.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | (more),                   \
		.slots = (of_slots),                                                               \
	}

/* What a call of the core answers; the interpreter lock is let go of around it. */
#define sfr_py_unlocked(call)                                                                      \
	__extension__({                                                                            \
		PyThreadState *sfr_py_thread = PyEval_SaveThread();                                \
		__auto_type sfr_py_answer = (call);                                                \
		PyEval_RestoreThread(sfr_py_thread);                                               \
		sfr_py_answer;                                                                     \
	})

/* What a method answers with, of a code: None, or what a negative one stands for is raised. */
PyObject *sfr_py_none(PyObject *object, int rc);
/* True; False for the code `no`; SFR_PY_RAISED and other negative ones as above. */
PyObject *sfr_py_unless(PyObject *object, int rc, int no);
/* A str of what the core says, whatever bytes it is. */
PyObject *sfr_py_text(const char *text);
/* A number of 64 bits: 0, or -1 with an exception set. */
int sfr_py_u64(PyObject *number, uint64_t *out);

/* A wait that answers signals: it goes in slices, in each of which the interpreter lock may be given up.
 *
 *     struct sfr_py_wait w = sfr_py_wait(timeout);       seconds; None or NULL: for ever
 *     while (sfr_py_goes_on(&w))                         once at least
 *             w.rc = ...(w.slice_ns);
 *
 * It is over when the code is not SFR_EAGAIN, the time has passed, or a handler has raised. */
enum { SFR_PY_BEGINS = 1, SFR_PY_RAISED };
struct sfr_py_wait {
	uint64_t left_ns, slice_ns;
	int rc; /* a code of the core's, or one of those above */
};
struct sfr_py_wait sfr_py_wait(PyObject *timeout);
int sfr_py_goes_on(struct sfr_py_wait *wait);

/* Starts loading the line of memory at `address`, which may be a stale one: prefetching cannot
 * fault. GCC takes a function of nothing but prefetches for one without effects, and drops the
 * calls of it, so this one has an effect. */
static inline void sfr_py_prefetch(uintptr_t address)
{
	__builtin_prefetch((const void *)address);
	__asm__ volatile("");
}

/* Each adds types and functions; 0, or -1 with an exception set. */
int sfr_py_add_engine(PyObject *module);     /* engine.c */
int sfr_py_add_ticket(PyObject *module);     /* ticket.c */
int sfr_py_add_parts(PyObject *module);      /* parts.c */
int sfr_py_add_snapshot(PyObject *module);   /* snapshot.c */
int sfr_py_add_memory(PyObject *module);     /* memory.c */
int sfr_py_add_onload(PyObject *module);     /* onload.c */
int sfr_py_add_look(PyObject *module);       /* look.c */
int sfr_py_add_steps(PyObject *module);      /* steps.c */
int sfr_py_add_cpus(PyObject *module);       /* cpus.c */
int sfr_py_add_log(PyObject *module);        /* log.c: log, notices, fork */
int sfr_py_add_work(PyObject *module);       /* work.c: work in the log's order */
int sfr_py_add_inject(PyObject *module);     /* inject.c: the call table, for tests */
int sfr_py_add_reader(PyObject *module);     /* reader.c: check, crc32 */
int sfr_py_add_file(PyObject *module);       /* file.c, called by reader.c */
int sfr_py_add_restore(PyObject *module);    /* restore.c, likewise */
int sfr_py_add_skeleton(PyObject *module);   /* skeleton.c */
int sfr_py_add_containers(PyObject *module); /* containers.c */
int sfr_py_add_observer(PyObject *module);   /* observer.c */
int sfr_py_add_trace(PyObject *module);      /* trace.c */

#endif
