/* What crosses the files of the skeleton; skeleton.c has the overview.
 *
 *   torch_types.c    what torch is made of, and which tensors are plain
 *   skeleton.c       the collector: the pickler's persistent_id, and what it has found
 *   storages.c       the storages of what was found
 *   prefetch.c       what the last save met, to be in the caches when this one comes to it
 *   pickle_scan.c    finds the plain tensors' places in the finished pickle
 *   pickle_splice.c  puts their opcodes there
 *   copies.c         for snapshots: finds tensors without a pickler, and makes them again over copies
 *   containers.c     likewise: the containers that they are in
 */
#ifndef SFR_PY_SKELETON_H
#define SFR_PY_SKELETON_H

#include <stdbool.h>

#include "torch/bridge.h"
#include "torch/map.h"
#include "torch/numbers.h"
#include "module.h"

/* ---- torch_types.c ------------------------------------------------------ */

/* Objects of torch that TorchTypes is made from; the names are its keyword arguments. */
#define SFR_PY_PART_LIST(X)                                                                        \
	X(TENSOR, "tensor")                   /* torch.Tensor */                                   \
	X(PARAMETER, "parameter")             /* torch.nn.Parameter */                             \
	X(TYPED_STORAGE, "typed_storage")     /* torch.storage.TypedStorage */                     \
	X(STORAGE_CLASSES, "storage_classes") /* the set torch.is_storage looks in */              \
	/* methods without arguments */                                                            \
	X(GETSTATE, "getstate")               /* object.__getstate__ */                            \
	X(UNTYPED_STORAGE, "untyped_storage") /* tensor -> its storage */                          \
	X(DATA_PTR, "data_ptr")               /* of a storage: its address */                      \
	X(NBYTES, "nbytes")                   /* of a storage: its length */                       \
	/* functions */                                                                            \
	X(PLACE, "place")                 /* tensor -> sfr_py_where, of all with its keys */       \
	X(STORAGE_TUPLE, "storage_tuple") /* (collector, storage) -> persistent id */              \
	X(LOCATION, "location")           /* storage -> its location tag */                        \
	X(DEVICE_INDEX, "device_index")   /* CUDA tensor -> its device's number */                 \
	X(FROM_HANDLES, "from_handles")   /* capsules -> tensors; takes the handles over */        \
	/* from here on getset descriptors */                                                      \
	X(REQUIRES_GRAD, "requires_grad")                                                          \
	X(BACKWARD_HOOKS, "backward_hooks")

enum sfr_py_part {
#define X(name, keyword) SFR_PY_##name,
	SFR_PY_PART_LIST(X)
#undef X
		SFR_PY_NR_PARTS
};
#define SFR_PY_FIRST_METHOD SFR_PY_GETSTATE
#define SFR_PY_LAST_METHOD SFR_PY_NBYTES
#define SFR_PY_FIRST_GETTER SFR_PY_REQUIRES_GRAD

#define SFR_PY_MAX_DTYPES 32
#define SFR_PY_MAX_NUMBERS 64 /* of torch's for dtypes */
#define SFR_PY_MAX_PLACES 16  /* sets of dispatch keys that are remembered */

/* A dtype that has a legacy storage class. */
struct sfr_py_dtype {
	PyObject *dtype;
	PyObject *storage_class; /* "FloatStorage", a str */
	const char *name;        /* its UTF-8, as long as it */
	size_t name_len;
	uint32_t itemsize;
};

/* Where the tensors with some dispatch keys are. */
enum sfr_py_where { SFR_PY_NOT_PLAIN = -1, SFR_PY_ON_HOST, SFR_PY_ON_DEVICE };
struct sfr_py_place {
	uint64_t keys;
	enum sfr_py_where where;
};

/* A trail: in which order a save met its tensors, and where each is: addresses to prefetch, which may
 * be stale. */
struct sfr_py_step {
	uintptr_t tensor, impl;     /* Python's object and the TensorImpl */
	uintptr_t wrapper, storage; /* likewise of the storage */
	uintptr_t holder;           /* the dict that the pickler went into before; 0: none */
};
struct sfr_py_trail {
	struct sfr_py_step *steps; /* by number of the found tensor */
	size_t nr, room;
};

struct sfr_py_torch_types {
	PyObject_HEAD
	PyObject *part[SFR_PY_NR_PARTS];
	descrgetfunc get[SFR_PY_NR_PARTS]; /* of the descriptors */
	/* What is behind descriptors and methods of these types; NULL where it is not in C. */
	PyTypeObject *type[SFR_PY_NR_PARTS];
	const PyGetSetDef *getter[SFR_PY_NR_PARTS];
	PyCFunction method[SFR_PY_NR_PARTS];
	struct sfr_py_dtype dtype[SFR_PY_MAX_DTYPES];
	uint32_t nr_dtypes;
	uint8_t dtype_at
		[SFR_PY_MAX_NUMBERS]; /* 1 + the place of torch's number for it, 0: not there */
	struct sfr_py_place place[SFR_PY_MAX_PLACES];
	uint32_t nr_places;
	PyObject *cpu;             /* "cpu" */
	struct sfr_py_trail trail; /* of the last save */
};

/* One tensor that the pickler met. */
struct sfr_py_found {
	PyObject *object;
	const int64_t *row; /* of the bridge; NULL unless plain */
	uint32_t storage;   /* number of its storage, likewise */
	uint8_t dtype;      /* in torch->dtype, when plain */
	bool plain, parameter, requires_grad, on_host;
};

/* Fills `found` for an exact Tensor or Parameter; found->plain says whether the splice can
 * write it, for all that its dtype and storage do not say (sfr_py_describe). 0, or -1 with an
 * exception (of the kinds that must come through) set. */
int sfr_py_examine(struct sfr_py_torch_types *torch, struct sfr_py_found *found);
/* What a tensor refuses to tell, its __reduce_ex__ refuses in its own words: clears the exception.
 * 0, or -1 where it is of the kinds that must come through. */
int sfr_py_refused(void);
/* The attribute behind a getset descriptor, or what a method without arguments or a function answers,
 * without the search for it. A new reference. */
PyObject *sfr_py_ask(const struct sfr_py_torch_types *torch, enum sfr_py_part part,
		     PyObject *object);
/* The same, as a number. 0 or -1. */
int sfr_py_ask_u64(const struct sfr_py_torch_types *torch, enum sfr_py_part part, PyObject *object,
		   uint64_t *out);
/* Adds the type TorchTypes. 0 or -1. */
int sfr_py_add_torch_types(PyObject *module);

/* ---- storages.c --------------------------------------------------------- */

/* One storage, record data/<number>. */
struct sfr_py_storage {
	uint64_t identity; /* address of the StorageImpl */
	uint64_t addr, nbytes;
	PyObject *location; /* a str; NULL if only the general road has met the storage */
	PyObject *dtype;    /* borrowed: what the last check of types saw; NULL: nothing yet */
	uint32_t device;    /* of struct sfr_source; 0 for the host, and for elsewhere */
	bool on_host;
	bool known; /* addr and nbytes are set */
};

/* Room for rows of the bridge, which stay where they are. */
struct sfr_py_rows {
	struct sfr_py_rows *next;
	size_t used, room; /* words */
	int64_t words[];
};

/* What one save has found. */
struct sfr_py_collector {
	PyObject_HEAD
	struct sfr_py_torch_types *torch;
	bool plain_road; /* false: something is in force that only the general road obeys */
	bool plain_cpu;  /* true: nobody has changed what torch tags host storages with */
	bool plain_cuda; /* likewise of CUDA devices: all of one device have one tag */
	bool any_dtypes; /* bytes may be seen as several: they are not saved as they are */
	struct sfr_py_found *found;
	size_t nr_found, found_room;
	struct sfr_py_map found_at; /* tensor -> number */
	struct sfr_py_storage *storages;
	size_t nr_storages, storages_room;
	struct sfr_py_numbers *numbers; /* of the storages */
	struct sfr_py_map dtype_at;     /* address of bytes -> dtype they are seen as (borrowed) */
	PyObject *storage_list;         /* list of UntypedStorage, by number */
	size_t tagged;                  /* number of the storage on a device that was tagged last */
	struct sfr_py_rows *rows;       /* found[].row points into them */
	struct sfr_py_trail before, trail; /* of the save before, and of this one */
	uintptr_t holder;                  /* the dict met last */
	bool finished;
};

/* The number of a storage, new or known. 0, or -1 with an exception set, as all of these. */
int sfr_py_enter_storage(struct sfr_py_collector *c, PyObject *storage, uint64_t identity,
			 bool on_host, size_t *number);
/* Refuses bytes that are seen as two dtypes, in torch's words. */
int sfr_py_check_dtype(struct sfr_py_collector *c, uint64_t addr, PyObject *dtype);
/* Has the bridge describe a plain tensor, and finds its storage; one of another dtype, or whose storage
 * has no memory, is no plain one any more. */
int sfr_py_describe(struct sfr_py_collector *c, struct sfr_py_found *tensor);
/* Asks a storage for its address and length. */
int sfr_py_ask_storage(struct sfr_py_collector *c, size_t number);
/* Gives an array room for `wanted` items. */
int sfr_py_grow(void **array, size_t wanted, size_t *room, size_t item);
/* Doubles an array that is full. */
static inline int sfr_py_make_room(void **array, size_t used, size_t *room, size_t item)
{
	return used < *room ? 0 : sfr_py_grow(array, *room == 0 ? 64 : 2 * *room, room, item);
}

/* Enters a tensor met for the first time (`exact`: no subclass); *number is its place. */
int sfr_py_enter_tensor(struct sfr_py_collector *c, PyObject *object, bool exact, size_t *number);

/* ---- copies.c ----------------------------------------------------------- */

/* Methods of the collector. */
PyObject *sfr_py_collector_collect(PyObject *self, PyObject *nodes);
PyObject *sfr_py_collector_copies(PyObject *self, PyObject *args);

/* ---- containers.c ---------------------------------------------------------- */

PyObject *sfr_py_collector_walk(PyObject *self, PyObject *args);

/* ---- prefetch.c ------------------------------------------------------------ */

/* Takes the last save's trail: no other collector uses it meanwhile. */
void sfr_py_trail_take(struct sfr_py_collector *c);
/* Before the next tensor is examined: has the memory of some to come loaded. */
void sfr_py_trail_look_ahead(const struct sfr_py_collector *c);
/* Notes the tensor that is about to be entered as found. 0, or -1 with an exception set. */
int sfr_py_trail_add(struct sfr_py_collector *c, PyObject *tensor, PyObject *wrapper,
		     uint64_t storage);
/* Leaves the trail to the next save. */
void sfr_py_trail_leave(struct sfr_py_collector *c);
void sfr_py_trail_fini(struct sfr_py_trail *trail);

/* ---- pickle_splice.c ----------------------------------------------------------- */

struct sfr_py_splice {
	const unsigned char *in; /* the pickle, with `number BINPERSID` for plain tensors */
	size_t len;
	const struct sfr_py_torch_types *torch;
	const struct sfr_py_found *found;
	size_t nr_found;
	const struct sfr_py_storage *storages;
};
/* Returns the pickle with the tensors in it as bytes, or NULL with an exception set. */
PyObject *sfr_py_splice(const struct sfr_py_splice *job);

#endif
