/* Order between a caller's stream and a lane's: three events, and the streams that wait for them.
 *
 *   E   recorded on the caller's stream first; the lane's stream waits for it, so the copies see
 *       the state at the call
 *   C   recorded behind the captured bytes and the samples; the caller's stream waits for it
 *   S   recorded behind everything; the step's stream waits for it
 *
 * Saves and snapshots record them at different points and use them alike. Waiting for an event
 * that was never recorded silently does nothing, so an event exists here only once it has been
 * recorded. */
#include <errno.h>
#include <stdio.h>

#include "base/base.h"
#include "device/lane.h"

bool sfr__cuda_is_capturing(const struct sfr__cuda *cu, CUstream stream)
{
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
	CUresult rc = cu->stream_capturing(stream, &status);

	return rc == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT ||
	       (rc == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE);
}

const struct sfr_stream *sfr__stream_of(const struct sfr_stream *streams, uint32_t nr,
					uint32_t device)
{
	for (uint32_t i = 0; i < nr; i++)
		if (streams[i].device == device)
			return &streams[i];
	return NULL;
}

void sfr__cuda_mark(struct sfr__cuda_lane *lane, CUstream stream, struct sfr_err *err)
{
	CUevent event = sfr__cuda_record(lane, stream, err);
	CUresult rc;

	if (!event)
		return;
	rc = lane->cu->stream_wait(lane->stream, event, 0);
	if (rc != CUDA_SUCCESS)
		(void)sfr__cuda_failed(lane, "cuStreamWaitEvent", rc, err);
	/* The wait concerns the event as recorded here, so the event can be reused. */
	sfr__cuda_event_put(lane, event);
}

void sfr__cuda_wait_captured(struct sfr__cuda_lane *lane, CUstream stream, CUevent *event,
			     struct sfr_err *err)
{
	const char *call = "cuCtxPushCurrent";
	struct sfr__cuda_scope scope;
	CUresult rc;

	if (!*event)
		return;
	rc = sfr__cuda_enter(&scope, lane->cu, lane->context);
	SFR__CUDA_THEN(rc, call, "cuStreamWaitEvent", lane->cu->stream_wait(stream, *event, 0));
	if (rc != CUDA_SUCCESS)
		(void)sfr__cuda_failed(lane, call, rc, err);
	sfr__cuda_event_put(lane, *event);
	*event = NULL;
	sfr__cuda_leave(&scope);
}

/* Inserts the wait, unless the stream is capturing. */
static bool put_wait(struct sfr__cuda_lane *lane, CUstream stream, CUevent event)
{
	struct sfr__cuda_scope scope;
	bool done;

	if (sfr__cuda_enter(&scope, lane->cu, lane->context) != CUDA_SUCCESS)
		return false;
	done = !sfr__cuda_is_capturing(lane->cu, stream) &&
	       lane->cu->stream_wait(stream, event, 0) == CUDA_SUCCESS;
	sfr__cuda_leave(&scope);
	return done;
}

bool sfr__cuda_wait_staged(struct sfr__cuda_lane *lane, struct sfr__cuda_staged *staged,
			   const struct sfr_stream *stream)
{
	CUevent event = NULL;
	bool done;

	sfr__lock(&lane->mu);
	done = staged->over || lane->dead;
	if (!done && stream)
		event = staged->event;
	staged->nr_waits += event != NULL; /* keeps the event from being reused meanwhile */
	sfr__unlock(&lane->mu);
	if (!event)
		return done;
	done = put_wait(lane, (CUstream)(uintptr_t)stream->handle, event);
	sfr__lock(&lane->mu);
	if (--staged->nr_waits == 0 && staged->over)
		sfr__cuda_staged_over_locked(lane, staged);
	sfr__unlock(&lane->mu);
	return done;
}

void sfr__cuda_staged_over_locked(struct sfr__cuda_lane *lane, struct sfr__cuda_staged *staged)
{
	staged->over = true;
	if (staged->nr_waits > 0)
		return; /* the last waiting thread does it */
	sfr__cuda_event_put_locked(lane, staged->event);
	staged->event = NULL;
}
