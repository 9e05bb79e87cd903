/* The private declarations of snapshots, for this folder and offload/. */
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
	SFR__SNAPSHOT_COPIED,  /* all copies have ended, successfully or not */
	SFR__NR_SNAPSHOT_STATES
};

/* The captured sources in host memory, or the deferred ones. stage/host.c copies a set as a single
 * block. */
struct sfr__host_set {
	struct sfr__host_copy copy;
	struct sfr__host_block block;

	/* constant */
	struct sfr_snapshot *snapshot;
	uint64_t *starts; /* offset of each source in the block; then the block's length */
};

struct sfr_snapshot {
	atomic_uint refs;

	/* constant */
	struct sfr_engine *engine; /* with a reference */
	uint64_t fork_generation;
	struct sfr_source *sources;
	uint32_t nr_sources;
	bool shared; /* SFR_SNAPSHOT_SHARED */
	bool leaves; /* SFR_SNAPSHOT_LEAVES */

	/* constant once LEASED */
	char **copies; /* the address of each source's copy */
	char *base;    /* start of the range that contains all copies */
	uint64_t len;  /* length of this range */

	/* guarded by engine->mu */
	_Atomic enum sfr__snapshot_state state; /* may be read without the lock */
	struct sfr__lot *lot;        /* the memory; NULL: not leased yet, or given back */
	bool held;                   /* set by sfr__lot_set_held_locked */
	bool abandoned;              /* there are no users left, so copying stops */
	uint32_t nr_views, nr_holds; /* users of the memory, see snapshot.c */
	uint32_t nr_copying;         /* the call, host threads and devices that still copy */
	int64_t torn;                /* index of a torn source, or -1; final once COPIED */
	struct sfr_err err;          /* the first error of a device; final once COPIED */
	_Atomic uint64_t copying_ns; /* device time of the copies; only with `leaves` */

	/* Samples of the deferred sources in host memory; `entry` is a source's index. Only
	 * sfr_snapshot_start writes to them. */
	struct sfr__samples samples;
	struct sfr__snapshot_device *devices; /* the array is constant */
	uint32_t nr_devices;

	struct sfr__host_set captured, deferred; /* sources in host memory */

	struct sfr__notice notice; /* posted when the copy has ended */
};

static inline const char *sfr__bytes_of(const struct sfr_source *source)
{
	return (const char *)(uintptr_t)source->addr;
}

/* ---- lot.c ---- */
/* Leases lens[i] bytes for the copy of each source i, and sets s->copies. The memory is then held.
 * With SFR_SNAPSHOT_LEAVES every length is a multiple of SFR_COPY_ALIGN. `nr_own` is the number of
 * saves in flight that wait for this call. Waits and fails as sfr__pool_lease. */
int sfr__lot_get(struct sfr_snapshot *s, const uint64_t *lens, uint32_t nr_own, uint64_t slice_ns);
/* Sets whether the snapshot's memory is *held*: it becomes free only when a user releases a view.
 * Memory that is not held becomes free by itself, when a copy or a process ends. Idempotent. */
void sfr__lot_set_held_locked(struct sfr_snapshot *s, bool held);
/* Makes sure that the memory is never used again. */
void sfr__lot_retire_locked(struct sfr_snapshot *s);
/* Pins the memory as far as possible. A driver context must be current. The snapshot must keep its
 * memory meanwhile. */
void sfr__lot_pin(const struct sfr_snapshot *s);
/* Ends the snapshot's use of its lot. Returns NULL if the lot has other users, else the lot, which
 * the caller gives to sfr__lot_free after unlocking. */
struct sfr__lot *sfr__lot_drop_locked(struct sfr_snapshot *s);
void sfr__lot_free(struct sfr_snapshot *s, struct sfr__lot *lot); /* NULL is allowed */

/* ---- life.c ---- */
/* Every change of state goes through this function. */
void sfr__snapshot_set_state_locked(struct sfr_snapshot *s, enum sfr__snapshot_state state);
/* Returns how often snapshots of this process went from one state to the other; for tests. */
unsigned sfr__snapshot_arrows(enum sfr__snapshot_state from, enum sfr__snapshot_state to);
/* Counts a thread or device that begins to copy. */
void sfr__snapshot_copy_begins(struct sfr_snapshot *s);
/* Counts a thread or device that has ended its copies. `torn` is the index of a torn source or -1;
 * `err` may be NULL. After the last one the state is COPIED, and the snapshot may be freed. */
void sfr__snapshot_copy_ended(struct sfr_snapshot *s, int64_t torn, const struct sfr_err *err);
/* Retires the memory after a device died, because copies of the device may never end. */
void sfr__snapshot_retire_memory(struct sfr_snapshot *s);

/* ---- snapshot/host.c ---- */
/* Makes the sets `captured` and `deferred`. 0 or -ENOMEM. */
int sfr__host_sets_new(struct sfr_snapshot *s);
void sfr__host_sets_free(struct sfr_snapshot *s);
/* Copies the captured set, and with `all` also the deferred set. */
void sfr__snapshot_copy_now(struct sfr_snapshot *s, bool all);
/* Lets threads copy the deferred set. The caller has counted this copy in nr_copying. */
void sfr__snapshot_defer_locked(struct sfr_snapshot *s);

/* ---- snapshot/samples.c ---- */
/* In these functions `device` is 0 for host memory, n for device n - 1.
 *
 * Returns the number of deferred sources there. */
uint32_t sfr__snapshot_nr_deferred(const struct sfr_snapshot *s, uint32_t device);
/* Returns an array of these sources, which the caller frees, and sets *nr to its length. NULL: out
 * of memory. */
struct sfr__sampled *sfr__snapshot_sampled(const struct sfr_snapshot *s, uint32_t device,
					   uint32_t *nr);
/* Returns the index of the first of these sources whose copy differs from its samples, or -1. */
int64_t sfr__snapshot_compare(const struct sfr_snapshot *s, uint32_t device,
			      const struct sfr__samples *samples);

/* ---- snapshot/device.c ---- */
/* Pins the leased memory as far as possible, if a device is in use. */
void sfr__snapshot_pin(struct sfr_snapshot *s);
/* Makes s->devices, one for each device that has sources. 0 or -ENOMEM. */
int sfr__snapshot_devices_new(struct sfr_snapshot *s);
/* Sets the caller's current streams. SFR_ESTATE if a device has none. */
int sfr__snapshot_devices_streams(struct sfr_snapshot *s, const struct sfr_stream *streams,
				  uint32_t nr);
/* Queues all copies, and makes the caller's streams wait for the captured ones. Returns 0, or
 * SFR_ECAPTURING or SFR_ECLOSED if the call is refused. Other errors are only in *err. */
int sfr__snapshot_devices_start(struct sfr_snapshot *s, struct sfr_err *err);
/* Makes these streams wait for all copies of their devices. Returns false if the host has to wait
 * instead. */
bool sfr__snapshot_devices_gate(struct sfr_snapshot *s, const struct sfr_stream *streams,
				uint32_t nr);

/* Returns whether this process inherited the snapshot by a fork. It must then not be touched. */
static inline bool sfr__snapshot_is_foreign(const struct sfr_snapshot *s)
{
	return s->fork_generation != sfr_fork_generation();
}

#endif
