/* The private declarations of snapshots, for this folder and offload/. */
#ifndef SFR_SNAPSHOT_H
#define SFR_SNAPSHOT_H

#include "sfr/snapshot.h"
#include "engine/engine.h"
#include "stage/host.h"
#include "stage/samples.h"

struct sfr__snapshot_device_state;
struct sfr__lot;

enum sfr__snapshot_state {
	SFR__SNAPSHOT_NEW,     /* has no memory yet */
	SFR__SNAPSHOT_LEASED,  /* has memory; nothing is copied yet */
	SFR__SNAPSHOT_COPYING, /* copies are queued or running */
	SFR__SNAPSHOT_COPIED,  /* all copies have ended, successfully or not */
	SFR__NR_SNAPSHOT_STATES
};

/* A set of sources in host memory: the captured ones, or the deferred ones. stage/host.c copies a
 * set like a single block. */
struct sfr__host_source_set {
	struct sfr__host_copy copy;
	struct sfr__host_block_state block;

	/* constant */
	struct sfr_snapshot *snapshot;
	uint64_t *starts; /* offset of each source in the block; last item: the block's length */
};

struct sfr_snapshot {
	atomic_uint refs;

	/* constant */
	struct sfr_engine *engine; /* the snapshot holds a reference to it */
	uint64_t fork_generation;
	struct sfr_source *sources;
	uint32_t nr_sources;
	bool shared;     /* SFR_SNAPSHOT_SHARED: forked children inherit the memory */
	bool is_offload; /* SFR_SNAPSHOT_LEAVES: tensors leave a device (sfr/snapshot.h) */

	/* constant once LEASED */
	char **copies; /* the address of each source's copy; NULL: it has no bytes */
	char *base;    /* start of the range that contains all copies */
	uint64_t len;  /* length of this range */

	/* guarded by engine->mu */
	_Atomic enum sfr__snapshot_state state; /* may be read without the lock */
	struct sfr__lot *lot;        /* the memory; NULL: not leased yet, or given back */
	bool view_held;              /* the memory is free only after a user releases a view */
	bool abandoned;              /* the memory has no users any more, so copying stops */
	uint32_t nr_views, nr_holds; /* the users of the memory (snapshot.c) */
	uint32_t nr_copying;         /* threads and devices that still copy */
	int64_t torn_source;         /* index of a torn source, or -1; final once COPIED */
	struct sfr_err err;          /* the first error of a device; final once COPIED */
	_Atomic uint64_t copying_ns; /* device time of the copies; only with is_offload */

	/* Samples of the deferred sources in host memory; an item's `entry` is the source's index.
	 * Constant after sfr_snapshot_start. */
	struct sfr__samples samples;
	struct sfr__snapshot_device_state *devices; /* the array is constant */
	uint32_t nr_devices;

	struct sfr__host_source_set captured, deferred; /* sources in host memory */

	struct sfr__notice notice; /* posted when all copies have ended */
};

/* Returns the address of a source's bytes. */
static inline const char *sfr__bytes_of(const struct sfr_source *source)
{
	return (const char *)(uintptr_t)source->addr;
}

/* ---- lot.c ---- */
/* Leases lens[i] bytes for the copy of each source i, and sets s->copies. The memory is then held
 * by a view. With SFR_SNAPSHOT_LEAVES every length is a multiple of SFR_COPY_ALIGN.
 * `nr_blocked_saves` is the number of saves in flight that cannot go on before this call returns.
 * Waits for memory, and returns errors, like sfr__pool_lease. */
int sfr__lot_lease_memory(struct sfr_snapshot *s, const uint64_t *lens, uint32_t nr_blocked_saves,
			  uint64_t slice_ns);
/* Sets whether a view holds the snapshot's memory: then only the view's user can make it free.
 * Other memory becomes free by itself, when a copy or a process ends. Idempotent. */
void sfr__lot_set_view_held_locked(struct sfr_snapshot *s, bool view_held);
/* Marks the memory so that it is never used again: a dead device may still write to it. */
void sfr__lot_retire_locked(struct sfr_snapshot *s);
/* Pins the memory as far as possible. A driver context must be current. The memory must not be
 * given back meanwhile. */
void sfr__lot_pin(const struct sfr_snapshot *s);
/* Ends the snapshot's use of its lot. If the lot has no other users, returns the lot: the caller
 * passes it to sfr__lot_free after unlocking. Otherwise returns NULL. */
struct sfr__lot *sfr__lot_remove_user_locked(struct sfr_snapshot *s);
void sfr__lot_free(struct sfr_snapshot *s, struct sfr__lot *lot); /* NULL is allowed */

/* ---- life.c ---- */
/* Sets the state, and wakes threads that wait for it. Nothing else changes the state. */
void sfr__snapshot_set_state_locked(struct sfr_snapshot *s, enum sfr__snapshot_state state);
/* Returns how often snapshots of this process went from one state to the other; for tests. */
unsigned sfr__snapshot_nr_transitions(enum sfr__snapshot_state from, enum sfr__snapshot_state to);
/* Increments nr_copying, for a thread or a device that begins to copy. */
void sfr__snapshot_note_copy_begin(struct sfr_snapshot *s);
/* Decrements nr_copying, for a thread or a device that has ended its copies. `torn_source` is an
 * index, or -1 if no source is torn. `err` may be NULL: no error. When nothing copies any more,
 * sets the state to COPIED. Then the snapshot may be freed. */
void sfr__snapshot_note_copy_end(struct sfr_snapshot *s, int64_t torn_source,
				 const struct sfr_err *err);
/* Retires the memory after a device has died, because its copies may never end. */
void sfr__snapshot_retire_memory(struct sfr_snapshot *s);

/* ---- snapshot/host.c ---- */
/* Makes s->captured and s->deferred. Returns 0 or -ENOMEM. */
int sfr__host_source_sets_new(struct sfr_snapshot *s);
void sfr__host_source_sets_free(struct sfr_snapshot *s);
/* Copies the captured sources in host memory on this thread; if `all`, also the deferred ones. */
void sfr__snapshot_copy_host_sources(struct sfr_snapshot *s, bool all);
/* Hands the deferred sources in host memory to the lane. The caller has counted this copy in
 * nr_copying. */
void sfr__snapshot_defer_host_copy_locked(struct sfr_snapshot *s);

/* ---- snapshot/samples.c ---- */
/* In these functions `device` is 0 for host memory, and n for device n - 1. */

/* Returns the number of deferred sources on `device`. */
uint32_t sfr__snapshot_nr_deferred(const struct sfr_snapshot *s, uint32_t device);
/* Returns an array of these sources, which the caller frees, and sets *nr to its length. Returns
 * NULL if there is no memory. */
struct sfr__source_to_sample *sfr__snapshot_list_deferred_sources(const struct sfr_snapshot *s,
								  uint32_t device, uint32_t *nr);
/* Returns the index of the first of these sources whose copy differs from its samples, or -1. */
int64_t sfr__snapshot_find_torn_source(const struct sfr_snapshot *s, uint32_t device,
				       const struct sfr__samples *samples);

/* ---- snapshot/device.c ---- */
/* Pins the leased memory as far as possible. Does nothing if the engine uses no device. */
void sfr__snapshot_pin(struct sfr_snapshot *s);
/* Makes s->devices, one for each device that has sources. Returns 0 or -ENOMEM. */
int sfr__snapshot_devices_new(struct sfr_snapshot *s);
/* Sets the caller's current streams. Returns 0, or SFR_ESTATE if a device has none. */
int sfr__snapshot_devices_set_streams(struct sfr_snapshot *s,
				      const struct sfr_device_stream *streams, uint32_t nr);
/* Queues all copies, and makes the caller's streams wait for the captured ones. Returns 0, or
 * SFR_ECAPTURING or SFR_ECLOSED if nothing was queued on a device. Sets *err after other errors,
 * and returns 0. */
int sfr__snapshot_start_device_copies(struct sfr_snapshot *s, struct sfr_err *err);
/* Makes these streams wait for all copies of their devices. Returns false if the host has to wait
 * instead. */
bool sfr__snapshot_gate_streams(struct sfr_snapshot *s, const struct sfr_device_stream *streams,
				uint32_t nr);

/* Returns whether this process inherited the snapshot by a fork. It must then not be touched. */
static inline bool sfr__snapshot_is_inherited(const struct sfr_snapshot *s)
{
	return s->fork_generation != sfr_fork_generation();
}

#endif
