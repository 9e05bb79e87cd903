/* glance.c: looks at a device's memory between steps, over the fake driver. */
#include "sfr/glance.h"

#include "cuda/fake.h"

enum { NR = 100, NBYTES = 4096 };

static _Alignas(4096) char memory[NR * NBYTES]; /* of the device, to the fake driver */
static struct sfr_glance_at at[NR];
static uint64_t stream;

/* A glance, and a stream of the caller's. */
static struct sfr_glance *begin_glance(void)
{
	struct sfr_glance *look = NULL;

	fake.fake_cuda_reset(); /* the eye stays, for as long as the process */
	for (int i = 0; i < NR; i++)
		at[i] = (struct sfr_glance_at){
			((uintptr_t)memory | FAKE_CUDA_DEVICE) + (uint64_t)i * NBYTES, NBYTES
		};
	stream = (uint64_t)(uintptr_t)fake.fake_cuda_stream(0);
	CHECK_EQ(sfr_glance_new(0, &look), 0);
	return look;
}

static void until_landed(struct sfr_glance *look)
{
	int rc;

	while ((rc = sfr_glance_landed(look)) == 0)
		(void)usleep(1000);
	CHECK_EQ(rc, 1);
}

TEST(what_has_changed_between_two_looks_is_seen)
{
	struct sfr_glance *look = begin_glance();

	CHECK_EQ(sfr_glance_take(look, stream, at, 3, 0), 0);
	until_landed(look);
	memory[NBYTES + NBYTES - 1] ^= 1;
	CHECK_EQ(sfr_glance_take(look, stream, at, 3, 1), 0);
	until_landed(look);
	CHECK_EQ(sfr_glance_same(look, 0), 1);
	CHECK_EQ(sfr_glance_same(look, 1), 0);
	CHECK_EQ(sfr_glance_same(look, 2), 1);
	sfr_glance_free(look);
	fake_check();
}

static void writes(void *byte)
{
	*(char *)byte ^= 1;
}

/* A step behind a look waits for it, or the look would see what the step has written. */
TEST(what_is_queued_behind_a_look_comes_behind_it)
{
	struct sfr_glance *look = begin_glance();

	fake.fake_cuda_first(1); /* the caller's stream, wherever both may go on */
	for (int again = 0; again < 2; again++) {
		CHECK_EQ(sfr_glance_take(look, stream, at, 2, again), 0);
		fake.fake_cuda_launch((void *)(uintptr_t)stream, writes, memory);
	}
	fake.fake_cuda_drain((void *)(uintptr_t)stream);
	until_landed(look);
	CHECK_EQ(sfr_glance_same(look, 0), 0); /* of the first write only the second look knows */
	CHECK_EQ(sfr_glance_same(look, 1), 1);
	sfr_glance_free(look);
	fake_check();
}

static void *looks_twice(void *glance)
{
	struct sfr_glance *look = glance;

	CHECK_EQ(sfr_glance_take(look, stream, at, 1, 0), 0);
	CHECK_EQ(sfr_glance_take(look, stream, at, NR, 0), SFR_EBUSY);
	CHECK_EQ(sfr_glance_landed(look), 0);
	return NULL;
}

/* The next one may need more memory, and copies are on their way into what there is. */
TEST(a_look_that_has_not_landed_is_not_begun_anew)
{
	struct sfr_glance *look = begin_glance();
	pthread_t thread;

	fake.fake_cuda_hold(1);
	CHECK_EQ(pthread_create(&thread, NULL, looks_twice, look), 0); /* who holds must not ask */
	CHECK_EQ(pthread_join(thread, NULL), 0);
	fake.fake_cuda_hold(0);
	until_landed(look);
	CHECK_EQ(sfr_glance_take(look, stream, at, NR, 0), 0);
	until_landed(look);
	sfr_glance_free(look);
	fake_check();
}

int main(void)
{
	if (!fake_load())
		return CHECK_SKIPPED;
	fake.fake_cuda_forget();
	check_run();
	return check_done();
}
