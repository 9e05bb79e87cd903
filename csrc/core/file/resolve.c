/* Finds out where a path leads, with all the file system calls that a save needs before it begins.
 *
 * A network file system may take any time for each call. So the binding releases the interpreter
 * lock once around all of them. After an error Python examines the path again, for a good message.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "file/file.h"

/* Returns the part of the path after the last slash. */
static const char *last_component(const char *path)
{
	const char *slash = strrchr(path, '/');

	return slash ? slash + 1 : path;
}

static bool is_real_name(const char *last)
{
	return last[0] != '\0' && strcmp(last, ".") != 0 && strcmp(last, "..") != 0;
}

/* Sets target->parent, fs and readable for the directory named by the first `len` bytes of `path`
 * (0: the current directory). Returns 0 or -errno. */
static int resolve_parent(const char *path, size_t len, struct sfr_target *target)
{
	char parent[SFR_PATH_MAX] = ".";
	struct stat st;

	if (len >= sizeof(parent))
		return -ENAMETOOLONG;
	if (len > 0) {
		memcpy(parent, path, len);
		parent[len] = '\0';
	}
	if (!sfr_sys.realpath(parent, target->parent) ||
	    sfr_sys.lstat(AT_FDCWD, target->parent, &st) < 0)
		return -errno;
	target->fs = (uint64_t)st.st_dev;
	target->readable = sfr_sys.faccessat(AT_FDCWD, target->parent, R_OK, AT_EACCESS) == 0;
	return S_ISDIR(st.st_mode) ? 0 : -ENOTDIR;
}

/* Sets target->mode to the mode of parent/name, or 0 if there is none. Returns 0 or -errno. */
static int stat_name(struct sfr_target *target)
{
	char path[SFR_PATH_MAX + sizeof(target->name)];
	size_t len = strlen(target->parent);
	struct stat st;

	memcpy(path, target->parent, len);
	if (len > 1) /* for all but the root directory */
		path[len++] = '/';
	memcpy(path + len, target->name, strlen(target->name) + 1);
	if (sfr_sys.lstat(AT_FDCWD, path, &st) < 0) {
		target->mode = 0;
		return errno == ENOENT ? 0 : -errno;
	}
	target->mode = st.st_mode;
	return 0;
}

int sfr_resolve(const char *path, int follow_link, struct sfr_target *target)
{
	char real[SFR_PATH_MAX];
	const char *last = last_component(path);
	bool needs_real_path = !is_real_name(last); /* such as "a/.." */
	struct stat st;
	int rc;

	if (!needs_real_path && follow_link)
		needs_real_path = sfr_sys.lstat(AT_FDCWD, path, &st) == 0 && S_ISLNK(st.st_mode);
	if (needs_real_path) {
		if (!sfr_sys.realpath(path, real))
			return -errno;
		path = real;
		last = last_component(path);
	}
	if (strlen(last) >= sizeof(target->name))
		return -ENAMETOOLONG;
	memcpy(target->name, last, strlen(last) + 1);
	/* "/name" is in the root directory, and "name" in the current one. */
	rc = resolve_parent(path, (size_t)(last - path), target);
	return rc < 0 ? rc : stat_name(target);
}

void sfr_read_text(const char *path, char *text, size_t size)
{
	int fd = sfr_sys.open(AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
	size_t len = 0;
	ssize_t got = 1;

	while (fd >= 0 && got > 0 && len < size - 1) {
		got = sfr_sys.pread(fd, text + len, size - 1 - len, (off_t)len);
		len += got > 0 ? (size_t)got : 0;
	}
	if (fd >= 0)
		(void)sfr_sys.close(fd); /* nothing to lose: it was only read */
	text[len] = '\0';
}
