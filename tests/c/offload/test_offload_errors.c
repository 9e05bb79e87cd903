/* Copying a group to a device: refusals and failures, and that nothing is left after them. */
#include <errno.h>
#include <semaphore.h>
#include <sys/wait.h>

#include "cuda/fake.h"
#include "offload/offload.h"
#include "snapshot/snapshot.h"

enum { PARTS = 3, PART = 3 * SAVING_BLOCK / 2 };

static unsigned char device[PARTS][PART] __attribute__((aligned(64)));
static struct sfr_engine *engine;
static struct sfr_snapshot *ticket;
static void *stream;

static void begin(void)
{
	struct sfr_source sources[PARTS];

	fake.fake_cuda_reset();
	memset(device, 0, sizeof(device));
	engine = fake_engine(12, 1);
	for (unsigned i = 0; i < PARTS; i++)
		sources[i] = (struct sfr_source){ .addr = (uint64_t)(uintptr_t)device[i],
						  .nbytes = PART };
	for (unsigned i = 0; i < PARTS; i++)
		memset(device[i], (int)i + 1, PART);
	CHECK_EQ(sfr_snapshot_new(engine, sources, PARTS, SFR_SNAPSHOT_LEAVES, &ticket), 0);
	CHECK_EQ(sfr_snapshot_lease(ticket, SFR_FOREVER), 0);
	CHECK_EQ(sfr_snapshot_start(ticket), 0);
	memset(device, 0, sizeof(device));
}

static int onload_parts(struct sfr_onload **out)
{
	struct sfr_onload_copy copies[PARTS];
	char *base;
	uint64_t len;

	sfr_snapshot_memory(ticket, &base, &len);
	for (unsigned i = 0; i < PARTS; i++)
		copies[i] = (struct sfr_onload_copy){
			.src = (uint64_t)(uintptr_t)base + sfr_snapshot_offset(ticket, i),
			.dst = (uint64_t)(uintptr_t)device[i] | FAKE_CUDA_DEVICE,
			.nbytes = PART,
		};
	return sfr_onload_start(engine, 0, (uint64_t)(uintptr_t)stream, copies, PARTS, ticket, out);
}

static bool is_onloaded(void)
{
	for (unsigned i = 0; i < PARTS; i++)
		for (unsigned k = 0; k < PART; k++)
			if (device[i][k] != i + 1)
				return false;
	return true;
}

static void works(void)
{
	struct sfr_onload *onload;
	uint64_t nr_events;
	struct sfr_err err;

	CHECK_EQ(onload_parts(&onload), 0);
	CHECK_EQ(sfr_onload_wait(onload, SFR_FOREVER), 0);
	nr_events = fake.fake_cuda_calls("cuEventRecord");
	/* the copies have completed */
	CHECK_EQ(sfr_onload_make_stream_wait(onload, (uint64_t)(uintptr_t)stream), 0);
	CHECK_EQ(fake.fake_cuda_calls("cuEventRecord"), nr_events);
	sfr_onload_error(onload, &err);
	CHECK_EQ(err.code, 0);
	CHECK(is_onloaded());
	sfr_onload_wait_and_free(onload);
}

static void take_notices(void)
{
	struct sfr_notice notice;

	while (sfr_notice_wait(&notice, 0) == 0)
		if (notice.snapshot)
			sfr_snapshot_put(notice.snapshot);
}

/* The pool has all of its memory back, and nothing of ours is left in the driver. */
static void end_engine(void)
{
	struct sfr_stats stats;

	sfr_snapshot_put(ticket);
	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK_EQ(stats.leased_bytes, 0);
	saving_end(engine);
	take_notices();
	fake_check();
	fake_check_nothing_left();
}

static void end(void)
{
	sfr_snapshot_remove_view(ticket);
	end_engine();
}

/* ---- what fails ---------------------------------------------------------------------- */

TEST(failed_allocation_queues_and_leaks_nothing)
{
	begin();
	works();
	FOR_EVERY_FAILURE(run, "*", ENOMEM)
	{
		struct sfr_onload *onload = NULL;
		struct sfr_err err = { .code = 0 };
		int rc = onload_parts(&onload);

		CHECK(rc == 0 || (rc == -ENOMEM && check_acted(&run)));
		check_end_fault(&run);
		if (rc == 0)
			sfr_onload_error(onload, &err);
		CHECK(err.code == 0 || check_acted(&run));
		sfr_onload_wait_and_free(onload);
	}
	works();
	end();
}

/* Fails each call of this name in turn. Returns how many failures were reported. */
static unsigned fail_each(const char *name)
{
	unsigned nr_reported = 0;

	for (uint64_t nth = 1;; nth++) {
		struct sfr_onload *onload;
		struct sfr_err err;
		uint64_t before = fake.fake_cuda_hits();

		fake.fake_cuda_fail(name, nth, 0, CUDA_ERROR_OUT_OF_MEMORY);
		CHECK_EQ(onload_parts(&onload), 0);
		(void)sfr_onload_make_stream_wait(onload, (uint64_t)(uintptr_t)stream);
		CHECK_EQ(sfr_onload_wait(onload, SFR_FOREVER), 0);
		sfr_onload_error(onload, &err);
		if (err.code != 0)
			nr_reported++;
		sfr_onload_wait_and_free(onload);
		if (fake.fake_cuda_hits() == before)
			break;
	}
	fake_check();
	fake.fake_cuda_reset();
	return nr_reported;
}

/* An exception: if the driver refuses to free an event, or to enter the context for that, the
 * event is left with the driver. */
TEST(failing_driver_call_is_reported_and_leaks_nothing)
{
	static const char *const names[] = {
		"cuStreamIsCapturing",  "cuStreamWaitEvent",    "cuEventCreate",
		"cuEventRecord",        "cuEventQuery",         "cuEventElapsedTime",
		"cuMemHostRegister_v2", "cuMemcpyHtoDAsync_v2", "cuMemcpyBatchAsync_v2",
	};
	unsigned nr_reported = 0;

	begin();
	works();
	for (unsigned i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		nr_reported += fail_each(names[i]);
	CHECK(nr_reported > 2);
	works();
	end();
}

TEST(nothing_is_copied_after_a_failed_call)
{
	struct sfr_onload *onload;
	struct sfr_err err;
	uint64_t before;

	begin();
	works();
	before = fake.fake_cuda_calls("cuMemcpyHtoDAsync_v2") +
		 fake.fake_cuda_calls("cuMemcpyBatchAsync_v2");
	fake.fake_cuda_fail("cuStreamWaitEvent", 1, 0, CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_EQ(onload_parts(&onload), 0);
	sfr_onload_error(onload, &err);
	CHECK(err.code != 0);
	CHECK_EQ(fake.fake_cuda_calls("cuMemcpyHtoDAsync_v2") +
			 fake.fake_cuda_calls("cuMemcpyBatchAsync_v2"),
		 before);
	sfr_onload_wait_and_free(onload);
	works();
	end();
}

/* Nobody knows whether a copy still reads the memory, so it is never used again. */
TEST(dead_device_is_reported_and_keeps_the_groups_memory)
{
	struct sfr_stats stats;
	struct sfr_onload *onload;
	struct sfr_err err;

	begin();
	works();
	fake.fake_cuda_fail_copy(1, CUDA_ERROR_LAUNCH_FAILED);
	for (int i = 0; i < 2; i++) { /* first it dies during the copy, then it is already dead */
		CHECK_EQ(onload_parts(&onload), 0);
		CHECK_EQ(sfr_onload_wait(onload, SFR_FOREVER), 0);
		sfr_onload_error(onload, &err);
		CHECK_EQ(err.code, -EIO);
		CHECK_EQ(strstr(err.note, "this device is dead since") != NULL, i == 1);
		sfr_onload_wait_and_free(onload);
	}
	sfr_snapshot_remove_view(ticket);
	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK_EQ(stats.leased_bytes, 0);
	CHECK(stats.retired_bytes >= PARTS * PART);
	sfr_snapshot_put(ticket);
	saving_end(engine);
	take_notices();
	fake_check();
	fake.fake_cuda_reset();
	fake.fake_cuda_forget();
}

TEST(unavailable_device_is_reported)
{
	struct sfr_onload *onload;
	struct sfr_err err;

	begin();
	fake.fake_cuda_fail("*", 1, 1, CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_EQ(onload_parts(&onload), 0);
	fake.fake_cuda_reset();
	sfr_onload_error(onload, &err);
	CHECK(err.code < 0);
	CHECK_EQ(sfr_onload_make_stream_wait(onload, (uint64_t)(uintptr_t)stream), 0);
	CHECK_EQ(sfr_onload_wait(onload, SFR_FOREVER), 0);
	sfr_onload_wait_and_free(onload);
	works();
	end();
}

/* Offloads a group from a stopped device. */
static void leave_again(void)
{
	const struct sfr_device_stream streams[] = { { .handle = (uint64_t)(uintptr_t)stream } };
	struct sfr_source sources[PARTS];

	sfr_snapshot_remove_view(ticket);
	sfr_snapshot_put(ticket);
	for (unsigned i = 0; i < PARTS; i++)
		sources[i] = (struct sfr_source){
			.addr = (uint64_t)(uintptr_t)device[i] | FAKE_CUDA_DEVICE,
			.nbytes = PART,
			.device = 1,
		};
	CHECK_EQ(sfr_snapshot_new(engine, sources, PARTS, SFR_SNAPSHOT_LEAVES, &ticket), 0);
	CHECK_EQ(sfr_snapshot_lease(ticket, SFR_FOREVER), 0);
	CHECK_EQ(sfr_snapshot_set_streams(ticket, streams, 1), 0);
	fake.fake_cuda_hold(1);
	CHECK_EQ(sfr_snapshot_start(ticket), 0);
}

TEST(onload_fails_if_it_cannot_wait_for_the_offload)
{
	struct sfr_onload *onload;
	int64_t torn;

	begin();
	works();
	leave_again();
	/* the wait for E */
	fake.fake_cuda_fail("cuStreamWaitEvent", 2, 0, CUDA_ERROR_OUT_OF_MEMORY);
	CHECK_EQ(onload_parts(&onload), SFR_EAGAIN);
	CHECK(onload == NULL);
	CHECK_EQ(fake.fake_cuda_hits(), 1);
	fake.fake_cuda_hold(0);
	CHECK_EQ(sfr_snapshot_wait(ticket, SFR_FOREVER, &torn), 0);
	works();
	end();
}

/* ---- what is refused ------------------------------------------------------------------- */

/* The engine is closed, or is being closed and waits for a snapshot. */
TEST(onload_of_a_closed_engine_is_refused)
{
	struct sfr_onload *onload;

	begin();
	engine->nr_pool_calls++;
	CHECK_EQ(sfr_engine_close(engine, 1), SFR_EAGAIN);
	CHECK_EQ(onload_parts(&onload), SFR_ECLOSED);
	engine->nr_pool_calls--;
	CHECK_EQ(sfr_engine_close(engine, SFR_FOREVER), 0);
	CHECK_EQ(onload_parts(&onload), SFR_ECLOSED);
	CHECK(onload == NULL);
	end();
}

TEST(capturing_stream_is_refused_and_left_alone)
{
	struct sfr_onload *onload;
	uint64_t nr_events;

	begin();
	works();
	fake.fake_cuda_capture(stream, 1);
	CHECK_EQ(onload_parts(&onload), SFR_ECAPTURING);
	fake.fake_cuda_capture(stream, 0);
	fake.fake_cuda_hold(1);
	CHECK_EQ(onload_parts(&onload), 0);
	fake.fake_cuda_capture(stream, 1);
	nr_events = fake.fake_cuda_calls("cuEventRecord");
	CHECK_EQ(sfr_onload_make_stream_wait(onload, (uint64_t)(uintptr_t)stream), SFR_EAGAIN);
	CHECK_EQ(fake.fake_cuda_calls("cuEventRecord"), nr_events);
	fake.fake_cuda_capture(stream, 0);
	fake.fake_cuda_hold(0);
	sfr_onload_wait_and_free(onload);
	end();
}

TEST(onload_of_returned_memory_is_refused)
{
	struct sfr_onload *onload;
	uint64_t len;
	char *base;

	begin();
	works();
	sfr_snapshot_memory(ticket, &base, &len);
	CHECK_EQ(sfr_engine_is_addr_pinned(engine, (uint64_t)(uintptr_t)base), 1);
	CHECK_EQ(sfr_engine_is_addr_pinned(engine, (uint64_t)(uintptr_t)device), 0);
	sfr_snapshot_remove_view(ticket);
	CHECK_EQ(onload_parts(&onload), SFR_ESTATE);
	CHECK(onload == NULL);
	CHECK_EQ(sfr_engine_close(engine, SFR_FOREVER), 0);
	CHECK_EQ(sfr_engine_is_addr_pinned(engine, (uint64_t)(uintptr_t)base), 0);
	end_engine();
}

static void onload_first_and_last(struct sfr_onload **out)
{
	struct sfr_onload_copy copies[2];
	uint64_t len;
	char *base;

	sfr_snapshot_memory(ticket, &base, &len);
	for (unsigned i = 0; i < 2; i++)
		copies[i] = (struct sfr_onload_copy){
			.src = (uint64_t)(uintptr_t)base + sfr_snapshot_offset(ticket, 2 * i),
			.dst = (uint64_t)(uintptr_t)device[2 * i] | FAKE_CUDA_DEVICE,
			.nbytes = PART,
		};
	CHECK_EQ(sfr_onload_start(engine, 0, (uint64_t)(uintptr_t)stream, copies, 2, ticket, out),
		 0);
}

TEST(memory_between_two_copies_is_left_alone)
{
	struct sfr_onload *onload;

	begin();
	onload_first_and_last(&onload);
	sfr_onload_wait_and_free(onload);
	CHECK(device[0][PART - 1] == 1 && device[2][0] == 3);
	for (unsigned k = 0; k < PART; k++)
		CHECK_EQ(device[1][k], 0);
	end();
}

/* A driver checks nothing about unknown memory in a batch, and may take long over it. */
TEST(only_pinned_memory_is_copied_in_batches)
{
	for (int pinned = 0; pinned < 2; pinned++) {
		struct sfr_onload *onload;
		uint64_t nr_batches;

		begin();
		if (!pinned) {
			fake.fake_cuda_fail("cuMemHostRegister_v2", 1, 1, CUDA_ERROR_OUT_OF_MEMORY);
			fake.fake_cuda_allow_pageable(1);
		}
		nr_batches = fake.fake_cuda_calls("cuMemcpyBatchAsync_v2");
		onload_first_and_last(&onload);
		sfr_onload_wait_and_free(onload);
		CHECK_EQ(fake.fake_cuda_calls("cuMemcpyBatchAsync_v2") - nr_batches, pinned);
		CHECK(device[0][PART - 1] == 1 && device[2][0] == 3);
		fake.fake_cuda_reset();
		end();
	}
}

/* Memory between two ranges that the caller gave belongs to the caller, on the host and on the
 * device. */
TEST(copies_outside_the_pool_are_not_merged)
{
	static unsigned char host[2 * SFR_COPY_ALIGN];
	struct sfr_onload_copy copies[2];
	struct sfr_onload *onload;

	begin();
	fake.fake_cuda_allow_pageable(1);
	memset(host, 7, sizeof(host));
	for (unsigned i = 0; i < 2; i++)
		copies[i] = (struct sfr_onload_copy){
			.src = (uint64_t)(uintptr_t)host + i * SFR_COPY_ALIGN,
			.dst = ((uint64_t)(uintptr_t)device[0] + i * SFR_COPY_ALIGN) |
			       FAKE_CUDA_DEVICE,
			.nbytes = 100,
		};
	CHECK_EQ(sfr_onload_start(engine, 0, (uint64_t)(uintptr_t)stream, copies, 2, NULL, &onload),
		 0);
	sfr_onload_wait_and_free(onload);
	for (unsigned k = 0; k < 2 * SFR_COPY_ALIGN; k++)
		CHECK_EQ(device[0][k], k % SFR_COPY_ALIGN < 100 ? 7 : 0);
	end();
}

TEST(onload_calls_are_refused_in_a_forked_child)
{
	struct sfr_onload *onload;
	pid_t child;
	int status = 0;

	begin();
	works();
	fake.fake_cuda_hold(1);
	CHECK_EQ(onload_parts(&onload), 0);
	child = fork();
	if (child == 0) {
		struct sfr_onload *other;
		uint64_t ns;

		(void)alarm(20);
		_exit(onload_parts(&other) == SFR_EFORK &&
				      sfr_onload_start(engine, 0, 0, NULL, 0, NULL, &other) ==
					      SFR_EFORK &&
				      sfr_onload_wait(onload, SFR_FOREVER) == SFR_EFORK &&
				      sfr_onload_make_stream_wait(onload, 0) == SFR_EFORK &&
				      sfr_onload_times(onload, &ns, &ns) == SFR_EFORK ?
			      0 :
			      1);
	}
	CHECK_EQ(waitpid(child, &status, 0), child);
	CHECK_EQ(status, 0);
	fake.fake_cuda_hold(0);
	sfr_onload_wait_and_free(onload);
	end();
}

/* ---- waiting ----------------------------------------------------------------------------- */

TEST(wait_returns_eagain_until_the_copies_complete)
{
	struct sfr_onload *onload;
	uint64_t copying, waited;

	begin();
	works();
	fake.fake_cuda_hold(1);
	CHECK_EQ(onload_parts(&onload), 0);
	CHECK_EQ(sfr_onload_wait(onload, 0), SFR_EAGAIN);
	CHECK_EQ(sfr_onload_wait(onload, 1000000), SFR_EAGAIN);
	CHECK_EQ(sfr_onload_times(onload, &copying, &waited), SFR_EAGAIN);
	for (unsigned i = 0; i < 3; i++)
		CHECK_EQ(sfr_onload_make_stream_wait(onload, (uint64_t)(uintptr_t)stream), 0);
	fake.fake_cuda_hold(0);
	CHECK_EQ(sfr_onload_wait(onload, SFR_FOREVER), 0);
	fake.fake_cuda_drain(stream);
	CHECK_EQ(sfr_onload_times(onload, &copying, &waited), 0);
	CHECK(copying > 0);
	CHECK(waited > 0);
	/* A complete group needs no wait. */
	waited = fake.fake_cuda_calls("cuStreamWaitEvent");
	CHECK_EQ(sfr_onload_make_stream_wait(onload, (uint64_t)(uintptr_t)stream), 0);
	CHECK_EQ(fake.fake_cuda_calls("cuStreamWaitEvent"), waited);
	sfr_onload_wait_and_free(onload);
	end();
}

static void wait_for_sem(void *go)
{
	(void)sem_wait(go);
}

TEST(times_are_known_after_the_streams_wait)
{
	struct sfr_onload *onload;
	uint64_t copying, waited;
	sem_t go;

	begin();
	works();
	CHECK_EQ(sem_init(&go, 0, 0), 0);
	fake.fake_cuda_hold(1);
	CHECK_EQ(onload_parts(&onload), 0);
	fake.fake_cuda_launch(stream, wait_for_sem, &go);
	CHECK_EQ(sfr_onload_make_stream_wait(onload, (uint64_t)(uintptr_t)stream), 0);
	fake.fake_cuda_hold(0);
	CHECK_EQ(sfr_onload_wait(onload, SFR_FOREVER), 0);
	CHECK_EQ(sfr_onload_times(onload, &copying, &waited), SFR_EAGAIN);
	(void)sem_post(&go);
	fake.fake_cuda_drain(stream);
	CHECK_EQ(sfr_onload_times(onload, &copying, &waited), 0);
	sfr_onload_wait_and_free(onload);
	end();
}

static CUresult new_event(CUevent *event, unsigned flags)
{
	(void)flags;
	*event = (CUevent)&device;
	return CUDA_SUCCESS;
}

static CUresult record_event(CUevent event, CUstream on)
{
	(void)event;
	(void)on;
	return CUDA_SUCCESS;
}

static CUresult ask_event(CUevent event)
{
	(void)event;
	return CUDA_SUCCESS;
}

static CUresult elapsed_2_5_ms(float *ms, CUevent begin, CUevent end)
{
	(void)begin;
	(void)end;
	*ms = 2.5f;
	return CUDA_SUCCESS;
}

TEST(times_are_in_nanoseconds)
{
	const struct sfr__cuda_api cu = { .event_new = new_event,
					  .event_record = record_event,
					  .event_query = ask_event,
					  .event_elapsed = elapsed_2_5_ms,
					  .event_free = ask_event };
	struct sfr__cuda_lane lane = { .cu = &cu };
	struct sfr__cuda_timer timer = { 0 };

	sfr__cuda_timer_begin(&lane, &timer, NULL);
	sfr__cuda_timer_end(&lane, &timer, NULL);
	CHECK(sfr__cuda_timer_read(&lane, &timer));
	CHECK_EQ(timer.ns, 2500000);
}

TEST(dropping_an_onload_waits_for_its_copies)
{
	struct sfr_onload *onload;

	begin();
	works();
	memset(device, 0, sizeof(device));
	fake.fake_cuda_delay(3000000, 1);
	CHECK_EQ(onload_parts(&onload), 0);
	sfr_onload_wait_and_free(onload);
	CHECK(is_onloaded());
	fake.fake_cuda_delay(0, 1);
	end();
}

BEGIN
{
	if (!fake_load())
		return false;
	stream = fake.fake_cuda_stream(0);
	return true;
}
