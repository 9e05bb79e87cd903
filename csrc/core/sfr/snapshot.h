/* Snapshots: copies in pool memory. snapshot/snapshot.c implements them. */
#ifndef SFR_SNAPSHOT_PUBLIC_H
#define SFR_SNAPSHOT_PUBLIC_H

#include "sfr/err.h"
#include "sfr/source.h"

struct sfr_engine;

/* A copy of host and device memory in the engine's pool. Sources are as for a save:
 * sfr_snapshot_start copies the captured ones, lanes copy the others. A source with nbytes but no
 * address only gets memory, which the caller fills.
 *
 * The memory returns to the pool when the copy and every view and hold have ended, and at the
 * latest with the last reference. */
struct sfr_snapshot;

/* Forked children see the memory as at the fork. -EINVAL for an engine with shared memory. */
#define SFR_SNAPSHOT_SHARED 1u
/* For tensors that leave a device. Callers' streams do not wait, so sources on devices must not
 * change until sfr_snapshot_wait has returned 0 or a stream has passed the gate. Copies start at
 * multiples of SFR_COPY_ALIGN bytes. Small snapshots share blocks. */
#define SFR_SNAPSHOT_LEAVES 2u
#define SFR_COPY_ALIGN 512u

/* Makes a snapshot without memory. Copies the array `sources`. Returns 0, -ENOMEM, -EINVAL or
 * SFR_EFORK. */
int sfr_snapshot_new(struct sfr_engine *engine, const struct sfr_source *sources,
		     uint32_t nr_sources, uint32_t flags, struct sfr_snapshot **out);
/* Leases the memory and gives the caller one view of it. Returns 0, or:
 *
 *   SFR_EAGAIN       saves will return enough memory: call again
 *   SFR_EEXHAUSTED   other snapshots hold too much
 *   SFR_ECLOSED, -errno */
int sfr_snapshot_lease(struct sfr_snapshot *s, uint64_t slice_ns);
/* Says which stream of each device that has sources is the caller's current one. Called before
 * sfr_snapshot_start. Returns 0, or SFR_ESTATE if a device has no stream in the list. */
int sfr_snapshot_set_streams(struct sfr_snapshot *s, const struct sfr_device_stream *streams,
			     uint32_t nr_streams);
/* Copies the captured sources in host memory. Takes samples of the deferred sources, which a lane
 * copies later. The call only queues the copies of sources on devices, and the caller's stream
 * waits for those of captured sources. Deferred sources and sources on devices must stay valid
 * until sfr_snapshot_wait has returned 0. Returns 0, -errno, or SFR_ECAPTURING if a stream is
 * capturing a graph.
 *
 * After a failure only copies from devices may still run. sfr_snapshot_wait then waits until they
 * have ended, and sfr_snapshot_error gives the error. */
int sfr_snapshot_start(struct sfr_snapshot *s);
/* Waits until every byte is copied, or until copying has stopped because the memory has no view or
 * hold left. *torn is the index of a source that changed before it was copied, or -1. Returns 0
 * or SFR_EAGAIN. A slice of zero takes no lock. */
int sfr_snapshot_wait(struct sfr_snapshot *s, uint64_t slice_ns, int64_t *torn);
/* The gate, like sfr_save_gate: after it a step may change the sources. Returns 0 or SFR_EAGAIN. */
int sfr_snapshot_gate(struct sfr_snapshot *s, const struct sfr_device_stream *streams,
		      uint32_t nr_streams, uint64_t slice_ns);
/* Sets *out to the error of a device, with code 0 if there is none. Final after
 * sfr_snapshot_wait has returned 0. */
void sfr_snapshot_error(struct sfr_snapshot *s, struct sfr_err *out);
/* Gets the range of memory with all copies, after sfr_snapshot_lease. Copies of other snapshots may
 * be in the range, too. */
void sfr_snapshot_memory(const struct sfr_snapshot *s, char **base, uint64_t *len);
/* Returns the offset of a source's copy in that range. */
uint64_t sfr_snapshot_offset(const struct sfr_snapshot *s, uint32_t source);
/* For another process that maps the memory: gets the file, which the engine owns, and the memory's
 * offset in it, a multiple of 4096. The offset is valid while the memory is leased. Returns 0, or
 * SFR_ESTATE if the engine has no shared memory or nothing is leased. */
int sfr_snapshot_locate_in_file(struct sfr_snapshot *s, int *fd, uint64_t *off);
/* Begin and end a view or a hold, which keep the memory leased. The caller ends a view. A hold ends
 * by itself, with the process or future that reads the memory. Beginning fails with SFR_ESTATE if
 * the memory has been returned already. */
int sfr_snapshot_add_view(struct sfr_snapshot *s);
void sfr_snapshot_remove_view(struct sfr_snapshot *s);
int sfr_snapshot_add_hold(struct sfr_snapshot *s);
void sfr_snapshot_remove_hold(struct sfr_snapshot *s);
/* Says whether (`yes` 1 or 0) all views will end by themselves. If so, a save or snapshot that
 * needs the memory waits for its return to the pool, instead of failing with SFR_EEXHAUSTED. */
void sfr_snapshot_set_will_return(struct sfr_snapshot *s, int yes);
/* Returns 1 while the memory is leased, else 0; or SFR_EFORK. */
int sfr_snapshot_is_leased(struct sfr_snapshot *s);
/* Returns how long the device took for the copies; 0 without SFR_SNAPSHOT_LEAVES. */
uint64_t sfr_snapshot_copying_ns(const struct sfr_snapshot *s);
uint64_t sfr_snapshot_number(const struct sfr_snapshot *s); /* from 1, unique in the process */
void sfr_snapshot_get(struct sfr_snapshot *s);
void sfr_snapshot_put(struct sfr_snapshot *s); /* accepts NULL */

#endif
