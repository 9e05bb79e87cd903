/* The engine: slots, queues, threads. See engine.c. */
#ifndef SFR_ENGINE_H
#define SFR_ENGINE_H

#include <stdatomic.h>

#include "sfr/engine.h"
#include "base/queue.h"
#include "device/lane.h"
#include "memory/pool.h"

/* Who serves which tasks, each in the order in which they came. */
enum sfr__crew {
	SFR__LANE, /* the lane, before what is shared: a snapshot has its memory, and never waits */
	SFR__WRITERS, /* any of the writers */
	SFR__NR_CREWS
};

/* Something that is done in pieces, by several threads at a time if need be: by the lane, by the
 * writers when they have no task and somebody waits for it, and by those who wait. */
struct sfr__shared {
	struct sfr__shared *next;
	/* Does a piece, with the mutex, which is given up meanwhile; takes the work off the list when
	 * there is none left. False when there is nothing to do for this thread at this moment.
	 * Only with `may_wait` it waits for blocks. */
	bool (*turn_locked)(struct sfr__shared *work, bool may_wait);
};

/* A save in flight, as far as the engine knows it: part of its ticket. */
struct sfr__flight {
	struct sfr__flight *next, *prev;
	pthread_t caller;
	bool in_call; /* the caller has neither launched nor abandoned it */
	bool apart;   /* it has a slot among those of its kind; constant */
	uint32_t blocks_held;
};

/* All of it is guarded by `mu` unless a comment says otherwise. */
struct sfr_engine {
	struct sfr__mutex mu;
	pthread_cond_t cv_lane;   /* tasks for the lane, or stopping */
	pthread_cond_t cv_writer; /* tasks for the writers, or stopping */
	pthread_cond_t cv_state;  /* any ticket's facts, or a slot */
	atomic_uint refs;
	uint64_t fork_generation;
	struct sfr_engine_opts opts;
	uint64_t pool_bytes; /* the cap, whoever chose it; constant, as the next */
	bool default_cap;
	struct sfr__pool *pool; /* NULL once closed */

	bool closing, closed, started, stopping;
	pthread_t lane;
	pthread_t *writers;
	uint32_t nr_writers; /* running */
	uint64_t close_seq;  /* log entry that close waits for, 0 = not looked up */

	struct sfr__cuda_lanes cuda_lanes; /* has a lock of its own */
	SFR__QUEUE(struct sfr__task) tasks[SFR__NR_CREWS];
	SFR__QUEUE(struct sfr__shared)
	shared;               /* the lane's, and where somebody waits the writers' */
	uint32_t nr_awaiting; /* threads that wait until some of it is done */
	struct sfr__flight *flights;
	uint32_t nr_snapshots; /* that have, or wait for, memory of the pool: it stays so long */
	uint32_t nr_copying;   /* of them, at the lane */
	struct sfr__lot *common_lot;     /* that small ones are cut out of; NULL: none has users */
	uint32_t nr_in_flight, nr_apart; /* the latter among the former */
	uint32_t nr_pool_users;          /* threads in warm_up or trim */
	uint64_t next_seq, nr_saves;
};

/* ---- workers.c ---- */
/* Starts the engine's threads, unless they run. -ENOMEM or what starting a thread says. */
int sfr__engine_start_locked(struct sfr_engine *engine);
/* Joins them; nothing is queued any more. */
void sfr__workers_stop(struct sfr_engine *engine);
void sfr__task_push_locked(struct sfr_engine *engine, enum sfr__crew crew, struct sfr__task *task);
/* Work to share, first come first served, and off the list again. */
void sfr__shared_push_locked(struct sfr_engine *engine, struct sfr__shared *work);
void sfr__shared_remove_locked(struct sfr_engine *engine, const struct sfr__shared *work);
/* There is more to do for those who found nothing. */
void sfr__shared_wake_locked(struct sfr_engine *engine);
/* There may be memory to make: threads with nothing else to do look round. */
void sfr__engine_wake_idle_locked(struct sfr_engine *engine);

/* ---- engine.c ---- */
void sfr__engine_get(struct sfr_engine *engine);
/* A snapshot has given back its memory, or got none. The last one of a closed engine frees the
 * pool. */
void sfr__engine_snapshot_gone(struct sfr_engine *engine);

/* ---- slots.c ---- */
/* Waits until a save may take a slot, those that are `apart` among themselves. Flags are those of
 * the save: SFR_SAVE_NESTED never waits, and *beyond says whether it goes beyond max_in_flight.
 * SFR_EAGAIN; SFR_EBUSY with SFR_SAVE_NO_WAIT; SFR_ECLOSED. */
int sfr__engine_admit_locked(struct sfr_engine *engine, bool apart, uint32_t flags,
			     uint64_t deadline_ns, bool *beyond);
/* A save by the calling thread has a slot from here on, until it leaves. */
void sfr__engine_enter_locked(struct sfr_engine *engine, struct sfr__flight *flight);
void sfr__engine_leave_locked(struct sfr_engine *engine, struct sfr__flight *flight);
/* Of the saves in flight, those that this very thread is capturing, further down its stack: it
 * cannot wait for them. */
uint32_t sfr__engine_nr_own_locked(const struct sfr_engine *engine);

#endif
