/* A CUDA driver without a device, for tests: exports the driver's functions that the core uses.
 *
 * Device memory is host memory. Each stream has a thread that runs its operations in order;
 * tests can delay each of them. This driver always does what a real one does only sometimes:
 *
 *   - A copy's destination is overwritten with garbage when the copy is queued. Its bytes are
 * read and written only when an event after it on the stream completes, so a copy that no event
 * follows never completes.
 *   - Destroying a stream returns at once, and the stream finishes its work. Copies that no
 * event follows complete as late as possible, when the test checks for violations.
 *   - The test decides whether the callers' streams or the core's run first if both may.
 *   - Streams 0, 1 and 2 (legacy, default, per thread) are the calling thread itself, because
 * torch runs CPU work there. An event recorded on one is complete at once, and a wait on one
 * stops the caller until the event completes.
 *
 * Violations are kept as sentences:
 *
 *   - a copy to memory that is not registered, or across two registrations
 *   - a copy on a stream that has waited for no event of a caller's stream
 *   - a wait for an event that was never recorded; an event of a caller's stream that no stream
 * waited for
 *   - use of a destroyed object
 *   - memory that is unregistered, or freed on the device, under a copy
 *   - during a graph capture, a query of an event by a thread that has not relaxed its mode, or
 * work added to the graph
 *   - a wait or a query of the thread that has stopped all streams, which would wait forever
 *
 * Any call can be made to fail. After an error that loses a real context, the device is dead:
 * nothing on it completes any more, and every call on it returns that error.
 *
 * A device's address is FAKE_CUDA_DEVICE above the host memory that represents it, where the
 * host cannot read. Only the driver's own copies convert the address.
 *
 * This driver refuses or delays what a real one does: calls that are illegal in a capture;
 * operations beyond a stream's limit, for which the call waits (no lock of the core may be held
 * then); a batch with an empty copy or with two copies to one address; an event on another
 * device's stream. A call takes 2 us, a copy 1.5, a registration 60 to 250 ms a GiB under the
 * one mutex.
 *
 * One mutex guards everything. `cv` is signalled when an operation has run. A stream's thread
 * sleeps on its own condition, so that one operation wakes one thread.
 *
 * fake_cuda_streams.c has streams, their threads and events; fake_cuda_memory.c memory and
 * copies; fake_cuda_controls.c the functions for tests. This file has devices, contexts and the
 * beginning of every call. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fake_cuda_state.h"

struct fake__state fk = { .mu = PTHREAD_MUTEX_INITIALIZER,
			  .cv = PTHREAD_COND_INITIALIZER,
			  .contexts = { { 0 }, { 1 }, { 2 }, { 3 } },
			  .delay_one_in = 1,
			  .depth = DEPTH,
			  .delay_seed = 1 };

__thread int fake__mode;
__thread struct fake__here fake__here;
static __thread CUcontext stack[16];
static __thread int depth;

/* ---- small things ---------------------------------------------------------- */

void fake__violated(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	if (fk.nr_violations < NR_VIOLATIONS)
		(void)vsnprintf(fk.violations[fk.nr_violations], sizeof(fk.violations[0]), format,
				args);
	va_end(args);
	fk.nr_violations++;
}

bool fake__loses_context(int code)
{
	return code == 4 || code == 214 || code == 226 || code == 700 || code == 702 ||
	       code == 709 || code == 710 || (code >= 714 && code <= 719) || code == 721 ||
	       code == 810 || code == 911;
}

int fake__current_device(void)
{
	return depth > 0 && stack[depth - 1] ? stack[depth - 1]->device : -1;
}

/* Begins a call, with the lock held: counts it, and makes it fail if a test asked for that. */
int fake__enter(const char *name, bool needs_context)
{
	int device = fake__current_device(), code = 0;

	fk.nr_calls++;
	fake__here.nr_calls++;
	fake__spend(CALL_NS);
	if (strcmp(name, "cuEventQuery") != 0 && device >= 0)
		fk.nr_not_ready[device] = 0;
	for (size_t i = 0; i < NR_COUNTS; i++) {
		if (!fk.counts[i].name[0])
			(void)snprintf(fk.counts[i].name, sizeof(fk.counts[i].name), "%s", name);
		if (strcmp(fk.counts[i].name, name) == 0) {
			fk.counts[i].nr++;
			fake__here.counts[i]++;
			break;
		}
	}
	if (fk.initialised && getpid() != fk.owner)
		return CUDA_ERROR_NOT_INITIALIZED;
	for (int i = 0; i < NR_FAULTS; i++) {
		struct fault *f = &fk.faults[i];

		if (!f->nth || (strcmp(f->name, name) != 0 && strcmp(f->name, "*") != 0))
			continue;
		f->seen++;
		if (code == 0 && (f->seen == f->nth || (f->sticky && f->seen > f->nth))) {
			code = f->code;
			fk.nr_hits++;
		}
	}
	if (code && fake__loses_context(code) && device >= 0) {
		fk.dead_of[device] = code;
		pthread_cond_broadcast(&fk.cv);
	}
	if (code)
		return code;
	if (needs_context && device < 0)
		return INVALID_CONTEXT;
	if (needs_context && fk.dead_of[device])
		return fk.dead_of[device];
	return 0;
}

/* Reports a query or a wait of the thread that has stopped the devices, which would wait
 * forever. Then lets the devices run. */
void fake__check_holder(const char *call)
{
	if (!fk.held || !pthread_equal(fk.holder, pthread_self()))
		return;
	fake__violated("%s by a thread that must not wait for the device", call);
	fk.held = false;
	fake__wake_all();
}

/* Spends the calling thread's time; the lock is held, so no other call can run. */
void fake__spend(uint64_t ns)
{
	struct timespec start, now;

	(void)clock_gettime(CLOCK_MONOTONIC, &start);
	do
		(void)clock_gettime(CLOCK_MONOTONIC, &now);
	while ((uint64_t)(now.tv_sec - start.tv_sec) * 1000000000u + (uint64_t)now.tv_nsec -
		       (uint64_t)start.tv_nsec <
	       ns);
}

uint64_t fake__random(void)
{
	fk.delay_seed = fk.delay_seed * 6364136223846793005u + 1442695040888963407u;
	return fk.delay_seed >> 33;
}

int fake__unsafe(const char *name, int code)
{
	bool capturing = fk.host_capturing;

	for (const struct CUstream_st *s = fk.streams; s; s = s->next)
		capturing |= s->capturing;
	if (code || !capturing || fake__mode == CU_STREAM_CAPTURE_MODE_RELAXED)
		return code;
	fake__violated("%s while a graph is captured", name);
	return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

/* ---- devices and contexts -------------------------------------------------------- */

EXPORT CUresult cuInit(unsigned int flags);
EXPORT CUresult cuInit(unsigned int flags)
{
	BEGIN("cuInit", false)
	(void)flags;
	if (!code && !fk.initialised) {
		fk.initialised = true;
		fk.owner = getpid();
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

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active);
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
	BEGIN("cuDevicePrimaryCtxGetState", false)
	*flags = 0;
	*active = !fk.inactive[device];
	END
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
	BEGIN_UNSAFE("cuDevicePrimaryCtxRetain", false)
	if (!code) {
		if (fk.inactive[device])
			fake__violated("device %d is made active by us", device);
		fk.retained[device]++;
		*context = &fk.contexts[device];
	}
	END
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
	BEGIN_UNSAFE("cuDevicePrimaryCtxRelease_v2", false)
	if (--fk.retained[device] < 0)
		fake__violated("device %d is released once too often", device);
	END
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context);
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context)
{
	BEGIN("cuCtxPushCurrent_v2", false)
	if (!code && fk.retained[context->device] <= 0)
		fake__violated("a context is used that was released");
	if (!code) {
		stack[depth++] = context;
		fk.nr_pushed++;
	}
	END
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context);
EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
	BEGIN("cuCtxPopCurrent_v2", false)
	/* May fail like any call, but has popped the context: otherwise the stack would grow
	 * because of the test alone. */
	fk.nr_pushed -= depth > 0;
	if (depth > 0)
		*context = stack[--depth];
	else
		fake__violated("a context is popped that was not pushed");
	END
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *want);
EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *want)
{
	BEGIN("cuThreadExchangeStreamCaptureMode", false)
	if (!code) {
		int was = fake__mode;

		fake__mode = *want;
		*want = was;
	}
	END
}
