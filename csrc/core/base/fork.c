/* Forks: a forked child closes the core's descriptors and starts the core again.
 *
 * A child has only the thread that forked. The core's other threads do not exist there, and any
 * lock may have been held. So the child increments the generation counter: objects of an older
 * generation refuse to work (SFR_EFORK). Fork hooks (base.h) reset the core's static variables.
 *
 * The child also closes the core's descriptors, which a table lists. A temporary stays locked by
 * flock as long as any descriptor of the open file exists. So a child that kept the descriptor
 * would make a dead parent's temporary look alive. The child never unlocks the file, because that
 * would release the parent's lock too.
 *
 *   parent                                    child
 *   before: takes fork_mu when no file        (has fork_mu: it is the same thread)
 *           is being opened
 *   after:  releases it                       closes the descriptors of the table
 *                                             generation + 1, hooks run
 *                                             initialises fork_mu again
 *
 * Threads open and close files without fork_mu, because open(2) may hang and close(2) may take
 * seconds. Instead, each table entry has a state:
 *
 *     FREE ──▶ OPENING ──▶ OPEN ──close begins──▶ CLOSING ──close has returned──▶ CLOSED
 *       ▲                                                                            │
 *       └────────────────── under fork_mu, when an open needs an entry ──────────────┘
 *
 * The kernel copies descriptors first and memory later, while other threads run. An entry that
 * became FREE in between would hide a descriptor that the child has. So entries become FREE only
 * under fork_mu, which the fork holds.
 *
 * The number of a CLOSING or CLOSED descriptor may already name another file. So the open file is
 * marked with F_SETSIG before it is closed, and the child closes only a marked file. The mark has
 * no other effect, because nobody asks for signals of these files. If the mark could not be set,
 * the child keeps the descriptor, to which nothing is written any more.
 *
 * A fork waits until no entry is OPENING, and new opens wait for the fork. So every descriptor of
 * the child is in its table. The wait ends after a second, because an open may hang. The child may
 * then have a descriptor that is in no table, until it calls exec.
 *
 * The child handler allocates no memory and takes no lock that another thread may have held. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/base.h"

#define NR_FDS 4096         /* entries of the table of descriptors */
#define OPEN_WAIT_S 1       /* the longest that forks and opens wait for each other */
#define OPENING INT_MIN     /* the code of an entry whose descriptor is not known yet */
#define CLOSING_MARK SIGURG /* F_SETSIG of a file that is being closed; any signal would do */

static struct sfr__mutex fork_mu = SFR__MUTEX(SFR__LOCK_FORK);
static pthread_cond_t fork_cv = PTHREAD_COND_INITIALIZER; /* signals that a count became 0 */
/* guarded by fork_mu: how many entries are OPENING, and how many forks wait for these */
static unsigned nr_opening, nr_forking;
static struct {
	/* FREE: 0; OPENING: the constant; OPEN: fd + 1; CLOSING or CLOSED: -(fd + 1) */
	atomic_int code;
	atomic_bool closed; /* the state is CLOSED, not CLOSING */
} table[NR_FDS];
static _Atomic uint64_t generation;
static struct sfr__fork_hook *hooks; /* constant once the library is loaded */

static pthread_once_t handlers_once = PTHREAD_ONCE_INIT;
static int handlers_rc; /* 0 or -errno of pthread_atfork */

void sfr__fork_hook_add(struct sfr__fork_hook *hook)
{
	hook->next = hooks;
	hooks = hook;
}

/* Waits until *count is 0, or until the time `until` of CLOCK_REALTIME: fork_cv uses this clock,
 * because it is statically initialised. */
static void wait_for_zero_locked(const unsigned *count, const struct timespec *until)
{
	while (*count != 0 && pthread_cond_timedwait(&fork_cv, &fork_mu.mu, until) != ETIMEDOUT)
		;
}

static struct timespec wait_deadline(void)
{
	struct timespec until = { 0, 0 };

	(void)clock_gettime(CLOCK_REALTIME, &until); /* the clock always exists */
	until.tv_sec += OPEN_WAIT_S;
	return until;
}

/* Runs before a fork. Waits until no descriptor is being opened, for a second at most. Returns with
 * fork_mu held, which the handlers below release. */
static void before_fork(void)
{
	struct timespec until = wait_deadline();

	sfr__lock(&fork_mu);
	nr_forking++;
	wait_for_zero_locked(&nr_opening, &until);
	nr_forking--;
}

static void after_in_parent(void)
{
	(void)pthread_cond_broadcast(&fork_cv); /* wakes threads that wait to open */
	sfr__unlock(&fork_mu);
}

static void after_in_child(void)
{
	for (int i = 0; i < NR_FDS; i++) {
		int code = atomic_load(&table[i].code);
		bool must_close;
		int fd;

		if (code == OPENING)
			code = 0;   /* the child cannot close it, because its number is not known */
		fd = abs(code) - 1; /* the code is fd + 1 or -(fd + 1) */
		must_close = code > 0;
		if (code < 0) /* fd may be another file by now, without the mark */
			must_close = fcntl(fd, F_GETSIG) == CLOSING_MARK;
		/* not sfr_sys.close: a test's wrapper may wait, which a fork handler must not */
		if (must_close)
			(void)close(fd); /* no error matters: only the parent writes */
		atomic_store(&table[i].code, 0);
	}
	atomic_fetch_add(&generation, 1);
	for (struct sfr__fork_hook *hook = hooks; hook; hook = hook->next)
		hook->reset();
	sfr__lock_check_release(fork_mu.rank); /* before_fork took it */
	sfr__mutex_init(&fork_mu, SFR__LOCK_FORK);
	(void)pthread_cond_init(&fork_cv, NULL); /* cannot fail on Linux */
	nr_opening = nr_forking = 0;
}

static void install_handlers(void)
{
	handlers_rc = -pthread_atfork(before_fork, after_in_parent, after_in_child);
}

/* After a failure (-ENOMEM) every call fails: without the handlers no engine may start. */
int sfr_fork_init(void)
{
	int rc = pthread_once(&handlers_once, install_handlers);

	return rc ? -rc : handlers_rc;
}

uint64_t sfr_fork_generation(void)
{
	return atomic_load(&generation);
}

/* Returns the index of the descriptor's OPEN entry, or -1. */
static int find_open_entry(int fd)
{
	for (int i = 0; i < NR_FDS; i++)
		if (atomic_load(&table[i].code) == fd + 1)
			return i;
	return -1;
}

/* Returns the index of an entry that is FREE or CLOSED, or -1. */
static int find_free_entry_locked(void)
{
	for (int i = 0; i < NR_FDS; i++) {
		int code = atomic_load(&table[i].code);

		if (code == 0)
			return i; /* FREE */
		if (code < 0 && code != OPENING && atomic_load(&table[i].closed))
			return i; /* CLOSED */
	}
	return -1;
}

/* Waits until no fork waits for opens, for a second at most. Then makes a free entry OPENING.
 * Returns its index, or -EMFILE. */
static int reserve_entry_for_open(void)
{
	struct timespec until = wait_deadline();
	int index;

	sfr__lock(&fork_mu);
	wait_for_zero_locked(&nr_forking, &until);
	index = find_free_entry_locked();
	if (index >= 0) {
		atomic_store(&table[index].closed, false);
		atomic_store(&table[index].code, OPENING);
		nr_opening++;
	}
	sfr__unlock(&fork_mu);
	return index < 0 ? -EMFILE : index;
}

/* Makes an OPENING entry OPEN, or FREE if `fd` is negative. */
static void record_open_result(int index, int fd)
{
	sfr__lock(&fork_mu);
	atomic_store(&table[index].code, fd < 0 ? 0 : fd + 1);
	if (--nr_opening == 0)
		(void)pthread_cond_broadcast(&fork_cv);
	sfr__unlock(&fork_mu);
}

int sfr__fd_openat(int dir, const char *path, int flags, mode_t mode)
{
	int index = reserve_entry_for_open(), fd = -1, rc = -EINTR;

	if (index < 0)
		return index;
	for (int tries = 0; tries < SFR__EINTR_TRIES; tries++) {
		fd = sfr_sys.open(dir, path, flags | O_CLOEXEC, mode);
		rc = fd < 0 ? -errno : fd;
		if (rc != -EINTR)
			break;
	}
	record_open_result(index, fd);
	return rc;
}

int sfr__fd_open(const char *path, int flags, mode_t mode)
{
	return sfr__fd_openat(AT_FDCWD, path, flags, mode);
}

int sfr__fd_open_memory(const char *name)
{
	int index = reserve_entry_for_open(), fd, rc;

	if (index < 0)
		return index;
	fd = sfr_sys.memfd(name, MFD_CLOEXEC);
	rc = fd < 0 ? -errno : fd;
	record_open_result(index, fd);
	return rc;
}

int sfr__fd_close(int fd)
{
	int index = find_open_entry(fd), rc;

	/* The mark tells after_in_child that fd is still this file. A failure does no harm: a child
	 * only keeps the file open. */
	(void)fcntl(fd, F_SETSIG, CLOSING_MARK);
	if (index >= 0)
		atomic_store(&table[index].code, -(fd + 1)); /* CLOSING */
	rc = sfr_sys.close(fd) < 0 ? -errno : 0;
	if (index >= 0)
		atomic_store(&table[index].closed, true);
	return rc;
}
