/* The fake driver's streams, each with a queue and a thread; its events; and the copies that
 * complete with them. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fake_cuda_state.h"

/* ---- the streams' threads ----------------------------------------------------- */

/* Pauses for a random time, without the lock. */
static void random_pause(void)
{
	struct timespec ts = { 0 };

	if (fk.delay_max == 0)
		return;
	if (fake__random() % fk.delay_one_in)
		return;
	ts.tv_nsec = (long)(fake__random() % fk.delay_max);
	pthread_mutex_unlock(&fk.mu);
	(void)nanosleep(&ts, NULL);
	pthread_mutex_lock(&fk.mu);
}

static uint64_t now_ns(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* Completes the copies before an event. */
static void complete_op(struct CUstream_st *stream)
{
	struct op *op;
	bool straddles;

	while ((op = stream->queued) && !fk.dead_of[stream->device]) {
		stream->queued = op->next;
		if (!stream->queued)
			stream->queued_end = &stream->queued;
		fk.nr_copies++;
		if (fk.fail_copy_at && fk.nr_copies == fk.fail_copy_at) {
			fk.dead_of[stream->device] = fk.fail_copy_code;
			fk.nr_hits++;
			pthread_cond_broadcast(&fk.cv);
		} else if (!op->pageable &&
			   !fake__registration_of(op->to_device ? op->src : op->dst, op->len,
						  &straddles)) {
			fake__violated(
				"a copy of %zu bytes has its end in memory no longer registered",
				op->len);
		} else {
			for (size_t i = 0; i < op->nr; i++)
				memcpy(op->dst + i * op->dst_pitch, op->src + i * op->src_pitch,
				       op->len);
			fk.bytes_copied += op->len * op->nr;
		}
		free(op);
	}
}

/* Returns whether the stream can do nothing but wait for an event. */
static bool is_stuck(const struct CUstream_st *stream)
{
	return stream->wait && stream->wait->event->completed < stream->wait->gen &&
	       !fk.dead_of[stream->device];
}

static void run(struct CUstream_st *stream, struct op *op)
{
	if (op->kind != COPY)
		random_pause();
	switch (op->kind) {
	case COPY:
		fake__spend(COPY_NS);
		if (op->to_device)
			fake__spoil(op);
		op->next = NULL;
		*stream->queued_end = op;
		stream->queued_end = &op->next;
		return;
	case RECORD:
		complete_op(stream);
		if (!fk.dead_of[stream->device] && op->event->completed < op->gen) {
			op->event->completed = op->gen;
			op->event->at_ns = now_ns();
		}
		break;
	case WAIT:
		stream->wait = op;
		pthread_cond_broadcast(&fk.cv);
		while (is_stuck(stream) && !stream->dropped)
			pthread_cond_wait(&fk.cv, &fk.mu);
		stream->wait = NULL;
		break;
	case WORK:
		pthread_mutex_unlock(&fk.mu);
		op->fn(op->arg);
		pthread_mutex_lock(&fk.mu);
		break;
	}
	free(op);
}

/* Returns whether the stream's next operation may run now. */
static bool may_run(const struct CUstream_st *stream)
{
	bool callers = fk.first == CALLERS;

	if (fk.first == NOBODY || stream->of_caller == callers)
		return true;
	for (const struct CUstream_st *s = fk.streams; s; s = s->next)
		if (s->of_caller == callers && !is_stuck(s) && (s->head || s->busy))
			return false;
	return true;
}

static void free_ops(struct op *op)
{
	while (op) {
		struct op *next = op->next;

		free(op);
		op = next;
	}
}

/* Removes a destroyed stream that has run all its work from the list of active ones. */
static void retire(struct CUstream_st *stream)
{
	struct CUstream_st **at = &fk.streams;

	while (*at != stream)
		at = &(*at)->next;
	*at = stream->next;
	stream->next = fk.ended_streams;
	fk.ended_streams = stream;
	free_ops(stream->head);
	free_ops(stream->queued);
	stream->head = stream->tail = stream->queued = NULL;
	stream->queued_end = &stream->queued;
	pthread_cond_broadcast(&fk.cv);
}

static void *stream_main(void *arg)
{
	struct CUstream_st *stream = arg;

	pthread_mutex_lock(&fk.mu);
	while (!stream->dropped) {
		struct op *op = stream->head;

		if (op && !fk.held && !may_run(stream)) {
			pthread_cond_wait(&fk.cv, &fk.mu);
		} else if (op && !fk.held) {
			stream->head = op->next;
			if (!stream->head)
				stream->tail = NULL;
			stream->busy = true;
			run(stream, op);
			stream->busy = false;
			stream->nr_ops--;
			pthread_cond_broadcast(&fk.cv);
		} else if (!op && !stream->alive && (!stream->queued || stream->flushed)) {
			complete_op(stream);
			break;
		} else {
			pthread_cond_wait(&stream->todo, &fk.mu);
		}
	}
	retire(stream);
	pthread_mutex_unlock(&fk.mu);
	return NULL;
}

void fake__push_op(struct CUstream_st *stream, const struct op *op)
{
	struct op *copy = malloc(sizeof(*copy));

	if (!copy)
		abort();
	*copy = *op;
	copy->next = NULL;
	if (stream->tail)
		stream->tail->next = copy;
	else
		stream->head = copy;
	stream->tail = copy;
	stream->nr_ops++;
	pthread_cond_signal(&stream->todo);
}

void fake__queue_op(struct CUstream_st *stream, const struct op *op, const char *call)
{
	if (stream->nr_ops >= fk.depth) {
		fake__check_holder(call);
		if (fk.nr_locks && fk.nr_locks() > 0)
			fake__violated("%s has to wait for room on its stream, under a lock", call);
	}
	while (stream->nr_ops >= fk.depth && stream->alive && !fk.dead_of[stream->device])
		pthread_cond_wait(&fk.cv, &fk.mu);
	fake__push_op(stream, op);
}

struct CUstream_st *fake__new_stream(int device, bool of_caller)
{
	struct CUstream_st *stream = calloc(1, sizeof(*stream));
	pthread_t thread;

	if (!stream)
		abort();
	stream->alive = true;
	stream->device = device;
	stream->of_caller = of_caller;
	stream->queued_end = &stream->queued;
	stream->next = fk.streams;
	fk.streams = stream;
	if (pthread_cond_init(&stream->todo, NULL) != 0)
		abort();
	if (pthread_create(&thread, NULL, stream_main, stream) != 0 || pthread_detach(thread) != 0)
		abort();
	return stream;
}

bool fake__usable_stream(CUstream stream, const char *call)
{
	if (is_host(stream) || stream->alive)
		return true;
	fake__violated("%s on a stream that was destroyed", call);
	return false;
}

/* Reports an event of a caller's stream that no stream waited for: without that wait, the copies
 * do not have the state at the call. */
static void check_waited(const struct CUevent_st *event)
{
	if (event->of_caller && !event->waited && !event->timing && !fk.dead_of[event->device])
		fake__violated(
			"an event was recorded on a caller's stream and no stream waited for it");
}

static bool usable_event(CUevent event, const char *call)
{
	if (event && event->alive)
		return true;
	fake__violated("%s on an event that was destroyed", call);
	return false;
}

void fake__wake_all(void)
{
	pthread_cond_broadcast(&fk.cv);
	for (struct CUstream_st *s = fk.streams; s; s = s->next)
		pthread_cond_signal(&s->todo);
}

/* ---- streams and events ------------------------------------------------------------ */

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned int flags);
EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
	BEGIN_UNSAFE("cuStreamCreate", true)
	if (!(flags & CU_STREAM_NON_BLOCKING))
		fake__violated("a stream that waits for the legacy one");
	if (!code)
		*stream = fake__new_stream(fake__current_device(), false);
	END
}

static void end_stream(struct CUstream_st *stream)
{
	stream->alive = false;
	pthread_cond_signal(&stream->todo);
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream);
EXPORT CUresult cuStreamDestroy_v2(CUstream stream)
{
	BEGIN_UNSAFE("cuStreamDestroy_v2", true)
	if (is_host(stream))
		fake__violated("a caller's stream is destroyed");
	else if (fake__usable_stream(stream, "cuStreamDestroy") &&
		 (!code || fake__loses_context(code)))
		end_stream(stream);
	END
}

EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags);
EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
	uint64_t gen;
	BEGIN("cuStreamWaitEvent", true)
	(void)flags;
	if (event)
		event->waited = true; /* counts even if the call fails */
	if (!code && fake__usable_stream(stream, "cuStreamWaitEvent") &&
	    usable_event(event, "cuStreamWaitEvent")) {
		gen = event->recorded;
		if (event->timing)
			fake__violated("a wait for an event that takes the time");
		if (gen == 0)
			fake__violated("a wait for an event that was never recorded");
		if (is_host(stream) ? fk.host_capturing : stream->capturing)
			fake__violated("a wait is put into a graph");
		if (is_host(stream)) {
			if (event->completed < gen && !fk.dead_of[event->device])
				fake__check_holder("cuStreamWaitEvent on the thread's own stream");
			while (event->completed < gen && !fk.dead_of[event->device])
				pthread_cond_wait(&fk.cv, &fk.mu);
		} else {
			stream->knows_caller |= event->of_caller;
			fake__queue_op(stream,
				       &(struct op){ .kind = WAIT, .event = event, .gen = gen },
				       "cuStreamWaitEvent");
		}
	}
	END
}

EXPORT CUresult cuStreamQuery(CUstream stream);
EXPORT CUresult cuStreamQuery(CUstream stream)
{
	BEGIN_UNSAFE("cuStreamQuery", true)
	if (!code && fake__usable_stream(stream, "cuStreamQuery") && !is_host(stream)) {
		/* A real stream completes its work by itself. This one does so when it is
		 * queried. */
		if (stream->head || stream->busy) {
			code = CUDA_ERROR_NOT_READY;
			fake__check_holder("cuStreamQuery");
		} else {
			complete_op(stream);
		}
		if (!code && fk.dead_of[stream->device])
			code = fk.dead_of[stream->device];
	}
	END
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status);
EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status)
{
	BEGIN("cuStreamIsCapturing", true)
	*status = is_host(stream) ? fk.host_capturing : stream->capturing;
	END
}

EXPORT CUresult cuEventCreate(CUevent *event, unsigned int flags);
EXPORT CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
	BEGIN("cuEventCreate", true)
	if (!code) {
		*event = calloc(1, sizeof(**event));
		if (!*event)
			abort();
		(*event)->alive = true;
		(*event)->timing = !(flags & CU_EVENT_DISABLE_TIMING);
		(*event)->device = fake__current_device();
		(*event)->next = fk.events;
		fk.events = *event;
		fk.nr_events++;
	}
	END
}

EXPORT CUresult cuEventDestroy_v2(CUevent event);
EXPORT CUresult cuEventDestroy_v2(CUevent event)
{
	BEGIN("cuEventDestroy_v2", true)
	if (usable_event(event, "cuEventDestroy") && !code) {
		check_waited(event);
		event->alive = false;
		fk.nr_events--;
	}
	END
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream);
EXPORT CUresult cuEventRecord(CUevent event, CUstream stream)
{
	BEGIN("cuEventRecord", true)
	if (!code && fake__usable_stream(stream, "cuEventRecord") &&
	    usable_event(event, "cuEventRecord")) {
		if (event->device != (is_host(stream) ? fake__current_device() : stream->device)) {
			fake__violated("an event is recorded on a stream of another device");
			pthread_mutex_unlock(&fk.mu);
			return CUDA_ERROR_INVALID_HANDLE;
		}
		check_waited(event);
		event->recorded++;
		event->waited = false;
		event->of_caller = is_host(stream) || stream->of_caller;
		if (is_host(stream) ? fk.host_capturing : stream->capturing)
			fake__violated("an event is put into a graph");
		if (is_host(stream)) {
			event->completed = event->recorded;
			event->at_ns = now_ns();
			pthread_cond_broadcast(&fk.cv);
		} else {
			fake__queue_op(stream,
				       &(struct op){ .kind = RECORD,
						     .event = event,
						     .gen = event->recorded },
				       "cuEventRecord");
		}
	}
	END
}

EXPORT CUresult cuEventQuery(CUevent event);
EXPORT CUresult cuEventQuery(CUevent event)
{
	BEGIN("cuEventQuery", true)
	if (!code && usable_event(event, "cuEventQuery")) {
		code = fake__unsafe("cuEventQuery", 0);
		if (!code && event->completed < event->recorded) {
			code = CUDA_ERROR_NOT_READY;
			fake__check_holder("cuEventQuery");
			fk.nr_not_ready[event->device]++;
			pthread_cond_broadcast(&fk.cv);
		}
	}
	END
}

EXPORT CUresult cuEventElapsedTime(float *ms, CUevent begin, CUevent end);
EXPORT CUresult cuEventElapsedTime(float *ms, CUevent begin, CUevent end)
{
	BEGIN("cuEventElapsedTime", true)
	if (!code && usable_event(begin, "cuEventElapsedTime") &&
	    usable_event(end, "cuEventElapsedTime")) {
		if (!begin->timing || !end->timing || !begin->recorded || !end->recorded)
			code = CUDA_ERROR_INVALID_HANDLE;
		else if (begin->completed < begin->recorded || end->completed < end->recorded)
			code = CUDA_ERROR_NOT_READY;
		else
			*ms = (float)(end->at_ns - begin->at_ns) / 1e6f;
	}
	END
}
