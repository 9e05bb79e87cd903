/* Snapshots: copies that stay in the pool until nobody uses them.
 *
 *     NEW --lease--> LEASED --start--> COPYING --------> COPIED
 *                      |                                   ^
 *                      +-- start, host only, all captured -+
 *
 *     from     to       by
 *     NEW      LEASED   sfr_snapshot_lease
 *     LEASED   COPIED   sfr_snapshot_start, if it fails, or if all sources are captured host memory
 *     LEASED   COPYING  sfr_snapshot_start
 *     COPYING  COPIED   sfr__snapshot_note_copy_end, by the last thread or device that copies
 *
 * The memory is a lot (lot.c). It goes back to the pool when no copy is running and it has no
 * users, or with the last reference. There are two kinds of users:
 *
 *   view   an object that tensors refer to; only the caller can end it
 *   hold   a process or a future that reads the memory; ends by itself
 *
 * Writes to deferred sources are detected by samples, as in a save.
 *
 * The call itself, host threads (host.c) and devices (device.c) may copy at the same time.
 * `nr_copying` counts them. They share one reference to the snapshot, which passes to the notice at
 * the end. So a thread of the engine never drops the last reference.
 *
 * With SFR_SNAPSHOT_SHARED the memory has MADV_DOFORK while it is leased, so children inherit it as
 * it was at the fork. A fork waits until a shared snapshot has been copied. */
#include <errno.h>
#include <string.h>

#include "snapshot/snapshot.h"

/* ---- making a snapshot, and leasing its memory ---- */

int sfr_snapshot_new(struct sfr_engine *engine, const struct sfr_source *sources,
		     uint32_t nr_sources, uint32_t flags, struct sfr_snapshot **out)
{
	static _Atomic uint64_t nr_snapshots;
	struct sfr_snapshot *s;
	int rc = -ENOMEM;

	*out = NULL;
	if (engine->fork_generation != sfr_fork_generation())
		return SFR_EFORK;
	if (flags & SFR_SNAPSHOT_SHARED && engine->opts.shared_memory)
		return -EINVAL; /* a child would see later writes to the memory */
	s = sfr_sys.calloc(1, sizeof(*s));
	if (!s)
		return -ENOMEM;
	atomic_init(&s->refs, 1);
	s->fork_generation = engine->fork_generation;
	s->engine = engine;
	sfr__engine_get(engine);
	s->shared = (flags & SFR_SNAPSHOT_SHARED) != 0;
	s->is_offload = (flags & SFR_SNAPSHOT_LEAVES) != 0;
	s->nr_sources = nr_sources;
	s->torn_source = -1;
	s->notice = (struct sfr__notice){
		.number = atomic_fetch_add_explicit(&nr_snapshots, 1, memory_order_relaxed) + 1,
		.snapshot = s,
		.what = SFR_NOTICE_SNAPSHOT,
	};
	/* + 1, because an allocation of no bytes may return NULL */
	s->sources = sfr_sys.calloc((size_t)nr_sources + 1, sizeof(*s->sources));
	s->copies = sfr_sys.calloc((size_t)nr_sources + 1, sizeof(*s->copies));
	if (!s->sources || !s->copies)
		goto fail;
	if (nr_sources)
		memcpy(s->sources, sources, nr_sources * sizeof(*sources));
	/* A source without an address is only given memory, which the caller fills. It must be
	 * captured and in host memory. */
	rc = -EINVAL;
	for (uint32_t i = 0; i < nr_sources; i++)
		if (sources[i].addr == 0 && sources[i].nbytes != 0 &&
		    (sources[i].lane != SFR_CAPTURED || sources[i].device != 0))
			goto fail;
	rc = sfr__host_source_sets_new(s);
	if (rc == 0)
		rc = sfr__snapshot_devices_new(s);
	if (rc < 0)
		goto fail;
	*out = s;
	return 0;
fail:
	sfr_snapshot_put(s);
	return rc;
}

/* Sets base and len to the range that contains all copies. */
static void set_range(struct sfr_snapshot *s)
{
	char *end = NULL;

	for (uint32_t i = 0; i < s->nr_sources; i++) {
		char *copy = s->copies[i];

		if (!copy)
			continue; /* a source without bytes */
		if (!s->base || copy < s->base)
			s->base = copy;
		if (!end || copy + s->sources[i].nbytes > end)
			end = copy + s->sources[i].nbytes;
	}
	s->len = s->base ? (uint64_t)(end - s->base) : 0;
}

int sfr_snapshot_lease(struct sfr_snapshot *s, uint64_t slice_ns)
{
	struct sfr_engine *engine = s->engine;
	uint64_t *lens;
	uint32_t nr_blocked_saves;
	int rc = 0;

	if (sfr__snapshot_is_inherited(s))
		return SFR_EFORK;
	lens = sfr_sys.malloc(((size_t)s->nr_sources + 1) * sizeof(*lens));
	if (!lens)
		return -ENOMEM;
	for (uint32_t i = 0; i < s->nr_sources; i++) /* copies of an offload are aligned */
		lens[i] = s->is_offload ? sfr__round_up(s->sources[i].nbytes, SFR_COPY_ALIGN) :
					  s->sources[i].nbytes;
	sfr__lock(&engine->mu);
	if (s->state != SFR__SNAPSHOT_NEW)
		rc = SFR_ESTATE;
	else if (engine->closing)
		rc = SFR_ECLOSED;
	else
		engine->nr_pool_users++; /* keeps the pool until sfr__engine_drop_pool_user */
	/* saves that this thread has not launched: they cannot go on before this call returns */
	nr_blocked_saves = sfr__engine_count_own_unlaunched_locked(engine, true);
	sfr__unlock(&engine->mu);
	if (rc < 0)
		goto out;
	rc = sfr__lot_lease_memory(s, lens, nr_blocked_saves, slice_ns);
	if (rc < 0) {
		sfr__engine_drop_pool_user(engine);
		goto out;
	}
	set_range(s);
	sfr__lock(&engine->mu);
	s->nr_views = 1; /* the caller's */
	sfr__snapshot_set_state_locked(s, SFR__SNAPSHOT_LEASED);
	sfr__unlock(&engine->mu);
	if (s->is_offload) /* pinned here, so that sfr_snapshot_start takes less time */
		sfr__snapshot_pin(s);
out:
	sfr_sys.free(lens);
	return rc;
}

void sfr_snapshot_memory(const struct sfr_snapshot *s, char **base, uint64_t *len)
{
	*base = s->base;
	*len = s->len;
}

uint64_t sfr_snapshot_offset(const struct sfr_snapshot *s, uint32_t source)
{
	return s->copies[source] ? (uint64_t)(s->copies[source] - s->base) : 0;
}

/* ---- copying ---- */

/* Takes samples of the deferred sources in host memory. Returns 0 or -ENOMEM. */
static int take_samples(struct sfr_snapshot *s)
{
	uint32_t nr;
	struct sfr__source_to_sample *sampled =
		sfr__snapshot_list_deferred_sources(s, 0, &nr); /* 0: host memory */
	/* the time is the seed that decides which cache lines are sampled */
	int rc = sampled ? sfr__samples_take(&s->samples, sampled, nr, sfr__now_ns()) : -ENOMEM;

	sfr_sys.free(sampled);
	return rc;
}

static void set_copied(struct sfr_snapshot *s)
{
	sfr__lock(&s->engine->mu);
	sfr__snapshot_set_state_locked(s, SFR__SNAPSHOT_COPIED);
	sfr__unlock(&s->engine->mu);
}

int sfr_snapshot_set_streams(struct sfr_snapshot *s, const struct sfr_device_stream *streams,
			     uint32_t nr_streams)
{
	if (sfr__snapshot_is_inherited(s))
		return SFR_EFORK;
	return sfr__snapshot_devices_set_streams(s, streams, nr_streams);
}

int sfr_snapshot_start(struct sfr_snapshot *s)
{
	struct sfr_engine *engine = s->engine;
	uint32_t nr_deferred = sfr__snapshot_nr_deferred(s, 0); /* in host memory */
	struct sfr_err err = { .index = -1 };
	bool in_background = false; /* other threads or devices copy after this call */
	int rc = 0;

	if (sfr__snapshot_is_inherited(s))
		return SFR_EFORK;
	sfr__lock(&engine->mu);
	if (s->state != SFR__SNAPSHOT_LEASED)
		rc = SFR_ESTATE;
	else if (s->nr_devices && engine->closing)
		rc = SFR_ECLOSED;
	sfr__unlock(&engine->mu);
	if (rc == SFR_ESTATE)
		return rc; /* unlike after other errors, the state does not change */
	if (rc == 0 && nr_deferred)
		rc = take_samples(s);
	sfr__lock(&engine->mu);
	if (rc == 0 && (nr_deferred || s->nr_devices) && !engine->closing) {
		rc = sfr__engine_start_locked(engine);
		in_background = rc == 0;
	}
	if (in_background) {
		sfr_snapshot_get(s); /* the reference that all copying threads share */
		s->nr_copying = 1;   /* this call */
		engine->nr_copying_snapshots++;
		sfr__snapshot_set_state_locked(s, SFR__SNAPSHOT_COPYING);
	}
	sfr__unlock(&engine->mu);
	if (!in_background) {
		/* After an error nothing is copied. Otherwise nothing needs other threads, or the
		 * engine is closing and may have no threads. This thread can copy host memory
		 * without them, but not from devices. */
		if (rc == 0 && s->nr_devices)
			rc = SFR_ECLOSED;
		if (rc == 0)
			sfr__snapshot_copy_host_sources(s, true); /* true: deferred sources, too */
		set_copied(s);
		return rc;
	}
	/* Devices come first: they copy while the host copies. */
	rc = sfr__snapshot_start_device_copies(s, &err);
	sfr__snapshot_copy_host_sources(s, false); /* false: only captured sources */
	if (nr_deferred) {
		sfr__lock(&engine->mu);
		s->nr_copying++;
		sfr__snapshot_defer_host_copy_locked(s);
		sfr__unlock(&engine->mu);
	}
	/* This call's own copies have ended. Captured sources cannot be torn (-1). */
	sfr__snapshot_note_copy_end(s, -1, &err);
	return rc < 0 ? rc : err.code;
}

/* Returns whether no copy is running. */
static bool is_not_copying(const void *snapshot)
{
	return ((const struct sfr_snapshot *)snapshot)->state != SFR__SNAPSHOT_COPYING;
}

/* Waits until no copy is running, and helps to copy meanwhile. Does not wait if slice_ns is 0.
 * Returns 0 or SFR_EAGAIN. */
static int wait_until_copied_locked(struct sfr_snapshot *s, uint64_t slice_ns, uint64_t deadline_ns)
{
	if (slice_ns == 0)
		return is_not_copying(s) ? 0 : SFR_EAGAIN;
	return sfr__host_help_and_wait_locked(&s->deferred.copy, deadline_ns, is_not_copying, s);
}

int sfr_snapshot_gate(struct sfr_snapshot *s, const struct sfr_device_stream *streams,
		      uint32_t nr_streams, uint64_t slice_ns)
{
	uint64_t deadline = sfr__deadline(slice_ns);
	bool must_wait; /* on the host: streams alone cannot order the next step */
	int rc;

	if (sfr__snapshot_is_inherited(s))
		return SFR_EFORK;
	must_wait = !sfr__snapshot_gate_streams(s, streams, nr_streams) ||
		    sfr__snapshot_nr_deferred(s, 0) > 0; /* 0: host memory */
	sfr__lock(&s->engine->mu);
	rc = must_wait ? wait_until_copied_locked(s, slice_ns, deadline) : 0;
	sfr__unlock(&s->engine->mu);
	return rc;
}

void sfr_snapshot_error(struct sfr_snapshot *s, struct sfr_err *out)
{
	*out = (struct sfr_err){ .index = -1 };
	if (sfr__snapshot_is_inherited(s))
		return;
	if (s->state != SFR__SNAPSHOT_COPYING) { /* the error is final */
		*out = s->err;
		return;
	}
	sfr__lock(&s->engine->mu);
	*out = s->err;
	sfr__unlock(&s->engine->mu);
}

int sfr_snapshot_wait(struct sfr_snapshot *s, uint64_t slice_ns, int64_t *torn)
{
	uint64_t deadline = sfr__deadline(slice_ns);
	int rc;

	*torn = -1;
	if (sfr__snapshot_is_inherited(s))
		return SFR_EFORK;
	if (slice_ns == 0) { /* the caller holds Python's interpreter lock, so take no lock */
		if (s->state == SFR__SNAPSHOT_COPYING)
			return SFR_EAGAIN;
		*torn = s->torn_source;
		return 0;
	}
	sfr__lock(&s->engine->mu);
	rc = wait_until_copied_locked(s, slice_ns, deadline);
	if (rc == 0)
		*torn = s->torn_source;
	sfr__unlock(&s->engine->mu);
	return rc;
}

/* ---- numbers and references ---- */

uint64_t sfr_snapshot_copying_ns(const struct sfr_snapshot *s)
{
	return atomic_load_explicit(&s->copying_ns, memory_order_relaxed);
}

uint64_t sfr_snapshot_number(const struct sfr_snapshot *s)
{
	return s->notice.number;
}

void sfr_snapshot_get(struct sfr_snapshot *s)
{
	atomic_fetch_add_explicit(&s->refs, 1, memory_order_relaxed);
}

void sfr_snapshot_put(struct sfr_snapshot *s)
{
	struct sfr_engine *engine;
	struct sfr__lot *lot;

	if (!s || sfr__snapshot_is_inherited(s))
		return;
	if (atomic_fetch_sub_explicit(&s->refs, 1, memory_order_acq_rel) != 1)
		return;
	engine = s->engine;
	if (s->lot) {
		sfr__lock(&engine->mu);
		lot = sfr__lot_remove_user_locked(s);
		sfr__unlock(&engine->mu);
		sfr__lot_free(s, lot);
		sfr__engine_drop_pool_user(engine);
	}
	sfr_sys.free(s->devices);
	sfr__host_source_sets_free(s);
	sfr__samples_free(&s->samples);
	sfr_sys.free(s->copies);
	sfr_sys.free(s->sources);
	sfr_sys.free(s);
	sfr_engine_put(engine);
}
