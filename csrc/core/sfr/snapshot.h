/* Snapshots: copies in memory of the pool. See snapshot/snapshot.c. */
#ifndef SFR_SNAPSHOT_PUBLIC_H
#define SFR_SNAPSHOT_PUBLIC_H

#include "sfr/err.h"
#include "sfr/source.h"

struct sfr_engine;

/* A copy of host memory, and of memory of devices, in memory of the engine's pool. Sources are rows of struct sfr_source, as
 * for a save: captured ones are copied by sfr_snapshot_start, the others by their lane. A source
 * with nbytes but no address gets its memory and is filled by the caller.
 *
 * The memory goes back when the copy has ended, every view of it is closed and every hold has
 * ended; at the latest with the last reference. */
struct sfr_snapshot;

/* Children that are forked later have the memory, as it is at the fork: so not of an engine with
 * shared memory, whose later bytes they would see (-EINVAL). */
#define SFR_SNAPSHOT_SHARED 1u
/* What leaves a device: callers' streams do not wait, so sources on devices stay as they are until
 * the wait is over, or a stream has been through the gate. Copies begin SFR_APART bytes apart. Small ones share
 * blocks. */
#define SFR_SNAPSHOT_LEAVES 2u
#define SFR_APART 512u

/* Leases nothing yet; the rows are copied. -ENOMEM, -EINVAL, SFR_EFORK. */
int sfr_snapshot_new(struct sfr_engine *engine, const struct sfr_source *sources,
		     uint32_t nr_sources, uint32_t flags, struct sfr_snapshot **out);
/* Leases the memory; the caller has one view of it then. SFR_EAGAIN: saves have to give some back, call it again; SFR_EEXHAUSTED: what
 * snapshots hold leaves too little; SFR_ECLOSED; -ENOMEM; -errno. */
int sfr_snapshot_lease(struct sfr_snapshot *s, uint64_t slice_ns);
/* For sources on devices, before the start: the caller's current stream on each. SFR_ESTATE: one of
 * the devices has none in the list. */
int sfr_snapshot_streams(struct sfr_snapshot *s, const struct sfr_stream *streams,
			 uint32_t nr_streams);
/* Copies the captured sources, takes samples of the others and hands these to the lane. Bytes of
 * deferred sources stay valid until sfr_snapshot_wait has returned 0. A failure (-ENOMEM, -errno)
 * leaves nothing to wait for.
 * Sources on devices, captured ones too, are copied by these: all is queued in the call, the
 * caller's stream waits for the captured ones, and their bytes stay valid until the wait is over.
 * SFR_ECAPTURING where a stream is capturing a graph. After any failure with such sources
 * something may still be copied: sfr_snapshot_wait says when that is over, sfr_snapshot_error what
 * went wrong. */
int sfr_snapshot_start(struct sfr_snapshot *s);
/* Waits until every byte is copied, or the copy was given up because nobody could read it any
 * more; *torn gets the number of a source that changed meanwhile, or -1. 0 or SFR_EAGAIN. A slice of
 * zero takes no lock. */
int sfr_snapshot_wait(struct sfr_snapshot *s, uint64_t slice_ns, int64_t *torn);
/* The gate of the next step, as sfr_save_gate. 0, SFR_EAGAIN. */
int sfr_snapshot_gate(struct sfr_snapshot *s, const struct sfr_stream *streams, uint32_t nr_streams,
		      uint64_t slice_ns);
/* What a device failed with; code 0: nothing. Final once the wait is over. */
void sfr_snapshot_error(struct sfr_snapshot *s, struct sfr_err *out);
/* The memory: one range that holds every source's copy (and may hold memory of others between
 * them), and the offset of each copy in it. Valid after sfr_snapshot_lease. */
void sfr_snapshot_memory(const struct sfr_snapshot *s, char **base, uint64_t *len);
uint64_t sfr_snapshot_offset(const struct sfr_snapshot *s, uint32_t source);
/* For another process that is to map that range: the file that it is of, and where in it it begins,
 * a multiple of 4096. The descriptor is the engine's, and stays as long as the memory is leased.
 * SFR_ESTATE: the engine has no shared memory, or nothing is leased. */
int sfr_snapshot_file(struct sfr_snapshot *s, int *fd, uint64_t *off);
/* A view keeps the memory, and so does a hold. While there is a view, a wait for the memory is
 * one that only the caller could end. SFR_ESTATE when the memory has gone back. */
int sfr_snapshot_view(struct sfr_snapshot *s);
void sfr_snapshot_unview(struct sfr_snapshot *s);
int sfr_snapshot_hold(struct sfr_snapshot *s);
void sfr_snapshot_unhold(struct sfr_snapshot *s);
/* Its views end by themselves, whatever the caller does: others wait for the memory while `yes`. */
void sfr_snapshot_will_return(struct sfr_snapshot *s, int yes);
/* 1 while the memory is leased, else 0; SFR_EFORK. */
int sfr_snapshot_leased(struct sfr_snapshot *s);
uint64_t sfr_snapshot_copying_ns(const struct sfr_snapshot *s); /* devices', of what leaves */
uint64_t sfr_snapshot_number(const struct sfr_snapshot *s);     /* from 1, of the process */
void sfr_snapshot_get(struct sfr_snapshot *s);
void sfr_snapshot_put(struct sfr_snapshot *s); /* NULL is fine */

#endif
