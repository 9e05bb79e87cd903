/* Whole saves: states, errors, slots, detectors, close. */
#include <errno.h>
#include <pthread.h>
#include <sys/resource.h>
#include <time.h>

#include "saving.h"

static const char *dir;
static struct saving_state one, two;

TEST(save_is_complete_for_any_pool_and_writers)
{
	for (uint64_t nr_blocks = 1; nr_blocks <= 8; nr_blocks++)
		for (uint32_t nr_writers = 1; nr_writers <= 3; nr_writers++) {
			struct sfr_engine *engine = saving_engine(nr_blocks, nr_writers, 2);

			CHECK_EQ(saving_save(engine, dir, "a", &one, SFR_SAVE_DURABLE), 0);
			CHECK_EQ(saving_content(dir, "a"), 1);
			CHECK_EQ(saving_save(engine, dir, "a", &two, 0), 0);
			CHECK_EQ(saving_content(dir, "a"), 2);
			saving_end(engine);
		}
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
}

TEST(save_unmaps_its_own_memory)
{
	struct sfr_engine *engine = saving_engine(8, 1, 2);
	uint64_t nr_mapped, nr_unmapped;

	CHECK_EQ(saving_save(engine, dir, "a", &one, 0),
		 0); /* makes the pool's memory and the threads */
	nr_mapped = sfr_inject_count_calls("mmap");
	nr_unmapped = sfr_inject_count_calls("munmap");
	CHECK_EQ(saving_save(engine, dir, "a", &one, 0), 0);
	nr_mapped = sfr_inject_count_calls("mmap") - nr_mapped;
	CHECK(nr_mapped > 0);
	CHECK_EQ(sfr_inject_count_calls("munmap") - nr_unmapped, nr_mapped);
	saving_end(engine);
}

static struct sfr_ticket *awaited;

static void *wait_until_copied(void *arg)
{
	int *rc = arg;

	*rc = sfr_save_wait(awaited, SFR_WAIT_COPIED, SFR_FOREVER);
	return NULL;
}

TEST(wait_for_the_copies_may_begin_before_the_save_does)
{
	struct sfr_engine *engine = saving_engine(1, 2, 2);
	pthread_t thread;
	int rc = -1;

	CHECK_EQ(saving_new(engine, dir, "a", &one, SFR_SAVE_DURABLE, &awaited), 0);
	CHECK_EQ(sfr_save_wait(awaited, SFR_WAIT_COPIED, 1), SFR_EAGAIN);
	CHECK_EQ(pthread_create(&thread, NULL, wait_until_copied, &rc), 0);
	CHECK_EQ(saving_submit(awaited), 0);
	CHECK_EQ(pthread_join(thread, NULL), 0);
	CHECK_EQ(rc, 0);
	CHECK_EQ(sfr_save_give_verdict(awaited, -1), 0);
	saving_finish(awaited);
	CHECK_EQ(saving_content(dir, "a"), 1);
	sfr_ticket_put(awaited);
	saving_end(engine);
}

TEST(two_saves_at_a_time_share_a_pool_of_one_block)
{
	struct sfr_engine *engine = saving_engine(1, 2, 2);
	struct sfr_ticket *a, *b;

	CHECK_EQ(saving_new(engine, dir, "a", &one, SFR_SAVE_DURABLE, &a), 0);
	CHECK_EQ(saving_new(engine, dir, "b", &two, SFR_SAVE_DURABLE, &b), 0);
	CHECK_EQ(saving_submit(a), 0);
	CHECK_EQ(saving_submit(b), 0);
	CHECK_EQ(sfr_save_wait(b, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_give_verdict(b, -1), 0);
	saving_finish(a);
	saving_finish(b);
	CHECK_EQ(saving_content(dir, "a"), 1);
	CHECK_EQ(saving_content(dir, "b"), 2);
	sfr_ticket_put(a);
	sfr_ticket_put(b);
	saving_end(engine);
}

TEST(the_rename_waits_for_the_verdict_and_later_verdicts_are_ignored)
{
	struct sfr_engine *engine = saving_engine(8, 2, 2);
	struct sfr_report report;
	struct sfr_ticket *t;

	CHECK_EQ(saving_save(engine, dir, "a", &one, SFR_SAVE_DURABLE), 0);
	t = saving_started(engine, dir, "a", &two, SFR_SAVE_DURABLE);
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_STAGED, 50 * 1000 * 1000), SFR_EAGAIN);
	CHECK_EQ(saving_content(dir, "a"), 1);
	CHECK_EQ(sfr_save_give_verdict(t, -1), 0);
	CHECK_EQ(sfr_save_give_verdict(t, 3), SFR_ESTATE);
	saving_finish(t);
	CHECK_EQ(sfr_save_report(t, &report), 0);
	CHECK_EQ(report.state, SFR_DURABLE);
	CHECK(report.staged_ns >= report.launched_ns && report.ended_ns >= report.staged_ns);
	CHECK_EQ(t->facts.written_nbytes, report.nbytes);
	CHECK_EQ(saving_content(dir, "a"), 2);
	sfr_ticket_put(t);
	saving_end(engine);
}

TEST(a_torn_verdict_fails_the_save_and_leaves_the_old_file)
{
	struct sfr_engine *engine = saving_engine(8, 2, 2);
	struct sfr_report report;
	struct sfr_ticket *t;

	CHECK_EQ(saving_save(engine, dir, "a", &one, SFR_SAVE_DURABLE), 0);
	t = saving_started(engine, dir, "a", &two, SFR_SAVE_DURABLE);
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_give_verdict(t, 4), 0);
	saving_finish(t);
	CHECK_EQ(sfr_save_report(t, &report), 0);
	CHECK_EQ(report.state, SFR_FAILED);
	CHECK_EQ(report.err.code, SFR_ETORN);
	CHECK_EQ(report.err.index, 4);
	CHECK_EQ(saving_content(dir, "a"), 1);
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
	sfr_ticket_put(t);
	saving_end(engine);
}

/* A write that users must not make and the detectors must find: a deliberate race with the lane. */
__attribute__((noinline, no_sanitize("thread"))) static void scribble(unsigned char *at)
{
	*at = 8;
}

/* Writes to a deferred storage before the lane has copied it, without a change of its version. */
static int save_with_a_write_behind(uint32_t flags, uint32_t storage, size_t at, int64_t *index)
{
	static struct saving_state s;
	struct sfr_engine *engine = saving_engine(8, 1, 2);
	struct sfr_report report;
	struct sfr_ticket *t;

	saving_fill(&s, 7);
	saving_slow("lane_copy", 30 * 1000 * 1000);
	t = saving_started(engine, dir, "torn", &s, flags);
	scribble(&s.bytes[storage][at]); /* the first lane copy is still asleep */
	saving_finish(t);
	sfr_inject_clear();
	CHECK_EQ(sfr_save_report(t, &report), 0);
	sfr_ticket_put(t);
	saving_end(engine);
	*index = report.err.index;
	return report.err.code;
}

TEST(write_to_a_sampled_line_is_detected_in_the_copy)
{
	int64_t index;

	/* With 4 deferred storages of 157 lines each, every line is a sample. */
	for (uint32_t storage = 2; storage < SAVING_NR; storage++) {
		CHECK_EQ(save_with_a_write_behind(0, storage, 0, &index), SFR_ETORN);
		CHECK_EQ(index, storage);
		CHECK_EQ(save_with_a_write_behind(0, storage, SAVING_LEN - storage - 1, &index),
			 SFR_ETORN);
		CHECK_EQ(index, storage);
	}
	CHECK_EQ(saving_content(dir, "torn"), -1);
}

TEST(check_bytes_detects_any_changed_byte)
{
	int64_t index;

	for (size_t at = 1; at < SAVING_LEN - SAVING_NR; at += 2477) {
		CHECK_EQ(save_with_a_write_behind(SFR_SAVE_CHECK_BYTES, 3, at, &index), SFR_ETORN);
		CHECK_EQ(index, 3);
	}
}

TEST(write_after_the_copy_does_not_fail_the_save)
{
	static struct saving_state s;
	struct sfr_engine *engine = saving_engine(8, 2, 2);
	struct sfr_ticket *t;

	saving_fill(&s, 5);
	saving_slow("pwrite", 5 * 1000 * 1000);
	t = saving_started(engine, dir, "a", &s, SFR_SAVE_CHECK_BYTES);
	memset(s.bytes[0], 9, sizeof(s.bytes[0])); /* captured */
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_give_verdict(t, -1), 0);
	memset(s.bytes, 9, sizeof(s.bytes));
	saving_finish(t);
	sfr_inject_clear();
	CHECK_EQ(saving_content(dir, "a"), 5);
	sfr_ticket_put(t);
	saving_end(engine);
}

TEST(a_save_can_be_cancelled_until_the_rename)
{
	static const char *const slow_calls[] = { "open", "lane_copy", "pwrite", "fdatasync" };
	struct sfr_engine *engine = saving_engine(2, 1, 2);
	struct sfr_ticket *t;

	CHECK_EQ(saving_save(engine, dir, "a", &one, SFR_SAVE_DURABLE), 0);
	for (int at = 0; at < 4; at++) {
		saving_slow(slow_calls[at], 20 * 1000 * 1000);
		CHECK_EQ(saving_new(engine, dir, "a", &two, SFR_SAVE_DURABLE, &t), 0);
		CHECK_EQ(saving_submit(t), 0);
		if (at == 3) {
			CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
			CHECK_EQ(sfr_save_give_verdict(t, -1), 0);
		}
		CHECK_EQ(sfr_save_cancel(t), 1);
		CHECK_EQ(sfr_save_cancel(t), 1);
		saving_finish(t);
		sfr_inject_clear();
		CHECK_EQ(saving_state_of(t), SFR_CANCELLED);
		CHECK_EQ(saving_content(dir, "a"), 1);
		CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
		sfr_ticket_put(t);
	}
	t = saving_started(engine, dir, "a", &two, SFR_SAVE_DURABLE);
	saving_finish(t);
	CHECK_EQ(sfr_save_cancel(t), 0); /* too late */
	CHECK_EQ(saving_content(dir, "a"), 2);
	sfr_ticket_put(t);
	saving_end(engine);
}

TEST(a_save_may_be_abandoned_in_the_call)
{
	struct sfr_engine *engine = saving_engine(8, 2, 1);
	struct sfr_ticket *t;

	CHECK_EQ(saving_new(engine, dir, "gone", &two, SFR_SAVE_DURABLE, &t), 0);
	CHECK_EQ(sfr_save_admit(t, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_launch(t), SFR_ESTATE); /* it was not captured */
	sfr_save_abandon(t);
	CHECK_EQ(sfr_save_launch(t), SFR_ESTATE);
	saving_done(t);
	CHECK_EQ(saving_content(dir, "gone"), -1);
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
	CHECK_EQ(saving_save(engine, dir, "a", &one, 0), 0); /* its slot is free again */
	saving_end(engine);
}

/* Another thread may wait for a save from before it is submitted, as the one that sends it does. */
TEST(save_without_a_slot_ends_when_it_is_abandoned)
{
	struct sfr_engine *engine = saving_engine(8, 1, 1);
	struct sfr_ticket *a, *t;

	a = saving_started(engine, dir, "a", &one, 0);
	CHECK_EQ(saving_new(engine, dir, "gone", &two, SFR_SAVE_NO_WAIT, &t), 0);
	CHECK_EQ(sfr_save_admit(t, SFR_FOREVER), SFR_EBUSY);
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_ENDED, 1000 * 1000), SFR_EAGAIN);
	sfr_save_abandon(t);
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_ENDED, SFR_FOREVER), 0);
	CHECK_EQ(saving_state_of(t), SFR_CANCELLED);
	CHECK_EQ(sfr_save_admit(t, SFR_FOREVER), SFR_ESTATE);
	sfr_ticket_put(t);
	saving_done(a);
	saving_end(engine);
}

/* A thread that sends the bytes can fail before the call has got to the admission. */
TEST(save_may_be_cancelled_before_it_is_admitted)
{
	struct sfr_engine *engine = saving_engine(8, 1, 1);
	struct sfr_ticket *t;

	CHECK_EQ(saving_save(engine, dir, "a", &one, SFR_SAVE_DURABLE), 0);
	CHECK_EQ(saving_new(engine, dir, "a", &two, SFR_SAVE_DURABLE, &t), 0);
	CHECK_EQ(sfr_save_cancel(t), 1);
	CHECK_EQ(sfr_save_admit(t, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_capture(t, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_launch(t), 0);
	saving_finish(t);
	CHECK_EQ(saving_state_of(t), SFR_CANCELLED);
	CHECK_EQ(saving_content(dir, "a"), 1);
	sfr_ticket_put(t);
	saving_end(engine);
}

TEST(slots_are_bounded_except_for_nested_saves)
{
	struct sfr_engine *engine = saving_engine(8, 1, 1);
	struct sfr_ticket *a, *b, *c, *nested;
	struct sfr_report report;

	CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &a), 0);
	CHECK_EQ(saving_submit(a), 0); /* without a verdict it stays in flight */
	CHECK_EQ(saving_new(engine, dir, "b", &one, 0, &b), 0);
	CHECK_EQ(sfr_save_admit(b, 1000 * 1000), SFR_EAGAIN);
	CHECK_EQ(saving_new(engine, dir, "c", &one, SFR_SAVE_NO_WAIT, &c), 0);
	CHECK_EQ(sfr_save_admit(c, SFR_FOREVER), SFR_EBUSY);
	nested = saving_started(engine, dir, "n", &two, SFR_SAVE_NESTED);
	CHECK_EQ(sfr_save_report(nested, &report), 0);
	CHECK_EQ(report.over_slots, 1);
	saving_finish(a);
	saving_finish(nested);
	CHECK_EQ(saving_submit(b), 0);
	saving_finish(b);
	CHECK_EQ(sfr_save_report(b, &report), 0);
	CHECK(report.slot_wait_ns >= 1000 * 1000);
	CHECK_EQ(saving_content(dir, "n"), 2);
	sfr_ticket_put(a);
	sfr_ticket_put(b);
	sfr_ticket_put(c);
	sfr_ticket_put(nested);
	saving_end(engine);
}

TEST(slot_of_another_writer_counts_among_the_saves_in_flight)
{
	struct sfr_engine *engine = saving_engine(8, 1, 1);
	struct sfr_slot *slot, *other;
	struct sfr_ticket *t;
	struct sfr_stats stats;

	CHECK_EQ(sfr_slot_take(engine, 0, SFR_FOREVER, &slot), 0);
	sfr_slot_mark_launched(slot);
	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK_EQ(stats.saves_in_flight, 1);
	CHECK_EQ(sfr_slot_take(engine, 0, 1000 * 1000, &other), SFR_EAGAIN);
	CHECK(other == NULL);
	CHECK_EQ(sfr_slot_take(engine, SFR_SAVE_NO_WAIT, SFR_FOREVER, &other), SFR_EBUSY);
	CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
	CHECK_EQ(sfr_save_admit(t, 1000 * 1000), SFR_EAGAIN);
	CHECK_EQ(sfr_slot_take(engine, SFR_SAVE_NESTED, SFR_FOREVER, &other), 0);
	sfr_slot_free(other);
	sfr_slot_give_back(slot);
	sfr_slot_give_back(slot);
	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK_EQ(stats.saves_in_flight, 0);
	CHECK_EQ(stats.saves_total, 2);
	CHECK_EQ(saving_submit(t), 0);
	saving_done(t);
	sfr_slot_free(slot);
	sfr_slot_free(NULL);
	saving_end(engine);
}

/* A checkpoint of several files, or of objects in a store, is one save. */
TEST(unordered_saves_of_a_larger_save_use_no_slot_of_their_own)
{
	struct sfr_engine *engine = saving_engine(8, 1, 1);
	struct sfr_ticket *t[2];
	struct sfr_slot *slot;
	struct sfr_stats stats;

	CHECK_EQ(sfr_slot_take(engine, 0, SFR_FOREVER, &slot), 0);
	sfr_slot_mark_launched(slot);
	t[0] = saving_started(engine, dir, "a", &one, SFR_SAVE_UNORDERED);
	t[1] = saving_started(engine, dir, "b", &one, SFR_SAVE_UNORDERED);
	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK_EQ(stats.saves_in_flight, 1);
	CHECK_EQ(stats.saves_total, 1);
	saving_done(t[0]);
	saving_done(t[1]);
	sfr_slot_free(slot);
	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK_EQ(stats.saves_in_flight, 0);
	CHECK_EQ(stats.saves_total, 1);
	saving_end(engine);
}

static void *take_a_slot(void *engine)
{
	struct sfr_slot *slot;

	CHECK_EQ(sfr_slot_take(engine, 0, 1000 * 1000, &slot), SFR_EAGAIN);
	return NULL;
}

/* The save would wait forever: only this thread can give the slot back. */
TEST(save_does_not_wait_for_a_slot_that_its_own_thread_has)
{
	struct sfr_engine *engine = saving_engine(8, 1, 1);
	struct sfr_report report;
	struct sfr_slot *slot;
	struct sfr_ticket *t;
	pthread_t other;

	CHECK_EQ(sfr_slot_take(engine, 0, SFR_FOREVER, &slot), 0);
	CHECK_EQ(pthread_create(&other, NULL, take_a_slot, engine), 0);
	CHECK_EQ(pthread_join(other, NULL), 0);
	t = saving_started(engine, dir, "a", &one, SFR_SAVE_NO_WAIT);
	saving_finish(t);
	CHECK_EQ(sfr_save_report(t, &report), 0);
	CHECK_EQ(report.over_slots, 1);
	sfr_ticket_put(t);
	sfr_slot_free(slot);
	saving_end(engine);
}

TEST(close_waits_for_launched_slots_only_of_its_own_thread)
{
	struct sfr_engine *engine = saving_engine(8, 1, 1);
	struct sfr_slot *slot, *late;

	CHECK_EQ(sfr_slot_take(engine, 0, SFR_FOREVER, &slot), 0);
	sfr_slot_mark_launched(slot);
	CHECK_EQ(sfr_engine_close(engine, 1000 * 1000), SFR_EAGAIN);
	CHECK_EQ(sfr_slot_take(engine, 0, SFR_FOREVER, &late), SFR_ECLOSED);
	sfr_slot_free(slot);
	CHECK_EQ(sfr_engine_close(engine, SFR_FOREVER), 0);
	saving_end(engine);

	engine = saving_engine(8, 1, 1);
	CHECK_EQ(sfr_slot_take(engine, 0, SFR_FOREVER, &slot), 0);
	CHECK_EQ(sfr_engine_close(engine, SFR_FOREVER), 0); /* as a signal handler would */
	saving_end(engine);
	sfr_slot_free(slot); /* the last reference */
}

TEST(a_closed_engine_refuses_saves_and_close_may_be_called_again)
{
	struct sfr_engine *engine = saving_engine(8, 1, 2);
	struct sfr_ticket *before, *t;
	struct sfr_stats stats;

	before = saving_started(engine, dir, "before", &one, 0);
	CHECK_EQ(sfr_engine_close(engine, 1000 * 1000), SFR_EAGAIN); /* one save is in flight */
	CHECK_EQ(saving_new(engine, dir, "a", &one, 0, &t), 0);
	CHECK_EQ(sfr_save_admit(t, SFR_FOREVER), SFR_ECLOSED);
	sfr_ticket_put(t);
	saving_finish(before);
	CHECK_EQ(saving_content(dir, "before"), 1);
	sfr_ticket_put(before);
	CHECK_EQ(sfr_engine_close(engine, SFR_FOREVER), 0);
	CHECK_EQ(sfr_engine_close(engine, SFR_FOREVER), 0);
	CHECK_EQ(sfr_engine_warm_up(engine, 1), SFR_ECLOSED);
	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK_EQ(stats.committed_bytes, 0);
	CHECK_EQ(stats.saves_total, 1);
	saving_end(engine);
}

TEST(close_does_not_wait_for_a_save_its_thread_is_capturing)
{
	struct sfr_engine *engine = saving_engine(8, 1, 2);
	struct sfr_ticket *t;

	CHECK_EQ(saving_new(engine, dir, "late", &two, 0, &t), 0);
	CHECK_EQ(sfr_save_admit(t, SFR_FOREVER), 0);
	CHECK_EQ(sfr_engine_close(engine, SFR_FOREVER), 0); /* as a signal handler would */
	CHECK_EQ(sfr_save_capture(t, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_launch(t), 0);
	saving_finish(t);
	CHECK_EQ(saving_content(dir, "late"), 2);
	sfr_ticket_put(t);
	saving_end(engine);
}

TEST(dropping_the_last_reference_ends_the_engines_threads)
{
	struct sfr_engine *engine = saving_engine(8, 3, 2);
	uint64_t nr_started = sfr_inject_count_calls("thread_create");
	uint64_t nr_ended = sfr_inject_count_calls("thread_join");

	CHECK_EQ(saving_save(engine, dir, "a", &one, 0), 0);
	sfr_engine_put(engine);
	CHECK_EQ(sfr_log_stop(), 0);
	nr_started = sfr_inject_count_calls("thread_create") - nr_started;
	CHECK(nr_started >= 4);
	CHECK_EQ(sfr_inject_count_calls("thread_join") - nr_ended, nr_started);
}

TEST(wait_of_zero_never_sleeps_and_reached_takes_no_lock)
{
	struct sfr_engine *engine = saving_engine(8, 1, 1);
	struct rusage before, after;
	struct sfr_report report;
	uint64_t written, nbytes;
	enum sfr_state state;
	int staged;
	struct sfr_ticket *t = saving_started(engine, dir, "a", &one, SFR_SAVE_DURABLE);

	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	/* Without a verdict the save is not staged and cannot end. */
	CHECK_EQ(getrusage(RUSAGE_THREAD, &before), 0);
	for (unsigned i = 0; i < 1000; i++)
		CHECK_EQ(sfr_save_wait(t, SFR_WAIT_STAGED, 0), SFR_EAGAIN);
	CHECK_EQ(getrusage(RUSAGE_THREAD, &after), 0);
	CHECK(after.ru_nvcsw - before.ru_nvcsw < 100); /* each sleep is a switch */
	sfr__lock(&engine->mu);
	/* if it took the lock, it would stop here */
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_ENDED, 0), SFR_EAGAIN);
	CHECK_EQ(sfr_save_state(t, &state, &staged), 0);
	CHECK(state == SFR_STAGING && !staged);
	CHECK_EQ(sfr_save_progress(t, &written, &nbytes), 0);
	CHECK(written <= nbytes); /* equal if the writers were fast */
	sfr__unlock(&engine->mu);
	saving_finish(t);
	sfr__lock(&engine->mu);
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_ENDED, 0), 0);
	CHECK_EQ(sfr_save_state(t, &state, &staged), 0);
	CHECK(state == SFR_DURABLE && staged);
	CHECK_EQ(sfr_save_report(t, &report), 0);
	CHECK_EQ(t->facts.written_nbytes, nbytes);
	sfr__unlock(&engine->mu);
	sfr_ticket_put(t);
	saving_end(engine);
}

/* A writer ends the save, and the log's thread may let it go earlier. */
TEST(failed_save_has_ended_when_it_leaves_the_log)
{
	struct sfr_engine *engine = saving_engine(8, 1, 1);

	for (unsigned i = 0; i < 500; i++) {
		struct sfr_ticket *t = saving_started(engine, dir, "a", &one, 0);

		CHECK_EQ(sfr_save_cancel(t), 1);
		while (sfr_log_pending() > 0) /* without a sleep, to hit the moment after */
			;
		CHECK_EQ(sfr_save_wait(t, SFR_WAIT_ENDED, 0), 0);
		while (saving_notice() != SFR_NOTICE_ENDED)
			;
		sfr_ticket_put(t);
	}
	saving_end(engine);
}

TEST(bad_options_are_refused)
{
	struct sfr_engine_opts opts = {
		.pool_bytes = 8192, .block_bytes = 8192, .nr_writers = 1, .max_in_flight = 1
	};
	const struct sfr_engine_opts good = opts;
	struct sfr_engine *engine;

	opts.pool_bytes = 4096;
	CHECK_EQ(sfr_engine_new(&opts, &engine), -EINVAL);
	opts = good, opts.block_bytes = 5000;
	CHECK_EQ(sfr_engine_new(&opts, &engine), -EINVAL);
	opts = good, opts.block_bytes = 0;
	CHECK_EQ(sfr_engine_new(&opts, &engine), -EINVAL);
	opts = good, opts.nr_writers = 0;
	CHECK_EQ(sfr_engine_new(&opts, &engine), -EINVAL);
	opts = good, opts.max_in_flight = 0;
	CHECK_EQ(sfr_engine_new(&opts, &engine), -EINVAL);
}

/* Whatever call fails, the path holds the old or the new file, the save reports the
 * error, nothing is left over, and the next save works. */
static void every_call_may_fail(const char *call, int err)
{
	struct sfr_engine *good = saving_engine(8, 1, 1);
	int before;

	CHECK_EQ(saving_save(good, dir, "every", &one, SFR_SAVE_DURABLE), 0);
	saving_end(good);
	before = nr_fds();
	FOR_EVERY_FAILURE(run, call, err)
	{
		const struct sfr_engine_opts opts = { .pool_bytes = 3 * SAVING_BLOCK,
						      .block_bytes = SAVING_BLOCK,
						      .nr_writers = 2,
						      .max_in_flight = 2 };
		struct sfr_engine *engine = NULL;
		struct saving_state *s = &two;
		int rc = sfr_engine_new(&opts, &engine), found;

		if (rc == 0)
			rc = saving_save(engine, dir, "every", s, SFR_SAVE_DURABLE);
		CHECK(rc == 0 || check_acted(&run));
		check_end_fault(&run);
		found = saving_content(dir, "every");
		CHECK(found == 1 || found == 2);
		if (rc == 0)
			CHECK_EQ(found, 2);
		if (engine) {
			CHECK_EQ(saving_save(engine, dir, "every", &one, SFR_SAVE_DURABLE), 0);
			CHECK_EQ(saving_content(dir, "every"), 1);
			saving_end(engine);
		}
		CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
		CHECK_EQ(nr_fds(), before);
	}
}

TEST(save_without_memory_in_any_call_fails_and_leaks_nothing)
{
	every_call_may_fail("*", ENOMEM);
}

TEST(failure_of_any_file_call_leaves_a_complete_file_and_a_usable_engine)
{
	static const char *const calls[] = { "open",  "pwrite", "fdatasync",
					     "fsync", "rename", "fallocate" };
	static const int errs[] = { EIO, ENOSPC }; /* test_file_faults.c has the others */

	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++)
		for (size_t k = 0; k < sizeof(errs) / sizeof(errs[0]); k++)
			every_call_may_fail(calls[i], errs[k]);
}

TEST(failed_open_fails_the_save_not_the_call)
{
	struct sfr_engine *engine = saving_engine(1, 1, 2);
	struct sfr_report report;
	struct sfr_ticket *t;

	t = saving_started(engine, "/nowhere/at/all", "a", &one, SFR_SAVE_DURABLE);
	saving_finish(t);
	CHECK_EQ(sfr_save_report(t, &report), 0);
	CHECK_EQ(report.state, SFR_FAILED);
	CHECK_EQ(report.err.code, -ENOENT);
	CHECK_EQ(report.err.phase, SFR_PHASE_OPEN);
	sfr_ticket_put(t);
	saving_end(engine);
}

static void *close_it(void *engine)
{
	return (void *)(intptr_t)sfr_engine_close(engine, SFR_FOREVER);
}

TEST(a_save_that_waits_for_a_slot_is_refused_when_the_engine_closes)
{
	struct sfr_engine *engine = saving_engine(8, 1, 1);
	struct sfr_ticket *a, *b;
	pthread_t closer;
	void *rc;

	a = saving_started(engine, dir, "a", &one, 0);
	CHECK_EQ(pthread_create(&closer, NULL, close_it, engine), 0);
	CHECK_EQ(saving_new(engine, dir, "b", &one, 0, &b), 0);
	CHECK_EQ(sfr_save_admit(b, SFR_FOREVER), SFR_ECLOSED);
	saving_finish(a);
	CHECK_EQ(pthread_join(closer, &rc), 0);
	CHECK_EQ((intptr_t)rc, 0);
	sfr_ticket_put(a);
	sfr_ticket_put(b);
	saving_end(engine);
}

TEST(every_arrow_of_the_diagram_was_taken)
{
	static const enum sfr_state arrows[][2] = {
		{ SFR_NEW, SFR_CAPTURING },     { SFR_NEW, SFR_CANCELLED },
		{ SFR_CAPTURING, SFR_STAGING }, { SFR_CAPTURING, SFR_ENDING },
		{ SFR_STAGING, SFR_STAGED },    { SFR_STAGING, SFR_ENDING },
		{ SFR_STAGED, SFR_WRITING },    { SFR_STAGED, SFR_ENDING },
		{ SFR_WRITING, SFR_READY },     { SFR_WRITING, SFR_ENDING },
		{ SFR_READY, SFR_COMMITTING },  { SFR_COMMITTING, SFR_DURABLE },
		{ SFR_COMMITTING, SFR_FAILED }, { SFR_ENDING, SFR_FAILED },
		{ SFR_ENDING, SFR_CANCELLED },
	};

	for (size_t i = 0; i < sizeof(arrows) / sizeof(arrows[0]); i++)
		if (!CHECK(sfr__ticket_nr_transitions(arrows[i][0], arrows[i][1]) > 0))
			(void)fprintf(stderr, "arrow %zu\n", i);
	for (unsigned from = SFR_DURABLE; from < SFR_NR_STATES; from++)
		for (unsigned to = 0; to < SFR_NR_STATES; to++)
			/* no arrow leaves an end state */
			CHECK_EQ(sfr__ticket_nr_transitions(from, to), 0);
}

BEGIN
{
	dir = saving_dir();
	saving_fill(&one, 1);
	saving_fill(&two, 2);
	CHECK_EQ(sfr_inject_install(), 0);
	sfr__host_tune(4096, 8192); /* so that copiers help with small copies too */
	return true;
}
