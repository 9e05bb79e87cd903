/* For C tests of the CUDA path: the fake driver beside the program, its controls, and states on it.
 */
#ifndef FAKE_H
#define FAKE_H

#include <dlfcn.h>
#include <string.h>

#include "../../csrc/core/cuda_lane.h"
#include "fake_cuda.h"
#include "saving.h"

static struct {
#define X(type, name, params) type(*name) params;
	FAKE_CUDA_LIST(X)
#undef X
} fake;

/* Points the core at the library that stands beside the program. False when it is not there. */
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
	return true;
}

/* Fails the test that broke a rule of the driver's, and says which. */
static inline void fake_check(void)
{
	for (uint64_t i = 0; i < fake.fake_cuda_nr_violations() && i < 8; i++)
		(void)fprintf(stderr, "  fake driver: %s\n", fake.fake_cuda_violation(i));
	CHECK_EQ(fake.fake_cuda_nr_violations(), 0);
	CHECK_EQ(fake.fake_cuda_calls("sync"), 0);
}

/* Nothing of ours is left on any device. */
static inline void fake_check_nothing_left(void)
{
	CHECK_EQ(fake.fake_cuda_live("streams"), 0);
	CHECK_EQ(fake.fake_cuda_live("events"), 0);
	CHECK_EQ(fake.fake_cuda_live("registered"), 0);
	CHECK_EQ(fake.fake_cuda_live("allocated"), 0);
	CHECK_EQ(fake.fake_cuda_live("contexts"), 0);
}

/* Puts the last `nr` storages of a state on a device. */
static inline void fake_place(struct saving_state *s, unsigned from, unsigned to, uint32_t device)
{
	for (unsigned i = from; i < to; i++)
		s->sources[i].device = device + 1;
}

/* From new to launched, with the current stream of each device. */
static inline int fake_submit(struct sfr_ticket *t, void *stream)
{
	const struct sfr_stream streams[] = {
		{ .handle = (uint64_t)(uintptr_t)stream, .device = 0 },
		{ .handle = 0, .device = 1 },
		{ .handle = 0, .device = 2 },
	};
	int rc = sfr_save_begin(t, streams, 3);

	return rc < 0 ? rc : saving_submit(t);
}

/* The gate of a step whose current stream on every device is `stream`. */
static inline int fake_gate(struct sfr_ticket *t, void *stream)
{
	const struct sfr_stream streams[] = {
		{ .handle = (uint64_t)(uintptr_t)stream, .device = 0 },
		{ .handle = 0, .device = 1 },
		{ .handle = 0, .device = 2 },
	};

	return sfr_save_gate(t, streams, 3, SFR_FOREVER);
}

/* One whole save; the code it ended with. */
static inline int fake_save(struct sfr_engine *engine, const char *dir, const char *name,
			    const struct saving_state *s, uint32_t flags)
{
	struct sfr_report report = { 0 };
	struct sfr_ticket *t;
	int rc = saving_new(engine, dir, name, s, flags, &t);

	if (rc < 0)
		return rc;
	rc = fake_submit(t, NULL);
	if (rc == 0) {
		CHECK_EQ(fake_gate(t, NULL), 0);
		saving_finish(t);
		CHECK_EQ(sfr_save_report(t, &report), 0);
		CHECK((report.state == SFR_DURABLE) == (report.err.code == 0));
		rc = report.err.code;
	}
	sfr_ticket_put(t);
	return rc;
}

#endif
