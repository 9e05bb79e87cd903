/* Removes a file, a link, or a directory with its contents.
 *
 * The walk keeps a list of directories instead of recursing, so no tree is too deep for the stack,
 * and it has one directory open at a time. Each directory is visited twice: first its files are
 * removed and its subdirectories put before it on the list, then the empty directory itself is
 * removed. Links are removed, never followed. Paths are full paths, so a name whose path is longer
 * than PATH_MAX stays, with the error ENAMETOOLONG. Another process could replace a directory by a
 * link during the walk, and so have other files removed. This is accepted, because the directories
 * of checkpoints belong to the user who trains.
 *
 * A temporary (file or directory) is kept if its writer is, or may be, alive. Removes run in the
 * order of submission, so the writer's save was submitted after the remove, and its file must stay.
 * The directories above it are kept without an error. sfr__file_remove_own keeps nothing: the maker
 * of a temporary directory removes the directory with it.
 *
 * A directory with a file `.metadata`, which names the data files, is a checkpoint of
 * torch.distributed.checkpoint (DCP). In it `.metadata` is removed first, and the directory is
 * synced before the first data file is removed. So if the walk is interrupted at any moment, there
 * is a whole checkpoint or none, never one that lacks data files. If `.metadata` cannot be removed,
 * the directory stays as it is.
 *
 * Apart from that a remove is not synced, and no caller waits for it to be durable. It runs only
 * when the save before it is durable. So if the machine dies and the removed name comes back, there
 * is one checkpoint too many, never one too few. A later save into the directory syncs the remove,
 * too. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "file/file.h"

/* The most scans of one directory. Some file systems skip an entry while others are removed. */
#define NR_SCANS 8

/* A directory still to be removed. */
struct node {
	struct node *next;
	unsigned nr_scans; /* how often it was visited, and its entries read */
	char path[];
};

/* The removal of one path. */
struct walk {
	struct node *todo;             /* a subdirectory comes before its parent */
	bool kept;                     /* a live temporary was kept somewhere */
	bool keeps_none;               /* live temporaries are removed too */
	_Atomic uint64_t *answered_ns; /* gets the time before each name; or NULL */
	struct sfr_err *err;
};

/* Records an error of the walk, if it is the first. The walk goes on. */
static void keep_error(struct walk *w, int code)
{
	sfr__err_set(w->err, code, SFR_PHASE_REMOVE, NULL);
}

/* Puts a directory on top of the list of those still to be removed. */
static void push_directory(struct walk *w, const char *path)
{
	size_t len = strlen(path) + 1;
	struct node *node = sfr_sys.malloc(sizeof(*node) + len);

	if (!node) {
		keep_error(w, -ENOMEM);
		return;
	}
	memcpy(node->path, path, len);
	node->nr_scans = 0;
	node->next = w->todo;
	w->todo = node;
}

/* Removes a file or link, or puts a directory on the list. Keeps a live temporary. `name` is the
 * last component of `path`, or NULL for the path that the caller wants removed, which is never
 * kept. */
static void remove_one(struct walk *w, const char *path, const char *name)
{
	struct stat st;
	bool may_stay;

	if (w->answered_ns)
		atomic_store_explicit(w->answered_ns, sfr__now_ns(), memory_order_relaxed);
	if (sfr_sys.lstat(AT_FDCWD, path, &st) < 0) {
		if (errno != ENOENT && errno != ENOTDIR)
			keep_error(w, -errno);
		return;
	}
	may_stay = name && !w->keeps_none && (S_ISREG(st.st_mode) || S_ISDIR(st.st_mode));
	if (may_stay && sfr__tmp_may_be_live(path, name)) {
		w->kept = true;
	} else if (S_ISDIR(st.st_mode)) {
		push_directory(w, path);
	} else if (sfr_sys.unlink(AT_FDCWD, path) < 0 && errno != ENOENT) {
		keep_error(w, -errno);
	}
}

/* A directory whose entries are being visited. */
struct visit {
	struct walk *walk;
	const char *dir;
	bool is_dcp; /* the directory is, or was, a checkpoint of DCP */
};

/* For sfr__dir_each: removes one entry of the visited directory. Returns 0 or -ENOMEM. */
static int remove_entry(void *arg, const char *name)
{
	const struct visit *visit = arg;
	char *path = sfr__path_join(visit->dir, name);

	if (!path)
		return -ENOMEM;
	remove_one(visit->walk, path, name);
	sfr_sys.free(path);
	return 0;
}

/* Removes the contents of a directory, and puts its subdirectories on the list. */
static void remove_contents(struct walk *w, const char *dir)
{
	struct visit visit = { .walk = w, .dir = dir };
	int rc = sfr__dir_each(dir, remove_entry, &visit);

	if (rc < 0 && rc != -ENOENT)
		keep_error(w, rc);
}

/* ---- checkpoints of DCP ---- */

/* Returns whether this is `.metadata`, or a name such as `__3.metadata`, which each rank writes if
 * it saves alone. */
static bool is_metadata_file(const char *name)
{
	if (strncmp(name, "__", 2) == 0) {
		name += 2;
		name += strspn(name, "0123456789");
	}
	return strcmp(name, ".metadata") == 0;
}

/* Returns whether this is the name of a data file of DCP, such as `__3_0.distcp`. */
static bool is_data_file(const char *name)
{
	const char *dot = strrchr(name, '.');

	return dot && strcmp(dot, ".distcp") == 0;
}

/* Removes a file of a directory, if it is there. Returns 0 or -errno. */
static int unlink_in(const char *dir, const char *name)
{
	char *path = sfr__path_join(dir, name);
	int rc;

	if (!path)
		return -ENOMEM;
	rc = sfr_sys.unlink(AT_FDCWD, path) < 0 ? -errno : 0;
	sfr_sys.free(path);
	return rc == -ENOENT || rc == -EISDIR ? 0 : rc; /* a directory is not metadata */
}

/* For sfr__dir_each: removes an entry that is metadata, and finds out whether the directory is a
 * checkpoint of DCP. Returns 0 or -errno. */
static int remove_if_metadata(void *arg, const char *name)
{
	struct visit *visit = arg;

	/* Data files count too: their metadata may be removed but not yet on the disk. */
	visit->is_dcp = visit->is_dcp || is_metadata_file(name) || is_data_file(name);
	return is_metadata_file(name) ? unlink_in(visit->dir, name) : 0;
}

/* If the directory is a checkpoint of DCP, removes its metadata and syncs, so that it is no
 * checkpoint any more. Returns false if that failed; then nothing else in it may be removed. */
static bool remove_metadata(struct walk *w, const char *dir)
{
	struct visit visit = { .walk = w, .dir = dir };
	int rc = sfr__dir_each(dir, remove_if_metadata, &visit);

	if (rc == -ENOENT)
		rc = 0; /* another program removed it */
	if (rc == 0 && visit.is_dcp)
		rc = sfr__dir_sync(dir);
	if (rc < 0)
		keep_error(w, rc);
	return rc == 0;
}

/* Takes one step with the directory at the head of the list. The first visit removes the files in
 * the directory, a later visit the empty directory. If the directory is not empty after all, it is
 * scanned again, up to NR_SCANS times. */
static void step_directory(struct walk *w)
{
	struct node *node = w->todo;
	int code;

	if (node->nr_scans++ == 0) {
		if (remove_metadata(w, node->path))
			remove_contents(w, node->path);
		return; /* subdirectories now on the list come first */
	}
	while (sfr_sys.rmdir(node->path) < 0) {
		code = -errno;
		if (code == -ENOENT)
			break;
		if (code == -ENOTEMPTY || code == -EEXIST) {
			/* Another scan would not help: an entry was kept or cannot be removed. */
			if (w->kept || w->err->code)
				break;
			if (node->nr_scans++ < NR_SCANS) {
				remove_contents(w, node->path);
				if (w->todo != node)
					return; /* the scan has found a subdirectory */
				continue;
			}
		}
		keep_error(w, code);
		break;
	}
	w->todo = node->next; /* the node is still the head: otherwise this line is not reached */
	sfr_sys.free(node);
}

/* Removes `path` with everything in it. Returns 0, or the first error, which is also in `err`. */
static int remove_tree(const char *path, struct walk *walk, struct sfr_err *err)
{
	/* The walk asks whether it has failed itself, and `err` may have an earlier error. */
	struct sfr_err own = { .index = -1 };

	walk->err = &own;
	remove_one(walk, path, NULL);
	while (walk->todo)
		step_directory(walk);
	if (own.code)
		sfr__err_set(err, own.code, own.phase, own.note);
	return own.code;
}

int sfr__file_remove(const char *path, _Atomic uint64_t *answered_ns, struct sfr_err *err)
{
	struct walk walk = { .answered_ns = answered_ns };

	return remove_tree(path, &walk, err);
}

int sfr__file_remove_own(const char *path, struct sfr_err *err)
{
	struct walk walk = { .keeps_none = true };

	return remove_tree(path, &walk, err);
}
