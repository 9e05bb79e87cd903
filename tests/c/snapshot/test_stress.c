/* Everything at once, over pools of a few blocks and on several threads: saves, cancels,
 * snapshots that wait while blocks grow, trims, warm-ups, removes, loads, faults and forks.
 *
 * The test looks for an unforeseen order of events. That may show as a hang (the test is ended),
 * a data race (make tsan), memory that is not returned, or a file that is neither old nor new.
 * CHECK_STRESS_S in the environment sets its seconds (make stress); CHECK_SEED repeats one run. */
#include <errno.h>
#include <pthread.h>
#include <sys/wait.h>
#include <time.h>

#include "saving.h"
#include "snapshot/snapshot.h"

enum { BLOCK = SAVING_BLOCK, NR_ROUNDS = 12, NR_TURNS = 12, NR_NAMES = 3 };

static const char *dir;
static struct saving_state state;

struct actor {
	pthread_t thread;
	struct sfr_engine *engine;
	uint64_t random;
	void (*turn)(struct actor *me);
};

static void name_of(struct actor *me, char name[8])
{
	(void)snprintf(name, 8, "%c.pt", 'a' + (int)check_draw(&me->random, NR_NAMES));
}

static void save(struct actor *me)
{
	struct sfr_ticket *t;
	char name[8];

	name_of(me, name);
	if (saving_new(me->engine, dir, name, &state, 0, &t) != 0)
		return; /* an injected fault */
	if (sfr_save_admit(t, SFR_FOREVER) != 0) {
		sfr_ticket_put(t);
		return;
	}
	if (sfr_save_capture(t, SFR_FOREVER) != 0 || check_draw(&me->random, 8) == 0)
		sfr_save_abandon(t); /* snapshots hold every block, or the caller raises */
	else
		CHECK_EQ(sfr_save_launch(t), 0);
	if (check_draw(&me->random, 4) == 0)
		(void)sfr_save_cancel(t);
	if (check_draw(&me->random, 2) == 0)
		CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
	while (sfr_save_wait(t, SFR_WAIT_COPIED, 1000 * 1000) == SFR_EAGAIN)
		;
	(void)sfr_save_give_verdict(t, -1);
	CHECK_EQ(sfr_save_wait(t, SFR_WAIT_ENDED, SFR_FOREVER), 0);
	sfr_ticket_put(t);
}

static void snap(struct actor *me)
{
	const uint64_t most = 3 * BLOCK;
	const struct sfr_source source = {
		.addr = (uint64_t)(uintptr_t)state.bytes,
		.nbytes = 1 + check_draw(&me->random, (uint32_t)most),
		.lane = check_draw(&me->random, 2) ? SFR_LANE_HOST : SFR_CAPTURED,
	};
	struct sfr_snapshot *s;
	int64_t torn;
	int rc;

	if (sfr_snapshot_new(me->engine, &source, 1, 0, &s) != 0)
		return;
	while ((rc = sfr_snapshot_lease(s, 1000 * 1000)) == SFR_EAGAIN)
		;
	if (rc == 0) {
		if (sfr_snapshot_start(s) == 0)
			CHECK_EQ(sfr_snapshot_wait(s, SFR_FOREVER, &torn), 0);
		sfr_snapshot_remove_view(s);
	}
	sfr_snapshot_put(s);
}

static void resize(struct actor *me)
{
	if (check_draw(&me->random, 2) == 0)
		(void)sfr_engine_warm_up(me->engine, check_draw(&me->random, 8 * BLOCK));
	else
		(void)sfr_engine_trim(me->engine);
	(void)usleep(check_draw(&me->random, 500));
}

/* Checks a file: it is one of those saved, or missing. Or removes it. */
static void check_or_remove(struct actor *me)
{
	char name[8];
	struct sfr_err err;
	int found;

	name_of(me, name);
	if (check_draw(&me->random, 3) == 0) {
		(void)sfr__file_remove_tree(dir_path(dir, name), NULL, &err);
		return;
	}
	found = saving_content(dir, name);
	CHECK(found == 7 || found == -1 || (found == -2 && sfr_inject_hits() != 0));
}

static void fork_one(struct actor *me)
{
	pid_t child = fork();
	int status;

	if (child == 0)
		_exit(sfr_engine_trim(me->engine) == SFR_EFORK ? 0 : 1);
	if (CHECK(child > 0) && CHECK_EQ(waitpid(child, &status, 0), child))
		CHECK_EQ(status, 0);
	(void)usleep(1000);
}

static void *act(void *arg)
{
	struct actor *me = arg;

	for (int i = 0; i < NR_TURNS; i++)
		me->turn(me);
	return NULL;
}

/* Takes notices as they arrive, because each holds a reference. */
static void *listen(void *arg)
{
	struct sfr_notice notice = { .what = 0 };

	(void)arg;
	while (notice.what != SFR_NOTICE_STOP) {
		CHECK_EQ(sfr_notice_wait(&notice, SFR_FOREVER), 0);
		sfr_ticket_put(notice.ticket);
		sfr_snapshot_put(notice.snapshot);
	}
	return NULL;
}

static void one_round(uint64_t seed)
{
	static void (*const turns[])(struct actor *) = {
		save, save, save, snap, snap, resize, check_or_remove, resize, fork_one
	};
	enum { NR = sizeof(turns) / sizeof(turns[0]) };
	static const char *const calls[] = { "pwrite", "fdatasync", "rename", "malloc", "madvise" };
	uint64_t random = seed;
	const struct sfr_engine_opts opts = { .pool_bytes = (1 + check_draw(&random, 6)) * BLOCK,
					      .block_bytes = BLOCK,
					      .nr_writers = 1 + check_draw(&random, 3),
					      .max_in_flight = 1 + check_draw(&random, 3),
					      .nr_copiers = check_draw(&random, 3) };
	const struct sfr_fault fault = { .call = calls[check_draw(&random, 5)],
					 .nth = 1 + check_draw(&random, 60),
					 .err = EIO,
					 .limit = -1 };
	struct actor actors[NR];
	struct sfr_engine *engine;
	struct sfr_stats stats;

	CHECK_EQ(sfr_engine_new(&opts, &engine), 0);
	CHECK_EQ(sfr_inject_add_fault(&fault), 0);
	for (int i = 0; i < NR; i++) {
		actors[i] = (struct actor){ .engine = engine,
					    .random = seed * 31 + (uint64_t)i,
					    .turn = turns[i] };
		CHECK_EQ(pthread_create(&actors[i].thread, NULL, act, &actors[i]), 0);
	}
	for (int i = 0; i < NR; i++)
		CHECK_EQ(pthread_join(actors[i].thread, NULL), 0);
	sfr_inject_clear();
	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK_EQ(stats.saves_in_flight, 0);
	CHECK_EQ(sfr_engine_close(engine, SFR_FOREVER), 0);
	CHECK_EQ(sfr_engine_stats(engine, &stats), 0);
	CHECK_EQ(stats.committed_bytes, 0);
	sfr_engine_put(engine);
}

TEST(concurrent_saves_and_snapshots_end_and_leave_no_temporaries)
{
	uint64_t seed = check_number("CHECK_SEED", (uint64_t)time(NULL));
	uint64_t seconds = check_number("CHECK_STRESS_S", 0);
	uint64_t end = seconds ? sfr__now_ns() + seconds * 1000000000u : 0;

	for (int round = 0; end != 0 ? sfr__now_ns() < end : round < NR_ROUNDS; round++) {
		int before = check__nr_failed;

		(void)alarm(CHECK_SECONDS); /* for each round */
		one_round(seed + (uint64_t)round);
		if (check__nr_failed != before) {
			(void)fprintf(stderr, "CHECK_SEED=%llu\n",
				      (unsigned long long)seed + (unsigned long long)round);
			return;
		}
	}
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
}

static pthread_t listener;

static void stop_listener(void)
{
	sfr_notice_post_stop();
	CHECK_EQ(pthread_join(listener, NULL), 0);
}

BEGIN
{
	dir = saving_dir();
	saving_fill(&state, 7);
	(void)saving_on_host();
	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(pthread_create(&listener, NULL, listen, NULL), 0);
	sfr__host_tune(4096, 8192); /* so that copiers help with small copies too */
	check_at_end(stop_listener);
	return true;
}
