/* Files as the core writes and removes them, and their temporaries. */
#ifndef SFR_FILE_H
#define SFR_FILE_H

#include <stdatomic.h>

#include "sfr/state.h"
#include "sfr/target.h"
#include "base/base.h"

/* ---- dir.c ---- */

/* Returns "dir/name", which the caller frees with sfr_sys.free, or NULL without memory. */
char *sfr__path_join(const char *dir, const char *name);
/* Calls `each` with each name in a directory, except "." and "..", until `each` returns nonzero.
 * Returns that value, 0 after the last name, or -errno if the directory cannot be read. */
int sfr__dir_each(const char *dir, int (*each)(void *arg, const char *name), void *arg);
/* Syncs a directory's entries, if the file system can. Returns 0 or -errno. */
int sfr__dir_sync(const char *dir);

/* ---- tmp.c ---- */

#define SFR__TMP_NAME_LEN 128 /* longer than any name made here */

/* A temporary that this process is writing. Embedded in the object that writes it. */
struct sfr__tmp {
	struct sfr__tmp *next; /* in the list of live temporaries (tmp.c) */
	uint64_t serial;       /* unique in the process, part of the name; 0: not in the list */
	char name[SFR__TMP_NAME_LEN];
};

/* Makes and locks a temporary in the open directory `dir`, and lists it as live. Returns 0 with the
 * temporary's descriptor in *fd_out, or the code that it puts into `err`. After success the caller
 * calls sfr__tmp_unlist and then closes the descriptor. */
int sfr__tmp_make(int dir, struct sfr__tmp *tmp, int *fd_out, struct sfr_err *err);
/* Removes a temporary from the list of live ones, before its descriptor is closed. Idempotent. */
void sfr__tmp_unlist(struct sfr__tmp *tmp);
/* Returns whether `path`, whose last component is `name`, is a temporary that may be live. */
bool sfr__tmp_may_be_live(const char *path, const char *name);

/* ---- clean.c ---- */

/* Cleans up after dead writers in the open directory `dir`, whose path is `path`. Removes their
 * temporaries, and puts back directories that they had moved aside. Sends a notice of each
 * temporary that may be alive elsewhere. Errors are ignored: the next save tries again. */
void sfr__tmp_clean_dir(int dir, const char *path);

/* ---- file.c, remove.c (folder.c: sfr/folder.h, steps.c: sfr/steps.h) ---- */

/* The state of a file; file.c has the diagram. */
enum sfr__file_state {
	SFR__FILE_NONE,  /* all zero, or after fini */
	SFR__FILE_NAMED, /* initialised, not opened */
	SFR__FILE_OPEN,
	SFR__FILE_SYNCED,
	SFR__FILE_RENAMED, /* renamed, but syncing the directory failed */
	SFR__FILE_DONE,
	SFR__FILE_BROKEN, /* a step other than a write failed: only fini may follow */
};

/* One file that is being written (file.c). Several threads may write at a time. Every other step is
 * called at most once; a second call returns SFR_ESTATE. */
struct sfr__file {
	char *dir, *name;          /* path of the directory, and the destination's name in it */
	int dir_fd, fd;            /* descriptors of the directory and of the temporary; -1: none */
	uint64_t len;              /* bytes of the complete file */
	uint32_t io_mode;          /* SFR_IO_* */
	bool durable;              /* sync the file and the directory */
	bool renamed;              /* the destination's name leads to this file */
	atomic_uint nr_unanswered; /* calls to the file system that have not returned */
	_Atomic uint64_t progress_ns; /* sfr__now_ns when such a call last began or returned */
	char why_buffered[160];       /* why the page cache was used; "" if it was not */
	char why_unsynced[160];       /* why the directory was not synced; "" if it was */
	enum sfr__file_state state;
	uint64_t fork_generation; /* of the process that called sfr__file_init */
	struct sfr__tmp tmp;      /* in a list: the struct must not move between open and fini */
};

/* Initialises the struct for a file of `len` bytes, with copies of the strings `dir` and `name`.
 * Returns 0 or -ENOMEM. */
int sfr__file_init(struct sfr__file *f, const char *dir, const char *name, uint64_t len,
		   bool durable);
/* Opens and cleans the directory, makes and locks the temporary, tests O_DIRECT, reserves space.
 * This function and the next three return 0 or the code that they put into `err`. */
int sfr__file_open(struct sfr__file *f, struct sfr_err *err);
/* Writes all bytes or fails. With SFR_IO_DIRECT, buf, len and off are multiples of 4096; the last
 * page may extend beyond the file's length. */
int sfr__file_write(struct sfr__file *f, const void *buf, size_t len, uint64_t off,
		    struct sfr_err *err);
/* Cuts the file to its length and syncs it if it is durable. A failure is final. */
int sfr__file_sync(struct sfr__file *f, struct sfr_err *err);
/* Renames the file and syncs the directory if the file is durable. If only the sync fails,
 * f->renamed is true: the new file is in place but may not be durable. Refuses the rename with:
 *
 *   -EISDIR, -EINVAL   the destination is neither a regular file nor a link
 *   -ESTALE            the path of the directory leads to another directory than at the open */
int sfr__file_commit(struct sfr__file *f, struct sfr_err *err);
/* Returns the time (sfr__now_ns) when a call to the file system last began or returned, or 0 if no
 * call is under way. Any thread may call it. */
uint64_t sfr__file_unanswered_since(const struct sfr__file *f);
/* Removes the temporary unless it was renamed, closes the descriptors and frees the names. Callable
 * in any state; idempotent. In a forked child only frees the names. */
void sfr__file_fini(struct sfr__file *f);
/* Removes a file, link or directory tree; a missing name is no error. Keeps live temporaries, and
 * the directories above them. Goes on after an error. But if the metadata of a distributed
 * checkpoint cannot be removed, its data files are kept. *answered_ns, unless NULL, gets the time
 * (sfr__now_ns) before each name, which shows that a long remove makes progress. Returns 0, or the
 * first error, which is also in `err`. */
int sfr__file_remove_tree(const char *path, _Atomic uint64_t *answered_ns, struct sfr_err *err);
/* Does the same, but removes live temporaries too: for a directory that no other save uses. */
int sfr__file_remove_tree_and_live_tmps(const char *path, struct sfr_err *err);

#endif
