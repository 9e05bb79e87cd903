/* Forked children: the resources that they get, and those that they must not keep or touch. */
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/file.h>
#include <sys/wait.h>

#include "fix_save.h"

/* Runs `body` in a forked child and checks that it passed. The child leaves by _exit, because a
 * sanitizer would report the parent's memory as its leaks. */
static void in_child(void (*body)(void *), void *arg)
{
	int failed = check__nr_failed, status = -1;
	pid_t pid = fork();

	if (pid == 0) {
		(void)alarm(60); /* a lock that nobody releases must not hang the test */
		body(arg);
		_exit(check__nr_failed != failed);
	}
	CHECK(pid > 0);
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static bool is_locked(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	bool locked = flock(fd, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK;

	(void)close(fd);
	return locked;
}

struct seen {
	int fd, other_fd;
	uint64_t generation;
	const char *path;
};

static void child_closes_ours_only(void *arg)
{
	const struct seen *seen = arg;

	CHECK(fcntl(seen->fd, F_GETFD) < 0 && errno == EBADF);
	CHECK(fcntl(seen->other_fd, F_GETFD) >= 0);
	CHECK_EQ(sfr_fork_generation(), seen->generation + 1);
	CHECK(is_locked(seen->path));
}

TEST(a_child_closes_the_descriptors_and_does_not_unlock)
{
	const char *dir = dir_make("/var/tmp"), *path = dir_path(dir, "a");
	struct seen seen = { .path = path };

	CHECK_EQ(sfr_fork_init(), 0);
	seen.generation = sfr_fork_generation();
	seen.fd = sfr__fd_open(path, O_RDWR | O_CREAT, 0600);
	seen.other_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	if (!CHECK(seen.fd >= 0 && seen.other_fd >= 0))
		return;
	CHECK(fcntl(seen.fd, F_GETFD) & FD_CLOEXEC);
	CHECK_EQ(flock(seen.fd, LOCK_EX | LOCK_NB), 0);
	in_child(child_closes_ours_only, &seen);
	CHECK(is_locked(path)); /* also after the child has ended */
	CHECK(fcntl(seen.fd, F_GETFD) >= 0);
	CHECK_EQ(sfr_fork_generation(), seen.generation);
	CHECK_EQ(sfr__fd_close(seen.fd), 0);
	CHECK(!is_locked(path));
	(void)close(seen.other_fd);
	dir_remove(dir);
}

static void child_leaves_a_reused_number_alone(void *arg)
{
	CHECK(fcntl(*(int *)arg, F_GETFD) >= 0);
}

TEST(closing_removes_the_descriptor_from_the_table)
{
	int fd = sfr__fd_open("/dev/null", O_RDONLY, 0), again;
	struct sfr_fault fault = { "close", 1, 0, EIO, -1, 0 };

	CHECK_EQ(sfr_fork_init(), 0);
	CHECK_EQ(sfr__fd_close(fd), 0);
	again = open("/dev/null", O_RDONLY | O_CLOEXEC);
	CHECK_EQ(again, fd);
	in_child(child_leaves_a_reused_number_alone, &again);
	(void)close(again);

	/* A close that fails has closed the descriptor nevertheless. */
	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr_inject_add_fault(&fault), 0);
	fd = sfr__fd_open("/dev/null", O_RDONLY, 0);
	CHECK_EQ(sfr__fd_close(fd), -EIO);
	sfr_inject_uninstall();
	again = open("/dev/null", O_RDONLY | O_CLOEXEC);
	CHECK_EQ(again, fd);
	in_child(child_leaves_a_reused_number_alone, &again);
	(void)close(again);
}

TEST(interrupted_open_is_retried_a_bounded_number_of_times)
{
	struct sfr_fault fault = { "open", 1, 0, EINTR, -1, 0 };
	int fds = nr_fds(), fd;

	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr_inject_add_fault(&fault), 0);
	fd = sfr__fd_open("/dev/null", O_RDONLY, 0);
	CHECK(fd >= 0);
	CHECK_EQ(sfr_inject_count_calls("open"), 2);
	CHECK_EQ(sfr__fd_close(fd), 0);
	sfr_inject_clear();
	fault.sticky = 1;
	CHECK_EQ(sfr_inject_add_fault(&fault), 0);
	CHECK_EQ(sfr__fd_open("/dev/null", O_RDONLY, 0), -EINTR);
	sfr_inject_uninstall();
	CHECK_EQ(sfr__fd_open("/nonexistent/file", O_RDONLY, 0), -ENOENT);
	CHECK_EQ(nr_fds(), fds);
}

/* Replaces open(2): 4096 real descriptors may exceed the limit. */
static int next_fd;
static int fake_open(int dir, const char *path, int flags, mode_t mode)
{
	(void)dir;
	(void)path;
	(void)flags;
	(void)mode;
	return next_fd++;
}

static int fake_close(int fd)
{
	(void)fd;
	return 0;
}

TEST(open_fails_when_the_table_is_full)
{
	struct sfr_sys plain = sfr_sys;
	int first = 1000000, nr = 0;

	next_fd = first;
	sfr_sys.open = fake_open;
	sfr_sys.close = fake_close;
	while (nr < 10000 && sfr__fd_open("x", O_RDONLY, 0) >= 0)
		nr++;
	CHECK_EQ(nr, 4096);
	CHECK_EQ(next_fd, first + nr); /* refused before anything was opened */
	CHECK_EQ(sfr__fd_open("x", O_RDONLY, 0), -EMFILE);
	CHECK_EQ(sfr__fd_close(first + 7), 0);
	CHECK_EQ(sfr__fd_open("x", O_RDONLY, 0), next_fd - 1);
	for (int fd = first; fd < next_fd; fd++)
		CHECK_EQ(sfr__fd_close(fd), 0);
	sfr_sys = plain;
}

/* ---- forks while other threads are busy ---- */

/* Unlike the C library's allocator, a sanitizer's may leave its lock taken in a child if another
 * thread was inside it. The core allocates from here instead, so that only the core's own locks
 * are tested. */
#define NR_CELLS 512
static struct {
	atomic_bool taken;
	_Alignas(16) char bytes[1040];
} cells[NR_CELLS];

static void *cell_malloc(size_t len)
{
	if (!CHECK(len <= sizeof(cells[0].bytes)))
		return NULL;
	for (int i = 0; i < NR_CELLS; i++)
		if (!atomic_exchange(&cells[i].taken, true))
			return cells[i].bytes;
	return NULL;
}

static void cell_free(void *mem)
{
	for (int i = 0; mem && i < NR_CELLS; i++)
		if (mem == cells[i].bytes)
			atomic_store(&cells[i].taken, false);
}

static atomic_bool stop;

/* Lengthens the moment between a system call and its entry in the table. */
static int slow_open(int dir, const char *path, int flags, mode_t mode)
{
	int fd = openat(dir, path, flags, mode);

	(void)usleep(200);
	return fd;
}

static int slow_close(int fd)
{
	int rc = close(fd);

	(void)usleep(200);
	return rc;
}

static void *open_and_close(void *arg)
{
	while (!atomic_load(&stop)) {
		int fd = sfr__fd_open(arg, O_RDONLY, 0);

		if (CHECK(fd >= 0))
			CHECK_EQ(sfr__fd_close(fd), 0);
		(void)usleep(400); /* mutexes are not fair: let the fork get the lock */
	}
	return NULL;
}

static void *post_notices(void *unused)
{
	(void)unused;
	while (!atomic_load(&stop)) {
		sfr__notice_post_text("a sentence");
		(void)usleep(20);
	}
	return NULL;
}

/* These two hold a lock of the log, or of the temporaries, most of the time. */
static void *query_log(void *unused)
{
	(void)unused;
	while (!atomic_load(&stop))
		(void)sfr_log_pending();
	return NULL;
}

static void *query_temporaries(void *unused)
{
	struct sfr__tmp tmp = { .serial = 0 };

	(void)unused;
	while (!atomic_load(&stop))
		sfr__tmp_unlist(&tmp);
	return NULL;
}

static void check_child_starts_without_state(void *arg)
{
	const char *path = arg;
	struct sfr__tmp tmp = { .serial = 0 };
	char link[PATH_MAX], at[64];
	struct sfr_notice notice;
	int fd;

	for (int i = 3; i < 64; i++) {
		ssize_t len;

		(void)snprintf(at, sizeof(at), "/proc/self/fd/%d", i);
		len = readlink(at, link, sizeof(link) - 1);
		if (len < 0)
			continue;
		link[len] = 0;
		CHECK(strcmp(link, path) != 0); /* no descriptor of the parent's threads is left */
	}
	/* The parent's threads may have held these locks, which are free here; the parent's
	 * state is gone. */
	CHECK_EQ(sfr_log_pending(), 0);
	sfr__tmp_unlist(&tmp);
	CHECK_EQ(sfr_notice_wait(&notice, 0), SFR_EAGAIN);
	for (int i = 0; i < NR_CELLS; i++)
		atomic_store(&cells[i].taken, false); /* the parent's notices use these cells */
	sfr__notice_post_text("of the child");
	CHECK_EQ(sfr_notice_wait(&notice, 0), 0);
	CHECK(strcmp(notice.text, "of the child") == 0);
	CHECK_EQ(sfr_fork_init(), 0);
	fd = sfr__fd_open(path, O_RDONLY, 0);
	CHECK(fd >= 0);
	CHECK_EQ(sfr__fd_close(fd), 0);
}

#define NR_BUSY 5
static void *(*const busy[NR_BUSY])(void *) = { open_and_close, open_and_close, post_notices,
						query_log, query_temporaries };

TEST(child_forked_amid_opens_and_closes_has_only_its_own_descriptors)
{
	char path[PATH_MAX];
	const char *dir = dir_make("/dev/shm");
	struct sfr_sys plain = sfr_sys;
	pthread_t threads[NR_BUSY];
	struct sfr_notice notice;

	sfr_sys.open = slow_open;
	sfr_sys.close = slow_close;
	sfr_sys.malloc = cell_malloc;
	sfr_sys.free = cell_free;
	(void)snprintf(path, sizeof(path), "%s", dir_path(dir, "a"));
	file_put(path, "a", 1);
	CHECK_EQ(sfr_fork_init(), 0);
	atomic_store(&stop, false);
	for (int i = 0; i < NR_BUSY; i++)
		CHECK_EQ(pthread_create(&threads[i], NULL, busy[i], path), 0);
	for (int i = 0; i < 60; i++) {
		in_child(check_child_starts_without_state, path);
		while (sfr_notice_wait(&notice, 0) == 0)
			;
	}
	atomic_store(&stop, true);
	for (int i = 0; i < NR_BUSY; i++)
		CHECK_EQ(pthread_join(threads[i], NULL), 0);
	while (sfr_notice_wait(&notice, 0) == 0)
		;
	sfr_sys = plain;
	dir_remove(dir);
}

/* ---- calls that do not return ---- */

static sem_t inside, go_on;

static int hanging_close(int fd)
{
	(void)sem_post(&inside);
	(void)sem_wait(&go_on);
	return close(fd);
}

/* As in the kernel: the number is free at once, and the flush takes long. */
static int flushing_close(int fd)
{
	int rc = close(fd);

	(void)sem_post(&inside);
	(void)sem_wait(&go_on);
	return rc;
}

static int hanging_open(int dir, const char *path, int flags, mode_t mode)
{
	(void)sem_post(&inside);
	(void)sem_wait(&go_on);
	return openat(dir, path, flags, mode);
}

static void *close_it(void *arg)
{
	CHECK_EQ(sfr__fd_close(*(int *)arg), 0);
	return NULL;
}

static void *open_and_close_it(void *path)
{
	CHECK_EQ(sfr__fd_close(sfr__fd_open(path, O_RDONLY, 0)), 0);
	return NULL;
}

static void check_child_lacks_fd(void *arg)
{
	CHECK(fcntl(*(int *)arg, F_GETFD) < 0);
}

static void open_and_close_in_child(void *arg)
{
	sfr_sys.open = slow_open;
	sfr_sys.close = slow_close;
	CHECK_EQ(sfr__fd_close(sfr__fd_open(arg, O_RDONLY, 0)), 0);
}

/* Both tests hang forever if a fork waits for what another thread does to a file. */
TEST(a_fork_does_not_wait_for_a_close)
{
	char path[PATH_MAX];
	const char *dir = dir_make("/dev/shm");
	struct sfr_sys plain = sfr_sys;
	pthread_t thread;
	int fd, other;

	(void)snprintf(path, sizeof(path), "%s", dir_path(dir, "a"));
	file_put(path, "a", 1);
	CHECK_EQ(sfr_fork_init(), 0);
	fd = sfr__fd_open(path, O_RDWR, 0);
	CHECK_EQ(flock(fd, LOCK_EX | LOCK_NB), 0);
	sfr_sys.close = hanging_close;
	CHECK_EQ(pthread_create(&thread, NULL, close_it, &fd), 0);
	(void)sem_wait(&inside);
	in_child(check_child_lacks_fd, &fd); /* still open in the parent, and closed in the child */
	CHECK(is_locked(path));
	in_child(open_and_close_in_child, path);
	(void)sem_post(&go_on);
	CHECK_EQ(pthread_join(thread, NULL), 0);

	sfr_sys.close = plain.close;
	fd = sfr__fd_open(path, O_RDWR, 0);
	sfr_sys.close = flushing_close;
	CHECK_EQ(pthread_create(&thread, NULL, close_it, &fd), 0);
	(void)sem_wait(&inside);
	other = open(path, O_RDONLY | O_CLOEXEC);
	CHECK_EQ(other, fd); /* the number already belongs to another open of the same file */
	in_child(child_leaves_a_reused_number_alone, &other);
	(void)sem_post(&go_on);
	CHECK_EQ(pthread_join(thread, NULL), 0);
	(void)close(other);
	sfr_sys = plain;
	dir_remove(dir);
}

TEST(a_fork_does_not_wait_for_an_open_that_hangs)
{
	char path[PATH_MAX];
	const char *dir = dir_make("/dev/shm");
	struct sfr_sys plain = sfr_sys;
	pthread_t thread;

	(void)snprintf(path, sizeof(path), "%s", dir_path(dir, "a"));
	file_put(path, "a", 1);
	CHECK_EQ(sfr_fork_init(), 0);
	sfr_sys.open = hanging_open;
	CHECK_EQ(pthread_create(&thread, NULL, open_and_close_it, path), 0);
	(void)sem_wait(&inside);
	in_child(open_and_close_in_child, path); /* the child has its own lock */
	sfr_sys.open = plain.open;
	/* the parent can still open files */
	CHECK_EQ(sfr__fd_close(sfr__fd_open(path, O_RDONLY, 0)), 0);
	(void)sem_post(&go_on);
	CHECK_EQ(pthread_join(thread, NULL), 0);
	sfr_sys = plain;
	CHECK_EQ(sfr__fd_close(sfr__fd_open(path, O_RDONLY, 0)), 0);
	dir_remove(dir);
}

/* ---- files across forks ---- */

struct across {
	struct sfr__file *file;
	const char *dir;
};

static void child_frees_and_saves_its_own(void *arg)
{
	struct across *across = arg;
	struct sfr_err err = { .index = -1 };
	struct sfr__file own;
	_Alignas(SFR_PAGE) char page[SFR_PAGE] = "of the child";

	sfr__file_fini(across->file); /* as a destructor might: it only frees */
	CHECK_EQ(dir_count(across->dir, TEMPORARIES, NULL), 1);
	CHECK_EQ(sfr__file_init(&own, across->dir, "b", sizeof(page), true), 0);
	CHECK_EQ(sfr__file_open(&own, &err), 0);
	CHECK_EQ(dir_count(across->dir, TEMPORARIES, NULL), 2); /* the parent's is alive */
	CHECK_EQ(sfr__file_write(&own, page, sizeof(page), 0, &err), 0);
	CHECK_EQ(sfr__file_sync(&own, &err), 0);
	CHECK_EQ(sfr__file_commit(&own, &err), 0);
	sfr__file_fini(&own);
}

TEST(a_child_neither_deletes_nor_unlocks_the_parents_temporary)
{
	_Alignas(SFR_PAGE) char page[SFR_PAGE] = "of the parent";
	char dir[PATH_MAX];
	struct sfr_err err = { .index = -1 };
	struct sfr__file file;
	struct across across = { &file, dir };

	(void)snprintf(dir, sizeof(dir), "%s", dir_make("/var/tmp"));
	CHECK_EQ(sfr_fork_init(), 0);
	CHECK_EQ(sfr__file_init(&file, dir, "a", sizeof(page), true), 0);
	CHECK_EQ(sfr__file_open(&file, &err), 0);
	in_child(child_frees_and_saves_its_own, &across);
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 1);
	CHECK(is_locked(dir_path(dir, file.tmp.name)));
	CHECK_EQ(sfr__file_write(&file, page, sizeof(page), 0, &err), 0);
	CHECK_EQ(sfr__file_sync(&file, &err), 0);
	CHECK_EQ(sfr__file_commit(&file, &err), 0);
	sfr__file_fini(&file);
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
	CHECK_EQ(dir_count(dir, "", NULL), 2);
	dir_remove(dir);
}

TEST(a_child_does_not_keep_its_dead_parents_lock)
{
	char dir[PATH_MAX], ready;
	struct sfr_err err = { .index = -1 };
	struct sfr__file file;
	int pipes[2], hold[2], status;
	pid_t writer;

	(void)snprintf(dir, sizeof(dir), "%s", dir_make("/var/tmp"));
	CHECK_EQ(sfr_fork_init(), 0);
	CHECK_EQ(pipe2(pipes, O_CLOEXEC), 0);
	CHECK_EQ(pipe2(hold, O_CLOEXEC), 0);
	writer = fork();
	if (writer == 0) {
		/* Opens a file, and forks a child of its own that outlives it. */
		if (sfr__file_init(&file, dir, "a", 64, true) < 0 ||
		    sfr__file_open(&file, &err) < 0)
			_exit(1);
		if (fork() == 0) {
			(void)close(hold[1]);
			if (write(pipes[1], "x", 1) == 1)
				(void)read(hold[0], &ready, 1); /* until the test closes the pipe */
			_exit(0);
		}
		(void)pause();
		_exit(0);
	}
	CHECK_EQ(read(pipes[0], &ready, 1), 1); /* the grandchild is running */
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 1);
	dir_clean(dir);
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 1);
	CHECK_EQ(kill(writer, SIGKILL), 0);
	CHECK_EQ(waitpid(writer, &status, 0), writer);
	dir_clean(dir);
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
	(void)close(pipes[0]);
	(void)close(pipes[1]);
	(void)close(hold[0]);
	(void)close(hold[1]);
	dir_remove(dir);
}

BEGIN
{
	CHECK(sem_init(&inside, 0, 0) == 0 && sem_init(&go_on, 0, 0) == 0);
	return true;
}
