/* The order between a caller's streams and a lane's, over the fake driver: the events E, C and S
 * (stage/transfer.h) of saves and snapshots. Work on the caller's stream overwrites everything
 * as early as it may. */
#include <sched.h>

#include "cuda/fix_cuda.h"
#include "snapshot/snapshot.h"

/* E: recorded in the call that begins a save, on the caller's stream, before anything is copied. */
TEST(save_begins_with_an_event_that_its_stream_waits_for)
{
	struct sfr_ticket *t;
	struct sfr_engine *engine = begin_on_device(16, 2);
	void *stream = fake.fake_cuda_stream(0);

	for (int i = 0; i < 2; i++) { /* only the first time is the lane's stream new */
		uint64_t records = fake.fake_cuda_calls("cuEventRecord");
		uint64_t waits = fake.fake_cuda_calls("cuStreamWaitEvent");
		const struct sfr_device_stream on = { .handle = (uintptr_t)stream };

		CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
		CHECK_EQ(sfr_save_begin_transfers(t, &on, 1), 0);
		CHECK_EQ(fake.fake_cuda_calls("cuEventRecord"), records + 1);
		CHECK_EQ(fake.fake_cuda_calls("cuStreamWaitEvent"), waits + 1);
		CHECK_EQ(saving_submit(t), 0);
		saving_finish(t);
		CHECK_EQ(saving_content_as(dir, "a", &one), 1);
		sfr_ticket_put(t);
	}
	fake_end(engine);
}

/* Nothing runs before everything is queued. Then the caller's streams run before the core's or
 * after them, wherever both may. So a missing event, or one in the wrong place, always shows. */
TEST(file_has_the_state_at_the_call_whichever_side_runs_first)
{
	struct fake_fill before = { &one, 0, SAVING_NR, 5 },
			 captured = { &one, 0, FAKE_FIRST_DEFERRED, FAKE_GARBAGE },
			 rest = { &one, FAKE_FIRST_DEFERRED, SAVING_NR, FAKE_GARBAGE };

	begin();
	for (int i = 0; i < 8; i++) {
		void *stream = fake.fake_cuda_stream(0), *step = stream;
		struct sfr_engine *engine = fake_engine(32, 2);
		struct sfr_ticket *t;

		fake_put_on_device(&one, 0, SAVING_NR, 0);
		fake.fake_cuda_first(1 + i % 2);
		for (int k = 0; k < 2; k++) {
			before.value = (unsigned char)(5 + k);
			CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
			fake.fake_cuda_hold(1);
			fake.fake_cuda_launch(stream, fake_fill, &before);
			CHECK_EQ(fake_submit(t, stream), 0);
			fake.fake_cuda_launch(stream, fake_fill, &captured);
			if (i & 2) { /* the step runs on a side stream, as in torch */
				step = fake.fake_cuda_stream(0);
				fake.fake_cuda_follow(step, stream);
			}
			CHECK_EQ(fake_gate_held(t, step), 0);
			fake.fake_cuda_launch(step, fake_fill, &rest);
			fake.fake_cuda_hold(0);
			saving_finish(t);
			CHECK_EQ(saving_content_as(dir, "a", &one), 5 + k);
			sfr_ticket_put(t);
			fake.fake_cuda_drain(step);
			fake.fake_cuda_drain(stream);
		}
		fake_end(engine);
	}
}

/* Samples have the bytes at the call. A write that is queued right after the call, without a
 * gate, comes before the deferred copies and is detected. */
TEST(write_queued_after_the_call_is_detected_by_samples)
{
	struct fake_fill work = { &one, 3, 4, 9 };
	struct sfr_report report;
	struct sfr_ticket *t;
	struct sfr_engine *engine = begin_on_device(32, 2);
	void *stream = fake.fake_cuda_stream(0);

	fake.fake_cuda_first(1);
	CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
	fake.fake_cuda_hold(1);
	CHECK_EQ(fake_submit(t, stream), 0);
	fake.fake_cuda_launch(stream, fake_fill, &work);
	fake.fake_cuda_hold(0);
	saving_finish(t);
	CHECK_EQ(sfr_save_report(t, &report), 0);
	CHECK_EQ(report.err.code, SFR_ETORN);
	CHECK_EQ(report.err.index, 3);
	sfr_ticket_put(t);
	fake.fake_cuda_drain(stream);
	fake_end(engine);
}

TEST(gate_inserts_a_wait_without_blocking_the_host)
{
	struct sfr_ticket *t;
	uint64_t waits;
	struct sfr_engine *engine = begin_on_device(16, 2);
	void *stream = fake.fake_cuda_stream(0);

	CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
	/* The devices are stopped, so a thread that waits for them waits forever. */
	fake.fake_cuda_hold(1);
	CHECK_EQ(fake_submit(t, stream), 0);
	waits = fake.fake_cuda_calls("cuStreamWaitEvent");
	for (uint64_t i = 1; i <= 2; i++) { /* twice, as two optimizers do */
		CHECK_EQ(fake_gate_held(t, stream), 0);
		CHECK_EQ(fake.fake_cuda_calls("cuStreamWaitEvent"), waits + i);
	}
	CHECK_EQ(sfr_save_give_verdict(t, -1), 0);
	/* The device may read the sources for as long as its copies run. */
	fake.fake_cuda_settle();
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, 0), SFR_EAGAIN);
	fake.fake_cuda_hold(0);
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	fake_freed(&one, 0);
	saving_finish(t);
	CHECK_EQ(saving_content_as(dir, "a", &one), 1);
	sfr_ticket_put(t);
	fake_end(engine);
}

TEST(save_refuses_a_capturing_stream_and_the_gate_adds_nothing_to_it)
{
	struct sfr_ticket *t, *refused;
	struct sfr_engine *engine = begin_on_device(16, 2);
	void *stream = fake.fake_cuda_stream(0);

	CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &refused), 0);
	CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
	fake.fake_cuda_hold(1);
	CHECK_EQ(fake_submit(t, stream), 0);
	fake.fake_cuda_capture(stream, 1);
	CHECK_EQ(sfr_save_begin_transfers(refused,
					  &(struct sfr_device_stream){ .handle =
									       (uintptr_t)stream },
					  1),
		 SFR_ECAPTURING);
	CHECK_EQ(fake_gate_held(t, stream), SFR_EAGAIN); /* it waits on the host */
	fake.fake_cuda_hold(0);
	CHECK_EQ(fake_gate(t, stream), 0);
	fake_freed(&one, 0);
	fake.fake_cuda_capture(stream, 0);
	saving_finish(t);
	CHECK_EQ(saving_content_as(dir, "a", &one), 1);
	sfr_ticket_put(t);
	sfr_ticket_put(refused);
	fake_end(engine);
}

TEST(a_gate_without_a_stream_for_the_device_waits_on_the_host)
{
	struct sfr_ticket *t;
	struct sfr_engine *engine = begin_on_device(16, 2);
	void *stream = fake.fake_cuda_stream(0);

	CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
	fake.fake_cuda_hold(1);
	CHECK_EQ(fake_submit(t, stream), 0);
	CHECK_EQ(sfr_save_gate(t, NULL, 0, 0), SFR_EAGAIN);
	fake.fake_cuda_settle();
	CHECK_EQ(sfr_save_gate(t, NULL, 0, 0), SFR_EAGAIN);
	fake.fake_cuda_hold(0);
	CHECK_EQ(sfr_save_gate(t, NULL, 0, SFR_FOREVER), 0);
	fake_freed(&one, 0);
	saving_done(t);
	fake_end(engine);
}

TEST(bytes_changed_before_their_copy_are_detected)
{
	for (int by_sum = 0; by_sum < 2; by_sum++) {
		struct sfr_engine *engine;
		struct sfr_report report;
		struct sfr_ticket *t;
		struct fake_fill work = { &one, 3, 4, 9 };
		void *stream;

		begin();
		engine = fake_engine(1, 1); /* so that little is copied before the gate */
		stream = fake.fake_cuda_stream(0);
		fake_put_on_device(&one, 0, SAVING_NR, 0);
		CHECK_EQ(saving_new(engine, dir, "a", &one, by_sum ? SFR_SAVE_CHECK_BYTES : 0, &t),
			 0);
		CHECK_EQ(sfr_save_begin_transfers(t,
						  &(struct sfr_device_stream){
							  .handle = (uintptr_t)stream },
						  1),
			 0);
		CHECK_EQ(sfr_save_admit(t, SFR_FOREVER), 0);
		CHECK_EQ(sfr_save_capture(t, SFR_FOREVER), 0);
		fake.fake_cuda_launch(stream, fake_fill,
				      &work); /* before anything deferred is queued */
		fake.fake_cuda_drain(stream);
		CHECK_EQ(sfr_save_launch(t), 0);
		saving_finish(t);
		CHECK_EQ(sfr_save_report(t, &report), 0);
		CHECK_EQ(report.err.code, SFR_ETORN);
		CHECK_EQ(report.err.index, 3);
		sfr_ticket_put(t);
		fake_end(engine);
	}
}

static unsigned char large[1 << 20]; /* so that few of its lines are samples */

static void change_a_byte(void *arg)
{
	(void)arg;
	large[200]++; /* the first sample is at 0, the next one at 400 or later */
}

TEST(check_mutation_finds_a_changed_byte_between_samples)
{
	for (int by_sum = 0; by_sum < 2; by_sum++) {
		struct sfr_engine *engine;
		struct sfr_report report;
		struct sfr_ticket *t;
		void *stream;

		begin();
		engine = fake_engine(1, 1); /* so that little is copied before the gate */
		stream = fake.fake_cuda_stream(0);
		one.sources[3].addr = (uintptr_t)large;
		one.sources[3].nbytes = sizeof(large);
		fake_put_on_device(&one, 0, SAVING_NR, 0);
		CHECK_EQ(saving_new(engine, dir, "a", &one, by_sum ? SFR_SAVE_CHECK_BYTES : 0, &t),
			 0);
		CHECK_EQ(sfr_save_begin_transfers(t,
						  &(struct sfr_device_stream){
							  .handle = (uintptr_t)stream },
						  1),
			 0);
		CHECK_EQ(sfr_save_admit(t, SFR_FOREVER), 0);
		CHECK_EQ(sfr_save_capture(t, SFR_FOREVER), 0);
		fake.fake_cuda_launch(stream, change_a_byte, NULL);
		fake.fake_cuda_drain(stream);
		CHECK_EQ(sfr_save_launch(t), 0);
		saving_finish(t);
		CHECK_EQ(sfr_save_report(t, &report), 0);
		CHECK_EQ(report.err.code, by_sum ? SFR_ETORN : 0);
		CHECK_EQ(report.err.index, by_sum ? 3 : -1);
		sfr_ticket_put(t);
		fake_end(engine);
	}
}

static struct sfr_snapshot *new_snapshot(struct sfr_engine *engine, const struct saving_state *s,
					 void *stream)
{
	const struct sfr_device_stream streams[] = { { .handle = (uintptr_t)stream } };
	struct sfr_snapshot *snapshot;

	CHECK_EQ(sfr_snapshot_new(engine, s->sources, SAVING_NR, 0, &snapshot), 0);
	CHECK_EQ(sfr_snapshot_lease(snapshot, SFR_FOREVER), 0);
	CHECK_EQ(sfr_snapshot_set_streams(snapshot, streams, 1), 0);
	return snapshot;
}

/* Returns whether each source's copy is full of `value`. */
static bool snapshot_is(struct sfr_snapshot *snapshot, unsigned from, unsigned char value)
{
	uint64_t len;
	char *base;
	bool good = true;

	sfr_snapshot_memory(snapshot, &base, &len);
	for (unsigned i = from; i < SAVING_NR; i++) {
		const char *copy = base + sfr_snapshot_offset(snapshot, i);

		for (uint64_t k = 0; k < one.sources[i].nbytes; k++)
			good = good && copy[k] == (char)value;
	}
	return good;
}

TEST(device_snapshot_is_queued_in_the_call_without_blocking)
{
	for (int held = 0; held < 2; held++) {
		struct fake_fill before = { &one, 0, SAVING_NR, 5 },
				 after = { &one, 0, SAVING_NR, 6 };
		struct sfr_snapshot *snapshot;
		struct sfr_engine *engine;
		const struct sfr_device_stream step = { 0 };
		void *stream;
		int64_t torn;

		begin();
		engine = fake_engine(16, 1);
		stream = fake.fake_cuda_stream(0);
		fake_put_on_device(&one, 0, SAVING_NR, 0);
		snapshot = new_snapshot(engine, &one, stream);
		fake.fake_cuda_hold(held); /* a thread that waits for the device waits forever */
		fake.fake_cuda_launch(stream, fake_fill, &before);
		CHECK_EQ(sfr_snapshot_start(snapshot), 0);
		/* The step's stream waits also for what is copied after the call. */
		CHECK_EQ(sfr_snapshot_gate(snapshot,
					   &(struct sfr_device_stream){ .handle =
										(uintptr_t)stream },
					   1, 0),
			 0);
		fake.fake_cuda_launch(stream, fake_fill, &after);
		if (held) {
			CHECK_EQ(sfr_snapshot_wait(snapshot, 0, &torn), SFR_EAGAIN);
			sfr_snapshot_remove_view(
				/* nothing can read the copy, but the device writes to it */
				snapshot);
			CHECK_EQ(sfr_snapshot_is_leased(snapshot), 1);
			fake.fake_cuda_hold(0);
		}
		CHECK_EQ(sfr_snapshot_wait(snapshot, SFR_FOREVER, &torn), 0);
		CHECK_EQ(torn, -1);
		CHECK_EQ(saving_notice(), SFR_NOTICE_SNAPSHOT);
		CHECK_EQ(sfr_snapshot_gate(snapshot, &step, 1, 0), 0);
		if (!held) {
			CHECK(snapshot_is(snapshot, 0, 5));
			sfr_snapshot_remove_view(snapshot);
		}
		CHECK_EQ(fake.fake_cuda_calls("cuMemcpyBatchAsync_v2"), 2);
		CHECK_EQ(fake.fake_cuda_calls("cuMemcpy3DBatchAsync_v2"), 1); /* the samples */
		fake.fake_cuda_drain(stream);
		CHECK_EQ(sfr_engine_close(engine, SFR_FOREVER), 0);
		sfr_snapshot_put(snapshot);
		fake_end(engine);
	}
}

TEST(a_snapshot_on_a_capturing_stream_is_refused)
{
	int64_t torn;
	struct sfr_engine *engine = begin_on_device(16, 1);
	void *stream = fake.fake_cuda_stream(0);
	struct sfr_snapshot *snapshot = new_snapshot(engine, &one, stream);

	fake.fake_cuda_capture(stream, 1);
	CHECK_EQ(sfr_snapshot_start(snapshot), SFR_ECAPTURING);
	CHECK_EQ(sfr_snapshot_wait(snapshot, SFR_FOREVER, &torn), 0);
	CHECK_EQ(saving_notice(), SFR_NOTICE_SNAPSHOT);
	fake.fake_cuda_capture(stream, 0);
	sfr_snapshot_remove_view(snapshot);
	sfr_snapshot_put(snapshot);
	fake_end(engine);
}

static uint32_t nr_copying(struct sfr_snapshot *snapshot)
{
	uint32_t nr;

	sfr__lock(&snapshot->engine->mu);
	nr = snapshot->nr_copying;
	sfr__unlock(&snapshot->engine->mu);
	return nr;
}

/* As for files: nothing runs before everything is queued, and then one side runs first. */
TEST(snapshot_has_the_state_at_the_call_whichever_side_runs_first)
{
	struct fake_fill before = { &one, 0, SAVING_NR, 5 },
			 captured = { &one, 0, FAKE_FIRST_DEFERRED, FAKE_GARBAGE },
			 rest = { &one, FAKE_FIRST_DEFERRED, SAVING_NR, FAKE_GARBAGE };

	begin();
	for (int i = 0; i < 4; i++) {
		struct sfr_engine *engine = fake_engine(16, 1);
		void *stream = fake.fake_cuda_stream(0);
		const struct sfr_device_stream step = { .handle = (uintptr_t)stream };
		int64_t torn;

		fake_put_on_device(&one, 0, SAVING_NR, 0);
		fake.fake_cuda_first(1 + i % 2);
		for (int k = 0; k < 2; k++) {
			struct sfr_snapshot *snapshot = new_snapshot(engine, &one, stream);

			before.value = (unsigned char)(5 + k);
			fake.fake_cuda_hold(1);
			fake.fake_cuda_launch(stream, fake_fill, &before);
			CHECK_EQ(sfr_snapshot_start(snapshot), 0);
			/* the last copying thread has found no torn source */
			sfr__snapshot_note_copy_begin(snapshot);
			fake.fake_cuda_launch(stream, fake_fill, &captured);
			if (i & 2) /* a write without a gate */
				fake.fake_cuda_launch(stream, fake_fill, &rest);
			else
				CHECK_EQ(sfr_snapshot_gate(snapshot, &step, 1, 0), 0);
			fake.fake_cuda_launch(stream, fake_fill, &rest);
			fake.fake_cuda_hold(0);
			while (nr_copying(snapshot) > 1)
				(void)sched_yield();
			sfr__snapshot_note_copy_end(snapshot, -1, NULL);
			CHECK_EQ(sfr_snapshot_wait(snapshot, SFR_FOREVER, &torn), 0);
			fake_freed(&one, 0);
			if (!(i & 2))
				CHECK_EQ(torn, -1);
			else if (i % 2 == 0) /* the caller's stream ran first */
				CHECK_EQ(torn, FAKE_FIRST_DEFERRED);
			if (torn < 0)
				CHECK(snapshot_is(snapshot, 0, before.value));
			CHECK_EQ(saving_notice(), SFR_NOTICE_SNAPSHOT);
			sfr_snapshot_remove_view(snapshot);
			sfr_snapshot_put(snapshot);
			fake.fake_cuda_drain(stream);
		}
		fake_end(engine);
	}
}

/* Fills storage 3 of `one`, whose bytes a copy may be reading: that race is what the test needs. */
__attribute__((noinline, no_sanitize("thread"))) static void overwrite_unordered(void *unused)
{
	volatile unsigned char *bytes = one.bytes[3];

	(void)unused;
	for (unsigned i = 0; i < SAVING_LEN; i++)
		bytes[i] = 9;
}

/* A stream that no other stream waits for writes after the samples are taken and before the
 * copy. The write is detected. */
TEST(a_write_between_samples_and_copy_tears_the_snapshot)
{
	void *stream, *other;
	unsigned nr_torn = 0;

	begin();
	stream = fake.fake_cuda_stream(0);
	other = fake.fake_cuda_stream(0);
	for (uint64_t seed = 1; seed <= 400 && nr_torn == 0; seed++) {
		struct sfr_engine *engine = fake_engine(16, 1);
		struct sfr_snapshot *snapshot;
		int64_t torn;

		saving_fill(&one, 1);
		fake_put_on_device(&one, 0, SAVING_NR, 0);
		snapshot = new_snapshot(engine, &one, stream);
		fake.fake_cuda_delay(1 + fake_rng(200000), seed);
		CHECK_EQ(sfr_snapshot_start(snapshot), 0);
		fake.fake_cuda_launch(other, overwrite_unordered, NULL);
		CHECK_EQ(sfr_snapshot_wait(snapshot, SFR_FOREVER, &torn), 0);
		CHECK(torn == -1 || torn == 3);
		if (torn == 3)
			nr_torn++;
		fake.fake_cuda_drain(other);
		CHECK_EQ(saving_notice(), SFR_NOTICE_SNAPSHOT);
		sfr_snapshot_remove_view(snapshot);
		CHECK_EQ(sfr_engine_close(engine, SFR_FOREVER), 0);
		sfr_snapshot_put(snapshot);
		saving_end(engine);
	}
	CHECK(nr_torn > 0);
	fake_check();
	fake_check_nothing_left();
}

BEGIN
{
	if (!fake_load())
		return false;
	dir = saving_dir();
	return true;
}
