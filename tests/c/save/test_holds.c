/* The actions of one thread while another is stopped in the middle of a call of the table. The
 * test decides when the call continues, so nothing depends on elapsed time. */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>

#include "saving.h"

static const char *dir;
static struct saving_state one, two;

static struct sfr_ticket *submit(struct sfr_engine *engine, const char *name,
				 const struct saving_state *s)
{
	struct sfr_ticket *t = NULL;

	t = saving_started(engine, dir, name, s, SFR_SAVE_DURABLE);
	return t;
}

/* ---- calls that stop ---- */

static struct sfr_sys plain;
static sem_t held, may_go;
static atomic_int nr_to_hold;

static void hold(void)
{
	if (atomic_fetch_sub(&nr_to_hold, 1) > 0) {
		(void)sem_post(&held);
		(void)sem_wait(&may_go);
	}
}

static void hold_next(int nr)
{
	CHECK_EQ(sem_init(&held, 0, 0), 0);
	CHECK_EQ(sem_init(&may_go, 0, 0), 0);
	nr_to_hold = nr;
}

static int held_unlink(int at, const char *name)
{
	hold();
	return plain.unlink(at, name);
}

/* ---- cancel against commit ---- */

/* Returns the state of the save's log entry. Reads it without the lock. */
__attribute__((noinline, no_sanitize("thread"))) static enum sfr__log_entry_state in_the_log(
	const struct sfr_ticket *t)
{
	return *(const volatile enum sfr__log_entry_state *)&t->log.state;
}

/* A save is ready and then cancelled. Its clean-up has begun when the log reaches it. */
TEST(save_cancelled_when_ready_is_never_renamed)
{
	struct sfr_engine *engine = saving_engine(16, 2, 3);
	struct sfr_ticket *first, *t;

	plain = sfr_sys;
	sfr_sys.unlink = held_unlink;
	first = submit(engine, "first", &one);
	t = submit(engine, "cancelled", &two);
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_give_verdict(t, -1), 0);
	while (saving_state_of(t) != SFR_READY)
		(void)sched_yield();
	hold_next(1);
	CHECK_EQ(sfr_save_cancel(t), 1);
	(void)sem_wait(&held); /* stopped before its temporary is removed */
	CHECK_EQ(sfr_save_wait(first, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_give_verdict(first, -1), 0);
	while (in_the_log(t) != SFR__LOG_RUNNING)
		(void)sched_yield();
	(void)sem_post(&may_go);
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_ENDED, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_wait(first, SFR_WAIT_ENDED, SFR_FOREVER), 0);
	while (sfr_log_pending() != 0)
		(void)sched_yield();
	CHECK_EQ(saving_state_of(t), SFR_CANCELLED);
	CHECK_EQ(saving_state_of(first), SFR_DURABLE);
	CHECK_EQ(saving_content(dir, "cancelled"), -1);
	for (int from = 0; from < SFR_NR_STATES; from++)
		CHECK(from == SFR_READY || sfr__ticket_nr_transitions(from, SFR_COMMITTING) == 0);
	for (int nr_ends = 0; nr_ends < 2;)
		if (saving_notice() == SFR_NOTICE_ENDED)
			nr_ends++;
	sfr_ticket_put(t);
	sfr_ticket_put(first);
	saving_end(engine);
	sfr_sys = plain;
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
}

/* ---- close and removes ---- */

TEST(close_waits_for_removes)
{
	struct sfr_engine *engine = saving_engine(16, 1, 3);

	CHECK_EQ(saving_save(engine, dir, "gone", &one, 0), 0);
	plain = sfr_sys;
	hold_next(1);
	sfr_sys.unlink = held_unlink;
	CHECK_EQ(sfr_log_append_remove(dir_path(dir, "gone"), NULL), 0);
	(void)sem_wait(&held);
	CHECK_EQ(sfr_engine_close(engine, 1), SFR_EAGAIN);
	CHECK_EQ(saving_content(dir, "gone"), 1);
	(void)sem_post(&may_go);
	CHECK_EQ(sfr_engine_close(engine, SFR_FOREVER), 0);
	CHECK_EQ(saving_content(dir, "gone"), -1);
	sfr_engine_put(engine);
	CHECK_EQ(sfr_log_stop(), 0);
	sfr_sys = plain;
}

/* ---- the first error ---- */

static atomic_int nr_writes;

/* Two writes stop; then each fails with an error of its own. */
static ssize_t failing_pwrite(int fd, const void *buf, size_t len, off_t off)
{
	static sem_t *const go[] = { &held, &may_go };
	int i;

	if (len <= SFR_PAGE)
		/* the test write of a file that is being opened */
		return plain.pwrite(fd, buf, len, off);
	i = atomic_fetch_add(&nr_writes, 1);
	if (i < 2)
		(void)sem_wait(go[i]);
	errno = i == 0 ? ENOSPC : EIO;
	return -1;
}

TEST(save_reports_its_first_error)
{
	struct sfr_engine *engine = saving_engine(16, 2, 3);
	struct sfr_report report;
	struct sfr_ticket *t = NULL;

	CHECK_EQ(saving_save(engine, dir, "a", &one, 0), 0); /* opens its file without a fault */
	CHECK_EQ(sfr_log_stop(), 0);                         /* its thread reads the table */
	plain = sfr_sys;
	CHECK_EQ(saving_new(engine, dir, "a", &two, SFR_SAVE_DURABLE, &t), 0);
	hold_next(0);
	nr_writes = 0;
	sfr_sys.pwrite = failing_pwrite;
	CHECK_EQ(saving_submit(t), 0);
	while (nr_writes < 2)
		(void)sched_yield();
	(void)sem_post(&held);
	while (saving_state_of(t) != SFR_ENDING)
		(void)sched_yield();
	(void)sem_post(&may_go);
	saving_finish(t);
	CHECK_EQ(sfr_save_report(t, &report), 0);
	CHECK_EQ(report.state, SFR_FAILED);
	CHECK_EQ(report.err.code, -ENOSPC);
	sfr_ticket_put(t);
	saving_end(engine);
	sfr_sys = plain;
	CHECK_EQ(saving_content(dir, "a"), 1);
}

/* ---- old bytes ---- */

TEST(no_old_byte_of_the_pool_is_in_a_file)
{
	struct sfr_engine *engine = saving_engine(16, 2, 3);

	CHECK_EQ(sfr_engine_warm_up(engine, 16 * SAVING_BLOCK), 0);
	for (int i = 0; i < 3; i++) {
		saving_poison(engine);
		CHECK_EQ(saving_save(engine, dir, "a", &one, 0), 0);
		saving_padding_is_zero(dir, "a", &one);
		CHECK_EQ(saving_content(dir, "a"), 1);
	}
	saving_end(engine);
}

/* ---- descriptors ---- */

static atomic_int nr_opened, nr_inherited, nr_created, nr_not_new;

static int watched_open(int at, const char *name, int flags, mode_t mode)
{
	nr_opened++;
	if ((flags & O_CLOEXEC) == 0)
		nr_inherited++;
	if ((flags & O_CREAT) != 0)
		nr_created++;
	if ((flags & O_CREAT) && !(flags & O_EXCL))
		nr_not_new++;
	return plain.open(at, name, flags, mode);
}

TEST(programs_started_during_a_save_inherit_no_descriptor)
{
	struct sfr_engine *engine = saving_engine(16, 2, 3);
	struct sfr_check *check = NULL;
	struct sfr_log_load *load = NULL;
	int fd = -1;

	plain = sfr_sys;
	nr_opened = nr_inherited = nr_created = nr_not_new = 0;
	sfr_sys.open = watched_open;
	CHECK_EQ(saving_save(engine, dir, "a", &one, SFR_SAVE_DURABLE), 0);
	CHECK_EQ(sfr_log_load_new(dir_path(dir, "a"), &load), 0);
	CHECK_EQ(sfr_log_load_wait(load, SFR_FOREVER, &fd), 0);
	CHECK(fcntl(fd, F_GETFD) & FD_CLOEXEC);
	CHECK_EQ(sfr_check_new(fd, SFR_CHECK_BYTES, &check), 0);
	CHECK_EQ(sfr_check_run(check, SFR_FOREVER), 0);
	sfr_check_free(check);
	(void)close(fd);
	sfr_log_load_free(load);
	CHECK_EQ(sfr_log_append_remove(dir_path(dir, "a"), NULL), 0);
	saving_end(engine);
	sfr_sys = plain;
	CHECK(nr_opened >= 3 && nr_created >= 1);
	CHECK_EQ(nr_inherited, 0);
	CHECK_EQ(nr_not_new, 0);
}

TEST(kept_handle_holds_no_descriptor)
{
	struct sfr_engine *engine = saving_engine(16, 1, 3);
	struct sfr_ticket *well, *cancelled;
	int before;

	CHECK_EQ(saving_save(engine, dir, "a", &one, 0), 0);
	before = nr_fds();
	well = submit(engine, "a", &two);
	saving_finish(well);
	cancelled = submit(engine, "a", &one);
	CHECK_EQ(sfr_save_cancel(cancelled), 1);
	saving_finish(cancelled);
	CHECK_EQ(nr_fds(), before);
	CHECK_EQ(saving_content(dir, "a"), 2);
	sfr_ticket_put(well);
	sfr_ticket_put(cancelled);
	saving_end(engine);
}

/* ---- names that begin alike ---- */

TEST(remove_does_not_concern_names_with_the_same_beginning)
{
	struct sfr_engine *engine = saving_engine(16, 1, 3);
	struct sfr_ticket *t = submit(engine, "other", &one); /* the log waits for this save */

	CHECK_EQ(sfr_log_append_remove(dir_path(dir, "ep1"), NULL), 0);
	CHECK_EQ(sfr_log_will_exist(dir_path(dir, "ep1")), 0);
	CHECK_EQ(sfr_log_will_exist(dir_path(dir, "ep1/shard")), 0);
	CHECK_EQ(sfr_log_will_exist(dir_path(dir, "ep10")), -1);
	CHECK_EQ(sfr_log_will_exist(dir_path(dir, "ep")), -1);
	CHECK_EQ(sfr_log_will_exist(dir_path(dir, "other/shard")), -1);
	saving_done(t);
	saving_end(engine);
}

/* A link that was not made does not affect the checkpoints. */
TEST(remove_runs_after_a_failed_link)
{
	struct sfr_engine *engine = saving_engine(16, 1, 3);
	struct sfr_external_work *link = NULL;
	uint64_t number = 0, seq = 0;
	int after_good = 0;

	CHECK_EQ(saving_save(engine, dir, "old", &one, 0), 0);
	CHECK_EQ(sfr_external_work_new(dir_path(dir, "last"), SFR_WORK_LINK, &link), 0);
	CHECK_EQ(sfr_external_work_append(link), 0);
	CHECK_EQ(sfr_log_append_remove(dir_path(dir, "old"), NULL), 0);
	CHECK_EQ(sfr_external_work_take_next(SFR_FOREVER, &number, &after_good), 0);
	CHECK_EQ(after_good, 1);
	sfr_external_work_mark_ended(link, 0);
	sfr_external_work_put(link);
	CHECK_EQ(sfr_log_drain(&seq, SFR_FOREVER), 0);
	CHECK_EQ(saving_content(dir, "old"), -1);
	saving_end(engine);
}

BEGIN
{
	dir = saving_dir();
	saving_fill(&one, 1);
	saving_fill(&two, 2);
	return true;
}
