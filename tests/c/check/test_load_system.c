/* A check and the system: failing calls, short reads, files that change meanwhile, slices. */
#include <errno.h>
#include <fcntl.h>

#include "verdict.h"

TEST(unreadable_descriptors_give_their_own_errors)
{
	int ends[2], fd = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	struct verdict v;

	CHECK_EQ(check_fd(fd, 0).rc, -EISDIR);
	(void)close(fd);
	CHECK_EQ(check_fd(fd, 0).rc, -EBADF);
	CHECK_EQ(pipe(ends), 0);
	v = check_fd(ends[0], 0);
	CHECK(v.rc == 0 && !v.ok && strstr(v.error, "not a regular file") != NULL);
	(void)close(ends[0]);
	(void)close(ends[1]);
}

TEST(a_check_runs_in_slices)
{
	struct archive a = archive_torch();
	size_t len = 5u << 20;
	unsigned char *data = calloc(1, len);
	struct sfr_check *check;
	uint64_t done = 0;
	int fd, rc, slices = 0;

	archive_add(&a, "archive/data/0", data, len);
	archive_finish(&a);
	fd = file_of(a.buf, a.len);
	CHECK_EQ(sfr_check_new(fd, SFR_CHECK_BYTES, &check), 0);
	while ((rc = sfr_check_run(check, 0)) == SFR_EAGAIN && slices++ < 1000) {
		CHECK(sfr_check_bytes_done(check) >= done && sfr_check_bytes_done(check) <= a.len);
		done = sfr_check_bytes_done(check);
		CHECK(!sfr_check_result(check)->ok);
	}
	CHECK_EQ(rc, 0);
	CHECK(sfr_check_result(check)->ok);
	CHECK_EQ(sfr_check_run(check, 0), 0); /* a second call returns the same */
	CHECK_EQ(sfr_check_bytes_done(check), a.len);
	/* One step for each record and direction, and one for each chunk, so an interruption
	 * never waits long. */
	CHECK(slices > 15 && slices < 40);
	sfr_check_free(check);

	/* A check that is freed in the middle leaves nothing behind (ASAN detects a leak). */
	CHECK_EQ(sfr_check_new(fd, SFR_CHECK_BYTES, &check), 0);
	CHECK_EQ(sfr_check_run(check, 0), SFR_EAGAIN);
	CHECK_EQ(sfr_check_run(check, 0), SFR_EAGAIN);
	sfr_check_free(check);
	sfr_check_free(NULL);
	(void)close(fd);
	free(data);
	archive_free(&a);
}

TEST(every_failure_of_the_system_is_reported_and_leaks_nothing)
{
	for (int twice = 0; twice < 2; twice++) {
		/* It has a bad record, so that the list of bad records is made too. */
		struct archive a = twice ? archive_torch() : sample();
		int fd;

		if (twice) {
			archive_add(&a, "archive/version", "3\n", 2);
			archive_finish(&a);
		} else {
			a.buf[a.records[7].data_off] ^= 1;
		}
		fd = file_of(a.buf, a.len);
		FOR_EVERY_FAILURE(run, "*", EIO)
		{
			struct verdict v = check_fd(fd, SFR_CHECK_BYTES);

			if (check_acted(&run))
				CHECK(v.rc == -EIO || v.rc == -ENOMEM);
			else
				CHECK(v.rc == 0 && v.nr_bad == 1);
			check_end_fault(&run);
			v = check_fd(fd, SFR_CHECK_BYTES);
			CHECK(v.rc == 0 && v.nr_bad == 1);
		}
		(void)close(fd);
		archive_free(&a);
	}
}

/* Makes an archive so long that each kind of item is somewhere the first one of a new chunk:
 * headers, names, data, descriptors, and both parts of a directory record. */
static struct archive long_archive(char (*names)[208], size_t nr)
{
	struct archive a = archive_torch();
	size_t len = (3u << 20) - (a.len + 30 + strlen("archive/data/big"));
	char *big = calloc(1, len);

	/* The record ends with a chunk, so that its descriptor begins the next one. */
	a.align = 0;
	archive_add(&a, "archive/data/big", big, len);
	for (size_t i = 0; i < nr; i++) {
		(void)snprintf(names[i], sizeof(names[i]), "archive/data/%0*zu", (int)(i % 190 + 4),
			       i);
		archive_add(&a, names[i], big, i % 777);
	}
	/* One name occurs twice, far apart. Both are read again, each from its own chunk. */
	archive_add(&a, names[0], big, 5);
	archive_finish(&a);
	free(big);
	return a;
}

TEST(failure_of_any_read_in_a_long_file_ends_the_check)
{
	enum { NR = ARCHIVE_MAX - 8 };
	static char names[NR][208];
	struct archive a = long_archive(names, NR);
	int fd = file_of(a.buf, a.len);

	CHECK(a.dir_off > (7u << 19) && a.len - a.dir_off > 5 * 65536);
	for (unsigned flags = 0; flags <= SFR_CHECK_BYTES; flags++) {
		uint64_t nth = 0, hits;

		CHECK_EQ(sfr_inject_install(), 0);
		do {
			struct sfr_fault fault = {
				.call = "pread", .nth = ++nth, .err = EIO, .limit = -1
			};
			struct verdict v;

			sfr_inject_clear();
			CHECK_EQ(sfr_inject_add_fault(&fault), 0);
			v = check_fd(fd, flags);
			hits = sfr_inject_hits();
			/* After a failure nothing is read, so that no later read counts as a
			 * success. */
			CHECK(hits == 0 || sfr_inject_count_calls("pread") == nth);
			CHECK(hits != 0 ? v.rc == -EIO : v.rc == 0 && v.nr_bad == 1);
			CHECK(v.rc != 0 || v.nr_records == a.nr);
		} while (hits != 0);
		CHECK(nth > (flags != 0 ? 8 : 80));
		sfr_inject_uninstall();
	}
	(void)close(fd);
	archive_free(&a);
}

/* Reads as usual. From the nth read on, it returns other bytes for the directory's first chunk. */
static uint64_t write_before_nr;
static off_t write_at;
static char written_byte;
static ssize_t writing_pread(int fd, void *buf, size_t len, off_t off)
{
	ssize_t n = pread(fd, buf, len, off);

	if (--write_before_nr == 0 && pwrite(fd, &written_byte, 1, write_at) != 1)
		abort();
	return n;
}

TEST(check_detects_names_that_change_while_it_runs)
{
	enum { NR = ARCHIVE_MAX - 8 };
	const struct sfr_sys plain = sfr_sys;
	static char names[NR][208];
	struct archive a = long_archive(names, NR);
	const size_t central = a.records[6].central; /* of the name that occurs again at the end */
	int fd = file_of(a.buf, a.len);
	struct verdict v;

	CHECK(strcmp(a.records[6].name, names[0]) == 0);
	sfr_sys.pread = writing_pread;
	for (int what = 0; what < 3; what++) {
		/* After the walk has passed: another name, no record at all, nothing. */
		write_before_nr = 50;
		write_at = (off_t)(what == 0 ? central + 46 + 10 : central);
		written_byte = what == 2 ? (char)a.buf[central] : 'q';
		v = check_fd(fd, 0);
		CHECK_EQ(v.rc, 0);
		if (what == 0)
			CHECK(v.ok);
		else if (what == 1)
			CHECK(strcmp(v.error, "it was changed while it was read") == 0);
		else
			CHECK(v.nr_bad == 1 && strcmp(v.reason, "its name occurs twice") == 0);
		CHECK_EQ(pwrite(fd, a.buf + central, 200, (off_t)central), 200);
	}
	sfr_sys = plain;
	(void)close(fd);
	archive_free(&a);
}

TEST(read_error_is_returned_again)
{
	struct sfr_fault fault = { .call = "pread", .nth = 2, .err = EIO, .limit = -1 };
	struct archive a = sample();
	int fd = file_of(a.buf, a.len);
	struct sfr_check *check;

	CHECK_EQ(sfr_check_new(fd, SFR_CHECK_BYTES, &check), 0);
	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr_inject_add_fault(&fault), 0);
	CHECK_EQ(sfr_check_run(check, SFR_FOREVER), -EIO);
	sfr_inject_clear();
	CHECK_EQ(sfr_check_run(check, SFR_FOREVER), -EIO);
	CHECK(!sfr_check_result(check)->ok);
	sfr_check_free(check);
	(void)close(fd);
	archive_free(&a);
}

TEST(short_and_interrupted_reads_are_continued)
{
	static const int64_t limits[] = { 1, 7, -2, -3 };
	struct archive a = sample();
	int fd = file_of(a.buf, a.len);

	CHECK_EQ(sfr_inject_install(), 0);
	for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
		struct sfr_fault fault = {
			.call = "pread", .nth = 1, .sticky = limits[i] > 0, .limit = limits[i]
		};

		sfr_inject_clear();
		CHECK_EQ(sfr_inject_add_fault(&fault), 0);
		CHECK(check_fd(fd, SFR_CHECK_BYTES).ok);
		CHECK(sfr_inject_hits() > 0);
	}
	for (uint64_t nth = 1; nth <= 2; nth++) {
		struct sfr_fault fault = { .call = "pread", .nth = nth, .err = EINTR, .limit = -1 };

		sfr_inject_clear();
		CHECK_EQ(sfr_inject_add_fault(&fault), 0);
		CHECK(check_fd(fd, SFR_CHECK_BYTES).ok);
		CHECK_EQ(sfr_inject_hits(), 1);
	}
	sfr_inject_uninstall();
	(void)close(fd);
	archive_free(&a);
}

static uint64_t nr_preads;
static int shrinking_fd;
static ssize_t shrinking_pread(int fd, void *buf, size_t len, off_t off)
{
	if (fd == shrinking_fd && --nr_preads == 0 && ftruncate(fd, 200) != 0)
		abort();
	return pread(fd, buf, len, off);
}

TEST(file_that_shrinks_during_a_check_is_damaged)
{
	const struct sfr_sys plain = sfr_sys;
	struct archive a = archive_torch();
	size_t len = 3u << 20;
	unsigned char *data = calloc(1, len);

	archive_add(&a, "archive/data/0", data, len);
	archive_finish(&a);
	for (uint64_t nth = 2; nth <= 4; nth++) {
		int fd = file_of(a.buf, a.len);
		struct verdict v;

		shrinking_fd = fd;
		nr_preads = nth;
		sfr_sys.pread = shrinking_pread;
		v = check_fd(fd, SFR_CHECK_BYTES);
		sfr_sys = plain;
		CHECK(v.rc == 0 && !v.ok && strstr(v.error, "changed while it was read") != NULL);
		(void)close(fd);
	}
	free(data);
	archive_free(&a);
}
