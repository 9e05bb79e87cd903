/* Transfers: the copies of one client between one device and host memory, in transfer.c.
 *
 * A client is a save, a snapshot, an onload (offload/onload.c) or a load. It says which bytes go
 * where, and is called when their copies have completed. Everything in between is done here:
 *
 *   caller's stream   ... work  E │                  waits C │ forward, backward  waits S │ step
 *   lane's stream               waits E │ captured, samples, C │ the rest            S │
 *
 *   E   begin      is recorded on the caller's stream first; the lane's stream waits for it, so
 *                  the copies see the state at the call
 *   C   captured   is recorded after the captured copies; the caller's stream waits for it
 *   S   staged     is recorded after all copies; a step's stream waits for it (gate)
 *
 * Waiting for an event that was never recorded silently does nothing. So each event is recorded
 * before anybody can wait for it.
 *
 * Copies are sent in portions. Each is followed by an event, which the lane's thread queries. The
 * copies to a portion's memory are in that portion or in earlier ones, and a portion is allocated
 * before its first copy is queued. So every copy is followed by an event that the thread queries.
 *
 *              begin                       end                    the last portion
 *     no lane ───────▶ queueing           ─────▶ in flight       ─────────────────▶ over
 *                      1 thread + portions       portions only                      0 users
 *                           │      end, and nothing was sent or all portions are done    ▲
 *                           └────────────────────────────────────────────────────────────┘
 *
 * `nr_users` counts the thread that queues and the portions in flight. The last of them to end
 * calls `over`, and does not touch the transfer afterwards. A refused begin leaves no lane, and
 * none of the client's functions is called.
 *
 * After an error no more copies are queued, but a portion with queued copies is still sent, so that
 * its event follows them. On a device that died, it is unknown what became of a copy (`ok` is
 * false). Memory to which nothing was queued is given back (`unused`).
 *
 * One thread at a time queues. A save queues its captured bytes on the caller's thread, and the
 * rest on the lane's, in small portions (`slowly`) until a gate waits for them. Small portions cost
 * a save little, because it waits for blocks anyway, and they let copies of other streams run
 * between them. A snapshot or an onload has all of its memory, and its caller mostly waits for it,
 * so all its copies are sent as one portion. */
#ifndef SFR_STAGE_TRANSFER_H
#define SFR_STAGE_TRANSFER_H

#include "device/lane.h"
#include "memory/pool.h"
#include "stage/samples.h"

/* Functions that a client provides. */
struct sfr__transfer_ops {
	/* Called on the lane's thread when the copies of a portion have completed, or with !ok when
	 * the device has died under them. May be NULL. */
	void (*portion_done)(struct sfr__transfer *tr, struct sfr__cuda_portion *portion, bool ok);
	/* Called on the thread that queues, when a portion is given up because the device is dead
	 * and nothing was queued to the portion's memory. NULL for a client whose portions have no
	 * memory. */
	void (*unused)(struct sfr__transfer *tr, struct sfr__cuda_portion *portion);
	/* Called on the lane's thread, or in sfr__transfer_end, when nothing is queued or in flight
	 * any more; the client may free the transfer. NULL for a client that calls
	 * sfr__transfer_wait before it frees the transfer. */
	void (*over)(struct sfr__transfer *tr);
};

/* Embedded in its client; all fields but `ops` are zero before begin. */
struct sfr__transfer {
	const struct sfr__transfer_ops *ops; /* constant, like the next */
	struct sfr__cuda_lane *lane;         /* NULL: not begun */

	/* used by the thread that queues */
	CUstream stream;                         /* the caller's */
	struct sfr__cuda_scope scope;            /* between enter and leave */
	struct sfr_err err;                      /* the first error */
	struct sfr__cuda_batch pinned, unpinned; /* copies that were added and are not queued yet */
	struct sfr__cuda_portion *portion;       /* the next to send; NULL: nothing was added */
	uint64_t bytes;                          /* added to that portion so far */
	bool launched;                           /* a portion was sent */
	bool has_queued; /* copies may have been queued since the last sfr__transfer_send */
	bool slowly;     /* small portions, and few in flight; only on the lane's thread */
	bool timed;      /* measure the copies that are queued next */
	uint64_t seq;    /* sfr_ticket.seq: `slowly` ends when a gate waits for this save */

	/* used by the thread that queues, then in `portion_done` and by the last user */
	struct sfr__samples samples; /* its items are in the store's memory */
	struct sfr__cuda_store store;
	struct sfr__cuda_timer copying;

	bool lost; /* the device died under a portion; constant once the transfer is over */

	/* guarded by lane->mu */
	_Atomic uint32_t nr_users; /* also read without the lock */
	uint32_t nr_waits;         /* threads about to insert a wait for S */
	CUevent staged;            /* S; NULL: could not be recorded, or is not needed any more */
};

/* Gets the device's lane, for a transfer that waits for no stream of the caller (without E).
 * Returns SFR_ECLOSED, or 0: then sfr__transfer_end must follow if tr->lane is set, and otherwise
 * tr->err says what failed. */
int sfr__transfer_open(struct sfr__transfer *tr, struct sfr__cuda_lanes *lanes, uint32_t device,
		       enum sfr__cuda_way way);
/* Does the same, enters the context on this thread, and makes the lane's stream wait for the
 * caller's (E). Also returns SFR_ECAPTURING: then there is no lane. */
int sfr__transfer_begin(struct sfr__transfer *tr, struct sfr__cuda_lanes *lanes, uint32_t device,
			enum sfr__cuda_way way, CUstream stream);
/* Returns whether all copies have ended, or none was begun. Takes no lock. */
static inline bool sfr__transfer_is_over(const struct sfr__transfer *tr)
{
	return tr->nr_users == 0;
}
/* Waits until the transfer is over. 0 or SFR_EAGAIN. */
int sfr__transfer_wait(struct sfr__transfer *tr, uint64_t deadline_ns);
/* Enter and leave the device's context on this thread, around the functions below. The lane's
 * thread is always in the context. sfr__transfer_enter returns false, with the reason in err, if
 * the driver refuses. */
bool sfr__transfer_enter(struct sfr__transfer *tr);
void sfr__transfer_leave(struct sfr__transfer *tr);

/* Prepares the pool for pinning with this device's driver. Returns false if that is impossible: the
 * pool keeps the reason. */
bool sfr__transfer_prepare_pin(const struct sfr__transfer *tr, struct sfr__pool *pool);
/* Returns the portion to which the next copies are added, or NULL with the error in err: no memory.
 * The client may set its fields until the portion is sent. While `slowly` is set, adding copies
 * sends portions too. */
struct sfr__cuda_portion *sfr__transfer_portion(struct sfr__transfer *tr);
/* Adds a copy of `len` bytes between addresses on the device and in host memory. `pinned`: the host
 * memory is registered with the driver. */
void sfr__transfer_add(struct sfr__transfer *tr, uint64_t dst, uint64_t src, uint64_t len,
		       bool pinned);
/* Adds a copy whose end in host memory is in the pool, or in pinned memory elsewhere. Splits the
 * copy where regions of the pool meet, because a driver refuses a copy across two registrations. */
void sfr__transfer_add_pooled(struct sfr__transfer *tr, const struct sfr__pool *pool, uint64_t dst,
			      uint64_t src, uint64_t len);
/* Gets the transfer's store, memory for samples of these sources, unless it has one already.
 * `sources` is NULL if the caller had no memory for the array. Returns false, with the error in
 * err, if there is no memory. */
bool sfr__transfer_get_store(struct sfr__transfer *tr, const struct sfr__sampled *sources,
			     uint32_t nr);
/* Queues copies that gather samples of the sources. Frees the array `sources`, which may be NULL as
 * above. `seed` decides which lines are sampled. Any error is in err. */
void sfr__transfer_sample(struct sfr__transfer *tr, struct sfr__sampled *sources, uint32_t nr,
			  uint64_t seed);
/* Returns whether the device has died; then err says why. */
bool sfr__transfer_died(struct sfr__transfer *tr);
/* Sends the portion, if there is one. */
void sfr__transfer_send(struct sfr__transfer *tr);
/* Queues the copies that were added, and makes the caller's stream wait for them (C). */
void sfr__transfer_mark_captured(struct sfr__transfer *tr);
/* Copies `len` bytes at `src` on the device to the store, and waits for them, but not inside the
 * driver. Returns false, with the error in err, if that failed. */
bool sfr__transfer_fetch(struct sfr__transfer *tr, uint64_t src, size_t len);
/* Sends the copies that were added and are not sent yet, and records S. */
void sfr__transfer_mark_staged(struct sfr__transfer *tr);
/* Sends the copies that were added and are not sent yet, and leaves the context. This thread must
 * not use the transfer afterwards. */
void sfr__transfer_end(struct sfr__transfer *tr);

/* Makes a stream wait for S, unless all copies have completed. Returns false if the host must wait
 * itself, because there is no stream or no event, or because the stream captures a graph. Any
 * thread may call it. */
bool sfr__transfer_gate(struct sfr__transfer *tr, const struct sfr_stream *stream);
/* Returns the caller's stream of a device, or NULL. */
const struct sfr_stream *sfr__stream_of(const struct sfr_stream *streams, uint32_t nr,
					uint32_t device);

#endif
