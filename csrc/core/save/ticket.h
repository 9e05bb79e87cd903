/* Engine and ticket as engine.c, ticket.c, lane.c, writer.c and log.c share them.
 *
 * Everything in both structures is guarded by engine->mu unless a comment says otherwise.
 */
#ifndef SFR_TICKET_H
#define SFR_TICKET_H

#include <stdatomic.h>

#include "base/sfr_internal.h"

/* Work for a writer thread. Jobs live in their ticket, so queueing one cannot fail. */
enum sfr__job_kind {
	SFR__JOB_OPEN,  /* make the temporary */
	SFR__JOB_BLOCK, /* CRC and write one staged block */
	SFR__JOB_TAIL,  /* write the directory, sync the file */
	SFR__JOB_CLEAN, /* the save has failed: remove the temporary, end the ticket */
};
struct sfr__job {
	struct sfr__job *next;
	struct sfr_ticket *ticket;
	enum sfr__job_kind kind;
	/* SFR__JOB_BLOCK */
	struct sfr__block *block;
	const struct sfr__run *run;
	uint32_t blk;
	bool summed; /* its pieces are in their entries' CRCs already */
};

/* Who fills a block. */
enum sfr__stager {
	SFR__BY_CALLER, /* in the call: as fast as can be */
	SFR__BY_LANE,   /* adds up CRCs and compares with the samples on the way */
};

/* Samples of one save or snapshot at most, and the bytes of one: a cache line. */
#define SFR__MAX_SAMPLES 4096
#define SFR__SAMPLE_LEN 64

/* One cache line of a deferred source as it was at the call. */
struct sfr__sample {
	uint32_t entry; /* ascending, then off ascending: the order in which the lane copies */
	uint32_t len;
	uint64_t off;
	unsigned char bytes[SFR__SAMPLE_LEN];
};

/* Samples of the deferred sources of one run. */
struct sfr__samples {
	struct sfr__sample *items;
	uint32_t nr, pos; /* those before pos were compared */
};

/* A save's, remove's or other work's place in the process's log; guarded by the log's mutex. */
enum sfr__log_kind { SFR__LOG_SAVE, SFR__LOG_REMOVE, SFR__LOG_WORK };
struct sfr__log_entry {
	struct sfr__log_entry *next;
	enum sfr__log_kind kind;
	uint64_t seq;
	char *key;
	struct sfr_ticket *ticket;  /* SAVE */
	struct sfr_log_work *work;  /* WORK */
	struct sfr_log_load *loads; /* opened when this entry has ended */
	bool ready;                 /* SAVE: may be committed; WORK: it is its turn */
	bool taken;                 /* WORK: somebody does it */
	bool ended, ok;
};

struct sfr_ticket {
	struct sfr_engine *engine; /* a reference */
	atomic_uint refs;          /* atomic */
	uint64_t fork_generation;  /* constant, as are the next six */
	uint64_t number;           /* counts the saves of the process: its name in a timeline */
	uint64_t seq;              /* order of admission: older saves get blocks first */
	uint32_t flags;
	uint32_t nr_blocks;    /* of the whole image */
	struct sfr__image img; /* crc and crc_len: the lane's for what it copies, else guarded */
	struct sfr__job *jobs; /* nr_blocks, then OPEN, TAIL, CLEAN */
	struct sfr__file file; /* writers until READY, then the log's thread */

	enum sfr_state state;
	atomic_bool over;   /* the state is an end; read without the lock */
	struct sfr_err err; /* first error wins */

	/* facts from which sfr__ticket_step derives the state */
	bool opened, launched, abandoned, copied, confirmed, tail_queued, synced, clean_queued;
	bool lane_owns;            /* queued at, or being copied by, the lane */
	uint32_t cuda_out;         /* parts in devices that are not over */
	uint32_t cuda_unsubmitted; /* of them, those that have copies to queue yet */
	uint32_t jobs_out;         /* queued or running */
	uint32_t blocks_written;

	/* capture position: only the capturing thread touches it */
	uint32_t capture_blk;
	bool capture_done;
	pthread_t caller;

	/* detectors: written by capture, read by the lane */
	struct sfr__samples samples; /* of the host's */
	uint32_t *sums; /* SFR_SAVE_CHECK_BYTES: CRC of each deferred entry at the call */

	struct sfr__cuda_part *parts; /* one for each device; the array is constant */
	uint32_t nr_parts;

	struct sfr__log_entry log;
	struct sfr__notice notice_copied, notice_ended;

	uint32_t blocks_held, peak_blocks;
	uint64_t written_nbytes;
	uint64_t slot_wait_ns, block_wait_ns;
	uint64_t created_ns, launched_ns, copied_ns, staged_ns, ended_ns;
	uint32_t io_mode;
	bool over_slots;
	char fallback[4][160];

	struct sfr_ticket *lane_next;
	struct sfr_ticket *all_next, *all_prev; /* of the engine's tickets in flight */
};

struct sfr_engine {
	pthread_mutex_t mu;
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

	struct sfr__cuda_lane *cuda_lanes; /* stay until the engine is freed */
	struct sfr_ticket *lane_head, *lane_tail;
	struct sfr__job *job_head, *job_tail;
	struct sfr_ticket *tickets;                         /* in flight */
	struct sfr_snapshot *snapshot_head, *snapshot_tail; /* for the lane */
	uint32_t nr_snapshots; /* that have, or wait for, memory of the pool: it stays so long */
	uint32_t nr_copying;   /* of them, at the lane */
	uint32_t nr_in_flight;
	uint32_t nr_pool_users; /* threads in warm_up or trim */
	uint64_t next_seq, nr_saves;
};

/* ---- save.c ---- */
/* Leases the next block of a run, stages it and hands it to the writers. 0; SFR_EAGAIN when there
 * is no block within the slice; else the ticket has failed with what is returned. */
int sfr__stage_next(struct sfr_ticket *t, const struct sfr__run *run, uint32_t blk,
		    enum sfr__stager by, uint64_t slice_ns);

/* Gives a leased block, staged, to the writers; `summed`: its pieces are in the CRCs already. */
void sfr__push_block_locked(struct sfr_ticket *t, const struct sfr__run *run, uint32_t blk,
			    struct sfr__block *block, bool summed);

/* ---- stage_cuda.c ---- */
/* A new ticket's parts, from its image. -ENOMEM. */
int sfr__cuda_parts_new(struct sfr_ticket *t);
void sfr__cuda_parts_free(struct sfr_ticket *t);
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
/* The ticket's OPEN, TAIL or CLEAN job. */
struct sfr__job *sfr__ticket_job(struct sfr_ticket *t, enum sfr__job_kind kind);
/* How often a state followed another, in the whole process; for tests. */
unsigned sfr__ticket_arrows(enum sfr_state from, enum sfr_state to);
/* Every change of state goes through here. */
void sfr__ticket_set_state_locked(struct sfr_ticket *t, enum sfr_state state);
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
/* The next step may begin as far as the host is concerned: every copy has ended or is queued. */
bool sfr__ticket_is_open_locked(const struct sfr_ticket *t);
static inline bool sfr__ticket_failing_locked(const struct sfr_ticket *t)
{
	return t->err.code != 0;
}

/* Made before a fork that this process came out of: nothing of it may be touched. */
static inline bool sfr__ticket_foreign(const struct sfr_ticket *t)
{
	return t->fork_generation != sfr_fork_generation();
}

/* ---- lane.c ---- */
/* Fills one block of a run from its sources. *torn gets the source index of the lane's first
 * mismatch with samples or sums. */
void sfr__stage_block(struct sfr_ticket *t, const struct sfr__run *run, uint32_t blk, char *dst,
		      enum sfr__stager by, int64_t *torn);
/* samples.c: how many lines of each source are sampled, at most, where there are so many. */
uint64_t sfr__samples_each(uint32_t nr_sources);
/* Says which lines of a source are: fills all but the bytes of at most `each` items, and returns
 * of how many. *random goes on. */
uint32_t sfr__samples_place(struct sfr__sample *items, uint32_t entry, uint64_t nbytes,
			    uint64_t each, uint64_t *random);
/* Takes samples of every deferred source in host memory. -ENOMEM. */
int sfr__take_samples(struct sfr_ticket *t);
/* How many lines of each deferred source are sampled, and of a whole run, at most. */
uint64_t sfr__samples_per_entry(const struct sfr_ticket *t);
/* Says which lines of a run's sources are sampled: fills all but the bytes of nr_entries *
 * sfr__samples_per_entry items. */
void sfr__place_samples(const struct sfr_ticket *t, const struct sfr__run *run,
			struct sfr__samples *samples);
/* Compares what was staged of an entry with samples and sums: pieces come in ascending order. The
 * index of a torn source, or -1. */
int64_t sfr__check_piece(struct sfr_ticket *t, struct sfr__samples *samples, uint32_t entry,
			 uint64_t off, const char *staged, size_t len);
void *sfr__lane_main(void *engine);
void sfr__lane_push_locked(struct sfr_engine *engine, struct sfr_ticket *t);

/* ---- writer.c ---- */
void *sfr__writer_main(void *engine);
void sfr__writer_push_locked(struct sfr_engine *engine, struct sfr__job *job);

/* ---- engine.c ---- */
int sfr__engine_start_locked(struct sfr_engine *engine);
void sfr__engine_get(struct sfr_engine *engine);
/* Of the saves in flight, those that this very thread is capturing, further down its stack: it
 * cannot wait for them. */
uint32_t sfr__engine_nr_own_locked(const struct sfr_engine *engine);
/* A snapshot has given back its memory, or got none. The last one of a closed engine frees the
 * pool. */
void sfr__engine_snapshot_gone(struct sfr_engine *engine);

/* ---- log.c ---- */
/* Starts the log's thread if it does not run. 0 or -errno. */
int sfr__log_start(void);
/* Appends a save; entry->key and ->ticket are set. Takes over one reference of the ticket. */
void sfr__log_append(struct sfr__log_entry *entry);
void sfr__log_ready(struct sfr__log_entry *entry);
void sfr__log_ended(struct sfr__log_entry *entry, bool ok);
uint64_t sfr__log_last_remove(void);
/* As sfr__log_ended, but the first end counts: work may be ended more than once. */
void sfr__log_work_ended(struct sfr__log_entry *entry, bool ok);
/* Waits until a WORK entry is at the head and nobody has taken it; takes it. SFR_EAGAIN, and
 * SFR_ECLOSED when the log is being stopped. *after_good: the last save before it did well. */
int sfr__log_take_turn(uint64_t slice_ns, struct sfr__log_entry **out, bool *after_good);

/* ---- work.c ---- */
/* Whether the work makes its name (a save, a link), takes it away (a remove), and is a save. */
bool sfr__work_creates(const struct sfr_log_work *work);
bool sfr__work_is_save(const struct sfr_log_work *work);
/* Its entry has left the log: drops the log's reference. */
void sfr__work_left_log(struct sfr_log_work *work);

#endif
