/* Measures the time between two points of one stream, with events that have timing.
 *
 * The events that order streams have no timing, because waiting for a timed event is slower. If
 * timing fails, the time is 0 and no error is reported: only a statistic depends on it. */
#include "device/lane.h"

/* Makes and records an event; *event becomes NULL if that fails. */
static void record_timed_event(struct sfr__cuda_lane *lane, CUstream stream, CUevent *event)
{
	if (lane->cu->event_new(event, CU_EVENT_DEFAULT) != CUDA_SUCCESS)
		*event = NULL;
	else if (lane->cu->event_record(*event, stream) != CUDA_SUCCESS) {
		(void)lane->cu->event_free(*event); /* on failure it is only lost */
		*event = NULL;
	}
}

void sfr__cuda_timer_begin(struct sfr__cuda_lane *lane, struct sfr__cuda_timer *timer,
			   CUstream stream)
{
	record_timed_event(lane, stream, &timer->begin);
}

void sfr__cuda_timer_end(struct sfr__cuda_lane *lane, struct sfr__cuda_timer *timer,
			 CUstream stream)
{
	if (timer->begin)
		record_timed_event(lane, stream, &timer->end);
}

void sfr__cuda_timer_free_events(struct sfr__cuda_lane *lane, struct sfr__cuda_timer *timer)
{
	if (timer->begin)
		(void)lane->cu->event_free(timer->begin); /* fails if a dead context has freed it */
	if (timer->end)
		(void)lane->cu->event_free(timer->end);
	*timer = (struct sfr__cuda_timer){ .ns = timer->ns };
}

bool sfr__cuda_timer_read(struct sfr__cuda_lane *lane, struct sfr__cuda_timer *timer)
{
	float ms = 0;

	if (timer->begin && timer->end) {
		CUresult rc = lane->cu->event_query(timer->end);

		if (rc == CUDA_ERROR_NOT_READY)
			return false;
		if (rc == CUDA_SUCCESS)
			rc = lane->cu->event_elapsed(&ms, timer->begin, timer->end);
		if (rc == CUDA_SUCCESS && ms > 0)
			timer->ns = (uint64_t)((double)ms * 1e6);
	}
	sfr__cuda_timer_free_events(lane, timer);
	return true;
}
