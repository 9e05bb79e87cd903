/* Notices: what the core has to tell the one who uses it.
 *
 * Lane, writer and log threads never run the caller's code. They post notices to this queue;
 * one thread of the caller takes them (sfr_notice_wait) and does what has to be done there:
 * gives its verdict on version counters, lets sources go, settles futures, runs callbacks.
 * A ticket's two notices are part of the ticket, so posting them needs no memory and cannot
 * fail; a sentence (TEXT) is worth a log line only and is dropped when memory is short.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "base/queue.h"

static struct {
	struct sfr__mutex mu; /* guards all of this; a leaf: nothing is taken under it */
	pthread_cond_t cv;
	bool cv_ready;
	SFR__QUEUE(struct sfr__notice) queue;
	struct sfr_notice again; /* comes first; .what 0: none */
	unsigned stops;
} notices = { .mu = SFR__MUTEX(SFR__LOCK_NOTICES) };

void sfr__notice_post(struct sfr__notice *notice)
{
	sfr__lock(&notices.mu);
	sfr__queue_push(&notices.queue, notice);
	pthread_cond_signal(&notices.cv);
	sfr__unlock(&notices.mu);
}

void sfr__notice_text(const char *format, ...)
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

/* Its references go over to the caller; a sentence ends here. */
static void hand_over(struct sfr__notice *notice, struct sfr_notice *out)
{
	out->what = notice->what;
	out->number = notice->number;
	out->ticket = notice->ticket;
	out->snapshot = notice->snapshot;
	(void)snprintf(out->text, sizeof(out->text), "%s", notice->text ? notice->text : "");
	if (notice->what == SFR_NOTICE_TEXT) {
		sfr_sys.free(notice->text);
		sfr_sys.free(notice);
	}
}

int sfr_notice_wait(struct sfr_notice *out, uint64_t slice_ns)
{
	uint64_t deadline = sfr__deadline(slice_ns);
	struct sfr__notice *notice = NULL;
	int rc = 0;

	sfr__lock(&notices.mu);
	*out = notices.again;
	notices.again.what = 0;
	/* CLOCK_MONOTONIC, which no static initializer gives. Before anybody waits nobody is woken. */
	if (!notices.cv_ready)
		notices.cv_ready = sfr__cond_init(&notices.cv) == 0;
	while (!out->what && !notices.queue.head && !notices.stops && rc == 0)
		rc = sfr__cond_wait(&notices.cv, &notices.mu, deadline);
	if (!out->what)
		notice = sfr__queue_pop(&notices.queue);
	if (!out->what && !notice && notices.stops) {
		notices.stops--;
		out->what = SFR_NOTICE_STOP;
	}
	sfr__unlock(&notices.mu);
	if (notice)
		hand_over(notice, out);
	return out->what ? 0 : SFR_EAGAIN;
}

void sfr_notice_again(const struct sfr_notice *notice)
{
	sfr__lock(&notices.mu);
	notices.again = *notice;
	sfr__unlock(&notices.mu);
}

void sfr_notice_stop(void)
{
	sfr__lock(&notices.mu);
	notices.stops++;
	pthread_cond_signal(&notices.cv);
	sfr__unlock(&notices.mu);
}

static void forget(void)
{
	/* The parent's waiter and the holder of the lock, if any, do not exist here: the memory
	 * is made new without looking at it. What was queued belongs to the parent. */
	memset(&notices, 0, sizeof(notices));
	sfr__mutex_init(&notices.mu, SFR__LOCK_NOTICES);
}
SFR__AT_FORK(forget)
