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
 *   before: takes fork_mu                     (has fork_mu: it is the same thread)
 *   after:  gives it back                     closes what is in the table
 *                                             generation + 1, others forget
 *                                             gives fork_mu back
 *
 * fork_mu makes a descriptor and its place in the table one thing. Opens,
 * closes and forks exclude each other, so no child has a descriptor that is not
 * in its table, nor finds a number in it that by now means somebody else's
 * file. A fork therefore waits while a file is being opened or closed, which is
 * short on every file system that answers.
 *
 * The child handler calls nothing that allocates or takes a lock another thread
 * may have held. A child made by a bare clone(2) runs no handlers: it keeps the
 * descriptors until it calls exec or ends.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/base.h"

#define NR_FDS 4096

static struct sfr__mutex fork_mu = SFR__MUTEX(SFR__LOCK_FORK);
static atomic_int fds[NR_FDS]; /* descriptor + 1, 0 = free; written under fork_mu */
static _Atomic uint64_t generation;
static struct sfr__fork_hook *hooks; /* constant once main runs */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int once_rc; /* 0 or -errno of the installation */

void sfr__fork_watch(struct sfr__fork_hook *hook)
{
	hook->next = hooks;
	hooks = hook;
}

static void before(void)
{
	sfr__lock(&fork_mu); /* fails only on a mutex that is not one */
}

static void after_in_parent(void)
{
	sfr__unlock(&fork_mu);
}

static void after_in_child(void)
{
	for (int i = 0; i < NR_FDS; i++) {
		int fd = atomic_load(&fds[i]) - 1;

		/* Not through the table: a test's wrapper may wait, and nothing here may.
		 * What close returns does not matter, the parent writes these files. */
		if (fd >= 0)
			(void)close(fd);
		atomic_store(&fds[i], 0);
	}
	atomic_fetch_add(&generation, 1);
	for (struct sfr__fork_hook *hook = hooks; hook; hook = hook->next)
		hook->forget();
	sfr__unlock(&fork_mu); /* taken by this very thread in before() */
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

/* The slot that holds `value`, or -1. */
static int find_slot_locked(int value)
{
	for (int i = 0; i < NR_FDS; i++)
		if (atomic_load(&fds[i]) == value)
			return i;
	return -1;
}

/* An interrupted open is tried again. -EMFILE also when the table is full: then nothing has been
 * opened. Blocks as long as open(2) does, and every fork of the process with it. */
int sfr__fd_open(const char *path, int flags, mode_t mode)
{
	int slot, fd = -1, rc;

	sfr__lock(&fork_mu);
	slot = find_slot_locked(0);
	rc = -EMFILE;
	if (slot < 0)
		goto out;
	for (int tries = 0; tries < SFR__EINTR_TRIES; tries++) {
		fd = sfr_sys.open(path, flags | O_CLOEXEC, mode);
		rc = fd < 0 ? -errno : fd;
		if (rc != -EINTR)
			break;
	}
	if (fd >= 0)
		atomic_store(&fds[slot], fd + 1);
out:
	sfr__unlock(&fork_mu);
	return rc;
}

/* The descriptor is gone whatever is returned (Linux), so nobody closes it twice. */
int sfr__fd_close(int fd)
{
	int slot, rc;

	sfr__lock(&fork_mu);
	slot = find_slot_locked(fd + 1);
	rc = sfr_sys.close(fd) < 0 ? -errno : 0;
	if (slot >= 0)
		atomic_store(&fds[slot], 0);
	sfr__unlock(&fork_mu);
	return rc;
}
