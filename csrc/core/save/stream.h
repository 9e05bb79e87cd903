/* The stream of a save that is not written to a file. stream_put.c implements what lanes and
 * writers call, and stream.c what the caller does. */
#ifndef SFR_SAVE_STREAM_H
#define SFR_SAVE_STREAM_H

#include "sfr/stream.h"
#include "save/jobs.h"

/* Returns whether a save of the image can be a stream: whether its blocks are numbered in the order
 * of the file. */
bool sfr__stream_is_possible(const struct sfr__image *img);
/* Waits until a block may be leased: a stream leases its blocks in the order of the file. 0 or
 * SFR_EAGAIN. */
int sfr__stream_await_lease(struct sfr_ticket *t, const struct sfr__extent *extent, uint32_t blk,
			    uint64_t slice_ns);
/* Returns whether the block may be leased now. For a save that is not a stream, both functions
 * allow that at once. */
bool sfr__stream_may_lease_locked(const struct sfr_ticket *t, const struct sfr__extent *extent,
				  uint32_t blk);
/* Puts a job with final bytes into the stream. Returns true if the stream now owns the job. Returns
 * false if the calling writer still does: the save is failing, or the job has no bytes of its own
 * (a block in edge pages, an empty tail) and has only been counted. */
bool sfr__stream_put(struct sfr_ticket *t, struct sfr__job *job);
/* Sets [*from, *to) to the range of the file that this job alone provides: its block without edge
 * pages. */
void sfr__stream_own_bytes(const struct sfr_ticket *t, const struct sfr__job *job, uint64_t *from,
			   uint64_t *to);

#endif
