/* A small state, saves of it, and checks of the file, for all tests of whole saves. */
#ifndef SAVING_H
#define SAVING_H

#include "sfr.h"
#include "check/check.h"
#include "check/records.h"
#include "memory/pool_int.h"
#include "save/jobs.h"
#include "fix_dir.h"

enum {
	SAVING_BLOCK = 8192,
	SAVING_NR = 6,
	SAVING_LEN = 10000,
};

/* A state of SAVING_NR storages. The first two are captured, the others deferred. */
struct saving_state {
	unsigned char bytes[SAVING_NR][SAVING_LEN];
	struct sfr_source sources[SAVING_NR];
};

static inline void saving_fill(struct saving_state *s, unsigned char value)
{
	memset(s->bytes, value, sizeof(s->bytes));
	for (unsigned i = 0; i < SAVING_NR; i++)
		s->sources[i] = (struct sfr_source){
			.addr = (uint64_t)(uintptr_t)s->bytes[i],
			.nbytes = SAVING_LEN - i, /* all lengths differ */
			.lane = i < 2 ? SFR_CAPTURED : SFR_LANE_HOST,
		};
}

static inline struct sfr_engine *saving_engine_of(uint64_t block_bytes, uint64_t nr_blocks,
						  uint32_t nr_writers, uint32_t max_in_flight)
{
	const struct sfr_engine_opts opts = { .pool_bytes = nr_blocks * block_bytes,
					      .block_bytes = block_bytes,
					      .nr_writers = nr_writers,
					      .max_in_flight = max_in_flight,
					      .nr_copiers = 2 };
	struct sfr_engine *engine = NULL;

	CHECK_EQ(sfr_engine_new(&opts, &engine), 0);
	return engine;
}

static inline struct sfr_engine *saving_engine(uint64_t nr_blocks, uint32_t nr_writers,
					       uint32_t max_in_flight)
{
	return saving_engine_of(SAVING_BLOCK, nr_blocks, nr_writers, max_in_flight);
}

/* Closes and frees the engine; afterwards no thread of the core runs. */
static inline void saving_end(struct sfr_engine *engine)
{
	CHECK_EQ(sfr_engine_close(engine, SFR_FOREVER), 0);
	sfr_engine_put(engine);
	CHECK_EQ(sfr_log_stop(), 0);
}

/* Makes each such call of the system slow. */
static inline void saving_slow(const char *call, uint64_t delay_ns)
{
	const struct sfr_fault fault = {
		.call = call, .nth = 1, .sticky = 1, .limit = -1, .delay_ns = delay_ns
	};

	CHECK_EQ(sfr_inject_add_fault(&fault), 0);
}

static const char saving_skeleton[] = "skeleton";

static inline int saving_new(struct sfr_engine *engine, const char *dir, const char *name,
			     const struct saving_state *s, uint32_t flags, struct sfr_ticket **t)
{
	const struct sfr_save_desc desc = {
		.dir = dir,
		.name = name,
		.skeleton = saving_skeleton,
		.skeleton_len = sizeof(saving_skeleton),
		.sources = s->sources,
		.nr_sources = SAVING_NR,
		.flags = flags,
	};

	return sfr_save_new(engine, &desc, t);
}

/* Submits a new save up to its launch. */
static inline int saving_submit(struct sfr_ticket *t)
{
	int rc = sfr_save_admit(t, SFR_FOREVER);

	if (rc == 0)
		rc = sfr_save_capture(t, SFR_FOREVER);
	if (rc == 0)
		rc = sfr_save_launch(t);
	return rc;
}

/* Makes a new save and launches it. */
static inline struct sfr_ticket *saving_started(struct sfr_engine *engine, const char *dir,
						const char *name, const struct saving_state *s,
						uint32_t flags)
{
	struct sfr_ticket *t = NULL;

	CHECK_EQ(saving_new(engine, dir, name, s, flags, &t), 0);
	CHECK_EQ(saving_submit(t), 0);
	return t;
}

/* The last text among the notices; "" after a test has read it. */
static char saving_text[1024];

/* Takes the next notice. Returns its kind. */
static inline unsigned saving_notice(void)
{
	struct sfr_notice notice;

	CHECK_EQ(sfr_notice_wait(&notice, SFR_FOREVER), 0);
	CHECK(notice.ticket == NULL || notice.number == sfr_ticket_number(notice.ticket));
	sfr_ticket_put(notice.ticket);
	sfr_snapshot_put(notice.snapshot);
	if (notice.what == SFR_NOTICE_TEXT)
		memcpy(saving_text, notice.text, sizeof(saving_text));
	return notice.what;
}

/* Gives a good verdict, waits for the end, and takes the save's notices. */
static inline void saving_finish(struct sfr_ticket *t)
{
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	(void)sfr_save_give_verdict(t, -1); /* refused if the save has failed already */
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_ENDED, SFR_FOREVER), 0);
	while (saving_notice() != SFR_NOTICE_ENDED)
		;
}

/* Ends a save and drops the reference. */
static inline void saving_done(struct sfr_ticket *t)
{
	saving_finish(t);
	sfr_ticket_put(t);
}

static inline enum sfr_state saving_state_of(struct sfr_ticket *t)
{
	struct sfr_report report;

	CHECK_EQ(sfr_save_report(t, &report), 0);
	return report.state;
}

/* Waits for the end of a launched save. Returns its code. */
static inline int saving_end_of(struct sfr_ticket *t)
{
	struct sfr_report report;

	saving_finish(t);
	CHECK_EQ(sfr_save_report(t, &report), 0);
	CHECK((report.state == SFR_DURABLE) == (report.err.code == 0));
	CHECK(report.err.code != 0 || report.err.index == -1);
	return report.err.code;
}

/* Makes one whole save. Returns its code. */
static inline int saving_save(struct sfr_engine *engine, const char *dir, const char *name,
			      const struct saving_state *s, uint32_t flags)
{
	struct sfr_ticket *t;
	int rc = saving_new(engine, dir, name, s, flags, &t);

	if (rc < 0)
		return rc;
	rc = saving_submit(t);
	if (rc == 0)
		rc = saving_end_of(t);
	sfr_ticket_put(t);
	return rc;
}

/* Returns the byte that fills an open file; -2: it is damaged and `check` says so; -4: it passes
 * for good and is not. `layout`: the lanes and devices of the sources, which decide the file's
 * layout. */
static inline int saving_content_in(int fd, const struct saving_state *layout)
{
	struct sfr_check *check = NULL;
	struct sfr__image img;
	unsigned char byte, same[SAVING_LEN];
	int found = -2;

	const struct sfr_save_desc desc = { .skeleton = saving_skeleton,
					    .skeleton_len = sizeof(saving_skeleton),
					    .sources = layout->sources,
					    .nr_sources = SAVING_NR };
	if (sfr_check_new(fd, SFR_CHECK_BYTES, &check) == 0 &&
	    sfr_check_run(check, SFR_FOREVER) == 0 && sfr_check_result(check)->ok &&
	    sfr_check_result(check)->nr_unchecked == 0 &&
	    sfr__image_init(&img, &desc, SAVING_BLOCK) == 0) {
		found = -3;
		for (uint32_t i = 0; i < img.nr_entries; i++) {
			const struct sfr__image_entry *entry = &img.entries[i];

			if (entry->source < 0)
				continue;
			CHECK_EQ(pread(fd, same, entry->nbytes, (off_t)entry->data_off),
				 entry->nbytes);
			byte = same[0];
			for (uint64_t k = 0; k < entry->nbytes; k++)
				if (same[k] != byte)
					found = -4;
			if (found == -3)
				found = byte;
			else if (found != byte)
				found = -4;
		}
		sfr__image_fini(&img);
	}
	sfr_check_free(check);
	return found;
}

/* Does the same for the file dir/name; -1: there is none. */
static inline int saving_content_as(const char *dir, const char *name,
				    const struct saving_state *layout)
{
	int found, fd = open(dir_path(dir, name), O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return -1;
	found = saving_content_in(fd, layout);
	(void)close(fd);
	return found;
}

static inline const struct saving_state *saving_on_host(void)
{
	static struct saving_state on_host;

	saving_fill(&on_host, 0);
	return &on_host;
}

static inline int saving_content_fd(int fd)
{
	return saving_content_in(fd, saving_on_host());
}

static inline int saving_content(const char *dir, const char *name)
{
	return saving_content_as(dir, name, saving_on_host());
}

/* Fills the pool's memory with bytes that no file may contain. */
static inline void saving_poison(struct sfr_engine *engine)
{
	struct sfr__pool *pool = engine->pool;

	for (uint32_t i = 0; i < pool->nr_ever_used; i++)
		if (pool->blocks[i].state == SFR__BLOCK_FREE)
			memset(pool->blocks[i].mem, 0xa5, pool->blocks[i].committed);
}

/* Counts the bytes of padding in a block of the file that are not zero; *nr: all bytes of
 * padding. */
static inline uint64_t saving_padding_of(int fd, const struct sfr__image *img,
					 const struct sfr__extent *extent, uint32_t blk,
					 uint64_t *nr)
{
	unsigned char bytes[SAVING_BLOCK] = { 0 };
	size_t len = sfr__image_block_len(img, extent, blk);
	struct sfr__seg_iter it;
	struct sfr__seg seg;
	uint64_t nr_dirty = 0;

	CHECK_EQ(pread(fd, bytes, len, (off_t)sfr__image_block_off(img, extent, blk)), len);
	sfr__seg_iter_init(&it, img, extent, blk);
	while (sfr__seg_next(&it, &seg))
		for (size_t i = seg.pos; seg.kind == SFR__SEG_PAD && i < seg.pos + seg.len; i++) {
			if (bytes[i] != 0)
				nr_dirty++;
			(*nr)++;
		}
	return nr_dirty;
}

/* Checks that the file's padding is zero, and so contains no bytes of other files. */
static inline void saving_padding_is_zero(const char *dir, const char *name,
					  const struct saving_state *layout)
{
	const struct sfr_save_desc desc = { .skeleton = saving_skeleton,
					    .skeleton_len = sizeof(saving_skeleton),
					    .sources = layout->sources,
					    .nr_sources = SAVING_NR };
	struct sfr__image img;
	uint64_t nr = 0, nr_dirty = 0;
	int fd = open(dir_path(dir, name), O_RDONLY | O_CLOEXEC);

	if (!CHECK(fd >= 0) || !CHECK_EQ(sfr__image_init(&img, &desc, SAVING_BLOCK), 0))
		return;
	for (const struct sfr__extent *extent = img.extents; extent < img.extents + img.nr_extents;
	     extent++)
		for (uint32_t blk = 0; blk < extent->nr_blocks; blk++)
			nr_dirty += saving_padding_of(fd, &img, extent, blk, &nr);
	CHECK(nr > 1000);
	CHECK_EQ(nr_dirty, 0);
	sfr__image_fini(&img);
	(void)close(fd);
}

static char saving__dir[PATH_MAX];

static inline void saving__remove_dir(void)
{
	struct sfr_err err = { .index = -1 };

	(void)sfr__file_remove_tree(saving__dir, NULL, &err);
}

/* Makes an empty directory, which is removed after the last test. */
static inline const char *saving_dir(void)
{
	const char *base = getenv("TMPDIR");

	(void)snprintf(saving__dir, sizeof(saving__dir), "%s/stillframe-test-XXXXXX",
		       base ? base : "/tmp");
	if (!mkdtemp(saving__dir)) {
		perror(saving__dir);
		exit(EXIT_FAILURE);
	}
	check_at_end(saving__remove_dir);
	return saving__dir;
}

#endif
