/* The engine: slots, queues, threads. engine.c implements it. */
#ifndef SFR_ENGINE_H
#define SFR_ENGINE_H

#include <stdatomic.h>

#include "sfr/engine.h"
#include "base/queue.h"
#include "device/lane.h"
#include "memory/pool.h"

/* The order in which shared work is served: lower values first. */
enum sfr__shared_rank {
	SFR__IN_CALL, /* a call waits for the work; the lane takes no part: its priority is low */
	SFR__AT_ONCE, /* the work has all its memory and never waits for blocks */
	SFR__IN_TURN, /* the work may wait for blocks that earlier work has */
};

/* A copy that several threads do together, in steps: the lane, the threads that wait for it, and
 * copiers, which help while a thread waits. */
struct sfr__shared {
	struct sfr__shared *next;
	enum sfr__shared_rank rank;
	/* Does one step; releases the engine's mutex meanwhile. Waits for blocks only with
	 * `may_wait`. The last step removes the work from the list. Returns false if nothing can be
	 * done now. */
	bool (*step_locked)(struct sfr__shared *work, bool may_wait);
};

/* A save in flight, as the engine sees it; embedded in its ticket or its struct sfr_slot. */
struct sfr__flight {
	struct sfr__flight *next, *prev;
	pthread_t caller;     /* the thread that took the slot */
	bool in_call;         /* the caller has neither launched the save nor given it up */
	uint32_t blocks_held; /* blocks of the pool that the save has now */

	/* constant */
	bool unordered; /* does not count against max_in_flight (slots.c) */
	bool uncounted; /* a file of a larger save, which is the one that statistics count */
	bool in_pool;   /* counted by the pool among the saves that need blocks */
};

enum {
	SFR__MOST_COPIERS = 15,   /* the largest number that sfr_engine_opts may ask for */
	SFR__MOST_UNORDERED = 64, /* unordered saves in flight; each has two file descriptors */
};

/* The engine. `mu` guards all fields unless a comment says otherwise. */
struct sfr_engine {
	struct sfr__mutex mu;
	pthread_cond_t cv_lane, cv_writer, cv_copier; /* wake threads for work, or to stop */
	pthread_cond_t cv_state; /* any save, snapshot, slot or call has changed */
	atomic_uint refs;

	/* constant */
	uint64_t fork_generation;
	struct sfr_engine_opts opts;
	uint64_t pool_bytes; /* the cap of the pool */
	bool default_cap;    /* the user did not choose the cap */

	struct sfr__pool *pool; /* NULL once closed */
	uint32_t nr_pool_users; /* snapshots and onloads for which the pool is kept */
	uint32_t nr_pool_calls; /* threads in warm_up, trim or use_device */

	bool closing;  /* sfr_engine_close was called: nothing new begins */
	bool closed;   /* every save has ended, and the threads end */
	bool started;  /* the lane and all writers run */
	bool stopping; /* the threads must end */
	pthread_t lane;
	pthread_t *writers;
	uint32_t nr_writers; /* running */
	pthread_t copiers[SFR__MOST_COPIERS];
	uint32_t nr_copiers; /* running */
	uint64_t close_seq;  /* close waits for the log up to this entry; 0: unknown, or none */

	struct sfr__cuda_lanes cuda_lanes;  /* has a lock of its own */
	SFR__QUEUE(struct sfr__task) tasks; /* for the writers */
	struct sfr__shared *shared;         /* a list of shared work, in the order of ranks */
	uint32_t nr_awaiting;               /* threads that wait for shared work */

	struct sfr__flight *flights; /* a list of the saves in flight */
	uint32_t nr_in_flight;       /* saves in flight ... */
	uint32_t nr_unordered;       /* ... and how many of them are unordered */
	uint64_t last_seq;           /* sfr_ticket.seq of the save that was admitted last */
	uint64_t nr_saves;           /* saves so far, for statistics */

	uint32_t nr_copying;         /* snapshots in the state COPYING */
	struct sfr__lot *common_lot; /* the lot that small snapshots share; NULL: none in use */
};

/* ---- workers.c ---- */
/* Starts the lane and the writers unless they run. Returns 0 or -errno. */
int sfr__engine_start_locked(struct sfr_engine *engine);
/* Starts the copiers that do not run yet, or fewer: nothing depends on a copier. */
void sfr__copiers_start_locked(struct sfr_engine *engine);
/* Ends and joins all threads, when nothing is queued any more. */
void sfr__workers_stop(struct sfr_engine *engine);
/* Gives the writers a task. They serve tasks in order. */
void sfr__task_push_locked(struct sfr_engine *engine, struct sfr__task *task);
/* Insert work into the list after all work of its rank, and remove it. */
void sfr__shared_push_locked(struct sfr_engine *engine, struct sfr__shared *work);
void sfr__shared_remove_locked(struct sfr_engine *engine, const struct sfr__shared *work);
/* Wakes the threads that may do shared work, because a step may have become possible. */
void sfr__shared_wake_locked(struct sfr_engine *engine);

/* ---- engine.c ---- */
void sfr__engine_get(struct sfr_engine *engine); /* adds a reference; sfr_engine_put drops it */
/* Decrements nr_pool_users. The last user of a closed engine frees the pool. */
void sfr__engine_drop_pool_user(struct sfr_engine *engine);

/* ---- slots.c ---- */
/* Waits until a save may take a slot. `flags` are the save's flags. Never waits with
 * SFR_SAVE_NESTED, nor for an ordered save of a thread that already has a slot. If no slot is free
 * in these cases, sets *beyond: the save exceeds max_in_flight. Returns 0, or:
 *
 *   SFR_EAGAIN    the deadline has passed
 *   SFR_EBUSY     no slot is free, and `flags` has SFR_SAVE_NO_WAIT
 *   SFR_ECLOSED */
int sfr__engine_admit_locked(struct sfr_engine *engine, bool unordered, uint32_t flags,
			     uint64_t deadline_ns, bool *beyond);
/* Give a save of the calling thread a slot, and take the slot back. */
void sfr__engine_enter_locked(struct sfr_engine *engine, struct sfr__flight *flight);
void sfr__engine_leave_locked(struct sfr_engine *engine, struct sfr__flight *flight);
/* Returns how many saves in flight the calling thread has not launched. The thread must not wait
 * for their end, because it would wait for itself. `in_pool`: only those with in_pool set. */
uint32_t sfr__engine_nr_own_locked(const struct sfr_engine *engine, bool in_pool);

#endif
