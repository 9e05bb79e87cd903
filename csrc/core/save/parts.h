/* A save's part in a device, as the files share it that know of devices. See stage_cuda.c. */
#ifndef SFR_PARTS_H
#define SFR_PARTS_H

#include "device/lane.h"
#include "save/save.h"

/* One save's part in one device. It belongs to the ticket. */
struct sfr__cuda_part {
	struct sfr__cuda_landing landing; /* hears of each piece */
	struct sfr__task staging;         /* on the lane's thread: queues the deferred bytes */
	struct sfr_ticket *ticket;        /* constant, as the next four */
	struct sfr__cuda_lane *lane;      /* NULL until begun */
	uint32_t device;                  /* the driver's number */
	const struct sfr__run *captured, *deferred; /* NULL: none */

	/* only the capturing thread touches these */
	CUstream stream; /* the caller's current one */
	uint32_t capture_blk;
	bool samples_taken;
	CUevent captured_event; /* C, until the caller's stream waits for it */

	struct sfr__samples samples; /* capture, then the lane; items lie in the store */
	struct sfr__cuda_store store;

	/* guarded by lane->mu */
	CUevent staged;  /* S, recorded once `submitted`; NULL: could not be */
	uint32_t nr_out; /* pieces in flight */
	bool called;     /* the capturing thread is through */
	bool submitted;  /* nothing will be queued any more */
	bool over;
};

/* ---- blocks_cuda.c ---- */
/* Fills one block: headers and padding at once, tensor bytes by copies that are queued. The block
 * is the lane's from here on. `slowly`: on the lane's thread, with few pieces in flight. */
void sfr__cuda_stage_block(struct sfr__cuda_part *part, const struct sfr__run *run, uint32_t blk,
			   struct sfr__block *block, bool slowly);
/* On the lane's thread, before more is queued: few in flight, unless a gate waits for this save. */
void sfr__cuda_throttle(struct sfr__cuda_part *part);
/* Queues copies of the sampled lines of the part's deferred sources. */
void sfr__cuda_take_samples(struct sfr__cuda_part *part);
/* Checksums of the part's deferred sources, for SFR_SAVE_CHECK_BYTES: waits for each byte. */
void sfr__cuda_sum(struct sfr__cuda_part *part);
/* What landed in a block, compared with the samples. The index of a torn source, or -1. */
int64_t sfr__cuda_check(struct sfr__cuda_part *part, const struct sfr__cuda_piece *piece);

/* ---- landing.c ---- */
void sfr__cuda_part_landed(struct sfr__cuda_landing *landing, const struct sfr__cuda_piece *piece,
			   bool ok);
/* After a change of what it depends on, with that in one piece: whether nothing of the part is queued
 * or in flight any more. True once, and then the caller settles the part, without the lock; whoever
 * hears false has to leave the part alone, since another thread may settle it and its ticket go. */
bool sfr__cuda_part_over_locked(struct sfr__cuda_part *part);
void sfr__cuda_part_settle(struct sfr__cuda_part *part);
#endif
