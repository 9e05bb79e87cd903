/* A device's lane: a stream, the portions in flight on it, and a thread that watches them.
 *
 *   callers' threads ──┐ have the turn    portions           completed
 *                      ├────────────────▶ in flight (a list) ───────▶ the thread ───▶ transfers
 *   the lane's thread ─┘
 *
 * The thread queries the oldest portion's event every POLL_NS and sleeps in between. It never waits
 * inside the driver, whose waits spin or hold locks that training needs.
 *
 * One copy engine serves all streams in order. When training copies a loss to the host, that copy
 * waits for the portions in flight. Therefore only a few are in flight at a time. When the gate
 * waits for a save, the rest of the save's copies is queued at once.
 *
 * A step may wait for this thread, so its priority is not lowered and its timer slack is small. At
 * nice 10 with two busy cores, one sleep of 50 us in ten took 2.8 ms.
 *
 *     alive ──an error after which no call in the context works──▶ dead
 *
 * On a dead device nobody knows whether a copy still runs. All its copies fail with the error that
 * made it dead.
 *
 * A thread that queues copies has the *turn*, and appends a portion to the list before it ends the
 * turn. So the list has the stream's order. The turn is not a lock, because it may take long: when
 * about a thousand operations are on a stream, the next call blocks until earlier ones have run. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "device/lane.h"

#define POLL_NS UINT64_C(50000) /* the time between two queries of an event */

/* Bounds on queued copies while no step waits for them. Copies on other streams wait for the queued
 * ones, at most 0.3 ms at 55 GB/s with these values. */
uint64_t sfr__cuda_portion_bytes = 4 << 20;
static uint64_t most_in_flight = 4;

void sfr__cuda_set_portion_limits(uint64_t portion_bytes, uint64_t nr_in_flight)
{
	if (portion_bytes)
		sfr__cuda_portion_bytes = portion_bytes;
	if (nr_in_flight)
		most_in_flight = nr_in_flight;
}

/* ---- the turn to queue ------------------------------------------------------- */

void sfr__cuda_acquire_turn(struct sfr__cuda_lane *lane)
{
	sfr__lock(&lane->mu);
	while (lane->turn_taken)
		(void)sfr__cond_wait(&lane->cv_wait, &lane->mu, SFR_FOREVER);
	lane->turn_taken = true;
	sfr__unlock(&lane->mu);
}

void sfr__cuda_release_turn(struct sfr__cuda_lane *lane)
{
	sfr__lock(&lane->mu);
	lane->turn_taken = false;
	pthread_cond_broadcast(&lane->cv_wait);
	sfr__unlock(&lane->mu);
}

/* ---- portions ---------------------------------------------------------------- */

void sfr__cuda_portion_add_in_flight(struct sfr__cuda_lane *lane, struct sfr__cuda_portion *portion,
				     struct sfr_err *err)
{
	portion->event = sfr__cuda_record_event(lane, lane->stream, err);
	sfr__lock(&lane->mu);
	sfr__queue_push(&lane->in_flight, portion);
	lane->nr_in_flight++;
	pthread_cond_signal(&lane->cv);
	sfr__unlock(&lane->mu);
}

/* Returns whether the oldest portion has ended: its copies have completed, or the device is dead.
 * Needs no lock, because only the calling thread, the lane's, removes portions. */
static bool has_portion_ended(struct sfr__cuda_lane *lane, struct sfr__cuda_portion *portion)
{
	const struct sfr__cuda_api *cu = lane->cu;

	if (sfr__cuda_is_dead(lane))
		return true;
	if (portion->event)
		return sfr__cuda_handle_query_result(lane, "cuEventQuery",
						     cu->event_query(portion->event),
						     &portion->nr_failed_queries);
	return sfr__cuda_handle_query_result(lane, "cuStreamQuery", cu->stream_query(lane->stream),
					     &portion->nr_failed_queries);
}

/* Removes and returns the oldest portion if it has ended, else returns NULL. Sets *copied to
 * whether its copies have completed: they may not have if the device is dead. */
static struct sfr__cuda_portion *take_ended_portion(struct sfr__cuda_lane *lane, bool *copied)
{
	struct sfr__cuda_portion *portion;

	sfr__lock(&lane->mu);
	portion = lane->in_flight.head;
	sfr__unlock(&lane->mu);
	if (!portion || !has_portion_ended(lane, portion))
		return NULL;
	sfr__lock(&lane->mu);
	(void)sfr__queue_pop(&lane->in_flight); /* its head is still this portion */
	lane->nr_in_flight--;
	*copied = !lane->dead;
	sfr__cuda_event_put_locked(lane, portion->event);
	sfr__unlock(&lane->mu);
	return portion;
}

void sfr__cuda_poll(struct sfr__cuda_lane *lane)
{
	struct sfr__cuda_portion *portion;
	bool copied;

	while ((portion = take_ended_portion(lane, &copied))) {
		portion->done(portion, copied);
		sfr__cuda_portion_put(lane, portion);
	}
}

void sfr__cuda_wait_while_throttled(struct sfr__cuda_lane *lane, uint64_t seq)
{
	bool must_wait = true;

	while (must_wait) {
		sfr__cuda_poll(lane);
		sfr__lock(&lane->mu);
		/* a save that the gate waits for does not wait here, nor one on a dead device */
		must_wait =
			lane->nr_in_flight >= most_in_flight && seq > lane->rush_seq && !lane->dead;
		if (must_wait)
			(void)sfr__cond_wait(&lane->cv, &lane->mu, sfr__deadline(POLL_NS));
		sfr__unlock(&lane->mu);
	}
}

bool sfr__cuda_is_rushed(struct sfr__cuda_lane *lane, uint64_t seq)
{
	return sfr__under(&lane->mu, seq <= lane->rush_seq);
}

void sfr__cuda_rush_saves_up_to(struct sfr__cuda_lane *lane, uint64_t seq)
{
	sfr__lock(&lane->mu);
	if (lane->rush_seq < seq)
		lane->rush_seq = seq;
	pthread_cond_signal(&lane->cv);
	sfr__unlock(&lane->mu);
}

/* ---- the thread -------------------------------------------------------------- */

void sfr__cuda_push_task(struct sfr__cuda_lane *lane, struct sfr__task *task)
{
	sfr__lock(&lane->mu);
	sfr__queue_push(&lane->tasks, task);
	pthread_cond_signal(&lane->cv);
	sfr__unlock(&lane->mu);
}

void *sfr__cuda_lane_main(void *arg)
{
	struct sfr__cuda_lane *lane = arg;
	struct sfr__cuda_scope scope;
	struct sfr__task *task;

	/* if this fails, so does the first call that needs the context, which reports the error */
	(void)sfr__cuda_enter(&scope, lane->cu, lane->context);
	sfr__lock(&lane->mu);
	for (;;) {
		task = sfr__queue_pop(&lane->tasks);
		if (task) {
			sfr__unlock(&lane->mu);
			task->run(task);
			sfr__lock(&lane->mu);
		} else if (lane->in_flight.head) {
			sfr__unlock(&lane->mu);
			sfr__cuda_poll(lane);
			sfr__lock(&lane->mu);
			if (lane->in_flight.head && !lane->tasks.head)
				(void)sfr__cond_wait(&lane->cv, &lane->mu, sfr__deadline(POLL_NS));
		} else if (lane->stopping) {
			break;
		} else {
			(void)sfr__cond_wait(&lane->cv, &lane->mu, SFR_FOREVER);
		}
	}
	sfr__unlock(&lane->mu);
	sfr__cuda_leave(&scope);
	return NULL;
}
