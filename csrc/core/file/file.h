/* One file's life, and what temporaries are. */
#ifndef SFR_FILE_H
#define SFR_FILE_H

#include <stdatomic.h>

#include "sfr/state.h"
#include "sfr/place.h"
#include "base/base.h"

/* ---- dir.c ---- */

/* "dir/name", malloc'ed, or NULL. */
char *sfr__path_join(const char *dir, const char *name);
/* Calls `each` with the names in a directory, but for "." and "..", until it answers other than 0. That
 * answer, 0, or -errno of the directory. */
int sfr__dir_each(const char *dir, int (*each)(void *arg, const char *name), void *arg);
/* Syncs the entries of a directory: 0, also where its file system has no such thing, or -errno. */
int sfr__dir_sync(const char *dir);

/* ---- tmp.c ---- */

#define SFR__TMP_NAME_LEN 128 /* more than the longest name we make */

/* A temporary's name and its entry in the list of this process's live ones; part of its file. */
struct sfr__tmp {
	struct sfr__tmp *next;
	uint64_t serial; /* of this process; part of the name. 0 = not in the list */
	char name[SFR__TMP_NAME_LEN];
};

/* Makes and locks a new temporary in the open directory `dir`: 0 and *fd_out, and `tmp` is in the
 * list of live ones until sfr__tmp_forget. `err` gets phase and code, which are returned. */
int sfr__tmp_make(int dir, struct sfr__tmp *tmp, int *fd_out, struct sfr_err *err);
/* Takes it out of the list: from now on others may clear it away. Call it when the name is gone,
 * and before the descriptor is closed. Twice is fine. */
void sfr__tmp_forget(struct sfr__tmp *tmp);
/* Unlinks what dead writers of this boot left in the open directory `dir`, whose path is `path`;
 * names once a process, in a notice, those of other boots and those of which nothing can be known.
 * Never fails: what cannot be cleared today is there tomorrow. */
void sfr__tmp_clean(int dir, const char *path);
/* Is `path`, whose last component is `name`, a temporary whose writer lives (in this process, or
 * holding the lock in another), or one of which that cannot be told? */
bool sfr__tmp_may_be_live(const char *path, const char *name);

/* ---- file.c, remove.c (steps.c: sfr/steps.h) ---- */

/* How far a file is; file.c has the diagram. */
enum sfr__file_state {
	SFR__FILE_NONE, /* all zero, or after fini */
	SFR__FILE_NAMED,
	SFR__FILE_OPEN,
	SFR__FILE_SYNCED,
	SFR__FILE_RENAMED, /* the new file is there; its directory's sync failed */
	SFR__FILE_DONE,
	SFR__FILE_BROKEN, /* a step other than a write failed: only fini may follow */
};

/* One file's life: temporary in the same directory -> data -> fdatasync -> rename ->
 * fsync(directory). Every step is called at most once (SFR_ESTATE otherwise), but for writes,
 * which may come from several threads at a time. */
struct sfr__file {
	char *dir, *name; /* the directory's path, the destination's name in it */
	int dir_fd, fd;   /* -1 = none. The directory is opened once, before anything else */
	uint64_t len;
	uint32_t io_mode; /* SFR_IO_* */
	bool durable, renamed;
	/* calls to the file system that have not returned, and when the last one was made or did */
	atomic_uint nr_asked;
	_Atomic uint64_t asked_ns;
	char why_buffered[160], why_unsynced[160]; /* the directory; "" = it was not so */
	enum sfr__file_state state;
	uint64_t fork_generation;
	struct sfr__tmp tmp; /* the file may not be moved in memory between open and fini */
};

/* Copies the names. -ENOMEM. */
int sfr__file_init(struct sfr__file *f, const char *dir, const char *name, uint64_t len,
		   bool durable);
/* Opens the directory (so that one which could not be synced is refused before anything is
 * written), clears dead temporaries of this boot out of it, makes and locks the temporary, probes O_DIRECT with a real write of one page, preallocates. `err` gets phase and code. */
int sfr__file_open(struct sfr__file *f, struct sfr_err *err);
/* Writes all of it or fails; short writes and EINTR are gone on with. With O_DIRECT buf, len and
 * off are multiples of 4096: so the last page may go beyond the file's length. */
int sfr__file_write(struct sfr__file *f, const void *buf, size_t len, uint64_t off,
		    struct sfr_err *err);
/* Cuts the file to its length, which the last page may have gone beyond; fdatasync, unless not
 * durable. A failure is final: never called again on this descriptor. */
int sfr__file_sync(struct sfr__file *f, struct sfr_err *err);
/* rename, then fsync of the directory unless not durable. After a failure of the latter
 * f->renamed is true: the new file is there but not known durable. What is at the path and is
 * neither a regular file nor a link is refused (-EISDIR, -EINVAL), in the log's order. */
int sfr__file_commit(struct sfr__file *f, struct sfr_err *err);
/* Since when some call of open, write, sync or fini waits for the file system, and none of them has
 * been answered (sfr__now_ns). 0: none waits. Any thread. */
uint64_t sfr__file_asked_since(const struct sfr__file *f);
/* Unlinks the temporary if there is one and it was not renamed, closes, frees. Any state, twice
 * as well. In a forked child it only frees. */
void sfr__file_fini(struct sfr__file *f);
/* Removes a file, link or directory tree; a missing name is no error. Temporaries whose writers
 * live, of this process or another on this machine, are left alone (their saves were submitted
 * later), and with them the directories that hold them. What cannot be removed does not keep the
 * rest from going, but for what makes a directory a checkpoint, which goes first; the first error is
 * returned. Else not synced: remove.c says why. Where `heard_ns` is
 * given, it gets the time after each name: a large tree takes long and answers all the time. */
int sfr__file_remove(const char *path, _Atomic uint64_t *heard_ns, struct sfr_err *err);

#endif
