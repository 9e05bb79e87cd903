/* A CUDA driver without a device, for tests: exports the driver's functions that the core uses.
 *
 * Device memory is host memory. Each stream has a thread that takes its operations in turn; delays
 * can be put before each. What a real device only sometimes shows, this one always does:
 *
 *   - a copy's destination is overwritten with rubbish when the copy is queued, and its bytes are
 *     read and written only when an event behind it on the stream completes; a copy that no event
 *     follows never lands;
 *   - a stream that is destroyed with work on it goes on with that: the call returns at once. Copies
 *     that no event follows land as late as they may, when the test looks for violations;
 *   - who goes first where both may, the caller's streams or the core's, is the test's to say;
 *   - streams 0, 1 and 2 (legacy, default, per thread) are the calling thread itself, since torch
 *     runs CPU work there: an event recorded on one is complete at once, and a wait put on one
 *     holds the caller until the event completes.
 *
 * Violations are kept as sentences: a copy to memory that is not registered or no longer so, or
 * across two registrations; a copy on a stream that has waited for no event of a caller's stream;
 * a wait for an event never recorded, and an event of a caller's stream that nobody waited for; use
 * of what was destroyed; memory unregistered, or freed on the device, under a copy; an event asked
 * while a graph is captured by a thread that has not relaxed its mode, and work put into a graph.
 *
 * Any call can be made to fail. An error after which a real context is lost stays: the device is
 * dead, nothing on it lands any more, and every call that has to do with it returns that error.
 *
 * One mutex guards everything. `cv` is signalled when something has run; a stream's thread sleeps
 * on a condition of its own, so that one piece of work wakes one thread.
 */
#define SFR_NO_CUDA_H
#include <errno.h>
#include <stdarg.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cuda_types.h"
#include "fake_cuda.h"

#define EXPORT __attribute__((visibility("default")))
#define NR_DEVICES 4
#define RUBBISH 0xdb
#define NR_FAULTS 16
#define NR_VIOLATIONS 64
#define SETTLED 16  /* queries in a row that say "not ready": a lane with nothing else to do */
#define SETTLE_S 10 /* a lane that asks nothing for so long never will */
#define INVALID_CONTEXT 201
#define INVALID_HANDLE 400
#define CAPTURE_UNSUPPORTED 900
#define ALREADY_REGISTERED 712
#define NOT_REGISTERED 713

enum kind { COPY, RECORD, WAIT, WORK };
struct op {
	struct op *next;
	enum kind kind;
	char *dst;
	const char *src;
	size_t len;
	bool pageable;
	CUevent event;
	uint64_t gen;
	void (*fn)(void *);
	void *arg;
};

struct CUctx_st {
	int device;
};

/* Handles are never freed, so that the use of one that was destroyed is seen; destroyed streams
 * go to a list of their own, so that walks over the living ones stay short. */
struct CUevent_st {
	struct CUevent_st *next;
	bool alive;
	int device;
	uint64_t recorded, completed; /* generations */
	bool of_caller;               /* its last recording was on a caller's stream */
	bool waited;                  /* for its last recording */
};

struct CUstream_st {
	struct CUstream_st *next;
	bool alive, of_caller, capturing, knows_caller;
	bool busy;             /* in an operation */
	bool flushed, dropped; /* once destroyed: its last copies are to land; nothing is to */
	int device;
	const struct op *wait; /* the operation it is in waits, for an event */
	struct op *head, *tail;
	struct op *queued; /* copies that have had their turn and wait for an event */
	struct op **queued_end;
	pthread_cond_t todo; /* its thread sleeps here */
};

struct registration {
	struct registration *next;
	char *mem;
	size_t len;
	bool allocated;
};

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t cv = PTHREAD_COND_INITIALIZER;
static struct CUctx_st contexts[NR_DEVICES] = { { 0 }, { 1 }, { 2 }, { 3 } };
static int retained[NR_DEVICES], dead_of[NR_DEVICES];
static bool inactive[NR_DEVICES], initialised, held, pageable_allowed, host_capturing;
static struct CUstream_st *streams, *ended_streams;
static struct registration *registrations;
static struct CUevent_st *events;
static int64_t nr_events;
static uint64_t delay_max, delay_one_in = 1, delay_seed = 1, nr_calls, nr_syncs, nr_hits, nr_copies,
			   bytes_copied;
static uint64_t fail_copy_at;
static int fail_copy_code;
static pid_t owner;
static enum { NOBODY, CALLERS, CORE } first;
static bool never_settles;
static pthread_t holder;      /* who let nothing go on */
static uint64_t nr_not_ready; /* queries that said so, with no other call in between */

static struct fault {
	char name[48];
	uint64_t nth, seen;
	int sticky, code;
} faults[NR_FAULTS];
static struct count {
	char name[48];
	uint64_t nr;
} counts[64];
static char violations[NR_VIOLATIONS][160];
static uint64_t nr_violations;

static __thread CUcontext stack[16];
static __thread int depth;
static __thread int mode; /* of graph captures; 0 = global */

static void wake_all(void);

/* ---- small things ---------------------------------------------------------- */

__attribute__((format(printf, 1, 2))) static void violated(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	if (nr_violations < NR_VIOLATIONS)
		(void)vsnprintf(violations[nr_violations], sizeof(violations[0]), format, args);
	va_end(args);
	nr_violations++;
}

static bool loses_context(int code)
{
	return code == 4 || code == 214 || code == 700 || code == 709 || code == 710 ||
	       (code >= 714 && code <= 719);
}

static int current_device(void)
{
	return depth > 0 && stack[depth - 1] ? stack[depth - 1]->device : -1;
}

/* What every call does first, with the lock: counts itself, and may have to fail. */
static int enter(const char *name, bool needs_context)
{
	int device = current_device(), code = 0;

	nr_calls++;
	if (strcmp(name, "cuEventQuery") != 0)
		nr_not_ready = 0;
	for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
		if (!counts[i].name[0])
			(void)snprintf(counts[i].name, sizeof(counts[i].name), "%s", name);
		if (strcmp(counts[i].name, name) == 0) {
			counts[i].nr++;
			break;
		}
	}
	if (initialised && getpid() != owner)
		return CUDA_ERROR_NOT_INITIALIZED;
	for (int i = 0; i < NR_FAULTS; i++) {
		struct fault *f = &faults[i];

		if (!f->nth || (strcmp(f->name, name) != 0 && strcmp(f->name, "*") != 0))
			continue;
		f->seen++;
		if (code == 0 && (f->seen == f->nth || (f->sticky && f->seen > f->nth))) {
			code = f->code;
			nr_hits++;
		}
	}
	if (code && loses_context(code) && device >= 0) {
		dead_of[device] = code;
		pthread_cond_broadcast(&cv);
	}
	if (code)
		return code;
	if (needs_context && device < 0)
		return INVALID_CONTEXT;
	if (needs_context && dead_of[device])
		return dead_of[device];
	return 0;
}

/* The thread that holds the devices asks whether something has completed, or waits for it: it would
 * do so for ever. Says so and lets them go on. */
static void check_holder(const char *call)
{
	if (!held || !pthread_equal(holder, pthread_self()))
		return;
	violated("%s by a thread that must not wait for the device", call);
	held = false;
	wake_all();
}

static bool is_host(CUstream stream)
{
	return (uintptr_t)stream <= 2;
}

/* A pause of random length, without the lock. */
static void pause_a_little(void)
{
	struct timespec ts = { 0 };

	if (delay_max == 0)
		return;
	delay_seed = delay_seed * 6364136223846793005u + 1442695040888963407u;
	if ((delay_seed >> 58) % delay_one_in)
		return;
	ts.tv_nsec = (long)((delay_seed >> 33) % delay_max);
	pthread_mutex_unlock(&mu);
	(void)nanosleep(&ts, NULL);
	pthread_mutex_lock(&mu);
}

static struct registration *registration_of(const char *mem, size_t len, bool *straddles)
{
	*straddles = false;
	for (struct registration *r = registrations; r; r = r->next) {
		if (mem >= r->mem && mem + len <= r->mem + r->len)
			return r;
		if (mem < r->mem + r->len && mem + len > r->mem)
			*straddles = true;
	}
	return NULL;
}

/* ---- the streams' threads ----------------------------------------------------- */

/* Writes what the copies before an event have copied. */
static void land(struct CUstream_st *stream)
{
	struct op *op;
	bool straddles;

	while ((op = stream->queued) && !dead_of[stream->device]) {
		stream->queued = op->next;
		if (!stream->queued)
			stream->queued_end = &stream->queued;
		nr_copies++;
		if (fail_copy_at && nr_copies == fail_copy_at) {
			dead_of[stream->device] = fail_copy_code;
			nr_hits++;
			pthread_cond_broadcast(&cv);
		} else if (!op->pageable && !registration_of(op->dst, op->len, &straddles)) {
			violated("a copy of %zu bytes lands in memory no longer registered",
				 op->len);
		} else {
			memcpy(op->dst, op->src, op->len);
			bytes_copied += op->len;
		}
		free(op);
	}
}

/* Whether a stream can only wait: what it waits for has not completed. */
static bool is_stuck(const struct CUstream_st *stream)
{
	return stream->wait && stream->wait->event->completed < stream->wait->gen &&
	       !dead_of[stream->device];
}

static void run(struct CUstream_st *stream, struct op *op)
{
	if (op->kind != COPY)
		pause_a_little();
	switch (op->kind) {
	case COPY:
		op->next = NULL;
		*stream->queued_end = op;
		stream->queued_end = &op->next;
		return;
	case RECORD:
		land(stream);
		if (!dead_of[stream->device] && op->event->completed < op->gen)
			op->event->completed = op->gen;
		break;
	case WAIT:
		stream->wait = op;
		pthread_cond_broadcast(&cv);
		while (is_stuck(stream) && !stream->dropped)
			pthread_cond_wait(&cv, &mu);
		stream->wait = NULL;
		break;
	case WORK:
		pthread_mutex_unlock(&mu);
		op->fn(op->arg);
		pthread_mutex_lock(&mu);
		break;
	}
	free(op);
}

/* Whether a stream's next operation may run now, or others come first. */
static bool has_turn(const struct CUstream_st *stream)
{
	bool callers = first == CALLERS;

	if (first == NOBODY || stream->of_caller == callers)
		return true;
	for (const struct CUstream_st *s = streams; s; s = s->next)
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

/* A destroyed stream has run dry: out of the list of those with work. */
static void retire(struct CUstream_st *stream)
{
	struct CUstream_st **at = &streams;

	while (*at != stream)
		at = &(*at)->next;
	*at = stream->next;
	stream->next = ended_streams;
	ended_streams = stream;
	free_ops(stream->head);
	free_ops(stream->queued);
	stream->head = stream->tail = stream->queued = NULL;
	stream->queued_end = &stream->queued;
	pthread_cond_broadcast(&cv);
}

static void *stream_main(void *arg)
{
	struct CUstream_st *stream = arg;

	pthread_mutex_lock(&mu);
	while (!stream->dropped) {
		struct op *op = stream->head;

		if (op && !held && !has_turn(stream)) {
			pthread_cond_wait(&cv, &mu);
		} else if (op && !held) {
			stream->head = op->next;
			if (!stream->head)
				stream->tail = NULL;
			stream->busy = true;
			run(stream, op);
			stream->busy = false;
			pthread_cond_broadcast(&cv);
		} else if (!op && !stream->alive && (!stream->queued || stream->flushed)) {
			land(stream);
			break;
		} else {
			pthread_cond_wait(&stream->todo, &mu);
		}
	}
	retire(stream);
	pthread_mutex_unlock(&mu);
	return NULL;
}

static void push_op(struct CUstream_st *stream, const struct op *op)
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
	pthread_cond_signal(&stream->todo);
}

static struct CUstream_st *new_stream(int device, bool of_caller)
{
	struct CUstream_st *stream = calloc(1, sizeof(*stream));
	pthread_t thread;

	if (!stream)
		abort();
	stream->alive = true;
	stream->device = device;
	stream->of_caller = of_caller;
	stream->queued_end = &stream->queued;
	stream->next = streams;
	streams = stream;
	if (pthread_cond_init(&stream->todo, NULL) != 0)
		abort();
	if (pthread_create(&thread, NULL, stream_main, stream) != 0 || pthread_detach(thread) != 0)
		abort();
	return stream;
}

static void wake_all(void)
{
	pthread_cond_broadcast(&cv);
	for (struct CUstream_st *s = streams; s; s = s->next)
		pthread_cond_signal(&s->todo);
}

static bool usable_stream(CUstream stream, const char *call)
{
	if (is_host(stream) || stream->alive)
		return true;
	violated("%s on a stream that was destroyed", call);
	return false;
}

/* E is for somebody to wait for: what is copied is the state at the call by that alone. */
static void check_waited(const struct CUevent_st *event)
{
	if (event->of_caller && !event->waited && !dead_of[event->device])
		violated("an event was recorded on a caller's stream and nobody waited for it");
}

static bool usable_event(CUevent event, const char *call)
{
	if (event && event->alive)
		return true;
	violated("%s on an event that was destroyed", call);
	return false;
}

/* ---- devices and contexts -------------------------------------------------------- */

#define BEGIN(name, needs_context)                                                                 \
	int code;                                                                                  \
	pthread_mutex_lock(&mu);                                                                   \
	code = enter(name, needs_context);
#define END                                                                                        \
	pthread_mutex_unlock(&mu);                                                                 \
	return code;

EXPORT CUresult cuInit(unsigned int flags);
EXPORT CUresult cuInit(unsigned int flags)
{
	BEGIN("cuInit", false)
	(void)flags;
	if (!code && !initialised) {
		initialised = true;
		owner = getpid();
	}
	END
}

EXPORT CUresult cuDriverGetVersion(int *version);
EXPORT CUresult cuDriverGetVersion(int *version)
{
	const char *text = getenv("FAKE_CUDA_VERSION");
	BEGIN("cuDriverGetVersion", false)
	*version = text ? atoi(text) : 13000;
	END
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **text);
EXPORT CUresult cuGetErrorName(CUresult error, const char **text)
{
	switch ((int)error) {
#define X(name, value)                                                                             \
	case value:                                                                                \
		*text = #name;                                                                     \
		return CUDA_SUCCESS;
		X(CUDA_ERROR_INVALID_VALUE, 1)
		X(CUDA_ERROR_OUT_OF_MEMORY, 2)
		X(CUDA_ERROR_NOT_INITIALIZED, 3)
		X(CUDA_ERROR_DEINITIALIZED, 4)
		X(CUDA_ERROR_INVALID_DEVICE, 101)
		X(CUDA_ERROR_INVALID_CONTEXT, 201)
		X(CUDA_ERROR_INVALID_HANDLE, 400)
		X(CUDA_ERROR_ILLEGAL_ADDRESS, 700)
		X(CUDA_ERROR_NOT_SUPPORTED, 801)
#undef X
	default:
		*text = NULL;
		return CUDA_ERROR_INVALID_VALUE;
	}
}

EXPORT CUresult cuDeviceGetCount(int *count);
EXPORT CUresult cuDeviceGetCount(int *count)
{
	BEGIN("cuDeviceGetCount", false)
	*count = NR_DEVICES;
	END
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal);
EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
	BEGIN("cuDeviceGet", false)
	if (!code && (ordinal < 0 || ordinal >= NR_DEVICES))
		code = 101;
	*device = ordinal;
	END
}

EXPORT CUresult cuDeviceGetPCIBusId(char *id, int len, CUdevice device);
EXPORT CUresult cuDeviceGetPCIBusId(char *id, int len, CUdevice device)
{
	BEGIN("cuDeviceGetPCIBusId", false)
	(void)snprintf(id, (size_t)len, "FFFF:%02X:00.0", (unsigned int)device & 0xff);
	END
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active);
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
	BEGIN("cuDevicePrimaryCtxGetState", false)
	*flags = 0;
	*active = !inactive[device];
	END
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
	BEGIN("cuDevicePrimaryCtxRetain", false)
	if (!code) {
		if (inactive[device])
			violated("device %d is made active by us", device);
		retained[device]++;
		*context = &contexts[device];
	}
	END
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
	BEGIN("cuDevicePrimaryCtxRelease_v2", false)
	if (--retained[device] < 0)
		violated("device %d is released once too often", device);
	END
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context);
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context)
{
	BEGIN("cuCtxPushCurrent_v2", false)
	if (!code && retained[context->device] <= 0)
		violated("a context is used that was released");
	if (!code)
		stack[depth++] = context;
	END
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context);
EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
	BEGIN("cuCtxPopCurrent_v2", false)
	/* Fails like any call, but has popped: a stack that only grows is a test's own doing. */
	if (depth > 0)
		*context = stack[--depth];
	else
		violated("a context is popped that was not pushed");
	END
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *want);
EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *want)
{
	BEGIN("cuThreadExchangeStreamCaptureMode", false)
	if (!code) {
		int was = mode;

		mode = *want;
		*want = was;
	}
	END
}

/* ---- streams and events ------------------------------------------------------------ */

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned int flags);
EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
	BEGIN("cuStreamCreate", true)
	if (!(flags & CU_STREAM_NON_BLOCKING))
		violated("a stream that waits for the legacy one");
	if (!code)
		*stream = new_stream(current_device(), false);
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
	BEGIN("cuStreamDestroy_v2", true)
	if (is_host(stream))
		violated("a caller's stream is destroyed");
	else if (usable_stream(stream, "cuStreamDestroy") && (!code || loses_context(code)))
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
		event->waited = true; /* or tried to, which is as good here */
	if (!code && usable_stream(stream, "cuStreamWaitEvent") &&
	    usable_event(event, "cuStreamWaitEvent")) {
		gen = event->recorded;
		if (gen == 0)
			violated("a wait for an event that was never recorded");
		if (is_host(stream) ? host_capturing : stream->capturing)
			violated("a wait is put into a graph");
		if (is_host(stream)) {
			if (event->completed < gen && !dead_of[event->device])
				check_holder("cuStreamWaitEvent on the thread's own stream");
			while (event->completed < gen && !dead_of[event->device])
				pthread_cond_wait(&cv, &mu);
		} else {
			stream->knows_caller |= event->of_caller;
			push_op(stream, &(struct op){ .kind = WAIT, .event = event, .gen = gen });
		}
	}
	END
}

EXPORT CUresult cuStreamQuery(CUstream stream);
EXPORT CUresult cuStreamQuery(CUstream stream)
{
	BEGIN("cuStreamQuery", true)
	if (!code && usable_stream(stream, "cuStreamQuery") && !is_host(stream)) {
		/* A real stream runs dry by itself: so does this one when it is asked. */
		if (stream->head || stream->busy) {
			code = CUDA_ERROR_NOT_READY;
			check_holder("cuStreamQuery");
		} else {
			land(stream);
		}
		if (!code && dead_of[stream->device])
			code = dead_of[stream->device];
	}
	END
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status);
EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status)
{
	BEGIN("cuStreamIsCapturing", true)
	*status = is_host(stream) ? host_capturing : stream->capturing;
	END
}

EXPORT CUresult cuEventCreate(CUevent *event, unsigned int flags);
EXPORT CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
	BEGIN("cuEventCreate", true)
	if (!(flags & CU_EVENT_DISABLE_TIMING))
		violated("an event that takes the time");
	if (!code) {
		*event = calloc(1, sizeof(**event));
		if (!*event)
			abort();
		(*event)->alive = true;
		(*event)->device = current_device();
		(*event)->next = events;
		events = *event;
		nr_events++;
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
		nr_events--;
	}
	END
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream);
EXPORT CUresult cuEventRecord(CUevent event, CUstream stream)
{
	BEGIN("cuEventRecord", true)
	if (!code && usable_stream(stream, "cuEventRecord") &&
	    usable_event(event, "cuEventRecord")) {
		check_waited(event);
		event->recorded++;
		event->waited = false;
		event->of_caller = is_host(stream) || stream->of_caller;
		if (is_host(stream) ? host_capturing : stream->capturing)
			violated("an event is put into a graph");
		if (is_host(stream)) {
			event->completed = event->recorded;
			pthread_cond_broadcast(&cv);
		} else {
			push_op(stream, &(struct op){ .kind = RECORD,
						      .event = event,
						      .gen = event->recorded });
		}
	}
	END
}

EXPORT CUresult cuEventQuery(CUevent event);
EXPORT CUresult cuEventQuery(CUevent event)
{
	BEGIN("cuEventQuery", true)
	if (!code && usable_event(event, "cuEventQuery")) {
		bool capturing = host_capturing;

		for (struct CUstream_st *s = streams; s; s = s->next)
			capturing |= s->capturing;
		if (capturing && mode != CU_STREAM_CAPTURE_MODE_RELAXED) {
			violated("an event is asked while a graph is captured");
			code = CAPTURE_UNSUPPORTED;
		} else if (event->completed < event->recorded) {
			code = CUDA_ERROR_NOT_READY;
			check_holder("cuEventQuery");
			nr_not_ready++;
			pthread_cond_broadcast(&cv);
		}
	}
	END
}

/* ---- memory ----------------------------------------------------------------------- */

static void add_registration(void *mem, size_t len, bool allocated)
{
	struct registration *r = calloc(1, sizeof(*r));

	if (!r)
		abort();
	r->mem = mem;
	r->len = len;
	r->allocated = allocated;
	r->next = registrations;
	registrations = r;
}

static bool overlaps(const char *mem, size_t len, const char *with, size_t with_len)
{
	return mem < with + with_len && with < mem + len;
}

/* Whether a copy that is still to land reads from the memory, or writes to it. */
static bool in_use(const char *mem, size_t len)
{
	for (const struct CUstream_st *s = streams; s; s = s->next) {
		if (dead_of[s->device])
			continue;
		for (int i = 0; i < 2; i++)
			for (const struct op *op = i ? s->head : s->queued; op; op = op->next)
				if (op->kind == COPY && (overlaps(mem, len, op->dst, op->len) ||
							 overlaps(mem, len, op->src, op->len)))
					return true;
	}
	return false;
}

/* Takes one out; a copy into it that is still to land is a violation. */
static int drop_registration(void *mem, bool allocated)
{
	for (struct registration **at = &registrations; *at; at = &(*at)->next) {
		struct registration *r = *at;

		if (r->mem != mem || r->allocated != allocated)
			continue;
		if (in_use(r->mem, r->len))
			violated("memory is taken from under a copy");
		*at = r->next;
		free(r);
		return 0;
	}
	return NOT_REGISTERED;
}

EXPORT CUresult cuMemHostRegister_v2(void *mem, size_t len, unsigned int flags);
EXPORT CUresult cuMemHostRegister_v2(void *mem, size_t len, unsigned int flags)
{
	BEGIN("cuMemHostRegister_v2", true)
	if (!code && !(flags & CU_MEMHOSTREGISTER_PORTABLE))
		violated("memory is registered for one device only");
	if (!code && len > (size_t)1 << 30)
		violated("a registration of more than 1 GiB");
	for (struct registration *r = registrations; r && !code; r = r->next)
		if (overlaps(mem, len, r->mem, r->len))
			code = ALREADY_REGISTERED;
	if (!code) {
		((volatile char *)mem)[0] = 0; /* pages that nobody may write are refused */
		((volatile char *)mem)[len - 1] = 0;
		add_registration(mem, len, false);
	}
	END
}

EXPORT CUresult cuMemHostUnregister(void *mem);
EXPORT CUresult cuMemHostUnregister(void *mem)
{
	BEGIN("cuMemHostUnregister", true)
	if (!code || loses_context(code)) {
		int rc = drop_registration(mem, false);

		if (!code)
			code = rc;
		if (rc)
			violated("memory is unregistered that was not registered");
	}
	END
}

EXPORT CUresult cuMemHostAlloc(void **mem, size_t len, unsigned int flags);
EXPORT CUresult cuMemHostAlloc(void **mem, size_t len, unsigned int flags)
{
	BEGIN("cuMemHostAlloc", true)
	(void)flags;
	if (!code) {
		*mem = aligned_alloc(4096, (len + 4095) / 4096 * 4096);
		if (!*mem)
			abort();
		add_registration(*mem, len, true);
	}
	END
}

EXPORT CUresult cuMemFreeHost(void *mem);
EXPORT CUresult cuMemFreeHost(void *mem)
{
	BEGIN("cuMemFreeHost", true)
	if (!code || loses_context(code)) {
		if (drop_registration(mem, true))
			violated("memory is freed that was not allocated");
		else
			free(mem);
	}
	END
}

/* ---- copies ----------------------------------------------------------------------- */

static int copy(void *dst, CUdeviceptr src, size_t len, CUstream stream, const char *call)
{
	bool straddles, pinned;
	struct op op = { .kind = COPY,
			 .dst = dst,
			 .src = (const char *)(uintptr_t)src, /* NOLINT: a device pointer */
			 .len = len };

	if (!usable_stream(stream, call))
		return INVALID_HANDLE;
	if (is_host(stream)) {
		violated("%s on a caller's stream", call);
		return CUDA_ERROR_INVALID_VALUE;
	}
	pinned = registration_of(dst, len, &straddles) != NULL;
	if (straddles && !pinned) {
		violated("a copy across two registrations, or over the edge of one");
		return CUDA_ERROR_INVALID_VALUE;
	}
	if (!pinned && !pageable_allowed)
		violated("a copy to memory that is not registered");
	if (!stream->knows_caller)
		violated("a copy on a stream that has waited for nothing of its caller");
	op.pageable = !pinned;
	memset(dst, RUBBISH, len);
	push_op(stream, &op);
	if (!pinned) {
		/* The driver copies through memory of its own, and the caller waits. */
		struct CUevent_st done = { .alive = true, .device = stream->device, .recorded = 1 };

		push_op(stream, &(struct op){ .kind = RECORD, .event = &done, .gen = 1 });
		while (done.completed < 1 && !dead_of[stream->device])
			pthread_cond_wait(&cv, &mu);
		while (done.completed < 1 && (stream->head || stream->busy))
			pthread_cond_wait(&cv, &mu); /* it is on this stack */
	}
	return 0;
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t len, CUstream stream);
EXPORT CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t len, CUstream stream)
{
	BEGIN("cuMemcpyDtoHAsync_v2", true)
	if (!code)
		code = copy(dst, src, len, stream, "cuMemcpyDtoHAsync");
	END
}

static int batch(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *lens, size_t nr,
		 const struct sfr__cu_copy_attributes *attrs, const size_t *attr_at,
		 size_t nr_attrs, CUstream stream)
{
	int code = 0;

	if (nr == 0 || nr_attrs != 1 || attr_at[0] != 0)
		return CUDA_ERROR_INVALID_VALUE;
	if (attrs[0].src_access_order != SFR__CU_ORDER_STREAM)
		violated("a batch that may read before its turn");
	for (size_t i = 0; i < nr && !code; i++)
		code = copy((void *)(uintptr_t)dsts[i], srcs[i], lens[i], stream, /* NOLINT */
			    "cuMemcpyBatchAsync");
	return code;
}

EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *lens, size_t nr,
				      struct sfr__cu_copy_attributes *attrs, size_t *attr_at,
				      size_t nr_attrs, CUstream stream);
EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *lens, size_t nr,
				      struct sfr__cu_copy_attributes *attrs, size_t *attr_at,
				      size_t nr_attrs, CUstream stream)
{
	BEGIN("cuMemcpyBatchAsync_v2", true)
	if (!code)
		code = batch(dsts, srcs, lens, nr, attrs, attr_at, nr_attrs, stream);
	END
}

EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *lens, size_t nr,
				   struct sfr__cu_copy_attributes *attrs, size_t *attr_at,
				   size_t nr_attrs, size_t *failed, CUstream stream);
EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *lens, size_t nr,
				   struct sfr__cu_copy_attributes *attrs, size_t *attr_at,
				   size_t nr_attrs, size_t *failed, CUstream stream)
{
	BEGIN("cuMemcpyBatchAsync", true)
	*failed = SIZE_MAX;
	if (!code)
		code = batch(dsts, srcs, lens, nr, attrs, attr_at, nr_attrs, stream);
	END
}

/* ---- what waits: the core has no use for these, and a test counts them -------------- */

#define WAITER(name, params)                                                                       \
	EXPORT CUresult name params;                                                               \
	EXPORT CUresult name params                                                                \
	{                                                                                          \
		BEGIN(#name, true)                                                                 \
		nr_syncs++;                                                                        \
		END                                                                                \
	}
WAITER(cuStreamSynchronize, (CUstream stream __attribute__((unused))))
WAITER(cuEventSynchronize, (CUevent event __attribute__((unused))))
WAITER(cuCtxSynchronize, (void))

/* ---- for tests ------------------------------------------------------------------- */

EXPORT void fake_cuda_reset(void);
EXPORT void fake_cuda_reset(void)
{
	pthread_mutex_lock(&mu);
	memset(faults, 0, sizeof(faults));
	memset(counts, 0, sizeof(counts));
	memset(dead_of, 0, sizeof(dead_of));
	memset(inactive, 0, sizeof(inactive));
	nr_violations = nr_calls = nr_syncs = nr_hits = nr_copies = bytes_copied = 0;
	fail_copy_at = delay_max = 0;
	held = pageable_allowed = host_capturing = false;
	first = NOBODY;
	never_settles = false;
	delay_one_in = 1;
	wake_all();
	pthread_mutex_unlock(&mu);
}

/* Waits until streams that were destroyed have run dry. */
static void wait_for_destroyed(void)
{
	bool some = true;

	while (some) {
		some = false;
		for (struct CUstream_st *s = streams; s; s = s->next)
			some |= !s->alive;
		if (some)
			pthread_cond_wait(&cv, &mu);
	}
}

EXPORT void fake_cuda_forget(void);
EXPORT void fake_cuda_forget(void)
{
	struct registration *r;

	pthread_mutex_lock(&mu);
	/* A device may have been given up whose streams still have copies: none of them lands. */
	for (struct CUstream_st *s = streams; s; s = s->next)
		if (!s->of_caller)
			s->alive = false, s->dropped = true;
	wake_all();
	wait_for_destroyed();
	while ((r = registrations)) {
		registrations = r->next;
		if (r->allocated)
			free(r->mem);
		free(r);
	}
	nr_events = 0;
	memset(retained, 0, sizeof(retained));
	pthread_mutex_unlock(&mu);
}

EXPORT void fake_cuda_fail(const char *name, uint64_t nth, int sticky, int code);
EXPORT void fake_cuda_fail(const char *name, uint64_t nth, int sticky, int code)
{
	pthread_mutex_lock(&mu);
	for (int i = 0; i < NR_FAULTS; i++) {
		if (faults[i].nth)
			continue;
		(void)snprintf(faults[i].name, sizeof(faults[i].name), "%s", name);
		faults[i].nth = nth;
		faults[i].seen = 0;
		faults[i].sticky = sticky;
		faults[i].code = code;
		break;
	}
	pthread_mutex_unlock(&mu);
}

EXPORT void fake_cuda_fail_copy(uint64_t nth, int code);
EXPORT void fake_cuda_fail_copy(uint64_t nth, int code)
{
	pthread_mutex_lock(&mu);
	fail_copy_at = nr_copies + nth;
	fail_copy_code = code;
	pthread_mutex_unlock(&mu);
}

#define GETTER(type, name, params, expression)                                                     \
	EXPORT type name params;                                                                   \
	EXPORT type name params                                                                    \
	{                                                                                          \
		type value;                                                                        \
		pthread_mutex_lock(&mu);                                                           \
		value = (expression);                                                              \
		pthread_mutex_unlock(&mu);                                                         \
		return value;                                                                      \
	}

static uint64_t count_of(const char *name)
{
	if (strcmp(name, "*") == 0)
		return nr_calls;
	if (strcmp(name, "sync") == 0)
		return nr_syncs;
	for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++)
		if (strcmp(counts[i].name, name) == 0)
			return counts[i].nr;
	return 0;
}

static int64_t live(const char *what)
{
	int64_t nr = 0;

	if (strcmp(what, "events") == 0)
		return nr_events;
	if (strcmp(what, "streams") == 0)
		for (struct CUstream_st *s = streams; s; s = s->next)
			nr += s->alive && !s->of_caller;
	if (strcmp(what, "contexts") == 0)
		for (int i = 0; i < NR_DEVICES; i++)
			nr += retained[i];
	for (struct registration *r = registrations; r; r = r->next)
		nr += strcmp(what, r->allocated ? "allocated" : "registered") == 0;
	return nr;
}

/* Whatever destroyed streams were given lands now, unless nothing goes on. */
static void flush(void)
{
	for (struct CUstream_st *s = streams; s; s = s->next)
		s->flushed = !s->alive;
	wake_all();
	if (!held)
		wait_for_destroyed();
}

GETTER(uint64_t, fake_cuda_hits, (void), nr_hits)
GETTER(uint64_t, fake_cuda_calls, (const char *name), count_of(name))
GETTER(uint64_t, fake_cuda_nr_violations, (void), (flush(), nr_violations))
GETTER(const char *, fake_cuda_violation, (uint64_t i), i < NR_VIOLATIONS ? violations[i] : "")
GETTER(int64_t, fake_cuda_live, (const char *what), live(what))
GETTER(uint64_t, fake_cuda_copied_bytes, (void), bytes_copied)

#define SETTER(name, params, ...)                                                                  \
	EXPORT void name params;                                                                   \
	EXPORT void name params                                                                    \
	{                                                                                          \
		pthread_mutex_lock(&mu);                                                           \
		__VA_ARGS__;                                                                       \
		wake_all();                                                                        \
		pthread_mutex_unlock(&mu);                                                         \
	}
SETTER(fake_cuda_allow_pageable, (int yes), pageable_allowed = yes)
SETTER(fake_cuda_delay, (uint64_t max_ns, uint64_t seed), delay_max = max_ns, delay_seed = seed)
SETTER(fake_cuda_delay_one_in, (uint64_t nr), delay_one_in = nr)
SETTER(fake_cuda_first, (int who), first = (unsigned)who)
SETTER(fake_cuda_hold, (int yes), held = yes, holder = pthread_self())
SETTER(fake_cuda_activate, (int device, int yes), inactive[device] = !yes)
SETTER(fake_cuda_capture, (void *stream, int yes),
       *(is_host(stream) ? &host_capturing : &((CUstream)stream)->capturing) = yes)
GETTER(void *, fake_cuda_stream, (int device), new_stream(device, true))

EXPORT void fake_cuda_launch(void *stream, void (*fn)(void *), void *arg);
EXPORT void fake_cuda_launch(void *stream, void (*fn)(void *), void *arg)
{
	pthread_mutex_lock(&mu);
	push_op(stream, &(struct op){ .kind = WORK, .fn = fn, .arg = arg });
	pthread_mutex_unlock(&mu);
}

EXPORT void fake_cuda_follow(void *stream, void *other);
EXPORT void fake_cuda_follow(void *stream, void *other)
{
	struct CUevent_st *event = calloc(1, sizeof(*event));

	if (!event)
		abort();
	pthread_mutex_lock(&mu);
	event->recorded = 1;
	event->next = events;
	events = event;
	push_op(other, &(struct op){ .kind = RECORD, .event = event, .gen = 1 });
	push_op(stream, &(struct op){ .kind = WAIT, .event = event, .gen = 1 });
	pthread_mutex_unlock(&mu);
}

EXPORT void fake_cuda_freed(const void *mem, uint64_t len);
EXPORT void fake_cuda_freed(const void *mem, uint64_t len)
{
	pthread_mutex_lock(&mu);
	if (in_use(mem, len))
		violated("memory of a device is freed under a copy");
	pthread_mutex_unlock(&mu);
}

EXPORT void fake_cuda_settle(void);
EXPORT void fake_cuda_settle(void)
{
	struct timespec end;

	(void)clock_gettime(CLOCK_REALTIME, &end);
	end.tv_sec += SETTLE_S;
	pthread_mutex_lock(&mu);
	nr_not_ready = 0;
	while (nr_not_ready < SETTLED && !never_settles)
		if (pthread_cond_timedwait(&cv, &mu, &end) == ETIMEDOUT) {
			violated("a lane with copies in flight does not ask for them");
			never_settles = true;
		}
	pthread_mutex_unlock(&mu);
}

EXPORT void fake_cuda_drain(void *handle);
EXPORT void fake_cuda_drain(void *handle)
{
	struct CUstream_st *stream = handle;

	pthread_mutex_lock(&mu);
	while (stream->head || stream->busy)
		pthread_cond_wait(&cv, &mu);
	pthread_mutex_unlock(&mu);
}
