/* supply.c: memory is made before saves need it, by whoever has nothing better to do. */
#include <semaphore.h>
#include <sys/prctl.h>

#include "pool_helpers.h"
#include "saving.h"

static bool always(void *arg)
{
	(void)arg;
	return true;
}

static bool never(void *arg)
{
	(void)arg;
	return false;
}

/* Yes as often as *arg says. */
static bool count_down(void *arg)
{
	return (*(int *)arg)-- > 0;
}

static void supply_all(struct sfr__pool *pool)
{
	while (sfr__pool_supply(pool, always, NULL))
		;
}

/* How often memory was made for a block that a thread took for itself. */
static uint64_t nr_cold(struct sfr__pool *pool)
{
	return sfr__pool_moves(pool, SFR__BLOCK_RESERVED, SFR__BLOCK_GROWING) +
	       sfr__pool_moves(pool, SFR__BLOCK_FREE, SFR__BLOCK_GROWING);
}

TEST(what_a_save_could_use_is_made_and_then_no_save_makes_any)
{
	struct sfr__pool *pool = make(80 * MIB, 4 * MIB);
	struct sfr__block *blocks[6];
	uint64_t cold;

	CHECK(!sfr__pool_lacks(pool));
	CHECK(!sfr__pool_supply(pool, always, NULL));
	sfr__pool_join(pool, 5);
	CHECK(sfr__pool_lacks(pool));
	/* Its small last block is its own, and stays small. */
	CHECK(sfr__pool_supply(pool, always, NULL));
	blocks[5] = lease(pool, 1);
	CHECK_EQ(blocks[5]->committed, 2 * MIB);
	sfr__pool_put(pool, blocks[5]);
	supply_all(pool);
	sfr__pool_leave(pool, 5);
	CHECK(!sfr__pool_lacks(pool));
	CHECK_EQ(stats(pool).committed_bytes, 22 * MIB);
	cold = nr_cold(pool);
	for (int save = 0; save < 3; save++) {
		sfr__pool_join(pool, 5);
		for (int i = 0; i < 6; i++)
			blocks[i] = lease(pool, i < 5 ? 4 * MIB : 1);
		for (int i = 0; i < 6; i++)
			sfr__pool_put(pool, blocks[i]);
		sfr__pool_leave(pool, 5);
	}
	CHECK_EQ(nr_cold(pool), cold);
	CHECK_EQ(stats(pool).committed_bytes, 22 * MIB);
	/* What there is was counted once, however often it was leased. */
	CHECK_EQ(sfr__pool_trim(pool), 0);
	sfr__pool_join(pool, 5);
	supply_all(pool);
	sfr__pool_leave(pool, 5);
	CHECK_EQ(stats(pool).committed_bytes, 20 * MIB);
	sfr__pool_free(pool);
}

/* It is what its save needs, and whole ones are made beside it. */
TEST(a_block_that_a_small_save_went_on_with_stays_small)
{
	struct sfr__pool *pool = make(80 * MIB, 8 * MIB);
	struct sfr__block *block;
	int times = 1;

	sfr__pool_join(pool, 1);
	CHECK(sfr__pool_supply(pool, count_down, &times));
	block = lease(pool, 4 * MIB);
	CHECK_EQ(stats(pool).committed_bytes, 4 * MIB);
	sfr__pool_put(pool, block);
	supply_all(pool);
	CHECK_EQ(block->committed, 4 * MIB);
	CHECK_EQ(stats(pool).committed_bytes, 12 * MIB);
	sfr__pool_leave(pool, 1);
	sfr__pool_free(pool);
}

TEST(saves_that_overlap_and_want_more_get_it)
{
	struct sfr__pool *pool = make(80 * MIB, 4 * MIB);
	struct sfr__block *blocks[4];

	sfr__pool_join(pool, 3);
	sfr__pool_join(pool, 3);
	supply_all(pool);
	/* As long as one's memory is enough for both it stays at that. */
	CHECK_EQ(stats(pool).committed_bytes, 12 * MIB);
	for (int i = 0; i < 4; i++)
		blocks[i] = lease(pool, 4 * MIB);
	supply_all(pool);
	CHECK_EQ(stats(pool).committed_bytes, 24 * MIB);
	for (int i = 0; i < 4; i++)
		sfr__pool_put(pool, blocks[i]);
	sfr__pool_leave(pool, 3);
	sfr__pool_leave(pool, 3);
	sfr__pool_free(pool);
}

TEST(the_cap_bounds_it_and_what_snapshots_hold_does_not_count)
{
	struct sfr__pool *pool = make(16 * MIB, 4 * MIB);
	const uint64_t lens[1] = { 8 * MIB };
	struct sfr__lease held;
	char *addr;

	CHECK_EQ(sfr__pool_place(pool, lens, 1, false, 0, 0, &addr, &held), 0);
	sfr__pool_join(pool, 1);
	CHECK(sfr__pool_lacks(pool));
	supply_all(pool);
	CHECK_EQ(stats(pool).committed_bytes, 12 * MIB);
	sfr__pool_join(pool, 1000);
	supply_all(pool);
	CHECK(!sfr__pool_lacks(pool));
	CHECK_EQ(stats(pool).committed_bytes, 16 * MIB);
	sfr__pool_unplace(pool, &held);
	sfr__pool_leave(pool, 1000);
	sfr__pool_leave(pool, 1);
	sfr__pool_free(pool);
}

TEST(it_stops_when_it_is_told_to_and_goes_on_where_it_stopped)
{
	struct sfr__pool *pool = make(80 * MIB, 8 * MIB);
	int times = 3;

	sfr__pool_join(pool, 2);
	CHECK(!sfr__pool_supply(pool, never, NULL));
	CHECK_EQ(stats(pool).committed_bytes, 0);
	CHECK(sfr__pool_supply(pool, count_down, &times));
	CHECK_EQ(stats(pool).committed_bytes, 6 * MIB);
	CHECK(sfr__pool_supply(pool, always, NULL));
	CHECK_EQ(stats(pool).committed_bytes, 8 * MIB);
	supply_all(pool);
	CHECK_EQ(stats(pool).committed_bytes, 16 * MIB);
	sfr__pool_leave(pool, 2);
	sfr__pool_free(pool);
}

/* ---- while it is made, others come ---- */

static struct sfr__pool *shared_pool;
static pthread_barrier_t made_a_piece;

static bool meet(void *arg)
{
	int *nr = arg;

	if (++*nr == 2) { /* one piece is there */
		(void)pthread_barrier_wait(&made_a_piece);
		/* Whoever came is in the queue, or waits for it to stop. */
		(void)usleep(20000);
	}
	return true;
}

static void *supply_one(void *arg)
{
	int nr = 0;

	(void)arg;
	(void)sfr__pool_supply(shared_pool, meet, &nr);
	return NULL;
}

static void begin_to_supply(pthread_t *thread, uint64_t pool_bytes)
{
	shared_pool = make(pool_bytes, 8 * MIB);
	(void)pthread_barrier_init(&made_a_piece, NULL, 2);
	sfr__pool_join(shared_pool, 1);
	CHECK_EQ(pthread_create(thread, NULL, supply_one, NULL), 0);
	(void)pthread_barrier_wait(&made_a_piece);
}

static void end_supply(pthread_t thread)
{
	CHECK_EQ(pthread_join(thread, NULL), 0);
	(void)pthread_barrier_destroy(&made_a_piece);
	sfr__pool_leave(shared_pool, 1);
	sfr__pool_free(shared_pool);
}

TEST(who_wants_the_last_block_gets_it_even_without_waiting)
{
	struct sfr__block *block;
	pthread_t thread;

	begin_to_supply(&thread, 8 * MIB);
	block = lease(shared_pool, 8 * MIB);
	if (CHECK(block != NULL))
		CHECK_EQ(block->committed, 8 * MIB);
	sfr__pool_put(shared_pool, block);
	end_supply(thread);
}

TEST(a_run_gets_it_too)
{
	const uint64_t lens[1] = { 16 * MIB };
	struct sfr__lease run;
	pthread_t thread;
	char *addr;

	begin_to_supply(&thread, 16 * MIB);
	CHECK_EQ(sfr__pool_place(shared_pool, lens, 1, false, 1, 0, &addr, &run), 0);
	sfr__pool_unplace(shared_pool, &run);
	end_supply(thread);
}

TEST(a_trim_takes_what_is_being_made_and_none_is_made_until_the_next_save)
{
	struct sfr__block *block;
	pthread_t thread;

	begin_to_supply(&thread, 80 * MIB);
	sfr__pool_join(shared_pool, 3);
	CHECK_EQ(sfr__pool_trim(shared_pool), 0);
	CHECK_EQ(stats(shared_pool).committed_bytes, 0);
	CHECK(!sfr__pool_lacks(shared_pool));
	/* The save that is under way gets its blocks; nothing is made beyond that. */
	block = lease(shared_pool, 8 * MIB);
	CHECK(!sfr__pool_lacks(shared_pool));
	sfr__pool_put(shared_pool, block);
	CHECK_EQ(stats(shared_pool).committed_bytes, 8 * MIB);
	sfr__pool_join(shared_pool, 2);
	CHECK(sfr__pool_lacks(shared_pool));
	sfr__pool_leave(shared_pool, 2);
	sfr__pool_leave(shared_pool, 3);
	end_supply(thread);
}

TEST(a_system_without_memory_is_not_asked_again_before_the_next_save)
{
	struct sfr__pool *pool = make(80 * MIB, 4 * MIB);

	sfr__pool_join(pool, 4);
	CHECK(sfr__pool_supply(pool, always, NULL));
	refuse_populate = ENOMEM;
	CHECK(!sfr__pool_supply(pool, always, NULL));
	CHECK(!sfr__pool_lacks(pool));
	refuse_populate = 0;
	CHECK_EQ(stats(pool).committed_bytes, 4 * MIB);
	CHECK_EQ(stats(pool).leased_bytes, 0);
	sfr__pool_join(pool, 4);
	supply_all(pool);
	CHECK_EQ(stats(pool).committed_bytes, 16 * MIB);
	sfr__pool_leave(pool, 4);
	sfr__pool_leave(pool, 4);
	sfr__pool_free(pool);
}

/* ---- an engine's threads do it ---- */

enum { STATE_LEN = 24 << 20, STATE_BLOCK = 2 << 20 };

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
	saving_finish(t);
	sfr_ticket_put(t);
}

static uint64_t committed(struct sfr_engine *engine)
{
	struct sfr_stats out;

	CHECK_EQ(sfr_engine_stats(engine, &out), 0);
	return out.committed_bytes;
}

static bool is_supplying(struct sfr__pool *pool)
{
	bool yes;

	sfr__lock(&pool->mu);
	yes = pool->makers != NULL || sfr__pool_lacks_locked(pool);
	sfr__unlock(&pool->mu);
	return yes;
}

/* Ends, or the test is ended. */
static void wait_for_memory(struct sfr_engine *engine, uint64_t nbytes)
{
	while (committed(engine) < nbytes || is_supplying(engine->pool))
		(void)usleep(1000);
}

TEST(from_the_second_save_on_no_memory_is_made)
{
	const char *dir = saving_dir();

	for (uint32_t lane = 0; lane < 2; lane++) {
		struct sfr_engine *engine =
			saving_engine_of(STATE_BLOCK, 256 * MIB / STATE_BLOCK, 2, 2);
		/* What is captured and what is deferred lie in blocks of their own. */
		uint64_t whole = STATE_LEN + (1 + lane) * STATE_BLOCK, cold, made;

		save_state(engine, dir, lane);
		wait_for_memory(engine, whole);
		made = committed(engine);
		/* Who wants a block while others have theirs in hand makes one more: a writer each, and
		 * the lane. */
		CHECK(made <= whole + 3 * STATE_BLOCK);
		cold = nr_cold(engine->pool);
		for (int i = 0; i < 3; i++)
			save_state(engine, dir, lane);
		CHECK_EQ(committed(engine), made);
		CHECK_EQ(nr_cold(engine->pool), cold);
		CHECK_EQ(sfr_engine_trim(engine), 0);
		CHECK_EQ(committed(engine), 0);
		(void)usleep(20000);
		CHECK_EQ(committed(engine), 0);
		sfr_engine_put(engine);
	}
	saving_rmdir(dir);
}

/* As a niced thread is on a machine that has other work. */
static void slow_lane(void)
{
	char name[16] = "";

	(void)prctl(PR_GET_NAME, name);
	(void)usleep(strcmp(name, "sfr-lane0") == 0 ? 100000 : 2000);
}

TEST(the_next_save_finds_memory_though_idle_threads_get_nowhere)
{
	const char *dir = saving_dir();

	for (uint32_t lane = 0; lane < 2; lane++) {
		struct sfr_engine *engine =
			saving_engine_of(STATE_BLOCK, 256 * MIB / STATE_BLOCK, 2, 2);
		uint64_t whole = STATE_LEN + lane * STATE_BLOCK;

		during_populate = slow_lane;
		save_state(engine, dir, lane);
		CHECK(committed(engine) >= whole);
		during_populate = NULL;
		sfr_engine_put(engine);
	}
	saving_rmdir(dir);
}

static sem_t lane_may_go;

static void hold_the_lane(void)
{
	char name[16] = "";

	(void)prctl(PR_GET_NAME, name);
	if (strcmp(name, "sfr-lane0") == 0)
		(void)sem_wait(&lane_may_go);
}

/* Beside a lane that does not come back. */
TEST(idle_writers_make_memory_too)
{
	const char *dir = saving_dir();
	struct sfr_engine *engine = saving_engine_of(STATE_BLOCK, 256 * MIB / STATE_BLOCK, 2, 2);
	uint64_t had;

	save_state(engine, dir, SFR_CAPTURED);
	wait_for_memory(engine, STATE_LEN);
	had = committed(engine);
	(void)usleep(20000); /* they sleep by now, or there is nothing to see */
	CHECK_EQ(sem_init(&lane_may_go, 0, 0), 0);
	during_populate = hold_the_lane;
	sfr__pool_join(engine->pool, 30);
	sfr__lock(&engine->mu);
	sfr__engine_wake_idle_locked(engine);
	sfr__unlock(&engine->mu);
	for (int ms = 0; ms < 10000 && committed(engine) < had + 8 * STATE_BLOCK; ms++)
		(void)usleep(1000);
	CHECK(committed(engine) >= had + 8 * STATE_BLOCK);
	during_populate = NULL;
	(void)sem_post(&lane_may_go);
	sfr__pool_leave(engine->pool, 30);
	sfr_engine_put(engine);
	saving_rmdir(dir);
}

TEST(a_writer_makes_no_more_than_what_the_rest_of_the_save_may_not_make)
{
	struct sfr__pool *pool = make(80 * MIB, 4 * MIB);

	sfr__pool_join(pool, 5);
	sfr__pool_keep_pace(pool, 5, 5, always, NULL);
	CHECK_EQ(stats(pool).committed_bytes, 0);
	sfr__pool_keep_pace(pool, 4, 5, always, NULL);
	CHECK_EQ(stats(pool).committed_bytes, 4 * MIB);
	sfr__pool_keep_pace(pool, 4, 5, always, NULL);
	CHECK_EQ(stats(pool).committed_bytes, 4 * MIB);
	sfr__pool_keep_pace(pool, 0, 5, never, NULL);
	CHECK_EQ(stats(pool).committed_bytes, 4 * MIB);
	sfr__pool_leave(pool, 5);
	sfr__pool_free(pool);
}

/* Until `let_go_on` has been met at twice, the thread stands where it is: as one that a busy machine
 * does not let run. */
static pthread_barrier_t let_go_on;
static __thread bool is_held;

static void stand(void)
{
	(void)pthread_barrier_wait(&let_go_on);
	(void)pthread_barrier_wait(&let_go_on);
}

static bool hold_after_a_piece(void *arg)
{
	if (++*(int *)arg == 2)
		stand();
	return true;
}

static bool hold_in_the_second_piece(void *arg)
{
	is_held = ++*(int *)arg == 2;
	return true;
}

static void stand_if_held(void)
{
	if (is_held)
		stand();
	is_held = false;
}

static void *supply_held(void *go_on)
{
	bool (*const *hold)(void *) = go_on;
	int nr = 0;

	(void)sfr__pool_supply(shared_pool, *hold, &nr);
	return NULL;
}

static void finish_in_the_place_of_a_thread_that_is_held(bool (*hold)(void *), uint64_t pool_bytes,
							 void (*finish)(void))
{
	pthread_t thread;

	shared_pool = make(pool_bytes, 8 * MIB);
	during_populate = stand_if_held;
	(void)pthread_barrier_init(&let_go_on, NULL, 2);
	sfr__pool_join(shared_pool, 1);
	CHECK_EQ(pthread_create(&thread, NULL, supply_held, &hold), 0);
	(void)pthread_barrier_wait(&let_go_on);
	CHECK_EQ(stats(shared_pool).committed_bytes, 2 * MIB);
	finish();
	(void)pthread_barrier_wait(&let_go_on);
	CHECK_EQ(pthread_join(thread, NULL), 0);
	during_populate = NULL;
	(void)pthread_barrier_destroy(&let_go_on);
	CHECK_EQ(sfr__pool_trim(shared_pool), 0);
	CHECK_EQ(stats(shared_pool).committed_bytes, 0);
	sfr__pool_leave(shared_pool, 1);
	sfr__pool_free(shared_pool);
}

static void finish_as_the_last_writer(void)
{
	sfr__pool_keep_pace(shared_pool, 0, 1, always, NULL);
	CHECK_EQ(stats(shared_pool).committed_bytes, 8 * MIB);
	CHECK(!sfr__pool_lacks(shared_pool));
}

/* With one whose ticket fails meanwhile, and so makes nothing. */
static void finish_as_a_writer_that_gives_up(void)
{
	sfr__pool_keep_pace(shared_pool, 0, 1, never, NULL);
	CHECK_EQ(stats(shared_pool).committed_bytes, 2 * MIB);
	CHECK(sfr__pool_lacks(shared_pool));
}

static struct sfr__block *taken;

static void finish_as_who_needs_it(void)
{
	taken = lease(shared_pool, 8 * MIB);
	if (CHECK(taken != NULL)) {
		CHECK_EQ(taken->committed, 8 * MIB);
		memset(taken->mem, 7, taken->committed);
	}
}

static void finish_as_who_needs_a_part(void)
{
	taken = lease(shared_pool, 2 * MIB);
	if (CHECK(taken != NULL))
		CHECK_EQ(stats(shared_pool).committed_bytes, 2 * MIB);
	sfr__pool_put(shared_pool, taken);
}

static void finish_as_a_run(void)
{
	const uint64_t lens[1] = { 16 * MIB };
	struct sfr__lease run;
	char *addr;

	CHECK_EQ(sfr__pool_place(shared_pool, lens, 1, false, 1, 0, &addr, &run), 0);
	CHECK_EQ(stats(shared_pool).leased_bytes, 16 * MIB);
	sfr__pool_unplace(shared_pool, &run);
}

TEST(nobody_waits_for_a_thread_that_is_not_let_run)
{
	bool (*const holds[])(void *) = { hold_after_a_piece, hold_in_the_second_piece };

	for (int i = 0; i < 2; i++) {
		finish_in_the_place_of_a_thread_that_is_held(holds[i], 80 * MIB,
							     finish_as_the_last_writer);
		finish_in_the_place_of_a_thread_that_is_held(holds[i], 80 * MIB,
							     finish_as_a_writer_that_gives_up);
		finish_in_the_place_of_a_thread_that_is_held(holds[i], 8 * MIB,
							     finish_as_who_needs_a_part);
		finish_in_the_place_of_a_thread_that_is_held(holds[i], 16 * MIB, finish_as_a_run);
	}
}

static void *trim_shared(void *arg)
{
	(void)arg;
	CHECK_EQ(sfr__pool_trim(shared_pool), 0);
	return NULL;
}

static void *place_all(void *run)
{
	const uint64_t lens[1] = { 16 * MIB };
	char *addr;

	CHECK_EQ(sfr__pool_place(shared_pool, lens, 1, false, 0, SFR_FOREVER, &addr, run), 0);
	return NULL;
}

static bool is_trimmed(void)
{
	bool yes;

	sfr__lock(&shared_pool->mu);
	yes = shared_pool->nr_wanted == 0;
	sfr__unlock(&shared_pool->mu);
	return yes;
}

/* A trim waits beside the run, for the thread that makes memory; it was there first. */
TEST(a_run_that_waits_for_a_save_hears_of_its_end_whoever_else_waits)
{
	bool (*hold)(void *) = hold_after_a_piece;
	struct sfr__block *blocks[2];
	pthread_t maker, trim, place;
	struct sfr__lease run;

	shared_pool = make(16 * MIB, 8 * MIB);
	(void)pthread_barrier_init(&let_go_on, NULL, 2);
	sfr__pool_join(shared_pool, 1);
	CHECK_EQ(pthread_create(&maker, NULL, supply_held, &hold), 0);
	(void)pthread_barrier_wait(&let_go_on);
	for (int i = 0; i < 2; i++) /* its own too: the run finds nothing to take over */
		blocks[i] = lease(shared_pool, 2 * MIB);
	for (int i = 0; i < 2; i++)
		sfr__pool_put(shared_pool, blocks[i]);
	CHECK_EQ(pthread_create(&trim, NULL, trim_shared, NULL), 0);
	while (!is_trimmed())
		(void)usleep(200);
	CHECK_EQ(pthread_create(&place, NULL, place_all, &run), 0);
	while (stats(shared_pool).nr_waiters == 0)
		(void)usleep(200);
	sfr__pool_leave(shared_pool, 1);
	CHECK_EQ(pthread_join(place, NULL), 0);
	sfr__pool_unplace(shared_pool, &run);
	(void)pthread_barrier_wait(&let_go_on);
	CHECK_EQ(pthread_join(trim, NULL), 0);
	CHECK_EQ(pthread_join(maker, NULL), 0);
	(void)pthread_barrier_destroy(&let_go_on);
	sfr__pool_free(shared_pool);
}

static void *make_it_late(void *nr)
{
	(void)sfr__pool_supply(shared_pool, hold_in_the_second_piece, nr);
	return NULL;
}

/* Whatever becomes of its piece: memory, the ordinary way of touching it, or no memory. */
TEST(a_thread_whose_block_is_somebody_elses_by_now_changes_nothing_in_it)
{
	const int refused[] = { 0, EINVAL, ENOMEM };

	during_populate = stand_if_held;
	for (int i = 0; i < 3; i++) {
		pthread_t thread;
		int nr = 0;

		shared_pool = make(8 * MIB, 8 * MIB);
		(void)pthread_barrier_init(&let_go_on, NULL, 2);
		sfr__pool_join(shared_pool, 1);
		CHECK_EQ(pthread_create(&thread, NULL, make_it_late, &nr), 0);
		(void)pthread_barrier_wait(&let_go_on);
		finish_as_who_needs_it();
		__atomic_store_n(&refuse_populate, refused[i], __ATOMIC_SEQ_CST);
		(void)pthread_barrier_wait(&let_go_on);
		CHECK_EQ(pthread_join(thread, NULL), 0);
		refuse_populate = 0;
		for (size_t at = 0; at < taken->committed; at += 512)
			if (taken->mem[at] != 7)
				CHECK_EQ(at, taken->committed);
		CHECK_EQ(stats(shared_pool).leased_bytes, 8 * MIB);
		sfr__pool_put(shared_pool, taken);
		(void)pthread_barrier_destroy(&let_go_on);
		sfr__pool_leave(shared_pool, 1);
		sfr__pool_free(shared_pool);
	}
	during_populate = NULL;
}

TEST(close_and_fork_do_not_mind_that_memory_is_being_made)
{
	const char *dir = saving_dir();

	for (int i = 0; i < 20; i++) {
		struct sfr_engine *engine =
			saving_engine_of(STATE_BLOCK, 64 * MIB / STATE_BLOCK, 2, 2);
		pid_t child;
		int status;

		save_state(engine, dir, SFR_CAPTURED);
		child = fork();
		if (child == 0) {
			alarm(60);
			_exit(sfr_engine_trim(engine) == SFR_EFORK &&
					      sfr_engine_close(engine, 0) == SFR_EFORK ?
				      0 :
				      1);
		}
		CHECK_EQ(waitpid(child, &status, 0), child);
		CHECK_EQ(status, 0);
		CHECK_EQ(sfr_engine_close(engine, SFR_FOREVER), 0);
		CHECK_EQ(committed(engine), 0);
		sfr_engine_put(engine);
	}
	saving_rmdir(dir);
}

int main(void)
{
	use_odd_system();
	check_run();
	return check_done();
}
