/* Every state that a power failure may leave while a directory replaces another one.
 *
 * The calls that change directories are recorded, and the syncs. A machine that dies after the k-th
 * call has on its disk every change that a later sync of its directory covers, and any part of the
 * others. A file has its bytes if it was synced; otherwise it may be empty. In each of these states
 * the path has to lead to all of the old directory or all of the new one. */
#include <errno.h>

#include "sfr/folder.h"
#include "fix_save.h"

enum { MOST_OPS = 64, MOST_ENTRIES = 64 };

enum kind {
	LINK,      /* the name `one` of `dir` leads to `ino` */
	DROP,      /* it leads nowhere */
	MOVE,      /* from `one` to `other` */
	SWAP,      /* `one` and `other`: `ino` has the latter's name now, `ino2` the former's */
	BYTES,     /* the file `ino` has what was written to it */
	SYNC,      /* `ino`, a file or a directory */
	COMMITTED, /* the call of the commit has returned */
};

struct op {
	enum kind kind;
	ino_t dir, ino, ino2;
	char one[NAME_MAX + 1], other[NAME_MAX + 1];
	bool certain, absent;
};

static struct op ops[MOST_OPS];
static int nr_ops;
static struct sfr_sys plain;
static struct sfr_err err;

/* ---- the record --------------------------------------------------------------- */

static ino_t ino_at(int dir, const char *name)
{
	struct stat st;

	return fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0 ? 0 : st.st_ino;
}

static ino_t ino_of(int fd)
{
	struct stat st;

	CHECK_EQ(fstat(fd, &st), 0);
	return st.st_ino;
}

/* Notes a change of a name, which may be a path. */
static struct op *note(enum kind kind, int dir, const char *path, ino_t ino)
{
	const char *slash = strrchr(path, '/');
	char above[PATH_MAX];
	struct op *op = &ops[nr_ops++];

	CHECK(nr_ops < MOST_OPS);
	(void)snprintf(above, sizeof(above), "%.*s", slash ? (int)(slash - path) : 1,
		       slash ? path : ".");
	*op = (struct op){ .kind = kind, .dir = ino_at(dir, above), .ino = ino };
	(void)snprintf(op->one, sizeof(op->one), "%s", slash ? slash + 1 : path);
	return op;
}

static int noted_open(int dir, const char *name, int flags, mode_t mode)
{
	int fd = plain.open(dir, name, flags, mode);

	if (fd >= 0 && (flags & O_CREAT))
		(void)note(LINK, dir, name, ino_of(fd));
	return fd;
}

static int noted_mkdir(int dir, const char *name, mode_t mode)
{
	int rc = plain.mkdir(dir, name, mode);

	(void)note(LINK, dir, name, ino_at(dir, name));
	return rc;
}

static int noted_rename(int dir, const char *from, const char *to)
{
	ino_t ino = ino_at(dir, from);
	int rc = plain.rename(dir, from, to);

	(void)snprintf(note(MOVE, dir, from, ino)->other, NAME_MAX + 1, "%s", to);
	return rc;
}

static int noted_exchange(int dir, const char *one, const char *other)
{
	ino_t ino = ino_at(dir, one), ino2 = ino_at(dir, other);
	int rc = plain.exchange(dir, one, other);
	struct op *op = note(SWAP, dir, one, ino);

	op->ino2 = ino2;
	(void)snprintf(op->other, sizeof(op->other), "%s", other);
	return rc;
}

static int no_exchange(int dir, const char *one, const char *other)
{
	(void)dir;
	(void)one;
	(void)other;
	errno = EINVAL;
	return -1;
}

static int noted_unlink(int dir, const char *name)
{
	(void)note(DROP, dir, name, ino_at(dir, name));
	return plain.unlink(dir, name);
}

static int noted_rmdir(const char *path)
{
	(void)note(DROP, AT_FDCWD, path, ino_at(AT_FDCWD, path));
	return plain.rmdir(path);
}

static int noted_fsync(int fd)
{
	(void)note(SYNC, AT_FDCWD, ".", ino_of(fd));
	return plain.fsync(fd);
}

static void put(const char *dir, const char *name, const char *text)
{
	const char *path = dir_path(dir, name);

	file_put(path, text, strlen(text));
	(void)note(LINK, AT_FDCWD, path, ino_at(AT_FDCWD, path));
	(void)snprintf(note(BYTES, AT_FDCWD, path, ino_at(AT_FDCWD, path))->other, NAME_MAX, "%s",
		       text);
}

static void fill(const char *dir, const char *text)
{
	const char *sub = dir_path(dir, "sub");

	put(dir, "a", text);
	CHECK_EQ(noted_mkdir(AT_FDCWD, sub, 0777), 0);
	put(sub, "b", text);
}

/* Records the save of a directory over an old one. */
static void record(const char *dir, bool aside)
{
	struct sfr_folder *f;
	uint64_t nbytes;

	nr_ops = 0;
	err = (struct sfr_err){ .index = -1 };
	plain = sfr_sys;
	CHECK_EQ(noted_mkdir(AT_FDCWD, dir_path(dir, "c"), 0777), 0);
	fill(dir_path(dir, "c"), "old");
	for (int i = 0; i < nr_ops; i++)
		ops[i].certain = true; /* it was durable before */
	sfr_sys.open = noted_open;
	sfr_sys.mkdir = noted_mkdir;
	sfr_sys.rename = noted_rename;
	sfr_sys.exchange = aside ? no_exchange : noted_exchange;
	sfr_sys.unlink = noted_unlink;
	sfr_sys.rmdir = noted_rmdir;
	sfr_sys.fsync = noted_fsync;
	CHECK_EQ(sfr_folder_new(dir, "c", true, &f), 0);
	CHECK_EQ(sfr_folder_make_temporary(f, &err), 0);
	fill(sfr_folder_temporary_path(f), "new");
	CHECK_EQ(sfr_folder_sync(f, &nbytes, &err), 0);
	CHECK_EQ(sfr_folder_commit(f, &err), 0);
	(void)note(COMMITTED, AT_FDCWD, ".", 0);
	CHECK_EQ(sfr_folder_end_and_clean_up(f, &err), 0);
	sfr_folder_free(f);
	sfr_sys = plain;
}

/* ---- what is on the disk ------------------------------------------------------ */

static struct entry {
	ino_t dir, ino;
	const char *name;
} entries[MOST_ENTRIES];
static int nr_entries;

/* Makes a name lead to an inode, or to none (0). */
static void set_entry(ino_t dir, const char *name, ino_t ino)
{
	for (int i = 0; i < nr_entries; i++)
		if (entries[i].dir == dir && strcmp(entries[i].name, name) == 0)
			entries[i--] = entries[--nr_entries];
	if (ino)
		entries[nr_entries++] = (struct entry){ dir, ino, name };
}

static ino_t found(ino_t dir, const char *name)
{
	for (int i = 0; i < nr_entries; i++)
		if (entries[i].dir == dir && strcmp(entries[i].name, name) == 0)
			return entries[i].ino;
	return 0;
}

static int nr_names(ino_t dir)
{
	int nr = 0;

	for (int i = 0; i < nr_entries; i++)
		if (entries[i].dir == dir)
			nr++;
	return nr;
}

static void build(int nr)
{
	nr_entries = 0;
	for (int i = 0; i < nr; i++) {
		const struct op *op = &ops[i];

		if (op->absent)
			continue;
		if (op->kind == LINK)
			set_entry(op->dir, op->one, op->ino);
		if (op->kind == DROP || op->kind == MOVE)
			set_entry(op->dir, op->one, 0);
		if (op->kind == MOVE)
			set_entry(op->dir, op->other, op->ino);
		if (op->kind == SWAP) {
			set_entry(op->dir, op->one, op->ino2);
			set_entry(op->dir, op->other, op->ino);
		}
	}
}

static const char *text_of(int nr, ino_t file)
{
	for (int i = 0; i < nr; i++)
		if (ops[i].kind == BYTES && ops[i].ino == file && !ops[i].absent)
			return ops[i].other;
	return "damaged";
}

/* Returns "old" or "new" for a whole directory, else why it is none. */
static const char *content(int nr, ino_t dir)
{
	ino_t sub = found(dir, "sub");
	const char *text = text_of(nr, found(dir, "a"));

	if (!dir)
		return "missing";
	if (nr_names(dir) != 2 || !sub || nr_names(sub) != 1)
		return "incomplete";
	return strcmp(text, text_of(nr, found(sub, "b"))) == 0 ? text : "mixed";
}

static const char *aside_content(int nr, ino_t top)
{
	for (int i = 0; i < nr_entries; i++)
		if (entries[i].dir == top && strstr(entries[i].name, ".old-c"))
			return content(nr, entries[i].ino);
	return "missing";
}

static int nr_states, nr_bad, nr_missing;

static void judge(int nr, bool aside, bool committed)
{
	const ino_t top = ops[0].dir;
	const char *what;

	build(nr);
	what = content(nr, found(top, "c"));
	nr_states++;
	if (aside && strcmp(what, "missing") == 0 && !committed) {
		nr_missing++;
		what = aside_content(nr, top);
	}
	if (strcmp(what, "new") != 0 && (committed || strcmp(what, "old") != 0) && nr_bad++ == 0)
		(void)fprintf(stderr, "  after %d calls: %s\n", nr, what);
}

/* Judges the states in which each of the uncertain changes is present or absent. */
static void vary(const int *uncertain, int nr_uncertain, int nr, bool aside, bool committed)
{
	if (nr_uncertain == 0) {
		judge(nr, aside, committed);
		return;
	}
	for (int absent = 0; absent < 2; absent++) {
		ops[uncertain[nr_uncertain - 1]].absent = absent;
		vary(uncertain, nr_uncertain - 1, nr, aside, committed);
	}
	ops[uncertain[nr_uncertain - 1]].absent = false;
}

/* Goes through every state that a crash after each call can leave; returns how many are bad. A
 * change is certain to be on the disk once a later sync of its file or directory has returned. Of
 * the others, every combination is tried. */
static int enumerate(bool aside)
{
	bool committed = false;

	nr_states = nr_bad = nr_missing = 0;
	for (int nr = 1; nr <= nr_ops; nr++) {
		int uncertain[MOST_OPS], nr_uncertain = 0;

		committed = committed || ops[nr - 1].kind == COMMITTED;
		for (int i = 0; i < nr; i++) {
			bool certain = ops[i].certain || ops[i].kind >= SYNC;

			for (int k = i + 1; k < nr && !certain; k++)
				certain = ops[k].kind == SYNC &&
					  ops[k].ino ==
						  (ops[i].kind == BYTES ? ops[i].ino : ops[i].dir);
			if (!certain)
				uncertain[nr_uncertain++] = i;
		}
		if (CHECK(nr_uncertain <= 12) && !ops[nr - 1].certain)
			vary(uncertain, nr_uncertain, nr, aside, committed);
	}
	return nr_bad;
}

static void replaced(const char *dir)
{
	record(dir, false);
	CHECK_EQ(enumerate(false), 0);
	CHECK(nr_states > 300);
}

TEST(after_a_crash_the_path_leads_to_the_old_directory_or_the_new_one)
{
	in_each_base(replaced);
}

static void replaced_in_two(const char *dir)
{
	record(dir, true);
	CHECK_EQ(enumerate(true), 0);
	CHECK(nr_states > 300 && nr_missing > 0);
}

TEST(without_exchange_the_old_directory_may_have_a_hidden_name)
{
	in_each_base(replaced_in_two);
}

/* Takes the syncs of one inode, or of all (0), out of the record. */
static void without_syncs(const char *dir, ino_t (*which)(void))
{
	int nr = 0;
	ino_t ino;

	record(dir, false);
	ino = which();
	for (int i = 0; i < nr_ops; i++)
		if (ops[i].kind != SYNC || (ino && ops[i].ino != ino))
			ops[nr++] = ops[i];
	CHECK(nr < nr_ops);
	nr_ops = nr;
}

static ino_t parent(void)
{
	return ops[0].dir;
}

static ino_t last_file(void)
{
	for (int i = nr_ops - 1;; i--)
		if (ops[i].kind == BYTES)
			return ops[i].ino;
}

static ino_t last_directory(void)
{
	for (int i = nr_ops - 1;; i--)
		if (ops[i].kind == BYTES)
			return ops[i].dir;
}

static void missing_syncs(const char *dir)
{
	ino_t (*const which[])(void) = { parent, last_file, last_directory };
	char below[PATH_MAX];

	for (unsigned i = 0; i < 3; i++) {
		(void)snprintf(below, sizeof(below), "%s/%u", dir, i);
		CHECK_EQ(mkdir(below, 0777), 0);
		without_syncs(below, which[i]);
		CHECK(enumerate(false) > 0);
	}
}

TEST(the_crash_model_detects_a_missing_sync)
{
	in_each_base(missing_syncs);
}
