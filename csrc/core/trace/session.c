/* The session: the one trace that a process can write at a time. A thread moves events from the
 * rings (ring.c) to a document (document.c).
 *
 *   idle ──start──▶ running ──stop──▶ stopping ──thread has ended──▶ idle
 *
 * The session's mutex guards its state. Lock order: no other lock is held when it is taken; the
 * registry's mutex (ring.c) may be taken under it. */
#include <errno.h>
#include <string.h>

#include "trace/events.h"

#define FLUSH_NS (100u * 1000 * 1000) /* time between two writes */

enum session_state { IDLE, RUNNING, STOPPING };

static struct {
	struct sfr__mutex mu;
	pthread_cond_t cv; /* signals that stop was called */
	bool have_cv;
	enum session_state state;
	pthread_t thread;
	uint32_t number; /* number of this process's last trace */
	/* of the trace that is being written */
	uint64_t start_ns;
	/* lost events (sfr__rings_count_lost) that the document has counted */
	uint64_t nr_lost_seen;
	struct sfr__document doc;
	char *of_parent; /* in a forked child: the parent's text, kept for leak checkers */
} session = { .mu = SFR__MUTEX(SFR__LOCK_SESSION), .doc = { .fd = -1 } };

/* Moves the rings' events to the document, writes the document, and frees rings of ended threads.
 * `last`: the trace ends. */
static void write_events(bool last)
{
	struct sfr__timeline timeline = { &session.doc, session.number, session.start_ns };
	uint64_t lost;

	sfr__rings_each(sfr__trace_drain_ring, &timeline);
	lost = sfr__rings_count_lost();
	session.doc.nr_dropped += lost - session.nr_lost_seen;
	if (session.doc.len || lost != session.nr_lost_seen)
		sfr__document_flush(&session.doc);
	session.nr_lost_seen = lost;
	sfr__rings_free_dead(last);
}

static void *trace_main(void *unused)
{
	bool running;

	(void)unused;
	sfr__lock(&session.mu);
	do {
		if (session.state == RUNNING)
			(void)sfr__cond_wait(&session.cv, &session.mu, sfr__deadline(FLUSH_NS));
		running = session.state == RUNNING;
		/* under the mutex, so starting, stopping and naming a row may wait for a write */
		write_events(!running);
	} while (running);
	sfr__unlock(&session.mu);
	return NULL;
}

int sfr_trace_start(const char *path)
{
	int rc = sfr_fork_init();

	if (rc < 0)
		return rc;
	sfr__lock(&session.mu);
	if (session.state != IDLE) {
		sfr__unlock(&session.mu);
		return SFR_EBUSY;
	}
	if (!session.have_cv)
		rc = sfr__cond_init(&session.cv);
	session.have_cv = rc == 0;
	if (rc == 0)
		rc = sfr__document_open(&session.doc, path);
	if (rc == 0) {
		/* never 0, which means that no trace is being written */
		session.number = session.number == UINT32_MAX ? 1 : session.number + 1;
		session.state = RUNNING;
		session.nr_lost_seen = 0;
		session.start_ns = sfr__now_ns();
		rc = sfr__thread_start(&session.thread, "sfr-trace", SFR__BACKGROUND, trace_main,
				       NULL);
	}
	if (rc == 0) {
		sfr__rings_begin_trace(session.number);
	} else {
		session.state = IDLE;
		sfr__document_close(&session.doc);
	}
	sfr__unlock(&session.mu);
	return rc;
}

int sfr_trace_stop(struct sfr_trace_result *out)
{
	memset(out, 0, sizeof(*out));
	sfr__lock(&session.mu);
	if (session.state != RUNNING) {
		sfr__unlock(&session.mu);
		return SFR_ESTATE;
	}
	atomic_store_explicit(&sfr__trace_on, 0, memory_order_release);
	session.state = STOPPING;
	pthread_cond_signal(&session.cv);
	sfr__unlock(&session.mu);
	(void)sfr_sys.thread_join(session.thread, NULL); /* cannot fail: the thread is joinable */
	sfr__lock(&session.mu);
	out->nr_events = session.doc.nr_events;
	out->nr_dropped = session.doc.nr_dropped;
	out->error = session.doc.error;
	sfr__document_close(&session.doc);
	session.state = IDLE;
	sfr__unlock(&session.mu);
	return 0;
}

void sfr_trace_name_thread(uint64_t tid, const char *name)
{
	sfr__lock(&session.mu);
	if (session.state == RUNNING && !session.doc.error) {
		sfr__document_make_room(&session.doc);
		sfr__trace_name_row(&session.doc, tid, name,
				    -1); /* -1: the row stays where it is */
	}
	sfr__unlock(&session.mu);
}

/* Runs in a forked child. */
static void forget_parents_session(void)
{
	/* fork.c has closed the descriptor. The text is not freed, as in ring.c. */
	char *text = session.doc.text;
	uint32_t number = session.number;

	memset(&session, 0, sizeof(session));
	session.of_parent = text;
	session.number = number; /* the next trace must have another number */
	session.doc.fd = -1;
	sfr__mutex_init(&session.mu, SFR__LOCK_SESSION);
}
SFR__AT_FORK(forget_parents_session)
