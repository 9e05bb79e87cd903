/* The stream of a save that is not written to a file. Lanes and writers call these functions;
 * stream.c has the caller's. */
#ifndef SFR_SAVE_STREAM_H
#define SFR_SAVE_STREAM_H

#include "sfr/stream.h"
#include "save/jobs.h"

/* Returns whether the image's blocks are numbered in the order of the file, so that a save of it
 * can be a stream. */
bool sfr__stream_is_possible(const struct sfr__image *img);
/* Waits until a block may be leased. Returns 0 or SFR_EAGAIN. */
int sfr__stream_await_lease(struct sfr_ticket *t, const struct sfr__extent *extent, uint32_t blk,
			    uint64_t slice_ns);
/* Returns whether a block may be leased now. A stream leases its blocks in the order of the file.
 * Other saves may always lease. */
bool sfr__stream_may_lease_locked(const struct sfr_ticket *t, const struct sfr__extent *extent,
				  uint32_t blk);
/* Puts a job with final bytes into the stream. Returns whether the stream now owns the job. If not,
 * the save is failing, or the job has no bytes of its own (all in edge pages, or an empty tail) and
 * is only counted. */
bool sfr__stream_put(struct sfr_ticket *t, struct sfr__job *job);
/* Sets [*from, *to) to the bytes of the file that only this job provides: its block without edge
 * pages. */
void sfr__stream_own_bytes(const struct sfr_ticket *t, const struct sfr__job *job, uint64_t *from,
			   uint64_t *to);

#endif
