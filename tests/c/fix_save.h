/* Saves one small file through every step of file.c, and checks the result. */
#ifndef FIX_SAVE_H
#define FIX_SAVE_H

#include "save/jobs.h"
#include "fix_dir.h"

#define SAVE_LEN (5u * SFR_PAGE)
#define SAVE_WRITE_BYTES (2u * SFR_PAGE) /* bytes of one write; the last one is shorter */

static _Alignas(SFR_PAGE) char save_new[SAVE_LEN];
static char save_old[] = "the old file";

/* Every change (from, to) of the file's state that a test has seen. */
static bool save_arrows[SFR__FILE_BROKEN + 1][SFR__FILE_BROKEN + 1];

/* Takes one step of a file's life and records the change of its state. */
#define SAVE_STEP(f, call)                                                                         \
	__extension__({                                                                            \
		enum sfr__file_state save__from = (f)->state;                                      \
		int save__rc = (call);                                                             \
		save_arrows[save__from][(f)->state] = true;                                        \
		save__rc;                                                                          \
	})

static inline void save_fill(void)
{
	for (uint32_t i = 0; i < SAVE_LEN; i++)
		save_new[i] = (char)(i * 2654435761u >> 24);
}

/* Runs `body` in a fresh directory on each file system. */
static inline void in_each_base(void (*body)(const char *dir))
{
	char dir[PATH_MAX];

	for (int i = 0; i < NR_DIR_BASES; i++) {
		(void)snprintf(dir, sizeof(dir), "%s", dir_make(dir_bases[i]));
		body(dir);
		dir_remove(dir);
	}
}

static inline void save_put_old(const char *dir)
{
	file_put(dir_path(dir, "a.ckpt"), save_old, sizeof(save_old));
}

static inline bool save_is_old(const char *dir)
{
	return file_is(dir_path(dir, "a.ckpt"), save_old, sizeof(save_old));
}

static inline bool save_is_new(const char *dir)
{
	return file_is(dir_path(dir, "a.ckpt"), save_new, SAVE_LEN);
}

static inline int save_write_all(struct sfr__file *f, struct sfr_err *err)
{
	int rc = 0;

	for (uint32_t off = 0; off < SAVE_LEN && rc == 0; off += SAVE_WRITE_BYTES) {
		uint32_t len =
			SAVE_LEN - off < SAVE_WRITE_BYTES ? SAVE_LEN - off : SAVE_WRITE_BYTES;

		rc = SAVE_STEP(f, sfr__file_write(f, save_new + off, len, off, err));
	}
	return rc;
}

/* Makes a whole save except for its end (sfr__file_fini), which the caller calls. Returns the
 * result of the first step that failed. */
static inline int save_begin(struct sfr__file *f, const char *dir, bool durable,
			     struct sfr_err *err)
{
	int rc;

	*err = (struct sfr_err){ .index = -1 };
	memset(f, 0, sizeof(*f));
	rc = SAVE_STEP(f, sfr__file_init(f, dir, "a.ckpt", SAVE_LEN, durable));
	if (rc == 0)
		rc = SAVE_STEP(f, sfr__file_open(f, err));
	if (rc == 0)
		rc = save_write_all(f, err);
	if (rc == 0)
		rc = SAVE_STEP(f, sfr__file_sync(f, err));
	if (rc == 0)
		rc = SAVE_STEP(f, sfr__file_commit(f, err));
	return rc;
}

static inline void save_end(struct sfr__file *f)
{
	(void)SAVE_STEP(f, (sfr__file_fini(f), 0)); /* fini has no result */
}

/* Makes a save without faults, which must succeed and leave no temporary. Not synced, for speed. */
static inline void save_cleanly(const char *dir)
{
	struct sfr__file f;
	struct sfr_err err;

	CHECK_EQ(save_begin(&f, dir, false, &err), 0);
	save_end(&f);
	CHECK(save_is_new(dir));
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
}

static inline void dir_clean(const char *dir)
{
	int fd = open(dir, O_PATH | O_DIRECTORY | O_CLOEXEC);

	CHECK(fd >= 0);
	sfr__tmp_clean_dir(fd, dir);
	CHECK_EQ(close(fd), 0);
}

/* Returns the text of the next notice, or "". */
static inline const char *save_notice(void)
{
	static struct sfr_notice notice;

	return sfr_notice_wait(&notice, 0) == 0 ? notice.text : "";
}

#endif
