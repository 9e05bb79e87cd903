/* Copies of host memory: which threads copy chunks, when a copy is over, and what a call may
 * leave behind. */
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "stage/host.h"
#include "check.h"

enum { PIECE = 4096, NR_PIECES = 8, BLOCK = PIECE * NR_PIECES, NR_BLOCKS = 3 };

/* A copy of NR_BLOCKS blocks, and its results. */
static struct {
	struct sfr__host_copy copy;
	struct sfr__host_block_state blocks[NR_BLOCKS];
	struct sfr__block *leased[NR_BLOCKS];
	unsigned char from[NR_BLOCKS][BLOCK], to[NR_BLOCKS][BLOCK];
	uint32_t nr_filled;
	int64_t torn;
	int code;
	bool failing;
	atomic_bool over;
} c;

/* Controls of the threads that copy chunks. */
static pthread_t caller;
static atomic_int nr_by_caller, nr_by_copiers, nr_by_lane;
static atomic_bool wait_for_copier, cancel_then, hold_copiers, hold_lane, outlast_copiers;
static sem_t copier_is_blocked, lane_is_blocked;

static bool is_named(const char *prefix)
{
	char name[16] = "";

	(void)pthread_getname_np(pthread_self(), name, sizeof(name));
	return strncmp(name, prefix, strlen(prefix)) == 0;
}

static void block_thread(sem_t *blocked, atomic_bool *hold)
{
	(void)sem_post(blocked);
	while (*hold)
		(void)usleep(100);
}

static bool is_stopping(struct sfr_engine *engine)
{
	bool stopping;

	sfr__lock(&engine->mu);
	stopping = engine->stopping;
	sfr__unlock(&engine->mu);
	return stopping;
}

/* Stops the copier in a chunk until the engine stops. It then takes all chunks that are left. */
static void wait_for_stop(struct sfr_engine *engine)
{
	while (!is_stopping(engine))
		(void)usleep(100);
	hold_copiers = false;
	while (nr_by_copiers < NR_BLOCKS * NR_PIECES - 1)
		(void)usleep(100);
	(void)usleep(20000); /* by now it has looked for more, or the test shows nothing */
}

static struct sfr__host_block_state *block(struct sfr__host_copy *copy, uint32_t blk)
{
	(void)copy;
	return &c.blocks[blk];
}

static size_t block_len(struct sfr__host_copy *copy, uint32_t blk)
{
	(void)copy;
	(void)blk;
	return BLOCK;
}

static void leased_locked(struct sfr__host_copy *copy, uint32_t blk, struct sfr__block *leased)
{
	(void)copy;
	c.leased[blk] = leased;
}

static int64_t copy_chunk(struct sfr__host_copy *copy, uint32_t blk, size_t off, size_t len,
			  bool hurried)
{
	if (pthread_equal(pthread_self(), caller)) {
		CHECK(hurried);
		nr_by_caller++;
		for (int ms = 0; wait_for_copier && nr_by_copiers == 0 && ms < 10000; ms++)
			(void)usleep(1000);
		if (outlast_copiers && nr_by_caller == 1)
			wait_for_stop(copy->engine);
		if (cancel_then) {
			sfr__lock(&copy->engine->mu);
			c.failing = true;
			sfr__unlock(&copy->engine->mu);
		}
	} else if (is_named("sfr-copier")) {
		CHECK(hurried);
		if (nr_by_copiers++ == 0)
			block_thread(&copier_is_blocked, &hold_copiers);
	} else if (is_named("sfr-lane") && nr_by_lane++ == 0) {
		block_thread(&lane_is_blocked, &hold_lane);
	}
	memcpy(c.to[blk] + off, c.from[blk] + off, len);
	return memcmp(c.to[blk] + off, c.from[blk] + off, len) ? 0 : -1;
}

static bool is_failing_locked(struct sfr__host_copy *copy)
{
	(void)copy;
	return c.failing;
}

static void fail_locked(struct sfr__host_copy *copy, int code, int64_t source)
{
	(void)copy;
	c.code = code;
	c.torn = source;
	c.failing = true;
}

static void filled_locked(struct sfr__host_copy *copy, uint32_t blk)
{
	c.nr_filled++;
	if (c.leased[blk])
		sfr__pool_put(copy->engine->pool, c.leased[blk]);
	c.leased[blk] = NULL;
}

static void over(struct sfr__host_copy *copy)
{
	sfr__lock(&copy->engine->mu);
	c.over = true;
	pthread_cond_broadcast(&copy->engine->cv_state);
	sfr__unlock(&copy->engine->mu);
}

static bool is_over(const void *arg)
{
	(void)arg;
	return c.over;
}

static const struct sfr__host_copy_ops ops = {
	.block = block,
	.block_len = block_len,
	.leased_locked = leased_locked,
	.copy = copy_chunk,
	.is_failing_locked = is_failing_locked,
	.fail_locked = fail_locked,
	.filled_locked = filled_locked,
	.over = over,
};

/* Makes an engine, and a copy that needs blocks of its pool or, with `has_memory`, none. */
static struct sfr_engine *begin(uint32_t nr_copiers, uint32_t nr_pool_blocks, bool has_memory)
{
	static unsigned char memory[NR_BLOCKS][BLOCK];
	const struct sfr_engine_opts opts = { .pool_bytes = (uint64_t)nr_pool_blocks * BLOCK,
					      .block_bytes = BLOCK,
					      .nr_writers = 1,
					      .max_in_flight = 1,
					      .nr_copiers = nr_copiers };
	struct sfr_engine *engine = NULL;

	CHECK_EQ(sfr_engine_new(&opts, &engine), 0);
	memset(&c, 0, sizeof(c));
	for (uint32_t i = 0; i < NR_BLOCKS; i++) {
		for (uint32_t k = 0; k < BLOCK; k++)
			c.from[i][k] = (unsigned char)((i * 7919 + k) * 2654435761u >> 13);
		if (has_memory)
			c.blocks[i] = (struct sfr__host_block_state){ .mem = (char *)memory[i],
								      .left = BLOCK };
	}
	c.torn = -1;
	c.copy = (struct sfr__host_copy){
		.engine = engine, .ops = &ops, .nr_blocks = NR_BLOCKS, .seq = 1
	};
	caller = pthread_self();
	nr_by_caller = nr_by_copiers = nr_by_lane = 0;
	wait_for_copier = cancel_then = hold_copiers = hold_lane = outlast_copiers = false;
	CHECK_EQ(sem_init(&copier_is_blocked, 0, 0), 0);
	CHECK_EQ(sem_init(&lane_is_blocked, 0, 0), 0);
	sfr__host_tune(PIECE, 2 * PIECE);
	return engine;
}

static void end(struct sfr_engine *engine)
{
	CHECK(engine->shared == NULL);
	CHECK_EQ(c.copy.nr_copying, 0);
	CHECK_EQ(sfr_engine_close(engine, SFR_FOREVER), 0);
	sfr_engine_put(engine);
	sfr__host_tune(0, 0);
}

static void check_copied(void)
{
	CHECK_EQ(c.nr_filled, NR_BLOCKS);
	CHECK(memcmp(c.from, c.to, sizeof(c.from)) == 0);
	CHECK_EQ(c.torn, -1);
}

/* ---- in the call ------------------------------------------------------------------- */

TEST(copiers_help_with_a_large_copy_in_the_call)
{
	for (uint32_t nr_copiers = 1; nr_copiers <= 3; nr_copiers += 2) {
		struct sfr_engine *engine = begin(nr_copiers, 2, nr_copiers == 1);

		wait_for_copier = true;
		CHECK_EQ(sfr__host_copy_now(&c.copy, SFR_FOREVER), 0);
		CHECK(nr_by_copiers > 0);
		CHECK_EQ(nr_by_copiers + nr_by_caller, NR_BLOCKS * NR_PIECES);
		check_copied();
		end(engine);
	}
}

TEST(caller_copies_a_small_source_alone)
{
	struct sfr_engine *engine = begin(2, 2, true);

	sfr__host_tune(PIECE, NR_BLOCKS * BLOCK + 1);
	CHECK_EQ(sfr__host_copy_now(&c.copy, SFR_FOREVER), 0);
	CHECK_EQ(nr_by_caller, NR_BLOCKS * NR_PIECES);
	CHECK_EQ(engine->nr_copiers, 0); /* none was started */
	check_copied();
	end(engine);
}

static int no_thread(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *),
		     void *arg)
{
	(void)thread;
	(void)attr;
	(void)start;
	(void)arg;
	return EAGAIN;
}

TEST(copy_is_completed_without_any_copier)
{
	const struct sfr_sys before = sfr_sys;
	struct sfr_engine *engine = begin(2, 2, false);

	sfr_sys.thread_create = no_thread;
	CHECK_EQ(sfr__host_copy_now(&c.copy, SFR_FOREVER), 0);
	CHECK_EQ(nr_by_caller, NR_BLOCKS * NR_PIECES);
	check_copied();
	sfr_sys = before;
	end(engine);
}

TEST(lane_takes_no_part_in_the_calls_copy)
{
	struct sfr_engine *engine = begin(0, 2, true);

	sfr__lock(&engine->mu);
	CHECK_EQ(sfr__engine_start_locked(engine), 0);
	sfr__unlock(&engine->mu);
	(void)usleep(20000); /* by now it sleeps, or the test shows nothing */
	CHECK_EQ(sfr__host_copy_now(&c.copy, SFR_FOREVER), 0);
	CHECK_EQ(nr_by_lane, 0);
	CHECK_EQ(nr_by_caller, NR_BLOCKS * NR_PIECES);
	check_copied();
	end(engine);
}

static atomic_bool returned;

static bool is_cancelled(struct sfr_engine *engine)
{
	bool cancelled;

	sfr__lock(&engine->mu);
	cancelled = c.failing;
	sfr__unlock(&engine->mu);
	return cancelled;
}

/* Releases it after the caller has cancelled the copy, in a test that does. */
static void *release_copier_later(void *engine)
{
	CHECK_EQ(sem_wait(&copier_is_blocked), 0);
	while (cancel_then && !is_cancelled(engine))
		(void)usleep(100);
	(void)usleep(50000);
	CHECK(!returned);
	hold_copiers = false;
	return NULL;
}

/* The caller may change the sources then. */
TEST(no_copier_reads_a_source_after_the_call)
{
	struct sfr_engine *engine = begin(1, 2, true);
	pthread_t other;

	returned = false;
	wait_for_copier = hold_copiers = true;
	CHECK_EQ(pthread_create(&other, NULL, release_copier_later, engine), 0);
	CHECK_EQ(sfr__host_copy_now(&c.copy, SFR_FOREVER), 0);
	returned = true;
	CHECK_EQ(pthread_join(other, NULL), 0);
	CHECK_EQ(nr_by_copiers, 1);
	check_copied();
	end(engine);
}

/* This holds between two calls too, because the caller may give the copy up. */
TEST(call_without_a_free_block_stops_copying_and_can_be_resumed)
{
	struct sfr_engine *engine = begin(2, 1, false);
	struct sfr__block *taken;

	wait_for_copier = true;
	CHECK_EQ(sfr__pool_get(engine->pool, 0, BLOCK, 0, &taken), 0);
	CHECK_EQ(sfr__host_copy_now(&c.copy, sfr__deadline(1000 * 1000)), SFR_EAGAIN);
	CHECK_EQ(c.copy.nr_copying, 0);
	CHECK(engine->shared == NULL);
	CHECK(c.copy.wait_ns > 0);
	sfr__pool_put(engine->pool, taken);
	CHECK_EQ(sfr__host_copy_now(&c.copy, SFR_FOREVER), 0);
	check_copied();
	end(engine);
}

TEST(cancel_during_the_call_returns_the_unfinished_block)
{
	struct sfr_engine *engine = begin(1, 2, false);
	struct sfr_stats stats;
	pthread_t other;

	returned = false;
	/* The copier has one chunk, the caller another one, and the block has more. */
	wait_for_copier = cancel_then = hold_copiers = true;
	CHECK_EQ(pthread_create(&other, NULL, release_copier_later, engine), 0);
	CHECK_EQ(sfr__host_copy_now(&c.copy, SFR_FOREVER), 0);
	returned = true;
	CHECK_EQ(pthread_join(other, NULL), 0);
	CHECK_EQ(nr_by_caller + nr_by_copiers, 2);
	CHECK_EQ(c.nr_filled, 1);
	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK_EQ(stats.leased_bytes, 0);
	end(engine);
}

static void *stop_threads(void *engine)
{
	CHECK_EQ(sem_wait(&copier_is_blocked), 0);
	sfr__workers_stop(engine);
	return NULL;
}

/* A snapshot copies in its call while another thread closes the engine. */
TEST(copiers_leave_a_call_when_the_engine_stops)
{
	struct sfr_engine *engine = begin(1, 2, true);
	pthread_t other;

	/* The caller keeps the last chunk until the copier has ended. */
	outlast_copiers = hold_copiers = true;
	CHECK_EQ(pthread_create(&other, NULL, stop_threads, engine), 0);
	CHECK_EQ(sfr__host_copy_now(&c.copy, SFR_FOREVER), 0);
	CHECK_EQ(pthread_join(other, NULL), 0);
	CHECK_EQ(nr_by_copiers + nr_by_caller, NR_BLOCKS * NR_PIECES);
	check_copied();
	end(engine);
}

/* ---- deferred ------------------------------------------------------------------------ */

static void defer(struct sfr_engine *engine, bool has_memory)
{
	sfr__lock(&engine->mu);
	CHECK_EQ(sfr__engine_start_locked(engine), 0);
	sfr__host_begin_deferred_locked(&c.copy, has_memory);
	sfr__unlock(&engine->mu);
}

static int wait_for_copy(struct sfr_engine *engine, uint64_t slice_ns)
{
	int rc;

	sfr__lock(&engine->mu);
	rc = sfr__host_help_and_wait_locked(&c.copy, sfr__deadline(slice_ns), is_over, NULL);
	sfr__unlock(&engine->mu);
	return rc;
}

TEST(waiting_thread_and_copiers_copy)
{
	struct sfr_engine *engine = begin(1, NR_BLOCKS, true);

	hold_lane = true;
	defer(engine, true);
	CHECK_EQ(sem_wait(&lane_is_blocked), 0);
	(void)usleep(20000);
	CHECK_EQ(nr_by_copiers, 0); /* no thread waits yet */
	wait_for_copier = true;
	CHECK_EQ(wait_for_copy(engine, 20 * 1000 * 1000), SFR_EAGAIN);
	while (nr_by_caller + nr_by_copiers < NR_BLOCKS * NR_PIECES - 1)
		CHECK_EQ(wait_for_copy(engine, 1000 * 1000), SFR_EAGAIN);
	CHECK_EQ(nr_by_lane, 1);
	CHECK(nr_by_copiers > 0 && nr_by_caller > 0);
	hold_lane = false;
	CHECK_EQ(wait_for_copy(engine, SFR_FOREVER), 0);
	check_copied();
	end(engine);
}

TEST(failed_copy_ends_after_the_chunks_being_copied)
{
	struct sfr_engine *engine = begin(0, 2, false);
	struct sfr_stats stats;

	hold_lane = true;
	defer(engine, false);
	CHECK_EQ(sem_wait(&lane_is_blocked), 0);
	sfr__lock(&engine->mu);
	c.failing = true;
	sfr__unlock(&engine->mu);
	CHECK_EQ(wait_for_copy(engine, 20 * 1000 * 1000), SFR_EAGAIN);
	CHECK_EQ(nr_by_caller, 0);
	hold_lane = false;
	CHECK_EQ(wait_for_copy(engine, SFR_FOREVER), 0);
	CHECK_EQ(nr_by_lane, 1);
	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK_EQ(stats.leased_bytes, 0);
	end(engine);
}
