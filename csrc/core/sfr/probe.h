/* Probes of device memory. device/probe.c implements them. */
#ifndef SFR_PROBE_PUBLIC_H
#define SFR_PROBE_PUBLIC_H

#include <stdint.h>

/* A probe copies three cache lines of each of several storages on one device to the host, twice:
 * after a step and before the next. The result is known some time later, and nobody waits for the
 * device. One thread at a time uses a probe. */
struct sfr_probe;
struct sfr_probe_range {
	uint64_t addr, nbytes; /* skipped when shorter than three lines */
};
/* Makes a probe. -ENODEV, -EIO: the device cannot be probed; -ENOMEM. */
int sfr_probe_new(uint32_t device, struct sfr_probe **out);
/* Frees a probe at any time; accepts NULL. */
void sfr_probe_free(struct sfr_probe *probe);
/* Queues the copies after the work on `stream`, a stream of the probe's device; the stream's later
 * work waits for them. `again` is nonzero for the second copy. Its ranges are those of the first,
 * in the same order, with nbytes = 0 for storages that are no longer wanted. SFR_EBUSY: nothing was
 * queued, because another thread is probing or the previous copies have not completed.
 * SFR_ECAPTURING, SFR_EFORK; -EIO: the probe never works again. */
int sfr_probe_copy(struct sfr_probe *probe, uint64_t stream, const struct sfr_probe_range *ranges,
		   uint32_t nr, int again);
/* Returns 1 when the copies have completed, 0 when they have not, and -EIO or SFR_EFORK when they
 * never will. */
int sfr_probe_done(struct sfr_probe *probe);
/* Returns 1 if storage `i` had the same bytes both times, else 0. Called only after both copies
 * have completed. */
int sfr_probe_same(const struct sfr_probe *probe, uint32_t i);

#endif
