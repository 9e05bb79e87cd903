/* A thread that waits for deferred bytes copies them, together with the lane and the copiers. */
#include <pthread.h>
#include <semaphore.h>
#include <time.h>

#include "saving.h"

enum { MIB = 1 << 20, BLOCK = 4 * MIB, NR_SOURCES = 5 };

static const char *dir;
static unsigned char *bytes[NR_SOURCES];
/* Parts of a block, ends inside chunks and blocks, and a source that spans four blocks. */
static uint64_t lens[NR_SOURCES] = { 6 * MIB + 17, 100, 14 * MIB + 1, MIB, 2 * MIB - 3 };

/* ---- a lane that is stopped in its first chunk ---- */

static sem_t lane_stands, lane_may_go;
static pthread_t waiter;
static atomic_int nr_by_lane, nr_by_waiter, nr_by_others;

static bool is_lane(void)
{
	char name[16] = "";

	(void)pthread_getname_np(pthread_self(), name, sizeof(name));
	return strcmp(name, "sfr-lane0") == 0;
}

/* Stops the waiting thread in its first chunk until other threads have one. */
static atomic_bool waiter_stands, others_came;

static void count(void)
{
	if (is_lane()) {
		if (nr_by_lane++ == 0) {
			(void)sem_post(&lane_stands);
			(void)sem_wait(&lane_may_go);
		}
	} else if (pthread_equal(pthread_self(), waiter)) {
		nr_by_waiter++;
		for (int ms = 0; waiter_stands && nr_by_others == 0 && ms < 10000; ms++)
			(void)usleep(1000);
		if (waiter_stands)
			others_came = nr_by_others > 0;
		waiter_stands = false;
	} else {
		nr_by_others++;
	}
}

static uint32_t counted_lane_copy(uint32_t crc, void *dst, const void *src, size_t len)
{
	count();
	return sfr_crc32_copy(crc, dst, src, len);
}

static void counted_capture_copy(void *dst, const void *src, size_t len)
{
	count();
	memcpy(dst, src, len);
}

static struct sfr_ticket *submit(struct sfr_engine *engine, const char *name, uint32_t flags)
{
	struct sfr_source sources[NR_SOURCES];
	const struct sfr_save_desc desc = { .dir = dir,
					    .name = name,
					    .skeleton = saving_skeleton,
					    .skeleton_len = sizeof(saving_skeleton),
					    .sources = sources,
					    .nr_sources = NR_SOURCES,
					    .flags = flags };
	struct sfr_ticket *t = NULL;

	for (int i = 0; i < NR_SOURCES; i++)
		sources[i] = (struct sfr_source){ (uint64_t)(uintptr_t)bytes[i], lens[i],
						  SFR_LANE_HOST, 0 };
	CHECK_EQ(sfr_save_new(engine, &desc, &t), 0);
	CHECK_EQ(saving_submit(t), 0);
	return t;
}

/* Checks every CRC and every byte. */
static void check_file(const char *name)
{
	struct sfr_source sources[NR_SOURCES];
	const struct sfr_save_desc desc = { .skeleton = saving_skeleton,
					    .skeleton_len = sizeof(saving_skeleton),
					    .sources = sources,
					    .nr_sources = NR_SOURCES };
	static unsigned char found[16 * MIB];
	struct sfr_check *check = NULL;
	struct sfr__image img;
	int fd = open(dir_path(dir, name), O_RDONLY | O_CLOEXEC);

	if (!CHECK(fd >= 0))
		return;
	CHECK_EQ(sfr_check_new(fd, SFR_CHECK_BYTES, &check), 0);
	CHECK_EQ(sfr_check_run(check, SFR_FOREVER), 0);
	CHECK(sfr_check_result(check)->ok);
	CHECK_EQ(sfr_check_result(check)->nr_unchecked, 0);
	for (int i = 0; i < NR_SOURCES; i++)
		sources[i] = (struct sfr_source){ (uint64_t)(uintptr_t)bytes[i], lens[i],
						  SFR_LANE_HOST, 0 };
	CHECK_EQ(sfr__image_init(&img, &desc, BLOCK), 0);
	for (uint32_t i = 0; i < img.nr_entries; i++) {
		const struct sfr__image_entry *entry = &img.entries[i];

		if (entry->source < 0)
			continue;
		CHECK_EQ(pread(fd, found, entry->nbytes, (off_t)entry->data_off), entry->nbytes);
		CHECK(memcmp(found, bytes[entry->source], entry->nbytes) == 0);
	}
	sfr__image_fini(&img);
	sfr_check_free(check);
	(void)close(fd);
}

static void end(struct sfr_engine *engine, struct sfr_ticket *t)
{
	saving_done(t);
	saving_end(engine);
}

static void hold_the_lane(void)
{
	CHECK_EQ(sem_init(&lane_stands, 0, 0), 0);
	CHECK_EQ(sem_init(&lane_may_go, 0, 0), 0);
	nr_by_lane = nr_by_waiter = nr_by_others = 0;
	waiter = pthread_self();
	sfr_sys.lane_copy = counted_lane_copy;
	sfr_sys.capture_copy = counted_capture_copy;
}

static bool is_fully_handed_out(struct sfr_ticket *t)
{
	bool all;

	sfr__lock(&t->engine->mu);
	all = t->staging.deferred.copy.blk == t->staging.deferred.copy.nr_blocks;
	sfr__unlock(&t->engine->mu);
	return all;
}

/* Returns whether the block is parked that has the end of the lane's entry. */
static bool is_block_parked(struct sfr_ticket *t)
{
	bool yes;

	sfr__lock(&t->engine->mu);
	yes = t->work.parked != NULL;
	sfr__unlock(&t->engine->mu);
	return yes;
}

static void release_lane(void)
{
	CHECK_EQ(sem_post(&lane_may_go), 0);
}

/* One writer is enough: it has the ends of entries that the lane is still copying, and does not
 * wait for them. */
TEST(waiting_thread_copies_all_but_the_lanes_chunk)
{
	for (uint32_t nr_writers = 1; nr_writers <= 3; nr_writers += 2) {
		struct sfr_engine *engine = saving_engine_of(BLOCK, 16, nr_writers, 2);
		struct sfr_ticket *t;

		hold_the_lane();
		t = submit(engine, "a.pt", 0);
		CHECK_EQ(sem_wait(&lane_stands), 0);
		nr_by_waiter = 0; /* it has copied the skeleton */
		CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, 0), SFR_EAGAIN);
		CHECK_EQ(nr_by_waiter, 0); /* the call did not wait */
		while (!is_fully_handed_out(t) || !is_block_parked(t))
			CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, 1000 * 1000), SFR_EAGAIN);
		CHECK_EQ(nr_by_lane, 1);
		CHECK(nr_by_waiter > 0);
		release_lane();
		CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
		end(engine, t);
		check_file("a.pt");
	}
}

/* Returns the length of the first source with which its data end `left` bytes before the end of
 * its second block. */
static uint64_t len_that_leaves(uint64_t left)
{
	struct sfr_source source = { (uint64_t)(uintptr_t)bytes[0], lens[0], SFR_LANE_HOST, 0 };
	const struct sfr_save_desc desc = { .skeleton = saving_skeleton,
					    .skeleton_len = sizeof(saving_skeleton),
					    .sources = &source,
					    .nr_sources = 1 };
	const struct sfr__extent *extent;
	struct sfr__image img;
	uint64_t len;

	CHECK_EQ(sfr__image_init(&img, &desc, BLOCK), 0);
	extent = sfr__image_find_extent(&img, SFR_LANE_HOST, 0);
	len = extent->off + 2 * (uint64_t)BLOCK - left - img.entries[extent->first_entry].data_off;
	sfr__image_fini(&img);
	return len;
}

/* While the lane copies the first part of an entry, its CRC is unknown. So the block with its
 * descriptor must not be written yet. */
TEST(block_with_a_descriptor_waits_for_the_entrys_earlier_bytes)
{
	static const uint64_t left[] = { 0, 4, 8, 15, 16, 17 };
	const uint64_t before = lens[0];

	for (size_t i = 0; i < sizeof(left) / sizeof(left[0]); i++) {
		struct sfr_engine *engine = saving_engine_of(BLOCK, 16, 1, 2);
		struct sfr_ticket *t;

		lens[0] = len_that_leaves(left[i]);
		hold_the_lane();
		t = submit(engine, "a.pt", 0);
		CHECK_EQ(sem_wait(&lane_stands), 0);
		while (!is_fully_handed_out(t) || !is_block_parked(t))
			CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, 1000 * 1000), SFR_EAGAIN);
		release_lane();
		end(engine, t);
		check_file("a.pt");
	}
	lens[0] = before;
}

/* Returns an engine whose threads sleep. A thread that makes memory would find work when it is
 * done. */
static struct sfr_engine *idle_engine(void)
{
	struct sfr_engine *engine = saving_engine_of(BLOCK, 16, 3, 2);
	struct sfr_ticket *t;

	sfr_sys.lane_copy = sfr_crc32_copy;
	t = submit(engine, "a.pt", 0);
	saving_done(t);
	(void)usleep(20000); /* by now they sleep, or the test shows nothing */
	hold_the_lane();
	return engine;
}

TEST(copiers_help_while_a_thread_waits)
{
	struct sfr_engine *engine = idle_engine();
	struct sfr_ticket *t = submit(engine, "a.pt", 0);

	CHECK_EQ(sem_wait(&lane_stands), 0);
	(void)usleep(20000); /* as above: the captured bytes are written */
	waiter_stands = true;
	while (!is_fully_handed_out(t))
		CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, 1000 * 1000), SFR_EAGAIN);
	CHECK(others_came);
	release_lane();
	end(engine, t);
	check_file("a.pt");
}

TEST(launch_wakes_the_lane_without_a_waiter)
{
	struct sfr_engine *engine = idle_engine();
	struct timespec limit;
	struct sfr_ticket *t = submit(engine, "a.pt", 0);

	CHECK_EQ(clock_gettime(CLOCK_REALTIME, &limit), 0);
	limit.tv_sec += 20;
	CHECK_EQ(sem_timedwait(&lane_stands, &limit), 0);
	release_lane();
	end(engine, t);
}

TEST(one_block_is_enough_for_several_copying_threads)
{
	for (uint32_t nr_blocks = 1; nr_blocks <= 2; nr_blocks++) {
		struct sfr_engine *engine = saving_engine_of(BLOCK, nr_blocks, 2, 2);
		struct sfr_ticket *first, *second;

		first = submit(engine, "a.pt", 0);
		second = submit(engine, "b.pt", SFR_SAVE_CHECK_BYTES);
		CHECK_EQ(sfr_save_wait(second, SFR_WAIT_COPIED, SFR_FOREVER), 0);
		CHECK_EQ(sfr_save_wait(first, SFR_WAIT_COPIED, SFR_FOREVER), 0);
		CHECK_EQ(sfr_save_give_verdict(first, -1), 0);
		CHECK_EQ(sfr_save_give_verdict(second, -1), 0);
		CHECK_EQ(sfr_save_wait(first, SFR_WAIT_ENDED, SFR_FOREVER), 0);
		CHECK_EQ(sfr_save_wait(second, SFR_WAIT_ENDED, SFR_FOREVER), 0);
		for (int i = 0; i < 4; i++) /* two of each kind */
			(void)saving_notice();
		CHECK_EQ(sfr_engine_close(engine, SFR_FOREVER), 0);
		sfr_ticket_put(first);
		sfr_ticket_put(second);
		sfr_engine_put(engine);
		check_file("a.pt");
		check_file("b.pt");
	}
}

TEST(cancel_during_a_shared_copy_returns_every_block)
{
	struct sfr_engine *engine = saving_engine_of(BLOCK, 16, 2, 2);
	struct sfr_stats stats;
	struct sfr_ticket *t;

	hold_the_lane();
	/* As if a thread waited for another save: no CRC is computed while copying, now or
	 * later. */
	sfr__lock(&engine->mu);
	engine->nr_waiters++;
	sfr__unlock(&engine->mu);
	t = submit(engine, "c.pt", 0);
	CHECK_EQ(sem_wait(&lane_stands), 0);
	while (!is_block_parked(t))
		CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, 1000 * 1000), SFR_EAGAIN);
	CHECK_EQ(sfr_save_cancel(t), 1);
	/* The lane still reads the sources. */
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, 1000 * 1000), SFR_EAGAIN);
	release_lane();
	saving_finish(t);
	sfr__lock(&engine->mu);
	engine->nr_waiters--;
	sfr__unlock(&engine->mu);
	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK_EQ(stats.leased_bytes, 0);
	sfr_ticket_put(t);
	saving_end(engine);
}

TEST(torn_source_is_detected_whichever_thread_copies_it)
{
	for (uint32_t flags = 0; flags <= SFR_SAVE_CHECK_BYTES; flags += SFR_SAVE_CHECK_BYTES) {
		struct sfr_engine *engine = saving_engine_of(BLOCK, 16, 2, 2);
		struct sfr_report report;
		struct sfr_ticket *t;

		hold_the_lane();
		t = submit(engine, "d.pt", flags);
		CHECK_EQ(sem_wait(&lane_stands), 0);
		/* The last line of a source is always sampled. With checksums any byte is
		 * detected. */
		bytes[2][flags ? 7 * MIB + 5 : lens[2] - 1] ^= 1;
		CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, 100 * 1000 * 1000), SFR_EAGAIN);
		release_lane();
		saving_finish(t);
		CHECK_EQ(sfr_save_report(t, &report), 0);
		CHECK_EQ(report.err.code, SFR_ETORN);
		CHECK_EQ(report.err.index, 2);
		sfr_ticket_put(t);
		saving_end(engine);
	}
}

TEST(shared_work_is_served_by_rank_and_then_by_age)
{
	static const enum sfr__shared_work_rank ranks[] = { SFR__RANK_NEEDS_BLOCKS,
							    SFR__RANK_HAS_MEMORY,
							    SFR__RANK_NEEDS_BLOCKS,
							    SFR__RANK_HAS_MEMORY };
	static const int order[] = { 1, 3, 0, 2 };
	struct sfr_engine *engine = saving_engine_of(BLOCK, 1, 1, 1);
	struct sfr__shared_work works[4] = { 0 }, *at;

	sfr__lock(&engine->mu); /* no thread sees the list meanwhile */
	for (int i = 0; i < 4; i++) {
		works[i].rank = ranks[i];
		sfr__shared_work_push_locked(engine, &works[i]);
	}
	at = engine->shared;
	for (int i = 0; i < 4; i++, at = at->next)
		CHECK(at == &works[order[i]]);
	CHECK(at == NULL);
	sfr__shared_work_remove_locked(engine, &works[2]); /* the last one */
	sfr__shared_work_remove_locked(engine, &works[1]); /* the first one */
	CHECK(engine->shared == &works[3] && works[3].next == &works[0] && works[0].next == NULL);
	sfr__shared_work_remove_locked(engine, &works[1]); /* not in the list: nothing happens */
	sfr__shared_work_remove_locked(engine, &works[3]);
	sfr__shared_work_remove_locked(engine, &works[0]);
	CHECK(engine->shared == NULL);
	sfr__unlock(&engine->mu);
	saving_end(engine);
}

BEGIN
{
	dir = saving_dir();
	for (int i = 0; i < NR_SOURCES; i++) {
		const uint64_t most = lens[i] > 2 * BLOCK ? lens[i] : 2 * BLOCK;

		bytes[i] = malloc(most);
		if (!bytes[i])
			exit(EXIT_FAILURE);
		for (uint64_t k = 0; k < most; k++)
			bytes[i][k] = (unsigned char)((k + (uint64_t)i * 7919) * 2654435761u >> 13);
	}
	return true;
}
