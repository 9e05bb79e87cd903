/* Removing files, links and trees, and what must survive it. */
#include <errno.h>
#include <sys/wait.h>

#include "fix_save.h"

static char dir[PATH_MAX]; /* the directory of the running test */

static void make_dir(const char *base)
{
	(void)snprintf(dir, sizeof(dir), "%s", dir_make(base));
}

static int rm(const char *name, struct sfr_err *err)
{
	*err = (struct sfr_err){ .index = -1 };
	return sfr__file_remove_tree(dir_path(dir, name), NULL, err);
}

TEST(remove_deletes_a_file_and_accepts_a_missing_name)
{
	struct sfr_err err;

	make_dir("/var/tmp");
	file_put(dir_path(dir, "a"), "x", 1);
	CHECK_EQ(rm("a", &err), 0);
	CHECK(!file_exists(dir_path(dir, "a")));
	CHECK_EQ(rm("a", &err), 0);
	CHECK_EQ(rm("no/such/parent", &err), 0);
	file_put(dir_path(dir, "a"), "x", 1);
	CHECK_EQ(rm("a/b", &err), 0); /* nothing exists below a file */
	CHECK_EQ(err.code, 0);
	CHECK(file_exists(dir_path(dir, "a")));
	dir_remove(dir);
}

TEST(remove_deletes_a_link_and_keeps_its_target)
{
	struct sfr_err err;

	make_dir("/var/tmp");
	file_put(dir_path(dir, "target"), "x", 1);
	CHECK_EQ(mkdir(dir_path(dir, "d"), 0700), 0);
	file_put(dir_path(dir, "d/inside"), "x", 1);
	CHECK_EQ(symlink("target", dir_path(dir, "to_file")), 0);
	CHECK_EQ(symlink("d", dir_path(dir, "to_dir")), 0);
	CHECK_EQ(symlink("nowhere", dir_path(dir, "broken")), 0);
	CHECK_EQ(rm("to_file", &err), 0);
	CHECK_EQ(rm("to_dir", &err), 0);
	CHECK_EQ(rm("broken", &err), 0);
	CHECK_EQ(dir_count(dir, "", NULL), 2);
	CHECK(file_exists(dir_path(dir, "d/inside")));

	/* The same inside a tree. */
	CHECK_EQ(mkdir(dir_path(dir, "tree"), 0700), 0);
	CHECK_EQ(symlink("../d", dir_path(dir, "tree/to_dir")), 0);
	CHECK_EQ(symlink("..", dir_path(dir, "tree/to_parent")), 0);
	CHECK_EQ(rm("tree", &err), 0);
	CHECK_EQ(dir_count(dir, "", NULL), 2);
	CHECK(file_exists(dir_path(dir, "d/inside")));
	dir_remove(dir);
}

static void make_tree(void)
{
	static const char *const dirs[] = { "t", "t/a", "t/a/b", "t/a/b/c", "t/empty", "t/z" };
	static const char *const files[] = {
		"t/1", "t/a/2", "t/a/b/3", "t/a/b/c/4", "t/z/5", "t/6"
	};

	for (size_t i = 0; i < sizeof(dirs) / sizeof(dirs[0]); i++)
		CHECK(mkdir(dir_path(dir, dirs[i]), 0700) == 0 || errno == EEXIST);
	for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++)
		file_put(dir_path(dir, files[i]), "x", 1);
	if (!file_exists(dir_path(dir, "t/pipe")))
		CHECK_EQ(mkfifo(dir_path(dir, "t/pipe"), 0600), 0);
}

TEST(remove_deletes_a_whole_tree)
{
	struct sfr_err err;
	int fds = nr_fds();

	make_dir("/var/tmp");
	make_tree();
	file_put(dir_path(dir, "beside"), "x", 1);
	CHECK_EQ(rm("t", &err), 0);
	CHECK_EQ(dir_count(dir, "", NULL), 1);
	CHECK_EQ(nr_fds(), fds);

	CHECK_EQ(mkdir(dir_path(dir, "t"), 0700), 0); /* more names than one buffer holds */
	for (int i = 0; i < 3000; i++) {
		char name[48];

		(void)snprintf(name, sizeof(name), "t/a-rather-long-name-%d", i);
		if (i % 3 == 0)
			CHECK_EQ(mkdir(dir_path(dir, name), 0700), 0);
		else
			file_put(dir_path(dir, name), "", 0);
	}
	CHECK_EQ(rm("t", &err), 0);
	CHECK_EQ(dir_count(dir, "", NULL), 1);
	dir_remove(dir);
}

TEST(tree_deeper_than_path_max_is_reported)
{
	char name[201];
	struct sfr_err err;
	int at, next, fds = nr_fds();

	make_dir("/dev/shm");
	memset(name, 'd', 200);
	name[200] = 0;
	CHECK_EQ(mkdir(dir_path(dir, "deep"), 0700), 0);
	file_put(dir_path(dir, "deep/file"), "x", 1);
	at = open(dir_path(dir, "deep"), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	for (int i = 0; i < 30; i++) { /* a path of 6000 bytes */
		CHECK_EQ(mkdirat(at, name, 0700), 0);
		next = openat(at, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		CHECK(next >= 0);
		(void)close(at);
		at = next;
	}
	(void)close(at);
	CHECK_EQ(rm("deep", &err), -ENAMETOOLONG);
	CHECK_EQ(err.phase, SFR_PHASE_REMOVE);
	/* the files that could be removed are gone */
	CHECK(!file_exists(dir_path(dir, "deep/file")));
	CHECK_EQ(nr_fds(), fds);

	/* The deepest tree whose paths are still valid is removed. */
	at = open(dir_path(dir, ""), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	CHECK_EQ(fchdir(at), 0);
	(void)close(at);
	for (int i = 0; i < 31; i++)
		CHECK_EQ(chdir(i == 0 ? "deep" : name), 0);
	for (int i = 31; i > 0; i--) {
		CHECK_EQ(chdir(".."), 0);
		CHECK_EQ(rmdir(i == 1 ? "deep" : name), 0);
	}
	CHECK_EQ(chdir("/"), 0);
	CHECK_EQ(mkdir(dir_path(dir, "t"), 0700), 0);
	{
		char path[PATH_MAX];
		size_t len = (size_t)snprintf(path, sizeof(path), "%s/t", dir);

		while (len + 3 < sizeof(path)) {
			memcpy(path + len, "/d", 3);
			len += 2;
			if (!CHECK_EQ(mkdir(path, 0700), 0))
				break;
		}
	}
	CHECK_EQ(rm("t", &err), 0);
	CHECK_EQ(dir_count(dir, "", NULL), 0);
	dir_remove(dir);
}

TEST(remove_keeps_live_temporaries_and_their_directories)
{
	char sub[PATH_MAX];
	struct sfr__file f;
	struct sfr_err err;

	make_dir("/var/tmp");
	make_tree();
	(void)snprintf(sub, sizeof(sub), "%s", dir_path(dir, "t/a/b"));
	err = (struct sfr_err){ .index = -1 };
	CHECK_EQ(sfr__file_init(&f, sub, "a.ckpt", SAVE_LEN, true), 0);
	CHECK_EQ(sfr__file_open(&f, &err), 0);
	CHECK_EQ(rm("t", &err), 0); /* keeping it is no error */
	CHECK_EQ(dir_count(dir_path(dir, "t"), "", NULL), 1);
	CHECK_EQ(dir_count(dir_path(dir, "t/a"), "", NULL), 1);
	CHECK_EQ(dir_count(sub, "", NULL), 1);
	CHECK(file_exists(dir_path(f.dir, f.tmp.name)));
	CHECK_EQ(save_write_all(&f, &err), 0);
	CHECK_EQ(sfr__file_sync(&f, &err), 0);
	CHECK_EQ(sfr__file_commit(&f, &err), 0);
	sfr__file_fini(&f);
	CHECK(save_is_new(sub));
	CHECK_EQ(rm("t", &err), 0);
	CHECK_EQ(dir_count(dir, "", NULL), 0);
	dir_remove(dir);
}

TEST(removing_a_tree_removes_dead_temporaries)
{
	struct sfr_err err = { .index = -1 };
	struct sfr_fault fault = { "unlink", 1, 0, EIO, -1, 0 };
	struct sfr__file f;

	make_dir("/var/tmp");
	CHECK_EQ(mkdir(dir_path(dir, "t"), 0700), 0);
	CHECK_EQ(sfr__file_init(&f, dir_path(dir, "t"), "a.ckpt", SAVE_LEN, true), 0);
	CHECK_EQ(sfr__file_open(&f, &err), 0);
	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr_inject_add_fault(&fault), 0);
	sfr__file_fini(&f);
	sfr_inject_uninstall();
	CHECK_EQ(dir_count(dir_path(dir, "t"), TEMPORARIES, NULL), 1);
	file_put(dir_path(dir, "t/.stillframe-0123456789abcdef0123456789abcdef-1-1.tmp"), "x", 1);
	CHECK_EQ(rm("t", &err), 0);
	CHECK_EQ(dir_count(dir, "", NULL), 0);
	dir_remove(dir);
}

TEST(failed_unlink_does_not_stop_the_remove)
{
	struct sfr_fault fault = { "unlink", 2, 0, EIO, -1, 0 };
	struct sfr_err err;

	make_dir("/var/tmp");
	make_tree();
	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr_inject_add_fault(&fault), 0);
	CHECK_EQ(rm("t", &err), -EIO);
	CHECK_EQ(err.code, -EIO); /* not the ENOTEMPTY that results from it */
	CHECK_EQ(err.phase, SFR_PHASE_REMOVE);
	CHECK_EQ(sfr_inject_count_calls("unlink"), 7);
	sfr_inject_uninstall();
	CHECK_EQ(rm("t", &err), 0);
	CHECK_EQ(dir_count(dir, "", NULL), 0);
	dir_remove(dir);
}

/* ---- files are added to the tree while it is removed ---- */

static struct sfr_sys plain;
static int additions_left;
static bool adds_directories;

static int add_and_rmdir(const char *path)
{
	int rc;

	if (additions_left > 0) {
		additions_left--;
		file_put(dir_path(path, "late"), "x", 1);
		if (adds_directories)
			CHECK(mkdir(dir_path(path, "late_dir"), 0700) == 0 || errno == EEXIST);
	}
	rc = plain.rmdir(path);
	if (rc == 0)
		errno = EACCES; /* so that rmdir's own answer does not show */
	return rc;
}

TEST(files_added_during_a_remove_are_removed_a_bounded_number_of_times)
{
	struct sfr_err err;

	make_dir("/var/tmp");
	make_tree();
	plain = sfr_sys;
	sfr_sys.rmdir = add_and_rmdir;
	for (int i = 0; i < 2; i++) {
		additions_left = 3;
		adds_directories = i == 0;
		CHECK_EQ(rm("t", &err), 0);
		CHECK_EQ(dir_count(dir, "", NULL), 0);
		CHECK_EQ(mkdir(dir_path(dir, "t"), 0700), 0);
	}
	additions_left = 1 << 10; /* directories would get eight visits each */
	CHECK_EQ(rm("t", &err), -ENOTEMPTY);
	CHECK(additions_left > 0);
	sfr_sys = plain;
	CHECK_EQ(rm("t", &err), 0);
	dir_remove(dir);
}

static _Atomic uint64_t answered;
static uint64_t answered_before;
static unsigned nr_unlinks;

static int listening_unlink(int fd, const char *name)
{
	CHECK(answered > answered_before); /* since the previous one */
	answered_before = answered;
	nr_unlinks++;
	(void)usleep(1); /* so that the clock advances */
	return plain.unlink(fd, name);
}

TEST(remove_records_the_time_after_each_name)
{
	struct sfr_err err = { .index = -1 };

	make_dir("/dev/shm");
	make_tree();
	plain = sfr_sys;
	sfr_sys.unlink = listening_unlink;
	CHECK_EQ(sfr__file_remove_tree(dir_path(dir, "t"), &answered, &err), 0);
	CHECK(nr_unlinks > 1);
	sfr_sys = plain;
	dir_remove(dir);
}

/* ---- checkpoints of torch.distributed.checkpoint ---- */

static void make_checkpoint(void)
{
	static const char *const files[] = { "t/c/0", "t/c/__0_0.12ab.distcp", "t/c/.metadata",
					     "t/c/__1_0.distcp", "t/c/__12.metadata" };

	CHECK(mkdir(dir_path(dir, "t"), 0700) == 0 || errno == EEXIST);
	CHECK(mkdir(dir_path(dir, "t/c"), 0700) == 0 || errno == EEXIST);
	for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++)
		file_put(dir_path(dir, files[i]), "x", 1);
}

static int nr_data(void)
{
	return dir_count(dir_path(dir, "t/c"), "__0_", NULL) +
	       dir_count(dir_path(dir, "t/c"), "__1_", NULL);
}

static unsigned nr_metadata_gone, nr_synced;

static int unlink_in_order(int fd, const char *path)
{
	bool metadata = strstr(path, "metadata") != NULL;

	CHECK(metadata ? nr_synced == 0 : nr_metadata_gone == 2 && nr_synced == 1);
	if (metadata)
		nr_metadata_gone++;
	return plain.unlink(fd, path);
}

static int counted_fsync(int fd)
{
	CHECK_EQ(nr_metadata_gone, 2);
	nr_synced++;
	return plain.fsync(fd);
}

TEST(metadata_is_removed_and_synced_first)
{
	struct sfr_err err;

	make_dir("/var/tmp");
	make_checkpoint();
	plain = sfr_sys;
	sfr_sys.unlink = unlink_in_order;
	sfr_sys.fsync = counted_fsync;
	CHECK_EQ(rm("t", &err), 0);
	CHECK_EQ(nr_synced, 1);
	sfr_sys = plain;
	CHECK_EQ(dir_count(dir, "", NULL), 0);

	/* A directory may have the same name. */
	CHECK_EQ(mkdir(dir_path(dir, "t"), 0700), 0);
	CHECK_EQ(mkdir(dir_path(dir, "t/.metadata"), 0700), 0);
	file_put(dir_path(dir, "t/.metadata/a"), "x", 1);
	CHECK_EQ(rm("t", &err), 0);
	CHECK_EQ(dir_count(dir, "", NULL), 0);
	dir_remove(dir);
}

/* Either the first unlink fails, or the sync after the unlinks. */
TEST(data_files_stay_if_metadata_cannot_be_removed)
{
	static const char *const calls[] = { "unlink", "fsync" };
	struct sfr_err err;

	make_dir("/var/tmp");
	for (int i = 0; i < 2; i++) {
		struct sfr_fault fault = { calls[i], 1, 0, EIO, -1, 0 };

		make_checkpoint();
		CHECK_EQ(sfr_inject_install(), 0);
		CHECK_EQ(sfr_inject_add_fault(&fault), 0);
		CHECK_EQ(rm("t", &err), -EIO);
		sfr_inject_uninstall();
		CHECK_EQ(nr_data(), 2);
		/* After a failed sync, the next remove cannot know whether the unlink has
		 * reached the disk. */
		CHECK_EQ(sfr_inject_install(), 0);
		CHECK_EQ(rm("t", &err), 0);
		CHECK_EQ(sfr_inject_count_calls("fsync"), 1);
		sfr_inject_uninstall();
		CHECK_EQ(dir_count(dir, "", NULL), 0);
	}
	dir_remove(dir);
}

TEST(remove_reports_every_failure)
{
	static const int errors[] = { EIO, EACCES, EROFS, EBUSY, EINTR };
	struct sfr_err err;
	int fds = nr_fds();

	make_dir("/dev/shm");
	for (int e = 0; e < 5; e++) {
		FOR_EVERY_FAILURE(run, "*", errors[e])
		{
			int rc;

			make_tree();
			make_checkpoint();
			rc = rm("t", &err);
			CHECK_EQ(nr_fds(), fds);
			check_end_fault(&run);
			CHECK(!file_exists(dir_path(dir, "t/c/.metadata")) || nr_data() == 2);
			CHECK_EQ(rc, err.code);
			CHECK(rc == 0 || (check_acted(&run) && err.phase == SFR_PHASE_REMOVE));
			CHECK(rc == 0 || rc == -errors[e] || rc == -ENOMEM);
			CHECK(rc != 0 || !file_exists(dir_path(dir, "t")));
			CHECK_EQ(rm("t", &err), 0);
			CHECK_EQ(dir_count(dir, "", NULL), 0);
		}
	}
	dir_remove(dir);
}

BEGIN
{
	save_fill();
	return true;
}
