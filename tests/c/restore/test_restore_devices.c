/* Restores to devices over the fake driver: several devices in one load, and damaged or changed
 * files. */
#include <errno.h>

#include "restore/restore_int.h"
#include "cuda/fix_cuda.h"

static int open_file(const char *name)
{
	return open(dir_path(dir, name), O_RDWR | O_CLOEXEC);
}

static void save_one(void)
{
	struct sfr_engine *engine;

	begin();
	for (unsigned i = 0; i < SAVING_NR; i++)
		memset(one.bytes[i], (int)i + 1, SAVING_LEN);
	engine = saving_engine(16, 1, 1);
	CHECK_EQ(saving_save(engine, dir, "a", &one, 0), 0);
	saving_end(engine);
}

static const char batches[] = "cuMemcpyBatchAsync_v2"; /* copies one chunk in one call */

/* The final memory of the devices, which is host memory here. */
static unsigned char arrived[SAVING_NR][SAVING_LEN];

/* The reason of the first failure of the last restore. */
static char reason[160];

/* Sends data/i to device i % 2, and nothing else. */
static int restore_to_two(int fd)
{
	struct sfr_restore *r = NULL;
	struct sfr_check *check;
	char why[160] = "";
	int rc;

	memset(arrived, 0, sizeof(arrived));
	CHECK_EQ(sfr_check_new(fd, SFR_CHECK_DIRECTORY | SFR_CHECK_KEEP, &check), 0);
	CHECK_EQ(sfr_check_run(check, SFR_FOREVER), 0);
	if (!CHECK_EQ(sfr_restore_new(check, fd, SFR_RESTORE_VERIFY, &r), 0))
		return -1;
	for (uint32_t device = 0; device < 2; device++) {
		void *stream = fake.fake_cuda_stream((int)device);

		CHECK_EQ(sfr_restore_prepare_device(r, device, (uint64_t)(uintptr_t)stream, why,
						    sizeof(why)),
			 0);
	}
	for (unsigned i = 0; i < SAVING_NR; i++) {
		char name[16];
		int len = snprintf(name, sizeof(name), "data/%u", i);
		uint64_t index = sfr_restore_find(r, name, (size_t)len);

		if (CHECK(index < sfr_restore_nr_records(r)))
			sfr_restore_set_device_destination(r, index, i % 2,
							   (uint64_t)(uintptr_t)arrived[i] +
								   FAKE_CUDA_DEVICE);
	}
	rc = sfr_reader_allow_records(r->reader, sfr_restore_nr_records(r));
	if (rc == 0)
		rc = sfr_reader_wait(r->reader, sfr_restore_nr_records(r), SFR_FOREVER);
	(void)snprintf(reason, sizeof(reason), "%s",
		       rc < 0 && sfr_reader_failure(r->reader)->reason ?
			       sfr_reader_failure(r->reader)->reason :
			       "");
	sfr_restore_free(r);
	CHECK_EQ(fake.fake_cuda_nr_violations(), 0);
	return rc;
}

static bool is_complete(void)
{
	for (unsigned i = 0; i < SAVING_NR; i++)
		for (uint64_t k = 0; k < one.sources[i].nbytes; k++)
			if (arrived[i][k] != i + 1)
				return false;
	return true;
}

TEST(records_of_one_file_go_to_two_devices)
{
	int fd;

	save_one();
	fd = open_file("a");
	for (unsigned late = 0; late < 2; late++) {
		fake.fake_cuda_delay(late * 200000, 7);
		CHECK_EQ(restore_to_two(fd), 0);
		CHECK(is_complete());
	}
	(void)close(fd);
}

TEST(every_flipped_byte_is_reported_or_is_padding)
{
	struct stat st;
	unsigned nr_bad = 0;
	int fd;

	save_one();
	fd = open_file("a");
	CHECK_EQ(fstat(fd, &st), 0);
	/* From the first header's end to the last record. The check reads the directory. */
	for (off_t at = 128; at < st.st_size * 9 / 10; at += 997) {
		unsigned char byte, other;

		CHECK_EQ(pread(fd, &byte, 1, at), 1);
		other = byte ^ 0x10;
		CHECK_EQ(pwrite(fd, &other, 1, at), 1);
		if (restore_to_two(fd) == 0)
			CHECK(is_complete()); /* the byte was padding */
		else
			nr_bad++;
		CHECK_EQ(pwrite(fd, &byte, 1, at), 1);
	}
	CHECK(nr_bad > 20);
	CHECK_EQ(restore_to_two(fd), 0);
	(void)close(fd);
}

TEST(load_to_two_devices_fails_if_one_of_them_fails)
{
	uint64_t nth = 0;
	int fd, rc;

	save_one();
	fd = open_file("a");
	do {
		fake.fake_cuda_reset();
		fake.fake_cuda_fail(batches, ++nth, 0, 999);
		rc = restore_to_two(fd);
		CHECK((rc != 0) == (fake.fake_cuda_hits() != 0));
	} while (rc != 0);
	CHECK(nth > 2); /* each device had some */
	fake.fake_cuda_reset();
	CHECK_EQ(restore_to_two(fd), 0);
	CHECK(is_complete());
	(void)close(fd);
}

/* Fails each of several calls in a row, which open a device or send to it. */
TEST(error_names_only_the_failed_driver_call)
{
	static const char *const opening[] = { "cuStreamCreate", "cuEventCreate", "cuEventRecord",
					       "cuStreamWaitEvent" };
	static const char *const sending[] = { batches, "cuEventRecord" };
	int fd;

	save_one();
	fd = open_file("a");
	for (size_t i = 0; i < sizeof(opening) / sizeof(opening[0]); i++) {
		struct sfr_restore *r = NULL;
		struct sfr_check *check;
		char why[160] = "";

		CHECK_EQ(sfr_check_new(fd, SFR_CHECK_DIRECTORY | SFR_CHECK_KEEP, &check), 0);
		CHECK_EQ(sfr_check_run(check, SFR_FOREVER), 0);
		CHECK_EQ(sfr_restore_new(check, fd, 0, &r), 0);
		fake.fake_cuda_reset();
		fake.fake_cuda_fail(opening[i], 1, 0, CUDA_ERROR_OUT_OF_MEMORY);
		CHECK_EQ(sfr_restore_prepare_device(r, 0, 0, why, sizeof(why)), -EIO);
		CHECK(strstr(why, opening[i]) != NULL);
		sfr_restore_free(r);
		CHECK_EQ(fake.fake_cuda_live("contexts"), 0);
	}
	for (size_t i = 0; i < sizeof(sending) / sizeof(sending[0]); i++) {
		fake.fake_cuda_reset();
		/* Each device records its E first, and that event is reused. */
		fake.fake_cuda_fail(sending[i], i == 0 ? 1 : 3, 1, CUDA_ERROR_OUT_OF_MEMORY);
		CHECK(restore_to_two(fd) != 0);
		CHECK(strncmp(strstr(reason, "cu"), sending[i], strcspn(sending[i], "_")) == 0);
	}
	fake.fake_cuda_reset();
	(void)close(fd);
}

TEST(first_refused_driver_call_is_reported)
{
	int fd;

	save_one();
	fd = open_file("a");
	/* Repeated, because the question may come before the next failure. */
	for (unsigned round = 0; round < 8; round++) {
		fake.fake_cuda_fail(batches, 1, 0, 999);
		fake.fake_cuda_fail("cuEventRecord", 3, 1, 999); /* after the first copy */
		CHECK_EQ(restore_to_two(fd), -EIO);
		CHECK(strstr(reason, "cuMemcpyBatchAsync") != NULL);
		CHECK(fake.fake_cuda_hits() > 1);
		fake.fake_cuda_reset();
	}
	(void)close(fd);
}

/* Nobody knows whether a copy still reads the buffer. */
TEST(buffer_of_a_dead_device_is_never_reused)
{
	int64_t nr_before;
	int fd;

	save_one();
	fd = open_file("a");
	nr_before = fake.fake_cuda_live("allocated");
	fake.fake_cuda_fail("cuEventQuery", 1, 1, 999);
	fake.fake_cuda_fail("cuStreamQuery", 1, 1, 999);
	CHECK_EQ(restore_to_two(fd), -EIO);
	CHECK(strstr(reason, "cuEventQuery") != NULL);
	CHECK_EQ(fake.fake_cuda_live("allocated"), nr_before + 1);
	fake.fake_cuda_reset();
	(void)close(fd);
}

BEGIN
{
	if (!fake_load())
		return false;
	dir = saving_dir();
	return true;
}
