/* What a device's part of a save waits for, where a wait fails or is another's: over the fake driver.
 * Nothing here waits for a time to pass.
 */
#include <semaphore.h>

#include "cuda/fix_cuda.h"

/* Storages from 4 on stay on the host. */
static void place_mixed(struct saving_state *s)
{
	fake_place(s, 0, 1, 0);
	fake_place(s, 2, 3, 0);
	fake_place(s, 3, 4, 1);
}

static void no_old_byte_of_the_pool_is_in_a_file_from_a_device(void)
{
	struct sfr_engine *engine;

	begin();
	engine = fake_engine(16, 2);
	CHECK_EQ(sfr_engine_warm_up(engine, 16 * SAVING_BLOCK), 0);
	for (int i = 0; i < 2; i++) {
		saving_fill(&one, 1);
		if (i == 0)
			fake_place(&one, 0, SAVING_NR, 0);
		else
			place_mixed(&one);
		saving_poison(engine);
		CHECK_EQ(fake_save(engine, dir, "a", &one, 0), 0);
		saving_padding_is_zero(dir, "a", &one);
		CHECK_EQ(saving_look_as(dir, "a", &one), 1);
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

/* A device's stream can wait for a device's copies, for those of the host nobody but the host. */
static void a_gate_waits_for_the_hosts_copies_too(void)
{
	struct sfr_engine *engine;
	struct sfr_ticket *t;

	begin();
	engine = fake_engine(32, 1);
	place_mixed(&one);
	plain = sfr_sys;
	sfr_sys.lane_copy = held_lane_copy;
	nr_to_hold = 1;
	CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
	CHECK_EQ(fake_submit(t, NULL), 0);
	(void)sem_wait(&held); /* the lane is in the middle of a storage of the host's */
	CHECK_EQ(fake__gate(t, NULL, 1), SFR_EAGAIN);
	CHECK_EQ(fake__gate(t, NULL, 1), SFR_EAGAIN);
	(void)sem_post(&may_go);
	CHECK_EQ(fake_gate(t, NULL), 0);
	memset(one.bytes[SAVING_NR - 1], 9, SAVING_LEN); /* the step */
	saving_finish(t);
	sfr_sys = plain;
	CHECK_EQ(saving_look_as(dir, "a", &one), 1);
	sfr_ticket_put(t);
	fake_end(engine);
}

/* ---- waits that fail ---- */

/* S is not waited for: so the host waits, and the copies are those of the state at the call. */
static void a_gate_whose_wait_fails_waits_on_the_host(void)
{
	struct sfr_engine *engine;
	struct sfr_ticket *t;
	void *stream;

	begin();
	engine = fake_engine(32, 2);
	stream = fake.fake_cuda_stream(0);
	fake_place(&one, 0, SAVING_NR, 0);
	CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
	fake.fake_cuda_hold(1);
	CHECK_EQ(fake_submit(t, stream), 0);
	fake.fake_cuda_fail("cuStreamWaitEvent", 1, 1, 1);
	CHECK_EQ(fake_gate_held(t, stream), SFR_EAGAIN);
	CHECK(fake.fake_cuda_hits() > 0);
	fake.fake_cuda_hold(0);
	CHECK_EQ(fake_gate(t, stream), 0);
	fake_freed(&one, 0);
	saving_finish(t);
	CHECK_EQ(saving_look_as(dir, "a", &one), 1);
	sfr_ticket_put(t);
	fake_end(engine);
}

/* E or C is not waited for: what was copied may be no state of any step, and is not published. */
static void a_save_whose_order_cannot_be_kept_fails(void)
{
	for (uint64_t nth = 1; nth <= 2; nth++) {
		struct sfr_engine *engine;
		struct sfr_ticket *t;
		struct sfr_report report;

		begin();
		engine = fake_engine(32, 2);
		fake_place(&one, 0, SAVING_NR, 0);
		fake_place(&two, 0, SAVING_NR, 0);
		CHECK_EQ(fake_save(engine, dir, "a", &one, 0), 0);
		fake.fake_cuda_fail("cuStreamWaitEvent", nth, 0, 1);
		CHECK_EQ(saving_new(engine, dir, "a", &two, 0, &t), 0);
		CHECK_EQ(fake_submit(t, NULL), 0);
		CHECK_EQ(fake.fake_cuda_hits(), 1); /* in the call, not at the gate */
		saving_finish(t);
		CHECK_EQ(sfr_save_report(t, &report), 0);
		CHECK_EQ(report.state, SFR_FAILED);
		CHECK(report.err.code < 0);
		CHECK_EQ(saving_look_as(dir, "a", &one), 1);
		sfr_ticket_put(t);
		fake_end(engine);
	}
}

/* By their numbers, as cuda.h has them: what the driver calls an inconsistent state, in which any
 * further work returns the same error, and what says that its context or device is gone. Over the
 * fake any error ends a device, since its later calls fail too. */
static void errors_after_which_a_device_answers_nothing_any_more_are_known(void)
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

int main(void)
{
	if (!fake_load())
		return CHECK_SKIPPED;
	CHECK_EQ(sem_init(&held, 0, 0), 0);
	CHECK_EQ(sem_init(&may_go, 0, 0), 0);
	dir = saving_dir();
	RUN(no_old_byte_of_the_pool_is_in_a_file_from_a_device);
	RUN(a_gate_waits_for_the_hosts_copies_too);
	RUN(a_gate_whose_wait_fails_waits_on_the_host);
	RUN(a_save_whose_order_cannot_be_kept_fails);
	RUN(errors_after_which_a_device_answers_nothing_any_more_are_known);
	saving_rmdir(dir);
	return check_done();
}
