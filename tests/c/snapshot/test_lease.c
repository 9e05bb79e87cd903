/* lease.c: where the memory of snapshots is in the pool, and which waits end. */
#include "snapshot_helpers.h"

TEST(lease_waits_only_for_memory_that_returns_by_itself)
{
	struct sfr_engine *engine = make_engine(4);
	struct sfr_snapshot *one, *two;

	CHECK_EQ(take_nbytes(engine, 5 * BLOCK, &two), SFR_EEXHAUSTED);
	sfr_snapshot_put(two);
	CHECK_EQ(take_nbytes(engine, 3 * BLOCK, &one), 0);
	CHECK_EQ(sfr_snapshot_start(one), 0);
	CHECK_EQ(take_nbytes(engine, 2 * BLOCK, &two), SFR_EEXHAUSTED);
	CHECK_EQ(sfr_snapshot_add_hold(one), 0);
	sfr_snapshot_remove_view(one);
	/* Now only a process holds it, which ends by itself. */
	CHECK_EQ(sfr_snapshot_lease(two, 0), SFR_EAGAIN);
	sfr_snapshot_remove_hold(one);
	CHECK_EQ(sfr_snapshot_lease(two, 0), 0);
	CHECK_EQ(sfr_snapshot_lease(two, 0), SFR_ESTATE);
	drop(two);
	sfr_snapshot_put(one);
	CHECK_EQ(leased(engine), 0);
	sfr_engine_put(engine);
}

TEST(request_for_a_block_fails_while_snapshots_hold_all_blocks)
{
	struct sfr__pool *pool = make(4 * MIB, MIB);
	const uint64_t lens[1] = { 4 * MIB };
	struct sfr__lease lease;
	struct sfr__block *block;
	char *addr;

	CHECK_EQ(sfr__pool_lease(pool, lens, 1, false, 0, 0, &addr, &lease), 0);
	CHECK_EQ(sfr__pool_get(pool, 1, 1, SFR_FOREVER, &block), SFR_EEXHAUSTED);
	sfr__pool_set_user_held(pool, &lease, false);
	sfr__pool_set_user_held(pool, &lease, false); /* may be called twice */
	CHECK_EQ(sfr__pool_get(pool, 1, 1, 0, &block), SFR_EAGAIN);
	sfr__pool_unlease(pool, &lease);
	sfr__pool_unlease(pool, &lease);
	CHECK_EQ(sfr__pool_get(pool, 1, 1, 0, &block), 0);
	sfr__pool_put(pool, block);
	sfr__pool_free(pool);
}

TEST(a_spare_block_is_left_to_saves)
{
	struct sfr__pool *pool = make(4 * MIB, MIB);
	const uint64_t all[1] = { 4 * MIB }, most[1] = { 3 * MIB };
	struct sfr__lease lease;
	struct sfr__block *block;
	char *addr;

	sfr__pool_add_save(pool, 0);
	/* The saves end by themselves, so the request waits. */
	CHECK_EQ(sfr__pool_lease(pool, all, 1, false, 0, 0, &addr, &lease), SFR_EAGAIN);
	CHECK_EQ(sfr__pool_lease(pool, most, 1, false, 0, 0, &addr, &lease), 0);
	CHECK_EQ(sfr__pool_get(pool, 1, 1, 0, &block), 0);
	sfr__pool_put(pool, block);
	sfr__pool_unlease(pool, &lease);
	/* A caller that itself delays the only save would wait forever. */
	CHECK_EQ(sfr__pool_lease(pool, all, 1, false, 1, 0, &addr, &lease), 0);
	sfr__pool_unlease(pool, &lease);
	sfr__pool_remove_save(pool, 0);
	CHECK_EQ(sfr__pool_lease(pool, all, 1, false, 0, 0, &addr, &lease), 0);
	sfr__pool_unlease(pool, &lease);
	sfr__pool_free(pool);
}

struct run_client {
	struct sfr__pool *pool;
	struct sfr__lease lease;
	uint64_t len;
	int rc;
};

static void *wait_for_a_run(void *arg)
{
	struct run_client *me = arg;
	char *addr;

	me->rc = sfr__pool_lease(me->pool, &me->len, 1, false, 0, SFR_FOREVER, &addr, &me->lease);
	return NULL;
}

TEST(waiting_run_leaves_a_spare_block_to_a_new_save)
{
	struct run_client client = { .pool = make(4 * MIB, MIB), .len = 4 * MIB };
	struct sfr__block *first, *second;
	pthread_t thread;

	first = lease(client.pool, MIB);
	CHECK_EQ(pthread_create(&thread, NULL, wait_for_a_run, &client), 0);
	while (stats(client.pool).nr_waiters == 0)
		(void)usleep(200);
	sfr__pool_add_save(client.pool, 0);
	sfr__pool_put(client.pool, first);
	(void)usleep(20000); /* if it took all four, it would do so now */
	CHECK_EQ(stats(client.pool).leased_bytes, 0);
	second = lease(client.pool, MIB);
	sfr__pool_put(client.pool, second);
	sfr__pool_remove_save(client.pool, 0);
	CHECK_EQ(pthread_join(thread, NULL), 0);
	CHECK_EQ(client.rc, 0);
	sfr__pool_unlease(client.pool, &client.lease);
	sfr__pool_free(client.pool);
}

TEST(waiting_request_fails_when_the_memory_becomes_held)
{
	struct run_client client = { .pool = make(4 * MIB, MIB), .len = 4 * MIB };
	const uint64_t lens[1] = { 4 * MIB };
	struct sfr__lease lease;
	pthread_t thread;
	char *addr;

	CHECK_EQ(sfr__pool_lease(client.pool, lens, 1, false, 0, 0, &addr, &lease), 0);
	sfr__pool_set_user_held(client.pool, &lease, false); /* it will come back by itself */
	CHECK_EQ(pthread_create(&thread, NULL, wait_for_a_run, &client), 0);
	while (stats(client.pool).nr_waiters == 0)
		(void)usleep(200);
	sfr__pool_set_user_held(client.pool, &lease, true);
	CHECK_EQ(pthread_join(thread, NULL), 0);
	CHECK_EQ(client.rc, SFR_EEXHAUSTED);
	sfr__pool_unlease(client.pool, &lease);
	sfr__pool_free(client.pool);
}

TEST(a_run_waits_for_blocks_of_saves)
{
	struct sfr__pool *pool = make(4 * MIB, MIB);
	const uint64_t lens[1] = { 2 * MIB };
	struct sfr__block *blocks[4];
	struct sfr__lease lease;
	char *addr;

	for (int i = 0; i < 4; i++)
		CHECK_EQ(sfr__pool_get(pool, 1, MIB, 0, &blocks[i]), 0);
	CHECK_EQ(sfr__pool_lease(pool, lens, 1, false, 0, 0, &addr, &lease), SFR_EAGAIN);
	sfr__pool_put(pool, blocks[0]);
	sfr__pool_put(pool, blocks[2]);
	/* Two blocks are free, but they are not adjacent. */
	CHECK_EQ(sfr__pool_lease(pool, lens, 1, false, 0, 0, &addr, &lease), SFR_EAGAIN);
	sfr__pool_put(pool, blocks[1]);
	CHECK_EQ(sfr__pool_lease(pool, lens, 1, false, 0, 0, &addr, &lease), 0);
	CHECK_EQ((uintptr_t)addr % MIB, 0);
	memset(addr, 1, 2 * MIB);
	sfr__pool_unlease(pool, &lease);
	sfr__pool_put(pool, blocks[3]);
	CHECK_EQ(stats(pool).leased_bytes, 0);
	sfr__pool_free(pool);
}

TEST(items_go_into_separate_runs_if_no_window_fits)
{
	struct sfr__pool *pool = make(6 * MIB, MIB);
	const uint64_t lens[5] = { MIB / 2, 2 * MIB, 0, MIB / 2, 7 * MIB / 4 };
	struct sfr__block *blocks[6];
	struct sfr__lease lease;
	char *addrs[5];

	for (int i = 0; i < 6; i++)
		CHECK_EQ(sfr__pool_get(pool, 1, MIB, 0, &blocks[i]), 0);
	for (int i = 0; i < 6; i++)
		if (i != 1)
			sfr__pool_put(pool, blocks[i]);
	/* Free are block 0 and blocks 2 to 5. All are needed, so no window has room. */
	CHECK_EQ(sfr__pool_lease(pool, lens, 5, false, 0, 0, addrs, &lease), 0);
	CHECK(addrs[2] == NULL);
	for (int i = 0; i < 5; i++) {
		CHECK_EQ((uintptr_t)addrs[i] % SFR_ALIGN, 0);
		if (lens[i] != 0)
			memset(addrs[i], i + 1, lens[i]);
	}
	for (int i = 0; i < 5; i++)
		CHECK(lens[i] == 0 || (addrs[i][0] == i + 1 && addrs[i][lens[i] - 1] == i + 1));
	CHECK_EQ(stats(pool).leased_bytes, (1 + lease.nr_blocks) * MIB);
	sfr__pool_unlease(pool, &lease);
	sfr__pool_put(pool, blocks[1]);
	CHECK_EQ(stats(pool).leased_bytes, 0);
	sfr__pool_free(pool);
}

/* A process maps whole pages and may read to the last block's end. */
TEST(shared_memory_has_the_whole_last_block)
{
	const uint64_t lens[1] = { 4 * MIB + 1 };

	for (int whole = 0; whole < 2; whole++) {
		struct sfr__pool *pool = make(8 * MIB, 4 * MIB);
		struct sfr__lease lease;
		char *addr;

		CHECK_EQ(sfr__pool_lease(pool, lens, 1, whole, 0, 0, &addr, &lease), 0);
		CHECK((stats(pool).committed_bytes == 8 * MIB) == (whole != 0));
		CHECK(!whole || all_resident(addr, 8 * MIB));
		sfr__pool_unlease(pool, &lease);
		sfr__pool_free(pool);
	}
}

TEST(lease_prefers_blocks_with_memory)
{
	struct sfr__pool *pool = make(64 * MIB, 4 * MIB);
	const uint64_t lens[1] = { 7 * MIB };
	struct sfr__lease first, second;
	char *addr, *again;

	CHECK_EQ(sfr__pool_lease(pool, lens, 1, false, 0, 0, &addr, &first), 0);
	CHECK_EQ(stats(pool).committed_bytes, 8 * MIB);
	CHECK(all_resident(addr, 7 * MIB));
	CHECK_EQ(sfr__pool_lease(pool, lens, 1, false, 0, 0, &again, &second), 0);
	sfr__pool_unlease(pool, &first);
	sfr__pool_unlease(pool, &second);
	for (int i = 0; i < 5; i++) {
		CHECK_EQ(sfr__pool_lease(pool, lens, 1, false, 0, 0, &again, &second), 0);
		sfr__pool_unlease(pool, &second);
		CHECK_EQ(stats(pool).committed_bytes, 16 * MIB);
	}
	sfr__pool_free(pool);
}

TEST(lease_fails_with_enomem_without_memory)
{
	struct sfr__pool *pool;
	const uint64_t lens[1] = { 3 * MIB };
	struct sfr__lease lease;
	char *addr;

	use_odd_system();
	pool = make(4 * MIB, MIB);
	refuse_populate = ENOMEM;
	CHECK_EQ(sfr__pool_lease(pool, lens, 1, false, 0, SFR_FOREVER, &addr, &lease), -ENOMEM);
	CHECK(lease.runs == NULL);
	refuse_populate = 0;
	CHECK_EQ(stats(pool).leased_bytes, 0);
	CHECK_EQ(sfr__pool_lease(pool, lens, 1, false, 0, 0, &addr, &lease), 0);
	sfr__pool_unlease(pool, &lease);
	sfr__pool_free(pool);
}

/* The whole run is resident, whether several threads made it, the caller alone, or half of it
 * existed. */
TEST(memory_of_a_run_is_made_by_several_threads)
{
	struct sfr_fault fault = { "thread_create", 2, 1, EAGAIN, -1, 0 };
	const uint64_t lens[2] = { 7 * MIB, 9 * MIB };

	CHECK_EQ(sfr_inject_install(), 0);
	for (unsigned refused = 0; refused < 3; refused++) {
		struct sfr__pool *pool = make(16 * MIB, MIB);
		struct sfr__lease lease;
		uint64_t started;
		char *addrs[2];

		if (refused == 2)
			CHECK_EQ(sfr__pool_warm_up(pool, 8 * MIB), 0);
		fault.nth = refused;
		if (refused > 0)
			CHECK_EQ(sfr_inject_add_fault(&fault), 0);
		started = sfr_inject_count_calls("thread_create");
		CHECK_EQ(sfr__pool_lease(pool, lens, 2, false, 0, 0, addrs, &lease), 0);
		CHECK_EQ(sfr_inject_count_calls("thread_create") - started,
			 refused == 0 ? 3 : refused);
		CHECK(all_resident(addrs[0], 7 * MIB) && all_resident(addrs[1], 9 * MIB));
		CHECK_EQ(stats(pool).leased_bytes, 16 * MIB);
		sfr_inject_clear();
		sfr__pool_unlease(pool, &lease);
		CHECK_EQ(stats(pool).committed_bytes, 16 * MIB);
		sfr__pool_free(pool);
	}
}

/* ---- lots: blocks that small snapshots share ---- */

static int leave(struct sfr_engine *engine, uint64_t nbytes, struct sfr_snapshot **out)
{
	const struct sfr_source source = { .nbytes = nbytes };
	int rc = sfr_snapshot_new(engine, &source, 1, SFR_SNAPSHOT_LEAVES, out);

	return rc == 0 ? sfr_snapshot_lease(*out, 0) : rc;
}

static char *memory(const struct sfr_snapshot *s, uint64_t nbytes)
{
	char *base;
	uint64_t len;

	sfr_snapshot_memory(s, &base, &len);
	CHECK_EQ(len, nbytes);
	return base;
}

TEST(small_snapshots_share_a_block_until_the_last_is_released)
{
	enum { SMALL = 2000, APART = 2048, FULL = BLOCK / APART };
	struct sfr_engine *engine = make_engine(4);
	struct sfr_snapshot *s[FULL + 1], *large;

	for (unsigned i = 0; i < FULL; i++) {
		CHECK_EQ(leave(engine, SMALL, &s[i]), 0);
		CHECK_EQ(leased(engine), BLOCK);
		CHECK(memory(s[i], SMALL) == memory(s[0], SMALL) + i * APART);
	}
	CHECK_EQ(leave(engine, SMALL, &s[FULL]), 0); /* there is no room left */
	CHECK_EQ(leased(engine), 2 * BLOCK);
	for (unsigned i = 0; i + 1 < FULL; i++)
		drop(s[i]);
	CHECK_EQ(leased(engine), 2 * BLOCK);
	CHECK_EQ(leave(engine, SMALL, &s[0]), 0); /* after the last range, not in a free one */
	CHECK(memory(s[0], SMALL) == memory(s[FULL], SMALL) + APART);
	drop(s[FULL - 1]);
	CHECK_EQ(leased(engine), BLOCK);
	CHECK_EQ(leave(engine, BLOCK / 4 + 1, &large), 0); /* it has a block of its own */
	CHECK_EQ(leased(engine), 2 * BLOCK);
	drop(large);
	drop(s[0]);
	drop(s[FULL]);
	CHECK_EQ(leased(engine), 0);
	CHECK_EQ(leave(engine, SMALL, &s[0]), 0); /* after the previous one */
	drop(s[0]);
	CHECK_EQ(leased(engine), 0);
	sfr_engine_put(engine);
}

TEST(request_waits_for_a_shared_block_only_when_no_user_holds_it)
{
	struct sfr_engine *engine = make_engine(1);
	struct sfr_snapshot *one, *two, *three, *all;

	CHECK_EQ(leave(engine, 100, &one), 0);
	CHECK_EQ(leave(engine, 100, &two), 0);
	CHECK_EQ(sfr_snapshot_add_hold(one), 0);
	sfr_snapshot_remove_view(one); /* only a hold is left, which ends by itself */
	CHECK_EQ(take_nbytes(engine, BLOCK, &all), SFR_EEXHAUSTED);
	CHECK_EQ(sfr_snapshot_add_hold(two), 0);
	sfr_snapshot_remove_view(two);
	CHECK_EQ(sfr_snapshot_lease(all, 0), SFR_EAGAIN);
	CHECK_EQ(leave(engine, 100, &three), 0);
	CHECK_EQ(sfr_snapshot_lease(all, 0), SFR_EEXHAUSTED);
	sfr_snapshot_set_will_return(three, 1);
	CHECK_EQ(sfr_snapshot_lease(all, 0), SFR_EAGAIN);
	drop(three);
	sfr_snapshot_remove_hold(one);
	CHECK_EQ(sfr_snapshot_lease(all, 0), SFR_EAGAIN);
	sfr_snapshot_remove_hold(two);
	CHECK_EQ(sfr_snapshot_lease(all, 0), 0);
	drop(all);
	sfr_snapshot_put(one);
	sfr_snapshot_put(two);
	sfr_engine_put(engine);
}

TEST(retired_lot_gets_no_new_users)
{
	struct sfr_engine *engine = make_engine(3);
	struct sfr_snapshot *one, *two, *three;
	struct sfr_stats out;

	CHECK_EQ(leave(engine, 100, &one), 0);
	CHECK_EQ(leave(engine, 100, &two), 0);
	sfr__snapshot_retire_memory(one);
	CHECK_EQ(leave(engine, 100, &three), 0);
	CHECK_EQ(leased(engine), 2 * BLOCK);
	drop(one);
	CHECK_EQ(sfr_engine_stats(engine, &out), 0);
	CHECK_EQ(out.retired_bytes, 0); /* the other block is not retired */
	drop(two);
	drop(three);
	CHECK_EQ(sfr_engine_stats(engine, &out), 0);
	CHECK_EQ(out.leased_bytes, 0);
	CHECK_EQ(out.retired_bytes, BLOCK);
	sfr_engine_put(engine);
}

TEST(a_lot_that_gets_no_memory_leaves_nothing)
{
	struct sfr_engine *engine = make_engine(2);

	FOR_EVERY_FAILURE(run, "*", ENOMEM)
	{
		struct sfr_snapshot *one = NULL;
		int rc = leave(engine, 100, &one);

		CHECK(rc == 0 || (rc == -ENOMEM && check_acted(&run)));
		check_end_fault(&run);
		CHECK_EQ(leased(engine), rc == 0 ? BLOCK : 0);
		if (rc == 0)
			sfr_snapshot_remove_view(one);
		sfr_snapshot_put(one);
	}
	CHECK_EQ(leased(engine), 0);
	sfr_engine_put(engine);
}

static void *leave_and_drop(void *arg)
{
	struct sfr_snapshot *mine[4] = { NULL };

	for (unsigned i = 0; i < 400; i++) {
		struct sfr_snapshot **at = &mine[i % 4];

		if (*at)
			drop(*at);
		CHECK_EQ(leave(arg, 100 + i % 3000, at), 0);
		memset(memory(*at, 100 + i % 3000), (int)i, 100 + i % 3000);
	}
	for (unsigned i = 0; i < 4; i++)
		drop(mine[i]);
	return NULL;
}

TEST(many_threads_take_ranges_of_lots_at_once)
{
	struct sfr_engine *engine = make_engine(64);
	pthread_t threads[3];

	for (unsigned i = 0; i < 3; i++)
		CHECK_EQ(pthread_create(&threads[i], NULL, leave_and_drop, engine), 0);
	for (unsigned i = 0; i < 3; i++)
		CHECK_EQ(pthread_join(threads[i], NULL), 0);
	CHECK_EQ(leased(engine), 0);
	sfr_engine_put(engine);
}
