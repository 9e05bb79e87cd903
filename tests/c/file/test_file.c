/* The life of one file: its steps, its destinations, and disks that are really full.
 * test_file_faults.c injects failures. */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "fix_save.h"

/* ---- a good life ---- */

static void saves(const char *dir)
{
	const struct sfr_err none = { .index = -1 };
	int fds = nr_fds();
	char name[NAME_MAX + 1];
	struct sfr__file f;
	struct sfr_err err;

	CHECK_EQ(sfr_inject_install(), 0);
	for (int durable = 0; durable <= 1; durable++) {
		save_put_old(dir);
		sfr_inject_clear();
		CHECK_EQ(save_begin(&f, dir, durable, &err), 0);
		CHECK(memcmp(&err, &none, sizeof(err)) == 0);
		CHECK_EQ(f.state, SFR__FILE_DONE);
		CHECK(f.renamed && f.io_mode != SFR_IO_UNKNOWN);
		CHECK((f.io_mode == SFR_IO_BUFFERED) == (f.why_buffered[0] != 0));
		CHECK(save_is_new(dir));
		CHECK_EQ(dir_count(dir, TEMPORARIES, name), 0);
		save_end(&f);
		save_end(&f); /* may be called twice */
		CHECK(save_is_new(dir));
		CHECK_EQ(sfr_inject_count_calls("fdatasync"), durable);
		CHECK_EQ(sfr_inject_count_calls("fsync"), durable);
		CHECK_EQ(nr_fds(), fds);
	}
	sfr_inject_uninstall();
}

TEST(a_save_replaces_the_old_file_and_leaves_nothing_else)
{
	in_each_base(saves);
}

static void has_a_good_temporary(const char *dir)
{
	struct sfr_err err = { .index = -1 };
	char name[NAME_MAX + 1] = "";
	mode_t before = umask(027);
	struct sfr__file f;
	struct stat st;

	memset(&f, 0xa5, sizeof(f)); /* garbage, which init must overwrite */
	CHECK_EQ(sfr__file_init(&f, dir, "a.ckpt", SAVE_LEN, true), 0);
	CHECK(f.tmp.name[0] == '\0' && atomic_load(&f.progress_ns) == 0);
	CHECK_EQ(sfr__file_open(&f, &err), 0);
	CHECK_EQ(dir_count(dir, TEMPORARIES, name), 1);
	CHECK(strcmp(name, f.tmp.name) == 0);
	CHECK(!strstr(name, ".ckpt") && !strstr(name, ".pt"));
	CHECK(strcmp(name + strlen(name) - 4, ".tmp") == 0);
	CHECK(sfr__tmp_may_be_live(dir_path(dir, name), name));
	CHECK(lstat(dir_path(dir, name), &st) == 0 && (st.st_mode & 07777) == 0640);
	CHECK(!file_exists(dir_path(dir, "a.ckpt")));
	sfr__file_fini(&f); /* without a commit */
	CHECK_EQ(dir_count(dir, "", NULL), 0);
	(void)umask(before);
}

TEST(the_temporary_is_hidden_locked_and_has_the_mode_of_open)
{
	in_each_base(has_a_good_temporary);
}

TEST(a_file_of_any_length_is_saved)
{
	const char *dir = dir_make("/var/tmp");
	uint32_t lens[] = { 0, 1, 4095, 4097, SAVE_LEN - 1, SAVE_LEN };
	struct sfr_err err = { .index = -1 };
	struct sfr__file f;

	for (int i = 0; i < 6; i++) {
		CHECK_EQ(sfr__file_init(&f, dir, "a", lens[i], true), 0);
		CHECK_EQ(sfr__file_open(&f, &err), 0);
		CHECK(f.io_mode == SFR_IO_BUFFERED || lens[i] != 0);
		/* Written in whole pages, so the last one extends beyond the end. */
		CHECK_EQ(sfr__file_write(&f, save_new, sfr__round_up(lens[i], SFR_PAGE), 0, &err),
			 0);
		CHECK_EQ(sfr__file_sync(&f, &err), 0);
		CHECK_EQ(sfr__file_commit(&f, &err), 0);
		sfr__file_fini(&f);
		CHECK(file_is(dir_path(dir, "a"), save_new, lens[i]));
	}
	dir_remove(dir);
}

/* ---- calls that may hang ---- */

static struct sfr__file *asking;
static struct sfr_sys real;
static unsigned nr_calls, nr_without_time;

static void count_call(void)
{
	nr_calls++;
	if (sfr__file_unanswered_since(asking) == 0)
		nr_without_time++;
}

static int asked_open(int dir, const char *name, int flags, mode_t mode)
{
	count_call();
	return real.open(dir, name, flags, mode);
}

static ssize_t asked_pwrite(int fd, const void *buf, size_t len, off_t off)
{
	count_call();
	return real.pwrite(fd, buf, len, off);
}

static int asked_fallocate(int fd, int mode, off_t off, off_t len)
{
	count_call();
	return real.fallocate(fd, mode, off, len);
}

static int asked_ftruncate(int fd, off_t len)
{
	count_call();
	return real.ftruncate(fd, len);
}

static int asked_fdatasync(int fd)
{
	count_call();
	return real.fdatasync(fd);
}

static int asked_unlink(int dir, const char *name)
{
	count_call();
	return real.unlink(dir, name);
}

/* The log's thread does the same for the rename and the directory's sync. */
TEST(every_call_that_may_hang_is_recorded_while_it_runs)
{
	const char *dir = dir_make("/var/tmp");
	struct sfr_err err = { .index = -1 };
	struct sfr__file f;

	asking = &f;
	real = sfr_sys;
	CHECK_EQ(sfr__file_init(&f, dir, "a", 4097, true), 0);
	sfr_sys.open = asked_open;
	sfr_sys.pwrite = asked_pwrite;
	sfr_sys.fallocate = asked_fallocate;
	sfr_sys.ftruncate = asked_ftruncate;
	sfr_sys.fdatasync = asked_fdatasync;
	sfr_sys.unlink = asked_unlink;
	CHECK_EQ(sfr__file_open(&f, &err), 0);
	CHECK_EQ(sfr__file_unanswered_since(&f), 0);
	CHECK_EQ(sfr__file_write(&f, save_new, 8192, 0, &err), 0);
	CHECK_EQ(sfr__file_sync(&f, &err), 0);
	CHECK_EQ(sfr__file_unanswered_since(&f), 0);
	sfr__file_fini(&f); /* without a commit */
	sfr_sys = real;
	CHECK(nr_calls >= 7);
	CHECK_EQ(nr_without_time, 0);
	dir_remove(dir);
}

/* ---- steps out of order ---- */

TEST(a_step_out_of_order_is_refused_and_does_nothing)
{
	const char *dir = dir_make("/var/tmp");
	struct sfr_err err = { .index = -1 };
	struct sfr__file f;

	CHECK_EQ(sfr_inject_install(), 0);
	save_put_old(dir);
	CHECK_EQ(sfr__file_init(&f, dir, "a.ckpt", SAVE_LEN, true), 0);
	sfr_inject_clear();
	CHECK_EQ(sfr__file_write(&f, save_new, SAVE_LEN, 0, &err), SFR_ESTATE);
	CHECK_EQ(sfr__file_sync(&f, &err), SFR_ESTATE);
	CHECK_EQ(sfr__file_commit(&f, &err), SFR_ESTATE);
	CHECK_EQ(sfr_inject_count_calls("*"), 0);
	CHECK_EQ(sfr__file_open(&f, &err), 0);
	sfr_inject_clear();
	CHECK_EQ(sfr__file_open(&f, &err), SFR_ESTATE);
	CHECK_EQ(sfr__file_commit(&f, &err), SFR_ESTATE); /* not before the sync */
	CHECK_EQ(sfr_inject_count_calls("*"), 0);
	CHECK_EQ(save_write_all(&f, &err), 0);
	CHECK_EQ(sfr__file_sync(&f, &err), 0);
	sfr_inject_clear();
	CHECK_EQ(sfr__file_sync(&f, &err), SFR_ESTATE);
	CHECK_EQ(sfr__file_write(&f, save_new, SAVE_LEN, 0, &err), SFR_ESTATE);
	CHECK_EQ(sfr_inject_count_calls("*"), 0);
	CHECK_EQ(sfr__file_commit(&f, &err), 0);
	sfr_inject_clear();
	CHECK_EQ(sfr__file_commit(&f, &err), SFR_ESTATE);
	CHECK_EQ(sfr_inject_count_calls("*"), 0);
	CHECK_EQ(err.code, SFR_ESTATE); /* the first error is kept */
	CHECK_EQ(err.phase, SFR_PHASE_WRITE);
	sfr__file_fini(&f);
	sfr_inject_uninstall();
	dir_remove(dir);
}

/* ---- several writers ---- */

#define NR_WRITERS 4
#define BIG_LEN (20u << 20) /* more than one slice for each writer */

struct writer {
	struct sfr__file *f;
	const char *bytes;
	uint64_t off;
	int rc;
};

static void *write_part(void *arg)
{
	struct writer *w = arg;
	struct sfr_err err = { .index = -1 };

	w->rc = sfr__file_write(w->f, w->bytes + w->off, BIG_LEN / NR_WRITERS, w->off, &err);
	return NULL;
}

static void takes_several_writers(const char *dir)
{
	struct sfr_fault half = { "pwrite", 3, 0, 0, -2, 0 };
	struct sfr_fault odd = { "pwrite", 5, 0, 0, 4097, 0 };
	struct sfr_fault interrupted = { "pwrite", 4, 0, EINTR, -1, 0 };
	struct sfr_err err = { .index = -1 };
	struct writer writers[NR_WRITERS];
	pthread_t threads[NR_WRITERS];
	char *bytes = aligned_alloc(SFR_PAGE, BIG_LEN);
	struct sfr__file f;

	if (!CHECK(bytes))
		return;
	for (uint32_t i = 0; i < BIG_LEN; i++)
		bytes[i] = (char)(i * 2654435761u >> 20);
	CHECK_EQ(sfr__file_init(&f, dir, "big", BIG_LEN, true), 0);
	CHECK_EQ(sfr__file_open(&f, &err), 0);
	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr_inject_add_fault(&half), 0);
	CHECK_EQ(sfr_inject_add_fault(&odd), 0);
	CHECK_EQ(sfr_inject_add_fault(&interrupted), 0);
	for (unsigned i = 0; i < NR_WRITERS; i++) {
		writers[i] = (struct writer){ &f, bytes, (uint64_t)i * (BIG_LEN / NR_WRITERS), -1 };
		CHECK_EQ(pthread_create(&threads[i], NULL, write_part, &writers[i]), 0);
	}
	for (unsigned i = 0; i < NR_WRITERS; i++) {
		CHECK_EQ(pthread_join(threads[i], NULL), 0);
		CHECK_EQ(writers[i].rc, 0);
	}
	CHECK(sfr_inject_count_calls("pwrite") > NR_WRITERS * 2); /* slices, and parts of them */
	sfr_inject_uninstall();
	CHECK_EQ(sfr__file_sync(&f, &err), 0);
	CHECK_EQ(sfr__file_commit(&f, &err), 0);
	sfr__file_fini(&f);
	CHECK(file_is(dir_path(dir, "big"), bytes, BIG_LEN));
	free(bytes);
}

TEST(several_threads_write_one_file)
{
	in_each_base(takes_several_writers);
}

/* ---- destinations ---- */

TEST(special_files_are_refused_and_links_replaced)
{
	const char *dir = dir_make("/var/tmp"), *path = dir_path(dir, "a.ckpt");
	struct sfr__file f;
	struct sfr_err err;
	struct stat st;

	CHECK_EQ(mkdir(path, 0700), 0);
	CHECK_EQ(save_begin(&f, dir, true, &err), -EISDIR);
	CHECK_EQ(err.phase, SFR_PHASE_RENAME);
	save_end(&f);
	CHECK_EQ(rmdir(path), 0);

	CHECK_EQ(mkfifo(path, 0600), 0);
	CHECK_EQ(save_begin(&f, dir, true, &err), -EINVAL);
	CHECK_EQ(err.phase, SFR_PHASE_RENAME);
	CHECK(strstr(err.note, "regular"));
	save_end(&f);
	CHECK(lstat(path, &st) == 0 && S_ISFIFO(st.st_mode));
	CHECK_EQ(unlink(path), 0);

	file_put(dir_path(dir, "target"), "target", 6);
	CHECK_EQ(symlink("target", path), 0);
	save_cleanly(dir);
	CHECK(lstat(path, &st) == 0 && S_ISREG(st.st_mode));
	CHECK(file_is(dir_path(dir, "target"), "target", 6));
	CHECK_EQ(dir_count(dir, "", NULL), 2);
	dir_remove(dir);

	CHECK_EQ(save_begin(&f, dir, true, &err), -ENOENT); /* the directory is gone */
	CHECK_EQ(err.phase, SFR_PHASE_OPEN);
	save_end(&f);
}

TEST(too_long_name_is_reported)
{
	const char *dir = dir_make("/var/tmp");
	struct sfr_err err = { .index = -1 };
	struct sfr__file f;
	char name[NAME_MAX + 2];

	memset(name, 'n', sizeof(name));
	name[NAME_MAX + 1] = 0;
	CHECK_EQ(sfr__file_init(&f, dir, name, 0, true), 0);
	CHECK_EQ(sfr__file_open(&f, &err), 0);
	CHECK_EQ(sfr__file_sync(&f, &err), 0);
	CHECK_EQ(sfr__file_commit(&f, &err), -ENAMETOOLONG);
	sfr__file_fini(&f);
	name[NAME_MAX] = 0; /* the longest name; the temporary's name does not depend on it */
	err = (struct sfr_err){ .index = -1 };
	CHECK_EQ(sfr__file_init(&f, dir, name, 0, true), 0);
	CHECK_EQ(sfr__file_open(&f, &err), 0);
	CHECK_EQ(sfr__file_sync(&f, &err), 0);
	CHECK_EQ(sfr__file_commit(&f, &err), 0);
	sfr__file_fini(&f);
	CHECK_EQ(dir_count(dir, "", NULL), 1);
	dir_remove(dir);
}

/* ---- a real full disk and a real limit on file sizes, each in a child ---- */

#define CHILD_SKIPS 77

/* Returns 0, 1 or CHILD_SKIPS. */
static int run_in_child(void (*body)(const char *dir), const char *dir)
{
	int failed = check__nr_failed, status = -1;
	pid_t pid = fork();

	if (pid == 0) {
		body(dir);
		_exit(check__nr_failed != failed);
	}
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

static void put_line(const char *path, const char *line)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);

	if (fd < 0 || write(fd, line, strlen(line)) < 0)
		_exit(CHILD_SKIPS);
	(void)close(fd);
}

/* Enters a new mount namespace; without root's rights, inside a user namespace in which this
 * process is root. */
static void enter_mount_namespace(void)
{
	char uid[48], gid[48];

	(void)snprintf(uid, sizeof(uid), "0 %u 1", (unsigned)geteuid());
	(void)snprintf(gid, sizeof(gid), "0 %u 1", (unsigned)getegid());
	if (unshare(CLONE_NEWNS) == 0)
		return;
	if (unshare(CLONE_NEWUSER | CLONE_NEWNS) < 0)
		_exit(CHILD_SKIPS);
	put_line("/proc/self/setgroups", "deny");
	put_line("/proc/self/uid_map", uid);
	put_line("/proc/self/gid_map", gid);
}

static void saves_on_small_disks(const char *dir)
{
	char options[32];
	bool fitted = false;

	enter_mount_namespace();
	if (mount("none", "/", "none", MS_REC | MS_PRIVATE, NULL) < 0)
		_exit(CHILD_SKIPS);
	CHECK_EQ(sfr_inject_install(), 0);
	for (unsigned pages = 2; pages <= SAVE_LEN / SFR_PAGE + 3; pages++) {
		for (int reserves = 0; reserves <= 1; reserves++) {
			struct sfr_fault no_room = { "fallocate", 1, 1, EOPNOTSUPP, -1, 0 };
			struct sfr__file f;
			struct sfr_err err;
			int rc;

			(void)snprintf(options, sizeof(options), "size=%u", pages * SFR_PAGE);
			if (mount("none", dir, "tmpfs", 0, options) < 0)
				_exit(CHILD_SKIPS);
			sfr_inject_clear();
			if (!reserves)
				CHECK_EQ(sfr_inject_add_fault(&no_room), 0);
			save_put_old(dir); /* takes one page */
			rc = save_begin(&f, dir, true, &err);
			save_end(&f);
			if (pages < SAVE_LEN / SFR_PAGE + 1) {
				CHECK_EQ(rc, -ENOSPC);
				CHECK(err.phase ==
				      (reserves ? SFR_PHASE_ALLOCATE : SFR_PHASE_WRITE));
				CHECK(save_is_old(dir));
				CHECK_EQ(dir_count(dir, "", NULL), 1);
			} else {
				CHECK_EQ(rc, 0);
				CHECK(save_is_new(dir));
				fitted = true;
			}
			CHECK_EQ(umount(dir), 0);
		}
	}
	CHECK(fitted);
	sfr_inject_uninstall();
}

TEST(full_disk_is_reported_and_the_old_file_stays)
{
	char dir[PATH_MAX];
	int rc;

	(void)snprintf(dir, sizeof(dir), "%s", dir_make("/var/tmp"));
	rc = run_in_child(saves_on_small_disks, dir);
	dir_remove(dir);
	if (rc == CHILD_SKIPS)
		check_skip("mounting a tmpfs is not permitted here");
	else
		CHECK_EQ(rc, 0);
}

static void saves_under_a_limit(const char *dir)
{
	struct sfr_fault no_room = { "fallocate", 1, 1, EOPNOTSUPP, -1, 0 };
	struct rlimit limit = { 3 * SFR_PAGE, RLIM_INFINITY };
	struct sfr__file f;
	struct sfr_err err;
	sigset_t set;

	(void)sigemptyset(&set);
	(void)sigaddset(&set, SIGXFSZ);
	CHECK_EQ(sigprocmask(SIG_BLOCK, &set, NULL), 0); /* as in every thread of the core */
	save_put_old(dir);
	CHECK_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(save_begin(&f, dir, true, &err), -EFBIG);
	CHECK_EQ(err.phase, SFR_PHASE_ALLOCATE);
	save_end(&f);
	CHECK(save_is_old(dir));
	CHECK_EQ(sfr_inject_add_fault(&no_room), 0);
	CHECK_EQ(save_begin(&f, dir, true, &err), -EFBIG);
	CHECK_EQ(err.phase, SFR_PHASE_WRITE);
	save_end(&f);
	CHECK(save_is_old(dir));
	CHECK_EQ(dir_count(dir, "", NULL), 1);
	limit.rlim_cur = SAVE_LEN;
	CHECK_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
	save_cleanly(dir);
	sfr_inject_uninstall();
}

static void limited(const char *dir)
{
	CHECK_EQ(run_in_child(saves_under_a_limit, dir), 0);
}

TEST(file_size_limit_is_reported)
{
	in_each_base(limited);
}

BEGIN
{
	save_fill();
	return true;
}
