/* notice.c: notices arrive in the order in which they were posted, and a stop wakes waiting
 * threads. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "base/base.h"
#include "check.h"
#include "sfr.h"

static struct sfr_notice next(uint64_t slice_ns, int *rc)
{
	struct sfr_notice notice;

	*rc = sfr_notice_wait(&notice, slice_ns);
	return notice;
}

static void *wait_for_notice(void *arg)
{
	int rc;

	*(struct sfr_notice *)arg = next(SFR_FOREVER, &rc);
	return NULL;
}

/* Returns whether the other thread sleeps: it can wait for nothing but notices. */
static bool is_asleep(pid_t tid)
{
	char path[64], text[256] = "";
	FILE *file;

	(void)snprintf(path, sizeof(path), "/proc/self/task/%d/stat", (int)tid);
	file = fopen(path, "re");
	if (!file)
		return false;
	(void)!fgets(text, sizeof(text), file);
	(void)fclose(file);
	return strstr(text, ") S ") != NULL;
}

static pid_t waiter_tid;
static atomic_bool waiter_known;

static void *announce_and_wait(void *arg)
{
	waiter_tid = gettid();
	waiter_known = true;
	return wait_for_notice(arg);
}

/* Runs first, because nothing must have been posted before it. */
TEST(stop_and_notices_wake_a_waiting_thread)
{
	for (int with_news = 0; with_news < 2; with_news++) {
		struct sfr__notice copied = { .what = SFR_NOTICE_COPIED };
		struct sfr_notice got = { .what = 99 };
		pthread_t thread;

		waiter_known = false;
		CHECK_EQ(pthread_create(&thread, NULL, announce_and_wait, &got), 0);
		while (!waiter_known || !is_asleep(waiter_tid))
			(void)usleep(100);
		if (with_news)
			sfr__notice_post(&copied);
		else
			sfr_notice_post_stop();
		CHECK_EQ(pthread_join(thread, NULL), 0);
		CHECK_EQ(got.what, with_news ? SFR_NOTICE_COPIED : SFR_NOTICE_STOP);
	}
}

TEST(notices_arrive_complete_and_in_order)
{
	static char ticket, snapshot; /* never dereferenced */
	struct sfr__notice ended = { .what = SFR_NOTICE_ENDED,
				     .number = 41,
				     .ticket = (struct sfr_ticket *)&ticket };
	struct sfr__notice copied = { .what = SFR_NOTICE_SNAPSHOT,
				      .number = 42,
				      .snapshot = (struct sfr_snapshot *)&snapshot };
	struct sfr_notice got;
	int rc;

	for (int round = 0; round < 3; round++) {
		sfr__notice_post(&ended);
		sfr__notice_post_text("%s %d", "text", round);
		sfr__notice_post(&copied);
		got = next(0, &rc);
		CHECK_EQ(rc, 0);
		CHECK(got.what == SFR_NOTICE_ENDED && got.number == 41 &&
		      got.ticket == ended.ticket && !got.snapshot && got.text[0] == '\0');
		got = next(0, &rc);
		CHECK_EQ(rc, 0);
		CHECK(got.what == SFR_NOTICE_TEXT && strncmp(got.text, "text ", 5) == 0);
		CHECK_EQ(got.text[5], '0' + round);
		got = next(0, &rc);
		CHECK_EQ(rc, 0);
		CHECK(got.what == SFR_NOTICE_SNAPSHOT && got.number == 42 && !got.ticket &&
		      got.snapshot == copied.snapshot);
		got = next(0, &rc);
		CHECK_EQ(rc, SFR_EAGAIN);
		CHECK_EQ(got.what, 0);
	}
}

TEST(text_notice_is_dropped_without_memory)
{
	FOR_EVERY_FAILURE(run, "malloc", ENOMEM)
	{
		struct sfr_notice got;
		int rc;

		sfr__notice_post_text("text");
		got = next(0, &rc);
		CHECK((rc == 0 && got.what == SFR_NOTICE_TEXT) ||
		      (rc == SFR_EAGAIN && check_acted(&run)));
		check_end_fault(&run);
	}
}

TEST(notices_posted_before_a_stop_come_before_it)
{
	int rc;

	sfr__notice_post_text("text");
	sfr_notice_post_stop();
	CHECK_EQ(next(0, &rc).what, SFR_NOTICE_TEXT);
	CHECK_EQ(next(0, &rc).what, SFR_NOTICE_STOP);
	CHECK_EQ(rc, 0);
	CHECK_EQ(next(0, &rc).what, 0);
	CHECK_EQ(rc, SFR_EAGAIN);
}

TEST(notice_put_back_is_returned_first_and_once)
{
	static char ticket; /* never dereferenced */
	struct sfr_notice got;
	int rc;

	sfr__notice_post_text("first");
	sfr__notice_post_text("second");
	sfr_notice_post_stop();
	got = next(0, &rc);
	got.ticket = (struct sfr_ticket *)&ticket;
	got.number = 41;
	sfr_notice_put_back(&got);
	got = next(0, &rc);
	CHECK(rc == 0 && got.what == SFR_NOTICE_TEXT && strcmp(got.text, "first") == 0);
	CHECK(got.number == 41 && got.ticket == (struct sfr_ticket *)&ticket);
	got = next(0, &rc);
	CHECK(got.what == SFR_NOTICE_TEXT && strcmp(got.text, "second") == 0);
	CHECK(got.number == 0 && !got.ticket);
	got = next(0, &rc);
	CHECK_EQ(got.what, SFR_NOTICE_STOP);
	sfr_notice_put_back(&got);
	CHECK_EQ(next(SFR_FOREVER, &rc).what, SFR_NOTICE_STOP);
	CHECK_EQ(rc, 0);
	CHECK_EQ(next(0, &rc).what, 0);
	CHECK_EQ(rc, SFR_EAGAIN);
}
