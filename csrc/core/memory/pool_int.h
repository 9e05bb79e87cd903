/* The inside of a pool, shared by pool.c (single blocks), lease.c and place.c (contiguous ones),
 * grow.c (many) and supply.c.
 *
 * pool->mu guards all fields except the constant ones (range, block_bytes, nr_blocks, the pointer
 * blocks) and pin, which has its own mutex. pool.c has the diagram of a block's states. */
#ifndef SFR_POOL_INT_H
#define SFR_POOL_INT_H

#include "memory/range.h"
#include "memory/pin.h"
#include "memory/pool.h"

/* A list of blocks, linked by block->next. Last in, first out: the block that was used last may
 * still be in a cache. */
struct sfr__list {
	struct sfr__block *head;
};

/* A thread that waits for a block or a lease; on its stack. */
struct sfr__waiter {
	struct sfr__waiter *next;
	uint64_t seq; /* the save's sequence number; UINT64_MAX for a lease */
};

struct sfr__pool {
	struct sfr__range range; /* the blocks' address space */
	uint64_t block_bytes;
	uint32_t nr_blocks;

	struct sfr__mutex mu;
	pthread_cond_t cv; /* signals that a block came back or the queue has a new head */
	struct sfr__block *blocks;
	uint32_t nr_known;           /* blocks used so far; the blocks after them are in no list */
	struct sfr__list reserved;   /* without memory */
	struct sfr__list whole;      /* free, memory for the whole block */
	struct sfr__list partial;    /* free, memory for part of the block */
	struct sfr__waiter *waiters; /* lowest seq first */
	uint32_t nr_owned; /* blocks that a thread or a lease owns: GROWING, LEASED, SHRINKING */
	uint32_t nr_retired;
	uint32_t nr_saves;    /* saves that still need blocks (sfr__pool_join) */
	uint32_t nr_expected; /* whole blocks that these saves could use together */
	uint32_t nr_wanted, nr_full, nr_filling; /* supply.c explains these */
	uint32_t nr_held;     /* owned blocks that only a user can return (lease.c) */
	uint64_t nr_returned; /* how often a block came back, so that waiting threads notice it */
	uint64_t committed_bytes, leased_bytes, retired_bytes;
	struct sfr__pin pin; /* the regions registered with the CUDA driver */
	uint64_t moves[SFR__NR_BLOCK_STATES][SFR__NR_BLOCK_STATES]; /* [from][to]; for tests */
};

/* ---- place.c ---- */
/* A row of adjacent usable blocks, into which items are put. begin, at and end are offsets in the
 * pool: [begin, at) has items, and [at, end) is still free. */
struct sfr__gap {
	uint64_t begin, at, end;
};

/* The items of a lease, and where they go. */
struct sfr__placement {
	const uint64_t *lens;  /* bytes of each item */
	uint32_t nr;           /* items */
	uint64_t total;        /* bytes of all items, each rounded up to SFR_ALIGN */
	char **addrs;          /* address of each item; NULL for an empty item */
	struct sfr__gap *gaps; /* an array with room for the largest possible number of gaps */
	uint32_t nr_gaps;
};
/* Sets the address of each item. The items go into free blocks or, with `later`, into any blocks
 * outside held leases, because these blocks become free without a user's help. With `spare`, one
 * usable block is left for saves. Returns false if the items do not fit; the addresses are then
 * undefined. */
bool sfr__pool_place_locked(const struct sfr__pool *pool, struct sfr__placement *placement,
			    bool later, bool spare);

/* ---- blocks.c ---- */
/* Returns the address of the block's own pages, even while it uses the driver's memory. */
static inline char *sfr__pool_home(const struct sfr__pool *pool, const struct sfr__block *block)
{
	return pool->range.base + block->index * pool->block_bytes;
}
/* Give memory to bytes [from, to) of a block that the caller owns, or return that memory to the
 * system. Called without the lock; after a success the caller records the new number of bytes with
 * sfr__pool_recount_locked. Return 0 or -errno. */
int sfr__pool_commit(struct sfr__pool *pool, const struct sfr__block *block, size_t from,
		     size_t to);
int sfr__pool_decommit(struct sfr__pool *pool, const struct sfr__block *block, size_t from,
		       size_t to);
/* Returns how much memory a lease of `need` bytes gives a block: whole huge pages, at most the
 * block. */
size_t sfr__pool_memory_for(const struct sfr__pool *pool, uint64_t need);
/* Returns whether a block in this state belongs to a thread or a lease, and so is in no list of the
 * pool. */
bool sfr__block_is_owned(enum sfr__block_state state);
/* Changes a block's state and the counters that depend on it, and adds the block to the list of its
 * new state. The caller has removed it from its old list, or does so with sfr__pool_filter. */
void sfr__pool_move_locked(struct sfr__pool *pool, struct sfr__block *block,
			   enum sfr__block_state to);
/* Records that the block has `now` bytes of memory. The caller owns the block, but other threads
 * read block->committed, so it is written under the lock. */
void sfr__pool_recount_locked(struct sfr__pool *pool, struct sfr__block *block, size_t now);
/* Takes the first block that was never used, which is in no list. Returns NULL if there is none. */
struct sfr__block *sfr__pool_fresh_locked(struct sfr__pool *pool);
void sfr__pool_push(struct sfr__list *list, struct sfr__block *block);
struct sfr__block *sfr__pool_pop(struct sfr__list *list); /* NULL when the list is empty */
/* Removes from a list the blocks that have become owned. */
void sfr__pool_filter(struct sfr__list *list);
/* Returns whether the block counts in nr_full (supply.c). Code that may change this calls
 * sfr__pool_uncount_locked before and sfr__pool_count_locked after the change. */
static inline bool sfr__block_is_full(const struct sfr__pool *pool, const struct sfr__block *block)
{
	return block->committed == pool->block_bytes && !block->held &&
	       block->state != SFR__BLOCK_RETIRED;
}
static inline void sfr__pool_uncount_locked(struct sfr__pool *pool, const struct sfr__block *block)
{
	if (sfr__block_is_full(pool, block))
		pool->nr_full--;
}
static inline void sfr__pool_count_locked(struct sfr__pool *pool, const struct sfr__block *block)
{
	if (sfr__block_is_full(pool, block))
		pool->nr_full++;
}
/* ---- supply.c ---- */
/* Returns whether saves could use more whole blocks than the pool has, and the pool can make
 * one. */
bool sfr__pool_lacks_locked(const struct sfr__pool *pool);
/* Raises the number of blocks that should have memory, because a save found no block with
 * memory. */
void sfr__pool_want_more_locked(struct sfr__pool *pool);
/* ---- grow.c ---- */
/* Gives each block in `work`, which the caller owns, memory for block->want bytes, on several
 * threads. Calls grown_locked once for each block when it is finished, under pool->mu: with 0, or
 * with the first error of all blocks, after which the blocks that are left get no memory. Called
 * without the lock. Returns 0 or the first error. */
int sfr__pool_grow_all(struct sfr__pool *pool, struct sfr__list work,
		       void (*grown_locked)(struct sfr__pool *pool, struct sfr__block *block,
					    int rc));

/* ---- the queue, in pool.c ---- */
/* Add a thread to the queue and remove it. The queue is sorted by seq, and only the thread at its
 * head may take blocks. */
void sfr__pool_enqueue_locked(struct sfr__pool *pool, struct sfr__waiter *me);
void sfr__pool_dequeue_locked(struct sfr__pool *pool, struct sfr__waiter *me);

#endif
