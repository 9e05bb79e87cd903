/* The CPUs that threads of the core run on.
 *
 * A thread inherits the CPUs of the thread that starts it. An OpenMP runtime may have bound that
 * thread to a single CPU (OMP_PROC_BIND, GOMP_CPU_AFFINITY). The core's threads would share this
 * CPU with the training. So Python sets the CPUs of the process here (_base/cpus.py).
 *
 * The set as a whole is not atomic. A thread that starts during a change may get CPUs of the old
 * set and of the new one, which is harmless.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "base/base.h"
#include "sfr/cpus.h"

#define WORD_BITS 64
#define NR_WORDS (CPU_SETSIZE / WORD_BITS)

/* A bit for each CPU. If all are zero, threads inherit their CPUs. */
static _Atomic uint64_t cpu_bits[NR_WORDS];

int sfr_cpus_set_for_new_threads(const int *cpus, size_t nr)
{
	uint64_t new_bits[NR_WORDS] = { 0 };

	for (size_t i = 0; i < nr; i++) {
		if (cpus[i] < 0 || cpus[i] >= CPU_SETSIZE)
			return -EINVAL;
		new_bits[cpus[i] / WORD_BITS] |= UINT64_C(1) << (cpus[i] % WORD_BITS);
	}
	for (size_t i = 0; i < NR_WORDS; i++)
		atomic_store(&cpu_bits[i], new_bits[i]);
	return 0;
}

void sfr__cpus_apply_to_this_thread(void)
{
	cpu_set_t cpus;
	bool any = false;

	CPU_ZERO(&cpus);
	for (size_t i = 0; i < CPU_SETSIZE; i++) {
		uint64_t word = atomic_load(&cpu_bits[i / WORD_BITS]);

		if ((word >> (i % WORD_BITS) & 1) != 0) {
			CPU_SET(i, &cpus);
			any = true;
		}
	}
	if (any)
		(void)sfr_sys.set_affinity(&cpus); /* on failure the thread is only slower */
}
