/* A device's lane: queues copies on its stream and reports their completion. lane.c implements it.
 *
 * An engine has two lanes for a device, one for each direction. Copies are queued in portions. The
 * lane's thread calls a portion's `done` when the portion's copies have completed.
 *
 * Locks are taken in the order engine->mu, lanes->mu, lane->mu. None of them is held while work is
 * queued, because a call that queues work blocks when the stream is full. Instead the thread that
 * queues has the lane's *turn* (sfr__cuda_acquire_turn). */
#ifndef SFR_LANE_H
#define SFR_LANE_H

#include "sfr/source.h"
#include "base/queue.h"
#include "cuda/driver.h"

enum {
	SFR__CUDA_EVENTS_KEPT = 64,    /* unused events that a lane keeps */
	SFR__CUDA_STORES_KEPT = 2,     /* unused stores (memory for samples) that a lane keeps */
	SFR__CUDA_SMALL = 256 << 10,   /* smaller copies are batched apart from larger ones */
	SFR__CUDA_FAILED_QUERIES = 64, /* after so many in a row the device counts as dead */
};

/* Bytes of a portion while no step waits for the copies. */
extern uint64_t sfr__cuda_portion_bytes;
/* For tests: sets the bytes of a portion and how many may be in flight. 0: unchanged. */
void sfr__cuda_set_portion_limits(uint64_t portion_bytes, uint64_t nr_in_flight);

struct sfr__transfer;

/* Copies that are queued together, with one event after them. */
struct sfr__cuda_portion {
	struct sfr__cuda_portion *next;
	/* Called on the lane's thread when the copies have completed (ok), or when the device has
	 * died (!ok): some copies may then still run. The lane reuses the portion afterwards. */
	void (*done)(struct sfr__cuda_portion *portion, bool ok);
	struct sfr__transfer *transfer; /* owner of the copies */

	/* used only by the transfer's client */
	void *memory;                     /* filled by the copies; or NULL */
	const struct sfr__extent *extent; /* the extent of the file whose blocks the copies fill */
	uint32_t first_blk;               /* the first of these blocks, by its index */

	/* used by the lane */
	CUevent event; /* recorded after the copies; NULL: that failed, so the stream is queried */
	uint32_t nr_failed_queries; /* in a row */
};

/* Host memory for samples (store.c). */
struct sfr__cuda_host_buffer {
	void *mem; /* NULL: none */
	size_t len;
	bool pinned;
};

/* The time between two points of a stream (timer.c). Zero-initialised. */
struct sfr__cuda_timer {
	CUevent begin, end; /* NULL: not measured, or already read */
	uint64_t ns;        /* the result; 0: unknown */
};

/* The direction of a lane's copies. A device can copy out and in at the same time. */
enum sfr__cuda_direction { SFR__CUDA_OUT, SFR__CUDA_IN };

struct sfr__cuda_lane {
	struct sfr__cuda_lane *next; /* in the engine's list; guarded by lanes->mu */

	/* constant */
	uint32_t device;
	enum sfr__cuda_direction direction;
	const struct sfr__cuda_api *cu;
	CUcontext context;
	CUstream stream;
	pthread_t thread;

	struct sfr__mutex mu; /* guards the fields below */

	pthread_cond_t cv;      /* wakes the thread */
	pthread_cond_t cv_wait; /* wakes threads that wait for the turn, or for copies */
	bool turn_taken;        /* a thread has the turn to queue */

	SFR__QUEUE(struct sfr__cuda_portion) in_flight; /* portions in the order of the stream */
	uint64_t nr_in_flight;                          /* portions */
	SFR__QUEUE(struct sfr__task) tasks;             /* to be run by the thread */
	/* the gate waits for the saves up to this number, so their copies are not throttled */
	uint64_t rush_seq;

	/* kept for reuse */
	struct sfr__cuda_portion *free_portions;
	CUevent events[SFR__CUDA_EVENTS_KEPT];
	uint32_t nr_events;
	struct sfr__cuda_host_buffer stores[SFR__CUDA_STORES_KEPT];

	bool no_batches;     /* the driver does not support cuMemcpyBatchAsync */
	bool no_row_batches; /* the driver does not support cuMemcpy3DBatchAsync */
	uint32_t nr_refused; /* batches of either kind that the driver refused */
	bool stopping, dead;
	char why[160]; /* why the device is dead; constant once `dead` is set */
};

/* The lanes of an engine. */
struct sfr__cuda_lanes {
	struct sfr__mutex mu;
	struct sfr__cuda_lane *head; /* lanes stay until the engine is freed */
	bool stopped;
};

/* ---- lanes.c ---- */
void sfr__cuda_lanes_init(struct sfr__cuda_lanes *lanes);
/* Gets or makes the device's lane for a direction. The engine owns the lane. Returns 0, SFR_ECLOSED
 * after sfr__cuda_lanes_stop, or -errno with the reason in `why`. */
int sfr__cuda_lane_get(struct sfr__cuda_lanes *lanes, uint32_t device,
		       enum sfr__cuda_direction direction, struct sfr__cuda_lane **out, char *why,
		       size_t why_len);
/* Waits for all tasks and portions, and ends the lanes. A second call does nothing. */
void sfr__cuda_lanes_stop(struct sfr__cuda_lanes *lanes);
void sfr__cuda_lanes_free(struct sfr__cuda_lanes *lanes);
/* Appends a sentence for each dead device to `text` of `len` bytes. */
void sfr__cuda_lanes_report_dead(struct sfr__cuda_lanes *lanes, char *text, size_t len);

/* ---- events.c ---- */
/* Records an event after the work queued on the stream. Returns the event, or NULL with *err set.
 * sfr__cuda_event_put gives an event back for reuse; accepts NULL. */
CUevent sfr__cuda_record_event(struct sfr__cuda_lane *lane, CUstream stream, struct sfr_err *err);
void sfr__cuda_event_put(struct sfr__cuda_lane *lane, CUevent event);
void sfr__cuda_event_put_locked(struct sfr__cuda_lane *lane, CUevent event);
/* Sets *err to a call's failure or, on a dead device, to the error that made it dead. Returns
 * whether the device is dead. */
bool sfr__cuda_handle_failure(struct sfr__cuda_lane *lane, const char *call, CUresult rc,
			      struct sfr_err *err);
/* Handles the result `rc` of a query. `call` is the query's name. *nr_failed counts the failed
 * queries in a row. Marks the device dead after a sticky error, or after SFR__CUDA_FAILED_QUERIES
 * failures. Returns whether the wait is over: the work is done, or the device is dead. */
bool sfr__cuda_handle_query_result(struct sfr__cuda_lane *lane, const char *call, CUresult rc,
				   uint32_t *nr_failed);
/* Marks the device dead after `call` has failed with `rc`. Logs that once. */
void sfr__cuda_mark_dead(struct sfr__cuda_lane *lane, const char *call, CUresult rc);
bool sfr__cuda_is_dead(struct sfr__cuda_lane *lane);
/* If the device is dead, sets *err to the reason and returns true. */
bool sfr__cuda_fail_if_dead(struct sfr__cuda_lane *lane, struct sfr_err *err);
/* Returns whether a stream is being captured into a CUDA graph. Work that is queued on such a
 * stream would become part of the graph or break the capture. */
bool sfr__cuda_is_capturing(const struct sfr__cuda_api *cu, CUstream stream);
/* Returns a zeroed portion, or NULL without memory. sfr__cuda_portion_put gives a portion back. */
struct sfr__cuda_portion *sfr__cuda_portion_get(struct sfr__cuda_lane *lane);
void sfr__cuda_portion_put(struct sfr__cuda_lane *lane, struct sfr__cuda_portion *portion);

/* ---- lane.c ---- */
void *sfr__cuda_lane_main(void *lane);
/* Begin and end the lane's turn. The first waits until no other thread has the turn. Only the
 * thread that has the turn queues work on the lane's stream. It holds no lock meanwhile. */
void sfr__cuda_acquire_turn(struct sfr__cuda_lane *lane);
void sfr__cuda_release_turn(struct sfr__cuda_lane *lane);
/* Records an event after the queued copies and puts the portion in flight. If the event fails, sets
 * *err and still puts the portion in flight, because the copies may run. Only in a turn. */
void sfr__cuda_portion_add_in_flight(struct sfr__cuda_lane *lane, struct sfr__cuda_portion *portion,
				     struct sfr_err *err);
/* Called on the lane's thread. Removes the portions whose copies have completed, and calls
 * `done`. */
void sfr__cuda_poll(struct sfr__cuda_lane *lane);
/* Called on the lane's thread. Waits until few portions are in flight, or the gate waits for the
 * save `seq`. */
void sfr__cuda_wait_while_throttled(struct sfr__cuda_lane *lane, uint64_t seq);
/* Records that the gate waits for the saves up to this sequence number. */
void sfr__cuda_rush_saves_up_to(struct sfr__cuda_lane *lane, uint64_t seq);
bool sfr__cuda_is_rushed(struct sfr__cuda_lane *lane, uint64_t seq);
/* Gives the lane's thread a task, which may block. */
void sfr__cuda_push_task(struct sfr__cuda_lane *lane, struct sfr__task *task);

/* ---- copies.c; the caller has the lane's turn ---- */
/* A growing list of copies to queue together. All zero is an empty list. */
struct sfr__cuda_batch {
	CUdeviceptr *dst, *src; /* addresses, on the device or the host */
	size_t *len;            /* bytes */
	size_t nr, capacity;    /* copies in the list, and how many the arrays can hold */
};
/* Returns 0 or -ENOMEM. */
int sfr__cuda_batch_add(struct sfr__cuda_batch *batch, uint64_t dst, uint64_t src, size_t len);
void sfr__cuda_batch_free(struct sfr__cuda_batch *batch);
/* Queues the copies in the lane's direction and empties the list. Sets *err if that fails.
 * `pinned`: all the host memory is pinned. */
void sfr__cuda_queue_batch(struct sfr__cuda_lane *lane, struct sfr__cuda_batch *batch, bool pinned,
			   struct sfr_err *err);
/* A copy of `nr` rows of `width` bytes each, which begin `pitch` bytes apart on the device. */
struct sfr__cuda_rows {
	void *dst;       /* address of the first row on the host */
	CUdeviceptr src; /* address of the first row on the device */
	size_t width, nr, pitch;
};
/* Queues `nr` copies. On the host, rows begin dst_pitch bytes apart. Sets *err if that fails. */
void sfr__cuda_lane_queue_rows(struct sfr__cuda_lane *lane, const struct sfr__cuda_rows *rows,
			       size_t nr, size_t dst_pitch, bool pinned, struct sfr_err *err);
/* Does the same on any stream of the current context. With `batched`, queues all copies with one
 * call if the driver has such a call. Returns the driver's error. */
CUresult sfr__cuda_queue_rows(const struct sfr__cuda_api *cu, CUstream stream,
			      const struct sfr__cuda_rows *rows, size_t nr, size_t dst_pitch,
			      bool batched);
/* Writes a sentence for reports to `text` if the driver has refused batches. */
void sfr__cuda_describe_refusals(struct sfr__cuda_lane *lane, char *text, size_t len);

/* ---- store.c ---- */
/* Gets a store of at least `len` bytes, reused or new. Returns 0 or -errno. */
int sfr__cuda_host_buffer_get(struct sfr__cuda_lane *lane, size_t len,
			      struct sfr__cuda_host_buffer *store);
/* Gives a store back to the lane. Accepts an empty store. */
void sfr__cuda_host_buffer_put(struct sfr__cuda_lane *lane, struct sfr__cuda_host_buffer *store);
void sfr__cuda_host_buffer_free(const struct sfr__cuda_api *cu,
				struct sfr__cuda_host_buffer *store);
/* Makes a store in the current context. Returns 0 or -errno. */
int sfr__cuda_host_buffer_new(const struct sfr__cuda_api *cu, size_t len,
			      struct sfr__cuda_host_buffer *store);

/* ---- timer.c; called with the lane's context current ---- */
/* Record the first and the second point on the stream. If that fails, nothing is measured. */
void sfr__cuda_timer_begin(struct sfr__cuda_lane *lane, struct sfr__cuda_timer *timer,
			   CUstream stream);
void sfr__cuda_timer_end(struct sfr__cuda_lane *lane, struct sfr__cuda_timer *timer,
			 CUstream stream);
/* Reads the time into timer->ns and frees the events. Returns false if the work has not ended. */
bool sfr__cuda_timer_read(struct sfr__cuda_lane *lane, struct sfr__cuda_timer *timer);
/* Frees the events and keeps timer->ns. */
void sfr__cuda_timer_free_events(struct sfr__cuda_lane *lane, struct sfr__cuda_timer *timer);

#endif
