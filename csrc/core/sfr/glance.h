/* Glances at memory of a device. See device/glance.c. */
#ifndef SFR_GLANCE_PUBLIC_H
#define SFR_GLANCE_PUBLIC_H

#include <stdint.h>

/* Three lines of each of some storages on one device, copied down twice: after a step, and before the
 * next. Whether they are the same is known some time later; nobody waits for the device. A glance
 * is used by one thread at a time. */
struct sfr_glance;
struct sfr_glance_at {
	uint64_t addr, nbytes; /* fewer bytes than three lines: passed over */
};
/* -ENODEV, -EIO: the device cannot be looked at; -ENOMEM. */
int sfr_glance_new(uint32_t device, struct sfr_glance **out);
/* May be called at any time; NULL is fine. */
void sfr_glance_free(struct sfr_glance *look);
/* Queues the copies behind what is on `stream`, a stream of the glance's device, which then waits for
 * them. `again`: the second time, of the same storages in the same order; such as are not wanted any
 * more are given with no bytes. SFR_EBUSY: nothing was queued, because another thread is looking or
 * the glance before has not landed; SFR_ECAPTURING, SFR_EFORK; -EIO: never again. */
int sfr_glance_take(struct sfr_glance *look, uint64_t stream, const struct sfr_glance_at *at,
		    uint32_t nr, int again);
/* 1: all of it has landed; 0: not yet; -EIO, SFR_EFORK: it never will. */
int sfr_glance_landed(struct sfr_glance *look);
/* Once it has landed, twice: whether storage number i was the same both times. */
int sfr_glance_same(const struct sfr_glance *look, uint32_t i);

#endif
