/* Checks that threads take locks in the order of lock.h. Only the C tests are built with it. */
#include "base/lock.h"

#ifdef SFR_CHECK_LOCKS
#include <stdio.h>
#include <stdlib.h>

static _Thread_local unsigned held; /* the locks of this thread: a bit for each rank */

static void abort_for_lock_rank(const char *what, enum sfr__lock_rank rank)
{
	(void)fprintf(stderr, "locks: rank %d is %s while 0x%x are held (base/lock.h)\n", (int)rank,
		      what, held);
	abort();
}

unsigned sfr__count_locks_held(void)
{
	return (unsigned)__builtin_popcount(held);
}

void sfr__lock_check_acquire(enum sfr__lock_rank rank)
{
	if (held >> rank) /* this lock or one further down the list */
		abort_for_lock_rank("taken", rank);
	held |= 1u << rank;
}

void sfr__lock_check_release(enum sfr__lock_rank rank)
{
	if (!(held >> rank & 1)) /* the thread does not hold it */
		abort_for_lock_rank("given up", rank);
	held &= ~(1u << rank);
}

void sfr__lock_check_holds_only(enum sfr__lock_rank rank)
{
	if (held != 1u << rank)
		abort_for_lock_rank("waited under", rank);
}
#endif
