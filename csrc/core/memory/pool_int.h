/* The inside of a pool, for the files of this directory.
 *
 * pool->mu guards the fields of struct sfr__pool, with two exceptions: `range`, `block_bytes`,
 * `nr_blocks` and the pointer `blocks` are constant, and `pin` has its own mutex. */
#ifndef SFR_POOL_INT_H
#define SFR_POOL_INT_H

#include "memory/range.h"
#include "memory/pin.h"
#include "memory/pool.h"

/* A list of blocks, linked by block->next. Last in, first out: the last used block may still be in
 * a cache. */
struct sfr__block_list {
	struct sfr__block *head;
};

/* An entry in the queue of waiting threads, on the waiting thread's stack. */
struct sfr__pool_waiter {
	struct sfr__pool_waiter *next;
	uint64_t seq; /* the save's sequence number; UINT64_MAX for a lease */
};

struct sfr__pool {
	struct sfr__memory_range range; /* the blocks' address space */
	uint64_t block_bytes;
	uint32_t nr_blocks;

	struct sfr__mutex mu;
	pthread_cond_t cv; /* signals that a block came back or the queue has a new head */
	struct sfr__block *blocks;
	uint32_t nr_ever_used; /* blocks[0, nr_ever_used) were used; the others are in no list */
	struct sfr__block_list reserved;  /* without memory */
	struct sfr__block_list whole;     /* free, memory for the whole block */
	struct sfr__block_list partial;   /* free, memory for part of the block */
	struct sfr__pool_waiter *waiters; /* lowest seq first */
	uint32_t nr_owned;                /* blocks that are GROWING, LEASED or SHRINKING */
	uint32_t nr_retired;
	uint32_t nr_saves;        /* saves that still need blocks (sfr__pool_add_save) */
	uint32_t nr_whole_useful; /* whole blocks that these saves could use together */
	/* how many whole blocks the pool should have; missing ones are made ahead of need */
	uint32_t nr_whole_target;
	uint32_t nr_whole_for_saves; /* whole blocks that are not retired or held by a user */
	uint32_t nr_whole_growing;   /* blocks that threads are making whole */
	uint32_t nr_user_held;       /* owned blocks that only a user can return */
	uint64_t nr_returned; /* how often blocks came back; a change is a reason to try again */
	uint64_t committed_bytes, leased_bytes, retired_bytes;
	struct sfr__pin pin; /* the regions registered with the CUDA driver */
	uint64_t moves[SFR__NR_BLOCK_STATES][SFR__NR_BLOCK_STATES]; /* [from][to]; for tests */
};

/* ---- place.c ---- */
/* A row of adjacent usable blocks, as offsets in the pool. Items were placed in [begin, used_end);
 * [used_end, end) is still free. */
struct sfr__gap {
	uint64_t begin, used_end, end;
};

/* The items of a lease and their addresses. */
struct sfr__placement {
	const uint64_t *lens;  /* bytes of each item */
	uint32_t nr;           /* items */
	uint64_t total;        /* bytes of all items, each rounded up to SFR_ALIGN */
	char **addrs;          /* address of each item; NULL for an empty item */
	struct sfr__gap *gaps; /* the caller's array, with room for every gap that there can be */
	uint32_t nr_gaps;
};
/* Sets the address of each item. The items go into free blocks. With `after_wait`, they may go into
 * all blocks outside held leases, because a wait is enough for these to become free. With
 * `keep_one_free`, one usable block stays empty. Returns false if the items do not fit; the
 * addresses are then undefined. */
bool sfr__pool_place_locked(const struct sfr__pool *pool, struct sfr__placement *placement,
			    bool after_wait, bool keep_one_free);

/* ---- blocks.c ---- */
/* Returns the block's address in the pool's range, even while block->mem is the driver's memory. */
static inline char *sfr__pool_block_addr(const struct sfr__pool *pool,
					 const struct sfr__block *block)
{
	return pool->range.base + block->index * pool->block_bytes;
}
/* Give memory to bytes [from, to) of a block, or take it away. The caller owns the block and holds
 * no lock. After a success it calls sfr__pool_set_committed_locked. Return 0 or -errno. */
int sfr__pool_commit_memory(struct sfr__pool *pool, const struct sfr__block *block, size_t from,
			    size_t to);
int sfr__pool_decommit(struct sfr__pool *pool, const struct sfr__block *block, size_t from,
		       size_t to);
/* Returns how much memory a lease of `need` bytes gives a block: whole huge pages, at most all of
 * the block. */
size_t sfr__pool_block_bytes_to_commit(const struct sfr__pool *pool, uint64_t need);
/* Returns whether a block in this state belongs to a thread or a lease. Such a block is in no
 * list. */
bool sfr__block_is_owned(enum sfr__block_state state);
/* Changes a block's state and the counters that depend on it, and adds the block to the list of its
 * new state. The caller removes the block from its old list, before this call or by
 * sfr__list_remove_owned. */
void sfr__pool_move_locked(struct sfr__pool *pool, struct sfr__block *block,
			   enum sfr__block_state to);
/* Makes an owned block FREE, or RESERVED if it has no memory. */
static inline void sfr__pool_disown_locked(struct sfr__pool *pool, struct sfr__block *block)
{
	sfr__pool_move_locked(pool, block,
			      block->committed != 0 ? SFR__BLOCK_FREE : SFR__BLOCK_RESERVED);
}
/* Returns how many of these blocks, from the first on, are adjacent in the pool; nr > 0. */
static inline uint32_t sfr__pool_count_adjacent(struct sfr__block *const *blocks, uint32_t nr)
{
	uint32_t len = 1;

	while (len < nr && blocks[len]->index == blocks[0]->index + len)
		len++;
	return len;
}
/* Sets block->committed and the sums that depend on it. The caller owns the block. */
void sfr__pool_set_committed_locked(struct sfr__pool *pool, struct sfr__block *block,
				    size_t nbytes);
/* Takes the first block that was never used, or returns NULL. */
struct sfr__block *sfr__pool_take_never_used_locked(struct sfr__pool *pool);
void sfr__pool_push(struct sfr__block_list *list, struct sfr__block *block);
struct sfr__block *sfr__pool_list_pop(struct sfr__block_list *list); /* NULL: the list is empty */
/* Removes the blocks that have become owned from a list. */
void sfr__list_remove_owned(struct sfr__block_list *list);
/* Returns whether pool->nr_whole_for_saves counts the block. Code that changes `committed`,
 * `user_held` or `state` calls the first function below before the change, the second after it. */
static inline bool sfr__block_is_whole_for_saves(const struct sfr__pool *pool,
						 const struct sfr__block *block)
{
	return block->committed == pool->block_bytes && !block->user_held &&
	       block->state != SFR__BLOCK_RETIRED;
}
static inline void sfr__pool_uncount_if_whole_locked(struct sfr__pool *pool,
						     const struct sfr__block *block)
{
	if (sfr__block_is_whole_for_saves(pool, block))
		pool->nr_whole_for_saves--;
}
static inline void sfr__pool_count_if_whole_locked(struct sfr__pool *pool,
						   const struct sfr__block *block)
{
	if (sfr__block_is_whole_for_saves(pool, block))
		pool->nr_whole_for_saves++;
}
/* ---- supply.c ---- */
/* Returns whether saves could use more whole blocks than there are, and a block without memory can
 * be made whole. */
bool sfr__pool_needs_whole_blocks_locked(const struct sfr__pool *pool);
/* Raises nr_whole_target to nr_whole_useful. Called when a save found no block with memory. */
void sfr__pool_raise_whole_target_locked(struct sfr__pool *pool);
/* ---- grow.c ---- */
/* Gives each block in `work` memory for block->target_bytes bytes, on several threads. The caller
 * owns the blocks and holds no lock. Calls grown_locked under pool->mu once for each block: with 0,
 * or with the first error, after which the remaining blocks get no memory. Returns 0 or the first
 * error. */
int sfr__pool_grow_all(struct sfr__pool *pool, struct sfr__block_list work,
		       void (*grown_locked)(struct sfr__pool *pool, struct sfr__block *block,
					    int rc));

/* ---- the queue, in pool.c ---- */
/* Add a thread to the queue, and remove it. The queue is sorted by seq. Only the thread at its head
 * may take blocks. */
void sfr__pool_enqueue_locked(struct sfr__pool *pool, struct sfr__pool_waiter *me);
void sfr__pool_dequeue_locked(struct sfr__pool *pool, struct sfr__pool_waiter *me);
/* Returns whether a waiting thread should try to take blocks. `returned_at_failure` is NULL before
 * the first try. If a try fails because the system has no memory, it points to nr_returned at that
 * try. The thread tries again when a block has returned since, or if only users can return one. */
static inline bool sfr__pool_may_retry_locked(const struct sfr__pool *pool,
					      const uint64_t *returned_at_failure)
{
	return returned_at_failure == NULL || *returned_at_failure != pool->nr_returned ||
	       pool->nr_owned == pool->nr_user_held;
}

#endif
