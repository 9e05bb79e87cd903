/* Timelines: rings under several threads, dropped events, failing files, forks. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>

#include "fix_dir.h"
#include "saving.h"
#include "trace/document.h"
#include "trace/ring.h"

enum { NR_THREADS = 4, NR_SPANS = 5000 };

static const char *dir;

static void one_span(uint64_t save)
{
	SFR__TRACE(SFR_TRACE_COPY, save, 4096);
}

static const char *text_of(const char *path)
{
	static char text[8 << 20];
	FILE *file = fopen(path, "rb");
	size_t len = file ? fread(text, 1, sizeof(text) - 1, file) : 0;

	if (file)
		(void)fclose(file);
	text[len] = '\0';
	return text;
}

/* Counts the occurrences of `what`. Python's tests check that the whole is JSON. */
static int count(const char *text, const char *what)
{
	int nr = 0;

	for (const char *at = text; (at = strstr(at, what)); at += strlen(what))
		nr++;
	return nr;
}

static bool is_closed(const char *text)
{
	size_t len = strlen(text);

	return len > 3 && text[0] == '{' && strcmp(text + len - 3, "}}\n") == 0;
}

static int nr_rings;
static void count_ring(struct sfr__ring *ring, void *unused)
{
	(void)ring, (void)unused;
	nr_rings++;
}

static int rings(void)
{
	nr_rings = 0;
	sfr__rings_each(count_ring, NULL);
	return nr_rings;
}

/* ---- */

TEST(without_a_trace_nothing_is_recorded_and_no_ring_is_made)
{
	struct sfr_trace_result result;

	one_span(1);
	sfr_trace_record_span(SFR_TRACE_GATE, sfr_trace_get_start_ns(), 1, 0);
	sfr_trace_step(1, false);
	sfr_trace_step(1, true);
	sfr__trace_save(1, 1, 2, 3, SFR_DURABLE, "a");
	sfr_trace_name_thread(1, "nobody");
	CHECK_EQ(sfr_trace_get_start_ns(), 0);
	CHECK_EQ(rings(), 0);
	CHECK_EQ(sfr_trace_stop(&result), SFR_ESTATE);
}

static void *record_spans(void *unused)
{
	(void)unused;
	for (int i = 0; i < NR_SPANS; i++)
		one_span((uint64_t)i + 1);
	return NULL;
}

TEST(every_span_of_every_thread_is_written_or_counted)
{
	const char *path = dir_path(dir, "threads.json"), *text;
	struct sfr_trace_result result;
	pthread_t threads[NR_THREADS];

	CHECK_EQ(sfr_trace_start(path), 0);
	for (int i = 0; i < NR_THREADS; i++)
		CHECK_EQ(pthread_create(&threads[i], NULL, record_spans, NULL), 0);
	for (int i = 0; i < NR_THREADS; i++)
		CHECK_EQ(pthread_join(threads[i], NULL), 0);
	CHECK_EQ(sfr_trace_stop(&result), 0);
	CHECK_EQ(result.error, 0);
	CHECK_EQ(result.nr_events + result.nr_dropped, NR_THREADS * NR_SPANS);
	CHECK_EQ(result.nr_dropped, 0); /* a ring has room for more */
	text = text_of(path);
	CHECK(is_closed(text));
	CHECK_EQ(count(text, "\"name\":\"copy\""), NR_THREADS * NR_SPANS);
	CHECK_EQ(count(text, "\"name\":\"thread_name\""), NR_THREADS);
	CHECK_EQ(rings(), 0); /* their threads have ended */
}

TEST(leftover_events_are_not_in_the_next_trace)
{
	const char *path = dir_path(dir, "full.json");
	struct sfr_trace_result result;

	/* Without a reader, nobody empties this thread's ring. */
	sfr__rings_begin_trace(1000);
	for (int i = 0; i < SFR__RING_EVENTS + 100; i++)
		one_span(7);
	atomic_store(&sfr__trace_on, 0);
	CHECK_EQ(rings(), 1);
	/* Events and losses of one trace are not in the next. */
	CHECK_EQ(sfr_trace_start(path), 0);
	one_span(8);
	one_span(0); /* without a save: the span that named one has ended */
	CHECK_EQ(sfr_trace_stop(&result), 0);
	CHECK_EQ(result.nr_events, 2);
	CHECK_EQ(result.nr_dropped, 0);
	CHECK_EQ(count(text_of(path), "\"save\":7"), 0);
	CHECK_EQ(count(text_of(path), "\"save\":8"), 1);
}

static uint64_t seen_dropped;
static void add_dropped(struct sfr__ring *ring, void *unused)
{
	(void)unused;
	seen_dropped += atomic_load(&ring->dropped);
}

TEST(full_ring_drops_events_and_counts_them)
{
	sfr__rings_begin_trace(1001);
	for (int i = 0; i < SFR__RING_EVENTS + 100; i++)
		one_span((uint64_t)i + 1);
	atomic_store(&sfr__trace_on, 0);
	seen_dropped = 0;
	sfr__rings_each(add_dropped, NULL);
	CHECK_EQ(seen_dropped, 100);
	sfr__rings_begin_trace(1002); /* empties the ring */
	atomic_store(&sfr__trace_on, 0);
	seen_dropped = 0;
	sfr__rings_each(add_dropped, NULL);
	CHECK_EQ(seen_dropped, 0);
	sfr__rings_free_dead(true);
}

static void *record_one(void *unused)
{
	(void)unused;
	one_span(1);
	return NULL;
}

TEST(a_thread_without_memory_for_a_ring_is_counted)
{
	const struct sfr_fault fault = {
		.call = "calloc", .nth = 1, .sticky = 1, .err = ENOMEM, .limit = -1
	};
	const char *path = dir_path(dir, "memory.json");
	struct sfr_trace_result result;
	pthread_t thread;

	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr_trace_start(path), 0);
	CHECK_EQ(sfr_inject_add_fault(&fault), 0);
	CHECK_EQ(pthread_create(&thread, NULL, record_one, NULL), 0);
	CHECK_EQ(pthread_join(thread, NULL), 0);
	sfr_inject_clear();
	/* Waits until the loss is written; later events do not count it again. */
	for (int i = 0; i < 6000 && count(text_of(path), "\"dropped_events\":\"1\"") == 0; i++)
		(void)usleep(10 * 1000);
	CHECK_EQ(sfr_trace_stop(&result), 0);
	CHECK_EQ(result.nr_events, 0);
	CHECK_EQ(result.nr_dropped, 1);
	CHECK_EQ(count(text_of(path), "\"dropped_events\":\"1\""), 1);
}

TEST(failed_trace_start_returns_an_error_and_leaves_nothing_open)
{
	struct sfr_trace_result result;

	CHECK_EQ(sfr_trace_start(dir_path(dir, "missing/t.json")), -ENOENT);
	CHECK_EQ(sfr_trace_start(dir), -EISDIR);
	CHECK_EQ(sfr_trace_start("/dev/null"), -EINVAL);
	CHECK_EQ(mkfifo(dir_path(dir, "pipe"), 0600), 0);
	CHECK_EQ(sfr_trace_start(dir_path(dir, "pipe")), -ENXIO);
	CHECK_EQ(sfr_trace_stop(&result), SFR_ESTATE);
	FOR_EVERY_FAILURE(run, "*", ENOSPC)
	{
		int rc = sfr_trace_start(dir_path(dir, "faulty.json"));

		check_end_fault(&run);
		CHECK(rc == 0 || check_acted(&run));
		CHECK_EQ(sfr_trace_stop(&result), rc == 0 ? 0 : SFR_ESTATE);
		CHECK_EQ(sfr_trace_get_start_ns(), 0);
	}
}

TEST(a_second_trace_is_refused_while_one_is_written)
{
	struct sfr_trace_result result;

	CHECK_EQ(sfr_trace_start(dir_path(dir, "first.json")), 0);
	CHECK_EQ(sfr_trace_start(dir_path(dir, "second.json")), SFR_EBUSY);
	CHECK(access(dir_path(dir, "second.json"), F_OK) < 0);
	CHECK_EQ(sfr_trace_stop(&result), 0);
	CHECK_EQ(sfr_trace_start(dir_path(dir, "second.json")), 0);
	CHECK_EQ(sfr_trace_stop(&result), 0);
}

TEST(failing_disk_leaves_a_valid_document_and_counts_lost_events)
{
	/* The first write has the head. The next one fails, at once or half-way. */
	for (int half = 0; half < 2; half++) {
		const struct sfr_fault cut = { .call = "pwrite", .nth = 1, .limit = -2 };
		const struct sfr_fault full = {
			.call = "pwrite", .nth = 1 + (uint64_t)half, .err = ENOSPC, .limit = -1
		};
		const char *path = dir_path(dir, "disk.json");
		struct sfr_trace_result result;

		CHECK_EQ(sfr_inject_install(), 0);
		CHECK_EQ(sfr_trace_start(path), 0);
		sfr_inject_clear();
		if (half)
			CHECK_EQ(sfr_inject_add_fault(&cut), 0);
		CHECK_EQ(sfr_inject_add_fault(&full), 0);
		for (int i = 0; i < 100; i++)
			one_span(1);
		/* until the writing thread has tried */
		while (sfr_inject_hits() < 1 + (uint64_t)half)
			(void)usleep(1000);
		one_span(2);
		CHECK_EQ(sfr_trace_stop(&result), 0);
		sfr_inject_clear();
		CHECK_EQ(result.error, -ENOSPC);
		CHECK_EQ(result.nr_events, 0);
		CHECK_EQ(result.nr_dropped, 101);
		CHECK_EQ(count(text_of(path), "\"name\":\"copy\""), 0);
		/* The head, one row and the end. The events that were written in part are blank. */
		CHECK_EQ(count(text_of(path), "]"), 1);
		CHECK_EQ(count(text_of(path), "{"), 4);
		CHECK_EQ(count(text_of(path), " ") > 100, half);
	}
}

TEST(forked_child_writes_only_its_own_trace)
{
	const char *path = dir_path(dir, "parent.json"), *own = dir_path(dir, "child.json");
	struct sfr_trace_result result;
	int status = -1;
	pid_t pid;

	CHECK_EQ(sfr_trace_start(path), 0);
	one_span(1);
	/* Waits until its thread runs: the memory that starts the thread would leak in the
	 * child. */
	for (int i = 0; i < 6000 && count(text_of(path), "\"save\":1") == 0; i++)
		(void)usleep(10 * 1000);
	pid = fork();
	if (pid == 0) {
		int failed = check__nr_failed;

		(void)alarm(60);
		one_span(2);
		CHECK_EQ(sfr_trace_get_start_ns(), 0);
		CHECK_EQ(sfr_trace_stop(&result), SFR_ESTATE);
#ifndef __SANITIZE_THREAD__ /* it does not support threads after a fork of a threaded process */
		CHECK_EQ(sfr_trace_start(own), 0);
		one_span(3);
		CHECK_EQ(sfr_trace_stop(&result), 0);
		CHECK_EQ(result.nr_events, 1);
#endif
		_exit(check__nr_failed != failed);
	}
	CHECK(pid > 0);
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	one_span(4);
	CHECK_EQ(sfr_trace_stop(&result), 0);
	CHECK_EQ(result.nr_events, 2);
	CHECK_EQ(count(text_of(path), "\"save\":1") + count(text_of(path), "\"save\":4"), 2);
	CHECK_EQ(count(text_of(path), "\"save\":2") + count(text_of(path), "\"save\":3"), 0);
#ifndef __SANITIZE_THREAD__
	CHECK_EQ(count(text_of(own), "\"save\":3"), 1);
#endif
	CHECK_EQ(count(text_of(own), "\"save\":1"), 0);
}

TEST(steps_that_raise_are_forgotten)
{
	const char *path = dir_path(dir, "steps.json"), *text;
	struct sfr_trace_result result;

	CHECK_EQ(sfr_trace_start(path), 0);
	sfr_trace_step(1, true); /* the step began before the trace */
	sfr_trace_step(1, false);
	sfr_trace_step(1, false); /* the first step raised */
	sfr_trace_step(2, false); /* nested: one optimizer around another */
	sfr_trace_step(2, true);
	sfr_trace_step(3, false); /* a step inside it raises */
	sfr_trace_step(1, true);
	for (uint64_t i = 10; i < 30; i++) /* nested deeper than the ring keeps */
		sfr_trace_step(i, false);
	for (uint64_t i = 29; i >= 10; i--)
		sfr_trace_step(i, true);
	CHECK_EQ(sfr_trace_stop(&result), 0);
	text = text_of(path);
	CHECK_EQ(count(text, "\"name\":\"step\""), 2);
	CHECK_EQ(count(text, "\"name\":\"optimizer\""), 2 + 8);
}

TEST(trace_shows_every_phase_of_a_save)
{
	static const char *const phases[] = { "save",           "admit", "capture",  "samples",
					      "copy",           "block", "checksum", "write",
					      "open",           "tail",  "sync",     "commit",
					      "sync directory", "remove" };
	const char *path = dir_path(dir, "save.json"), *text;
	struct sfr_trace_result result;
	struct sfr_engine *engine;
	struct saving_state state;
	char what[64];

	saving_fill(&state, 1);
	CHECK_EQ(sfr_trace_start(path), 0);
	engine = saving_engine(4, 2, 2);
	CHECK_EQ(saving_save(engine, dir, "a \"b\"\n\377.pt", &state, SFR_SAVE_DURABLE), 0);
	CHECK_EQ(sfr_log_append_remove(dir_path(dir, "a \"b\"\n\377.pt"), NULL), 0);
	saving_end(engine);
	CHECK_EQ(sfr_trace_stop(&result), 0);
	text = text_of(path);
	for (size_t i = 0; i < sizeof(phases) / sizeof(phases[0]); i++) {
		(void)snprintf(what, sizeof(what), "\"name\":\"%s\",", phases[i]);
		CHECK(count(text, what) > 0);
	}
	CHECK_EQ(count(text, "\"file\":\"a \\\"b\\\"\\u000a?.pt\",\"state\":\"durable\""), 1);
	CHECK_EQ(count(text, "\"name\":\"copy storage\""), 0); /* all of them are small */
}

TEST(only_valid_utf8_is_kept_in_names)
{
	static const struct {
		const char *in, *out;
	} cases[] = {
		{ "a\x7f\"\\\n", "a\\u007f\\\"\\\\\\u000a" },
		/* the first and last character of each length; the neighbours of surrogates */
		{ "\xc2\x80\xdf\xbf", "\xc2\x80\xdf\xbf" },
		{ "\xe0\xa0\x80\xef\xbf\xbf", "\xe0\xa0\x80\xef\xbf\xbf" },
		{ "\xed\x9f\xbf\xee\x80\x80", "\xed\x9f\xbf\xee\x80\x80" },
		{ "\xf0\x90\x80\x80\xf4\x8f\xbf\xbf", "\xf0\x90\x80\x80\xf4\x8f\xbf\xbf" },
		/* too long for their values */
		{ "\xc0\xaf", "??" },
		{ "\xc1\xbf", "??" },
		{ "\xe0\x9f\xbf", "???" },
		{ "\xf0\x8f\xbf\xbf", "????" },
		{ "\xed\xa0\x80", "???" },      /* a surrogate */
		{ "\xf4\x90\x80\x80", "????" }, /* above U+10FFFF */
		{ "\xf5\x80\x80\x80", "????" },
		{ "\x80z", "?z" }, /* not the first byte of a character */
		{ "\xc3z", "?z" }, /* not a second byte */
		{ "\xe2\x82z", "??z" },
		{ "\xe2\x82", "??" }, /* cut off */
	};
	char out[64];

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		sfr__document_escape(cases[i].in, strlen(cases[i].in), out);
		CHECK(strcmp(out, cases[i].out) == 0);
	}
	sfr__document_escape("ab\xc3\xa9", 3, out); /* ends inside the character */
	CHECK(strcmp(out, "ab?") == 0);
}

BEGIN
{
	dir = saving_dir();
	return true;
}
