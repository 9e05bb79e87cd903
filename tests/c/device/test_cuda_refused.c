/* What a driver refuses, what dies with a device, and what is said of it, over the fake driver. */
#include <errno.h>
#include <semaphore.h>

#include "cuda/fix_cuda.h"
#include "pool_figures.h"

static const char batches[] = "cuMemcpyBatchAsync_v2";

static struct sfr_report saved(struct sfr_engine *engine, const struct saving_state *s,
			       uint32_t flags)
{
	struct sfr_report report = { 0 };
	struct sfr_ticket *t;

	CHECK_EQ(saving_new(engine, dir, "a", s, flags, &t), 0);
	CHECK_EQ(fake_submit(t, NULL), 0);
	CHECK_EQ(fake_gate(t, NULL), 0);
	saving_finish(t);
	CHECK_EQ(sfr_save_report(t, &report), 0);
	sfr_ticket_put(t);
	return report;
}

/* What is told besides reports: once, however often. */
static unsigned nr_told;

static void take_texts(const char *words)
{
	struct sfr_notice notice;

	while (sfr_notice_wait(&notice, 0) == 0) {
		nr_told += notice.what == SFR_NOTICE_TEXT && strstr(notice.text, words) != NULL;
		sfr_ticket_put(notice.ticket);
		sfr_snapshot_put(notice.snapshot);
	}
}

/* ---- batches ---- */

TEST(a_single_batch_that_is_refused_is_told_of_and_the_next_is_tried)
{
	struct sfr_report report;
	uint64_t before;
	struct sfr_engine *engine = begin_on_device(32, 2);

	nr_told = 0;
	report = saved(engine, &one, 0);
	CHECK_EQ(report.fallback[SFR_FALLBACK_COPIES][0], 0);
	fake.fake_cuda_fail(batches, 1, 0, CUDA_ERROR_INVALID_VALUE);
	report = saved(engine, &one, 0);
	CHECK_EQ(report.err.code, 0);
	CHECK(strstr(report.fallback[SFR_FALLBACK_COPIES], "refused 1 batches") != NULL);
	CHECK(strstr(saving_text, "refuses a batch of copies") != NULL);
	before = fake.fake_cuda_calls(batches);
	saving_text[0] = '\0';
	report = saved(engine, &one, 0);
	CHECK(fake.fake_cuda_calls(batches) > before);
	CHECK(strstr(report.fallback[SFR_FALLBACK_COPIES], "refused 1 batches") != NULL);
	fake.fake_cuda_reset();
	fake.fake_cuda_fail(batches, 1, 0, CUDA_ERROR_INVALID_VALUE);
	report = saved(engine, &one, 0);
	CHECK(strstr(report.fallback[SFR_FALLBACK_COPIES], "refused 2 batches") != NULL);
	CHECK_EQ(saving_text[0], 0); /* it was told of before */
	CHECK_EQ(saving_look_as(dir, "a", &one), 1);
	fake_end(engine);
}

TEST(a_driver_without_batches_is_asked_for_one_once)
{
	struct sfr_report report;
	struct sfr_engine *engine = begin_on_device(32, 2);

	fake.fake_cuda_fail(batches, 1, 1, CUDA_ERROR_NOT_SUPPORTED);
	for (int i = 0; i < 2; i++) {
		report = saved(engine, &one, 0);
		CHECK_EQ(report.err.code, 0);
		CHECK(strstr(report.fallback[SFR_FALLBACK_COPIES], "refuses batched copies") !=
		      NULL);
		CHECK_EQ(fake.fake_cuda_calls(batches), 1);
	}
	CHECK(strstr(saving_text, "refuses batched copies") != NULL);
	CHECK_EQ(saving_look_as(dir, "a", &one), 1);
	fake_end(engine);
}

/* Of rows, which are samples: in a batch, and one by one where that was refused. */
TEST(a_copy_that_fails_is_called_by_its_own_name)
{
	for (int refused = 0; refused < 2; refused++) {
		const char *name = refused ? "cuMemcpy2DAsync" : "cuMemcpy3DBatchAsync";
		struct sfr_engine *engine = begin_on_device(32, 2);
		struct sfr_report report;

		fake.fake_cuda_fail("cuMemcpy3DBatchAsync_v2", 1, 0,
				    refused ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_OUT_OF_MEMORY);
		fake.fake_cuda_fail("cuMemcpy2DAsync_v2", 1, 0, CUDA_ERROR_OUT_OF_MEMORY);
		report = saved(engine, &one, 0);
		CHECK(report.err.code != 0);
		CHECK(strstr(report.err.note, name) != NULL);
		fake_end(engine);
	}
}

/* ---- memory that cannot be pinned ---- */

TEST(memory_that_stays_pageable_is_told_of_with_the_reason)
{
	struct sfr_report report;
	struct sfr_engine *engine = begin_on_device(32, 2);

	saving_text[0] = '\0';
	fake.fake_cuda_allow_pageable(1);
	fake.fake_cuda_fail("cuMemHostRegister_v2", 1, 1, 2);
	fake.fake_cuda_fail("cuMemHostAlloc", 1, 1, 2);
	report = saved(engine, &one, 0);
	CHECK_EQ(report.err.code, 0);
	CHECK(strstr(report.fallback[SFR_FALLBACK_PAGEABLE], "cuMemHostAlloc") != NULL);
	CHECK(strstr(report.fallback[SFR_FALLBACK_PAGEABLE], "OUT_OF_MEMORY") != NULL);
	CHECK(strstr(report.fallback[SFR_FALLBACK_PAGEABLE], "stays pageable") != NULL);
	CHECK(strcmp(saving_text, report.fallback[SFR_FALLBACK_PAGEABLE]) == 0);
	CHECK_EQ(saving_look_as(dir, "a", &one), 1);
	pool_figures_agree(engine->pool);
	fake_end(engine);
}

/* Some blocks of the pool are registered together, some alone, some not at all. */
TEST(a_trim_gives_back_what_no_lease_is_part_of)
{
	struct sfr_engine *engine;
	struct sfr__block *block;
	struct sfr_stats stats;
	char why[160];

	begin();
	engine = fake_engine(16, 1);
	CHECK_EQ(sfr_engine_warm_up(engine, 4 * SAVING_BLOCK), 0); /* no driver knows of these */
	CHECK_EQ(sfr_engine_use_device(engine, 0, why, sizeof(why)), 0);
	CHECK_EQ(sfr__pool_get(engine->pool, 1, SAVING_BLOCK, 0, &block), 0);
	CHECK_EQ(sfr_engine_trim(engine), 0);
	pool_figures_agree(engine->pool);
	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK_EQ(stats.committed_bytes, SAVING_BLOCK);
	sfr__pool_put(engine->pool, block);
	CHECK_EQ(sfr_engine_warm_up(engine, 4 * SAVING_BLOCK), 0);
	CHECK(fake.fake_cuda_live("registered") > 0);
	CHECK_EQ(sfr__pool_get(engine->pool, 1, SAVING_BLOCK, 0, &block), 0);
	CHECK_EQ(sfr_engine_trim(engine), 0); /* it is registered with the one that is leased */
	CHECK(fake.fake_cuda_live("registered") > 0);
	sfr__pool_put(engine->pool, block);
	pool_is_at_rest(engine->pool);
	fake_place(&one, 0, SAVING_NR, 0);
	CHECK_EQ(saved(engine, &one, 0).err.code, 0);
	CHECK_EQ(sfr_engine_trim(engine), 0);
	pool_is_at_rest(engine->pool);
	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK_EQ(stats.committed_bytes, 0);
	CHECK_EQ(fake.fake_cuda_live("registered"), 0);
	fake_end(engine);
}

TEST(warm_up_without_the_devices_context_pins_later)
{
	struct sfr_engine *engine = begin_on_device(16, 1);

	CHECK_EQ(saved(engine, &one, 0).err.code, 0);
	CHECK_EQ(sfr_engine_trim(engine), 0);
	fake.fake_cuda_fail("cuCtxPushCurrent_v2", 1, 0, 999);
	CHECK_EQ(sfr_engine_warm_up(engine, 16 * SAVING_BLOCK), 0);
	CHECK_EQ(fake.fake_cuda_hits(), 1);
	CHECK_EQ(fake.fake_cuda_live("registered"), 0);
	pool_is_at_rest(engine->pool);
	CHECK_EQ(saved(engine, &one, 0).err.code, 0);
	CHECK(fake.fake_cuda_live("registered") > 0);
	fake_end(engine);
}

/* ---- a device that dies ---- */

struct pause {
	struct sfr__task task;
	sem_t begun, go_on;
};

static void run_pause(struct sfr__task *task)
{
	struct pause *p = sfr__container(task, struct pause, task);

	(void)sem_post(&p->begun);
	(void)sem_wait(&p->go_on);
}

/* Nothing of this save is in flight that could tell it. */
TEST(a_device_that_dies_before_anything_is_queued_fails_the_save)
{
	struct pause p = { .task.run = run_pause };
	struct sfr__cuda_scope scope;
	struct sfr__cuda_lane *lane;
	struct sfr_engine *engine;
	struct sfr_report report;
	struct sfr_ticket *t;

	begin();
	CHECK_EQ(sem_init(&p.begun, 0, 0), 0);
	CHECK_EQ(sem_init(&p.go_on, 0, 0), 0);
	engine = fake_engine(32, 2);
	fake_place(&one, 2, SAVING_NR, 0);
	CHECK_EQ(saved(engine, &one, 0).err.code, 0);
	lane = engine->cuda_lanes.head;
	sfr__cuda_push(lane, &p.task);
	(void)sem_wait(&p.begun);
	CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
	CHECK_EQ(fake_submit(t, NULL), 0);
	CHECK_EQ(sfr__cuda_enter(&scope, lane->cu, lane->context), 0);
	while (lane->in_flight.head) /* the samples land */
		sfr__cuda_poll(lane);
	sfr__cuda_leave(&scope);
	saving_text[0] = '\0';
	sfr__cuda_die(lane, "cuTest", CUDA_ERROR_LAUNCH_FAILED);
	sfr__cuda_die(lane, "cuTest", CUDA_ERROR_LAUNCH_FAILED); /* said once */
	(void)sem_post(&p.go_on);
	saving_finish(t);
	CHECK_EQ(sfr_save_report(t, &report), 0);
	CHECK_EQ(report.state, SFR_FAILED);
	CHECK_EQ(report.err.code, -EIO);
	CHECK(strstr(report.err.note, "cuTest") != NULL);
	CHECK(strstr(saving_text, "nothing on this device can be saved any more") != NULL);
	CHECK_EQ(saving_look_as(dir, "a", &one), 1); /* the one before */
	nr_told = 0;
	take_texts("nothing on this device");
	CHECK_EQ(nr_told, 0);
	sfr_ticket_put(t);
	saving_end(engine);
	fake_check();
}

static void *(*plain_realloc)(void *mem, size_t len);
static struct sfr__cuda_lane *_Atomic dying; /* its device dies when the call lists a copy */

static void *realloc_or_die(void *mem, size_t len)
{
	struct sfr__cuda_lane *lane = atomic_exchange(&dying, NULL);

	if (lane != NULL)
		sfr__cuda_die(lane, "cuTest", CUDA_ERROR_LAUNCH_FAILED);
	return plain_realloc(mem, len);
}

/* All sources are captured, or all deferred: nothing of either kind is queued on the dead device,
 * and so nothing is in flight that could tell. */
TEST(a_device_that_dies_in_the_call_of_a_snapshot_fails_it)
{
	for (unsigned captured = 0; captured < 2; captured++) {
		const struct sfr_stream stream = { 0 };
		struct sfr_snapshot *s;
		struct sfr_engine *engine;
		struct sfr_err err;
		int64_t torn;

		begin();
		engine = fake_engine(32, 2);
		fake_place(&one, 0, SAVING_NR, 0);
		CHECK_EQ(saved(engine, &one, 0).err.code, 0); /* makes the lane */
		for (unsigned i = 0; i < SAVING_NR; i++)
			one.sources[i].lane = captured ? SFR_CAPTURED : SFR_LANE_HOST;
		CHECK_EQ(sfr_snapshot_new(engine, one.sources, SAVING_NR, 0, &s), 0);
		CHECK_EQ(sfr_snapshot_lease(s, SFR_FOREVER), 0);
		CHECK_EQ(sfr_snapshot_streams(s, &stream, 1), 0);
		atomic_store(&dying, engine->cuda_lanes.head);
		CHECK_EQ(sfr_snapshot_start(s), -EIO);
		CHECK(atomic_load(&dying) == NULL);
		CHECK_EQ(sfr_snapshot_wait(s, SFR_FOREVER, &torn), 0);
		sfr_snapshot_error(s, &err);
		CHECK_EQ(err.code, -EIO);
		CHECK(strstr(err.note, "cuTest") != NULL);
		sfr_snapshot_unview(s);
		sfr_snapshot_put(s);
		take_texts("");
		saving_end(engine);
		fake_check();
	}
}

/* The memory of a snapshot that was being copied, and of blocks: nobody gets it, and the driver
 * goes on knowing it, since a copy into it may be running. Pinned by way of a device that lives. */
TEST(memory_of_a_dead_device_is_nobodys_any_more)
{
	for (int snapshots = 0; snapshots < 2; snapshots++) {
		const struct sfr_stream streams[] = { { .device = 1 } };
		struct sfr_snapshot *s;
		struct sfr_engine *engine;
		struct sfr_stats stats;
		char why[160];
		int64_t torn;

		begin();
		engine = fake_engine(32, 2);
		CHECK_EQ(sfr_engine_use_device(engine, 0, why, sizeof(why)), 0);
		fake_place(&one, 0, SAVING_NR, 1);
		fake.fake_cuda_fail_copy(3, 719);
		if (!snapshots) {
			CHECK_EQ(saved(engine, &one, 0).err.code, -EIO);
		} else {
			CHECK_EQ(sfr_snapshot_new(engine, one.sources, SAVING_NR, 0, &s), 0);
			CHECK_EQ(sfr_snapshot_lease(s, SFR_FOREVER), 0);
			CHECK_EQ(sfr_snapshot_streams(s, streams, 1), 0);
			(void)sfr_snapshot_start(s);
			CHECK_EQ(sfr_snapshot_wait(s, SFR_FOREVER, &torn), 0);
			sfr_snapshot_unview(s);
			sfr_snapshot_put(s);
			take_texts("");
			/* And one that finds the device dead, of which nothing is queued. */
			CHECK_EQ(sfr_snapshot_new(engine, one.sources, SAVING_NR, 0, &s), 0);
			CHECK_EQ(sfr_snapshot_lease(s, SFR_FOREVER), 0);
			CHECK_EQ(sfr_snapshot_streams(s, streams, 1), 0);
			CHECK_EQ(sfr_snapshot_start(s), -EIO);
			CHECK_EQ(sfr_snapshot_wait(s, SFR_FOREVER, &torn), 0);
			sfr_snapshot_unview(s);
			CHECK_EQ(sfr_snapshot_leased(s), 0);
			sfr_snapshot_put(s);
			take_texts("");
		}
		CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
		CHECK(stats.retired_bytes > 0);
		CHECK_EQ(stats.leased_bytes, 0);
		pool_figures_agree(engine->pool);
		saving_end(engine);
		CHECK(fake.fake_cuda_live("registered") > 0);
		fake_check();
		fake.fake_cuda_forget();
	}
}

/* The call that never says anything is named, and what waits for its answer ends all the same:
 * pieces in flight, checksums in the call. */
TEST(a_call_that_is_never_answered_is_named_and_waited_for_no_longer)
{
	static const char *const calls[] = { "cuEventQuery", "cuStreamQuery" };
	static const uint32_t flags[] = { 0, SFR_SAVE_CHECK_BYTES };
	struct sfr_engine *engine;
	struct sfr_report report;

	for (unsigned i = 0; i < 4; i++) {
		const char *call = calls[i / 2];

		begin();
		saving_text[0] = '\0';
		engine = fake_engine(8, 1);
		fake_place(&one, 0, SAVING_NR, 0);
		for (unsigned k = 0; k < SAVING_NR; k++)
			one.sources[k].lane = SFR_LANE_HOST;
		if (i / 2) /* nothing is left to ask but the stream; E is the first */
			fake.fake_cuda_fail("cuEventRecord", 2, 1, 1);
		fake.fake_cuda_fail(call, 1, 1, 1);
		report = saved(engine, &one, flags[i % 2]);
		CHECK_EQ(report.err.code, -EIO);
		/* Nothing but the call had asked for its event: the device is no worse for it. */
		CHECK(strstr(i == 1 ? report.err.note : saving_text, call) != NULL);
		saving_end(engine);
		fake.fake_cuda_reset();
		fake.fake_cuda_forget();
	}
}

/* ---- who is asked, and what is said ---- */

TEST(a_device_that_is_not_there_is_refused_with_the_drivers_reason)
{
	struct sfr_engine *engine;
	char why[160];

	begin();
	engine = fake_engine(4, 1);
	CHECK(sfr_engine_use_device(engine, 99, why, sizeof(why)) < 0);
	CHECK(strstr(why, "cuDeviceGet") != NULL && strstr(why, "99") != NULL);
	fake_end(engine);
}

/* ---- the system ---- */

/* One call of the system after the other: the file is the old one or the new one, nothing hangs and
 * nothing is left. */
TEST(whatever_the_system_refuses_a_save_of_a_device_ends)
{
	int nr = 0;

	begin();
	fake_place(&one, 0, SAVING_NR, 0);
	fake_place(&two, 0, SAVING_NR, 0);
	fake.fake_cuda_allow_pageable(1); /* where there is no memory to note what is pinned */
	FOR_EVERY_FAILURE(run, "*", ENOMEM)
	{
		const struct sfr_engine_opts opts = { .pool_bytes = 32 * SAVING_BLOCK,
						      .block_bytes = SAVING_BLOCK,
						      .nr_writers = 1,
						      .max_in_flight = 2 };
		const struct sfr_stream stream = { 0 };
		struct sfr_engine *engine = NULL;
		struct sfr_snapshot *s = NULL;
		struct sfr_ticket *t = NULL;
		int64_t torn;
		int rc = sfr_engine_new(&opts, &engine);

		nr++;
		if (rc == 0)
			rc = saving_new(engine, dir, "a", &two, 0, &t);
		if (rc == 0) {
			rc = fake_submit(t, NULL);
			if (rc == 0) {
				struct sfr_report report = { 0 };

				CHECK_EQ(fake_gate(t, NULL), 0);
				saving_finish(t);
				CHECK_EQ(sfr_save_report(t, &report), 0);
				rc = report.err.code;
			}
			CHECK(rc == 0 || check_acted(&run));
		}
		sfr_ticket_put(t);
		if (engine && sfr_snapshot_new(engine, one.sources, SAVING_NR, 0, &s) == 0 &&
		    sfr_snapshot_lease(s, SFR_FOREVER) == 0) {
			CHECK_EQ(sfr_snapshot_streams(s, &stream, 1), 0);
			rc = sfr_snapshot_start(s);
			CHECK(rc == 0 || check_acted(&run));
			CHECK_EQ(sfr_snapshot_wait(s, SFR_FOREVER, &torn), 0);
			sfr_snapshot_unview(s);
		}
		sfr_snapshot_put(s);
		check_heal(&run);
		if (engine) {
			saving_end(engine);
		}
		take_texts("");
		CHECK_EQ(sfr_log_stop(), 0);
		fake_check();
		fake_check_nothing_left();
	}
	CHECK(nr > 50);
	CHECK_EQ(saving_look_as(dir, "a", &two), 2);
}

int main(void)
{
	if (!fake_load())
		return CHECK_SKIPPED;
	plain_realloc = sfr_sys.realloc; /* before there are threads */
	sfr_sys.realloc = realloc_or_die;
	dir = saving_dir();
	check_run();
	saving_rmdir(dir);
	return check_done();
}
