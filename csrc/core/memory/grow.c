/* Memory for many blocks at once: made before it is needed (warm_up), made for a lease, and
 * returned to the system (trim). Several threads make pages several times as fast as one thread,
 * and adjacent blocks are pinned faster together. */
#include <stdlib.h>

#include "memory/range.h"
#include "memory/pin.h"
#include "memory/pool_int.h"

#define MAX_THREADS 4 /* threads that make memory at once, including the caller */

/* ---- on several threads ---- */

/* The state that the threads of one sfr__pool_grow_all share. */
struct growth {
	struct sfr__pool *pool;
	struct sfr__block_list work; /* blocks that no thread has taken; guarded by pool->mu */
	int rc;                      /* the first error; guarded by pool->mu */
	/* the caller's function, called for each block */
	void (*grown_locked)(struct sfr__pool *pool, struct sfr__block *block, int rc);
};

/* Runs on each thread: gives memory to blocks of the list until the list is empty. */
static void *grow_main(void *arg)
{
	struct growth *job = arg;
	struct sfr__pool *pool = job->pool;
	struct sfr__block *block;

	sfr__lock(&pool->mu);
	while ((block = sfr__pool_list_pop(&job->work)) != NULL) {
		int rc = job->rc;

		if (rc == 0) { /* after an error of any thread, the other blocks get no memory */
			sfr__unlock(&pool->mu);
			rc = sfr__pool_commit_memory(pool, block, block->committed,
						     block->target_bytes);
			sfr__lock(&pool->mu);
			if (rc == 0)
				sfr__pool_set_committed_locked(pool, block, block->target_bytes);
			else if (job->rc == 0)
				job->rc = rc;
		}
		job->grown_locked(pool, block, rc);
	}
	sfr__unlock(&pool->mu);
	return NULL;
}

int sfr__pool_grow_all(struct sfr__pool *pool, struct sfr__block_list work,
		       void (*grown_locked)(struct sfr__pool *pool, struct sfr__block *block,
					    int rc))
{
	struct growth job = { .pool = pool, .work = work, .grown_locked = grown_locked };
	pthread_t threads[MAX_THREADS - 1];
	uint32_t nr_threads = 0, nr = 0;

	for (const struct sfr__block *block = work.head; block != NULL; block = block->next)
		nr++;
	/* no more threads than blocks, counting the caller */
	while (nr_threads + 1 < MAX_THREADS && nr_threads + 1 < nr) {
		if (sfr__thread_start(&threads[nr_threads], "sfr-warm", SFR__AWAITED, grow_main,
				      &job) != 0)
			break; /* the others do this thread's work */
		nr_threads++;
	}
	(void)grow_main(&job);
	while (nr_threads > 0) /* cannot fail: the threads are joinable */
		(void)sfr_sys.thread_join(threads[--nr_threads], NULL);
	return job.rc;
}

/* ---- warm up ---- */

/* Moves from `list` to `work` the blocks that need more memory, if the first `nbytes` bytes of the
 * pool are to have memory. Sets block->target_bytes. */
static void collect_blocks_to_warm_locked(struct sfr__pool *pool, struct sfr__block_list *list,
					  uint64_t nbytes, struct sfr__block_list *work)
{
	struct sfr__block **at = &list->head, *block;

	while ((block = *at) != NULL) {
		uint64_t begin = block->index * pool->block_bytes;

		block->target_bytes =
			nbytes > begin ? sfr__pool_block_bytes_to_commit(pool, nbytes - begin) : 0;
		if (block->committed >= block->target_bytes) {
			at = &block->next;
			continue;
		}
		*at = block->next;
		sfr__pool_move_locked(pool, block, SFR__BLOCK_GROWING);
		sfr__pool_push(work, block);
	}
}

/* Called by sfr__pool_grow_all for each block: makes it FREE, or RESERVED without memory. */
static void return_warmed_block_locked(struct sfr__pool *pool, struct sfr__block *block, int rc)
{
	(void)rc; /* after a failure, too, the block keeps the memory that it had */
	pool->nr_returned++;
	sfr__pool_disown_locked(pool, block);
}

static int compare_block_indices(const void *a, const void *b)
{
	uint32_t i = (*(struct sfr__block *const *)a)->index;
	uint32_t j = (*(struct sfr__block *const *)b)->index;

	if (i == j)
		return 0;
	return i < j ? -1 : 1;
}

/* Pins the free blocks that have all their memory, each row of adjacent blocks in one call. */
static void pin_free_blocks(struct sfr__pool *pool)
{
	struct sfr__block **to_pin = sfr_sys.malloc(pool->nr_blocks * sizeof(struct sfr__block *));
	struct sfr__cuda_scope scope;
	struct sfr__block **at = &pool->whole.head, *block;
	uint32_t nr = 0;

	if (to_pin == NULL)
		return; /* each block is pinned at its first use instead */
	if (sfr__cuda_enter(&scope, pool->pin.cu, pool->pin.context) != CUDA_SUCCESS) {
		sfr_sys.free(to_pin);
		return;
	}
	sfr__lock(&pool->mu);
	while ((block = *at) != NULL) {
		if (block->region != NULL) { /* pinned already */
			at = &block->next;
			continue;
		}
		*at = block->next;
		/* no other thread may use the block while it is pinned */
		sfr__pool_move_locked(pool, block, SFR__BLOCK_GROWING);
		to_pin[nr++] = block;
	}
	sfr__unlock(&pool->mu);
	qsort(to_pin, nr, sizeof(*to_pin), compare_block_indices);
	for (uint32_t i = 0, len; i < nr; i += len) {
		len = sfr__pool_count_adjacent(to_pin + i, nr - i);
		sfr__pool_pin_blocks(pool, to_pin + i, len);
	}
	sfr__cuda_leave(&scope);
	sfr__lock(&pool->mu);
	for (uint32_t i = 0; i < nr; i++)
		sfr__pool_move_locked(pool, to_pin[i], SFR__BLOCK_FREE);
	sfr__unlock(&pool->mu);
	sfr_sys.free(to_pin);
}

int sfr__pool_warm_up(struct sfr__pool *pool, uint64_t nbytes)
{
	struct sfr__block_list work = { NULL };
	int rc;

	if (nbytes > pool->nr_blocks * pool->block_bytes)
		nbytes = pool->nr_blocks * pool->block_bytes;
	sfr__lock(&pool->mu);
	while (pool->nr_ever_used * pool->block_bytes < nbytes)
		sfr__pool_push(&pool->reserved, sfr__pool_take_never_used_locked(pool));
	collect_blocks_to_warm_locked(pool, &pool->partial, nbytes, &work);
	collect_blocks_to_warm_locked(pool, &pool->reserved, nbytes, &work);
	sfr__unlock(&pool->mu);
	rc = sfr__pool_grow_all(pool, work, return_warmed_block_locked);
	if (sfr__pin_is_on(&pool->pin))
		pin_free_blocks(pool);
	return rc;
}

/* ---- trim ---- */

int sfr__pool_trim(struct sfr__pool *pool)
{
	struct sfr__block_list work = { NULL };
	struct sfr__block *block;
	int rc = 0;

	sfr__lock(&pool->mu);
	pool->nr_whole_target = 0; /* writers make no memory until the next save */
	while ((block = sfr__pool_list_pop(&pool->whole)) != NULL ||
	       (block = sfr__pool_list_pop(&pool->partial)) != NULL) {
		sfr__pool_move_locked(pool, block, SFR__BLOCK_SHRINKING);
		sfr__pool_push(&work, block);
	}
	sfr__unlock(&pool->mu);
	sfr__pin_release_regions(&pool->pin, work.head);
	sfr__lock(&pool->mu);
	while ((block = sfr__pool_list_pop(&work)) != NULL) {
		int block_rc;

		/* its region has a block in use, or the driver did not release the region */
		if (block->region != NULL) {
			sfr__pool_move_locked(pool, block, SFR__BLOCK_FREE);
			continue;
		}
		sfr__unlock(&pool->mu);
		block_rc = sfr__pool_decommit(pool, block, 0, block->committed);
		sfr__lock(&pool->mu);
		if (block_rc == 0)
			sfr__pool_set_committed_locked(pool, block, 0);
		else if (rc == 0)
			rc = block_rc;
		pool->nr_returned++;
		sfr__pool_move_locked(pool, block,
				      block_rc == 0 ? SFR__BLOCK_RESERVED : SFR__BLOCK_FREE);
	}
	sfr__unlock(&pool->mu);
	return rc;
}
