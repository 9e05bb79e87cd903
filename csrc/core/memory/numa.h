/* Makes memory from CPUs near a device. numa.c implements it. */
#ifndef SFR_NUMA_H
#define SFR_NUMA_H

#include <sched.h>

#include "base/base.h"

struct sfr__numa {
	cpu_set_t before; /* CPUs that the thread was allowed to use */
	bool moved;
};

/* Moves the calling thread to CPUs of this NUMA node until sfr__numa_end, if it may; -1: no move.
 * The thread must not end in between. */
void sfr__numa_begin(struct sfr__numa *near, int node);
void sfr__numa_end(const struct sfr__numa *near);
/* Parses the kernel's lists, such as "0-3,8,10-11\n". False if the text is not one. */
bool sfr__cpus_parse(const char *text, cpu_set_t *cpus);

#endif
