/* Describes and makes tensors. bridge.c implements it.
 *
 * A row describes a tensor in int64 words: a header, ndim sizes, ndim strides. Offsets and strides
 * are in elements, lengths in bytes. Dtypes are torch's numbers. */
#ifndef SFR_PY_TORCH_BRIDGE_H
#define SFR_PY_TORCH_BRIDGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Indices of the words of the header that sfr_py_bridge_describe_tensor writes. */
enum {
	SFR_ROW_OFFSET, /* offset of the first element in the storage */
	SFR_ROW_NBYTES, /* length of the storage */
	SFR_ROW_DTYPE,
	SFR_ROW_NDIM,
	SFR_ROW_HEADER /* the number of words of the header */
};

/* Indices of the words of the header that sfr_py_bridge_make_tensors reads. */
enum {
	SFR_NEW_OVER,   /* index of the row, before this one, whose storage is shared; -1: none */
	SFR_NEW_BASE,   /* address of the row's own storage; 0 if it shares one */
	SFR_NEW_NBYTES, /* length of the own storage, at least one element; 0 if it shares one */
	SFR_NEW_OFFSET, /* offset of the first element in the storage */
	SFR_NEW_DTYPE,
	SFR_NEW_NDIM,
	SFR_NEW_HEADER /* the number of words of the header */
};

/* Keeps memory alive while storages use it. */
struct sfr_keepalive {
	/* number of storages that use the memory, plus one while storages are made; changed by any
	 * thread, with __atomic operations */
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
 * many words the row needs; if they are more than `room`, nothing was written. Returns -1 if torch
 * refuses. */
int64_t sfr_py_bridge_describe_tensor(struct AtenTensorOpaque *tensor, int64_t *row, int64_t room);

/* Returns the address of the tensor's storage. `offset` is the offset of the tensor's first element
 * in the storage, in bytes. A copy-on-write storage has its own memory afterwards. Returns 0 if
 * there is no memory or no element, or torch refuses. */
uint64_t sfr_py_bridge_storage_address(struct AtenTensorOpaque *tensor, uint64_t offset);

/* Returns whether this torch makes tensors over given memory (from 2.11 on). */
bool sfr_py_bridge_can_make_tensors(void);

/* Makes a tensor over given host memory for each of `nr` rows, and stores the handles in `tensors`.
 * Each new storage adds 1 to the count of `keepalive`. No tensor requires a gradient. Returns 0, or
 * -1 without an exception and without any tensor. */
int sfr_py_bridge_make_tensors(const int64_t *rows, size_t nr, struct sfr_keepalive *keepalive,
			       void **tensors);

/* Releases `nr` handles, each with its reference to a tensor. */
void sfr_py_bridge_release_handles(void *const *tensors, size_t nr);

#endif
