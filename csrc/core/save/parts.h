/* A save's part in a device, as stage_cuda.c, fill_cuda.c, landing.c and gate.c share it. */
#ifndef SFR_PARTS_H
#define SFR_PARTS_H

#include "device/lane.h"
#include "memory/pin.h"
#include "save/save.h"

/* It belongs to the ticket. */
struct sfr__cuda_part {
	struct sfr__cuda_landing landing;           /* first: the lane knows the part by it */
	struct sfr__task staging;                   /* for the lane's thread */
	struct sfr_ticket *ticket;                  /* constant, as the next four */
	struct sfr__cuda_lane *lane;                /* NULL until begun */
	uint32_t device;                            /* the driver's number */
	const struct sfr__run *captured, *deferred; /* NULL: none */

	/* only the capturing thread touches these */
	CUstream stream; /* the caller's current one */
	uint32_t capture_blk;
	bool samples_taken;
	CUevent captured_event; /* C, until the caller's stream waits for it */

	struct sfr__samples samples; /* capture, then the lane; items lie in the store */
	struct sfr__cuda_store store;

	/* guarded by lane->mu */
	struct sfr__cuda_staged staged; /* S */
	uint32_t nr_out;                /* pieces in flight */
	bool called;                    /* the capturing thread is through */
	bool submitted;                 /* nothing will be queued any more */
	bool over;
};

/* ---- landing.c ---- */
/* sfr__cuda_landing.fn of a part. */
void sfr__cuda_part_landed(struct sfr__cuda_landing *landing, struct sfr__cuda_piece *piece,
			   bool ok);
/* The capturing thread is through; nothing will be queued any more. With the second of the two and
 * the last piece the part is over, and the ticket may be gone. */
void sfr__cuda_part_called(struct sfr__cuda_part *part);
void sfr__cuda_part_submitted(struct sfr__cuda_part *part);

/* ---- fill_cuda.c ---- */
/* Blocks on their way, of one run: what is to be copied, and the piece that will watch it. */
struct sfr__cuda_fill {
	struct sfr__cuda_part *part;
	const struct sfr__run *run;
	bool slowly; /* few in flight: on the lane's thread, while nobody hurries */
	struct sfr__cuda_piece *piece; /* flies next; made before anything is queued */
	struct sfr__block *last;       /* of the piece's */
	uint32_t nr_blocks;            /* of the piece's */
	bool pinned;                   /* what stands in the arrays goes to pinned memory */
	bool touched;                  /* the device was given a copy into a block of the piece's */
	uint64_t bytes;                /* since the last event */
	size_t nr;                     /* in the arrays */
	CUdeviceptr dst[512], src[512];
	size_t len[512];
	struct sfr_err err;
};
void sfr__cuda_fill_begin(struct sfr__cuda_fill *fill, struct sfr__cuda_part *part,
			  const struct sfr__run *run);
/* Fills one leased block: headers and padding at once, tensor bytes by copies. The block is the
 * fill's from here on, and flies with those before it when there are enough. */
void sfr__cuda_fill_block(struct sfr__cuda_fill *fill, uint32_t blk, struct sfr__block *block);
/* Queues what is left, and has it fly; tells the ticket what went wrong. */
void sfr__cuda_fill_end(struct sfr__cuda_fill *fill);
/* Queues copies of the sampled lines of the part's deferred sources. */
void sfr__cuda_take_samples(struct sfr__cuda_part *part);
/* Checksums of the part's deferred sources, for SFR_SAVE_CHECK_BYTES: waits for each byte. */
void sfr__cuda_sum(struct sfr__cuda_part *part);

#endif
