/* Saves from devices, over the fake driver: order, lifetimes, several devices, the gate. */
#include <errno.h>
#include <pthread.h>
#include <time.h>

#include "fake.h"

static const char *dir;
static struct saving_state one, two;

static struct sfr_engine *new_engine(uint64_t nr_blocks, uint32_t nr_writers)
{
	const struct sfr_engine_opts opts = { .pool_bytes = nr_blocks * SAVING_BLOCK,
					      .block_bytes = SAVING_BLOCK,
					      .nr_writers = nr_writers,
					      .max_in_flight = 2 };
	struct sfr_engine *engine = NULL;

	CHECK_EQ(sfr_engine_new(&opts, &engine), 0);
	return engine;
}

static void free_engine(struct sfr_engine *engine)
{
	CHECK_EQ(sfr_engine_close(engine, SFR_FOREVER), 0);
	sfr_engine_put(engine);
	CHECK_EQ(sfr_log_stop(), 0);
}

static void begin(void)
{
	fake.fake_cuda_reset();
	saving_fill(&one, 1);
	saving_fill(&two, 2);
	sfr_cuda_tune(4 << 20, 4);
}

/* The end of a test in which every rule of the driver was kept. */
static void end(struct sfr_engine *engine)
{
	free_engine(engine);
	fake_check();
	fake_check_nothing_left();
}

static void a_save_from_a_device_is_whole_with_any_pool_and_any_number_of_writers(void)
{
	begin();
	for (uint64_t nr_blocks = 1; nr_blocks <= 8; nr_blocks++)
		for (uint32_t nr_writers = 1; nr_writers <= 3; nr_writers++) {
			struct sfr_engine *engine = new_engine(nr_blocks, nr_writers);

			fake_place(&one, 0, SAVING_NR, 0);
			fake_place(&two, 1, 4, 0);
			fake_place(&two, 4, 5, 1);
			CHECK_EQ(fake_save(engine, dir, "a", &one, SFR_SAVE_DURABLE), 0);
			CHECK_EQ(saving_look_as(dir, "a", &one), 1);
			CHECK_EQ(fake_save(engine, dir, "a", &two, 0), 0);
			CHECK_EQ(saving_look_as(dir, "a", &two), 2);
			end(engine);
		}
	CHECK_EQ(saving_nr_temporaries(dir), 0);
}

int main(void)
{
	if (!fake_load())
		return CHECK_SKIPPED;
	dir = saving_dir();
	RUN(a_save_from_a_device_is_whole_with_any_pool_and_any_number_of_writers);
	saving_rmdir(dir);
	return check_done();
}
