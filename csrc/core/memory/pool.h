/* Memory: blocks, contiguous leases of several of them, and what all pools may have. */
#ifndef SFR_POOL_H
#define SFR_POOL_H

#include "base/base.h"

/* ---- pool.c ---- */

/* A persistent pool of equal blocks cut from one reserved address range.
 *
 * Address space for pool_bytes is reserved at once (PROT_NONE); a block gets memory when it
 * is first handed out, and only as much of it as was asked for (rounded up to 2 MiB, at most
 * the block). Memory stays until trim or free. Pages are MADV_DONTFORK, MADV_HUGEPAGE where
 * the kernel gives them, and present (MADV_POPULATE_WRITE, or touched) on return. */
struct sfr__pool;

/* States of a block; pool.c has the diagram. */
enum sfr__block_state {
	SFR__BLOCK_RESERVED, /* address space, no memory */
	SFR__BLOCK_FREE,     /* has memory */
	SFR__BLOCK_GROWING,  /* in the hands of a thread that gives it memory */
	SFR__BLOCK_LEASED,
	SFR__BLOCK_SHRINKING, /* in the hands of a thread that takes its memory */
	SFR__BLOCK_RETIRED,   /* a copy into it may never end: nobody's for good */
	SFR__NR_BLOCK_STATES
};

struct sfr__block {
	char *mem;               /* page aligned, pool's block_bytes of address space */
	struct sfr__block *next; /* owner's use while leased */
	/* How the CUDA driver knows it, NULL = not at all; the owner's, or one of several owners'. */
	_Atomic(struct sfr__piece *) piece;
	size_t committed; /* bytes that have memory, from mem on; written under pool->mu */
	size_t want;      /* what it is to have: less memory than that is unfinished */
	uint32_t index;
	enum sfr__block_state state; /* guarded by pool->mu, as is the next */
	bool held; /* part of a run that only a caller can give back: see sfr__pool_hold */
};

struct sfr__pool_stats {
	uint64_t pool_bytes, block_bytes, committed_bytes, leased_bytes, retired_bytes;
	uint32_t nr_waiters; /* threads that wait for a block */
};

/* pool_bytes is rounded down to whole blocks; -EINVAL when that is none. `shared` and its errors:
 * see sfr__memory_reserve. */
int sfr__pool_new(uint64_t pool_bytes, uint64_t block_bytes, bool shared, struct sfr__pool **out);
/* No block may be leased. NULL is fine. */
void sfr__pool_free(struct sfr__pool *pool);
/* Leases a block with at least `need` bytes of memory (need <= block_bytes). Waiters are served
 * lowest `seq` (oldest save) first; a caller never overtakes a waiter with a lower seq. Prefers
 * a free block that has memory already. SFR_EAGAIN when `slice_ns` passes (0: no wait),
 * -ENOMEM when the system has no memory and no block with memory is free or leased,
 * SFR_EEXHAUSTED when snapshots hold every block. */
int sfr__pool_get(struct sfr__pool *pool, uint64_t seq, size_t need, uint64_t slice_ns,
		  struct sfr__block **out);
void sfr__pool_put(struct sfr__pool *pool, struct sfr__block *block);
/* Instead of put, for a block into which a copy may be running that nobody will hear of again (a
 * dead device): it and its memory are never used again. */
void sfr__pool_retire(struct sfr__pool *pool, struct sfr__block *block);
/* Whether a block that `need` bytes are put into is to have all its memory. */
bool sfr__pool_is_whole(const struct sfr__pool *pool, size_t need);
/* pin.c's part of the pool. */
struct sfr__pin *sfr__pool_pin(struct sfr__pool *pool);
/* Pins blocks in the caller's hand that have all their memory and no piece, and follow one another in
 * memory: see sfr__pin_blocks. Where a driver's memory takes the place of a block's own, that goes
 * back to the system. */
void sfr__pool_pin_blocks(struct sfr__pool *pool, struct sfr__block *const *blocks, uint32_t nr);
/* Gives memory to the first blocks, nbytes in all (clipped to the cap), on up to four threads. */
int sfr__pool_warm_up(struct sfr__pool *pool, uint64_t nbytes);
/* Gives the memory of free blocks back to the system. None is made ahead of use until the next save
 * begins. */
int sfr__pool_trim(struct sfr__pool *pool);
void sfr__pool_stats(struct sfr__pool *pool, struct sfr__pool_stats *out);

/* ---- supply.c ---- */

/* A save that takes blocks begins, and needs none any more: of so many of them the whole memory.
 * From the beginning on the pool lacks what it has less. */
void sfr__pool_join(struct sfr__pool *pool, uint32_t nr_whole);
void sfr__pool_leave(struct sfr__pool *pool, uint32_t nr_whole);
/* Whether there is memory to be made that saves could use. */
bool sfr__pool_lacks(struct sfr__pool *pool);
/* Makes some of it, a block's at most, and stops early when somebody waits for a block or `go_on`
 * says no: it is asked every 2 MiB. False when nothing was made. Any thread that holds no block. */
bool sfr__pool_supply(struct sfr__pool *pool, bool (*go_on)(void *arg), void *arg);
/* A block of a save is written that could use `nr_whole`, and `nr_left` more will come by here: makes
 * one block where more are lacking than that. With the last, the save's own are there, unless the
 * system has no memory or somebody waits for a block. */
void sfr__pool_keep_pace(struct sfr__pool *pool, uint32_t nr_left, uint32_t nr_whole,
			 bool (*go_on)(void *arg), void *arg);

/* ---- lease.c ---- */

/* Contiguous memory for several items, in whole blocks of the pool: one run of blocks, or a few
 * where free blocks lie apart. */
struct sfr__run_of_blocks {
	uint32_t first;
	uint64_t len; /* bytes in use, from the first block's start on */
};
struct sfr__lease {
	struct sfr__run_of_blocks *runs; /* NULL: nothing is leased */
	uint32_t nr_runs;
	uint32_t nr_blocks;
	bool whole;   /* its blocks have all their memory */
	bool retired; /* a copy into it may never end: its blocks are nobody's again */
};

/* Leases memory for `nr` items of `lens` bytes, each contiguous and aligned to SFR_ALIGN, all or
 * nothing; addrs[i] gets its address (NULL for no bytes). Behind every waiter of sfr__pool_get. One
 * block at least is left as long as saves need some (sfr__pool_join) but the `nr_own` that the
 * caller itself holds up. SFR_EAGAIN when `slice_ns` passes (0: no wait); SFR_EEXHAUSTED when the
 * items do not fit beside what is held, so that only a holder could end the wait; -ENOMEM. On
 * success the lease is held. `whole`: in blocks that have all their memory, which a driver can be
 * told of. */
int sfr__pool_place(struct sfr__pool *pool, const uint64_t *lens, uint32_t nr, bool whole,
		    uint32_t nr_own, uint64_t slice_ns, char **addrs, struct sfr__lease *out);
/* Pins the blocks of such a lease where they are, as far as the system lets us: what stays
 * pageable is noted. Needs a context. By one thread at a time. Whether all are. */
bool sfr__pool_pin_lease(struct sfr__pool *pool, const struct sfr__lease *lease);
/* The file that the pool's memory is of, and where in it `mem` is; -1: its memory is private. */
int sfr__pool_file(const struct sfr__pool *pool, const char *mem, uint64_t *off);
/* Whether the address is one of the pool's. */
bool sfr__pool_has(const struct sfr__pool *pool, const char *mem);
/* How many of the `len` bytes at `mem`, in a lease, one copy of a device may go to, and whether
 * they are pinned. */
size_t sfr__pool_span(const struct sfr__pool *pool, const char *mem, size_t len, bool *pinned);
/* Whether somebody holds the lease, as one is held that was just taken. Not: it will come back by itself
 * from now on, and those who wait may wait for it. Idempotent. */
void sfr__pool_hold(struct sfr__pool *pool, const struct sfr__lease *lease, bool held);
/* Gives the lease back, or retires its blocks, and empties it. */
void sfr__pool_unplace(struct sfr__pool *pool, struct sfr__lease *lease);
/* Whether children of fork have the lease's memory (false is how the pool has it). 0 or -errno. */
int sfr__pool_share(struct sfr__pool *pool, const struct sfr__lease *lease, bool shared);

/* How often blocks of the pool went from one state to another; for tests. */
uint64_t sfr__pool_moves(struct sfr__pool *pool, enum sfr__block_state from,
			 enum sfr__block_state to);

/* ---- budget.c ---- */

/* sfr_default_pool_bytes, taken out of the budget that default caps share: for an engine that
 * was given no pool_bytes. It gives the same number back when its pool is gone. */
uint64_t sfr__budget_take(uint64_t block_bytes);
void sfr__budget_give(uint64_t bytes);
/* pool.c: all pools together have that much more memory (less, if negative). */
void sfr__budget_hold(int64_t bytes);

#endif
