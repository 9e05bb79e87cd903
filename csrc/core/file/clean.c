/* Removes the temporaries of dead writers. Each save cleans the directory that it writes to.
 *
 *   file                    removed while this process has its lock
 *   temporary directory     removed with its contents; after an exchange it is the old directory
 *   directory moved aside   put back if nothing has its name, else removed
 *
 * The parent is synced before an old directory is removed: otherwise a power failure may bring the
 * old directory back, without its files.
 *
 * Temporaries of another boot are only reported; tmp.c says why. */
#include <errno.h>
#include <string.h>

#include "file/tmp.h"

/* A directory whose dead temporaries are being removed. */
struct cleaning {
	const char *path;
	int dir_fd;                      /* open descriptor of the directory */
	char boot_id[SFR__BOOT_LEN + 1]; /* of the machine's current boot */
};

/* Syncs the parent, then removes the directory. If this fails, the next save tries again. */
static void remove_directory(const struct cleaning *cleaning, const char *path)
{
	struct sfr_err err = { .index = -1 };

	if (sfr__dir_sync(cleaning->path) == 0)
		(void)sfr__file_remove_tree(path, NULL,
					    &err); /* NULL: nobody watches its progress */
}

/* Puts back a directory that was moved aside, or removes it if its former name is in use. */
static void put_back_or_remove(const struct cleaning *cleaning, const char *name, const char *path,
			       const struct sfr__tmp_name *parsed)
{
	struct stat st;

	if (sfr_sys.lstat(cleaning->dir_fd, parsed->former_name, &st) == 0) {
		remove_directory(cleaning, path);
		return;
	}
	if (errno == ENOENT && sfr_sys.rename(cleaning->dir_fd, name, parsed->former_name) == 0)
		sfr__notice_post_text(
			"%s/%s was put back: the save that was to replace it did not end",
			cleaning->path, parsed->former_name);
}

/* Sends a notice of a temporary whose writer cannot be examined here. */
static void report_foreign(const struct cleaning *cleaning, const char *path,
			   const struct sfr__tmp_name *parsed)
{
	if (!sfr__tmp_mark_reported(path)) /* it was reported before */
		return;
	if (parsed->kind == SFR__TMP_OLD)
		sfr__notice_post_text(
			"%s is what %s/%s was before a save on another machine or in an "
			"earlier boot: rename it back if that save did not end",
			path, cleaning->path, parsed->former_name);
	else
		sfr__notice_post_text("%s is a temporary file of another machine or an earlier "
				      "boot: remove it if no save there uses it",
				      path);
}

/* Removes a temporary, or puts it back, if its writer is dead. `path` ends in `name`. */
static void clean_temporary(const struct cleaning *cleaning, const char *name, const char *path,
			    const struct sfr__tmp_name *parsed)
{
	char lock_name[SFR__TMP_NAME_LEN];
	enum sfr__tmp_writer_state life;
	int fd, code;

	if (strcmp(parsed->boot_id, cleaning->boot_id) != 0) {
		report_foreign(cleaning, path, parsed);
		return;
	}
	if (sfr__tmp_is_ours(parsed))
		return;
	memcpy(lock_name, name, parsed->lock_name_len); /* without a directory's ".d" or ".old-" */
	lock_name[parsed->lock_name_len] = 0;
	life = sfr__tmp_lock_if_dead(cleaning->dir_fd, lock_name, &fd, &code);
	if (life == SFR__TMP_UNKNOWN)
		sfr__tmp_report_unknown(path, code);
	if (life == SFR__TMP_DEAD || life == SFR__TMP_GONE) {
		if (parsed->kind == SFR__TMP_NEW)
			remove_directory(cleaning, path);
		else if (parsed->kind == SFR__TMP_OLD)
			put_back_or_remove(cleaning, name, path, parsed);
		else if (life == SFR__TMP_DEAD)
			/* if this fails, the next save tries again */
			(void)sfr_sys.unlink(cleaning->dir_fd, name);
	}
	if (fd >= 0)
		(void)sfr__fd_close(fd); /* nothing was written to it */
}

/* Called by sfr__dir_each for each name. Returns 0 or -ENOMEM. */
static int clean_if_temporary(void *arg, const char *name)
{
	const struct cleaning *cleaning = arg;
	struct sfr__tmp_name parsed;
	char *path;

	if (!sfr__tmp_parse(name, &parsed))
		return 0;
	path = sfr__path_join(cleaning->path, name);
	if (!path)
		return -ENOMEM;
	clean_temporary(cleaning, name, path, &parsed);
	sfr_sys.free(path);
	return 0;
}

void sfr__tmp_clean_dir(int dir, const char *dir_path)
{
	struct cleaning cleaning = { .path = dir_path, .dir_fd = dir };

	if (!sfr__tmp_get_boot_id(cleaning.boot_id))
		return; /* no temporary is known to be of this boot */
	/* on failure the next save tries again */
	(void)sfr__dir_each(dir_path, clean_if_temporary, &cleaning);
}
