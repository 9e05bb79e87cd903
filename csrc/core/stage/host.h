/* Copies host memory into memory of the pool: in the call, or deferred.
 *
 * A copy fills blocks in ascending order. Each block is handed out in chunks, front to back:
 *
 *     blk ---------------------------v
 *     block    [filled]   [filled]   [.XXX..........]   [no memory yet]     X: being copied
 *                                         ^ handed_out
 *
 * These threads take chunks:
 *
 *   deferred      the lane, at low priority; while threads wait for the copy, also these threads
 *                 and copiers
 *   in the call   the calling thread, and copiers if the copy is large
 *
 * Rules:
 *
 *   1. One thread at a time gets memory for the next block of a copy, and has no other block
 *      while it waits. So a pool of one block is enough for all copies.
 *   2. The thread that copies the last chunk of a block passes the block on. Nothing touches the
 *      block later.
 *   3. A copy that fails or is given up hands out no more chunks. It is over when no thread copies
 *      a chunk. Only then are sources and memory free. A call that copies always waits for this.
 *   4. Deferred copies that have all their memory come first, because they never wait. Those that
 *      need blocks follow in the order of their start, because the older ones have the blocks. */
#ifndef SFR_STAGE_HOST_H
#define SFR_STAGE_HOST_H

#include "engine/engine.h"

/* One block of a copy. Guarded by engine->mu; mem is constant once it is set. */
struct sfr__host_block_state {
	char *mem;         /* NULL: no memory yet */
	size_t handed_out; /* bytes in chunks that threads have taken */
	size_t left;       /* bytes not copied yet */
};

struct sfr__host_copy;

/* Functions that the owner of a copy provides: a save or a snapshot. Functions named _locked are
 * called with engine->mu held, `copy` and `over` without it. */
struct sfr__host_copy_ops {
	/* Returns the state of a block, which the owner stores. */
	struct sfr__host_block_state *(*block)(struct sfr__host_copy *copy, uint32_t blk);
	size_t (*block_len)(struct sfr__host_copy *copy, uint32_t blk);
	/* Returns whether memory may be leased for a block now. May be NULL: then always. */
	bool (*may_lease_locked)(struct sfr__host_copy *copy, uint32_t blk);
	/* Gives the owner the pool's block that was leased for block `blk`. May be NULL: then all
	 * memory is leased before the copy begins. */
	void (*leased_locked)(struct sfr__host_copy *copy, uint32_t blk, struct sfr__block *block);
	/* Copies the bytes [off, off + len) of a block. `hurried`: a thread waits for the copy.
	 * Returns the index of a torn source, or -1 if none is torn. */
	int64_t (*copy)(struct sfr__host_copy *copy, uint32_t blk, size_t off, size_t len,
			bool hurried);
	/* Returns whether the copy has failed or was given up. */
	bool (*is_failing_locked)(struct sfr__host_copy *copy);
	/* Records why the copy fails: SFR_ETORN with the index of the torn source, or the code of a
	 * failed lease with -1 for the source. */
	void (*fail_locked)(struct sfr__host_copy *copy, int code, int64_t source);
	/* Called when nothing more is copied to a block. The owner passes the block's memory on. */
	void (*filled_locked)(struct sfr__host_copy *copy, uint32_t blk);
	/* Called when a deferred copy is over. May free the owner. */
	void (*over)(struct sfr__host_copy *copy);
};

/* One copy of host memory, embedded in its owner's state. */
struct sfr__host_copy {
	/* on the engine's list while there are chunks to hand out */
	struct sfr__shared_work shared;

	/* constant */
	struct sfr_engine *engine;
	const struct sfr__host_copy_ops *ops;
	uint32_t nr_blocks;
	uint64_t seq;    /* the order in which saves get blocks */
	uint64_t number; /* of the save or snapshot, for a trace */

	/* guarded by engine->mu */
	uint32_t blk;        /* the block whose chunks are handed out; nr_blocks: none is left */
	uint32_t nr_copying; /* chunks that threads are copying */
	bool fetching;       /* a thread is getting memory for block `blk` */
	bool is_deferred;    /* the copy is deferred, has begun, and is not over */
	bool draining;       /* a call waits until no thread copies a chunk */
	uint64_t wait_ns;    /* time that threads have waited for blocks */
};

/* Begins a deferred copy. `has_memory`: memory for all blocks is leased already. */
void sfr__host_begin_deferred_locked(struct sfr__host_copy *copy, bool has_memory);
/* Copies in the call. After the call no thread reads the sources. Returns 0 when the copy is over,
 * even if ops->fail_locked was called, or else:
 *
 *   SFR_EAGAIN       no block was free until the deadline
 *   SFR_EEXHAUSTED   snapshots hold all blocks
 *   other codes      a lease has failed; ops->fail_locked was called
 *
 * After the first two the caller may call again, or give the copy up. */
int sfr__host_copy_now(struct sfr__host_copy *copy, uint64_t deadline_ns);
/* Waits until is_over(arg) returns true. Meanwhile helps with the deferred copy, or with older
 * copies that have the blocks which it needs. Returns 0 or SFR_EAGAIN. */
int sfr__host_help_and_wait_locked(struct sfr__host_copy *copy, uint64_t deadline_ns,
				   bool (*is_over)(const void *arg), const void *arg);
/* For tests. `chunk`: bytes of a chunk. `help_from`: copiers help with copies of at least so many
 * bytes. 0 sets the default. */
void sfr__host_tune(size_t chunk, uint64_t help_from);
/* Prefetches the first bytes of a source that is copied soon. */
void sfr__host_prefetch_first_lines(const char *src, uint64_t nbytes);

#endif
