/* probe.c: compares a device's memory between steps, over the fake driver. */
#include "sfr/probe.h"

#include "cuda/fake.h"

enum { NR = 100, NBYTES = 4096 };

static _Alignas(4096) char memory[NR * NBYTES]; /* of the device, to the fake driver */
static struct sfr_probe_range at[NR];
static uint64_t stream;

/* Makes a probe, and a stream of the caller. */
static struct sfr_probe *begin_probe(void)
{
	struct sfr_probe *probe = NULL;

	fake.fake_cuda_reset(); /* the prober stays for the life of the process */
	for (int i = 0; i < NR; i++)
		at[i] = (struct sfr_probe_range){
			((uintptr_t)memory | FAKE_CUDA_DEVICE) + (uint64_t)i * NBYTES, NBYTES
		};
	stream = (uint64_t)(uintptr_t)fake.fake_cuda_stream(0);
	CHECK_EQ(sfr_probe_new(0, &probe), 0);
	return probe;
}

static void wait_for(struct sfr_probe *probe)
{
	int rc;

	while ((rc = sfr_probe_is_done(probe)) == 0)
		(void)usleep(1000);
	CHECK_EQ(rc, 1);
}

TEST(change_between_two_probes_is_detected)
{
	struct sfr_probe *probe = begin_probe();

	CHECK_EQ(sfr_probe_queue_copies(probe, stream, at, 3, 0), 0);
	wait_for(probe);
	memory[NBYTES + NBYTES - 1] ^= 1;
	CHECK_EQ(sfr_probe_queue_copies(probe, stream, at, 3, 1), 0);
	wait_for(probe);
	CHECK_EQ(sfr_probe_is_unchanged(probe, 0), 1);
	CHECK_EQ(sfr_probe_is_unchanged(probe, 1), 0);
	CHECK_EQ(sfr_probe_is_unchanged(probe, 2), 1);
	sfr_probe_free(probe);
	fake_check();
}

static void write_byte(void *byte)
{
	*(char *)byte ^= 1;
}

/* A step that is queued after a probe waits for it; otherwise the probe would copy what the step
 * writes. */
TEST(work_queued_after_a_probe_waits_for_it)
{
	struct sfr_probe *probe = begin_probe();

	fake.fake_cuda_first(1); /* the caller's stream runs first where both may */
	for (int again = 0; again < 2; again++) {
		CHECK_EQ(sfr_probe_queue_copies(probe, stream, at, 2, again), 0);
		fake.fake_cuda_launch((void *)(uintptr_t)stream, write_byte, memory);
	}
	fake.fake_cuda_drain((void *)(uintptr_t)stream);
	wait_for(probe);
	CHECK_EQ(sfr_probe_is_unchanged(probe, 0),
		 0); /* only the second probe has the first write */
	CHECK_EQ(sfr_probe_is_unchanged(probe, 1), 1);
	sfr_probe_free(probe);
	fake_check();
}

static void *probe_twice(void *arg)
{
	struct sfr_probe *probe = arg;

	CHECK_EQ(sfr_probe_queue_copies(probe, stream, at, 1, 0), 0);
	CHECK_EQ(sfr_probe_queue_copies(probe, stream, at, NR, 0), SFR_EBUSY);
	CHECK_EQ(sfr_probe_is_done(probe), 0);
	return NULL;
}

/* A new start might replace memory that copies are still written to. */
TEST(probe_in_flight_is_not_started_again)
{
	struct sfr_probe *probe = begin_probe();
	pthread_t thread;

	fake.fake_cuda_hold(1);
	/* A thread of its own, because the one that stopped the device must not query it. */
	CHECK_EQ(pthread_create(&thread, NULL, probe_twice, probe), 0);
	CHECK_EQ(pthread_join(thread, NULL), 0);
	fake.fake_cuda_hold(0);
	wait_for(probe);
	CHECK_EQ(sfr_probe_queue_copies(probe, stream, at, NR, 0), 0);
	wait_for(probe);
	sfr_probe_free(probe);
	fake_check();
}

BEGIN
{
	if (!fake_load())
		return false;
	fake.fake_cuda_forget();
	return true;
}
