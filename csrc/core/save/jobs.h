/* The jobs of a save: work for the writers. Implemented in jobs.c. */
#ifndef SFR_SAVE_JOBS_H
#define SFR_SAVE_JOBS_H

#include "save/ticket.h"

enum sfr__job_kind {
	SFR__JOB_OPEN,  /* open the temporary */
	SFR__JOB_BLOCK, /* CRC and write one staged block */
	SFR__JOB_TAIL,  /* write the tail, sync the file */
	SFR__JOB_PLACE, /* commit a save without order */
	SFR__JOB_CLEAN, /* a failed save: remove the temporary, end the ticket */
};

/* Jobs live in their ticket, so queueing one cannot fail. */
struct sfr__job {
	struct sfr__task task;
	struct sfr_ticket *ticket;
	enum sfr__job_kind kind;
	/* only for SFR__JOB_BLOCK */
	char *mem;                /* the bytes to write */
	struct sfr__block *block; /* the pool's block that contains them, */
	/* or the length of the job's own memory; with neither, mem is inside a source */
	size_t own_len;
	const struct sfr__extent *extent;
	uint32_t blk;
	bool summed;                   /* the entries' CRCs include, or will include, its bytes */
	bool put, held;                /* its bytes are in the stream; the stream still has it */
	struct sfr__job *parked;       /* next parked job */
	struct sfr__host_block staged; /* while the block is filled from host memory */
};

/* Makes the jobs of a ticket whose blocks are counted. 0 or -ENOMEM. */
int sfr__jobs_new(struct sfr_ticket *t);
void sfr__job_push_locked(struct sfr__job *job);
/* Returns one of the ticket's jobs that are not for a block. */
struct sfr__job *sfr__ticket_job(struct sfr_ticket *t, enum sfr__job_kind kind);
/* Returns the job of one block of an extent. */
struct sfr__job *sfr__block_job(struct sfr_ticket *t, const struct sfr__extent *extent,
				uint32_t blk);
/* Queues a staged block for the writers. summed: its bytes are in the CRCs already. */
void sfr__push_block_locked(struct sfr_ticket *t, const struct sfr__extent *extent, uint32_t blk,
			    struct sfr__block *block, bool summed);
/* Adds the CRC of a stretch of an entry, in any order. Returns whether the entry is complete. */
bool sfr__add_crc(struct sfr_ticket *t, const struct sfr__seg *seg, uint32_t crc);
/* Queues again the blocks that wait for a CRC. */
void sfr__unpark_locked(struct sfr_ticket *t);
/* Queues again the jobs in a stream that nobody has taken, so that writers release them. */
void sfr__requeue_held_locked(struct sfr_ticket *t);

#endif
