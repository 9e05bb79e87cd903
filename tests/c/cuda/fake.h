/* Loads the fake CUDA driver for C tests, and controls it. */
#ifndef FAKE_H
#define FAKE_H

#include <dlfcn.h>
#include <string.h>

#include "device/lane.h"
#include "fake_cuda.h"
#include "saving.h"

static struct {
#define X(type, name, params) type(*name) params;
	FAKE_CUDA_LIST(X)
#undef X
} fake;

/* ---- locks that the calling thread holds ----
 *
 * A call of the driver may have to wait for room on its stream. If the thread holds a lock
 * meanwhile, other threads wait too. So the fake driver asks how many locks it holds. */

static int fake__count_locks(void)
{
	return (int)sfr__count_locks_held();
}

/* Makes the core use the library next to the program. False if there is none. */
static inline bool fake_load(void)
{
	static char path[PATH_MAX];
	ssize_t len = readlink("/proc/self/exe", path, sizeof(path) - 32);
	void *handle;

	if (len < 0)
		return false;
	path[len] = '\0';
	(void)strcpy(strrchr(path, '/'), "/libfake_cuda.so");
	(void)setenv("STILLFRAME_LIBCUDA", path, 1);
	handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!handle) {
		(void)fprintf(stderr, "%s\n", dlerror());
		return false;
	}
#define X(type, name, params)                                                                      \
	{                                                                                          \
		void *found = dlsym(handle, #name);                                                \
		memcpy(&fake.name, &found, sizeof(found));                                         \
		if (!found)                                                                        \
			return false;                                                              \
	}
	FAKE_CUDA_LIST(X)
#undef X
	fake.fake_cuda_watch_locks(fake__count_locks);
	return true;
}

/* Fails the test if a rule of the driver was broken, and prints the rule. */
static inline void fake_check(void)
{
	for (uint64_t i = 0; i < fake.fake_cuda_nr_violations() && i < 8; i++)
		(void)fprintf(stderr, "  fake driver: %s\n", fake.fake_cuda_violation(i));
	CHECK_EQ(fake.fake_cuda_nr_violations(), 0);
	CHECK_EQ(fake.fake_cuda_calls("sync"), 0);
}

/* Checks that nothing of ours is left on any device. */
static inline void fake_check_nothing_left(void)
{
	CHECK_EQ(fake.fake_cuda_live("streams"), 0);
	CHECK_EQ(fake.fake_cuda_live("events"), 0);
	CHECK_EQ(fake.fake_cuda_live("registered"), 0);
	CHECK_EQ(fake.fake_cuda_live("allocated"), 0);
	CHECK_EQ(fake.fake_cuda_live("contexts"), 0);
	CHECK_EQ(fake.fake_cuda_live("pushed"), 0);
}

/* Puts storages [from, to) of a state on a device. */
static inline void fake_put_on_device(struct saving_state *s, unsigned from, unsigned to,
				      uint32_t device)
{
	for (unsigned i = from; i < to; i++) {
		s->sources[i].device = device + 1;
		s->sources[i].addr |= FAKE_CUDA_DEVICE;
	}
}

/* Submits a new save up to its launch, with each device's current stream. */
static inline int fake_submit(struct sfr_ticket *t, void *stream)
{
	const struct sfr_device_stream streams[] = {
		{ .handle = (uint64_t)(uintptr_t)stream, .device = 0 },
		{ .handle = 0, .device = 1 },
		{ .handle = 0, .device = 2 },
	};
	int rc = sfr_save_begin_transfers(t, streams, 3);

	return rc < 0 ? rc : saving_submit(t);
}

static inline int fake__gate(struct sfr_ticket *t, void *stream, uint64_t slice_ns)
{
	const struct sfr_device_stream streams[] = {
		{ .handle = (uint64_t)(uintptr_t)stream, .device = 0 },
		{ .handle = 0, .device = 1 },
		{ .handle = 0, .device = 2 },
	};

	return sfr_save_gate(t, streams, 3, slice_ns);
}

/* Passes the gate of a step whose current stream on every device is `stream`. */
static inline int fake_gate(struct sfr_ticket *t, void *stream)
{
	return fake__gate(t, stream, SFR_FOREVER);
}

/* Does the same while the devices are stopped: returns SFR_EAGAIN at once if the host would have
 * to wait for a device. Gives the lane's thread the time that it takes to queue. */
static inline int fake_gate_held(struct sfr_ticket *t, void *stream)
{
	int rc = fake__gate(t, stream, 0);

	if (rc == SFR_EAGAIN) {
		fake.fake_cuda_settle();
		rc = fake__gate(t, stream, 0);
	}
	return rc;
}

/* Reports storages [from, SAVING_NR) of a state as freed: no copy may read from them any more. */
static inline void fake_freed(const struct saving_state *s, unsigned from)
{
	for (unsigned i = from; i < SAVING_NR; i++)
		fake.fake_cuda_freed(s->bytes[i], SAVING_LEN);
}

/* Makes one whole save. Returns the code it ended with. */
static inline int fake_save(struct sfr_engine *engine, const char *dir, const char *name,
			    const struct saving_state *s, uint32_t flags)
{
	struct sfr_ticket *t;
	int rc = saving_new(engine, dir, name, s, flags, &t);

	if (rc < 0)
		return rc;
	rc = fake_submit(t, NULL);
	if (rc == 0) {
		CHECK_EQ(fake_gate(t, NULL), 0);
		rc = saving_end_of(t);
	}
	sfr_ticket_put(t);
	return rc;
}

/* ---- engines and work for tests ---- */

enum { FAKE_FIRST_DEFERRED = 2, FAKE_GARBAGE = 0xee };

static inline struct sfr_engine *fake_engine(uint64_t nr_blocks, uint32_t nr_writers)
{
	return saving_engine(nr_blocks, nr_writers, 2);
}

/* Ends a test that must have broken no rule of the driver. */
static inline void fake_end(struct sfr_engine *engine)
{
	saving_end(engine);
	fake_check();
	fake_check_nothing_left();
}

/* Work for the device: fills storages [from, to) with a value. */
struct fake_fill {
	struct saving_state *s;
	unsigned from, to;
	unsigned char value;
};

static inline void fake_fill(void *arg)
{
	const struct fake_fill *f = arg;

	for (unsigned i = f->from; i < f->to; i++)
		memset(f->s->bytes[i], f->value, SAVING_LEN);
}

static uint64_t fake__random = 1;
static inline uint32_t fake_rng(uint32_t below)
{
	return check_draw(&fake__random, below);
}

#endif
