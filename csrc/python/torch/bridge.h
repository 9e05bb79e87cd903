/* Describes or makes many tensors in one call. bridge.c implements it.
 *
 * A row describes one tensor in int64 words: a header, ndim sizes, ndim strides. Offsets and
 * strides are in elements, lengths in bytes. Dtypes are torch's numbers. */
#ifndef SFR_PY_TORCH_BRIDGE_H
#define SFR_PY_TORCH_BRIDGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The header that `describe` writes. */
enum {
	SFR_ROW_OFFSET, /* first element, in the storage */
	SFR_ROW_NBYTES, /* length of the storage */
	SFR_ROW_DTYPE,
	SFR_ROW_NDIM,
	SFR_ROW_HEADER
};

/* The header that `make` reads. */
enum {
	/* index of an earlier row of the same dtype whose storage it shares; -1: a storage of its
	 * own */
	SFR_NEW_OVER,
	SFR_NEW_BASE, /* address and length of its own storage, at least one element; else 0 */
	SFR_NEW_NBYTES,
	SFR_NEW_OFFSET,
	SFR_NEW_DTYPE,
	SFR_NEW_NDIM,
	SFR_NEW_HEADER
};

/* Keeps memory while storages use it. Each storage counts one, and so does the maker: with __atomic
 * operations, from any thread. The last one calls `last`, on any thread, without the interpreter
 * lock. */
struct sfr_hold {
	uint64_t count;
	void (*last)(struct sfr_hold *self);
};

static inline void sfr_hold_put(struct sfr_hold *hold)
{
	if (__atomic_sub_fetch(&hold->count, 1, __ATOMIC_ACQ_REL) == 0)
		hold->last(hold);
}

/* A tensor as a handle of torch's C shim, an at::Tensor. Callers hold the interpreter lock, and no
 * function here releases it. */
struct AtenTensorOpaque;

/* Finds torch's functions once, before any other call here. 0, or -1 with an ImportError set: torch
 * has not been imported or is too old. */
int sfr_py_bridge_load(void);

/* Writes a tensor's row of at most `room` words. Returns the words it needs (call again with more
 * room if that exceeds `room`), or -1 if torch refuses. */
int64_t sfr_py_bridge_describe(struct AtenTensorOpaque *tensor, int64_t *row, int64_t room);

/* Returns the address of the tensor's storage, `ahead` bytes before the tensor's first element; a
 * copy-on-write storage has its own memory afterwards. 0 if there is no memory or no element, or
 * torch refuses. */
uint64_t sfr_py_bridge_address(struct AtenTensorOpaque *tensor, uint64_t ahead);

/* Returns whether this torch makes tensors over given memory (from 2.11 on). */
bool sfr_py_bridge_can_make(void);

/* Makes a tensor in host memory for each row; the new storages keep `hold`. None requires a
 * gradient. 0; or -1, and there are no new tensors. */
int sfr_py_bridge_make(const int64_t *rows, size_t nr, struct sfr_hold *hold, void **tensors);

/* Releases handles that count one reference each, like those of `make`. */
void sfr_py_bridge_drop(void *const *tensors, size_t nr);

#endif
