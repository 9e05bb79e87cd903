/* A device's lane, and a save's part in it: what lane_cuda.c and stage_cuda.c share.
 *
 * Locks: lane->mu stands between engine->mu and pool->mu (base/lock.h); nothing of the engine
 * is taken under it. It is held over calls of the driver, none of which waits for a device. */
#ifndef SFR_LANE_H
#define SFR_LANE_H

#include "cuda/driver.h"
#include "memory/pin.h"
#include "save/save.h"

enum {
	SFR__CUDA_EVENTS_KEPT = 64, /* free ones a lane holds on to */
	SFR__CUDA_STORES_KEPT = 2,
	SFR__CUDA_BATCH = 256,       /* copies in one batched call */
	SFR__CUDA_SMALL = 256 << 10, /* copies below it go in batches */
	SFR__CUDA_QUERIES = 64, /* that fail in a row: nothing is expected of the device then */
};

/* How much is asked of a device at a time: copies queued on other streams stand in line behind
 * what is queued here. Chosen so that the line is at most 0.3 ms long at 55 GB/s; tests and the
 * benchmark's sweep change them while no save is in flight. */
extern uint64_t sfr__cuda_piece_bytes, sfr__cuda_nr_in_flight;

/* Who hears of a piece's end on the lane's thread, other than a save: a snapshot's part. `ok` is
 * false when the device died, and nobody can know what became of the copies. */
struct sfr__cuda_landing {
	void (*fn)(struct sfr__cuda_landing *landing, bool ok);
};

/* Copies that are followed by one event. */
struct sfr__cuda_piece {
	struct sfr__cuda_piece *next;
	struct sfr__cuda_landing *landing; /* NULL: of a save, and what follows says where to */
	struct sfr__cuda_part *part;
	struct sfr__block *block; /* the last piece of a block has it, others NULL */
	const struct sfr__run *run;
	uint32_t blk;
	CUevent landed;  /* NULL: could not be recorded, the stream is asked instead */
	uint32_t failed; /* queries that failed in a row */
};

/* Memory that samples are copied into, kept from save to save: pinning it takes longer than all
 * else that a call does. */
struct sfr__cuda_store {
	struct sfr__range range; /* empty: none */
	size_t len;
	bool pinned;
};

struct sfr__cuda_lane {
	struct sfr__cuda_lane *next; /* of the engine's; guarded by engine->mu */
	struct sfr_engine *engine;   /* constant, as the next five; outlives the lane */
	uint32_t device;
	const struct sfr__cuda *cu;
	CUcontext context;
	CUstream stream;
	pthread_t thread;

	struct sfr__mutex mu; /* guards what follows, and the order on the stream */
	pthread_cond_t cv;
	struct sfr__cuda_piece *head, *tail;            /* in flight, in the stream's order */
	struct sfr__cuda_piece *free_pieces;            /* to be used again */
	struct sfr__cuda_part *queue_head, *queue_tail; /* launched, deferred bytes to queue */
	uint64_t nr_in_flight;
	uint64_t rush_seq; /* a gate waits for saves up to this one: no bound on what is queued */
	CUevent events[SFR__CUDA_EVENTS_KEPT];
	uint32_t nr_events;
	struct sfr__cuda_store stores[SFR__CUDA_STORES_KEPT]; /* free ones */
	bool single_copies;                                   /* the driver refused a batch */
	bool stopping, dead;
	char why[160]; /* what it died of */
};

/* One save's part in one device. It belongs to the ticket. */
struct sfr__cuda_part {
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
	struct sfr__cuda_part *next;
	CUevent staged;  /* S, recorded once `submitted`; NULL: could not be */
	uint32_t nr_out; /* pieces in flight */
	bool called;     /* the capturing thread is through */
	bool submitted;  /* nothing will be queued any more */
	bool over;
};

/* ---- lane_cuda.c ---- */
/* The engine's lane of a device, made at its first use. 0, SFR_ECLOSED, or -errno with `why`. */
int sfr__cuda_lane_get(struct sfr_engine *engine, uint32_t device, struct sfr__cuda_lane **out,
		       char *why, size_t why_len);
/* An event, new or used before; NULL when the driver has none to give. */
CUevent sfr__cuda_event_get_locked(struct sfr__cuda_lane *lane);
void sfr__cuda_event_put_locked(struct sfr__cuda_lane *lane, CUevent event);
/* Notes that a call failed. True when the device is dead from now on, or was before. */
bool sfr__cuda_failed_locked(struct sfr__cuda_lane *lane, const char *call, CUresult rc,
			     struct sfr_err *err);
/* Gives the device up: nothing of it works any more, or nobody can tell. */
void sfr__cuda_die_locked(struct sfr__cuda_lane *lane, const char *call, CUresult rc);
/* A piece, new or used before (NULL without memory), and back. */
struct sfr__cuda_piece *sfr__cuda_piece_get(struct sfr__cuda_lane *lane);
void sfr__cuda_piece_put(struct sfr__cuda_lane *lane, struct sfr__cuda_piece *piece);
/* Appends a piece to those in flight. */
void sfr__cuda_fly_locked(struct sfr__cuda_lane *lane, struct sfr__cuda_piece *piece);
/* On the lane's thread: takes what has landed off the list. */
void sfr__cuda_poll(struct sfr__cuda_lane *lane);
/* After a change of what it depends on, with that in one piece: whether nothing of the part is queued
 * or in flight any more. True once, and then the caller settles the part, without the lock; whoever
 * hears false has to leave the part alone, since another thread may settle it and its ticket go. */
bool sfr__cuda_part_over_locked(struct sfr__cuda_part *part);
void sfr__cuda_part_settle(struct sfr__cuda_part *part);
/* Ends the lanes' threads and frees what they hold on their devices; for engine.c. */
void sfr__cuda_lanes_stop(struct sfr_engine *engine);
void sfr__cuda_lanes_free(struct sfr_engine *engine);

/* ---- copy_cuda.c ---- */
/* Queues copies, in one call where the driver has one for that and the memory is pinned. */
void sfr__cuda_copies_locked(struct sfr__cuda_lane *lane, CUdeviceptr *dst, CUdeviceptr *src,
			     size_t *len, size_t nr, bool pinned, struct sfr_err *err);
/* Memory for samples, of `len` bytes at least. 0 or -errno. */
int sfr__cuda_store_get(struct sfr__cuda_lane *lane, size_t len, struct sfr__cuda_store *store);
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
int64_t sfr__cuda_check(const struct sfr__cuda_piece *piece);
/* Gives memory of samples back: of a part, when it is over; of a lane, when it ends. */
void sfr__cuda_store_put(struct sfr__cuda_lane *lane, struct sfr__cuda_store *store);
void sfr__cuda_store_free(struct sfr__cuda_lane *lane, struct sfr__cuda_store *store);

/* ---- order_cuda.c ---- */
/* Whether work put on the stream would become part of a graph, or break one. */
bool sfr__cuda_is_capturing(const struct sfr__cuda *cu, CUstream stream);
/* The caller's stream of a device, or NULL. */
const struct sfr_stream *sfr__stream_of(const struct sfr_stream *streams, uint32_t nr,
					uint32_t device);
/* Says that the lane's device is dead, and of what. */
void sfr__cuda_refuse_locked(const struct sfr__cuda_lane *lane, struct sfr_err *err);
/* An event behind what is on the stream; NULL with `err` set where none can be had. */
CUevent sfr__cuda_record_locked(struct sfr__cuda_lane *lane, CUstream stream, struct sfr_err *err);
/* E: records what is on the caller's stream and has the lane's stream wait for it, with nothing of
 * others in between. */
void sfr__cuda_mark_locked(struct sfr__cuda_lane *lane, CUstream stream, struct sfr_err *err);
/* C: has the caller's stream wait for *event (NULL: nothing to do), which is the lane's again. */
void sfr__cuda_wait_captured(struct sfr__cuda_lane *lane, CUstream stream, CUevent *event,
			     struct sfr_err *err);
/* S: has a step's stream wait. False when the host has to: no stream, no event, or a capture. */
bool sfr__cuda_wait_staged_locked(struct sfr__cuda_lane *lane, const struct sfr_stream *stream,
				  CUevent staged);

/* ---- stage_cuda.c ---- */
/* On the lane's thread: queues a part's deferred bytes. */
void sfr__cuda_stage(struct sfr__cuda_part *part);

#endif
