/* pool.c: leases, their order, and memory that is given and taken while the system has enough. */
#include "pool_helpers.h"

/* ---- leases and memory ---------------------------------------------------------- */

TEST(a_pool_smaller_than_one_block_is_refused)
{
	struct sfr__pool *pool = NULL;

	CHECK_EQ(sfr__pool_new(MIB - 1, MIB, false, &pool), -EINVAL);
	CHECK_EQ(sfr__pool_new(0, MIB, false, &pool), -EINVAL);
	CHECK_EQ(sfr__pool_new(MIB, 0, false, &pool), -EINVAL);
	CHECK_EQ(sfr__pool_new(MIB, 5000, false, &pool), -EINVAL);
	CHECK_EQ(sfr__pool_new(UINT64_MAX, SFR_PAGE, false, &pool), -EINVAL);
	CHECK(pool == NULL);
	sfr__pool_free(NULL);
	pool = make(3 * MIB + 4096, MIB);
	CHECK_EQ(stats(pool).pool_bytes, 3 * MIB);
	CHECK_EQ(stats(pool).block_bytes, MIB);
	sfr__pool_free(pool);
}

TEST(blocks_are_disjoint_aligned_present_and_writable)
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

TEST(block_gets_the_requested_memory)
{
	struct sfr__pool *pool = make(64 * MIB, 16 * MIB);
	struct sfr__block *small = lease(pool, 1), *big, *middle, *fresh;

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
	/* A smaller free block that fits is taken first, then a whole one, then a new one. Small
	 * blocks grow only if there is no other. */
	CHECK(lease(pool, 2 * MIB) == small);
	CHECK(lease(pool, 16 * MIB) == big);
	fresh = lease(pool, 16 * MIB);
	CHECK(fresh != middle);
	CHECK_EQ(stats(pool).committed_bytes, 38 * MIB);
	CHECK(lease(pool, 16 * MIB) == middle);
	CHECK_EQ(middle->committed, 16 * MIB);
	CHECK_EQ(stats(pool).committed_bytes, 50 * MIB);
	CHECK(all_resident(middle->mem, 16 * MIB));
	sfr__pool_put(pool, small);
	sfr__pool_put(pool, big);
	sfr__pool_put(pool, middle);
	sfr__pool_put(pool, fresh);
	small = lease(pool, 0); /* no bytes: still a block, with some memory */
	CHECK(small->committed > 0);
	sfr__pool_put(pool, small);
	sfr__pool_free(pool);

	pool = make(8 * SFR_PAGE, SFR_PAGE); /* never more memory than the block, and never none */
	small = lease(pool, 0);
	CHECK_EQ(small->committed, SFR_PAGE);
	sfr__pool_put(pool, small);
	small = lease(pool, 100);
	CHECK_EQ(small->committed, SFR_PAGE);
	sfr__pool_put(pool, small);
	sfr__pool_free(pool);
}

TEST(block_memory_is_reused)
{
	struct sfr__pool *pool = make(64 * MIB, 4 * MIB);
	struct sfr__block *block;
	uint64_t before;

	CHECK_EQ(sfr_inject_install(), 0);
	for (int i = 0; i < 10; i++)
		sfr__pool_put(pool, lease(pool, 4 * MIB));
	CHECK_EQ(stats(pool).committed_bytes, 4 * MIB);
	before = sfr_inject_count_calls("madvise") + sfr_inject_count_calls("mprotect");
	block = lease(pool, 4 * MIB);
	sfr__pool_put(pool, block);
	CHECK_EQ(sfr_inject_count_calls("madvise") + sfr_inject_count_calls("mprotect"), before);
	sfr__pool_free(pool);
}

TEST(forked_child_has_no_pool_memory)
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
		/* A read would crash; write(2) reports EFAULT instead. */
		_exit(write(ends[1], block->mem + 2 * MIB, 1) == 1 ? 1 : 0);
	CHECK(child > 0);
	CHECK_EQ(waitpid(child, &status, 0), child);
	(void)close(ends[1]);
	/* A sanitizer may have mapped memory in the gap, and valgrind may return another status. */
	CHECK(read(ends[0], &byte, 1) != 1 || byte != 0x5a);
	(void)close(ends[0]);
	sfr__pool_put(pool, block);
	sfr__pool_free(pool);
}

/* ---- waiting -------------------------------------------------------------------- */

TEST(get_from_an_empty_pool_ends_with_its_slice)
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

TEST(the_oldest_save_is_served_first)
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

TEST(older_save_is_served_before_younger_waiters)
{
	struct sfr__pool *pool = make(MIB, MIB);
	struct sfr__block *held, *block;
	struct client client;

	for (int i = 0; i < 200; i++) {
		held = lease(pool, MIB);
		nr_served = 0;
		start_client(&client, pool, 5, SFR_FOREVER);
		sfr__pool_put(pool, held);
		/* Whether or not the waiting thread is awake, it is served before this caller. */
		if (sfr__pool_get(pool, 6, MIB, 0, &block) == 0) {
			CHECK_EQ(nr_served, 1); /* it was served and has put the block back */
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

TEST(waiter_that_gives_up_does_not_block_the_next)
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
		/* No other thread has the block, and it has the requested memory. */
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

TEST(no_block_is_leased_to_two_threads_at_once)
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
		CHECK(clients[i].rc >= 666); /* each waiting get was served */
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

TEST(warm_up_gives_memory_to_the_first_blocks)
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
	CHECK_EQ(sfr__pool_warm_up(pool, UINT64_MAX), 0); /* at most the cap */
	CHECK_EQ(stats(pool).committed_bytes, 64 * MIB);
	for (int i = 2; i < 8; i++)
		blocks[i] = lease(pool, 8 * MIB);
	for (int i = 0; i < 8; i++) {
		CHECK(all_resident(blocks[i]->mem, 8 * MIB));
		sfr__pool_put(pool, blocks[i]);
	}
	sfr__pool_free(pool);
}

TEST(warm_up_works_without_threads)
{
	struct sfr__pool *pool = make(64 * MIB, 8 * MIB);
	struct sfr_fault fault = { "thread_create", 1, 1, EAGAIN, -1, 0 };

	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr_inject_add_fault(&fault), 0);
	CHECK_EQ(sfr__pool_warm_up(pool, 64 * MIB), 0);
	CHECK(sfr_inject_hits() > 0);
	sfr_inject_clear();
	CHECK_EQ(stats(pool).committed_bytes, 64 * MIB);
	sfr__pool_free(pool);
}

TEST(trim_frees_only_unleased_memory)
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
	CHECK(!is_readable(mem)); /* a late copy into it would crash */
	CHECK_EQ(held->mem[0] + held->mem[8 * MIB - 1], 14);
	for (int i = 0; i < 7; i++) {
		block = lease(pool, 8 * MIB);
		CHECK_EQ(block->mem[0], 0);
		block->mem[8 * MIB - 1] = 1;
		CHECK_EQ(sfr__pool_trim(pool), 0); /* it is leased, so it stays */
	}
	CHECK_EQ(stats(pool).leased_bytes, 64 * MIB);
	CHECK_EQ(sfr__pool_get(pool, 1, 1, 0, &block), SFR_EAGAIN);
	sfr__pool_put(pool, held);
	sfr__pool_free(pool); /* nothing leaks, even with leased blocks */
}

BEGIN
{
	use_odd_system();
	return true;
}
