/* The fake driver itself: each rule that it checks is broken once and reported, and correct work
 * breaks none. The tests do a lane's work with the driver's own calls. */
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#include "fake.h"

/* X: member, symbol, parameters; as csrc/core/cuda/driver.h has them. */
static struct {
#define X(member, name, symbol, params) CUresult(*member) params;
	SFR__CUDA_CALLS(X)
#undef X
	CUresult (*stream_sync)(CUstream stream);
	CUresult (*batch)(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *lens, size_t nr,
			  struct sfr__cu_copy_attributes *attrs, size_t *attr_at, size_t nr_attrs,
			  CUstream stream);
	CUresult (*batch_3d)(size_t nr, struct sfr__cu_copy_3d *copies, unsigned long long flags,
			     CUstream stream);
} cu;

static _Alignas(4096) char pinned[3 * 4096];
static char source[3 * 4096];
static void *caller;
static CUstream lane;
static CUevent e, copied;

static void load_symbols(void)
{
	void *handle = dlopen(getenv("STILLFRAME_LIBCUDA"), RTLD_NOW | RTLD_LOCAL), *found;

#define X(member, name, symbol, params)                                                            \
	found = dlsym(handle, symbol);                                                             \
	memcpy(&cu.member, &found, sizeof(found));
	SFR__CUDA_CALLS(X)
#undef X
	found = dlsym(handle, "cuMemcpyBatchAsync_v2");
	memcpy(&cu.batch, &found, sizeof(found));
	found = dlsym(handle, "cuMemcpy3DBatchAsync_v2");
	memcpy(&cu.batch_3d, &found, sizeof(found));
	found = dlsym(handle, "cuStreamSynchronize");
	memcpy(&cu.stream_sync, &found, sizeof(found));
}

static void begin(void)
{
	CUcontext context;

	fake.fake_cuda_reset();
	fake.fake_cuda_forget();
	caller = fake.fake_cuda_stream(0);
	memset(source, 7, sizeof(source));
	CHECK_EQ(cu.init(0), 0);
	CHECK_EQ(cu.primary_retain(&context, 0), 0);
	CHECK_EQ(cu.push(context), 0);
	CHECK_EQ(cu.stream_new(&lane, CU_STREAM_NON_BLOCKING), 0);
	CHECK_EQ(cu.event_new(&e, CU_EVENT_DISABLE_TIMING), 0);
	CHECK_EQ(cu.event_new(&copied, CU_EVENT_DISABLE_TIMING), 0);
	CHECK_EQ(cu.host_register(pinned, sizeof(pinned), CU_MEMHOSTREGISTER_PORTABLE), 0);
}

static void mark(void)
{
	CHECK_EQ(cu.event_record(e, caller), 0);
	CHECK_EQ(cu.stream_wait(lane, e, 0), 0);
}

static CUdeviceptr device(const char *host)
{
	return (CUdeviceptr)(uintptr_t)host | FAKE_CUDA_DEVICE;
}

static CUresult copy(char *to, size_t len)
{
	return cu.copy(to, device(source), len, lane);
}

static void wait_for(CUevent event)
{
	while (cu.event_query(event) == CUDA_ERROR_NOT_READY)
		(void)usleep(100);
}

/* Ends a test that must have one violation with these words, or none if `words` is NULL. */
static void end(const char *words)
{
	CUcontext context;

	if (words && CHECK(fake.fake_cuda_nr_violations() > 0) &&
	    !CHECK(strstr(fake.fake_cuda_violation(0), words) != NULL))
		(void)fprintf(stderr, "  it says: %s\n", fake.fake_cuda_violation(0));
	if (!words)
		fake_check();
	fake.fake_cuda_reset();
	fake.fake_cuda_forget();
	CHECK_EQ(cu.pop(&context), 0);
	fake.fake_cuda_reset();
}

TEST(correct_work_is_no_violation_and_completes)
{
	begin();
	mark();
	CHECK_EQ(copy(pinned, 100), 0);
	CHECK_EQ(cu.event_record(copied, lane), 0);
	wait_for(copied);
	CHECK_EQ(pinned[99], 7);
	CHECK_EQ(cu.event_free(copied), 0);
	CHECK_EQ(cu.event_free(e), 0);
	CHECK_EQ(cu.stream_free(lane), 0);
	CHECK_EQ(cu.host_unregister(pinned), 0);
	end(NULL);
}

TEST(copy_without_a_later_event_never_completes)
{
	begin();
	mark();
	CHECK_EQ(copy(pinned, 100), 0);
	fake.fake_cuda_drain(lane);
	CHECK_EQ((unsigned char)pinned[99], 0xdb);
	CHECK_EQ(cu.stream_free(lane), 0);
	CHECK_EQ((unsigned char)pinned[99], 0xdb); /* the call does not wait for the copy */
	fake_check();
	CHECK_EQ(pinned[99], 7);
	end(NULL);
}

TEST(missing_order_is_a_violation)
{
	begin();
	(void)copy(pinned, 100);
	end("not waited for its caller");

	begin();
	mark();
	CHECK_EQ(cu.event_record(e, caller), 0);
	CHECK_EQ(cu.event_record(e, caller), 0);
	end("no stream waited for it");

	begin();
	CHECK_EQ(cu.event_record(e, caller), 0);
	CHECK_EQ(cu.event_free(e), 0);
	end("no stream waited for it");

	begin();
	(void)cu.stream_wait(caller, copied, 0);
	end("never recorded");

	begin();
	fake.fake_cuda_hold(1);
	mark();
	CHECK_EQ(copy(pinned, 100), 0);
	CHECK_EQ(cu.event_record(copied, lane), 0);
	CHECK_EQ(cu.event_query(copied), CUDA_ERROR_NOT_READY);
	end("must not wait for the device");
}

TEST(copy_to_forbidden_memory_is_a_violation)
{
	static _Alignas(4096) char other[4096];

	begin();
	mark();
	(void)copy(other, 100);
	end("not registered");

	begin();
	CHECK_EQ(cu.host_unregister(pinned), 0);
	CHECK_EQ(cu.host_register(pinned, 4096, CU_MEMHOSTREGISTER_PORTABLE), 0);
	CHECK_EQ(cu.host_register(pinned + 4096, 4096, CU_MEMHOSTREGISTER_PORTABLE), 0);
	mark();
	CHECK(copy(pinned + 4000, 200) != CUDA_SUCCESS);
	end("two registrations");

	begin();
	mark();
	CHECK_EQ(copy(pinned, 100), 0);
	CHECK_EQ(cu.host_unregister(pinned), 0);
	end("taken from under a copy");

	begin();
	mark();
	CHECK_EQ(copy(pinned, 100), 0);
	CHECK_EQ(cu.stream_free(lane), 0); /* its copies go on */
	CHECK_EQ(cu.host_unregister(pinned), 0);
	end("taken from under a copy");

	begin();
	mark();
	CHECK_EQ(copy(pinned, 100), 0);
	fake.fake_cuda_freed(source, sizeof(source));
	end("freed under a copy");
}

TEST(use_of_a_destroyed_object_is_a_violation)
{
	begin();
	mark();
	CHECK_EQ(cu.stream_free(lane), 0);
	(void)copy(pinned, 100);
	end("a stream that was destroyed");

	begin();
	CHECK_EQ(cu.event_free(copied), 0);
	(void)cu.event_record(copied, lane);
	end("an event that was destroyed");

	begin();
	CHECK_EQ(cu.stream_free(lane), 0);
	(void)cu.stream_free(lane);
	end("a stream that was destroyed");
}

TEST(work_on_a_capturing_stream_is_a_violation)
{
	begin();
	fake.fake_cuda_capture(caller, 1);
	(void)cu.event_record(e, caller);
	end("put into a graph");

	begin();
	mark();
	CHECK_EQ(cu.event_record(copied, lane), 0);
	fake.fake_cuda_capture(caller, 1);
	(void)cu.stream_wait(caller, copied, 0);
	end("put into a graph");

	begin();
	fake.fake_cuda_capture(caller, 1);
	CHECK(cu.event_query(copied) != CUDA_SUCCESS);
	end("cuEventQuery while a graph is captured");
}

static void end_capture(const char *words)
{
	fake.fake_cuda_capture(caller, 0);
	end(words);
}

TEST(calls_forbidden_during_a_capture_are_refused)
{
	CUstreamCaptureMode relaxed = CU_STREAM_CAPTURE_MODE_RELAXED;
	CUcontext context;
	CUstream more;
	void *mem;

#define FORBIDDEN(call, words)                                                                     \
	begin();                                                                                   \
	fake.fake_cuda_capture(caller, 1);                                                         \
	CHECK_EQ(call, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);                                     \
	end_capture(words);
	FORBIDDEN(cu.host_register(source, 4096, CU_MEMHOSTREGISTER_PORTABLE), "cuMemHostRegister")
	FORBIDDEN(cu.host_unregister(pinned), "cuMemHostUnregister")
	FORBIDDEN(cu.host_alloc(&mem, 4096, CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc")
	FORBIDDEN(cu.host_free(pinned), "cuMemFreeHost")
	FORBIDDEN(cu.stream_new(&more, CU_STREAM_NON_BLOCKING), "cuStreamCreate")
	FORBIDDEN(cu.stream_free(lane), "cuStreamDestroy")
	FORBIDDEN(cu.stream_query(lane), "cuStreamQuery")
	FORBIDDEN(cu.primary_retain(&context, 0), "cuDevicePrimaryCtxRetain")
	FORBIDDEN(cu.primary_release(0), "cuDevicePrimaryCtxRelease")
#undef FORBIDDEN
	begin();
	fake.fake_cuda_capture(caller, 1);
	CHECK_EQ(cu.exchange_mode(&relaxed), 0);
	CHECK_EQ(cu.stream_query(lane), 0);
	CHECK_EQ(cu.host_alloc(&mem, 4096, CU_MEMHOSTALLOC_PORTABLE), 0);
	CHECK_EQ(cu.host_free(mem), 0);
	CHECK_EQ(cu.exchange_mode(&relaxed), 0);
	fake_check();
	end_capture(NULL);
}

/* A read of a device's memory crashes the host, and the driver accepts no other address for it. */
TEST(only_the_driver_can_read_device_memory)
{
	pid_t child;
	int status = 0;

	begin();
	mark();
	CHECK_EQ(cu.copy(pinned, (CUdeviceptr)(uintptr_t)source, 100, lane),
		 CUDA_ERROR_INVALID_VALUE);
	end("no device's");

	child = fork();
	if (child == 0) {
		(void)signal(SIGSEGV, SIG_DFL);
		(void)signal(SIGBUS, SIG_DFL);
		status = *(volatile const char *)(uintptr_t)device(source);
		_exit(0);
	}
	CHECK_EQ(waitpid(child, &status, 0), child);
	/* a sanitizer exits with an error instead */
	CHECK(WIFSIGNALED(status) || WEXITSTATUS(status) != 0);
}

TEST(call_waits_when_the_stream_is_full)
{
	static struct sfr__mutex mu = SFR__MUTEX(SFR__LOCK_LANE);

	begin();
	fake.fake_cuda_depth(4);
	mark();
	for (int i = 0; i < 100; i++)
		CHECK_EQ(copy(pinned + 40 * i, 40), 0);
	CHECK_EQ(cu.event_record(copied, lane), 0);
	wait_for(copied);
	CHECK_EQ(pinned[99 * 40], 7);
	end(NULL);

	begin(); /* the thread that stopped the streams would wait forever */
	fake.fake_cuda_depth(4);
	fake.fake_cuda_hold(1);
	mark();
	for (int i = 0; i < 4; i++)
		CHECK_EQ(copy(pinned + 40 * i, 40), 0);
	end("must not wait for the device");

	begin();
	fake.fake_cuda_depth(1);
	mark();
	sfr__lock(&mu);
	for (int i = 0; i < 1000 && fake.fake_cuda_nr_violations() == 0; i++)
		CHECK_EQ(copy(pinned + i, 1), 0);
	sfr__unlock(&mu);
	CHECK_EQ(cu.event_record(copied, lane), 0);
	wait_for(copied);
	end("under a lock");
}

TEST(invalid_batch_is_refused)
{
	struct sfr__cu_copy_attributes attrs = { .src_access_order = SFR__CU_ORDER_STREAM };
	CUdeviceptr dst[2], src[2] = { device(source), device(source) + 100 };
	size_t len[2] = { 100, 0 }, at = 0;

	dst[0] = (CUdeviceptr)(uintptr_t)pinned;
	dst[1] = dst[0] + 99;
	begin();
	mark();
	CHECK_EQ(cu.batch(dst, src, len, 2, &attrs, &at, 1, lane), CUDA_ERROR_INVALID_VALUE);
	end("an empty copy");

	len[1] = 100;
	begin();
	mark();
	CHECK_EQ(cu.batch(dst, src, len, 2, &attrs, &at, 1, lane), CUDA_ERROR_INVALID_VALUE);
	end("two copies to the same bytes");

	begin(); /* as if the memory consisted of segments: refused, but no violation */
	mark();
	dst[1] = dst[0] + 200;
	fake.fake_cuda_segments(4096);
	src[1] = (src[0] + 4096) / 4096 * 4096 - 50;
	CHECK_EQ(cu.batch(dst, src, len, 2, &attrs, &at, 1, lane), CUDA_ERROR_INVALID_VALUE);
	fake.fake_cuda_segments(0);
	CHECK_EQ(cu.batch(dst, src, len, 2, &attrs, &at, 1, lane), 0);
	CHECK_EQ(cu.event_record(copied, lane), 0);
	wait_for(copied);
	end(NULL);
}

TEST(rows_are_copied_by_their_pitch)
{
	struct sfr__cu_copy_3d rows[2] = {
		{ .src = { .type = 1, .ptr = device(source) + 10, .row_len = 1000 },
		  .dst = { .type = 1, .row_len = 80 },
		  .width = 64,
		  .height = 3,
		  .depth = 1,
		  .src_access_order = SFR__CU_ORDER_STREAM }
	};
	CUDA_MEMCPY2D copy_2d = { .srcMemoryType = CU_MEMORYTYPE_DEVICE,
				  .srcDevice = device(source),
				  .srcPitch = 500,
				  .dstMemoryType = CU_MEMORYTYPE_HOST,
				  .dstHost = pinned + 4096,
				  .dstPitch = 100,
				  .WidthInBytes = 50,
				  .Height = 2 };

	begin();
	mark();
	for (int i = 0; i < 3; i++)
		memset(source + 10 + i * 1000, 20 + i, 64);
	rows[0].dst.ptr = (CUdeviceptr)(uintptr_t)pinned;
	rows[1] = rows[0];
	rows[1].dst.ptr += 2048;
	CHECK_EQ(cu.batch_3d(2, rows, 0, lane), 0);
	CHECK_EQ(cu.copy_2d(&copy_2d, lane), 0);
	CHECK_EQ(cu.event_record(copied, lane), 0);
	wait_for(copied);
	for (int i = 0; i < 3; i++)
		CHECK(pinned[i * 80] == 20 + i && pinned[i * 80 + 63] == 20 + i &&
		      pinned[2048 + i * 80 + 63] == 20 + i);
	CHECK_EQ(memcmp(pinned + 4096, source, 50), 0);
	CHECK_EQ(memcmp(pinned + 4196, source + 500, 50), 0);
	rows[0].depth = 0;
	CHECK_EQ(cu.batch_3d(1, rows, 0, lane), CUDA_ERROR_INVALID_VALUE);
	copy_2d.srcPitch = (size_t)1 << 31;
	CHECK_EQ(cu.copy_2d(&copy_2d, lane), CUDA_ERROR_INVALID_VALUE);
	copy_2d.srcPitch = 49;
	CHECK_EQ(cu.copy_2d(&copy_2d, lane), CUDA_ERROR_INVALID_VALUE);
	end(NULL);
}

TEST(an_event_belongs_to_its_device)
{
	CUcontext context;
	CUevent other;

	begin();
	CHECK_EQ(cu.primary_retain(&context, 1), 0);
	CHECK_EQ(cu.push(context), 0);
	CHECK_EQ(cu.event_new(&other, CU_EVENT_DISABLE_TIMING), 0);
	CHECK_EQ(cu.pop(&context), 0);
	CHECK_EQ(cu.event_record(other, lane), CUDA_ERROR_INVALID_HANDLE);
	CHECK_EQ(cu.primary_release(1), 0);
	end("a stream of another device");
}

static uint64_t now_ns(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* Checks lower bounds only, because a busy machine takes longer. */
TEST(calls_copies_and_registrations_take_time)
{
	static _Alignas(4096) char large[1 << 20];
	uint64_t start = now_ns();

	begin();
	for (int i = 0; i < 100; i++)
		CHECK_EQ(cu.stream_query(lane), 0);
	CHECK(now_ns() - start >= 100 * 2000);
	start = now_ns();
	CHECK_EQ(cu.host_register(large, sizeof(large), CU_MEMHOSTREGISTER_PORTABLE), 0);
	CHECK(now_ns() - start >= 60000000 / 1024);
	end(NULL);
}

static void *count_on_other_thread(void *unused)
{
	int count;

	CHECK_EQ(fake.fake_cuda_calls_here("*"), 0);
	CHECK_EQ(cu.device_count(&count), 0);
	CHECK_EQ(fake.fake_cuda_calls_here("cuDeviceGetCount"), 1);
	return unused;
}

TEST(calls_are_also_counted_by_thread)
{
	pthread_t other;
	uint64_t all, here;

	begin();
	all = fake.fake_cuda_calls("*");
	here = fake.fake_cuda_calls_here("*");
	CHECK_EQ(pthread_create(&other, NULL, count_on_other_thread, NULL), 0);
	CHECK_EQ(pthread_join(other, NULL), 0);
	CHECK_EQ(fake.fake_cuda_calls("*") - all, 1);
	CHECK_EQ(fake.fake_cuda_calls_here("*") - here, 0);
	CHECK_EQ(cu.stream_query(lane), 0);
	CHECK_EQ(fake.fake_cuda_calls_here("*") - here, 1);
	end(NULL);
}

TEST(calls_that_wait_for_the_device_are_counted)
{
	begin();
	CHECK_EQ(fake.fake_cuda_calls("sync"), 0);
	CHECK_EQ(cu.stream_sync(lane), 0);
	CHECK_EQ(fake.fake_cuda_calls("sync"), 1);
	fake.fake_cuda_reset();
	end(NULL);
}

BEGIN
{
	if (!fake_load())
		return false;
	load_symbols();
	return true;
}
