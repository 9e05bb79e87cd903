/* Order between a caller's stream and a lane's: three events, and who waits for them.
 *
 *   E   recorded on the caller's stream before anything else; the lane's stream waits for it, so
 *       what is copied is what was there then
 *   C   recorded behind the captured bytes and the samples; the caller's stream waits for it
 *   S   recorded behind everything; the stream of the step waits for it
 *
 * Saves (stage_cuda.c) and snapshots (snapshot/device.c) put them at other places; what is done with
 * them is the same. A wait for an event that was never recorded is a silent nothing: so there is
 * an event only where it has been recorded.
 */
#include <errno.h>
#include <stdio.h>

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

void sfr__cuda_refuse_locked(const struct sfr__cuda_lane *lane, struct sfr_err *err)
{
	char why[160];

	(void)snprintf(why, sizeof(why), "this device is dead since %.130s", lane->why);
	sfr__err_set(err, -EIO, SFR_PHASE_STAGE, why);
}

CUevent sfr__cuda_record_locked(struct sfr__cuda_lane *lane, CUstream stream, struct sfr_err *err)
{
	CUevent event = lane->dead ? NULL : sfr__cuda_event_get_locked(lane);
	CUresult rc = event ? lane->cu->event_record(event, stream) : CUDA_ERROR_OUT_OF_MEMORY;

	if (rc == CUDA_SUCCESS)
		return event;
	(void)sfr__cuda_failed_locked(lane, event ? "cuEventRecord" : "cuEventCreate", rc, err);
	if (!lane->dead)
		sfr__cuda_event_put_locked(lane, event);
	return NULL;
}

void sfr__cuda_mark_locked(struct sfr__cuda_lane *lane, CUstream stream, struct sfr_err *err)
{
	CUevent event = sfr__cuda_record_locked(lane, stream, err);
	CUresult rc;

	if (!event)
		return;
	rc = lane->cu->stream_wait(lane->stream, event, 0);
	if (rc != CUDA_SUCCESS)
		(void)sfr__cuda_failed_locked(lane, "cuStreamWaitEvent", rc, err);
	/* The wait is for the event as it was recorded here: it may be recorded anew. */
	if (!lane->dead)
		sfr__cuda_event_put_locked(lane, event);
}

void sfr__cuda_wait_captured(struct sfr__cuda_lane *lane, CUstream stream, CUevent *event,
			     struct sfr_err *err)
{
	struct sfr__cuda_scope scope;
	CUresult rc;

	if (!*event)
		return;
	rc = sfr__cuda_enter(&scope, lane->cu, lane->context);
	if (rc == CUDA_SUCCESS)
		rc = lane->cu->stream_wait(stream, *event, 0);
	sfr__lock(&lane->mu);
	if (rc != CUDA_SUCCESS)
		(void)sfr__cuda_failed_locked(lane, "cuStreamWaitEvent", rc, err);
	if (!lane->dead)
		sfr__cuda_event_put_locked(lane, *event);
	sfr__unlock(&lane->mu);
	*event = NULL;
	sfr__cuda_leave(&scope);
}

bool sfr__cuda_wait_staged_locked(struct sfr__cuda_lane *lane, const struct sfr_stream *stream,
				  CUevent staged)
{
	struct sfr__cuda_scope scope;
	CUstream handle;
	bool done;

	if (!stream || !staged || sfr__cuda_enter(&scope, lane->cu, lane->context) != CUDA_SUCCESS)
		return false;
	handle = (CUstream)(uintptr_t)stream->handle;
	done = !sfr__cuda_is_capturing(lane->cu, handle) &&
	       lane->cu->stream_wait(handle, staged, 0) == CUDA_SUCCESS;
	sfr__cuda_leave(&scope);
	return done;
}
