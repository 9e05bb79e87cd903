/* Writing a trace: a thread that turns what the rings hold into Trace Event JSON.
 *
 *   idle ──start──▶ running ──stop──▶ stopping ──thread has ended──▶ idle
 *
 * Every 100 ms the thread empties the rings into the file. Each write appends events and the
 * document's end behind them; the next one begins where that end stood:
 *
 *     {"displayTimeUnit":"ms","traceEvents":[ ... events ...          ],"otherData":{...}}
 *                                                           ^ off     ^ end of the document
 *
 * So the file is one whole JSON document after every write, also when the process dies inside the
 * traced block without any clean-up. When a write fails, the end is put back where it was, spaces
 * behind it (which JSON allows) where part of the new events had been written, and from then on
 * events are counted as dropped.
 *
 * Rows: one a thread, named after it; and above them, for each thread that runs optimizer steps, a
 * row of its steps, under a thread number that no thread can have (the kernel's end at 2^22).
 *
 * The session's mutex guards its state; it is taken before the registry's (trace.c) and after no
 * other lock.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "trace/trace.h"

#define FLUSH_NS (100u * 1000 * 1000)
#define STEPS_TID (UINT64_C(1) << 22)

enum {
	TEXT_BYTES = 256 << 10,
	LINE_BYTES = 768,
	EVENT_LINES = 16, /* no event takes more, its row's names included */
	END_BYTES = 256,
};

enum session_state { IDLE, RUNNING, STOPPING };

static struct {
	struct sfr__mutex mu;
	pthread_cond_t cv; /* stop has been called; a name has come */
	bool have_cv;
	enum session_state state;
	pthread_t thread;
	uint32_t number; /* of traces begun in this process */
	/* the thread's, but for start and stop, between which it lives */
	int fd;
	uint64_t off; /* of the document's end */
	uint64_t start_ns, started_unix_ns;
	uint64_t nr_events, nr_dropped, nr_lost_seen, end_len;
	uint64_t nr_unwritten; /* events of the text not yet written */
	int error;
	char *text, *of_parent;
	size_t len; /* of the text not yet written */
} session = { .mu = SFR__MUTEX(SFR__LOCK_SESSION), .fd = -1 };

static const struct {
	const char *name, *category, *number;
} kinds[] = {
#define X(kind, kind_name, kind_category, kind_number)                                             \
	[kind] = { .name = (kind_name), .category = (kind_category), .number = (kind_number) },
	SFR_TRACE_LIST(X)
#undef X
};

/* ---- the file ---- */

/* 0 or -errno; *done bytes have been written. */
static int write_at(const char *bytes, size_t len, uint64_t off, size_t *done)
{
	int stalled = 0;

	*done = 0;
	while (*done < len) {
		ssize_t put = sfr_sys.pwrite(session.fd, bytes + *done, len - *done,
					     (off_t)(off + *done));

		if (put < 0 && errno != EINTR)
			return -errno;
		stalled = put > 0 ? 0 : stalled + 1;
		if (stalled == SFR__EINTR_TRIES)
			return -EIO;
		*done += put > 0 ? (size_t)put : 0;
	}
	return 0;
}

static size_t put_end(char *text)
{
	return (size_t)snprintf(text, END_BYTES,
				"\n],\"otherData\":{\"producer\":\"stillframe\","
				"\"started_unix_ns\":\"%" PRIu64 "\",\"dropped_events\":\"%" PRIu64
				"\"}}\n",
				session.started_unix_ns, session.nr_dropped);
}

/* Writes the text and the document's end. */
static void flush_text(void)
{
	size_t end_len, done, all;
	uint64_t old_end = session.off + session.end_len;
	int rc;

	if (session.error)
		goto out;
	/* Room for the end is kept behind the text. */
	end_len = put_end(session.text + session.len);
	all = session.len + end_len;
	rc = write_at(session.text, all, session.off, &done);
	if (rc == 0) {
		session.off += session.len;
		session.end_len = end_len;
		goto out;
	}
	session.error = rc;
	session.nr_events -= session.nr_unwritten;
	session.nr_dropped += session.nr_unwritten;
	if (session.off == 0)
		goto out; /* not even the head: an empty file */
	/* Only bytes that are there already are written over, so a full disk does not matter. */
	end_len = put_end(session.text);
	while (session.off + end_len <
		       (session.off + done > old_end ? session.off + done : old_end) &&
	       end_len < TEXT_BYTES)
		session.text[end_len++] = ' ';
	(void)write_at(session.text, end_len, session.off, &done); /* the first error is kept */
out:
	session.len = 0;
	session.nr_unwritten = 0;
}

__attribute__((format(printf, 1, 2))) static void add(const char *format, ...)
{
	va_list args;
	int len;

	va_start(args, format);
	len = vsnprintf(session.text + session.len, LINE_BYTES, format, args);
	va_end(args);
	if (len > 0)
		session.len += (size_t)len < LINE_BYTES ? (size_t)len : LINE_BYTES - 1;
}

/* Before each event: only whole ones are followed by the document's end. */
static void make_room(void)
{
	if (session.len > TEXT_BYTES - EVENT_LINES * LINE_BYTES - END_BYTES)
		flush_text();
}

/* A string as JSON wants it, without its quotes: what is not whole UTF-8 becomes '?'. `out` has
 * room for 6 bytes a byte and the final zero. */
static void escape(const char *in, size_t max, char *out)
{
	const unsigned char *s = (const unsigned char *)in, *end = s + strnlen(in, max);

	while (s < end) {
		size_t more = *s < 0x80               ? 0 :
			      *s >= 0xc2 && *s < 0xe0 ? 1 :
			      *s >= 0xe0 && *s < 0xf0 ? 2 :
			      *s >= 0xf0 && *s < 0xf5 ? 3 :
							4;
		bool whole = more < 4 && (size_t)(end - s) > more;

		for (size_t i = 1; whole && i <= more; i++)
			whole = (s[i] & 0xc0) == 0x80;
		/* Overlong forms, surrogates and what lies beyond U+10FFFF. */
		if (whole && more == 2)
			whole = !(*s == 0xe0 && s[1] < 0xa0) && !(*s == 0xed && s[1] >= 0xa0);
		if (whole && more == 3)
			whole = !(*s == 0xf0 && s[1] < 0x90) && !(*s == 0xf4 && s[1] >= 0x90);
		if (!whole) {
			*out++ = '?';
			s++;
		} else if (*s == '"' || *s == '\\') {
			*out++ = '\\';
			*out++ = (char)*s++;
		} else if (*s < 0x20 || *s == 0x7f) {
			out += snprintf(out, 7, "\\u%04x", *s++);
		} else {
			for (size_t i = 0; i <= more; i++)
				*out++ = (char)*s++;
		}
	}
	*out = '\0';
}

/* ---- events ---- */

struct moment {
	uint64_t us;
	unsigned ns; /* of a microsecond */
};

static struct moment moment(uint64_t ns)
{
	return (struct moment){ .us = ns / 1000, .ns = (unsigned)(ns % 1000) };
}

#define MOMENT "%" PRIu64 ".%03u"
#define MOMENT_ARGS(m) (m).us, (m).ns

static void add_row(uint64_t tid, const char *name, int order)
{
	char escaped[6 * 64 + 1];

	escape(name, 64, escaped);
	add(",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%" PRIu64
	    ",\"args\":{\"name\":\"%s\"}}",
	    (int)getpid(), tid, escaped);
	if (order >= 0)
		add(",\n{\"name\":\"thread_sort_index\",\"ph\":\"M\",\"pid\":%d,\"tid\":%" PRIu64
		    ",\"args\":{\"sort_index\":%d}}",
		    (int)getpid(), tid, order);
}

/* From top to bottom: steps, main thread, other threads of the program, then ours as bytes go. */
static int order_of(const struct sfr__ring *ring)
{
	static const char *const prefixes[] = { "sfr-lane", "sfr-writer", "sfr-log" };

	for (int i = 0; i < 3; i++)
		if (strncmp(ring->name, prefixes[i], strlen(prefixes[i])) == 0)
			return 3 + i;
	return ring->tid == (uint64_t)getpid() ? 1 : 2;
}

static void name_rows(struct sfr__ring *ring, bool steps)
{
	char name[64];

	if (ring->named_in != session.number) {
		ring->named_in = session.number;
		add_row(ring->tid, ring->tid == (uint64_t)getpid() ? "main thread" : ring->name,
			order_of(ring));
	}
	if (steps && ring->steps_named_in != session.number) {
		ring->steps_named_in = session.number;
		(void)snprintf(name, sizeof(name),
			       ring->tid == (uint64_t)getpid() ? "training steps" :
								 "training steps (thread %" PRIu64
								 ")",
			       ring->tid);
		add_row(STEPS_TID + ring->tid, name, 0);
	}
}

static void add_args(const struct sfr__trace_event *event)
{
	const char *number = kinds[event->kind].number;

	add(",\"args\":{");
	if (event->save)
		add("\"save\":%" PRIu64 "%s", event->save, number ? "," : "");
	if (number)
		add("\"%s\":%" PRIu64, number, event->number);
}

/* A save's life lies across rows: an asynchronous slice of its own. */
static void add_save(uint64_t tid, const struct sfr__trace_event *event)
{
	uint64_t start = event->start_ns > session.start_ns ? event->start_ns : session.start_ns;
	char name[6 * sizeof(event->name) + 1];

	escape(event->name, sizeof(event->name), name);
	add(",\n{\"name\":\"save\",\"cat\":\"save\",\"ph\":\"b\",\"id\":%" PRIu64
	    ",\"pid\":%d,\"tid\":%" PRIu64 ",\"ts\":" MOMENT,
	    event->save, (int)getpid(), tid, MOMENT_ARGS(moment(start - session.start_ns)));
	add_args(event);
	add(",\"file\":\"%s\",\"state\":\"%s\"}}", name,
	    sfr_state_name((enum sfr_state)event->state));
	add(",\n{\"name\":\"save\",\"cat\":\"save\",\"ph\":\"e\",\"id\":%" PRIu64
	    ",\"pid\":%d,\"tid\":%" PRIu64 ",\"ts\":" MOMENT "}",
	    event->save, (int)getpid(), tid, MOMENT_ARGS(moment(event->end_ns - session.start_ns)));
}

static void add_event(const struct sfr__ring *ring, const struct sfr__trace_event *event)
{
	uint64_t tid = ring->tid;

	if (event->kind == SFR_TRACE_SAVE) {
		add_save(tid, event);
		return;
	}
	if (event->kind == SFR_TRACE_STEP || event->kind == SFR_TRACE_OPTIMIZER)
		tid += STEPS_TID;
	add(",\n{\"name\":\"%s\",\"cat\":\"%s\",\"ph\":\"X\",\"pid\":%d,\"tid\":%" PRIu64
	    ",\"ts\":" MOMENT ",\"dur\":" MOMENT,
	    kinds[event->kind].name, kinds[event->kind].category, (int)getpid(), tid,
	    MOMENT_ARGS(moment(event->start_ns - session.start_ns)),
	    MOMENT_ARGS(moment(event->end_ns - event->start_ns)));
	add_args(event);
	add("}}");
}

static void read_ring(struct sfr__ring *ring, void *unused)
{
	const struct sfr__trace_event *event;
	uint64_t dropped = atomic_load_explicit(&ring->dropped, memory_order_relaxed);

	(void)unused;
	/* As many as fit at a time: a thread that records without end must not keep us here. */
	for (int i = 0; i < SFR__RING_EVENTS && (event = sfr__ring_peek(ring)); i++) {
		bool steps = event->kind == SFR_TRACE_STEP || event->kind == SFR_TRACE_OPTIMIZER;
		bool early = event->kind == SFR_TRACE_SAVE ? event->end_ns < session.start_ns :
							     event->start_ns < session.start_ns;

		if (!early && session.error) {
			session.nr_dropped++;
		} else if (!early) {
			make_room();
			name_rows(ring, steps);
			session.nr_events++;
			session.nr_unwritten++;
			add_event(ring, event);
		}
		sfr__ring_pop(ring);
	}
	if (dropped == ring->dropped_seen)
		return;
	make_room();
	name_rows(ring, false);
	add(",\n{\"name\":\"%" PRIu64
	    " events dropped\",\"cat\":\"trace\",\"ph\":\"i\",\"s\":\"t\","
	    "\"pid\":%d,\"tid\":%" PRIu64 ",\"ts\":" MOMENT "}",
	    dropped - ring->dropped_seen, (int)getpid(), ring->tid,
	    MOMENT_ARGS(moment(sfr__now_ns() - session.start_ns)));
	session.nr_dropped += dropped - ring->dropped_seen;
	ring->dropped_seen = dropped;
}

static void flush(bool last)
{
	uint64_t lost;

	sfr__rings_each(read_ring, NULL);
	lost = sfr__rings_lost();
	session.nr_dropped += lost - session.nr_lost_seen;
	/* Without new events the file is as it should be, but for the count of dropped ones. */
	if (session.len || lost != session.nr_lost_seen)
		flush_text();
	session.nr_lost_seen = lost;
	sfr__rings_sweep(last);
}

/* ---- the thread ---- */

static void *trace_main(void *unused)
{
	bool running;

	(void)unused;
	sfr__lock(&session.mu);
	do {
		if (session.state == RUNNING)
			(void)sfr__cond_wait(&session.cv, &session.mu, sfr__deadline(FLUSH_NS));
		running = session.state == RUNNING;
		/* With the mutex, which others take to begin, to end and to name rows: all of
		 * them can wait for a write. */
		flush(!running);
	} while (running);
	sfr__unlock(&session.mu);
	return NULL;
}

/* Opens the file and writes a document without events. 0 or a negative code. */
static int open_file(const char *path)
{
	struct timespec now = { 0, 0 };
	struct stat st;
	int rc;

	/* Not blocking: a pipe without a reader must not hold the caller. */
	session.fd = sfr__fd_open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK | O_NOCTTY, 0666);
	if (session.fd < 0)
		return session.fd;
	if (sfr_sys.fstat(session.fd, &st) < 0)
		return -errno;
	if (!S_ISREG(st.st_mode))
		return -EINVAL;
	(void)sfr_sys.clock_gettime(CLOCK_REALTIME, &now); /* always there on Linux */
	session.started_unix_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
	session.off = session.nr_events = session.nr_dropped = session.nr_lost_seen = 0;
	session.end_len = session.nr_unwritten = 0;
	session.error = 0;
	session.len = 0;
	add("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n"
	    "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"name\":\"stillframe\"}}",
	    (int)getpid());
	flush_text();
	rc = session.error;
	return rc;
}

static void close_file(void)
{
	if (session.fd >= 0)
		(void)sfr__fd_close(session.fd); /* a timeline: not worth an error of its own */
	session.fd = -1;
	sfr_sys.free(session.text);
	session.text = NULL;
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
	session.text = rc == 0 ? sfr_sys.malloc(TEXT_BYTES) : NULL;
	if (rc == 0 && !session.text)
		rc = -ENOMEM;
	if (rc == 0)
		rc = open_file(path);
	if (rc == 0) {
		session.number = session.number == UINT32_MAX ? 1 : session.number + 1;
		session.state = RUNNING;
		session.start_ns = sfr__now_ns();
		rc = sfr__thread_start(&session.thread, "sfr-trace", trace_main, NULL);
	}
	if (rc == 0) {
		sfr__rings_begin(session.number);
	} else {
		session.state = IDLE;
		close_file();
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
	(void)sfr_sys.thread_join(session.thread, NULL); /* it is ours and joinable */
	sfr__lock(&session.mu);
	out->nr_events = session.nr_events;
	out->nr_dropped = session.nr_dropped;
	out->error = session.error;
	close_file();
	session.state = IDLE;
	sfr__unlock(&session.mu);
	return 0;
}

void sfr_trace_name_thread(uint64_t tid, const char *name)
{
	sfr__lock(&session.mu);
	if (session.state == RUNNING && !session.error) {
		make_room();
		add_row(tid, name, -1);
	}
	sfr__unlock(&session.mu);
}

static void forget(void)
{
	/* fork.c has closed the descriptor; the text stays, as the rings do. */
	char *text = session.text;
	uint32_t number = session.number;

	memset(&session, 0, sizeof(session));
	session.of_parent = text;
	session.number = number; /* rows of before must be named anew */
	session.fd = -1;
	sfr__mutex_init(&session.mu, SFR__LOCK_SESSION);
}
SFR__AT_FORK(forget)
