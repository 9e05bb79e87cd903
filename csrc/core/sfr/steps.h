/* A list of directory changes, carried out in one call. file/steps.c implements it. */
#ifndef SFR_STEPS_PUBLIC_H
#define SFR_STEPS_PUBLIC_H

#include <stddef.h>

enum sfr_step_kind {
	SFR_STEP_WRITE, /* creates the file `path` with these bytes; -EEXIST if there is one */
	SFR_STEP_WRITE_SYNCED, /* does the same and syncs the file */
	SFR_STEP_SYNC,         /* syncs the directory `path`, if its file system can */
	SFR_STEP_RENAME,       /* renames `path` to the name in `bytes` */
	SFR_STEP_UNLINK,       /* removes `path`; no error if there is none */
};

struct sfr_step {
	enum sfr_step_kind kind;
	const char *path;
	const char *bytes; /* followed by a zero byte */
	size_t len;
};
/* Takes the steps in order up to the first that fails, and returns 0 or its -errno. *nr_done steps
 * were taken; nothing is undone, so a file may exist in part. Blocks on file systems. */
int sfr_steps_take(const struct sfr_step *steps, size_t nr_steps, size_t *nr_done);
/* Lists the directory `path`: *names gets malloc'ed, zero-terminated names of *len bytes in all,
 * which the caller frees with sfr_names_free. 0 or -errno. */
int sfr_names(const char *path, char **names, size_t *len);
void sfr_names_free(char *names);

#endif
