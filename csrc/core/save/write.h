/* Functions that writers and the log call for a save. */
#ifndef SFR_SAVE_WRITE_H
#define SFR_SAVE_WRITE_H

#include "save/jobs.h"

/* ---- write.c ---- */
/* Runs a job on a writer's thread. */
void sfr__job_run(struct sfr__task *task);
/* Gives back the memory of a block or a tail: to the pool, or to the system if the job has mapped
 * it. */
void sfr__release_block(struct sfr_ticket *t, struct sfr__job *job);

/* ---- in_place.c ---- */
/* Returns the block size of a save of parts: at most the pool's. */
uint64_t sfr__in_place_block_bytes(const struct sfr_engine *engine);
/* Queues the first blocks of a save of parts. */
void sfr__in_place_queue_first_blocks_locked(struct sfr_ticket *t);
/* Called after a block was written: queues the next block. For a stream, queues blocks until as
 * many bytes are queued as the caller sends at a time. */
void sfr__in_place_queue_more_blocks_locked(struct sfr_ticket *t);
/* Called by a writer before it writes a block: sets job->mem to the memory to write. If it copies
 * the bytes, also adds their CRCs. Returns 0, or -1 with the reason in *err. */
int sfr__in_place_prepare_block(struct sfr_ticket *t, struct sfr__job *job, struct sfr_err *err);
/* Frees memory that the job has mapped itself, if any. */
void sfr__in_place_unmap(struct sfr__job *job);

/* ---- commit.c ---- */
extern const struct sfr__log_ops sfr__save_log_ops;
/* Renames the file and ends the save. The ticket may be freed then. Returns false, and does
 * nothing, if the save was cancelled before. */
bool sfr__save_commit(struct sfr_ticket *t);

#endif
