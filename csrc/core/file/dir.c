/* Helpers for directories: make the path of an entry, visit the names, sync. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "file/file.h"

char *sfr__path_join(const char *dir, const char *name)
{
	size_t dir_len = strlen(dir), name_len = strlen(name);
	char *path = sfr_sys.malloc(dir_len + 1 + name_len + 1);

	if (!path)
		return NULL;
	memcpy(path, dir, dir_len);
	path[dir_len] = '/';
	memcpy(path + dir_len + 1, name, name_len + 1);
	return path;
}

int sfr__dir_each(const char *dir, int (*each)(void *arg, const char *name), void *arg)
{
	DIR *stream = sfr_sys.opendir(dir);
	int rc = stream ? 0 : -errno;

	while (rc == 0) {
		struct dirent *entry;

		errno = 0;
		entry = sfr_sys.readdir(stream);
		if (!entry) {
			rc = -errno; /* 0 after the last entry */
			break;
		}
		if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
			rc = each(arg, entry->d_name);
	}
	if (stream)
		(void)sfr_sys.closedir(stream); /* cannot fail: the stream is valid */
	return rc;
}

int sfr__dir_sync(const char *dir)
{
	int fd = sfr__fd_open(dir, O_RDONLY | O_DIRECTORY, 0), rc;

	if (fd < 0)
		return fd;
	rc = sfr_sys.fsync(fd) < 0 ? -errno : 0;
	(void)sfr__fd_close(fd); /* nothing was written */
	if (rc == -EINVAL || rc == -ENOTSUP || rc == -ENOSYS)
		return 0; /* the file system cannot sync directories */
	return rc;
}
