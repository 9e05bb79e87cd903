/* What is asked of many tensors, or made many times, in one call: see bridge.c.
 *
 * A row is a run of int64 words, one for each tensor: a header, then ndim sizes, then ndim strides.
 * Offsets and strides are in elements, lengths in bytes. Dtypes are torch's numbers of them.
 */
#ifndef SFR_PY_TORCH_BRIDGE_H
#define SFR_PY_TORCH_BRIDGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What `describe` says of a tensor. */
enum {
	SFR_ROW_OFFSET, /* of the first element in the storage */
	SFR_ROW_NBYTES, /* of the storage */
	SFR_ROW_DTYPE,
	SFR_ROW_NDIM,
	SFR_ROW_HEADER
};

/* What `make` is told. */
enum {
	SFR_NEW_OVER, /* number of an earlier row of the same dtype, whose storage it is to share;
		       * -1: a storage of its own */
	SFR_NEW_BASE, /* where that begins, and its length: at least one element; else 0 */
	SFR_NEW_NBYTES,
	SFR_NEW_OFFSET,
	SFR_NEW_DTYPE,
	SFR_NEW_NDIM,
	SFR_NEW_HEADER
};

/* Keeps memory while storages are over it. Each of them counts one, and so does whoever made the
 * hold: with __atomic operations, from any thread. The last one to go calls `last`, on any thread
 * and without the interpreter lock. */
struct sfr_hold {
	uint64_t count;
	void (*last)(struct sfr_hold *self);
};

static inline void sfr_hold_put(struct sfr_hold *hold)
{
	if (__atomic_sub_fetch(&hold->count, 1, __ATOMIC_ACQ_REL) == 0)
		hold->last(hold);
}

/* A tensor is given by a handle of torch's C shim, an at::Tensor. Whoever calls holds the interpreter
 * lock; no function lets go of it. */
struct AtenTensorOpaque;

/* Finds torch's functions, once. 0; or -1 with an ImportError set: torch has not been imported, or is
 * too old. The others may be called after that. */
int sfr_py_bridge_load(void);

/* Writes a tensor's row, where there is room for `room` words. Returns the number of words it needs (if
 * that is more than `room`, make room and call again), or -1 when torch has refused. */
int64_t sfr_py_bridge_describe(struct AtenTensorOpaque *tensor, int64_t *row, int64_t room);

/* Where the memory of a tensor's storage begins, `ahead` bytes before the tensor's first element; a
 * copy-on-write storage owns its memory afterwards. 0 where there is none, where the tensor has no
 * element, and where torch refuses. */
uint64_t sfr_py_bridge_address(struct AtenTensorOpaque *tensor, uint64_t ahead);

/* Whether this torch makes tensors over given memory: from 2.11 on. */
bool sfr_py_bridge_makes(void);

/* Makes a tensor in host memory for each row; the storages among them keep `hold`. None requires a
 * gradient. 0; or -1, and there are no new tensors. */
int sfr_py_bridge_make(const int64_t *rows, size_t nr, struct sfr_hold *hold, void **tensors);

/* Gives handles back that count one reference each, as those of `make` do. */
void sfr_py_bridge_drop(void *const *tensors, size_t nr);

#endif
