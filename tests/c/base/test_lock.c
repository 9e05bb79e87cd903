/* The check of the locks' order detects every violation of the order, and nothing else. */
#include <signal.h>
#include <sys/wait.h>

#include "base/base.h"
#include "check.h"

static struct sfr__mutex outer = SFR__MUTEX(SFR__LOCK_ENGINE);
static struct sfr__mutex inner = SFR__MUTEX(SFR__LOCK_POOL);

/* Returns how a child that runs `body` ends: the number of the signal, or 0. */
static int end_of(void (*body)(void))
{
	int status = 0;
	pid_t child = fork();

	if (child == 0) {
		(void)fclose(stderr);
		(void)signal(SIGABRT, SIG_DFL); /* no sanitizer report for an intended abort */
		body();
		_exit(0);
	}
	CHECK_EQ(waitpid(child, &status, 0), child);
	return WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
}

static void in_order(void)
{
	for (int i = 0; i < 2; i++) {
		sfr__lock(&outer);
		sfr__lock(&inner);
		sfr__unlock(&outer);
		sfr__unlock(&inner);
	}
}

static void against_the_order(void)
{
	sfr__lock(&inner);
	sfr__lock(&outer);
}

static void lock_two_of_a_rank(void)
{
	struct sfr__mutex twin = SFR__MUTEX(SFR__LOCK_ENGINE);

	sfr__lock(&outer);
	sfr__lock(&twin);
}

static void unlock_without_lock(void)
{
	sfr__unlock(&inner);
}

static void wait_with_two_locks(void)
{
	pthread_cond_t cond;

	(void)sfr__cond_init(&cond);
	sfr__lock(&outer);
	sfr__lock(&inner);
	(void)sfr__cond_wait(&cond, &inner, 0);
}

TEST(only_violations_of_the_lock_order_abort)
{
	CHECK_EQ(end_of(in_order), 0);
	CHECK_EQ(end_of(against_the_order), SIGABRT);
	CHECK_EQ(end_of(lock_two_of_a_rank), SIGABRT);
	CHECK_EQ(end_of(unlock_without_lock), SIGABRT);
	CHECK_EQ(end_of(wait_with_two_locks), SIGABRT);
}
