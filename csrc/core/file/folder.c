/* A directory that becomes visible in one step, or replaces another one in one step.
 *
 *   1  open      the parent, for all later steps
 *                a file next to the destination that carries the lock   (tmp.c)
 *                the temporary directory
 *   2            its user fills it: with saves of this library, or with any other writes
 *   3  sync      every file, then every directory, the deepest first
 *   4  exchange  with the destination, or rename if there is none: readers see only the old
 *                directory or only the new one
 *   5  sync      the parent: the new name is on the disk
 *   6  clear     removes the old directory, then the lock
 *
 * 3 before 4: otherwise the new name might reach the disk before the bytes. 5 before 6: until the
 * parent is synced, a power failure may bring the old directory back. If the sync fails, both
 * directories stay, and the next save into the parent cleans up (clean.c).
 *
 *         open           sync            commit             clear
 *   NEW ───────▶ OPEN ──────────▶ SYNCED ───────▶ DONE ──────────▶ CLEARED
 *                 │ ╲─ failed ─╮     │  ╲───────▶ PLACED (parent not synced) ──▶ CLEARED
 *                 │            ▼     │
 *                 │         BROKEN ◀─╯ failed
 *                 └────clear───┴──▶ CLEARED
 *
 * On NFS and some other file systems, which cannot exchange, step 4 is two renames:
 *
 *   4a  the old directory is moved aside, to a hidden name that contains its own name
 *   4b  the new one is renamed to the destination
 *
 * Between 4a and 4b a reader finds no directory. If 4b fails, 4a is undone. If the process dies in
 * between, the next save into the parent puts the old directory back, and so does a load that does
 * not find it (sfr_clean_up_after_dead_writers). After a power failure in between, a notice gives
 * its hidden name. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "file/tmp.h"
#include "sfr/folder.h"
#include "sfr/target.h"

enum state {
	NEW,     /* nothing is on the disk */
	OPEN,    /* being filled */
	SYNCED,  /* everything in it is on the disk */
	BROKEN,  /* a step failed; the destination is unchanged */
	PLACED,  /* in place; the parent could not be synced */
	DONE,    /* in place, and durable if that was asked for */
	CLEARED, /* only the destination is left */
};

struct sfr_folder {
	char *dir, *name;    /* the parent's path, and the destination's name in it */
	int dir_fd, lock_fd; /* descriptors of the parent and of the lock file; -1: none */
	bool durable;
	enum state state;
	uint64_t fork_generation;
	struct sfr__tmp tmp;                        /* the lock file */
	char temporary_name[SFR__TMP_NAME_LEN + 2]; /* the temporary directory: tmp.name + ".d" */
	char *temporary_path;                       /* NULL before sfr_folder_make_temporary */
	char *aside_name; /* hidden name of the old directory once it was moved aside; else NULL */
};

/* Changes the state after a failed step, and sets *err. Returns `code`. */
static int fail_step(struct sfr_folder *f, struct sfr_err *err, int code, enum sfr_phase phase,
		     const char *note)
{
	f->state = phase == SFR_PHASE_SYNC_DIR ? PLACED : BROKEN;
	sfr__err_set_if_unset(err, code, phase, note);
	return code;
}

/* Returns 0, SFR_ESTATE if the state is not the required one, or SFR_EFORK in a forked child. */
static int check_state(const struct sfr_folder *f, enum state required, struct sfr_err *err)
{
	int rc = f->state == required ? 0 : SFR_ESTATE;

	if (f->fork_generation != sfr_fork_generation())
		rc = SFR_EFORK;
	if (rc < 0)
		sfr__err_set_if_unset(err, rc, SFR_PHASE_NONE, NULL);
	return rc;
}

int sfr_folder_new(const char *dir, const char *name, int durable, struct sfr_folder **out)
{
	struct sfr_folder *f;
	int rc = sfr_fork_init();

	*out = NULL;
	if (rc < 0)
		return rc;
	f = sfr_sys.calloc(1, sizeof(*f));
	if (!f)
		return -ENOMEM;
	f->dir_fd = f->lock_fd = -1;
	f->durable = durable != 0;
	f->fork_generation = sfr_fork_generation();
	f->dir = sfr__text_copy(dir);
	f->name = sfr__text_copy(name);
	if (!f->dir || !f->name) {
		sfr_folder_free(f);
		return -ENOMEM;
	}
	*out = f;
	return 0;
}

int sfr_folder_make_temporary(struct sfr_folder *f, struct sfr_err *err)
{
	int rc = check_state(f, NEW, err);

	if (rc < 0)
		return rc;
	/* opened for reading only if it is synced; O_PATH also works without permission to read */
	f->dir_fd = sfr__fd_open(f->dir, O_DIRECTORY | (f->durable ? O_RDONLY : O_PATH), 0);
	if (f->dir_fd < 0)
		return fail_step(f, err, f->dir_fd, SFR_PHASE_OPEN,
				 "the parent directory, which a durable save reads and syncs");
	sfr__tmp_clean_dir(f->dir_fd, f->dir);
	rc = sfr__tmp_make(f->dir_fd, &f->tmp, &f->lock_fd, err);
	if (rc < 0) {
		f->state = BROKEN;
		return rc;
	}
	(void)snprintf(f->temporary_name, sizeof(f->temporary_name), "%.*s.d",
		       SFR__TMP_NAME_LEN - 1, f->tmp.name);
	f->temporary_path = sfr__path_join(f->dir, f->temporary_name);
	if (!f->temporary_path)
		return fail_step(f, err, -ENOMEM, SFR_PHASE_OPEN, NULL);
	/* subject to the umask, like any directory */
	if (sfr_sys.mkdir(f->dir_fd, f->temporary_name, 0777) < 0)
		return fail_step(f, err, -errno, SFR_PHASE_OPEN,
				 "the temporary directory next to the destination");
	f->state = OPEN;
	return 0;
}

const char *sfr_folder_temporary_path(const struct sfr_folder *f)
{
	return f->temporary_path;
}

/* ---- syncing a tree ---- */

/* A directory, in one of the two lists of a walk. */
struct node {
	struct node *next;
	char path[];
};

/* A walk through the temporary directory and everything below it. */
struct walk {
	struct node *todo;    /* directories whose entries were not visited yet */
	struct node *visited; /* a directory comes before its parent */
	const char *dir;      /* the directory being visited */
	size_t top_len;       /* length of the part of each path that messages leave out */
	bool durable;         /* sync the files */
	uint64_t nbytes;      /* of all files so far */
	struct sfr_err *err;
};

/* Sets *w->err, with the path relative to the temporary directory as the note. Returns `code`. */
static int fail_walk(struct walk *w, int code, const char *path)
{
	const char *rest = path + w->top_len;

	sfr__err_set_if_unset(w->err, code, SFR_PHASE_SYNC, *rest == '/' ? rest + 1 : rest);
	return code;
}

/* Returns 0 or -errno; 0 also if another program has removed the file. */
static int sync_file(const char *path)
{
	const int flags = O_NOFOLLOW | O_NONBLOCK;
	int fd = sfr__fd_open(path, O_RDONLY | flags, 0), rc;

	if (fd == -EACCES) /* unreadable; a descriptor for writing can be synced, too */
		fd = sfr__fd_open(path, O_WRONLY | flags, 0);
	if (fd < 0)
		return fd == -ENOENT ? 0 : fd;
	rc = sfr_sys.fsync(fd) < 0 ? -errno : 0;
	(void)sfr__fd_close(fd); /* nothing was written through it */
	return rc;
}

/* Puts a directory on the list w->todo. Returns 0 or -ENOMEM. */
static int push_directory(struct walk *w, const char *path)
{
	size_t len = strlen(path) + 1;
	struct node *node = sfr_sys.malloc(sizeof(*node) + len);

	if (!node)
		return -ENOMEM;
	memcpy(node->path, path, len);
	node->next = w->todo;
	w->todo = node;
	return 0;
}

/* Puts a directory on the list, or syncs a file. Returns 0 or -errno. */
static int sync_file_or_push_directory(struct walk *w, const char *path)
{
	struct stat st;

	if (sfr_sys.lstat(AT_FDCWD, path, &st) < 0)
		return errno == ENOENT ? 0 : -errno;
	if (S_ISDIR(st.st_mode))
		return push_directory(w, path);
	if (!S_ISREG(st.st_mode))
		return 0; /* a link, pipe or device has no bytes to sync */
	w->nbytes += (uint64_t)st.st_size;
	return w->durable ? sync_file(path) : 0;
}

/* Called by sfr__dir_each for each name in w->dir. Returns 0 or -errno, which is also in w->err. */
static int sync_or_push_name(void *arg, const char *name)
{
	struct walk *w = arg;
	char *path = sfr__path_join(w->dir, name);
	int rc = path ? sync_file_or_push_directory(w, path) : -ENOMEM;

	if (rc < 0)
		(void)fail_walk(w, rc, path ? path : w->dir);
	sfr_sys.free(path);
	return rc;
}

/* Visits all directories, each after its parent. Returns 0 or -errno, which is also in w->err. */
static int sync_files_and_list_directories(struct walk *w)
{
	while (w->todo) {
		struct node *node = w->todo;
		int rc;

		w->todo = node->next;
		node->next = w->visited;
		w->visited = node;
		w->dir = node->path;
		rc = sfr__dir_each(node->path, sync_or_push_name, w);
		if (rc < 0)
			return fail_walk(w, rc, node->path);
	}
	return 0;
}

/* Syncs the visited directories, deepest first. Returns 0 or -errno, which is also in w->err. */
static int sync_directories(struct walk *w)
{
	for (const struct node *node = w->visited; node; node = node->next) {
		int rc = sfr__dir_sync(node->path);

		if (rc < 0)
			return fail_walk(w, rc, node->path);
	}
	return 0;
}

static void free_nodes(struct node *node)
{
	while (node) {
		struct node *next = node->next;

		sfr_sys.free(node);
		node = next;
	}
}

int sfr_folder_sync(struct sfr_folder *f, uint64_t *nbytes, struct sfr_err *err)
{
	struct walk w = { .durable = f->durable, .err = err };
	int rc = check_state(f, OPEN, err);

	*nbytes = 0;
	if (rc < 0)
		return rc;
	w.top_len = strlen(f->temporary_path);
	rc = push_directory(&w, f->temporary_path);
	if (rc == 0)
		rc = sync_files_and_list_directories(&w);
	if (rc == 0 && f->durable)
		rc = sync_directories(&w);
	free_nodes(w.todo);
	free_nodes(w.visited);
	if (rc < 0)
		/* *err keeps the error that the walk has put there, with the path */
		return fail_step(f, err, rc, SFR_PHASE_SYNC, NULL);
	*nbytes = w.nbytes;
	f->state = SYNCED;
	return 0;
}

/* ---- the commit ---- */

/* Returns whether this error means that the file system cannot exchange two names. */
static bool means_no_exchange(int code)
{
	return code == -EINVAL || code == -ENOSYS || code == -ENOTSUP;
}

/* Does steps 4a and 4b: moves the old directory aside and renames the new one. Returns 0 or -errno.
 * After an error *note may be set to a constant text that explains the error. */
static int replace_with_two_renames(struct sfr_folder *f, const char **note)
{
	size_t len = strlen(f->tmp.name) + sizeof(".old-") + strlen(f->name);
	int rc;

	f->aside_name = sfr_sys.malloc(len);
	if (!f->aside_name)
		return -ENOMEM;
	(void)snprintf(f->aside_name, len, "%s.old-%s", f->tmp.name, f->name);
	if (sfr_sys.rename(f->dir_fd, f->name, f->aside_name) < 0) {
		*note = "moving the old directory aside";
		return -errno;
	}
	if (sfr_sys.rename(f->dir_fd, f->temporary_name, f->name) == 0)
		return 0;
	rc = -errno;
	if (sfr_sys.rename(f->dir_fd, f->aside_name, f->name) < 0)
		*note = "the old directory has a hidden name until the next save there";
	return rc;
}

/* Does step 4: exchanges the new directory with the destination, or renames the new one if there is
 * no destination. Returns 0 or -errno, and sets *note like the function above. */
static int exchange_or_rename(struct sfr_folder *f, const char **note)
{
	struct stat st;
	int rc = sfr_sys.lstat(f->dir_fd, f->name, &st) < 0 ? -errno : 0;

	if (rc == -ENOENT)
		return sfr_sys.rename(f->dir_fd, f->temporary_name, f->name) < 0 ? -errno : 0;
	if (rc < 0)
		return rc;
	if (!S_ISDIR(st.st_mode)) {
		*note = "the path is not a directory";
		return -ENOTDIR;
	}
	rc = sfr_sys.exchange(f->dir_fd, f->temporary_name, f->name) < 0 ? -errno : 0;
	return means_no_exchange(rc) ? replace_with_two_renames(f, note) : rc;
}

int sfr_folder_commit(struct sfr_folder *f, struct sfr_err *err)
{
	const char *note = NULL;
	int rc = check_state(f, SYNCED, err);

	if (rc < 0)
		return rc;
	rc = exchange_or_rename(f, &note);
	if (rc < 0)
		return fail_step(f, err, rc, SFR_PHASE_RENAME, note);
	rc = f->durable && sfr_sys.fsync(f->dir_fd) < 0 ? -errno : 0;
	/* These errors mean that the file system cannot sync directories. */
	if (rc < 0 && rc != -EINVAL && rc != -ENOTSUP && rc != -ENOSYS)
		return fail_step(f, err, rc, SFR_PHASE_SYNC_DIR, NULL);
	f->state = DONE;
	return 0;
}

/* ---- the end ---- */

/* Removes the directory `name` in the parent. Returns 0, or an error that is also in `err`. */
static int remove_in_parent(const struct sfr_folder *f, const char *name, struct sfr_err *err)
{
	char *path = sfr__path_join(f->dir, name);
	int rc;

	if (!path) {
		sfr__err_set_if_unset(err, -ENOMEM, SFR_PHASE_REMOVE, NULL);
		return -ENOMEM;
	}
	rc = sfr__file_remove_tree_and_live_tmps(path, err);
	sfr_sys.free(path);
	return rc;
}

int sfr_folder_end_and_clean_up(struct sfr_folder *f, struct sfr_err *err)
{
	int rc = 0, aside_rc;

	if (f->fork_generation != sfr_fork_generation() || f->state == CLEARED)
		return 0;
	/* Before a commit the new directory has the temporary name; after an exchange, the old one.
	 * In the state PLACED the old directory stays, because the parent is not synced. */
	if (f->temporary_path && f->state != PLACED)
		rc = remove_in_parent(f, f->temporary_name, err);
	if (f->aside_name && f->state == DONE) {
		aside_rc = remove_in_parent(f, f->aside_name, err);
		if (rc == 0)
			rc = aside_rc;
	}
	if (f->lock_fd >= 0)
		/* if this fails, the next save removes it */
		(void)sfr_sys.unlink(f->dir_fd, f->tmp.name);
	sfr__tmp_unlist(&f->tmp);
	if (f->lock_fd >= 0)
		(void)sfr__fd_close(f->lock_fd); /* nothing was written to it */
	if (f->dir_fd >= 0)
		(void)sfr__fd_close(f->dir_fd); /* fsync has already reported any error */
	f->lock_fd = f->dir_fd = -1;
	f->state = CLEARED;
	return rc;
}

void sfr_folder_free(struct sfr_folder *f)
{
	struct sfr_err err = { .index = -1 };

	if (!f)
		return;
	(void)sfr_folder_end_and_clean_up(f, &err); /* the next save removes the rest */
	sfr_sys.free(f->aside_name);
	sfr_sys.free(f->temporary_path);
	sfr_sys.free(f->name);
	sfr_sys.free(f->dir);
	sfr_sys.free(f);
}

void sfr_clean_up_after_dead_writers(const char *dir)
{
	int fd = sfr__fd_open(dir, O_RDONLY | O_DIRECTORY, 0);

	if (fd < 0)
		return;
	sfr__tmp_clean_dir(fd, dir);
	(void)sfr__fd_close(fd); /* nothing was written */
}
