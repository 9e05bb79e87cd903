/* A directory that is filled under a temporary name and put in place in one step. file/folder.c
 * implements it; python/stillframe/_save/directory.py decides when each step is taken. */
#ifndef SFR_FOLDER_PUBLIC_H
#define SFR_FOLDER_PUBLIC_H

#include "sfr/err.h"

struct sfr_folder;

/* Makes an object for the directory `dir`/`name`; nothing is on the disk yet. One thread at a time
 * may use it. -ENOMEM. */
int sfr_folder_new(const char *dir, const char *name, int durable, struct sfr_folder **out);
/* Opens `dir`, removes what dead writers left in it, and makes a temporary directory beside
 * `name`. The directory is locked as long as this process lives. Every failure below is in `err`,
 * with its phase. */
int sfr_folder_open(struct sfr_folder *folder, struct sfr_err *err);
/* Returns the path of the temporary directory; NULL before it is open. */
const char *sfr_folder_path(const struct sfr_folder *folder);
/* Syncs every file below it and every directory, those deeper down first; without `durable`
 * nothing. Adds up the files' lengths in *nbytes. Nobody may write there any more. */
int sfr_folder_sync(struct sfr_folder *folder, uint64_t *nbytes, struct sfr_err *err);
/* Renames it to `name` and syncs `dir`. A directory of that name gets the temporary name. Refuses
 * to replace anything else (-ENOTDIR). A failure in phase SFR_PHASE_SYNC_DIR means that the new
 * directory is in place and may not be durable; after any other the old one is. */
int sfr_folder_commit(struct sfr_folder *folder, struct sfr_err *err);
/* Removes what is not needed: the new directory before a commit, the old one after it. If the last
 * sync of a commit failed, both stay for the next save into `dir`, which syncs it first. */
int sfr_folder_clear(struct sfr_folder *folder, struct sfr_err *err);
/* Clears and frees it; in a forked child it only frees. Accepts NULL. */
void sfr_folder_free(struct sfr_folder *folder);

/* Cleans up in `dir` behind writers that died, as each save into it does: directories that they had
 * moved aside are put back. Never fails. */
void sfr_tidy(const char *dir);

#endif
