/* The state that a save reports while it runs. */
#include <errno.h>
#include <unistd.h>

#include "saving.h"
#include "pool_figures.h"

enum { NR_BLOCKS = 16 };

static const char *dir;
static struct saving_state one;

static void free_engine(struct sfr_engine *engine)
{
	pool_figures_agree(engine->pool);
	saving_end(engine);
}

/* Holds every write of a block until the fault is removed. */
static const struct sfr_fault stuck = {
	.call = "pwrite", .nth = 1, .sticky = 1, .limit = -1, .delay_ns = SFR_FOREVER
};

TEST(save_reports_staged_until_every_block_is_written)
{
	struct sfr_engine *engine = saving_engine(NR_BLOCKS, 1, 2);
	struct sfr_ticket *t;

	CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
	CHECK_EQ(sfr_inject_add_fault(&stuck), 0);
	CHECK_EQ(saving_submit(t), 0);
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	CHECK_EQ(saving_state_of(t), SFR_STAGING);
	CHECK_EQ(sfr_save_give_verdict(t, -1), 0);
	CHECK_EQ(saving_state_of(t), SFR_STAGED);
	CHECK_EQ(sfr_inject_remove_fault(&stuck), 0);
	saving_finish(t);
	CHECK_EQ(saving_state_of(t), SFR_DURABLE);
	sfr_ticket_put(t);
	free_engine(engine);
}

TEST(report_says_that_a_directory_could_not_be_synced)
{
	const struct sfr_fault fault = {
		.call = "fsync", .nth = 1, .sticky = 1, .err = EINVAL, .limit = -1
	};
	struct sfr_engine *engine = saving_engine(NR_BLOCKS, 1, 2);
	struct sfr_report report;
	struct sfr_ticket *t;

	CHECK_EQ(saving_new(engine, dir, "a", &one, SFR_SAVE_DURABLE, &t), 0);
	CHECK_EQ(sfr_inject_add_fault(&fault), 0);
	CHECK_EQ(saving_submit(t), 0);
	saving_finish(t);
	CHECK_EQ(sfr_inject_remove_fault(&fault), 0);
	CHECK_EQ(sfr_save_report(t, &report), 0);
	CHECK_EQ(report.state, SFR_DURABLE);
	CHECK_EQ(report.err.index, -1);
	CHECK(strstr(report.fallback[SFR_FALLBACK_UNSYNCED], "cannot sync a directory (EINVAL)") !=
	      NULL);
	sfr_ticket_put(t);
	free_engine(engine);
}

/* The lane waits for blocks in slices. The end of a slice is no failure. */
TEST(lane_goes_on_after_waiting_for_a_block)
{
	struct sfr_engine *engine = saving_engine(NR_BLOCKS, 1, 2);
	struct sfr__block *blocks[NR_BLOCKS];
	struct sfr_ticket *t;
	unsigned nr = 0;

	CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
	CHECK_EQ(sfr_inject_add_fault(&stuck), 0); /* no captured block comes back */
	CHECK_EQ(sfr_save_admit(t, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_capture(t, SFR_FOREVER), 0);
	while (sfr__pool_get(engine->pool, 0, SAVING_BLOCK, 0, &blocks[nr]) == 0)
		nr++;
	CHECK(nr > 0);
	CHECK_EQ(sfr_save_launch(t), 0);
	(void)usleep(120000);
	CHECK_EQ(saving_state_of(t), SFR_STAGING);
	while (nr > 0)
		sfr__pool_put(engine->pool, blocks[--nr]);
	CHECK_EQ(sfr_inject_remove_fault(&stuck), 0);
	saving_finish(t);
	CHECK_EQ(saving_state_of(t), SFR_DURABLE);
	CHECK_EQ(saving_content(dir, "a"), 1);
	sfr_ticket_put(t);
	free_engine(engine);
}

/* There is no save: the caller gets the error, and no notice reports a failed save. */
TEST(call_refused_by_a_full_pool_makes_no_save)
{
	struct sfr_engine *engine = saving_engine(NR_BLOCKS, 1, 2);
	const uint64_t all[1] = { NR_BLOCKS * (uint64_t)SAVING_BLOCK };
	struct sfr__lease lease;
	struct sfr_ticket *t;
	char *addr;

	CHECK_EQ(sfr__pool_lease(engine->pool, all, 1, false, 0, 0, &addr, &lease), 0);
	CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
	CHECK_EQ(sfr_save_admit(t, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_capture(t, SFR_FOREVER), SFR_EEXHAUSTED);
	sfr_save_abandon(t);
	CHECK_EQ(sfr_save_capture(t, SFR_FOREVER), SFR_ESTATE);
	CHECK_EQ(sfr_save_launch(t), SFR_ESTATE);
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_ENDED, SFR_FOREVER), 0);
	CHECK_EQ(saving_state_of(t), SFR_CANCELLED);
	while (saving_notice() != SFR_NOTICE_ENDED)
		;
	sfr_ticket_put(t);
	sfr__pool_unlease(engine->pool, &lease);
	free_engine(engine);
}

/* With another clock than that of the deadlines, waits would return at once or never. */
TEST(engine_conditions_use_the_clock_of_deadlines)
{
	struct sfr_engine *engine =
		saving_engine(NR_BLOCKS, 1, 2); /* without threads, so nothing wakes the waiter */
	pthread_cond_t *all[] = { &engine->cv_lane, &engine->cv_writer, &engine->cv_state };

	sfr__lock(&engine->mu);
	for (int i = 0; i < 3; i++) {
		uint64_t until = sfr__now_ns() + 2000000;

		CHECK_EQ(sfr__cond_wait(all[i], &engine->mu, until), SFR_EAGAIN);
		CHECK(sfr__now_ns() >= until);
	}
	sfr__unlock(&engine->mu);
	free_engine(engine);
}

TEST(storage_of_several_chunks_is_copied_completely)
{
	enum { LEN = (9 << 20) + 5 };
	static unsigned char large[2][LEN];
	struct sfr_source sources[2];
	struct sfr_engine *engine;
	struct sfr_snapshot *s;
	int64_t torn;
	uint64_t len;
	char *base;

	for (unsigned i = 0; i < 2; i++) {
		for (uint32_t k = 0; k < LEN; k++)
			large[i][k] = (unsigned char)(k >> 12 ^ k ^ i);
		sources[i] = (struct sfr_source){ .addr = (uint64_t)(uintptr_t)large[i],
						  .nbytes = LEN,
						  .lane = i ? SFR_LANE_HOST : SFR_CAPTURED };
	}
	engine = saving_engine_of(1u << 20, 64, 1, 1);
	CHECK_EQ(sfr_snapshot_new(engine, sources, 2, 0, &s), 0);
	CHECK_EQ(sfr_snapshot_lease(s, SFR_FOREVER), 0);
	CHECK_EQ(sfr_snapshot_start(s), 0);
	CHECK_EQ(sfr_snapshot_wait(s, SFR_FOREVER, &torn), 0);
	CHECK_EQ(torn, -1);
	CHECK_EQ(saving_notice(), SFR_NOTICE_SNAPSHOT);
	sfr_snapshot_memory(s, &base, &len);
	for (uint32_t i = 0; i < 2; i++)
		CHECK(memcmp(base + sfr_snapshot_offset(s, i), large[i], LEN) == 0);
	sfr_snapshot_remove_view(s);
	sfr_snapshot_put(s);
	free_engine(engine);
}

BEGIN
{
	dir = saving_dir();
	saving_fill(&one, 1);
	CHECK_EQ(sfr_inject_install(), 0);
	return true;
}
