/* The life of one file, and temporaries. */
#ifndef SFR_FILE_H
#define SFR_FILE_H

#include <stdatomic.h>

#include "sfr/state.h"
#include "sfr/target.h"
#include "base/base.h"

/* ---- dir.c ---- */

/* Returns "dir/name", malloc'ed, or NULL. */
char *sfr__path_join(const char *dir, const char *name);
/* Calls `each` with the names in a directory, except "." and "..", until it returns nonzero.
 * Returns that value, 0, or -errno of the directory. */
int sfr__dir_each(const char *dir, int (*each)(void *arg, const char *name), void *arg);
/* Syncs the entries of a directory. Returns 0, also if its file system cannot, or -errno. */
int sfr__dir_sync(const char *dir);

/* ---- tmp.c ---- */

#define SFR__TMP_NAME_LEN 128 /* longer than any name made here */

/* A temporary's name and its entry in the list of this process's live ones; embedded in its
 * file. */
struct sfr__tmp {
	struct sfr__tmp *next;
	uint64_t serial; /* unique in the process, part of the name; 0: not in the list */
	char name[SFR__TMP_NAME_LEN];
};

/* Makes and locks a temporary in the open directory `dir`. Returns 0 and *fd_out, and lists `tmp`
 * as live until sfr__tmp_forget; or returns the code in `err`, with its phase. */
int sfr__tmp_make(int dir, struct sfr__tmp *tmp, int *fd_out, struct sfr_err *err);
/* Removes it from the list, after which others may remove the file. Called when the name is gone
 * and before the descriptor is closed. Idempotent. */
void sfr__tmp_forget(struct sfr__tmp *tmp);
/* Returns whether `path`, with last component `name`, is a temporary whose writer lives (in this
 * process, or with the lock in another) or may live. */
bool sfr__tmp_may_be_live(const char *path, const char *name);

/* ---- clean.c ---- */

/* Removes what dead writers of this boot left in the open directory `dir`, whose path is `path`.
 * Puts directories back that they had moved aside. A notice names, once per process, temporaries of
 * other boots and those whose writer's state is unknown. Never fails; the next save tries again. */
void sfr__tmp_clean(int dir, const char *path);

/* ---- file.c, remove.c (folder.c: sfr/folder.h, steps.c: sfr/steps.h) ---- */

/* The state of a file; file.c has the diagram. */
enum sfr__file_state {
	SFR__FILE_NONE, /* all zero, or after fini */
	SFR__FILE_NAMED,
	SFR__FILE_OPEN,
	SFR__FILE_SYNCED,
	SFR__FILE_RENAMED, /* renamed, but syncing the directory failed */
	SFR__FILE_DONE,
	SFR__FILE_BROKEN, /* a step other than a write failed: only fini may follow */
};

/* The life of one file: temporary in the same directory -> data -> fdatasync -> rename ->
 * fsync(directory). Every step is called at most once (SFR_ESTATE otherwise), except writes, which
 * may come from several threads at a time. */
struct sfr__file {
	char *dir, *name; /* path of the directory, and the destination's name in it */
	int dir_fd, fd;   /* -1: none. The directory is opened once, first */
	uint64_t len;
	uint32_t io_mode; /* SFR_IO_* */
	bool durable, renamed;
	/* calls to the file system that have not returned, and when the last call began or
	 * returned */
	atomic_uint nr_asked;
	_Atomic uint64_t asked_ns;
	/* why the file was written through the page cache, and why the directory was not synced;
	 * "": it was not so */
	char why_buffered[160], why_unsynced[160];
	enum sfr__file_state state;
	uint64_t fork_generation;
	/* the list points here, so the file must not move between open and fini */
	struct sfr__tmp tmp;
};

/* Copies the names. -ENOMEM. */
int sfr__file_init(struct sfr__file *f, const char *dir, const char *name, uint64_t len,
		   bool durable);
/* Opens the directory first, so that one that cannot be synced is refused before anything is
 * written. Then removes dead temporaries of this boot from it, makes and locks the temporary, tests
 * O_DIRECT with a real write of one page, and reserves space. `err` gets phase and code. */
int sfr__file_open(struct sfr__file *f, struct sfr_err *err);
/* Writes all bytes or fails; retries short writes and EINTR. With O_DIRECT buf, len and off are
 * multiples of 4096, so the last page may extend beyond the file's length. */
int sfr__file_write(struct sfr__file *f, const void *buf, size_t len, uint64_t off,
		    struct sfr_err *err);
/* Cuts the file to its length, then fdatasync unless not durable. A failure is final: never called
 * again on this descriptor. */
int sfr__file_sync(struct sfr__file *f, struct sfr_err *err);
/* Renames the file, then syncs the directory unless not durable. If only the sync fails, f->renamed
 * is true: the new file exists but may not be durable. Refuses to replace anything but a regular
 * file or a link (-EISDIR, -EINVAL); the log's order decides what is there. Refuses too if the
 * directory's path leads to another directory by now (-ESTALE): the file would not appear at its
 * path. */
int sfr__file_commit(struct sfr__file *f, struct sfr_err *err);
/* Returns since when (sfr__now_ns) calls of open, write, sync or fini have been waiting for the
 * file system without any answer; 0: none waits. Callable from any thread. */
uint64_t sfr__file_asked_since(const struct sfr__file *f);
/* Removes the temporary unless it was renamed, closes and frees. Any state; idempotent. In a forked
 * child it only frees. */
void sfr__file_fini(struct sfr__file *f);
/* Removes a file, link or directory tree; a missing name is no error. Keeps temporaries whose
 * writers live on this machine (their saves were submitted later), and the directories above them.
 * A name that cannot be removed does not stop the rest, except what makes a directory a checkpoint,
 * which must go first. Returns the first error. Not synced otherwise: remove.c says why.
 * *answered_ns, if given, gets the time after each name, because a large tree takes long but keeps
 * answering. */
int sfr__file_remove(const char *path, _Atomic uint64_t *answered_ns, struct sfr_err *err);
/* Does the same for a directory that only its maker uses, and keeps nothing. */
int sfr__file_remove_own(const char *path, struct sfr_err *err);

#endif
