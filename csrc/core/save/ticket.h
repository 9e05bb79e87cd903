/* The ticket: the object of one save. */
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
	/* Only `crc` and `crc_len` of its entries change. The engine's mutex guards these two,
	 * except while one thread copies all bytes of an entry. */
	struct sfr__image img;
	bool in_place; /* a file of parts: writers read the sources, nothing is copied before */
	/* The edge pages, which are pages of the file with bytes of several blocks. NULL: none.
	 * Each writer copies the bytes of its block to them, and the TAIL job writes them. */
	char *edges;
	uint32_t nr_blocks;    /* blocks of the image */
	uint32_t nr_whole;     /* how many of them need all the memory of a pool block */
	struct sfr__job *jobs; /* one for each block, then OPEN, TAIL, RENAME, CLEAN */
	/* Always sfr__job_run (write.c). A pointer, so that jobs.c does not depend on write.c. */
	void (*run_job)(struct sfr__task *task);
};

/* The events of the save so far, in any order. sfr__ticket_advance_state_locked derives the state
 * from these facts. */
struct sfr__save_milestones {
	bool opened;          /* the temporary file is open; for a stream: the OPEN job has run */
	bool launched;        /* sfr_save_launch was called */
	bool abandoned;       /* sfr_save_abandon was called */
	bool tail_queued;     /* the TAIL job was queued */
	bool synced;          /* the file is synced; for a stream: its last piece was taken */
	bool torn_check_done; /* sfr_save_give_verdict was called, or nothing is deferred */
	atomic_bool copied;   /* every source is copied; also read without the lock */
	/* Written to the file. For a stream: blocks that writers have put into it, and bytes that
	 * its caller has sent and given back. */
	uint32_t blocks_written;
	_Atomic uint64_t written_nbytes; /* also read without the lock */
};

/* The copy from host memory that fills one extent. */
struct sfr__extent_copy {
	struct sfr__host_copy copy;
	struct sfr_ticket *ticket;
	const struct sfr__extent *extent; /* NULL: nothing is to be copied */
};

/* How the sources get into blocks, and what detects changed sources. The caller's thread sets this
 * up in the capture; afterwards lanes use it. */
struct sfr__save_staging {
	struct sfr__extent_copy captured, deferred; /* host memory */
	struct sfr__device_state *devices;          /* one for each device that has sources */
	uint32_t nr_devices;
	bool capture_done;           /* used only by the caller's thread */
	struct sfr__samples samples; /* of deferred sources in host memory */
	/* NULL without SFR_SAVE_CHECK_BYTES. Of deferred entry i, check_crcs[i] is the CRC at the
	 * call, and check_crcs[nr_entries + i] is the CRC of the copy. */
	uint32_t *check_crcs;
};

/* The work that other threads do for the save. When the save ends, all of it is done. */
struct sfr__save_pending_work {
	bool host_copying;       /* deferred bytes of the host are still to be copied */
	uint32_t nr_transfers;   /* devices whose transfer has begun and is not over */
	uint32_t nr_queueing;    /* devices to which copies may still be queued */
	uint32_t nr_jobs;        /* jobs that are queued, running, parked or in the stream */
	struct sfr__job *parked; /* a list of blocks that wait for the CRC of an entry */
	bool joined_pool; /* sfr__pool_add_save was called, and sfr__pool_remove_save was not yet */
	uint32_t blocks_returned; /* blocks given back to the pool, written or not */
	/* for a file of parts: */
	uint32_t next_extent, next_blk; /* the next block to queue */
	uint64_t pushed_nbytes;         /* bytes of the blocks queued so far */
	uint32_t blocks_leased;         /* blocks leased so far, returned or not */
};

/* A save with SFR_SAVE_STREAM. */
struct sfr__save_stream {
	uint64_t sent;     /* bytes of the file that the caller has taken so far */
	uint32_t next_blk; /* index in plan.jobs of the next block to take */
	bool ended;        /* the caller has taken the empty piece at the end */
};

/* The engine's mutex guards every field unless its comment says otherwise. */
struct sfr_ticket {
	/* constant */
	struct sfr_engine *engine; /* the ticket holds a reference on it */
	uint64_t fork_generation;  /* of the process that made the ticket */
	uint64_t number;           /* unique in the process; names the save in a trace */
	uint64_t seq;              /* order of admission: saves with a lower one get blocks first */
	uint32_t flags;            /* SFR_SAVE_* */

	atomic_uint refs;

	_Atomic enum sfr_state state; /* also read without the lock */
	atomic_bool over;             /* the state is final, and nothing changes any more */
	struct sfr_err err;           /* the first error */

	struct sfr__save_plan plan;
	struct sfr__save_milestones facts;
	struct sfr__save_staging staging;
	struct sfr__save_pending_work work;
	struct sfr__save_stream stream;
	struct sfr_report report; /* except `state` and `err`, which sfr_save_report adds */

	struct sfr__file file; /* used by writers until READY, then by the committing thread */
	struct sfr__save_in_flight flight; /* its slot in the engine */
	struct sfr__log_entry log;         /* its entry in the log, if the save is ordered */
	struct sfr__notice notice_copied, notice_ended;
};

/* ---- ticket.c ---- */
/* Frees a ticket that has no references left, also one that is only partly set up. */
void sfr__ticket_free(struct sfr_ticket *t);
/* Returns how often saves of this process went from one state to the other; for tests. */
unsigned sfr__ticket_nr_transitions(enum sfr_state from, enum sfr_state to);
/* Sets the state, and wakes threads that wait for it. Nothing else changes the state. */
void sfr__ticket_set_state_locked(struct sfr_ticket *t, enum sfr_state state);
/* Returns whether a wait for `what` is over: the save has reached this point, or has ended. */
bool sfr__ticket_has_reached_locked(const struct sfr_ticket *t, enum sfr_wait_for what);
/* Records an error; only the first error is kept. Changes the state to ENDING, unless the save is
 * not admitted yet, or is being renamed already. */
void sfr__ticket_fail_locked(struct sfr_ticket *t, const struct sfr_err *err);
void sfr__ticket_fail(struct sfr_ticket *t, const struct sfr_err *err);
bool sfr__ticket_is_failing(struct sfr_ticket *t);
/* Derives the state from t->facts, and queues the jobs that are possible now. Called after every
 * change of t->facts or t->work. */
void sfr__ticket_advance_state_locked(struct sfr_ticket *t);
/* Changes the state from READY to COMMITTING. Returns false if the state is not READY, because the
 * save was cancelled. */
bool sfr__ticket_begin_commit(struct sfr_ticket *t);
/* Ends the save after all its I/O: sets the final state, gives the slot back, ends the entry in the
 * log and posts the notice. `err` is the error of the commit, or NULL. The caller must not use the
 * ticket afterwards: it may be freed. */
void sfr__ticket_finish(struct sfr_ticket *t, const struct sfr_err *err);
/* Called when a lane has ended its copies. Does nothing while another lane copies. Otherwise sets
 * facts.copied, unless the save is failing, and posts the notice COPIED. */
void sfr__ticket_set_copied_if_done_locked(struct sfr_ticket *t);
/* Returns whether the next optimizer step may run: every copy has ended or is queued on a device,
 * or the save is failing. */
bool sfr__ticket_gate_is_open_locked(const struct sfr_ticket *t);
/* Gives a leased block back to the pool, without writing it. */
void sfr__ticket_put_block(struct sfr_ticket *t, struct sfr__block *block);

/* Returns whether the save has an error. Its file will not be renamed. */
static inline bool sfr__ticket_is_failing_locked(const struct sfr_ticket *t)
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

/* Returns whether this process inherited the ticket by a fork. It must then not be touched. */
static inline bool sfr__ticket_is_inherited(const struct sfr_ticket *t)
{
	return t->fork_generation != sfr_fork_generation();
}

/* Counts a block that was just leased. A stream leases blocks in the order of the file, so this
 * also wakes the lanes that wait for their turn to lease. */
static inline void sfr__ticket_count_block_locked(struct sfr_ticket *t)
{
	uint64_t bytes;

	t->flight.blocks_held++;
	t->work.blocks_leased++;
	bytes = t->flight.blocks_held * t->plan.img.block_bytes;
	if (sfr__ticket_is_stream(t)) {
		sfr__shared_work_wake_locked(t->engine);
		pthread_cond_broadcast(&t->engine->cv_state);
	}
	if (bytes > t->report.peak_pool_bytes)
		t->report.peak_pool_bytes = bytes;
}

/* ---- wait.c ---- */
/* Waits until the save has reached `what`. Helps to copy if `what` is SFR_WAIT_COPIED. Does not
 * wait if the deadline is 0. Returns 0 or SFR_EAGAIN. */
int sfr__ticket_wait(struct sfr_ticket *t, enum sfr_wait_for what, uint64_t deadline_ns);

#endif
