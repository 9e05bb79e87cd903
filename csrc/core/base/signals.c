/* Signals that a forked worker leaves to its parent.
 *
 * A scheduler sends SIGTERM to every process of a job. A worker that dies of it takes the data away
 * that its parent needs to reach the next step boundary. The parent then cannot save. But a worker
 * must still end when its parent terminates it, with the same signal. The sender tells the two
 * apart:
 *
 *     the parent sent it         the action that was in place before
 *     the parent is dead         likewise
 *     anyone else sent it        ignored, and from now on the worker is killed when its parent dies
 *
 * The kernel kills it then (PR_SET_PDEATHSIG), because the signal that would have ended it is gone.
 * By "parent" the kernel means the thread that forked. A worker of the main thread is bound to it
 * from the beginning, so none outlives a parent that is killed before any signal.
 */
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/base.h"
#include "sfr/signals.h"

#define NR_SIGNALS 65 /* Linux has 1 to 64 */

static struct sigaction before[NR_SIGNALS];
static _Atomic pid_t parent;

/* Returns true if the signal is to be ignored. */
static bool leave(const siginfo_t *info)
{
	pid_t mine = atomic_load(&parent);

	if (info->si_pid == mine || getppid() != mine)
		return false;
	(void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* fails only for an invalid signal */
	return getppid() == mine;               /* the parent may have died before the call */
}

static void handle(int signum, siginfo_t *info, void *context)
{
	const struct sigaction *old = &before[signum];
	int saved = errno;

	if (leave(info)) {
		errno = saved;
		return;
	}
	if (old->sa_flags & SA_SIGINFO) {
		old->sa_sigaction(signum, info, context);
	} else if (old->sa_handler == SIG_DFL) {
		/* delivered when this handler returns, because the signal is blocked until then */
		(void)sigaction(signum, old, NULL);
		(void)raise(signum);
	} else if (old->sa_handler != SIG_IGN) {
		old->sa_handler(signum);
	}
	errno = saved;
}

int sfr_signals_leave(int signum, bool at_once)
{
	struct sigaction action = { 0 }, old;

	if (signum < 1 || signum >= NR_SIGNALS || sigaction(signum, NULL, &old) < 0)
		return -EINVAL;
	atomic_store(&parent, getppid());
	if (at_once)
		(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (old.sa_flags & SA_SIGINFO && old.sa_sigaction == handle)
		return 0;
	before[signum] = old;
	action.sa_sigaction = handle;
	action.sa_flags = SA_SIGINFO | SA_RESTART;
	(void)sigemptyset(&action.sa_mask);
	return sigaction(signum, &action, NULL) < 0 ? -errno : 0;
}
