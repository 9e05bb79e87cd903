/* sums.c: the threads and the walk reach the same verdict on every file, through the page cache
 * and past it. Failing and short reads are reported. A forked child finishes the check by
 * itself. */
#include <errno.h>
#include <stdatomic.h>
#include <sys/wait.h>

#include "fix_dir.h"
#include "base/base.h"
#include "reader/reader.h"
#include "sfr/limits.h"
#include "verdict.h"

#define PIECE SFR__READER_CHUNK_MAX
#define NR_WHOLE 12u /* chunks: more than there are threads */
#define LEN (NR_WHOLE * PIECE + 12345u)

static unsigned char *content;

static void make_content(void)
{
	content = malloc(LEN);
	if (content == NULL)
		abort();
	for (size_t i = 0; i < LEN; i++)
		content[i] = (unsigned char)(check_random() >> 24);
}

/* A file that is long enough for threads. */
static struct archive long_archive(void)
{
	struct archive a = archive_torch();

	archive_add(&a, "archive/data/0", content, 100);
	archive_add(&a, "archive/data/1", content, 8 * PIECE + 77);
	archive_add(&a, "archive/data/2", content + 9, PIECE);
	archive_add(&a, "archive/data/3", content, LEN - 11 * PIECE);
	archive_finish(&a);
	return a;
}

static int open_long(const char *dir, const struct archive *a)
{
	const char *path = dir_path(dir, "long");
	int fd;

	file_put(path, a->buf, a->len);
	fd = open(path, O_RDWR | O_CLOEXEC);
	CHECK(fd >= 0);
	return fd;
}

/* Reads chunks of one page, so that threads share records. */
static void use_threads(bool yes)
{
	struct sfr_limits limits;

	sfr_limits_reset();
	limits = sfr_limits;
	limits.reader_chunk_bytes = SFR_PAGE;
	limits.ahead_bytes = yes ? 1 : UINT64_MAX;
	CHECK_EQ(sfr_limits_set(&limits), 0);
}

static void agree(const struct verdict *threads, const struct verdict *walk)
{
	CHECK_EQ(threads->rc, walk->rc);
	CHECK_EQ(threads->ok, walk->ok);
	CHECK_EQ(threads->headers, walk->headers);
	CHECK_EQ(threads->nr_records, walk->nr_records);
	CHECK_EQ(threads->nr_unchecked, walk->nr_unchecked);
	CHECK_EQ(threads->nr_bad, walk->nr_bad);
	CHECK(strcmp(threads->error, walk->error) == 0);
	CHECK(strcmp(threads->bad, walk->bad) == 0);
	CHECK(threads->reason == walk->reason ||
	      (threads->reason != NULL && strcmp(threads->reason, walk->reason) == 0));
}

static struct archive damaged(unsigned kind)
{
	static const char *const names[] = { "archive/data/0", "archive/data/1", "archive/data/2",
					     "archive/data/3", "archive/data/4", "archive/data/5" };
	struct archive a = { .described = kind % 2 == 0, .zip64 = true, .align = 64 };

	a.no_crc = kind % 5 == 0;
	archive_add(&a, "archive/data.pkl", "\x80\x02}q\x00.", 6);
	archive_add(&a, "archive/version", "3\n", 2);
	for (unsigned i = 0; i < 6; i++) {
		archive_add(&a, names[i], content, check_random() % (3 * SFR_PAGE));
		if (check_random() % 4 == 0)
			archive_gap(&a, check_random() % (2 * SFR_PAGE));
	}
	archive_finish(&a);
	for (unsigned i = 0; i < kind % 4; i++)
		a.buf[check_random() % a.len] ^= (unsigned char)(1u << check_random() % 8);
	return a;
}

TEST(check_on_threads_gives_the_verdict_of_a_check_without_threads)
{
	unsigned nr_bad = 0, nr_good = 0;

	for (unsigned round = 0; round < 3000; round++) {
		struct archive a = damaged(round);
		struct verdict threads, walk;

		use_threads(true);
		threads = check_archive(&a, SFR_CHECK_BYTES);
		use_threads(false);
		walk = check_archive(&a, SFR_CHECK_BYTES);
		agree(&threads, &walk);
		if (walk.nr_bad != 0)
			nr_bad++;
		if (walk.ok)
			nr_good++;
		archive_free(&a);
	}
	CHECK(nr_bad > 300 && nr_good > 300);
	sfr_limits_reset();
}

/* An archive in the middle of a file, as in a sharded checkpoint. */
TEST(archive_inside_a_file_is_checked)
{
	static const uint64_t offsets[] = { 1, 777, SFR_PAGE, 3 * SFR_PAGE };
	struct archive a = sample();

	for (unsigned i = 0; i < 4 * 4; i++) {
		const uint64_t off = offsets[i / 4];
		int fd = memfd_create("parts", MFD_CLOEXEC);
		struct sfr_check *check;

		use_threads(i % 2 != 0);
		if (i % 4 >= 2) /* damaged in the other rounds */
			a.buf[a.records[a.nr - 1].data_off] ^= 1;
		CHECK_EQ(pwrite(fd, a.buf, a.len, (off_t)off), a.len);
		CHECK_EQ(pwrite(fd, "behind", 6, (off_t)(off + a.len)), 6);
		CHECK_EQ(sfr_check_new_part(fd, off, a.len, SFR_CHECK_BYTES | SFR_CHECK_DIRECT,
					    &check),
			 0);
		CHECK_EQ(sfr_check_run(check, SFR_FOREVER), 0);
		CHECK_EQ(sfr_check_result(check)->ok, i % 4 < 2);
		CHECK_EQ(sfr_check_result(check)->nr_bad, i % 4 >= 2);
		CHECK_EQ(sfr_check_result(check)->nbytes, a.len);
		sfr_check_free(check);
		(void)close(fd);
		if (i % 4 >= 2)
			a.buf[a.records[a.nr - 1].data_off] ^= 1;
	}
	sfr_limits_reset();
	archive_free(&a);
}

TEST(check_that_is_freed_early_reads_no_further)
{
	const struct sfr_fault slow = {
		.call = "pread", .nth = 1, .sticky = 1, .limit = -1, .delay_ns = 20000000
	};
	struct archive a = long_archive();
	int fd = file_of(a.buf, a.len);
	struct sfr_check *check;

	CHECK_EQ(sfr_inject_install(), 0);
	sfr_inject_clear();
	CHECK_EQ(sfr_check_new(fd, SFR_CHECK_BYTES, &check), 0);
	while (check->reader == NULL)
		CHECK_EQ(sfr_check_run(check, 0), SFR_EAGAIN);
	CHECK_EQ(sfr_inject_add_fault(&slow), 0);
	sfr_check_free(check);
	CHECK(sfr_inject_hits() <= 2 * SFR__READER_THREADS);
	sfr_inject_clear();
	sfr_inject_uninstall();
	(void)close(fd);
	archive_free(&a);
}

TEST(check_survives_short_interrupted_and_refused_reads)
{
	static const struct sfr_fault faults[] = {
		{ .call = "pread", .nth = 7, .limit = 1 },
		{ .call = "pread", .nth = 1, .sticky = 1, .limit = 70001 },
		{ .call = "pread", .nth = 9, .limit = -3 },
		{ .call = "pread", .nth = 8, .err = EINTR, .limit = -1 },
		{ .call = "open", .nth = 1, .err = EINVAL, .limit = -1 },
		{ .call = "open", .nth = 1, .err = ENOENT, .limit = -1 }, /* no /proc */
		{ .call = "thread_create", .nth = 2, .err = EAGAIN, .limit = -1 },
		{ .call = "thread_create", .nth = 1, .sticky = 1, .err = EAGAIN, .limit = -1 },
	};
	struct archive a = long_archive();

	for (int base = 0; base < NR_DIR_BASES; base++) {
		const char *dir = dir_make(dir_bases[base]);
		int fd = open_long(dir, &a);

		CHECK_EQ(sfr_inject_install(), 0);
		for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++) {
			struct verdict v;

			sfr_inject_clear();
			CHECK_EQ(sfr_inject_add_fault(&faults[i]), 0);
			v = check_fd(fd, SFR_CHECK_BYTES | SFR_CHECK_DIRECT);
			CHECK(v.rc == 0 && v.ok);
			CHECK(sfr_inject_hits() > 0);
		}
		sfr_inject_clear();
		sfr_inject_uninstall();
		(void)close(fd);
		dir_remove(dir);
	}
	archive_free(&a);
}

/* A disk error is reported, even if another read would succeed. */
TEST(read_error_of_a_thread_is_the_error_of_the_check)
{
	const struct sfr_fault fault = { .call = "pread", .nth = 4, .err = EIO, .limit = -1 };
	struct archive a = long_archive();
	int fd = file_of(a.buf, a.len);
	struct sfr_check *check;

	CHECK_EQ(sfr_inject_install(), 0);
	sfr_inject_clear();
	CHECK_EQ(sfr_check_new(fd, SFR_CHECK_BYTES, &check), 0);
	while (check->dir_check == NULL || check->dir_check->state != SFR__CHECK_NAMES)
		CHECK_EQ(sfr_check_run(check, 0), SFR_EAGAIN);
	CHECK_EQ(sfr_inject_add_fault(&fault), 0);
	for (int again = 0; again < 3; again++)
		CHECK_EQ(sfr_check_run(check, SFR_FOREVER), -EIO);
	CHECK(sfr_check_has_os_error(check));
	sfr_check_free(check);
	sfr_inject_clear();
	sfr_inject_uninstall();
	(void)close(fd);
	archive_free(&a);
}

TEST(check_reports_a_shrinking_file_as_changed)
{
	struct archive a = long_archive();
	int fd = file_of(a.buf, a.len);
	struct sfr_check *check;

	CHECK_EQ(sfr_check_new(fd, SFR_CHECK_BYTES, &check), 0);
	while (check->dir_check == NULL || check->dir_check->state != SFR__CHECK_NAMES)
		CHECK_EQ(sfr_check_run(check, 0), SFR_EAGAIN);
	/* In the last record's data, whose header is read before the threads begin. */
	CHECK_EQ(ftruncate(fd, (off_t)(a.records[a.nr - 1].data_off + PIECE / 2)), 0);
	CHECK_EQ(sfr_check_run(check, SFR_FOREVER), 0);
	CHECK(!sfr_check_result(check)->ok);
	CHECK(strstr(sfr_check_result(check)->error, "changed while it was read") != NULL);
	sfr_check_free(check);
	(void)close(fd);
	archive_free(&a);
}

TEST(check_finds_damage_despite_any_failing_call)
{
	const char *dir = dir_make(dir_bases[0]);
	struct archive a = long_archive();
	int fd, before;

	a.buf[a.records[a.nr - 3].data_off + 4 * PIECE] ^= 1;
	fd = open_long(dir, &a);
	before = nr_fds();
	FOR_EVERY_FAILURE(run, "*", EIO)
	{
		struct verdict v = check_fd(fd, SFR_CHECK_BYTES | SFR_CHECK_DIRECT);

		/* Without memory, a descriptor or a thread, the walk reads the file. */
		CHECK(v.rc == 0 ? v.nr_bad == 1 && v.nr_records == a.nr :
				  check_acted(&run) && (v.rc == -EIO || v.rc == -ENOMEM));
		CHECK_EQ(nr_fds(), before);
	}
	sfr_inject_uninstall();
	(void)close(fd);
	archive_free(&a);
	dir_remove(dir);
}

/* A signal handler forks between two slices, and the child continues the check. */
TEST(forked_child_and_parent_both_end_the_check)
{
	const char *dir = dir_make(dir_bases[0]);
	struct archive a = long_archive();
	struct sfr_check *check;
	int fd = open_long(dir, &a), status = -1;
	pid_t child;

	CHECK_EQ(sfr_check_new(fd, SFR_CHECK_BYTES | SFR_CHECK_DIRECT, &check), 0);
	while (check->reader == NULL)
		CHECK_EQ(sfr_check_run(check, 0), SFR_EAGAIN);
	(void)fflush(stdout);
	child = fork();
	if (child == 0) {
		bool good = sfr_check_bytes_done(check) <= a.len;

		good = sfr_check_run(check, SFR_FOREVER) == 0 && good &&
		       sfr_check_result(check)->ok;
		sfr_check_free(check);
		_exit(good ? 0 : 1);
	}
	CHECK_EQ(waitpid(child, &status, 0), child);
	CHECK_EQ(status, 0);
	CHECK_EQ(sfr_check_run(check, SFR_FOREVER), 0);
	CHECK(sfr_check_result(check)->ok);
	sfr_check_free(check);
	(void)close(fd);
	archive_free(&a);
	dir_remove(dir);
}

BEGIN
{
	make_content();
	return true;
}
