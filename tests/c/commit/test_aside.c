/* A file system that does not answer: which entries of the log overtake it, and which wait.
 *
 * A call that hangs here waits at the gate, which the test opens and closes. File systems are
 * numbers, because the log knows no more about them. */
#include <pthread.h>
#include <sys/wait.h>

#include "saving.h"

enum { NFS = 71, SSD = 72, RAM = 73, UNKNOWN = 0 };

#define PATIENCE_NS UINT64_C(20000000)
#define LONG_NS (6 * PATIENCE_NS) /* long enough for an entry that may overtake to do so */

static const char *dir;
static struct saving_state one, two;
static struct sfr_engine *engine;
static struct sfr_sys real;

/* ---- the gate ---- */

static struct {
	pthread_mutex_t mu;
	pthread_cond_t cv;
	bool closed, syncs, used;
	unsigned nr_waiting;
} gate = { .mu = PTHREAD_MUTEX_INITIALIZER, .cv = PTHREAD_COND_INITIALIZER };

/* Waits while the gate is closed. */
static void wait_at_gate(void)
{
	(void)pthread_mutex_lock(&gate.mu);
	gate.used = true;
	gate.nr_waiting++;
	(void)pthread_cond_broadcast(&gate.cv);
	while (gate.closed)
		(void)pthread_cond_wait(&gate.cv, &gate.mu);
	gate.nr_waiting--;
	(void)pthread_cond_broadcast(&gate.cv);
	(void)pthread_mutex_unlock(&gate.mu);
}

/* Returns only when every call that waited there has continued. */
static void set_gate(bool closed, bool syncs)
{
	(void)pthread_mutex_lock(&gate.mu);
	gate.closed = closed;
	gate.syncs = syncs;
	if (closed)
		gate.used = false;
	(void)pthread_cond_broadcast(&gate.cv);
	while (!closed && gate.nr_waiting)
		(void)pthread_cond_wait(&gate.cv, &gate.mu);
	(void)pthread_mutex_unlock(&gate.mu);
}

static void wait_until_one_hangs(void)
{
	(void)pthread_mutex_lock(&gate.mu);
	while (!gate.used)
		(void)pthread_cond_wait(&gate.cv, &gate.mu);
	(void)pthread_mutex_unlock(&gate.mu);
}

static void wait_until_hanging(unsigned nr)
{
	(void)pthread_mutex_lock(&gate.mu);
	while (gate.nr_waiting < nr)
		(void)pthread_cond_wait(&gate.cv, &gate.mu);
	(void)pthread_mutex_unlock(&gate.mu);
}

static bool is_called(const char *path, const char *name)
{
	const char *slash = strrchr(path, '/');

	return strcmp(slash ? slash + 1 : path, name) == 0;
}

static int slow_rename(int fd, const char *from, const char *to)
{
	if (is_called(to, "hung"))
		wait_at_gate();
	return real.rename(fd, from, to);
}

static int slow_unlink(int fd, const char *name)
{
	if (is_called(name, "hung"))
		wait_at_gate();
	return real.unlink(fd, name);
}

static int slow_open(int fd, const char *name, int flags, mode_t mode)
{
	if (is_called(name, "hung to load"))
		wait_at_gate();
	return real.open(fd, name, flags, mode);
}

/* Makes one sync hang, of any file. */
static int slow_fdatasync(int fd)
{
	bool hangs;

	(void)pthread_mutex_lock(&gate.mu);
	hangs = gate.syncs;
	gate.syncs = false;
	(void)pthread_mutex_unlock(&gate.mu);
	if (hangs)
		wait_at_gate();
	return real.fdatasync(fd);
}

/* Tells the file system of a remove's directory by the directory's name. */
static int numbered_lstat(int fd, const char *path, struct stat *st)
{
	int rc = real.lstat(fd, path, st);

	if (rc == 0 && S_ISDIR(st->st_mode))
		st->st_dev = strstr(path, "nfs") ? NFS : SSD;
	return rc;
}

/* ---- saves ---- */

static struct sfr_ticket *submit_in(const char *where, const char *name, uint64_t fs,
				    const struct saving_state *s)
{
	const struct sfr_save_desc desc = {
		.dir = where,
		.name = name,
		.fs = fs,
		.skeleton = saving_skeleton,
		.skeleton_len = sizeof(saving_skeleton),
		.sources = s->sources,
		.nr_sources = SAVING_NR,
		.flags = SFR_SAVE_DURABLE,
	};
	struct sfr_ticket *t = NULL;

	CHECK_EQ(sfr_save_new(engine, &desc, &t), 0);
	CHECK_EQ(saving_submit(t), 0);
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_give_verdict(t, -1), 0);
	return t;
}

static struct sfr_ticket *submit(const char *name, uint64_t fs, const struct saving_state *s)
{
	return submit_in(dir, name, fs, s);
}

static void check_becomes_durable(struct sfr_ticket *t)
{

	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_ENDED, UINT64_C(20000000000)), 0);
	CHECK_EQ(saving_state_of(t), SFR_DURABLE);
	sfr_ticket_put(t);
}

static void check_is_blocked(struct sfr_ticket *t)
{
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_ENDED, LONG_NS), SFR_EAGAIN);
}

static void drain(void)
{
	uint64_t seq = 0;

	set_gate(false, false);
	CHECK_EQ(sfr_log_drain(&seq, SFR_FOREVER), 0);
	CHECK_EQ(sfr_log_pending(), 0);
}

/* Counts the notices that contain these words, and empties the queue. */
static int nr_notices_with(const char *words)
{
	struct sfr_notice notice;
	int nr = 0;

	while (sfr_notice_wait(&notice, 0) == 0) {
		if (strstr(notice.text, words) != NULL)
			nr++;
		sfr_ticket_put(notice.ticket);
	}
	return nr;
}

static int nr_log_threads(void)
{
	char path[64], name[32];
	DIR *tasks = opendir("/proc/self/task");
	int nr = 0;

	for (const struct dirent *e; tasks && (e = readdir(tasks));) {
		FILE *file;

		(void)snprintf(path, sizeof(path), "/proc/self/task/%.20s/comm", e->d_name);
		file = fopen(path, "re");
		if (file && fgets(name, sizeof(name), file) && strcmp(name, "sfr-log\n") == 0)
			nr++;
		if (file)
			(void)fclose(file);
	}
	if (tasks)
		(void)closedir(tasks);
	return nr;
}

/* ---- tests ---- */

TEST(saves_on_other_file_systems_overtake_a_hanging_rename)
{
	struct sfr_ticket *hung;
	char text[256];

	set_gate(true, false);
	hung = submit("hung", NFS, &one);
	wait_until_one_hangs();
	check_becomes_durable(submit("a", SSD, &two));
	check_becomes_durable(submit("b", SSD, &two));
	check_becomes_durable(submit("c", RAM, &two));
	CHECK_EQ(saving_content(dir, "hung"), -1);
	CHECK_EQ(saving_content(dir, "a"), 2);
	CHECK_EQ(saving_content(dir, "c"), 2);
	CHECK_EQ(sfr_log_pending(), 4); /* they leave the log in its order */
	CHECK_EQ(nr_notices_with("hung has not answered"), 1);
	CHECK_EQ(sfr_log_describe_hang(text, sizeof(text)), 1);
	CHECK(strstr(text, "hung has not answered for") != NULL);
	set_gate(false, false);
	check_becomes_durable(hung);
	drain();
	CHECK_EQ(sfr_log_describe_hang(text, sizeof(text)), 0);
	CHECK_EQ(saving_content(dir, "hung"), 1);
	while (nr_log_threads() > 1)
		(void)usleep(1000);
}

TEST(saves_on_other_file_systems_overtake_a_hanging_sync)
{
	struct sfr_ticket *hung;

	set_gate(true, true);
	hung = submit("a", NFS, &one);
	wait_until_one_hangs();
	check_becomes_durable(submit("b", SSD, &two));
	check_is_blocked(hung);
	CHECK_EQ(nr_notices_with("/a has not answered"), 1);
	set_gate(false, false);
	check_becomes_durable(hung);
	drain();
}

TEST(saves_overtake_a_hanging_remove)
{
	(void)mkdir(dir_path(dir, "nfs"), 0777);
	check_becomes_durable(submit_in(dir_path(dir, "nfs"), "hung", SSD, &one));
	drain();
	set_gate(true, false);
	CHECK_EQ(sfr_log_append_remove(dir_path(dir, "nfs/hung"), NULL), 0);
	wait_until_one_hangs();
	check_becomes_durable(submit("b", SSD, &two));
	CHECK_EQ(nr_notices_with("nfs/hung has not answered"), 1);
	drain();
	CHECK_EQ(saving_content(dir_path(dir, "nfs"), "hung"), -1);
}

TEST(saves_overtake_two_file_systems_that_hang)
{
	struct sfr_ticket *hung, *sync;

	set_gate(true, true);
	sync = submit("a", RAM, &one);
	wait_until_one_hangs();
	CHECK_EQ(sfr_log_append_remove(dir_path(dir, "nfs/hung"), NULL),
		 0); /* waits for that save, which does not hang */
	hung = submit("hung", NFS, &one);
	check_becomes_durable(submit("b", SSD, &two));
	check_becomes_durable(submit("c", SSD, &two)); /* overtakes both, when the rename hangs */
	set_gate(false, false);
	check_becomes_durable(sync);
	check_becomes_durable(hung);
	drain();
	CHECK_EQ(nr_notices_with("has not answered") > 0, 1);
}

/* A save that is ready waits for one that hangs, and is renamed after it. `late`: the save
 * comes when a second thread is already waiting, which has let another save overtake. */
static void check_waits_behind_hung_save(const char *where, const char *name, uint64_t fs,
					 bool late)
{
	struct sfr_ticket *hung, *held;

	set_gate(true, false);
	hung = submit("hung", NFS, &one);
	wait_until_one_hangs();
	if (late)
		check_becomes_durable(submit("past", RAM, &one));
	held = submit_in(where, name, fs, &two);
	check_is_blocked(held);
	set_gate(false, false);
	check_becomes_durable(hung);
	check_becomes_durable(held);
	drain();
	CHECK_EQ(saving_content(where, name), 2);
	CHECK_EQ(nr_notices_with("has not answered"), late);
}

TEST(saves_of_the_same_file_system_or_name_do_not_overtake)
{
	for (int late = 0; late < 2; late++) {
		check_waits_behind_hung_save(dir, "the same file system", NFS, late);
		check_waits_behind_hung_save(dir, "one that nobody knows", UNKNOWN, late);
		check_waits_behind_hung_save(dir, "hung", SSD, late); /* the same name */
	}
}

TEST(save_into_a_directory_to_be_removed_does_not_overtake)
{
	struct sfr_ticket *hung, *held;

	(void)mkdir(dir_path(dir, "tree"), 0777);
	set_gate(true, false);
	hung = submit("hung", NFS, &one);
	wait_until_one_hangs();
	CHECK_EQ(sfr_log_append_remove(dir_path(dir, "tree"), NULL), 0);
	held = submit_in(dir_path(dir, "tree"), "in it", SSD, &two);
	check_is_blocked(held);
	set_gate(false, false);
	check_becomes_durable(hung);
	check_becomes_durable(held);
	drain();
}

/* The save that could overtake is itself on a file system that hangs, after another save. */
TEST(save_after_a_hanging_one_of_its_file_system_does_not_overtake)
{
	struct sfr_ticket *ready, *hung, *sync;

	set_gate(true, false);
	hung = submit("hung", NFS, &one);
	wait_until_one_hangs();
	set_gate(true, true);
	sync = submit("a", RAM, &one);
	wait_until_one_hangs();
	(void)usleep((unsigned)(3 * PATIENCE_NS / 1000)); /* until the log knows that it hangs */
	ready = submit("b", RAM, &two);
	check_is_blocked(ready);
	set_gate(false, false);
	check_becomes_durable(hung);
	check_becomes_durable(sync);
	check_becomes_durable(ready);
	drain();
	(void)nr_notices_with("");
}

/* It hangs in a rename and in a sync; only one notice names it. */
TEST(hanging_file_system_is_reported_once)
{
	struct sfr_ticket *hung, *sync;

	set_gate(true, false);
	hung = submit("hung", NFS, &one);
	wait_until_one_hangs();
	set_gate(true, true);
	sync = submit("a", NFS, &one);
	wait_until_one_hangs();
	(void)usleep((unsigned)(3 * PATIENCE_NS / 1000)); /* until the log knows that it hangs */
	check_becomes_durable(submit("b", SSD, &two));
	CHECK_EQ(nr_notices_with("has not answered"), 1);
	set_gate(false, false);
	check_becomes_durable(hung);
	check_becomes_durable(sync);
	drain();
}

TEST(slow_save_is_not_overtaken)
{
	struct sfr_ticket *slow = NULL, *b;

	CHECK_EQ(saving_new(engine, dir, "slow", &one, SFR_SAVE_DURABLE, &slow), 0);
	/* without a verdict nothing is asked of its file system */
	CHECK_EQ(saving_submit(slow), 0);
	b = submit("b", SSD, &two);
	check_is_blocked(b);
	CHECK_EQ(sfr_save_give_verdict(slow, -1), 0);
	check_becomes_durable(slow);
	check_becomes_durable(b);
	drain();
	CHECK_EQ(nr_notices_with("has not answered"), 0);
}

TEST(slow_but_answering_file_system_is_not_overtaken)
{
	struct sfr_ticket *slow, *b;

	sfr_log_set_patience(0); /* back to the default */
	set_gate(true, false);
	slow = submit("hung", NFS, &one);
	wait_until_one_hangs();
	b = submit("b", SSD, &two);
	check_is_blocked(b);
	set_gate(false, false);
	check_becomes_durable(slow);
	check_becomes_durable(b);
	drain();
	CHECK_EQ(nr_notices_with("has not answered"), 0);
	CHECK_EQ(sfr_log_stop(), 0); /* its threads wait for that long */
	sfr_log_set_patience(PATIENCE_NS);
}

/* Before and after a thread has taken the work. */
TEST(external_work_at_the_head_is_not_overtaken)
{
	struct sfr_external_work *work;
	struct sfr_ticket *b;
	uint64_t number;
	bool after_good;

	CHECK_EQ(sfr_external_work_new("/in front", SFR_WORK_SAVE, &work), 0);
	CHECK_EQ(sfr_external_work_append(work), 0);
	b = submit("b", SSD, &two);
	check_is_blocked(b);
	CHECK_EQ(sfr__log_take_external_work(0, &number, &after_good), 0);
	check_is_blocked(b);
	sfr_external_work_mark_ended(work, 1);
	check_becomes_durable(b);
	drain();
	sfr_external_work_put(work);
}

/* Of two ready saves on one file system the first is renamed first, whatever hangs before them. */
TEST(overtaking_saves_keep_their_order)
{
	struct sfr_ticket *hung, *slow = NULL, *b;
	const struct sfr_save_desc desc = { .dir = dir,
					    .name = "slow",
					    .fs = SSD,
					    .skeleton = saving_skeleton,
					    .skeleton_len = sizeof(saving_skeleton),
					    .sources = one.sources,
					    .nr_sources = SAVING_NR };

	set_gate(true, false);
	hung = submit("hung", NFS, &one);
	wait_until_one_hangs();
	CHECK_EQ(sfr_save_new(engine, &desc, &slow), 0);
	CHECK_EQ(saving_submit(slow), 0);
	b = submit("b", SSD, &two);
	check_is_blocked(b);
	CHECK_EQ(sfr_save_wait(slow, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_give_verdict(slow, -1), 0);
	check_becomes_durable(slow);
	check_becomes_durable(b);
	set_gate(false, false);
	check_becomes_durable(hung);
	drain();
	(void)nr_notices_with("");
}

TEST(a_remove_waits_for_every_save_before_it)
{
	struct sfr_ticket *hung;

	check_becomes_durable(submit("old", SSD, &one));
	set_gate(true, false);
	hung = submit("hung", NFS, &one);
	wait_until_one_hangs();
	check_becomes_durable(submit("new", SSD, &two));
	CHECK_EQ(sfr_log_append_remove(dir_path(dir, "old"), NULL), 0);
	check_becomes_durable(submit("newer", SSD, &two)); /* overtakes the remove too */
	CHECK_EQ(saving_content(dir, "old"), 1);
	set_gate(false, false);
	check_becomes_durable(hung);
	drain();
	CHECK_EQ(saving_content(dir, "old"), -1);
	(void)nr_notices_with("");
}

TEST(load_of_a_save_that_overtook_is_opened_while_the_head_hangs)
{
	struct sfr_log_load *load, *late, *of_hung;
	struct sfr_ticket *hung;
	int fd = -1;

	set_gate(true, false);
	hung = submit("hung", NFS, &one);
	wait_until_one_hangs();
	CHECK_EQ(sfr_log_load_new(dir_path(dir, "hung"), &of_hung), 0);
	check_becomes_durable(submit("b", SSD, &two));
	CHECK_EQ(sfr_log_load_new(dir_path(dir, "b"), &late),
		 0); /* its entry has ended but is still in the list */
	CHECK_EQ(sfr_log_load_wait(late, UINT64_C(20000000000), &fd), 0);
	CHECK_EQ(saving_content_fd(fd), 2);
	(void)close(fd);
	sfr_log_load_free(late);
	CHECK_EQ(sfr_log_load_wait(of_hung, LONG_NS, &fd), SFR_EAGAIN);
	set_gate(false, false);
	check_becomes_durable(hung);
	CHECK_EQ(sfr_log_load_wait(of_hung, SFR_FOREVER, &fd), 0);
	(void)close(fd);
	sfr_log_load_free(of_hung);
	drain();

	/* If the load hangs, its entry stays where it is, and others overtake it. */
	(void)nr_notices_with("");
	set_gate(true, true);
	hung = submit("hung to load", NFS, &two);
	wait_until_one_hangs();
	CHECK_EQ(sfr_log_load_new(dir_path(dir, "hung to load"), &load), 0);
	set_gate(false, false);
	set_gate(true, false);
	check_becomes_durable(hung);
	wait_until_one_hangs();
	check_becomes_durable(submit("b", SSD, &one));
	CHECK_EQ(nr_notices_with("hung to load has not answered"), 1);
	drain();
	CHECK_EQ(sfr_log_load_wait(load, SFR_FOREVER, &fd), 0);
	CHECK_EQ(saving_content_fd(fd), 2);
	(void)close(fd);
	sfr_log_load_free(load);
	drain();
	(void)nr_notices_with("");
}

TEST(log_has_one_thread_for_one_file_system)
{
	struct sfr_ticket *hung, *held;

	set_gate(true, false);
	hung = submit("hung", SSD, &one);
	wait_until_one_hangs();
	held = submit("held", SSD, &two);
	check_is_blocked(held);
	CHECK_EQ(nr_log_threads(), 1);
	set_gate(false, false);
	check_becomes_durable(hung);
	check_becomes_durable(held);
	drain();
}

/* One thread for each file system that hangs, at most four. Later entries wait. */
TEST(no_more_than_four_threads_hang)
{
	static const char *const places[] = { "0", "1", "2", "3", "4", "5" };
	struct sfr_ticket *hung[6];

	set_gate(true, false);
	for (int i = 0; i < 6; i++) {
		(void)mkdir(dir_path(dir, places[i]), 0777);
		hung[i] = submit_in(dir_path(dir, places[i]), "hung", 80 + (uint64_t)i, &one);
	}
	wait_until_hanging(4);
	check_is_blocked(hung[5]);
	CHECK_EQ(nr_log_threads(), 4);
	set_gate(false, false);
	for (int i = 0; i < 6; i++)
		check_becomes_durable(hung[i]);
	drain();
	(void)nr_notices_with("");
}

TEST(the_log_stops_with_all_its_threads)
{
	struct sfr_ticket *hung;

	set_gate(true, false);
	hung = submit("hung", NFS, &one);
	wait_until_one_hangs();
	check_becomes_durable(submit("b", SSD, &two));
	CHECK_EQ(nr_log_threads(), 2);
	set_gate(false, false);
	CHECK_EQ(sfr_log_stop(), 0);
	CHECK_EQ(nr_log_threads(), 0);
	check_becomes_durable(hung);
	check_becomes_durable(submit("again", SSD, &two));
	drain();
	(void)nr_notices_with("");
}

/* Counts threads that were started and not joined yet. */
static atomic_int nr_threads;

static int counted_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *),
			  void *arg)
{
	int rc = real.thread_create(thread, attr, start, arg);

	if (rc == 0)
		nr_threads++;
	return rc;
}

static int counted_join(pthread_t thread, void **value)
{
	nr_threads--;
	return real.thread_join(thread, value);
}

TEST(every_thread_is_joined_in_the_end)
{
	saving_end(engine);
	CHECK_EQ(nr_threads, 0);
}

static void restore_calls(void)
{
	sfr_sys = real;
}

BEGIN
{
	dir = saving_dir();
	saving_fill(&one, 1);
	saving_fill(&two, 2);
	real = sfr_sys;
	sfr_sys.rename = slow_rename;
	sfr_sys.unlink = slow_unlink;
	sfr_sys.open = slow_open;
	sfr_sys.fdatasync = slow_fdatasync;
	sfr_sys.lstat = numbered_lstat;
	sfr_sys.thread_create = counted_create;
	sfr_sys.thread_join = counted_join;
	sfr_log_set_patience(PATIENCE_NS);
	engine = saving_engine(64, 3, 8);
	check_at_end(restore_calls);
	return true;
}
