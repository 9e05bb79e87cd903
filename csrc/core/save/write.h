/* The work of writers and the log on a save. write.c, in_place.c and commit.c implement it. */
#ifndef SFR_SAVE_WRITE_H
#define SFR_SAVE_WRITE_H

#include "save/jobs.h"

/* ---- write.c ---- */
/* Runs a job on a writer's thread. */
void sfr__job_run(struct sfr__task *task);
/* Gives back the memory of a block, or of a tail, that nobody reads any more. */
void sfr__release_block(struct sfr_ticket *t, struct sfr__job *job);

/* ---- in_place.c ---- */
/* Returns the block size of a save of parts: never more than the pool's. */
uint64_t sfr__in_place_block_bytes(const struct sfr_engine *engine);
/* Queues the first blocks of a save of parts, at launch. */
void sfr__in_place_begin_locked(struct sfr_ticket *t);
/* Called when a block of such a save is written: queues the next one, if there is one. For a stream
 * it queues blocks until as many bytes are queued as the client sends at a time. */
void sfr__in_place_next_locked(struct sfr_ticket *t);
/* Prepares a block of such a save, on a writer: sets the memory to write and, if the bytes had to
 * be copied, adds their CRCs. 0, or -1 with the reason in err. */
int sfr__in_place_prepare(struct sfr_ticket *t, struct sfr__job *job, struct sfr_err *err);
/* Frees memory that a job owns (own_len), whether or not it was written. */
void sfr__in_place_release(struct sfr__job *job);

/* ---- commit.c ---- */
extern const struct sfr__log_ops sfr__save_log_ops;
/* Renames the file and ends the ticket, which may be freed. Returns false if the save was cancelled
 * before, and then does nothing. */
bool sfr__save_commit(struct sfr_ticket *t);

#endif
