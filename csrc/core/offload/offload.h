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

/* Copies that were started together. Calls on one onload must not overlap. */
struct sfr_onload;

/* One range of memory: `src` in host memory, `dst` in device memory. */
struct sfr_onload_copy {
	uint64_t src, dst, nbytes;
};

/* Queues the copies on the engine's stream for this device. That stream first waits for the work on
 * `stream`, the caller's current one, and for copies still running into the memory of `from` (NULL
 * if the sources are elsewhere). Sources and destinations stay valid until sfr_onload_wait has
 * returned 0; the onload holds the memory of `from`.
 *
 * 0: *out is the onload, for sfr_onload_put; a failure of the device is in sfr_onload_error.
 * SFR_ECLOSED, SFR_EFORK, SFR_ECAPTURING, -ENOMEM: nothing is queued. SFR_ESTATE: the memory of
 * `from` has been returned. SFR_EAGAIN: nothing is queued, because the copies into `from` have no
 * event to wait for; call again once sfr_snapshot_wait has returned 0. */
int sfr_onload_start(struct sfr_engine *engine, uint32_t device, uint64_t stream,
		     const struct sfr_onload_copy *copies, uint32_t nr, struct sfr_snapshot *from,
		     struct sfr_onload **out);
/* Makes a stream of the onload's device wait for the copies. 0, SFR_EFORK. SFR_EAGAIN: the stream
 * cannot wait, because it captures a graph or there is no event, so the caller must use
 * sfr_onload_wait. */
int sfr_onload_order(struct sfr_onload *onload, uint64_t stream);
/* Waits until no copy is running. 0, SFR_EAGAIN, SFR_EFORK. A slice of zero takes no lock. */
int sfr_onload_wait(struct sfr_onload *onload, uint64_t slice_ns);
/* Sets *copying_ns to the device time of the copies, and *waited_ns to how long the first stream
 * that waited for them was idle. A time that was not measured is 0. Returns 0; SFR_EAGAIN: not
 * known yet; SFR_EFORK. */
int sfr_onload_times(struct sfr_onload *onload, uint64_t *copying_ns, uint64_t *waited_ns);
/* Sets *out to the device's error; code 0: none. Final once the wait is over. Takes no lock. */
void sfr_onload_error(struct sfr_onload *onload, struct sfr_err *out);
/* Waits for copies that still run, and frees the onload. Accepts NULL. */
void sfr_onload_put(struct sfr_onload *onload);
/* Returns 1 if the host memory at `addr` is in a pinned region of the engine's pool, so that copies
 * from it avoid the driver's staging buffer; else 0. */
int sfr_engine_has_pinned(struct sfr_engine *engine, uint64_t addr);

#endif
