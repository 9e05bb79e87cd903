/* Copies host memory into memory of the pool: in the call, or deferred.
 *
 * A copy fills blocks, in ascending order. Each block is handed out front to back in chunks. A
 * thread takes a chunk, copies it, and comes back for the next one.
 *
 *     blk ---------------------------v
 *     block    [filled]   [filled]   [.XXX..........]   [no memory yet]     X: being copied
 *                                         ^ begun
 *
 * These threads take chunks:
 *
 *   deferred      the lane, at low priority; every thread that waits for the copy, and copiers
 *                 while there is such a thread
 *   in the call   the calling thread, and copiers if the copy is large
 *
 * Copiers have the priority of the thread that started them, and nothing depends on them: the
 * waiting thread takes any chunk that no copier takes.
 *
 * Rules:
 *
 *   1. One thread at a time gets memory for the next block of a copy, and has no other block
 *      while it waits. So a pool of one block is enough for all copies.
 *   2. The thread that copies the last chunk of a block passes the block on. Nothing touches it
 *      later.
 *   3. A copy that fails or is given up hands out no more chunks. It is over when the chunks that
 *      threads are copying are done: only then are sources and memory free. A call that copies does
 *      not return before, whatever it returns.
 *   4. A deferred copy is on the engine's list of shared work. Copies that need blocks are served
 *      in the order of their start, because the older ones have the blocks. Copies that have all
 *      their memory come before them, because they never wait. */
#ifndef SFR_STAGE_HOST_H
#define SFR_STAGE_HOST_H

#include "engine/engine.h"

/* One block of a copy. Guarded by engine->mu; mem is constant once it is set. */
struct sfr__host_block {
	char *mem;    /* NULL: no memory yet */
	size_t begun; /* bytes handed out */
	size_t left;  /* bytes not copied yet */
};

struct sfr__host_copy;

/* Functions that the owner of a copy provides: a save or a snapshot. Those named _locked are called
 * with engine->mu held, the others without it. */
struct sfr__host_ops {
	/* Returns the state of a block, which the owner of the copy stores. */
	struct sfr__host_block *(*block)(struct sfr__host_copy *copy, uint32_t blk);
	/* Returns how many bytes a block has. */
	size_t (*block_len)(struct sfr__host_copy *copy, uint32_t blk);
	/* Returns whether memory may be leased for a block now. NULL: always. */
	bool (*may_lease_locked)(struct sfr__host_copy *copy, uint32_t blk);
	/* Called when a block of the pool was leased for a block of the copy. NULL for a copy whose
	 * memory is all leased before it begins. */
	void (*leased_locked)(struct sfr__host_copy *copy, uint32_t blk, struct sfr__block *block);
	/* Copies the bytes [off, off + len) of a block. `hurried`: a thread waits, or this is in
	 * the call. Returns the index of a torn source, or -1. */
	int64_t (*copy)(struct sfr__host_copy *copy, uint32_t blk, size_t off, size_t len,
			bool hurried);
	/* Returns whether the copy has failed or was given up, so that the rest is not needed. */
	bool (*is_failing_locked)(struct sfr__host_copy *copy);
	/* Records a failure. SFR_ETORN: the source with this index was torn. Any other code: there
	 * is no memory for a block, and `source` is -1. */
	void (*fail_locked)(struct sfr__host_copy *copy, int code, int64_t source);
	/* Called when a block is copied completely or, if the copy has failed, as far as it ever
	 * will be. The owner then passes the block's memory on. */
	void (*filled_locked)(struct sfr__host_copy *copy, uint32_t blk);
	/* Called when a deferred copy is over. The owner may be freed when this returns. */
	void (*over)(struct sfr__host_copy *copy);
};

/* One copy of host memory, embedded in its owner's state. */
struct sfr__host_copy {
	struct sfr__shared shared; /* on the engine's list while there are chunks to hand out */
	struct sfr_engine *engine; /* constant, like the next four */
	const struct sfr__host_ops *ops;
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

/* Begins to hand out a deferred copy. `has_memory`: no block of it needs to be leased. */
void sfr__host_begin_locked(struct sfr__host_copy *copy, bool has_memory);
/* Copies in the call. Returns 0 when the copy is over, also if it has failed (ops->fail_locked).
 * SFR_EAGAIN if there was no block until the deadline, SFR_EEXHAUSTED if snapshots hold all blocks:
 * the caller may call again, or give the copy up. Whatever is returned, no thread reads the sources
 * any more. */
int sfr__host_copy_now(struct sfr__host_copy *copy, uint64_t deadline_ns);
/* Waits until is_over(arg) returns true. Meanwhile helps with the deferred copy or, while it has no
 * memory, with older copies that have the blocks. 0 or SFR_EAGAIN. */
int sfr__host_wait_locked(struct sfr__host_copy *copy, uint64_t deadline_ns,
			  bool (*is_over)(const void *arg), const void *arg);
/* For tests, while nothing is copied: sets the length of a chunk, and from how many bytes on
 * copiers help. 0 restores the default. */
void sfr__host_tune(size_t chunk, uint64_t help_from);
/* Prefetches the first bytes of a source that is copied soon, because a small one begins with a
 * cache miss. */
void sfr__host_prefetch(const char *src, uint64_t nbytes);

#endif
