/* A device's lane: queues copies on its stream and reports their completion. lane.c implements it.
 *
 * A device has two lanes, one for copies from it and one for copies to it.
 *
 * A lane knows neither saves nor snapshots. stage/transfer.c queues their copies in portions, and
 * is called when the copies of one have completed. Code with more to queue than should be in flight
 * gives the lane's thread a task.
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

/* Bytes of a portion while nobody waits; see lane.c. */
extern uint64_t sfr__cuda_portion_bytes;
/* Sets the bytes of a portion and the portions in flight (0: unchanged), for measurements and
 * tests, while no save is in flight. */
void sfr__cuda_tune(uint64_t portion_bytes, uint64_t nr_in_flight);

struct sfr__transfer;

/* Copies followed by one event. */
struct sfr__cuda_portion {
	struct sfr__cuda_portion *next;
	/* Called on the lane's thread when the copies have completed; the portion is the lane's
	 * again when it returns. `ok` is false if the device died: then it is unknown whether they
	 * were made. */
	void (*done)(struct sfr__cuda_portion *portion, bool ok);
	struct sfr__transfer *of;
	/* for the client, like the next two: the memory that is complete when this portion is, or
	 * NULL */
	void *memory;
	const struct sfr__extent *extent;
	uint32_t first_blk; /* index of the first block in its extent; the others follow */
	/* NULL: it could not be recorded, so the whole stream is queried instead */
	CUevent event;
	uint32_t failed; /* queries that failed in a row */
};

/* Memory for samples, kept from save to save because pinning takes longer than the rest of a
 * call. */
struct sfr__cuda_store {
	void *mem; /* NULL: none */
	size_t len;
	bool pinned;
};

/* Measures how long a stream spent on something; all zero until it begins. See timer.c. */
struct sfr__cuda_timer {
	CUevent begin, end; /* NULL: not measured, or already read */
	uint64_t ns;
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

	struct sfr__mutex mu;   /* guards what follows */
	pthread_cond_t cv;      /* wakes the thread */
	pthread_cond_t cv_wait; /* wakes threads that wait for the turn, or for copies */
	bool queueing;          /* a thread has the turn */
	SFR__QUEUE(struct sfr__cuda_portion) in_flight; /* in stream order */
	struct sfr__cuda_portion *free_portions;        /* to be reused */
	SFR__QUEUE(struct sfr__task) tasks;
	uint64_t nr_in_flight;
	uint64_t rush_seq; /* a gate waits for saves up to this number: queue without bound */
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
void sfr__cuda_lanes_report_dead(struct sfr__cuda_lanes *lanes, char *text, size_t len);

/* ---- events.c ---- */
/* Records an event after the work on the stream, or returns NULL and sets `err`. event_put returns
 * it for reuse. */
CUevent sfr__cuda_record(struct sfr__cuda_lane *lane, CUstream stream, struct sfr_err *err);
void sfr__cuda_event_put(struct sfr__cuda_lane *lane, CUevent event);
void sfr__cuda_event_put_locked(struct sfr__cuda_lane *lane, CUevent event);
/* Records a failed call of the driver. Returns true when the device is dead. */
bool sfr__cuda_note_failure(struct sfr__cuda_lane *lane, const char *call, CUresult rc,
			    struct sfr_err *err);
/* Returns whether waiting is over: the query `call` says so, or it failed so often in a row
 * (*failed) that the device is given up. */
bool sfr__cuda_is_over(struct sfr__cuda_lane *lane, const char *call, CUresult rc,
		       uint32_t *failed);
/* Marks the device dead: its context is unusable, or nobody can tell. */
void sfr__cuda_die(struct sfr__cuda_lane *lane, const char *call, CUresult rc);
bool sfr__cuda_is_dead(struct sfr__cuda_lane *lane);
/* Returns whether the device is dead, and then sets *err to the reason. */
bool sfr__cuda_refuses(struct sfr__cuda_lane *lane, struct sfr_err *err);
/* Returns whether work queued on the stream would become part of a graph or break its capture. */
bool sfr__cuda_is_capturing(const struct sfr__cuda *cu, CUstream stream);
/* Returns a zeroed portion, new or reused, or NULL without memory. portion_put returns it for
 * reuse. */
struct sfr__cuda_portion *sfr__cuda_portion_get(struct sfr__cuda_lane *lane);
void sfr__cuda_portion_put(struct sfr__cuda_lane *lane, struct sfr__cuda_portion *portion);

/* ---- lane.c ---- */
/* The main function of a lane's thread. */
void *sfr__cuda_lane_main(void *lane);
/* Only the thread that has the turn queues work on a lane's stream. It holds no lock. */
void sfr__cuda_turn_begin(struct sfr__cuda_lane *lane);
void sfr__cuda_turn_end(struct sfr__cuda_lane *lane);
/* In a turn: records an event after the queued work and appends the portion to those in flight.
 * Never skipped: if no event can be recorded, the whole stream is queried instead. */
void sfr__cuda_portion_send(struct sfr__cuda_lane *lane, struct sfr__cuda_portion *portion,
			    struct sfr_err *err);
/* On the lane's thread: removes portions whose copies have completed. */
void sfr__cuda_poll(struct sfr__cuda_lane *lane);
/* On the lane's thread, before queueing more: waits until few portions are in flight, unless a
 * gate waits for this save. */
void sfr__cuda_throttle(struct sfr__cuda_lane *lane, uint64_t seq);
/* is_rushed returns whether a gate waits for the save; rush records that one does. */
bool sfr__cuda_is_rushed(struct sfr__cuda_lane *lane, uint64_t seq);
void sfr__cuda_rush(struct sfr__cuda_lane *lane, uint64_t seq);
/* Gives the lane's thread a task, which may block. */
void sfr__cuda_push(struct sfr__cuda_lane *lane, struct sfr__task *task);

/* ---- copies.c; in a turn ---- */
/* A growing list of copies to queue together; all zero: none. add: 0 or -ENOMEM. */
struct sfr__cuda_batch {
	CUdeviceptr *dst, *src;
	size_t *len, nr, room;
};
int sfr__cuda_batch_add(struct sfr__cuda_batch *batch, uint64_t dst, uint64_t src, size_t len);
void sfr__cuda_batch_free(struct sfr__cuda_batch *batch);
/* Queues them in the lane's direction, in few calls if the driver has batches and the memory is
 * pinned, and empties the list. */
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

#endif
