/* The functions of fake_cuda.h, with which tests control and inspect the fake driver. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fake_cuda_state.h"

/* queries in a row that answered "not ready": the lane has nothing else to do */
#define SETTLED 16
#define SETTLE_S 10 /* a lane that has made no query for so long will make none */

/* ---- for tests ------------------------------------------------------------------- */

EXPORT void fake_cuda_reset(void);
EXPORT void fake_cuda_reset(void)
{
	pthread_mutex_lock(&fk.mu);
	memset(fk.faults, 0, sizeof(fk.faults));
	for (size_t i = 0; i < NR_COUNTS; i++)
		fk.counts[i].nr = 0;
	memset(fk.dead_of, 0, sizeof(fk.dead_of));
	memset(fk.inactive, 0, sizeof(fk.inactive));
	fk.nr_violations = fk.nr_calls = fk.nr_syncs = fk.nr_hits = fk.nr_copies = fk.bytes_copied =
		0;
	fk.fail_copy_at = fk.delay_max = 0;
	fk.held = fk.pageable_allowed = fk.host_capturing = false;
	for (struct CUstream_st *s = fk.streams; s; s = s->next)
		s->capturing = false;
	fk.first = NOBODY;
	fk.never_settles = false;
	fk.delay_one_in = 1;
	fk.depth = DEPTH;
	fk.segment = 0;
	fake__wake_all();
	pthread_mutex_unlock(&fk.mu);
}

/* Waits until destroyed streams have run all their work. */
static void wait_for_destroyed(void)
{
	bool some = true;

	while (some) {
		some = false;
		for (struct CUstream_st *s = fk.streams; s; s = s->next)
			some |= !s->alive;
		if (some)
			pthread_cond_wait(&fk.cv, &fk.mu);
	}
}

EXPORT void fake_cuda_forget(void);
EXPORT void fake_cuda_forget(void)
{
	struct registration *r;

	pthread_mutex_lock(&fk.mu);
	/* The core may have given up a device whose streams still have copies: none of these
	 * completes. */
	for (struct CUstream_st *s = fk.streams; s; s = s->next)
		if (!s->of_caller)
			s->alive = false, s->dropped = true;
	fake__wake_all();
	wait_for_destroyed();
	while ((r = fk.registrations)) {
		fk.registrations = r->next;
		if (r->allocated)
			free(r->mem);
		free(r);
	}
	fk.nr_events = 0;
	memset(fk.retained, 0, sizeof(fk.retained));
	pthread_mutex_unlock(&fk.mu);
}

EXPORT void fake_cuda_fail(const char *name, uint64_t nth, int sticky, int code);
EXPORT void fake_cuda_fail(const char *name, uint64_t nth, int sticky, int code)
{
	pthread_mutex_lock(&fk.mu);
	for (int i = 0; i < NR_FAULTS; i++) {
		if (fk.faults[i].nth)
			continue;
		(void)snprintf(fk.faults[i].name, sizeof(fk.faults[i].name), "%s", name);
		fk.faults[i].nth = nth;
		fk.faults[i].seen = 0;
		fk.faults[i].sticky = sticky;
		fk.faults[i].code = code;
		break;
	}
	pthread_mutex_unlock(&fk.mu);
}

EXPORT void fake_cuda_fail_copy(uint64_t nth, int code);
EXPORT void fake_cuda_fail_copy(uint64_t nth, int code)
{
	pthread_mutex_lock(&fk.mu);
	fk.fail_copy_at = fk.nr_copies + nth;
	fk.fail_copy_code = code;
	pthread_mutex_unlock(&fk.mu);
}

#define GETTER(type, name, params, expression)                                                     \
	EXPORT type name params;                                                                   \
	EXPORT type name params                                                                    \
	{                                                                                          \
		type value;                                                                        \
		pthread_mutex_lock(&fk.mu);                                                        \
		value = (expression);                                                              \
		pthread_mutex_unlock(&fk.mu);                                                      \
		return value;                                                                      \
	}

/* Returns the index of the name in fk.counts, or NR_COUNTS. */
static size_t index_of(const char *name)
{
	size_t i = 0;

	while (i < NR_COUNTS && strcmp(fk.counts[i].name, name) != 0)
		i++;
	return i;
}

static uint64_t count_of(const char *name)
{
	size_t index = index_of(name);

	if (strcmp(name, "*") == 0)
		return fk.nr_calls;
	if (strcmp(name, "sync") == 0)
		return fk.nr_syncs;
	return index < NR_COUNTS ? fk.counts[index].nr : 0;
}

static uint64_t count_here(const char *name)
{
	size_t index = index_of(name);

	if (strcmp(name, "*") == 0)
		return fake__here.nr_calls;
	return index < NR_COUNTS ? fake__here.counts[index] : 0;
}

static int64_t live(const char *what)
{
	int64_t nr = 0;

	if (strcmp(what, "events") == 0)
		return fk.nr_events;
	if (strcmp(what, "pushed") == 0)
		return fk.nr_pushed;
	if (strcmp(what, "streams") == 0)
		for (struct CUstream_st *s = fk.streams; s; s = s->next)
			if (s->alive && !s->of_caller)
				nr++;
	if (strcmp(what, "contexts") == 0)
		for (int i = 0; i < NR_DEVICES; i++)
			nr += fk.retained[i];
	for (struct registration *r = fk.registrations; r; r = r->next)
		nr += strcmp(what, r->allocated ? "allocated" : "registered") == 0;
	return nr;
}

/* Completes the copies of destroyed streams, unless all streams are stopped. */
static void flush(void)
{
	for (struct CUstream_st *s = fk.streams; s; s = s->next)
		s->flushed = !s->alive;
	fake__wake_all();
	if (!fk.held)
		wait_for_destroyed();
}

GETTER(uint64_t, fake_cuda_hits, (void), fk.nr_hits)
GETTER(uint64_t, fake_cuda_calls, (const char *name), count_of(name))
GETTER(uint64_t, fake_cuda_calls_here, (const char *name), count_here(name))
GETTER(uint64_t, fake_cuda_nr_violations, (void), (flush(), fk.nr_violations))
GETTER(const char *, fake_cuda_violation, (uint64_t i), i < NR_VIOLATIONS ? fk.violations[i] : "")
GETTER(int64_t, fake_cuda_live, (const char *what), live(what))
GETTER(uint64_t, fake_cuda_copied_bytes, (void), fk.bytes_copied)

#define SETTER(name, params, ...)                                                                  \
	EXPORT void name params;                                                                   \
	EXPORT void name params                                                                    \
	{                                                                                          \
		pthread_mutex_lock(&fk.mu);                                                        \
		__VA_ARGS__;                                                                       \
		fake__wake_all();                                                                  \
		pthread_mutex_unlock(&fk.mu);                                                      \
	}
SETTER(fake_cuda_allow_pageable, (int yes), fk.pageable_allowed = yes)
SETTER(fake_cuda_depth, (uint64_t nr), fk.depth = nr ? nr : DEPTH)
SETTER(fake_cuda_segments, (uint64_t len), fk.segment = len)
SETTER(fake_cuda_watch_locks, (int (*nr)(void)), fk.nr_locks = nr)
SETTER(fake_cuda_delay, (uint64_t max_ns, uint64_t seed), fk.delay_max = max_ns,
       fk.delay_seed = seed)
SETTER(fake_cuda_delay_one_in, (uint64_t nr), fk.delay_one_in = nr)
SETTER(fake_cuda_first, (int who), fk.first = (unsigned)who)
SETTER(fake_cuda_hold, (int yes), fk.held = yes, fk.holder = pthread_self())
SETTER(fake_cuda_activate, (int device, int yes), fk.inactive[device] = !yes)
SETTER(fake_cuda_capture, (void *stream, int yes),
       *(is_host(stream) ? &fk.host_capturing : &((CUstream)stream)->capturing) = yes)
GETTER(void *, fake_cuda_stream, (int device), fake__new_stream(device, true))

EXPORT void fake_cuda_launch(void *stream, void (*fn)(void *), void *arg);
EXPORT void fake_cuda_launch(void *stream, void (*fn)(void *), void *arg)
{
	pthread_mutex_lock(&fk.mu);
	fake__push_op(stream, &(struct op){ .kind = WORK, .fn = fn, .arg = arg });
	pthread_mutex_unlock(&fk.mu);
}

EXPORT void fake_cuda_follow(void *stream, void *other);
EXPORT void fake_cuda_follow(void *stream, void *other)
{
	struct CUevent_st *event = calloc(1, sizeof(*event));

	if (!event)
		abort();
	pthread_mutex_lock(&fk.mu);
	event->recorded = 1;
	event->next = fk.events;
	fk.events = event;
	fake__push_op(other, &(struct op){ .kind = RECORD, .event = event, .gen = 1 });
	fake__push_op(stream, &(struct op){ .kind = WAIT, .event = event, .gen = 1 });
	pthread_mutex_unlock(&fk.mu);
}

EXPORT void fake_cuda_freed(const void *mem, uint64_t len);
EXPORT void fake_cuda_freed(const void *mem, uint64_t len)
{
	pthread_mutex_lock(&fk.mu);
	mem = (const void *)((uintptr_t)mem & ~(uintptr_t)FAKE_CUDA_DEVICE); /* NOLINT */
	if (fake__in_use(mem, len))
		fake__violated("memory of a device is freed under a copy");
	pthread_mutex_unlock(&fk.mu);
}

/* Returns whether every lane with copies in flight has only queried them for a while. */
static bool is_settled(void)
{
	for (const struct CUstream_st *s = fk.streams; s; s = s->next) {
		bool copies = s->queued != NULL;

		for (const struct op *op = s->head; op; op = op->next)
			copies |= op->kind == COPY;
		if (copies && fk.nr_not_ready[s->device] < SETTLED)
			return false;
	}
	return true;
}

EXPORT void fake_cuda_settle(void);
EXPORT void fake_cuda_settle(void)
{
	struct timespec end;

	(void)clock_gettime(CLOCK_REALTIME, &end);
	end.tv_sec += SETTLE_S;
	pthread_mutex_lock(&fk.mu);
	memset(fk.nr_not_ready, 0, sizeof(fk.nr_not_ready));
	while (!is_settled() && !fk.never_settles)
		if (pthread_cond_timedwait(&fk.cv, &fk.mu, &end) == ETIMEDOUT) {
			fake__violated("a lane with copies in flight does not query them");
			fk.never_settles = true;
		}
	pthread_mutex_unlock(&fk.mu);
}

EXPORT void fake_cuda_drain(void *handle);
EXPORT void fake_cuda_drain(void *handle)
{
	struct CUstream_st *stream = handle;

	pthread_mutex_lock(&fk.mu);
	while (stream->head || stream->busy)
		pthread_cond_wait(&fk.cv, &fk.mu);
	pthread_mutex_unlock(&fk.mu);
}
