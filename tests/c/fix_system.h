/* Fixture: files in which the system tells what it has, written by a test. Who leads open() of /proc
 * and /sys to them is the test's business. */
#ifndef FIX_SYSTEM_H
#define FIX_SYSTEM_H

#include <limits.h>
#include <string.h>
#include <sys/stat.h>

#include "check.h"

static char root[] = "/tmp/sfr_system_XXXXXX"; /* for mkdtemp */

/* Where a file of the system's is, below `root`; static until the thread's next call. */
static inline char *system_path(const char *path)
{
	static _Thread_local char full[PATH_MAX];

	(void)snprintf(full, sizeof(full), "%s%s", root, path);
	return full;
}

/* Writes a file of the system's, with its directories. */
static inline void tell(const char *path, const char *text)
{
	char *full = system_path(path);
	FILE *file;

	for (char *slash = full + strlen(root) + 1; (slash = strchr(slash, '/')) != NULL; slash++) {
		*slash = '\0';
		(void)mkdir(full, 0777);
		*slash = '/';
	}
	file = fopen(full, "w");
	if (!CHECK(file != NULL))
		return;
	CHECK(fputs(text, file) >= 0);
	CHECK_EQ(fclose(file), 0);
}

#endif
