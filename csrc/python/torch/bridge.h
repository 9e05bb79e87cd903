/* Describes or makes many tensors in one call. bridge.c implements it.
 *
 * A row describes one tensor in int64 words: a header, ndim sizes, ndim strides. Offsets and
 * strides are in elements, lengths in bytes. Dtypes are torch's numbers. */
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
	/* index of an earlier row of the same dtype whose storage it shares; -1: a storage of its
	 * own */
	SFR_NEW_OVER,
	SFR_NEW_BASE,   /* address of its own storage; 0 if it shares one */
	SFR_NEW_NBYTES, /* length of its own storage, at least one element; 0 if it shares one */
	SFR_NEW_OFFSET,
	SFR_NEW_DTYPE,
	SFR_NEW_NDIM,
	SFR_NEW_HEADER /* the number of words of the header */
};

/* Keeps memory alive while storages use it: `count` is the number of these storages, plus one while
 * the code that makes them runs. Any thread may change the count, with __atomic operations. The
 * thread that drops it to 0 calls `last`, which frees the memory, without the interpreter lock. */
struct sfr_keepalive {
	uint64_t count;
	void (*last)(struct sfr_keepalive *self);
};

/* Drops one count. */
static inline void sfr_keepalive_put(struct sfr_keepalive *keepalive)
{
	if (__atomic_sub_fetch(&keepalive->count, 1, __ATOMIC_ACQ_REL) == 0)
		keepalive->last(keepalive);
}

/* A tensor in torch's C shim: torch's at::Tensor, used by its address. Callers of the functions
 * below hold the interpreter lock, and no function releases it. */
struct AtenTensorOpaque;

/* Finds torch's functions once, before any other call here. 0, or -1 with an ImportError set: torch
 * has not been imported or is too old. */
int sfr_py_bridge_load(void);

/* Writes the row that describes a tensor to `row`, which has room for `room` words. Returns how
 * many words the row needs, or -1 if torch refuses. If it needs more than `room` words, nothing is
 * written: call again with more room. */
int64_t sfr_py_bridge_describe(struct AtenTensorOpaque *tensor, int64_t *row, int64_t room);

/* Returns the address of the tensor's storage: that of the first element less `ahead`, the number
 * of bytes of the storage before this element. A copy-on-write storage has its own memory
 * afterwards. Returns 0 if there is no memory or no element, or torch refuses. */
uint64_t sfr_py_bridge_address(struct AtenTensorOpaque *tensor, uint64_t ahead);

/* Returns whether this torch makes tensors over given memory (from 2.11 on). */
bool sfr_py_bridge_can_make(void);

/* Makes a tensor over given host memory for each of `nr` rows, and stores the tensors' handles in
 * `tensors`. Each new storage adds 1 to the count of `keepalive`. No tensor requires a gradient.
 * Returns 0; or -1, and then there are no new tensors. */
int sfr_py_bridge_make(const int64_t *rows, size_t nr, struct sfr_keepalive *keepalive,
		       void **tensors);

/* Releases `nr` handles, each of which counts one reference, like those of sfr_py_bridge_make. */
void sfr_py_bridge_drop(void *const *tensors, size_t nr);

#endif
