/* A device's lane: queues copies on its stream and reports their completion. lane.c implements it.
 *
 * A device has two lanes, one for copies from it and one for copies to it.
 *
 * A lane knows neither saves nor snapshots. Code that queues copies supplies a landing, which is
 * called when they have completed. Code with more to queue than should be in flight gives the
 * lane's thread a task.
 *
 * Locks: lane->mu ranks below engine->mu; lanes->mu is taken alone. Neither is held over a call
 * that queues work, because a full stream blocks the call. The queueing thread has the lane's turn
 * instead. */
#ifndef SFR_LANE_H
#define SFR_LANE_H

#include "sfr/source.h"
#include "base/queue.h"
#include "cuda/driver.h"

enum {
	SFR__CUDA_EVENTS_KEPT = 64, /* unused events that a lane keeps */
	SFR__CUDA_STORES_KEPT = 2,
	SFR__CUDA_SMALL = 256 << 10, /* copies below this many bytes are small */
	SFR__CUDA_QUERIES = 64, /* failed queries in a row after which the device is given up */
};

/* Bytes of a transfer while nobody waits; see lane.c. */
extern uint64_t sfr__cuda_piece_bytes;
/* Sets the bytes of a transfer and the transfers in flight (0: unchanged), for measurements and
 * tests, while no save is in flight. */
void sfr__cuda_tune(uint64_t piece_bytes, uint64_t nr_in_flight);

struct sfr__cuda_piece;

/* Called on the lane's thread when a transfer's copies have completed. `ok` is false when the
 * device died, and nobody can know what became of them. The landing owns the piece until fn
 * returns. */
struct sfr__cuda_landing {
	void (*fn)(struct sfr__cuda_landing *landing, struct sfr__cuda_piece *piece, bool ok);
};

/* A transfer: copies followed by one event. */
struct sfr__cuda_piece {
	struct sfr__cuda_piece *next;
	struct sfr__cuda_landing *landing;
	/* the landing's, like the next two: blocks that this transfer completes */
	struct sfr__block *blocks;
	const struct sfr__run *run;
	uint32_t first_blk; /* index of the first block in its extent; the others follow */
	CUevent landed;     /* NULL: could not be recorded, and the whole stream is queried */
	uint32_t failed;    /* queries that failed in a row */
};

/* Memory for samples, kept from save to save because pinning takes longer than the rest of a
 * call. */
struct sfr__cuda_store {
	void *mem; /* NULL: none */
	size_t len;
	bool pinned;
};

/* Measures how long a stream spent on something; all zero before. See timer.c. */
struct sfr__cuda_timer {
	CUevent begin, end; /* NULL: not measured, or already read */
	uint64_t ns;
};

/* S: the event behind all copies, and the threads about to insert a wait for it. Guarded by
 * lane->mu. */
struct sfr__cuda_staged {
	CUevent event; /* NULL: could not be recorded */
	uint32_t nr_waits;
	bool over; /* all copies have completed: nothing to wait for */
};

/* The direction of a lane's copies. Each has its own stream, because a device copies both ways at
 * once. */
enum sfr__cuda_way { SFR__CUDA_OUT, SFR__CUDA_IN };

struct sfr__cuda_lane {
	struct sfr__cuda_lane *next; /* in the engine's list; guarded by lanes->mu */
	uint32_t device;             /* constant, like the next five */
	enum sfr__cuda_way way;
	const struct sfr__cuda *cu;
	CUcontext context;
	CUstream stream;
	pthread_t thread;

	struct sfr__mutex mu; /* guards what follows */
	pthread_cond_t cv;    /* wakes the thread */
	pthread_cond_t cv_turn;
	bool queueing;                                /* a thread has the turn */
	SFR__QUEUE(struct sfr__cuda_piece) in_flight; /* in stream order */
	struct sfr__cuda_piece *free_pieces;          /* to be reused */
	SFR__QUEUE(struct sfr__task) tasks;
	uint64_t nr_in_flight;
	uint64_t rush_seq; /* a gate waits for saves up to this one: queue without bound */
	CUevent events[SFR__CUDA_EVENTS_KEPT];
	uint32_t nr_events;
	struct sfr__cuda_store stores[SFR__CUDA_STORES_KEPT]; /* unused ones */
	bool no_batches, no_row_batches;                      /* the driver has no such batches */
	uint32_t nr_refused;                                  /* batches that the driver refused */
	bool stopping, dead;
	char why[160]; /* the error it died of; constant afterwards */
};

/* The lanes of an engine. */
struct sfr__cuda_lanes {
	struct sfr__mutex mu;
	struct sfr__cuda_lane *head; /* lanes stay until the engine is freed */
	bool stopped;
};

/* ---- lanes.c ---- */
void sfr__cuda_lanes_init(struct sfr__cuda_lanes *lanes);
/* Returns the lane of a device, making it at first use. 0, SFR_ECLOSED, or -errno with `why`. */
int sfr__cuda_lane_get(struct sfr__cuda_lanes *lanes, uint32_t device, enum sfr__cuda_way way,
		       struct sfr__cuda_lane **out, char *why, size_t why_len);
/* Ends the lanes' threads and frees their device resources. */
void sfr__cuda_lanes_stop(struct sfr__cuda_lanes *lanes);
void sfr__cuda_lanes_free(struct sfr__cuda_lanes *lanes);
/* Appends a sentence for each dead device. */
void sfr__cuda_lanes_tell(struct sfr__cuda_lanes *lanes, char *text, size_t len);

/* ---- events.c ---- */
/* Records an event behind the work on the stream, or returns NULL and sets `err`. event_put returns
 * it for reuse. */
CUevent sfr__cuda_record(struct sfr__cuda_lane *lane, CUstream stream, struct sfr_err *err);
void sfr__cuda_event_put(struct sfr__cuda_lane *lane, CUevent event);
void sfr__cuda_event_put_locked(struct sfr__cuda_lane *lane, CUevent event);
/* Notes a failed call. Returns true when the device is dead. */
bool sfr__cuda_failed(struct sfr__cuda_lane *lane, const char *call, CUresult rc,
		      struct sfr_err *err);
/* Returns whether waiting is over: the query `call` says so, or it failed so often in a row
 * (*failed) that the device is given up. */
bool sfr__cuda_is_through(struct sfr__cuda_lane *lane, const char *call, CUresult rc,
			  uint32_t *failed);
/* Marks the device dead: its context is unusable, or nobody can tell. */
void sfr__cuda_die(struct sfr__cuda_lane *lane, const char *call, CUresult rc);
bool sfr__cuda_is_dead(struct sfr__cuda_lane *lane);
/* Returns whether the device is dead, and then sets *err to the reason. */
bool sfr__cuda_refuses(struct sfr__cuda_lane *lane, struct sfr_err *err);
/* Returns a zeroed transfer, new or reused, or NULL without memory. piece_put returns it for
 * reuse. */
struct sfr__cuda_piece *sfr__cuda_piece_get(struct sfr__cuda_lane *lane);
void sfr__cuda_piece_put(struct sfr__cuda_lane *lane, struct sfr__cuda_piece *piece);

/* ---- lane.c ---- */
/* The main function of a lane's thread. */
void *sfr__cuda_lane_main(void *lane);
/* Only the thread that has the turn queues work on a lane's stream. It holds no lock. */
void sfr__cuda_turn_begin(struct sfr__cuda_lane *lane);
void sfr__cuda_turn_end(struct sfr__cuda_lane *lane);
/* In a turn: records an event behind the queued work and appends the transfer to those in flight.
 * Never skipped: if no event can be recorded, the whole stream is queried instead. */
void sfr__cuda_fly(struct sfr__cuda_lane *lane, struct sfr__cuda_piece *piece, struct sfr_err *err);
/* On the lane's thread: removes transfers whose copies have completed. */
void sfr__cuda_poll(struct sfr__cuda_lane *lane);
/* On the lane's thread, before queueing more: waits until few transfers are in flight, unless a
 * gate waits for this save. */
void sfr__cuda_throttle(struct sfr__cuda_lane *lane, uint64_t seq);
/* Return whether a gate waits for the save; and say that one does. */
bool sfr__cuda_is_rushed(struct sfr__cuda_lane *lane, uint64_t seq);
void sfr__cuda_rush(struct sfr__cuda_lane *lane, uint64_t seq);
/* Gives the lane's thread a task, which may block. */
void sfr__cuda_push(struct sfr__cuda_lane *lane, struct sfr__task *task);

/* ---- copies.c; in a turn ---- */
/* Queues copies in the lane's direction, in few calls if the driver has batches and the memory is
 * pinned. Reorders the arrays. */
void sfr__cuda_copy(struct sfr__cuda_lane *lane, CUdeviceptr *dst, CUdeviceptr *src, size_t *len,
		    size_t nr, bool pinned, struct sfr_err *err);
/* Copies to queue together; all zero: none. See batch.c. */
struct sfr__cuda_batch {
	CUdeviceptr *dst, *src;
	size_t *len, nr, room;
};
int sfr__cuda_batch_add(struct sfr__cuda_batch *batch, uint64_t dst, uint64_t src, size_t len);
void sfr__cuda_batch_free(struct sfr__cuda_batch *batch);
/* Queues them, unless an error is set. */
void sfr__cuda_batch_copy(struct sfr__cuda_lane *lane, struct sfr__cuda_batch *batch, bool pinned,
			  struct sfr_err *err);
/* `nr` rows of `width` bytes, `pitch` bytes apart on the device. */
struct sfr__cuda_rows {
	void *dst;
	CUdeviceptr src;
	size_t width, nr, pitch;
};
/* Queues copies of rows, which are dst_pitch bytes apart on the host. */
void sfr__cuda_copy_rows(struct sfr__cuda_lane *lane, const struct sfr__cuda_rows *rows, size_t nr,
			 size_t dst_pitch, bool pinned, struct sfr_err *err);
/* Does the same on any stream of the current context; the caller handles errors. */
CUresult sfr__cuda_rows_queue(const struct sfr__cuda *cu, CUstream stream,
			      const struct sfr__cuda_rows *rows, size_t nr, size_t dst_pitch,
			      bool batched);
/* Writes a sentence for reports if copies were not batched, else leaves "". */
void sfr__cuda_copies_note(struct sfr__cuda_lane *lane, char *text, size_t len);

/* ---- store.c ---- */
/* Gets memory of at least `len` bytes for samples. 0 or -errno. */
int sfr__cuda_store_get(struct sfr__cuda_lane *lane, size_t len, struct sfr__cuda_store *store);
/* Returns memory to the lane for reuse, or to the driver when the lane ends. */
void sfr__cuda_store_put(struct sfr__cuda_lane *lane, struct sfr__cuda_store *store);
void sfr__cuda_store_free(const struct sfr__cuda *cu, struct sfr__cuda_store *store);
/* Allocates memory: the driver's, which is pinned, or ordinary memory if the driver has none. */
int sfr__cuda_store_new(const struct sfr__cuda *cu, size_t len, struct sfr__cuda_store *store);

/* ---- timer.c; with the lane's context ---- */
void sfr__cuda_timer_begin(struct sfr__cuda_lane *lane, struct sfr__cuda_timer *timer,
			   CUstream stream);
void sfr__cuda_timer_end(struct sfr__cuda_lane *lane, struct sfr__cuda_timer *timer,
			 CUstream stream);
/* Reads the time into timer->ns and frees the events. False: it has not ended yet. */
bool sfr__cuda_timer_read(struct sfr__cuda_lane *lane, struct sfr__cuda_timer *timer);
void sfr__cuda_timer_drop(struct sfr__cuda_lane *lane, struct sfr__cuda_timer *timer);

/* ---- order.c ---- */
/* Returns whether work queued on the stream would become part of a graph or break its capture. */
bool sfr__cuda_is_capturing(const struct sfr__cuda *cu, CUstream stream);
/* Returns the caller's stream of a device, or NULL. */
const struct sfr_stream *sfr__stream_of(const struct sfr_stream *streams, uint32_t nr,
					uint32_t device);
/* E: makes the lane's stream wait for what is on the caller's stream. In a turn. */
void sfr__cuda_mark(struct sfr__cuda_lane *lane, CUstream stream, struct sfr_err *err);
/* C: makes the caller's stream wait for *event (NULL: does nothing) and takes the event back. */
void sfr__cuda_wait_captured(struct sfr__cuda_lane *lane, CUstream stream, CUevent *event,
			     struct sfr_err *err);
/* S: makes a step's stream wait. False when the host must wait: no stream, no event, or a
 * capture. */
bool sfr__cuda_wait_staged(struct sfr__cuda_lane *lane, struct sfr__cuda_staged *staged,
			   const struct sfr_stream *stream);
/* Notes that all copies have completed. */
void sfr__cuda_staged_over_locked(struct sfr__cuda_lane *lane, struct sfr__cuda_staged *staged);

#endif
