/* A snapshot, as snapshot.c and the lane know it. */
#ifndef SFR_SNAPSHOT_H
#define SFR_SNAPSHOT_H

#include "sfr/snapshot.h"
#include "engine/engine.h"
#include "stage/host.h"
#include "stage/samples.h"

struct sfr__snapshot_part;
struct sfr__lot;

enum sfr__snapshot_state {
	SFR__SNAPSHOT_NEW,
	SFR__SNAPSHOT_LEASED,
	SFR__SNAPSHOT_COPYING, /* queued at, or being copied by, lanes */
	SFR__SNAPSHOT_COPIED,  /* or failed, or given up: nobody writes into the memory any more */
	SFR__NR_SNAPSHOT_STATES
};

/* Sources in host memory that are copied together: one block of stage/host.c, as the memory is there
 * already. */
struct sfr__snapshot_run {
	struct sfr__host_copy copy;
	struct sfr__host_block block;
	struct sfr_snapshot *snapshot; /* constant, as the next */
	uint64_t *starts; /* bytes of the run in front of each source, and in all of them */
};

struct sfr_snapshot {
	struct sfr_engine *engine; /* a reference; constant, as the next five */
	atomic_uint refs;          /* atomic */
	uint64_t fork_generation;
	struct sfr_source *sources;
	uint32_t nr_sources;
	bool shared, leaves;
	char **copies; /* where each source goes; constant from LEASED on, as the next two */
	char *base;
	uint64_t len;

	/* the rest is guarded by engine->mu */
	_Atomic enum sfr__snapshot_state state; /* read without the lock, too */
	struct sfr__lot *lot;                   /* its memory, NULL: not leased, or gone back */
	bool held;      /* of the lot: only its callers can end that; lot.c's */
	bool abandoned; /* nobody can read the copy any more: what is left of it is not copied */
	uint32_t nr_views, nr_holds;
	uint32_t nr_out;    /* of those who copy: the call, the host's threads, parts in devices */
	int64_t torn;       /* final once the state is COPIED */
	struct sfr_err err; /* of a device; the first; final as torn is */
	_Atomic uint64_t copying_ns; /* that devices took for what leaves; atomic */

	struct sfr__samples
		samples; /* of the host's; entry is a source; taken by start, then the lane's */
	struct sfr__snapshot_part *parts; /* one for each device; the array is constant */
	uint32_t nr_parts;

	struct sfr__snapshot_run captured, deferred; /* of the host's */

	struct sfr__notice notice;
};

static inline const char *sfr__bytes_of(const struct sfr_source *source)
{
	return (const char *)(uintptr_t)source->addr;
}

/* ---- lot.c ---- */
/* Gets memory for copies of `lens` bytes, multiples of SFR_APART where they leave; fills s->copies. Held
 * from then on. As sfr__pool_place. */
int sfr__lot_get(struct sfr_snapshot *s, const uint64_t *lens, uint32_t nr_own, uint64_t slice_ns);
/* Whether a wait for the memory is one that only a caller could end. Idempotent. */
void sfr__lot_hold_locked(struct sfr_snapshot *s, bool held);
/* It is nobody's again. */
void sfr__lot_retire_locked(struct sfr_snapshot *s);
/* Pins it as far as that goes. Needs a context. The snapshot keeps its memory meanwhile. */
void sfr__lot_pin(const struct sfr_snapshot *s);
/* The snapshot has no memory any more. What is returned is to be freed without the lock: the last
 * user's; or NULL. */
struct sfr__lot *sfr__lot_drop_locked(struct sfr_snapshot *s);
void sfr__lot_free(struct sfr_snapshot *s, struct sfr__lot *lot); /* NULL is fine */

/* ---- life.c ---- */
void sfr__snapshot_set_state_locked(struct sfr_snapshot *s, enum sfr__snapshot_state state);
/* One more, and one less, of those who copy; what it found. The last one settles the snapshot. */
void sfr__snapshot_out(struct sfr_snapshot *s);
void sfr__snapshot_in(struct sfr_snapshot *s, int64_t torn, const struct sfr_err *err);
/* A copy into the memory may never end: it is nobody's again. */
void sfr__snapshot_lost(struct sfr_snapshot *s);

/* ---- snapshot/host.c ---- */
/* Says which sources in host memory are copied in the call, and which later. -ENOMEM. */
int sfr__snapshot_runs_new(struct sfr_snapshot *s);
void sfr__snapshot_runs_free(struct sfr_snapshot *s);
/* Copies the captured ones; `all`: the deferred ones, too. */
void sfr__snapshot_copy_now(struct sfr_snapshot *s, bool all);
/* Hands out the deferred ones. Who copies is counted already. */
void sfr__snapshot_defer_locked(struct sfr_snapshot *s);

/* ---- snapshot/samples.c ---- */
/* Sources that are copied after the call, in one kind of memory (sfr_source.device). */
uint32_t sfr__snapshot_nr_deferred(const struct sfr_snapshot *s, uint32_t device);
/* Those, for sampling: from malloc, or NULL. */
struct sfr__sampled *sfr__snapshot_sampled(const struct sfr_snapshot *s, uint32_t device,
					   uint32_t *nr);
/* The first of those whose copy differs from its samples, or -1. */
int64_t sfr__snapshot_compare(const struct sfr_snapshot *s, uint32_t device,
			      const struct sfr__samples *samples);

/* ---- snapshot/device.c ---- */
/* Pins the leased memory as far as that goes, where some device is in use. */
void sfr__snapshot_pin(struct sfr_snapshot *s);
/* Makes the parts of the sources that live on devices. -ENOMEM. */
int sfr__snapshot_parts_new(struct sfr_snapshot *s);
/* The caller's current streams. SFR_ESTATE when a device has none. */
int sfr__snapshot_parts_streams(struct sfr_snapshot *s, const struct sfr_stream *streams,
				uint32_t nr);
/* Queues all copies. SFR_ECAPTURING, SFR_ECLOSED: refused; what else fails is in *err. */
int sfr__snapshot_parts_start(struct sfr_snapshot *s, struct sfr_err *err);
/* The caller's streams wait for the captured ones. */
void sfr__snapshot_parts_captured(struct sfr_snapshot *s, struct sfr_err *err);
/* These streams wait for all copies of their devices. False when the host has to. */
bool sfr__snapshot_parts_gate(struct sfr_snapshot *s, const struct sfr_stream *streams,
			      uint32_t nr);
/* How often a state followed another, in the whole process; for tests. */
unsigned sfr__snapshot_arrows(enum sfr__snapshot_state from, enum sfr__snapshot_state to);

/* Made before a fork that this process came out of: nothing of it may be touched. */
static inline bool sfr__snapshot_is_foreign(const struct sfr_snapshot *s)
{
	return s->fork_generation != sfr_fork_generation();
}

#endif
