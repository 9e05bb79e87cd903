/* The locks of the core, and the order in which they may be taken.
 *
 * A thread that holds one takes only such as stand further down in the list, so no two threads can
 * wait for each other. Where SFR_CHECK_LOCKS is defined, as in the builds of the C tests, each
 * thread keeps account of what it holds, and one that goes against the order aborts the test: also
 * when nobody was in its way this time.
 *
 * Nothing waits under any of them but for its own condition, and no system call for a file is made
 * under one, with these exceptions, all by calls that return as soon as the kernel answers: a
 * thread is started under SESSION, ENGINE, LANE and LOG (so that there is one of each, at most); the
 * timeline's file is opened under SESSION, which may wait a second for a fork.
 */
#ifndef SFR_LOCK_H
#define SFR_LOCK_H

#include <pthread.h>

enum sfr__lock_rank {
	SFR__LOCK_SESSION, /* trace/session.c: the one timeline that is being written */
	SFR__LOCK_ENGINE,  /* an engine's queues and slots, its tickets, its snapshots */
	SFR__LOCK_LANES,   /* device/lanes.c: the lanes of an engine */
	SFR__LOCK_LANE,  /* what is in flight on a device's stream; never over a call that queues */
	SFR__LOCK_EYES,  /* device/glance.c: through which devices are looked at */
	SFR__LOCK_LOG,   /* commit/log.c: the process's ordered log */
	SFR__LOCK_POOL,  /* a pool's free blocks, waiters, figures */
	SFR__LOCK_PIN,   /* what the driver knows of a pool's memory */
	SFR__LOCK_AHEAD, /* check/ahead.c: pieces between the readers and the check */
	SFR__LOCK_RESTORE,  /* restore/restore.c: records between the readers and who waits */
	SFR__LOCK_DRIVER,   /* cuda/driver.c: whether it is loaded and initialised */
	SFR__LOCK_TMP,      /* file/tmp.c: the temporaries of this process that live */
	SFR__LOCK_NOTICES,  /* base/notice.c: what the core has to tell */
	SFR__LOCK_REGISTRY, /* trace/ring.c: the rings of all threads */
	SFR__LOCK_FORK,     /* base/fork.c: open descriptors; also held across a fork */
	SFR__NR_LOCKS
};

struct sfr__mutex {
	pthread_mutex_t mu;
	enum sfr__lock_rank rank; /* constant */
};
#define SFR__MUTEX(of_rank) { .mu = PTHREAD_MUTEX_INITIALIZER, .rank = (of_rank) }

#ifdef SFR_CHECK_LOCKS
/* How many the calling thread holds. */
unsigned sfr__locks_held(void);
/* Before a lock is taken, and after it is given up. */
void sfr__lock_taken(enum sfr__lock_rank rank);
void sfr__lock_given(enum sfr__lock_rank rank);
/* Before a wait on a condition, under this one alone. */
void sfr__lock_alone(enum sfr__lock_rank rank);
#else
static inline void sfr__lock_taken(enum sfr__lock_rank rank)
{
	(void)rank;
}
static inline void sfr__lock_given(enum sfr__lock_rank rank)
{
	(void)rank;
}
static inline void sfr__lock_alone(enum sfr__lock_rank rank)
{
	(void)rank;
}
#endif

/* What pthread returns of these is dropped: on a default mutex that is used by these rules none of
 * them can fail. */
static inline void sfr__mutex_init(struct sfr__mutex *mutex, enum sfr__lock_rank rank)
{
	mutex->rank = rank;
	(void)pthread_mutex_init(&mutex->mu, NULL);
}

static inline void sfr__mutex_fini(struct sfr__mutex *mutex)
{
	(void)pthread_mutex_destroy(&mutex->mu);
}

static inline void sfr__lock(struct sfr__mutex *mutex)
{
	sfr__lock_taken(mutex->rank);
	(void)pthread_mutex_lock(&mutex->mu);
}

static inline void sfr__unlock(struct sfr__mutex *mutex)
{
	sfr__lock_given(mutex->rank);
	(void)pthread_mutex_unlock(&mutex->mu);
}

/* What an expression is while the mutex is held. */
#define sfr__under(mutex, expression)                                                              \
	__extension__({                                                                            \
		sfr__lock(mutex);                                                                  \
		__auto_type sfr__value = (expression);                                             \
		sfr__unlock(mutex);                                                                \
		sfr__value;                                                                        \
	})

#endif
