/* A directory that is filled under a temporary name and put in place in one step. file/folder.c
 * implements it; python/stillframe/_save/directory.py calls the steps. */
#ifndef SFR_FOLDER_PUBLIC_H
#define SFR_FOLDER_PUBLIC_H

#include "sfr/err.h"

struct sfr_folder;

/* Makes an object for the directory `dir`/`name`, and nothing on the disk yet. With `durable`,
 * everything is synced. One thread at a time may use the object. Returns 0 or -errno. */
int sfr_folder_new(const char *dir, const char *name, int durable, struct sfr_folder **out);
/* Opens `dir`, removes what dead writers left in it, and makes a temporary directory next to
 * `name`. The temporary directory is locked until sfr_folder_end_and_clean_up, or until this
 * process ends. This function and the others that take `err` return 0 or the code that they put
 * into `err`. */
int sfr_folder_make_temporary(struct sfr_folder *folder, struct sfr_err *err);
/* Returns the path of the temporary directory; NULL before it is open. */
const char *sfr_folder_temporary_path(const struct sfr_folder *folder);
/* Syncs every file in the temporary directory, then every directory, the deepest first. Without
 * `durable` nothing is synced. *nbytes is the sum of the files' lengths. From now on nobody may
 * write to the directory. */
int sfr_folder_sync(struct sfr_folder *folder, uint64_t *nbytes, struct sfr_err *err);
/* Renames the temporary directory to `name` and syncs `dir`. An existing directory of this name
 * gets a temporary name; anything else is not replaced (-ENOTDIR). After an error in the phase
 * SFR_PHASE_SYNC_DIR the new directory is in place but may not be durable. After any other error
 * the old directory is in place. */
int sfr_folder_commit(struct sfr_folder *folder, struct sfr_err *err);
/* Removes the new directory before a commit, the old one after it. If SFR_PHASE_SYNC_DIR failed,
 * both stay: the next save into `dir` syncs `dir` and then removes the old directory. */
int sfr_folder_end_and_clean_up(struct sfr_folder *folder, struct sfr_err *err);
/* Clears and frees the object; a forked child only frees it. Accepts NULL. */
void sfr_folder_free(struct sfr_folder *folder);

/* Cleans up in `dir` after writers that died, as each save into `dir` does. Puts back directories
 * that they had moved aside. Never fails. */
void sfr_clean_up_after_dead_writers(const char *dir);

#endif
