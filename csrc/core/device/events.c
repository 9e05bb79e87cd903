/* A lane's events, its portions, and its errors.
 *
 * An error that makes the context unusable makes the device *dead*, for good. The error is logged
 * once, and every later failure on that device names it. */
#include <errno.h>
#include <stdio.h>

#include "device/lane.h"

void sfr__cuda_mark_dead(struct sfr__cuda_lane *lane, const char *call, CUresult rc)
{
	bool first;

	sfr__lock(&lane->mu);
	first = !lane->dead;
	if (first) {
		sfr__cuda_format_error(lane->cu, lane->device, call, rc, lane->why,
				       sizeof(lane->why));
		lane->dead = true;
	}
	sfr__unlock(&lane->mu);
	if (first)
		sfr__notice_post_text("%s: nothing on this device can be saved any more",
				      lane->why);
}

bool sfr__cuda_is_dead(struct sfr__cuda_lane *lane)
{
	return sfr__under(&lane->mu, lane->dead);
}

bool sfr__cuda_fail_if_dead(struct sfr__cuda_lane *lane, struct sfr_err *err)
{
	char why[sizeof(lane->why)];

	if (!sfr__cuda_is_dead(lane))
		return false;
	(void)snprintf(why, sizeof(why), "this device is dead since %.130s", lane->why);
	sfr__err_set_if_unset(err, -EIO, SFR_PHASE_STAGE, why);
	return true;
}

bool sfr__cuda_is_capturing(const struct sfr__cuda_api *cu, CUstream stream)
{
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
	CUresult rc = cu->stream_capturing(stream, &status);

	return rc == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT ||
	       (rc == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE);
}

/* Returns an event, new or reused; NULL if the driver cannot make one. */
static CUevent event_get(struct sfr__cuda_lane *lane)
{
	CUevent event = NULL;
	CUresult rc;

	sfr__lock(&lane->mu);
	if (lane->nr_events > 0)
		event = lane->events[--lane->nr_events];
	sfr__unlock(&lane->mu);
	if (event)
		return event;
	rc = lane->cu->event_new(&event, CU_EVENT_DISABLE_TIMING);
	if (sfr__cuda_is_sticky(rc))
		sfr__cuda_mark_dead(lane, "cuEventCreate", rc);
	return rc == CUDA_SUCCESS ? event : NULL;
}

void sfr__cuda_event_put_locked(struct sfr__cuda_lane *lane, CUevent event)
{
	if (!event || lane->dead) /* a dead context has freed its events */
		return;
	if (lane->nr_events < SFR__CUDA_EVENTS_KEPT)
		lane->events[lane->nr_events++] = event;
	else
		(void)lane->cu->event_free(event); /* a failure cannot be handled */
}

void sfr__cuda_event_put(struct sfr__cuda_lane *lane, CUevent event)
{
	sfr__lock(&lane->mu);
	sfr__cuda_event_put_locked(lane, event);
	sfr__unlock(&lane->mu);
}

bool sfr__cuda_handle_query_result(struct sfr__cuda_lane *lane, const char *call, CUresult rc,
				   uint32_t *nr_failed)
{
	if (rc == CUDA_SUCCESS)
		return true;
	*nr_failed = rc == CUDA_ERROR_NOT_READY ? 0 : *nr_failed + 1;
	if (!sfr__cuda_is_sticky(rc) && *nr_failed < SFR__CUDA_FAILED_QUERIES)
		return false;
	sfr__cuda_mark_dead(lane, call, rc);
	return true;
}

bool sfr__cuda_handle_failure(struct sfr__cuda_lane *lane, const char *call, CUresult rc,
			      struct sfr_err *err)
{
	char text[160];
	bool dead;

	if (sfr__cuda_is_sticky(rc))
		sfr__cuda_mark_dead(lane, call, rc);
	dead = sfr__cuda_is_dead(lane);
	sfr__cuda_format_error(lane->cu, lane->device, call, rc, text, sizeof(text));
	/* On a dead device the earlier error says more. */
	sfr__err_set_if_unset(err, -EIO, SFR_PHASE_STAGE, dead ? lane->why : text);
	return dead;
}

struct sfr__cuda_portion *sfr__cuda_portion_get(struct sfr__cuda_lane *lane)
{
	struct sfr__cuda_portion *portion;

	sfr__lock(&lane->mu);
	portion = lane->free_portions;
	if (portion)
		lane->free_portions = portion->next;
	sfr__unlock(&lane->mu);
	if (!portion)
		portion = sfr_sys.malloc(sizeof(*portion));
	if (portion)
		*portion = (struct sfr__cuda_portion){ 0 };
	return portion;
}

void sfr__cuda_portion_put(struct sfr__cuda_lane *lane, struct sfr__cuda_portion *portion)
{
	sfr__lock(&lane->mu);
	portion->next = lane->free_portions;
	lane->free_portions = portion;
	sfr__unlock(&lane->mu);
}

CUevent sfr__cuda_record_event(struct sfr__cuda_lane *lane, CUstream stream, struct sfr_err *err)
{
	CUevent event = event_get(lane);
	CUresult rc = event ? lane->cu->event_record(event, stream) : CUDA_ERROR_OUT_OF_MEMORY;

	if (rc == CUDA_SUCCESS)
		return event;
	(void)sfr__cuda_handle_failure(lane, event ? "cuEventRecord" : "cuEventCreate", rc, err);
	sfr__cuda_event_put(lane, event);
	return NULL;
}
