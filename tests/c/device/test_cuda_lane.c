/* A device's lane over the fake driver: what it queues, in how many calls, what it reuses, and
 * that it sleeps in between. */
#include <unistd.h>

#include "cuda/fix_cuda.h"

/* The lane that copies from device 0. */
static struct sfr__cuda_lane *lane_of(struct sfr_engine *engine)
{
	return engine->cuda_lanes.head;
}

static uint64_t in_flight(struct sfr_engine *engine)
{
	struct sfr__cuda_lane *lane = lane_of(engine);
	uint64_t nr;

	sfr__lock(&lane->mu);
	nr = lane->nr_in_flight;
	sfr__unlock(&lane->mu);
	return nr;
}

/* ---- many small storages ---- */

enum { NR_SMALL = 1300, SMALL_LEN = 100 };

static unsigned char small[NR_SMALL][SMALL_LEN];
static struct sfr_source small_sources[NR_SMALL];

/* Fills small storages, of which every other one is deferred and no two neighbours have the same
 * bytes. */
static void fill_small(void)
{
	for (unsigned i = 0; i < NR_SMALL; i++) {
		for (unsigned k = 0; k < SMALL_LEN; k++)
			small[i][k] = (unsigned char)(7 * i + 3 * k);
		small_sources[i] = (struct sfr_source){
			.addr = (uint64_t)(uintptr_t)small[i] | FAKE_CUDA_DEVICE,
			.nbytes = SMALL_LEN - i % 7,
			.device = 1,
			.lane = i % 2 ? SFR_LANE_HOST : SFR_CAPTURED,
		};
	}
}

/* Counts the storages of the file that differ from the state. */
static int nr_wrong(const struct sfr_save_desc *desc)
{
	unsigned char found[SMALL_LEN];
	struct sfr__image img;
	char path[PATH_MAX];
	int fd, nr = 0;

	(void)snprintf(path, sizeof(path), "%s/%s", desc->dir, desc->name);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (!CHECK(fd >= 0) || !CHECK_EQ(sfr__image_init(&img, desc, 1u << 17), 0))
		return -1;
	for (uint32_t i = 0; i < img.nr_entries; i++) {
		const struct sfr__image_entry *entry = &img.entries[i];

		if (entry->source < 0)
			continue;
		CHECK_EQ(pread(fd, found, entry->nbytes, (off_t)entry->data_off), entry->nbytes);
		if (memcmp(found, small[entry->source], entry->nbytes) != 0)
			nr++;
	}
	sfr__image_fini(&img);
	(void)close(fd);
	return nr;
}

/* More storages than fit into one call are copied in few calls, each with all of its bytes. */
TEST(many_small_storages_are_copied_in_few_calls)
{
	const struct sfr_save_desc desc = { .dir = dir,
					    .name = "small",
					    .skeleton = saving_skeleton,
					    .skeleton_len = sizeof(saving_skeleton),
					    .sources = small_sources,
					    .nr_sources = NR_SMALL };
	const struct sfr_device_stream stream = { 0 };
	struct sfr_engine *engine;
	struct sfr_snapshot *snapshot;
	struct sfr_report report;
	struct sfr_ticket *t;
	int64_t torn;
	uint64_t len;
	char *base;
	int nr = 0;

	begin();
	fill_small();
	engine = saving_engine_of(1u << 17, 16, 2, 2);
	for (int i = 0; i < 2; i++) { /* first with a lane that hurries, then without */
		sfr__cuda_set_portion_limits(i ? 4 << 20 : 4096, 4);
		CHECK_EQ(sfr_save_new(engine, &desc, &t), 0);
		CHECK_EQ(fake_submit(t, NULL), 0);
		CHECK_EQ(fake_gate(t, NULL), 0);
		saving_finish(t);
		CHECK_EQ(sfr_save_report(t, &report), 0);
		CHECK_EQ(report.err.code, 0);
		CHECK_EQ(nr_wrong(&desc), 0);
		sfr_ticket_put(t);
	}
	CHECK_EQ(sfr_snapshot_new(engine, small_sources, NR_SMALL, 0, &snapshot), 0);
	CHECK_EQ(sfr_snapshot_lease(snapshot, SFR_FOREVER), 0);
	CHECK_EQ(sfr_snapshot_set_streams(snapshot, &stream, 1), 0);
	CHECK_EQ(sfr_snapshot_start(snapshot), 0);
	CHECK_EQ(sfr_snapshot_wait(snapshot, SFR_FOREVER, &torn), 0);
	CHECK_EQ(torn, -1);
	CHECK_EQ(saving_notice(), SFR_NOTICE_SNAPSHOT);
	sfr_snapshot_memory(snapshot, &base, &len);
	for (uint32_t i = 0; i < NR_SMALL; i++)
		nr += memcmp(base + sfr_snapshot_offset(snapshot, i), small[i],
			     small_sources[i].nbytes) != 0;
	CHECK_EQ(nr, 0);
	sfr_snapshot_remove_view(snapshot);
	sfr_snapshot_put(snapshot);
	CHECK_EQ(fake.fake_cuda_calls("cuMemcpy2DAsync_v2"), 0);
	CHECK(fake.fake_cuda_calls("cuMemcpyDtoHAsync_v2") <= 8); /* the last ones of each kind */
	fake_end(engine);
}

/* ---- how much is in flight ---- */

TEST(portions_in_flight_are_bounded_until_a_gate_waits)
{
	static const uint64_t most[] = { 3, 9 };

	for (size_t i = 0; i < sizeof(most) / sizeof(most[0]); i++) {
		struct sfr_engine *engine;
		struct sfr_ticket *t;
		void *stream;

		begin();
		sfr__cuda_set_portion_limits(SAVING_BLOCK / 4,
					     most[i]); /* a block is several portions */
		engine = fake_engine(32, 2);
		stream = fake.fake_cuda_stream(0);
		fake_put_on_device(&one, 0, SAVING_NR, 0);
		CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
		fake.fake_cuda_hold(1);
		CHECK_EQ(fake_submit(t, stream), 0);
		fake.fake_cuda_settle();
		CHECK_EQ(in_flight(engine), most[i]);
		CHECK_EQ(fake_gate_held(t, stream), 0);
		CHECK(in_flight(engine) <= most[i] + 5); /* the rest, four blocks each */
		fake.fake_cuda_hold(0);
		saving_finish(t);
		CHECK_EQ(saving_content_as(dir, "a", &one), 1);
		sfr_ticket_put(t);
		fake_end(engine);
	}
}

/* ---- sleep ---- */

static struct sfr_sys plain;
static atomic_uint nr_looks, nr_all_looks;
static _Atomic(pthread_t) sleeper;

/* A thread that waits for a time reads the clock; one that only queries the device does not. */
static int counted_clock(clockid_t clock, struct timespec *ts)
{
	atomic_fetch_add(&nr_all_looks, 1);
	if (pthread_equal(pthread_self(), atomic_load(&sleeper)))
		atomic_fetch_add(&nr_looks, 1);
	return plain.clock_gettime(clock, ts);
}

static void await_sleep(void)
{
	unsigned before = atomic_load(&nr_looks);

	while (atomic_load(&nr_looks) < before + 10)
		(void)usleep(100);
}

TEST(lane_sleeps_between_queries)
{
	struct sfr_ticket *t;
	void *stream;
	struct sfr_engine *engine = begin_on_device(32, 2);

	sfr__cuda_set_portion_limits(SAVING_BLOCK, 3);
	stream = fake.fake_cuda_stream(0);
	CHECK_EQ(fake_save(engine, dir, "a", &one, 0), 0); /* makes the lane */
	atomic_store(&sleeper, lane_of(engine)->thread);
	CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
	fake.fake_cuda_hold(1);
	CHECK_EQ(fake_submit(t, stream), 0);
	fake.fake_cuda_settle();
	await_sleep(); /* with more to queue */
	CHECK_EQ(fake_gate_held(t, stream), 0);
	fake.fake_cuda_settle();
	await_sleep(); /* with everything queued */
	fake.fake_cuda_hold(0);
	saving_done(t);
	fake_end(engine);
}

/* None of an engine's threads polls. A busy machine only makes fewer switches. */
TEST(idle_engine_sleeps)
{
	unsigned before;
	struct sfr_engine *engine = begin_on_device(16, 2);

	CHECK_EQ(fake_save(engine, dir, "a", &one, 0), 0);
	before = atomic_load(&nr_all_looks);
	(void)usleep(150000);
	CHECK(atomic_load(&nr_all_looks) < before + 100);
	fake_end(engine);
}

static void *sum(void *arg)
{
	CHECK_EQ(fake_submit(arg, NULL), 0);
	return NULL;
}

/* The call waits for checksums. It sleeps until the lane notifies it, and the lane sleeps in
 * between. */
TEST(call_sleeps_while_the_lane_fetches_bytes_for_checksums)
{
	struct sfr_report report;
	struct sfr_ticket *t;
	pthread_t caller;
	struct sfr_engine *engine = begin_on_device(32, 2);

	CHECK_EQ(fake_save(engine, dir, "a", &one, 0), 0); /* makes the lane */
	for (unsigned i = 0; i < SAVING_NR; i++)
		one.sources[i].lane = SFR_LANE_HOST;
	atomic_store(&sleeper, lane_of(engine)->thread);
	CHECK_EQ(saving_new(engine, dir, "a", &one, SFR_SAVE_CHECK_BYTES, &t), 0);
	fake.fake_cuda_hold(1);
	CHECK_EQ(pthread_create(&caller, NULL, sum, t), 0);
	await_sleep();
	fake.fake_cuda_hold(0);
	CHECK_EQ(pthread_join(caller, NULL), 0);
	CHECK_EQ(fake_gate(t, NULL), 0);
	saving_finish(t);
	CHECK_EQ(sfr_save_report(t, &report), 0);
	CHECK_EQ(report.err.code, 0);
	CHECK_EQ(saving_content_as(dir, "a", &one), 1);
	sfr_ticket_put(t);
	fake_end(engine);
}

/* ---- what is used again ---- */

TEST(portions_and_events_are_reused)
{
	uint32_t nr = 0;
	struct sfr_engine *engine = begin_on_device(16, 2);

	for (int i = 0; i < 12; i++)
		CHECK_EQ(fake_save(engine, dir, "a", &one, 0), 0);
	sfr__lock(&lane_of(engine)->mu);
	for (struct sfr__cuda_portion *each = lane_of(engine)->free_portions; each;
	     each = each->next)
		nr++;
	CHECK(lane_of(engine)->nr_events <= 12);
	sfr__unlock(&lane_of(engine)->mu);
	CHECK(nr > 0 && nr <= 12); /* as many as were in flight at a time */
	fake_end(engine);
}

static int start_snapshot(struct sfr_engine *engine, const struct sfr_source *sources,
			  unsigned nr_sources, struct sfr_snapshot **out)
{
	const struct sfr_device_stream stream = { .handle = (uintptr_t)fake.fake_cuda_stream(0) };
	int rc = sfr_snapshot_new(engine, sources, nr_sources, 0, out);

	if (rc == 0)
		rc = sfr_snapshot_lease(*out, SFR_FOREVER);
	if (rc == 0)
		rc = sfr_snapshot_set_streams(*out, &stream, 1);
	return rc == 0 ? sfr_snapshot_start(*out) : rc;
}

static void finish(struct sfr_snapshot *s)
{
	int64_t torn;

	CHECK_EQ(sfr_snapshot_wait(s, SFR_FOREVER, &torn), 0);
	CHECK_EQ(torn, -1);
	CHECK_EQ(saving_notice(), SFR_NOTICE_SNAPSHOT);
	sfr_snapshot_remove_view(s);
	sfr_snapshot_put(s);
}

/* Leaves one deferred storage on the device. As it is one of many, few of its lines are sampled. */
static void keep_small_on_the_host(void)
{
	for (unsigned i = 2; i < NR_SMALL; i++) {
		small_sources[i].addr &= ~(uint64_t)FAKE_CUDA_DEVICE;
		small_sources[i].device = 0;
	}
}

/* Memory for samples is kept, but at most two pieces of it, and none is used for more samples
 * than fit: the driver's memory, or ordinary memory if the driver has none. */
TEST(memory_for_samples_is_kept_and_never_too_small)
{
	for (int ours = 0; ours < 2; ours++) {
		struct sfr_engine *engine;
		struct sfr_snapshot *s[4];

		begin();
		engine = saving_engine_of(1u << 17, 16, 2, 2);
		fake_put_on_device(&one, 0, SAVING_NR, 0);
		if (ours) {
			fake.fake_cuda_fail("cuMemHostAlloc", 1, 1, 2);
			fake.fake_cuda_allow_pageable(1);
		}
		for (unsigned i = 0; i < 2; i++) { /* a page of it, then more */
			fill_small();
			if (i == 0)
				keep_small_on_the_host();
			CHECK_EQ(start_snapshot(engine, small_sources, NR_SMALL, &s[0]), 0);
			finish(s[0]);
		}
		fake.fake_cuda_hold(!ours); /* a copy to unpinned memory waits for the device */
		for (unsigned i = 0; i < 4; i++)
			CHECK_EQ(start_snapshot(engine, one.sources, SAVING_NR, &s[i]), 0);
		fake.fake_cuda_hold(0);
		for (unsigned i = 0; i < 4; i++)
			finish(s[i]);
		fake_end(engine);
	}
}

BEGIN
{
	if (!fake_load())
		return false;
	plain = sfr_sys; /* before any thread runs */
	sfr_sys.clock_gettime = counted_clock;
	dir = saving_dir();
	return true;
}
