/* The ordered log: renames and removes in the order of submission, with loads between them. */
#include <errno.h>
#include <pthread.h>
#include <sys/wait.h>

#include "saving.h"

static const char *dir;
static struct saving_state one, two;
static struct sfr_engine *engine;

static struct sfr_ticket *submit(const char *name, const struct saving_state *s)
{
	return saving_started(engine, dir, name, s, SFR_SAVE_DURABLE);
}

static void confirm(struct sfr_ticket *t, int64_t torn)
{
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_give_verdict(t, torn), 0);
}

static void drain(void)
{
	uint64_t seq = 0;

	CHECK_EQ(sfr_log_drain(&seq, SFR_FOREVER), 0);
	CHECK_EQ(sfr_log_pending(), 0);
}

/* Returns the text of a notice that no test has read: one that came before a save's end, or the
 * next one. */
static const char *next_text(void)
{
	static char text[sizeof(saving_text)];

	while (!saving_text[0])
		(void)saving_notice();
	memcpy(text, saving_text, sizeof(text));
	saving_text[0] = 0;
	return text;
}

TEST(renames_take_effect_in_the_order_of_submission_across_paths)
{
	struct sfr_ticket *a = submit("a", &one), *b = submit("b", &two);

	confirm(b, -1);
	CHECK_EQ(sfr_save_wait(b, SFR_WAIT_ENDED, 100 * 1000 * 1000),
		 SFR_EAGAIN); /* a has no verdict */
	CHECK_EQ(saving_content(dir, "b"), -1);
	saving_done(a);
	saving_done(b);
	CHECK_EQ(saving_content(dir, "a"), 1);
	CHECK_EQ(saving_content(dir, "b"), 2);
}

TEST(saves_of_one_path_are_renamed_in_order)
{
	struct sfr_ticket *a = submit("same", &one), *b = submit("same", &two);

	confirm(b, -1);
	saving_done(a);
	saving_done(b);
	CHECK_EQ(saving_content(dir, "same"), 2);
}

TEST(a_remove_waits_for_the_save_before_it)
{
	struct sfr_ticket *a, *b;

	saving_done(submit("old", &one));
	a = submit("new", &two);
	CHECK_EQ(sfr_log_append_remove(dir_path(dir, "old"), NULL), 0);
	CHECK_EQ(sfr_log_will_exist(dir_path(dir, "old")), 0);
	CHECK_EQ(sfr_log_will_exist(dir_path(dir, "new")), 1);
	CHECK_EQ(sfr_log_will_exist(dir_path(dir, "other")), -1);
	CHECK_EQ(saving_content(dir, "old"), 1);
	saving_done(a);
	drain();
	CHECK_EQ(saving_content(dir, "old"), -1);
	CHECK_EQ(saving_content(dir, "new"), 2);
	b = submit("new", &one);
	/* the remove concerns its own file too */
	CHECK_EQ(sfr_log_append_remove(dir_path(dir, "new"), NULL), 0);
	saving_done(b);
	drain();
	CHECK_EQ(saving_content(dir, "new"), -1);
}

TEST(a_remove_is_dropped_when_the_last_save_before_it_failed)
{
	struct sfr_ticket *a, *b;

	saving_done(submit("old", &one));
	a = submit("new", &two);
	CHECK_EQ(sfr_log_append_remove(dir_path(dir, "old"), NULL), 0);
	confirm(a, 3); /* torn */
	saving_done(a);
	CHECK(strstr(next_text(), "was not removed") != NULL);
	drain();
	CHECK_EQ(saving_content(dir, "old"), 1);
	/* This holds however long ago the save failed. */
	CHECK_EQ(sfr_log_append_remove(dir_path(dir, "old"), NULL), 0);
	CHECK(strstr(next_text(), "was not removed") != NULL);
	CHECK_EQ(saving_content(dir, "old"), 1);
	/* A cancelled save did not succeed either. */
	b = submit("new", &two);
	CHECK_EQ(sfr_log_append_remove(dir_path(dir, "old"), NULL), 0);
	CHECK_EQ(sfr_save_cancel(b), 1);
	saving_done(b);
	CHECK(strstr(next_text(), "was not removed") != NULL);
	CHECK_EQ(saving_content(dir, "old"), 1);
	saving_done(submit("new", &two));
	CHECK_EQ(sfr_log_append_remove(dir_path(dir, "old"), NULL), 0);
	drain();
	CHECK_EQ(saving_content(dir, "old"), -1);
}

TEST(a_later_save_survives_an_earlier_remove_of_its_name)
{
	struct sfr_ticket *a = submit("x", &one), *b;

	CHECK_EQ(sfr_log_append_remove(dir_path(dir, "x"), NULL), 0);
	b = submit("x", &two);
	confirm(b, -1);
	CHECK_EQ(sfr_log_will_exist(dir_path(dir, "x")), 1);
	saving_done(a);
	saving_done(b);
	drain();
	CHECK_EQ(saving_content(dir, "x"), 2);
}

TEST(removing_a_directory_leaves_a_later_save_into_it_alone)
{
	char path[PATH_MAX];
	struct sfr_ticket *first, *late = NULL;

	CHECK_EQ(mkdir(dir_path(dir, "tree"), 0777), 0);
	CHECK_EQ(mkdir(dir_path(dir, "tree/deep"), 0777), 0);
	(void)snprintf(path, sizeof(path), "%s", dir_path(dir, "tree"));
	CHECK_EQ(saving_save(engine, path, "inside", &one, 0), 0);
	first = submit("a", &one);
	CHECK_EQ(sfr_log_append_remove(path, NULL), 0);
	CHECK_EQ(sfr_log_will_exist(dir_path(dir, "tree/inside")), 0);
	late = saving_started(engine, path, "late", &two, SFR_SAVE_DURABLE);
	confirm(late, -1);
	saving_done(first);
	saving_done(late);
	drain();
	CHECK_EQ(saving_content(path, "inside"), -1);
	CHECK_EQ(access(dir_path(dir, "tree/deep"), F_OK), -1);
	CHECK_EQ(saving_content(path, "late"), 2);
	CHECK_EQ(sfr_log_append_remove(path, NULL), 0);
	drain();
	CHECK_EQ(access(path, F_OK), -1);
}

TEST(remove_accepts_a_missing_name_and_logs_a_refused_one)
{
	const struct sfr_fault fault = { .call = "unlink", .nth = 1, .err = EPERM, .limit = -1 };

	CHECK_EQ(sfr_log_append_remove(dir_path(dir, "never"), NULL), 0);
	drain();
	saving_done(submit("kept", &one));
	CHECK_EQ(sfr_inject_add_fault(&fault), 0);
	CHECK_EQ(sfr_log_append_remove(dir_path(dir, "kept"), NULL), 0);
	CHECK(strstr(next_text(), "could not be removed") != NULL);
	sfr_inject_clear();
	CHECK_EQ(saving_content(dir, "kept"), 1);
}

TEST(a_load_waits_for_the_saves_of_its_path_and_sees_none_submitted_later)
{
	struct sfr_ticket *other = submit("other", &one), *a, *b;
	struct sfr_log_load *load, *missing;
	unsigned char byte;
	int fd;

	a = submit("l", &one);
	CHECK_EQ(sfr_log_load_new(dir_path(dir, "l"), &load), 0);
	b = submit("l", &two);
	CHECK_EQ(sfr_log_append_remove(dir_path(dir, "l"), NULL), 0);
	CHECK_EQ(sfr_log_load_new(dir_path(dir, "l"), &missing), 0);
	confirm(other, -1);
	CHECK_EQ(sfr_log_load_wait(load, 20 * 1000 * 1000, &fd), SFR_EAGAIN);
	confirm(a, -1);
	confirm(b, -1);
	saving_done(other);
	saving_done(a);
	saving_done(b);
	/* b has replaced the file and the name is gone; the load still has the file it asked for */
	drain();
	CHECK_EQ(sfr_log_load_wait(load, SFR_FOREVER, &fd), 0);
	CHECK(fd >= 0);
	CHECK_EQ(pread(fd, &byte, 1, 40 * 1024), 1); /* inside the deferred storages */
	CHECK_EQ(byte, 1);
	sfr_log_load_free(load);
	CHECK_EQ(close(fd), 0); /* the descriptor belongs to the caller */
	CHECK_EQ(sfr_log_load_wait(missing, SFR_FOREVER, &fd), -ENOENT);
	sfr_log_load_free(missing);
}

/* A path that ends in a slash is a directory. The name of one directory here is the beginning of
 * the name that is saved, and a load of it must not wait. */
TEST(load_of_a_directory_waits_for_everything_in_it)
{
	struct sfr_ticket *a;
	struct sfr_log_load *load, *of_sibling;
	char key[PATH_MAX];
	int fd;

	CHECK_EQ(mkdir(dir_path(dir, "wai"), 0777), 0);
	a = submit("wait", &one);
	(void)snprintf(key, sizeof(key), "%s/", dir_path(dir, "wai"));
	CHECK_EQ(sfr_log_load_new(key, &of_sibling), 0);
	/* The parent of both, with a slash at its end. */
	*strrchr(key, '/') = '\0';
	*(strrchr(key, '/') + 1) = '\0';
	CHECK_EQ(sfr_log_load_new(key, &load), 0);
	CHECK_EQ(sfr_log_load_wait(of_sibling, UINT64_C(5000000000), &fd), 0);
	(void)close(fd);
	CHECK_EQ(sfr_log_load_wait(load, 20 * 1000 * 1000, &fd), SFR_EAGAIN);
	confirm(a, -1);
	saving_done(a);
	CHECK_EQ(sfr_log_load_wait(load, SFR_FOREVER, &fd), 0);
	CHECK_EQ(saving_content(dir, "wait"), 1);
	(void)close(fd);
	sfr_log_load_free(load);
	sfr_log_load_free(of_sibling);
}

TEST(load_of_a_directory_waits_for_a_remove_of_it)
{
	struct sfr_ticket *a = submit("before", &one);
	struct sfr_log_load *load;
	char key[PATH_MAX];
	int fd;

	CHECK_EQ(mkdir(dir_path(dir, "going"), 0777), 0);
	CHECK_EQ(sfr_log_append_remove(dir_path(dir, "going"), NULL), 0);
	(void)snprintf(key, sizeof(key), "%s/", dir_path(dir, "going"));
	CHECK_EQ(sfr_log_load_new(key, &load), 0);
	CHECK_EQ(sfr_log_load_wait(load, 20 * 1000 * 1000, &fd), SFR_EAGAIN);
	confirm(a, -1);
	saving_done(a);
	CHECK_EQ(sfr_log_load_wait(load, SFR_FOREVER, &fd), -ENOENT);
	sfr_log_load_free(load);
}

TEST(load_of_another_path_does_not_wait)
{
	struct sfr_ticket *a;
	struct sfr_log_load *load;
	int fd;

	saving_done(submit("there", &two));
	a = submit("slow", &one);
	CHECK_EQ(sfr_log_load_new(dir_path(dir, "there"), &load), 0);
	/* It does not wait for "slow", which has no verdict. Its own save leaves the log a
	 * moment after its end. */
	CHECK_EQ(sfr_log_load_wait(load, UINT64_C(5000000000), &fd), 0);
	(void)close(fd);
	sfr_log_load_free(load);
	CHECK_EQ(sfr_log_load_new(dir_path(dir, "slow"), &load), 0);
	sfr_log_load_free(load); /* freed while it waits */
	saving_done(a);
	drain();
}

TEST(failed_save_leaves_existence_of_its_name_unchanged)
{
	struct sfr_ticket *a = submit("f", &one), *first = submit("first", &one);

	confirm(a, 4);
	CHECK_EQ(sfr_save_wait(a, SFR_WAIT_ENDED, SFR_FOREVER), 0);
	CHECK_EQ(sfr_log_will_exist(dir_path(dir, "f")), -1);
	saving_done(a);
	saving_done(first);
}

/* The parent's saves go on; in the child every call on an object of the parent is refused. */
TEST(child_cannot_use_the_parents_objects_and_the_parents_saves_go_on)
{
	struct sfr_ticket *t = submit("forked", &two);
	struct sfr_log_load *load;
	int status = -1, fd;
	pid_t child;

	sfr_external_work_put(NULL); /* allowed, as in every such function */
	CHECK_EQ(sfr_log_load_new(dir_path(dir, "forked"), &load), 0);
	child = fork();
	if (child == 0) {
		struct sfr_report report;
		struct sfr_stats stats;
		struct sfr_snapshot *s;
		struct sfr_ticket *u;
		char text[256];

		CHECK_EQ(sfr_save_wait(t, SFR_WAIT_ENDED, SFR_FOREVER), SFR_EFORK);
		CHECK_EQ(sfr_save_cancel(t), SFR_EFORK);
		CHECK_EQ(sfr_save_give_verdict(t, -1), SFR_EFORK);
		CHECK_EQ(sfr_save_report(t, &report), SFR_EFORK);
		CHECK_EQ(sfr_engine_stats(engine, &stats), SFR_EFORK);
		CHECK_EQ(sfr_engine_close(engine, SFR_FOREVER), SFR_EFORK);
		CHECK_EQ(sfr_engine_warm_up(engine, 1), SFR_EFORK);
		CHECK_EQ(sfr_engine_trim(engine), SFR_EFORK);
		CHECK_EQ(sfr_engine_use_device(engine, 0, text, sizeof(text)), SFR_EFORK);
		CHECK_EQ(sfr_engine_describe_driver(engine, text, sizeof(text)), SFR_EFORK);
		CHECK_EQ(sfr_snapshot_new(engine, one.sources, SAVING_NR, 0, &s), SFR_EFORK);
		CHECK_EQ(saving_new(engine, dir, "no", &one, 0, &u), SFR_EFORK);
		CHECK_EQ(sfr_log_load_wait(load, SFR_FOREVER, &fd), SFR_EFORK);
		CHECK_EQ(sfr_log_pending(), 0);
		sfr_log_load_free(load);
		sfr_ticket_put(t);
		sfr_engine_put(engine);
/* TSan does not support threads after a fork of a threaded process. A lock of GCC 12's ASan
 * allocator may be held by a thread that the child does not have; malloc itself handles that. */
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
		engine = saving_engine(8, 1, 1);
		CHECK_EQ(saving_save(engine, dir, "child", &one, SFR_SAVE_DURABLE), 0);
		CHECK_EQ(saving_content(dir, "child"), 1);
		saving_end(engine);
#endif
		_exit(check__nr_failed == 0 ? 0 : 1);
	}
	CHECK(child > 0);
	CHECK_EQ(waitpid(child, &status, 0), child);
	CHECK_EQ(status, 0);
	saving_done(t);
	CHECK_EQ(sfr_log_load_wait(load, SFR_FOREVER, &fd), 0);
	(void)close(fd);
	sfr_log_load_free(load);
	CHECK_EQ(saving_content(dir, "forked"), 2);
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
}

TEST(failed_allocation_in_the_log_loses_nothing)
{
	saving_done(submit("m", &one));
	FOR_EVERY_FAILURE(run, "*", ENOMEM)
	{
		struct sfr_log_load *load = NULL;
		int rc = sfr_log_load_new(dir_path(dir, "m"), &load), fd = -1;

		if (rc == 0)
			rc = sfr_log_load_wait(load, SFR_FOREVER, &fd);
		CHECK(rc == 0 || check_acted(&run));
		if (fd >= 0)
			(void)close(fd);
		sfr_log_load_free(load);
		rc = sfr_log_append_remove(dir_path(dir, "gone"), NULL);
		CHECK(rc == 0 || check_acted(&run));
		check_end_fault(&run);
		drain();
	}
	CHECK_EQ(saving_content(dir, "m"), 1);
}

static void *stop_the_log(void *unused)
{
	(void)unused;
	CHECK_EQ(sfr_log_stop(), 0);
	return NULL;
}

/* An admitted save has a reserved entry, which it uses or gives up. */
TEST(the_log_does_not_stop_between_a_saves_admission_and_its_launch)
{
	pthread_t stopper;
	struct sfr_ticket *t = NULL, *given_up = NULL;
	int rc;

	CHECK_EQ(saving_new(engine, dir, "admitted", &one, SFR_SAVE_DURABLE, &t), 0);
	CHECK_EQ(sfr_save_admit(t, SFR_FOREVER), 0);
	CHECK_EQ(pthread_create(&stopper, NULL, stop_the_log, NULL), 0);
	(void)usleep(50000); /* if it stopped at once, it would have done so by now */
	CHECK_EQ(sfr_save_capture(t, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_launch(t), 0);
	confirm(t, -1);
	rc = sfr_save_wait(t, SFR_WAIT_ENDED, UINT64_C(20000000000));
	CHECK_EQ(rc, 0);
	if (rc < 0)
		CHECK_EQ(sfr_log_append_remove(dir_path(dir, "none"), NULL),
			 0); /* starts the log again */
	saving_done(t);
	CHECK_EQ(pthread_join(stopper, NULL), 0);
	CHECK_EQ(saving_content(dir, "admitted"), 1);

	CHECK_EQ(saving_new(engine, dir, "given up", &one, SFR_SAVE_DURABLE, &given_up), 0);
	CHECK_EQ(sfr_save_admit(given_up, SFR_FOREVER), 0);
	sfr_save_abandon(given_up);
	CHECK_EQ(sfr_log_stop(), 0); /* there is nothing to wait for */
	saving_done(given_up);
	saving_done(submit("next", &one));
	CHECK_EQ(saving_content(dir, "next"), 1);
}

/* Otherwise the stop would wait for as long as the log waits for a file system. */
TEST(the_log_stops_once_an_admitted_save_is_given_up)
{
	struct sfr_ticket *t = NULL;
	pthread_t stopper;

	sfr_log_set_patience(SFR_FOREVER);
	CHECK_EQ(saving_new(engine, dir, "given up", &one, SFR_SAVE_DURABLE, &t), 0);
	CHECK_EQ(sfr_save_admit(t, SFR_FOREVER), 0);
	CHECK_EQ(pthread_create(&stopper, NULL, stop_the_log, NULL), 0);
	(void)usleep(50000); /* the stop waits for the save */
	sfr_save_abandon(t);
	CHECK_EQ(pthread_join(stopper, NULL), 0);
	sfr_log_set_patience(0);
	saving_done(t);
	saving_done(submit("next", &one));
}

static void *take_a_turn(void *number)
{
	int after_good;

	CHECK_EQ(sfr_external_work_take_next(SFR_FOREVER, number, &after_good), 0);
	return NULL;
}

TEST(external_work_alone_in_the_log_wakes_its_waiting_thread)
{
	struct sfr_external_work *work;
	uint64_t number = 0;
	pthread_t taker;

	drain(); /* so that no entry's end wakes the thread */
	CHECK_EQ(pthread_create(&taker, NULL, take_a_turn, &number), 0);
	(void)usleep(50000); /* the thread waits */
	CHECK_EQ(sfr_external_work_new("/alone", SFR_WORK_SAVE, &work), 0);
	CHECK_EQ(sfr_external_work_append(work), 0);
	CHECK_EQ(pthread_join(taker, NULL), 0);
	CHECK(number != 0);
	sfr_external_work_mark_ended(work, 1);
	sfr_external_work_put(work);
	drain();
}

static void end_engine(void)
{
	saving_end(engine);
}

BEGIN
{
	dir = saving_dir();
	saving_fill(&one, 1);
	saving_fill(&two, 2);
	CHECK_EQ(sfr_inject_install(), 0);
	engine = saving_engine(32, 2, 4);
	check_at_end(end_engine);
	return true;
}
