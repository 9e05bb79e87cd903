/* The lanes of an engine. They are made at first use and end with the engine. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "device/lane.h"

/* Frees the lane's events, stream and stores, and releases the device's context. */
static void free_device_resources(struct sfr__cuda_lane *lane)
{
	struct sfr__cuda_scope scope;

	if (!lane->context)
		return;
	if (sfr__cuda_enter(&scope, lane->cu, lane->context) == CUDA_SUCCESS) {
		/* On a dead device each call may fail, but then nothing is left to free. */
		while (lane->nr_events > 0)
			(void)lane->cu->event_free(lane->events[--lane->nr_events]);
		if (lane->stream)
			(void)lane->cu->stream_free(lane->stream);
		for (size_t i = 0; i < SFR__CUDA_STORES_KEPT; i++)
			sfr__cuda_host_buffer_free(lane->cu, &lane->stores[i]);
		sfr__cuda_leave(&scope);
	}
	lane->stream = NULL;
	sfr__cuda_release_primary_context(lane->cu, lane->device);
	lane->context = NULL;
}

/* Frees the memory of a lane that has no thread and no device resources any more. */
static void free_lane(struct sfr__cuda_lane *lane)
{
	struct sfr__cuda_portion *portion;

	while ((portion = lane->free_portions)) {
		lane->free_portions = portion->next;
		sfr_sys.free(portion);
	}
	(void)pthread_cond_destroy(&lane->cv_wait); /* nobody waits any more */
	(void)pthread_cond_destroy(&lane->cv);
	sfr__mutex_fini(&lane->mu);
	sfr_sys.free(lane);
}

/* Makes the lane's stream and starts its thread. Returns 0, or -errno with the reason in `why`. */
static int start_lane(struct sfr__cuda_lane *lane, char *why, size_t why_len)
{
	char name[16];
	int ret = sfr__cuda_open_context_and_stream(lane->cu, lane->device, &lane->context,
						    &lane->stream, why, why_len);

	if (ret < 0)
		return ret;
	(void)snprintf(name, sizeof(name),
		       lane->direction == SFR__CUDA_OUT ? "sfr-cuda%u" : "sfr-onload%u",
		       lane->device);
	/* SFR__PROMPT: an optimizer step may wait for the thread, so its sleeps must end on time */
	ret = sfr__thread_start(&lane->thread, name, SFR__PROMPT, sfr__cuda_lane_main, lane);
	if (ret < 0)
		(void)snprintf(why, why_len, "device %u: no thread for its lane", lane->device);
	return ret;
}

/* Makes a lane with its thread running. Returns 0, or -errno with the reason in `why`. */
static int make_lane(uint32_t device, enum sfr__cuda_direction direction,
		     struct sfr__cuda_lane **out, char *why, size_t why_len)
{
	struct sfr__cuda_lane *lane = sfr_sys.calloc(1, sizeof(*lane));
	int rc;

	if (!lane)
		return -ENOMEM;
	sfr__mutex_init(&lane->mu, SFR__LOCK_LANE);
	lane->device = device;
	lane->direction = direction;
	rc = sfr__cond_init(&lane->cv);
	if (rc == 0) {
		rc = sfr__cond_init(&lane->cv_wait);
		if (rc < 0)
			(void)pthread_cond_destroy(&lane->cv);
	}
	if (rc < 0) {
		sfr__mutex_fini(&lane->mu);
		sfr_sys.free(lane);
		return rc;
	}
	lane->cu = sfr__cuda_get_or_init_driver(why, why_len);
	rc = lane->cu ? start_lane(lane, why, why_len) : -ENODEV;
	if (rc < 0) {
		free_device_resources(lane);
		free_lane(lane);
		return rc;
	}
	*out = lane;
	return 0;
}

static void stop_lane(struct sfr__cuda_lane *lane)
{
	sfr__lock(&lane->mu);
	lane->stopping = true;
	pthread_cond_signal(&lane->cv);
	sfr__unlock(&lane->mu);
	(void)sfr_sys.thread_join(lane->thread, NULL); /* cannot fail: it is joinable */
	free_device_resources(lane);
}

/* Sets *out to the lane, or to NULL if there is none yet. Returns 0 or SFR_ECLOSED. */
static int find_lane_locked(const struct sfr__cuda_lanes *lanes, uint32_t device,
			    enum sfr__cuda_direction direction, struct sfr__cuda_lane **out)
{
	*out = NULL;
	if (lanes->stopped)
		return SFR_ECLOSED;
	for (struct sfr__cuda_lane *lane = lanes->head; lane; lane = lane->next)
		if (lane->device == device && lane->direction == direction)
			*out = lane;
	return 0;
}

int sfr__cuda_lane_get(struct sfr__cuda_lanes *lanes, uint32_t device,
		       enum sfr__cuda_direction direction, struct sfr__cuda_lane **out, char *why,
		       size_t why_len)
{
	struct sfr__cuda_lane *new_lane = NULL;
	int rc;

	sfr__lock(&lanes->mu);
	rc = find_lane_locked(lanes, device, direction, out);
	sfr__unlock(&lanes->mu);
	if (rc < 0 || *out)
		return rc;
	rc = make_lane(device, direction, &new_lane, why, why_len);
	if (rc < 0)
		return rc;
	sfr__lock(&lanes->mu);
	/* another thread may have been first */
	rc = find_lane_locked(lanes, device, direction, out);
	if (rc == 0 && !*out) {
		new_lane->next = lanes->head;
		lanes->head = *out = new_lane;
		new_lane = NULL;
	}
	sfr__unlock(&lanes->mu);
	if (new_lane) { /* not needed */
		stop_lane(new_lane);
		free_lane(new_lane);
	}
	return rc;
}

void sfr__cuda_lanes_init(struct sfr__cuda_lanes *lanes)
{
	*lanes = (struct sfr__cuda_lanes){ .mu = SFR__MUTEX(SFR__LOCK_LANES) };
}

void sfr__cuda_lanes_stop(struct sfr__cuda_lanes *lanes)
{
	struct sfr__cuda_lane *lane = NULL;

	sfr__lock(&lanes->mu);
	if (!lanes->stopped)
		lane = lanes->head;
	lanes->stopped = true; /* from here on the list is constant */
	sfr__unlock(&lanes->mu);
	for (; lane; lane = lane->next)
		stop_lane(lane);
}

void sfr__cuda_lanes_free(struct sfr__cuda_lanes *lanes)
{
	struct sfr__cuda_lane *lane;

	while ((lane = lanes->head)) {
		lanes->head = lane->next;
		free_lane(lane);
	}
	sfr__mutex_fini(&lanes->mu); /* the caller guarantees that nobody uses it */
}

void sfr__cuda_lanes_report_dead(struct sfr__cuda_lanes *lanes, char *text, size_t len)
{
	sfr__lock(&lanes->mu);
	for (struct sfr__cuda_lane *lane = lanes->head; lane; lane = lane->next) {
		size_t used = strlen(text);

		if (sfr__cuda_is_dead(lane))
			(void)snprintf(text + used, len - used, " Device %u is dead: %s.",
				       lane->device, lane->why);
	}
	sfr__unlock(&lanes->mu);
}
