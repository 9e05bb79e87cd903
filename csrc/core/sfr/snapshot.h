/* Snapshots: copies in pool memory. snapshot/snapshot.c implements them. */
#ifndef SFR_SNAPSHOT_PUBLIC_H
#define SFR_SNAPSHOT_PUBLIC_H

#include "sfr/err.h"
#include "sfr/source.h"

struct sfr_engine;

/* A copy of host and device memory in the engine's pool. Sources are rows of struct sfr_source, as
 * for a save: sfr_snapshot_start copies the captured ones, lanes copy the others. A source with
 * nbytes but no address only gets memory, which the caller fills.
 *
 * The memory returns to the pool when the copy has ended and every view and hold has ended, and at
 * the latest with the last reference. */
struct sfr_snapshot;

/* Children forked later see the memory as it was at the fork. Refused (-EINVAL) for an engine with
 * shared memory, where they would see later bytes too. */
#define SFR_SNAPSHOT_SHARED 1u
/* For tensors that leave a device: callers' streams do not wait, so sources on devices must not
 * change until sfr_snapshot_wait has returned 0 or a stream has passed the gate. Copies start at
 * multiples of SFR_COPY_ALIGN bytes. Small snapshots share blocks. */
#define SFR_SNAPSHOT_LEAVES 2u
#define SFR_COPY_ALIGN 512u

/* Makes a snapshot without memory; the rows are copied. -ENOMEM, -EINVAL, SFR_EFORK. */
int sfr_snapshot_new(struct sfr_engine *engine, const struct sfr_source *sources,
		     uint32_t nr_sources, uint32_t flags, struct sfr_snapshot **out);
/* Leases the memory and gives the caller one view of it. SFR_EAGAIN: saves will return enough
 * memory, so call again. SFR_EEXHAUSTED: other snapshots hold too much. SFR_ECLOSED; -ENOMEM;
 * -errno. */
int sfr_snapshot_lease(struct sfr_snapshot *s, uint64_t slice_ns);
/* For sources on devices: names the caller's current stream on each device, before the start.
 * SFR_ESTATE: a device has no stream in the list. */
int sfr_snapshot_streams(struct sfr_snapshot *s, const struct sfr_stream *streams,
			 uint32_t nr_streams);
/* Copies the captured sources, takes samples of the deferred ones and hands the latter to the lane.
 * Deferred sources stay valid until sfr_snapshot_wait has returned 0. A failure (-ENOMEM, -errno)
 * leaves nothing to wait for.
 *
 * Lanes copy all sources on devices, captured ones too: the call queues the copies, the caller's
 * stream waits for the captured ones, and the sources stay valid until the wait is over.
 * SFR_ECAPTURING: a stream is capturing a graph. After any failure with such sources copies may
 * still be running; sfr_snapshot_wait says when they are over, sfr_snapshot_error what failed. */
int sfr_snapshot_start(struct sfr_snapshot *s);
/* Waits until every byte is copied, or until the copy was given up because nobody can read it any
 * more. *torn is the index of a source that changed meanwhile, or -1. 0 or SFR_EAGAIN. A slice of
 * zero takes no lock. */
int sfr_snapshot_wait(struct sfr_snapshot *s, uint64_t slice_ns, int64_t *torn);
/* The gate of the next step, like sfr_save_gate. 0 or SFR_EAGAIN. */
int sfr_snapshot_gate(struct sfr_snapshot *s, const struct sfr_stream *streams, uint32_t nr_streams,
		      uint64_t slice_ns);
/* Sets *out to the error of a device, with code 0 if there is none. It is final after the wait. */
void sfr_snapshot_error(struct sfr_snapshot *s, struct sfr_err *out);
/* sfr_snapshot_memory sets *base and *len to the range that contains every copy. (Copies of other
 * snapshots may be between them.) sfr_snapshot_offset returns the offset of one source's copy in
 * that range. Valid after sfr_snapshot_lease. */
void sfr_snapshot_memory(const struct sfr_snapshot *s, char **base, uint64_t *len);
uint64_t sfr_snapshot_offset(const struct sfr_snapshot *s, uint32_t source);
/* For another process that maps the memory: sets *fd to the file that contains the memory, and *off
 * to the memory's offset in it, a multiple of 4096. The engine owns *fd. *off is valid while the
 * memory is leased. SFR_ESTATE: the engine has no shared memory, or nothing is leased. */
int sfr_snapshot_file(struct sfr_snapshot *s, int *fd, uint64_t *off);
/* Begin and end a view or a hold, which keeps the memory leased. The caller ends a view; a hold
 * ends by itself, with the process or future that reads the memory. SFR_ESTATE: the memory has been
 * returned. */
int sfr_snapshot_view(struct sfr_snapshot *s);
void sfr_snapshot_unview(struct sfr_snapshot *s);
int sfr_snapshot_hold(struct sfr_snapshot *s);
void sfr_snapshot_unhold(struct sfr_snapshot *s);
/* With `yes`, declares that the memory will return to the pool whatever the caller does, because
 * all views end by themselves. Then a save or snapshot that needs the memory waits for it, where it
 * would otherwise fail with SFR_EEXHAUSTED. With `yes` == 0, takes the declaration back. */
void sfr_snapshot_will_return(struct sfr_snapshot *s, int yes);
/* Returns 1 while the memory is leased, else 0; SFR_EFORK. */
int sfr_snapshot_leased(struct sfr_snapshot *s);
/* Returns the time that the device took for the copies, with SFR_SNAPSHOT_LEAVES; else 0. */
uint64_t sfr_snapshot_copying_ns(const struct sfr_snapshot *s);
uint64_t sfr_snapshot_number(const struct sfr_snapshot *s); /* from 1, unique in the process */
void sfr_snapshot_get(struct sfr_snapshot *s);
void sfr_snapshot_put(struct sfr_snapshot *s); /* accepts NULL */

#endif
