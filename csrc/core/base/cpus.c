/* The CPUs that threads of the core run on.
 *
 * A thread inherits the CPUs of the one that starts it. An OpenMP runtime may have bound that one
 * to a single core (OMP_PROC_BIND, GOMP_CPU_AFFINITY), and then every thread of the core would
 * share that core with the training. Python knows better (_base/cpus.py) and says so here.
 *
 * The words are atomic one by one. A thread that starts while they change may get CPUs of both
 * sets, all of which the process may use.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "base/base.h"
#include "sfr/cpus.h"

#define WORD_BITS 64
#define NR_WORDS (CPU_SETSIZE / WORD_BITS)

static _Atomic uint64_t words[NR_WORDS]; /* all zero: as the thread that starts others */

int sfr_cpus_set(const int *cpus, size_t nr)
{
	uint64_t wanted[NR_WORDS] = { 0 };

	for (size_t i = 0; i < nr; i++) {
		if (cpus[i] < 0 || cpus[i] >= CPU_SETSIZE)
			return -EINVAL;
		wanted[cpus[i] / WORD_BITS] |= UINT64_C(1) << (cpus[i] % WORD_BITS);
	}
	for (size_t i = 0; i < NR_WORDS; i++)
		atomic_store(&words[i], wanted[i]);
	return 0;
}

/* Moves the calling thread to them. Where the system refuses, it stays where it was: slower, and
 * nothing worse. */
void sfr__cpus_take(void)
{
	cpu_set_t cpus;
	bool any = false;

	CPU_ZERO(&cpus);
	for (size_t i = 0; i < CPU_SETSIZE; i++) {
		if (atomic_load(&words[i / WORD_BITS]) >> (i % WORD_BITS) & 1) {
			CPU_SET(i, &cpus);
			any = true;
		}
	}
	if (any)
		(void)sfr_sys.set_affinity(&cpus);
}
