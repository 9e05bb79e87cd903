/* Giving memory to blocks from CPUs near a device. See numa.c. */
#ifndef SFR_NUMA_H
#define SFR_NUMA_H

#include <sched.h>

#include "base/base.h"

struct sfr__numa {
	cpu_set_t before; /* where the thread may run */
	bool moved;
};

/* The calling thread runs on CPUs of this NUMA node until sfr__numa_end, if it may (-1: it stays
 * where it is). Between the two it must not end. */
void sfr__numa_begin(struct sfr__numa *near, int node);
void sfr__numa_end(const struct sfr__numa *near);
/* Reads the kernel's lists, "0-3,8,10-11\n". False where the text is none. */
bool sfr__cpus_parse(const char *text, cpu_set_t *cpus);

#endif
