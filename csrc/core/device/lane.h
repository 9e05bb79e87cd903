/* A device's lane: queues copies on its stream and reports their completion. lane.c implements it.
 *
 * An engine has two lanes for a device, one for copies from it and one for copies to it.
 *
 * A lane knows neither saves nor snapshots. stage/transfer.c queues their copies in portions, and
 * the lane's thread calls each portion's `done` when its copies have completed. If there is more to
 * copy than should be in flight at once, a task on the lane's thread queues the rest.
 *
 * Locks: lane->mu may be taken while engine->mu is held; lanes->mu is taken before lane->mu. None
 * of them is held during a call that queues work, because such a call blocks when the stream is
 * full. Instead, a thread takes the lane's *turn* while it queues (sfr__cuda_turn_begin). */
#ifndef SFR_LANE_H
#define SFR_LANE_H

#include "sfr/source.h"
#include "base/queue.h"
#include "cuda/driver.h"

enum {
	SFR__CUDA_EVENTS_KEPT = 64,  /* unused events that a lane keeps */
	SFR__CUDA_STORES_KEPT = 2,   /* unused stores (memory for samples) that a lane keeps */
	SFR__CUDA_SMALL = 256 << 10, /* copies below this many bytes are small */
	/* failed queries in a row after which the device counts as dead */
	SFR__CUDA_FAILED_QUERIES = 64,
};

/* Bytes of a portion while no step waits for the copies; lane.c gives the reason for its value. */
extern uint64_t sfr__cuda_portion_bytes;
/* Sets the bytes of a portion and the largest number of portions in flight (0: unchanged). Only for
 * measurements and tests, while no save is in flight. */
void sfr__cuda_tune(uint64_t portion_bytes, uint64_t nr_in_flight);

struct sfr__transfer;

/* Copies that are queued together, with one event after them. */
struct sfr__cuda_portion {
	struct sfr__cuda_portion *next;
	/* Called on the lane's thread when the copies have completed. After the call the lane
	 * reuses the portion. `ok` is false if the device died: then it is unknown whether the
	 * copies were made. */
	void (*done)(struct sfr__cuda_portion *portion, bool ok);
	struct sfr__transfer *transfer; /* the copies belong to it */
	/* the transfer's client, not the lane, sets and uses these three */
	void *memory; /* the memory that the copies fill, or NULL */
	const struct sfr__extent *extent;
	/* The copies fill this block of the extent, given by its index there, and the next ones. */
	uint32_t first_blk;
	/* recorded after the copies; NULL if that failed: then the stream is queried instead */
	CUevent event;
	uint32_t failed; /* queries that failed in a row */
};

/* A store: memory for samples. A lane keeps it from save to save, because pinning takes longer than
 * the rest of the call that asks for a save. */
struct sfr__cuda_store {
	void *mem; /* NULL: none */
	size_t len;
	bool pinned;
};

/* Measures how long a stream takes for the work between two points (timer.c). All zero until the
 * first point. */
struct sfr__cuda_timer {
	CUevent begin, end; /* NULL: not measured, or already read */
	uint64_t ns;        /* the result; 0 if it is not known */
};

/* The direction of a lane's copies: out of the device, or into it. Each direction has a stream of
 * its own, because a device can copy in both at the same time. */
enum sfr__cuda_way { SFR__CUDA_OUT, SFR__CUDA_IN };

struct sfr__cuda_lane {
	struct sfr__cuda_lane *next; /* the next in the engine's list; guarded by lanes->mu */
	uint32_t device;             /* constant, like the next five */
	enum sfr__cuda_way way;
	const struct sfr__cuda *cu;
	CUcontext context;
	CUstream stream;
	pthread_t thread;

	struct sfr__mutex mu;   /* guards the fields below */
	pthread_cond_t cv;      /* wakes the thread */
	pthread_cond_t cv_wait; /* wakes threads that wait for the turn, or for copies */
	bool queueing;          /* a thread has the turn */
	SFR__QUEUE(struct sfr__cuda_portion) in_flight; /* portions in the order of the stream */
	struct sfr__cuda_portion *free_portions;        /* to be reused */
	SFR__QUEUE(struct sfr__task) tasks;             /* for the thread: sfr__cuda_push_task */
	uint64_t nr_in_flight;                          /* portions */
	/* The gate waits for the saves whose sequence number is at most this. So the thread queues
	 * their copies at once, however many portions are in flight. */
	uint64_t rush_seq;
	CUevent events[SFR__CUDA_EVENTS_KEPT]; /* unused events, to be reused */
	uint32_t nr_events;
	struct sfr__cuda_store stores[SFR__CUDA_STORES_KEPT]; /* unused stores, to be reused */
	bool no_batches;     /* the driver does not support cuMemcpyBatchAsync */
	bool no_row_batches; /* the driver does not support cuMemcpy3DBatchAsync */
	uint32_t nr_refused; /* batches of either kind that the driver refused */
	bool stopping, dead;
	char why[160]; /* the error that made the device dead; constant afterwards */
};

/* The lanes of an engine. */
struct sfr__cuda_lanes {
	struct sfr__mutex mu;
	struct sfr__cuda_lane *head; /* lanes stay until the engine is freed */
	bool stopped;
};

/* ---- lanes.c ---- */
void sfr__cuda_lanes_init(struct sfr__cuda_lanes *lanes);
/* Sets *out to the device's lane for the direction `way`, which is made at its first use. The
 * engine owns the lane. Returns 0; SFR_ECLOSED after sfr__cuda_lanes_stop; or -errno with the
 * reason in `why`. */
int sfr__cuda_lane_get(struct sfr__cuda_lanes *lanes, uint32_t device, enum sfr__cuda_way way,
		       struct sfr__cuda_lane **out, char *why, size_t why_len);
/* Ends the lanes' threads, each after its tasks and its portions in flight, and frees their device
 * resources. A second call does nothing. */
void sfr__cuda_lanes_stop(struct sfr__cuda_lanes *lanes);
/* Frees the lanes, after sfr__cuda_lanes_stop. */
void sfr__cuda_lanes_free(struct sfr__cuda_lanes *lanes);
/* Appends a sentence for each dead device to `text`, which has room for `len` bytes. */
void sfr__cuda_lanes_report_dead(struct sfr__cuda_lanes *lanes, char *text, size_t len);

/* ---- events.c ---- */
/* Records an event after the work that is queued on the stream, and returns the event, or NULL with
 * *err set. sfr__cuda_event_put gives the event back for reuse; accepts NULL. */
CUevent sfr__cuda_record(struct sfr__cuda_lane *lane, CUstream stream, struct sfr_err *err);
void sfr__cuda_event_put(struct sfr__cuda_lane *lane, CUevent event);
void sfr__cuda_event_put_locked(struct sfr__cuda_lane *lane, CUevent event);
/* Sets *err to the failure of a driver's call or, if the device is dead, to the error that made it
 * dead. Returns whether the device is dead. */
bool sfr__cuda_note_failure(struct sfr__cuda_lane *lane, const char *call, CUresult rc,
			    struct sfr_err *err);
/* Evaluates `rc`, the result of the query named `call`. *failed counts the failed queries in a row.
 * Marks the device dead if the error is sticky, or after SFR__CUDA_FAILED_QUERIES failures. Returns
 * whether the wait is over, because the work is done or the device is dead. */
bool sfr__cuda_check_query(struct sfr__cuda_lane *lane, const char *call, CUresult rc,
			   uint32_t *failed);
/* Marks the device dead, and logs that once. It is called when the device's context is unusable, or
 * does not even answer queries. `call` and `rc` are the failed call and its result. */
void sfr__cuda_mark_dead(struct sfr__cuda_lane *lane, const char *call, CUresult rc);
bool sfr__cuda_is_dead(struct sfr__cuda_lane *lane);
/* Returns whether the device is dead. If so, sets *err to the reason. */
bool sfr__cuda_fail_if_dead(struct sfr__cuda_lane *lane, struct sfr_err *err);
/* Returns whether a graph is being captured on the stream. Then work that is queued on it would
 * become part of the graph or break the capture. */
bool sfr__cuda_is_capturing(const struct sfr__cuda *cu, CUstream stream);
/* Returns a zeroed portion, new or reused, or NULL without memory. sfr__cuda_portion_put gives it
 * back for reuse. */
struct sfr__cuda_portion *sfr__cuda_portion_get(struct sfr__cuda_lane *lane);
void sfr__cuda_portion_put(struct sfr__cuda_lane *lane, struct sfr__cuda_portion *portion);

/* ---- lane.c ---- */
/* The main function of a lane's thread. */
void *sfr__cuda_lane_main(void *lane);
/* sfr__cuda_turn_begin waits until no other thread has the lane's turn, and takes it. Only the
 * thread that has the turn queues work on the lane's stream; that thread holds no lock. */
void sfr__cuda_turn_begin(struct sfr__cuda_lane *lane);
void sfr__cuda_turn_end(struct sfr__cuda_lane *lane);
/* In a turn: records an event after the queued work and appends the portion to those in flight. If
 * no event can be recorded, sets *err and appends the portion nevertheless, because its copies may
 * run. */
void sfr__cuda_portion_send(struct sfr__cuda_lane *lane, struct sfr__cuda_portion *portion,
			    struct sfr_err *err);
/* On the lane's thread: removes the portions whose copies have completed, and calls their
 * `done`. */
void sfr__cuda_poll(struct sfr__cuda_lane *lane);
/* On the lane's thread, before it queues more of save number `seq`: waits until few portions are in
 * flight, unless the gate waits for this save. */
void sfr__cuda_throttle(struct sfr__cuda_lane *lane, uint64_t seq);
/* sfr__cuda_rush records that the gate waits for save number `seq` and all saves before it;
 * sfr__cuda_is_rushed returns whether the gate waits for save number `seq`. */
bool sfr__cuda_is_rushed(struct sfr__cuda_lane *lane, uint64_t seq);
void sfr__cuda_rush(struct sfr__cuda_lane *lane, uint64_t seq);
/* Gives the lane's thread a task, which may block. */
void sfr__cuda_push_task(struct sfr__cuda_lane *lane, struct sfr__task *task);

/* ---- copies.c; in a turn ---- */
/* A growing list of copies to queue together: addresses and lengths in bytes. All zero is an empty
 * list. sfr__cuda_batch_add returns 0 or -ENOMEM. */
struct sfr__cuda_batch {
	CUdeviceptr *dst, *src;
	size_t *len, nr, room;
};
int sfr__cuda_batch_add(struct sfr__cuda_batch *batch, uint64_t dst, uint64_t src, size_t len);
void sfr__cuda_batch_free(struct sfr__cuda_batch *batch);
/* Queues the copies in the lane's direction and empties the list. `pinned`: the host memory is
 * pinned, so that few calls suffice if the driver has batches. Sets *err if a copy cannot be
 * queued. */
void sfr__cuda_batch_copy(struct sfr__cuda_lane *lane, struct sfr__cuda_batch *batch, bool pinned,
			  struct sfr_err *err);
/* A copy of `nr` rows of `width` bytes each, which begin `pitch` bytes apart on the device. */
struct sfr__cuda_rows {
	void *dst;       /* address of the first row on the host */
	CUdeviceptr src; /* address of the first row on the device */
	size_t width, nr, pitch;
};
/* Queues `nr` copies of rows from the device. On the host, rows begin dst_pitch bytes apart. Sets
 * *err if a copy cannot be queued. */
void sfr__cuda_copy_rows(struct sfr__cuda_lane *lane, const struct sfr__cuda_rows *rows, size_t nr,
			 size_t dst_pitch, bool pinned, struct sfr_err *err);
/* Queues the same copies on any stream of the current context, in one call if `batched` is set and
 * the driver has such a call. Returns the driver's error, which the caller handles. */
CUresult sfr__cuda_rows_queue(const struct sfr__cuda *cu, CUstream stream,
			      const struct sfr__cuda_rows *rows, size_t nr, size_t dst_pitch,
			      bool batched);
/* Writes a sentence for reports to `text` if the driver has refused batches. Otherwise leaves
 * `text` unchanged. */
void sfr__cuda_copies_note(struct sfr__cuda_lane *lane, char *text, size_t len);

/* ---- store.c ---- */
/* Gets a store of at least `len` bytes: an unused store of the lane, or a new one. Returns 0 or
 * -errno. */
int sfr__cuda_store_get(struct sfr__cuda_lane *lane, size_t len, struct sfr__cuda_store *store);
/* Gives a store back to the lane, which keeps it for reuse or frees it. An empty store is fine. */
void sfr__cuda_store_put(struct sfr__cuda_lane *lane, struct sfr__cuda_store *store);
void sfr__cuda_store_free(const struct sfr__cuda *cu, struct sfr__cuda_store *store);
/* Makes a store of pinned memory, or of ordinary memory if the driver refuses. The context must be
 * current. Returns 0 or -errno. */
int sfr__cuda_store_new(const struct sfr__cuda *cu, size_t len, struct sfr__cuda_store *store);

/* ---- timer.c; with the lane's context ---- */
/* Record the first and the second point on the stream. If that fails, nothing is measured. */
void sfr__cuda_timer_begin(struct sfr__cuda_lane *lane, struct sfr__cuda_timer *timer,
			   CUstream stream);
void sfr__cuda_timer_end(struct sfr__cuda_lane *lane, struct sfr__cuda_timer *timer,
			 CUstream stream);
/* Reads the time into timer->ns and frees the events. Returns false if the work has not ended
 * yet. */
bool sfr__cuda_timer_read(struct sfr__cuda_lane *lane, struct sfr__cuda_timer *timer);
/* Frees the events and keeps timer->ns. */
void sfr__cuda_timer_drop(struct sfr__cuda_lane *lane, struct sfr__cuda_timer *timer);

#endif
