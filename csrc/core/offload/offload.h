/* Copies from host memory to a device, while the caller's stream computes. onload.c implements it.
 *
 *     sfr_onload_start(engine, device, stream, copies, nr, from, &onload)
 *     ...
 *     rc = sfr_onload_order(onload, stream);           the stream waits for the copies
 *     while (rc == SFR_EAGAIN)                         (if the stream cannot, the caller waits)
 *             rc = sfr_onload_wait(onload, slice_ns);
 *     sfr_onload_put(onload); */
#ifndef SFR_OFFLOAD_H
#define SFR_OFFLOAD_H

#include "sfr/engine.h"
#include "sfr/snapshot.h"

/* Copies that were started together. One thread at a time uses an onload. */
struct sfr_onload;

/* One range of memory. */
struct sfr_onload_copy {
	uint64_t src; /* in host memory */
	uint64_t dst; /* in device memory */
	uint64_t nbytes;
};

/* Queues the copies. They run after the work on `stream`, the caller's current one, and after
 * copies that still run into `from`. `from` is the snapshot whose memory the sources are in, or
 * NULL; the onload holds this memory. Sources and destinations stay valid until sfr_onload_wait has
 * returned 0. Returns 0, with device errors left to sfr_onload_error; or, with nothing queued:
 *
 *   SFR_EAGAIN   no stream can wait for `from`: call again after sfr_snapshot_wait has returned 0
 *   SFR_ESTATE   the memory of `from` has been returned
 *   SFR_ECLOSED, SFR_EFORK, SFR_ECAPTURING, -ENOMEM */
int sfr_onload_start(struct sfr_engine *engine, uint32_t device, uint64_t stream,
		     const struct sfr_onload_copy *copies, uint32_t nr, struct sfr_snapshot *from,
		     struct sfr_onload **out);
/* Makes a stream of the onload's device wait for the copies. Returns 0, SFR_EFORK, or SFR_EAGAIN if
 * the stream cannot wait: then the caller uses sfr_onload_wait. */
int sfr_onload_order(struct sfr_onload *onload, uint64_t stream);
/* Waits until no copy is running. A slice of zero takes no lock. 0, SFR_EAGAIN or SFR_EFORK. */
int sfr_onload_wait(struct sfr_onload *onload, uint64_t slice_ns);
/* Gets the device time of the copies, and how long the first stream that waited for them was idle.
 * A time that was not measured is 0. Returns 0, SFR_EAGAIN (not known yet) or SFR_EFORK. */
int sfr_onload_times(struct sfr_onload *onload, uint64_t *copying_ns, uint64_t *waited_ns);
/* Gets the device's error, with code 0 if there is none. Final after the wait. Takes no lock. */
void sfr_onload_error(struct sfr_onload *onload, struct sfr_err *out);
/* Waits for copies that still run, and frees the onload. Accepts NULL. */
void sfr_onload_put(struct sfr_onload *onload);
/* Returns 1 if the host memory at `addr` is in a pinned region of the engine's pool, else 0. */
int sfr_engine_has_pinned(struct sfr_engine *engine, uint64_t addr);

#endif
