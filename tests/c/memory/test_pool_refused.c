/* pool.c and range.c when the system refuses memory: which threads wait, which get an error, and
 * that the pool is intact afterwards. The last test checks that every arrow of the diagram in
 * pool.c was taken. */
#include "pool_helpers.h"

TEST(pages_are_touched_where_madvise_is_unknown)
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

TEST(get_without_memory_waits_for_leased_blocks)
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
	while (stats(pool).nr_waiters < 2)
		(void)usleep(200);
	CHECK_EQ(nr_served, 0); /* neither waiter has given up or been served */
	sfr__pool_put(pool, held);
	CHECK_EQ(pthread_join(first.thread, NULL), 0);
	CHECK_EQ(pthread_join(second.thread, NULL), 0);
	CHECK_EQ(first.rc, 0);
	CHECK_EQ(second.rc, 0);
	/* A free block is given instead of an error. */
	CHECK_EQ(sfr__pool_get(pool, 1, MIB, 0, &block), 0);
	CHECK(block == held);
	sfr__pool_put(pool, block);
	refuse_populate = 0;
	CHECK_EQ(stats(pool).committed_bytes, MIB);
	sfr__pool_free(pool);
}

/* The kernel may have given part of the memory before it ran out. */
TEST(partial_memory_is_returned_after_a_refusal)
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

TEST(get_takes_a_block_that_returns_while_the_system_refuses_memory)
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

static void *get_4_mib(void *arg)
{
	struct client *me = arg;
	struct sfr__block *block;

	me->rc = sfr__pool_get(me->pool, me->seq, 4 * MIB, me->slice_ns, &block);
	return NULL;
}

/* No block of another thread comes back; the memory that a warm-up has made is enough. */
TEST(get_uses_memory_that_is_made_while_it_waits)
{
	struct sfr__pool *pool = make(4 * MIB, MIB);
	struct sfr__block *held = lease(pool, MIB);
	struct client client;

	refuse_populate = ENOMEM;
	nr_served = 0;
	start_client(&client, pool, 1, 10000 * MS);
	(void)usleep(20000); /* by now it was refused, or the test shows nothing */
	refuse_populate = 0;
	CHECK_EQ(sfr__pool_warm_up(pool, 4 * MIB), 0);
	CHECK_EQ(pthread_join(client.thread, NULL), 0);
	CHECK_EQ(client.rc, 0);
	sfr__pool_put(pool, held);
	sfr__pool_free(pool);
}

/* The younger thread could use the existing memory, and does so when it is first in the queue.
 * The threads before it need more and still wait. */
TEST(waiter_without_memory_that_gives_up_wakes_the_next)
{
	struct sfr__pool *pool = make(8 * MIB, 4 * MIB);
	struct sfr__block *held = lease(pool, 4 * MIB), *partial = lease(pool, 1);
	struct client old, young, youngest[3];

	sfr__pool_put(pool, partial);
	refuse_populate = ENOMEM;
	nr_served = 0;
	old = (struct client){ .pool = pool, .seq = 1, .slice_ns = 100 * MS };
	CHECK_EQ(pthread_create(&old.thread, NULL, get_4_mib, &old), 0);
	while (stats(pool).nr_waiters == 0)
		(void)usleep(200);
	for (uint64_t i = 0; i < 3; i++)
		start_client(&youngest[i], pool, 3 + i, SFR_FOREVER);
	start_client(&young, pool, 2, SFR_FOREVER);
	CHECK_EQ(pthread_join(old.thread, NULL), 0);
	CHECK_EQ(old.rc, SFR_EAGAIN);
	CHECK_EQ(pthread_join(young.thread, NULL), 0);
	CHECK_EQ(young.rc, 0);
	for (int i = 0; i < 3; i++)
		CHECK_EQ(pthread_join(youngest[i].thread, NULL), 0);
	refuse_populate = 0;
	sfr__pool_put(pool, held);
	sfr__pool_free(pool);
}

TEST(all_waiters_without_memory_are_woken)
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
		/* The small block is enough for 1 MiB. */
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

/* The whole life of a pool in which any call may fail; the statistics show what it did. */
static void live(struct check_runs *run)
{
	struct sfr__pool *pool = NULL;
	struct sfr__block *blocks[3];
	uint64_t leased = 0;
	int rc;

	rc = sfr__pool_new(12 * MIB, 4 * MIB, false, &pool);
	CHECK(rc == 0 || (rc == -run->err && check_acted(run)) || rc == -ENOMEM);
	CHECK((rc == 0) == (pool != NULL));
	if (pool == NULL)
		return;
	for (int i = 0; i < 3; i++) {
		rc = sfr__pool_get(pool, 1, i == 0 ? 1 : 4 * MIB, 0, &blocks[i]);
		CHECK(rc == 0 || check_acted(run));
		/* While a thread has a block, memory may become available. */
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
	check_end_fault(run);

	/* The pool is intact: every block can be leased, and all memory returned. */
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

TEST(pool_is_intact_after_every_failure)
{
	static const char *const calls[] = { "*",      "mmap",   "madvise",      "mprotect",
					     "calloc", "malloc", "thread_create" };
	static const int errs[] = { ENOMEM, EIO, EACCES };

	for (int i = 0; i < 7; i++) {
		for (int j = 0; j < 3; j++) {
			int before = live_maps;

			FOR_EVERY_FAILURE(run, calls[i], errs[j])
			live(&run);
			/* if munmap fails too, one more mapping is left */
			CHECK(i == 0 || live_maps == before);
		}
	}
}

TEST(every_state_change_of_the_diagram_happens_and_no_other)
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
	refuse_dontneed = EACCES;
	CHECK_EQ(sfr__pool_trim(pool), -EACCES); /* F -> S -> F */
	refuse_dontneed = 0;
	CHECK_EQ(stats(pool).committed_bytes, 2 * MIB);
	CHECK_EQ(sfr__pool_trim(pool), 0); /* F -> S -> R */
	CHECK_EQ(sfr__pool_warm_up(pool, 8 * MIB), 0);
	for (int from = 0; from < SFR__NR_BLOCK_STATES; from++)
		for (int to = 0; to < SFR__NR_BLOCK_STATES; to++)
			CHECK_EQ(sfr__pool_nr_moves(pool, (enum sfr__block_state)from,
						    (enum sfr__block_state)to) != 0,
				 arrows[from][to]);
	sfr__pool_free(pool);
}

BEGIN
{
	use_odd_system();
	return true;
}
