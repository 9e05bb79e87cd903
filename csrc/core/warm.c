/* Memory for many blocks at once, before anybody needs it (warm_up), and back to the system (trim).
 *
 * The cost of a first touch is the page fault's and the driver's, so warm_up takes it on several
 * threads and has the driver pin neighbours together. Blocks are in the hand of one thread
 * meanwhile; pool.c has the diagram.
 */
#include <stdlib.h>

#include "memory.h"
#include "pin.h"
#include "pool.h"

#define MAX_WARMERS 4 /* threads in warm_up, the caller among them */

struct warm_up {
	struct sfr__pool *pool;
	struct sfr__list work; /* blocks in hand, guarded by pool->mu */
	uint64_t nbytes;       /* asked for, from the first block on */
	int rc;                /* the first failure; guarded by pool->mu */
};

/* Memory that the block is to have; 0 for those behind the end. */
static size_t warm_len(const struct warm_up *job, const struct sfr__block *block)
{
	uint64_t begin = block->index * job->pool->block_bytes;

	return job->nbytes > begin ? sfr__pool_memory_for(job->pool, job->nbytes - begin) : 0;
}

/* One thread's share: blocks from the list until it is empty. After a failure the rest go back
 * as they are. */
static void *warm_main(void *arg)
{
	struct warm_up *job = arg;
	struct sfr__pool *pool = job->pool;
	struct sfr__block *block;

	(void)pthread_mutex_lock(&pool->mu);
	while ((block = sfr__pool_pop(&job->work)) != NULL) {
		size_t had = block->committed;

		if (job->rc == 0) {
			int rc;

			(void)pthread_mutex_unlock(&pool->mu);
			rc = sfr__pool_grow(pool, block, warm_len(job, block));
			(void)pthread_mutex_lock(&pool->mu);
			sfr__pool_recount_locked(pool, block, had);
			if (rc != 0 && job->rc == 0)
				job->rc = rc;
		}
		pool->nr_returned++;
		sfr__pool_move_locked(pool, block,
				      block->committed != 0 ? SFR__BLOCK_FREE :
							      SFR__BLOCK_RESERVED);
	}
	(void)pthread_mutex_unlock(&pool->mu);
	return NULL;
}

/* Takes the blocks out of a list that the job has work on. */
static uint32_t collect_locked(struct warm_up *job, struct sfr__list *list)
{
	struct sfr__block **at = &list->head, *block;
	uint32_t nr = 0;

	while ((block = *at) != NULL) {
		if (block->committed >= warm_len(job, block)) {
			at = &block->next;
			continue;
		}
		*at = block->next;
		sfr__pool_move_locked(job->pool, block, SFR__BLOCK_GROWING);
		sfr__pool_push(&job->work, block);
		nr++;
	}
	return nr;
}

static int by_index(const void *a, const void *b)
{
	uint32_t i = (*(struct sfr__block *const *)a)->index;
	uint32_t j = (*(struct sfr__block *const *)b)->index;

	return i < j ? -1 : i > j;
}

/* Pins the free blocks that have all their memory: neighbours together. */
static void pin_whole(struct sfr__pool *pool)
{
	struct sfr__block **found = sfr_sys.malloc(pool->nr_blocks * sizeof(struct sfr__block *));
	struct sfr__cuda_scope scope;
	struct sfr__block **at = &pool->whole.head, *block;
	uint32_t nr = 0;

	if (found == NULL)
		return; /* each is pinned when it is first used, then */
	if (sfr__cuda_enter(&scope, pool->pin.cu, pool->pin.context) != CUDA_SUCCESS) {
		sfr_sys.free(found);
		return;
	}
	(void)pthread_mutex_lock(&pool->mu);
	while ((block = *at) != NULL) {
		if (block->piece != NULL) {
			at = &block->next;
			continue;
		}
		*at = block->next;
		sfr__pool_move_locked(pool, block, SFR__BLOCK_GROWING);
		found[nr++] = block;
	}
	(void)pthread_mutex_unlock(&pool->mu);
	qsort(found, nr, sizeof(*found), by_index);
	for (uint32_t i = 0, len; i < nr; i += len) {
		for (len = 1; i + len < nr && found[i + len]->index == found[i]->index + len;)
			len++;
		sfr__pin_blocks(&pool->pin, found + i, len, pool->block_bytes);
	}
	sfr__cuda_leave(&scope);
	(void)pthread_mutex_lock(&pool->mu);
	for (uint32_t i = 0; i < nr; i++)
		sfr__pool_move_locked(pool, found[i], SFR__BLOCK_FREE);
	(void)pthread_mutex_unlock(&pool->mu);
	sfr_sys.free(found);
}

int sfr__pool_warm_up(struct sfr__pool *pool, uint64_t nbytes)
{
	struct warm_up job = { .pool = pool, .nbytes = nbytes };
	pthread_t threads[MAX_WARMERS - 1];
	uint32_t nr_threads = 0, nr;
	struct sfr__block *block;

	if (job.nbytes > pool->nr_blocks * pool->block_bytes)
		job.nbytes = pool->nr_blocks * pool->block_bytes;
	(void)pthread_mutex_lock(&pool->mu);
	nr = collect_locked(&job, &pool->partial) + collect_locked(&job, &pool->reserved);
	for (; pool->nr_known * pool->block_bytes < job.nbytes; nr++) {
		block = sfr__pool_fresh_locked(pool);
		sfr__pool_move_locked(pool, block, SFR__BLOCK_GROWING);
		sfr__pool_push(&job.work, block);
	}
	(void)pthread_mutex_unlock(&pool->mu);

	/* Fewer threads, or none, only take longer. */
	while (nr_threads + 1 < MAX_WARMERS && nr_threads + 1 < nr &&
	       sfr__thread_start(&threads[nr_threads], "sfr-warm", warm_main, &job) == 0)
		nr_threads++;
	(void)warm_main(&job);
	while (nr_threads > 0)
		(void)sfr_sys.thread_join(threads[--nr_threads], NULL); /* ours, not detached */
	if (sfr__pin_is_on(&pool->pin))
		pin_whole(pool);
	return job.rc;
}

int sfr__pool_trim(struct sfr__pool *pool)
{
	struct sfr__list work = { NULL };
	struct sfr__block *block;
	int rc = 0;

	(void)pthread_mutex_lock(&pool->mu);
	while ((block = sfr__pool_pop(&pool->whole)) != NULL ||
	       (block = sfr__pool_pop(&pool->partial)) != NULL) {
		sfr__pool_move_locked(pool, block, SFR__BLOCK_SHRINKING);
		sfr__pool_push(&work, block);
	}
	(void)pthread_mutex_unlock(&pool->mu);
	sfr__pin_drop(&pool->pin, work.head);
	(void)pthread_mutex_lock(&pool->mu);
	while ((block = sfr__pool_pop(&work)) != NULL) {
		size_t had = block->committed;
		int failed;

		if (block->piece != NULL) { /* the driver knows it together with one in use */
			sfr__pool_move_locked(pool, block, SFR__BLOCK_FREE);
			continue;
		}
		(void)pthread_mutex_unlock(&pool->mu);
		failed = sfr__memory_decommit(block->mem, block->committed);
		if (failed == 0)
			block->committed = 0;
		else if (rc == 0)
			rc = failed;
		(void)pthread_mutex_lock(&pool->mu);
		sfr__pool_recount_locked(pool, block, had);
		pool->nr_returned++;
		sfr__pool_move_locked(pool, block,
				      failed == 0 ? SFR__BLOCK_RESERVED : SFR__BLOCK_FREE);
	}
	(void)pthread_mutex_unlock(&pool->mu);
	return rc;
}
