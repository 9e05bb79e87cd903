/* Memory for many blocks at once: made before it is needed (warm_up), made for a lease, and
 * returned to the system (trim). Several threads make pages several times as fast as one thread,
 * and adjacent blocks are pinned faster together. */
#include <stdlib.h>

#include "memory/range.h"
#include "memory/pin.h"
#include "memory/pool_int.h"

#define MAX_GROWERS 4 /* threads, including the caller */

/* ---- on several threads ---- */

/* One call of sfr__pool_grow_all. */
struct growth {
	struct sfr__pool *pool;
	struct sfr__list work; /* blocks that no thread has taken; guarded by pool->mu */
	int rc;                /* the first error; guarded by pool->mu */
	void (*grown_locked)(struct sfr__pool *pool, struct sfr__block *block, int rc);
};

/* Runs on each thread: gives memory to blocks of the list until the list is empty. */
static void *grow_main(void *arg)
{
	struct growth *job = arg;
	struct sfr__pool *pool = job->pool;
	struct sfr__block *block;

	sfr__lock(&pool->mu);
	while ((block = sfr__pool_pop(&job->work)) != NULL) {
		int rc = job->rc;

		if (rc == 0) {
			sfr__unlock(&pool->mu);
			rc = sfr__pool_commit(pool, block, block->committed, block->want);
			sfr__lock(&pool->mu);
			if (rc == 0)
				sfr__pool_recount_locked(pool, block, block->want);
			else if (job->rc == 0)
				job->rc = rc;
		}
		job->grown_locked(pool, block, rc);
	}
	sfr__unlock(&pool->mu);
	return NULL;
}

int sfr__pool_grow_all(struct sfr__pool *pool, struct sfr__list work,
		       void (*grown_locked)(struct sfr__pool *pool, struct sfr__block *block,
					    int rc))
{
	struct growth job = { .pool = pool, .work = work, .grown_locked = grown_locked };
	pthread_t threads[MAX_GROWERS - 1];
	uint32_t nr_threads = 0, nr = 0;

	for (const struct sfr__block *block = work.head; block != NULL; block = block->next)
		nr++;
	/* If no thread can be started, the caller does all the work. */
	while (nr_threads + 1 < MAX_GROWERS && nr_threads + 1 < nr &&
	       sfr__thread_start(&threads[nr_threads], "sfr-warm", SFR__AWAITED, grow_main, &job) ==
		       0)
		nr_threads++;
	(void)grow_main(&job);
	while (nr_threads > 0) /* cannot fail: the threads are joinable */
		(void)sfr_sys.thread_join(threads[--nr_threads], NULL);
	return job.rc;
}

/* ---- warm up ---- */

/* Moves blocks from `list` to `work` if they need more memory for the first `nbytes` bytes of the
 * pool. Sets block->want. */
static void collect_locked(struct sfr__pool *pool, struct sfr__list *list, uint64_t nbytes,
			   struct sfr__list *work)
{
	struct sfr__block **at = &list->head, *block;

	while ((block = *at) != NULL) {
		uint64_t begin = block->index * pool->block_bytes;

		block->want = nbytes > begin ? sfr__pool_memory_for(pool, nbytes - begin) : 0;
		if (block->committed >= block->want) {
			at = &block->next;
			continue;
		}
		*at = block->next;
		sfr__pool_move_locked(pool, block, SFR__BLOCK_GROWING);
		sfr__pool_push(work, block);
	}
}

static void warmed_locked(struct sfr__pool *pool, struct sfr__block *block, int rc)
{
	(void)rc; /* a block keeps the memory that it had or got */
	pool->nr_returned++;
	sfr__pool_disown_locked(pool, block);
}

static int by_index(const void *a, const void *b)
{
	uint32_t i = (*(struct sfr__block *const *)a)->index;
	uint32_t j = (*(struct sfr__block *const *)b)->index;

	if (i == j)
		return 0;
	return i < j ? -1 : 1;
}

/* Pins the free blocks that have all their memory, adjacent ones together. */
static void pin_whole(struct sfr__pool *pool)
{
	struct sfr__block **found = sfr_sys.malloc(pool->nr_blocks * sizeof(struct sfr__block *));
	struct sfr__cuda_scope scope;
	struct sfr__block **at = &pool->whole.head, *block;
	uint32_t nr = 0;

	if (found == NULL)
		return; /* each block is pinned at its first use instead */
	if (sfr__cuda_enter(&scope, pool->pin.cu, pool->pin.context) != CUDA_SUCCESS) {
		sfr_sys.free(found);
		return;
	}
	sfr__lock(&pool->mu);
	while ((block = *at) != NULL) {
		if (block->region != NULL) {
			at = &block->next;
			continue;
		}
		*at = block->next;
		/* no other thread may use the block while it is pinned */
		sfr__pool_move_locked(pool, block, SFR__BLOCK_GROWING);
		found[nr++] = block;
	}
	sfr__unlock(&pool->mu);
	qsort(found, nr, sizeof(*found), by_index);
	for (uint32_t i = 0, len; i < nr; i += len) {
		len = sfr__pool_row_len(found + i, nr - i);
		sfr__pool_pin_blocks(pool, found + i, len);
	}
	sfr__cuda_leave(&scope);
	sfr__lock(&pool->mu);
	for (uint32_t i = 0; i < nr; i++)
		sfr__pool_move_locked(pool, found[i], SFR__BLOCK_FREE);
	sfr__unlock(&pool->mu);
	sfr_sys.free(found);
}

int sfr__pool_warm_up(struct sfr__pool *pool, uint64_t nbytes)
{
	struct sfr__list work = { NULL };
	int rc;

	if (nbytes > pool->nr_blocks * pool->block_bytes)
		nbytes = pool->nr_blocks * pool->block_bytes;
	sfr__lock(&pool->mu);
	while (pool->nr_known * pool->block_bytes < nbytes)
		sfr__pool_push(&pool->reserved, sfr__pool_fresh_locked(pool));
	collect_locked(pool, &pool->partial, nbytes, &work);
	collect_locked(pool, &pool->reserved, nbytes, &work);
	sfr__unlock(&pool->mu);
	rc = sfr__pool_grow_all(pool, work, warmed_locked);
	if (sfr__pin_is_on(&pool->pin))
		pin_whole(pool);
	return rc;
}

/* ---- trim ---- */

int sfr__pool_trim(struct sfr__pool *pool)
{
	struct sfr__list work = { NULL };
	struct sfr__block *block;
	int rc = 0;

	sfr__lock(&pool->mu);
	pool->nr_wanted = 0; /* writers make no memory until the next save */
	while ((block = sfr__pool_pop(&pool->whole)) != NULL ||
	       (block = sfr__pool_pop(&pool->partial)) != NULL) {
		sfr__pool_move_locked(pool, block, SFR__BLOCK_SHRINKING);
		sfr__pool_push(&work, block);
	}
	sfr__unlock(&pool->mu);
	sfr__pin_drop(&pool->pin, work.head);
	sfr__lock(&pool->mu);
	while ((block = sfr__pool_pop(&work)) != NULL) {
		int failed;

		/* a part of its region is in use, or the driver did not release the region */
		if (block->region != NULL) {
			sfr__pool_move_locked(pool, block, SFR__BLOCK_FREE);
			continue;
		}
		sfr__unlock(&pool->mu);
		failed = sfr__pool_decommit(pool, block, 0, block->committed);
		sfr__lock(&pool->mu);
		if (failed == 0)
			sfr__pool_recount_locked(pool, block, 0);
		else if (rc == 0)
			rc = failed;
		pool->nr_returned++;
		sfr__pool_move_locked(pool, block,
				      failed == 0 ? SFR__BLOCK_RESERVED : SFR__BLOCK_FREE);
	}
	sfr__unlock(&pool->mu);
	return rc;
}
