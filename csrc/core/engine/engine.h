/* The engine: slots, queues, threads. See engine.c. */
#ifndef SFR_ENGINE_H
#define SFR_ENGINE_H

#include <stdatomic.h>

#include "memory/pool.h"

struct sfr__cuda_lane;
struct sfr__job;

/* All of it is guarded by `mu` unless a comment says otherwise. */
struct sfr_engine {
	struct sfr__mutex mu;
	pthread_cond_t cv_lane;   /* lane queue or stopping */
	pthread_cond_t cv_writer; /* writer queue or stopping */
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

	struct sfr__cuda_lane *cuda_lanes;        /* stay until the engine is freed */
	struct sfr_ticket *lane_head, *lane_tail; /* whose deferred bytes are handed out */
	uint32_t nr_awaiting;                     /* threads that wait until some are copied */
	struct sfr__job *job_head, *job_tail;
	struct sfr_ticket *tickets;                         /* in flight */
	struct sfr_snapshot *snapshot_head, *snapshot_tail; /* for the lane */
	uint32_t nr_snapshots; /* that have, or wait for, memory of the pool: it stays so long */
	uint32_t nr_copying;   /* of them, at the lane */
	uint32_t nr_in_flight;
	uint32_t nr_pool_users; /* threads in warm_up or trim */
	uint64_t next_seq, nr_saves;
};

int sfr__engine_start_locked(struct sfr_engine *engine);
void sfr__engine_get(struct sfr_engine *engine);
/* There may be memory to make: threads with nothing else to do look round. */
void sfr__engine_wake_idle_locked(struct sfr_engine *engine);
/* Such a thread makes some, without the lock, until `go_on`(engine) says no. False when there was
 * nothing to do. */
bool sfr__engine_supply_locked(struct sfr_engine *engine, bool (*go_on)(void *engine));
/* Of the saves in flight, those that this very thread is capturing, further down its stack: it
 * cannot wait for them. */
uint32_t sfr__engine_nr_own_locked(const struct sfr_engine *engine);
/* A snapshot has given back its memory, or got none. The last one of a closed engine frees the
 * pool. */
void sfr__engine_snapshot_gone(struct sfr_engine *engine);

#endif
