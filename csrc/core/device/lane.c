/* A device's lane: a stream of its own, what is in flight on it, and a thread that watches.
 *
 *   callers' threads ──┐ have the turn    pieces                landed
 *                      ├────────────────▶ in flight (a list) ───────▶ the thread ───▶ landings
 *   the lane's thread ─┘
 *
 * The thread never waits for the device in the driver: it asks the oldest piece's event every
 * POLL_NS and sleeps in between, since the driver's own waits spin or hold locks that training
 * needs, and host functions on the stream can serialise other streams. Work for it queues more
 * only while few pieces are in flight: the copy engine serves all streams in one line, and who
 * asks for a loss on another stream stands behind what is queued here. When a gate has come, all
 * that is left is queued at once. A step may wait for this thread, so it runs at the priority of
 * who made it and its short sleeps are short: at nice 10 beside two busy cores a sleep of 50 us took
 * 2.8 ms in one of ten cases.
 *
 *     alive ──an error after which nothing of the context works──▶ dead
 *
 * On a dead device nobody can know whether a copy still runs. Landings are told so, later copies
 * are refused with the reason, and the engine goes on serving the host and other devices.
 *
 * Order. Whoever queues has the turn, and its last act there is to put a piece on the list: so the
 * list has the stream's order, and every copy is followed by an event that somebody watches. The
 * turn is no lock: nobody but those who want it too waits for its end, neither the gate nor the
 * thread that watches. A stream takes about a thousand operations, and the call that brings one
 * more waits until earlier ones have run.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "device/lane.h"

#define POLL_NS UINT64_C(50000)

/* How much is asked of a device at a time as long as nobody hurries, and how many such pieces: copies
 * queued on other streams stand in line behind what is queued here. Chosen so that the line is at
 * most 0.3 ms long at 55 GB/s; tests and the benchmark's sweep change them while no save is in
 * flight. */
uint64_t sfr__cuda_piece_bytes = 4 << 20;
static uint64_t most_in_flight = 4;

void sfr__cuda_tune(uint64_t piece_bytes, uint64_t nr_in_flight)
{
	if (piece_bytes)
		sfr__cuda_piece_bytes = piece_bytes;
	if (nr_in_flight)
		most_in_flight = nr_in_flight;
}

/* ---- the turn ----------------------------------------------------------------- */

void sfr__cuda_turn_begin(struct sfr__cuda_lane *lane)
{
	sfr__lock(&lane->mu);
	while (lane->queueing)
		(void)sfr__cond_wait(&lane->cv_turn, &lane->mu, SFR_FOREVER);
	lane->queueing = true;
	sfr__unlock(&lane->mu);
}

void sfr__cuda_turn_end(struct sfr__cuda_lane *lane)
{
	sfr__lock(&lane->mu);
	lane->queueing = false;
	pthread_cond_signal(&lane->cv_turn);
	sfr__unlock(&lane->mu);
}

/* ---- pieces ------------------------------------------------------------------ */

void sfr__cuda_fly(struct sfr__cuda_lane *lane, struct sfr__cuda_piece *piece, struct sfr_err *err)
{
	piece->landed = sfr__cuda_record(lane, lane->stream, err);
	sfr__lock(&lane->mu);
	sfr__queue_push(&lane->in_flight, piece);
	lane->nr_in_flight++;
	pthread_cond_signal(&lane->cv);
	sfr__unlock(&lane->mu);
}

/* Whether the oldest piece is to be taken off: it has landed, or never will (the lane is dead). Only
 * this thread takes pieces off, so it stays where it is meanwhile. */
static bool is_due(struct sfr__cuda_lane *lane, struct sfr__cuda_piece *piece)
{
	const struct sfr__cuda *cu = lane->cu;

	if (sfr__cuda_is_dead(lane))
		return true;
	if (piece->landed)
		return sfr__cuda_is_through(lane, "cuEventQuery", cu->event_query(piece->landed),
					    &piece->failed);
	return sfr__cuda_is_through(lane, "cuStreamQuery", cu->stream_query(lane->stream),
				    &piece->failed);
}

/* The oldest piece in flight, if it is to be taken off. */
static struct sfr__cuda_piece *take_due(struct sfr__cuda_lane *lane, bool *landed)
{
	struct sfr__cuda_piece *piece;

	sfr__lock(&lane->mu);
	piece = lane->in_flight.head;
	sfr__unlock(&lane->mu);
	if (!piece || !is_due(lane, piece))
		return NULL;
	sfr__lock(&lane->mu);
	(void)sfr__queue_pop(&lane->in_flight); /* piece */
	lane->nr_in_flight--;
	*landed = !lane->dead;
	sfr__cuda_event_put_locked(lane, piece->landed);
	sfr__unlock(&lane->mu);
	return piece;
}

void sfr__cuda_poll(struct sfr__cuda_lane *lane)
{
	struct sfr__cuda_piece *piece;
	bool landed;

	while ((piece = take_due(lane, &landed))) {
		piece->landing->fn(piece->landing, piece, landed);
		sfr__cuda_piece_put(lane, piece);
	}
}

void sfr__cuda_throttle(struct sfr__cuda_lane *lane, uint64_t seq)
{
	bool full = true;

	while (full) {
		sfr__cuda_poll(lane);
		sfr__lock(&lane->mu);
		full = lane->nr_in_flight >= most_in_flight && seq > lane->rush_seq && !lane->dead;
		if (full)
			(void)sfr__cond_wait(&lane->cv, &lane->mu, sfr__deadline(POLL_NS));
		sfr__unlock(&lane->mu);
	}
}

bool sfr__cuda_is_rushed(struct sfr__cuda_lane *lane, uint64_t seq)
{
	return sfr__under(&lane->mu, seq <= lane->rush_seq);
}

void sfr__cuda_rush(struct sfr__cuda_lane *lane, uint64_t seq)
{
	sfr__lock(&lane->mu);
	if (lane->rush_seq < seq)
		lane->rush_seq = seq;
	pthread_cond_signal(&lane->cv);
	sfr__unlock(&lane->mu);
}

/* ---- the thread -------------------------------------------------------------- */

void sfr__cuda_push(struct sfr__cuda_lane *lane, struct sfr__task *task)
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

	/* A failure shows at the first call that needs the context. */
	(void)sfr__cuda_enter(&scope, lane->cu, lane->context);
	sfr__lock(&lane->mu);
	for (;;) {
		task = sfr__queue_pop(&lane->tasks);
		if (task || lane->in_flight.head) {
			sfr__unlock(&lane->mu);
			if (task)
				task->run(task);
			else
				sfr__cuda_poll(lane);
			sfr__lock(&lane->mu);
			if (!task && lane->in_flight.head && !lane->tasks.head)
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
