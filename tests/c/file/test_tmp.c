/* Temporaries: dead ones are removed; live ones and those of unknown state are kept. */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>

#include "fix_save.h"

static char dir[PATH_MAX]; /* the directory of the running test */
static struct sfr_sys plain;

static void make_dir(void)
{
	(void)snprintf(dir, sizeof(dir), "%s", dir_make("/var/tmp"));
	while (*save_notice())
		; /* drops notices of earlier tests */
}

/* Returns the beginning of the names that our process gives on this boot, taken from a real one. */
static const char *own_boot(void)
{
	static char boot[33];
	char name[NAME_MAX + 1] = "";
	struct sfr_err err = { .index = -1 };
	struct sfr__file f;
	const char *base = dir_make("/dev/shm");
	uintmax_t serial = 0;
	intmax_t pid = 0;

	CHECK_EQ(sfr__file_init(&f, base, "a", 0, true), 0);
	CHECK_EQ(sfr__file_open(&f, &err), 0);
	CHECK_EQ(dir_count(base, TEMPORARIES, name), 1);
	CHECK_EQ(sscanf(name, ".stillframe-%32[0-9a-f]-%jd-%ju.tmp", boot, &pid, &serial), 3);
	CHECK_EQ(pid, getpid());
	CHECK_EQ(strlen(boot), 32);
	sfr__file_fini(&f);
	dir_remove(base);
	return boot;
}

static const char *temp_path(const char *boot, intmax_t pid, uintmax_t serial)
{
	char name[NAME_MAX];

	(void)snprintf(name, sizeof(name), ".stillframe-%s-%jd-%ju.tmp", boot, pid, serial);
	return dir_path(dir, name);
}

/* Starts a process that opens a file in `dir` and then waits to be killed. */
static pid_t start_writer(void)
{
	int pipes[2];
	char ready = 0;
	pid_t pid;

	CHECK_EQ(pipe2(pipes, O_CLOEXEC), 0);
	pid = fork();
	if (pid == 0) {
		struct sfr_err err = { .index = -1 };
		struct sfr__file f;

		(void)alarm(60);
		if (sfr__file_init(&f, dir, "a.ckpt", SAVE_LEN, true) < 0 ||
		    sfr__file_open(&f, &err) < 0 || save_write_all(&f, &err) < 0 ||
		    write(pipes[1], "x", 1) != 1)
			_exit(1);
		for (;;)
			(void)pause();
	}
	(void)close(pipes[1]);
	CHECK_EQ(read(pipes[0], &ready, 1), 1);
	(void)close(pipes[0]);
	return pid;
}

static void kill_writer(pid_t pid)
{
	int status;

	CHECK_EQ(kill(pid, SIGKILL), 0);
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

/* Runs in a process that has not read the boot id yet. */
static void cannot_read_the_boot_id(void)
{
	struct sfr_fault fault = { "pread", 1, 1, EIO, -1, 0 };
	char name[NAME_MAX + 1] = "";
	struct sfr_err err = { .index = -1 };
	struct sfr__file f;

	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr_inject_add_fault(&fault), 0);
	CHECK_EQ(sfr__file_init(&f, dir, "a.ckpt", SAVE_LEN, true), 0);
	CHECK_EQ(sfr__file_open(&f, &err), 0);
	/* without a boot id, no temporary can be recognised */
	CHECK_EQ(sfr_inject_count_calls("opendir"), 0);
	CHECK_EQ(dir_count(dir, ".stillframe-noboot-", name), 1);
	CHECK(sfr__tmp_may_be_live(dir_path(dir, name), name));
	CHECK_EQ(save_write_all(&f, &err), 0);
	CHECK_EQ(sfr__file_sync(&f, &err), 0);
	CHECK_EQ(sfr__file_commit(&f, &err), 0);
	sfr__file_fini(&f);
	CHECK(save_is_new(dir));
	CHECK_EQ(dir_count(dir, TEMPORARIES, name), 1); /* the dead one from before */
	sfr_inject_clear();
	save_cleanly(dir); /* the failure is not remembered */
	sfr_inject_uninstall();
}

TEST(save_without_a_boot_id_removes_no_temporary)
{
	int failed = check__nr_failed, status = -1;
	FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
	char boot[64] = "";
	size_t nr = 0;
	pid_t pid;
	int c;

	make_dir();
	if (!CHECK(file))
		return;
	while ((c = fgetc(file)) != EOF && c != '\n' && nr < sizeof(boot) - 1)
		if (c != '-')
			boot[nr++] = (char)c;
	(void)fclose(file);
	file_put(temp_path(boot, 999999999, 1), "x", 1);
	pid = fork();
	if (pid == 0) {
		cannot_read_the_boot_id();
		_exit(check__nr_failed != failed);
	}
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	dir_remove(dir);
}

TEST(temporary_of_a_killed_writer_is_removed_and_a_live_one_stays)
{
	pid_t killed, living;
	char name[NAME_MAX + 1] = "";
	struct sfr__file f;
	struct sfr_err err;

	make_dir();
	killed = start_writer();
	living = start_writer();
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 2);
	CHECK_EQ(save_begin(&f, dir, true, &err), 0);
	save_end(&f);
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 2); /* both writers are alive */
	kill_writer(killed);
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 2);
	CHECK_EQ(save_begin(&f, dir, true, &err), 0);
	save_end(&f);
	CHECK_EQ(dir_count(dir, TEMPORARIES, name), 1);
	CHECK(sfr__tmp_may_be_live(dir_path(dir, name), name));
	kill_writer(living);
	CHECK(!sfr__tmp_may_be_live(dir_path(dir, name), name));
	save_cleanly(dir);
	dir_remove(dir);
}

TEST(two_saves_of_one_process_keep_each_others_temporaries)
{
	struct sfr_err err = { .index = -1 };
	struct sfr__file first, second;

	make_dir();
	CHECK_EQ(sfr__file_init(&first, dir, "a.ckpt", SAVE_LEN, true), 0);
	CHECK_EQ(sfr__file_open(&first, &err), 0);
	CHECK_EQ(save_begin(&second, dir, true, &err), 0);
	save_end(&second);
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 1);
	CHECK_EQ(save_write_all(&first, &err), 0);
	CHECK_EQ(sfr__file_sync(&first, &err), 0);
	CHECK_EQ(sfr__file_commit(&first, &err), 0);
	sfr__file_fini(&first);
	CHECK(save_is_new(dir));
	dir_remove(dir);
}

TEST(only_own_temporaries_are_known_to_be_live_without_flock)
{
	struct sfr_fault no_locks = { "flock", 1, 1, ENOLCK, -1, 0 };
	struct sfr_err err = { .index = -1 };
	struct sfr__file first, second;
	const char *dead;

	make_dir();
	dead = temp_path(own_boot(), 999999999, 1);
	file_put(dead, "x", 1);
	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr_inject_add_fault(&no_locks), 0);
	CHECK_EQ(sfr__file_init(&first, dir, "b.ckpt", SAVE_LEN, true), 0);
	CHECK_EQ(sfr__file_open(&first, &err), 0);
	CHECK_EQ(save_begin(&second, dir, true, &err), 0);
	save_end(&second);
	CHECK(save_is_new(dir));
	CHECK(file_exists(dir_path(dir, first.tmp.name)));
	CHECK(sfr__tmp_may_be_live(dir_path(dir, first.tmp.name),
				   first.tmp.name)); /* a remove asks whether it is alive */
	CHECK(file_exists(dead));                    /* nothing could show that it is dead */
	sfr__file_fini(&first);
	sfr_inject_uninstall();
	save_cleanly(dir);
	CHECK(!file_exists(dead));
	dir_remove(dir);
}

/* If it is unknown whether the writer lives, the temporary is kept and named once. */
TEST(temporary_is_dead_only_if_its_lock_was_taken_or_its_name_is_gone)
{
	static const struct {
		const char *call;
		int err;
	} cases[] = { { "flock", EBADF }, { "flock", ENOSYS }, { "flock", ENOLCK },
		      { "flock", EIO },   { "flock", EINTR },  { "open", EMFILE },
		      { "open", EACCES }, { "open", ENFILE },  { "open", ESTALE },
		      { "fstat", EIO },   { "lstat", EIO } };
	char boot[64], name[NAME_MAX + 1];
	struct sfr_err err;

	(void)snprintf(boot, sizeof(boot), "%s", own_boot());
	make_dir();
	CHECK_EQ(mkdir(dir_path(dir, "tree"), 0777), 0);
	for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct sfr_fault fault = { cases[i].call, 1, 1, cases[i].err, -1, 0 };
		char path[PATH_MAX], in_tree[PATH_MAX], text[1024];
		int failed = check__nr_failed;

		(void)snprintf(path, sizeof(path), "%s", temp_path(boot, 999999999, i + 1));
		(void)snprintf(name, sizeof(name), "%s", strrchr(path, '/') + 1);
		CHECK(snprintf(in_tree, PATH_MAX, "%s/tree/%s", dir, name) < PATH_MAX);
		file_put(path, "x", 1);
		CHECK_EQ(sfr_inject_install(), 0);
		CHECK_EQ(sfr_inject_add_fault(&fault), 0);
		dir_clean(dir);
		CHECK(file_exists(path));
		(void)snprintf(text, sizeof(text), "%s", save_notice());
		CHECK(strstr(text, path) && strstr(text, sfr_code_name(-cases[i].err)));
		dir_clean(dir);
		CHECK(strcmp(save_notice(), "") == 0);
		/* A remove of the directory must keep it too. There, a failing fstat or lstat is
		 * an error of its own. */
		CHECK_EQ(rename(path, in_tree), 0);
		err = (struct sfr_err){ .index = -1 };
		(void)sfr__file_remove_tree(dir_path(dir, "tree"), NULL, &err);
		CHECK(file_exists(in_tree));
		sfr_inject_uninstall();
		if (strstr(cases[i].call, "stat") == NULL)
			CHECK(strstr(save_notice(), in_tree) != NULL);
		while (*save_notice())
			;
		CHECK_EQ(unlink(in_tree), 0);
		if (check__nr_failed != failed)
			(void)fprintf(stderr, "  (%s %s)\n", cases[i].call,
				      sfr_code_name(-cases[i].err));
	}
	dir_remove(dir);
}

/* NFSv4 turns the lock into an fcntl lock, which a read-only descriptor does not get. */
static int nfs_flock(int fd, int op)
{
	if ((fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY && op & LOCK_EX) {
		errno = EBADF;
		return -1;
	}
	return plain.flock(fd, op);
}

static int no_writing_open(int at, const char *name, int flags, mode_t mode)
{
	if (!(flags & O_DIRECTORY) && (flags & O_ACCMODE) != O_RDONLY && !(flags & O_CREAT)) {
		errno = EACCES;
		return -1;
	}
	return plain.open(at, name, flags, mode);
}

TEST(dead_temporary_on_nfs_is_removed)
{
	char boot[64];

	(void)snprintf(boot, sizeof(boot), "%s", own_boot());
	make_dir();
	file_put(temp_path(boot, 999999999, 1), "x", 1);
	plain = sfr_sys;
	sfr_sys.flock = nfs_flock;
	dir_clean(dir);
	CHECK_EQ(dir_count(dir, "", NULL), 0);
	sfr_sys = plain;
	/* A temporary of another user, in a directory of ours. */
	file_put(temp_path(boot, 999999999, 1), "x", 1);
	sfr_sys.open = no_writing_open;
	dir_clean(dir);
	CHECK_EQ(dir_count(dir, "", NULL), 0);
	sfr_sys = plain;
	dir_remove(dir);
}

/* A pipe has no writer, and opening it for reading would wait for one. */
TEST(pipe_with_a_temporarys_name_does_not_block)
{
	const char *path;

	make_dir();
	path = temp_path(own_boot(), 999999999, 1);
	CHECK_EQ(mkfifo(path, 0600), 0);
	plain = sfr_sys;
	sfr_sys.open = no_writing_open;
	dir_clean(dir);
	CHECK(file_exists(path));
	sfr_sys = plain;
	dir_remove(dir);
}

/* Even if flock fails, the list protects the process's own temporary. */
TEST(a_temporary_between_open_and_flock_is_safe_from_its_own_process)
{
	struct sfr_err err = { .index = -1 };
	struct sfr__file f;

	make_dir();
	CHECK_EQ(sfr__file_init(&f, dir, "a.ckpt", SAVE_LEN, true), 0);
	CHECK_EQ(sfr__file_open(&f, &err), 0);
	CHECK_EQ(flock(f.fd, LOCK_UN), 0);
	dir_clean(dir);
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 1);
	sfr__tmp_unlist(&f.tmp);
	dir_clean(dir); /* neither locked nor in the list, so it is dead */
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
	sfr__file_fini(&f);
	dir_remove(dir);
}

/* ---- a cleaner of another process comes between open and flock ---- */

static int races_left;
static bool cleaner_holds;

static int race_flock(int fd, int op)
{
	char name[NAME_MAX + 1];

	if (races_left-- > 0) {
		CHECK_EQ(dir_count(dir, TEMPORARIES, name), 1);
		CHECK_EQ(unlink(dir_path(dir, name)), 0);
		if (cleaner_holds) {
			errno = EWOULDBLOCK;
			return -1;
		}
	}
	return plain.flock(fd, op);
}

TEST(writer_that_loses_to_a_cleaner_tries_another_name)
{
	int fds = nr_fds();
	struct sfr__file f;
	struct sfr_err err;

	make_dir();
	plain = sfr_sys;
	sfr_sys.flock = race_flock;
	for (int holds = 0; holds <= 1; holds++) {
		cleaner_holds = holds;
		races_left = 3;
		CHECK_EQ(save_begin(&f, dir, true, &err), 0);
		save_end(&f);
		CHECK(save_is_new(dir));
		CHECK_EQ(dir_count(dir, "", NULL), 1);
		CHECK_EQ(nr_fds(), fds);
	}
	races_left = 1000000;
	CHECK_EQ(save_begin(&f, dir, true, &err), -EWOULDBLOCK);
	CHECK_EQ(err.phase, SFR_PHASE_LOCK);
	save_end(&f);
	CHECK(save_is_new(dir)); /* the file from before */
	CHECK_EQ(nr_fds(), fds);
	sfr_sys = plain;
	dir_remove(dir);
}

/* The name leads to another file once the cleaner has locked the one it opened. */
static int swap_flock(int fd, int op)
{
	char name[NAME_MAX + 1];
	int rc = plain.flock(fd, op);

	if (races_left-- > 0 && dir_count(dir, TEMPORARIES, name) == 1) {
		CHECK_EQ(rename(dir_path(dir, name), dir_path(dir, "moved")), 0);
		file_put(dir_path(dir, name), "another", 7);
	}
	return rc;
}

TEST(a_cleaner_unlinks_only_the_file_it_has_locked)
{
	const char *path;

	make_dir();
	path = temp_path(own_boot(), 999999999, 1);
	file_put(path, "x", 1);
	plain = sfr_sys;
	sfr_sys.flock = swap_flock;
	races_left = 1;
	dir_clean(dir);
	sfr_sys = plain;
	CHECK(file_is(path, "another", 7));
	CHECK_EQ(unlink(dir_path(dir, "moved")), 0);
	dir_clean(dir);
	CHECK_EQ(dir_count(dir, "", NULL), 0);
	dir_remove(dir);
}

/* ---- names that are not ours to remove ---- */

TEST(only_dead_temporaries_of_this_boot_with_exactly_our_name_are_removed)
{
	static const char *const impostors[] = {
		".stillframe-%s-999999999-1.tmp.bak",
		".stillframe-%s-999999999-01.tmp",
		".stillframe-%s-999999999-.tmp",
		".stillframe-%s-999999999-1.tmpx",
		"stillframe-%s-999999999-1.tmp",
		".stillframe-%s--1.tmp",
		".stillframe-%s-9 -1.tmp",
		".stillframe-%s.tmp",
	};
	const size_t nr = sizeof(impostors) / sizeof(impostors[0]);
	char boot[64], name[NAME_MAX];
	struct stat st;

	(void)snprintf(boot, sizeof(boot), "%s", own_boot());
	make_dir();
	for (size_t i = 0; i < nr; i++) {
		const char *gap = strstr(impostors[i], "%s");

		(void)snprintf(name, sizeof(name), "%.*s%s%s", (int)(gap - impostors[i]),
			       impostors[i], boot, gap + 2);
		file_put(dir_path(dir, name), "x", 1);
	}
	file_put(dir_path(dir, "target"), "x", 1);
	CHECK_EQ(symlink("target", temp_path(boot, 999999999, 1)), 0);
	CHECK_EQ(mkfifo(temp_path(boot, 999999999, 2), 0600), 0);
	CHECK_EQ(mkdir(temp_path(boot, 999999999, 3), 0700), 0);
	file_put(temp_path(boot, 999999999, 4), "x", 1);             /* the only dead one */
	file_put(temp_path(boot, 1, 18446744073709551615u), "x", 1); /* and another one */
	CHECK_EQ(dir_count(dir, "", NULL), (int)nr + 6);
	dir_clean(dir);
	CHECK_EQ(dir_count(dir, "", NULL), (int)nr + 4);
	CHECK(!file_exists(temp_path(boot, 999999999, 4)));
	CHECK(lstat(temp_path(boot, 999999999, 1), &st) == 0 && S_ISLNK(st.st_mode));
	CHECK(lstat(temp_path(boot, 999999999, 2), &st) == 0 && S_ISFIFO(st.st_mode));
	CHECK(lstat(temp_path(boot, 999999999, 3), &st) == 0 && S_ISDIR(st.st_mode));
	CHECK(strcmp(save_notice(), "") == 0);
	dir_remove(dir);
}

TEST(temporaries_of_another_boot_stay_and_are_reported_once)
{
	const char *path, *text;

	make_dir();
	path = temp_path("0123456789abcdef0123456789abcdef", 17, 3);
	file_put(path, "x", 1);
	dir_clean(dir);
	text = save_notice();
	CHECK(strncmp(text, path, strlen(path)) == 0 && strlen(text) > strlen(path) + 20);
	CHECK(file_exists(path));
	dir_clean(dir);
	CHECK(strcmp(save_notice(), "") == 0); /* named once per process */
	CHECK(file_exists(path));
	file_put(temp_path("noboot", 17, 3), "x", 1);
	dir_clean(dir);
	CHECK(strstr(save_notice(), "noboot"));
	CHECK_EQ(dir_count(dir, "", NULL), 2);
	dir_remove(dir);
}

TEST(next_save_removes_a_temporary_whose_unlink_failed)
{
	struct sfr_fault fault = { "unlink", 1, 1, EIO, -1, 0 };
	struct sfr_err err = { .index = -1 };
	struct sfr__file f;

	make_dir();
	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr__file_init(&f, dir, "a.ckpt", SAVE_LEN, true), 0);
	CHECK_EQ(sfr__file_open(&f, &err), 0);
	CHECK_EQ(sfr_inject_add_fault(&fault), 0);
	sfr__file_fini(&f);
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 1);
	dir_clean(dir);
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 1);
	sfr_inject_uninstall();
	save_cleanly(dir);
	dir_remove(dir);
}

TEST(failed_clean_up_does_not_fail_the_save)
{
	static const int errors[] = { EIO, EACCES, EINTR, ENOMEM };
	char boot[64];
	int fds = nr_fds();

	(void)snprintf(boot, sizeof(boot), "%s", own_boot());
	make_dir();
	for (int e = 0; e < 4; e++) {
		FOR_EVERY_FAILURE(run, "*", errors[e])
		{
			for (unsigned i = 1; i <= 3; i++)
				file_put(temp_path(boot, 999999999, i), "x", 1);
			dir_clean(dir);
			CHECK_EQ(nr_fds(), fds);
			check_end_fault(&run);
			dir_clean(dir);
			CHECK_EQ(dir_count(dir, "", NULL), 0);
		}
	}
	dir_remove(dir);
}

/* The memory for names is bounded. This test is the last one, because no name is logged after
 * it. */
TEST(number_of_reported_temporaries_is_bounded)
{
	unsigned nr = 0;

	make_dir();
	for (unsigned i = 0; i < 300; i++)
		file_put(temp_path("0123456789abcdef0123456789abcdef", 18, i + 1), "x", 1);
	dir_clean(dir);
	while (*save_notice())
		nr++;
	CHECK(nr > 200 && nr < 256);
	dir_clean(dir);
	CHECK(strcmp(save_notice(), "") == 0);
	CHECK_EQ(dir_count(dir, "", NULL), 300);
	dir_remove(dir);
}

BEGIN
{
	save_fill();
	CHECK_EQ(sfr_fork_init(), 0);
	return true;
}
