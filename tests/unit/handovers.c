/* Counts how often each thread lets go of the interpreter lock; preloaded (see fix_handovers.py).
 *
 * A thread that drops the lock signals one condition variable of the interpreter, and nothing else
 * signals it. A call that is known to drop the lock once shows which one it is. So the count is
 * exact, and needs neither a second thread nor time.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#define NR_THREADS 256
#define LEARNING 4

int handovers_set_learning(int on);
long handovers_of(int thread);

static struct {
	_Atomic int thread;
	_Atomic long count;
} counts[NR_THREADS];

static _Atomic(pthread_cond_t *) lock_dropped;
static _Atomic(pthread_cond_t *) seen[LEARNING]; /* by the thread that learns */
static _Atomic int learner, nr_seen;

static void count(int thread)
{
	for (int i = 0; i < NR_THREADS; i++) {
		int none = 0;

		if (atomic_load(&counts[i].thread) == thread ||
		    atomic_compare_exchange_strong(&counts[i].thread, &none, thread)) {
			atomic_fetch_add(&counts[i].count, 1);
			return;
		}
	}
}

int pthread_cond_signal(pthread_cond_t *cond)
{
	static int (*_Atomic original)(pthread_cond_t *);
	int (*call)(pthread_cond_t *) = atomic_load(&original);

	if (!call) {
		/* Without the version the oldest one is found, of another layout. */
		void *found = dlvsym(RTLD_NEXT, "pthread_cond_signal", "GLIBC_2.3.2");

		if (!found)
			found = dlsym(RTLD_NEXT, "pthread_cond_signal");
		*(void **)&call = found;
		atomic_store(&original, call);
	}
	if (cond == atomic_load(&lock_dropped))
		count(gettid());
	else if (atomic_load(&learner) == gettid() && atomic_load(&nr_seen) < LEARNING)
		atomic_store(&seen[atomic_fetch_add(&nr_seen, 1)], cond);
	return call(cond);
}

/* Between learn(1) and learn(0) the calling thread drops the lock once, and takes it back. 0, or -1
 * when that was not seen. */
int handovers_set_learning(int on)
{
	atomic_store(&learner, on ? gettid() : 0);
	if (on || atomic_load(&nr_seen) != 2) /* dropped, then taken */
		return on ? 0 : -1;
	atomic_store(&lock_dropped, atomic_load(&seen[0]));
	return 0;
}

/* Returns the count of a thread, given by its kernel id. */
long handovers_of(int thread)
{
	for (int i = 0; i < NR_THREADS; i++)
		if (atomic_load(&counts[i].thread) == thread)
			return atomic_load(&counts[i].count);
	return 0;
}
