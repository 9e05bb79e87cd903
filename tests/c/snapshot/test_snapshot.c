/* snapshot.c: copies that stay in the pool, and when their memory is returned. */
#include <sys/mman.h>
#include <sys/wait.h>

#include <semaphore.h>

#include "snapshot_helpers.h"

/* ---- copies ------------------------------------------------------------------- */

TEST(captured_and_deferred_bytes_are_copied)
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

/* While the copy is stopped, neither a step nor a reader continues. */
TEST(gate_and_reader_wait_for_a_running_copy)
{
	const struct sfr_fault still = {
		.call = "lane_copy", .nth = 1, .sticky = 1, .limit = -1, .delay_ns = SFR_FOREVER
	};
	struct sfr_engine *engine = make_engine(NR_BLOCKS);
	struct sfr_source sources[NR];
	struct sfr_snapshot *s;
	int64_t torn;

	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr_inject_add_fault(&still), 0);
	fill(7);
	describe(sources, true);
	CHECK_EQ(take(engine, sources, NR, 0, &s), 0);
	while (sfr_inject_hits() == 0) /* until the lane has the only chunk */
		(void)usleep(100);
	CHECK_EQ(sfr_snapshot_gate(s, NULL, 0, 1000000), SFR_EAGAIN);
	CHECK_EQ(sfr_snapshot_wait(s, 1000000, &torn), SFR_EAGAIN);
	CHECK_EQ(sfr_inject_remove_fault(&still), 0);
	CHECK_EQ(sfr_snapshot_gate(s, NULL, 0, SFR_FOREVER), 0);
	fill(99);
	CHECK(holds(s, sources, 7));
	drop(s);
	take_notice(NULL);
	CHECK_EQ(sfr_engine_close(engine, SFR_FOREVER), 0);
	sfr_engine_put(engine);
	sfr_inject_uninstall();
}

/* Captured sources need no samples, because nothing is compared with them. */
TEST(captured_sources_are_not_sampled)
{
	struct sfr_engine *engine = make_engine(NR_BLOCKS);
	struct sfr_source sources[NR];
	struct sfr_snapshot *s;
	int64_t torn;

	fill(7);
	describe(sources, true);
	CHECK_EQ(take(engine, sources, NR, 0, &s), 0);
	CHECK_EQ(sfr_snapshot_wait(s, SFR_FOREVER, &torn), 0);
	CHECK(s->samples.nr > 0 && s->samples.nr <= SFR__MAX_SAMPLES);
	for (uint32_t k = 0; k < s->samples.nr; k++)
		CHECK_EQ(sources[s->samples.items[k].entry].lane, SFR_LANE_HOST);
	take_notice(s);
	drop(s);
	sfr_engine_put(engine);
}

TEST(empty_snapshot_has_no_memory_and_is_copied_at_once)
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

static void change_a_byte_without_crc(void *dst, const void *src, size_t len)
{
	(void)change_a_byte(0, dst, src, len);
}

TEST(write_between_call_and_copy_is_detected)
{
	struct sfr_engine *engine = make_engine(NR_BLOCKS);
	const struct sfr_sys before = sfr_sys;
	struct sfr_source sources[NR];
	struct sfr_snapshot *s;
	int64_t torn;

	fill(1);
	describe(sources, true);
	sfr_sys.lane_copy = change_a_byte;
	sfr_sys.capture_copy = change_a_byte_without_crc;
	CHECK_EQ(take(engine, sources, NR, 0, &s), 0);
	CHECK_EQ(sfr_snapshot_wait(s, SFR_FOREVER, &torn), 0);
	CHECK_EQ(torn, 2);
	take_notice(s);
	drop(s);
	sfr_engine_put(engine); /* its threads use the table */
	sfr_sys = before;
}

/* ---- a copy of several chunks, of which the lane takes the first ---- */

enum { NR_CHUNKS = 5, LARGE = NR_CHUNKS << 20 };

static unsigned char large[LARGE];
static _Atomic int nr_by_lane, nr_by_waiter;
static sem_t lane_is_blocked, lane_may_go;

static uint32_t block_first_copy(uint32_t crc, void *dst, const void *src, size_t len)
{
	if (nr_by_lane++ == 0) {
		(void)sem_post(&lane_is_blocked);
		(void)sem_wait(&lane_may_go);
	}
	memcpy(dst, src, len);
	return crc;
}

static void copy_as_waiter(void *dst, const void *src, size_t len)
{
	nr_by_waiter++;
	memcpy(dst, src, len);
}

/* Starts a snapshot whose first chunk the lane is copying. */
static struct sfr_snapshot *begin_large(struct sfr_engine *engine)
{
	const struct sfr_source source = { (uint64_t)(uintptr_t)large, LARGE, SFR_LANE_HOST, 0 };
	struct sfr_snapshot *s;

	CHECK_EQ(sem_init(&lane_is_blocked, 0, 0), 0);
	CHECK_EQ(sem_init(&lane_may_go, 0, 0), 0);
	nr_by_lane = nr_by_waiter = 0;
	sfr_sys.lane_copy = block_first_copy;
	sfr_sys.capture_copy = copy_as_waiter;
	for (size_t i = 0; i < LARGE; i++)
		large[i] = (unsigned char)(i * 2654435761u >> 13);
	CHECK_EQ(take(engine, &source, 1, 0, &s), 0);
	CHECK_EQ(sem_wait(&lane_is_blocked), 0);
	return s;
}

TEST(thread_at_the_gate_copies_all_but_the_lanes_chunk)
{
	struct sfr_engine *engine = make_engine(2 * LARGE / BLOCK);
	const struct sfr_sys before = sfr_sys;
	struct sfr_snapshot *s = begin_large(engine);
	char *base;
	uint64_t len;

	CHECK_EQ(sfr_snapshot_gate(s, NULL, 0, 0), SFR_EAGAIN);
	CHECK_EQ(nr_by_waiter, 0); /* the call did not wait */
	for (int i = 0; i < NR_CHUNKS; i++)
		CHECK_EQ(sfr_snapshot_gate(s, NULL, 0, 20 * 1000 * 1000), SFR_EAGAIN);
	CHECK_EQ(nr_by_waiter, NR_CHUNKS - 1);
	CHECK_EQ(nr_by_lane, 1);
	CHECK_EQ(sem_post(&lane_may_go), 0);
	CHECK_EQ(sfr_snapshot_gate(s, NULL, 0, SFR_FOREVER), 0);
	sfr_snapshot_memory(s, &base, &len);
	CHECK(len == LARGE && memcmp(base, large, LARGE) == 0);
	take_notice(s);
	drop(s);
	sfr_engine_put(engine); /* its threads use the table */
	sfr_sys = before;
}

TEST(gate_that_helps_to_copy_detects_an_earlier_write)
{
	struct sfr_engine *engine = make_engine(2 * LARGE / BLOCK);
	const struct sfr_sys before = sfr_sys;
	struct sfr_snapshot *s = begin_large(engine);
	int64_t torn;

	large[LARGE - 1] ^= 1; /* the last line is always sampled */
	CHECK_EQ(sfr_snapshot_gate(s, NULL, 0, 100 * 1000 * 1000), SFR_EAGAIN);
	CHECK_EQ(sem_post(&lane_may_go), 0);
	CHECK_EQ(sfr_snapshot_wait(s, SFR_FOREVER, &torn), 0);
	CHECK_EQ(torn, 0);
	take_notice(s);
	drop(s);
	sfr_engine_put(engine); /* its threads use the table */
	sfr_sys = before;
}

TEST(released_snapshot_stops_copying)
{
	struct sfr_engine *engine = make_engine(2 * LARGE / BLOCK);
	const struct sfr_sys before = sfr_sys;
	struct sfr_snapshot *s = begin_large(engine);
	int64_t torn;

	sfr_snapshot_remove_view(s);
	CHECK_EQ(sfr_snapshot_is_leased(s), 1); /* it is still being written to */
	CHECK_EQ(sfr_snapshot_gate(s, NULL, 0, 20 * 1000 * 1000), SFR_EAGAIN);
	CHECK_EQ(sem_post(&lane_may_go), 0);
	CHECK_EQ(sfr_snapshot_wait(s, SFR_FOREVER, &torn), 0);
	CHECK_EQ(torn, -1);
	CHECK_EQ(nr_by_lane, 1);
	CHECK_EQ(nr_by_waiter, 0);
	take_notice(s);
	CHECK_EQ(sfr_snapshot_is_leased(s), 0);
	CHECK_EQ(leased(engine), 0);
	sfr_snapshot_put(s);
	sfr_engine_put(engine); /* its threads use the table */
	sfr_sys = before;
}

/* ---- memory ------------------------------------------------------------------- */

TEST(memory_stays_for_views_and_holds)
{
	struct sfr_engine *engine = make_engine(NR_BLOCKS);
	struct sfr_snapshot *s;

	CHECK_EQ(take_nbytes(engine, BLOCK, &s), 0);
	CHECK_EQ(sfr_snapshot_start(s), 0);
	CHECK_EQ(sfr_snapshot_add_view(s), 0);
	CHECK_EQ(sfr_snapshot_add_hold(s), 0);
	sfr_snapshot_remove_view(s);
	sfr_snapshot_remove_view(s);
	CHECK_EQ(sfr_snapshot_is_leased(s), 1);
	CHECK_EQ(sfr_snapshot_add_hold(s), 0);
	sfr_snapshot_remove_hold(s);
	CHECK_EQ(sfr_snapshot_is_leased(s), 1);
	sfr_snapshot_remove_hold(s);
	CHECK_EQ(sfr_snapshot_is_leased(s), 0);
	CHECK_EQ(sfr_snapshot_add_hold(s), SFR_ESTATE);
	CHECK_EQ(sfr_snapshot_add_view(s), SFR_ESTATE);
	sfr_snapshot_put(s);
	sfr_engine_put(engine);
}

TEST(last_reference_returns_the_memory)
{
	struct sfr_engine *engine = make_engine(NR_BLOCKS);
	struct sfr_snapshot *s;

	CHECK_EQ(take_nbytes(engine, BLOCK, &s), 0);
	sfr_snapshot_put(s);
	CHECK_EQ(leased(engine), 0);
	sfr_engine_put(engine);
	sfr_snapshot_put(NULL);
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
		    sfr_snapshot_add_hold(s) != SFR_EFORK ||
		    sfr_snapshot_add_view(s) != SFR_EFORK || sfr_snapshot_is_leased(s) != SFR_EFORK)
			_exit(2);
		drop(s);
		_exit(there ? 1 : 0);
	}
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(forked_child_has_only_shared_snapshots)
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

TEST(processes_with_the_descriptor_can_map_a_shared_snapshot)
{
	const struct sfr_engine_opts opts = { .pool_bytes = NR_BLOCKS * BLOCK,
					      .block_bytes = BLOCK,
					      .nr_writers = 1,
					      .max_in_flight = 1,
					      .shared_memory = 1 };
	struct sfr_source sources[NR], big = { .nbytes = 3 * BLOCK };
	struct sfr_snapshot *first, *s, *refused;
	struct sfr_engine *engine = NULL;
	uint64_t len, off = 0;
	char *base, *seen;
	int fd;

	CHECK_EQ(sfr_engine_new(&opts, &engine), 0);
	fill(5);
	describe(sources, false);
	CHECK_EQ(sfr_snapshot_new(engine, sources, NR, SFR_SNAPSHOT_SHARED, &refused), -EINVAL);
	/* so that the next one does not begin at 0 */
	CHECK_EQ(take(engine, &big, 1, 0, &first), 0);
	CHECK_EQ(sfr_snapshot_new(engine, sources, NR, 0, &s), 0);
	CHECK_EQ(sfr_snapshot_locate_in_file(s, &fd, &off), SFR_ESTATE);
	CHECK_EQ(sfr_snapshot_lease(s, 0), 0);
	CHECK_EQ(sfr_snapshot_start(s), 0);
	CHECK_EQ(sfr_snapshot_locate_in_file(s, &fd, &off), 0);
	CHECK(off == 3 * BLOCK);
	sfr_snapshot_memory(s, &base, &len);
	seen = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, (off_t)off);
	if (!CHECK(seen != MAP_FAILED))
		return;
	CHECK_EQ(memcmp(seen, base, len), 0);
	memset(seen, 77, LEN); /* the other process's writes stay private */
	CHECK(holds(s, sources, 5));
	CHECK_EQ(exit_of_child(s, sources), 0); /* a forked child has none of the memory */
	CHECK_EQ(munmap(seen, len), 0);
	sfr_snapshot_remove_view(s);
	CHECK_EQ(sfr_snapshot_locate_in_file(s, &fd, &off),
		 SFR_ESTATE); /* the memory has been returned */
	sfr_snapshot_put(s);
	drop(first);
	sfr_engine_put(engine);
	engine = make_engine(NR_BLOCKS);
	CHECK_EQ(take(engine, sources, NR, 0, &s), 0);
	CHECK_EQ(sfr_snapshot_locate_in_file(s, &fd, &off), SFR_ESTATE); /* the memory is private */
	drop(s);
	sfr_engine_put(engine);
}

/* ---- the end ------------------------------------------------------------------ */

TEST(a_closed_engine_keeps_the_pool_for_its_snapshots)
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
	CHECK(committed(engine) > 0);
	sfr_snapshot_remove_view(s);
	CHECK_EQ(leased(engine), 0);
	CHECK_EQ(committed(engine), 0);
	sfr_engine_put(engine); /* the snapshot still refers to the engine */
	sfr_snapshot_put(s);
}

TEST(snapshot_begun_before_close_is_copied_in_the_call)
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

TEST(every_failure_leaves_the_pool_intact)
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
		check_end_fault(&run);
		if (rc == 0) {
			int64_t torn;

			CHECK_EQ(sfr_snapshot_wait(s, SFR_FOREVER, &torn), 0);
			CHECK(holds(s, sources, 5));
			take_notice(s);
		}
		if (s) {
			sfr_snapshot_put(s); /* drops the view too */
			CHECK_EQ(leased(engine), 0);
		}
		sfr_engine_put(engine);
	}
}

TEST(every_arrow_of_the_diagram_was_taken_and_no_other)
{
	static const bool drawn[SFR__NR_SNAPSHOT_STATES][SFR__NR_SNAPSHOT_STATES] = {
		[SFR__SNAPSHOT_NEW][SFR__SNAPSHOT_LEASED] = true,
		[SFR__SNAPSHOT_LEASED][SFR__SNAPSHOT_COPYING] = true,
		[SFR__SNAPSHOT_LEASED][SFR__SNAPSHOT_COPIED] = true,
		[SFR__SNAPSHOT_COPYING][SFR__SNAPSHOT_COPIED] = true,
	};

	for (unsigned from = 0; from < SFR__NR_SNAPSHOT_STATES; from++)
		for (unsigned to = 0; to < SFR__NR_SNAPSHOT_STATES; to++)
			CHECK_EQ(sfr__snapshot_nr_transitions(from, to) != 0, drawn[from][to]);
}
