/* Notices: messages from the core's threads to the caller.
 *
 * Lane, writer and log threads never run the caller's code. They post notices to this queue, and
 * one thread of the caller takes them (sfr_notice_wait). That thread gives the verdict on version
 * counters, releases sources, settles futures and runs callbacks. A ticket embeds its two notices,
 * so posting them needs no memory and cannot fail. A notice of text (SFR_NOTICE_TEXT) only becomes
 * a line in a log, and is dropped when memory is short. */
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
	/* a notice that sfr_notice_again has put back, and that is returned first; none if .what is
	 * 0 */
	struct sfr_notice again;
	unsigned stops; /* calls of sfr_notice_stop that no waiter has seen */
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

/* Copies the notice to *out. Its reference on a ticket or snapshot passes to the caller. Frees a
 * notice of text; other notices are embedded in their owners. */
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
	/* A static initializer cannot choose CLOCK_MONOTONIC, so the first wait initialises the
	 * condition. Before that no thread waits, so a post need not wake one. */
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

/* Runs in a forked child. */
static void forget(void)
{
	/* Queued notices belong to the parent. The lock and the condition may be in use by threads
	 * that do not exist in the child, so their memory is only overwritten. */
	memset(&notices, 0, sizeof(notices));
	sfr__mutex_init(&notices.mu, SFR__LOCK_NOTICES);
}
SFR__AT_FORK(forget)
