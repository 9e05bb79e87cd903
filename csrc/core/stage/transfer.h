/* Transfers: the copies of one client between one device and host memory, in transfer.c.
 *
 * A client is a save, a snapshot, an onload (offload/onload.c) or a load. It says which bytes go
 * where, and is called when their copies have completed.
 *
 *   caller's stream   ... work  E │                  waits C │ forward, backward  waits S │ step
 *   lane's stream               waits E │ captured, samples, C │ the rest            S │
 *
 *   E   begin      is recorded on the caller's stream first; the lane's stream waits for it, so
 *                  the copies see the state at the call
 *   C   captured   is recorded after the captured copies; the caller's stream waits for it
 *   S   staged     is recorded after all copies; a step's stream waits for it (gate)
 *
 * Each event is recorded before anybody can wait for it: waiting for an event that was never
 * recorded silently does nothing. Copies are sent in portions. A portion is allocated before its
 * first copy is queued, so every copy is followed by a portion's event.
 *
 *              begin                       end                    the last portion
 *     no lane ───────▶ queueing           ─────▶ in flight       ─────────────────▶ over
 *                      1 thread + portions       portions only                      0 users
 *                           │      end, and nothing was sent or all portions are done    ▲
 *                           └────────────────────────────────────────────────────────────┘
 *
 * `nr_users` counts the thread that queues and the portions in flight. The last user calls `over`,
 * and does not touch the transfer afterwards. After an error no more copies are queued, but a
 * portion with queued copies is still sent.
 *
 * One thread at a time queues. For a save that is the caller's thread, then the lane's. The lane's
 * thread queues small portions, so that copies of other streams run between them, until a gate
 * waits. A snapshot or an onload is sent as one portion, because its caller mostly waits for it. */
#ifndef SFR_STAGE_TRANSFER_H
#define SFR_STAGE_TRANSFER_H

#include "device/lane.h"
#include "memory/pool.h"
#include "stage/samples.h"

/* Functions that a client provides. They may be NULL, except as stated. */
struct sfr__transfer_ops {
	/* Called on the lane's thread when the copies of a portion have completed. !ok: the device
	 * has died, and some copies may still run. */
	void (*portion_done)(struct sfr__transfer *tr, struct sfr__cuda_portion *portion, bool ok);
	/* Called on the thread that queues, instead of `portion_done`, for a portion with memory
	 * that is not sent: the device is dead, and no copy to the memory was queued. Must not be
	 * NULL if portions have memory. */
	void (*portion_dropped)(struct sfr__transfer *tr, struct sfr__cuda_portion *portion);
	/* Called on the lane's thread or in sfr__transfer_end_queueing, when all copies have ended.
	 * May free the transfer. If it is NULL, the client calls sfr__transfer_wait before it frees
	 * the transfer. */
	void (*over)(struct sfr__transfer *tr);
};

/* Embedded in its client; all fields but `ops` are zero before begin. */
struct sfr__transfer {
	/* constant */
	const struct sfr__transfer_ops *ops;
	struct sfr__cuda_lane *lane; /* NULL: not begun */

	/* used by the thread that queues */
	CUstream stream;                         /* the caller's */
	struct sfr__cuda_scope scope;            /* between enter and leave */
	struct sfr_err err;                      /* the first error */
	struct sfr__cuda_batch pinned, unpinned; /* copies that were added and are not queued yet */
	struct sfr__cuda_portion *portion;       /* the next to send; NULL: nothing was added */
	uint64_t bytes;                          /* added to `portion` so far */
	bool launched;                           /* a portion was sent */
	bool has_queued; /* copies may have been queued since the last sfr__transfer_send_portion */
	bool throttled;  /* small portions, and few in flight; only on the lane's thread */
	bool timed;      /* measure the copies that are queued next */
	uint64_t seq;    /* of the save (sfr_ticket.seq), for a transfer that is throttled */

	/* used by the thread that queues, then in `portion_done` and by the last user */
	struct sfr__samples samples;
	struct sfr__cuda_host_buffer store; /* memory of the samples */
	struct sfr__cuda_timer copying;     /* measures copies, see `timed` */

	bool device_died; /* while a portion was in flight; constant once the transfer is over */

	/* guarded by lane->mu */
	_Atomic uint32_t nr_users; /* also read without the lock */
	uint32_t nr_waits;         /* threads about to insert a wait for S */
	CUevent staged; /* S; NULL: not recorded yet, not recordable, or not needed any more */
};

/* Opens a transfer that does not wait for a stream of the caller: it has no E. Returns SFR_ECLOSED
 * or 0. After 0 the caller calls sfr__transfer_end_queueing if tr->lane is set; otherwise tr->err
 * says what failed. */
int sfr__transfer_open(struct sfr__transfer *tr, struct sfr__cuda_lanes *lanes, uint32_t device,
		       enum sfr__cuda_direction direction);
/* Does the same, enters the context on this thread, and makes the lane's stream wait for the
 * caller's (E). If the caller's stream is captured into a graph, returns SFR_ECAPTURING and leaves
 * tr->lane NULL. */
int sfr__transfer_begin_after_stream(struct sfr__transfer *tr, struct sfr__cuda_lanes *lanes,
				     uint32_t device, enum sfr__cuda_direction direction,
				     CUstream stream);
/* Returns whether all copies have ended, or none was begun. Takes no lock. */
static inline bool sfr__transfer_is_over(const struct sfr__transfer *tr)
{
	return tr->nr_users == 0;
}
/* Waits until the transfer is over. Returns 0 or SFR_EAGAIN. */
int sfr__transfer_wait(struct sfr__transfer *tr, uint64_t deadline_ns);
/* Enter and leave the device's context around the functions below; the lane's thread is always in
 * it. Entering returns false, with tr->err set, if the driver refuses. */
bool sfr__transfer_enter_context(struct sfr__transfer *tr);
void sfr__transfer_leave_context(struct sfr__transfer *tr);

/* Prepares the pool for pinning. Returns false if that is impossible; the pool keeps the reason. */
bool sfr__transfer_prepare_pin(const struct sfr__transfer *tr, struct sfr__pool *pool);
/* Returns the portion to which the next copies are added. The client may set the portion's fields
 * until the portion is sent. Returns NULL if memory is short, with the error in tr->err. */
struct sfr__cuda_portion *sfr__transfer_get_or_make_portion(struct sfr__transfer *tr);
/* Adds a copy of `len` bytes between device and host memory. `pinned`: the host memory is pinned.
 * If the transfer is throttled, sends the portion when it is full. */
void sfr__transfer_add_copy(struct sfr__transfer *tr, uint64_t dst, uint64_t src, uint64_t len,
			    bool pinned);
/* Adds a copy from or to host memory that is in the pool, or pinned elsewhere. Splits the copy
 * where regions of the pool meet, because a driver refuses a copy across two registrations. */
void sfr__transfer_add_pooled_copy(struct sfr__transfer *tr, const struct sfr__pool *pool,
				   uint64_t dst, uint64_t src, uint64_t len);
/* Gets a store for samples of these sources, unless the transfer has one. `sources` is NULL if the
 * caller had no memory for the array. Returns false if memory is short, with the error in
 * tr->err. */
bool sfr__transfer_get_sample_store(struct sfr__transfer *tr,
				    const struct sfr__source_to_sample *sources, uint32_t nr);
/* Queues copies that gather samples of the sources. Frees the array `sources`, which may be NULL as
 * in sfr__transfer_get_sample_store. `seed` decides which lines are sampled. Any error is in
 * tr->err. */
void sfr__transfer_queue_sample_copies(struct sfr__transfer *tr,
				       struct sfr__source_to_sample *sources, uint32_t nr,
				       uint64_t seed);
/* Returns whether the device has died; then tr->err says why. */
bool sfr__transfer_fail_if_device_dead(struct sfr__transfer *tr);
/* Queues the copies that were added, and sends their portion if there is one. */
void sfr__transfer_send_portion(struct sfr__transfer *tr);
/* Queues the copies that were added, and makes the caller's stream wait for them (C). */
void sfr__transfer_make_stream_wait(struct sfr__transfer *tr);
/* Copies `len` bytes at `src` on the device to the store, and waits for them without a blocking
 * call of the driver. Returns false after an error, which is in tr->err. */
bool sfr__transfer_fetch_to_store(struct sfr__transfer *tr, uint64_t src, size_t len);
/* Sends the rest of the copies, and records S. */
void sfr__transfer_send_and_record_staged(struct sfr__transfer *tr);
/* Sends the rest and leaves the context. This thread must not use the transfer any more. */
void sfr__transfer_end_queueing(struct sfr__transfer *tr);

/* Makes a stream wait for S, unless all copies have completed. Returns false if the host must wait
 * instead: no stream, no event, or the stream captures a graph. Any thread may call it. */
bool sfr__transfer_gate_stream(struct sfr__transfer *tr, const struct sfr_device_stream *stream);
/* Returns the caller's stream of a device, or NULL. */
const struct sfr_device_stream *sfr__find_stream(const struct sfr_device_stream *streams,
						 uint32_t nr, uint32_t device);

#endif
