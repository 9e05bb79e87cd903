/* Forks: a forked child closes the core's descriptors and starts the core again.
 *
 * A child has the parent's memory and descriptors, but only the thread that forked. The core's
 * other threads do not exist there, and any of its locks may have been held. So the child starts
 * again. It increments the generation counter; objects that were made under an older generation
 * refuse to work (SFR_EFORK). It also calls the fork hooks (base.h), which reset the core's static
 * variables.
 *
 * Descriptors cannot just be forgotten. A temporary is locked by flock for as long as any
 * descriptor of the same open file exists. A child that kept one would make a dead parent's
 * temporary look alive. Therefore a table lists these descriptors, and the child closes them. It
 * never unlocks, because that would unlock the parent's file too.
 *
 *   parent                                    child
 *   before: takes fork_mu when no file        (has fork_mu: it is the same thread)
 *           is being opened
 *   after:  releases it                       closes the descriptors of the table
 *                                             generation + 1, hooks run
 *                                             initialises fork_mu again
 *
 * No system call is made under fork_mu: open(2) may hang on one file system while others are to be
 * opened on another, and close(2) may flush or upload for seconds. Instead, each table entry has a
 * state:
 *
 *     FREE ──▶ OPENING ──▶ OPEN ──close begins──▶ CLOSING ──close has returned──▶ OVER
 *       ▲                                                                          │
 *       └─────────────────── under fork_mu, when an entry is wanted ───────────────┘
 *
 * The kernel copies a forking process's descriptors first and its memory later, and other threads
 * run in between. An entry that became FREE in that window would hide a descriptor that the child
 * has. So entries become FREE only under fork_mu, which the fork holds.
 *
 * The number of a CLOSING or OVER descriptor may already name another file. So the open file is
 * marked before it is closed, with F_SETSIG. The mark belongs to the open file rather than to the
 * number, and has no effect because nobody asks for signals. The child closes such a descriptor
 * only if it has the mark. If the mark could not be set, the child keeps the descriptor: nothing is
 * written to that file any more.
 *
 * A fork waits until no entry is OPENING, and new opens wait for the fork, so every descriptor of
 * the child is in its table. The wait ends after a second, because otherwise an open that hangs
 * would make every fork of the program hang. The child may then have one descriptor outside any
 * table; exec closes it.
 *
 * The child handler calls nothing that allocates memory, or that takes a lock which another thread
 * may have held. A child made by a bare clone(2) runs no handlers: it keeps the descriptors until
 * it calls exec or ends. */
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
#define OPENING INT_MIN     /* the descriptor's number is not known yet */
#define CLOSING_MARK SIGURG /* any signal would do: nobody asks for signals of these files */

static struct sfr__mutex fork_mu = SFR__MUTEX(SFR__LOCK_FORK);
static pthread_cond_t fork_cv = PTHREAD_COND_INITIALIZER; /* signals that a count became 0 */
/* OPENING entries, and forks that wait until there are none; guarded by fork_mu */
static unsigned nr_opening, nr_forking;
static struct {
	/* descriptor + 1 if OPEN; -(descriptor + 1) if CLOSING or OVER; 0 if FREE; or OPENING */
	atomic_int fd;
	atomic_bool over; /* its close has returned */
} fds[NR_FDS];
static _Atomic uint64_t generation;
static struct sfr__fork_hook *hooks; /* constant once the library is loaded */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int once_rc; /* 0 or -errno of pthread_atfork */

void sfr__fork_hook_add(struct sfr__fork_hook *hook)
{
	hook->next = hooks;
	hooks = hook;
}

/* Waits until *nr is 0, but not beyond the time `until`. This is a time of CLOCK_REALTIME, because
 * a statically initialised condition uses that clock. The thread may hold another lock meanwhile:
 * trace/session.c opens its file under a lock. */
static void wait_for_zero_locked(const unsigned *nr, const struct timespec *until)
{
	while (*nr != 0 && pthread_cond_timedwait(&fork_cv, &fork_mu.mu, until) != ETIMEDOUT)
		;
}

/* Returns the time when a wait that begins now has to end. Forks wait for opens, and opens for
 * forks. */
static struct timespec wait_end(void)
{
	struct timespec until = { 0, 0 };

	(void)clock_gettime(CLOCK_REALTIME, &until); /* the clock always exists */
	until.tv_sec += OPEN_WAIT_S;
	return until;
}

/* Runs before a fork and returns with fork_mu held: after_in_parent unlocks it, and after_in_child
 * initialises it again. Waits first until no descriptor is being opened; new opens wait while
 * nr_forking is not 0. */
static void before_fork(void)
{
	struct timespec until = wait_end();

	sfr__lock(&fork_mu);
	nr_forking++;
	wait_for_zero_locked(&nr_opening, &until);
	nr_forking--;
}

/* Runs in the parent after a fork, also one that failed, and releases fork_mu. */
static void after_in_parent(void)
{
	(void)pthread_cond_broadcast(&fork_cv); /* wakes threads that wait to open */
	sfr__unlock(&fork_mu);
}

/* Runs in the child after a fork: closes inherited descriptors and starts the core's state
 * afresh. */
static void after_in_child(void)
{
	for (int i = 0; i < NR_FDS; i++) {
		int entry = atomic_load(&fds[i].fd);

		if (entry == OPENING)
			entry = 0; /* the child cannot close it, because its number is not known */
		/* This is not sfr_sys.close, because a test's wrapper may wait and a fork handler
		 * must not. The result does not matter: the parent writes these files. */
		if (entry > 0 || (entry < 0 && fcntl(-entry - 1, F_GETSIG) == CLOSING_MARK))
			(void)close(abs(entry) - 1);
		atomic_store(&fds[i].fd, 0);
	}
	atomic_fetch_add(&generation, 1);
	for (struct sfr__fork_hook *hook = hooks; hook; hook = hook->next)
		hook->forget();
	sfr__lock_check_release(
		fork_mu.rank); /* the check of lock order knows that before_fork took it */
	sfr__mutex_init(&fork_mu, SFR__LOCK_FORK);
	(void)pthread_cond_init(&fork_cv,
				NULL); /* cannot fail on Linux; the waiters were the parent's */
	nr_opening = nr_forking = 0;
}

static void install_handlers(void)
{
	once_rc = -pthread_atfork(before_fork, after_in_parent, after_in_child);
}

/* Installs the fork handlers, once. Any thread may call it, any number of times. After a failure
 * (-ENOMEM) every call fails: without the handlers a child could do damage, so no engine may
 * start. */
int sfr_fork_init(void)
{
	int rc = pthread_once(&once, install_handlers);

	return rc ? -rc : once_rc;
}

uint64_t sfr_fork_generation(void)
{
	return atomic_load(&generation);
}

/* Returns the index of an OPEN descriptor's entry, or -1. */
static int find_open_entry(int fd)
{
	for (int i = 0; i < NR_FDS; i++)
		if (atomic_load(&fds[i].fd) == fd + 1)
			return i;
	return -1;
}

/* Returns the index of an entry that is FREE or OVER, or -1. */
static int find_free_entry_locked(void)
{
	for (int i = 0; i < NR_FDS; i++) {
		int entry = atomic_load(&fds[i].fd);

		if (entry == 0 || (entry < 0 && entry != OPENING && atomic_load(&fds[i].over)))
			return i;
	}
	return -1;
}

/* Makes a free entry of the table OPENING and returns its index, or -EMFILE. First waits, for a
 * second at most, until no fork waits for opens. */
static int begin_open(void)
{
	struct timespec until = wait_end();
	int index;

	sfr__lock(&fork_mu);
	wait_for_zero_locked(&nr_forking, &until);
	index = find_free_entry_locked();
	if (index >= 0) {
		atomic_store(&fds[index].over, false);
		atomic_store(&fds[index].fd, OPENING);
		nr_opening++;
	}
	sfr__unlock(&fork_mu);
	return index < 0 ? -EMFILE : index;
}

/* Makes an OPENING entry OPEN, or FREE if `fd` is negative. */
static void end_open(int index, int fd)
{
	sfr__lock(&fork_mu);
	atomic_store(&fds[index].fd, fd < 0 ? 0 : fd + 1);
	if (--nr_opening == 0)
		(void)pthread_cond_broadcast(&fork_cv);
	sfr__unlock(&fork_mu);
}

/* Retries an interrupted open, and blocks as long as open(2) does. Returns -EMFILE also when the
 * table is full; then nothing was opened. */
int sfr__fd_openat(int dir, const char *path, int flags, mode_t mode)
{
	int index = begin_open(), fd = -1, rc = index;

	for (int tries = 0; index >= 0 && tries < SFR__EINTR_TRIES; tries++) {
		fd = sfr_sys.open(dir, path, flags | O_CLOEXEC, mode);
		rc = fd < 0 ? -errno : fd;
		if (rc != -EINTR)
			break;
	}
	if (index >= 0)
		end_open(index, fd);
	return rc;
}

int sfr__fd_open(const char *path, int flags, mode_t mode)
{
	return sfr__fd_openat(AT_FDCWD, path, flags, mode);
}

int sfr__fd_memory(const char *name)
{
	int index = begin_open(), fd, rc = index;

	if (index >= 0) {
		fd = sfr_sys.memfd(name, MFD_CLOEXEC);
		rc = fd < 0 ? -errno : fd;
		end_open(index, fd);
	}
	return rc;
}

/* On Linux the descriptor is closed even if close returns an error, so no caller closes it again.
 * No lock is held during the close, which may take seconds, so a fork need not wait for it. */
int sfr__fd_close(int fd)
{
	int index = find_open_entry(fd), rc;

	/* if this fails, a forked child keeps the descriptor, which is harmless */
	(void)fcntl(fd, F_SETSIG, CLOSING_MARK);
	if (index >= 0)
		atomic_store(&fds[index].fd, -(fd + 1));
	rc = sfr_sys.close(fd) < 0 ? -errno : 0;
	if (index >= 0)
		atomic_store(&fds[index].over, true);
	return rc;
}
