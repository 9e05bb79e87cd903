/* A save's state on one device, for stage_device.c and gate.c. */
#ifndef SFR_DEVICE_STATE_H
#define SFR_DEVICE_STATE_H

#include "save/jobs.h"
#include "save/stage.h"
#include "stage/transfer.h"

struct sfr__device_state {
	struct sfr__transfer transfer;
	struct sfr__task task;     /* queues the deferred sources, on the lane's thread */
	struct sfr_ticket *ticket; /* owns this; constant */
	uint32_t device;           /* the driver's number; constant */
	const struct sfr__extent *captured, *deferred; /* NULL: there is none on the device */

	/* used only by the caller's thread, in the capture */
	uint32_t capture_blk; /* the next captured block to fill */
	bool samples_taken;
};

#endif
