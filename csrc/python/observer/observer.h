/* The observer's types and functions, for the files of this folder. observer.c explains them. */
#ifndef SFR_PY_OBSERVER_H
#define SFR_PY_OBSERVER_H

#include <time.h>

#include "module.h"
#include "torch/map.h"
#include "torch/numbers.h"

/* Returns the referent of a weak reference, borrowed; Py_None if it was freed. CPython 3.13
 * deprecates PyWeakref_GetObject, but the limited API of 3.11 has no other function. */
static inline PyObject *sfr_py_referent(PyObject *ref)
{
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
	return PyWeakref_GetObject(ref);
#pragma GCC diagnostic pop
}

/* How to read one attribute of torch's tensors or storages, or call one method without arguments.
 * Calling torch's C function directly is three times as fast as a look-up by name. */
struct sfr_py_accessor {
	getter get;       /* reads the attribute; NULL: look it up by name */
	void *closure;    /* the getter's second argument */
	PyCFunction call; /* calls the method; NULL: look it up by name */
	PyObject *name;
	int is_method;
};

/* The types and attributes of torch that the observer uses. The first Observer of a process fills
 * the struct. */
struct sfr_py_torch {
	PyTypeObject *tensor, *parameter; /* the exact types that may be deferred */
	PyTypeObject
		*wrapper;    /* the type given to sfr_py_declare_wrapper: DTensor; NULL: none yet */
	PyObject *str_local; /* name of the wrapper's attribute with the inner tensor */
	PyObject *free_weak; /* UntypedStorage._free_weak_ref */
	PyObject *str_params;
	/* tensors' attributes */
	struct sfr_py_accessor version, requires_grad, is_cpu, grad, impl, storage;
	struct sfr_py_accessor device; /* number of a tensor's CUDA device; -1: another kind */
	/* storages' attributes */
	struct sfr_py_accessor cdata, nbytes, data_ptr, is_shared, weak_ref;
	int ready; /* the struct is filled */
};
extern struct sfr_py_torch sfr_py_torch;

/* Fills sfr_py_torch, once. */
int sfr_py_torch_init(void);
/* For tests in which host memory counts as a device's: makes sfr_py_read_attribute call `function`
 * with the object instead of reading the attribute `name`. None restores torch's own attribute. */
int sfr_py_torch_override(PyObject *name, PyObject *function);
/* Reads an attribute of an object, or calls a method of it. */
PyObject *sfr_py_read_attribute(const struct sfr_py_accessor *access, PyObject *object);
/* Sets *out to an attribute that is a number. */
int sfr_py_read_u64(const struct sfr_py_accessor *access, PyObject *object, uint64_t *out);
/* Returns the truth of an attribute: 1, 0, or -1 with an exception set. */
int sfr_py_read_flag(const struct sfr_py_accessor *access, PyObject *object);

/* Declares a type of tensors that only wrap an inner tensor: their attribute `name`. The inner
 * tensor has the memory, so the functions below then use it instead. They get it without running
 * Python code. A second type replaces the first. */
int sfr_py_declare_wrapper(PyTypeObject *wrapper, PyObject *name);
/* Returns a new reference to the tensor that has the memory: `tensor` itself if it is exactly a
 * Tensor or a Parameter, or the inner tensor of a wrapper. Returns NULL without an exception for
 * other objects, because attributes of subclasses may run Python code. */
PyObject *sfr_py_unwrap_tensor(PyObject *tensor);
/* Returns 1 if sfr_py_unwrap_tensor gives a tensor, else 0. */
int sfr_py_has_memory(PyObject *tensor);
/* Returns a new reference to the storage with the tensor's memory. */
PyObject *sfr_py_storage_of(PyObject *tensor);
/* Returns the address of the StorageImpl of the tensor's storage; 0 if there is none, as for sparse
 * tensors. Sets no exception. */
uint64_t sfr_py_storage_cdata_of(PyObject *tensor);
/* Sets *out to the tensor's version, a number that grows with every write that torch counts. Fails
 * if the tensor has no memory, or is an inference tensor, for which torch counts nothing. */
int sfr_py_version_of(PyObject *tensor, uint64_t *out);

#define SFR_PY_NONE UINT32_MAX /* as an index: no tensor */

/* ---- the tensors of an optimizer ------------------------------------------- */

struct sfr_py_refs {
	PyObject **items; /* strong references */
	size_t nr;        /* items in use */
	size_t cap;       /* items that fit */
};

struct sfr_py_walk {
	struct sfr_py_refs found;  /* candidates: trained parameters and tensors of their state */
	struct sfr_py_refs others; /* tensors of the groups that are not candidates */
	int stateless;             /* Optimizer.state is empty */
};

/* Collects the tensors in `groups` (Optimizer.param_groups) and `state` (Optimizer.state). Runs no
 * Python code and allocates no Python object. Call sfr_py_walk_fini also after a failure. */
int sfr_py_walk(PyObject *groups, PyObject *state, struct sfr_py_walk *walk);
void sfr_py_walk_fini(struct sfr_py_walk *walk);
/* Returns a cheap fingerprint of `groups` and `state`. It changes when a group, a parameter or a
 * parameter's state is added or removed. */
uint64_t sfr_py_optimizer_fingerprint(PyObject *groups, PyObject *state);

/* ---- the observer's data (observer.c has the states) -------------------- */

/* A storage up to this size is always captured: one of an optimizer in host memory, one of an
 * optimizer on a device, one of a memory owner (defer.c). */
#define SFR_PY_HOST_MIN_NBYTES 4096
#define SFR_PY_DEVICE_MIN_NBYTES 65536
#define SFR_PY_MEMORY_OWNER_MIN_NBYTES 65536
#define SFR_PY_CACHE_LINE 64 /* bytes of a cache line */
#define SFR_PY_NR_CYCLES 2   /* cycles without a change until a storage may be deferred */
#define SFR_PY_NR_SAMPLES 3  /* cache lines that are compared of a storage: start, middle, end */

enum sfr_py_verdict { SFR_PY_UNDECIDED, SFR_PY_DEFERRABLE, SFR_PY_CAPTURED };

/* A watched storage. */
struct sfr_py_watched_storage {
	/* torch's weak reference to the StorageImpl: an int, its address. NULL: the watch was moved
	 * to another table */
	PyObject *weak_ref;
	uint64_t cdata; /* the same address as a number */
	uint64_t addr, nbytes;
	uint32_t device_plus_1;   /* 0: host memory; n: CUDA device n - 1 */
	uintptr_t storage_object; /* address of the storage's Python object; only to prefetch */
	uint32_t first_tensor;    /* index of the first in the list of tensors over the storage */
	uint32_t nr_tensors;
	uint32_t last_walk; /* number of the last walk that found the storage */
	uint32_t nr_owned;  /* tensors over the storage that this walk found */
	uint8_t verdict;    /* enum sfr_py_verdict */
	uint8_t nr_cycles;  /* comparisons so far, all without a change */
};

/* A tensor over a watched storage. */
struct sfr_py_watched_tensor {
	PyObject *ref;          /* weak reference to the tensor */
	uintptr_t tensor, impl; /* addresses of the tensor and its TensorImpl; only to prefetch */
	uint64_t version;       /* the version counter at the last recording */
	uint32_t watch;         /* index of the storage in `watches` */
	uint32_t next;          /* index of the next tensor over the storage, or SFR_PY_NONE */
	uint32_t last_walk;     /* number of the last walk that found the tensor */
};

struct sfr_py_watch_table {
	struct sfr_py_watched_storage *watches;
	struct sfr_py_watched_tensor *tensors;
	uint32_t nr_watches, nr_tensors;
	struct sfr_py_map by_storage; /* StorageImpl's address -> index in `watches` */
	struct sfr_py_map by_tensor;  /* tensor's address -> index in `tensors` */
};

/* The probes of one device; probes.c has the states. */
enum sfr_py_probe_state {
	SFR_PY_IDLE,
	SFR_PY_FIRST_DUE,    /* storages are recorded; the first probe is to be taken */
	SFR_PY_FIRST_TAKEN,  /* the first probe was taken */
	SFR_PY_SECOND_DUE,   /* the next gate is reached; the second probe is to be taken */
	SFR_PY_SECOND_TAKEN, /* the second probe was taken, and its copies may run */
	SFR_PY_CANNOT_PROBE, /* this device cannot be probed */
};
struct sfr_py_probe {
	uint32_t device_plus_1; /* as in struct sfr_py_watched_storage */
	enum sfr_py_probe_state state;
	struct sfr_probe *core; /* may be NULL with SFR_PY_CANNOT_PROBE */
	/* two arrays with an item for each storage that this cycle probes */
	uint32_t *probed_watches; /* index of its watch */
	struct sfr_probe_range *probed_ranges;
	uint32_t nr_probed; /* items in use in each array */
	uint32_t room;      /* items that fit into each array */
};
#define SFR_PY_MAX_PROBES 16 /* storages on further devices stay undecided */

struct sfr_py_observer {
	PyObject_HEAD
	PyObject *owners; /* dict shared by all observers: storage -> serial of the first owner */
	PyObject *serial; /* int: this observer's number in `owners` */
	struct sfr_py_watch_table table;
	/* samples[i]: the samples of table.watches[i], as they were last recorded */
	unsigned char (*samples)[SFR_PY_NR_SAMPLES][SFR_PY_CACHE_LINE];
	uint32_t *to_compare; /* indices of the watches that the next gate compares with samples */
	uint32_t nr_to_compare;
	uint32_t nr_undecided;     /* watches with the verdict UNDECIDED */
	uint32_t cursor;           /* index of the watch with which the next recording begins */
	uint32_t walk_number;      /* how many walks were made for saves; compared with last_walk */
	size_t nr_excluded;        /* the optimizer's tensors that can never be deferred */
	uint64_t fingerprint;      /* sfr_py_optimizer_fingerprint when the table was built */
	uint64_t credit_ns;        /* budget: CPU time that observing may take now */
	uint64_t device_credit_ns; /* budget: device time that probes may take now */
	struct sfr_py_probe probes[SFR_PY_MAX_PROBES];
	uint32_t nr_probes;
	uint64_t last_step_ns; /* when the last step ended; at first, when this object was made */
	int busy;              /* a call is under way: while it is set, other calls do nothing */
	int table_is_stale;    /* what the optimizer owns has changed: enrol() must be called */
	int must_forget;       /* forget() was called: enrol() must reuse nothing of the table */
	int gc_was_on;         /* whether the garbage collector was on before enter() */
};

/* Sets a storage's verdict. */
void sfr_py_observer_set_verdict(struct sfr_py_observer *self, struct sfr_py_watched_storage *watch,
				 enum sfr_py_verdict verdict);

/* ---- table.c ---- */
/* Returns the entry of this tensor, or NULL. */
struct sfr_py_watched_tensor *sfr_py_find_watched_tensor(const struct sfr_py_watch_table *table,
							 PyObject *tensor);
/* Stops watching everything. Keeps an exception that is set. */
void sfr_py_observer_drop_table(struct sfr_py_observer *self);
/* Makes a new table of the tensors and storages that the optimizer owns now. For each storage that
 * another observer watches too, appends (serial of that observer, storage) to the list `clashes`.
 * After a failure nothing is watched. */
int sfr_py_observer_rebuild_table(struct sfr_py_observer *self, PyObject *groups, PyObject *state,
				  PyObject *clashes);

/* ---- probes.c ---- */
/* Adds a watched storage on a device to the device's next probe, if the budget allows. */
void sfr_py_probes_add_watch(struct sfr_py_observer *self, uint32_t watch_index);
/* Called when the storages of a step have been added: makes the first probes due. */
void sfr_py_probes_make_first_due(struct sfr_py_observer *self);
/* Called at the next step's gate: makes the second probes due. They leave out the storages for
 * which `check_unchanged` returns 0. */
void sfr_py_probes_make_second_due(struct sfr_py_observer *self,
				   int (*check_unchanged)(struct sfr_py_observer *self,
							  uint32_t watch_index));
/* Asks whether the probes in flight have completed, and gives verdicts on the storages of those
 * that have. Releases the interpreter lock, so the caller sets `busy`. */
void sfr_py_probes_poll(struct sfr_py_observer *self);
/* Returns 1 if no device waits for a probe or for a verdict, else 0. */
int sfr_py_probes_are_idle(const struct sfr_py_observer *self);
/* Drops the probes under way without a verdict. Called when the indices of storages change. */
void sfr_py_probes_reset(struct sfr_py_observer *self);
/* Returns a tuple of torch's numbers of the devices that wait for a probe. */
PyObject *sfr_py_probes_due_devices(struct sfr_py_observer *self);
/* Takes the probes that are due on the devices in `streams`, a tuple of (device, handle of its
 * current stream). Releases the interpreter lock, so the caller sets `busy`. */
int sfr_py_probes_take_due(struct sfr_py_observer *self, PyObject *streams);
void sfr_py_probes_fini(struct sfr_py_observer *self);

/* The fields of a memory_owners.Marks, borrowed: all storages of a save, and lists that are filled
 * with those that are deferred. */
struct sfr_py_deferral_marks {
	struct sfr_py_storage_numbers *numbers; /* StorageImpl's address -> number of the storage */
	PyObject *rows;                         /* bytearray of struct sfr_source, by number */
	PyObject *indices;                      /* list of the deferred storages' numbers */
	/* three lists with an item for each tensor over a deferred storage */
	PyObject *tensors, *storage_numbers, *versions;
};

/* ---- defer.c ---- */
/* Marks the optimizer's storages that may be deferred. Called between enter() and leave(). */
int sfr_py_observer_mark_deferred(struct sfr_py_observer *self, PyObject *groups, PyObject *state,
				  const struct sfr_py_deferral_marks *marks);
/* Marks the storages of a memory owner's tensors that may be deferred. */
int sfr_py_mark_memory_owner_deferred(PyObject *tensors, const struct sfr_py_deferral_marks *marks);

/* ---- observe.c; called between enter() and leave() ---- */
/* Called after a step: records undecided storages within the budget. */
void sfr_py_observer_record_samples(struct sfr_py_observer *self);
/* Called after the table was rebuilt: records every undecided storage. */
void sfr_py_observer_record_all_samples(struct sfr_py_observer *self);
/* Called at the next step's gate: compares the recorded storages within the budget. */
void sfr_py_observer_compare_samples(struct sfr_py_observer *self);

uint64_t sfr_py_clock_ns(clockid_t id);

#endif
