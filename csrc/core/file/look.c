/* Where a path leads: every look at the file system that a save needs before it begins, together.
 *
 * The caller's thread asks this inside its call, and each look may take as long as a network file
 * system likes. So the binding lets go of the interpreter lock around all of them, once. What is
 * there is told; what is missing or refused is for the caller to look at closer, since there the
 * words matter and the time does not.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "file/file.h"

/* Splits off the last component of `path`, which may have been made real before. */
static const char *last_of(const char *path)
{
	const char *slash = strrchr(path, '/');

	return slash ? slash + 1 : path;
}

static int is_a_name(const char *last)
{
	return last[0] != '\0' && strcmp(last, ".") != 0 && strcmp(last, "..") != 0;
}

/* The real path of the directory that the first `len` bytes of `path` name. */
static int look_at_parent(const char *path, size_t len, struct sfr_place *place)
{
	char parent[SFR_PATH_MAX] = ".";
	struct stat st;

	if (len >= sizeof(parent))
		return -ENAMETOOLONG;
	if (len > 0) {
		memcpy(parent, path, len);
		parent[len] = '\0';
	}
	if (!sfr_sys.realpath(parent, place->parent) ||
	    sfr_sys.lstat(AT_FDCWD, place->parent, &st) < 0)
		return -errno;
	place->fs = (uint64_t)st.st_dev;
	place->readable = sfr_sys.faccessat(AT_FDCWD, place->parent, R_OK, AT_EACCESS) == 0;
	return S_ISDIR(st.st_mode) ? 0 : -ENOTDIR;
}

/* What stands at `parent`/`name`: its mode, 0 for nothing. */
static int look_at_name(struct sfr_place *place)
{
	char path[SFR_PATH_MAX + sizeof(place->name)];
	size_t len = strlen(place->parent);
	struct stat st;

	memcpy(path, place->parent, len);
	if (len > 1) /* all but the root */
		path[len++] = '/';
	memcpy(path + len, place->name, strlen(place->name) + 1);
	if (sfr_sys.lstat(AT_FDCWD, path, &st) < 0) {
		place->mode = 0;
		return errno == ENOENT ? 0 : -errno;
	}
	place->mode = st.st_mode;
	return 0;
}

int sfr_look(const char *path, int follow_link, struct sfr_place *place)
{
	char real[SFR_PATH_MAX];
	const char *last = last_of(path);
	struct stat st;
	int rc;

	if (!is_a_name(last) ||
	    (follow_link && sfr_sys.lstat(AT_FDCWD, path, &st) == 0 && S_ISLNK(st.st_mode))) {
		if (!sfr_sys.realpath(path, real))
			return -errno;
		path = real;
		last = last_of(path);
	}
	if (strlen(last) >= sizeof(place->name))
		return -ENAMETOOLONG;
	memcpy(place->name, last, strlen(last) + 1);
	/* "/name" stands in the root, and "name" in the directory that one is in. */
	rc = look_at_parent(path, (size_t)(last - path), place);
	return rc < 0 ? rc : look_at_name(place);
}
