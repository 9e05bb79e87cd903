/* Whole saves of flat files (archive/flat.c): each is, byte for byte, its header and members,
 * whatever the blocks, the pool, the devices and what fails. */
#include <errno.h>

#include "cuda/fake.h"
#include "flat_state.h"

static const char *dir;
static struct flat_state state;

static int new_save(struct sfr_engine *engine, uint32_t flags, struct sfr_ticket **t)
{
	struct sfr_save_desc desc = state.desc;

	desc.dir = dir;
	desc.name = "a";
	desc.flags = flags;
	return sfr_save_new(engine, &desc, t);
}

static void check_file(void)
{
	CHECK(file_is(dir_path(dir, "a"), state.expected, state.len));
}

/* One whole save; the code it ended with. */
static int save(struct sfr_engine *engine, uint32_t flags)
{
	struct sfr_report report;
	struct sfr_ticket *t = NULL;
	int rc = new_save(engine, flags, &t);

	if (rc < 0)
		return rc;
	rc = fake_submit(t, NULL);
	if (rc == 0) {
		CHECK_EQ(fake_gate(t, NULL), 0);
		rc = saving_end_of(t);
		CHECK_EQ(sfr_save_report(t, &report), 0);
		CHECK_EQ(report.nbytes, state.len);
		if (rc == 0)
			CHECK_EQ(t->facts.written_nbytes, state.len);
	}
	sfr_ticket_put(t);
	return rc;
}

/* Moves the sources with device numbers to the fake driver's devices. */
static void put_on_devices(void)
{
	for (uint32_t i = 0; i < FLAT_SOURCES; i++)
		if (state.sources[i].device != 0)
			state.sources[i].addr |= FAKE_CUDA_DEVICE;
}

TEST(a_flat_file_is_its_header_and_members_with_any_pool)
{
	static const uint64_t blocks[] = { 4096, 8192, 12288, 1 << 20 };

	for (unsigned round = 0; round < 48; round++) {
		struct sfr_engine *engine =
			saving_engine_of(blocks[round % 4], 1 + round % 5, 1 + round % 3, 2);

		flat_make(&state, 0);
		CHECK_EQ(save(engine, (round % 2 ? SFR_SAVE_DURABLE : 0) |
					      (round % 3 ? 0 : SFR_SAVE_UNORDERED) |
					      (round % 5 ? 0 : SFR_SAVE_CHECK_BYTES)),
			 0);
		check_file();
		saving_end(engine);
	}
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
}

TEST(a_flat_file_from_several_devices_is_whole)
{
	for (unsigned round = 0; round < 24; round++) {
		struct sfr_engine *engine;

		fake.fake_cuda_reset();
		engine = saving_engine_of(round % 2 ? 8192 : 65536, 1 + round % 4, 2, 2);
		flat_make(&state, 3);
		put_on_devices();
		CHECK_EQ(save(engine, round % 5 ? 0 : SFR_SAVE_CHECK_BYTES), 0);
		check_file();
		saving_end(engine);
		fake_check();
		fake_check_nothing_left();
	}
}

/* Bytes of earlier users of the pool are not written. The file is compared to its last byte. */
TEST(old_bytes_of_the_pool_are_not_written)
{
	struct sfr_engine *engine = saving_engine_of(8192, 3, 2, 2);

	for (unsigned round = 0; round < 8; round++) {
		flat_make(&state, 0);
		saving_poison(engine);
		CHECK_EQ(save(engine, 0), 0);
		check_file();
	}
	saving_end(engine);
}

/* A version's verdict and a sample's name the source, and not the member. */
TEST(a_torn_member_is_reported_by_its_source)
{
	struct sfr_engine *engine = saving_engine_of(8192, 8, 1, 2);
	struct sfr_report report;
	struct sfr_ticket *t;

	flat_make(&state, 0);
	state.desc.nr_members = 2;
	for (uint32_t i = 0; i < 2; i++) {
		state.sources[4 + i].lane = SFR_LANE_HOST;
		state.members[i] =
			(struct sfr_member){ .off = 100, .nbytes = 20000, .source = 4 + i };
	}
	flat_expect(&state);
	CHECK_EQ(new_save(engine, 0, &t), 0);
	CHECK_EQ(sfr_save_admit(t, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_capture(t, SFR_FOREVER), 0);
	memset(state.bytes[5], 0x55, FLAT_SOURCE_LEN);
	CHECK_EQ(sfr_save_launch(t), 0);
	saving_finish(t);
	CHECK_EQ(sfr_save_report(t, &report), 0);
	CHECK_EQ(report.err.code, SFR_ETORN);
	CHECK_EQ(report.err.index, 5);
	sfr_ticket_put(t);
	saving_end(engine);
}

static atomic_bool synced;
static atomic_uint nr_late;

static ssize_t noted_pwrite(int fd, const void *bytes, size_t len, off_t off)
{
	if (synced)
		nr_late++;
	return pwrite(fd, bytes, len, off);
}

static int noted_fdatasync(int fd)
{
	synced = true;
	return fdatasync(fd);
}

TEST(pages_that_extents_share_are_written_before_the_sync)
{
	struct sfr_engine *engine = saving_engine_of(8192, 4, 2, 2);
	struct sfr_sys plain = sfr_sys;
	struct sfr_ticket *t;

	do
		flat_make(&state, 0);
	while (state.desc.nr_members < 10);
	sfr_sys.pwrite = noted_pwrite; /* no save is under way */
	sfr_sys.fdatasync = noted_fdatasync;
	CHECK_EQ(new_save(engine, SFR_SAVE_DURABLE, &t), 0);
	CHECK(t->plan.img.nr_edges > 0);
	CHECK_EQ(saving_submit(t), 0);
	saving_done(t);
	CHECK(synced);
	CHECK_EQ(nr_late, 0);
	check_file();
	saving_end(engine);
	sfr_sys = plain;
}

static struct sfr_engine *small_engine(int *rc)
{
	const struct sfr_engine_opts opts = {
		.pool_bytes = 8192, .block_bytes = 4096, .nr_writers = 1, .max_in_flight = 1
	};
	struct sfr_engine *engine = NULL;

	*rc = sfr_engine_new(&opts, &engine);
	return engine;
}

TEST(any_failure_leaves_the_old_file_or_the_complete_new_one)
{
	static const struct {
		const char *call;
		int err;
	} faults[] = { { "*", ENOMEM }, { "*", EIO }, { "pwrite", ENOSPC } };

	for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++) {
		do
			flat_make(&state, 0);
		while (state.len > 60000 || state.desc.nr_members < 5);
		FOR_EVERY_FAILURE(run, faults[i].call, faults[i].err)
		{
			int rc;
			struct sfr_engine *engine = small_engine(&rc);

			file_put(dir_path(dir, "a"), "old", 3);
			if (rc == 0)
				rc = save(engine, i == 0 ? SFR_SAVE_UNORDERED : SFR_SAVE_DURABLE);
			CHECK(rc == 0 || check_acted(&run));
			check_end_fault(&run);
			CHECK(file_is(dir_path(dir, "a"), state.expected, state.len) ||
			      (rc != 0 && file_is(dir_path(dir, "a"), "old", 3)));
			if (engine)
				saving_end(engine);
		}
		CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
	}
}

TEST(a_cancelled_flat_save_leaves_nothing)
{
	struct sfr_engine *engine;
	struct sfr_ticket *t;

	CHECK_EQ(sfr_inject_install(), 0);
	engine = saving_engine_of(4096, 2, 1, 2);
	do
		flat_make(&state, 0);
	while (state.len < 100000);
	(void)unlink(dir_path(dir, "a"));
	sfr_inject_clear();
	saving_slow("pwrite", 1000000);
	CHECK_EQ(new_save(engine, 0, &t), 0);
	CHECK_EQ(saving_submit(t), 0);
	CHECK_EQ(sfr_save_cancel(t), 1);
	sfr_inject_clear();
	saving_done(t);
	CHECK(!file_exists(dir_path(dir, "a")));
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
	saving_end(engine);
	sfr_inject_uninstall();
}

BEGIN
{
	if (!fake_load())
		return false;
	dir = saving_dir();
	return true;
}
