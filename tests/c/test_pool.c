/* pool.c and memory.c: leases, their order, memory given and taken, and what is left when the
 * system refuses. */
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "../../csrc/core/sfr_internal.h"
#include "check.h"

#define KIB UINT64_C(1024)
#define MIB (KIB * KIB)
#define MS UINT64_C(1000000)

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* ---- a system that can be told to refuse ------------------------------------- */

static int refuse_populate, refuse_dontneed; /* errno, or 0 */
static bool populate_first;                  /* and refuse with the memory already there */
static void (*during_populate)(void);
static char *populated; /* where it was last asked for */
static int live_maps;   /* mmap calls that no munmap has undone */

static int odd_madvise(void *addr, size_t len, int advice)
{
	int err = 0;

	if (advice == MADV_DONTNEED)
		err = __atomic_load_n(&refuse_dontneed, __ATOMIC_SEQ_CST);
	if (advice == MADV_POPULATE_WRITE) {
		err = __atomic_load_n(&refuse_populate, __ATOMIC_SEQ_CST);
		if (populate_first)
			(void)madvise(populated = addr, len, advice);
		if (during_populate != NULL)
			during_populate();
	}
	if (err != 0) {
		errno = err;
		return -1;
	}
	return madvise(addr, len, advice);
}

static void *counted_mmap(void *addr, size_t len, int prot, int flags, int fd, off_t off)
{
	void *map = mmap(addr, len, prot, flags, fd, off);

	live_maps += map != MAP_FAILED;
	return map;
}

static int counted_munmap(void *addr, size_t len)
{
	live_maps--;
	return munmap(addr, len);
}

static struct sfr__pool *make(uint64_t pool_bytes, uint64_t block_bytes)
{
	struct sfr__pool *pool = NULL;

	CHECK_EQ(sfr__pool_new(pool_bytes, block_bytes, &pool), 0);
	return pool;
}

static struct sfr__block *lease(struct sfr__pool *pool, size_t need)
{
	struct sfr__block *block = NULL;

	CHECK_EQ(sfr__pool_get(pool, 1, need, 0, &block), 0);
	return block;
}

static struct sfr__pool_stats stats(struct sfr__pool *pool)
{
	struct sfr__pool_stats out;

	sfr__pool_stats(pool, &out);
	return out;
}

static bool all_resident(const char *mem, size_t len)
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

/* Asks the kernel, which says EFAULT where a read here would be a SIGSEGV. */
static bool is_readable(const char *mem)
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

/* ---- leases and memory ---------------------------------------------------------- */

static void a_pool_smaller_than_one_block_is_refused(void)
{
	struct sfr__pool *pool = NULL;

	CHECK_EQ(sfr__pool_new(MIB - 1, MIB, &pool), -EINVAL);
	CHECK_EQ(sfr__pool_new(0, MIB, &pool), -EINVAL);
	CHECK_EQ(sfr__pool_new(MIB, 0, &pool), -EINVAL);
	CHECK_EQ(sfr__pool_new(MIB, 5000, &pool), -EINVAL);
	CHECK_EQ(sfr__pool_new(UINT64_MAX, SFR_PAGE, &pool), -EINVAL);
	CHECK(pool == NULL);
	sfr__pool_free(NULL);
	pool = make(3 * MIB + 4096, MIB);
	CHECK_EQ(stats(pool).pool_bytes, 3 * MIB);
	CHECK_EQ(stats(pool).block_bytes, MIB);
	sfr__pool_free(pool);
}

static void blocks_are_apart_aligned_present_and_writable(void)
{
	struct sfr__pool *pool = make(4 * 4 * MIB, 4 * MIB);
	struct sfr__block *blocks[4];

	CHECK_EQ(stats(pool).committed_bytes, 0);
	for (int i = 0; i < 4; i++) {
		blocks[i] = lease(pool, 4 * MIB);
		CHECK_EQ((uintptr_t)blocks[i]->mem % (2 * MIB), 0);
		CHECK(all_resident(blocks[i]->mem, 4 * MIB));
		memset(blocks[i]->mem, i + 1, 4 * MIB);
	}
	for (int i = 0; i < 4; i++) {
		CHECK_EQ(blocks[i]->mem[0], i + 1);
		CHECK_EQ(blocks[i]->mem[4 * MIB - 1], i + 1);
	}
	CHECK_EQ(stats(pool).leased_bytes, 16 * MIB);
	for (int i = 0; i < 4; i++)
		sfr__pool_put(pool, blocks[i]);
	CHECK_EQ(stats(pool).leased_bytes, 0);
	CHECK_EQ(stats(pool).committed_bytes, 16 * MIB);
	sfr__pool_free(pool);
}

static void a_block_gets_as_much_memory_as_is_asked_for(void)
{
	struct sfr__pool *pool = make(64 * MIB, 16 * MIB);
	struct sfr__block *small = lease(pool, 1), *big, *middle;

	CHECK_EQ(small->committed, 2 * MIB);
	middle = lease(pool, 2 * MIB + 1);
	CHECK_EQ(middle->committed, 4 * MIB);
	big = lease(pool, 15 * MIB);
	CHECK_EQ(big->committed, 16 * MIB);
	CHECK_EQ(stats(pool).committed_bytes, 22 * MIB);
	CHECK_EQ(stats(pool).leased_bytes, 22 * MIB);
	sfr__pool_put(pool, big);
	sfr__pool_put(pool, middle);
	sfr__pool_put(pool, small);
	/* What fits and is smaller goes first, then what is whole, then what can grow. */
	CHECK(lease(pool, 2 * MIB) == small);
	CHECK(lease(pool, 16 * MIB) == big);
	CHECK(lease(pool, 16 * MIB) == middle);
	CHECK_EQ(middle->committed, 16 * MIB);
	CHECK_EQ(stats(pool).committed_bytes, 34 * MIB);
	CHECK(all_resident(middle->mem, 16 * MIB));
	sfr__pool_put(pool, small);
	sfr__pool_put(pool, big);
	sfr__pool_put(pool, middle);
	small = lease(pool, 0); /* no bytes: still a block, and memory to stand on */
	CHECK(small->committed > 0);
	sfr__pool_put(pool, small);
	sfr__pool_free(pool);

	pool = make(8 * SFR_PAGE, SFR_PAGE); /* never more than the block, and never none */
	small = lease(pool, 0);
	CHECK_EQ(small->committed, SFR_PAGE);
	sfr__pool_put(pool, small);
	small = lease(pool, 100);
	CHECK_EQ(small->committed, SFR_PAGE);
	sfr__pool_put(pool, small);
	sfr__pool_free(pool);
}

static void memory_is_used_again_and_not_asked_for_twice(void)
{
	struct sfr__pool *pool = make(64 * MIB, 4 * MIB);
	struct sfr__block *block;
	uint64_t before;

	CHECK_EQ(sfr_inject_install(), 0);
	for (int i = 0; i < 10; i++)
		sfr__pool_put(pool, lease(pool, 4 * MIB));
	CHECK_EQ(stats(pool).committed_bytes, 4 * MIB);
	before = sfr_inject_calls("madvise") + sfr_inject_calls("mprotect");
	block = lease(pool, 4 * MIB);
	sfr__pool_put(pool, block);
	CHECK_EQ(sfr_inject_calls("madvise") + sfr_inject_calls("mprotect"), before);
	sfr__pool_free(pool);
}

static void a_child_does_not_have_the_memory(void)
{
	struct sfr__pool *pool = make(4 * MIB, 4 * MIB);
	struct sfr__block *block = lease(pool, 4 * MIB);
	int status = 0, ends[2];
	char byte = 0;
	pid_t child;

	memset(block->mem, 0x5a, 4 * MIB);
	if (!CHECK_EQ(pipe(ends), 0))
		return;
	child = fork();
	if (child == 0)
		/* A read would be a SIGSEGV; the kernel says EFAULT. */
		_exit(write(ends[1], block->mem + 2 * MIB, 1) == 1 ? 1 : 0);
	CHECK(child > 0);
	CHECK_EQ(waitpid(child, &status, 0), child);
	/* A sanitizer may have put memory of its own into the gap. */
	CHECK(status == 0 || (read(ends[0], &byte, 1) == 1 && byte != 0x5a));
	(void)close(ends[0]);
	(void)close(ends[1]);
	sfr__pool_put(pool, block);
	sfr__pool_free(pool);
}

/* ---- waiting -------------------------------------------------------------------- */

static void an_empty_pool_says_so_when_the_slice_is_over(void)
{
	struct sfr__pool *pool = make(MIB, MIB);
	struct sfr__block *held = lease(pool, MIB), *block = held;
	uint64_t start;

	CHECK_EQ(sfr__pool_get(pool, 1, MIB, 0, &block), SFR_EAGAIN);
	CHECK(block == NULL);
	start = sfr__now_ns();
	CHECK_EQ(sfr__pool_get(pool, 1, MIB, 20 * MS, &block), SFR_EAGAIN);
	CHECK(sfr__now_ns() - start >= 20 * MS);
	CHECK_EQ(sfr__pool_get(pool, 1, MIB + 1, SFR_FOREVER, &block), -EINVAL);
	CHECK_EQ(stats(pool).nr_waiters, 0);
	sfr__pool_put(pool, held);
	sfr__pool_free(pool);
}

struct client {
	struct sfr__pool *pool;
	uint64_t seq, slice_ns;
	int rc;
	pthread_t thread;
	uint64_t *order; /* of those served: the next place */
};

static uint64_t served[8];
static int nr_served;

static void *wait_and_put(void *arg)
{
	struct client *me = arg;
	struct sfr__block *block;

	me->rc = sfr__pool_get(me->pool, me->seq, MIB, me->slice_ns, &block);
	if (me->rc != 0)
		return NULL;
	/* Only the holder of the only block is here. */
	served[nr_served++] = me->seq;
	sfr__pool_put(me->pool, block);
	return NULL;
}

static void start_client(struct client *client, struct sfr__pool *pool, uint64_t seq,
			 uint64_t slice_ns)
{
	uint32_t nr = stats(pool).nr_waiters;

	*client = (struct client){ .pool = pool, .seq = seq, .slice_ns = slice_ns, .rc = 1 };
	CHECK_EQ(pthread_create(&client->thread, NULL, wait_and_put, client), 0);
	while (stats(pool).nr_waiters == nr)
		(void)usleep(200);
}

static void the_oldest_save_is_served_first(void)
{
	static const uint64_t seqs[] = { 5, 3, 9, 1, 7, 3 };
	static const uint64_t expected[] = { 1, 3, 3, 5, 7, 9 };
	struct sfr__pool *pool = make(MIB, MIB);
	struct sfr__block *held = lease(pool, MIB);
	struct client clients[6];

	nr_served = 0;
	for (int i = 0; i < 6; i++)
		start_client(&clients[i], pool, seqs[i], SFR_FOREVER);
	sfr__pool_put(pool, held);
	for (int i = 0; i < 6; i++)
		CHECK_EQ(pthread_join(clients[i].thread, NULL), 0);
	for (int i = 0; i < 6; i++)
		CHECK_EQ(served[i], expected[i]);
	sfr__pool_free(pool);
}

static void a_newcomer_overtakes_only_who_is_younger(void)
{
	struct sfr__pool *pool = make(MIB, MIB);
	struct sfr__block *held, *block;
	struct client client;

	for (int i = 0; i < 200; i++) {
		held = lease(pool, MIB);
		nr_served = 0;
		start_client(&client, pool, 5, SFR_FOREVER);
		sfr__pool_put(pool, held);
		/* Whether the waiter is awake yet or not: it comes before this caller. */
		if (sfr__pool_get(pool, 6, MIB, 0, &block) == 0) {
			CHECK_EQ(nr_served, 1); /* it was served and has put already */
			sfr__pool_put(pool, block);
		}
		CHECK_EQ(pthread_join(client.thread, NULL), 0);
		CHECK_EQ(nr_served, 1);
	}
	held = lease(pool, MIB);
	start_client(&client, pool, 5, SFR_FOREVER);
	CHECK_EQ(sfr__pool_get(pool, 4, MIB, 0, &block), SFR_EAGAIN);
	sfr__pool_put(pool, held);
	CHECK_EQ(pthread_join(client.thread, NULL), 0);
	sfr__pool_free(pool);
}

static void a_waiter_that_gives_up_does_not_hold_up_the_next(void)
{
	struct sfr__pool *pool = make(MIB, MIB);
	struct sfr__block *held = lease(pool, MIB);
	struct client impatient, patient;

	nr_served = 0;
	start_client(&impatient, pool, 1, 30 * MS);
	start_client(&patient, pool, 2, SFR_FOREVER);
	CHECK_EQ(pthread_join(impatient.thread, NULL), 0);
	CHECK_EQ(impatient.rc, SFR_EAGAIN);
	sfr__pool_put(pool, held);
	CHECK_EQ(pthread_join(patient.thread, NULL), 0);
	CHECK_EQ(patient.rc, 0);
	sfr__pool_free(pool);
}

static bool stop;

static void *contend(void *arg)
{
	struct client *me = arg;
	uint64_t rng = me->seq * 7919 + 1;

	for (int i = 0; i < 1000; i++) {
		struct sfr__block *block;
		size_t need;

		rng = rng * UINT64_C(6364136223846793005) + 1;
		need = (size_t)(1 + (rng >> 33) % (4 * MIB));
		if (sfr__pool_get(me->pool, (uint64_t)i, need, i % 3 == 0 ? 0 : SFR_FOREVER,
				  &block) != 0)
			continue;
		/* Nobody else has it, and all that was asked for is there. */
		CHECK(block->committed >= need);
		*(volatile uint64_t *)block->mem = rng;
		block->mem[need - 1] = 1;
		if (i % 7 == 0)
			(void)usleep(10);
		CHECK(need < 16 || *(volatile uint64_t *)block->mem == rng);
		me->rc++;
		sfr__pool_put(me->pool, block);
	}
	return NULL;
}

static void *disturb(void *arg)
{
	struct sfr__pool *pool = arg;

	for (int i = 0; !__atomic_load_n(&stop, __ATOMIC_SEQ_CST); i++) {
		if (i % 2 == 0)
			CHECK_EQ(sfr__pool_trim(pool), 0);
		else
			CHECK_EQ(sfr__pool_warm_up(pool, 5 * MIB), 0);
		(void)usleep(500);
	}
	return NULL;
}

static void eight_threads_on_three_blocks_never_meet_in_one(void)
{
	struct sfr__pool *pool = make(12 * MIB, 4 * MIB);
	struct client clients[8];
	pthread_t other;

	stop = false;
	CHECK_EQ(pthread_create(&other, NULL, disturb, pool), 0);
	for (uint64_t i = 0; i < 8; i++) {
		clients[i] = (struct client){ .pool = pool, .seq = i };
		CHECK_EQ(pthread_create(&clients[i].thread, NULL, contend, &clients[i]), 0);
	}
	for (int i = 0; i < 8; i++) {
		CHECK_EQ(pthread_join(clients[i].thread, NULL), 0);
		CHECK(clients[i].rc >= 666); /* each get that waits is served */
	}
	__atomic_store_n(&stop, true, __ATOMIC_SEQ_CST);
	CHECK_EQ(pthread_join(other, NULL), 0);
	CHECK_EQ(stats(pool).leased_bytes, 0);
	CHECK_EQ(stats(pool).nr_waiters, 0);
	CHECK_EQ(sfr__pool_trim(pool), 0);
	CHECK_EQ(stats(pool).committed_bytes, 0);
	sfr__pool_free(pool);
}

/* ---- warm up and trim ------------------------------------------------------------- */

static void warm_up_gives_the_first_blocks_memory(void)
{
	struct sfr__pool *pool = make(64 * MIB, 8 * MIB);
	struct sfr__block *blocks[8];

	CHECK_EQ(sfr__pool_warm_up(pool, 0), 0);
	CHECK_EQ(stats(pool).committed_bytes, 0);
	CHECK_EQ(sfr__pool_warm_up(pool, 25 * MIB), 0);
	CHECK_EQ(stats(pool).committed_bytes, 26 * MIB); /* 8 + 8 + 8 + 2 */
	blocks[0] = lease(pool, 8 * MIB);
	blocks[1] = lease(pool, 8 * MIB);
	CHECK_EQ(sfr__pool_warm_up(pool, 25 * MIB), 0); /* nothing is left to do */
	CHECK_EQ(stats(pool).committed_bytes, 26 * MIB);
	CHECK_EQ(sfr__pool_warm_up(pool, UINT64_MAX), 0); /* clipped */
	CHECK_EQ(stats(pool).committed_bytes, 64 * MIB);
	for (int i = 2; i < 8; i++)
		blocks[i] = lease(pool, 8 * MIB);
	for (int i = 0; i < 8; i++) {
		CHECK(all_resident(blocks[i]->mem, 8 * MIB));
		sfr__pool_put(pool, blocks[i]);
	}
	sfr__pool_free(pool);
}

static void warm_up_needs_no_threads(void)
{
	struct sfr__pool *pool = make(64 * MIB, 8 * MIB);
	struct sfr_fault fault = { "thread_create", 1, 1, EAGAIN, -1, 0 };

	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr_inject_set(&fault), 0);
	CHECK_EQ(sfr__pool_warm_up(pool, 64 * MIB), 0);
	CHECK(sfr_inject_hits() > 0);
	sfr_inject_clear();
	CHECK_EQ(stats(pool).committed_bytes, 64 * MIB);
	sfr__pool_free(pool);
}

static void trim_gives_free_memory_back_and_leaves_leases_alone(void)
{
	struct sfr__pool *pool = make(64 * MIB, 8 * MIB);
	struct sfr__block *held = lease(pool, 8 * MIB), *block;
	char *mem;

	CHECK_EQ(sfr__pool_warm_up(pool, 64 * MIB), 0);
	memset(held->mem, 7, 8 * MIB);
	block = lease(pool, 1);
	mem = block->mem;
	mem[0] = 9;
	sfr__pool_put(pool, block);
	CHECK_EQ(sfr__pool_trim(pool), 0);
	CHECK_EQ(stats(pool).committed_bytes, 8 * MIB);
	CHECK(!all_resident(mem, SFR_PAGE));
	CHECK(!is_readable(mem)); /* a late copy into it would be seen */
	CHECK_EQ(held->mem[0] + held->mem[8 * MIB - 1], 14);
	for (int i = 0; i < 7; i++) {
		block = lease(pool, 8 * MIB);
		CHECK_EQ(block->mem[0], 0);
		block->mem[8 * MIB - 1] = 1;
		CHECK_EQ(sfr__pool_trim(pool), 0); /* it is leased: it stays */
	}
	CHECK_EQ(stats(pool).leased_bytes, 64 * MIB);
	CHECK_EQ(sfr__pool_get(pool, 1, 1, 0, &block), SFR_EAGAIN);
	sfr__pool_put(pool, held);
	sfr__pool_free(pool); /* even with leases out nothing leaks */
}

/* ---- a system without memory --------------------------------------------------------- */

static void an_old_kernel_has_its_pages_touched(void)
{
	static const int errs[] = { EINVAL, EPERM, ENOSYS, EINTR };

	for (int i = 0; i < 4; i++) {
		struct sfr__pool *pool = make(8 * MIB, 8 * MIB);
		struct sfr__block *block;

		refuse_populate = errs[i];
		block = lease(pool, 8 * MIB);
		refuse_populate = 0;
		CHECK(all_resident(block->mem, 8 * MIB));
		sfr__pool_put(pool, block);
		sfr__pool_free(pool);
	}
}

static void without_memory_a_get_waits_for_who_has_some(void)
{
	struct sfr__pool *pool = make(4 * MIB, MIB);
	struct sfr__block *held, *block;
	struct client first, second;

	refuse_populate = ENOMEM;
	CHECK_EQ(sfr__pool_get(pool, 1, MIB, SFR_FOREVER, &block), -ENOMEM);
	CHECK(block == NULL);
	CHECK_EQ(stats(pool).committed_bytes, 0);
	refuse_populate = 0;
	held = lease(pool, MIB);
	refuse_populate = ENOMEM;
	CHECK_EQ(sfr__pool_get(pool, 1, MIB, 0, &block), SFR_EAGAIN);
	CHECK_EQ(sfr__pool_get(pool, 1, MIB, 10 * MS, &block), SFR_EAGAIN);
	nr_served = 0;
	start_client(&first, pool, 1, SFR_FOREVER);
	start_client(&second, pool, 2, SFR_FOREVER);
	(void)usleep(20000);
	CHECK_EQ(stats(pool).nr_waiters, 2); /* neither gave up, neither is served */
	sfr__pool_put(pool, held);
	CHECK_EQ(pthread_join(first.thread, NULL), 0);
	CHECK_EQ(pthread_join(second.thread, NULL), 0);
	CHECK_EQ(first.rc, 0);
	CHECK_EQ(second.rc, 0);
	/* And with the block free, it is what is given. */
	CHECK_EQ(sfr__pool_get(pool, 1, MIB, 0, &block), 0);
	CHECK(block == held);
	sfr__pool_put(pool, block);
	refuse_populate = 0;
	CHECK_EQ(stats(pool).committed_bytes, MIB);
	sfr__pool_free(pool);
}

/* The kernel may have given a part of it when it runs out. */
static void memory_that_came_before_the_refusal_is_given_back(void)
{
	struct sfr__pool *pool = make(8 * MIB, 8 * MIB);
	struct sfr__block *block;

	populate_first = true;
	refuse_populate = ENOMEM;
	CHECK_EQ(sfr__pool_get(pool, 1, 8 * MIB, 0, &block), -ENOMEM);
	populate_first = false;
	refuse_populate = 0;
	CHECK(!all_resident(populated, SFR_PAGE));
	CHECK(!is_readable(populated));
	sfr__pool_free(pool);
}

static struct sfr__pool *the_pool;
static struct sfr__block *to_put;

static void put_now(void)
{
	if (to_put != NULL)
		sfr__pool_put(the_pool, to_put);
	to_put = NULL;
}

static void a_block_that_comes_back_during_the_refusal_is_taken(void)
{
	struct sfr__block *block, *held;

	the_pool = make(8 * MIB, 4 * MIB);
	to_put = held = lease(the_pool, 4 * MIB);
	refuse_populate = ENOMEM;
	during_populate = put_now;
	CHECK_EQ(sfr__pool_get(the_pool, 1, 4 * MIB, SFR_FOREVER, &block), 0);
	during_populate = NULL;
	refuse_populate = 0;
	CHECK(block == held);
	sfr__pool_put(the_pool, held);
	sfr__pool_free(the_pool);
}

static void *want_4_mib_for_a_while(void *arg)
{
	struct client *me = arg;
	struct sfr__block *block;

	me->rc = sfr__pool_get(me->pool, me->seq, 4 * MIB, me->slice_ns, &block);
	return NULL;
}

/* The younger one could go on with what there is, and does as soon as it is its turn. */
static void one_that_found_no_memory_and_gives_up_wakes_the_next(void)
{
	struct sfr__pool *pool = make(8 * MIB, 4 * MIB);
	struct sfr__block *held = lease(pool, 4 * MIB), *partial = lease(pool, 1);
	struct client old, young;

	sfr__pool_put(pool, partial);
	refuse_populate = ENOMEM;
	nr_served = 0;
	old = (struct client){ .pool = pool, .seq = 1, .slice_ns = 100 * MS };
	CHECK_EQ(pthread_create(&old.thread, NULL, want_4_mib_for_a_while, &old), 0);
	while (stats(pool).nr_waiters == 0)
		(void)usleep(200);
	start_client(&young, pool, 2, SFR_FOREVER);
	CHECK_EQ(pthread_join(old.thread, NULL), 0);
	CHECK_EQ(old.rc, SFR_EAGAIN);
	CHECK_EQ(pthread_join(young.thread, NULL), 0);
	CHECK_EQ(young.rc, 0);
	refuse_populate = 0;
	sfr__pool_put(pool, held);
	sfr__pool_free(pool);
}

static void those_who_find_no_memory_at_the_same_time_all_hear_of_it(void)
{
	struct sfr__pool *pool = make(8 * MIB, 4 * MIB);
	struct sfr__block *held = lease(pool, 1); /* 2 MiB: too little for the others */
	struct client clients[4];

	refuse_populate = ENOMEM;
	for (uint64_t i = 0; i < 4; i++) {
		clients[i] = (struct client){ .pool = pool, .seq = i, .slice_ns = SFR_FOREVER };
		CHECK_EQ(pthread_create(&clients[i].thread, NULL, wait_and_put, &clients[i]), 0);
	}
	(void)usleep(20000);
	sfr__pool_put(pool, held);
	for (int i = 0; i < 4; i++) {
		CHECK_EQ(pthread_join(clients[i].thread, NULL), 0);
		/* The small block is enough for a need of 1 MiB. */
		CHECK_EQ(clients[i].rc, 0);
	}
	CHECK_EQ(sfr__pool_trim(pool), 0);
	for (uint64_t i = 0; i < 4; i++) {
		clients[i] = (struct client){ .pool = pool, .seq = i, .slice_ns = SFR_FOREVER };
		CHECK_EQ(pthread_create(&clients[i].thread, NULL, wait_and_put, &clients[i]), 0);
	}
	for (int i = 0; i < 4; i++) {
		CHECK_EQ(pthread_join(clients[i].thread, NULL), 0);
		CHECK_EQ(clients[i].rc, -ENOMEM);
	}
	refuse_populate = 0;
	CHECK_EQ(stats(pool).committed_bytes, 0);
	sfr__pool_free(pool);
}

/* One life of a pool. Every call may fail; what it did is told by the figures. */
static void live(struct check_runs *run)
{
	struct sfr__pool *pool = NULL;
	struct sfr__block *blocks[3];
	uint64_t leased = 0;
	int rc;

	rc = sfr__pool_new(12 * MIB, 4 * MIB, &pool);
	CHECK(rc == 0 || (rc == -run->err && check_acted(run)) || rc == -ENOMEM);
	CHECK((rc == 0) == (pool != NULL));
	if (pool == NULL)
		return;
	for (int i = 0; i < 3; i++) {
		rc = sfr__pool_get(pool, 1, i == 0 ? 1 : 4 * MIB, 0, &blocks[i]);
		CHECK(rc == 0 || check_acted(run));
		/* With a block in somebody's hands, the want of memory may pass. */
		CHECK(rc == 0 || rc == (leased != 0 ? SFR_EAGAIN : -run->err));
		CHECK((rc == 0) == (blocks[i] != NULL));
		leased += blocks[i] != NULL ? blocks[i]->committed : 0;
	}
	CHECK_EQ(stats(pool).leased_bytes, leased);
	for (int i = 0; i < 3; i++)
		if (blocks[i] != NULL)
			sfr__pool_put(pool, blocks[i]);
	for (int i = 0; i < 2; i++) {
		rc = sfr__pool_trim(pool);
		CHECK(rc == 0 || (rc == -run->err && check_acted(run)));
		rc = sfr__pool_warm_up(pool, 12 * MIB);
		CHECK(rc == 0 || (rc == -run->err && check_acted(run)));
	}
	check_heal(run);

	/* The pool is whole: every block can be had, and all memory given back. */
	CHECK_EQ(stats(pool).leased_bytes, 0);
	for (int i = 0; i < 3; i++) {
		blocks[i] = lease(pool, 4 * MIB);
		if (blocks[i] != NULL)
			memset(blocks[i]->mem, 1, 4 * MIB);
	}
	for (int i = 0; i < 3; i++)
		if (blocks[i] != NULL)
			sfr__pool_put(pool, blocks[i]);
	CHECK_EQ(sfr__pool_trim(pool), 0);
	CHECK_EQ(stats(pool).committed_bytes, 0);
	sfr__pool_free(pool);
}

static void the_pool_is_whole_after_every_failure(void)
{
	static const char *const calls[] = { "*",      "mmap",   "madvise",      "mprotect",
					     "calloc", "malloc", "thread_create" };
	static const int errs[] = { ENOMEM, EAGAIN, EACCES };

	for (int i = 0; i < 7; i++) {
		for (int j = 0; j < 3; j++) {
			int before = live_maps;

			FOR_EVERY_FAILURE(run, calls[i], errs[j])
			live(&run);
			/* Where munmap fails too there is one more, of course. */
			CHECK(i == 0 || live_maps == before);
		}
	}
}

static void every_arrow_of_the_diagram_is_taken_and_no_other(void)
{
	static const bool arrows[SFR__NR_BLOCK_STATES][SFR__NR_BLOCK_STATES] = {
		[SFR__BLOCK_RESERVED] = { [SFR__BLOCK_GROWING] = true },
		[SFR__BLOCK_FREE] = { [SFR__BLOCK_GROWING] = true,
				      [SFR__BLOCK_LEASED] = true,
				      [SFR__BLOCK_SHRINKING] = true },
		[SFR__BLOCK_GROWING] = { [SFR__BLOCK_LEASED] = true,
					 [SFR__BLOCK_FREE] = true,
					 [SFR__BLOCK_RESERVED] = true },
		[SFR__BLOCK_LEASED] = { [SFR__BLOCK_FREE] = true },
		[SFR__BLOCK_SHRINKING] = { [SFR__BLOCK_RESERVED] = true, [SFR__BLOCK_FREE] = true },
	};
	struct sfr__pool *pool = make(8 * MIB, 4 * MIB);
	struct sfr__block *block;

	refuse_populate = ENOMEM;
	CHECK_EQ(sfr__pool_get(pool, 1, 1, 0, &block), -ENOMEM); /* R -> G -> R */
	refuse_populate = 0;
	sfr__pool_put(pool, lease(pool, 1)); /* R -> G -> L -> F */
	sfr__pool_put(pool, lease(pool, 1)); /* F -> L -> F */
	refuse_populate = ENOMEM;
	CHECK_EQ(sfr__pool_get(pool, 1, 4 * MIB, 0, &block), -ENOMEM); /* F -> G -> F */
	CHECK_EQ(sfr__pool_warm_up(pool, 8 * MIB), -ENOMEM);
	refuse_populate = 0;
	CHECK_EQ(stats(pool).committed_bytes, 2 * MIB);
	refuse_dontneed = EAGAIN;
	CHECK_EQ(sfr__pool_trim(pool), -EAGAIN); /* F -> S -> F */
	refuse_dontneed = 0;
	CHECK_EQ(stats(pool).committed_bytes, 2 * MIB);
	CHECK_EQ(sfr__pool_trim(pool), 0); /* F -> S -> R */
	CHECK_EQ(sfr__pool_warm_up(pool, 8 * MIB), 0);
	for (int from = 0; from < SFR__NR_BLOCK_STATES; from++)
		for (int to = 0; to < SFR__NR_BLOCK_STATES; to++)
			CHECK_EQ(sfr__pool_moves(pool, (enum sfr__block_state)from,
						 (enum sfr__block_state)to) != 0,
				 arrows[from][to]);
	sfr__pool_free(pool);
}

int main(void)
{
	sfr_sys.madvise = odd_madvise;
	sfr_sys.mmap = counted_mmap;
	sfr_sys.munmap = counted_munmap;
	RUN(a_pool_smaller_than_one_block_is_refused);
	RUN(blocks_are_apart_aligned_present_and_writable);
	RUN(a_block_gets_as_much_memory_as_is_asked_for);
	RUN(memory_is_used_again_and_not_asked_for_twice);
	RUN(a_child_does_not_have_the_memory);
	RUN(an_empty_pool_says_so_when_the_slice_is_over);
	RUN(the_oldest_save_is_served_first);
	RUN(a_newcomer_overtakes_only_who_is_younger);
	RUN(a_waiter_that_gives_up_does_not_hold_up_the_next);
	RUN(eight_threads_on_three_blocks_never_meet_in_one);
	RUN(warm_up_gives_the_first_blocks_memory);
	RUN(warm_up_needs_no_threads);
	RUN(trim_gives_free_memory_back_and_leaves_leases_alone);
	RUN(an_old_kernel_has_its_pages_touched);
	RUN(without_memory_a_get_waits_for_who_has_some);
	RUN(memory_that_came_before_the_refusal_is_given_back);
	RUN(a_block_that_comes_back_during_the_refusal_is_taken);
	RUN(one_that_found_no_memory_and_gives_up_wakes_the_next);
	RUN(those_who_find_no_memory_at_the_same_time_all_hear_of_it);
	RUN(the_pool_is_whole_after_every_failure);
	RUN(every_arrow_of_the_diagram_is_taken_and_no_other);
	return check_done();
}
