/* The life of one file under injected failures: every call fails, once or permanently, and every
 * write is short. Most arrows of the diagram in file.c are failures, so it is checked here. */
#include <errno.h>
#include <sys/wait.h>

#include "fix_save.h"

/* ---- given up ---- */

TEST(abandoning_a_file_in_any_state_keeps_the_old_one)
{
	const char *dir = dir_make("/var/tmp");
	struct sfr_err err = { .index = -1 };
	int fds = nr_fds();
	struct sfr__file f;

	save_put_old(dir);
	for (int steps = 0; steps <= 3; steps++) {
		memset(&f, 0, sizeof(f));
		CHECK_EQ(SAVE_STEP(&f, sfr__file_init(&f, dir, "a.ckpt", SAVE_LEN, true)), 0);
		if (steps > 0)
			CHECK_EQ(SAVE_STEP(&f, sfr__file_open(&f, &err)), 0);
		if (steps > 1)
			CHECK_EQ(save_write_all(&f, &err), 0);
		if (steps > 2)
			CHECK_EQ(SAVE_STEP(&f, sfr__file_sync(&f, &err)), 0);
		save_end(&f);
		CHECK(save_is_old(dir));
		CHECK_EQ(dir_count(dir, "", NULL), 1);
		CHECK_EQ(nr_fds(), fds);
	}
	memset(&f, 0, sizeof(f));
	sfr__file_fini(&f); /* never begun: fini must not close descriptor 0 */
	CHECK(fcntl(0, F_GETFD) >= 0 || fds == 0);
	dir_remove(dir);
}

/* ---- one call fails ---- */

struct case_ {
	const char *call;
	int err;
	uint64_t nth;
	bool durable;
	int rc; /* the result of the save */
	enum sfr_phase phase;
	bool is_new;  /* whether the new file is at the path */
	int fallback; /* which fallback sentence is set, or -1 */
};

/* The calls of one save in a directory with one file. The opens are of the directory and the
 * temporary. fstat and lstat belong to the check after the lock, and the second lstat to the
 * destination. */
static const struct case_ cases[] = {
	{ "opendir", EIO, 1, true, 0, SFR_PHASE_NONE, true, -1 },
	{ "open", EACCES, 1, true, -EACCES, SFR_PHASE_OPEN, false, -1 },
	{ "open", EMFILE, 1, true, -EMFILE, SFR_PHASE_OPEN, false, -1 },
	{ "open", EINTR, 1, true, 0, SFR_PHASE_NONE, true, -1 },
	{ "open", EACCES, 2, true, -EACCES, SFR_PHASE_OPEN, false, -1 },
	{ "open", EROFS, 2, true, -EROFS, SFR_PHASE_OPEN, false, -1 },
	{ "open", ENOSPC, 2, true, -ENOSPC, SFR_PHASE_OPEN, false, -1 },
	{ "open", EINTR, 2, true, 0, SFR_PHASE_NONE, true, -1 },
	{ "open", EEXIST, 2, true, 0, SFR_PHASE_NONE, true, -1 }, /* tries another name */
	{ "flock", EIO, 1, true, -EIO, SFR_PHASE_LOCK, false, -1 },
	{ "flock", EINTR, 1, true, 0, SFR_PHASE_NONE, true, -1 },
	{ "flock", EWOULDBLOCK, 1, true, 0, SFR_PHASE_NONE, true, -1 }, /* a cleaner has the lock */
	{ "flock", ENOLCK, 1, true, 0, SFR_PHASE_NONE, true, -1 },
	{ "flock", ENOTSUP, 1, true, 0, SFR_PHASE_NONE, true, -1 },
	{ "flock", ENOSYS, 1, true, 0, SFR_PHASE_NONE, true, -1 },
	{ "fstat", EIO, 1, true, -EIO, SFR_PHASE_LOCK, false, -1 },
	{ "lstat", EIO, 1, true, -EIO, SFR_PHASE_LOCK, false, -1 },
	/* a cleaner has removed the file */
	{ "lstat", ENOENT, 1, true, 0, SFR_PHASE_NONE, true, -1 },
	{ "set_flags", EINVAL, 1, true, 0, SFR_PHASE_NONE, true, 0 },
	{ "set_flags", EIO, 1, true, 0, SFR_PHASE_NONE, true, 0 },
	{ "pwrite", EINVAL, 1, true, 0, SFR_PHASE_NONE, true, 0 },
	{ "pwrite", EOPNOTSUPP, 1, true, 0, SFR_PHASE_NONE, true, 0 },
	{ "pwrite", EINTR, 1, true, 0, SFR_PHASE_NONE, true, -1 },
	{ "pwrite", EIO, 1, true, -EIO, SFR_PHASE_WRITE, false, -1 },
	{ "pwrite", ENOSPC, 1, true, -ENOSPC, SFR_PHASE_WRITE, false, -1 },
	{ "pwrite", EDQUOT, 1, true, -EDQUOT, SFR_PHASE_WRITE, false, -1 },
	{ "fallocate", ENOSPC, 1, true, -ENOSPC, SFR_PHASE_ALLOCATE, false, -1 },
	{ "fallocate", EDQUOT, 1, true, -EDQUOT, SFR_PHASE_ALLOCATE, false, -1 },
	{ "fallocate", EFBIG, 1, true, -EFBIG, SFR_PHASE_ALLOCATE, false, -1 },
	{ "fallocate", EIO, 1, true, -EIO, SFR_PHASE_ALLOCATE, false, -1 },
	{ "fallocate", EOPNOTSUPP, 1, true, 0, SFR_PHASE_NONE, true, -1 },
	{ "fallocate", ENOSYS, 1, true, 0, SFR_PHASE_NONE, true, -1 },
	{ "fallocate", EINVAL, 1, true, 0, SFR_PHASE_NONE, true, -1 },
	{ "fallocate", EINTR, 1, true, 0, SFR_PHASE_NONE, true, -1 },
	{ "pwrite", EIO, 2, true, -EIO, SFR_PHASE_WRITE, false, -1 },
	{ "pwrite", ENOSPC, 4, true, -ENOSPC, SFR_PHASE_WRITE, false, -1 },
	{ "pwrite", EINTR, 3, true, 0, SFR_PHASE_NONE, true, -1 },
	{ "fdatasync", EIO, 1, true, -EIO, SFR_PHASE_SYNC, false, -1 },
	{ "fdatasync", EINTR, 1, true, -EINTR, SFR_PHASE_SYNC, false, -1 },
	{ "fdatasync", ENOSPC, 1, true, -ENOSPC, SFR_PHASE_SYNC, false, -1 },
	{ "lstat", EIO, 2, true, 0, SFR_PHASE_NONE, true, -1 }, /* was its directory replaced? */
	{ "lstat", EIO, 3, true, -EIO, SFR_PHASE_RENAME, false, -1 },
	{ "rename", EIO, 1, true, -EIO, SFR_PHASE_RENAME, false, -1 },
	{ "rename", EACCES, 1, true, -EACCES, SFR_PHASE_RENAME, false, -1 },
	{ "fsync", EIO, 1, true, -EIO, SFR_PHASE_SYNC_DIR, true, -1 },
	{ "fsync", EINTR, 1, true, -EINTR, SFR_PHASE_SYNC_DIR, true, -1 },
	{ "fsync", EINVAL, 1, true, 0, SFR_PHASE_NONE, true, 1 },
	{ "fsync", ENOTSUP, 1, true, 0, SFR_PHASE_NONE, true, 1 },
	{ "close", EIO, 1, true, 0, SFR_PHASE_NONE, true, -1 },
	{ "close", EIO, 2, true, 0, SFR_PHASE_NONE, true, -1 },
	{ "close", EDQUOT, 1, false, -EDQUOT, SFR_PHASE_WRITE, true, -1 },
};

static void check_failures(const char *dir)
{
	int fds = nr_fds();

	save_cleanly(dir); /* reads the boot id, so that later saves do not */
	CHECK_EQ(sfr_inject_install(), 0);
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		const struct case_ *c = &cases[i];
		struct sfr_fault fault = { c->call, c->nth, 0, c->err, -1, 0 };
		int failed = check__nr_failed;
		struct sfr__file f;
		struct sfr_err err;

		save_put_old(dir);
		sfr_inject_clear();
		CHECK_EQ(sfr_inject_add_fault(&fault), 0);
		CHECK_EQ(save_begin(&f, dir, c->durable, &err), c->rc);
		CHECK_EQ(err.code, c->rc);
		CHECK_EQ(err.phase, c->phase);
		CHECK_EQ(f.renamed, c->is_new);
		save_end(&f);
		CHECK_EQ(sfr_inject_hits(), 1);
		CHECK(c->is_new ? save_is_new(dir) : save_is_old(dir));
		CHECK_EQ(dir_count(dir, "", NULL), 1);
		CHECK_EQ(nr_fds(), fds);
		CHECK(sfr_inject_count_calls("fdatasync") <= 1 &&
		      sfr_inject_count_calls("fsync") <= 1);
		if (c->fallback >= 0)
			CHECK(strstr(c->fallback == SFR_FALLBACK_BUFFERED ? f.why_buffered :
									    f.why_unsynced,
				     sfr_code_name(-c->err)));
		CHECK(c->fallback != SFR_FALLBACK_BUFFERED || f.io_mode == SFR_IO_BUFFERED);
		if (check__nr_failed != failed)
			(void)fprintf(stderr, "  (%s %s, call %d)\n", c->call,
				      sfr_code_name(-c->err), (int)c->nth);
	}
	sfr_inject_uninstall();
}

TEST(failing_call_reports_its_phase_and_leaves_a_complete_file)
{
	in_each_base(check_failures);
}

static int nr_opens_at_first_write, nr_opens;
static struct sfr_sys unwatched;

static int watched_open(int at, const char *name, int flags, mode_t mode)
{
	nr_opens++;
	return unwatched.open(at, name, flags, mode);
}

static ssize_t watched_pwrite(int fd, const void *buf, size_t len, off_t off)
{
	if (nr_opens_at_first_write == 0)
		nr_opens_at_first_write = nr_opens;
	return unwatched.pwrite(fd, buf, len, off);
}

/* The table of descriptors may become full meanwhile, and the directory may change its
 * permissions or path. None of this can prevent the sync of the new file. */
TEST(no_file_is_opened_after_the_first_write)
{
	const char *dir = dir_make("/var/tmp");
	char moved[PATH_MAX];
	struct sfr_err err = { .index = -1 };
	struct sfr__file f = { 0 };

	CHECK(snprintf(moved, sizeof(moved), "%s-moved", dir) < PATH_MAX);
	save_cleanly(dir);
	unwatched = sfr_sys;
	sfr_sys.open = watched_open;
	sfr_sys.pwrite = watched_pwrite;
	CHECK_EQ(SAVE_STEP(&f, sfr__file_init(&f, dir, "a.ckpt", SAVE_LEN, true)), 0);
	CHECK_EQ(SAVE_STEP(&f, sfr__file_open(&f, &err)), 0);
	CHECK_EQ(rename(dir, moved), 0);
	CHECK_EQ(save_write_all(&f, &err), 0);
	CHECK_EQ(SAVE_STEP(&f, sfr__file_sync(&f, &err)), 0);
	CHECK_EQ(SAVE_STEP(&f, sfr__file_commit(&f, &err)), 0);
	save_end(&f);
	sfr_sys = unwatched;
	CHECK(nr_opens_at_first_write > 0);
	CHECK_EQ(nr_opens, nr_opens_at_first_write);
	CHECK(save_is_new(moved));
	dir_remove(moved);
}

/* Runs as nobody, because root may read everything. */
static void saves_where_nobody_may_read(const char *dir)
{
	struct sfr_err err;
	struct sfr__file f;

	if (setgid(65534) < 0 || setuid(65534) < 0)
		_exit(77);
	CHECK_EQ(save_begin(&f, dir, true, &err), -EACCES);
	CHECK_EQ(err.phase, SFR_PHASE_OPEN);
	CHECK(!f.renamed);
	save_end(&f);
	CHECK_EQ(save_begin(&f, dir, false, &err), 0);
	save_end(&f);
	CHECK(save_is_new(dir));
}

TEST(unreadable_directory_is_refused_only_for_durable_saves)
{
	const char *dir = dir_make("/var/tmp");
	int status = -1, failed = check__nr_failed;
	pid_t pid;

	CHECK_EQ(chmod(dir, 0333), 0);
	pid = fork();
	if (pid == 0) {
		saves_where_nobody_may_read(dir);
		_exit(check__nr_failed != failed);
	}
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	CHECK(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 77));
	if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
		(void)printf(" (not shown: this user cannot become nobody)");
	dir_remove(dir);
}

TEST(open_fails_if_direct_mode_fails_and_cannot_be_reset)
{
	struct sfr_fault refused = { "pwrite", 1, 0, EINVAL, -1, 0 };
	struct sfr_fault stuck = { "set_flags", 2, 0, EIO, -1, 0 };
	const char *dir = dir_make("/var/tmp");
	struct sfr__file f;
	struct sfr_err err;

	save_put_old(dir);
	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr_inject_add_fault(&refused), 0);
	CHECK_EQ(sfr_inject_add_fault(&stuck), 0);
	CHECK_EQ(save_begin(&f, dir, true, &err), -EIO);
	CHECK_EQ(err.phase, SFR_PHASE_WRITE);
	save_end(&f);
	sfr_inject_uninstall();
	CHECK(save_is_old(dir));
	dir_remove(dir);
}

/* ---- every call fails, once and from then on ---- */

static void survives_every_failure(const char *dir)
{
	static const int errors[] = { EIO, ENOSPC, EDQUOT, EINTR, EACCES, EROFS, EINVAL, EAGAIN };
	/* Real syncs take long, so a real disk gets only the errors that disks have. */
	size_t nr_errors =
		strncmp(dir, "/dev/shm", 8) == 0 ? sizeof(errors) / sizeof(errors[0]) : 2;
	int fds = nr_fds();

	save_cleanly(dir);
	for (size_t e = 0; e < nr_errors; e++) {
		for (int durable = 0; durable <= 1; durable++) {
			FOR_EVERY_FAILURE(run, "*", errors[e])
			{
				struct sfr__file f;
				struct sfr_err err;
				int rc;

				save_put_old(dir);
				rc = save_begin(&f, dir, durable, &err);
				save_end(&f);
				CHECK(sfr_inject_count_calls("fdatasync") <= 1);
				CHECK(sfr_inject_count_calls("fsync") <= 1);
				CHECK_EQ(nr_fds(), fds);
				check_end_fault(&run);

				CHECK(f.renamed ? save_is_new(dir) : save_is_old(dir));
				CHECK(rc == 0 ? f.renamed : check_acted(&run));
				/* An -ENOMEM of sfr__file_init has no phase. */
				CHECK(rc == err.code || (rc == -ENOMEM && err.code == 0));
				CHECK(rc == 0 || rc == -errors[e] || rc == -ENOMEM);
				if (rc != 0 && f.renamed)
					CHECK(err.phase ==
					      (durable ? SFR_PHASE_SYNC_DIR : SFR_PHASE_WRITE));
				save_cleanly(dir); /* and removes what a failed unlink has left */
				CHECK_EQ(nr_fds(), fds);
			}
		}
	}
}

TEST(any_failing_call_leaves_old_or_new_file_and_the_next_save_works)
{
	in_each_base(survives_every_failure);
}

/* ---- short writes ---- */

static void continues_after_short_writes(const char *dir)
{
	/* Bytes that a write transfers; -2: half of those asked for, -3: all but one. */
	static const int64_t limits[] = { 1, 100, SFR_PAGE, -2, -3 };
	struct sfr_fault interrupted = { "pwrite", 3, 0, EINTR, -1, 0 };
	struct sfr__file f;
	struct sfr_err err;

	CHECK_EQ(sfr_inject_install(), 0);
	for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
		for (uint64_t nth = 1; nth < 8; nth++) {
			struct sfr_fault shorter = { "pwrite", nth, 0, 0, limits[i], 0 };
			struct sfr_fault again = { "pwrite", nth + 1, 0, 0, limits[i], 0 };

			save_put_old(dir);
			sfr_inject_clear();
			CHECK_EQ(sfr_inject_add_fault(&shorter), 0);
			CHECK_EQ(sfr_inject_add_fault(&again), 0);
			CHECK_EQ(sfr_inject_add_fault(&interrupted), 0);
			CHECK_EQ(save_begin(&f, dir, true, &err), 0);
			save_end(&f);
			CHECK(save_is_new(dir));
		}
	}
	sfr_inject_uninstall();
}

TEST(short_write_is_continued)
{
	in_each_base(continues_after_short_writes);
}

static void ends_without_progress(const char *dir)
{
	struct sfr_fault nothing = { "pwrite", 2, 0, 0, 0, 0 };
	struct sfr_fault crumbs = { "pwrite", 2, 1, 0, 1, 0 };
	struct sfr_fault interrupted = { "pwrite", 2, 1, EINTR, -1, 0 };
	struct sfr__file f;
	struct sfr_err err;
	int rc;

	save_put_old(dir);
	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr_inject_add_fault(&nothing), 0);
	CHECK_EQ(save_begin(&f, dir, true, &err), -EIO);
	CHECK_EQ(err.phase, SFR_PHASE_WRITE);
	save_end(&f);
	CHECK(save_is_old(dir));
	sfr_inject_clear();

	CHECK_EQ(sfr_inject_add_fault(&interrupted), 0);
	CHECK_EQ(save_begin(&f, dir, true, &err), -EINTR);
	CHECK_EQ(err.phase, SFR_PHASE_WRITE);
	save_end(&f);
	CHECK(save_is_old(dir));
	sfr_inject_clear();

	/* One byte at a time is slow but progress. With O_DIRECT it never completes a page. */
	CHECK_EQ(sfr_inject_add_fault(&crumbs), 0);
	rc = save_begin(&f, dir, true, &err);
	CHECK_EQ(rc, f.io_mode == SFR_IO_DIRECT ? -EIO : 0);
	save_end(&f);
	CHECK(rc == 0 ? save_is_new(dir) : save_is_old(dir));
	sfr_inject_uninstall();
}

TEST(a_write_without_progress_ends_with_an_error)
{
	struct sfr_fault no_direct = { "set_flags", 1, 1, EINVAL, -1, 0 };
	struct sfr_fault crumbs = { "pwrite", 1, 1, 0, 1, 0 };
	char dir[PATH_MAX];
	struct sfr__file f;
	struct sfr_err err;

	in_each_base(ends_without_progress);

	(void)snprintf(dir, sizeof(dir), "%s", dir_make("/dev/shm"));
	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr_inject_add_fault(&no_direct), 0);
	CHECK_EQ(sfr_inject_add_fault(&crumbs), 0);
	CHECK_EQ(save_begin(&f, dir, true, &err), 0);
	CHECK_EQ(sfr_inject_count_calls("pwrite"), SAVE_LEN);
	save_end(&f);
	CHECK(save_is_new(dir));
	sfr_inject_uninstall();
	dir_remove(dir);
}

/* ---- the diagram ---- */

TEST(every_state_change_of_the_diagram_was_tested)
{
	static const enum sfr__file_state arrows[][2] = {
		{ SFR__FILE_NONE, SFR__FILE_NAMED },    { SFR__FILE_NAMED, SFR__FILE_OPEN },
		{ SFR__FILE_OPEN, SFR__FILE_OPEN },     { SFR__FILE_OPEN, SFR__FILE_SYNCED },
		{ SFR__FILE_SYNCED, SFR__FILE_DONE },   { SFR__FILE_SYNCED, SFR__FILE_RENAMED },
		{ SFR__FILE_NAMED, SFR__FILE_BROKEN },  { SFR__FILE_OPEN, SFR__FILE_BROKEN },
		{ SFR__FILE_SYNCED, SFR__FILE_BROKEN }, { SFR__FILE_NAMED, SFR__FILE_NONE },
		{ SFR__FILE_OPEN, SFR__FILE_NONE },     { SFR__FILE_SYNCED, SFR__FILE_NONE },
		{ SFR__FILE_RENAMED, SFR__FILE_NONE },  { SFR__FILE_DONE, SFR__FILE_NONE },
		{ SFR__FILE_BROKEN, SFR__FILE_NONE },   { SFR__FILE_NONE, SFR__FILE_NONE },
	};
	size_t nr = sizeof(arrows) / sizeof(arrows[0]);

	for (size_t i = 0; i < nr; i++)
		if (!CHECK(save_arrows[arrows[i][0]][arrows[i][1]]))
			(void)fprintf(stderr, "  (%d to %d)\n", arrows[i][0], arrows[i][1]);
	for (size_t i = 0; i < nr; i++)
		save_arrows[arrows[i][0]][arrows[i][1]] = false;
	for (int from = 0; from <= SFR__FILE_BROKEN; from++)
		for (int to = 0; to <= SFR__FILE_BROKEN; to++)
			CHECK(!save_arrows[from][to]); /* no other arrow was taken */
}

BEGIN
{
	save_fill();
	return true;
}
