/* The start of the core's threads: their name, CPUs, priority and signals. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>

#include "base/base.h"

#define PROMPT_SLACK_NS 1000 /* how late a sleep may end; the kernel's default is 50 us */
#define WORKER_NICE 10       /* a lower priority than the training thread's, which has 0 */

/* Arguments for thread_main, which frees them. */
struct thread_main_args {
	void *(*main)(void *);
	void *arg;
	char name[16]; /* the kernel's limit, with the final zero */
	enum sfr__thread_kind kind;
};

static void *thread_main(void *arg)
{
	struct thread_main_args start = *(struct thread_main_args *)arg;

	sfr_sys.free(arg);
	(void)pthread_setname_np(pthread_self(), start.name); /* only a label for debuggers */
	sfr__cpus_apply_to_this_thread();
	/* a sandbox may forbid these calls; a failure only makes the program slower */
	if (start.kind == SFR__BACKGROUND)
		(void)sfr_sys.set_nice(WORKER_NICE);
	if (start.kind == SFR__PROMPT)
		(void)sfr_sys.set_slack(PROMPT_SLACK_NS);
	return start.main(start.arg);
}

/* The new thread inherits the caller's signal mask, so the caller blocks the signals meanwhile. The
 * program's signal handlers then never run on the thread. Faults are not blocked: otherwise
 * Python's faulthandler could not report where the process crashed. */
int sfr__thread_start(pthread_t *thread, const char *name, enum sfr__thread_kind kind,
		      void *(*main)(void *), void *arg)
{
	static const int fault_signals[] = { SIGSEGV, SIGBUS, SIGILL, SIGFPE };
	struct thread_main_args *start;
	sigset_t all, old;
	int rc;

	start = sfr_sys.malloc(sizeof(*start));
	if (!start)
		return -ENOMEM;
	start->main = main;
	start->arg = arg;
	start->kind = kind;
	memset(start->name, 0, sizeof(start->name));
	strncpy(start->name, name, sizeof(start->name) - 1);

	(void)sigfillset(&all);
	for (size_t i = 0; i < sizeof(fault_signals) / sizeof(fault_signals[0]); i++)
		(void)sigdelset(&all, fault_signals[i]);
	rc = pthread_sigmask(SIG_SETMASK, &all, &old);
	if (rc == 0) {
		rc = sfr_sys.thread_create(thread, NULL, thread_main, start);
		/* cannot fail: the mask was valid a moment ago */
		(void)pthread_sigmask(SIG_SETMASK, &old, NULL);
	}
	if (rc != 0)
		sfr_sys.free(start);
	return -rc;
}
