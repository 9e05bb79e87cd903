/* The waits of a save's device state, over the fake driver: waits that fail, and several threads
 * that wait. No test depends on elapsed time. */
#include <sched.h>
#include <semaphore.h>
#include <unistd.h>

#include "cuda/fix_cuda.h"

/* Places the storages from 4 on in host memory. */
static void place_mixed(struct saving_state *s)
{
	fake_put_on_device(s, 0, 1, 0);
	fake_put_on_device(s, 2, 3, 0);
	fake_put_on_device(s, 3, 4, 1);
}

TEST(no_old_byte_of_the_pool_is_in_a_file_from_a_device)
{
	struct sfr_engine *engine;

	begin();
	engine = fake_engine(16, 2);
	CHECK_EQ(sfr_engine_warm_up(engine, 16 * SAVING_BLOCK), 0);
	for (int i = 0; i < 2; i++) {
		saving_fill(&one, 1);
		if (i == 0)
			fake_put_on_device(&one, 0, SAVING_NR, 0);
		else
			place_mixed(&one);
		saving_poison(engine);
		CHECK_EQ(fake_save(engine, dir, "a", &one, 0), 0);
		saving_padding_is_zero(dir, "a", &one);
		CHECK_EQ(saving_content_as(dir, "a", &one), 1);
	}
	fake_end(engine);
}

/* ---- a gate and the host's copies ---- */

static struct sfr_sys plain;
static sem_t held, may_go;
static atomic_int nr_to_hold;

static uint32_t held_lane_copy(uint32_t crc, void *dst, const void *src, size_t len)
{
	if (atomic_fetch_sub(&nr_to_hold, 1) > 0) {
		(void)sem_post(&held);
		(void)sem_wait(&may_go);
	}
	return plain.lane_copy(crc, dst, src, len);
}

static uint32_t unsubmitted(struct sfr_ticket *t)
{
	uint32_t nr;

	sfr__lock(&t->engine->mu);
	nr = t->work.nr_queueing;
	sfr__unlock(&t->engine->mu);
	return nr;
}

/* A device's stream can wait for copies from the device. For copies of host memory only the host
 * can wait. */
TEST(gate_waits_for_copies_of_host_memory_too)
{
	struct sfr_engine *engine;
	struct sfr_ticket *t;

	begin();
	engine = fake_engine(32, 1);
	place_mixed(&one);
	nr_to_hold = 1;
	CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
	CHECK_EQ(fake_submit(t, NULL), 0);
	(void)sem_wait(&held); /* the lane is copying a storage in host memory */
	while (unsubmitted(t))
		(void)sched_yield(); /* until all copies from devices are queued */
	CHECK_EQ(fake__gate(t, NULL, 1), SFR_EAGAIN);
	CHECK_EQ(fake__gate(t, NULL, 1), SFR_EAGAIN);
	(void)sem_post(&may_go);
	CHECK_EQ(fake_gate(t, NULL), 0);
	memset(one.bytes[SAVING_NR - 1], 9, SAVING_LEN); /* the step */
	saving_finish(t);
	CHECK_EQ(saving_content_as(dir, "a", &one), 1);
	sfr_ticket_put(t);
	fake_end(engine);
}

/* ---- waits that fail ---- */

/* S is recorded, but the wait for it fails. So the host waits, and the copies have the state at
 * the call. */
TEST(a_gate_whose_wait_fails_waits_on_the_host)
{
	static const char *const calls[] = { "cuStreamWaitEvent", "cuCtxPushCurrent_v2" };

	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
		struct sfr_engine *engine;
		struct sfr_ticket *t;
		void *stream;

		begin();
		engine = fake_engine(32, 2);
		stream = fake.fake_cuda_stream(0);
		fake_put_on_device(&one, 0, SAVING_NR, 0);
		CHECK_EQ(fake_save(engine, dir, "a", &one, 0), 0); /* starts the lane's thread */
		CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
		fake.fake_cuda_hold(1);
		CHECK_EQ(fake_submit(t, stream), 0);
		fake.fake_cuda_fail(calls[i], 1, 1, 1);
		CHECK_EQ(fake_gate_held(t, stream), SFR_EAGAIN);
		CHECK(fake.fake_cuda_hits() > 0);
		fake.fake_cuda_hold(0);
		CHECK_EQ(fake_gate(t, stream), 0);
		fake_freed(&one, 0);
		saving_finish(t);
		fake.fake_cuda_reset();
		CHECK_EQ(saving_content_as(dir, "a", &one), 1);
		sfr_ticket_put(t);
		fake_end(engine);
	}
}

/* ---- gates that wait for a lane without blocks ---- */

enum { NR_BLOCKS = 16, NR_GATES = 3 };

struct starved {
	struct sfr_engine *engine;
	struct sfr_ticket *t;
	struct sfr__block *blocks[NR_BLOCKS];
	uint32_t nr_blocks;
	void *stream;
	pthread_t gates[NR_GATES];
};

static void *pass_gate(void *arg)
{
	const struct starved *s = arg;

	CHECK_EQ(fake_gate(s->t, s->stream), 0);
	return NULL;
}

/* Several threads' steps wait at the gate of a save whose lane has no free block, on a stopped
 * device. */
static void starve(struct starved *s)
{
	bool all = false;

	begin();
	*s = (struct starved){ .engine = fake_engine(NR_BLOCKS, 2) };
	s->stream = fake.fake_cuda_stream(0);
	fake_put_on_device(&one, 0, SAVING_NR, 0);
	CHECK_EQ(saving_new(s->engine, dir, "a", &one, 0, &s->t), 0);
	sfr__cuda_set_portion_limits(SAVING_BLOCK,
				     1); /* nothing deferred is queued before the gate */
	fake.fake_cuda_hold(1);
	CHECK_EQ(fake_submit(s->t, s->stream), 0);
	while (s->nr_blocks < NR_BLOCKS &&
	       sfr__pool_get(s->engine->pool, 0, SAVING_BLOCK, 0, &s->blocks[s->nr_blocks]) == 0)
		s->nr_blocks++;
	for (int i = 0; i < NR_GATES; i++)
		CHECK_EQ(pthread_create(&s->gates[i], NULL, pass_gate, s), 0);
	while (!all) {
		sfr__lock(&s->engine->mu);
		all = s->engine->nr_waiters == NR_GATES;
		sfr__unlock(&s->engine->mu);
		(void)sched_yield();
	}
	CHECK_EQ(unsubmitted(s->t), 1);
}

static void feed(struct starved *s)
{
	while (s->nr_blocks > 0)
		sfr__pool_put(s->engine->pool, s->blocks[--s->nr_blocks]);
}

static void join_gates(struct starved *s)
{
	for (int i = 0; i < NR_GATES; i++)
		CHECK_EQ(pthread_join(s->gates[i], NULL), 0);
}

static void end_starved(struct starved *s, int found)
{
	fake.fake_cuda_hold(0);
	saving_finish(s->t);
	CHECK_EQ(saving_content_as(dir, "a", &one), found);
	sfr_ticket_put(s->t);
	fake_end(s->engine);
}

TEST(every_waiting_gate_goes_on_when_all_copies_are_queued)
{
	struct starved s;

	starve(&s);
	feed(&s);
	join_gates(&s);
	end_starved(&s, 1);
}

/* The cancelled save delays no step, although its copies have not ended. */
TEST(every_waiting_gate_goes_on_when_the_save_is_cancelled)
{
	struct starved s;
	int before = saving_content_as(dir, "a", &one);

	starve(&s);
	CHECK_EQ(sfr_save_cancel(s.t), 1);
	join_gates(&s);
	feed(&s);
	end_starved(&s, before);
}

/* ---- several threads that wait for the end of the copies ---- */

struct waiters {
	struct sfr_ticket *t;
	struct sfr_snapshot *s;
};

static void *await(void *arg)
{
	const struct waiters *w = arg;
	int64_t torn;

	if (w->t)
		CHECK_EQ(sfr_save_wait(w->t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	else
		CHECK_EQ(sfr_snapshot_wait(w->s, SFR_FOREVER, &torn), 0);
	return NULL;
}

TEST(every_waiter_for_the_copies_is_woken)
{
	struct sfr_device_stream step = { .device = 0 };
	struct sfr_engine *engine;
	struct waiters w = { 0 };
	pthread_t threads[NR_GATES];

	begin();
	step.handle = (uintptr_t)fake.fake_cuda_stream(0);
	engine = fake_engine(32, 2);
	fake_put_on_device(&one, 0, SAVING_NR, 0);
	for (int snapshots = 0; snapshots < 2; snapshots++) {
		fake.fake_cuda_hold(1);
		if (!snapshots) {
			CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &w.t), 0);
			CHECK_EQ(fake_submit(w.t, (void *)(uintptr_t)step.handle), 0);
		} else {
			CHECK_EQ(sfr_snapshot_new(engine, one.sources, SAVING_NR, 0, &w.s), 0);
			CHECK_EQ(sfr_snapshot_lease(w.s, SFR_FOREVER), 0);
			CHECK_EQ(sfr_snapshot_set_streams(w.s, &step, 1), 0);
			CHECK_EQ(sfr_snapshot_start(w.s), 0);
		}
		for (int i = 0; i < NR_GATES; i++)
			CHECK_EQ(pthread_create(&threads[i], NULL, await, &w), 0);
		(void)usleep(20000); /* by now most of them wait, or the test shows nothing */
		fake.fake_cuda_hold(0);
		for (int i = 0; i < NR_GATES; i++)
			CHECK_EQ(pthread_join(threads[i], NULL), 0);
		if (!snapshots) {
			saving_finish(w.t);
			sfr_ticket_put(w.t);
			w.t = NULL;
		} else {
			CHECK_EQ(saving_notice(), SFR_NOTICE_SNAPSHOT);
			sfr_snapshot_remove_view(w.s);
			sfr_snapshot_put(w.s);
		}
	}
	fake_end(engine);
}

/* The wait for E or C fails. The copies may mix states, so the save fails. */
TEST(a_save_whose_order_cannot_be_kept_fails)
{
	for (uint64_t nth = 1; nth <= 2; nth++) {
		struct sfr_engine *engine;
		struct sfr_ticket *t;
		struct sfr_report report;

		begin();
		engine = fake_engine(32, 2);
		fake_put_on_device(&one, 0, SAVING_NR, 0);
		fake_put_on_device(&two, 0, SAVING_NR, 0);
		CHECK_EQ(fake_save(engine, dir, "a", &one, 0), 0);
		fake.fake_cuda_fail("cuStreamWaitEvent", nth, 0, 1);
		CHECK_EQ(saving_new(engine, dir, "a", &two, 0, &t), 0);
		CHECK_EQ(fake_submit(t, NULL), 0);
		CHECK_EQ(fake.fake_cuda_hits(), 1); /* in the call, not at the gate */
		saving_finish(t);
		CHECK_EQ(sfr_save_report(t, &report), 0);
		CHECK_EQ(report.state, SFR_FAILED);
		CHECK(report.err.code < 0);
		CHECK_EQ(saving_content_as(dir, "a", &one), 1);
		sfr_ticket_put(t);
		fake_end(engine);
	}
}

/* The numbers are those of cuda.h: an inconsistent state, in which any further work returns the
 * same error, and a context or device that is gone. Over the fake driver any error ends a
 * device, because its later calls fail too. */
TEST(fatal_errors_of_a_device_are_recognised)
{
	static const int final[] = { 4,   214, 226, 700, 702, 709, 710, 714,
				     715, 716, 717, 718, 719, 721, 810, 911 };
	const size_t nr = sizeof(final) / sizeof(final[0]);

	for (int code = 0, k = 0; code < 1000; code++) {
		bool is = (size_t)k < nr && final[k] == code;

		CHECK_EQ(sfr__cuda_is_sticky((CUresult)code), is);
		k += is;
	}
}

/* A fatal error ends a device at once. Other errors of a query end it only after many in a row,
 * and a busy device is never given up. */
TEST(device_is_given_up_at_once_after_a_fatal_error_and_late_after_unclear_ones)
{
	static const struct {
		int code;
		uint32_t answers; /* answers until the device is given up; 0: never */
	} all[] = { { 700, 1 }, { 1, SFR__CUDA_FAILED_QUERIES }, { CUDA_ERROR_NOT_READY, 0 } };

	for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
		struct sfr_engine *engine = begin_on_device(16, 2);
		struct sfr__cuda_lane *lane;
		uint32_t failed = 0, nr = 0;

		CHECK_EQ(fake_save(engine, dir, "a", &one, 0), 0);
		lane = engine->cuda_lanes.head;
		while (nr++ < 2 * SFR__CUDA_FAILED_QUERIES &&
		       !sfr__cuda_handle_query_result(lane, "cuStreamQuery", (CUresult)all[i].code,
						      &failed))
			CHECK(!sfr__cuda_is_dead(lane));
		CHECK_EQ(nr, all[i].answers ? all[i].answers : 2 * SFR__CUDA_FAILED_QUERIES + 1);
		CHECK_EQ(sfr__cuda_is_dead(lane), all[i].answers > 0);
		saving_end(engine);
		fake_check();
		fake.fake_cuda_forget();
	}
}

BEGIN
{
	if (!fake_load())
		return false;
	plain = sfr_sys; /* before any thread runs */
	sfr_sys.lane_copy = held_lane_copy;
	CHECK_EQ(sem_init(&held, 0, 0), 0);
	CHECK_EQ(sem_init(&may_go, 0, 0), 0);
	dir = saving_dir();
	return true;
}
