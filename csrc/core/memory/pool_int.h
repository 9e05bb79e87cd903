/* The pool's inside, as pool.c (single blocks), lease.c and place.c (contiguous ones) and grow.c (many) share
 * it.
 *
 * Everything in it is guarded by pool->mu but what is constant from sfr__pool_new on. pool.c has
 * the diagram of a block's states.
 */
#ifndef SFR_POOL_INT_H
#define SFR_POOL_INT_H

#include "memory/range.h"
#include "memory/pin.h"
#include "memory/pool.h"

/* Singly linked by block->next, last in, first out: the block whose lines are warm. */
struct sfr__list {
	struct sfr__block *head;
};

struct sfr__waiter {
	struct sfr__waiter *next;
	uint64_t seq;
};

/* A thread that makes memory ahead of use. */
struct sfr__maker {
	struct sfr__maker *next;
	struct sfr__block *block; /* NULL: it was taken over */
	/* Whose pages the thread may be making, in its hand or not: they keep their memory. */
	const struct sfr__block *at;
	bool idle; /* the thread is niced and has nothing else to do */
};

struct sfr__pool {
	struct sfr__range range; /* the blocks' address space */
	uint64_t block_bytes;
	uint32_t nr_blocks;

	struct sfr__mutex mu;
	pthread_cond_t cv; /* a block came back, or the queue has a new head */
	struct sfr__block *blocks;
	uint32_t nr_known;           /* blocks above it were never used and are not in a list */
	struct sfr__list reserved;   /* without memory */
	struct sfr__list whole;      /* free, memory for the whole block */
	struct sfr__list partial;    /* free, memory for a part */
	struct sfr__waiter *waiters; /* lowest seq first */
	uint32_t nr_in_hand, nr_retired;
	uint32_t nr_saves;    /* that need blocks yet, one at a time */
	uint32_t nr_expected; /* whole blocks that they could use; supply.c has the next four */
	uint32_t nr_wanted, nr_full, nr_filling;
	struct sfr__maker *makers;
	uint32_t
		nr_held; /* of those in hand, blocks that only a caller can give back: see lease.c */
	uint64_t nr_returned; /* blocks that came back with their memory, ever */
	uint64_t committed_bytes, leased_bytes, retired_bytes;
	struct sfr__pin pin; /* what the CUDA driver knows of the memory */
	uint64_t moves[SFR__NR_BLOCK_STATES][SFR__NR_BLOCK_STATES];
};

/* ---- place.c ---- */
/* One free run of blocks while items are placed: [at, end) bytes of the pool's range. */
struct sfr__extent {
	uint64_t begin, at, end;
};

struct sfr__plan {
	const uint64_t *lens;
	uint32_t nr;
	uint64_t total; /* bytes of all items, each rounded up to SFR_ALIGN */
	char **addrs;
	struct sfr__extent *extents; /* room for every run there can be */
	uint32_t nr_extents;
};
/* Puts the items into blocks that nobody has, or (`ever`) that nobody will have once all that comes
 * back by itself has come back; leaves one block for saves where `spare` says so. False when they
 * do not fit. */
bool sfr__pool_plan_locked(const struct sfr__pool *pool, struct sfr__plan *plan, bool ever,
			   bool spare);

/* ---- blocks.c ---- */
/* Where the block's own pages are, wherever it has its memory. */
static inline char *sfr__pool_home(const struct sfr__pool *pool, const struct sfr__block *block)
{
	return pool->range.base + block->index * pool->block_bytes;
}
/* Gives those bytes of a block in hand memory, and takes it, without the lock; to be counted then.
 * -errno: they have what they had. What takes memory waits for threads that made some of the block
 * before somebody took it over. */
int sfr__pool_commit(struct sfr__pool *pool, const struct sfr__block *block, size_t from,
		     size_t to);
int sfr__pool_decommit(struct sfr__pool *pool, const struct sfr__block *block, size_t from,
		       size_t to);
/* Memory that a lease of `need` bytes gives a block: huge pages whole, never more than it. */
size_t sfr__pool_memory_for(const struct sfr__pool *pool, uint64_t need);
/* Whether a block in that state belongs to a thread or a lease, and so is in no list. */
bool sfr__pool_in_hand(enum sfr__block_state state);
/* Every change of a block's state goes through here. */
void sfr__pool_move_locked(struct sfr__pool *pool, struct sfr__block *block,
			   enum sfr__block_state to);
/* After memory was given or taken: the block has `now` bytes. Others look at that figure of any
 * block, in hand or not, so nobody writes it without the lock. */
void sfr__pool_recount_locked(struct sfr__pool *pool, struct sfr__block *block, size_t now);
/* The first block that was never used, in no list yet; NULL when each has been. */
struct sfr__block *sfr__pool_fresh_locked(struct sfr__pool *pool);
void sfr__pool_push(struct sfr__list *list, struct sfr__block *block);
struct sfr__block *sfr__pool_pop(struct sfr__list *list); /* NULL when it is empty */
/* Takes out the blocks that are in hand by now. */
void sfr__pool_filter(struct sfr__list *list);
/* Whether it is full in the sense of supply.c. What changes that has `nr_full` counted anew:
 * sfr__pool_uncount_locked before, sfr__pool_count_locked after. */
static inline bool sfr__block_is_full(const struct sfr__pool *pool, const struct sfr__block *block)
{
	return block->committed == pool->block_bytes && !block->held &&
	       block->state != SFR__BLOCK_RETIRED;
}
static inline void sfr__pool_uncount_locked(struct sfr__pool *pool, const struct sfr__block *block)
{
	pool->nr_full -= sfr__block_is_full(pool, block);
}
static inline void sfr__pool_count_locked(struct sfr__pool *pool, const struct sfr__block *block)
{
	pool->nr_full += sfr__block_is_full(pool, block);
}
/* ---- supply.c ---- */
bool sfr__pool_lacks_locked(const struct sfr__pool *pool);
/* A free block that was to have more memory than it got; NULL. */
struct sfr__block *sfr__pool_pop_unfinished(struct sfr__pool *pool);
/* A block that is being made ahead of use, taken out of the hand of whoever does so; NULL. */
struct sfr__block *sfr__pool_take_over_locked(struct sfr__pool *pool);
/* Makes free blocks of all of those. Whether there was any. */
bool sfr__pool_reclaim_locked(struct sfr__pool *pool);
/* Somebody has found no block with memory. */
void sfr__pool_missed_locked(struct sfr__pool *pool);
/* Nothing is lacking, and none is being made when it returns. */
void sfr__pool_stop_supply_locked(struct sfr__pool *pool);
/* ---- grow.c ---- */
/* Gives blocks in hand the memory that each wants, on several threads, and hands each over as
 * soon as it has it, or not (then with the first of all failures). Without the lock. */
int sfr__pool_grow_all(struct sfr__pool *pool, struct sfr__list work,
		       void (*grown_locked)(struct sfr__pool *pool, struct sfr__block *block,
					    int rc));

/* ---- the queue, in pool.c ---- */
void sfr__pool_enqueue_locked(struct sfr__pool *pool, struct sfr__waiter *me);
void sfr__pool_dequeue_locked(struct sfr__pool *pool, struct sfr__waiter *me);

#endif
