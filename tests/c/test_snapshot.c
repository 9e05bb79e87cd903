/* snapshot.c and runs.c: copies that live in the pool, and when their memory goes back. */
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "../../csrc/core/snapshot.h"
#include "pool_helpers.h"

enum { NR = 5, LEN = 30000, BLOCK = 16384, NR_BLOCKS = 16 };

static unsigned char bytes[NR][LEN];

static void fill(unsigned char value)
{
	for (int i = 0; i < NR; i++)
		memset(bytes[i], value + i, LEN);
}

/* The first two captured, the others deferred if `lane`. The fourth is empty. */
static void describe(struct sfr_source *sources, bool lane)
{
	for (unsigned i = 0; i < NR; i++)
		sources[i] = (struct sfr_source){
			.addr = (uint64_t)(uintptr_t)bytes[i],
			.nbytes = i == 3 ? 0 : LEN - 100 * i - 1,
			.lane = lane && i >= 2 ? SFR_LANE_HOST : SFR_CAPTURED,
		};
}

static struct sfr_engine *make_engine(uint64_t nr_blocks)
{
	const struct sfr_engine_opts opts = {
		.pool_bytes = nr_blocks * BLOCK,
		.block_bytes = BLOCK,
		.nr_writers = 1,
		.max_in_flight = 1,
	};
	struct sfr_engine *engine = NULL;

	CHECK_EQ(sfr_engine_new(&opts, &engine), 0);
	return engine;
}

static uint64_t leased(struct sfr_engine *engine)
{
	struct sfr_stats out;

	CHECK_EQ(sfr_engine_stats(engine, &out), 0);
	return out.leased_bytes;
}

static int take(struct sfr_engine *engine, const struct sfr_source *sources, uint32_t nr,
		uint32_t flags, struct sfr_snapshot **out)
{
	int rc = sfr_snapshot_new(engine, sources, nr, flags, out);

	if (rc == 0)
		rc = sfr_snapshot_lease(*out, SFR_FOREVER);
	if (rc == 0)
		rc = sfr_snapshot_start(*out);
	return rc;
}

/* One captured source of `nbytes`; the bytes are never read when there is no address. */
static int take_nbytes(struct sfr_engine *engine, uint64_t nbytes, struct sfr_snapshot **out)
{
	const struct sfr_source source = { .nbytes = nbytes };
	int rc = sfr_snapshot_new(engine, &source, 1, 0, out);

	return rc == 0 ? sfr_snapshot_lease(*out, 0) : rc;
}

static void drop(struct sfr_snapshot *s)
{
	sfr_snapshot_unview(s);
	sfr_snapshot_put(s);
}

static void take_notice(struct sfr_snapshot *expected)
{
	struct sfr_ticket *ticket;
	struct sfr_snapshot *s;
	unsigned what;
	char text[8];

	CHECK_EQ(sfr_notice_wait(&ticket, &what, text, sizeof(text), SFR_FOREVER), 0);
	CHECK_EQ(what, SFR_NOTICE_SNAPSHOT);
	CHECK(ticket == NULL);
	s = sfr_notice_snapshot();
	CHECK(expected == NULL || s == expected);
	CHECK(sfr_notice_snapshot() == NULL); /* once */
	sfr_snapshot_put(s);
}

static bool holds(const struct sfr_snapshot *s, const struct sfr_source *sources,
		  unsigned char value)
{
	char *base;
	uint64_t len;
	bool same = true;

	sfr_snapshot_memory(s, &base, &len);
	for (unsigned i = 0; i < NR; i++) {
		uint64_t off = sfr_snapshot_offset(s, i);

		same &= off % SFR_ALIGN == 0 && off + sources[i].nbytes <= len;
		for (uint64_t k = 0; same && k < sources[i].nbytes; k++)
			same = (unsigned char)base[off + k] == (unsigned char)(value + i);
	}
	return same;
}

/* ---- copies ------------------------------------------------------------------- */

static void captured_and_deferred_bytes_are_copied(void)
{
	struct sfr_engine *engine = make_engine(NR_BLOCKS);
	struct sfr_source sources[NR];
	struct sfr_snapshot *s;
	int64_t torn;

	for (int lane = 0; lane < 2; lane++) {
		fill(7);
		describe(sources, lane);
		CHECK_EQ(take(engine, sources, NR, 0, &s), 0);
		CHECK_EQ(sfr_snapshot_wait(s, SFR_FOREVER, &torn), 0);
		CHECK_EQ(torn, -1);
		fill(99);
		CHECK(holds(s, sources, 7));
		CHECK(leased(engine) > 0);
		drop(s);
		if (lane)
			take_notice(NULL);
		CHECK_EQ(leased(engine), 0);
	}
	CHECK_EQ(sfr_engine_close(engine, SFR_FOREVER), 0);
	sfr_engine_put(engine);
}

static void a_snapshot_of_nothing_is_one(void)
{
	struct sfr_engine *engine = make_engine(1);
	struct sfr_snapshot *s;
	int64_t torn;
	uint64_t len;
	char *base;

	CHECK_EQ(take(engine, NULL, 0, 0, &s), 0);
	CHECK_EQ(sfr_snapshot_wait(s, 0, &torn), 0);
	sfr_snapshot_memory(s, &base, &len);
	CHECK_EQ(len, 0);
	drop(s);
	sfr_engine_put(engine);
}

static uint32_t change_a_byte(uint32_t crc, void *dst, const void *src, size_t len)
{
	memcpy(dst, src, len);
	((char *)dst)[0] ^= 1; /* the first line is always sampled */
	return crc;
}

static void a_change_before_the_copy_is_found(void)
{
	struct sfr_engine *engine = make_engine(NR_BLOCKS);
	const struct sfr_sys before = sfr_sys;
	struct sfr_source sources[NR];
	struct sfr_snapshot *s;
	int64_t torn;

	fill(1);
	describe(sources, true);
	sfr_sys.lane_copy = change_a_byte;
	CHECK_EQ(take(engine, sources, NR, 0, &s), 0);
	CHECK_EQ(sfr_snapshot_wait(s, SFR_FOREVER, &torn), 0);
	CHECK_EQ(torn, 2);
	take_notice(s);
	drop(s);
	sfr_sys = before;
	sfr_engine_put(engine);
}

static _Atomic int nr_copies;
static struct sfr_snapshot *_Atomic copied;

static uint32_t drop_while_copying(uint32_t crc, void *dst, const void *src, size_t len)
{
	memcpy(dst, src, len);
	if (nr_copies++ == 0) {
		while (copied == NULL)
			(void)usleep(100);
		sfr_snapshot_unview(copied);
		CHECK_EQ(sfr_snapshot_leased(copied), 1); /* it is being written into */
	}
	return crc;
}

static void a_copy_nobody_can_read_is_given_up(void)
{
	struct sfr_engine *engine = make_engine(NR_BLOCKS);
	const struct sfr_sys before = sfr_sys;
	struct sfr_source sources[NR];
	struct sfr_snapshot *s;
	int64_t torn;

	fill(1);
	describe(sources, true);
	sfr_sys.lane_copy = drop_while_copying;
	nr_copies = 0;
	copied = NULL;
	CHECK_EQ(take(engine, sources, NR, 0, &s), 0);
	copied = s;
	CHECK_EQ(sfr_snapshot_wait(s, SFR_FOREVER, &torn), 0);
	CHECK_EQ(torn, -1);
	CHECK_EQ(nr_copies, 1);
	take_notice(s);
	CHECK_EQ(sfr_snapshot_leased(s), 0);
	CHECK_EQ(leased(engine), 0);
	sfr_snapshot_put(s);
	sfr_sys = before;
	sfr_engine_put(engine);
}

/* ---- memory ------------------------------------------------------------------- */

static void memory_stays_for_views_and_holds(void)
{
	struct sfr_engine *engine = make_engine(NR_BLOCKS);
	struct sfr_snapshot *s;

	CHECK_EQ(take_nbytes(engine, BLOCK, &s), 0);
	CHECK_EQ(sfr_snapshot_start(s), 0);
	CHECK_EQ(sfr_snapshot_view(s), 0);
	CHECK_EQ(sfr_snapshot_hold(s), 0);
	sfr_snapshot_unview(s);
	sfr_snapshot_unview(s);
	CHECK_EQ(sfr_snapshot_leased(s), 1);
	CHECK_EQ(sfr_snapshot_hold(s), 0);
	sfr_snapshot_unhold(s);
	CHECK_EQ(sfr_snapshot_leased(s), 1);
	sfr_snapshot_unhold(s);
	CHECK_EQ(sfr_snapshot_leased(s), 0);
	CHECK_EQ(sfr_snapshot_hold(s), SFR_ESTATE);
	CHECK_EQ(sfr_snapshot_view(s), SFR_ESTATE);
	sfr_snapshot_put(s);
	sfr_engine_put(engine);
}

static void the_last_reference_gives_back_what_is_left(void)
{
	struct sfr_engine *engine = make_engine(NR_BLOCKS);
	struct sfr_snapshot *s;

	CHECK_EQ(take_nbytes(engine, BLOCK, &s), 0);
	sfr_snapshot_put(s);
	CHECK_EQ(leased(engine), 0);
	sfr_engine_put(engine);
	sfr_snapshot_put(NULL);
}

static void what_is_held_is_not_waited_for_and_what_comes_back_is(void)
{
	struct sfr_engine *engine = make_engine(4);
	struct sfr_snapshot *one, *two;

	CHECK_EQ(take_nbytes(engine, 5 * BLOCK, &two), SFR_EEXHAUSTED);
	sfr_snapshot_put(two);
	CHECK_EQ(take_nbytes(engine, 3 * BLOCK, &one), 0);
	CHECK_EQ(sfr_snapshot_start(one), 0);
	CHECK_EQ(take_nbytes(engine, 2 * BLOCK, &two), SFR_EEXHAUSTED);
	CHECK_EQ(sfr_snapshot_hold(one), 0);
	sfr_snapshot_unview(one);
	/* Now only a process holds it, which ends by itself. */
	CHECK_EQ(sfr_snapshot_lease(two, 0), SFR_EAGAIN);
	sfr_snapshot_unhold(one);
	CHECK_EQ(sfr_snapshot_lease(two, 0), 0);
	CHECK_EQ(sfr_snapshot_lease(two, 0), SFR_ESTATE);
	drop(two);
	sfr_snapshot_put(one);
	CHECK_EQ(leased(engine), 0);
	sfr_engine_put(engine);
}

static void a_block_is_refused_when_runs_hold_all_of_them(void)
{
	struct sfr__pool *pool = make(4 * MIB, MIB);
	const uint64_t lens[1] = { 4 * MIB };
	struct sfr__lease lease;
	struct sfr__block *block;
	char *addr;

	CHECK_EQ(sfr__pool_place(pool, lens, 1, false, 0, &addr, &lease), 0);
	CHECK_EQ(sfr__pool_get(pool, 1, 1, SFR_FOREVER, &block), SFR_EEXHAUSTED);
	sfr__pool_let_go(pool, &lease);
	sfr__pool_let_go(pool, &lease); /* twice is fine */
	CHECK_EQ(sfr__pool_get(pool, 1, 1, 0, &block), SFR_EAGAIN);
	sfr__pool_unplace(pool, &lease);
	sfr__pool_unplace(pool, &lease);
	CHECK_EQ(sfr__pool_get(pool, 1, 1, 0, &block), 0);
	sfr__pool_put(pool, block);
	sfr__pool_free(pool);
}

static void a_spare_block_is_left_to_saves(void)
{
	struct sfr__pool *pool = make(4 * MIB, MIB);
	const uint64_t all[1] = { 4 * MIB }, most[1] = { 3 * MIB };
	struct sfr__lease lease;
	struct sfr__block *block;
	char *addr;

	/* The saves end by themselves, so it is a wait and no refusal. */
	CHECK_EQ(sfr__pool_place(pool, all, 1, true, 0, &addr, &lease), SFR_EAGAIN);
	CHECK_EQ(sfr__pool_place(pool, most, 1, true, 0, &addr, &lease), 0);
	CHECK_EQ(sfr__pool_get(pool, 1, 1, 0, &block), 0);
	sfr__pool_put(pool, block);
	sfr__pool_unplace(pool, &lease);
	sfr__pool_free(pool);
}

static void a_run_waits_for_blocks_of_saves(void)
{
	struct sfr__pool *pool = make(4 * MIB, MIB);
	const uint64_t lens[1] = { 2 * MIB };
	struct sfr__block *blocks[4];
	struct sfr__lease lease;
	char *addr;

	for (int i = 0; i < 4; i++)
		CHECK_EQ(sfr__pool_get(pool, 1, MIB, 0, &blocks[i]), 0);
	CHECK_EQ(sfr__pool_place(pool, lens, 1, false, 0, &addr, &lease), SFR_EAGAIN);
	sfr__pool_put(pool, blocks[0]);
	sfr__pool_put(pool, blocks[2]);
	/* Two blocks, but they do not touch. */
	CHECK_EQ(sfr__pool_place(pool, lens, 1, false, 0, &addr, &lease), SFR_EAGAIN);
	sfr__pool_put(pool, blocks[1]);
	CHECK_EQ(sfr__pool_place(pool, lens, 1, false, 0, &addr, &lease), 0);
	CHECK_EQ((uintptr_t)addr % MIB, 0);
	memset(addr, 1, 2 * MIB);
	sfr__pool_unplace(pool, &lease);
	sfr__pool_put(pool, blocks[3]);
	CHECK_EQ(stats(pool).leased_bytes, 0);
	sfr__pool_free(pool);
}

static void items_go_into_runs_that_lie_apart(void)
{
	struct sfr__pool *pool = make(6 * MIB, MIB);
	const uint64_t lens[5] = { MIB / 2, 2 * MIB, 0, MIB / 2, 3 * MIB / 4 };
	struct sfr__block *blocks[6];
	struct sfr__lease lease;
	char *addrs[5];

	for (int i = 0; i < 6; i++)
		CHECK_EQ(sfr__pool_get(pool, 1, MIB, 0, &blocks[i]), 0);
	for (int i = 0; i < 6; i++)
		if (i != 1)
			sfr__pool_put(pool, blocks[i]);
	/* Free: 0, and 2 to 5. */
	CHECK_EQ(sfr__pool_place(pool, lens, 5, false, 0, addrs, &lease), 0);
	CHECK(addrs[2] == NULL);
	for (int i = 0; i < 5; i++) {
		CHECK_EQ((uintptr_t)addrs[i] % SFR_ALIGN, 0);
		if (lens[i] != 0)
			memset(addrs[i], i + 1, lens[i]);
	}
	for (int i = 0; i < 5; i++)
		CHECK(lens[i] == 0 || (addrs[i][0] == i + 1 && addrs[i][lens[i] - 1] == i + 1));
	CHECK_EQ(stats(pool).leased_bytes, (1 + lease.nr_blocks) * MIB);
	sfr__pool_unplace(pool, &lease);
	sfr__pool_put(pool, blocks[1]);
	CHECK_EQ(stats(pool).leased_bytes, 0);
	sfr__pool_free(pool);
}

static void memory_that_is_there_is_used_first(void)
{
	struct sfr__pool *pool = make(64 * MIB, 4 * MIB);
	const uint64_t lens[1] = { 7 * MIB };
	struct sfr__lease first, second;
	char *addr, *again;

	CHECK_EQ(sfr__pool_place(pool, lens, 1, false, 0, &addr, &first), 0);
	CHECK_EQ(stats(pool).committed_bytes, 8 * MIB);
	CHECK(all_resident(addr, 7 * MIB));
	CHECK_EQ(sfr__pool_place(pool, lens, 1, false, 0, &again, &second), 0);
	sfr__pool_unplace(pool, &first);
	sfr__pool_unplace(pool, &second);
	for (int i = 0; i < 5; i++) {
		CHECK_EQ(sfr__pool_place(pool, lens, 1, false, 0, &again, &second), 0);
		sfr__pool_unplace(pool, &second);
		CHECK_EQ(stats(pool).committed_bytes, 16 * MIB);
	}
	sfr__pool_free(pool);
}

static void a_system_without_memory_is_said_so(void)
{
	struct sfr__pool *pool;
	const uint64_t lens[1] = { 3 * MIB };
	struct sfr__lease lease;
	char *addr;

	use_odd_system();
	pool = make(4 * MIB, MIB);
	refuse_populate = ENOMEM;
	CHECK_EQ(sfr__pool_place(pool, lens, 1, false, SFR_FOREVER, &addr, &lease), -ENOMEM);
	CHECK(lease.runs == NULL);
	refuse_populate = 0;
	CHECK_EQ(stats(pool).leased_bytes, 0);
	CHECK_EQ(sfr__pool_place(pool, lens, 1, false, 0, &addr, &lease), 0);
	sfr__pool_unplace(pool, &lease);
	sfr__pool_free(pool);
}

/* ---- fork --------------------------------------------------------------------- */

static int exit_of_child(struct sfr_snapshot *s, const struct sfr_source *sources)
{
	int status;
	pid_t pid = fork();

	if (pid == 0) {
		int64_t torn;
		char *base;
		uint64_t len;
		bool there;

		sfr_snapshot_memory(s, &base, &len);
		there = is_readable(base) && holds(s, sources, 5);
		if (sfr_snapshot_wait(s, 0, &torn) != SFR_EFORK ||
		    sfr_snapshot_hold(s) != SFR_EFORK || sfr_snapshot_view(s) != SFR_EFORK ||
		    sfr_snapshot_leased(s) != SFR_EFORK)
			_exit(2);
		drop(s);
		_exit(there ? 1 : 0);
	}
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void only_shared_memory_is_there_in_a_child(void)
{
	struct sfr_engine *engine = make_engine(NR_BLOCKS);
	struct sfr_source sources[NR];
	struct sfr_snapshot *s;

	fill(5);
	describe(sources, false);
	for (int round = 0; round < 2; round++) { /* private again after it was shared */
		CHECK_EQ(take(engine, sources, NR, 0, &s), 0);
		CHECK_EQ(exit_of_child(s, sources), 0);
		drop(s);
		CHECK_EQ(take(engine, sources, NR, SFR_SNAPSHOT_SHARED, &s), 0);
		CHECK_EQ(exit_of_child(s, sources), 1);
		CHECK(holds(s, sources, 5));
		drop(s);
	}
	CHECK_EQ(leased(engine), 0);
	sfr_engine_put(engine);
}

/* ---- the end ------------------------------------------------------------------ */

static void a_closed_engine_keeps_the_pool_for_its_snapshots(void)
{
	struct sfr_engine *engine = make_engine(NR_BLOCKS);
	struct sfr_source sources[NR];
	struct sfr_snapshot *s, *late;
	int64_t torn;

	fill(5);
	describe(sources, true);
	CHECK_EQ(take(engine, sources, NR, 0, &s), 0);
	CHECK_EQ(sfr_engine_close(engine, SFR_FOREVER), 0);
	CHECK_EQ(sfr_snapshot_wait(s, 0, &torn), 0); /* close has waited for the copy */
	CHECK_EQ(take(engine, sources, NR, 0, &late), SFR_ECLOSED);
	sfr_snapshot_put(late);
	CHECK(holds(s, sources, 5));
	CHECK(leased(engine) > 0);
	take_notice(s);
	sfr_snapshot_unview(s);
	CHECK_EQ(leased(engine), 0);
	sfr_engine_put(engine); /* and the snapshot still refers to it */
	sfr_snapshot_put(s);
}

static void a_snapshot_begun_before_the_close_is_copied_at_once(void)
{
	struct sfr_engine *engine = make_engine(NR_BLOCKS);
	struct sfr_source sources[NR];
	struct sfr_snapshot *s;
	int64_t torn;

	fill(5);
	describe(sources, true);
	CHECK_EQ(sfr_snapshot_new(engine, sources, NR, 0, &s), 0);
	CHECK_EQ(sfr_snapshot_start(s), SFR_ESTATE);
	CHECK_EQ(sfr_snapshot_lease(s, 0), 0);
	CHECK_EQ(sfr_engine_close(engine, SFR_FOREVER), 0);
	CHECK_EQ(sfr_snapshot_start(s), 0);
	CHECK_EQ(sfr_snapshot_wait(s, 0, &torn), 0);
	CHECK(holds(s, sources, 5));
	drop(s);
	sfr_engine_put(engine);
}

static void every_failure_leaves_the_pool_whole(void)
{
	struct sfr_source sources[NR];

	fill(5);
	describe(sources, true);
	FOR_EVERY_FAILURE(run, "*", ENOMEM)
	{
		struct sfr_engine *engine = NULL;
		struct sfr_snapshot *s = NULL;
		const struct sfr_engine_opts opts = { .pool_bytes = NR_BLOCKS * BLOCK,
						      .block_bytes = BLOCK,
						      .nr_writers = 1,
						      .max_in_flight = 1 };
		int rc = sfr_engine_new(&opts, &engine);

		if (rc == 0)
			rc = take(engine, sources, NR, SFR_SNAPSHOT_SHARED, &s);
		CHECK(rc == 0 || (rc == -ENOMEM && check_acted(&run)));
		check_heal(&run);
		if (rc == 0) {
			int64_t torn;

			CHECK_EQ(sfr_snapshot_wait(s, SFR_FOREVER, &torn), 0);
			CHECK(holds(s, sources, 5));
			take_notice(s);
		}
		if (s) {
			sfr_snapshot_put(s); /* the view goes with it */
			CHECK_EQ(leased(engine), 0);
		}
		sfr_engine_put(engine);
	}
}

static void every_arrow_of_the_diagram_was_taken_and_no_other(void)
{
	static const bool drawn[SFR__NR_SNAPSHOT_STATES][SFR__NR_SNAPSHOT_STATES] = {
		[SFR__SNAPSHOT_NEW][SFR__SNAPSHOT_LEASED] = true,
		[SFR__SNAPSHOT_LEASED][SFR__SNAPSHOT_COPYING] = true,
		[SFR__SNAPSHOT_LEASED][SFR__SNAPSHOT_COPIED] = true,
		[SFR__SNAPSHOT_COPYING][SFR__SNAPSHOT_COPIED] = true,
	};

	for (unsigned from = 0; from < SFR__NR_SNAPSHOT_STATES; from++)
		for (unsigned to = 0; to < SFR__NR_SNAPSHOT_STATES; to++)
			CHECK_EQ(sfr__snapshot_arrows(from, to) != 0, drawn[from][to]);
}

int main(void)
{
	RUN(captured_and_deferred_bytes_are_copied);
	RUN(a_snapshot_of_nothing_is_one);
	RUN(a_change_before_the_copy_is_found);
	RUN(a_copy_nobody_can_read_is_given_up);
	RUN(memory_stays_for_views_and_holds);
	RUN(the_last_reference_gives_back_what_is_left);
	RUN(what_is_held_is_not_waited_for_and_what_comes_back_is);
	RUN(a_block_is_refused_when_runs_hold_all_of_them);
	RUN(a_spare_block_is_left_to_saves);
	RUN(a_run_waits_for_blocks_of_saves);
	RUN(items_go_into_runs_that_lie_apart);
	RUN(memory_that_is_there_is_used_first);
	RUN(a_system_without_memory_is_said_so);
	RUN(only_shared_memory_is_there_in_a_child);
	RUN(a_closed_engine_keeps_the_pool_for_its_snapshots);
	RUN(a_snapshot_begun_before_the_close_is_copied_at_once);
	RUN(every_failure_leaves_the_pool_whole);
	RUN(every_arrow_of_the_diagram_was_taken_and_no_other);
	return check_done();
}
