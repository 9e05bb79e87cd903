/* Hands out chunks of a copy to threads, and finds when the copy is over. host.h has the rules.
 *
 * Other processes may keep the lane, whose priority is low, from running, and a thread cannot raise
 * its priority again. So chunks are small: a waiting thread takes the chunks itself, and waits at
 * most for the one that the lane is copying. */
#include "stage/host.h"
#include "trace/trace.h"

/* the longest wait for a block; then the thread checks whether the copy was given up */
#define FETCH_SLICE_NS (UINT64_C(50) * 1000 * 1000)

/* constant except in tests */
static struct {
	size_t chunk;       /* bytes */
	uint64_t help_from; /* bytes; a copy of fewer ends before copiers wake up */
} tuned = { 1 << 20, 4 << 20 };

void sfr__host_tune(size_t chunk, uint64_t help_from)
{
	tuned.chunk = chunk ? chunk : 1 << 20;
	tuned.help_from = help_from ? help_from : 4 << 20;
}

void sfr__host_prefetch_first_lines(const char *src, uint64_t nbytes)
{
	enum {
		LINE = 64, /* bytes of a cache line */
		MOST = 8,  /* the most lines of a source to prefetch */
	};

	for (uint64_t off = 0; off < nbytes && off < MOST * LINE; off += LINE)
		__builtin_prefetch(src + off);
}

/* ---- one chunk, one block -------------------------------------------------------------- */

/* Returns whether there are chunks to hand out. */
static bool has_chunks_locked(struct sfr__host_copy *copy)
{
	return copy->blk < copy->nr_blocks && !copy->ops->is_failing_locked(copy);
}

static bool may_lease_locked(struct sfr__host_copy *copy)
{
	return copy->ops->may_lease_locked == NULL || copy->ops->may_lease_locked(copy, copy->blk);
}

/* Returns the block whose chunks are handed out. */
static struct sfr__host_block_state *current_block(struct sfr__host_copy *copy)
{
	return copy->ops->block(copy, copy->blk);
}

/* Leases a block of at least `need` bytes, and waits up to slice_ns for it. Returns what
 * sfr__pool_get returns. Sets *waited_ns to the time spent waiting. */
static int lease_block_timed(struct sfr__host_copy *copy, size_t need, uint64_t slice_ns,
			     struct sfr__block **block, uint64_t *waited_ns)
{
	struct sfr__pool *pool = copy->engine->pool;
	int rc = sfr__pool_get(pool, copy->seq, need, 0, block); /* 0: without waiting */
	uint64_t start;

	*waited_ns = 0;
	if (rc != SFR_EAGAIN)
		return rc;
	SFR__TRACE(SFR_TRACE_POOL_WAIT, copy->number, 0);
	start = sfr__now_ns();
	rc = sfr__pool_get(pool, copy->seq, need, slice_ns, block);
	*waited_ns = sfr__now_ns() - start;
	return rc;
}

/* Gets memory for the next block; releases the mutex meanwhile. Returns what lease_block_timed()
 * returns. */
static int lease_next_block_locked(struct sfr__host_copy *copy, uint64_t slice_ns)
{
	const uint32_t blk = copy->blk;
	size_t need = copy->ops->block_len(copy, blk);
	struct sfr__host_block_state *next = current_block(copy);
	struct sfr__block *block;
	uint64_t waited_ns;
	int rc;

	copy->fetching = true;
	sfr__unlock(&copy->engine->mu);
	rc = lease_block_timed(copy, need, slice_ns, &block, &waited_ns);
	sfr__lock(&copy->engine->mu);
	copy->fetching = false;
	copy->wait_ns += waited_ns;
	if (rc == 0) {
		copy->ops->leased_locked(copy, blk, block);
		*next = (struct sfr__host_block_state){ .mem = block->mem, .left = need };
	}
	sfr__shared_work_wake_locked(copy->engine); /* others can take chunks, or fetch a block */
	return rc;
}

/* Copies the next chunk of a block that has memory; releases the mutex meanwhile. */
static void copy_next_chunk_locked(struct sfr__host_copy *copy)
{
	const uint32_t blk = copy->blk;
	struct sfr__host_block_state *block = current_block(copy);
	size_t block_len = copy->ops->block_len(copy, blk);
	size_t off = block->handed_out, rest = block_len - off;
	size_t len = rest < tuned.chunk ? rest : tuned.chunk;
	/* whether a thread waits for the copy */
	bool hurried = !copy->is_deferred || copy->engine->nr_waiters != 0;
	int64_t torn; /* index of a torn source, or -1 */

	block->handed_out += len; /* this thread takes the chunk */
	if (block->handed_out == block_len)
		copy->blk++; /* the next chunks are in the next block */
	copy->nr_copying++;
	sfr__unlock(&copy->engine->mu);
	{ /* a scope for the trace's span, which must not include the wait for the mutex */
		SFR__TRACE(SFR_TRACE_COPY, copy->number, len);
		torn = copy->ops->copy(copy, blk, off, len, hurried);
		sfr__copy_fence();
	}
	sfr__lock(&copy->engine->mu);
	copy->nr_copying--;
	if (torn >= 0)
		copy->ops->fail_locked(copy, SFR_ETORN, torn);
	block->left -= len;
	if (block->left == 0)
		copy->ops->filled_locked(copy, blk);
	if (copy->draining && copy->nr_copying == 0) /* wake wait_for_copying_threads_locked */
		pthread_cond_broadcast(&copy->engine->cv_state);
}

/* Returns whether the copy is over: nobody reads the sources any more. Takes the copy off the list
 * when it hands out no more chunks. Passes on a block that a failed copy has left unfinished. */
static bool finish_copy_if_done_locked(struct sfr__host_copy *copy)
{
	if (has_chunks_locked(copy))
		return false;
	sfr__shared_work_remove_locked(copy->engine, &copy->shared);
	if (copy->nr_copying != 0 || copy->fetching)
		return false;
	if (copy->blk < copy->nr_blocks) {
		const uint32_t unfinished = copy->blk;

		copy->blk = copy->nr_blocks;
		if (copy->ops->block(copy, unfinished)->mem)
			copy->ops->filled_locked(copy, unfinished);
	}
	return true;
}

/* Makes memory in the pool for a later block. In a new pool this takes longer than copying, so
 * copiers do it. Releases the mutex meanwhile, so the copy may be over afterwards. Returns whether
 * memory was made. */
static bool make_pool_block_locked(struct sfr_engine *engine)
{
	bool made;

	sfr__unlock(&engine->mu);
	made = sfr__pool_make_one_whole_block(engine->pool);
	sfr__lock(&engine->mu);
	return made;
}

/* ---- deferred ---------------------------------------------------------------------------- */

/* Does a step, as struct sfr__shared_work requires: copies a chunk, gets memory for a block, or
 * ends the copy. Returns false if nothing can be done now. */
static bool step_locked(struct sfr__shared_work *work, bool may_wait)
{
	struct sfr__host_copy *copy = sfr__container(work, struct sfr__host_copy, shared);
	struct sfr_engine *engine = copy->engine;
	const bool has_chunks = has_chunks_locked(copy);
	int rc;

	if (has_chunks && current_block(copy)->mem) {
		copy_next_chunk_locked(copy);
	} else if (has_chunks) {
		if (!may_wait)
			return make_pool_block_locked(engine);
		if (copy->fetching || !may_lease_locked(copy))
			return false;
		rc = lease_next_block_locked(copy, FETCH_SLICE_NS);
		if (rc < 0 && rc != SFR_EAGAIN)
			copy->ops->fail_locked(copy, rc, -1);
	}
	/* a copy that is not deferred is ended by the call that makes it (sfr__host_copy_now) */
	if (!copy->is_deferred || !finish_copy_if_done_locked(copy))
		return has_chunks; /* if there were chunks, something was done above */
	copy->is_deferred = false;
	sfr__unlock(&engine->mu);
	copy->ops->over(copy); /* the owner may free the copy from here on */
	sfr__lock(&engine->mu);
	return true;
}

/* Starts the copiers if enough is left to copy. Returns whether it is enough. */
static bool start_copiers_if_large_locked(struct sfr__host_copy *copy)
{
	uint64_t left = copy->blk < copy->nr_blocks ? copy->ops->block_len(copy, copy->blk) : 0;

	left *= copy->nr_blocks - copy->blk; /* all blocks but the last are equally long */
	if (left < tuned.help_from)
		return false;
	sfr__copiers_start_locked(copy->engine);
	return true;
}

void sfr__host_begin_deferred_locked(struct sfr__host_copy *copy, bool has_memory)
{
	copy->is_deferred = true;
	copy->shared.step_locked = step_locked;
	copy->shared.rank = has_memory ? SFR__RANK_HAS_MEMORY : SFR__RANK_NEEDS_BLOCKS;
	(void)start_copiers_if_large_locked(copy); /* they help if a thread waits later */
	sfr__shared_work_push_locked(copy->engine, &copy->shared);
}

/* Does a step of the copy or, if its next block has no memory, of the oldest copy that needs
 * blocks. Returns false if there is nothing to do now. */
static bool help_with_copy_locked(struct sfr__host_copy *copy)
{
	struct sfr__shared_work *work = &copy->shared;

	if (!copy->is_deferred || copy->blk == copy->nr_blocks)
		return false; /* the copy is over, or no chunks are left */
	if (has_chunks_locked(copy) && !current_block(copy)->mem) {
		work = copy->engine->shared;
		while (work && work->rank != SFR__RANK_NEEDS_BLOCKS)
			work = work->next;
	}
	return work && work->step_locked(work, true);
}

int sfr__host_help_and_wait_locked(struct sfr__host_copy *copy, uint64_t deadline_ns,
				   bool (*is_over)(const void *arg), const void *arg)
{
	struct sfr_engine *engine = copy->engine;
	int rc = 0;

	engine->nr_waiters++; /* copiers help while this is not 0 */
	sfr__shared_work_wake_locked(engine);
	while (!is_over(arg) && rc == 0)
		if (help_with_copy_locked(copy))
			rc = sfr__now_ns() < deadline_ns ? 0 : SFR_EAGAIN;
		else
			rc = sfr__cond_wait(&engine->cv_state, &engine->mu, deadline_ns);
	engine->nr_waiters--;
	return is_over(arg) ? 0 : SFR_EAGAIN;
}

/* ---- in the call ------------------------------------------------------------------------- */

/* Takes the copy off the list, and waits until no other thread reads the sources. */
static void wait_for_copying_threads_locked(struct sfr__host_copy *copy)
{
	sfr__shared_work_remove_locked(copy->engine, &copy->shared);
	copy->draining = true;
	while (copy->nr_copying != 0)
		(void)sfr__cond_wait(&copy->engine->cv_state, &copy->engine->mu, SFR_FOREVER);
	copy->draining = false;
}

int sfr__host_copy_now(struct sfr__host_copy *copy, uint64_t deadline_ns)
{
	int rc = 0;

	sfr__lock(&copy->engine->mu);
	if (start_copiers_if_large_locked(copy)) {
		copy->shared.step_locked = step_locked;
		copy->shared.rank = SFR__RANK_IN_CALL;
		sfr__shared_work_push_locked(copy->engine, &copy->shared);
	}
	while (rc == 0 && has_chunks_locked(copy))
		if (current_block(copy)->mem)
			copy_next_chunk_locked(copy);
		else
			rc = lease_next_block_locked(copy, sfr__time_left(deadline_ns));
	wait_for_copying_threads_locked(copy);
	if (rc < 0 && rc != SFR_EAGAIN && rc != SFR_EEXHAUSTED)
		copy->ops->fail_locked(copy, rc, -1);
	(void)finish_copy_if_done_locked(copy); /* passes on an unfinished block after a cancel */
	sfr__unlock(&copy->engine->mu);
	return rc;
}
