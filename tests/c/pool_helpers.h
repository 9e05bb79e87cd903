/* Pools to test, client threads that wait for them, and a system that refuses memory on request.
 * For test_pool.c and test_pool_refused.c. */
#ifndef POOL_HELPERS_H
#define POOL_HELPERS_H

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "sfr.h"
#include "memory/pool.h"
#include "memory/pool_int.h"
#include "check.h"

#define KIB UINT64_C(1024)
#define MIB (KIB * KIB)
#define MS UINT64_C(1000000)

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* ---- a system that can be told to refuse ------------------------------------- */

static int refuse_populate, refuse_dontneed;  /* errno, or 0 */
static bool populate_first;                   /* refuse after the memory was made */
static void (*_Atomic during_populate)(void); /* called while threads populate */
static char *populated;                       /* the last address that was populated */
static atomic_int live_maps;                  /* mmap calls without their munmap */

static inline int fault_madvise(void *addr, size_t len, int advice)
{
	int err = 0;

	if (advice == MADV_DONTNEED)
		err = __atomic_load_n(&refuse_dontneed, __ATOMIC_SEQ_CST);
	if (advice == MADV_POPULATE_WRITE) {
		void (*during)(void) = during_populate;

		if (populate_first)
			(void)madvise(populated = addr, len, advice);
		if (during != NULL)
			during();
		err = __atomic_load_n(&refuse_populate, __ATOMIC_SEQ_CST);
	}
	if (err != 0) {
		errno = err;
		return -1;
	}
	return madvise(addr, len, advice);
}

static inline void *counted_mmap(void *addr, size_t len, int prot, int flags, int fd, off_t off)
{
	void *map = mmap(addr, len, prot, flags, fd, off);

	if (map != MAP_FAILED)
		live_maps++;
	return map;
}

static inline int counted_munmap(void *addr, size_t len)
{
	live_maps--;
	return munmap(addr, len);
}

static inline struct sfr__pool *make(uint64_t pool_bytes, uint64_t block_bytes)
{
	struct sfr__pool *pool = NULL;

	CHECK_EQ(sfr__pool_new(pool_bytes, block_bytes, false, &pool), 0);
	return pool;
}

static inline struct sfr__block *lease(struct sfr__pool *pool, size_t need)
{
	struct sfr__block *block = NULL;

	CHECK_EQ(sfr__pool_get(pool, 1, need, 0, &block), 0);
	return block;
}

static inline struct sfr__pool_stats stats(struct sfr__pool *pool)
{
	struct sfr__pool_stats out;

	sfr__pool_stats(pool, &out);
	return out;
}

static inline bool all_resident(const char *mem, size_t len)
{
	static unsigned char pages[16384];

	if (!CHECK(len / SFR_PAGE <= sizeof(pages)) ||
	    !CHECK_EQ(mincore((void *)(uintptr_t)mem, len, pages), 0))
		return false;
	for (size_t i = 0; i < len / SFR_PAGE; i++)
		if ((pages[i] & 1) == 0)
			return false;
	return true;
}

/* Returns whether the memory is readable, by asking the kernel: it returns EFAULT where a read
 * here would crash. */
static inline bool is_readable(const char *mem)
{
	int ends[2];
	bool readable;

	if (!CHECK_EQ(pipe(ends), 0))
		return false;
	readable = write(ends[1], mem, 1) == 1;
	(void)close(ends[0]);
	(void)close(ends[1]);
	return readable;
}

struct client {
	struct sfr__pool *pool;
	uint64_t seq, slice_ns;
	int rc;
	pthread_t thread;
	uint64_t *order; /* of served threads: where the next one is recorded */
};

static uint64_t served[8];
static int nr_served;

static inline void *wait_and_put(void *arg)
{
	struct client *me = arg;
	struct sfr__block *block;

	me->rc = sfr__pool_get(me->pool, me->seq, MIB, me->slice_ns, &block);
	if (me->rc != 0)
		return NULL;
	/* Only the thread that has the only block is here. */
	served[nr_served++] = me->seq;
	sfr__pool_put(me->pool, block);
	return NULL;
}

static inline void start_client(struct client *client, struct sfr__pool *pool, uint64_t seq,
				uint64_t slice_ns)
{
	uint32_t nr = stats(pool).nr_waiters;

	*client = (struct client){ .pool = pool, .seq = seq, .slice_ns = slice_ns, .rc = 1 };
	CHECK_EQ(pthread_create(&client->thread, NULL, wait_and_put, client), 0);
	while (stats(pool).nr_waiters == nr)
		(void)usleep(200);
}

/* Installs the functions above in the table. */
static inline void use_odd_system(void)
{
	sfr_sys.madvise = fault_madvise;
	sfr_sys.mmap = counted_mmap;
	sfr_sys.munmap = counted_munmap;
}

#endif
