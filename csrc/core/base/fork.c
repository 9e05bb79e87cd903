/* fork: what a child inherits, and what it must not keep.
 *
 * A child has the parent's memory and descriptors, but only the thread that
 * forked. Everything the core had at work belongs to threads which do not
 * exist there, and its locks may have been held by them. So the child starts
 * anew: a generation counter moves on, every object made before is told apart
 * by it (SFR_EFORK), and the files with state for the whole process, which have
 * linked a hook, are told to forget it.
 *
 * Descriptors are the one thing that cannot just be forgotten. A temporary is
 * locked by flock, and that lock lives as long as any descriptor of the same
 * open file: a child that kept one would make the temporary of a dead parent
 * look alive for as long as the child runs. So each such descriptor stands in a
 * table, and the child closes them. It never unlocks, for that would unlock the
 * parent's file too.
 *
 *   parent                                    child
 *   before: takes fork_mu when no file        (has fork_mu: it is the same thread)
 *           is being opened
 *   after:  gives it back                     closes what is in the table
 *                                             generation + 1, others forget
 *                                             gives fork_mu back
 *
 * No system call is made under fork_mu: open(2) may hang on one file system, and others
 * are to be opened on another; close(2) may flush or upload for seconds. A place in the
 * table has a state instead:
 *
 *     FREE ──▶ OPENING ──▶ OPEN ──close begins──▶ CLOSING ──close has returned──▶ OVER
 *       ▲                                                                          │
 *       └─────────────────── under fork_mu, when a slot is wanted ─────────────────┘
 *
 * The kernel copies a forking process's descriptors first and its memory later, and the
 * other threads run in between: a slot that went FREE there would hide a descriptor that
 * the child has. So nothing becomes FREE but under fork_mu, which the fork holds.
 *
 * The number of a CLOSING or OVER descriptor may mean somebody else's file by now. So the
 * open file is marked before it is closed (F_SETSIG, which stands for nothing as
 * long as nobody asks for signals, and goes with the open file and not with the
 * number), and the child closes only what bears the mark. Where the mark cannot
 * be set the child leaves such a descriptor: the file's writing is over.
 *
 * A fork waits until nothing is OPENING, and what would be opened meanwhile waits for the
 * fork: so no child has a descriptor that is not in its table. It waits a second and no
 * longer, since the program's every fork would hang with an open that does. The child may then
 * have one descriptor that is in no table, which ends with exec.
 *
 * The child handler calls nothing that allocates or takes a lock another thread
 * may have held. A child made by a bare clone(2) runs no handlers: it keeps the
 * descriptors until it calls exec or ends.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/base.h"

#define NR_FDS 4096
#define OPEN_WAIT_S 1       /* of a fork for an open */
#define OPENING INT_MIN     /* no number of a descriptor yet */
#define CLOSING_MARK SIGURG /* any signal: nobody asks for one, and it is never sent */

static struct sfr__mutex fork_mu = SFR__MUTEX(SFR__LOCK_FORK);
static pthread_cond_t fork_cv = PTHREAD_COND_INITIALIZER; /* of both counts */
static unsigned nr_opening, nr_forking;                   /* under fork_mu */
static struct {
	/* descriptor + 1 = OPEN, -(descriptor + 1) = CLOSING or OVER, 0 = FREE, or OPENING */
	atomic_int fd;
	atomic_bool over; /* its close has returned */
} fds[NR_FDS];
static _Atomic uint64_t generation;
static struct sfr__fork_hook *hooks; /* constant once main runs */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int once_rc; /* 0 or -errno of the installation */

void sfr__fork_watch(struct sfr__fork_hook *hook)
{
	hook->next = hooks;
	hooks = hook;
}

/* Waits while *nr is not 0, until a moment of CLOCK_REALTIME, which a static condition has: a second
 * at most, and so under the lock over the timeline, whose file is opened under it, too. */
static void wait_locked(const unsigned *nr, const struct timespec *until)
{
	while (*nr != 0 && pthread_cond_timedwait(&fork_cv, &fork_mu.mu, until) != ETIMEDOUT)
		;
}

static struct timespec soon(void)
{
	struct timespec until = { 0, 0 };

	(void)clock_gettime(CLOCK_REALTIME, &until); /* it exists */
	until.tv_sec += OPEN_WAIT_S;
	return until;
}

static void before(void)
{
	struct timespec until = soon();

	sfr__lock(&fork_mu);
	nr_forking++;
	wait_locked(&nr_opening, &until);
	nr_forking--;
}

static void after_in_parent(void)
{
	(void)pthread_cond_broadcast(&fork_cv); /* who waits to open */
	sfr__unlock(&fork_mu);
}

static void after_in_child(void)
{
	for (int i = 0; i < NR_FDS; i++) {
		int entry = atomic_load(&fds[i].fd);

		if (entry == OPENING)
			entry = 0; /* nobody knows its number: see the top */
		/* Not through the table: a test's wrapper may wait, and nothing here may.
		 * What close returns does not matter, the parent writes these files. */
		if (entry > 0 || (entry < 0 && fcntl(-entry - 1, F_GETSIG) == CLOSING_MARK))
			(void)close(abs(entry) - 1);
		atomic_store(&fds[i].fd, 0);
	}
	atomic_fetch_add(&generation, 1);
	for (struct sfr__fork_hook *hook = hooks; hook; hook = hook->next)
		hook->forget();
	sfr__lock_given(fork_mu.rank);
	sfr__mutex_init(&fork_mu, SFR__LOCK_FORK);
	(void)pthread_cond_init(&fork_cv,
				NULL); /* cannot fail on Linux; waiters are the parent's */
	nr_opening = nr_forking = 0;
}

static void install(void)
{
	once_rc = -pthread_atfork(before, after_in_parent, after_in_child);
}

/* Any thread, any number of times. -ENOMEM, then and from then on: without the handlers a child
 * could do damage, so nothing may start. */
int sfr_fork_init(void)
{
	int rc = pthread_once(&once, install);

	return rc ? -rc : once_rc;
}

uint64_t sfr_fork_generation(void)
{
	return atomic_load(&generation);
}

/* The slot of an OPEN descriptor, or -1. */
static int find_slot(int fd)
{
	for (int i = 0; i < NR_FDS; i++)
		if (atomic_load(&fds[i].fd) == fd + 1)
			return i;
	return -1;
}

/* A slot that is FREE, or OVER and so free now; -1 when there is none. */
static int free_slot_locked(void)
{
	for (int i = 0; i < NR_FDS; i++) {
		int entry = atomic_load(&fds[i].fd);

		if (entry == 0 || (entry < 0 && entry != OPENING && atomic_load(&fds[i].over)))
			return i;
	}
	return -1;
}

/* The slot, OPENING from now on, or -EMFILE. A fork that waits goes first. */
static int begin_open(void)
{
	struct timespec until = soon();
	int slot;

	sfr__lock(&fork_mu);
	wait_locked(&nr_forking, &until);
	slot = free_slot_locked();
	if (slot >= 0) {
		atomic_store(&fds[slot].over, false);
		atomic_store(&fds[slot].fd, OPENING);
		nr_opening++;
	}
	sfr__unlock(&fork_mu);
	return slot < 0 ? -EMFILE : slot;
}

static void end_open(int slot, int fd)
{
	sfr__lock(&fork_mu);
	atomic_store(&fds[slot].fd, fd < 0 ? 0 : fd + 1);
	if (--nr_opening == 0)
		(void)pthread_cond_broadcast(&fork_cv);
	sfr__unlock(&fork_mu);
}

/* An interrupted open is tried again. -EMFILE also when the table is full: then nothing has been
 * opened. Blocks as long as open(2) does. */
int sfr__fd_openat(int dir, const char *path, int flags, mode_t mode)
{
	int slot = begin_open(), fd = -1, rc = slot;

	for (int tries = 0; slot >= 0 && tries < SFR__EINTR_TRIES; tries++) {
		fd = sfr_sys.open(dir, path, flags | O_CLOEXEC, mode);
		rc = fd < 0 ? -errno : fd;
		if (rc != -EINTR)
			break;
	}
	if (slot >= 0)
		end_open(slot, fd);
	return rc;
}

int sfr__fd_open(const char *path, int flags, mode_t mode)
{
	return sfr__fd_openat(AT_FDCWD, path, flags, mode);
}

/* The descriptor is gone whatever is returned (Linux), so nobody closes it twice. No lock is held:
 * forks go on, see the top. */
int sfr__fd_close(int fd)
{
	int slot = find_slot(fd), rc;

	(void)fcntl(fd, F_SETSIG, CLOSING_MARK); /* see the top for where it cannot be set */
	if (slot >= 0)
		atomic_store(&fds[slot].fd, -(fd + 1));
	rc = sfr_sys.close(fd) < 0 ? -errno : 0;
	if (slot >= 0)
		atomic_store(&fds[slot].over, true);
	return rc;
}
