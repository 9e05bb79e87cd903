/* Queues a client's copies on a device's lane, and calls the client when they have completed. See
 * transfer.h for the life of a transfer, and device/lane.h for the *turn* in which a thread
 * queues. */
#include <errno.h>

#include "base/base.h"
#include "memory/pin.h"
#include "stage/transfer.h"

/* ---- users --------------------------------------------------------------------------- */

/* Gives the event S back to the lane, unless a thread is about to wait for it. */
static void drop_staged_event_locked(struct sfr__transfer *tr)
{
	if (tr->nr_waits != 0)
		return;
	sfr__cuda_event_put_locked(tr->lane, tr->staged);
	tr->staged = NULL;
}

/* Counts one user less. The last user ends the transfer; only a user can add users. */
static void drop_user(struct sfr__transfer *tr)
{
	/* loaded here, because another thread may free the transfer below */
	void (*over)(struct sfr__transfer *tr) = tr->ops->over;
	struct sfr__cuda_lane *lane = tr->lane;
	bool last;

	sfr__lock(&lane->mu);
	last = tr->nr_users == 1;
	if (!last) {
		tr->nr_users--;
		pthread_cond_broadcast(&lane->cv_wait);
	}
	sfr__unlock(&lane->mu);
	if (!last)
		return;
	/* nr_users stays 1 until the end, so that a client that waits does not free the transfer */
	sfr__cuda_host_buffer_put(lane, &tr->store);
	/* returns true, because the copies have ended */
	(void)sfr__cuda_timer_read(lane, &tr->copying);
	sfr__lock(&lane->mu);
	drop_staged_event_locked(tr);
	tr->nr_users = 0; /* a client without `over` may free the transfer from here on */
	pthread_cond_broadcast(&lane->cv_wait);
	sfr__unlock(&lane->mu);
	if (over)
		over(tr);
}

static void portion_done(struct sfr__cuda_portion *portion, bool ok)
{
	struct sfr__transfer *tr = portion->transfer;

	if (!ok)
		tr->device_died = true;
	if (tr->ops->portion_done)
		tr->ops->portion_done(tr, portion, ok);
	drop_user(tr);
}

int sfr__transfer_wait(struct sfr__transfer *tr, uint64_t deadline_ns)
{
	struct sfr__cuda_lane *lane = tr->lane;
	int rc = 0;

	if (sfr__transfer_is_over(tr))
		return 0;
	sfr__lock(&lane->mu);
	while (tr->nr_users != 0 && rc == 0)
		rc = sfr__cond_wait(&lane->cv_wait, &lane->mu, deadline_ns);
	rc = tr->nr_users == 0 ? 0 : rc;
	sfr__unlock(&lane->mu);
	return rc;
}

bool sfr__transfer_fail_if_device_dead(struct sfr__transfer *tr)
{
	bool dead = sfr__cuda_is_dead(tr->lane);

	if (dead)
		/* needs no lock: `why` is constant once the lane is dead */
		sfr__err_set_if_unset(&tr->err, -EIO, SFR_PHASE_STAGE, tr->lane->why);
	return dead;
}

/* ---- begin: E --------------------------------------------------------------------------- */

bool sfr__transfer_enter_context(struct sfr__transfer *tr)
{
	CUresult rc = sfr__cuda_enter(&tr->scope, tr->lane->cu, tr->lane->context);

	if (rc != CUDA_SUCCESS)
		(void)sfr__cuda_handle_failure(tr->lane, "cuCtxPushCurrent", rc, &tr->err);
	return rc == CUDA_SUCCESS;
}

void sfr__transfer_leave_context(struct sfr__transfer *tr)
{
	sfr__cuda_leave(&tr->scope);
}

/* Makes `stream` wait for the event `after`, and gives the event back. The event can be reused at
 * once, because the wait is for its last recording before this call. */
static void make_stream_wait(struct sfr__transfer *tr, CUstream stream, CUevent after)
{
	CUresult rc;

	if (!after) /* it could not be recorded */
		return;
	rc = tr->lane->cu->stream_wait(stream, after, 0);
	if (rc != CUDA_SUCCESS)
		(void)sfr__cuda_handle_failure(tr->lane, "cuStreamWaitEvent", rc, &tr->err);
	sfr__cuda_event_put(tr->lane, after);
}

int sfr__transfer_open(struct sfr__transfer *tr, struct sfr__cuda_lanes *lanes, uint32_t device,
		       enum sfr__cuda_direction direction)
{
	struct sfr__cuda_lane *lane;
	char why[160] = "";
	int rc = sfr__cuda_lane_get(lanes, device, direction, &lane, why, sizeof(why));

	tr->err.index = -1;
	if (rc == 0) {
		tr->lane = lane;
		tr->nr_users = 1;
	} else if (rc != SFR_ECLOSED) {
		sfr__err_set_if_unset(&tr->err, rc, SFR_PHASE_STAGE, why);
		rc = 0; /* the caller sees that tr->lane is NULL, and reads tr->err */
	}
	return rc;
}

int sfr__transfer_begin_after_stream(struct sfr__transfer *tr, struct sfr__cuda_lanes *lanes,
				     uint32_t device, enum sfr__cuda_direction direction,
				     CUstream stream)
{
	int rc = sfr__transfer_open(tr, lanes, device, direction);
	struct sfr__cuda_lane *lane = tr->lane;

	if (!lane || !sfr__transfer_enter_context(tr))
		return rc;
	tr->stream = stream;
	if (sfr__cuda_is_capturing(lane->cu, stream)) {
		sfr__transfer_leave_context(tr);
		tr->nr_users = 0; /* as if the transfer had never been opened */
		tr->lane = NULL;
		return SFR_ECAPTURING;
	}
	if (!sfr__cuda_fail_if_dead(lane, &tr->err)) {
		sfr__cuda_acquire_turn(lane);
		make_stream_wait(tr, lane->stream, sfr__cuda_record_event(lane, stream, &tr->err));
		sfr__cuda_release_turn(lane);
	}
	return 0;
}

/* ---- portions ------------------------------------------------------------------------- */

struct sfr__cuda_portion *sfr__transfer_get_or_make_portion(struct sfr__transfer *tr)
{
	if (!tr->portion)
		tr->portion = sfr__cuda_portion_get(tr->lane);
	if (!tr->portion)
		sfr__err_set_if_unset(&tr->err, -ENOMEM, SFR_PHASE_STAGE, NULL);
	return tr->portion;
}

/* Queues the copies that were added. The caller has the lane's turn. */
static void queue_added_copies(struct sfr__transfer *tr)
{
	struct sfr__cuda_lane *lane = tr->lane;

	if (tr->pinned.nr + tr->unpinned.nr > 0 && !tr->err.code &&
	    !sfr__transfer_fail_if_device_dead(tr)) {
		tr->has_queued = true; /* a failed call may have queued some copies */
		if (tr->timed)
			sfr__cuda_timer_begin(lane, &tr->copying, lane->stream);
		sfr__cuda_queue_batch(lane, &tr->pinned, true, &tr->err);
		if (!tr->err.code)
			sfr__cuda_queue_batch(lane, &tr->unpinned, false, &tr->err);
		if (tr->timed)
			sfr__cuda_timer_end(lane, &tr->copying, lane->stream);
		tr->timed = false; /* later copies are not measured */
	}
	tr->pinned.nr = tr->unpinned.nr = 0;
}

/* Puts the portion in flight, after all copies that are queued so far. The caller has the lane's
 * turn. */
static void launch_portion(struct sfr__transfer *tr)
{
	struct sfr__cuda_lane *lane = tr->lane;

	tr->portion->done = portion_done;
	tr->portion->transfer = tr;
	tr->launched = true;
	sfr__lock(&lane->mu);
	tr->nr_users++;
	sfr__unlock(&lane->mu);
	sfr__cuda_portion_add_in_flight(lane, tr->portion, &tr->err);
	tr->portion = NULL;
	tr->bytes = 0;
}

void sfr__transfer_send_portion(struct sfr__transfer *tr)
{
	struct sfr__cuda_portion *portion = tr->portion;
	bool is_dropped;

	if (!portion)
		return;
	sfr__cuda_acquire_turn(tr->lane);
	queue_added_copies(tr);
	/* Without queued copies a portion is dropped. One with memory is dropped only on a dead
	 * device: otherwise `portion_done` has to pass the memory on. */
	is_dropped = !tr->has_queued && (!portion->memory || sfr__transfer_fail_if_device_dead(tr));
	if (!is_dropped)
		launch_portion(tr);
	sfr__cuda_release_turn(tr->lane);
	tr->has_queued = false;
	if (!is_dropped)
		return;
	if (portion->memory)
		tr->ops->portion_dropped(tr, portion);
	sfr__cuda_portion_put(tr->lane, portion);
	tr->portion = NULL;
	tr->bytes = 0;
}

/* Sends the portion, and waits until few portions are in flight. Sends nothing if the next portion
 * cannot be allocated: later copies are then added to this one. */
static void send_portion_and_throttle(struct sfr__transfer *tr)
{
	struct sfr__cuda_portion *next = sfr__cuda_portion_get(tr->lane);

	if (!next)
		return;
	sfr__cuda_acquire_turn(tr->lane);
	queue_added_copies(tr);
	launch_portion(tr);
	sfr__cuda_release_turn(tr->lane);
	tr->portion = next;
	sfr__cuda_wait_while_throttled(tr->lane, tr->seq);
}

void sfr__transfer_add_copy(struct sfr__transfer *tr, uint64_t dst, uint64_t src, uint64_t len,
			    bool pinned)
{
	for (uint64_t done = 0, step; done < len && !tr->err.code; done += step) {
		const uint64_t portion_bytes = sfr__cuda_portion_bytes;
		/* a full portion that send_portion_and_throttle could not send gets as many bytes
		 * again */
		const uint64_t room =
			portion_bytes > tr->bytes ? portion_bytes - tr->bytes : portion_bytes;

		step = len - done;
		if (tr->throttled && step > room)
			step = room;
		if (!sfr__transfer_get_or_make_portion(tr))
			return;
		if (sfr__cuda_batch_add(pinned ? &tr->pinned : &tr->unpinned, dst + done,
					src + done, (size_t)step) < 0)
			sfr__err_set_if_unset(&tr->err, -ENOMEM, SFR_PHASE_STAGE, NULL);
		tr->bytes += step;
		if (tr->throttled && tr->bytes >= portion_bytes)
			send_portion_and_throttle(tr);
	}
}

bool sfr__transfer_prepare_pin(const struct sfr__transfer *tr, struct sfr__pool *pool)
{
	struct sfr__pin *pin = sfr__pool_get_pin(pool);
	char why[160];

	if (sfr__pin_turn_on(pin, tr->lane->cu, tr->lane->device, why, sizeof(why)) == 0)
		return true;
	sfr__pin_report_failure(pin, why);
	return false;
}

void sfr__transfer_add_pooled_copy(struct sfr__transfer *tr, const struct sfr__pool *pool,
				   uint64_t dst, uint64_t src, uint64_t len)
{
	/* whichever of the two is in host memory */
	const char *host =
		(const char *)(uintptr_t)(tr->lane->direction == SFR__CUDA_OUT ? dst : src);

	for (uint64_t off = 0, step; off < len; off += step) {
		bool pinned = true; /* memory outside the pool is pinned by its owner */

		step = len - off;
		if (sfr__pool_has(pool, host))
			step = sfr__pool_len_for_one_copy(pool, host + off, (size_t)step, &pinned);
		sfr__transfer_add_copy(tr, dst + off, src + off, step, pinned);
	}
}

/* ---- samples and checksums ------------------------------------------------------------- */

bool sfr__transfer_get_sample_store(struct sfr__transfer *tr,
				    const struct sfr__source_to_sample *sources, uint32_t nr)
{
	int rc = sources ? 0 : -ENOMEM;

	if (rc == 0 && !tr->store.mem)
		rc = sfr__cuda_host_buffer_get(tr->lane,
					       sfr__samples_most_rows(sources, nr) *
						       sizeof(*tr->samples.items),
					       &tr->store);
	if (rc < 0)
		sfr__err_set_if_unset(&tr->err, rc, SFR_PHASE_STAGE, NULL);
	return rc == 0;
}

void sfr__transfer_queue_sample_copies(struct sfr__transfer *tr,
				       struct sfr__source_to_sample *sources, uint32_t nr,
				       uint64_t seed)
{
	/* One more than needed: an allocation of no bytes may return NULL. */
	struct sfr__cuda_rows *rows = sources ? sfr_sys.malloc((nr + 1) * sizeof(*rows)) : NULL;
	size_t nr_rows;

	if (!rows) {
		sfr__err_set_if_unset(&tr->err, -ENOMEM, SFR_PHASE_STAGE, NULL);
		goto out;
	}
	if (nr == 0 || !sfr__transfer_get_sample_store(tr, sources, nr))
		goto out;
	if (!sfr__transfer_get_or_make_portion(tr) || tr->err.code)
		goto out;
	tr->samples.items = tr->store.mem;
	nr_rows = sfr__samples_choose_rows(&tr->samples, sources, nr, seed, rows);
	sfr__cuda_acquire_turn(tr->lane);
	tr->has_queued = true;
	sfr__cuda_lane_queue_rows(tr->lane, rows, nr_rows, sizeof(*tr->samples.items),
				  tr->store.pinned, &tr->err);
	sfr__cuda_release_turn(tr->lane);
out:
	sfr_sys.free(rows);
	sfr_sys.free(sources);
}

bool sfr__transfer_fetch_to_store(struct sfr__transfer *tr, uint64_t src, size_t len)
{
	struct sfr__cuda_lane *lane = tr->lane;

	sfr__transfer_add_copy(tr, (uint64_t)(uintptr_t)tr->store.mem, src, len, tr->store.pinned);
	sfr__transfer_send_portion(tr);
	sfr__lock(&lane->mu);
	while (tr->nr_users > 1) /* this thread is one; the others are portions in flight */
		(void)sfr__cond_wait(&lane->cv_wait, &lane->mu, SFR_FOREVER);
	sfr__unlock(&lane->mu);
	return !sfr__transfer_fail_if_device_dead(tr) && tr->err.code == 0;
}

/* ---- C and S ---------------------------------------------------------------------------- */

void sfr__transfer_make_stream_wait(struct sfr__transfer *tr)
{
	CUevent captured;

	sfr__cuda_acquire_turn(tr->lane);
	queue_added_copies(tr);
	captured = sfr__cuda_record_event(tr->lane, tr->lane->stream, &tr->err);
	sfr__cuda_release_turn(tr->lane);
	make_stream_wait(tr, tr->stream, captured);
}

void sfr__transfer_send_and_record_staged(struct sfr__transfer *tr)
{
	struct sfr__cuda_lane *lane = tr->lane;
	struct sfr_err err = { .index = -1 }; /* ignored: without S the gate waits on the host */
	CUevent event;

	sfr__transfer_send_portion(tr);
	if (sfr__cuda_is_dead(lane))
		return;
	sfr__cuda_acquire_turn(lane);
	event = sfr__cuda_record_event(lane, lane->stream, &err);
	sfr__cuda_release_turn(lane);
	sfr__lock(&lane->mu);
	tr->staged = event;
	sfr__unlock(&lane->mu);
}

void sfr__transfer_end_queueing(struct sfr__transfer *tr)
{
	struct sfr__cuda_scope scope = tr->scope;

	sfr__transfer_send_portion(tr);
	sfr__cuda_batch_free(&tr->pinned);
	sfr__cuda_batch_free(&tr->unpinned);
	drop_user(tr); /* the client may free the transfer from here on */
	sfr__cuda_leave(&scope);
}

/* ---- the gate ----------------------------------------------------------------------------- */

/* Makes a stream wait for the event. Returns false if the driver refuses, or the stream is being
 * captured. */
static bool insert_wait(struct sfr__cuda_lane *lane, CUstream stream, CUevent event)
{
	struct sfr__cuda_scope scope;
	bool inserted;

	if (sfr__cuda_enter(&scope, lane->cu, lane->context) != CUDA_SUCCESS)
		return false;
	inserted = !sfr__cuda_is_capturing(lane->cu, stream) &&
		   lane->cu->stream_wait(stream, event, 0) == CUDA_SUCCESS;
	sfr__cuda_leave(&scope);
	return inserted;
}

bool sfr__transfer_gate_stream(struct sfr__transfer *tr, const struct sfr_device_stream *stream)
{
	struct sfr__cuda_lane *lane = tr->lane;
	CUevent event = NULL;
	bool host_may_go_on;

	if (!lane)
		return true;
	sfr__lock(&lane->mu);
	host_may_go_on = tr->nr_users == 0 || lane->dead; /* nothing to wait for */
	if (!host_may_go_on && stream)
		event = tr->staged;
	if (event)
		tr->nr_waits++; /* keeps the event from being reused meanwhile */
	sfr__unlock(&lane->mu);
	if (!event)
		return host_may_go_on;
	host_may_go_on = insert_wait(lane, (CUstream)(uintptr_t)stream->handle, event);
	sfr__lock(&lane->mu);
	tr->nr_waits--;
	if (tr->nr_users == 0)
		drop_staged_event_locked(tr);
	sfr__unlock(&lane->mu);
	return host_may_go_on;
}

const struct sfr_device_stream *sfr__find_stream(const struct sfr_device_stream *streams,
						 uint32_t nr, uint32_t device)
{
	for (uint32_t i = 0; i < nr; i++)
		if (streams[i].device == device)
			return &streams[i];
	return NULL;
}
