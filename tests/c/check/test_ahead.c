/* ahead.c: whatever is asked going forward, the file's bytes are shown, on the disk and in memory,
 * past the page cache and through it; failures come when the piece is asked for, and stay. */
#include <errno.h>
#include <stdatomic.h>
#include <sys/wait.h>

#include "check/ahead.h"
#include "fix_dir.h"
#include "verdict.h"

#define PIECE SFR__AHEAD_PIECE_MAX
#define MOST SFR__AHEAD_MOST
#define NR_WHOLE 7u /* pieces: more than there are slots */
#define LEN (NR_WHOLE * PIECE + 12345u)

static unsigned char *content;

static void make_content(void)
{
	content = malloc(LEN);
	if (content == NULL)
		abort();
	for (size_t i = 0; i < LEN; i++)
		content[i] = (unsigned char)(rng() >> 24);
}

static int open_content(const char *dir)
{
	const char *path = dir_path(dir, "content");
	int fd;

	file_put(path, content, LEN);
	fd = open(path, O_RDWR | O_CLOEXEC);
	CHECK(fd >= 0);
	return fd;
}

/* Goes forward in steps of any length until the end. */
static void walk(struct sfr__ahead *a, uint64_t off, uint64_t longest_step)
{
	while (off < LEN) {
		size_t len = rng() % MOST + 1, got = 0;
		const unsigned char *bytes;

		if (len > LEN - off)
			len = (size_t)(LEN - off);
		CHECK(sfr__ahead_can(a, off, LEN));
		if (!CHECK_EQ(sfr__ahead_get(a, off, len, &bytes, &got), 0))
			return;
		CHECK(got >= len && off + got <= LEN);
		CHECK(memcmp(bytes, content + off, got) == 0);
		off += rng() % longest_step;
	}
}

static void whatever_is_asked_going_forward_is_shown(void)
{
	static const uint64_t steps[] = { MOST, 4 * MOST, 3 * (uint64_t)PIECE };

	for (int base = 0; base < NR_DIR_BASES; base++) {
		const char *dir = dir_make(dir_bases[base]);
		int fd = open_content(dir);

		for (unsigned i = 0; i < 12; i++) {
			struct sfr__ahead *a;

			if (!CHECK_EQ(sfr__ahead_start(fd, LEN, i % 2 != 0, &a), 0))
				continue;
			walk(a, i % 3 == 0 ? 0 : rng() % LEN, steps[i % 3]);
			CHECK(!sfr__ahead_can(a, LEN, LEN - 1));
			sfr__ahead_stop(a);
		}
		(void)close(fd);
		dir_remove(dir);
	}
}

static void it_may_be_stopped_at_any_piece(void)
{
	const char *dir = dir_make(dir_bases[0]);
	int fd = open_content(dir);

	for (uint64_t piece = 0; piece <= NR_WHOLE; piece++) {
		const unsigned char *bytes;
		struct sfr__ahead *a;

		CHECK_EQ(sfr__ahead_start(fd, LEN, true, &a), 0);
		if (piece != 0)
			CHECK_EQ(sfr__ahead_get(a, piece * PIECE - 1, 2, &bytes, NULL), 0);
		sfr__ahead_stop(a);
	}
	sfr__ahead_stop(NULL);
	(void)close(fd);
	dir_remove(dir);
}

static atomic_uint nr_slow_reads;
static ssize_t (*real_pread)(int fd, void *buf, size_t len, off_t off);

static ssize_t slow_pread(int fd, void *buf, size_t len, off_t off)
{
	atomic_fetch_add(&nr_slow_reads, 1);
	(void)usleep(2000);
	return real_pread(fd, buf, len, off);
}

/* A file that was found to be damaged in its first piece is not read to its end. */
static void who_is_stopped_reads_no_further(void)
{
	int fd = memfd_create("long", MFD_CLOEXEC);
	const unsigned char *bytes;
	struct sfr__ahead *a;

	CHECK_EQ(ftruncate(fd, 64 * (off_t)PIECE), 0);
	real_pread = sfr_sys.pread;
	sfr_sys.pread = slow_pread;
	CHECK_EQ(sfr__ahead_start(fd, 64 * PIECE, false, &a), 0);
	CHECK_EQ(sfr__ahead_get(a, 0, 1, &bytes, NULL), 0);
	sfr__ahead_stop(a);
	sfr_sys.pread = real_pread;
	CHECK(atomic_load(&nr_slow_reads) < 16); /* as many as there are slots */
	(void)close(fd);
}

static void what_is_out_of_bounds_is_refused(void)
{
	const char *dir = dir_make(dir_bases[0]);
	int fd = open_content(dir);
	const unsigned char *bytes;
	struct sfr__ahead *a;

	CHECK_EQ(sfr__ahead_start(fd, LEN, false, &a), 0);
	CHECK_EQ(sfr__ahead_get(a, LEN + 1, 0, &bytes, NULL), SFR_ECORRUPT);
	CHECK_EQ(sfr__ahead_get(a, LEN - 1, 2, &bytes, NULL), SFR_ECORRUPT);
	CHECK_EQ(sfr__ahead_get(a, 0, MOST + 1, &bytes, NULL), SFR_ECORRUPT);
	CHECK_EQ(sfr__ahead_get(a, UINT64_MAX, 1, &bytes, NULL), SFR_ECORRUPT);
	CHECK_EQ(sfr__ahead_get(a, PIECE, 1, &bytes, NULL), 0);
	CHECK(!sfr__ahead_can(a, PIECE - 1, LEN)); /* what is past is past: the window reads it */
	walk(a, PIECE, MOST);
	sfr__ahead_stop(a);
	(void)close(fd);
	dir_remove(dir);
}

static void short_reads_interruptions_and_a_refused_o_direct_are_gone_on_with(void)
{
	static const struct sfr_fault faults[] = {
		{ .call = "pread", .nth = 2, .limit = 1 },
		{ .call = "pread", .nth = 1, .sticky = 1, .limit = 70001 },
		{ .call = "pread", .nth = 3, .limit = -3 },
		{ .call = "pread", .nth = 1, .err = EINTR, .limit = -1 },
		{ .call = "pread", .nth = 2, .err = EINVAL, .limit = -1 },
		{ .call = "open", .nth = 1, .err = EINVAL, .limit = -1 },
		{ .call = "open", .nth = 1, .err = ENOENT, .limit = -1 }, /* no /proc */
		{ .call = "thread_create", .nth = 2, .err = EAGAIN, .limit = -1 },
	};
	const char *dir = dir_make(dir_bases[0]);
	int fd = open_content(dir);

	CHECK_EQ(sfr_inject_install(), 0);
	for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++) {
		struct sfr__ahead *a;

		sfr_inject_clear();
		CHECK_EQ(sfr_inject_set(&faults[i]), 0);
		CHECK_EQ(sfr__ahead_start(fd, LEN, true, &a), 0);
		walk(a, 0, MOST);
		CHECK(sfr_inject_hits() > 0);
		sfr__ahead_stop(a);
	}
	sfr_inject_clear();
	sfr_inject_remove();
	(void)close(fd);
	dir_remove(dir);
}

static void a_failure_comes_with_its_piece_and_stays(void)
{
	const char *dir = dir_make(dir_bases[0]);
	int fd = open_content(dir);
	const unsigned char *bytes;
	struct sfr__ahead *a;

	CHECK_EQ(sfr_inject_install(), 0);
	for (unsigned cut = 0; cut < 2; cut++) {
		const struct sfr_fault fault = {
			.call = "pread", .nth = 1, .sticky = 1, .err = EIO, .limit = -1
		};

		if (cut) /* or the file becomes shorter: in the middle of the third piece */
			CHECK_EQ(ftruncate(fd, 2 * PIECE + PIECE / 2), 0);
		CHECK_EQ(sfr__ahead_start(fd, LEN, true, &a), 0);
		CHECK_EQ(sfr__ahead_get(a, 0, 1, &bytes, NULL), 0);
		if (!cut)
			CHECK_EQ(sfr_inject_set(&fault), 0);
		for (int again = 0; again < 3; again++)
			CHECK_EQ(sfr__ahead_get(a, (NR_WHOLE - 1) * PIECE, 1, &bytes, NULL),
				 cut ? SFR_ECORRUPT : -EIO);
		sfr__ahead_stop(a);
		sfr_inject_clear();
	}
	sfr_inject_remove();
	(void)close(fd);
	dir_remove(dir);
}

/* A check of a file that is long enough for threads, with one record bad. */
static struct archive long_archive(void)
{
	struct archive a = archive_torch();

	archive_add(&a, "archive/data/0", content, 100);
	archive_add(&a, "archive/data/1", content, 5 * PIECE + 77);
	archive_add(&a, "archive/data/2", content + 9, PIECE);
	archive_add(&a, "archive/data/3", content, LEN - 6 * PIECE);
	archive_finish(&a);
	return a;
}

static void a_check_finds_what_is_bad_whatever_fails_for_good_or_once(void)
{
	const char *dir = dir_make(dir_bases[0]), *path = dir_path(dir, "long");
	struct archive a = long_archive();
	int fd, before;

	a.buf[a.records[a.nr - 3].data_off + 4 * PIECE] ^= 1;
	file_put(path, a.buf, a.len);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	before = nr_fds();
	FOR_EVERY_FAILURE(run, "*", EIO)
	{
		struct verdict v = check_fd(fd, SFR_CHECK_BYTES | SFR_CHECK_DIRECT);

		/* Without memory, a descriptor or a thread to read ahead, it reads by itself. */
		CHECK(v.rc == 0 ? v.nr_bad == 1 && v.nr_records == a.nr :
				  check_acted(&run) && (v.rc == -EIO || v.rc == -ENOMEM));
		CHECK_EQ(nr_fds(), before);
	}
	sfr_inject_remove();
	(void)close(fd);
	archive_free(&a);
	dir_remove(dir);
}

/* A signal handler forks between two slices, and the child goes on with the check. */
static void a_forked_child_can_end_the_check_and_so_can_the_parent(void)
{
	const char *dir = dir_make(dir_bases[0]), *path = dir_path(dir, "long");
	struct archive a = long_archive();
	struct sfr_check *check;
	int fd, status = -1;
	pid_t child;

	file_put(path, a.buf, a.len);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	CHECK_EQ(sfr_check_new(fd, SFR_CHECK_BYTES | SFR_CHECK_DIRECT, &check), 0);
	for (int i = 0; i < 12; i++)
		CHECK_EQ(sfr_check_run(check, 0), SFR_EAGAIN);
	(void)fflush(stdout);
	child = fork();
	if (child == 0) {
		bool good = sfr_check_run(check, SFR_FOREVER) == 0 && sfr_check_result(check)->ok;

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

int main(void)
{
	make_content();
	RUN(whatever_is_asked_going_forward_is_shown);
	RUN(it_may_be_stopped_at_any_piece);
	RUN(who_is_stopped_reads_no_further);
	RUN(what_is_out_of_bounds_is_refused);
	RUN(short_reads_interruptions_and_a_refused_o_direct_are_gone_on_with);
	RUN(a_failure_comes_with_its_piece_and_stays);
	RUN(a_check_finds_what_is_bad_whatever_fails_for_good_or_once);
	RUN(a_forked_child_can_end_the_check_and_so_can_the_parent);
	free(content);
	return check_done();
}
