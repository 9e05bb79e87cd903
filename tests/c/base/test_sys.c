/* The call table, its helpers, and the faults that tests inject into it. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include "sfr.h"
#include "base/base.h"
#include "fix_dir.h"

/* ---- helpers ---- */

TEST(clock_advances_in_nanoseconds)
{
	uint64_t before = sfr__now_ns(), after;

	(void)usleep(20000);
	after = sfr__now_ns();
	CHECK(after - before >= 20000000u);
	CHECK(after - before < 20000000000u);
}

TEST(a_deadline_is_now_plus_the_slice_and_never_wraps)
{
	uint64_t before = sfr__now_ns(), deadline = sfr__deadline(1000000);

	CHECK(deadline >= before + 1000000 && deadline <= sfr__now_ns() + 1000000);
	CHECK(sfr__deadline(SFR_FOREVER) == SFR_FOREVER);
	CHECK(sfr__deadline(SFR_FOREVER - 1) == SFR_FOREVER);
	CHECK(sfr__deadline(0) >= before);
}

struct signalled {
	struct sfr__mutex mu;
	pthread_cond_t cond;
	bool flag;
};

static void *set_and_signal(void *arg)
{
	struct signalled *s = arg;

	(void)usleep(20000);
	sfr__lock(&s->mu);
	s->flag = true;
	pthread_cond_signal(&s->cond);
	sfr__unlock(&s->mu);
	return NULL;
}

TEST(a_condition_wait_ends_at_its_deadline_or_when_woken)
{
	struct signalled s = { .mu = SFR__MUTEX(SFR__LOCK_ENGINE) };
	uint64_t deadline;
	pthread_t thread;
	int rc = 0;

	if (!CHECK_EQ(sfr__cond_init(&s.cond), 0))
		return;
	sfr__lock(&s.mu);
	deadline = sfr__deadline(30000000);
	while (rc == 0)
		rc = sfr__cond_wait(&s.cond, &s.mu, deadline);
	CHECK_EQ(rc, SFR_EAGAIN);
	CHECK(sfr__now_ns() >= deadline);
	CHECK_EQ(sfr__cond_wait(&s.cond, &s.mu, 0), SFR_EAGAIN); /* the deadline has passed */

	CHECK_EQ(sfr__thread_start(&thread, "sfr-test", SFR__BACKGROUND, set_and_signal, &s), 0);
	while (!s.flag)
		CHECK_EQ(sfr__cond_wait(&s.cond, &s.mu, SFR_FOREVER), 0);
	sfr__unlock(&s.mu);
	CHECK_EQ(sfr_sys.thread_join(thread, NULL), 0);
	(void)pthread_cond_destroy(&s.cond);
}

static void *set_without_signal(void *arg)
{
	struct signalled *s = arg;

	sfr__lock(&s->mu);
	s->flag = true;
	sfr__unlock(&s->mu);
	return NULL;
}

/* Hangs if a wait without a bound depends on being woken. */
TEST(wait_recovers_from_a_lost_wake_up)
{
	struct signalled s = { .mu = SFR__MUTEX(SFR__LOCK_ENGINE) };
	pthread_t thread;

	CHECK_EQ(sfr__cond_init(&s.cond), 0);
	sfr__lock(&s.mu);
	CHECK_EQ(sfr__thread_start(&thread, "sfr-test", SFR__BACKGROUND, set_without_signal, &s),
		 0);
	while (!s.flag)
		CHECK_EQ(sfr__cond_wait(&s.cond, &s.mu, SFR_FOREVER), 0);
	sfr__unlock(&s.mu);
	CHECK_EQ(sfr_sys.thread_join(thread, NULL), 0);
	(void)pthread_cond_destroy(&s.cond);
}

/* The properties of a thread, as the thread itself sees them. */
struct self {
	char name[16];
	int nice, slack_ns;
	bool blocked; /* signals from others are blocked */
	bool open;    /* signals that it raises itself are not */
};

static void *describe_thread(void *arg)
{
	struct self *self = arg;
	sigset_t set;

	(void)pthread_getname_np(pthread_self(), self->name, sizeof(self->name));
	self->nice = getpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid));
	self->slack_ns = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
	(void)pthread_sigmask(SIG_SETMASK, NULL, &set);
	self->blocked = self->open = true;
	for (int sig = 1; sig < 32; sig++)
		if (sig == SIGSEGV || sig == SIGBUS || sig == SIGILL || sig == SIGFPE)
			self->open = self->open && sigismember(&set, sig) == 0;
		else if (sig != SIGKILL && sig != SIGSTOP)
			self->blocked = self->blocked && sigismember(&set, sig) == 1;
	return arg;
}

TEST(new_thread_has_its_name_priority_and_signal_mask)
{
	int own_nice = getpriority(PRIO_PROCESS, 0);
	struct self self = { "", 0, 0, false, false };
	sigset_t before, after;
	pthread_t thread;
	void *value = NULL;

	(void)sigemptyset(&after);
	(void)pthread_sigmask(SIG_SETMASK, NULL, &before);
	if (!CHECK_EQ(sfr__thread_start(&thread, "sfr-writer12345678", SFR__BACKGROUND,
					describe_thread, &self),
		      0))
		return;
	CHECK_EQ(sfr_sys.thread_join(thread, &value), 0);
	CHECK(value == &self);
	CHECK(strcmp(self.name, "sfr-writer12345") == 0); /* cut to the kernel's limit */
	CHECK(self.nice == 10 || own_nice > 10); /* the whole test may run at a lower priority */
	CHECK(self.blocked);
	CHECK(self.open);
	(void)pthread_sigmask(SIG_SETMASK, NULL, &after);
	for (int sig = 1; sig < 32; sig++)
		CHECK_EQ(sigismember(&before, sig), sigismember(&after, sig));
	CHECK_EQ(getpriority(PRIO_PROCESS, 0), own_nice);
}

/* A device's lane sleeps for about as long as a few copies take, and training waits for it. */
TEST(awaited_threads_keep_priority_and_prompt_ones_wake_in_time)
{
	int own_nice = getpriority(PRIO_PROCESS, 0);
	int own_slack_ns = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);

	for (int prompt = 0; prompt < 2; prompt++) {
		struct self self = { "", 0, 0, false, false };
		pthread_t thread;

		if (!CHECK_EQ(sfr__thread_start(&thread, "sfr-test",
						prompt ? SFR__PROMPT : SFR__AWAITED,
						describe_thread, &self),
			      0))
			continue;
		CHECK_EQ(sfr_sys.thread_join(thread, NULL), 0);
		CHECK_EQ(self.nice, own_nice);
		CHECK(prompt ? self.slack_ns <= 1000 : self.slack_ns == own_slack_ns);
	}
	CHECK_EQ(prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0), own_slack_ns);
}

static void *note_cpus(void *cpus)
{
	CHECK_EQ(sched_getaffinity(0, sizeof(cpu_set_t), cpus), 0);
	return NULL;
}

static void cpus_of_a_new_thread(cpu_set_t *cpus)
{
	pthread_t thread;

	CHECK_EQ(sfr__thread_start(&thread, "sfr-test", SFR__AWAITED, note_cpus, cpus), 0);
	CHECK_EQ(pthread_join(thread, NULL), 0);
}

TEST(new_thread_runs_on_the_set_cpus_or_inherits_them)
{
	const int bad[] = { 0, CPU_SETSIZE };
	cpu_set_t all, found;
	int last = 0;

	CHECK_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
	for (int i = 0; i < CPU_SETSIZE; i++)
		if (CPU_ISSET((size_t)i, &all))
			last = i;
	CHECK_EQ(sfr_cpus_set_for_new_threads(&last, 1), 0);
	CHECK_EQ(sfr_cpus_set_for_new_threads(bad, 2), -EINVAL); /* and changes nothing */
	cpus_of_a_new_thread(&found);
	CHECK_EQ(CPU_COUNT(&found), 1);
	CHECK(CPU_ISSET((size_t)last, &found));
	CHECK_EQ(sfr_cpus_set_for_new_threads(NULL, 0), 0);
	cpus_of_a_new_thread(&found);
	CHECK(CPU_EQUAL(&found, &all));
}

TEST(failed_thread_start_returns_an_error_and_leaks_nothing)
{
	struct sfr_fault no_thread = { "thread_create", 1, 0, EAGAIN, -1, 0 };
	struct sfr_fault no_memory = { "malloc", 1, 0, ENOMEM, -1, 0 };
	struct sfr_fault no_nice = { "set_nice", 1, 0, EPERM, -1, 0 };
	struct self self = { "", 0, 0, false, false };
	pthread_t thread;

	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr_inject_add_fault(&no_thread), 0);
	CHECK_EQ(sfr__thread_start(&thread, "sfr-test", SFR__BACKGROUND, describe_thread, &self),
		 -EAGAIN);
	CHECK_EQ(sfr_inject_count_calls("malloc"), sfr_inject_count_calls("free"));
	sfr_inject_clear();
	CHECK_EQ(sfr_inject_add_fault(&no_memory), 0);
	CHECK_EQ(sfr__thread_start(&thread, "sfr-test", SFR__BACKGROUND, describe_thread, &self),
		 -ENOMEM);
	CHECK_EQ(sfr_inject_count_calls("thread_create"), 0);
	sfr_inject_clear();

	/* If the priority cannot be lowered, the thread runs nevertheless. */
	CHECK_EQ(sfr_inject_add_fault(&no_nice), 0);
	if (CHECK_EQ(sfr__thread_start(&thread, "sfr-test", SFR__BACKGROUND, describe_thread,
				       &self),
		     0))
		CHECK_EQ(sfr_sys.thread_join(thread, NULL), 0);
	CHECK(self.blocked);
	CHECK_EQ(self.nice, getpriority(PRIO_PROCESS, 0));
	CHECK_EQ(sfr_inject_hits(), 1);
	sfr_inject_uninstall();
}

/* ---- every call of the table ---- */

static void *do_nothing(void *arg)
{
	return arg;
}

/* Makes every call of the table once with valid arguments, in the order of the struct. Counts
 * the calls that failed, and the failures whose errno was not `err`. */
static int call_everything(int err, int *nr_wrong)
{
	const char *dir = dir_make("/var/tmp"), *path = dir_path(dir, "a"),
		   *to = dir_path(dir, "b");
	unsigned char there;
	char byte = 'x', copied = 0;
	int fd, nr = 0, rc;
	struct timespec ts;
	cpu_set_t cpus;
	pthread_t thread;
	struct rlimit limit;
	struct stat st;
	void *mem;
	DIR *stream;

	*nr_wrong = 0;
#define TRY(failed)                                                                                \
	do {                                                                                       \
		errno = 0;                                                                         \
		if (failed) {                                                                      \
			nr++;                                                                      \
			if (errno != err)                                                          \
				(*nr_wrong)++;                                                     \
		}                                                                                  \
	} while (0)
	TRY((fd = sfr_sys.open(AT_FDCWD, path, O_RDWR | O_CREAT | O_CLOEXEC, 0600)) < 0);
	if (fd < 0)
		fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	TRY(sfr_sys.pwrite(fd, &byte, 1, 0) != 1);
	TRY(sfr_sys.pread(fd, &byte, 1, 0) < 0);
	TRY(sfr_sys.fdatasync(fd) < 0);
	TRY(sfr_sys.fsync(fd) < 0);
	TRY(sfr_sys.fallocate(fd, 0, 0, 4096) < 0);
	TRY(sfr_sys.ftruncate(fd, 4096) < 0);
	TRY(sfr_sys.flock(fd, LOCK_EX | LOCK_NB) < 0);
	TRY(sfr_sys.set_flags(fd, O_APPEND) < 0);
	TRY(sfr_sys.fstat(fd, &st) < 0);
	TRY(sfr_sys.close(fd) < 0);
	CHECK(fcntl(fd, F_GETFD) < 0); /* closed, whatever the call returned */
	TRY((fd = sfr_sys.memfd("memory", MFD_CLOEXEC)) < 0);
	(void)close(fd); /* by the plain system, if the table's call was refused */
	TRY(sfr_sys.lstat(AT_FDCWD, path, &st) < 0);
	TRY(sfr_sys.rename(AT_FDCWD, path, to) < 0);
	(void)rename(path, to);
	TRY(sfr_sys.unlink(AT_FDCWD, to) < 0);
	(void)unlink(to);
	TRY(!(stream = sfr_sys.opendir(dir)));
	if (!stream)
		stream = opendir(dir);
	CHECK(sfr_sys.readdir(stream));
	CHECK_EQ(sfr_sys.closedir(stream), 0);
	TRY(sfr_sys.rmdir(dir) < 0);
	(void)rmdir(dir);
	TRY((mem = sfr_sys.mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) ==
	    MAP_FAILED);
	if (mem == MAP_FAILED)
		mem = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	TRY(sfr_sys.mprotect(mem, 4096, PROT_NONE) < 0);
	TRY(sfr_sys.madvise(mem, 4096, MADV_DONTFORK) < 0);
	TRY(sfr_sys.mincore(mem, 4096, &there) < 0);
	TRY(sfr_sys.munmap(mem, 4096) < 0);
	(void)munmap(mem, 4096);
	TRY(!(mem = sfr_sys.malloc(10)));
	sfr_sys.free(mem);
	TRY(!(mem = sfr_sys.calloc(1, 10)));
	sfr_sys.free(mem);
	TRY(!(mem = sfr_sys.realloc(NULL, 10)));
	sfr_sys.free(mem);
	rc = sfr_sys.thread_create(&thread, NULL, do_nothing, NULL);
	errno = rc; /* thread calls return their error */
	if (rc) {
		nr++;
		if (rc != err)
			(*nr_wrong)++;
	} else {
		CHECK_EQ(sfr_sys.thread_join(thread, NULL), 0);
	}
	TRY(sfr_sys.set_nice(getpriority(PRIO_PROCESS, 0)) < 0);
	TRY(sfr_sys.set_slack(50000) < 0);
	CHECK_EQ(sched_getaffinity(0, sizeof(cpus), &cpus), 0);
	TRY(sfr_sys.set_affinity(&cpus) < 0);
	TRY(sfr_sys.get_limit(RLIMIT_AS, &limit) < 0);
	CHECK_EQ(sfr_sys.clock_gettime(CLOCK_MONOTONIC, &ts), 0);
	sfr_sys.capture_copy(&copied, "c", 1);
	CHECK(copied == 'c');
	CHECK_EQ(sfr_sys.lane_copy(0, &copied, "l", 1), sfr_crc32(0, "l", 1));
	CHECK(copied == 'l');
#undef TRY
	return nr;
}

#define NR_FAILING 30 /* members of the table that can fail */

TEST(wrappers_forward_and_count_every_call)
{
	static const char *const names[] = {
		"open",      "close",        "pread",     "pwrite",  "fdatasync",     "fsync",
		"fallocate", "flock",        "set_flags", "fstat",   "lstat",         "rename",
		"unlink",    "rmdir",        "opendir",   "mmap",    "munmap",        "mprotect",
		"madvise",   "malloc",       "calloc",    "realloc", "thread_create", "set_nice",
		"set_slack", "set_affinity", "get_limit", "mincore", "ftruncate",     "memfd",
	};
	int nr_wrong;

	CHECK_EQ(sizeof(names) / sizeof(names[0]), NR_FAILING);
	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr_inject_install(), 0); /* a second call does nothing */
	CHECK_EQ(call_everything(0, &nr_wrong), 0);
	for (size_t i = 0; i < NR_FAILING; i++)
		if (!CHECK_EQ(sfr_inject_count_calls(names[i]), 1))
			(void)fprintf(stderr, "  (%s)\n", names[i]);
	CHECK_EQ(sfr_inject_count_calls("*"), NR_FAILING);
	CHECK_EQ(sfr_inject_count_calls("free"), 3);
	CHECK_EQ(sfr_inject_count_calls("readdir"), 1);
	CHECK_EQ(sfr_inject_count_calls("closedir"), 1);
	CHECK_EQ(sfr_inject_count_calls("clock_gettime"), 1);
	CHECK_EQ(sfr_inject_count_calls("thread_join"), 1);
	CHECK_EQ(sfr_inject_count_calls("capture_copy") + sfr_inject_count_calls("lane_copy"), 2);
	CHECK_EQ(sfr_inject_count_calls("printf"), 0);
	CHECK_EQ(sfr_inject_hits(), 0);
	sfr_inject_clear();
	CHECK_EQ(sfr_inject_count_calls("*"), 0);
	sfr_inject_uninstall();
	CHECK_EQ(call_everything(0, &nr_wrong), 0); /* the plain table works too */
	CHECK_EQ(sfr_inject_count_calls("*"), 0);   /* after the removal nothing is counted */
}

TEST(every_call_that_can_fail_can_be_made_to_fail)
{
	static const int errors[] = { EIO, EINTR, ENOSPC, ENOMEM };
	int nr_wrong;

	CHECK_EQ(sfr_inject_install(), 0);
	for (size_t e = 0; e < sizeof(errors) / sizeof(errors[0]); e++) {
		for (uint64_t nth = 1; nth <= NR_FAILING + 1; nth++) {
			struct sfr_fault fault = { "*", nth, 0, errors[e], -1, 0 };

			CHECK_EQ(sfr_inject_add_fault(&fault), 0);
			CHECK_EQ(call_everything(errors[e], &nr_wrong), nth <= NR_FAILING);
			CHECK_EQ(nr_wrong, 0);
			CHECK_EQ(sfr_inject_hits(), nth <= NR_FAILING);
			sfr_inject_clear();
			fault.sticky = 1;
			CHECK_EQ(sfr_inject_add_fault(&fault), 0);
			CHECK_EQ(call_everything(errors[e], &nr_wrong), NR_FAILING + 1 - (int)nth);
			CHECK_EQ(nr_wrong, 0);
			sfr_inject_clear();
		}
	}
	sfr_inject_uninstall();
}

/* ---- faults ---- */

TEST(impossible_fault_is_refused)
{
	static const char *const safe[] = { "free",        "readdir",       "closedir",
					    "thread_join", "clock_gettime", "capture_copy",
					    "lane_copy" };
	struct sfr_fault fault = { "pwrit", 1, 0, EIO, -1, 0 };

	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr_inject_add_fault(&fault), -EINVAL);
	fault.call = "";
	CHECK_EQ(sfr_inject_add_fault(&fault), -EINVAL);
	for (size_t i = 0; i < sizeof(safe) / sizeof(safe[0]); i++) {
		fault.call = safe[i];
		fault.err = EIO;
		CHECK_EQ(sfr_inject_add_fault(&fault), -EINVAL);
		fault.err = 0; /* a slow call is possible */
		CHECK_EQ(sfr_inject_add_fault(&fault), 0);
	}
	sfr_inject_clear();
	fault = (struct sfr_fault){ "pwrite", 0, 0, EIO, -1, 0 };
	CHECK_EQ(sfr_inject_add_fault(&fault), -EINVAL);
	fault = (struct sfr_fault){ "pwrite", 1, 0, 0, -4, 0 };
	CHECK_EQ(sfr_inject_add_fault(&fault), -EINVAL);
	fault.limit = -1;
	for (int i = 0; i < 16; i++)
		CHECK_EQ(sfr_inject_add_fault(&fault), 0);
	CHECK_EQ(sfr_inject_add_fault(&fault), -ENOSPC);
	CHECK_EQ(sfr_inject_remove_fault(&fault), 0);
	CHECK_EQ(sfr_inject_add_fault(&fault), 0);
	sfr_inject_uninstall();
}

TEST(faults_count_independently_and_can_be_dropped)
{
	struct sfr_fault second = { "fsync", 2, 0, EIO, -1, 0 };
	struct sfr_fault from_fourth = { "fsync", 4, 1, ENOSPC, -1, 0 };
	int expected[] = { 0, EIO, 0, ENOSPC, ENOSPC, ENOSPC };
	int fd = open("/var/tmp", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr_inject_add_fault(&second), 0);
	CHECK_EQ(sfr_inject_add_fault(&from_fourth), 0);
	for (int i = 0; i < 6; i++) {
		errno = 0;
		CHECK_EQ(sfr_sys.fsync(fd) < 0 ? errno : 0, expected[i]);
	}
	CHECK_EQ(sfr_inject_hits(), 4);
	CHECK_EQ(sfr_inject_remove_fault(&from_fourth), 0);
	CHECK_EQ(sfr_inject_remove_fault(&from_fourth), -ENOENT);
	CHECK_EQ(sfr_sys.fsync(fd), 0);
	CHECK_EQ(sfr_inject_count_calls("fsync"), 7);
	sfr_inject_uninstall();
	(void)close(fd);
}

TEST(short_transfer_moves_exactly_the_given_bytes)
{
	const char *dir = dir_make("/dev/shm"), *path = dir_path(dir, "a");
	int64_t limits[] = { 0, 1, 3, -2, -3, 100, -1 };
	ssize_t moved[] = { 0, 1, 3, 5, 9, 10, 10 };
	char got[16], *page;
	int fd;

	CHECK_EQ(sfr_inject_install(), 0);
	for (int i = 0; i < 7; i++) {
		struct sfr_fault put = { "pwrite", 1, 0, 0, limits[i], 0 };
		struct sfr_fault get = { "pread", 1, 0, 0, limits[i], 0 };
		struct stat st;

		fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
		CHECK_EQ(sfr_inject_add_fault(&put), 0);
		CHECK_EQ(sfr_inject_add_fault(&get), 0);
		CHECK_EQ(sfr_sys.pwrite(fd, "0123456789", 10, 0), moved[i]);
		CHECK(fstat(fd, &st) == 0 && st.st_size == moved[i]);
		CHECK_EQ(pwrite(fd, "0123456789", 10, 0), 10);
		memset(got, '#', sizeof(got));
		CHECK_EQ(sfr_sys.pread(fd, got, 10, 0), moved[i]);
		CHECK(memcmp(got, "0123456789", (size_t)moved[i]) == 0 && got[moved[i]] == '#');
		sfr_inject_clear();
		(void)close(fd);
	}
	dir_remove(dir);

	/* Where O_DIRECT refuses odd lengths, only whole blocks are written. */
	dir = dir_make("/var/tmp");
	path = dir_path(dir, "a");
	page = aligned_alloc(4096, 3 * 4096);
	fd = open(path, O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);
	if (fd >= 0 && page) {
		struct sfr_fault put = { "pwrite", 1, 0, 0, -3, 0 };
		struct stat st;

		memset(page, 'p', 3 * 4096);
		CHECK_EQ(sfr_inject_add_fault(&put), 0);
		CHECK_EQ(sfr_sys.pwrite(fd, page, 3 * 4096, 0), 3 * 4096 - 1);
		CHECK(fstat(fd, &st) == 0 &&
		      (st.st_size == 2 * 4096 || st.st_size == 3 * 4096 - 1));
	}
	if (fd >= 0)
		(void)close(fd);
	free(page);
	dir_remove(dir);
	sfr_inject_uninstall();
}

TEST(a_delayed_call_is_late_and_succeeds)
{
	struct sfr_fault slow = { "lane_copy", 1, 0, 0, -1, 30000000 };
	uint64_t before;
	char to = 0;

	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr_inject_add_fault(&slow), 0);
	before = sfr__now_ns();
	(void)sfr_sys.lane_copy(0, &to, "a", 1);
	CHECK(sfr__now_ns() - before >= 30000000u);
	CHECK(to == 'a');
	CHECK_EQ(sfr_inject_hits(), 1);
	sfr_inject_uninstall();
}

static atomic_int nr_failures;

static void *allocate_often(void *unused)
{
	(void)unused;
	for (int i = 0; i < 10000; i++) {
		void *mem = sfr_sys.malloc(8);

		if (!mem)
			atomic_fetch_add(&nr_failures, 1);
		sfr_sys.free(mem);
	}
	return NULL;
}

TEST(the_nth_call_fails_once_however_many_threads_call)
{
	struct sfr_fault fault = { "malloc", 20000, 0, ENOMEM, -1, 0 };
	struct sfr_fault other = { "calloc", 1, 1, ENOMEM, -1, 0 };
	pthread_t threads[4];

	atomic_store(&nr_failures, 0);
	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr_inject_add_fault(&fault), 0);
	for (int i = 0; i < 4; i++)
		CHECK_EQ(pthread_create(&threads[i], NULL, allocate_often, NULL), 0);
	/* The list may be changed meanwhile. */
	for (int i = 0; i < 1000; i++) {
		CHECK_EQ(sfr_inject_add_fault(&other), 0);
		CHECK_EQ(sfr_inject_remove_fault(&other), 0);
	}
	for (int i = 0; i < 4; i++)
		CHECK_EQ(pthread_join(threads[i], NULL), 0);
	CHECK_EQ(atomic_load(&nr_failures), 1);
	CHECK_EQ(sfr_inject_count_calls("malloc"), 40000);
	CHECK_EQ(sfr_inject_hits(), 1);
	sfr_inject_uninstall();
}
