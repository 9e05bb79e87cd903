/* Pool memory: blocks, contiguous leases, and the budget of all pools. */
#ifndef SFR_POOL_H
#define SFR_POOL_H

#include "sfr/engine.h"
#include "base/base.h"

/* ---- pool.c ---- */

/* A persistent pool of equal blocks, which divide one range of address space.
 *
 * Address space for pool_bytes is reserved at once (PROT_NONE). A block gets memory when it is
 * first leased, and only as much as was asked for (rounded up to 2 MiB, at most the block). It
 * keeps the memory until trim or free. Pages are MADV_DONTFORK, and MADV_HUGEPAGE where the kernel
 * supports it. A leased block's pages are present, so that their first use takes no page fault. */
struct sfr__pool;

/* States of a block; pool.c has the diagram. */
enum sfr__block_state {
	SFR__BLOCK_RESERVED,  /* address space, no memory */
	SFR__BLOCK_FREE,      /* has memory, and no owner */
	SFR__BLOCK_GROWING,   /* owned by a thread that gives it memory */
	SFR__BLOCK_LEASED,    /* owned by a save or a snapshot */
	SFR__BLOCK_SHRINKING, /* owned by a thread that returns its memory to the system */
	SFR__BLOCK_RETIRED,   /* a copy into it may never end: never used again */
	SFR__NR_BLOCK_STATES
};

struct sfr__block {
	char *mem;               /* page aligned, block_bytes of address space */
	struct sfr__block *next; /* the next in a list of the pool, or of the block's owner */
	/* The registered region that contains the block, or NULL. Only the block's owner changes
	 * it. */
	_Atomic(struct sfr__region *) region;
	size_t committed; /* bytes with memory, from mem on; written under pool->mu */
	size_t want;      /* bytes of memory that it should have; used by warm_up and leases */
	uint32_t index;
	enum sfr__block_state state; /* guarded by pool->mu, like held */
	bool held; /* in a lease that only a user can give back (sfr__pool_hold) */
};

/* Statistics of a pool. struct sfr_stats (sfr/engine.h) explains the numbers of bytes. */
struct sfr__pool_stats {
	uint64_t pool_bytes, block_bytes, committed_bytes, leased_bytes, retired_bytes;
	uint32_t nr_waiters; /* threads that wait for a block or a lease */
};

/* Makes a pool of pool_bytes, rounded down to whole blocks. Returns 0; -EINVAL if that gives no
 * block, or if block_bytes is not a multiple of a page; -ENOMEM; or an error of
 * sfr__memory_reserve, which explains `shared`. */
int sfr__pool_new(uint64_t pool_bytes, uint64_t block_bytes, bool shared, struct sfr__pool **out);
/* Frees the pool. No block may be leased. Accepts NULL. */
void sfr__pool_free(struct sfr__pool *pool);
/* Leases a block with at least `need` bytes of memory (need <= block_bytes), preferably a free
 * block that has them already. The waiting thread with the lowest `seq` (the oldest save) is served
 * first. Returns 0; SFR_EAGAIN when `slice_ns` passes (0: no wait); SFR_EEXHAUSTED when snapshots
 * hold every block. Returns -ENOMEM when every block is retired, or when the system has no memory
 * and no block with memory is free or can return. sfr__pool_put gives the block back. */
int sfr__pool_get(struct sfr__pool *pool, uint64_t seq, size_t need, uint64_t slice_ns,
		  struct sfr__block **out);
void sfr__pool_put(struct sfr__pool *pool, struct sfr__block *block);
/* Called instead of sfr__pool_put for a block to which a dead device may still write: the block and
 * its memory are never used again. */
void sfr__pool_retire(struct sfr__pool *pool, struct sfr__block *block);
/* Returns whether a block that is leased for `need` bytes gets memory for all its bytes. */
bool sfr__pool_is_whole(const struct sfr__pool *pool, size_t need);
/* Returns the pool's registered regions (pin.c). */
struct sfr__pin *sfr__pool_pin(struct sfr__pool *pool);
/* Pins adjacent blocks that the caller owns and that have all their memory and no region; see
 * sfr__pin_blocks. If the driver allocates memory for a block, the block's own memory is given back
 * to the system. */
void sfr__pool_pin_blocks(struct sfr__pool *pool, struct sfr__block *const *blocks, uint32_t nr);
/* Gives memory to the first `nbytes` bytes of the pool, or to the whole pool if it is smaller, on
 * up to four threads. Returns 0 or the first error. */
int sfr__pool_warm_up(struct sfr__pool *pool, uint64_t nbytes);
/* Gives the memory of free blocks back to the system. Writers make no memory ahead of need until
 * the next save begins. Returns 0 or the first error. */
int sfr__pool_trim(struct sfr__pool *pool);
void sfr__pool_stats(struct sfr__pool *pool, struct sfr__pool_stats *out);

/* ---- supply.c ---- */

/* A save calls sfr__pool_join before it takes its first block, and sfr__pool_leave when it needs no
 * more blocks. `nr_whole` is the number of *whole* blocks (with all their memory) that it could use
 * at a time, the same in both calls. If the pool has fewer whole blocks than that, it *lacks* the
 * others. */
void sfr__pool_join(struct sfr__pool *pool, uint32_t nr_whole);
void sfr__pool_leave(struct sfr__pool *pool, uint32_t nr_whole);
/* Makes memory for blocks that the pool lacks. A writer calls this after each block that it has
 * written. `nr_left` is the number of such calls that follow for this save. Each of them can make
 * one block, so this call makes blocks only while more than `nr_left` are lacking. The last call
 * makes all that are lacking. The call does nothing while a thread waits for a block. After the
 * system has refused memory, it does nothing until the next save begins. */
void sfr__pool_keep_pace(struct sfr__pool *pool, uint32_t nr_left);
/* Makes memory for one block that the pool lacks. Returns false if the pool lacks none, or if a
 * thread waits for a block. */
bool sfr__pool_make_block(struct sfr__pool *pool);

/* ---- lease.c ---- */

/* A row of adjacent blocks. */
struct sfr__run_of_blocks {
	uint32_t first; /* index of the first block */
	uint64_t len;   /* bytes in use, from the first block's start */
};
/* Memory for several items, each contiguous: one run of whole blocks, or several runs if no run of
 * free blocks is long enough. */
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
 *     whole    gives the blocks all their memory, so that they can be registered
 *     nr_own   how many of the saves in flight can go on only when this call has returned
 *
 * Threads in sfr__pool_get are served first. One block is left free for saves while any save except
 * those `nr_own` needs blocks (sfr__pool_join).
 *
 * Returns 0; SFR_EAGAIN when `slice_ns` passes (0: no wait); SFR_EEXHAUSTED when the items do not
 * fit into the blocks outside held leases, so that only a user could end the wait; -ENOMEM when the
 * system has no memory. */
int sfr__pool_lease(struct sfr__pool *pool, const uint64_t *lens, uint32_t nr, bool whole,
		    uint32_t nr_own, uint64_t slice_ns, char **addrs, struct sfr__lease *out);
/* Pins the blocks of a `whole` lease, as far as the system allows, without changing their
 * addresses. The pin's CUDA context must be current. One thread at a time may call it for a lease.
 * Returns whether all blocks are pinned. */
bool sfr__pool_pin_lease(struct sfr__pool *pool, const struct sfr__lease *lease);
/* Returns the descriptor of the file to which shared pool memory belongs, and sets *off to the
 * offset of `mem` in it. Returns -1 if the memory is private. */
int sfr__pool_file(const struct sfr__pool *pool, const char *mem, uint64_t *off);
/* Returns whether the address is in the pool. */
bool sfr__pool_has(const struct sfr__pool *pool, const char *mem);
/* Returns how many of the `len` bytes at `mem`, an address in a lease, one device copy may cover: a
 * copy must not touch two registered regions. Sets *pinned to whether those bytes are pinned. */
size_t sfr__pool_span(const struct sfr__pool *pool, const char *mem, size_t len, bool *pinned);
/* Sets whether a user holds the lease, as is the case after sfr__pool_lease. A lease that is not
 * held is given back without a call by a user, so other threads may wait for its blocks.
 * Idempotent. */
void sfr__pool_hold(struct sfr__pool *pool, const struct sfr__lease *lease, bool held);
/* Gives the lease's blocks back to the pool, or retires them if lease->retired is set. Empties the
 * lease; accepts an empty one. */
void sfr__pool_unlease(struct sfr__pool *pool, struct sfr__lease *lease);
/* Sets whether forked children inherit the lease's memory; at first they do not. 0 or -errno. */
int sfr__pool_share(struct sfr__pool *pool, const struct sfr__lease *lease, bool shared);

/* Returns how often blocks of the pool changed from one state to another; for tests. */
uint64_t sfr__pool_moves(struct sfr__pool *pool, enum sfr__block_state from,
			 enum sfr__block_state to);

/* ---- budget.c ---- */

/* Takes the cap of a default pool out of the budget (struct sfr_engine_opts) and returns the cap,
 * in bytes. The engine gives the same number of bytes back when its pool is freed. */
uint64_t sfr__budget_take(const struct sfr_engine_opts *opts);
void sfr__budget_give(uint64_t bytes);
/* Records that the pools of the process have `bytes` more memory, or less if it is negative. */
void sfr__budget_hold(int64_t bytes);

#endif
