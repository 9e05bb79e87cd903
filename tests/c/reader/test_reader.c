/* The threads of a restore: how far they may have to read, what they report, and what happens
 * without threads. */
#include <errno.h>
#include <sys/wait.h>

#include "check/verdict.h"
#include "reader/reader_int.h"
#include "restore/restore.h"
#include "restore/restore_int.h"

#define PIECE SFR__READER_CHUNK_MAX

static struct archive a;
static int fd;

enum { ENDING = 5, BEHIND = 6 };

/* Makes an archive of two chunks: a record ends where the first one does, and a short one
 * follows. */
static void make_archive(void)
{
	static const char data[PIECE];

	a = archive_torch();
	archive_add(&a, "archive/data/0", data, 1);
	a.nr--;
	a.len = a.records[ENDING].hdr_off;
	archive_add(&a, "archive/data/0", data, PIECE - a.records[ENDING].data_off);
	archive_add(&a, "archive/data/1", "abcdefgh", 8);
	archive_finish(&a);
	CHECK_EQ(a.records[ENDING].data_off + a.records[ENDING].len, PIECE);
	fd = file_of(a.buf, a.len);
}

static struct sfr_restore *open_restore(void)
{
	struct sfr_restore *r = NULL;
	struct sfr_check *check;

	CHECK_EQ(sfr_check_new(fd, SFR_CHECK_DIRECTORY | SFR_CHECK_KEEP, &check), 0);
	CHECK_EQ(sfr_check_run(check, SFR_FOREVER), 0);
	if (!CHECK_EQ(sfr_restore_new(check, fd, SFR_RESTORE_VERIFY, &r), 0))
		exit(1);
	return r;
}

/* Its descriptor is in the next chunk, which is read only when all records in that chunk may be
 * read. */
TEST(record_ending_with_a_chunk_needs_the_next_chunk)
{
	struct sfr_restore *r = open_restore();

	CHECK_EQ(sfr_reader_count_records_to_allow(r->reader, ENDING), BEHIND + 1);
	CHECK_EQ(sfr_reader_count_records_to_allow(r->reader, 0), BEHIND);
	sfr_restore_free(r);
}

TEST(nothing_is_read_beyond_the_record_that_a_limit_names)
{
	struct sfr_restore *r = open_restore();

	sfr_reader_stop_after(r->reader, 0);
	CHECK_EQ(sfr_reader_allow_records(r->reader, a.nr), 0);
	CHECK_EQ(sfr_reader_wait(r->reader, 0, SFR_FOREVER), 0);
	CHECK_EQ(sfr_reader_wait(r->reader, ENDING, SFR_FOREVER), SFR_EUNPLACED);
	CHECK_EQ(sfr_reader_wait(r->reader, a.nr, SFR_FOREVER), SFR_EUNPLACED);
	(void)usleep(20000); /* for a thread that goes on nevertheless */
	CHECK(sfr_reader_bytes_read(r->reader) <= PIECE);
	sfr_reader_stop_after(r->reader, a.nr - 1);
	CHECK_EQ(sfr_reader_wait(r->reader, a.nr, SFR_FOREVER), 0);
	sfr_restore_free(r);
}

TEST(one_reader_thread_is_enough_and_reports_progress)
{
	const struct sfr_fault fault = {
		.call = "thread_create", .nth = 2, .sticky = 1, .err = EAGAIN, .limit = -1
	};
	struct sfr_restore *r = open_restore();

	CHECK_EQ(sfr_inject_install(), 0);
	sfr_inject_clear();
	CHECK_EQ(sfr_inject_add_fault(&fault), 0);
	CHECK_EQ(sfr_reader_bytes_read(r->reader), 0);
	CHECK_EQ(sfr_reader_allow_records(r->reader, a.nr), 0);
	CHECK_EQ(sfr_inject_hits(), 1);
	CHECK_EQ(sfr_reader_wait(r->reader, a.nr, SFR_FOREVER), 0);
	for (int i = 0; i < 2000 && sfr_reader_bytes_read(r->reader) != a.dir_off; i++)
		(void)usleep(5000); /* counted when all of the chunk has been put */
	CHECK_EQ(sfr_reader_bytes_read(r->reader), a.dir_off);
	sfr_restore_free(r);
	sfr_inject_uninstall();
}

TEST(first_failure_is_reported_and_ends_the_reading)
{
	struct sfr_restore *r = open_restore();

	sfr__reader_fail(r->reader, -EIO, ENDING, 77, NULL);
	sfr__reader_fail(r->reader, SFR_ECORRUPT, BEHIND, 99, SFR__READER_SHORTER);
	CHECK_EQ(sfr_reader_failure(r->reader)->code, -EIO);
	CHECK_EQ(sfr_reader_failure(r->reader)->index, ENDING);
	CHECK_EQ(sfr_reader_allow_records(r->reader, a.nr), 0);
	CHECK_EQ(sfr_reader_wait(r->reader, 0, SFR_FOREVER), -EIO);
	CHECK(r->reader->stop);
	sfr_restore_free(r);
}

/* torch's compute_crc32=False: the bytes cannot be checked, and count as good. */
TEST(records_without_checksums_are_read)
{
	struct archive without = { .described = true, .zip64 = true, .align = 64, .no_crc = true };
	struct sfr_restore *r;
	const int whole = fd;
	char got[9] = "";

	archive_add(&without, "archive/data.pkl", "\x80\x02}q\x00.", 6);
	archive_add(&without, "archive/.format_version", "0", 1);
	archive_add(&without, "archive/.storage_alignment", "64", 2);
	archive_add(&without, "archive/byteorder", "little", 6);
	archive_add(&without, "archive/version", "3\n", 2);
	archive_add(&without, "archive/data/0", "abcdefgh", 8);
	archive_finish(&without);
	fd = file_of(without.buf, without.len);
	r = open_restore();
	sfr_restore_set_destination(r, ENDING, got);
	CHECK_EQ(sfr_reader_allow_records(r->reader, without.nr), 0);
	CHECK_EQ(sfr_reader_wait(r->reader, without.nr, SFR_FOREVER), 0);
	CHECK(strcmp(got, "abcdefgh") == 0);
	sfr_restore_free(r);
	(void)close(fd);
	archive_free(&without);
	fd = whole;
}

/* A child has no threads of the reader. */
TEST(reader_calls_are_refused_in_a_forked_child)
{
	struct sfr_restore *r = open_restore();
	int status = -1;
	pid_t child = fork();

	if (child == 0) {
		CHECK_EQ(sfr_reader_allow_records(r->reader, a.nr), SFR_EFORK);
		CHECK_EQ(sfr_reader_wait(r->reader, 0, 1000), SFR_EFORK);
		sfr_restore_free(r);
		_exit(check__nr_failed == 0 ? 0 : 1);
	}
	CHECK(child > 0 && waitpid(child, &status, 0) == child);
	CHECK_EQ(status, 0);
	sfr_restore_free(r);
}

BEGIN
{
	make_archive();
	return true;
}
