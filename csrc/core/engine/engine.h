/* The engine: slots, queues, threads. engine.c implements it. */
#ifndef SFR_ENGINE_H
#define SFR_ENGINE_H

#include <stdatomic.h>

#include "sfr/engine.h"
#include "base/queue.h"
#include "device/lane.h"
#include "memory/pool.h"

/* The order in which shared work is served. */
enum sfr__shared_rank {
	SFR__IN_CALL, /* a call waits for the work, so no thread of low priority takes part */
	SFR__AT_ONCE, /* the work never waits for blocks */
	SFR__IN_TURN, /* the work waits for older work, which may have the blocks */
};

/* Work that several threads do in portions: the lane, the threads that wait for it, and copiers
 * while somebody waits. */
struct sfr__shared {
	struct sfr__shared *next;
	enum sfr__shared_rank rank;
	/* Does one step of the work. Called with the mutex, which it releases meanwhile; removes
	 * the work from the list when none is left. Waits for blocks only with `may_wait`. False:
	 * this thread has nothing to do right now. */
	bool (*step_locked)(struct sfr__shared *work, bool may_wait);
};

/* A save in flight, as the engine sees it; embedded in its ticket. */
struct sfr__flight {
	struct sfr__flight *next, *prev;
	pthread_t caller;
	bool in_call; /* the caller has not launched or abandoned it yet */
	/* an unordered save, which uses a slot of another kind; constant, like the next two */
	bool apart;
	bool within;  /* a file of a larger save, which has a slot and is counted instead */
	bool in_pool; /* the pool counts it among the saves that need blocks */
	uint32_t blocks_held;
};

enum {
	SFR__MOST_COPIERS = 15,
	SFR__MOST_APART = 64, /* unordered saves in flight; each has two descriptors */
};

/* `mu` guards all of it unless a comment says otherwise. */
struct sfr_engine {
	struct sfr__mutex mu;
	pthread_cond_t cv_lane;   /* signals shared work, or stopping */
	pthread_cond_t cv_writer; /* signals tasks for the writers, or stopping */
	pthread_cond_t cv_copier; /* signals shared work that somebody waits for, or stopping */
	pthread_cond_t cv_state;  /* signals a change of any ticket's facts, or a free slot */
	atomic_uint refs;
	uint64_t fork_generation;
	struct sfr_engine_opts opts;
	uint64_t pool_bytes; /* the cap, given or default; constant, like the next */
	bool default_cap;
	struct sfr__pool *pool; /* NULL once closed */

	bool closing, closed, started, stopping;
	pthread_t lane;
	pthread_t *writers;
	uint32_t nr_writers; /* running */
	pthread_t copiers[SFR__MOST_COPIERS];
	uint32_t nr_copiers; /* running */
	uint64_t close_seq;  /* sequence number in the log that close waits for; 0: not looked up */

	struct sfr__cuda_lanes cuda_lanes;  /* has a lock of its own */
	SFR__QUEUE(struct sfr__task) tasks; /* the writers' */
	struct sfr__shared *shared;         /* by rank */
	uint32_t nr_awaiting;               /* threads that wait for shared work */
	struct sfr__flight *flights;
	/* snapshots that have pool memory or wait for it; the pool is kept while there are any */
	uint32_t nr_snapshots;
	uint32_t nr_copying;             /* how many of them the lane is copying */
	struct sfr__lot *common_lot;     /* the lot that small snapshots share; NULL: none in use */
	uint32_t nr_in_flight, nr_apart; /* nr_apart is part of nr_in_flight */
	uint32_t nr_pool_users;          /* threads in warm_up or trim */
	uint64_t next_seq, nr_saves;
};

/* ---- workers.c ---- */
/* Starts the engine's threads unless they run. 0, -ENOMEM or the error of starting a thread. */
int sfr__engine_start_locked(struct sfr_engine *engine);
/* Starts the copiers. If the system refuses a thread, the engine works with fewer: nothing depends
 * on a copier. */
void sfr__copiers_start_locked(struct sfr_engine *engine);
/* Joins all threads; nothing is queued any more. */
void sfr__workers_stop(struct sfr_engine *engine);
/* Gives the writers a task; they serve tasks in the order of their arrival. */
void sfr__task_push_locked(struct sfr_engine *engine, struct sfr__task *task);
/* Insert work after all of its rank, and remove it. */
void sfr__shared_push_locked(struct sfr_engine *engine, struct sfr__shared *work);
void sfr__shared_remove_locked(struct sfr_engine *engine, const struct sfr__shared *work);
/* Wakes threads that found nothing to do. */
void sfr__shared_wake_locked(struct sfr_engine *engine);

/* ---- engine.c ---- */
void sfr__engine_get(struct sfr_engine *engine);
/* Records that a snapshot has returned its memory, or got none. The last one of a closed engine
 * frees the pool. */
void sfr__engine_snapshot_gone(struct sfr_engine *engine);

/* ---- slots.c ---- */
/* Waits until a save may take a slot; unordered (`apart`) saves have their own. Flags are those of
 * the save: with SFR_SAVE_NESTED it never waits. A thread that has a slot itself does not either.
 * *beyond tells whether it exceeds max_in_flight. SFR_EAGAIN; SFR_EBUSY with SFR_SAVE_NO_WAIT;
 * SFR_ECLOSED. */
int sfr__engine_admit_locked(struct sfr_engine *engine, bool apart, uint32_t flags,
			     uint64_t deadline_ns, bool *beyond);
/* Gives a save of the calling thread a slot; leave returns it. */
void sfr__engine_enter_locked(struct sfr_engine *engine, struct sfr__flight *flight);
void sfr__engine_leave_locked(struct sfr_engine *engine, struct sfr__flight *flight);
/* Counts the saves in flight that this thread is making further up its stack, and so cannot wait
 * for. `in_pool`: of those, the ones that the pool counts. */
uint32_t sfr__engine_nr_own_locked(const struct sfr_engine *engine, bool in_pool);

#endif
