/* Crash model: the states of a directory's files that a power failure may leave.
 *
 * The calls of a run are recorded through the system-call table, in their order. A machine that
 * dies after the k-th call has on its disk
 *
 *   - everything that a later sync covered: fdatasync the bytes and the length of its file,
 * fsync of a directory the names in it;
 *   - of everything else any part, in any combination: each write absent, whole, or torn between
 * two sectors of 512 bytes; each length, new name, rename and unlink absent or whole. So a
 * rename may be there before the bytes that it names.
 *
 * Journaling file systems promise more than that; POSIX leaves it open. The only order that is
 * kept is between writes to the same offset.
 *
 * crash_enumerate goes through all those states for every k, and checks what a reader would
 * find. */
#ifndef CRASH_MODEL_H
#define CRASH_MODEL_H

#include "crash_record.h"

/* ---- what is on the disk ---------------------------------------------------- */

static inline bool crash__is_call(const struct crash_op *op)
{
	return op->kind <= CRASH_LAST_CALL;
}

static inline bool crash__is_name(const struct crash_op *op)
{
	return op->kind == CRASH_CREATE || op->kind == CRASH_RENAME || op->kind == CRASH_UNLINK;
}

static inline bool crash__lies_in(const char *path, const char *dir)
{
	size_t len = strlen(dir);

	return strncmp(path, dir, len) == 0 && path[len] == '/' && !strchr(path + len + 1, '/');
}

/* Marks the calls that are certainly on the disk after the first `nr` calls. */
static inline void crash__mark_synced(int nr)
{
	for (int i = 0; i < nr; i++) {
		struct crash_op *op = &crash.ops[i];

		op->synced = 0;
		for (int k = i + 1; k < nr && !op->synced; k++) {
			const struct crash_op *later = &crash.ops[k];

			if (crash__is_name(op))
				op->synced = later->kind == CRASH_SYNC_DIR &&
					     crash__lies_in(op->name, later->name);
			else
				op->synced = later->kind == CRASH_SYNC && later->inode == op->inode;
		}
	}
}

/* Returns whether the torn write keeps this sector. The call's number chooses one of three
 * patterns: the front half, the back half, every other sector. */
static inline bool crash__keeps(int call, uint64_t sector, uint64_t nr_sectors)
{
	switch (call % 3) {
	case 0:
		return sector < nr_sectors / 2;
	case 1:
		return sector >= nr_sectors / 2;
	default:
		return sector % 2 == 1;
	}
}

/* Builds a file in crash.image. Returns its length. */
static inline uint64_t crash__build(int inode, int nr)
{
	uint64_t len = 0;

	memset(crash.image, 0, sizeof(crash.image));
	for (int i = 0; i < nr; i++) {
		const struct crash_op *op = &crash.ops[i];

		if (op->inode != inode || op->choice == CRASH_ABSENT)
			continue;
		if (op->kind == CRASH_SIZE && op->len > len)
			len = op->len;
		if (op->kind != CRASH_WRITE)
			continue;
		for (uint64_t at = 0; at < op->len; at += CRASH_SECTOR) {
			uint64_t some = op->len - at < CRASH_SECTOR ? op->len - at : CRASH_SECTOR;

			if (op->choice == CRASH_TORN &&
			    !crash__keeps(i, at / CRASH_SECTOR, op->len / CRASH_SECTOR))
				continue;
			memcpy(crash.image + op->off + at, op->bytes + at, some);
			if (op->off + at + some > len)
				len = op->off + at + some;
		}
	}
	return len;
}

/* Returns what a reader finds in an inode, as saving_content does. Equal bytes are read once. */
static inline int crash__content(int inode, int nr)
{
	uint64_t key = 14695981039346656037u, len, slot;

	for (int i = 0; i < nr; i++) {
		const struct crash_op *op = &crash.ops[i];

		if (op->inode != inode || op->choice == CRASH_ABSENT || crash__is_name(op))
			continue;
		key = (key ^ (uint64_t)(i * 8 + op->choice)) * 1099511628211u;
		key ^= key >> 29;
	}
	key = (key ^ (uint64_t)inode) * 1099511628211u | 1;
	slot = (key >> 20) % CRASH_MEMO;
	if (crash.memo[slot].key == key)
		return crash.memo[slot].found;
	len = crash__build(inode, nr);
	if (crash.memfd < 0)
		crash.memfd = memfd_create("crash", MFD_CLOEXEC);
	CHECK_EQ(ftruncate(crash.memfd, (off_t)len), 0);
	CHECK_EQ(pwrite(crash.memfd, crash.image, len, 0), len);
	crash.memo[slot].key = key;
	crash.memo[slot].found = saving_content_fd(crash.memfd);
	return crash.memo[slot].found;
}

/* Collects the names on the disk. Returns their number. */
static inline int crash__names(int nr, struct crash_name *names)
{
	int nr_names = 0;

	for (int i = 0; i < nr; i++) {
		const struct crash_op *op = &crash.ops[i];
		const char *set = NULL; /* the name that the operation gives to its inode */

		if (op->kind == CRASH_CREATE)
			set = op->name;
		else if (op->kind == CRASH_RENAME)
			set = op->to;
		if (!crash__is_name(op) || op->choice == CRASH_ABSENT)
			continue;
		if (op->kind != CRASH_CREATE)
			for (int k = 0; k < nr_names; k++)
				if (names[k].inode == op->inode &&
				    strcmp(names[k].name, op->name) == 0)
					names[k--] = names[--nr_names];
		if (!set)
			continue;
		for (int k = 0; k < nr_names; k++)
			if (strcmp(names[k].name, set) == 0)
				names[k--] = names[--nr_names];
		if (nr_names == CRASH_MAX_NAMES) {
			crash.lost = true;
			return nr_names;
		}
		names[nr_names++] = (struct crash_name){ .name = set, .inode = op->inode };
	}
	return nr_names;
}

/* ---- what may be on the disk -------------------------------------------------- */

#define CRASH_MISSING (-1)
#define CRASH_DAMAGED (-2)

struct crash_count {
	uint64_t states, bad;
	char first[CRASH_PATH + 128]; /* the first bad state */
};

/* Returns whether a save of `later` to the name began after that of `value`. */
static inline bool crash__begun_after(const char *name, int nr, int value, int later)
{
	bool begun = false;

	for (int i = 0; i < nr; i++) {
		const struct crash_op *op = &crash.ops[i];

		if (op->kind != CRASH_BEGUN || strcmp(op->name, name) != 0)
			continue;
		if (begun && op->value == later)
			return true;
		begun = begun || op->value == value;
	}
	return false;
}

/* Returns whether a name may have the contents `found` after the first `nr` entries of the
 * record. */
static inline bool crash__allowed(const char *name, int nr, int found, bool durable)
{
	bool ok = found == CRASH_MISSING; /* allowed as long as nothing was durable */

	for (int i = 0; i < nr; i++) {
		const struct crash_op *op = &crash.ops[i];

		if (op->kind < CRASH_BEGUN || strcmp(op->name, name) != 0)
			continue;
		if (op->kind == CRASH_DURABLE)
			ok = found == op->value || crash__begun_after(name, nr, op->value, found);
		else if (op->kind == CRASH_BEGUN)
			ok = ok || found == op->value || (!durable && found == CRASH_DAMAGED);
		else
			ok = ok || found == CRASH_MISSING;
	}
	return ok;
}

static inline void crash__judge(int nr, bool durable, struct crash_count *count)
{
	struct crash_name names[CRASH_MAX_NAMES];
	int nr_names = crash__names(nr, names), nr_whole = 0, nr_durable = 0;
	bool good = true;
	char what[128] = "";

	for (int i = 0; i < nr && good; i++) {
		const struct crash_op *op = &crash.ops[i];
		int found = CRASH_MISSING;

		if (op->kind != CRASH_BEGUN && op->kind != CRASH_REMOVED)
			continue;
		for (int k = 0; k < nr_names; k++)
			if (strcmp(names[k].name, op->name) == 0)
				found = crash__content(names[k].inode, nr);
		if (found >= 0)
			nr_whole++;
		good = crash__allowed(op->name, nr, found, durable);
		if (!good)
			(void)snprintf(what, sizeof(what), "%s is %d", strrchr(op->name, '/') + 1,
				       found);
	}
	for (int i = 0; i < nr; i++)
		if (crash.ops[i].kind == CRASH_DURABLE)
			nr_durable++;
	if (good && durable && nr_durable > 0 && nr_whole == 0) {
		good = false;
		(void)snprintf(what, sizeof(what), "no checkpoint is left");
	}
	count->states++;
	if (good)
		return;
	if (count->bad++ == 0)
		(void)snprintf(count->first, sizeof(count->first),
			       "after %d entries of the record: %s", nr, what);
}

/* Goes through every choice for the calls uncertain[from] ... uncertain[to - 1]. */
static inline void crash__vary(const int *uncertain, int from, int to, int nr, bool durable,
			       struct crash_count *count)
{
	struct crash_op *op;
	unsigned nr_choices;

	if (from == to) {
		crash__judge(nr, durable, count);
		return;
	}
	op = &crash.ops[uncertain[from]];
	nr_choices = op->kind == CRASH_WRITE ? 3 : 2;
	/* With the last call absent, the state was already checked one call ago. */
	for (unsigned choice = uncertain[from] == nr - 1; choice < nr_choices; choice++) {
		op->choice = (unsigned char)choice;
		crash__vary(uncertain, from + 1, to, nr, durable, count);
	}
}

/* Returns whether a call can matter: bytes of failed saves cannot, because no name leads to
 * them. */
static inline bool crash__matters(const struct crash_op *op)
{
	for (int i = 0; i < crash.nr_ops; i++)
		if (crash.ops[i].kind == CRASH_RENAME && crash.ops[i].inode == op->inode)
			return true;
	return crash__is_name(op);
}

/* Checks every state after every entry of the record. If more than `most` calls are uncertain,
 * that many vary at a time, and the others are all present or all absent. */
static inline struct crash_count crash_enumerate(int most, bool durable)
{
	struct crash_count count = { 0, 0, "" };
	int uncertain[CRASH_MAX_OPS];

	for (int nr = 1; nr <= crash.nr_ops; nr++) {
		int nr_uncertain = 0;

		crash__mark_synced(nr);
		for (int i = 0; i < nr; i++) {
			crash.ops[i].choice = CRASH_WHOLE;
			if (crash__is_call(&crash.ops[i]) && !crash.ops[i].synced &&
			    crash__matters(&crash.ops[i]))
				uncertain[nr_uncertain++] = i;
		}
		if (nr_uncertain <= most) {
			crash__vary(uncertain, 0, nr_uncertain, nr, durable, &count);
			continue;
		}
		for (int from = 0; from + most <= nr_uncertain; from++)
			for (unsigned others = CRASH_ABSENT; others <= CRASH_WHOLE; others++) {
				for (int i = 0; i < nr_uncertain; i++)
					crash.ops[uncertain[i]].choice = (unsigned char)others;
				crash__vary(uncertain, from, from + most, nr, durable, &count);
			}
	}
	CHECK(!crash.lost);
	return count;
}

/* ---- changes of the record that imitate a faulty save ---- */

/* Removes the entries of a kind. */
static inline void crash_drop(enum crash_kind kind)
{
	int nr = 0;

	for (int i = 0; i < crash.nr_ops; i++)
		if (crash.ops[i].kind == kind)
			free(crash.ops[i].bytes);
		else
			crash.ops[nr++] = crash.ops[i];
	crash.nr_ops = nr;
	memset(crash.memo, 0, sizeof(crash.memo));
}

/* Moves every entry of a kind before the entry of another kind that it directly followed. */
static inline void crash_hasten(enum crash_kind kind, enum crash_kind before)
{
	for (int i = 1; i < crash.nr_ops; i++)
		if (crash.ops[i].kind == kind && crash.ops[i - 1].kind == before) {
			struct crash_op op = crash.ops[i];

			crash.ops[i] = crash.ops[i - 1];
			crash.ops[i - 1] = op;
		}
	memset(crash.memo, 0, sizeof(crash.memo));
}

#endif
