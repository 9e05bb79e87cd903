/* Copies from host memory to a device, while the caller's stream computes. onload.c implements it.
 *
 *     sfr_onload_start(engine, device, stream, copies, nr, snapshot, &onload)
 *     ...
 *     rc = sfr_onload_make_stream_wait(onload, stream);   the stream waits for the copies
 *     while (rc == SFR_EAGAIN)                            (if the stream cannot, the caller waits)
 *             rc = sfr_onload_wait(onload, slice_ns);
 *     sfr_onload_wait_and_free(onload); */
#ifndef SFR_OFFLOAD_H
#define SFR_OFFLOAD_H

#include "sfr/engine.h"
#include "sfr/snapshot.h"

/* Copies that were started together. Only one thread at a time may use an onload. */
struct sfr_onload;

/* One range of memory. */
struct sfr_onload_copy {
	uint64_t src; /* in host memory */
	uint64_t dst; /* in device memory */
	uint64_t nbytes;
};

/* Queues the copies. They run after the present work of `stream`, the caller's current stream. If
 * the sources are in a snapshot's memory, `snapshot` is this snapshot, else NULL. Then the copies
 * also run after those that still write to the snapshot, and the onload holds its memory. The
 * caller keeps sources and destinations valid until sfr_onload_wait has returned 0. Returns 0 even
 * after an error of the device, which sfr_onload_error reports. Other results, with nothing queued:
 *
 *   SFR_EAGAIN   no stream can wait for the snapshot: call again after sfr_snapshot_wait has
 *                returned 0
 *   SFR_ESTATE   the memory of the snapshot has been returned
 *   SFR_ECLOSED, SFR_EFORK, SFR_ECAPTURING, -ENOMEM */
int sfr_onload_start(struct sfr_engine *engine, uint32_t device, uint64_t stream,
		     const struct sfr_onload_copy *copies, uint32_t nr,
		     struct sfr_snapshot *snapshot, struct sfr_onload **out);
/* Makes a stream of the onload's device wait for the copies. Returns 0, SFR_EFORK, or SFR_EAGAIN if
 * the stream cannot wait: then the caller waits with sfr_onload_wait. */
int sfr_onload_make_stream_wait(struct sfr_onload *onload, uint64_t stream);
/* Waits until no copy is running. With a slice of zero it only looks, and takes no lock. Returns 0,
 * SFR_EAGAIN or SFR_EFORK. */
int sfr_onload_wait(struct sfr_onload *onload, uint64_t slice_ns);
/* Gets the device time of the copies, and how long the first stream that waited for them was idle.
 * A time that was not measured is 0. Returns 0, SFR_EFORK, or SFR_EAGAIN if the times are not known
 * yet. */
int sfr_onload_times(struct sfr_onload *onload, uint64_t *copying_ns, uint64_t *waited_ns);
/* Gets the device's error, with code 0 if there is none. Final after the wait. Takes no lock. */
void sfr_onload_error(struct sfr_onload *onload, struct sfr_err *out);
/* Waits for copies that still run, and frees the onload. Accepts NULL. */
void sfr_onload_wait_and_free(struct sfr_onload *onload);
/* Returns 1 if the host memory at `addr` is in a pinned region of the engine's pool, else 0. */
int sfr_engine_is_addr_pinned(struct sfr_engine *engine, uint64_t addr);

#endif
