/* The fake driver itself: each rule that it watches over, broken once, is noticed, and work that
 * keeps to all of them is not. What follows is a lane's work in the driver's own calls. */
#include "fake.h"

/* X: member, symbol, parameters; as csrc/core/cuda/driver.h has them. */
static struct {
#define X(member, name, symbol, params) CUresult(*member) params;
	SFR__CUDA_CALLS(X)
#undef X
	CUresult (*stream_sync)(CUstream stream);
} cu;

static _Alignas(4096) char pinned[3 * 4096];
static char source[3 * 4096];
static void *caller;
static CUstream lane;
static CUevent e, landed;

static void look_up(void)
{
	void *handle = dlopen(getenv("STILLFRAME_LIBCUDA"), RTLD_NOW | RTLD_LOCAL), *found;

#define X(member, name, symbol, params)                                                            \
	found = dlsym(handle, symbol);                                                             \
	memcpy(&cu.member, &found, sizeof(found));
	SFR__CUDA_CALLS(X)
#undef X
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
	CHECK_EQ(cu.event_new(&landed, CU_EVENT_DISABLE_TIMING), 0);
	CHECK_EQ(cu.host_register(pinned, sizeof(pinned), CU_MEMHOSTREGISTER_PORTABLE), 0);
}

static void mark(void)
{
	CHECK_EQ(cu.event_record(e, caller), 0);
	CHECK_EQ(cu.stream_wait(lane, e, 0), 0);
}

static CUresult copy(char *to, size_t len)
{
	return cu.copy(to, (CUdeviceptr)(uintptr_t)source, len, lane);
}

static void wait_for(CUevent event)
{
	while (cu.event_query(event) == CUDA_ERROR_NOT_READY)
		(void)usleep(100);
}

/* The end of a test: one violation that has these words in it, or none. */
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

static void work_in_order_is_no_violation_and_lands(void)
{
	begin();
	mark();
	CHECK_EQ(copy(pinned, 100), 0);
	CHECK_EQ(cu.event_record(landed, lane), 0);
	wait_for(landed);
	CHECK_EQ(pinned[99], 7);
	CHECK_EQ(cu.event_free(landed), 0);
	CHECK_EQ(cu.event_free(e), 0);
	CHECK_EQ(cu.stream_free(lane), 0);
	CHECK_EQ(cu.host_unregister(pinned), 0);
	end(NULL);
}

static void a_copy_that_no_event_follows_does_not_land(void)
{
	begin();
	mark();
	CHECK_EQ(copy(pinned, 100), 0);
	fake.fake_cuda_drain(lane);
	CHECK_EQ((unsigned char)pinned[99], 0xdb);
	CHECK_EQ(cu.stream_free(lane), 0);
	CHECK_EQ((unsigned char)pinned[99], 0xdb); /* the call does not wait for it */
	fake_check();
	CHECK_EQ(pinned[99], 7);
	end(NULL);
}

static void order_that_is_missing_is_noticed(void)
{
	begin();
	(void)copy(pinned, 100);
	end("waited for nothing of its caller");

	begin();
	mark();
	CHECK_EQ(cu.event_record(e, caller), 0);
	CHECK_EQ(cu.event_record(e, caller), 0);
	end("nobody waited for it");

	begin();
	CHECK_EQ(cu.event_record(e, caller), 0);
	CHECK_EQ(cu.event_free(e), 0);
	end("nobody waited for it");

	begin();
	(void)cu.stream_wait(caller, landed, 0);
	end("never recorded");

	begin();
	fake.fake_cuda_hold(1);
	mark();
	CHECK_EQ(copy(pinned, 100), 0);
	CHECK_EQ(cu.event_record(landed, lane), 0);
	CHECK_EQ(cu.event_query(landed), CUDA_ERROR_NOT_READY);
	end("must not wait for the device");
}

static void memory_that_may_not_be_written_is_noticed(void)
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

static void what_was_destroyed_is_noticed_when_it_is_used(void)
{
	begin();
	mark();
	CHECK_EQ(cu.stream_free(lane), 0);
	(void)copy(pinned, 100);
	end("a stream that was destroyed");

	begin();
	CHECK_EQ(cu.event_free(landed), 0);
	(void)cu.event_record(landed, lane);
	end("an event that was destroyed");

	begin();
	CHECK_EQ(cu.stream_free(lane), 0);
	(void)cu.stream_free(lane);
	end("a stream that was destroyed");
}

static void a_graph_that_is_captured_is_not_to_be_touched(void)
{
	begin();
	fake.fake_cuda_capture(caller, 1);
	(void)cu.event_record(e, caller);
	end("put into a graph");

	begin();
	mark();
	CHECK_EQ(cu.event_record(landed, lane), 0);
	fake.fake_cuda_capture(caller, 1);
	(void)cu.stream_wait(caller, landed, 0);
	end("put into a graph");

	begin();
	fake.fake_cuda_capture(caller, 1);
	CHECK(cu.event_query(landed) != CUDA_SUCCESS);
	end("asked while a graph is captured");
}

static void a_call_that_waits_is_counted(void)
{
	begin();
	CHECK_EQ(fake.fake_cuda_calls("sync"), 0);
	CHECK_EQ(cu.stream_sync(lane), 0);
	CHECK_EQ(fake.fake_cuda_calls("sync"), 1);
	fake.fake_cuda_reset();
	end(NULL);
}

int main(void)
{
	if (!fake_load())
		return CHECK_SKIPPED;
	look_up();
	RUN(work_in_order_is_no_violation_and_lands);
	RUN(a_copy_that_no_event_follows_does_not_land);
	RUN(order_that_is_missing_is_noticed);
	RUN(memory_that_may_not_be_written_is_noticed);
	RUN(what_was_destroyed_is_noticed_when_it_is_used);
	RUN(a_graph_that_is_captured_is_not_to_be_touched);
	RUN(a_call_that_waits_is_counted);
	return check_done();
}
