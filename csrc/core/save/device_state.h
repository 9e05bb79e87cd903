/* A save's state on one device, shared by stage_device.c and gate.c. */
#ifndef SFR_DEVICE_STATE_H
#define SFR_DEVICE_STATE_H

#include "save/jobs.h"
#include "save/stage.h"
#include "stage/transfer.h"

/* The ticket owns it. */
struct sfr__device_state {
	struct sfr__transfer transfer;
	struct sfr__task task;     /* runs stage_deferred on the lane's thread */
	struct sfr_ticket *ticket; /* constant, like the next two */
	uint32_t device;           /* the driver's number */
	const struct sfr__extent *captured, *deferred; /* NULL if there is no such extent */

	/* used only by the capturing thread */
	uint32_t capture_blk; /* the next captured block to fill */
	bool samples_taken;
};

#endif
