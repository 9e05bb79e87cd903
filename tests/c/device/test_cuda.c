/* Saves from devices, over the fake driver: pool sizes, lifetimes, several devices, failures. */
#include <errno.h>
#include <sched.h>

#include "cuda/fix_cuda.h"

TEST(device_save_is_complete_for_any_pool_and_writers)
{
	begin();
	for (uint64_t nr_blocks = 1; nr_blocks <= 8; nr_blocks++)
		for (uint32_t nr_writers = 1; nr_writers <= 3; nr_writers++) {
			struct sfr_engine *engine = fake_engine(nr_blocks, nr_writers);

			fake_put_on_device(&one, 0, SAVING_NR, 0);
			fake_put_on_device(&two, 1, 4, 0);
			fake_put_on_device(&two, 4, 5, 1);
			CHECK_EQ(fake_save(engine, dir, "a", &one, SFR_SAVE_DURABLE), 0);
			CHECK_EQ(saving_content_as(dir, "a", &one), 1);
			CHECK_EQ(fake_save(engine, dir, "a", &two, 0), 0);
			CHECK_EQ(saving_content_as(dir, "a", &two), 2);
			fake_end(engine);
		}
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
}

TEST(few_portions_are_in_flight_until_the_gate)
{
	struct sfr_ticket *t;
	struct sfr_stats stats;
	void *stream;
	struct sfr_engine *engine = begin_on_device(16, 2);

	sfr__cuda_set_portion_limits(SAVING_BLOCK, 2);
	stream = fake.fake_cuda_stream(0);
	CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
	fake.fake_cuda_hold(1);
	CHECK_EQ(fake_submit(t, stream), 0);
	fake.fake_cuda_settle();
	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK(stats.leased_bytes <= 6 * SAVING_BLOCK); /* the captured ones, and two portions */
	CHECK_EQ(fake_gate_held(t, stream), 0);
	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK(stats.leased_bytes >= 8 * SAVING_BLOCK); /* all blocks of the save */
	fake.fake_cuda_hold(0);
	saving_finish(t);
	CHECK_EQ(saving_content_as(dir, "a", &one), 1);
	sfr_ticket_put(t);
	fake_end(engine);
}

TEST(cancelled_save_keeps_its_blocks_until_its_copies_end)
{
	struct sfr_ticket *t;
	struct sfr_stats stats;
	struct sfr_engine *engine = begin_on_device(16, 2);
	void *stream = fake.fake_cuda_stream(0);

	CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
	fake.fake_cuda_hold(1);
	CHECK_EQ(fake_submit(t, stream), 0);
	CHECK_EQ(fake_gate_held(t, stream), 0);
	CHECK_EQ(sfr_save_cancel(t), 1);
	CHECK_EQ(fake_gate_held(t, stream), 0); /* a save that is given up delays no step */
	fake.fake_cuda_settle();
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, 0), SFR_EAGAIN);
	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK(stats.leased_bytes > 0);
	fake.fake_cuda_hold(0);
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	fake_freed(&one, 0);
	saving_finish(t);
	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK_EQ(stats.leased_bytes, 0);
	CHECK_EQ(stats.retired_bytes, 0);
	sfr_ticket_put(t);
	fake_end(engine);
}

TEST(blocks_of_a_dead_device_are_retired_and_other_devices_go_on)
{
	struct sfr_engine *engine;
	struct sfr_stats stats;
	char text[512];

	begin();
	engine = fake_engine(16, 2);
	fake_put_on_device(&one, 2, SAVING_NR, 1); /* on device 1 */
	fake_put_on_device(&two, 2, SAVING_NR, 2); /* on device 2 */
	fake.fake_cuda_fail_copy(4 + 2, 700);      /* after the samples */
	CHECK_EQ(fake_save(engine, dir, "a", &one, 0), -EIO);
	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK(stats.retired_bytes > 0);
	CHECK_EQ(stats.leased_bytes, 0);
	CHECK_EQ(fake_save(engine, dir, "a", &one, 0), -EIO);
	CHECK_EQ(fake_save(engine, dir, "b", &two, 0), 0);
	CHECK_EQ(saving_content_as(dir, "b", &two), 2);
	CHECK_EQ(sfr_engine_describe_driver(engine, text, sizeof(text)), 0);
	CHECK(strstr(text, "Device 1 is dead") != NULL);
	saving_end(engine);
	fake_check();
}

/* The rest of the block was never queued, but the device may still write to its beginning. */
TEST(block_is_retired_when_the_device_dies_after_its_first_copies)
{
	enum { NR_IN_FLIGHT = 5 };
	struct sfr__cuda_lane *lane;
	struct sfr_stats before, after;
	struct sfr_engine *engine;
	struct sfr_ticket *t;
	void *stream;
	int rc;

	engine = begin_on_device(32, 2);
	/* the captured blocks and the samples are one portion */
	sfr__cuda_set_portion_limits(SAVING_BLOCK / 4, NR_IN_FLIGHT);
	stream = fake.fake_cuda_stream(0);
	CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
	fake.fake_cuda_hold(1);
	CHECK_EQ(fake_submit(t, stream), 0);
	lane = engine->cuda_lanes.head;
	while (sfr__under(&lane->mu, lane->nr_in_flight) < NR_IN_FLIGHT)
		(void)sched_yield();
	fake.fake_cuda_settle(); /* no more portions are queued before the gate */
	/* The host's blocks are written and given back, whatever becomes of the device. */
	while (sfr__under(&engine->mu, t->facts.blocks_written) < t->plan.img.extents[0].nr_blocks)
		(void)sched_yield();
	CHECK_EQ(sfr_engine_stats(engine, &before), 0);
	fake.fake_cuda_fail("cuMemcpyBatchAsync_v2", 1, 1, 700);
	fake.fake_cuda_fail("cuMemcpyDtoHAsync_v2", 1, 1, 700);
	rc = sfr_save_gate(t, NULL, 0, 0);  /* makes the lane queue the rest */
	CHECK(rc == SFR_EAGAIN || rc == 0); /* 0: the device has died already */
	while (!sfr__cuda_is_dead(lane))
		(void)sched_yield();
	fake.fake_cuda_hold(0);
	saving_finish(t);
	CHECK_EQ(sfr_engine_stats(engine, &after), 0);
	CHECK_EQ(after.leased_bytes, 0);
	CHECK_EQ(after.retired_bytes, before.leased_bytes);
	sfr_ticket_put(t);
	saving_end(engine);
	fake_check();
}

/* test_cuda_waits.c has all error numbers. The device stays alive after an error that its
 * context survives, and after an error that an earlier call of other code has left behind. */
TEST(only_fatal_errors_end_a_device)
{
	static const int codes[] = { 4, 700, 911, 1, 999 };
	struct sfr_stats stats;

	for (size_t i = 0; i < sizeof(codes) / sizeof(codes[0]); i++) {
		bool ends = i < 3;
		int code = codes[i];
		struct sfr_engine *engine;
		int before = check__nr_failed;

		begin();
		engine = fake_engine(16, 2);
		fake_put_on_device(&one, 0, SAVING_NR, 0);
		/* the event of a portion in flight */
		fake.fake_cuda_fail("cuEventQuery", 1, 0, code);
		CHECK_EQ(fake_save(engine, dir, "a", &one, 0), ends ? -EIO : 0);
		CHECK(fake.fake_cuda_hits() > 0);
		/* A device that is known to be dead is queried no more. */
		CHECK(!ends || fake.fake_cuda_calls("cuEventQuery") < 8);
		CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
		CHECK_EQ(stats.leased_bytes, 0);
		fake.fake_cuda_reset();
		CHECK_EQ(fake_save(engine, dir, "a", &one, 0), ends ? -EIO : 0);
		if (check__nr_failed != before)
			(void)fprintf(stderr, "  code %d\n", code);
		saving_end(engine);
		fake_check();
		fake.fake_cuda_forget();
	}
}

TEST(pool_with_only_retired_blocks_reports_it)
{
	struct sfr_engine *engine = begin_on_device(1, 1);

	fake.fake_cuda_fail_copy(1, 719);
	CHECK_EQ(fake_save(engine, dir, "a", &one, 0), -EIO);
	saving_fill(&two, 2);
	CHECK_EQ(saving_save(engine, dir, "b", &two, 0), -ENOMEM);
	saving_end(engine);
	fake_check();
}

/* The lane destroys its stream without waiting for the work on it. */
TEST(failed_event_during_checksums_leaves_no_copy_running)
{
	struct sfr_engine *engine = begin_on_device(8, 1);

	for (unsigned i = 0; i < SAVING_NR; i++)
		one.sources[i].lane = SFR_LANE_HOST;
	fake.fake_cuda_fail("cuEventRecord", 2, 1, 1); /* the first one is E */
	CHECK_EQ(fake_save(engine, dir, "a", &one, SFR_SAVE_CHECK_BYTES), -EIO);
	CHECK(fake.fake_cuda_hits() > 0);
	fake_freed(&one, 0);
	fake_end(engine);
}

/* Every call of the driver fails once and then permanently, with every kind of error. */
TEST(any_failing_driver_call_leaves_old_or_new_file)
{
	static const int codes[] = { 1, 2, 201, 700, 801 };
	unsigned nr_runs = 0;
	int before = check__nr_failed;

	begin();
	fake_put_on_device(&one, 0, SAVING_NR, 0);
	fake_put_on_device(&two, 0, SAVING_NR, 0);
	(void)alarm(0);
	for (size_t c = 0; c < sizeof(codes) / sizeof(codes[0]); c++)
		for (int sticky = 0; sticky < 2; sticky++)
			for (uint64_t nth = 1;; nth += 1 + nth / 24) {
				struct sfr_engine *engine = fake_engine(4, 2);
				bool acted;
				int rc;

				CHECK_EQ(fake_save(engine, dir, "a", &one, 0), 0);
				fake.fake_cuda_allow_pageable(1);
				fake.fake_cuda_fail("*", nth, sticky, codes[c]);
				rc = fake_save(engine, dir, "a", &two, 0);
				acted = fake.fake_cuda_hits() > 0;
				CHECK(rc == 0 || acted);
				CHECK_EQ(saving_content_as(dir, "a", &one), rc == 0 ? 2 : 1);
				if (check__nr_failed != before)
					(void)fprintf(stderr, "  code %d, call %d%s\n", codes[c],
						      (int)nth, sticky ? " and later ones" : "");
				before = check__nr_failed;
				CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
				saving_end(engine);
				fake_check();
				nr_runs++;
				fake.fake_cuda_reset();
				fake.fake_cuda_forget();
				engine = fake_engine(4, 2);
				CHECK_EQ(fake_save(engine, dir, "a", &two, 0), 0);
				saving_end(engine);
				if (!acted)
					break;
			}
	CHECK(nr_runs > 100);
}

TEST(device_without_an_active_context_is_refused)
{
	struct sfr_engine *engine;
	char why[160];

	begin();
	engine = fake_engine(4, 1);
	fake.fake_cuda_activate(1, 0);
	CHECK(sfr_engine_use_device(engine, 1, why, sizeof(why)) < 0);
	CHECK(strstr(why, "no active context") != NULL);
	fake_put_on_device(&one, 0, SAVING_NR, 1);
	CHECK_EQ(fake_save(engine, dir, "a", &one, 0), -ENODEV);
	fake_put_on_device(&one, 0, SAVING_NR, 99); /* a device that does not exist */
	struct sfr_ticket *t;
	CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
	CHECK_EQ(sfr_save_begin_transfers(t, &(struct sfr_device_stream){ .device = 99 }, 1), 0);
	CHECK_EQ(saving_submit(t), 0);
	saving_done(t);
	fake_end(engine);
}

TEST(warm_up_registers_regions_and_trim_releases_them)
{
	struct sfr_engine *engine;
	char why[160];

	begin();
	engine = fake_engine(16, 1);
	CHECK_EQ(sfr_engine_use_device(engine, 0, why, sizeof(why)), 0);
	CHECK_EQ(sfr_engine_warm_up(engine, 16 * SAVING_BLOCK), 0);
	CHECK_EQ(fake.fake_cuda_live("registered"), 1);
	CHECK_EQ(sfr_engine_trim(engine), 0);
	CHECK_EQ(fake.fake_cuda_live("registered"), 0);
	/* the large registration is refused */
	fake.fake_cuda_fail("cuMemHostRegister_v2", 1, 0, 2);
	CHECK_EQ(sfr_engine_warm_up(engine, 16 * SAVING_BLOCK), 0);
	CHECK_EQ(fake.fake_cuda_live("registered"), 2);
	fake_put_on_device(&one, 0, SAVING_NR, 0);
	CHECK_EQ(fake_save(engine, dir, "a", &one, 0), 0);
	CHECK_EQ(fake.fake_cuda_live("registered"), 2);
	CHECK_EQ(fake.fake_cuda_live("allocated"), 1); /* the memory for samples */
	fake_end(engine);
}

/* The driver holds locks while it registers, and no thread can launch kernels meanwhile. */
TEST(no_registration_is_larger_than_128_mib)
{
	struct sfr_engine *engine;
	char why[160];

	begin();
	engine = saving_engine_of(16u << 20, 10, 1, 1);
	CHECK_EQ(sfr_engine_use_device(engine, 0, why, sizeof(why)), 0);
	CHECK_EQ(sfr_engine_warm_up(engine, 160u << 20), 0);
	CHECK_EQ(fake.fake_cuda_live("registered"), 2);
	fake_end(engine); /* reports a larger registration as a violation */
}

BEGIN
{
	if (!fake_load())
		return false;
	dir = saving_dir();
	return true;
}
