/* Memory made before somebody needs it: what makes saves after the first one cheap.
 *
 * The first touch of memory takes several times as long as a copy into it. A save says at its
 * beginning how many whole blocks it could use at a time (sfr__pool_join), and as long as the pool
 * has fewer (it lacks some), any thread that has nothing better to do makes them
 * (sfr__pool_supply): in the first save ahead of those who copy, and afterwards until every block
 * is there that the save could have used. From the second save on nobody waits for new memory.
 * Saves that overlap may want more than each of them alone: who finds no block with memory then
 * raises what is wanted to all that the saves in flight could use.
 *
 * Idle threads are niced, and on a busy machine they get nowhere. So writers keep pace
 * (sfr__pool_keep_pace): of what is lacking there is never more than blocks are left to be written,
 * and when the last is written the memory for the next save is there. Where the idle ones are as
 * quick as the disk that costs a look.
 *
 *     nr_wanted   whole blocks that saves could use; a trim sets it to nothing until the next save
 *     nr_full     blocks that have all their memory and are no snapshot's and not retired
 *     nr_filling  blocks in hand that will be
 *
 * Nobody waits for such a thread, which a busy machine may not let run for long. After each piece of
 * 2 MiB it asks whether anybody wants a block, or itself, and then what it has made stays with the
 * block, which is first to be gone on with. Who cannot wait for that takes the block over: a save
 * that finds no other, and the writer of a save's last block, who goes on with making it. The thread
 * may be in the middle of a piece, and learns of it afterwards. So pages of one block may be made
 * by two threads at a time, which changes no byte that is there already. But who takes memory waits
 * until none is at it: a trim, and whoever the system refuses memory or gives a driver's in its place.
 * Pages that went from under such a thread would be touched where they are not, or be made anew
 * and counted by nobody. And the piece that it was at is counted when it has made it, whoever has the
 * block by then, or none: who took it over may have wanted no more, or given up. For a pool that a driver knows it is the same: blocks are pinned by those who use
 * them, which is quicker with memory that is there.
 */
#include "memory/numa.h"
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
	if (pool->nr_wanted != 0) /* or it was trimmed under the saves in flight */
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
		(void)pthread_cond_broadcast(&pool->cv); /* a run may take the last block now */
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

/* Whether it is in the hand of a thread that makes it piece by piece. */
static bool is_being_made_locked(const struct sfr__pool *pool, const struct sfr__block *block)
{
	const struct sfr__maker *maker = pool->makers;

	while (maker != NULL && maker->block != block)
		maker = maker->next;
	return maker != NULL;
}

/* The block has `now` bytes, by a thread that may have lost it meanwhile. In other hands it is not
 * counted: those give it all that they want, or take back all that it has not. */
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

/* Piece by piece, for as long as nobody minds. -errno: the piece may be there in part. */
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

/* The system has no memory: what may be there beyond what is counted goes. Nobody takes the block
 * over meanwhile. */
static void undo_locked(struct sfr__pool *pool, struct sfr__maker *maker)
{
	struct sfr__block *block = maker->block;

	pool->nr_wanted = 0; /* the next save may have better luck */
	maker->block = NULL;
	maker->at = NULL;
	sfr__unlock(&pool->mu);
	/* Where that is refused, it is used by the next commit of these pages. */
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
	(void)pthread_cond_broadcast(&pool->cv); /* who takes memory waits in no queue */
}

/* Goes on with a block in hand. False when there was nothing to be made, or it was minded. */
static bool make_locked(struct sfr__pool *pool, struct sfr__block *block, bool idle,
			bool (*go_on)(void *arg), void *arg)
{
	struct sfr__maker maker = { pool->makers, block, block, idle };
	const size_t had = block->committed;
	struct sfr__numa near;
	bool made = true;
	int rc;

	pool->makers = &maker;
	pool->nr_filling++;
	block->want = pool->block_bytes;
	sfr__unlock(&pool->mu);
	sfr__numa_begin(&near, sfr__pin_node(&pool->pin));
	/* Once for the whole block: it excludes all who make memory in this process. */
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
	sfr__unlock(&pool->mu);
	sfr__numa_end(&near);
	sfr__lock(&pool->mu);
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

/* Whether the save's own blocks are not all there, and nobody minds. */
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
