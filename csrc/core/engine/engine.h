/* The engine: slots, queues, threads. engine.c implements it. */
#ifndef SFR_ENGINE_H
#define SFR_ENGINE_H

#include <stdatomic.h>

#include "sfr/engine.h"
#include "base/queue.h"
#include "device/lane.h"
#include "memory/pool.h"

/* The order in which shared work is served: lower values first. */
enum sfr__shared_work_rank {
	/* A call waits for the work. The lane does not help, because its priority is low. */
	SFR__RANK_IN_CALL,
	/* The work has all its memory, so it never waits for blocks. */
	SFR__RANK_HAS_MEMORY,
	/* The work may have to wait for blocks that earlier work has. */
	SFR__RANK_NEEDS_BLOCKS,
};

/* Shared work: a copy that several threads do together, in steps. They are the lane, threads that
 * wait for the copy, and copiers, which help while a thread waits. */
struct sfr__shared_work {
	struct sfr__shared_work *next;
	enum sfr__shared_work_rank rank;
	/* Does one step, and releases the engine's mutex meanwhile. Waits for blocks only if
	 * `may_wait` is true. The last step removes the work from the list. Returns false if
	 * nothing can be done now. */
	bool (*step_locked)(struct sfr__shared_work *work, bool may_wait);
};

/* A save in flight, in the engine's list. Embedded in a ticket or a struct sfr_slot. */
struct sfr__save_in_flight {
	struct sfr__save_in_flight *next, *prev;
	pthread_t caller;     /* the thread that took the slot */
	bool in_call;         /* the caller has neither launched nor abandoned the save yet */
	uint32_t blocks_held; /* blocks of the pool that the save has now */

	/* constant */
	bool unordered;           /* does not count against max_in_flight (slots.c) */
	bool excluded_from_stats; /* a file of a larger save: statistics count only that save */
	bool uses_pool;           /* leases blocks, so the pool counts it (sfr__pool_add_save) */
};

enum {
	SFR__MAX_COPIERS = 15,   /* the upper bound of sfr_engine_opts.nr_copiers */
	SFR__MAX_UNORDERED = 64, /* unordered saves in flight; each has two file descriptors */
};

/* The engine. `mu` guards all fields unless a comment says otherwise. */
struct sfr_engine {
	struct sfr__mutex mu;
	pthread_cond_t cv_lane, cv_writer, cv_copier; /* wake threads for work, or to stop */
	/* wakes callers: a save, a snapshot, a slot or a call has changed */
	pthread_cond_t cv_state;
	atomic_uint refs;

	/* constant */
	uint64_t fork_generation;
	struct sfr_engine_opts opts;
	uint64_t pool_bytes; /* the cap of the pool */
	bool cap_is_default; /* the user did not choose the cap */

	struct sfr__pool *pool; /* NULL once it is freed, after the close */
	uint32_t nr_pool_users; /* snapshots and onloads: the pool is not freed before they end */
	uint32_t nr_pool_calls; /* threads in warm_up, trim or use_device: close waits for them */

	bool closing;  /* sfr_engine_close was called: no new save may begin */
	bool closed;   /* every save has ended, and close stops the threads */
	bool started;  /* the lane and all writers run */
	bool stopping; /* tells the threads to end */
	pthread_t lane;
	pthread_t *writers;
	uint32_t nr_writers; /* running */
	pthread_t copiers[SFR__MAX_COPIERS];
	uint32_t nr_copiers; /* running */
	uint64_t close_seq;  /* close waits for the log up to this entry; 0: not set yet, or none */

	struct sfr__cuda_lanes cuda_lanes;  /* has a lock of its own */
	SFR__QUEUE(struct sfr__task) tasks; /* for the writers */
	struct sfr__shared_work *shared;    /* a list of shared work, in the order of ranks */
	uint32_t nr_waiters;                /* threads that wait until a shared copy is done */

	struct sfr__save_in_flight *flights; /* a list of the saves in flight */
	uint32_t nr_in_flight;               /* length of this list */
	uint32_t nr_unordered;               /* how many of them are unordered */
	uint64_t last_seq;                   /* sfr_ticket.seq of the save that was admitted last */
	uint64_t nr_saves;                   /* saves that were ever admitted, for statistics */

	uint32_t nr_copying_snapshots; /* snapshots in the state COPYING */
	struct sfr__lot *common_lot;   /* from which small snapshots get memory (lot.c), or NULL */
};

/* ---- workers.c ---- */
/* Starts the lane and the writers unless they run. Returns 0 or -errno. */
int sfr__engine_start_locked(struct sfr_engine *engine);
/* Starts the copiers that do not run yet. May fail silently: copies then only take longer. */
void sfr__copiers_start_locked(struct sfr_engine *engine);
/* Ends and joins all threads of the engine, after they have done all queued work. */
void sfr__workers_stop(struct sfr_engine *engine);
/* Queues a task for the writers. They start tasks in the order of the queue. */
void sfr__task_push_locked(struct sfr_engine *engine, struct sfr__task *task);
/* Insert work into the list, after other work of its rank, and remove it. */
void sfr__shared_work_push_locked(struct sfr_engine *engine, struct sfr__shared_work *work);
void sfr__shared_work_remove_locked(struct sfr_engine *engine, const struct sfr__shared_work *work);
/* Wakes the threads that may do shared work, because a step may have become possible. */
void sfr__shared_work_wake_locked(struct sfr_engine *engine);

/* ---- engine.c ---- */
void sfr__engine_get(struct sfr_engine *engine); /* adds a reference; sfr_engine_put drops it */
/* Decrements nr_pool_users. The last user of a closed engine frees the pool. */
void sfr__engine_drop_pool_user(struct sfr_engine *engine);

/* ---- slots.c ---- */
/* Waits until a save may take a slot. `flags` are the save's flags. Two kinds of saves never wait:
 * a save with SFR_SAVE_NESTED, and an ordered save of a thread that already has a slot. If no slot
 * is free, they exceed max_in_flight, and *over_limit is set to true. Returns 0, or:
 *
 *   SFR_EAGAIN    no slot was free until the deadline
 *   SFR_EBUSY     no slot is free, and `flags` has SFR_SAVE_NO_WAIT
 *   SFR_ECLOSED */
int sfr__engine_wait_for_slot_locked(struct sfr_engine *engine, bool unordered, uint32_t flags,
				     uint64_t deadline_ns, bool *over_limit);
/* Give a save of the calling thread a slot, and take the slot back. */
void sfr__engine_add_save_locked(struct sfr_engine *engine, struct sfr__save_in_flight *flight);
void sfr__engine_remove_save_locked(struct sfr_engine *engine, struct sfr__save_in_flight *flight);
/* Returns how many saves in flight the calling thread has not launched yet. It must not wait for
 * their end, because it would wait for itself. `only_pool_users`: counts only saves that lease
 * blocks. */
uint32_t sfr__engine_count_own_unlaunched_locked(const struct sfr_engine *engine,
						 bool only_pool_users);

#endif
