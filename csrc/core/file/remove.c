/* Removes a file, a link, or a directory with its contents.
 *
 * The walk keeps a list of directories instead of recursing, and has one directory open at a time.
 * Each directory is visited twice. First its files are removed and its subdirectories put before it
 * on the list; then the empty directory is removed. Links are removed, never followed. The walk
 * trusts other processes not to replace a directory by a link meanwhile.
 *
 * A live temporary is kept: its save was submitted after the remove.
 * sfr__file_remove_tree_and_live_tmps keeps nothing.
 *
 * A directory with a file `.metadata` is a checkpoint of torch.distributed.checkpoint (DCP). In it
 * `.metadata` is removed first, and the directory is synced before its data files are removed. So
 * an interruption leaves a whole checkpoint or none, never one that lacks data files.
 *
 * Other removes are not synced. A remove runs only when the save before it is durable. So a name
 * that comes back after a power failure is one checkpoint too many, never one too few. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "file/file.h"

/* How often a directory is scanned. Some file systems skip entries if a scan removes entries. */
#define MAX_SCANS 8

/* A directory still to be removed. */
struct pending_dir {
	struct pending_dir *next;
	unsigned nr_scans; /* how often its entries were read */
	char path[];
};

struct walk {
	struct pending_dir *todo;      /* a subdirectory comes before its parent */
	bool kept_any;                 /* a live temporary was kept */
	bool removes_live;             /* live temporaries are removed too */
	_Atomic uint64_t *answered_ns; /* gets the time before each name; or NULL */
	struct sfr_err *err;           /* the first error, after which the walk goes on */
};

static void record_first_error(struct walk *w, int code)
{
	sfr__err_set_if_unset(w->err, code, SFR_PHASE_REMOVE, NULL);
}

/* Puts a directory at the head of the list. */
static void push_directory(struct walk *w, const char *path)
{
	size_t len = strlen(path) + 1;
	struct pending_dir *node = sfr_sys.malloc(sizeof(*node) + len);

	if (!node) {
		record_first_error(w, -ENOMEM);
		return;
	}
	memcpy(node->path, path, len);
	node->nr_scans = 0;
	node->next = w->todo;
	w->todo = node;
}

/* Removes a file or link, or puts a directory on the list. Keeps a live temporary. `name` is the
 * last component of `path`; or NULL for the tree itself, which is never kept. */
static void remove_file_or_push_directory(struct walk *w, const char *path, const char *name)
{
	struct stat st;
	bool may_stay;

	if (w->answered_ns)
		atomic_store_explicit(w->answered_ns, sfr__now_ns(), memory_order_relaxed);
	if (sfr_sys.lstat(AT_FDCWD, path, &st) < 0) {
		if (errno != ENOENT && errno != ENOTDIR)
			record_first_error(w, -errno);
		return;
	}
	/* only files and directories can be temporaries */
	may_stay = name && !w->removes_live && (S_ISREG(st.st_mode) || S_ISDIR(st.st_mode));
	if (may_stay && sfr__tmp_may_be_live(path, name)) {
		w->kept_any = true;
	} else if (S_ISDIR(st.st_mode)) {
		push_directory(w, path);
	} else if (sfr_sys.unlink(AT_FDCWD, path) < 0 && errno != ENOENT) {
		record_first_error(w, -errno);
	}
}

/* A directory whose entries are being visited. */
struct visit {
	struct walk *walk;
	const char *dir;
	bool is_dcp; /* the directory is, or was, a checkpoint of DCP */
};

/* Called by sfr__dir_each for each name. Returns 0 or -ENOMEM. */
static int remove_entry(void *arg, const char *name)
{
	const struct visit *visit = arg;
	char *path = sfr__path_join(visit->dir, name);

	if (!path)
		return -ENOMEM;
	remove_file_or_push_directory(visit->walk, path, name);
	sfr_sys.free(path);
	return 0;
}

static void remove_contents(struct walk *w, const char *dir)
{
	struct visit visit = { .walk = w, .dir = dir };
	int rc = sfr__dir_each(dir, remove_entry, &visit);

	if (rc < 0 && rc != -ENOENT) /* -ENOENT: another program has removed it */
		record_first_error(w, rc);
}

/* ---- checkpoints of DCP ---- */

/* Also accepts a name such as `__3.metadata`, which a rank writes if it saves alone. */
static bool is_dcp_metadata_file(const char *name)
{
	if (strncmp(name, "__", 2) == 0) {
		name += 2;
		name += strspn(name, "0123456789");
	}
	return strcmp(name, ".metadata") == 0;
}

/* A data file of DCP has a name such as `__3_0.distcp`. */
static bool is_dcp_data_file(const char *name)
{
	const char *dot = strrchr(name, '.');

	return dot && strcmp(dot, ".distcp") == 0;
}

/* Removes a file of a directory. Returns 0 or -errno; 0 also if there is no such file. */
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

/* Called by sfr__dir_each for each name. Removes metadata files, and sets visit->is_dcp if the name
 * belongs to DCP. Returns 0 or -errno. */
static int remove_if_metadata(void *arg, const char *name)
{
	struct visit *visit = arg;

	/* Data files alone also mean DCP: their metadata is removed, but perhaps only in memory. */
	visit->is_dcp = visit->is_dcp || is_dcp_metadata_file(name) || is_dcp_data_file(name);
	return is_dcp_metadata_file(name) ? unlink_in(visit->dir, name) : 0;
}

/* If the directory is a checkpoint of DCP, removes its metadata and syncs. Returns false if that
 * failed: then nothing else in the directory may be removed. */
static bool remove_metadata(struct walk *w, const char *dir)
{
	struct visit visit = { .walk = w, .dir = dir };
	int rc = sfr__dir_each(dir, remove_if_metadata, &visit);

	if (rc == -ENOENT)
		rc = 0; /* another program removed it */
	if (rc == 0 && visit.is_dcp)
		rc = sfr__dir_sync(dir);
	if (rc < 0)
		record_first_error(w, rc);
	return rc == 0;
}

/* Visits the directory at the head of the list. The first visit removes its files; the second, when
 * its subdirectories are gone, removes the directory. If the directory is still not empty, scans it
 * again, up to MAX_SCANS times. */
static void scan_or_remove_directory(struct walk *w)
{
	struct pending_dir *node = w->todo;

	if (node->nr_scans == 0) {
		node->nr_scans = 1;
		if (remove_metadata(w, node->path))
			remove_contents(w, node->path);
		return; /* its subdirectories are before it on the list */
	}
	while (sfr_sys.rmdir(node->path) < 0) {
		const int code = -errno;
		const bool is_not_empty = code == -ENOTEMPTY || code == -EEXIST;

		if (code == -ENOENT)
			break; /* another program has removed it */
		if (is_not_empty && (w->kept_any || w->err->code))
			break; /* an entry was kept or cannot be removed */
		if (!is_not_empty || node->nr_scans >= MAX_SCANS) {
			record_first_error(w, code);
			break;
		}
		node->nr_scans++;
		remove_contents(w, node->path);
		if (w->todo != node)
			return; /* the scan has found a subdirectory, which comes first */
	}
	w->todo = node->next; /* the node is still the head of the list */
	sfr_sys.free(node);
}

/* Returns 0 or the first error, which is also in `err`. */
static int remove_tree(const char *path, struct walk *walk, struct sfr_err *err)
{
	/* not `err`, which may have an error from before this walk */
	struct sfr_err walk_err = { .index = -1 };

	walk->err = &walk_err;
	remove_file_or_push_directory(
		walk, path, NULL); /* NULL: the tree itself is removed even if it is live */
	while (walk->todo)
		scan_or_remove_directory(walk);
	if (walk_err.code)
		sfr__err_set_if_unset(err, walk_err.code, walk_err.phase, walk_err.note);
	return walk_err.code;
}

int sfr__file_remove_tree(const char *path, _Atomic uint64_t *answered_ns, struct sfr_err *err)
{
	struct walk walk = { .answered_ns = answered_ns };

	return remove_tree(path, &walk, err);
}

int sfr__file_remove_tree_and_live_tmps(const char *path, struct sfr_err *err)
{
	struct walk walk = { .removes_live = true };

	return remove_tree(path, &walk, err);
}
