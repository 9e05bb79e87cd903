/* Memory near a device: on the device's NUMA node.
 *
 * A page is on the node of the thread that first touches it. The call mbind would set the node
 * directly, but containers often refuse that call, while a thread may always choose among its CPUs.
 * So a thread that makes memory for device copies moves to a CPU of the node, and afterwards
 * returns to the CPUs it was allowed before.
 *
 * This only affects speed. Where it is impossible (a single node, a node outside the process's
 * CPUs, a sandbox without sysfs), memory comes from the thread's own node. */
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

/* Reads the CPUs of a node. False when the system does not list them. */
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
	(void)sfr__fd_close(fd); /* nothing to lose: it was only read */
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
	CPU_AND(&cpus, &cpus, &near->before); /* only CPUs that the thread was allowed to use */
	if (CPU_COUNT(&cpus) == 0 || CPU_EQUAL(&cpus, &near->before))
		return;
	near->moved = sfr_sys.set_affinity(&cpus) == 0;
}

void sfr__numa_end(const struct sfr__numa *near)
{
	/* This fails only if the CPUs were taken from the whole process meanwhile. The kernel has
	 * then moved the thread already. */
	if (near->moved)
		(void)sfr_sys.set_affinity(&near->before);
}
