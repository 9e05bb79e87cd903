/* Refusals of the driver, deaths of devices, and the messages about both, over the fake driver. */
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

/* Counts the notices that are not in reports; each is posted once, however often it applies. */
static unsigned nr_noticed;

static void take_texts(const char *words)
{
	struct sfr_notice notice;

	while (sfr_notice_wait(&notice, 0) == 0) {
		if (notice.what == SFR_NOTICE_TEXT && strstr(notice.text, words) != NULL)
			nr_noticed++;
		sfr_ticket_put(notice.ticket);
		sfr_snapshot_put(notice.snapshot);
	}
}

/* ---- batches ---- */

TEST(refused_batch_is_reported_and_the_next_is_tried)
{
	struct sfr_report report;
	uint64_t before;
	struct sfr_engine *engine = begin_on_device(32, 2);

	nr_noticed = 0;
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
	CHECK_EQ(saving_text[0], 0); /* a notice named it before */
	CHECK_EQ(saving_content_as(dir, "a", &one), 1);
	fake_end(engine);
}

TEST(driver_without_batches_is_asked_once)
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
	CHECK_EQ(saving_content_as(dir, "a", &one), 1);
	fake_end(engine);
}

/* The copies of samples, which are rows: in a batch, and one by one after the batch was refused. */
TEST(error_names_the_driver_call_that_failed)
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

TEST(pageable_memory_is_reported_with_the_reason)
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
	CHECK_EQ(saving_content_as(dir, "a", &one), 1);
	pool_figures_agree(engine->pool);
	fake_end(engine);
}

/* Some blocks of the pool are registered together, some alone, some not at all. */
TEST(trim_releases_only_regions_without_leased_blocks)
{
	struct sfr_engine *engine;
	struct sfr__block *block;
	struct sfr_stats stats;
	char why[160];

	begin();
	engine = fake_engine(16, 1);
	/* the driver knows none of these */
	CHECK_EQ(sfr_engine_warm_up(engine, 4 * SAVING_BLOCK), 0);
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
	CHECK_EQ(sfr_engine_trim(engine), 0); /* it is registered together with the leased one */
	CHECK(fake.fake_cuda_live("registered") > 0);
	sfr__pool_put(engine->pool, block);
	pool_is_at_rest(engine->pool);
	fake_put_on_device(&one, 0, SAVING_NR, 0);
	CHECK_EQ(saved(engine, &one, 0).err.code, 0);
	CHECK_EQ(sfr_engine_trim(engine), 0);
	pool_is_at_rest(engine->pool);
	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK_EQ(stats.committed_bytes, 0);
	CHECK_EQ(fake.fake_cuda_live("registered"), 0);
	fake_end(engine);
}

TEST(blocks_are_pinned_later_if_warm_up_has_no_context)
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

/* Nothing of this save is in flight that could report the death. */
TEST(save_fails_if_the_device_dies_before_anything_is_queued)
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
	fake_put_on_device(&one, 2, SAVING_NR, 0);
	CHECK_EQ(saved(engine, &one, 0).err.code, 0);
	lane = engine->cuda_lanes.head;
	sfr__cuda_push_task(lane, &p.task);
	(void)sem_wait(&p.begun);
	CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
	CHECK_EQ(fake_submit(t, NULL), 0);
	CHECK_EQ(sfr__cuda_enter(&scope, lane->cu, lane->context), 0);
	while (lane->in_flight.head) /* until the samples are copied */
		sfr__cuda_poll(lane);
	sfr__cuda_leave(&scope);
	saving_text[0] = '\0';
	sfr__cuda_mark_dead(lane, "cuTest", CUDA_ERROR_LAUNCH_FAILED);
	sfr__cuda_mark_dead(lane, "cuTest", CUDA_ERROR_LAUNCH_FAILED); /* logged once */
	(void)sem_post(&p.go_on);
	saving_finish(t);
	CHECK_EQ(sfr_save_report(t, &report), 0);
	CHECK_EQ(report.state, SFR_FAILED);
	CHECK_EQ(report.err.code, -EIO);
	CHECK(strstr(report.err.note, "cuTest") != NULL);
	CHECK(strstr(saving_text, "nothing on this device can be saved any more") != NULL);
	CHECK_EQ(saving_content_as(dir, "a", &one), 1); /* the file of the previous save */
	nr_noticed = 0;
	take_texts("nothing on this device");
	CHECK_EQ(nr_noticed, 0);
	sfr_ticket_put(t);
	saving_end(engine);
	fake_check();
}

static void *(*plain_realloc)(void *mem, size_t len);
/* the lane whose device dies when the call adds a copy */
static struct sfr__cuda_lane *_Atomic dying;

static void *realloc_or_die(void *mem, size_t len)
{
	struct sfr__cuda_lane *lane = atomic_exchange(&dying, NULL);

	if (lane != NULL)
		sfr__cuda_mark_dead(lane, "cuTest", CUDA_ERROR_LAUNCH_FAILED);
	return plain_realloc(mem, len);
}

/* All sources are captured, or all are deferred. Nothing of either kind is queued on the dead
 * device, so nothing is in flight that could report the death. */
TEST(snapshot_fails_if_the_device_dies_in_the_call)
{
	for (unsigned captured = 0; captured < 2; captured++) {
		const struct sfr_device_stream stream = { 0 };
		struct sfr_snapshot *s;
		struct sfr_engine *engine;
		struct sfr_err err;
		int64_t torn;

		begin();
		engine = fake_engine(32, 2);
		fake_put_on_device(&one, 0, SAVING_NR, 0);
		CHECK_EQ(saved(engine, &one, 0).err.code, 0); /* makes the lane */
		for (unsigned i = 0; i < SAVING_NR; i++)
			one.sources[i].lane = captured ? SFR_CAPTURED : SFR_LANE_HOST;
		CHECK_EQ(sfr_snapshot_new(engine, one.sources, SAVING_NR, 0, &s), 0);
		CHECK_EQ(sfr_snapshot_lease(s, SFR_FOREVER), 0);
		CHECK_EQ(sfr_snapshot_set_streams(s, &stream, 1), 0);
		atomic_store(&dying, engine->cuda_lanes.head);
		CHECK_EQ(sfr_snapshot_start(s), -EIO);
		CHECK(atomic_load(&dying) == NULL);
		CHECK_EQ(sfr_snapshot_wait(s, SFR_FOREVER, &torn), 0);
		sfr_snapshot_error(s, &err);
		CHECK_EQ(err.code, -EIO);
		CHECK(strstr(err.note, "cuTest") != NULL);
		sfr_snapshot_remove_view(s);
		sfr_snapshot_put(s);
		take_texts("");
		saving_end(engine);
		fake_check();
	}
}

/* Memory that a snapshot was being copied to, and blocks, are never leased again and stay
 * registered, because a copy into them may be running. They were pinned through a device that is
 * alive. */
TEST(memory_of_a_dead_device_is_never_leased_again)
{
	for (int snapshots = 0; snapshots < 2; snapshots++) {
		const struct sfr_device_stream streams[] = { { .device = 1 } };
		struct sfr_snapshot *s;
		struct sfr_engine *engine;
		struct sfr_stats stats;
		char why[160];
		int64_t torn;

		begin();
		engine = fake_engine(32, 2);
		CHECK_EQ(sfr_engine_use_device(engine, 0, why, sizeof(why)), 0);
		fake_put_on_device(&one, 0, SAVING_NR, 1);
		fake.fake_cuda_fail_copy(3, 719);
		if (!snapshots) {
			CHECK_EQ(saved(engine, &one, 0).err.code, -EIO);
		} else {
			CHECK_EQ(sfr_snapshot_new(engine, one.sources, SAVING_NR, 0, &s), 0);
			CHECK_EQ(sfr_snapshot_lease(s, SFR_FOREVER), 0);
			CHECK_EQ(sfr_snapshot_set_streams(s, streams, 1), 0);
			(void)sfr_snapshot_start(s);
			CHECK_EQ(sfr_snapshot_wait(s, SFR_FOREVER, &torn), 0);
			sfr_snapshot_remove_view(s);
			sfr_snapshot_put(s);
			take_texts("");
			/* This one finds the device dead, and nothing of it is queued. */
			CHECK_EQ(sfr_snapshot_new(engine, one.sources, SAVING_NR, 0, &s), 0);
			CHECK_EQ(sfr_snapshot_lease(s, SFR_FOREVER), 0);
			CHECK_EQ(sfr_snapshot_set_streams(s, streams, 1), 0);
			CHECK_EQ(sfr_snapshot_start(s), -EIO);
			CHECK_EQ(sfr_snapshot_wait(s, SFR_FOREVER, &torn), 0);
			sfr_snapshot_remove_view(s);
			CHECK_EQ(sfr_snapshot_is_leased(s), 0);
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

/* A call of the driver that never answers is named, and everything that waits for it ends
 * nevertheless: portions in flight, and checksums in the call. */
TEST(driver_call_that_never_answers_is_named_and_ends_the_wait)
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
		fake_put_on_device(&one, 0, SAVING_NR, 0);
		for (unsigned k = 0; k < SAVING_NR; k++)
			one.sources[k].lane = SFR_LANE_HOST;
		if (i / 2) /* only the stream is left to query; E is the first event */
			fake.fake_cuda_fail("cuEventRecord", 2, 1, 1);
		fake.fake_cuda_fail(call, 1, 1, 1);
		report = saved(engine, &one, flags[i % 2]);
		CHECK_EQ(report.err.code, -EIO);
		/* Only this call had asked for its event, so the device stays alive. */
		CHECK(strstr(i == 1 ? report.err.note : saving_text, call) != NULL);
		saving_end(engine);
		fake.fake_cuda_reset();
		fake.fake_cuda_forget();
	}
}

/* ---- messages ---- */

TEST(missing_device_is_refused_with_the_drivers_reason)
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

/* Fails one call of the system after the other. The file is the old or the new one, nothing
 * hangs, and nothing is left. */
TEST(any_failing_system_call_leaves_old_or_new_file_of_a_device)
{
	int nr = 0;

	begin();
	fake_put_on_device(&one, 0, SAVING_NR, 0);
	fake_put_on_device(&two, 0, SAVING_NR, 0);
	/* needed when there is no memory to record what is pinned */
	fake.fake_cuda_allow_pageable(1);
	FOR_EVERY_FAILURE(run, "*", ENOMEM)
	{
		const struct sfr_engine_opts opts = { .pool_bytes = 32 * SAVING_BLOCK,
						      .block_bytes = SAVING_BLOCK,
						      .nr_writers = 1,
						      .max_in_flight = 2 };
		const struct sfr_device_stream stream = { 0 };
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
			CHECK_EQ(sfr_snapshot_set_streams(s, &stream, 1), 0);
			rc = sfr_snapshot_start(s);
			CHECK(rc == 0 || check_acted(&run));
			CHECK_EQ(sfr_snapshot_wait(s, SFR_FOREVER, &torn), 0);
			sfr_snapshot_remove_view(s);
		}
		sfr_snapshot_put(s);
		check_end_fault(&run);
		if (engine) {
			saving_end(engine);
		}
		take_texts("");
		CHECK_EQ(sfr_log_stop(), 0);
		fake_check();
		fake_check_nothing_left();
	}
	CHECK(nr > 50);
	CHECK_EQ(saving_content_as(dir, "a", &two), 2);
}

BEGIN
{
	if (!fake_load())
		return false;
	plain_realloc = sfr_sys.realloc; /* before any thread runs */
	sfr_sys.realloc = realloc_or_die;
	dir = saving_dir();
	return true;
}
