/* Two states for tests over the fake driver, and a driver without traces of earlier tests. */
#ifndef FIX_CUDA_H
#define FIX_CUDA_H

#include "fake.h"

static const char *dir;
static struct saving_state one, two;

static inline void begin(void)
{
	fake.fake_cuda_reset();
	fake.fake_cuda_forget(); /* left by a device that died */
	saving_fill(&one, 1);
	saving_fill(&two, 2);
	sfr__cuda_set_portion_limits(4 << 20, 4);
}

/* Does the same and makes an engine; the first state is completely on device 0. */
static inline struct sfr_engine *begin_on_device(uint64_t nr_blocks, uint32_t nr_writers)
{
	begin();
	fake_put_on_device(&one, 0, SAVING_NR, 0);
	return fake_engine(nr_blocks, nr_writers);
}

#endif
