/* A directory that is put in place in one step: each step, every failing call, and dead writers. */
#include <errno.h>
#include <signal.h>
#include <sys/wait.h>

#include "sfr/folder.h"
#include "fix_save.h"

static struct sfr_err err;

static struct sfr_folder *folder_in(const char *dir)
{
	struct sfr_folder *f = NULL;

	err = (struct sfr_err){ .index = -1 };
	(void)sfr_folder_new(dir, "c", true, &f); /* without memory there is none */
	return f;
}

static void put(const char *dir, const char *name, const char *text)
{
	file_put(dir_path(dir, name), text, strlen(text));
}

static bool is(const char *dir, const char *name, const char *text)
{
	return file_is(dir_path(dir, name), text, strlen(text));
}

/* Files a and b, the second one in a directory of its own. */
static void fill(const char *dir, const char *text)
{
	put(dir, "a", text);
	CHECK_EQ(mkdir(dir_path(dir, "sub"), 0777), 0);
	put(dir, "sub/b", text);
}

static bool holds(const char *dir, const char *text)
{
	return is(dir, "a", text) && is(dir, "sub/b", text) && dir_count(dir, "", NULL) == 2 &&
	       dir_count(dir_path(dir, "sub"), "", NULL) == 1;
}

static void put_old(const char *dir)
{
	CHECK_EQ(mkdir(dir_path(dir, "c"), 0777), 0);
	fill(dir_path(dir, "c"), "old");
}

/* A directory `c` from open to clear; returns the code of the first step that failed. */
static int save(const char *dir, const char *text)
{
	struct sfr_folder *f = folder_in(dir);
	struct sfr_err ignored = { .index = -1 };
	uint64_t nbytes = 0;
	int rc;

	if (!f)
		return -ENOMEM;
	rc = sfr_folder_make_temporary(f, &err);
	if (rc == 0)
		fill(sfr_folder_temporary_path(f), text);
	if (rc == 0)
		rc = sfr_folder_sync(f, &nbytes, &err);
	if (rc == 0)
		CHECK_EQ(nbytes, 2 * strlen(text));
	if (rc == 0)
		rc = sfr_folder_commit(f, &err);
	(void)sfr_folder_end_and_clean_up(f, &ignored);
	sfr_folder_free(f);
	return rc;
}

static void appears_and_is_replaced(const char *dir)
{
	CHECK_EQ(save(dir, "one"), 0);
	CHECK(holds(dir_path(dir, "c"), "one"));
	CHECK_EQ(save(dir, "three"), 0);
	CHECK(holds(dir_path(dir, "c"), "three"));
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
}

TEST(directory_appears_and_is_replaced)
{
	in_each_base(appears_and_is_replaced);
}

static void steps_have_an_order(const char *dir)
{
	struct sfr_folder *f = folder_in(dir);
	uint64_t nbytes;

	CHECK_EQ(sfr_folder_sync(f, &nbytes, &err), SFR_ESTATE);
	CHECK_EQ(sfr_folder_commit(f, &err), SFR_ESTATE);
	CHECK_EQ(sfr_folder_make_temporary(f, &err), 0);
	CHECK_EQ(sfr_folder_make_temporary(f, &err), SFR_ESTATE);
	CHECK_EQ(sfr_folder_commit(f, &err), SFR_ESTATE);
	CHECK_EQ(sfr_folder_sync(f, &nbytes, &err), 0);
	CHECK_EQ(nbytes, 0);
	CHECK_EQ(sfr_folder_commit(f, &err), 0);
	CHECK_EQ(sfr_folder_commit(f, &err), SFR_ESTATE);
	CHECK_EQ(sfr_folder_end_and_clean_up(f, &err), 0);
	CHECK_EQ(sfr_folder_end_and_clean_up(f, &err), 0);
	sfr_folder_free(f);
	sfr_folder_free(NULL);
	CHECK_EQ(dir_count(dir, "", NULL), 1);
}

TEST(steps_out_of_order_change_nothing)
{
	in_each_base(steps_have_an_order);
}

static void one_that_is_given_up(const char *dir)
{
	struct sfr_folder *f = folder_in(dir);

	put_old(dir);
	CHECK_EQ(sfr_folder_make_temporary(f, &err), 0);
	fill(sfr_folder_temporary_path(f), "new");
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 2); /* the lock, and the directory */
	sfr_folder_free(f);
	CHECK(holds(dir_path(dir, "c"), "old"));
	CHECK_EQ(dir_count(dir, "", NULL), 1);
}

TEST(abandoned_directory_leaves_nothing)
{
	in_each_base(one_that_is_given_up);
}

static void file_in_its_place(const char *dir)
{
	put(dir, "c", "a file");
	CHECK_EQ(save(dir, "new"), -ENOTDIR);
	CHECK_EQ(err.phase, SFR_PHASE_RENAME);
	CHECK(is(dir, "c", "a file"));
	CHECK_EQ(dir_count(dir, "", NULL), 1);
}

TEST(file_with_the_directorys_name_is_not_replaced)
{
	in_each_base(file_in_its_place);
}

/* ---- failing calls ------------------------------------------------------------ */

static void set_aside_mode(bool aside)
{
	const struct sfr_fault no_exchange = {
		.call = "exchange", .nth = 1, .sticky = 1, .err = EINVAL, .limit = -1
	};

	sfr_inject_clear();
	if (aside)
		CHECK_EQ(sfr_inject_add_fault(&no_exchange), 0);
}

/* Makes each call fail in turn. `aside`: nothing can be exchanged. */
static void every_call_fails(const char *dir, bool aside)
{
	struct sfr_fault fault = { .call = "*", .err = EIO, .limit = -1 };
	const char *there = "new", *next = "old";
	uint64_t nr_calls;
	int nr_failed = 0;

	put_old(dir);
	set_aside_mode(aside);
	CHECK_EQ(save(dir, there), 0);
	nr_calls = sfr_inject_count_calls("*");
	for (fault.nth = 1; fault.nth <= nr_calls; fault.nth++) {
		int rc;

		set_aside_mode(aside);
		CHECK_EQ(sfr_inject_add_fault(&fault), 0);
		rc = save(dir, next);
		sfr_inject_clear();
		if (rc < 0)
			nr_failed++;
		if (rc == 0 || err.phase == SFR_PHASE_SYNC_DIR) {
			const char *before = there;

			there = next;
			next = before;
		}
		CHECK(holds(dir_path(dir, "c"), there));
		dir_clean(dir); /* of what could not be removed or was not synced */
		CHECK(holds(dir_path(dir, "c"), there));
		CHECK_EQ(dir_count(dir, "", NULL), 1);
	}
	CHECK(nr_failed > 20);
	while (*save_notice())
		;
}

static void every_call_fails_in_turn(const char *dir)
{
	every_call_fails(dir, false);
}

static void every_call_fails_without_exchange(const char *dir)
{
	every_call_fails(dir, true);
}

TEST(any_failure_leaves_the_old_directory_or_the_new_one)
{
	CHECK_EQ(sfr_inject_install(), 0);
	in_each_base(every_call_fails_in_turn);
	in_each_base(every_call_fails_without_exchange);
	sfr_inject_uninstall();
}

static void not_moved_back(const char *dir)
{
	const struct sfr_fault no_rename = {
		.call = "rename", .nth = 2, .sticky = 1, .err = EIO, .limit = -1
	};

	put_old(dir);
	set_aside_mode(true);
	CHECK_EQ(sfr_inject_add_fault(&no_rename), 0);
	CHECK_EQ(save(dir, "new"), -EIO);
	CHECK(strstr(err.note, "a hidden name until the next save") != NULL);
	sfr_inject_clear();
	CHECK(!file_exists(dir_path(dir, "c")));
	save_cleanly(dir);
	CHECK(holds(dir_path(dir, "c"), "old"));
	CHECK(strstr(save_notice(), "was put back") != NULL);
}

TEST(old_directory_that_cannot_be_moved_back_is_not_lost)
{
	CHECK_EQ(sfr_inject_install(), 0);
	in_each_base(not_moved_back);
	sfr_inject_uninstall();
}

static void unsynced_parent(const char *dir)
{
	struct sfr_folder *f = folder_in(dir);
	struct sfr_fault fault = { .call = "fsync", .nth = 1, .err = EIO, .limit = -1 };
	uint64_t nbytes;

	put_old(dir);
	CHECK_EQ(sfr_folder_make_temporary(f, &err), 0);
	fill(sfr_folder_temporary_path(f), "new");
	CHECK_EQ(sfr_folder_sync(f, &nbytes, &err), 0);
	CHECK_EQ(sfr_inject_add_fault(&fault), 0);
	CHECK_EQ(sfr_folder_commit(f, &err), -EIO);
	CHECK_EQ(err.phase, SFR_PHASE_SYNC_DIR);
	sfr_folder_free(f);
	CHECK(holds(dir_path(dir, "c"), "new"));
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 1); /* the disk may still know the old one */
	sfr_inject_clear();
	fault.sticky = 1;
	CHECK_EQ(sfr_inject_add_fault(&fault), 0);
	dir_clean(dir);
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 1);
	sfr_inject_clear();
	dir_clean(dir);
	CHECK_EQ(dir_count(dir, "", NULL), 1);
}

TEST(old_directory_is_kept_until_its_parent_is_synced)
{
	CHECK_EQ(sfr_inject_install(), 0);
	in_each_base(unsynced_parent);
	sfr_inject_uninstall();
}

/* ---- dead writers --------------------------------------------------------------- */

static struct sfr_sys plain;

static int die(int dir, const char *one, const char *other)
{
	(void)plain.exchange(dir, one, other);
	(void)kill(getpid(), SIGKILL);
	return 0;
}

static int refuse(int dir, const char *one, const char *other)
{
	(void)dir;
	(void)one;
	(void)other;
	errno = EINVAL;
	return -1;
}

static int die_on_rename(int dir, const char *from, const char *to)
{
	int rc = plain.rename(dir, from, to);

	(void)kill(getpid(), SIGKILL);
	return rc;
}

/* Saves in a process that dies at its exchange, or at the first of two renames. */
static void die_at(const char *dir, bool aside)
{
	pid_t pid = fork();
	int status;

	if (pid == 0) {
		plain = sfr_sys;
		sfr_sys.exchange = aside ? refuse : die;
		if (aside)
			sfr_sys.rename = die_on_rename;
		(void)save(dir, "new");
		_exit(1);
	}
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	CHECK(WIFSIGNALED(status));
}

static void killed_at_the_exchange(const char *dir)
{
	put_old(dir);
	die_at(dir, false);
	CHECK(holds(dir_path(dir, "c"), "new"));
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 2);
	save_cleanly(dir); /* counts the temporaries */
	CHECK(holds(dir_path(dir, "c"), "new"));
}

static void killed_between_two_renames(const char *dir)
{
	put_old(dir);
	die_at(dir, true);
	CHECK(!file_exists(dir_path(dir, "c")));
	sfr_clean_up_after_dead_writers(dir);
	CHECK(holds(dir_path(dir, "c"), "old"));
	CHECK_EQ(dir_count(dir, "", NULL), 1);
	CHECK(strstr(save_notice(), "was put back") != NULL);
	die_at(dir, true);
	put_old(dir); /* somebody was faster */
	sfr_clean_up_after_dead_writers(dir);
	CHECK(holds(dir_path(dir, "c"), "old"));
	CHECK_EQ(dir_count(dir, "", NULL), 1);
}

TEST(the_next_save_cleans_up_after_a_killed_writer)
{
	in_each_base(killed_at_the_exchange);
	in_each_base(killed_between_two_renames);
}

static void living_writer(const char *dir)
{
	struct sfr_folder *f = folder_in(dir);
	struct sfr_err removed = { .index = -1 };
	char name[NAME_MAX + 1] = "";
	int status;
	pid_t pid;

	CHECK_EQ(sfr_folder_make_temporary(f, &err), 0);
	fill(sfr_folder_temporary_path(f), "new");
	dir_clean(dir); /* of this process */
	pid = fork();
	if (pid == 0) {
		dir_clean(dir); /* and of another one */
		sfr_folder_free(f);
		_exit(dir_count(dir, TEMPORARIES, NULL) == 2 ? 0 : 1);
	}
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	CHECK_EQ(status, 0);
	CHECK_EQ(dir_count(dir, TEMPORARIES, name), 2);
	CHECK(holds(sfr_folder_temporary_path(f), "new"));
	CHECK_EQ(sfr__file_remove_tree(dir, NULL, &removed), 0); /* keeps it, and what is above */
	CHECK(holds(sfr_folder_temporary_path(f), "new"));
	sfr_folder_free(f);
	CHECK_EQ(dir_count(dir, "", NULL), 0);
}

TEST(the_directory_of_a_living_writer_is_not_removed)
{
	in_each_base(living_writer);
}

static void another_boot(const char *dir)
{
	const char *boot = "00000000000000000000000000000000";
	char name[NAME_MAX];

	(void)snprintf(name, sizeof(name), ".stillframe-%s-1-1.tmp.old-c", boot);
	CHECK_EQ(mkdir(dir_path(dir, name), 0777), 0);
	dir_clean(dir);
	CHECK(file_exists(dir_path(dir, name)));
	CHECK(strstr(save_notice(), "before a save on another machine") != NULL);
	CHECK_EQ(rmdir(dir_path(dir, name)), 0);
	(void)snprintf(name, sizeof(name), ".stillframe-%s-1-1.tmp.dd", boot);
	CHECK_EQ(mkdir(dir_path(dir, name), 0777), 0);
	dir_clean(dir); /* no name of ours */
	CHECK(file_exists(dir_path(dir, name)));
	CHECK(*save_notice() == '\0');
}

TEST(directories_of_another_boot_are_reported_and_kept)
{
	in_each_base(another_boot);
}

/* ---- saves into a directory that is replaced ------------------------------------ */

static void save_into_the_old_one(const char *dir)
{
	char below[PATH_MAX];
	struct sfr__file f;

	err = (struct sfr_err){ .index = -1 };
	(void)snprintf(below, sizeof(below), "%s/c", dir);
	put_old(dir);
	memset(&f, 0, sizeof(f));
	CHECK_EQ(sfr__file_init(&f, below, "late", SAVE_LEN, true), 0);
	CHECK_EQ(sfr__file_open(&f, &err), 0);
	CHECK_EQ(save_write_all(&f, &err), 0);
	CHECK_EQ(sfr__file_sync(&f, &err), 0);
	CHECK_EQ(save(dir, "new"), 0);
	CHECK_EQ(sfr__file_commit(&f, &err), -ESTALE);
	CHECK_EQ(err.phase, SFR_PHASE_RENAME);
	sfr__file_fini(&f);
	CHECK(holds(dir_path(dir, "c"), "new"));
	CHECK_EQ(dir_count(dir, "", NULL), 1);
}

TEST(save_into_a_directory_that_was_replaced_fails)
{
	in_each_base(save_into_the_old_one);
}

BEGIN
{
	save_fill();
	return true;
}
