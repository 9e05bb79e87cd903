/* A snapshot, as the files of this folder and of offload/ see it. */
#ifndef SFR_SNAPSHOT_H
#define SFR_SNAPSHOT_H

#include "sfr/snapshot.h"
#include "engine/engine.h"
#include "stage/host.h"
#include "stage/samples.h"

struct sfr__snapshot_device;
struct sfr__lot;

enum sfr__snapshot_state {
	SFR__SNAPSHOT_NEW,
	SFR__SNAPSHOT_LEASED,
	SFR__SNAPSHOT_COPYING, /* copies are queued or running */
	/* Nothing writes to the memory any more. Also if the copy failed or was abandoned. */
	SFR__SNAPSHOT_COPIED,
	SFR__NR_SNAPSHOT_STATES
};

/* The captured or the deferred sources in host memory, which are copied together. They are one
 * block of stage/host.c, because all memory is leased before. */
struct sfr__host_set {
	struct sfr__host_copy copy;
	struct sfr__host_block block;
	struct sfr_snapshot *snapshot; /* constant, like the next */
	/* for each source of the snapshot, the bytes of the set before it; then the set's length */
	uint64_t *starts;
};

struct sfr_snapshot {
	atomic_uint refs;
	struct sfr_engine *engine; /* holds a reference; constant, like the next five */
	uint64_t fork_generation;
	struct sfr_source *sources;
	uint32_t nr_sources;
	bool shared;   /* SFR_SNAPSHOT_SHARED: children forked later can read the memory */
	bool leaves;   /* SFR_SNAPSHOT_LEAVES: the tensors leave a device */
	char **copies; /* the address of each copy; constant from LEASED on, like the next two */
	char *base;    /* [base, base + len) is the range that contains all copies */
	uint64_t len;

	/* the rest is guarded by engine->mu */
	_Atomic enum sfr__snapshot_state state; /* also read without the lock */
	struct sfr__lot *lot;        /* its memory; NULL if not leased yet, or given back */
	bool held;                   /* only a user can make it free (sfr__lot_set_held_locked) */
	bool abandoned;              /* nobody can read the copy, so the rest is not copied */
	uint32_t nr_views, nr_holds; /* users of the memory, see snapshot.c */
	uint32_t nr_copying;         /* counts who still copies: the call, host threads, devices */
	int64_t torn;                /* index of a torn source, or -1; final once COPIED */
	struct sfr_err err;          /* the first error of a device; final like torn */
	_Atomic uint64_t copying_ns; /* device time of the copies, for SFR_SNAPSHOT_LEAVES */

	/* Samples of deferred sources in host memory; their `entry` is the index of a source.
	 * sfr_snapshot_start takes them, and threads that copy only read them. */
	struct sfr__samples samples;
	struct sfr__snapshot_device *devices; /* one for each device; the array is constant */
	uint32_t nr_devices;

	struct sfr__host_set captured, deferred; /* sources in host memory */

	struct sfr__notice notice; /* posted when the copy has ended */
};

static inline const char *sfr__bytes_of(const struct sfr_source *source)
{
	return (const char *)(uintptr_t)source->addr;
}

/* ---- lot.c ---- */
/* Gets memory for the copy of each source i, lens[i] bytes (with SFR_SNAPSHOT_LEAVES a multiple of
 * SFR_COPY_ALIGN), and sets s->copies to the addresses. The memory is held from then on. `nr_own`
 * is the number of saves in flight that wait for this call. Waits and fails as sfr__pool_lease. */
int sfr__lot_get(struct sfr_snapshot *s, const uint64_t *lens, uint32_t nr_own, uint64_t slice_ns);
/* Sets whether the snapshot's memory is *held*: it becomes free only when a user releases the
 * snapshot. Memory that is not held becomes free by itself, when a copy or a process ends. (The
 * holds that nr_holds counts are such processes, so they do not make it held.) Idempotent. */
void sfr__lot_set_held_locked(struct sfr_snapshot *s, bool held);
/* Retires the memory: it is not used again. */
void sfr__lot_retire_locked(struct sfr_snapshot *s);
/* Pins the memory as far as possible. A context of the driver must be current, and the snapshot
 * must keep its memory meanwhile. */
void sfr__lot_pin(const struct sfr_snapshot *s);
/* Ends the snapshot's use of its lot. Returns the lot if that was the last use, for sfr__lot_free
 * without the lock; else NULL. */
struct sfr__lot *sfr__lot_drop_locked(struct sfr_snapshot *s);
void sfr__lot_free(struct sfr_snapshot *s, struct sfr__lot *lot); /* NULL is allowed */

/* ---- life.c ---- */
/* Sets the state; every change of state goes through here. */
void sfr__snapshot_set_state_locked(struct sfr_snapshot *s, enum sfr__snapshot_state state);
/* Returns how often snapshots of this process went from one state to the other; for tests. */
unsigned sfr__snapshot_arrows(enum sfr__snapshot_state from, enum sfr__snapshot_state to);
/* Counts one more thread or device that copies. */
void sfr__snapshot_copy_begins(struct sfr_snapshot *s);
/* Counts one less, and records its result: the index of a torn source or -1, and an error or NULL.
 * After the last one the state is COPIED, and the snapshot may be freed. */
void sfr__snapshot_copy_ended(struct sfr_snapshot *s, int64_t torn, const struct sfr_err *err);
/* Retires the memory: a device died, so its copies from or to the memory may never end. */
void sfr__snapshot_retire_memory(struct sfr_snapshot *s);

/* ---- snapshot/host.c ---- */
/* Makes both sets of sources in host memory, `captured` and `deferred`. 0 or -ENOMEM. */
int sfr__host_sets_new(struct sfr_snapshot *s);
void sfr__host_sets_free(struct sfr_snapshot *s);
/* Copies the captured sources in host memory and, with `all`, the deferred ones too. */
void sfr__snapshot_copy_now(struct sfr_snapshot *s, bool all);
/* Lets threads copy the deferred sources in host memory. The caller has counted this copy in
 * nr_copying. */
void sfr__snapshot_defer_locked(struct sfr_snapshot *s);

/* ---- snapshot/samples.c ---- */
/* Counts the sources that are copied after the call, in one kind of memory (sfr_source.device). */
uint32_t sfr__snapshot_nr_deferred(const struct sfr_snapshot *s, uint32_t device);
/* Returns an array of these sources, for sampling; the caller frees it. *nr gets its length.
 * Returns NULL without memory. */
struct sfr__sampled *sfr__snapshot_sampled(const struct sfr_snapshot *s, uint32_t device,
					   uint32_t *nr);
/* Returns the index of the first of these sources whose copy differs from its samples, or -1. */
int64_t sfr__snapshot_compare(const struct sfr_snapshot *s, uint32_t device,
			      const struct sfr__samples *samples);

/* ---- snapshot/device.c ---- */
/* Pins the leased memory as far as possible, if a device is in use. */
void sfr__snapshot_pin(struct sfr_snapshot *s);
/* Makes the state for each device that has sources. 0 or -ENOMEM. */
int sfr__snapshot_devices_new(struct sfr_snapshot *s);
/* Sets the caller's current streams. SFR_ESTATE if a device has none. */
int sfr__snapshot_devices_streams(struct sfr_snapshot *s, const struct sfr_stream *streams,
				  uint32_t nr);
/* Queues all copies, and makes the caller's streams wait for the captured ones. Returns
 * SFR_ECAPTURING or SFR_ECLOSED if the call is refused, else 0: any other error is in *err. */
int sfr__snapshot_devices_start(struct sfr_snapshot *s, struct sfr_err *err);
/* Makes these streams wait for all copies of their devices. Returns false if a stream cannot wait,
 * so that the host has to. */
bool sfr__snapshot_devices_gate(struct sfr_snapshot *s, const struct sfr_stream *streams,
				uint32_t nr);

/* Returns whether the snapshot was made before a fork that created this process: then nothing may
 * touch it. */
static inline bool sfr__snapshot_is_foreign(const struct sfr_snapshot *s)
{
	return s->fork_generation != sfr_fork_generation();
}

#endif
