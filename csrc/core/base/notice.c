/* Notices: messages from the core's threads to the caller.
 *
 * Lane, writer and log threads never run the caller's code. They post notices to this queue, and
 * one thread of the caller takes them (sfr_notice_wait). That thread compares tensors' version
 * counters, releases sources, sets the results of futures and runs callbacks. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "base/queue.h"

static struct {
	struct sfr__mutex mu; /* guards the whole struct; no other lock is taken under it */
	pthread_cond_t cv;
	bool cv_ready;
	SFR__QUEUE(struct sfr__notice) queue;
	struct sfr_notice put_back; /* given to sfr_notice_put_back; none if .what is 0 */
	unsigned nr_stops;          /* calls of sfr_notice_post_stop that no waiter has seen */
} notices = { .mu = SFR__MUTEX(SFR__LOCK_NOTICES) };

void sfr__notice_post(struct sfr__notice *notice)
{
	sfr__lock(&notices.mu);
	sfr__queue_push(&notices.queue, notice);
	pthread_cond_signal(&notices.cv);
	sfr__unlock(&notices.mu);
}

void sfr__notice_post_text(const char *format, ...)
{
	enum { TEXT_LEN = 1024 };
	struct sfr__notice *notice = sfr_sys.malloc(sizeof(*notice));
	char *text = sfr_sys.malloc(TEXT_LEN);
	va_list args;

	if (!notice || !text) {
		sfr_sys.free(notice);
		sfr_sys.free(text);
		return;
	}
	va_start(args, format);
	(void)vsnprintf(text, TEXT_LEN, format, args); /* cut off when too long */
	va_end(args);
	*notice = (struct sfr__notice){ .what = SFR_NOTICE_TEXT, .text = text };
	sfr__notice_post(notice);
}

/* Copies the notice to *out, which takes over the notice's reference. */
static void hand_over_notice(struct sfr__notice *notice, struct sfr_notice *out)
{
	out->what = notice->what;
	out->number = notice->number;
	out->ticket = notice->ticket;
	out->snapshot = notice->snapshot;
	(void)snprintf(out->text, sizeof(out->text), "%s", notice->text ? notice->text : "");
	if (notice->what == SFR_NOTICE_TEXT) { /* others are embedded in a ticket or snapshot */
		sfr_sys.free(notice->text);
		sfr_sys.free(notice);
	}
}

int sfr_notice_wait(struct sfr_notice *out, uint64_t slice_ns)
{
	uint64_t deadline = sfr__deadline(slice_ns);
	struct sfr__notice *notice;
	int rc = 0;

	*out = (struct sfr_notice){ .what = 0 };
	sfr__lock(&notices.mu);
	if (notices.put_back.what) {
		*out = notices.put_back;
		notices.put_back.what = 0;
		sfr__unlock(&notices.mu);
		return 0;
	}
	/* The first wait initialises the condition, because a static initialiser cannot choose
	 * CLOCK_MONOTONIC. Before that no thread waits, so no signal is lost. */
	if (!notices.cv_ready)
		notices.cv_ready = sfr__cond_init(&notices.cv) == 0;
	while (!notices.queue.head && !notices.nr_stops && rc == 0)
		rc = sfr__cond_wait(&notices.cv, &notices.mu, deadline);
	notice = sfr__queue_pop(&notices.queue);
	if (!notice && notices.nr_stops) {
		notices.nr_stops--;
		out->what = SFR_NOTICE_STOP;
	}
	sfr__unlock(&notices.mu);
	if (notice)
		hand_over_notice(notice, out);
	return out->what ? 0 : SFR_EAGAIN;
}

void sfr_notice_put_back(const struct sfr_notice *notice)
{
	sfr__lock(&notices.mu);
	notices.put_back = *notice;
	sfr__unlock(&notices.mu);
}

void sfr_notice_post_stop(void)
{
	sfr__lock(&notices.mu);
	notices.nr_stops++;
	pthread_cond_signal(&notices.cv);
	sfr__unlock(&notices.mu);
}

/* Runs in a forked child. */
static void reset_in_child(void)
{
	/* Threads of the parent may have used the lock and the condition. So neither is destroyed:
	 * their memory is overwritten. */
	memset(&notices, 0, sizeof(notices));
	sfr__mutex_init(&notices.mu, SFR__LOCK_NOTICES);
}
SFR__AT_FORK(reset_in_child)
