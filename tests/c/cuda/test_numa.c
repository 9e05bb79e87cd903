/* Where a device is, and threads that give memory near it: what the system tells is a test's, open()
 * of /sys is led to a directory of its own. */
#include <errno.h>
#include <sys/stat.h>

#include "cuda/fake.h"
#include "fix_system.h"
#include "memory/numa.h"

static struct sfr_sys plain;
static cpu_set_t allowed, wanted[4];
static unsigned nr_moves;

static int redirected_open(int at, const char *path, int flags, mode_t mode)
{
	if (strncmp(path, "/sys/", 5) != 0)
		return plain.open(at, path, flags, mode);
	return openat(at, system_path(path), flags, mode);
}

static int told_affinity(cpu_set_t *cpus)
{
	*cpus = allowed;
	return 0;
}

static int noted_affinity(const cpu_set_t *cpus)
{
	if (CHECK(nr_moves < 4))
		wanted[nr_moves++] = *cpus;
	return 0;
}

/* The kernel's name is in lower case, the driver's is not. */
TEST(a_devices_node_is_what_the_kernel_says_of_its_bus)
{
	const struct sfr__cuda *cu = sfr__cuda_get(NULL, 0);
	struct sfr_engine *engine;
	char why[160];

	fake.fake_cuda_reset();
	CHECK_EQ(sfr__cuda_node(cu, 0), -1);
	tell("/sys/bus/pci/devices/ffff:00:00.0/numa_node", "3                             \n");
	tell("/sys/bus/pci/devices/ffff:01:00.0/numa_node", "none\n");
	CHECK_EQ(sfr__cuda_node(cu, 0), 3);
	CHECK_EQ(sfr__cuda_node(cu, 1), -1);
	fake.fake_cuda_fail("cuDeviceGet", 1, 0, 1);
	CHECK_EQ(sfr__cuda_node(cu, 0), -1);
	fake.fake_cuda_reset();
	engine = fake_engine(4, 1);
	CHECK_EQ(sfr__pin_node(sfr__pool_pin(engine->pool)), -1);
	CHECK_EQ(sfr_engine_use_device(engine, 0, why, sizeof(why)), 0);
	CHECK_EQ(sfr__pin_node(sfr__pool_pin(engine->pool)), 3);
	fake_end(engine);
}

TEST(a_thread_goes_to_cpus_of_the_node_that_it_may_use_and_back)
{
	static char much[3 * 4096];
	struct sfr__numa near;
	int before = nr_fds();

	CPU_ZERO(&allowed);
	CPU_SET(0, &allowed);
	CPU_SET(1, &allowed);
	tell("/sys/devices/system/node/node3/cpulist", "1,5\n");
	nr_moves = 0;
	sfr__numa_begin(&near, 3);
	CHECK_EQ(nr_moves, 1);
	CHECK(CPU_COUNT(&wanted[0]) == 1 && CPU_ISSET(1, &wanted[0]));
	sfr__numa_end(&near);
	CHECK_EQ(nr_moves, 2);
	CHECK(CPU_EQUAL(&wanted[1], &allowed));
	/* No CPU of the node is ours, all of ours are, nobody tells, or too much is told. */
	tell("/sys/devices/system/node/node4/cpulist", "5-6\n");
	tell("/sys/devices/system/node/node5/cpulist", "0-6\n");
	memset(much, ' ', sizeof(much) - 1);
	memcpy(much, "1", 1);
	tell("/sys/devices/system/node/node7/cpulist", much);
	for (int node = 4; node < 8; node++) {
		sfr__numa_begin(&near, node);
		sfr__numa_end(&near);
	}
	CHECK_EQ(nr_moves, 2);
	CHECK_EQ(nr_fds(), before);
}

int main(void)
{
	char command[64];

	if (!fake_load())
		return CHECK_SKIPPED;
	if (!CHECK(mkdtemp(root) != NULL))
		return check_done();
	plain = sfr_sys;
	sfr_sys.open = redirected_open;
	sfr_sys.get_affinity = told_affinity;
	sfr_sys.set_affinity = noted_affinity;
	check_run();
	(void)snprintf(command, sizeof(command), "rm -rf %s", root);
	CHECK_EQ(system(command), 0);
	return check_done();
}
