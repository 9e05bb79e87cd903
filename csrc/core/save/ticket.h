/* The ticket: everything that is known of one save. */
#ifndef SFR_SAVE_TICKET_H
#define SFR_SAVE_TICKET_H

#include <stdatomic.h>

#include "sfr/parts.h"
#include "sfr/save.h"
#include "archive/layout.h"
#include "commit/log.h"
#include "engine/engine.h"
#include "file/file.h"
#include "stage/host.h"
#include "stage/samples.h"

struct sfr__job;

/* The bytes to be written. Constant once the save is admitted. */
struct sfr__save_plan {
	/* Only crc and crc_len of its entries change. The engine's mutex guards them, unless one
	 * thread copies all bytes of the entry. */
	struct sfr__image img;
	bool in_place; /* a file of parts: nothing is staged, writers read the sources */
	/* Memory for the image's edge pages, in ascending order; NULL: none. Writers copy their
	 * blocks' shares to it, and the TAIL job writes it. */
	char *edges;
	uint32_t nr_blocks;    /* of the image */
	uint32_t nr_whole;     /* blocks that need all the memory of a pool block */
	struct sfr__job *jobs; /* one for each block, then OPEN, TAIL, RENAME, CLEAN */
	/* Runs a job on a writer: sfr__job_run, which jobs.c must not call by name, because write.c
	 * calls jobs.c. */
	void (*run_job)(struct sfr__task *task);
};

/* The events of the save so far, in any order. sfr__ticket_step_locked derives the state from
 * them. */
struct sfr__save_facts {
	bool opened;                     /* the temporary is open; a stream: its OPEN job has run */
	bool launched, abandoned;        /* sfr_save_launch or sfr_save_abandon was called */
	bool tail_queued;                /* the TAIL job was queued */
	bool synced;                     /* the file is synced; a stream: its end was taken */
	bool confirmed;                  /* the caller has given its verdict, or need not */
	atomic_bool copied;              /* every source is copied; also read without the lock */
	uint32_t blocks_written;         /* to the file, or put into the stream */
	_Atomic uint64_t written_nbytes; /* bytes of the file; also read without the lock */
};

/* The copy from host memory that fills one extent; extent is NULL if there is none. */
struct sfr__extent_copy {
	struct sfr__host_copy copy;
	struct sfr_ticket *ticket;
	const struct sfr__extent *extent;
};

/* How the sources get into blocks, and what shows whether they have changed. The capture sets this
 * up, then lanes use it. */
struct sfr__save_staging {
	struct sfr__extent_copy captured, deferred; /* host memory */
	struct sfr__device_state *devices;          /* one for each device that has sources */
	uint32_t nr_devices;
	bool capture_done;           /* used only by the capturing thread */
	struct sfr__samples samples; /* of deferred sources in host memory */
	/* With SFR_SAVE_CHECK_BYTES, else NULL. sums[i] is the CRC of deferred entry i at the call,
	 * and sums[nr_entries + i] that of its copy. */
	uint32_t *sums;
};

/* The work that other threads do for the save. None is left when the save ends. */
struct sfr__save_sharing {
	bool host_copying;        /* deferred bytes of the host are still to be copied */
	uint32_t nr_transfers;    /* devices whose transfer has begun and is not over */
	uint32_t nr_queueing;     /* devices to which copies may still be queued */
	uint32_t nr_jobs;         /* jobs that are queued, running, parked or in the stream */
	struct sfr__job *parked;  /* blocks that wait for the CRC of an entry */
	bool needs_blocks;        /* sfr__pool_join was called, and sfr__pool_leave was not */
	uint32_t blocks_returned; /* blocks given back to the pool, written or not */
	/* of a save of parts: the next block to queue, and the bytes of the blocks queued so far */
	uint32_t next_extent, next_blk;
	uint64_t pushed_nbytes;
	uint32_t blocks_leased; /* blocks leased so far, returned or not */
};

/* A save with SFR_SAVE_STREAM. */
struct sfr__save_stream {
	uint64_t sent;     /* bytes of the file that the caller has taken */
	uint32_t next_blk; /* index in plan.jobs of the next block to take */
	bool ended;        /* the caller has taken the end */
};

/* The engine's mutex guards every field unless its comment says otherwise. */
struct sfr_ticket {
	struct sfr_engine *engine; /* holds a reference; constant, as are the next four */
	uint64_t fork_generation;
	uint64_t number; /* among the process's saves; names the save in a trace */
	uint64_t seq;    /* order of admission: older saves get blocks first */
	uint32_t flags;  /* SFR_SAVE_* */
	atomic_uint refs;

	_Atomic enum sfr_state state; /* also read without the lock */
	atomic_bool over;             /* the state is final, and nothing changes any more */
	struct sfr_err err;           /* the first error */

	struct sfr__save_plan plan;
	struct sfr__save_facts facts;
	struct sfr__save_staging staging;
	struct sfr__save_sharing sharing;
	struct sfr__save_stream stream;
	struct sfr_report report; /* without state and err */

	struct sfr__file file;     /* writers use it until READY, then the committing thread */
	struct sfr__flight flight; /* its slot in the engine */
	struct sfr__log_entry log; /* its entry in the log, if the save is ordered */
	struct sfr__notice notice_copied, notice_ended;
};

/* ---- ticket.c ---- */
/* Frees a ticket without references, also a half-made one. */
void sfr__ticket_free(struct sfr_ticket *t);
/* Returns how often saves went from one state to the other; for tests. */
unsigned sfr__ticket_arrows(enum sfr_state from, enum sfr_state to);
/* Sets the state. Nothing else changes it. */
void sfr__ticket_set_state_locked(struct sfr_ticket *t, enum sfr_state state);
/* Returns whether a wait for `what` is over: the save has got there, or has ended. */
bool sfr__ticket_reached_locked(const struct sfr_ticket *t, enum sfr_wait_for what);
/* Records an error; only the first is kept. Changes the state to ENDING, if the save was admitted
 * and is not being renamed. */
void sfr__ticket_fail_locked(struct sfr_ticket *t, const struct sfr_err *err);
void sfr__ticket_fail(struct sfr_ticket *t, const struct sfr_err *err);
bool sfr__ticket_failing(struct sfr_ticket *t);
/* Derives the state from the facts, and starts what follows. Called after every change of a fact or
 * of the work that is left. */
void sfr__ticket_step_locked(struct sfr_ticket *t);
/* Changes the state from READY to COMMITTING. Returns false if the save was cancelled before. */
bool sfr__ticket_begin_commit(struct sfr_ticket *t);
/* Ends the save after all its I/O: sets the final state, gives the slot back, ends the entry in the
 * log and posts the notice. `err` is the error of the commit, or NULL. The ticket may be freed. */
void sfr__ticket_finish(struct sfr_ticket *t, const struct sfr_err *err);
/* Called when a lane has ended its copies. If it was the last lane, records that nothing reads the
 * sources any more, and posts the notice COPIED. */
void sfr__ticket_copies_ended_locked(struct sfr_ticket *t);
/* Returns whether the gate lets the next step through: every copy has ended or is queued on a
 * device, or the save is failing. */
bool sfr__ticket_gate_is_open_locked(const struct sfr_ticket *t);
/* Gives back a leased block that is not used. */
void sfr__ticket_put_block(struct sfr_ticket *t, struct sfr__block *block);

/* Returns whether the save has an error. Its file will not be renamed. */
static inline bool sfr__ticket_failing_locked(const struct sfr_ticket *t)
{
	return t->err.code != 0;
}

/* Returns whether the save has no file, but hands its bytes to the caller. */
static inline bool sfr__ticket_is_stream(const struct sfr_ticket *t)
{
	return (t->flags & SFR_SAVE_STREAM) != 0;
}

/* Returns whether the log renames the save's file. Otherwise a writer does. */
static inline bool sfr__ticket_is_ordered(const struct sfr_ticket *t)
{
	return (t->flags & SFR_SAVE_UNORDERED) == 0;
}

/* Returns whether the ticket belongs to a parent process. Then nothing may touch it. */
static inline bool sfr__ticket_is_foreign(const struct sfr_ticket *t)
{
	return t->fork_generation != sfr_fork_generation();
}

/* Counts a block that was just leased. A stream leases blocks in the order of the file, so lanes
 * that wait for the next block are woken. */
static inline void sfr__ticket_count_block_locked(struct sfr_ticket *t)
{
	uint64_t bytes;

	t->flight.blocks_held++;
	t->sharing.blocks_leased++;
	bytes = t->flight.blocks_held * t->plan.img.block_bytes;
	if (sfr__ticket_is_stream(t)) {
		sfr__shared_wake_locked(t->engine);
		pthread_cond_broadcast(&t->engine->cv_state);
	}
	if (bytes > t->report.peak_pool_bytes)
		t->report.peak_pool_bytes = bytes;
}

/* ---- wait.c ---- */
/* Waits until the save has got to `what`; helps to copy if that is SFR_WAIT_COPIED. A deadline of 0
 * does not wait. Returns 0 or SFR_EAGAIN. */
int sfr__ticket_wait(struct sfr_ticket *t, enum sfr_wait_for what, uint64_t deadline_ns);

#endif
