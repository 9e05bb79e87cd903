/* The stream of a save that is not written to a file. Lanes and writers call these functions. The
 * caller of the save uses those of sfr/stream.h. */
#ifndef SFR_SAVE_STREAM_H
#define SFR_SAVE_STREAM_H

#include "sfr/stream.h"
#include "save/jobs.h"

/* Returns whether the image can be saved as a stream: its blocks are numbered in the order of the
 * file. */
bool sfr__stream_is_possible(const struct sfr__image *img);
/* Waits until a block may be leased. Returns 0. Returns SFR_EAGAIN if that takes longer than
 * slice_ns, or if the save fails. */
int sfr__stream_wait_until_may_lease(struct sfr_ticket *t, const struct sfr__extent *extent,
				     uint32_t blk, uint64_t slice_ns);
/* Returns whether a block may be leased now: in a stream, if it is the next block in the order of
 * the file. Other saves may always lease. */
bool sfr__stream_may_lease_locked(const struct sfr_ticket *t, const struct sfr__extent *extent,
				  uint32_t blk);
/* Puts a job, whose bytes do not change any more, into the stream. Returns true if the stream now
 * owns the job. Returns false if the save is failing, or if the stream needs no bytes of the job:
 * they are all in edge pages, or the tail is empty. */
bool sfr__stream_put_job(struct sfr_ticket *t, struct sfr__job *job);
/* Sets [*from, *to) to the range of the file that this job provides alone: its block without edge
 * pages. The range is empty if *from >= *to. */
void sfr__stream_unshared_range(const struct sfr_ticket *t, const struct sfr__job *job,
				uint64_t *from, uint64_t *to);

#endif
