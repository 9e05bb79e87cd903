/* Copies of host memory into memory of the pool: in the call, or deferred.
 *
 * A copy fills blocks, in ascending order. Each block is handed out front to back in pieces, and a
 * thread takes a piece, copies it and comes back for the next one.
 *
 *     blk ---------------------------v
 *     block    [filled]   [filled]   [.XXX..........]   [no memory yet]     X: being copied
 *                                         ^ begun
 *
 * Who takes pieces:
 *
 *   deferred      the lane, at low priority: as long as nobody waits, it is alone; every thread that
 *                 waits for the copy, and copiers while there is one
 *   in the call   the calling thread, and copiers where the copy is large
 *
 * Copiers have the priority of the thread that started them, and nobody depends on them: a piece that
 * none of them takes is taken by the thread that waits.
 *
 * Rules:
 *
 *   1. One thread at a time gets memory for the next block of a copy, and holds nothing meanwhile. So a
 *      pool of one block is enough for all copies.
 *   2. The thread that copies the last piece of a block hands the block on. Nobody touches it later.
 *   3. A copy that fails or is given up hands out no more pieces. It is over when the pieces that
 *      threads have in hand are copied: only then are sources and memory free. A call that copies
 *      returns no earlier, whatever it returns.
 *   4. A deferred copy is pushed on the engine's list. Copies that need blocks are served in the order
 *      in which they came, since the older ones have the blocks. Copies that have all their memory
 *      come before them, since they never wait.
 */
#ifndef SFR_STAGE_HOST_H
#define SFR_STAGE_HOST_H

#include "engine/engine.h"

/* One block of a copy. Guarded by engine->mu; mem is constant once it is set. */
struct sfr__host_block {
	char *mem;    /* NULL: it has no memory yet */
	size_t begun; /* bytes handed out */
	size_t left;  /* bytes not copied yet */
};

struct sfr__host_copy;

/* What the owner of a copy knows. Functions named _locked are called with engine->mu. */
struct sfr__host_ops {
	struct sfr__host_block *(*block)(struct sfr__host_copy *copy, uint32_t blk);
	size_t (*block_len)(struct sfr__host_copy *copy, uint32_t blk);
	/* A block of the pool was leased for a block of the copy. NULL: all have their memory. */
	void (*leased_locked)(struct sfr__host_copy *copy, uint32_t blk, struct sfr__block *block);
	/* Copies [off, off + len) of a block; `hurried`: some thread waits, or it is copied in the call.
	 * The index of a source that was torn, or -1. */
	int64_t (*copy)(struct sfr__host_copy *copy, uint32_t blk, size_t off, size_t len,
			bool hurried);
	/* Nobody wants the rest. */
	bool (*is_failing_locked)(struct sfr__host_copy *copy);
	/* A source was torn (SFR_ETORN), or there is no memory (source: -1). */
	void (*fail_locked)(struct sfr__host_copy *copy, int code, int64_t source);
	/* All of a block is copied; or, of a copy that fails, as much as will be. */
	void (*filled_locked)(struct sfr__host_copy *copy, uint32_t blk);
	/* A deferred copy is over. The owner may be gone when this returns. */
	void (*over)(struct sfr__host_copy *copy);
};

struct sfr__host_copy {
	struct sfr__shared shared; /* on the engine's list while there are pieces to hand out */
	struct sfr_engine *engine; /* constant, as the next four */
	const struct sfr__host_ops *ops;
	uint32_t nr_blocks;
	uint64_t seq;    /* order in which saves get blocks */
	uint64_t number; /* of the save, in a timeline */

	/* guarded by engine->mu */
	uint32_t blk;        /* the block whose pieces are handed out */
	uint32_t nr_copying; /* pieces that threads have in hand */
	bool fetching;       /* a thread gets memory for the block */
	bool open;           /* deferred, begun, and not over */
	bool draining;       /* a call waits until no thread has a piece in hand */
	uint64_t wait_ns;    /* that a call has waited for blocks */
};

/* Hands out a deferred copy. `has_memory`: no block of it needs to be leased. */
void sfr__host_begin_locked(struct sfr__host_copy *copy, bool has_memory);
/* Copies in the call. 0, or the copy has failed; SFR_EAGAIN when there was no block until the deadline,
 * SFR_EEXHAUSTED when snapshots hold all blocks: the call may go on later, or give the copy up. In no
 * case does any thread read the sources when this returns. */
int sfr__host_copy_now(struct sfr__host_copy *copy, uint64_t deadline_ns);
/* Waits until is_over(arg), and copies meanwhile what stands in the way of `copy`. 0 or SFR_EAGAIN. */
int sfr__host_wait_locked(struct sfr__host_copy *copy, uint64_t deadline_ns,
			  bool (*is_over)(const void *arg), const void *arg);
/* For tests, while nothing is copied: the length of a piece, and from how many bytes on copiers help; 0:
 * as ever. */
void sfr__host_tune(size_t piece, uint64_t help_from);
/* Asks for the first bytes of a source that is copied soon: a small one begins with a cache miss. */
void sfr__host_prefetch(const char *src, uint64_t nbytes);

#endif
