/* Signals that a forked worker leaves to its parent.
 *
 * A scheduler sends SIGTERM to every process of a job. A worker of a data loader must not die of
 * that signal, because its parent needs more data to reach the next step boundary and save. But the
 * worker must end when its parent sends the same signal. So the handler looks at the sender:
 *
 *     the parent sent it         the action that was in place before
 *     the parent is dead         the action that was in place before
 *     another process sent it    ignored, and from now on the worker is killed when its parent dies
 *
 * In the last case the kernel kills the worker (PR_SET_PDEATHSIG) when the thread that forked it
 * ends. With `at_once` the kernel does so from the beginning, so that the worker does not outlive a
 * parent that is killed before any signal came.
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

static struct sigaction
	old_actions[NR_SIGNALS]; /* those that sfr_signals_leave_to_parent replaced */
static _Atomic pid_t
	recorded_parent; /* the parent when sfr_signals_leave_to_parent was called last */

/* Returns whether the handler must ignore the signal: the parent lives and has not sent it. If so,
 * also asks the kernel to kill this process when its parent dies. */
static bool prepare_to_ignore_signal(const siginfo_t *info)
{
	pid_t my_parent = atomic_load(&recorded_parent);

	if (info->si_pid == my_parent)
		return false; /* the parent sent it */
	if (getppid() != my_parent)
		return false;                   /* the parent is dead */
	(void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* fails only for an invalid signal */
	return getppid() == my_parent;          /* false if the parent died before the call above */
}

/* Ignores the signal, or takes the action that was in place before. */
static void handle_signal(int signum, siginfo_t *info, void *context)
{
	const struct sigaction *old = &old_actions[signum];
	int saved_errno = errno;

	if (prepare_to_ignore_signal(info)) {
		errno = saved_errno;
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
	errno = saved_errno;
}

int sfr_signals_leave_to_parent(int signum, bool at_once)
{
	struct sigaction action = { 0 }, old;

	if (signum < 1 || signum >= NR_SIGNALS || sigaction(signum, NULL, &old) < 0)
		return -EINVAL;
	atomic_store(&recorded_parent, getppid());
	if (at_once)
		(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (old.sa_flags & SA_SIGINFO && old.sa_sigaction == handle_signal)
		return 0; /* called again: old_actions has the action already */
	old_actions[signum] = old;
	action.sa_sigaction = handle_signal;
	action.sa_flags = SA_SIGINFO | SA_RESTART;
	(void)sigemptyset(&action.sa_mask);
	return sigaction(signum, &action, NULL) < 0 ? -errno : 0;
}
