/* supply.c: the writers of a save make the memory that the next save needs. */
#include <stdatomic.h>
#include <string.h>
#include <sys/prctl.h>

#include "pool_helpers.h"
#include "saving.h"

/* Returns how often memory was made for a block. */
static uint64_t nr_made(struct sfr__pool *pool)
{
	return sfr__pool_nr_moves(pool, SFR__BLOCK_RESERVED, SFR__BLOCK_GROWING) +
	       sfr__pool_nr_moves(pool, SFR__BLOCK_FREE, SFR__BLOCK_GROWING);
}

static bool lacks(struct sfr__pool *pool)
{
	return sfr__under(&pool->mu, sfr__pool_needs_whole_blocks_locked(pool));
}

TEST(supply_makes_what_a_save_could_use_and_no_more)
{
	struct sfr__pool *pool = make(80 * MIB, 4 * MIB);
	struct sfr__block *blocks[6];
	uint64_t made;

	CHECK(!lacks(pool));
	sfr__pool_make_whole_blocks(pool, 0);
	CHECK_EQ(stats(pool).committed_bytes, 0);
	sfr__pool_add_save(pool, 5);
	CHECK(lacks(pool));
	/* Its small last block is separate and stays small. */
	blocks[5] = lease(pool, 1);
	CHECK_EQ(blocks[5]->committed, 2 * MIB);
	sfr__pool_put(pool, blocks[5]);
	sfr__pool_make_whole_blocks(pool, 0);
	sfr__pool_remove_save(pool, 5);
	CHECK(!lacks(pool));
	CHECK_EQ(stats(pool).committed_bytes, 22 * MIB);
	made = nr_made(pool);
	for (int save = 0; save < 3; save++) {
		sfr__pool_add_save(pool, 5);
		for (int i = 0; i < 6; i++)
			blocks[i] = lease(pool, i < 5 ? 4 * MIB : 1);
		for (int i = 0; i < 6; i++) {
			sfr__pool_put(pool, blocks[i]);
			sfr__pool_make_whole_blocks(pool, 5 - (uint32_t)i);
		}
		sfr__pool_remove_save(pool, 5);
	}
	CHECK_EQ(nr_made(pool), made);
	CHECK_EQ(stats(pool).committed_bytes, 22 * MIB);
	sfr__pool_free(pool);
}

TEST(writer_makes_only_memory_that_later_writes_cannot)
{
	struct sfr__pool *pool = make(80 * MIB, 4 * MIB);

	sfr__pool_add_save(pool, 5);
	sfr__pool_make_whole_blocks(pool, 5);
	CHECK_EQ(stats(pool).committed_bytes, 0);
	sfr__pool_make_whole_blocks(pool, 4);
	CHECK_EQ(stats(pool).committed_bytes, 4 * MIB);
	sfr__pool_make_whole_blocks(pool, 4);
	CHECK_EQ(stats(pool).committed_bytes, 4 * MIB);
	sfr__pool_make_whole_blocks(pool, 0);
	CHECK_EQ(stats(pool).committed_bytes, 20 * MIB);
	sfr__pool_remove_save(pool, 5);
	sfr__pool_free(pool);
}

TEST(overlapping_saves_raise_the_number_of_wanted_blocks)
{
	struct sfr__pool *pool = make(80 * MIB, 4 * MIB);
	struct sfr__block *blocks[4];

	sfr__pool_add_save(pool, 3);
	sfr__pool_add_save(pool, 3);
	sfr__pool_make_whole_blocks(pool, 0);
	/* If one save's memory is enough for both, no more is made. */
	CHECK_EQ(stats(pool).committed_bytes, 12 * MIB);
	for (int i = 0; i < 4; i++)
		blocks[i] = lease(pool, 4 * MIB);
	sfr__pool_make_whole_blocks(pool, 0);
	CHECK_EQ(stats(pool).committed_bytes, 24 * MIB);
	for (int i = 0; i < 4; i++)
		sfr__pool_put(pool, blocks[i]);
	sfr__pool_remove_save(pool, 3);
	sfr__pool_remove_save(pool, 3);
	sfr__pool_free(pool);
}

TEST(supply_stays_within_the_cap_without_held_blocks)
{
	struct sfr__pool *pool = make(16 * MIB, 4 * MIB);
	const uint64_t lens[1] = { 8 * MIB };
	struct sfr__lease held;
	char *addr;

	CHECK_EQ(sfr__pool_lease(pool, lens, 1, false, 0, 0, &addr, &held), 0);
	sfr__pool_add_save(pool, 1);
	CHECK(lacks(pool));
	sfr__pool_make_whole_blocks(pool, 0);
	CHECK_EQ(stats(pool).committed_bytes, 12 * MIB);
	sfr__pool_add_save(pool, 1000);
	sfr__pool_make_whole_blocks(pool, 0);
	CHECK(!lacks(pool));
	CHECK_EQ(stats(pool).committed_bytes, 16 * MIB);
	sfr__pool_unlease(pool, &held);
	sfr__pool_remove_save(pool, 1000);
	sfr__pool_remove_save(pool, 1);
	sfr__pool_free(pool);
}

TEST(after_a_trim_no_memory_is_made_until_the_next_save)
{
	struct sfr__pool *pool = make(80 * MIB, 8 * MIB);
	struct sfr__block *block;

	sfr__pool_add_save(pool, 3);
	sfr__pool_make_whole_blocks(pool, 0);
	CHECK_EQ(stats(pool).committed_bytes, 24 * MIB);
	CHECK_EQ(sfr__pool_trim(pool), 0);
	CHECK_EQ(stats(pool).committed_bytes, 0);
	CHECK(!lacks(pool));
	/* The save under way gets its blocks, and nothing more is made. */
	block = lease(pool, 8 * MIB);
	CHECK(!lacks(pool));
	sfr__pool_put(pool, block);
	sfr__pool_make_whole_blocks(pool, 0);
	CHECK_EQ(stats(pool).committed_bytes, 8 * MIB);
	sfr__pool_add_save(pool, 2);
	CHECK(lacks(pool));
	sfr__pool_remove_save(pool, 2);
	sfr__pool_remove_save(pool, 3);
	sfr__pool_free(pool);
}

TEST(supply_stops_until_the_next_save_after_a_refusal)
{
	struct sfr__pool *pool = make(80 * MIB, 4 * MIB);

	sfr__pool_add_save(pool, 4);
	sfr__pool_make_whole_blocks(pool, 3);
	refuse_populate = ENOMEM;
	sfr__pool_make_whole_blocks(pool, 0);
	CHECK(!lacks(pool));
	refuse_populate = 0;
	CHECK_EQ(stats(pool).committed_bytes, 4 * MIB);
	CHECK_EQ(stats(pool).leased_bytes, 0);
	sfr__pool_add_save(pool, 4);
	sfr__pool_make_whole_blocks(pool, 0);
	CHECK_EQ(stats(pool).committed_bytes, 16 * MIB);
	sfr__pool_remove_save(pool, 4);
	sfr__pool_remove_save(pool, 4);
	sfr__pool_free(pool);
}

TEST(a_writer_makes_no_memory_while_a_thread_waits_for_a_block)
{
	struct sfr__pool_waiter waiter = { .seq = 1 };
	struct sfr__pool *pool = make(24 * MIB, 8 * MIB);

	sfr__pool_add_save(pool, 3);
	sfr__lock(&pool->mu);
	sfr__pool_enqueue_locked(pool, &waiter);
	sfr__unlock(&pool->mu);
	sfr__pool_make_whole_blocks(pool, 0);
	CHECK_EQ(stats(pool).committed_bytes, 0);
	sfr__lock(&pool->mu);
	sfr__pool_dequeue_locked(pool, &waiter);
	sfr__unlock(&pool->mu);
	sfr__pool_make_whole_blocks(pool, 0);
	CHECK_EQ(stats(pool).committed_bytes, 24 * MIB);
	sfr__pool_remove_save(pool, 3);
	sfr__pool_free(pool);
}

/* ---- the writers of an engine ---- */

enum {
	STATE_LEN = 24 << 20,
	STATE_BLOCK = 2 << 20,
	/* Each of two writers and two copiers may be making a block when the call needs one. The
	 * call then makes its own. */
	EXTRA = 4 * STATE_BLOCK,
};

static void save_state(struct sfr_engine *engine, const char *dir, uint32_t lane)
{
	static char state[STATE_LEN];
	const struct sfr_source source = { (uint64_t)(uintptr_t)state, sizeof(state), lane, 0 };
	const struct sfr_save_desc desc = { .dir = dir,
					    .name = "a.pt",
					    .skeleton = saving_skeleton,
					    .skeleton_len = sizeof(saving_skeleton),
					    .sources = &source,
					    .nr_sources = 1 };
	struct sfr_ticket *t;

	memset(state, 7, sizeof(state));
	if (!CHECK_EQ(sfr_save_new(engine, &desc, &t), 0))
		return;
	CHECK_EQ(saving_submit(t), 0);
	saving_done(t);
}

static uint64_t committed(struct sfr_engine *engine)
{
	struct sfr_stats out;

	CHECK_EQ(sfr_engine_stats(engine, &out), 0);
	return out.committed_bytes;
}

/* Sleeps as long as a niced thread may wait on a busy machine. */
static void slow_lane(void)
{
	char name[16] = "";

	(void)prctl(PR_GET_NAME, name);
	(void)usleep(strcmp(name, "sfr-lane0") == 0 ? 100000 : 2000);
}

static void save_again(struct sfr_engine *engine, const char *dir, uint32_t lane)
{
	uint64_t had = committed(engine), made = nr_made(engine->pool);

	for (int i = 0; i < 3; i++)
		save_state(engine, dir, lane);
	CHECK_EQ(committed(engine), had);
	CHECK_EQ(nr_made(engine->pool), made);
}

TEST(later_saves_need_no_new_memory)
{
	static void (*const during[])(void) = { NULL, slow_lane };
	const char *dir = dir_make("/tmp");

	for (int i = 0; i < 4; i++) {
		const uint32_t lane = (uint32_t)i % 2;
		struct sfr_engine *engine =
			saving_engine_of(STATE_BLOCK, 256 * MIB / STATE_BLOCK, 2, 2);
		/* Captured and deferred bytes are in different blocks. */
		uint64_t whole = STATE_LEN + lane * STATE_BLOCK;

		during_populate = during[i / 2];
		save_state(engine, dir, lane);
		during_populate = NULL;
		CHECK(committed(engine) >= whole);
		CHECK(committed(engine) <= whole + EXTRA);
		save_again(engine, dir, lane);
		CHECK_EQ(sfr_engine_trim(engine), 0);
		CHECK_EQ(committed(engine), 0);
		sfr_engine_put(engine);
	}
	dir_remove(dir);
}

static atomic_int nr_by_copiers;

/* The call waits at its first block until copiers have made three others. */
static void copiers_first(void)
{
	char name[16] = "";

	(void)prctl(PR_GET_NAME, name);
	if (strncmp(name, "sfr-copier", 10) == 0)
		nr_by_copiers++;
	else if (strncmp(name, "sfr-", 4) != 0)
		for (int ms = 0; nr_by_copiers < 3 && ms < 10000; ms++)
			(void)usleep(1000);
}

TEST(copiers_make_memory_while_the_call_waits_for_its_own)
{
	const char *dir = dir_make("/tmp");
	struct sfr_engine *engine = saving_engine_of(STATE_BLOCK, 256 * MIB / STATE_BLOCK, 2, 2);

	during_populate = copiers_first;
	save_state(engine, dir, SFR_CAPTURED);
	during_populate = NULL;
	CHECK(nr_by_copiers >= 3);
	CHECK(committed(engine) <= STATE_LEN + EXTRA);
	sfr_engine_put(engine);
	dir_remove(dir);
}

BEGIN
{
	use_odd_system();
	return true;
}
