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
/* Calls `each` with each name in a directory, except "." and "..", until it returns nonzero.
 * Returns that value, or 0 after the last name, or -errno if the directory cannot be read. */
int sfr__dir_each(const char *dir, int (*each)(void *arg, const char *name), void *arg);
/* Syncs the entries of a directory. Returns 0 or -errno. A file system that cannot sync directories
 * is no error: 0. */
int sfr__dir_sync(const char *dir);

/* ---- tmp.c ---- */

#define SFR__TMP_NAME_LEN 128 /* longer than any name made here */

/* The name of a temporary, and its entry in this process's list of temporaries that are being
 * written. Embedded in the object that writes the temporary. */
struct sfr__tmp {
	struct sfr__tmp *next;
	uint64_t serial; /* unique in the process, part of the name; 0: not in the list */
	char name[SFR__TMP_NAME_LEN];
};

/* Makes and locks a temporary in the open directory `dir`, and adds `tmp` to the list. Returns 0,
 * with the temporary's descriptor in *fd_out, or the code that it puts into `err`. After success
 * the caller calls sfr__tmp_forget and then closes the descriptor. */
int sfr__tmp_make(int dir, struct sfr__tmp *tmp, int *fd_out, struct sfr_err *err);
/* Removes a temporary from the list, so that other saves may remove its file. Called when the file
 * was renamed or removed, and before its descriptor is closed. Idempotent. */
void sfr__tmp_forget(struct sfr__tmp *tmp);
/* Returns whether `path` is a temporary whose writer may be alive: the writer is in this process,
 * another process has the lock, or the lock's state is unknown. `name` is the last component of
 * `path`. */
bool sfr__tmp_may_be_live(const char *path, const char *name);

/* ---- clean.c ---- */

/* Removes the temporaries of dead writers of this boot from the open directory `dir`, whose path is
 * `path`, and puts directories back that those writers had moved aside. A notice names, once per
 * process, each temporary of another boot or of a writer whose state is unknown. Errors are
 * ignored, because the next save tries again. */
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
 * fsync(directory). Writes may come from several threads at a time. Every other step is called at
 * most once; a second call returns SFR_ESTATE. */
struct sfr__file {
	char *dir, *name; /* path of the directory, and the destination's name in it */
	int dir_fd, fd;   /* descriptors of the directory and of the temporary; -1: none */
	uint64_t len;     /* bytes of the complete file */
	uint32_t io_mode; /* SFR_IO_* */
	bool durable, renamed;
	/* the number of calls to the file system that have not returned; and the time (sfr__now_ns)
	 * when the last call began or returned */
	atomic_uint nr_asked;
	_Atomic uint64_t asked_ns;
	/* why the file was written through the page cache, or "" if it was not; and why the
	 * directory was not synced, or "" if it was */
	char why_buffered[160], why_unsynced[160];
	enum sfr__file_state state;
	uint64_t fork_generation; /* the maker's; it differs in a child, which must not use this */
	/* a list points to this, so the struct must not move between open and fini */
	struct sfr__tmp tmp;
};

/* Initialises a file of `len` bytes, which will be dir/name. Copies both names. With `durable` the
 * later steps sync the file and its directory. 0 or -ENOMEM. */
int sfr__file_init(struct sfr__file *f, const char *dir, const char *name, uint64_t len,
		   bool durable);
/* Opens the directory first, so that a directory that cannot be synced is refused before anything
 * is written. Then removes dead temporaries of this boot from it, makes and locks the temporary,
 * tests O_DIRECT with a real write of one page, and reserves space. This function and the next
 * three return 0, or the code that they put into `err`. */
int sfr__file_open(struct sfr__file *f, struct sfr_err *err);
/* Writes all bytes or fails; retries short writes and EINTR. With O_DIRECT buf, len and off are
 * multiples of 4096, so the last page may extend beyond the file's length. */
int sfr__file_write(struct sfr__file *f, const void *buf, size_t len, uint64_t off,
		    struct sfr_err *err);
/* Cuts the file to its length and, for a durable save, calls fdatasync. A failure is final:
 * fdatasync is never called again on this descriptor. */
int sfr__file_sync(struct sfr__file *f, struct sfr_err *err);
/* Renames the file and, for a durable save, syncs the directory. If only the sync fails, f->renamed
 * is true: the new file exists but may not be durable. Refuses to replace anything but a regular
 * file or a link (-EISDIR, -EINVAL). Refuses also if the directory's path leads to another
 * directory than at the open (-ESTALE), because the file would not appear at its path. */
int sfr__file_commit(struct sfr__file *f, struct sfr_err *err);
/* While calls of open, write, sync or fini wait for the file system, returns the time (sfr__now_ns)
 * when one of them last began or returned; else 0. Any thread may call it. */
uint64_t sfr__file_asked_since(const struct sfr__file *f);
/* Removes the temporary unless it was renamed, closes the descriptors and frees the names. Callable
 * in any state; idempotent. In a forked child it only frees. */
void sfr__file_fini(struct sfr__file *f);
/* Removes a file, link or directory tree; a missing name is no error. Keeps temporaries whose
 * writers live on this machine (their saves were submitted later), and the directories above them.
 * If a name cannot be removed, the other names still are. But if the metadata of a distributed
 * checkpoint cannot be removed, its data files are kept. Returns 0, or the first error, which is
 * also in `err`. *answered_ns, unless NULL, gets the time (sfr__now_ns) before each name: removing
 * a large tree takes long, although its file system answers. */
int sfr__file_remove(const char *path, _Atomic uint64_t *answered_ns, struct sfr_err *err);
/* Does the same for a directory that only its maker uses, and keeps no temporaries. */
int sfr__file_remove_own(const char *path, struct sfr_err *err);

#endif
