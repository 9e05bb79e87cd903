/* Memory near a device: on the NUMA node that it hangs on.
 *
 * A page lies on the node of the thread that touches it first. mbind would say so outright, but
 * containers refuse that call more often than not; where a thread may run is its own business. So
 * who gives memory to blocks of a pool that a device copies into does that from one of the node's
 * CPUs, and goes back to where it was allowed to run before.
 *
 * All of it is only faster. Where something is not to be had (a single node, a node outside the
 * process's own set of CPUs, a sandbox without sysfs) memory is taken from where the thread is.
 */
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "memory/numa.h"

enum { MAX_LIST = 4096 };

bool sfr__cpus_parse(const char *text, cpu_set_t *cpus)
{
	CPU_ZERO(cpus);
	while (*text >= '0' && *text <= '9') {
		char *end;
		unsigned long first = strtoul(text, &end, 10), last = first;

		if (*end == '-')
			last = strtoul(end + 1, &end, 10);
		if (last < first || last >= CPU_SETSIZE)
			return false;
		for (; first <= last; first++)
			CPU_SET(first, cpus);
		text = end + (*end == ',');
	}
	return *text == '\n' || *text == '\0';
}

/* The CPUs of a node. False when the system does not tell. */
static bool cpus_of(int node, cpu_set_t *cpus)
{
	char path[64], text[MAX_LIST];
	ssize_t len;
	int fd;

	(void)snprintf(path, sizeof(path), "/sys/devices/system/node/node%d/cpulist", node);
	fd = sfr__fd_open(path, O_RDONLY, 0);
	if (fd < 0)
		return false;
	len = sfr_sys.pread(fd, text, sizeof(text) - 1, 0);
	(void)sfr__fd_close(fd); /* only read from */
	if (len <= 0)
		return false;
	text[len] = '\0';
	return sfr__cpus_parse(text, cpus);
}

void sfr__numa_begin(struct sfr__numa *near, int node)
{
	cpu_set_t cpus;

	near->moved = false;
	if (node < 0 || sfr_sys.get_affinity(&near->before) != 0 || !cpus_of(node, &cpus))
		return;
	CPU_AND(&cpus, &cpus, &near->before); /* never where it was not allowed to run */
	if (CPU_COUNT(&cpus) == 0 || CPU_EQUAL(&cpus, &near->before))
		return;
	near->moved = sfr_sys.set_affinity(&cpus) == 0;
}

void sfr__numa_end(const struct sfr__numa *near)
{
	/* What it was allowed a moment ago it is allowed now, but for CPUs that were taken from
	 * the whole process meanwhile: then the kernel has moved it already. */
	if (near->moved)
		(void)sfr_sys.set_affinity(&near->before);
}
