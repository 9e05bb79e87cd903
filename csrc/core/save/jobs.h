/* The jobs of a save: work for the writers. */
#ifndef SFR_SAVE_JOBS_H
#define SFR_SAVE_JOBS_H

#include "save/ticket.h"

enum sfr__job_kind {
	SFR__JOB_OPEN,   /* open the temporary file */
	SFR__JOB_BLOCK,  /* compute the CRCs of one block and write it */
	SFR__JOB_TAIL,   /* write the tail, sync the file */
	SFR__JOB_RENAME, /* rename the file of an unordered save: it has no entry in the log */
	SFR__JOB_CLEAN,  /* a failed save: remove the temporary file, end the save */
};

/* A job is stored in its ticket, so queueing it needs no memory and cannot fail. */
struct sfr__job {
	struct sfr__task task;
	struct sfr_ticket *ticket;
	enum sfr__job_kind kind;
	/* The bytes to write, for BLOCK and TAIL. They are in `block` if it is not NULL. Else, if
	 * mapped_len is not 0, the job has mapped them itself. Else they are inside a source. */
	char *mem;
	struct sfr__block *block; /* a block of the pool, or NULL */
	size_t mapped_len;        /* length of the mapping at `mem`, or 0 */
	/* the fields below are for BLOCK; TAIL also uses was_put and in_stream */
	const struct sfr__extent *extent;
	uint32_t blk;   /* index of the block in the extent */
	bool crc_done;  /* the entries' CRCs include its bytes, once they are copied */
	bool was_put;   /* a writer has put its bytes into the stream */
	bool in_stream; /* they are in the stream: the caller has not taken them */
	struct sfr__job *next_parked;        /* the next in the list of jobs that wait for a CRC */
	struct sfr__host_block_state staged; /* used while host memory is copied to the block */
};

/* Allocates plan.jobs. plan.nr_blocks is set before. Returns 0 or -ENOMEM. */
int sfr__jobs_new(struct sfr_ticket *t);
/* Queues a job for the writers, and counts it in nr_jobs. */
void sfr__job_push_locked(struct sfr__job *job);
/* Returns the ticket's only job of a kind other than BLOCK. */
struct sfr__job *sfr__ticket_job(struct sfr_ticket *t, enum sfr__job_kind kind);
/* Returns the BLOCK job of block `blk` of an extent. */
struct sfr__job *sfr__block_job(struct sfr_ticket *t, const struct sfr__extent *extent,
				uint32_t blk);
/* Sets up the job of a staged block, and queues it for the writers. `crc_done`: as in struct
 * sfr__job. */
void sfr__push_block_locked(struct sfr_ticket *t, const struct sfr__extent *extent, uint32_t blk,
			    struct sfr__block *block, bool crc_done);
/* Adds the CRC of a segment (the bytes of an entry in one block) to the entry's CRC. The segments
 * of an entry may come in any order. Returns whether the entry's CRC is now complete. */
bool sfr__add_crc(struct sfr_ticket *t, const struct sfr__seg *seg, uint32_t crc);
/* Queues all parked blocks again. Called when an entry's CRC is complete, or the save fails. */
void sfr__jobs_unpark_locked(struct sfr_ticket *t);
/* Called when a save fails. Queues the jobs that are in its stream, so that writers release their
 * memory. Does nothing if the save is not a stream. */
void sfr__requeue_streamed_locked(struct sfr_ticket *t);

#endif
