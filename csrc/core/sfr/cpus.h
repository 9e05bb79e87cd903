/* The CPUs that the core's threads run on. See base/cpus.c. */
#ifndef SFR_CPUS_H
#define SFR_CPUS_H

#include <stddef.h>

/* Sets the CPUs of threads that the core starts from now on. With nr == 0 each thread inherits the
 * CPUs of the thread that starts it. Returns 0; or -EINVAL, with nothing changed, if `cpus` has a
 * number that no CPU can have. Any thread may call it. */
int sfr_cpus_set_for_new_threads(const int *cpus, size_t nr);

#endif
