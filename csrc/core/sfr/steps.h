/* A list of directory changes, carried out in one call. file/steps.c implements it. */
#ifndef SFR_STEPS_PUBLIC_H
#define SFR_STEPS_PUBLIC_H

#include <stddef.h>

enum sfr_directory_step_kind {
	SFR_STEP_WRITE, /* creates the file `path` with these bytes; -EEXIST if there is one */
	SFR_STEP_WRITE_SYNCED, /* does the same and syncs the file */
	SFR_STEP_SYNC,         /* syncs the directory `path`, if its file system can */
	SFR_STEP_RENAME,       /* renames `path` to the name in `bytes` */
	SFR_STEP_UNLINK,       /* removes `path`; no error if there is none */
};

struct sfr_directory_step {
	enum sfr_directory_step_kind kind;
	const char *path;
	const char *bytes; /* followed by a zero byte, which `len` does not count */
	size_t len;
};
/* Takes the steps in order, up to the first that fails. Returns its -errno, else 0. *nr_done counts
 * the steps that succeeded. Nothing is undone: a file may be written in part. */
int sfr_directory_steps_carry_out(const struct sfr_directory_step *steps, size_t nr_steps,
				  size_t *nr_done);
/* Lists a directory. *names gets zero-terminated names, *len bytes in all, which the caller frees
 * with sfr_directory_names_free. Returns 0 or -errno. */
int sfr_list_directory(const char *path, char **names, size_t *len);
void sfr_directory_names_free(char *names);

#endif
