/* Declarations shared by the files of the skeleton; skeleton.c has the overview.
 *
 *   torch_types.c    objects of torch, and which tensors are plain
 *   skeleton.c       the collector: the pickler's persistent_id, and what it finds
 *   storages.c       the storages of found tensors
 *   prefetch.c       loads the next tensors into the caches, in the order of the last save
 *   pickle_scan.c    finds the plain tensors' positions in the finished pickle
 *   pickle_splice.c  writes the opcodes of the plain tensors at these positions
 *   copies.c         snapshots: finds tensors without a pickler, and rebuilds them over copies
 *   containers.c     snapshots: walks into containers, and rebuilds them around the new tensors */
#ifndef SFR_PY_SKELETON_H
#define SFR_PY_SKELETON_H

#include <stdbool.h>

#include "torch/bridge.h"
#include "torch/map.h"
#include "torch/numbers.h"
#include "module.h"

/* ---- torch_types.c ------------------------------------------------------ */

/* The objects of torch that TorchTypes needs: X(enum constant, keyword argument of TorchTypes).
 * Functions and methods are described as: argument -> result. */
#define SFR_PY_ITEM_LIST(X)                                                                        \
	X(TENSOR, "tensor")                   /* torch.Tensor */                                   \
	X(PARAMETER, "parameter")             /* torch.nn.Parameter */                             \
	X(TYPED_STORAGE, "typed_storage")     /* torch.storage.TypedStorage */                     \
	X(STORAGE_CLASSES, "storage_classes") /* the set that torch.is_storage uses */             \
	/* methods without arguments */                                                            \
	X(GETSTATE, "getstate")               /* object.__getstate__ */                            \
	X(UNTYPED_STORAGE, "untyped_storage") /* tensor -> its storage */                          \
	X(DATA_PTR, "data_ptr")               /* storage -> its address */                         \
	X(NBYTES, "nbytes")                   /* storage -> its length */                          \
	/* functions */                                                                            \
	X(WHERE, "where") /* tensor -> sfr_py_memory_kind, for its dispatch keys */                \
	X(STORAGE_TUPLE, "storage_tuple") /* (collector, storage) -> persistent id */              \
	X(LOCATION, "location")           /* storage -> its location tag, such as "cuda:0" */      \
	X(DEVICE_INDEX, "device_index")   /* CUDA tensor -> its device's number */                 \
	X(FROM_HANDLES, "from_handles")   /* capsules -> tensors; consumes the handles */          \
	/* getset descriptors, up to the end of the list */                                        \
	X(REQUIRES_GRAD, "requires_grad")                                                          \
	X(BACKWARD_HOOKS, "backward_hooks")

enum sfr_py_torch_item {
#define X(name, keyword) SFR_PY_##name,
	SFR_PY_ITEM_LIST(X)
#undef X
		SFR_PY_NR_ITEMS
};
#define SFR_PY_FIRST_METHOD SFR_PY_GETSTATE
#define SFR_PY_LAST_METHOD SFR_PY_NBYTES
#define SFR_PY_FIRST_GETTER SFR_PY_REQUIRES_GRAD

#define SFR_PY_MAX_DTYPES 32
#define SFR_PY_MAX_DTYPE_NUMBERS 64 /* torch's numbers of dtypes are below this */
#define SFR_PY_MAX_KNOWN_KEYS 16    /* sets of dispatch keys that are remembered */

/* A dtype with a legacy storage class. */
struct sfr_py_dtype {
	PyObject *dtype;
	PyObject *storage_class; /* a str, such as "FloatStorage" */
	const char *name;        /* the same in UTF-8, borrowed from storage_class */
	size_t name_len;
	uint32_t itemsize; /* bytes of an element */
};

/* Where all tensors with the same dispatch keys are. NOT_PLAIN: no such tensor is plain. */
enum sfr_py_memory_kind { SFR_PY_NOT_PLAIN = -1, SFR_PY_ON_HOST, SFR_PY_ON_DEVICE };
struct sfr_py_known_dispatch_keys {
	uint64_t keys;
	enum sfr_py_memory_kind where;
};

/* The prefetch order (prefetch.c): addresses of the objects that the last save met, in that order.
 * The objects may be gone, so the addresses are only prefetched. */
struct sfr_py_prefetch_entry {
	uintptr_t tensor, impl;     /* a tensor's Python object and its TensorImpl */
	uintptr_t wrapper, storage; /* its storage's Python object and StorageImpl */
	uint64_t memory;            /* the storage's bytes */
	uintptr_t last_dict;        /* the dict met before the tensor: probably has it; 0: none */
};
struct sfr_py_prefetch_order {
	struct sfr_py_prefetch_entry *entries; /* entries[n] is for the tensor with number n */
	size_t nr, room;
};

/* The object TorchTypes. */
struct sfr_py_torch_types {
	PyObject_HEAD
	/* arrays by enum sfr_py_torch_item */
	PyObject *item[SFR_PY_NR_ITEMS];         /* the object itself */
	descrgetfunc descr_get[SFR_PY_NR_ITEMS]; /* tp_descr_get of a descriptor; else NULL */
	/* the C function behind a descriptor or a method, for objects of c_type; NULL: none */
	const PyGetSetDef *c_getter[SFR_PY_NR_ITEMS];
	PyCFunction c_method[SFR_PY_NR_ITEMS];
	PyTypeObject *c_type[SFR_PY_NR_ITEMS];

	struct sfr_py_dtype dtype[SFR_PY_MAX_DTYPES];
	uint32_t nr_dtypes;
	/* by torch's number of a dtype: 1 + its index in `dtype`; 0: none */
	uint8_t dtype_index_plus_1[SFR_PY_MAX_DTYPE_NUMBERS];
	struct sfr_py_known_dispatch_keys known_keys[SFR_PY_MAX_KNOWN_KEYS];
	uint32_t nr_known_keys;
	PyObject *cpu;                      /* the str "cpu" */
	struct sfr_py_prefetch_order order; /* the order of the last save */
};

/* A tensor that the pickler or a walk met. */
struct sfr_py_found_tensor {
	PyObject *object; /* a reference */
	bool plain;       /* torch_types.c explains it; if false, the fields below are unused */
	bool parameter, requires_grad, on_host;
	uint8_t dtype;      /* index in torch->dtype */
	uint32_t storage;   /* number of the storage */
	const int64_t *row; /* description by the bridge (torch/bridge.h); NULL if not plain */
};

/* Examines found->object, whose class is Tensor or Parameter itself, and sets the four booleans.
 * sfr_py_describe_tensor later checks dtype and storage, and may clear `plain`. Returns -1 only
 * with an exception that must propagate. */
int sfr_py_examine_tensor(struct sfr_py_torch_types *torch, struct sfr_py_found_tensor *found);
/* Handles an exception of sfr_py_ask_torch. Usually clears it and returns 0: the caller treats the
 * tensor as not plain, and its __reduce_ex__ raises the error. Returns -1 with the exception set if
 * it must propagate: MemoryError, or not an Exception. */
int sfr_py_clear_ordinary_error(void);
/* Asks torch about `object`: returns the value of a getset descriptor, or the result of a method or
 * function. */
PyObject *sfr_py_ask_torch(const struct sfr_py_torch_types *torch, enum sfr_py_torch_item item,
			   PyObject *object);
/* Sets *out to the result of sfr_py_ask_torch, which must be an int. Returns 0, or -1 with an
 * exception. */
int sfr_py_ask_u64(const struct sfr_py_torch_types *torch, enum sfr_py_torch_item item,
		   PyObject *object, uint64_t *out);
int sfr_py_add_torch_types(PyObject *module);

/* ---- storages.c --------------------------------------------------------- */

/* A storage: record data/<number> of the file. */
struct sfr_py_storage {
	uint64_t storage_impl; /* address of the StorageImpl */
	uint64_t addr, nbytes;
	PyObject *location;     /* location tag, a str; NULL if no plain tensor has the storage */
	PyObject *dtype;        /* borrowed: the dtype that was checked last, or NULL */
	uint32_t device_plus_1; /* n: CUDA device n - 1; 0: the host or elsewhere */
	bool on_host;
	bool range_known; /* addr and nbytes are set */
};

/* Memory for rows of the bridge. It never moves, because found[].row points into it. */
struct sfr_py_row_memory {
	struct sfr_py_row_memory *next;
	size_t used, room; /* in words */
	int64_t words[];   /* `room` of them */
};

/* The object Collector: what one save or snapshot has found so far. */
struct sfr_py_collector {
	PyObject_HEAD
	struct sfr_py_torch_types *torch;
	/* false: no tensor is plain, because something is active that only torch's own path
	 * handles, such as a dispatch mode */
	bool fast_path;
	/* no package has registered its own location tags for storages in host memory, or on CUDA
	 * devices; so all storages on one device have the same tag */
	bool plain_cpu, plain_cuda;
	bool mixed_dtypes_allowed; /* for a snapshot: tensors may view bytes as different dtypes */
	struct sfr_py_found_tensor *found;
	size_t nr_found, found_room;
	struct sfr_py_map index_by_tensor; /* tensor -> its index in `found` */
	struct sfr_py_storage *storages;
	size_t nr_storages, storages_room;
	struct sfr_py_storage_numbers *numbers; /* StorageImpl -> number of the storage */
	struct sfr_py_map dtype_by_addr;        /* address of bytes -> their dtype, borrowed */
	PyObject *storage_list;                 /* list of UntypedStorage, by number */
	size_t last_tagged_storage;     /* number of the device storage that got its tag last */
	struct sfr_py_row_memory *rows; /* newest first */
	struct sfr_py_prefetch_order old_order, new_order; /* of the previous save, and this one */
	uintptr_t last_dict; /* address of the dict that the pickler met last; 0: none */
	bool finished;       /* finish() was called */
};

/* Sets *number to the number of the storage whose StorageImpl has the address `storage_impl`. Adds
 * the storage, with a reference to it, if it is met for the first time. */
int sfr_py_find_or_add_storage(struct sfr_py_collector *c, PyObject *storage, uint64_t storage_impl,
			       bool on_host, size_t *number);
/* Fails, with torch's message, if the bytes at `addr` were already met as another dtype. */
int sfr_py_require_same_dtype(struct sfr_py_collector *c, uint64_t addr, PyObject *dtype);
/* Describes a plain tensor through the bridge and finds its storage: sets its row, dtype and
 * storage. Clears `plain` if the dtype has no legacy storage class, or the storage no memory. */
int sfr_py_describe_tensor(struct sfr_py_collector *c, struct sfr_py_found_tensor *tensor);
/* Asks a storage for its address and length, and stores them in its entry. */
int sfr_py_ask_storage_range(struct sfr_py_collector *c, size_t number);
/* Resizes an array to `new_room` items of `item_len` bytes, and sets *room to `new_room`. */
int sfr_py_grow_array(void **array, size_t new_room, size_t *room, size_t item_len);
/* Makes room for one more item: doubles the array if its `used` items fill its *room. */
static inline int sfr_py_make_room(void **array, size_t used, size_t *room, size_t item_len)
{
	if (used < *room)
		return 0;
	return sfr_py_grow_array(array, *room == 0 ? 64 : 2 * *room, room, item_len);
}

/* Adds a tensor that is met for the first time, examines and describes it, and sets *number to its
 * index. `exact`: its class is Tensor or Parameter itself. */
int sfr_py_collector_add_tensor(struct sfr_py_collector *c, PyObject *object, bool exact,
				size_t *number);

/* ---- copies.c, containers.c: methods of the collector ------------------- */

PyObject *sfr_py_collector_collect_tensors(PyObject *self, PyObject *nodes);
PyObject *sfr_py_collector_make_copies(PyObject *self, PyObject *args);
PyObject *sfr_py_collector_walk_containers(PyObject *self, PyObject *args);

/* ---- prefetch.c: loads the next tensors into the processor's caches -------- */

/* Moves the last save's prefetch order from TorchTypes to the collector, so that no other collector
 * uses it meanwhile. Prefetches the first tensors. */
void sfr_py_prefetch_order_take(struct sfr_py_collector *c);
/* Prefetches a later tensor. Called before each tensor is examined. */
void sfr_py_prefetch_later_tensor(const struct sfr_py_collector *c);
/* Adds the tensor that gets the next number to this save's order. `wrapper` is the Python object of
 * its storage. */
int sfr_py_prefetch_order_add(struct sfr_py_collector *c, PyObject *tensor, PyObject *wrapper,
			      const struct sfr_py_storage *storage);
/* Moves this save's prefetch order to TorchTypes, for the next save. */
void sfr_py_prefetch_order_store(struct sfr_py_collector *c);
void sfr_py_prefetch_order_fini(struct sfr_py_prefetch_order *order);

/* ---- pickle_splice.c ----------------------------------------------------------- */

/* The input of sfr_py_splice, all borrowed. */
struct sfr_py_splice {
	const unsigned char *in; /* the pickle, with `number BINPERSID` in place of plain tensors */
	size_t len;
	const struct sfr_py_torch_types *torch;
	const struct sfr_py_found_tensor *found;
	size_t nr_found;
	const struct sfr_py_storage *storages;
};
/* Returns the pickle with the tensors written in, as bytes. */
PyObject *sfr_py_splice(const struct sfr_py_splice *job);

#endif
