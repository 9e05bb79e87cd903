/* The whole framework of the C tests: one program for each part of the core, one function for
 * each test.
 *
 *     TEST(short_write_is_continued) { ... CHECK(x == y); ... }
 *     BEGIN { dir = saving_dir(); return true; }
 *
 * The tests run in the order of the file, after BEGIN, if there is one. It returns false if nothing
 * can be run on this machine.
 *
 * A failed check prints its position and is counted, and the test continues. If the rest depends
 * on a check, write `if (!CHECK(x)) return;`. The program exits with 0 (all passed), 1
 * (something failed) or 77 (nothing could be run on this machine).
 *
 * FOR_EVERY_FAILURE repeats a body while the first, second, third ... call of the table fails,
 * until a run makes fewer calls than that. It does so twice: with only that call failing, then
 * with that call and every later one.
 *
 *     FOR_EVERY_FAILURE(run, "*", ENOMEM) {
 *             int rc = sfr__pool_new(len, len, &pool);
 *
 *             CHECK(rc == 0 || (rc == -ENOMEM && check_acted(&run)));
 *             check_end_fault(&run);    (from here on nothing fails)
 *             ...
 *     } */
#ifndef CHECK_H
#define CHECK_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/sys.h"

#define CHECK_SKIPPED 77
#define CHECK_SECONDS 300u   /* SIGALRM ends a test that hangs; its name is the last one printed */
#define CHECK_MAX_RUNS 20000 /* of one FOR_EVERY_FAILURE: more means that it does not end */

static int check__nr_checks, check__nr_failed, check__nr_tests, check__nr_skipped;
static bool check__skip;

/* Several threads may count at the same time. */
__attribute__((format(printf, 4, 5))) static inline bool check__that(bool ok, const char *file,
								     int line, const char *format,
								     ...)
{
	va_list args;

	(void)__atomic_add_fetch(&check__nr_checks, 1, __ATOMIC_RELAXED);
	if (ok)
		return true;
	(void)__atomic_add_fetch(&check__nr_failed, 1, __ATOMIC_RELAXED);
	flockfile(stderr);
	(void)fprintf(stderr, "%s:%d: failed: ", file, line);
	va_start(args, format);
	(void)vfprintf(stderr, format, args);
	va_end(args);
	(void)fputc('\n', stderr);
	funlockfile(stderr);
	return false;
}

#define CHECK(cond) check__that((cond), __FILE__, __LINE__, "%s", #cond)
/* Compares integers of any type, and prints both if they differ. */
#define CHECK_EQ(a, b)                                                                             \
	__extension__({                                                                            \
		long long check__a = (long long)(a), check__b = (long long)(b);                    \
		check__that(check__a == check__b, __FILE__, __LINE__, "%s == %s (%lld, %lld)", #a, \
			    #b, check__a, check__b);                                               \
	})

static inline void check__run(void (*test)(void), const char *name)
{
	int before = check__nr_failed;

	(void)printf("  %s", name);
	(void)fflush(stdout);
	check__skip = false;
	(void)alarm(CHECK_SECONDS);
	test();
	(void)alarm(0);
	check__nr_tests++;
	if (check__skip)
		check__nr_skipped++;
	if (check__nr_failed != before)
		(void)printf(": FAILED");
	else if (check__skip)
		(void)printf(": skipped");
	(void)printf("\n");
	(void)fflush(stdout);
}

struct check__test {
	void (*run)(void);
	const char *name;
};

#define CHECK_MAX_TESTS 64
static struct check__test check__tests[CHECK_MAX_TESTS];
static int check__nr_known;

/* The constructors of a file run in the order in which they are written. */
#define TEST(test)                                                                                 \
	static void test(void);                                                                    \
	__attribute__((constructor)) static void check__add_##test(void)                           \
	{                                                                                          \
		check__tests[check__nr_known++] = (struct check__test){ test, #test };             \
	}                                                                                          \
	static void test(void)

static bool (*check__begin)(void);

#define BEGIN                                                                                      \
	static bool check__begin_program(void);                                                    \
	__attribute__((constructor)) static void check__add_begin(void)                            \
	{                                                                                          \
		check__begin = check__begin_program;                                               \
	}                                                                                          \
	static bool check__begin_program(void)

#define CHECK_MAX_ENDS 4
static void (*check__ends[CHECK_MAX_ENDS])(void);
static int check__nr_ends;

/* Has a function called after the last test, in the order of these calls. */
static inline void check_at_end(void (*end)(void))
{
	check__ends[check__nr_ends++] = end;
}

/* The test must return right after this. */
static inline void check_skip(const char *why)
{
	check__skip = true;
	(void)printf(" (%s)", why);
}

int main(void)
{
	if (check__begin && !check__begin())
		return CHECK_SKIPPED;
	for (int i = 0; i < check__nr_known; i++)
		check__run(check__tests[i].run, check__tests[i].name);
	for (int i = 0; i < check__nr_ends; i++)
		check__ends[i]();
	(void)printf("%d tests, %d skipped, %d checks, %d failed\n", check__nr_tests,
		     check__nr_skipped, check__nr_checks, check__nr_failed);
	if (check__nr_failed != 0)
		return EXIT_FAILURE;
	return check__nr_tests != 0 && check__nr_skipped == check__nr_tests ? CHECK_SKIPPED :
									      EXIT_SUCCESS;
}

/* Returns the next pseudo-random number of a sequence (splitmix64). Any state may begin one. */
static inline uint64_t check_random_of(uint64_t *state)
{
	uint64_t z = *state += 0x9e3779b97f4a7c15u;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
	z = (z ^ z >> 27) * 0x94d049bb133111ebu;
	return z ^ z >> 31;
}

/* Returns the next number below `bound` of a sequence. */
static inline uint32_t check_draw(uint64_t *state, uint32_t bound)
{
	return (uint32_t)(check_random_of(state) % bound);
}

/* Returns the next number of a sequence that is the same in each run. One thread at a time. */
static inline uint64_t check_random(void)
{
	static uint64_t state;

	return check_random_of(&state);
}

/* Returns the number that a variable of the environment has, or `otherwise`. */
static inline uint64_t check_number(const char *variable, uint64_t otherwise)
{
	const char *text = getenv(variable);

	return text ? strtoull(text, NULL, 10) : otherwise;
}

/* ---- every failure ------------------------------------------------------- */

struct check_runs {
	const char *call;
	int err;
	int sticky; /* 0: only one call fails; 1: that call and every later one */
	int nth;    /* number of the failing call, from 1; 0 before the first run */
	bool acted; /* the answer of check_acted before check_end_fault cleared the counters */
};

/* Returns whether this run's fault has made a call fail. If so, it caused any error that the
 * body sees. */
static inline bool check_acted(const struct check_runs *run)
{
	return run->acted || sfr_inject_hits() != 0;
}

/* Ends this run's fault: later calls of the body do not fail. */
static inline void check_end_fault(struct check_runs *run)
{
	run->acted = check_acted(run);
	sfr_inject_clear();
}

static inline struct check_runs check__runs(const char *call, int err)
{
	static bool installed; /* installed once and never removed: the wrappers only count */

	if (!installed)
		CHECK_EQ(sfr_inject_install(), 0);
	installed = true;
	return (struct check_runs){ .call = call, .err = err };
}

static inline bool check__next_run(struct check_runs *run)
{
	struct sfr_fault fault = { .call = run->call, .err = run->err, .limit = -1 };

	if (run->nth != 0 && !check_acted(run)) {
		/* At least one call must have failed; otherwise the loop has tested nothing. */
		CHECK(run->nth > 1);
		if (run->sticky++ != 0) {
			sfr_inject_clear();
			return false;
		}
		run->nth = 0;
	}
	if (!CHECK(run->nth < CHECK_MAX_RUNS)) {
		sfr_inject_clear();
		return false;
	}
	run->acted = false;
	fault.nth = (uint64_t)++run->nth;
	fault.sticky = run->sticky;
	sfr_inject_clear();
	return CHECK_EQ(sfr_inject_add_fault(&fault), 0);
}

/* The body must not leave the loop by break or return. */
#define FOR_EVERY_FAILURE(run, call, err)                                                          \
	for (struct check_runs run = check__runs(call, err); check__next_run(&run);)

#endif
