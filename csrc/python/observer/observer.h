/* Private to observer.c, table.c, look.c, eyes.c, walk.c and read.c. */
#ifndef SFR_PY_OBSERVER_H
#define SFR_PY_OBSERVER_H

#include <time.h>

#include "module.h"
#include "torch/map.h"
#include "torch/numbers.h"

/* What a weak reference refers to, borrowed: Py_None once it is gone, NULL with an exception set for
 * what is no weak reference. CPython 3.13 deprecates the function; the one in its place is not in
 * the limited API of 3.11. */
static inline PyObject *sfr_py_referent(PyObject *ref)
{
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
	return PyWeakref_GetObject(ref);
#pragma GCC diagnostic pop
}

/* One attribute or method without arguments of torch's tensors or storages. The function behind
 * the descriptor is called directly where the type's own table names it (15-30 ns instead of
 * 50-100); otherwise the ordinary way is taken. */
struct sfr_py_access {
	getter get;
	void *closure;
	PyCFunction call;
	PyObject *name;
	int is_method;
};

/* What the observer reads of torch. Filled once a process, by the first Observer, and kept: torch
 * itself can be loaded only once and never unloads. */
struct sfr_py_torch {
	PyTypeObject *tensor, *parameter; /* the exact types that may be deferred */
	PyTypeObject *wrapper; /* and the one that is seen through; NULL until it is known */
	PyObject *str_local;   /* where that has the tensor whose memory it shows */
	PyObject *free_weak;   /* UntypedStorage._free_weak_ref */
	PyObject *str_params;
	struct sfr_py_access version, requires_grad, is_cpu, grad, impl, storage; /* tensors */
	struct sfr_py_access device; /* of a tensor not of the host's: CUDA's number of it, or -1 */
	struct sfr_py_access cdata, nbytes, data_ptr, is_shared, weak_ref; /* storages */
	int ready;
};
extern struct sfr_py_torch sfr_py_torch;

/* Fills sfr_py_torch; 0, or -1 with an exception set. */
int sfr_py_torch_init(void);
/* Has one attribute answered by a function of one argument, or (None) by torch again: for tests that
 * show the host's memory as a device's. 0, or -1 with an exception set: no such attribute. */
int sfr_py_torch_present(PyObject *name, PyObject *function);
/* A new reference, or NULL with an exception set. */
PyObject *sfr_py_read(const struct sfr_py_access *access, PyObject *object);
/* 0, or -1 with an exception set. */
int sfr_py_read_u64(const struct sfr_py_access *access, PyObject *object, uint64_t *out);
/* 1, 0, or -1 with an exception set. */
int sfr_py_read_flag(const struct sfr_py_access *access, PyObject *object);
/* Sees from now on through tensors that are exactly of this type: `name` is the attribute with the
 * tensor whose memory they show. Everything of such a type that is asked of it here runs no Python
 * code. 0, or -1 with an exception set. */
int sfr_py_see_through(PyTypeObject *wrapper, PyObject *name);
/* The tensor that has the memory: `tensor` itself where it is exactly a Tensor or a Parameter, the one
 * inside where it is seen through. A new reference. NULL, with no exception, for any other: subclasses
 * may run Python code in any attribute, and nothing is known about who writes them. */
PyObject *sfr_py_memory_of(PyObject *tensor);
int sfr_py_is_seen(PyObject *tensor);
/* The storage of that memory, a new reference; or NULL with an exception set. */
PyObject *sfr_py_storage_of(PyObject *tensor);
/* The address of its StorageImpl, 0 where there is none, as sparse tensors and the like have none. */
uint64_t sfr_py_identity_of(PyObject *tensor);
/* A number that grows with every write that torch counts, under either name. 0, or -1 with an exception
 * set: it has no memory, or (inference tensors) counts nothing. */
int sfr_py_version_of(PyObject *tensor, uint64_t *out);

#define SFR_PY_NONE UINT32_MAX

/* ---- what an optimizer owns -------------------------------------------- */

struct sfr_py_refs {
	PyObject **items; /* strong references */
	size_t nr, cap;
};

struct sfr_py_walk {
	struct sfr_py_refs found;  /* candidates: trained parameters, tensors of their state */
	struct sfr_py_refs others; /* tensors of the groups that are no candidates */
	int stateless;             /* the state has no entry at all */
};

/* Collects what `groups` (Optimizer.param_groups) and `state` (Optimizer.state) hold. Runs no
 * Python code and allocates no object of Python's, so nothing can change under it. Shapes that
 * no optimizer of torch has are passed over. 0, or -1 with an exception set (no memory); the
 * walk is to be given back in either case. */
int sfr_py_walk(PyObject *groups, PyObject *state, struct sfr_py_walk *walk);
void sfr_py_walk_fini(struct sfr_py_walk *walk);
/* A number that changes when a group, a parameter or a parameter's state is added or removed. */
uint64_t sfr_py_walk_size(PyObject *groups, PyObject *state);

/* ---- the observer's data (observer.c has the states) -------------------- */

#define SFR_PY_DEVICE_MIN_NBYTES 65536 /* storages on a device up to this size are captured */
#define SFR_PY_KEPT_MIN_NBYTES 65536   /* the same of what a keeper has, wherever it lies */
#define SFR_PY_LINE 64                 /* bytes of a cache line */
#define SFR_PY_NR_CYCLES 2             /* without a change until a storage may be deferred */
#define SFR_PY_NR_LINES 3              /* looked at in each storage: start, middle, end */

enum sfr_py_verdict { SFR_PY_UNDECIDED, SFR_PY_DEFERRABLE, SFR_PY_CAPTURED };

/* One storage. */
struct sfr_py_watch {
	PyObject *ident; /* int: StorageImpl's address */
	uint64_t cdata;  /* the same */
	uint64_t addr, nbytes;
	uint32_t
		device; /* 0: the host's memory, n: of CUDA device n - 1, which the host cannot read */
	uintptr_t wrapper;    /* Python's object for the storage; only to prefetch */
	uint32_t first_claim; /* chain through claim.next */
	uint32_t nr_claims;
	uint32_t epoch, nr_marked; /* claims met by the walk number `epoch` */
	uint8_t verdict;
	uint8_t nr_cycles;
};

/* One tensor over a storage. */
struct sfr_py_claim {
	PyObject *ref;          /* weak reference to the tensor */
	uintptr_t tensor, impl; /* where the tensor and its TensorImpl are; only to prefetch */
	uint64_t version;       /* as recorded */
	uint32_t watch, next;
	uint32_t epoch;
};

struct sfr_py_table {
	struct sfr_py_watch *watches;
	struct sfr_py_claim *claims;
	uint32_t nr_watches, nr_claims;
	struct sfr_py_map by_storage, by_tensor; /* -> their numbers */
};

/* What is looked at on one device; eyes.c has the states. */
enum sfr_py_eye_state {
	SFR_PY_IDLE,
	SFR_PY_DUE,       /* storages are recorded; the first look is to be taken */
	SFR_PY_LOOKED,    /* it was taken */
	SFR_PY_DUE_AGAIN, /* the next gate is here; the second is to be taken */
	SFR_PY_IN_FLIGHT, /* it was taken, and has not landed */
	SFR_PY_BLIND,     /* the device cannot be looked at */
};
struct sfr_py_eye {
	uint32_t device; /* as in a watch */
	enum sfr_py_eye_state state;
	struct sfr_glance *look;
	struct sfr_glance_at *at; /* of the storages asked about */
	uint32_t *asked;          /* their numbers */
	uint32_t nr_asked, room;
};
#define SFR_PY_MAX_EYES 16 /* storages on further devices stay undecided */

struct sfr_py_observer {
	PyObject_HEAD
	PyObject *owned;  /* dict shared by all observers: storage -> serial of the first owner */
	PyObject *serial; /* int: this observer in `owned` */
	struct sfr_py_table table;
	unsigned char (*lines)[SFR_PY_NR_LINES]
			      [SFR_PY_LINE]; /* of the storage with the same number */
	uint32_t *armed; /* numbers of the storages recorded and not yet compared */
	uint32_t nr_armed, nr_undecided, cursor, epoch;
	size_t nr_passed_over;     /* tensors of the last enrolment that can never be deferred */
	uint64_t size;             /* sfr_py_walk_size at the last enrolment */
	uint64_t credit_ns;        /* CPU time that may be spent on looking now */
	uint64_t device_credit_ns; /* time of devices */
	struct sfr_py_eye eyes[SFR_PY_MAX_EYES];
	uint32_t nr_eyes;
	uint64_t stepped_ns; /* when a step ended last; at first when this was made */
	int busy, wanted, forget, gc_was_on;
};

/* Gives a storage its verdict. */
void sfr_py_observer_decide(struct sfr_py_observer *self, struct sfr_py_watch *watch,
			    enum sfr_py_verdict verdict);

/* table.c. The claim of this very tensor, or NULL. */
struct sfr_py_claim *sfr_py_find_claim(const struct sfr_py_table *table, PyObject *tensor);
/* Stops watching everything. Keeps whatever exception is set. */
void sfr_py_observer_drop(struct sfr_py_observer *self);
/* Finds what the optimizer owns now; [serial, storage] of each storage that another observer
 * watches is appended to `clashes`. 0, or -1 with an exception set and nothing watched. */
int sfr_py_observer_enrol(struct sfr_py_observer *self, PyObject *groups, PyObject *state,
			  PyObject *clashes);

/* eyes.c; all between enter() and leave(), but for the look itself. Whether a storage on a device is
 * recorded for the next look, the budget allowing. */
void sfr_py_eyes_record(struct sfr_py_observer *self, uint32_t number);
/* All storages of this step are recorded. */
void sfr_py_eyes_recorded(struct sfr_py_observer *self);
/* The gate of the next step: `is_same` says of a storage what the host can see. */
void sfr_py_eyes_compare(struct sfr_py_observer *self,
			 int (*is_same)(struct sfr_py_observer *self, uint32_t number));
/* Gives verdicts on what has landed. A call of the driver's: somebody else may have the interpreter
 * lock meanwhile, so `busy` is set. */
void sfr_py_eyes_harvest(struct sfr_py_observer *self);
/* Whether no device waits for a look, or was looked at with no verdict yet. */
int sfr_py_eyes_rest(const struct sfr_py_observer *self);
/* The numbers of storages mean others from now on. */
void sfr_py_eyes_reset(struct sfr_py_observer *self);
/* Devices that wait for a look: a tuple of their numbers as torch has them. */
PyObject *sfr_py_eyes_due(struct sfr_py_observer *self);
/* Takes them, on (device, stream) of each. 0, or -1 with an exception set. */
int sfr_py_eyes_look(struct sfr_py_observer *self, PyObject *streams);
void sfr_py_eyes_fini(struct sfr_py_observer *self);

/* What a save consists of, and what of it is copied behind its call: keepers.Marks, borrowed. */
struct sfr_py_marks {
	struct sfr_py_numbers *numbers;                  /* of the storages */
	PyObject *rows;                                  /* by number */
	PyObject *indices, *owners, *tensors, *versions; /* lists that are appended to */
};

/* defer.c; the first one between enter() and leave(). Marks what of a save may be copied behind its
 * call: of what the optimizer owns, or of what a keeper has. 0, or -1 with an exception set. */
int sfr_py_observer_defer(struct sfr_py_observer *self, PyObject *groups, PyObject *state,
			  const struct sfr_py_marks *marks);
int sfr_py_defer_kept(PyObject *tensors, const struct sfr_py_marks *marks);

/* look.c; all between enter() and leave(). A step has ended: records undecided storages
 * as far as the budget goes; all of them without looking at the budget after an enrolment. */
void sfr_py_observer_record(struct sfr_py_observer *self);
void sfr_py_observer_record_all(struct sfr_py_observer *self);
/* The next step's gate: compares what was recorded, once, as far as the budget goes. */
void sfr_py_observer_compare(struct sfr_py_observer *self);
uint64_t sfr_py_clock_ns(clockid_t id);

#endif
