/* Converts the rings' events to the Trace Event JSON format.
 *
 * Each thread has a row with the thread's name. A thread that runs optimizer steps has a second row
 * for the steps, above all threads' rows. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "trace/events.h"

/* The row of a thread's steps has the thread's tid plus this as its tid. Linux's tids are lower. */
#define STEPS_TID (UINT64_C(1) << 22)

static const struct {
	const char *name, *category;
	const char *unit; /* what an event's `number` counts; NULL: nothing */
} kinds[] = {
#define X(kind, kind_name, kind_category, kind_unit)                                               \
	[kind] = { .name = (kind_name), .category = (kind_category), .unit = (kind_unit) },
	SFR_TRACE_LIST(X)
#undef X
};

/* A time in the format: microseconds with three decimals. */
struct json_time {
	uint64_t us;
	unsigned ns; /* less than 1000 */
};

static struct json_time json_time(uint64_t ns)
{
	return (struct json_time){ .us = ns / 1000, .ns = (unsigned)(ns % 1000) };
}

#define JSON_TIME "%" PRIu64 ".%03u"
#define JSON_TIME_ARGS(m) (m).us, (m).ns

void sfr__trace_name_row(struct sfr__document *doc, uint64_t tid, const char *name, int order)
{
	enum { MAX_LEN = 64 };         /* the rest of a longer name is cut off */
	char escaped[6 * MAX_LEN + 1]; /* an escaped byte has at most 6 characters */

	sfr__document_escape(name, MAX_LEN, escaped);
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

/* The rows from top to bottom. The core's threads follow each other in the order in which bytes
 * pass through them. */
enum { ORDER_STEPS, ORDER_MAIN_THREAD, ORDER_OTHER_THREADS, ORDER_CORE };
static const char *const core_threads[] = { "sfr-copier", "sfr-lane", "sfr-writer", "sfr-log" };
enum { NR_CORE_THREADS = sizeof(core_threads) / sizeof(core_threads[0]) };

/* Returns the position of a thread's row. */
static int row_order_of(const struct sfr__ring *ring)
{
	for (int i = 0; i < NR_CORE_THREADS; i++)
		if (strncmp(ring->name, core_threads[i], strlen(core_threads[i])) == 0)
			return ORDER_CORE + i;
	return ring->tid == (uint64_t)getpid() ? ORDER_MAIN_THREAD : ORDER_OTHER_THREADS;
}

/* Names a thread's row and, with `with_steps`, the row of its steps. Rows that this trace has named
 * already are skipped. */
static void name_rows(const struct sfr__timeline *tl, struct sfr__ring *ring, bool with_steps)
{
	const bool is_main = ring->tid == (uint64_t)getpid();
	char name[64] = "training steps";

	if (ring->row_named_in != tl->number) {
		ring->row_named_in = tl->number;
		sfr__trace_name_row(tl->doc, ring->tid, is_main ? "main thread" : ring->name,
				    row_order_of(ring));
	}
	if (with_steps && ring->steps_row_named_in != tl->number) {
		ring->steps_row_named_in = tl->number;
		if (!is_main)
			(void)snprintf(name, sizeof(name), "training steps (thread %" PRIu64 ")",
				       ring->tid);
		sfr__trace_name_row(tl->doc, STEPS_TID + ring->tid, name, ORDER_STEPS);
	}
}

/* Begins the arguments of an event; the caller adds the closing brace. */
static void begin_event_args(struct sfr__document *doc, const struct sfr__trace_event *event)
{
	const char *unit = kinds[event->kind].unit;

	sfr__document_add(doc, ",\"args\":{");
	if (event->save)
		sfr__document_add(doc, "\"save\":%" PRIu64 "%s", event->save, unit ? "," : "");
	if (unit)
		sfr__document_add(doc, "\"%s\":%" PRIu64, unit, event->number);
}

/* Adds a save as an asynchronous event, a begin and an end, because its work is in several rows. */
static void add_save_event(const struct sfr__timeline *tl, uint64_t tid,
			   const struct sfr__trace_event *event)
{
	/* a save may have begun before the trace: then the event begins with the trace */
	uint64_t start = event->start_ns > tl->start_ns ? event->start_ns : tl->start_ns;
	char name[6 * sizeof(event->name) + 1];

	sfr__document_escape(event->name, sizeof(event->name), name);
	sfr__document_add(tl->doc,
			  ",\n{\"name\":\"save\",\"cat\":\"save\",\"ph\":\"b\",\"id\":%" PRIu64
			  ",\"pid\":%d,\"tid\":%" PRIu64 ",\"ts\":" JSON_TIME,
			  event->save, (int)getpid(), tid,
			  JSON_TIME_ARGS(json_time(start - tl->start_ns)));
	begin_event_args(tl->doc, event);
	sfr__document_add(tl->doc, ",\"file\":\"%s\",\"state\":\"%s\"}}", name,
			  sfr_state_name((enum sfr_state)event->state));
	sfr__document_add(tl->doc,
			  ",\n{\"name\":\"save\",\"cat\":\"save\",\"ph\":\"e\",\"id\":%" PRIu64
			  ",\"pid\":%d,\"tid\":%" PRIu64 ",\"ts\":" JSON_TIME "}",
			  event->save, (int)getpid(), tid,
			  JSON_TIME_ARGS(json_time(event->end_ns - tl->start_ns)));
}

/* Returns whether the event belongs in the row of its thread's steps. */
static bool belongs_in_steps_row(const struct sfr__trace_event *event)
{
	return event->kind == SFR_TRACE_STEP || event->kind == SFR_TRACE_OPTIMIZER;
}

static void add_event(const struct sfr__timeline *tl, const struct sfr__ring *ring,
		      const struct sfr__trace_event *event)
{
	uint64_t tid = ring->tid;

	if (event->kind == SFR_TRACE_SAVE) {
		add_save_event(tl, tid, event);
		return;
	}
	if (belongs_in_steps_row(event))
		tid += STEPS_TID;
	sfr__document_add(
		tl->doc,
		",\n{\"name\":\"%s\",\"cat\":\"%s\",\"ph\":\"X\",\"pid\":%d,\"tid\":%" PRIu64
		",\"ts\":" JSON_TIME ",\"dur\":" JSON_TIME,
		kinds[event->kind].name, kinds[event->kind].category, (int)getpid(), tid,
		JSON_TIME_ARGS(json_time(event->start_ns - tl->start_ns)),
		JSON_TIME_ARGS(json_time(event->end_ns - event->start_ns)));
	begin_event_args(tl->doc, event);
	sfr__document_add(tl->doc, "}}");
}

void sfr__trace_drain_ring(struct sfr__ring *ring, void *arg)
{
	const struct sfr__timeline *tl = arg;
	const struct sfr__trace_event *event;
	uint64_t dropped = atomic_load_explicit(&ring->dropped, memory_order_relaxed);

	/* The limit ends the loop even if the ring's thread keeps recording. */
	for (int i = 0; i < SFR__RING_EVENTS && (event = sfr__ring_peek(ring)); i++) {
		/* A save that was running when the trace began belongs to the trace. */
		uint64_t time_ns = event->kind == SFR_TRACE_SAVE ? event->end_ns : event->start_ns;
		bool is_older = time_ns < tl->start_ns; /* than this trace: only removed */

		if (!is_older && tl->doc->error) {
			tl->doc->nr_dropped++;
		} else if (!is_older) {
			sfr__document_make_room(tl->doc);
			name_rows(tl, ring, belongs_in_steps_row(event));
			tl->doc->nr_events++;
			tl->doc->nr_unwritten++;
			add_event(tl, ring, event);
		}
		sfr__ring_pop(ring);
	}
	if (dropped == ring->dropped_seen)
		return;
	sfr__document_make_room(tl->doc);
	name_rows(tl, ring, false); /* false: the row of its steps is not needed */
	sfr__document_add(tl->doc,
			  ",\n{\"name\":\"%" PRIu64
			  " events dropped\",\"cat\":\"trace\",\"ph\":\"i\",\"s\":\"t\","
			  "\"pid\":%d,\"tid\":%" PRIu64 ",\"ts\":" JSON_TIME "}",
			  dropped - ring->dropped_seen, (int)getpid(), ring->tid,
			  JSON_TIME_ARGS(json_time(sfr__now_ns() - tl->start_ns)));
	tl->doc->nr_dropped += dropped - ring->dropped_seen;
	ring->dropped_seen = dropped;
}
