/* The CPUs that the core's threads run on. See base/cpus.c. */
#ifndef SFR_CPUS_H
#define SFR_CPUS_H

#include <stddef.h>

/* Threads that the core starts from now on run on these CPUs. With nr == 0 each runs where the
 * thread that starts it may. -EINVAL for a number that is no CPU's: nothing changes then. Any
 * thread may call it. */
int sfr_cpus_set(const int *cpus, size_t nr);

#endif
