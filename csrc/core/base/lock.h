/* The locks of the core, and the order in which a thread may take them.
 *
 * A thread that holds a lock takes only locks further down the list, so no two threads can wait for
 * each other. The C tests are built with SFR_CHECK_LOCKS: a thread that breaks the order aborts the
 * test, even if no other thread holds the lock.
 *
 * Under a lock, a thread waits only for a condition of that lock and makes no system call on a
 * file. There are two exceptions:
 *   - Threads are started under SESSION, ENGINE, LANE and LOG, so that no thread is started twice.
 *   - The file of a trace is opened under SESSION, which may wait a second for a fork (fork.c). */
#ifndef SFR_LOCK_H
#define SFR_LOCK_H

#include <pthread.h>

enum sfr__lock_rank {
	SFR__LOCK_SESSION, /* trace/session.c: the trace that is being written */
	SFR__LOCK_ENGINE,  /* an engine's queues and slots, its tickets, its snapshots */
	SFR__LOCK_LANES,   /* device/lanes.c: the lanes of an engine */
	SFR__LOCK_LANE,    /* device/lane.c: portions in flight; not held while copies are queued */
	SFR__LOCK_PROBERS, /* device/probe.c: the devices that can be probed */
	SFR__LOCK_LOG,     /* commit/log.c: the process's ordered log */
	SFR__LOCK_POOL,    /* a pool's free blocks, waiters, statistics */
	SFR__LOCK_PIN,     /* memory/pin.c: a pool's regions, which the driver has registered */
	SFR__LOCK_READER,  /* reader/reader.c: the progress of a reader's threads */
	SFR__LOCK_ARRIVALS, /* reader/arriving.c: files whose bytes are on their way */
	SFR__LOCK_DRIVER,   /* cuda/driver.c: whether the driver is loaded and initialised */
	SFR__LOCK_TMP,      /* file/tmp.c: this process's live temporaries */
	SFR__LOCK_NOTICES,  /* base/notice.c: posted notices */
	SFR__LOCK_REGISTRY, /* trace/ring.c: the rings of all threads */
	SFR__LOCK_FORK,     /* base/fork.c: the table of descriptors; also held across a fork */
	SFR__NR_LOCKS
};

struct sfr__mutex {
	pthread_mutex_t mu;
	enum sfr__lock_rank rank; /* constant */
};
#define SFR__MUTEX(of_rank) { .mu = PTHREAD_MUTEX_INITIALIZER, .rank = (of_rank) }

#ifdef SFR_CHECK_LOCKS
/* Returns how many locks the calling thread holds. */
unsigned sfr__count_locks_held(void);
/* Called just before a lock is taken, and just before it is released. */
void sfr__lock_check_acquire(enum sfr__lock_rank rank);
void sfr__lock_check_release(enum sfr__lock_rank rank);
/* Called before a wait on a condition, when the thread must hold this lock and no other. */
void sfr__lock_check_holds_only(enum sfr__lock_rank rank);
#else
static inline void sfr__lock_check_acquire(enum sfr__lock_rank rank)
{
	(void)rank;
}
static inline void sfr__lock_check_release(enum sfr__lock_rank rank)
{
	(void)rank;
}
static inline void sfr__lock_check_holds_only(enum sfr__lock_rank rank)
{
	(void)rank;
}
#endif

/* The pthread functions cannot fail on a default mutex that its holder unlocks. */
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
	sfr__lock_check_acquire(mutex->rank);
	(void)pthread_mutex_lock(&mutex->mu);
}

static inline void sfr__unlock(struct sfr__mutex *mutex)
{
	sfr__lock_check_release(mutex->rank);
	(void)pthread_mutex_unlock(&mutex->mu);
}

/* Takes the mutex, evaluates an expression, releases the mutex, and returns the value. */
#define sfr__under(mutex, expression)                                                              \
	__extension__({                                                                            \
		sfr__lock(mutex);                                                                  \
		__auto_type sfr__value = (expression);                                             \
		sfr__unlock(mutex);                                                                \
		sfr__value;                                                                        \
	})

#endif
