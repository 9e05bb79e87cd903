/* A save's part on one device, shared by stage_cuda.c, fill_cuda.c, landing.c and gate.c. */
#ifndef SFR_PARTS_H
#define SFR_PARTS_H

#include "device/lane.h"
#include "memory/pin.h"
#include "save/jobs.h"
#include "save/stage.h"

/* The state of a save on one device. It belongs to the ticket. */
struct sfr__cuda_part {
	struct sfr__cuda_landing landing;           /* first: the lane finds the part by it */
	struct sfr__task staging;                   /* the task for the lane's thread */
	struct sfr_ticket *ticket;                  /* constant, like the next four */
	struct sfr__cuda_lane *lane;                /* NULL before sfr_save_begin */
	uint32_t device;                            /* the driver's number */
	const struct sfr__run *captured, *deferred; /* NULL if there is no such run */

	/* used only by the capturing thread */
	CUstream stream; /* the caller's current stream */
	uint32_t capture_blk;
	bool samples_taken;
	CUevent captured_event; /* event C, until the caller's stream waits for it */

	/* used by the capture, then by the lane; items are in the store */
	struct sfr__samples samples;
	struct sfr__cuda_store store;

	/* guarded by lane->mu */
	struct sfr__cuda_staged staged; /* event S */
	uint32_t nr_out;                /* transfers in flight */
	bool called;                    /* the capturing thread is done with the part */
	bool submitted;                 /* nothing more will be queued */
	bool over;
};

/* ---- landing.c ---- */
/* The function sfr__cuda_landing.fn of a part. */
void sfr__cuda_part_landed(struct sfr__cuda_landing *landing, struct sfr__cuda_piece *piece,
			   bool ok);
/* called: the capturing thread is done. submitted: nothing more will be queued. After both calls
 * and the last transfer the part is over, and the ticket may be freed. */
void sfr__cuda_part_called(struct sfr__cuda_part *part);
void sfr__cuda_part_submitted(struct sfr__cuda_part *part);

/* ---- fill_cuda.c ---- */
/* Blocks of one run that are being filled: the copies to queue, and the transfer that will own the
 * blocks. */
struct sfr__cuda_fill {
	struct sfr__cuda_part *part;
	const struct sfr__run *run;
	bool slowly; /* keep few in flight: on the lane's thread, while no thread waits */
	struct sfr__cuda_piece *piece; /* the next transfer; allocated before anything is queued */
	struct sfr__block *last;       /* last block of the transfer */
	uint32_t nr_blocks;            /* blocks of the transfer */
	bool pinned;                   /* the destinations in the arrays are pinned memory */
	/* a copy into a block of the transfer was given to the device */
	bool touched;
	uint64_t bytes; /* bytes since the last event */
	size_t nr;      /* number of copies in the arrays */
	CUdeviceptr dst[512], src[512];
	size_t len[512];
	struct sfr_err err;
};
void sfr__cuda_fill_begin(struct sfr__cuda_fill *fill, struct sfr__cuda_part *part,
			  const struct sfr__run *run);
/* Fills one leased block: headers and padding at once, tensor bytes by copies. The fill owns the
 * block from here on, and sends it with those before it when there are enough. */
void sfr__cuda_fill_block(struct sfr__cuda_fill *fill, uint32_t blk, struct sfr__block *block);
/* Queues and sends the rest; reports an error to the ticket. */
void sfr__cuda_fill_end(struct sfr__cuda_fill *fill);
/* Queues copies of the sampled cache lines of the part's deferred sources. */
void sfr__cuda_take_samples(struct sfr__cuda_part *part);
/* Computes checksums of the part's deferred sources, for SFR_SAVE_CHECK_BYTES. Waits for each
 * byte. */
void sfr__cuda_sum(struct sfr__cuda_part *part);

#endif
