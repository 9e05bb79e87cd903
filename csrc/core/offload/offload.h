#include "sfr/engine.h"
#include "sfr/snapshot.h"
/* Bringing bytes from host memory to a device, beside the work of the caller's stream. See onload.c.
 *
 *     sfr_onload_start(engine, device, stream, copies, nr, from, &onload)
 *     ...
 *     rc = sfr_onload_order(onload, stream);           the stream waits for the copies
 *     while (rc == SFR_EAGAIN)                         (or the caller does, where it cannot)
 *             rc = sfr_onload_wait(onload, slice_ns);
 *     sfr_onload_put(onload);
 */
#ifndef SFR_OFFLOAD_H
#define SFR_OFFLOAD_H

/* Calls on one onload do not overlap. */

struct sfr_onload;

/* One piece of memory: `src` in the host's, `dst` in the device's. */
struct sfr_onload_copy {
	uint64_t src, dst, nbytes;
};

/* Queues the copies on a stream of the engine's for this device, which first waits for what is on
 * `stream`, the caller's current one, and, where the sources are the memory of `from` (else NULL), for
 * what is still being copied into it. Sources and destinations stay valid until sfr_onload_wait has
 * returned 0; the memory of `from` is held by the onload.
 * 0, and the reference is the caller's; or SFR_ECLOSED, SFR_EFORK, SFR_ECAPTURING, -ENOMEM, and
 * nothing is queued; SFR_ESTATE: the memory of `from` has gone back. SFR_EAGAIN: nothing is queued,
 * since what is copied into `from` has no event to wait for: call again once sfr_snapshot_wait has
 * returned 0. What a device fails with is the onload's own: see sfr_onload_error. */
int sfr_onload_start(struct sfr_engine *engine, uint32_t device, uint64_t stream,
		     const struct sfr_onload_copy *copies, uint32_t nr, struct sfr_snapshot *from,
		     struct sfr_onload **out);
/* Has a stream of the onload's device wait for the copies. 0; SFR_EAGAIN: it cannot (a capture of a
 * graph, no event), and the caller has to wait for sfr_onload_wait. */
int sfr_onload_order(struct sfr_onload *onload, uint64_t stream);
/* Waits until no copy runs any more. 0, SFR_EAGAIN, SFR_EFORK. A slice of zero takes no lock. */
int sfr_onload_wait(struct sfr_onload *onload, uint64_t slice_ns);
/* How long the copies took on the device, and how long the first stream that had to wait for them stood
 * still; no time for what could not be timed. SFR_EAGAIN: not known yet. */
int sfr_onload_times(struct sfr_onload *onload, uint64_t *copying_ns, uint64_t *waited_ns);
/* What a device failed with, code 0: nothing. Final once the wait is over. Takes no lock. */
void sfr_onload_error(struct sfr_onload *onload, struct sfr_err *out);
/* Drops the reference, there is but one; waits for the copies if they still run. NULL is fine. */
void sfr_onload_put(struct sfr_onload *onload);
/* Whether a copy from this memory of the host needs no staging of the driver's: it lies in a pinned
 * part of the engine's pool. */
int sfr_engine_has_pinned(struct sfr_engine *engine, uint64_t addr);

#endif
