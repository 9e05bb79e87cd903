/* Lanes of devices: copies to the host's memory, the order on a lane's stream, who hears of their
 * end. A lane's mutex is held over calls of the driver, none of which waits for a device. */
#ifndef SFR_LANE_H
#define SFR_LANE_H

#include "cuda/driver.h"
#include "base/queue.h"
#include "memory/pin.h"
#include "memory/range.h"

struct sfr__run;

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

struct sfr__cuda_piece;

/* Who hears of a piece's end, on the lane's thread and with no lock held. `ok` is false when the
 * device died, and nobody can know what became of the copies. */
struct sfr__cuda_landing {
	void (*fn)(struct sfr__cuda_landing *landing, const struct sfr__cuda_piece *piece, bool ok);
};

/* Copies that are followed by one event. */
struct sfr__cuda_piece {
	struct sfr__cuda_piece *next;
	struct sfr__cuda_landing *landing;
	CUevent landed;  /* NULL: could not be recorded, the stream is asked instead */
	uint32_t failed; /* queries that failed in a row */
	/* the landing's own: a block that is full with this piece, NULL for others; which it is */
	struct sfr__block *block;
	const struct sfr__run *run;
	uint32_t blk;
};

/* Memory that samples are copied into, kept from save to save: pinning it takes longer than all
 * else that a call does. */
struct sfr__cuda_store {
	struct sfr__range range; /* empty: none */
	size_t len;
	bool pinned;
};

struct sfr__cuda_lane {
	struct sfr__cuda_lane *next; /* of the engine's */
	uint32_t device;             /* constant, as the next four */
	const struct sfr__cuda *cu;
	CUcontext context;
	CUstream stream;
	pthread_t thread;

	struct sfr__mutex mu; /* guards what follows, and the order on the stream */
	pthread_cond_t cv;
	SFR__QUEUE(struct sfr__cuda_piece) flying; /* in the stream's order */
	struct sfr__cuda_piece *free_pieces;       /* to be used again */
	SFR__QUEUE(struct sfr__task) tasks;        /* copies to be queued by the lane's thread */
	uint64_t nr_in_flight;
	uint64_t rush_seq; /* a gate waits for saves up to this one: no bound on what is queued */
	CUevent events[SFR__CUDA_EVENTS_KEPT];
	uint32_t nr_events;
	struct sfr__cuda_store stores[SFR__CUDA_STORES_KEPT]; /* free ones */
	bool single_copies;                                   /* the driver refused a batch */
	bool stopping, dead;
	char why[160]; /* what it died of */
};

/* The lanes of one engine. */
struct sfr__cuda_lanes {
	struct sfr__mutex mu; /* guards what follows, and each lane's `next` */
	struct sfr__cuda_lane *first;
	bool closing; /* there will be no more */
};

/* ---- lane.c; events.c from sfr__cuda_event_get_locked on ---- */
void sfr__cuda_lanes_init(struct sfr__cuda_lanes *lanes);
/* The lane of a device, made at its first use. 0, SFR_ECLOSED, or -errno with `why`. */
int sfr__cuda_lane_get(struct sfr__cuda_lanes *lanes, uint32_t device, struct sfr__cuda_lane **out,
		       char *why, size_t why_len);
/* From now on no lane is made. */
void sfr__cuda_lanes_close(struct sfr__cuda_lanes *lanes);
/* Ends the lanes' threads and frees what they hold on their devices. */
void sfr__cuda_lanes_stop(struct sfr__cuda_lanes *lanes);
void sfr__cuda_lanes_free(struct sfr__cuda_lanes *lanes);
/* Adds a sentence for each dead device. */
void sfr__cuda_lanes_describe(struct sfr__cuda_lanes *lanes, char *text, size_t len);
/* Has the lane's thread queue copies. */
void sfr__cuda_push_locked(struct sfr__cuda_lane *lane, struct sfr__task *task);
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
/* ---- store.c ---- */
/* Queues copies, in one call where the driver has one for that and the memory is pinned. */
void sfr__cuda_copies_locked(struct sfr__cuda_lane *lane, CUdeviceptr *dst, CUdeviceptr *src,
			     size_t *len, size_t nr, bool pinned, struct sfr_err *err);
/* Memory for samples, of `len` bytes at least. 0 or -errno. */
int sfr__cuda_store_get(struct sfr__cuda_lane *lane, size_t len, struct sfr__cuda_store *store);
/* Reads bytes of the device through the store, waiting for them: *crc goes on. err->code. */
int sfr__cuda_sum_through(struct sfr__cuda_lane *lane, struct sfr__cuda_store *store,
			  const char *src, uint64_t nbytes, uint32_t *crc, struct sfr_err *err);
/* Gives memory of samples back: of a part, when it is over; of a lane, when it ends. */
void sfr__cuda_store_put(struct sfr__cuda_lane *lane, struct sfr__cuda_store *store);
void sfr__cuda_store_free(struct sfr__cuda_lane *lane, struct sfr__cuda_store *store);

/* ---- order.c ---- */
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

#endif
