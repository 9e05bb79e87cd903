/* A save, as the files of this folder share it: its ticket, its jobs, its parts. */
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

/* Work for a writer thread. Jobs live in their ticket, so queueing one cannot fail. */
enum sfr__job_kind {
	SFR__JOB_OPEN,  /* make the temporary */
	SFR__JOB_BLOCK, /* CRC and write one staged block */
	SFR__JOB_TAIL,  /* write the directory, sync the file */
	SFR__JOB_PLACE, /* unordered: commit it */
	SFR__JOB_CLEAN, /* the save has failed: remove the temporary, end the ticket */
};
struct sfr__job {
	struct sfr__task task;
	struct sfr_ticket *ticket;
	enum sfr__job_kind kind;
	/* SFR__JOB_BLOCK */
	char *mem;                /* what is written */
	struct sfr__block *block; /* it stands in a block of the pool, */
	size_t own_len;           /* or in so much memory of its own; neither: in a source */
	const struct sfr__run *run;
	uint32_t blk;
	bool summed; /* its pieces are in their entries' CRCs already, or will be when they are copied */
	struct sfr__job *parked;       /* the next one */
	struct sfr__host_block staged; /* while it is filled from host memory */
};

/* A run of the image that is filled from host memory; NULL: there is none. */
struct sfr__run_copy {
	struct sfr__host_copy copy;
	struct sfr_ticket *ticket;
	const struct sfr__run *run;
};

/* All of it is guarded by the engine's mutex unless a comment says otherwise. */
struct sfr_ticket {
	struct sfr_engine *engine; /* a reference */
	atomic_uint refs;          /* atomic */
	uint64_t fork_generation;  /* constant, as are the next six */
	uint64_t number;           /* counts the saves of the process: its name in a timeline */
	uint64_t seq;              /* order of admission: older saves get blocks first */
	uint32_t flags;
	uint32_t nr_blocks;    /* of the whole image */
	uint32_t nr_whole;     /* of them, those that need all their memory */
	struct sfr__image img; /* crc and crc_len: the lane's for what it copies, else guarded */
	void (*run_job)(struct sfr__task *task);
	struct sfr__job *jobs; /* nr_blocks, then OPEN, TAIL, PLACE, CLEAN */
	struct sfr__file file; /* writers until READY, then who commits */

	_Atomic enum sfr_state state; /* read without the lock, too */
	atomic_bool over;             /* the state is an end, and nothing changes any more */
	struct sfr_err err;           /* first error wins */

	/* facts from which sfr__ticket_step derives the state */
	bool opened, launched, abandoned, confirmed, tail_queued, synced;
	atomic_bool copied; /* read without the lock, too */
	bool in_place;      /* of parts: nothing is staged, writers read the sources; constant */
	uint32_t next_run, next_blk; /* of such: the next block to be handed to the writers */
	bool needs_blocks;           /* the pool counts it among the saves that do */
	bool lane_owns;              /* deferred bytes of the host are being handed out or copied */
	struct sfr__job *parked;     /* blocks that wait for the CRC of an entry's beginning */
	uint32_t cuda_out;           /* parts in devices that are not over */
	uint32_t cuda_unsubmitted;   /* of them, those that have copies to queue yet */
	uint32_t jobs_out;           /* queued or running */
	uint32_t blocks_back;        /* to the pool, written or not */
	uint32_t blocks_written;

	struct sfr__run_copy captured, deferred; /* of the host's */
	bool capture_done;                       /* only the capturing thread touches it */

	/* detectors: written by capture, read by the lane */
	struct sfr__samples samples; /* of the host's */
	uint32_t *sums; /* SFR_SAVE_CHECK_BYTES: CRC of each deferred entry at the call */

	struct sfr__cuda_part *parts; /* one for each device; the array is constant */
	uint32_t nr_parts;

	struct sfr__log_entry log;
	struct sfr__notice notice_copied, notice_ended;

	uint32_t peak_blocks;
	_Atomic uint64_t written_nbytes; /* read without the lock, too */
	uint64_t slot_wait_ns, block_wait_ns;
	uint64_t created_ns, launched_ns, staged_ns, ended_ns;
	uint32_t io_mode;
	bool over_slots;
	char fallback[SFR_NR_FALLBACKS][160];

	struct sfr__flight flight;
};

/* ---- save.c ---- */
/* Gives a leased block, staged, to the writers; `summed`: its pieces are in the CRCs already. */
void sfr__push_block_locked(struct sfr_ticket *t, const struct sfr__run *run, uint32_t blk,
			    struct sfr__block *block, bool summed);

/* ---- commit.c ---- */
extern const struct sfr__log_ops sfr__save_log_ops;
/* Renames the file and ends the ticket. False: it was cancelled in time. */
bool sfr__save_commit(struct sfr_ticket *t);

/* ---- stage_cuda.c ---- */
/* A new ticket's parts, from its image. -ENOMEM. */
int sfr__cuda_parts_new(struct sfr_ticket *t);
/* Queues the captured sources on devices and takes samples there. SFR_EAGAIN, SFR_EEXHAUSTED as
 * sfr_save_capture; other failures become the ticket's. */
int sfr__cuda_capture(struct sfr_ticket *t, uint64_t slice_ns);
/* The caller's streams wait for what was queued. */
void sfr__cuda_capture_end(struct sfr_ticket *t);
/* Hands the parts to their lanes, or lets go of them (an abandoned or failing save). */
void sfr__cuda_launch(struct sfr_ticket *t);

/* ---- ticket.c ---- */
/* Frees a ticket nobody holds, whatever of it was made. */
void sfr__ticket_free(struct sfr_ticket *t);
/* One of the ticket's jobs behind those of its blocks. */
struct sfr__job *sfr__ticket_job(struct sfr_ticket *t, enum sfr__job_kind kind);
/* How often a state followed another, in the whole process; for tests. */
unsigned sfr__ticket_arrows(enum sfr_state from, enum sfr_state to);
/* Every change of state goes through here. */
void sfr__ticket_set_state_locked(struct sfr_ticket *t, enum sfr_state state);
/* Whether a save has come so far, or will not come any further; with the lock. */
bool sfr__ticket_reached(const struct sfr_ticket *t, enum sfr_wait_for what);
/* Records what went wrong (first error wins) and lets the save run out. */
void sfr__ticket_fail_locked(struct sfr_ticket *t, const struct sfr_err *err);
void sfr__ticket_fail(struct sfr_ticket *t, const struct sfr_err *err);
bool sfr__ticket_failing(struct sfr_ticket *t); /* as sfr__ticket_failing_locked, with the lock */
/* Derives the state from the facts and starts what follows from it. */
void sfr__ticket_step_locked(struct sfr_ticket *t);
/* READY -> COMMITTING; false when the save was cancelled in time. */
bool sfr__ticket_begin_commit(struct sfr_ticket *t);
/* The last arrow, after all I/O: slot, log and notice are settled here. */
void sfr__ticket_finish(struct sfr_ticket *t, const struct sfr_err *err);
/* A lane has let go of the ticket: when none has it any more, its sources are free. */
void sfr__ticket_released_locked(struct sfr_ticket *t);
/* Waits, and helps to copy if that is what it waits for; not at all with deadline 0. 0, SFR_EAGAIN. */
int sfr__ticket_wait(struct sfr_ticket *t, enum sfr_wait_for what, uint64_t deadline_ns);
/* The next step may begin as far as the host is concerned: every copy has ended or is queued. */
bool sfr__ticket_is_open_locked(const struct sfr_ticket *t);
static inline bool sfr__ticket_failing_locked(const struct sfr_ticket *t)
{
	return t->err.code != 0;
}

static inline bool sfr__ticket_is_ordered(const struct sfr_ticket *t)
{
	return (t->flags & SFR_SAVE_UNORDERED) == 0;
}

/* Made before a fork that this process came out of: nothing of it may be touched. */
static inline bool sfr__ticket_foreign(const struct sfr_ticket *t)
{
	return t->fork_generation != sfr_fork_generation();
}

/* A block was leased for the save. */
static inline void sfr__ticket_take_block_locked(struct sfr_ticket *t)
{
	if (++t->flight.blocks_held > t->peak_blocks)
		t->peak_blocks = t->flight.blocks_held;
}
/* Gives one back that nothing was made of. */
void sfr__ticket_put_block(struct sfr_ticket *t, struct sfr__block *block);

/* The job of one block of a run. */
struct sfr__job *sfr__block_job(struct sfr_ticket *t, const struct sfr__run *run, uint32_t blk);

/* ---- in_place.c ---- */
/* The bytes of a block of a save of parts: never more than the pool's. */
uint64_t sfr__in_place_block_bytes(const struct sfr_engine *engine);
/* Hands the first blocks of a save of parts to the writers; and the next one, when one is written. */
void sfr__in_place_begin_locked(struct sfr_ticket *t);
void sfr__in_place_next_locked(struct sfr_ticket *t);
/* A writer prepares such a block: the memory that will be written, and its pieces' CRCs. 0, or -1 and
 * `err` says why. */
int sfr__in_place_prepare(struct sfr_ticket *t, struct sfr__job *job, struct sfr_err *err);
/* Gives that memory back, whatever became of the block. */
void sfr__in_place_release(struct sfr__job *job);

/* ---- stage_host.c ---- */
/* Says what will be copied from host memory, when the save is admitted. */
void sfr__runs_aim(struct sfr_ticket *t);
/* What stands between the tensors' bytes. */
void sfr__stage_rest(struct sfr_ticket *t, const struct sfr__seg *seg, char *dst);
/* Asks for the first bytes of an entry that is copied soon. */
void sfr__prefetch_entry(const struct sfr_ticket *t, uint32_t entry);
/* Takes samples of every deferred source in host memory. -ENOMEM. */
int sfr__take_samples(struct sfr_ticket *t);
/* The sources of a run, for sampling: from malloc, or NULL. */
struct sfr__sampled *sfr__run_sources(const struct sfr_ticket *t, const struct sfr__run *run);
/* Compares what was staged of an entry with the samples. The index of a torn source, or -1. */
int64_t sfr__check_piece(const struct sfr_ticket *t, const struct sfr__samples *samples,
			 uint32_t entry, uint64_t off, const char *staged, size_t len);
/* The same with the sums (SFR_SAVE_CHECK_BYTES), where pieces come in ascending order. */
int64_t sfr__check_sum(struct sfr_ticket *t, uint32_t entry, uint64_t off, const char *staged,
		       size_t len);

/* ---- write.c ---- */
/* Does a job, on a writer's thread. */
void sfr__job_run(struct sfr__task *task);
/* ---- jobs.c ---- */
void sfr__job_push_locked(struct sfr__job *job);
/* Adds the CRC of a part of an entry to it: parts come in any order. Whether all are there now. */
bool sfr__add_crc(struct sfr_ticket *t, const struct sfr__seg *seg, uint32_t crc);
/* Blocks that wait for a CRC are looked at again. */
void sfr__unpark_locked(struct sfr_ticket *t);

#endif
