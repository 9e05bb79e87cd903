/* What _core and the bridge agree on: both are compiled with this, and neither links to the other.
 *
 * A row is a run of int64 words, one for each tensor: a header, then ndim sizes, then ndim strides.
 * Offsets and strides are in elements, lengths in bytes. Dtypes are torch's numbers of them.
 */
#ifndef SFR_BRIDGE_H
#define SFR_BRIDGE_H

#include <stdint.h>

/* What describe() says of a tensor. */
enum {
	SFR_ROW_DATA,   /* address of the first element; 0 for a tensor without elements */
	SFR_ROW_OFFSET, /* of the first element in the storage */
	SFR_ROW_NBYTES, /* of the storage */
	SFR_ROW_DTYPE,
	SFR_ROW_NDIM,
	SFR_ROW_HEADER
};

/* What make() is told. */
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

#endif
