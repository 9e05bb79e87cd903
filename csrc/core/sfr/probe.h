/* Probes of device memory. device/probe.c implements them. */
#ifndef SFR_PROBE_PUBLIC_H
#define SFR_PROBE_PUBLIC_H

#include <stdint.h>

/* A probe copies three cache lines of each of several storages on one device to the host, twice:
 * after a step and before the next. The result is known later; nobody waits for the device. One
 * thread at a time uses a probe. */
struct sfr_probe;
struct sfr_probe_range {
	uint64_t addr, nbytes; /* skipped when shorter than three cache lines */
};
/* Makes a probe. Returns 0, -ENOMEM, or -ENODEV or -EIO if the device cannot be probed. */
int sfr_probe_new(uint32_t device, struct sfr_probe **out);
/* Frees a probe at any time; accepts NULL. */
void sfr_probe_free(struct sfr_probe *probe);
/* Queues the copies after the work on `stream`, a stream of the probe's device. The stream's later
 * work waits for the copies. `again` nonzero: these are the second copies, and `ranges` must be
 * those of the first copies in the same order; nbytes 0 leaves a storage out. Returns 0, or:
 *
 *   SFR_EBUSY   another thread is probing, or the previous copies have not completed
 *   -EIO        the probe never works again
 *   SFR_ECAPTURING, SFR_EFORK, -EINVAL */
int sfr_probe_queue_copies(struct sfr_probe *probe, uint64_t stream,
			   const struct sfr_probe_range *ranges, uint32_t nr, int again);
/* Returns 1 if the copies have completed, 0 if not yet; -EIO or SFR_EFORK if they never will. */
int sfr_probe_is_done(struct sfr_probe *probe);
/* Returns 1 if storage `i` had the same bytes both times, else 0. For completed copies only. */
int sfr_probe_is_unchanged(const struct sfr_probe *probe, uint32_t i);

#endif
