/* Memory made ahead of need, which makes every save after the first one cheap.
 *
 * The first touch of memory takes several times as long as a copy into it. A save announces how
 * many whole blocks it could use at a time (sfr__pool_join). While the pool has fewer (it *lacks*
 * some), any idle thread makes them (sfr__pool_supply): in the first save ahead of the copying
 * threads, and afterwards until every block exists that the save could have used. From the second
 * save on, nobody waits for new memory. Saves that overlap may want more than each alone, so a save
 * that finds no block with memory raises the target to what all saves in flight could use.
 *
 * Idle threads are niced and make little progress on a busy machine. So writers keep pace
 * (sfr__pool_keep_pace): at most as many blocks are lacking as are still to be written, and with
 * the last write the memory for the next save exists. Where idle threads are as fast as the disk,
 * this costs one check.
 *
 *     nr_wanted   whole blocks that saves could use; a trim sets it to zero until the next save
 *     nr_full     blocks that have all their memory, are not held by snapshots and not retired
 *     nr_filling  owned blocks that will be
 *
 * Nobody waits for such a thread (a *maker*), which a busy machine may hardly schedule. After every
 * 2 MiB it checks whether anybody wants a block or its own time; the memory made so far then stays
 * with the block, which is finished first later on. A save that finds no other block takes the
 * maker's block over at once, and so does the writer of a save's last block, which finishes it. The
 * maker learns of that after its current 2 MiB, so two threads may make pages of one block at once,
 * which changes no existing byte.
 *
 * A thread that takes memory away waits until no maker is at it: a trim, or a failed or replaced
 * allocation. Otherwise the maker would touch missing pages, or make pages that nobody counts. The
 * maker counts its 2 MiB when they are made, even if the block has a new owner by then: that owner
 * may have wanted less or given up. Pools that a driver knows work the same way: the user of a
 * block pins it, which is faster when the memory exists. */
#include "memory/pin.h"
#include "memory/pool_int.h"
#include "memory/range.h"

static bool is_unfinished(const struct sfr__block *block)
{
	return block->committed < block->want;
}

struct sfr__block *sfr__pool_pop_unfinished(struct sfr__pool *pool)
{
	for (struct sfr__block **at = &pool->partial.head; *at != NULL; at = &(*at)->next) {
		struct sfr__block *block = *at;

		if (is_unfinished(block)) {
			*at = block->next;
			return block;
		}
	}
	return NULL;
}

bool sfr__pool_lacks_locked(const struct sfr__pool *pool)
{
	if (pool->nr_full + pool->nr_filling >= pool->nr_wanted)
		return false;
	if (pool->reserved.head != NULL || pool->nr_known < pool->nr_blocks)
		return true;
	for (const struct sfr__block *b = pool->partial.head; b != NULL; b = b->next)
		if (is_unfinished(b))
			return true;
	return false;
}

bool sfr__pool_lacks(struct sfr__pool *pool)
{
	return sfr__under(&pool->mu, sfr__pool_lacks_locked(pool));
}

static void want_locked(struct sfr__pool *pool, uint32_t nr)
{
	if (nr > pool->nr_blocks)
		nr = pool->nr_blocks;
	if (nr > pool->nr_wanted)
		pool->nr_wanted = nr;
}

void sfr__pool_missed_locked(struct sfr__pool *pool)
{
	if (pool->nr_wanted != 0) /* 0: trimmed while saves are in flight */
		want_locked(pool, pool->nr_expected);
}

void sfr__pool_join(struct sfr__pool *pool, uint32_t nr_whole)
{
	sfr__lock(&pool->mu);
	pool->nr_saves++;
	pool->nr_expected += nr_whole;
	want_locked(pool, nr_whole);
	sfr__unlock(&pool->mu);
}

void sfr__pool_leave(struct sfr__pool *pool, uint32_t nr_whole)
{
	sfr__lock(&pool->mu);
	pool->nr_saves--;
	pool->nr_expected -= nr_whole;
	if (pool->waiters != NULL)
		(void)pthread_cond_broadcast(&pool->cv); /* a run may now take the last block */
	sfr__unlock(&pool->mu);
}

/* ---- making it ---- */

static struct sfr__block *take_locked(struct sfr__pool *pool)
{
	struct sfr__block *block;

	if (pool->waiters != NULL || !sfr__pool_lacks_locked(pool))
		return NULL;
	block = sfr__pool_pop_unfinished(pool);
	if (block == NULL)
		block = sfr__pool_pop(&pool->reserved);
	if (block == NULL)
		block = sfr__pool_fresh_locked(pool);
	sfr__pool_move_locked(pool, block, SFR__BLOCK_GROWING);
	return block;
}

static struct sfr__block *take_over_locked(struct sfr__pool *pool, bool of_idle_ones)
{
	struct sfr__maker *maker = pool->makers;
	struct sfr__block *block;

	while (maker != NULL && (maker->block == NULL || (of_idle_ones && !maker->idle)))
		maker = maker->next;
	if (maker == NULL)
		return NULL;
	block = maker->block;
	maker->block = NULL;
	pool->nr_filling--;
	return block;
}

struct sfr__block *sfr__pool_take_over_locked(struct sfr__pool *pool)
{
	return take_over_locked(pool, false);
}

static void put_back_locked(struct sfr__pool *pool, struct sfr__block *block)
{
	pool->nr_returned += block->committed != 0;
	sfr__pool_move_locked(pool, block,
			      block->committed != 0 ? SFR__BLOCK_FREE : SFR__BLOCK_RESERVED);
}

bool sfr__pool_reclaim_locked(struct sfr__pool *pool)
{
	struct sfr__block *block;
	bool any = false;

	while ((block = take_over_locked(pool, false)) != NULL) {
		put_back_locked(pool, block);
		any = true;
	}
	return any;
}

/* Returns whether a maker owns the block. */
static bool is_being_made_locked(const struct sfr__pool *pool, const struct sfr__block *block)
{
	const struct sfr__maker *maker = pool->makers;

	while (maker != NULL && maker->block != block)
		maker = maker->next;
	return maker != NULL;
}

/* Records that the block has `now` bytes, made by a thread that may have lost it. A block with
 * another owner is not counted: that owner gives it all it wants or takes back all that is not
 * counted. */
static void count_locked(struct sfr__pool *pool, struct sfr__block *block, size_t now)
{
	const enum sfr__block_state state = block->state;
	const bool listed = state == SFR__BLOCK_RESERVED || state == SFR__BLOCK_FREE;

	if (block->committed >= now || state == SFR__BLOCK_SHRINKING ||
	    (state == SFR__BLOCK_GROWING && !is_being_made_locked(pool, block)))
		return;
	if (listed) {
		sfr__pool_move_locked(pool, block, SFR__BLOCK_GROWING);
		sfr__pool_filter(&pool->reserved);
		sfr__pool_filter(&pool->partial);
	}
	sfr__pool_recount_locked(pool, block, now);
	if (listed)
		put_back_locked(pool, block);
}

/* Makes 2 MiB at a time for as long as nobody objects. -errno: the last 2 MiB may exist in part. */
static int fill_locked(struct sfr__pool *pool, struct sfr__maker *maker, bool (*go_on)(void *arg),
		       void *arg)
{
	char *const home = sfr__pool_home(pool, maker->at);
	struct sfr__block *block;
	int rc = 0;

	while (rc == 0 && (block = maker->block) != NULL && is_unfinished(block) &&
	       pool->waiters == NULL && pool->nr_wanted != 0) {
		size_t had = block->committed, now = sfr__pool_memory_for(pool, had + 1);
		bool yes;

		sfr__unlock(&pool->mu);
		yes = go_on(arg);
		if (yes)
			rc = sfr__memory_populate(&pool->range, home + had, now - had);
		sfr__lock(&pool->mu);
		if (!yes)
			break;
		if (rc == 0)
			count_locked(pool, block, now);
	}
	return rc;
}

/* Frees uncounted memory after the system ran out. Nobody takes the block over meanwhile. */
static void undo_locked(struct sfr__pool *pool, struct sfr__maker *maker)
{
	struct sfr__block *block = maker->block;

	pool->nr_wanted = 0; /* the next save may succeed */
	maker->block = NULL;
	maker->at = NULL;
	sfr__unlock(&pool->mu);
	/* If this is refused, the next commit of these pages uses the memory. */
	(void)sfr__pool_decommit(pool, block, block->committed, block->want);
	sfr__lock(&pool->mu);
	maker->block = block;
}

static void unlink_locked(struct sfr__pool *pool, struct sfr__maker *maker)
{
	struct sfr__maker **at = &pool->makers;

	while (*at != maker)
		at = &(*at)->next;
	*at = maker->next;
	/* a thread that takes memory waits outside the queue */
	(void)pthread_cond_broadcast(&pool->cv);
}

/* Continues a block that the caller owns. False when nothing was made. */
static bool make_locked(struct sfr__pool *pool, struct sfr__block *block, bool idle,
			bool (*go_on)(void *arg), void *arg)
{
	struct sfr__maker maker = { pool->makers, block, block, idle };
	const size_t had = block->committed;
	bool made = true;
	int rc;

	pool->makers = &maker;
	pool->nr_filling++;
	block->want = pool->block_bytes;
	sfr__unlock(&pool->mu);
	/* Once for the whole block, because it excludes all threads of the process that make
	 * memory. */
	rc = sfr__memory_open(sfr__pool_home(pool, block) + had, pool->block_bytes - had);
	sfr__lock(&pool->mu);
	if (rc == 0)
		rc = fill_locked(pool, &maker, go_on, arg);
	if (rc != 0 && maker.block != NULL)
		undo_locked(pool, &maker);
	if (maker.block != NULL) {
		made = block->committed != had;
		pool->nr_filling--;
		put_back_locked(pool, block);
	}
	unlink_locked(pool, &maker);
	return made;
}

static bool supply(struct sfr__pool *pool, bool idle, bool (*go_on)(void *arg), void *arg)
{
	struct sfr__block *block;
	bool made;

	sfr__lock(&pool->mu);
	block = take_locked(pool);
	made = block != NULL && make_locked(pool, block, idle, go_on, arg);
	sfr__unlock(&pool->mu);
	return made;
}

bool sfr__pool_supply(struct sfr__pool *pool, bool (*go_on)(void *arg), void *arg)
{
	return supply(pool, true, go_on, arg);
}

/* Returns whether the save's own blocks are incomplete and nobody waits for a block. */
static bool lacks_own_locked(const struct sfr__pool *pool, uint32_t nr_whole)
{
	uint32_t nr = nr_whole < pool->nr_wanted ? nr_whole : pool->nr_wanted;

	return pool->nr_full < nr && pool->waiters == NULL;
}

void sfr__pool_keep_pace(struct sfr__pool *pool, uint32_t nr_left, uint32_t nr_whole,
			 bool (*go_on)(void *arg), void *arg)
{
	struct sfr__block *block;

	if (sfr__under(&pool->mu, pool->nr_full + pool->nr_filling + nr_left < pool->nr_wanted))
		(void)supply(pool, false, go_on, arg);
	if (nr_left != 0)
		return;
	sfr__lock(&pool->mu);
	while (lacks_own_locked(pool, nr_whole) && (block = take_over_locked(pool, true)) != NULL &&
	       make_locked(pool, block, false, go_on, arg))
		;
	sfr__unlock(&pool->mu);
}

void sfr__pool_stop_supply_locked(struct sfr__pool *pool)
{
	pool->nr_wanted = 0;
	while (pool->makers != NULL)
		(void)sfr__cond_wait(&pool->cv, &pool->mu, SFR_FOREVER);
}
