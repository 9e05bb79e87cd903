/* Lists of directory changes: taken in order, and none after one that failed. */
#include <errno.h>

#include "fix_save.h"
#include "sfr/steps.h"

#define NR_COMMIT 6

static char dir[PATH_MAX]; /* the directory of the running test */

static void make_dir(const char *base)
{
	(void)snprintf(dir, sizeof(dir), "%s", dir_make(base));
}

static struct sfr_directory_step step(enum sfr_directory_step_kind kind, const char *name,
				      const char *bytes)
{
	return (struct sfr_directory_step){ kind, dir_path(dir, name), bytes, strlen(bytes) };
}

/* Makes the steps that replace the old checkpoint by a new one; `gone` belongs to the old one. */
static void plan_commit(struct sfr_directory_step changes[NR_COMMIT])
{
	changes[0] = step(SFR_STEP_WRITE_SYNCED, "tmp", "new");
	changes[1] = (struct sfr_directory_step){ SFR_STEP_SYNC, dir, "", 0 };
	changes[2] = step(SFR_STEP_RENAME, "tmp", dir_path(dir, "name"));
	changes[3] = changes[1];
	changes[4] = step(SFR_STEP_UNLINK, "gone", "");
	changes[5] = step(SFR_STEP_UNLINK, "never there", "");
}

static void put_old(void)
{
	(void)unlink(dir_path(dir, "tmp"));
	file_put(dir_path(dir, "name"), "old", 3);
	file_put(dir_path(dir, "gone"), "x", 1);
}

TEST(steps_are_taken_in_their_order)
{
	struct sfr_directory_step changes[NR_COMMIT];
	size_t nr_done;

	make_dir("/var/tmp");
	put_old();
	plan_commit(changes);
	CHECK_EQ(sfr_inject_install(), 0);
	sfr_inject_clear();
	CHECK_EQ(sfr_directory_steps_carry_out(changes, NR_COMMIT, &nr_done), 0);
	CHECK_EQ(nr_done, NR_COMMIT);
	CHECK_EQ(sfr_inject_count_calls("fsync"), 3);
	CHECK(file_is(dir_path(dir, "name"), "new", 3));
	CHECK_EQ(dir_count(dir, "", NULL), 1);
	sfr_inject_clear();
	changes[0] = step(SFR_STEP_WRITE, "other", "");
	CHECK_EQ(sfr_directory_steps_carry_out(changes, 1, &nr_done), 0);
	CHECK_EQ(sfr_inject_count_calls("fsync"), 0);
	CHECK(file_is(dir_path(dir, "other"), "", 0));
	sfr_inject_uninstall();
	dir_remove(dir);
}

TEST(existing_file_is_not_overwritten_and_invalid_steps_are_refused)
{
	struct sfr_directory_step changes[2];
	size_t nr_done;

	make_dir("/dev/shm");
	put_old();
	changes[0] = step(SFR_STEP_WRITE, "name", "new");
	changes[1] = step(SFR_STEP_UNLINK, "gone", "");
	CHECK_EQ(sfr_directory_steps_carry_out(changes, 2, &nr_done), -EEXIST);
	CHECK_EQ(nr_done, 0);
	CHECK(file_is(dir_path(dir, "name"), "old", 3));
	CHECK(file_exists(dir_path(dir, "gone")));
	changes[0] = step(SFR_STEP_SYNC, "name", "");
	CHECK_EQ(sfr_directory_steps_carry_out(changes, 2, &nr_done), -ENOTDIR);
	changes[0] = step((enum sfr_directory_step_kind)99, "name", "");
	CHECK_EQ(sfr_directory_steps_carry_out(changes, 2, &nr_done), -EINVAL);
	CHECK(file_exists(dir_path(dir, "gone")));
	dir_remove(dir);
}

TEST(short_write_is_continued_and_a_late_error_fails_the_step)
{
	struct sfr_fault shorter = { .call = "pwrite", .nth = 1, .limit = 2 };
	struct sfr_fault stuck = {
		.call = "pwrite", .nth = 1, .sticky = 1, .err = EINTR, .limit = -1
	};
	struct sfr_fault nothing = { .call = "pwrite", .nth = 1, .sticky = 1, .limit = 0 };
	struct sfr_fault late = { .call = "close", .nth = 1, .err = EDQUOT, .limit = -1 };
	struct sfr_directory_step changes;
	size_t nr_done;

	make_dir("/var/tmp");
	changes = step(SFR_STEP_WRITE, "long", "a long text");
	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr_inject_add_fault(&shorter), 0);
	CHECK_EQ(sfr_directory_steps_carry_out(&changes, 1, &nr_done), 0);
	CHECK(file_is(changes.path, "a long text", 11));
	CHECK_EQ(sfr_inject_count_calls("pwrite"), 2);
	sfr_inject_clear();
	CHECK_EQ(sfr_inject_add_fault(&stuck), 0);
	(void)unlink(changes.path);
	CHECK_EQ(sfr_directory_steps_carry_out(&changes, 1, &nr_done), -EINTR);
	sfr_inject_clear();
	CHECK_EQ(sfr_inject_add_fault(&nothing), 0);
	(void)unlink(changes.path);
	CHECK_EQ(sfr_directory_steps_carry_out(&changes, 1, &nr_done), -EIO);
	sfr_inject_clear();
	/* as a network file system reports it, without a sync */
	CHECK_EQ(sfr_inject_add_fault(&late), 0);
	(void)unlink(changes.path);
	CHECK_EQ(sfr_directory_steps_carry_out(&changes, 1, &nr_done), -EDQUOT);
	sfr_inject_uninstall();
	dir_remove(dir);
}

/* A file system without directory syncs gives no error. */
TEST(failed_step_is_reported_and_ends_the_list)
{
	static const int errors[] = { EIO, ENOSPC, EACCES, EMFILE, EINVAL };
	struct sfr_directory_step changes[NR_COMMIT];
	int fds = nr_fds();

	make_dir("/var/tmp");
	for (size_t e = 0; e < sizeof(errors) / sizeof(errors[0]); e++) {
		FOR_EVERY_FAILURE(run, "*", errors[e])
		{
			size_t nr_done;
			int rc;

			put_old();
			plan_commit(changes);
			rc = sfr_directory_steps_carry_out(changes, NR_COMMIT, &nr_done);
			check_end_fault(&run);
			CHECK_EQ(nr_fds(), fds);
			CHECK(rc == 0 || rc == -errors[e]);
			CHECK(rc == 0 || check_acted(&run));
			CHECK_EQ(rc == 0, nr_done == NR_COMMIT);
			CHECK(file_is(dir_path(dir, "name"), nr_done > 2 ? "new" : "old", 3));
			CHECK_EQ(file_exists(dir_path(dir, "gone")), nr_done <= 4);
		}
	}
	dir_remove(dir);
}

TEST(listing_has_every_name_of_a_large_directory)
{
	char *names, name[32];
	size_t len, nr = 0;

	make_dir("/dev/shm");
	CHECK_EQ(sfr_list_directory(dir, &names, &len), 0);
	CHECK_EQ(len, 0);
	sfr_directory_names_free(names);
	for (int i = 0; i < 2000; i++) { /* more names than fit into a page */
		(void)snprintf(name, sizeof(name), "name %d", i);
		file_put(dir_path(dir, name), "", 0);
	}
	CHECK_EQ(sfr_list_directory(dir, &names, &len), 0);
	for (size_t at = 0; at < len; at += strlen(names + at) + 1) {
		CHECK(file_exists(dir_path(dir, names + at)));
		nr++;
	}
	CHECK_EQ(nr, 2000);
	sfr_directory_names_free(names);
	CHECK_EQ(sfr_list_directory(dir_path(dir, "nowhere"), &names, &len), -ENOENT);
	CHECK(!names && len == 0);
	FOR_EVERY_FAILURE(run, "*", ENOMEM)
	{
		int rc = sfr_list_directory(dir, &names, &len);

		check_end_fault(&run);
		CHECK(rc == 0 || (rc == -ENOMEM && !names && check_acted(&run)));
		sfr_directory_names_free(names);
	}
	dir_remove(dir);
}

BEGIN
{
	save_fill();
	return true;
}
