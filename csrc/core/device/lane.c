/* A device's lane: a stream of its own, what is in flight on it, and a thread that watches.
 *
 *   capture (the caller's thread) ──┐  pieces            landed         block full
 *                                   ├─────────▶ in flight ───▶ the thread ───▶ writers
 *   staging (the lane's thread) ────┘           (a list)
 *
 * The thread never waits for the device in the driver: it asks the oldest piece's event every
 * POLL_NS and sleeps in between, since the driver's own waits spin or hold locks that training
 * needs, and host functions on the stream can serialise other streams. It queues deferred bytes
 * only while few pieces are in flight: the copy engine serves all streams in one line, and who
 * asks for a loss on another stream stands behind what is queued here. When a gate has come, all
 * that is left is queued at once.
 *
 *     alive ──an error after which nothing of the context works──▶ dead
 *
 * On a dead device nobody can know whether a copy still runs. The blocks in flight are retired,
 * saves that have a part in the device fail, later ones are refused with the reason, and the
 * engine goes on serving the host and other devices.
 *
 * Whoever queues a piece does it under lane->mu, with its event, and so the list has the stream's
 * order and every copy is followed by an event that somebody watches.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "device/lane.h"

#define POLL_NS UINT64_C(50000)

uint64_t sfr__cuda_piece_bytes = 4 << 20, sfr__cuda_nr_in_flight = 4;

void sfr_cuda_tune(uint64_t piece_bytes, uint64_t nr_in_flight)
{
	if (piece_bytes)
		sfr__cuda_piece_bytes = piece_bytes;
	if (nr_in_flight)
		sfr__cuda_nr_in_flight = nr_in_flight;
}

/* ---- pieces ------------------------------------------------------------------ */

void sfr__cuda_fly_locked(struct sfr__cuda_lane *lane, struct sfr__cuda_piece *piece)
{
	sfr__queue_push(&lane->flying, piece);
	lane->nr_in_flight++;
	pthread_cond_signal(&lane->cv);
}

/* Settles the piece that was taken off the list. */
static void end_piece(struct sfr__cuda_lane *lane, struct sfr__cuda_piece *piece, bool landed)
{
	const struct sfr__cuda_piece ended = *piece;

	sfr__lock(&lane->mu);
	if (!lane->dead)
		sfr__cuda_event_put_locked(lane, piece->landed);
	piece->next = lane->free_pieces;
	lane->free_pieces = piece;
	sfr__unlock(&lane->mu);
	ended.landing->fn(ended.landing, &ended, landed);
}

/* Whether the oldest piece is to be taken off: it has landed, or never will (the lane is dead). */
static bool is_due_locked(struct sfr__cuda_lane *lane, struct sfr__cuda_piece *piece)
{
	CUresult rc;

	if (lane->dead)
		return true;
	rc = piece->landed ? lane->cu->event_query(piece->landed) :
			     lane->cu->stream_query(lane->stream);
	if (rc == CUDA_SUCCESS)
		return true;
	if (rc == CUDA_ERROR_NOT_READY) {
		piece->failed = 0;
		return false;
	}
	if (sfr__cuda_is_sticky(rc) || ++piece->failed == SFR__CUDA_QUERIES) {
		sfr__cuda_die_locked(lane, "cuEventQuery", rc);
		return true;
	}
	return false;
}

void sfr__cuda_poll(struct sfr__cuda_lane *lane)
{
	struct sfr__cuda_piece *piece;

	sfr__lock(&lane->mu);
	while ((piece = lane->flying.head) && is_due_locked(lane, piece)) {
		bool landed = !lane->dead;

		(void)sfr__queue_pop(&lane->flying); /* the piece */
		lane->nr_in_flight--;
		sfr__unlock(&lane->mu);
		end_piece(lane, piece, landed);
		sfr__lock(&lane->mu);
	}
	sfr__unlock(&lane->mu);
}

void sfr__cuda_push_locked(struct sfr__cuda_lane *lane, struct sfr__task *task)
{
	sfr__queue_push(&lane->tasks, task);
	pthread_cond_signal(&lane->cv);
}

/* ---- the thread -------------------------------------------------------------- */

static void *lane_main(void *arg)
{
	struct sfr__cuda_lane *lane = arg;
	struct sfr__cuda_scope scope;

	/* A failure shows at the first call that needs the context. */
	(void)sfr__cuda_enter(&scope, lane->cu, lane->context);
	sfr__lock(&lane->mu);
	for (;;) {
		struct sfr__task *task = sfr__queue_pop(&lane->tasks);

		if (task) {
			sfr__unlock(&lane->mu);
			task->run(task);
			sfr__lock(&lane->mu);
		} else if (lane->flying.head) {
			sfr__unlock(&lane->mu);
			sfr__cuda_poll(lane);
			sfr__lock(&lane->mu);
			if (lane->flying.head && !lane->tasks.head)
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

/* ---- life --------------------------------------------------------------------- */

void sfr__cuda_lanes_init(struct sfr__cuda_lanes *lanes)
{
	sfr__mutex_init(&lanes->mu, SFR__LOCK_LANES);
}

void sfr__cuda_lanes_close(struct sfr__cuda_lanes *lanes)
{
	sfr__lock(&lanes->mu);
	lanes->closing = true;
	sfr__unlock(&lanes->mu);
}

static struct sfr__cuda_lane *find_locked(struct sfr__cuda_lanes *lanes, uint32_t device)
{
	for (struct sfr__cuda_lane *lane = lanes->first; lane; lane = lane->next)
		if (lane->device == device)
			return lane;
	return NULL;
}

/* Frees what the lane has on its device. */
static void fini_device(struct sfr__cuda_lane *lane)
{
	struct sfr__cuda_scope scope;

	if (!lane->context)
		return;
	if (sfr__cuda_enter(&scope, lane->cu, lane->context) == CUDA_SUCCESS) {
		/* Each may fail on a dead device, which has nothing left to be freed. */
		while (lane->nr_events > 0)
			(void)lane->cu->event_free(lane->events[--lane->nr_events]);
		if (lane->stream)
			(void)lane->cu->stream_free(lane->stream);
		for (size_t i = 0; i < SFR__CUDA_STORES_KEPT; i++)
			sfr__cuda_store_free(lane, &lane->stores[i]);
		sfr__cuda_leave(&scope);
	}
	lane->stream = NULL;
	sfr__cuda_release(lane->cu, lane->device);
	lane->context = NULL;
}

static void free_lane(struct sfr__cuda_lane *lane)
{
	struct sfr__cuda_piece *piece;

	while ((piece = lane->free_pieces)) {
		lane->free_pieces = piece->next;
		sfr_sys.free(piece);
	}
	(void)pthread_cond_destroy(&lane->cv); /* nobody waits any more */
	sfr__mutex_fini(&lane->mu);
	sfr_sys.free(lane);
}

/* Makes the stream and starts the thread. 0 or -errno with `why`. */
static int init_device(struct sfr__cuda_lane *lane, char *why, size_t why_len)
{
	struct sfr__cuda_scope scope;
	char name[16];
	CUresult rc;
	int ret;

	ret = sfr__cuda_retain(lane->cu, lane->device, &lane->context, why, why_len);
	if (ret < 0)
		return ret;
	rc = sfr__cuda_enter(&scope, lane->cu, lane->context);
	if (rc == CUDA_SUCCESS)
		rc = lane->cu->stream_new(&lane->stream, CU_STREAM_NON_BLOCKING);
	sfr__cuda_leave(&scope);
	if (rc != CUDA_SUCCESS) {
		lane->stream = NULL;
		sfr__cuda_explain(lane->cu, lane->device, "cuStreamCreate", rc, why, why_len);
		return -EIO;
	}
	(void)snprintf(name, sizeof(name), "sfr-cuda%u", lane->device);
	ret = sfr__thread_start(&lane->thread, name, lane_main, lane);
	if (ret < 0)
		(void)snprintf(why, why_len, "device %u: no thread for its lane", lane->device);
	return ret;
}

static void stop_lane(struct sfr__cuda_lane *lane)
{
	sfr__lock(&lane->mu);
	lane->stopping = true;
	pthread_cond_signal(&lane->cv);
	sfr__unlock(&lane->mu);
	(void)sfr_sys.thread_join(lane->thread, NULL); /* ours and joinable */
	fini_device(lane);
}

int sfr__cuda_lane_get(struct sfr__cuda_lanes *lanes, uint32_t device, struct sfr__cuda_lane **out,
		       char *why, size_t why_len)
{
	struct sfr__cuda_lane *lane, *other;
	bool closing;
	int rc;

	sfr__lock(&lanes->mu);
	*out = find_locked(lanes, device);
	closing = lanes->closing;
	sfr__unlock(&lanes->mu);
	if (closing)
		return SFR_ECLOSED;
	if (*out)
		return 0;
	lane = sfr_sys.calloc(1, sizeof(*lane));
	if (!lane)
		return -ENOMEM;
	sfr__mutex_init(&lane->mu, SFR__LOCK_LANE);
	lane->device = device;
	rc = sfr__cond_init(&lane->cv);
	if (rc < 0) {
		sfr__mutex_fini(&lane->mu);
		sfr_sys.free(lane);
		return rc;
	}
	lane->cu = sfr__cuda_get(why, why_len);
	rc = lane->cu ? init_device(lane, why, why_len) : -ENODEV;
	if (rc < 0) {
		fini_device(lane);
		free_lane(lane);
		return rc;
	}
	sfr__lock(&lanes->mu);
	other = find_locked(lanes, device);
	closing = lanes->closing;
	if (!other && !closing) {
		lane->next = lanes->first;
		lanes->first = lane;
	}
	sfr__unlock(&lanes->mu);
	*out = other ? other : lane;
	if (other || closing) {
		stop_lane(lane);
		free_lane(lane);
	}
	return closing ? SFR_ECLOSED : 0;
}

void sfr__cuda_lanes_stop(struct sfr__cuda_lanes *lanes)
{
	struct sfr__cuda_lane *first;

	sfr__lock(&lanes->mu);
	lanes->closing = true;
	first = lanes->first; /* it does not change any more */
	sfr__unlock(&lanes->mu);
	for (struct sfr__cuda_lane *lane = first; lane; lane = lane->next)
		if (!lane->stopping)
			stop_lane(lane);
}

void sfr__cuda_lanes_free(struct sfr__cuda_lanes *lanes)
{
	struct sfr__cuda_lane *lane;

	while ((lane = lanes->first)) {
		lanes->first = lane->next;
		free_lane(lane);
	}
	sfr__mutex_fini(&lanes->mu);
}

void sfr__cuda_lanes_describe(struct sfr__cuda_lanes *lanes, char *text, size_t len)
{
	sfr__lock(&lanes->mu);
	for (struct sfr__cuda_lane *lane = lanes->first; lane; lane = lane->next) {
		size_t used = strlen(text);

		sfr__lock(&lane->mu);
		if (lane->dead)
			(void)snprintf(text + used, len - used, " Device %u is dead: %s.",
				       lane->device, lane->why);
		sfr__unlock(&lane->mu);
	}
	sfr__unlock(&lanes->mu);
}
