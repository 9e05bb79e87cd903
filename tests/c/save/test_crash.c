/* Every state in which a machine may be found after it died during saves and removes.
 *
 * From the first durable save on, the path always holds a complete file: the last one that was
 * reported durable, or a later one. crash_model.h defines the states.
 *
 * CHECK_CRASH=full uses files of more writes, and varies more of them at a time (`make crash`). */
#include "crash_model.h"

static const char *dir;
static bool full;
static uint64_t nr_states;

static struct sfr_engine *new_engine(uint32_t max_in_flight)
{
	/* Fewer and larger blocks give fewer writes: 5 for a file, or 10. */
	return saving_engine_of(full ? SAVING_BLOCK : 4 * SAVING_BLOCK, 4, 2, max_in_flight);
}

static struct sfr_engine *begin(uint32_t max_in_flight)
{
	crash_forget();
	crash_record();
	return new_engine(max_in_flight);
}

static void end(struct sfr_engine *engine)
{
	uint64_t seq = 0;

	CHECK_EQ(sfr_log_drain(&seq, SFR_FOREVER), 0);
	saving_end(engine);
	crash_stop();
}

static struct sfr_ticket *submit(struct sfr_engine *engine, const char *name, int value,
				 uint32_t flags)
{
	static struct saving_state states[4]; /* as many as may be in flight at a time */
	static unsigned next;
	struct saving_state *s = &states[next++ % 4];
	struct sfr_ticket *t;

	saving_fill(s, (unsigned char)value);
	CHECK_EQ(saving_new(engine, dir, name, s, flags, &t), 0);
	crash_note(CRASH_BEGUN, dir, name, value);
	CHECK_EQ(saving_submit(t), 0);
	return t;
}

/* Waits for the end and records a durable save. Returns the save's code. */
static int finish(struct sfr_ticket *t, const char *name, int value, uint32_t flags)
{
	struct sfr_report report;

	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	(void)sfr_save_give_verdict(t, -1);
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_ENDED, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_report(t, &report), 0);
	if (report.err.code == 0 && (flags & SFR_SAVE_DURABLE))
		crash_note(CRASH_DURABLE, dir, name, value);
	while (saving_notice() != SFR_NOTICE_ENDED)
		;
	sfr_ticket_put(t);
	return report.err.code;
}

static int save(struct sfr_engine *engine, const char *name, int value, uint32_t flags)
{
	return finish(submit(engine, name, value, flags), name, value, flags);
}

static void remove_name(const char *name)
{
	char key[PATH_MAX];

	CHECK(snprintf(key, sizeof(key), "%s/%s", dir, name) < PATH_MAX);
	crash_note(CRASH_REMOVED, dir, name, 0);
	CHECK_EQ(sfr_log_append_remove(key, NULL), 0);
}

static struct crash_count enumerate(bool durable)
{
	struct crash_count count;

	(void)alarm(full ? 10 * CHECK_SECONDS : CHECK_SECONDS); /* for each enumeration */
	count = crash_enumerate(full ? 12 : 7, durable);
	nr_states += count.states;
	return count;
}

/* Checks that no state is bad, and that there were at least so many. */
static void check_all_states(bool durable, uint64_t at_least)
{
	struct crash_count count = enumerate(durable);

	if (!CHECK_EQ(count.bad, 0))
		(void)fprintf(stderr, "  %s\n", count.first);
	CHECK(count.states >= at_least);
	(void)printf(" (%llu states)", (unsigned long long)count.states);
}

/* ---- saves and removes ----------------------------------------------------- */

TEST(the_path_is_the_last_durable_save_or_a_later_one)
{
	struct sfr_engine *engine = begin(1);

	for (int value = 1; value <= 3; value++)
		CHECK_EQ(save(engine, "a", value, SFR_SAVE_DURABLE), 0);
	end(engine);
	check_all_states(true, 2000);
}

TEST(rotation_always_leaves_a_checkpoint)
{
	struct sfr_engine *engine = begin(2);
	struct sfr_ticket *t;

	CHECK_EQ(save(engine, "e1", 1, SFR_SAVE_DURABLE), 0);
	t = submit(engine, "e2", 2, SFR_SAVE_DURABLE);
	remove_name("e1");
	CHECK_EQ(finish(t, "e2", 2, SFR_SAVE_DURABLE), 0);
	t = submit(engine, "e3", 3, SFR_SAVE_DURABLE);
	remove_name("e2");
	CHECK_EQ(finish(t, "e3", 3, SFR_SAVE_DURABLE), 0);
	/* and then a save under a name that was removed */
	CHECK_EQ(save(engine, "e1", 4, SFR_SAVE_DURABLE), 0);
	end(engine);
	check_all_states(true, 2000);
}

TEST(concurrent_saves_keep_each_others_files)
{
	struct sfr_engine *engine = begin(2);
	struct sfr_ticket *a, *b;

	CHECK_EQ(save(engine, "a", 1, SFR_SAVE_DURABLE), 0);
	a = submit(engine, "a", 2, SFR_SAVE_DURABLE);
	b = submit(engine, "b", 3, SFR_SAVE_DURABLE);
	CHECK_EQ(sfr_save_wait(b, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_give_verdict(b, -1), 0);
	CHECK_EQ(finish(a, "a", 2, SFR_SAVE_DURABLE), 0);
	CHECK_EQ(finish(b, "b", 3, SFR_SAVE_DURABLE), 0);
	a = submit(engine, "a", 4, SFR_SAVE_DURABLE);
	b = submit(engine, "a", 5, SFR_SAVE_DURABLE);
	CHECK_EQ(sfr_save_wait(b, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_give_verdict(b, -1), 0);
	CHECK_EQ(finish(a, "a", 4, SFR_SAVE_DURABLE), 0);
	CHECK_EQ(finish(b, "a", 5, SFR_SAVE_DURABLE), 0);
	end(engine);
	check_all_states(true, 2000);
}

TEST(failed_and_cancelled_saves_keep_durable_files)
{
	static const char *const calls[] = { "pwrite", "fdatasync", "rename" };
	struct sfr_engine *engine;
	struct sfr_ticket *t;

	CHECK_EQ(sfr_inject_install(), 0);
	engine = begin(1);
	CHECK_EQ(save(engine, "a", 1, SFR_SAVE_DURABLE), 0);
	for (int i = 0; i < 3; i++) {
		const struct sfr_fault fault = {
			.call = calls[i], .nth = i == 0 ? 3 : 1, .err = EIO, .limit = -1
		};

		CHECK_EQ(sfr_inject_add_fault(&fault), 0);
		CHECK_EQ(save(engine, "a", 2 + i, SFR_SAVE_DURABLE), -EIO);
		sfr_inject_clear();
		remove_name("a"); /* dropped, because the save before it did not become durable */
	}
	t = submit(engine, "a", 8, SFR_SAVE_DURABLE);
	(void)sfr_save_cancel(t);
	CHECK_EQ(finish(t, "a", 8, SFR_SAVE_DURABLE), SFR_ECANCELLED);
	CHECK_EQ(save(engine, "a", 9, SFR_SAVE_DURABLE), 0);
	end(engine);
	sfr_inject_uninstall();
	check_all_states(true, 2000);
}

TEST(unsynced_save_leaves_old_new_or_detectably_damaged_file)
{
	struct sfr_engine *engine = begin(1);
	struct crash_count count;

	CHECK_EQ(save(engine, "a", 1, SFR_SAVE_DURABLE), 0);
	CHECK_EQ(save(engine, "a", 2, 0), 0);
	end(engine);
	check_all_states(false, 1000);
	/* With the promise of a durable save, the model finds bad states. */
	count = enumerate(true);
	CHECK(count.bad > 0);
}

TEST(removing_a_directory_keeps_everything_else)
{
	struct sfr_engine *engine = begin(1);
	char path[PATH_MAX];
	const char *top = dir;
	char below[PATH_MAX];

	CHECK(snprintf(path, sizeof(path), "%s/old", dir) < PATH_MAX);
	CHECK_EQ(mkdir(path, 0777), 0);
	CHECK(snprintf(below, sizeof(below), "%s/old", dir) < PATH_MAX);
	dir = below;
	CHECK_EQ(save(engine, "a", 1, SFR_SAVE_DURABLE), 0);
	dir = top;
	CHECK_EQ(save(engine, "b", 2, SFR_SAVE_DURABLE), 0);
	crash_note(CRASH_REMOVED, below, "a", 0);
	remove_name("old");
	end(engine);
	CHECK_EQ(saving_content(below, "a"), -1);
	check_all_states(true, 1000);
}

/* ---- faults of our own, which the model must detect ---- */

static void record_an_overwrite(void)
{
	struct sfr_engine *engine = begin(1);

	CHECK_EQ(save(engine, "a", 1, SFR_SAVE_DURABLE), 0);
	CHECK_EQ(save(engine, "a", 2, SFR_SAVE_DURABLE), 0);
	end(engine);
}

TEST(crash_model_detects_a_missing_or_late_sync)
{
	record_an_overwrite();
	crash_drop(CRASH_SYNC);
	CHECK(enumerate(true).bad > 0);

	record_an_overwrite();
	crash_drop(CRASH_SYNC_DIR);
	CHECK(enumerate(true).bad > 0);

	record_an_overwrite();
	crash_hasten(CRASH_RENAME, CRASH_SYNC);
	CHECK(enumerate(true).bad > 0);

	record_an_overwrite();
	crash_hasten(CRASH_DURABLE, CRASH_SYNC_DIR);
	CHECK(enumerate(true).bad > 0);
}

TEST(crash_model_detects_a_remove_that_does_not_wait)
{
	struct sfr_engine *engine = begin(1);
	struct sfr_ticket *t;

	CHECK_EQ(save(engine, "e1", 1, SFR_SAVE_DURABLE), 0);
	t = submit(engine, "e2", 2, SFR_SAVE_DURABLE);
	remove_name("e1");
	CHECK_EQ(finish(t, "e2", 2, SFR_SAVE_DURABLE), 0);
	end(engine);
	crash_hasten(CRASH_UNLINK, CRASH_DURABLE); /* the two may come in either order */
	CHECK_EQ(enumerate(true).bad, 0);
	crash_hasten(CRASH_UNLINK, CRASH_SYNC_DIR);
	CHECK(enumerate(true).bad > 0);
}

/* ---- saves after a crash ---- */

/* Writes a state to the real disk. */
static void rebuild(int nr, const char *where)
{
	struct crash_name names[CRASH_MAX_NAMES];
	int nr_names = crash__names(nr, names);

	for (int i = 0; i < nr_names; i++) {
		uint64_t len = crash__build(names[i].inode, nr);
		char path[PATH_MAX];
		int fd;

		CHECK(snprintf(path, sizeof(path), "%s/%s", where,
			       strrchr(names[i].name, '/') + 1) < PATH_MAX);
		fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
		CHECK(fd >= 0);
		CHECK_EQ(pwrite(fd, crash.image, len, 0), len);
		CHECK_EQ(close(fd), 0);
	}
}

TEST(next_run_can_save_after_any_crash)
{
	record_an_overwrite();
	for (int nr = 1; nr <= crash.nr_ops; nr++) {
		const char *where = dir_make("/tmp");
		struct sfr_engine *engine;
		struct saving_state s;
		int found;

		crash__mark_synced(nr);
		for (int i = 0; i < nr; i++) {
			crash.ops[i].choice =
				crash.ops[i].synced ? CRASH_WHOLE : check_random() & 1;
		}
		rebuild(nr, where);
		found = saving_content(where, "a");
		CHECK(found == -1 || found == 1 || found == 2);
		engine = new_engine(1);
		saving_fill(&s, 3);
		CHECK_EQ(saving_save(engine, where, "a", &s, SFR_SAVE_DURABLE), 0);
		CHECK_EQ(saving_content(where, "a"), 3);
		/* their names have this boot's id */
		CHECK_EQ(dir_count(where, TEMPORARIES, NULL), 0);
		saving_end(engine);
		dir_remove(where);
	}
	CHECK_EQ(sfr_log_stop(), 0);
}

static void print_states(void)
{
	(void)printf("  %llu states in all\n", (unsigned long long)nr_states);
}

BEGIN
{
	const char *mode = getenv("CHECK_CRASH");

	full = mode && strcmp(mode, "full") == 0;
	dir = saving_dir();
	check_at_end(print_states);
	return true;
}
