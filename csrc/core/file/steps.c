/* A list of directory changes: files written, synced, renamed, removed.
 *
 * Python decides how the checkpoint of many ranks is committed. But each system call made from
 * Python releases the interpreter lock. While another thread computes, getting the lock back takes
 * 5 ms. So Python makes a list of changes, and the binding releases the lock once for the list.
 *
 * The caller knows which order is safe, and what to undo after a failure. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "file/file.h"
#include "sfr/steps.h"

/* ---- steps ---- */

/* Returns 0 or -errno. */
static int write_file(const struct sfr_directory_step *step)
{
	int fd = sfr__fd_open(step->path, O_WRONLY | O_CREAT | O_EXCL, 0666), rc, close_rc;
	size_t done;

	if (fd < 0)
		return fd;
	rc = sfr__write_all(fd, step->bytes, step->len, 0, &done);
	if (rc == 0 && step->kind == SFR_STEP_WRITE_SYNCED && sfr_sys.fsync(fd) < 0)
		rc = -errno;
	/* without a sync, a network file system may report a full disk only here */
	close_rc = sfr__fd_close(fd);
	return rc < 0 ? rc : close_rc;
}

/* Returns 0 or -errno; -EINVAL for an unknown kind. */
static int carry_out_step(const struct sfr_directory_step *step)
{
	switch (step->kind) {
	case SFR_STEP_WRITE:
	case SFR_STEP_WRITE_SYNCED:
		return write_file(step);
	case SFR_STEP_SYNC:
		return sfr__dir_sync(step->path);
	case SFR_STEP_RENAME: /* `bytes` is the new name */
		return sfr_sys.rename(AT_FDCWD, step->path, step->bytes) < 0 ? -errno : 0;
	case SFR_STEP_UNLINK:
		return sfr_sys.unlink(AT_FDCWD, step->path) < 0 && errno != ENOENT ? -errno : 0;
	}
	return -EINVAL;
}

int sfr_directory_steps_carry_out(const struct sfr_directory_step *steps, size_t nr_steps,
				  size_t *nr_done)
{
	for (*nr_done = 0; *nr_done < nr_steps; (*nr_done)++) {
		int rc = carry_out_step(&steps[*nr_done]);

		if (rc < 0)
			return rc;
	}
	return 0;
}

/* ---- names ---- */

/* Names one after another, each with its final zero byte. */
struct name_list {
	char *bytes;
	size_t len, capacity;
};

/* Called by sfr__dir_each for each name. Returns 0 or -ENOMEM. */
static int add_name(void *arg, const char *name)
{
	struct name_list *list = arg;
	size_t len = strlen(name) + 1;

	if (list->capacity - list->len < len) {
		size_t capacity = 2 * list->capacity + len + SFR_PAGE;
		char *bytes = sfr_sys.realloc(list->bytes, capacity);

		if (!bytes)
			return -ENOMEM;
		list->bytes = bytes;
		list->capacity = capacity;
	}
	memcpy(list->bytes + list->len, name, len);
	list->len += len;
	return 0;
}

int sfr_list_directory(const char *path, char **names, size_t *len)
{
	struct name_list list = { 0 };
	int rc = sfr__dir_each(path, add_name, &list);

	if (rc < 0)
		sfr_sys.free(list.bytes);
	*names = rc < 0 ? NULL : list.bytes;
	*len = rc < 0 ? 0 : list.len;
	return rc;
}

void sfr_directory_names_free(char *names)
{
	sfr_sys.free(names);
}
