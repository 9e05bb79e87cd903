/* Converts the rings' events to the Trace Event JSON format.
 *
 * Each thread has a row with the thread's name. A thread that runs optimizer steps has a second row
 * for its steps, above all threads' rows. This row has a thread number that no thread can have (the
 * kernel's numbers end at 2^22). */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "trace/events.h"

#define STEPS_TID (UINT64_C(1) << 22)

static const struct {
	const char *name, *category;
	const char *number; /* what an event's `number` counts; NULL: nothing */
} kinds[] = {
#define X(kind, kind_name, kind_category, kind_number)                                             \
	[kind] = { .name = (kind_name), .category = (kind_category), .number = (kind_number) },
	SFR_TRACE_LIST(X)
#undef X
};

/* A time as the format wants it: microseconds with three decimals. */
struct json_time {
	uint64_t us;
	unsigned ns; /* the rest, below a microsecond */
};

static struct json_time json_time(uint64_t ns)
{
	return (struct json_time){ .us = ns / 1000, .ns = (unsigned)(ns % 1000) };
}

#define JSON_TIME "%" PRIu64 ".%03u"
#define JSON_TIME_ARGS(m) (m).us, (m).ns

void sfr__trace_row(struct sfr__document *doc, uint64_t tid, const char *name, int order)
{
	char escaped[6 * 64 + 1];

	sfr__document_escape(name, 64, escaped);
	sfr__document_add(doc,
			  ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%" PRIu64
			  ",\"args\":{\"name\":\"%s\"}}",
			  (int)getpid(), tid, escaped);
	if (order >= 0)
		sfr__document_add(
			doc,
			",\n{\"name\":\"thread_sort_index\",\"ph\":\"M\",\"pid\":%d,\"tid\":%" PRIu64
			",\"args\":{\"sort_index\":%d}}",
			(int)getpid(), tid, order);
}

/* Returns the position of a thread's row. From top to bottom: training steps (0), the main thread,
 * the program's other threads, then the core's in the order in which bytes pass through them. */
static int order_of(const struct sfr__ring *ring)
{
	static const char *const prefixes[] = { "sfr-copier", "sfr-lane", "sfr-writer", "sfr-log" };

	for (int i = 0; i < 4; i++)
		if (strncmp(ring->name, prefixes[i], strlen(prefixes[i])) == 0)
			return 3 + i;
	return ring->tid == (uint64_t)getpid() ? 1 : 2;
}

/* Names a thread's row, unless this trace has named it. With `steps`, does the same for the row of
 * the thread's steps. */
static void name_rows(const struct sfr__timeline *tl, struct sfr__ring *ring, bool steps)
{
	char name[64];

	if (ring->named_in != tl->number) {
		ring->named_in = tl->number;
		sfr__trace_row(tl->doc, ring->tid,
			       ring->tid == (uint64_t)getpid() ? "main thread" : ring->name,
			       order_of(ring));
	}
	if (steps && ring->steps_named_in != tl->number) {
		ring->steps_named_in = tl->number;
		(void)snprintf(name, sizeof(name),
			       ring->tid == (uint64_t)getpid() ? "training steps" :
								 "training steps (thread %" PRIu64
								 ")",
			       ring->tid);
		sfr__trace_row(tl->doc, STEPS_TID + ring->tid, name, 0);
	}
}

/* Begins the arguments of an event; the caller adds the closing brace. */
static void add_args(struct sfr__document *doc, const struct sfr__trace_event *event)
{
	const char *number = kinds[event->kind].number;

	sfr__document_add(doc, ",\"args\":{");
	if (event->save)
		sfr__document_add(doc, "\"save\":%" PRIu64 "%s", event->save, number ? "," : "");
	if (number)
		sfr__document_add(doc, "\"%s\":%" PRIu64, number, event->number);
}

/* Adds a save. Its work is in several rows, so it is an asynchronous event: a begin and an end. */
static void add_save(const struct sfr__timeline *tl, uint64_t tid,
		     const struct sfr__trace_event *event)
{
	uint64_t start = event->start_ns > tl->start_ns ? event->start_ns : tl->start_ns;
	char name[6 * sizeof(event->name) + 1];

	sfr__document_escape(event->name, sizeof(event->name), name);
	sfr__document_add(tl->doc,
			  ",\n{\"name\":\"save\",\"cat\":\"save\",\"ph\":\"b\",\"id\":%" PRIu64
			  ",\"pid\":%d,\"tid\":%" PRIu64 ",\"ts\":" JSON_TIME,
			  event->save, (int)getpid(), tid,
			  JSON_TIME_ARGS(json_time(start - tl->start_ns)));
	add_args(tl->doc, event);
	sfr__document_add(tl->doc, ",\"file\":\"%s\",\"state\":\"%s\"}}", name,
			  sfr_state_name((enum sfr_state)event->state));
	sfr__document_add(tl->doc,
			  ",\n{\"name\":\"save\",\"cat\":\"save\",\"ph\":\"e\",\"id\":%" PRIu64
			  ",\"pid\":%d,\"tid\":%" PRIu64 ",\"ts\":" JSON_TIME "}",
			  event->save, (int)getpid(), tid,
			  JSON_TIME_ARGS(json_time(event->end_ns - tl->start_ns)));
}

/* Adds one recorded event. */
static void add_event(const struct sfr__timeline *tl, const struct sfr__ring *ring,
		      const struct sfr__trace_event *event)
{
	uint64_t tid = ring->tid;

	if (event->kind == SFR_TRACE_SAVE) {
		add_save(tl, tid, event);
		return;
	}
	if (event->kind == SFR_TRACE_STEP || event->kind == SFR_TRACE_OPTIMIZER)
		tid += STEPS_TID;
	sfr__document_add(
		tl->doc,
		",\n{\"name\":\"%s\",\"cat\":\"%s\",\"ph\":\"X\",\"pid\":%d,\"tid\":%" PRIu64
		",\"ts\":" JSON_TIME ",\"dur\":" JSON_TIME,
		kinds[event->kind].name, kinds[event->kind].category, (int)getpid(), tid,
		JSON_TIME_ARGS(json_time(event->start_ns - tl->start_ns)),
		JSON_TIME_ARGS(json_time(event->end_ns - event->start_ns)));
	add_args(tl->doc, event);
	sfr__document_add(tl->doc, "}}");
}

void sfr__trace_read_ring(struct sfr__ring *ring, void *arg)
{
	const struct sfr__timeline *tl = arg;
	const struct sfr__trace_event *event;
	uint64_t dropped = atomic_load_explicit(&ring->dropped, memory_order_relaxed);

	/* At most as many events as a ring holds, so that a thread that keeps recording cannot keep
	 * this thread here. */
	for (int i = 0; i < SFR__RING_EVENTS && (event = sfr__ring_peek(ring)); i++) {
		bool steps = event->kind == SFR_TRACE_STEP || event->kind == SFR_TRACE_OPTIMIZER;
		/* from before this trace; a save is early only if it also ended before the trace */
		bool early = event->kind == SFR_TRACE_SAVE ? event->end_ns < tl->start_ns :
							     event->start_ns < tl->start_ns;

		if (!early && tl->doc->error) {
			tl->doc->nr_dropped++;
		} else if (!early) {
			sfr__document_begin(tl->doc);
			name_rows(tl, ring, steps);
			tl->doc->nr_events++;
			tl->doc->nr_unwritten++;
			add_event(tl, ring, event);
		}
		sfr__ring_pop(ring);
	}
	if (dropped == ring->dropped_seen)
		return;
	sfr__document_begin(tl->doc);
	name_rows(tl, ring, false);
	sfr__document_add(tl->doc,
			  ",\n{\"name\":\"%" PRIu64
			  " events dropped\",\"cat\":\"trace\",\"ph\":\"i\",\"s\":\"t\","
			  "\"pid\":%d,\"tid\":%" PRIu64 ",\"ts\":" JSON_TIME "}",
			  dropped - ring->dropped_seen, (int)getpid(), ring->tid,
			  JSON_TIME_ARGS(json_time(sfr__now_ns() - tl->start_ns)));
	tl->doc->nr_dropped += dropped - ring->dropped_seen;
	ring->dropped_seen = dropped;
}
