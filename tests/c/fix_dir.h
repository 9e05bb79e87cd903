/* Directories to work in, and questions about them.
 *
 * Everything here calls the C library directly, not through sfr_sys: a test's own look at the
 * files must neither fail nor be counted. */
#ifndef FIX_DIR_H
#define FIX_DIR_H

#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>

#include "check.h"

/* One directory on the disk and one on tmpfs. Their file systems refuse different things. */
static const char *const dir_bases[] = { "/var/tmp", "/dev/shm" };
#define NR_DIR_BASES 2

/* Makes an empty directory below `base`. The path is static and valid until the next call. */
static inline const char *dir_make(const char *base)
{
	static char path[PATH_MAX];

	(void)snprintf(path, sizeof(path), "%s/sfr-test-XXXXXX", base);
	if (!CHECK(mkdtemp(path)))
		exit(EXIT_FAILURE);
	return path;
}

static inline int dir__remove_one(const char *path, const struct stat *st, int kind,
				  struct FTW *ftw)
{
	(void)st;
	(void)kind;
	(void)ftw;
	return remove(path);
}

static inline void dir_remove(const char *path)
{
	CHECK(nftw(path, dir__remove_one, 32, FTW_DEPTH | FTW_PHYS) == 0);
}

/* Returns "dir/name" in one of a few static buffers of the thread. Not inlined: otherwise gcc
 * reports an overlap if `dir` is such a path itself. */
__attribute__((noinline, unused)) static const char *dir_path(const char *dir, const char *name)
{
	static _Thread_local char paths[8][PATH_MAX];
	static _Thread_local unsigned next;
	char *path = paths[next++ % 8];

	CHECK(snprintf(path, PATH_MAX, "%s/%s", dir, name) < PATH_MAX);
	return path;
}

static inline void file_put(const char *path, const void *bytes, size_t len)
{
	FILE *file = fopen(path, "wb");

	if (!CHECK(file))
		return;
	CHECK(fwrite(bytes, 1, len, file) == len);
	CHECK(fclose(file) == 0);
}

/* Returns whether the file has exactly these bytes. */
static inline bool file_is(const char *path, const void *bytes, size_t len)
{
	FILE *file = fopen(path, "rb");
	char *got = malloc(len + 1);
	bool same =
		file && got && fread(got, 1, len + 1, file) == len && memcmp(got, bytes, len) == 0;

	free(got);
	if (file)
		(void)fclose(file);
	return same;
}

static inline bool file_exists(const char *path)
{
	struct stat st;

	return lstat(path, &st) == 0;
}

/* Counts the names in `dir` that begin with `prefix`, without "." and "..". `name_out`, if
 * given, receives a copy of the last one (NAME_MAX + 1 bytes). */
static inline int dir_count(const char *dir, const char *prefix, char *name_out)
{
	DIR *stream = opendir(dir);
	struct dirent *entry;
	int nr = 0;

	if (!CHECK(stream))
		return -1;
	while ((entry = readdir(stream))) {
		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0 ||
		    strncmp(entry->d_name, prefix, strlen(prefix)) != 0)
			continue;
		nr++;
		if (name_out)
			(void)snprintf(name_out, NAME_MAX + 1, "%s", entry->d_name);
	}
	(void)closedir(stream);
	return nr;
}

#define TEMPORARIES ".stillframe-"

/* Open descriptors of this process. */
static inline int nr_fds(void)
{
	return dir_count("/proc/self/fd", "", NULL) - 1; /* without the one that this count opens */
}

#endif
