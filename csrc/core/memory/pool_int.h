/* The inside of a pool, shared by pool.c (single blocks), lease.c and place.c (contiguous ones),
 * grow.c (many) and supply.c.
 *
 * pool->mu guards everything except what is constant from sfr__pool_new on. pool.c has the diagram
 * of a block's states. */
#ifndef SFR_POOL_INT_H
#define SFR_POOL_INT_H

#include "memory/range.h"
#include "memory/pin.h"
#include "memory/pool.h"

/* Linked by block->next; last in, first out, so that the block with warm cache lines comes
 * first. */
struct sfr__list {
	struct sfr__block *head;
};

struct sfr__waiter {
	struct sfr__waiter *next;
	uint64_t seq;
};

struct sfr__pool {
	struct sfr__range range; /* the blocks' address space */
	uint64_t block_bytes;
	uint32_t nr_blocks;

	struct sfr__mutex mu;
	pthread_cond_t cv; /* signals that a block came back or the queue has a new head */
	struct sfr__block *blocks;
	uint32_t nr_known;           /* later blocks were never used and are in no list */
	struct sfr__list reserved;   /* without memory */
	struct sfr__list whole;      /* free, memory for the whole block */
	struct sfr__list partial;    /* free, memory for part of the block */
	struct sfr__waiter *waiters; /* lowest seq first */
	uint32_t nr_in_hand, nr_retired;
	uint32_t nr_saves; /* saves that still need blocks, one at a time */
	/* whole blocks that they could use; supply.c explains the next four */
	uint32_t nr_expected;
	uint32_t nr_wanted, nr_full, nr_filling;
	uint32_t nr_held;     /* owned blocks that only a caller can return: see lease.c */
	uint64_t nr_returned; /* blocks that ever came back with their memory */
	uint64_t committed_bytes, leased_bytes, retired_bytes;
	struct sfr__pin pin; /* the regions registered with the CUDA driver */
	uint64_t moves[SFR__NR_BLOCK_STATES][SFR__NR_BLOCK_STATES];
};

/* ---- place.c ---- */
/* A gap between used blocks, while items are placed: bytes [at, end) of the pool are still free. */
struct sfr__gap {
	uint64_t begin, at, end;
};

struct sfr__placement {
	const uint64_t *lens;
	uint32_t nr;
	uint64_t total; /* bytes of all items, each rounded up to SFR_ALIGN */
	char **addrs;
	struct sfr__gap *gaps; /* room for as many as there can be */
	uint32_t nr_gaps;
};
/* Sets the address of each item: in free blocks or, with `ever`, in blocks that will be free once
 * every lease that is not held by a user has ended. With `spare`, leaves one block for saves.
 * Returns false when the items do not fit. */
bool sfr__pool_place_locked(const struct sfr__pool *pool, struct sfr__placement *placement,
			    bool ever, bool spare);

/* ---- blocks.c ---- */
/* Returns the address of the block's own pages, even while it uses the driver's memory. */
static inline char *sfr__pool_home(const struct sfr__pool *pool, const struct sfr__block *block)
{
	return pool->range.base + block->index * pool->block_bytes;
}
/* Give memory to, or take it from, bytes of a block that the caller owns, without the lock; the
 * caller counts it afterwards. -errno: nothing changed. */
int sfr__pool_commit(struct sfr__pool *pool, const struct sfr__block *block, size_t from,
		     size_t to);
int sfr__pool_decommit(struct sfr__pool *pool, const struct sfr__block *block, size_t from,
		       size_t to);
/* Returns how much memory a lease of `need` bytes gives a block: whole huge pages, at most the
 * block. */
size_t sfr__pool_memory_for(const struct sfr__pool *pool, uint64_t need);
/* Returns whether a block in that state belongs to a thread or a lease, and so is in no list. */
bool sfr__pool_in_hand(enum sfr__block_state state);
/* Every change of a block's state goes through here. */
void sfr__pool_move_locked(struct sfr__pool *pool, struct sfr__block *block,
			   enum sfr__block_state to);
/* Records that the block has `now` bytes of memory. Other threads read this of any block, so it is
 * only written under the lock. */
void sfr__pool_recount_locked(struct sfr__pool *pool, struct sfr__block *block, size_t now);
/* Returns the first block that was never used, which is in no list; NULL if there is none. */
struct sfr__block *sfr__pool_fresh_locked(struct sfr__pool *pool);
void sfr__pool_push(struct sfr__list *list, struct sfr__block *block);
struct sfr__block *sfr__pool_pop(struct sfr__list *list); /* NULL when the list is empty */
/* Removes the blocks that are owned by now. */
void sfr__pool_filter(struct sfr__list *list);
/* Returns whether the block is full, as supply.c defines it. A change of this is counted:
 * sfr__pool_uncount_locked before, sfr__pool_count_locked after. */
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
/* Returns whether saves could use whole blocks that the pool can still make. */
bool sfr__pool_lacks_locked(const struct sfr__pool *pool);
/* A save has found no block with memory: raises the number of blocks that should have some. */
void sfr__pool_want_more_locked(struct sfr__pool *pool);
/* ---- grow.c ---- */
/* Gives blocks that the caller owns the memory that each wants, on several threads, and passes each
 * on with its result (0 or the first error of all). Called without the lock. */
int sfr__pool_grow_all(struct sfr__pool *pool, struct sfr__list work,
		       void (*grown_locked)(struct sfr__pool *pool, struct sfr__block *block,
					    int rc));

/* ---- the queue, in pool.c ---- */
void sfr__pool_enqueue_locked(struct sfr__pool *pool, struct sfr__waiter *me);
void sfr__pool_dequeue_locked(struct sfr__pool *pool, struct sfr__waiter *me);

#endif
