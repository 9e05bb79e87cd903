/* Pool memory: blocks, contiguous leases, and the budget of all pools. */
#ifndef SFR_POOL_H
#define SFR_POOL_H

#include "sfr/engine.h"
#include "base/base.h"

/* ---- pool.c ---- */

/* A pool of equal blocks in one range of address space.
 *
 * The address space is reserved at once, without memory (PROT_NONE). A block gets memory when it is
 * first leased: as much as the lease needs, in whole huge pages. It keeps this memory until trim or
 * free. All pages are MADV_DONTFORK, and MADV_HUGEPAGE where possible. The pages of a leased block
 * are present, so their first use takes no page fault. */
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
	/* The registered region with the block, or NULL. Only the block's owner sets it. */
	_Atomic(struct sfr__region *) region;
	size_t committed;    /* bytes that have memory, from mem on; written under pool->mu */
	size_t target_bytes; /* while the block is GROWING: what `committed` is to become */
	uint32_t index;      /* the block's number in the pool, from 0 */
	enum sfr__block_state state; /* guarded by pool->mu */
	/* only a user can give it back (sfr__pool_set_user_held); guarded by pool->mu */
	bool user_held;
};

/* Statistics of a pool; struct sfr_stats (sfr/engine.h) explains the byte counts. */
struct sfr__pool_stats {
	uint64_t pool_bytes, block_bytes, committed_bytes, leased_bytes, retired_bytes;
	uint32_t nr_waiters; /* threads that wait for a block or a lease */
};

/* Makes a pool of pool_bytes, rounded down to whole blocks. sfr__memory_reserve explains `shared`.
 * Returns 0, or:
 *     -EINVAL  there would be no block, or block_bytes is not a multiple of a page
 *     -ENOMEM  there is no memory
 *     other    errors of sfr__memory_reserve */
int sfr__pool_new(uint64_t pool_bytes, uint64_t block_bytes, bool shared, struct sfr__pool **out);
/* Frees the pool. No block may be leased. Accepts NULL. */
void sfr__pool_free(struct sfr__pool *pool);
/* Leases a block with at least `need` bytes of memory (need <= block_bytes). The waiting thread
 * with the lowest `seq`, which is the oldest save, is served first. sfr__pool_put gives the block
 * back. Returns 0, or:
 *     SFR_EAGAIN      no block was free within slice_ns (0: no wait)
 *     SFR_EEXHAUSTED  snapshots hold every block
 *     -ENOMEM         no block can return: all are retired, or the system has no memory */
int sfr__pool_get(struct sfr__pool *pool, uint64_t seq, size_t need, uint64_t slice_ns,
		  struct sfr__block **out);
void sfr__pool_put(struct sfr__pool *pool, struct sfr__block *block);
/* Replaces sfr__pool_put for a block to which a dead device may still write. The block and its
 * memory are never used again. */
void sfr__pool_retire(struct sfr__pool *pool, struct sfr__block *block);
/* Returns whether a lease of `need` bytes gives a block all its memory. */
bool sfr__pool_fills_block(const struct sfr__pool *pool, size_t need);
/* Returns the pool's registered regions. */
struct sfr__pin *sfr__pool_get_pin(struct sfr__pool *pool);
/* Pins adjacent blocks as sfr__pin_blocks does. The caller owns the blocks; they have all their
 * memory and no region. A block for which the driver allocates memory loses its own. */
void sfr__pool_pin_blocks(struct sfr__pool *pool, struct sfr__block *const *blocks, uint32_t nr);
/* Gives memory to the first `nbytes` bytes of the pool, at most to the whole pool, on up to four
 * threads. Returns 0 or the first error. */
int sfr__pool_warm_up(struct sfr__pool *pool, uint64_t nbytes);
/* Gives the memory of free blocks back to the system. Until the next save begins,
 * sfr__pool_make_whole_blocks makes no memory. Returns 0 or the first error. */
int sfr__pool_trim(struct sfr__pool *pool);
void sfr__pool_stats(struct sfr__pool *pool, struct sfr__pool_stats *out);

/* ---- supply.c ---- */

/* A save calls sfr__pool_add_save before its first block, and sfr__pool_remove_save when it needs
 * no more blocks. A *whole* block has all its memory. `nr_whole` is the number of whole blocks that
 * the save could use at a time; it is the same in both calls. If the pool has fewer whole blocks
 * than saves could use, it *lacks* the difference. */
void sfr__pool_add_save(struct sfr__pool *pool, uint32_t nr_whole);
void sfr__pool_remove_save(struct sfr__pool *pool, uint32_t nr_whole);
/* Makes whole blocks that the pool lacks. A writer calls this after each block that it has written.
 * `nr_later_calls` more calls follow for this save, and each can make a block. So this call makes
 * only the blocks that the pool lacks beyond nr_later_calls. It makes none while a thread waits for
 * a block, nor, after the system has refused memory, until the next save begins. */
void sfr__pool_make_whole_blocks(struct sfr__pool *pool, uint32_t nr_later_calls);
/* Makes one whole block that the pool lacks. Returns false if the pool lacks none, or if a thread
 * waits for a block. */
bool sfr__pool_make_one_whole_block(struct sfr__pool *pool);

/* ---- lease.c ---- */

/* A row of adjacent blocks. */
struct sfr__run_of_blocks {
	uint32_t first; /* index of the first block */
	uint64_t len;   /* bytes in use, from the first block's start */
};
/* Memory for several items. Each item is contiguous. A lease is one run of whole blocks, or several
 * runs if no row of free blocks is long enough. */
struct sfr__lease {
	struct sfr__run_of_blocks *runs; /* NULL: nothing is leased */
	uint32_t nr_runs;
	uint32_t nr_blocks;
	bool whole;   /* all blocks have all their memory */
	bool retired; /* a copy into it may never end, so its blocks are never used again */
};

/* Leases memory for `nr` items of `lens` bytes, all or nothing. Sets addrs[i] to the address of
 * item i, a multiple of SFR_ALIGN, or to NULL if lens[i] is 0. The lease is held
 * (sfr__pool_set_user_held).
 *
 *     whole             gives the blocks all their memory, so that they can be registered
 *     nr_blocked_saves  how many saves in flight cannot go on before this call returns
 *     slice_ns          the longest wait; 0: no wait
 *
 * Threads in sfr__pool_get are served first. While another save needs blocks (sfr__pool_add_save),
 * one block stays free for it. Returns 0, or:
 *     SFR_EAGAIN      there was no room within slice_ns
 *     SFR_EEXHAUSTED  the items do not fit into the blocks outside held leases
 *     -ENOMEM         the system has no memory */
int sfr__pool_lease(struct sfr__pool *pool, const uint64_t *lens, uint32_t nr, bool whole,
		    uint32_t nr_blocked_saves, uint64_t slice_ns, char **addrs,
		    struct sfr__lease *out);
/* Pins the blocks of a `whole` lease at their addresses, as far as the system allows. The pin's
 * CUDA context must be current. Only one thread at a time may call this for a lease. Returns
 * whether all blocks are pinned. */
bool sfr__pool_pin_lease(struct sfr__pool *pool, const struct sfr__lease *lease);
/* Returns the file descriptor of shared pool memory, and sets *off to the offset of `mem` in that
 * file. Returns -1 if the memory is private. */
int sfr__pool_get_file_and_offset(const struct sfr__pool *pool, const char *mem, uint64_t *off);
/* Returns whether the address is in the pool. */
bool sfr__pool_has(const struct sfr__pool *pool, const char *mem);
/* Returns how many of the `len` bytes at `mem` can be copied with one device copy, which must not
 * touch two registered regions. `mem` is in a lease. Sets *pinned to whether these bytes are
 * pinned. */
size_t sfr__pool_len_for_one_copy(const struct sfr__pool *pool, const char *mem, size_t len,
				  bool *pinned);
/* Sets whether a user holds the lease; a new lease is held. Only its user can give a held lease
 * back, so no thread waits for its blocks. Idempotent. */
void sfr__pool_set_user_held(struct sfr__pool *pool, const struct sfr__lease *lease, bool held);
/* Gives the lease's blocks back, or retires them if lease->retired is set. Empties the lease;
 * accepts an empty one. */
void sfr__pool_unlease(struct sfr__pool *pool, struct sfr__lease *lease);
/* Sets whether forked children inherit the lease's memory; at first they do not. Returns 0 or
 * -errno. */
int sfr__pool_set_inheritable(struct sfr__pool *pool, const struct sfr__lease *lease, bool shared);

/* Returns how many times blocks changed between these states; for tests. */
uint64_t sfr__pool_nr_moves(struct sfr__pool *pool, enum sfr__block_state from,
			    enum sfr__block_state to);

/* ---- budget.c ---- */

/* Returns the cap of a default pool, in bytes, and takes it out of the budget (struct
 * sfr_engine_opts). The engine gives the same number of bytes back when its pool is freed. */
uint64_t sfr__budget_take_default_cap(const struct sfr_engine_opts *opts);
void sfr__budget_give_back(uint64_t bytes);
/* Adds `bytes` to the sum of memory that the process's pools have. `bytes` may be negative. */
void sfr__pools_add_committed_bytes(int64_t bytes);

#endif
