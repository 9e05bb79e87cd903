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
	SFR__IN_CALL, /* a call waits for it, so the lane, whose priority is low, takes no part */
	SFR__AT_ONCE, /* it has all its memory, so it never waits for blocks */
	SFR__IN_TURN, /* it may wait for blocks that earlier work of the list has */
};

/* Work that several threads share, step by step: the lane, the threads that wait for the work, and
 * copiers, which help while a thread waits. */
struct sfr__shared {
	struct sfr__shared *next;
	enum sfr__shared_rank rank;
	/* Does one step of the work. Called with the engine's mutex, which it releases while it
	 * copies. After the last step it removes the work from the list. It waits for blocks only
	 * with `may_wait`. Returns false if the calling thread can do nothing right now. */
	bool (*step_locked)(struct sfr__shared *work, bool may_wait);
};

/* A save in flight, as the engine sees it; embedded in its ticket or its struct sfr_slot. */
struct sfr__flight {
	struct sfr__flight *next, *prev;
	pthread_t caller; /* the thread that took the slot */
	bool in_call;     /* the caller has neither launched the save nor given it up */
	/* an unordered save, which takes none of the max_in_flight slots (slots.c); constant, like
	 * the next two */
	bool unordered;
	bool uncounted;       /* a file of a larger save: statistics count only the larger save */
	bool in_pool;         /* the pool counts it among the saves that need blocks */
	uint32_t blocks_held; /* blocks of the pool that the save has now */
};

enum {
	SFR__MOST_COPIERS = 15,   /* the largest number that sfr_engine_opts may ask for */
	SFR__MOST_UNORDERED = 64, /* unordered saves in flight; each has two file descriptors */
};

/* The engine. `mu` guards all fields unless a comment says otherwise. */
struct sfr_engine {
	struct sfr__mutex mu;
	/* Each wakes threads when there may be work for them, or when they must stop. */
	pthread_cond_t cv_lane, cv_writer, cv_copier;
	/* Wakes threads that wait for a change of any save or snapshot, for a free slot, or for the
	 * end of the pool's use. */
	pthread_cond_t cv_state;
	atomic_uint refs;
	uint64_t fork_generation; /* constant, like the next three */
	struct sfr_engine_opts opts;
	uint64_t pool_bytes;    /* the cap of the pool */
	bool default_cap;       /* the user did not choose pool_bytes */
	struct sfr__pool *pool; /* NULL once closed */

	bool closing;  /* sfr_engine_close was called: nothing new begins */
	bool closed;   /* every save has ended, and the threads end */
	bool started;  /* the lane and all writers run */
	bool stopping; /* the threads must end */
	pthread_t lane;
	pthread_t *writers;
	uint32_t nr_writers; /* running */
	pthread_t copiers[SFR__MOST_COPIERS];
	uint32_t nr_copiers; /* running */
	/* the sequence number of the last entry of the log that close waits for; 0: not looked up,
	 * or there is none */
	uint64_t close_seq;

	struct sfr__cuda_lanes cuda_lanes;  /* has a lock of its own */
	SFR__QUEUE(struct sfr__task) tasks; /* for the writers */
	struct sfr__shared *shared;         /* a list of shared work, in the order of ranks */
	uint32_t nr_awaiting;               /* threads that wait for shared work */
	struct sfr__flight *flights;        /* a list of the saves in flight */
	/* snapshots that have pool memory or wait for it, and onloads (copies back to a device,
	 * offload/onload.c); the pool is kept while there are any */
	uint32_t nr_pool_users;
	uint32_t nr_copying;         /* snapshots in the state COPYING */
	struct sfr__lot *common_lot; /* the lot that small snapshots share; NULL: none in use */
	uint32_t nr_in_flight, nr_unordered; /* nr_unordered is part of nr_in_flight */
	uint32_t nr_pool_calls;              /* threads in warm_up, trim or use_device */
	uint64_t last_seq;                   /* sfr_ticket.seq of the save that was admitted last */
	uint64_t nr_saves;                   /* saves so far, for statistics */
};

/* ---- workers.c ---- */
/* Starts the engine's threads unless they run. Returns 0, -ENOMEM or the error of starting a
 * thread. */
int sfr__engine_start_locked(struct sfr_engine *engine);
/* Starts the copiers that do not run yet. If the system refuses a thread, the engine works with
 * fewer: nothing depends on a copier. */
void sfr__copiers_start_locked(struct sfr_engine *engine);
/* Ends and joins all threads. The caller guarantees that nothing is queued any more. */
void sfr__workers_stop(struct sfr_engine *engine);
/* Gives the writers a task; they serve tasks in the order of their arrival. */
void sfr__task_push_locked(struct sfr_engine *engine, struct sfr__task *task);
/* sfr__shared_push_locked inserts work into the list after all work of its rank, and
 * sfr__shared_remove_locked removes it. */
void sfr__shared_push_locked(struct sfr_engine *engine, struct sfr__shared *work);
void sfr__shared_remove_locked(struct sfr_engine *engine, const struct sfr__shared *work);
/* Wakes the threads that may do shared work, because a step that was not possible may be now. */
void sfr__shared_wake_locked(struct sfr_engine *engine);

/* ---- engine.c ---- */
void sfr__engine_get(struct sfr_engine *engine); /* adds a reference; sfr_engine_put drops it */
/* Counts one user less in nr_pool_users: a snapshot has returned its memory or got none, or an
 * onload is freed. The last user of a closed engine frees the pool. */
void sfr__engine_drop_pool_user(struct sfr_engine *engine);

/* ---- slots.c ---- */
/* Waits until a save may take a slot; unordered saves have slots of their own. `flags` are the
 * save's flags. The call does not wait with SFR_SAVE_NESTED, nor for an ordered save of a thread
 * that already has a slot. If no slot is free then, *beyond is set, and the save exceeds
 * max_in_flight. Returns 0; SFR_EAGAIN after the deadline; SFR_EBUSY with SFR_SAVE_NO_WAIT;
 * SFR_ECLOSED. */
int sfr__engine_admit_locked(struct sfr_engine *engine, bool unordered, uint32_t flags,
			     uint64_t deadline_ns, bool *beyond);
/* Give a save of the calling thread a slot, and take the slot back when the save has ended. */
void sfr__engine_enter_locked(struct sfr_engine *engine, struct sfr__flight *flight);
void sfr__engine_leave_locked(struct sfr_engine *engine, struct sfr__flight *flight);
/* Returns the number of saves in flight that the calling thread has not launched yet. The thread
 * must not wait for these saves to end, because it would wait for itself. With `in_pool`, counts
 * only saves that the pool counts among those that need blocks. */
uint32_t sfr__engine_nr_own_locked(const struct sfr_engine *engine, bool in_pool);

#endif
