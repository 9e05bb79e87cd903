/* Describes and makes tensors. bridge.c implements it.
 *
 * A row describes a tensor in int64 words: a header, ndim sizes, ndim strides. Offsets and strides
 * are in elements, lengths in bytes. Dtypes are torch's numbers. */
#ifndef SFR_PY_TORCH_BRIDGE_H
#define SFR_PY_TORCH_BRIDGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Indices of the words of the header that sfr_py_bridge_describe writes. */
enum {
	SFR_ROW_OFFSET, /* offset of the first element in the storage */
	SFR_ROW_NBYTES, /* length of the storage */
	SFR_ROW_DTYPE,
	SFR_ROW_NDIM,
	SFR_ROW_HEADER /* the number of words of the header */
};

/* Indices of the words of the header that sfr_py_bridge_make reads. */
enum {
	SFR_NEW_OVER,   /* share the storage of this earlier row, of the same dtype; -1: do not */
	SFR_NEW_BASE,   /* address of a storage that is not shared, else 0 */
	SFR_NEW_NBYTES, /* length of this storage, at least one element, else 0 */
	SFR_NEW_OFFSET, /* offset of the first element in the storage */
	SFR_NEW_DTYPE,
	SFR_NEW_NDIM,
	SFR_NEW_HEADER /* the number of words of the header */
};

/* Keeps memory alive while storages use it. */
struct sfr_keepalive {
	/* storages, plus one while they are made; changed by any thread, with __atomic
	 * operations */
	uint64_t count;
	/* Frees the memory when the count is 0. Called without the interpreter lock. */
	void (*last)(struct sfr_keepalive *self);
};

static inline void sfr_keepalive_put(struct sfr_keepalive *keepalive)
{
	if (__atomic_sub_fetch(&keepalive->count, 1, __ATOMIC_ACQ_REL) == 0)
		keepalive->last(keepalive);
}

/* torch's at::Tensor. Its address is a handle in torch's C shim. Callers of the functions below
 * hold the interpreter lock, and no function releases it. */
struct AtenTensorOpaque;

/* Finds torch's functions, before any other call here. Sets an ImportError if torch has not been
 * imported or is too old. */
int sfr_py_bridge_load(void);

/* Writes the row that describes a tensor to `row`, which has room for `room` words. Returns how
 * many words the row needs, or -1 if torch refuses. Writes nothing if that is more than `room`. */
int64_t sfr_py_bridge_describe(struct AtenTensorOpaque *tensor, int64_t *row, int64_t room);

/* Returns the address of the tensor's storage, whose first `ahead` bytes are before the tensor's
 * first element. A copy-on-write storage has its own memory afterwards. Returns 0 if there is no
 * memory or no element, or torch refuses. */
uint64_t sfr_py_bridge_address(struct AtenTensorOpaque *tensor, uint64_t ahead);

/* Returns whether this torch makes tensors over given memory (from 2.11 on). */
bool sfr_py_bridge_can_make(void);

/* Makes a tensor over given host memory for each of `nr` rows, and stores the handles in `tensors`.
 * Each new storage adds 1 to the count of `keepalive`. No tensor requires a gradient. Returns 0, or
 * -1 without an exception; then no tensor is made. */
int sfr_py_bridge_make(const int64_t *rows, size_t nr, struct sfr_keepalive *keepalive,
		       void **tensors);

/* Releases `nr` handles, each with its reference to a tensor. */
void sfr_py_bridge_drop(void *const *tensors, size_t nr);

#endif
