/* The jobs of a save: work for the writers. */
#ifndef SFR_SAVE_JOBS_H
#define SFR_SAVE_JOBS_H

#include "save/ticket.h"

enum sfr__job_kind {
	SFR__JOB_OPEN,   /* open the temporary */
	SFR__JOB_BLOCK,  /* compute the CRCs of one block and write it */
	SFR__JOB_TAIL,   /* write the tail, sync the file */
	SFR__JOB_RENAME, /* rename the file of a save that is not in the log */
	SFR__JOB_CLEAN,  /* a failed save: remove the temporary, end the ticket */
};

/* Jobs live in their ticket, so queueing a job cannot fail. */
struct sfr__job {
	struct sfr__task task;
	struct sfr_ticket *ticket;
	enum sfr__job_kind kind;
	/* The bytes to write, for BLOCK and TAIL: in a block of the pool (`block`), in the job's
	 * own memory (own_len bytes), or inside a source. */
	char *mem;
	struct sfr__block *block; /* NULL: none */
	size_t own_len;           /* 0: none */
	/* the fields below are for BLOCK; TAIL also uses was_put and untaken */
	const struct sfr__extent *extent;
	uint32_t blk;                  /* index in the extent */
	bool summed;                   /* the entries' CRCs include its bytes */
	bool was_put;                  /* a writer has put its bytes into the stream */
	bool untaken;                  /* its bytes are in the stream and not taken yet */
	struct sfr__job *next_parked;  /* in the list of jobs that wait for a CRC */
	struct sfr__host_block staged; /* used while host memory is copied to the block */
};

/* Makes the jobs of a ticket whose plan.nr_blocks is set. Returns 0 or -ENOMEM. */
int sfr__jobs_new(struct sfr_ticket *t);
/* Queues a job for the writers, and counts it in nr_jobs. */
void sfr__job_push_locked(struct sfr__job *job);
/* Returns the ticket's only job of a kind other than BLOCK. */
struct sfr__job *sfr__ticket_job(struct sfr_ticket *t, enum sfr__job_kind kind);
struct sfr__job *sfr__block_job(struct sfr_ticket *t, const struct sfr__extent *extent,
				uint32_t blk);
/* Queues a staged block for the writers. `summed`: the entries' CRCs include its bytes. */
void sfr__push_block_locked(struct sfr_ticket *t, const struct sfr__extent *extent, uint32_t blk,
			    struct sfr__block *block, bool summed);
/* Adds the CRC of a segment, an entry's bytes in one block, to the entry's CRC. Segments come in
 * any order. Returns whether the entry's CRC is complete. */
bool sfr__add_crc(struct sfr_ticket *t, const struct sfr__seg *seg, uint32_t crc);
/* Queues all parked blocks again, after an entry's CRC is known or the save fails. */
void sfr__unpark_locked(struct sfr_ticket *t);
/* For a stream that fails: queues the jobs that the caller has not taken, so that writers release
 * their memory. */
void sfr__requeue_untaken_locked(struct sfr_ticket *t);

#endif
