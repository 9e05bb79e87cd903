/* Pool memory: blocks, contiguous leases, and the budget of all pools. */
#ifndef SFR_POOL_H
#define SFR_POOL_H

#include "sfr/engine.h"
#include "base/base.h"

/* ---- pool.c ---- */

/* A persistent pool of equal blocks, cut from one reserved address range.
 *
 * Address space for pool_bytes is reserved at once (PROT_NONE). A block gets memory when it is
 * first leased, and only as much as was asked for (rounded up to 2 MiB, at most the block). It
 * keeps the memory until trim or free. Pages are MADV_DONTFORK, MADV_HUGEPAGE where the kernel
 * supports it, and present on return (MADV_POPULATE_WRITE, or touched). */
struct sfr__pool;

/* States of a block; pool.c has the diagram. */
enum sfr__block_state {
	SFR__BLOCK_RESERVED, /* address space, no memory */
	SFR__BLOCK_FREE,     /* has memory, in use by nobody */
	SFR__BLOCK_GROWING,  /* owned by a thread that gives it memory */
	SFR__BLOCK_LEASED,
	SFR__BLOCK_SHRINKING, /* owned by a thread that takes its memory */
	SFR__BLOCK_RETIRED,   /* a copy into it may never end: never used again */
	SFR__NR_BLOCK_STATES
};

struct sfr__block {
	char *mem;               /* page aligned, block_bytes of address space */
	struct sfr__block *next; /* for the owner's use while leased */
	/* The region it is registered in, NULL: none. Belongs to the block's owner, or to the
	 * owners of the region's blocks together. */
	_Atomic(struct sfr__region *) region;
	size_t committed; /* bytes with memory, from mem on; written under pool->mu */
	size_t want;      /* bytes that warm_up or a lease gives it */
	uint32_t index;
	enum sfr__block_state state; /* guarded by pool->mu, like held */
	bool held; /* in a lease that only a caller can return: see sfr__pool_hold */
};

struct sfr__pool_stats {
	uint64_t pool_bytes, block_bytes, committed_bytes, leased_bytes, retired_bytes;
	uint32_t nr_waiters; /* threads that wait for a block */
};

/* Makes a pool of pool_bytes, rounded down to whole blocks; -EINVAL if that is none.
 * sfr__memory_reserve explains `shared` and its errors. */
int sfr__pool_new(uint64_t pool_bytes, uint64_t block_bytes, bool shared, struct sfr__pool **out);
/* Frees the pool. No block may be leased. Accepts NULL. */
void sfr__pool_free(struct sfr__pool *pool);
/* Leases a block with at least `need` bytes of memory (need <= block_bytes), preferring a free
 * block that has it. The waiter with the lowest `seq` (the oldest save) is served first and never
 * overtaken. SFR_EAGAIN when `slice_ns` passes (0: no wait); -ENOMEM when the system has no memory
 * and no block with memory is free or leased; SFR_EEXHAUSTED when snapshots hold every block. */
int sfr__pool_get(struct sfr__pool *pool, uint64_t seq, size_t need, uint64_t slice_ns,
		  struct sfr__block **out);
void sfr__pool_put(struct sfr__pool *pool, struct sfr__block *block);
/* Replaces put for a block that a dead device may still write to: the block and its memory are
 * never used again. */
void sfr__pool_retire(struct sfr__pool *pool, struct sfr__block *block);
/* Returns whether a block for `need` bytes gets all its memory. */
bool sfr__pool_is_whole(const struct sfr__pool *pool, size_t need);
/* Returns the pool's registered regions (pin.c). */
struct sfr__pin *sfr__pool_pin(struct sfr__pool *pool);
/* Pins adjacent blocks that the caller owns, that have all their memory and no region: see
 * sfr__pin_blocks. If a block gets the driver's memory, its own returns to the system. */
void sfr__pool_pin_blocks(struct sfr__pool *pool, struct sfr__block *const *blocks, uint32_t nr);
/* Gives memory to the first blocks, nbytes in all (at most the cap), on up to four threads. */
int sfr__pool_warm_up(struct sfr__pool *pool, uint64_t nbytes);
/* Returns the memory of free blocks to the system. Nothing is made for later saves until the next
 * one begins. */
int sfr__pool_trim(struct sfr__pool *pool);
void sfr__pool_stats(struct sfr__pool *pool, struct sfr__pool_stats *out);

/* ---- supply.c ---- */

/* Surround the time in which a save takes blocks. It can use nr_whole blocks with all their memory
 * at a time; the pool lacks those of them that it does not have. */
void sfr__pool_join(struct sfr__pool *pool, uint32_t nr_whole);
void sfr__pool_leave(struct sfr__pool *pool, uint32_t nr_whole);
/* Makes memory for blocks that the pool lacks. Called after each block that a save has written;
 * `nr_left` more calls follow, and each can make one block. So this call makes only what is lacking
 * beyond those, and the last one makes all that is left. Does nothing while a thread waits for a
 * block, or if the system has no memory. */
void sfr__pool_keep_pace(struct sfr__pool *pool, uint32_t nr_left);
/* Makes the memory of one block that the pool lacks. Returns false if it lacks none, or if a thread
 * waits for a block. */
bool sfr__pool_make(struct sfr__pool *pool);

/* ---- lease.c ---- */

/* Contiguous memory for several items, in whole blocks: one run, or a few where free blocks are
 * apart. */
struct sfr__run_of_blocks {
	uint32_t first;
	uint64_t len; /* bytes in use, from the first block's start */
};
struct sfr__lease {
	struct sfr__run_of_blocks *runs; /* NULL: nothing is leased */
	uint32_t nr_runs;
	uint32_t nr_blocks;
	bool whole;   /* its blocks have all their memory */
	bool retired; /* a copy into it may never end: its blocks are never used again */
};

/* Leases memory for `nr` items of `lens` bytes, all or nothing. Each item is contiguous and aligned
 * to SFR_ALIGN; addrs[i] becomes its address (NULL if lens[i] is 0). On success the lease is held.
 *
 *     whole    give the blocks all their memory, so that they can be registered
 *     nr_own   how many of the saves in flight wait for the caller itself
 *
 * Threads in sfr__pool_get are served first. One block is left for saves while any of them, apart
 * from those `nr_own`, needs blocks (sfr__pool_join).
 *
 * SFR_EAGAIN when `slice_ns` passes (0: no wait). SFR_EEXHAUSTED when the items do not fit with
 * the leases that are held, so that only their holders could end the wait. -ENOMEM. */
int sfr__pool_lease(struct sfr__pool *pool, const uint64_t *lens, uint32_t nr, bool whole,
		    uint32_t nr_own, uint64_t slice_ns, char **addrs, struct sfr__lease *out);
/* Pins the blocks of a `whole` lease without moving them, as far as the system allows, and notes
 * which stay pageable. The calling thread needs a CUDA context. One thread at a time. Returns
 * whether all blocks are pinned. */
bool sfr__pool_pin_lease(struct sfr__pool *pool, const struct sfr__lease *lease);
/* Returns the file that the pool's memory belongs to, and the offset of `mem` in it; -1: the memory
 * is private. */
int sfr__pool_file(const struct sfr__pool *pool, const char *mem, uint64_t *off);
/* Returns whether the address is in the pool. */
bool sfr__pool_has(const struct sfr__pool *pool, const char *mem);
/* Returns how many of the `len` bytes at `mem`, in a lease, one device copy may write, and whether
 * they are pinned. */
size_t sfr__pool_span(const struct sfr__pool *pool, const char *mem, size_t len, bool *pinned);
/* Sets whether a user holds the lease, as after sfr__pool_lease. A lease that is not held is given
 * back without a call by a user, so other threads may wait for it. Idempotent. */
void sfr__pool_hold(struct sfr__pool *pool, const struct sfr__lease *lease, bool held);
/* Gives the lease's blocks back to the pool, or retires them, and empties the lease. */
void sfr__pool_unlease(struct sfr__pool *pool, struct sfr__lease *lease);
/* Sets whether forked children get the lease's memory; at first they do not. 0 or -errno. */
int sfr__pool_share(struct sfr__pool *pool, const struct sfr__lease *lease, bool shared);

/* Returns how often blocks of the pool changed from one state to another; for tests. */
uint64_t sfr__pool_moves(struct sfr__pool *pool, enum sfr__block_state from,
			 enum sfr__block_state to);

/* ---- budget.c ---- */

/* Takes the cap of a default pool out of the budget (struct sfr_engine_opts). The engine gives the
 * same number back when its pool is gone. */
uint64_t sfr__budget_take(const struct sfr_engine_opts *opts);
void sfr__budget_give(uint64_t bytes);
/* Notes that the pools together have that much more memory (less, if negative). */
void sfr__budget_hold(int64_t bytes);

#endif
