/* Probes of device memory. device/glance.c implements them. */
#ifndef SFR_GLANCE_PUBLIC_H
#define SFR_GLANCE_PUBLIC_H

#include <stdint.h>

/* A probe copies three cache lines of each of several storages on one device to the host, twice:
 * after a step and before the next. The result is known some time later, and nobody waits for the
 * device. One thread at a time uses a probe. */
struct sfr_glance;
struct sfr_glance_at {
	uint64_t addr, nbytes; /* skipped when shorter than three lines */
};
/* Makes a probe. -ENODEV, -EIO: the device cannot be probed; -ENOMEM. */
int sfr_glance_new(uint32_t device, struct sfr_glance **out);
/* Frees a probe at any time; accepts NULL. */
void sfr_glance_free(struct sfr_glance *look);
/* Queues the copies behind the work on `stream`, a stream of the probe's device, which then waits
 * for them. `again` is nonzero the second time; it takes the same storages in the same order, with
 * nbytes = 0 for those no longer wanted. SFR_EBUSY: nothing was queued, because another thread is
 * probing or the previous copies have not completed. SFR_ECAPTURING, SFR_EFORK; -EIO: the probe
 * never works again. */
int sfr_glance_take(struct sfr_glance *look, uint64_t stream, const struct sfr_glance_at *at,
		    uint32_t nr, int again);
/* Returns 1 when the copies have completed, 0 when they have not, and -EIO or SFR_EFORK when they
 * never will. */
int sfr_glance_landed(struct sfr_glance *look);
/* After both rounds of copies have completed: whether storage `i` had the same bytes both times. */
int sfr_glance_same(const struct sfr_glance *look, uint32_t i);

#endif
