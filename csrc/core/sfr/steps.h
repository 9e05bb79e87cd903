/* Changes of directories that somebody else has planned, taken together. See file/steps.c. */
#ifndef SFR_STEPS_PUBLIC_H
#define SFR_STEPS_PUBLIC_H

#include <stddef.h>

enum sfr_step_kind {
	SFR_STEP_WRITE, /* a new file `path` with these bytes; one that is there is -EEXIST */
	SFR_STEP_WRITE_SYNCED, /* the same, on the disk */
	SFR_STEP_SYNC,         /* the entries of the directory `path`, where its file system can */
	SFR_STEP_RENAME,       /* `path` to the name that the bytes say */
	SFR_STEP_UNLINK,       /* `path`; a missing name is no error */
};

struct sfr_step {
	enum sfr_step_kind kind;
	const char *path;
	const char *bytes; /* a zero follows them */
	size_t len;
};
/* Takes the steps in their order, up to the first that fails: 0, or its -errno, and nothing of those
 * behind it is done. *nr_done steps have been taken. Nothing is undone: a file may have been made
 * in part. Blocks on file systems. */
int sfr_steps(const struct sfr_step *steps, size_t nr_steps, size_t *nr_done);
/* What stands in the directory `path`: malloc'ed names, each with a zero behind it, *len bytes in
 * all. 0 and they are the caller's, for sfr_names_free; or -errno. */
int sfr_names(const char *path, char **names, size_t *len);
void sfr_names_free(char *names);

#endif
