/* The parts of a save that this folder's files share: the ticket, its jobs and its device parts. */
#ifndef SFR_SAVE_H
#define SFR_SAVE_H

#include <stdatomic.h>

#include "sfr/parts.h"
#include "sfr/save.h"
#include "archive/layout.h"
#include "commit/log.h"
#include "engine/engine.h"
#include "file/file.h"
#include "stage/host.h"
#include "stage/samples.h"

/* A job for a writer thread. Jobs live in their ticket, so queueing one cannot fail. */
enum sfr__job_kind {
	SFR__JOB_OPEN,  /* open the temporary */
	SFR__JOB_BLOCK, /* CRC and write one staged block */
	SFR__JOB_TAIL,  /* write the tail, sync the file */
	SFR__JOB_PLACE, /* commit a save without order */
	SFR__JOB_CLEAN, /* a failed save: remove the temporary, end the ticket */
};
struct sfr__job {
	struct sfr__task task;
	struct sfr_ticket *ticket;
	enum sfr__job_kind kind;
	/* only for SFR__JOB_BLOCK */
	char *mem;                /* the bytes to write */
	struct sfr__block *block; /* the pool's block that contains them, */
	/* or the length of memory of its own; with neither, mem is inside a source */
	size_t own_len;
	const struct sfr__run *run;
	uint32_t blk;
	bool summed; /* its bytes are in their entries' CRCs, or will be when they are copied */
	struct sfr__job *parked;       /* next parked job */
	struct sfr__host_block staged; /* while the block is filled from host memory */
};

/* A run of the image that is filled from host memory; run is NULL if there is none. */
struct sfr__run_copy {
	struct sfr__host_copy copy;
	struct sfr_ticket *ticket;
	const struct sfr__run *run;
};

/* Every field is guarded by the engine's mutex unless its comment says otherwise. */
struct sfr_ticket {
	struct sfr_engine *engine; /* holds a reference */
	atomic_uint refs;          /* atomic */
	uint64_t fork_generation;  /* constant, like the next six */
	/* number among the process's saves; names the save in a timeline */
	uint64_t number;
	uint64_t seq; /* order of admission: older saves get blocks first */
	uint32_t flags;
	uint32_t nr_blocks; /* in the whole image */
	uint32_t nr_whole;  /* how many of them need a whole block of memory */
	/* crc and crc_len: the copying thread's for entries inside its bytes, else guarded */
	struct sfr__image img;
	void (*run_job)(struct sfr__task *task);
	struct sfr__job *jobs; /* nr_blocks, then OPEN, TAIL, PLACE, CLEAN */
	struct sfr__file file; /* writers use it until READY, then the committing thread */

	_Atomic enum sfr_state state; /* also read without the lock */
	atomic_bool over;             /* the state is final, and nothing changes any more */
	struct sfr_err err;           /* the first error is kept */

	/* facts from which sfr__ticket_step_locked derives the state */
	bool opened, launched, abandoned, confirmed, tail_queued, synced;
	atomic_bool copied; /* also read without the lock */
	/* a save of parts: nothing is staged, writers read the sources; constant */
	bool in_place;
	uint32_t next_run, next_blk; /* of such a save: the next block to queue */
	bool needs_blocks;           /* the pool counts this save among those that need blocks */
	bool lane_owns;              /* deferred bytes of the host are being handed out or copied */
	struct sfr__job *parked;     /* blocks that wait for the CRC of an entry's earlier bytes */
	uint32_t cuda_out;           /* device parts that are not over */
	uint32_t cuda_unsubmitted;   /* device parts that still have copies to queue */
	uint32_t jobs_out;           /* jobs that are queued or running */
	uint32_t blocks_back;        /* blocks given back to the pool, written or not */
	uint32_t blocks_written;

	struct sfr__run_copy captured, deferred; /* runs of host memory */
	bool capture_done;                       /* used only by the capturing thread */

	/* detectors of torn copies: written by the capture, read by the lane */
	struct sfr__samples samples; /* of host memory */
	/* SFR_SAVE_CHECK_BYTES: CRC of each deferred entry at the call, then of its copy */
	uint32_t *sums;

	struct sfr__cuda_part *parts; /* one for each device; the array is constant */
	uint32_t nr_parts;

	struct sfr__log_entry log;
	struct sfr__notice notice_copied, notice_ended;

	uint32_t peak_blocks;
	_Atomic uint64_t written_nbytes; /* also read without the lock */
	uint64_t slot_wait_ns, block_wait_ns;
	uint64_t created_ns, launched_ns, staged_ns, ended_ns;
	uint32_t io_mode;
	bool over_slots;
	char fallback[SFR_NR_FALLBACKS][160];

	struct sfr__flight flight;
};

/* ---- save.c ---- */
/* Queues a staged block for the writers. summed: its bytes are in the CRCs already. */
void sfr__push_block_locked(struct sfr_ticket *t, const struct sfr__run *run, uint32_t blk,
			    struct sfr__block *block, bool summed);

/* ---- commit.c ---- */
extern const struct sfr__log_ops sfr__save_log_ops;
/* Renames the file and ends the ticket. False: the save was cancelled before. */
bool sfr__save_commit(struct sfr_ticket *t);

/* ---- stage_device.c ---- */
/* Makes a new ticket's device parts from its image. -ENOMEM. */
int sfr__cuda_parts_new(struct sfr_ticket *t);
/* Queues the copies of captured sources on devices, takes samples there, and makes the caller's
 * streams wait for both. SFR_EAGAIN and
 * SFR_EEXHAUSTED as sfr_save_capture; other failures become the ticket's. */
int sfr__cuda_capture(struct sfr_ticket *t, uint64_t slice_ns);
/* Hands the device parts to their lanes, or releases them if the save was abandoned or is
 * failing. */
void sfr__cuda_launch(struct sfr_ticket *t);

/* ---- ticket.c ---- */
/* Frees a ticket without references, including a half-made one. */
void sfr__ticket_free(struct sfr_ticket *t);
/* Returns one of the ticket's jobs that are not for a block. */
struct sfr__job *sfr__ticket_job(struct sfr_ticket *t, enum sfr__job_kind kind);
/* Returns how often the process took an arrow between states; for tests. */
unsigned sfr__ticket_arrows(enum sfr_state from, enum sfr_state to);
/* Sets the state; every change of state goes through here. */
void sfr__ticket_set_state_locked(struct sfr_ticket *t, enum sfr_state state);
/* Whether a save has reached a point, or will not get any further. Needs the lock. */
bool sfr__ticket_reached(const struct sfr_ticket *t, enum sfr_wait_for what);
/* Records an error (the first is kept) and lets the save end. */
void sfr__ticket_fail_locked(struct sfr_ticket *t, const struct sfr_err *err);
void sfr__ticket_fail(struct sfr_ticket *t, const struct sfr_err *err);
/* takes the lock; else as sfr__ticket_failing_locked */
bool sfr__ticket_failing(struct sfr_ticket *t);
/* Derives the state from the facts, and starts what follows from it. */
void sfr__ticket_step_locked(struct sfr_ticket *t);
/* READY -> COMMITTING. False if the save was cancelled before. */
bool sfr__ticket_begin_commit(struct sfr_ticket *t);
/* Takes the last arrow, after all I/O, and settles slot, log and notice. */
void sfr__ticket_finish(struct sfr_ticket *t, const struct sfr_err *err);
/* Called when a lane has released the ticket. If no lane has it any more, its sources are free. */
void sfr__ticket_released_locked(struct sfr_ticket *t);
/* Waits, and helps to copy when waiting for copies. Deadline 0 does not wait. 0 or SFR_EAGAIN. */
int sfr__ticket_wait(struct sfr_ticket *t, enum sfr_wait_for what, uint64_t deadline_ns);
/* Whether the host lets the next step begin: every copy has ended or is queued on a device. */
bool sfr__ticket_is_open_locked(const struct sfr_ticket *t);
static inline bool sfr__ticket_failing_locked(const struct sfr_ticket *t)
{
	return t->err.code != 0;
}

static inline bool sfr__ticket_is_ordered(const struct sfr_ticket *t)
{
	return (t->flags & SFR_SAVE_UNORDERED) == 0;
}

/* Whether the ticket was made before a fork that created this process; then nothing may touch
 * it. */
static inline bool sfr__ticket_foreign(const struct sfr_ticket *t)
{
	return t->fork_generation != sfr_fork_generation();
}

/* Counts a block that was leased for the save. */
static inline void sfr__ticket_take_block_locked(struct sfr_ticket *t)
{
	if (++t->flight.blocks_held > t->peak_blocks)
		t->peak_blocks = t->flight.blocks_held;
}
/* Gives back a leased block that is not used. */
void sfr__ticket_put_block(struct sfr_ticket *t, struct sfr__block *block);

/* Returns the job of one block of a run. */
struct sfr__job *sfr__block_job(struct sfr_ticket *t, const struct sfr__run *run, uint32_t blk);

/* ---- in_place.c ---- */
/* Returns the block size of a save of parts: never more than the pool's. */
uint64_t sfr__in_place_block_bytes(const struct sfr_engine *engine);
/* begin queues the first blocks of a save of parts; next queues one more, when one is written. */
void sfr__in_place_begin_locked(struct sfr_ticket *t);
void sfr__in_place_next_locked(struct sfr_ticket *t);
/* Prepares such a block on a writer: the memory to write, and the CRCs of its bytes. 0, or -1 with
 * the reason in err. */
int sfr__in_place_prepare(struct sfr_ticket *t, struct sfr__job *job, struct sfr_err *err);
/* Gives that memory back, whether or not the block was written. */
void sfr__in_place_release(struct sfr__job *job);

/* ---- stage_host.c ---- */
/* Sets up the copies of host memory, at admission. */
void sfr__runs_aim(struct sfr_ticket *t);
/* Writes the bytes between tensors: headers and padding. */
void sfr__stage_rest(struct sfr_ticket *t, const struct sfr__seg *seg, char *dst);
/* Prefetches the first bytes of an entry that is copied soon. */
void sfr__prefetch_entry(const struct sfr_ticket *t, uint32_t entry);
/* Takes samples of every deferred source in host memory. -ENOMEM. */
int sfr__take_samples(struct sfr_ticket *t);
/* Returns the sources of a run for sampling, from malloc, or NULL. */
struct sfr__sampled *sfr__run_sources(const struct sfr_ticket *t, const struct sfr__run *run);
/* Compares staged bytes of an entry with the samples. Returns the index of a torn source, or -1. */
int64_t sfr__check_piece(const struct sfr_ticket *t, const struct sfr__samples *samples,
			 uint32_t entry, uint64_t off, const char *staged, size_t len);
/* The same with checksums (SFR_SAVE_CHECK_BYTES); an entry's bytes must come in ascending order. */
int64_t sfr__check_sum(struct sfr_ticket *t, uint32_t entry, uint64_t off, const char *staged,
		       size_t len);

/* ---- write.c ---- */
/* Runs a job on a writer's thread. */
void sfr__job_run(struct sfr__task *task);
/* ---- jobs.c ---- */
void sfr__job_push_locked(struct sfr__job *job);
/* Adds the CRC of a stretch of an entry, in any order. Returns whether the entry is complete. */
bool sfr__add_crc(struct sfr_ticket *t, const struct sfr__seg *seg, uint32_t crc);
/* Queues again the blocks that wait for a CRC. */
void sfr__unpark_locked(struct sfr_ticket *t);

#endif
