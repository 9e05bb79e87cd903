/* Removes a file, a link, or a directory with its contents.
 *
 * The walk keeps a list of directories instead of recursing, and has one directory open at a time.
 * Each directory is visited twice. First its files are removed and its subdirectories put before it
 * on the list; then the empty directory is removed. Links are removed, never followed. The walk
 * trusts other processes not to replace a directory by a link meanwhile.
 *
 * A live temporary is kept: its save was submitted after the remove. sfr__file_remove_own keeps
 * nothing.
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

/* scans of one directory: some file systems skip an entry while others are removed */
#define NR_SCANS 8

/* A directory still to be removed. */
struct node {
	struct node *next;
	unsigned nr_scans; /* how often its entries were read */
	char path[];
};

struct walk {
	struct node *todo;             /* a subdirectory comes before its parent */
	bool kept;                     /* a live temporary was kept */
	bool keeps_none;               /* remove live temporaries too */
	_Atomic uint64_t *answered_ns; /* gets the time before each name; or NULL */
	struct sfr_err *err;           /* the first error; the walk goes on */
};

static void keep_error(struct walk *w, int code)
{
	sfr__err_set(w->err, code, SFR_PHASE_REMOVE, NULL);
}

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

/* Removes a file or link, or lists a directory. Keeps a live temporary. `name` is the last
 * component of `path`; NULL for the tree itself, which is not kept. */
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

/* For sfr__dir_each. Returns 0 or -ENOMEM. */
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

static void remove_contents(struct walk *w, const char *dir)
{
	struct visit visit = { .walk = w, .dir = dir };
	int rc = sfr__dir_each(dir, remove_entry, &visit);

	if (rc < 0 && rc != -ENOENT)
		keep_error(w, rc);
}

/* ---- checkpoints of DCP ---- */

/* Also true for a name such as `__3.metadata`, which a rank writes if it saves alone. */
static bool is_metadata_file(const char *name)
{
	if (strncmp(name, "__", 2) == 0) {
		name += 2;
		name += strspn(name, "0123456789");
	}
	return strcmp(name, ".metadata") == 0;
}

/* A data file of DCP has a name such as `__3_0.distcp`. */
static bool is_data_file(const char *name)
{
	const char *dot = strrchr(name, '.');

	return dot && strcmp(dot, ".distcp") == 0;
}

/* Returns 0 or -errno; 0 if there is no such file. */
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

/* For sfr__dir_each: removes metadata, and finds out whether this is a checkpoint of DCP. */
static int remove_if_metadata(void *arg, const char *name)
{
	struct visit *visit = arg;

	/* Data files count too: an earlier remove of their metadata may not be on the disk yet. */
	visit->is_dcp = visit->is_dcp || is_metadata_file(name) || is_data_file(name);
	return is_metadata_file(name) ? unlink_in(visit->dir, name) : 0;
}

/* If the directory is a checkpoint of DCP, removes its metadata and syncs. Returns false if that
 * failed; then nothing else in it may be removed. */
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

/* Visits the directory at the head of the list: removes its files at the first visit, the empty
 * directory later. If it is not empty after all, scans it again, up to NR_SCANS times. */
static void step_directory(struct walk *w)
{
	struct node *node = w->todo;
	int code;

	if (node->nr_scans == 0) {
		node->nr_scans = 1;
		if (remove_metadata(w, node->path))
			remove_contents(w, node->path);
		return; /* subdirectories now on the list come first */
	}
	while (sfr_sys.rmdir(node->path) < 0) {
		code = -errno;
		if (code == -ENOENT)
			break;
		if (code == -ENOTEMPTY || code == -EEXIST) {
			/* an entry was kept or cannot be removed */
			if (w->kept || w->err->code)
				break;
			if (node->nr_scans < NR_SCANS) {
				node->nr_scans++;
				remove_contents(w, node->path);
				if (w->todo != node)
					return; /* the scan has found a subdirectory */
				continue;
			}
		}
		keep_error(w, code);
		break;
	}
	w->todo = node->next; /* the node is still the head of the list */
	sfr_sys.free(node);
}

/* Returns 0 or the first error, which is also in `err`. */
static int remove_tree(const char *path, struct walk *walk, struct sfr_err *err)
{
	/* `err` may have an earlier error, and the walk must know its own. */
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
