/* A device's lane: what queues copies on its stream, and hears of their end. See lane.c.
 *
 * A device has two: what leaves it goes on one, what is brought to it on the other.
 *
 * A lane knows neither saves nor snapshots: who queues copies brings a landing, which is told of
 * their end, and who has more to queue than the lane should have at a time brings work for its
 * thread.
 *
 * Locks: lane->mu stands below engine->mu, lanes->mu alone. Neither is held over a call that puts
 * something on a stream: a full stream makes the call wait. Who does that has the lane's turn.
 */
#ifndef SFR_LANE_H
#define SFR_LANE_H

#include "sfr/source.h"
#include "base/queue.h"
#include "cuda/driver.h"

enum {
	SFR__CUDA_EVENTS_KEPT = 64, /* free ones a lane holds on to */
	SFR__CUDA_STORES_KEPT = 2,
	SFR__CUDA_SMALL = 256 << 10, /* copies below it are small */
	SFR__CUDA_QUERIES = 64, /* that fail in a row: nothing is expected of the device then */
};

/* How much is asked of a device at a time as long as nobody hurries; see lane.c. */
extern uint64_t sfr__cuda_piece_bytes;
/* Other bounds: bytes of a piece, pieces in flight (0 = as they are). For measurements and tests, while
 * no save is in flight. */
void sfr__cuda_tune(uint64_t piece_bytes, uint64_t nr_in_flight);

struct sfr__cuda_piece;

/* Who hears of a piece's end, on the lane's thread. `ok` is false when the device died, and nobody
 * can know what became of the copies. The piece is the landing's until fn returns. */
struct sfr__cuda_landing {
	void (*fn)(struct sfr__cuda_landing *landing, struct sfr__cuda_piece *piece, bool ok);
};

/* Copies that are followed by one event. */
struct sfr__cuda_piece {
	struct sfr__cuda_piece *next;
	struct sfr__cuda_landing *landing;
	struct sfr__block *blocks; /* the landing's, as the next two: full with this piece */
	const struct sfr__run *run;
	uint32_t first_blk; /* the first block's number in its run; they follow one another */
	CUevent landed;     /* NULL: could not be recorded, the stream is asked instead */
	uint32_t failed;    /* queries that failed in a row */
};

/* Memory that samples are copied into, kept from save to save: pinning it takes longer than all
 * else that a call does. */
struct sfr__cuda_store {
	void *mem; /* NULL: none */
	size_t len;
	bool pinned;
};

/* How long a stream was at something; all zero before. See timer.c. */
struct sfr__cuda_timer {
	CUevent begin, end; /* NULL: not timed, or read */
	uint64_t ns;
};

/* S: the event behind all copies of a part, and who is about to wait for it. Guarded by lane->mu. */
struct sfr__cuda_staged {
	CUevent event; /* NULL: could not be had */
	uint32_t nr_waits;
	bool over; /* all has landed: there is nothing to wait for */
};

/* Which way a lane's copies go: each has a stream of its own, since a device copies both ways at once. */
enum sfr__cuda_way { SFR__CUDA_OUT, SFR__CUDA_IN };

struct sfr__cuda_lane {
	struct sfr__cuda_lane *next; /* of the engine's; guarded by lanes->mu */
	uint32_t device;             /* constant, as the next five */
	enum sfr__cuda_way way;
	const struct sfr__cuda *cu;
	CUcontext context;
	CUstream stream;
	pthread_t thread;

	struct sfr__mutex mu; /* guards what follows */
	pthread_cond_t cv;    /* for the thread */
	pthread_cond_t cv_turn;
	bool queueing;                                /* somebody has the turn */
	SFR__QUEUE(struct sfr__cuda_piece) in_flight; /* in the stream's order */
	struct sfr__cuda_piece *free_pieces;          /* to be used again */
	SFR__QUEUE(struct sfr__task) tasks;
	uint64_t nr_in_flight;
	uint64_t rush_seq; /* a gate waits for saves up to this one: no bound on what is queued */
	CUevent events[SFR__CUDA_EVENTS_KEPT];
	uint32_t nr_events;
	struct sfr__cuda_store stores[SFR__CUDA_STORES_KEPT]; /* free ones */
	bool no_batches, no_row_batches;                      /* the driver has none */
	uint32_t nr_refused;                                  /* single batches that it refused */
	bool stopping, dead;
	char why[160]; /* what it died of; constant from then on */
};

/* The lanes of an engine. */
struct sfr__cuda_lanes {
	struct sfr__mutex mu;
	struct sfr__cuda_lane *head; /* stay until the engine is freed */
	bool stopped;
};

/* ---- lanes.c ---- */
void sfr__cuda_lanes_init(struct sfr__cuda_lanes *lanes);
/* The lane of a device, made at its first use. 0, SFR_ECLOSED, or -errno with `why`. */
int sfr__cuda_lane_get(struct sfr__cuda_lanes *lanes, uint32_t device, enum sfr__cuda_way way,
		       struct sfr__cuda_lane **out, char *why, size_t why_len);
/* Ends the lanes' threads and frees what they hold on their devices. */
void sfr__cuda_lanes_stop(struct sfr__cuda_lanes *lanes);
void sfr__cuda_lanes_free(struct sfr__cuda_lanes *lanes);
/* Appends a sentence for each device that is dead. */
void sfr__cuda_lanes_tell(struct sfr__cuda_lanes *lanes, char *text, size_t len);

/* ---- events.c ---- */
/* An event behind what is on the stream; NULL with `err` set where none can be had. And back. */
CUevent sfr__cuda_record(struct sfr__cuda_lane *lane, CUstream stream, struct sfr_err *err);
void sfr__cuda_event_put(struct sfr__cuda_lane *lane, CUevent event);
void sfr__cuda_event_put_locked(struct sfr__cuda_lane *lane, CUevent event);
/* Notes that a call failed. True when the device is dead from now on, or was before. */
bool sfr__cuda_failed(struct sfr__cuda_lane *lane, const char *call, CUresult rc,
		      struct sfr_err *err);
/* Whether nothing has to be waited for any more: the answer of a query, `call`, says that it is done,
 * or is the last of so many that failed (*failed in a row) that the device is given up. */
bool sfr__cuda_is_through(struct sfr__cuda_lane *lane, const char *call, CUresult rc,
			  uint32_t *failed);
/* Gives the device up: nothing of it works any more, or nobody can tell. */
void sfr__cuda_die(struct sfr__cuda_lane *lane, const char *call, CUresult rc);
bool sfr__cuda_is_dead(struct sfr__cuda_lane *lane);
/* The same; sets *err to what the device died of. */
bool sfr__cuda_refuses(struct sfr__cuda_lane *lane, struct sfr_err *err);
/* A piece, all zero, new or used before (NULL without memory), and back. */
struct sfr__cuda_piece *sfr__cuda_piece_get(struct sfr__cuda_lane *lane);
void sfr__cuda_piece_put(struct sfr__cuda_lane *lane, struct sfr__cuda_piece *piece);

/* ---- lane.c ---- */
/* The thread of a lane. */
void *sfr__cuda_lane_main(void *lane);
/* Only one thread at a time puts something on a lane's stream: it has the turn, and no lock. */
void sfr__cuda_turn_begin(struct sfr__cuda_lane *lane);
void sfr__cuda_turn_end(struct sfr__cuda_lane *lane);
/* In a turn: an event behind what was queued, and the piece among those in flight. It always flies:
 * where no event can be had or recorded, the stream as a whole is asked. */
void sfr__cuda_fly(struct sfr__cuda_lane *lane, struct sfr__cuda_piece *piece, struct sfr_err *err);
/* On the lane's thread: takes what has landed off the list. */
void sfr__cuda_poll(struct sfr__cuda_lane *lane);
/* On the lane's thread, before more is queued: few in flight, unless a gate waits for this save. */
void sfr__cuda_throttle(struct sfr__cuda_lane *lane, uint64_t seq);
/* Whether a gate waits for the save; and that one does. */
bool sfr__cuda_is_rushed(struct sfr__cuda_lane *lane, uint64_t seq);
void sfr__cuda_rush(struct sfr__cuda_lane *lane, uint64_t seq);
/* Gives the lane's thread something to do, which may take its time. */
void sfr__cuda_push(struct sfr__cuda_lane *lane, struct sfr__task *task);

/* ---- copies.c; in a turn ---- */
/* Queues copies the lane's way, in few calls where the driver has batches and the memory is pinned.
 * The arrays come back in another order. */
void sfr__cuda_copy(struct sfr__cuda_lane *lane, CUdeviceptr *dst, CUdeviceptr *src, size_t *len,
		    size_t nr, bool pinned, struct sfr_err *err);
/* Copies to be queued together; all zero: none. See batch.c. */
struct sfr__cuda_batch {
	CUdeviceptr *dst, *src;
	size_t *len, nr, room;
};
int sfr__cuda_batch_add(struct sfr__cuda_batch *batch, uint64_t dst, uint64_t src, size_t len);
void sfr__cuda_batch_free(struct sfr__cuda_batch *batch);
/* Queues them, unless something has failed. */
void sfr__cuda_batch_copy(struct sfr__cuda_lane *lane, struct sfr__cuda_batch *batch, bool pinned,
			  struct sfr_err *err);
/* Copies of `nr` rows of `width` bytes, `pitch` bytes from row to row on the device. */
struct sfr__cuda_rows {
	void *dst;
	CUdeviceptr src;
	size_t width, nr, pitch;
};
/* Queues them; on the host rows stand dst_pitch bytes apart. */
void sfr__cuda_copy_rows(struct sfr__cuda_lane *lane, const struct sfr__cuda_rows *rows, size_t nr,
			 size_t dst_pitch, bool pinned, struct sfr_err *err);
/* The same on any stream of the current context, by whoever knows what an error means. */
CUresult sfr__cuda_rows_queue(const struct sfr__cuda *cu, CUstream stream,
			      const struct sfr__cuda_rows *rows, size_t nr, size_t dst_pitch,
			      bool batched);
/* A sentence for reports when copies did not go the best way, else "". */
void sfr__cuda_copies_note(struct sfr__cuda_lane *lane, char *text, size_t len);

/* ---- store.c ---- */
/* Memory for samples, of `len` bytes at least. 0 or -errno. */
int sfr__cuda_store_get(struct sfr__cuda_lane *lane, size_t len, struct sfr__cuda_store *store);
/* Gives it back: to the lane; to the driver, when the lane ends. */
void sfr__cuda_store_put(struct sfr__cuda_lane *lane, struct sfr__cuda_store *store);
void sfr__cuda_store_free(const struct sfr__cuda *cu, struct sfr__cuda_store *store);
/* Memory of the driver's, which is pinned by birth; other memory where it has none to give. */
int sfr__cuda_store_new(const struct sfr__cuda *cu, size_t len, struct sfr__cuda_store *store);

/* ---- timer.c; with the lane's context ---- */
void sfr__cuda_timer_begin(struct sfr__cuda_lane *lane, struct sfr__cuda_timer *timer,
			   CUstream stream);
void sfr__cuda_timer_end(struct sfr__cuda_lane *lane, struct sfr__cuda_timer *timer,
			 CUstream stream);
/* Sets timer->ns, and frees the events. False: it has not ended yet. */
bool sfr__cuda_timer_read(struct sfr__cuda_lane *lane, struct sfr__cuda_timer *timer);
void sfr__cuda_timer_drop(struct sfr__cuda_lane *lane, struct sfr__cuda_timer *timer);

/* ---- order.c ---- */
/* Whether work put on the stream would become part of a graph, or break one. */
bool sfr__cuda_is_capturing(const struct sfr__cuda *cu, CUstream stream);
/* The caller's stream of a device, or NULL. */
const struct sfr_stream *sfr__stream_of(const struct sfr_stream *streams, uint32_t nr,
					uint32_t device);
/* E: records what is on the caller's stream and has the lane's stream wait for it. In a turn. */
void sfr__cuda_mark(struct sfr__cuda_lane *lane, CUstream stream, struct sfr_err *err);
/* C: has the caller's stream wait for *event (NULL: nothing to do), which is the lane's again. */
void sfr__cuda_wait_captured(struct sfr__cuda_lane *lane, CUstream stream, CUevent *event,
			     struct sfr_err *err);
/* S: has a step's stream wait. False when the host has to: no stream, no event, or a capture. */
bool sfr__cuda_wait_staged(struct sfr__cuda_lane *lane, struct sfr__cuda_staged *staged,
			   const struct sfr_stream *stream);
/* All of it has landed. */
void sfr__cuda_staged_over_locked(struct sfr__cuda_lane *lane, struct sfr__cuda_staged *staged);

#endif
