/* Random schedules of a training that saves from devices and takes snapshots, over the fake
 * driver.
 *
 * Every step is queued without a wait, and overwrites the saved state as early as the order
 * between the streams allows. Each file must hold exactly one step, the one at which it was
 * saved, and no rule of the driver may be broken. A seed chooses delays, sizes, which side runs
 * first, where the storages are, and the kind of step after each save.
 *
 *     STILLFRAME_SCHEDULES=10000        the number of schedules, 300 by default; prints progress
 *     STILLFRAME_FIRST_SCHEDULE=4711    the first seed, to repeat one schedule */
#include <pthread.h>
#include <signal.h>
#include <time.h>

#include "cuda/fake.h"

enum { NR_SAVES = 3, ROOMY = 64, FITS = 16, SAY_EVERY_S = 5, HANGS_S = 100, ENOUGH_FAILED = 5 };

/* The events between a save and the next change of its deferred storages. */
#define STEPS(X)                                                                                   \
	X(SAME, "gated on the save's stream")                                                      \
	X(SIDE, "gated on a side stream")                                                          \
	X(TWO, "two optimizers, each gated on its own stream")                                     \
	X(THREAD, "gated by another thread")                                                       \
	X(CAPTURED, "gated while its graph is captured")                                           \
	X(NO_STREAM, "gated with no stream")                                                       \
	X(LATE, "gated when all before it has run")                                                \
	X(WAITED, "no gate, a wait")                                                               \
	X(CANCELLED, "given up")
enum step {
#define X(name, text) name,
	STEPS(X)
#undef X
		NR_STEPS
};
static const char *const step_names[] = {
#define X(name, text) text,
	STEPS(X)
#undef X
};

static const char *dir;
static uint64_t nr_steps[NR_STEPS], nr_snapshots;

/* A training's storages, and the stream for work on them on each device. */
static struct training {
	struct saving_state state;
	struct sfr_device_stream main[2], side[2];
	struct fake_fill work[64];
	unsigned nr_work;
	unsigned first; /* storages below it are in host memory */
	unsigned split; /* storages from it on are on the second device */
} training;

/* ---- queueing work -------------------------------------------------------------- */

static void *handle(const struct sfr_device_stream *stream)
{
	return (void *)(uintptr_t)stream->handle;
}

/* Queues work that fills storages [from, to), each on its device's stream. */
static void launch(const struct sfr_device_stream *streams, unsigned from, unsigned to,
		   unsigned char value)
{
	struct training *tr = &training;

	for (unsigned device = 0; device < 2; device++) {
		unsigned low = device ? tr->split : tr->first;
		unsigned high = device ? SAVING_NR : tr->split;
		struct fake_fill *work = &tr->work[tr->nr_work];

		if (low < from)
			low = from;
		if (high > to)
			high = to;
		if (low >= high)
			continue;
		*work = (struct fake_fill){ &tr->state, low, high, value };
		tr->nr_work++;
		fake.fake_cuda_launch(handle(&streams[device]), fake_fill, work);
	}
}

static void follow(const struct sfr_device_stream *streams, const struct sfr_device_stream *others)
{
	for (unsigned device = 0; device < 2; device++)
		fake.fake_cuda_follow(handle(&streams[device]), handle(&others[device]));
}

static void capture(const struct sfr_device_stream *streams, int yes)
{
	for (unsigned device = 0; device < 2; device++)
		fake.fake_cuda_capture(handle(&streams[device]), yes);
}

static void drain(const struct sfr_device_stream *streams)
{
	for (unsigned device = 0; device < 2; device++)
		fake.fake_cuda_drain(handle(&streams[device]));
}

/* ---- steps ------------------------------------------------------------------------ */

static bool held; /* the devices are stopped, so no thread may wait for them */

/* A copy of the state: a save or a snapshot. */
static struct taken {
	struct sfr_ticket *save;
	struct sfr_snapshot *snapshot;
	unsigned char value;
	bool wanted; /* not given up */
} taken[NR_SAVES];

static int gate_once(const struct taken *t, const struct sfr_device_stream *streams, uint32_t nr)
{
	uint64_t slice_ns = held ? 0 : SFR_FOREVER;

	return t->save ? sfr_save_gate(t->save, streams, nr, slice_ns) :
			 sfr_snapshot_gate(t->snapshot, streams, nr, slice_ns);
}

static int gate(const struct taken *t, const struct sfr_device_stream *streams, uint32_t nr)
{
	int rc = gate_once(t, streams, nr);

	if (rc == SFR_EAGAIN && held) {
		fake.fake_cuda_settle();
		rc = gate_once(t, streams, nr);
	}
	return rc;
}

static void wait_copied(const struct taken *t)
{
	int64_t torn = -1;

	CHECK_EQ(t->save ? sfr_save_wait(t->save, SFR_WAIT_COPIED, SFR_FOREVER) :
			   sfr_snapshot_wait(t->snapshot, SFR_FOREVER, &torn),
		 0);
	CHECK_EQ(torn, -1);
}

/* Reports the storages of [from, end) as freed. No gate waits for the copies of a save that was
 * given up, so its caller keeps the storages until the save has released them. */
static void freed(unsigned from, const struct taken *last)
{
	for (const struct taken *t = taken; t < last; t++)
		if (!t->wanted)
			wait_copied(t);
	fake_freed(&training.state, from);
}

/* Gives up a save. A snapshot that nobody can read is given up too. */
static bool give_up(const struct taken *t)
{
	if (t->save)
		return sfr_save_cancel(t->save) == 1;
	sfr_snapshot_remove_view(t->snapshot);
	return true;
}

static void *gate_and_step(void *arg)
{
	CHECK_EQ(gate(arg, training.side, 2), 0);
	launch(training.side, FAKE_FIRST_DEFERRED, SAVING_NR, FAKE_GARBAGE);
	return NULL;
}

/* Runs a step, which changes the deferred storages as soon as it may. False when the save was
 * given up. */
static bool step(struct taken *t, enum step kind)
{
	const struct sfr_device_stream *on = training.main, *side = training.side;
	unsigned from = FAKE_FIRST_DEFERRED;
	bool given_up = false;
	pthread_t thread;

	nr_steps[kind]++;
	switch (kind) {
	case SAME:
		CHECK_EQ(gate(t, on, 2), 0);
		break;
	case LATE:
		drain(on);
		CHECK_EQ(gate(t, on, 2), 0);
		break;
	case SIDE:
	case TWO:
		if (kind == TWO) {
			CHECK_EQ(gate(t, on, 2), 0);
			launch(on, from, from + 2, FAKE_GARBAGE);
			from += 2;
		}
		follow(side, on);
		CHECK_EQ(gate(t, side, 2), 0);
		launch(side, from, SAVING_NR, FAKE_GARBAGE);
		follow(on, side);
		return true;
	case THREAD:
		follow(side, on);
		if (CHECK_EQ(pthread_create(&thread, NULL, gate_and_step, t), 0))
			CHECK_EQ(pthread_join(thread, NULL), 0);
		follow(on, side);
		return true;
	case CAPTURED:
		capture(on, 1);
		CHECK_EQ(gate(t, on, 2), 0);
		capture(on, 0); /* a replay of the graph passes no gate */
		freed(from, t); /* the save's stream has waited for the other storages */
		break;
	case NO_STREAM:
		CHECK_EQ(gate(t, NULL, 0), 0);
		freed(from, t);
		break;
	case WAITED:
		wait_copied(t);
		freed(0, t);
		break;
	case CANCELLED:
		given_up = give_up(t);
#ifdef __SANITIZE_THREAD__ /* the step races with copies that are not used */
		wait_copied(t);
#endif
		CHECK_EQ(gate(t, on, 2), 0);
		break;
	case NR_STEPS:
		break;
	}
	launch(on, from, SAVING_NR, FAKE_GARBAGE);
	return !given_up;
}

/* ---- one schedule -------------------------------------------------------------------- */

/* Checks the file of a save that has ended: it holds exactly one step, or does not exist. */
static void check_file(unsigned number, const struct taken *t)
{
	char name[8];

	(void)snprintf(name, sizeof(name), "s%u", number);
	CHECK_EQ(saving_content_as(dir, name, &training.state), t->wanted ? t->value : -1);
	(void)unlink(dir_path(dir, name));
}

static bool is_full_of(const struct sfr_snapshot *snapshot, unsigned char value)
{
	uint64_t len;
	char *base;
	bool good = true;

	sfr_snapshot_memory(snapshot, &base, &len);
	for (unsigned i = 0; i < SAVING_NR; i++) {
		const char *copy = base + sfr_snapshot_offset(snapshot, i);

		for (uint64_t k = 0; k < training.state.sources[i].nbytes; k++)
			good = good && copy[k] == (char)value;
	}
	return good;
}

/* Makes the call; with `hold`, the devices are stopped from the first copy on. */
static void take_save(struct sfr_engine *engine, unsigned number, bool hold, struct taken *t)
{
	char name[8];

	(void)snprintf(name, sizeof(name), "s%u", number);
	CHECK_EQ(saving_new(engine, dir, name, &training.state, 0, &t->save), 0);
	CHECK_EQ(sfr_save_begin_transfers(t->save, training.main, 2), 0);
	CHECK_EQ(sfr_save_admit(t->save, SFR_FOREVER), 0); /* waits for others to end */
	held = hold;
	fake.fake_cuda_hold(held);
	CHECK_EQ(sfr_save_capture(t->save, SFR_FOREVER), 0);
	CHECK_EQ(sfr_save_launch(t->save), 0);
}

static void take_snapshot(struct sfr_engine *engine, bool hold, struct taken *t)
{
	const struct saving_state *state = &training.state;

	CHECK_EQ(sfr_snapshot_new(engine, state->sources, SAVING_NR, 0, &t->snapshot), 0);
	CHECK_EQ(sfr_snapshot_lease(t->snapshot, SFR_FOREVER), 0); /* as above */
	CHECK_EQ(sfr_snapshot_set_streams(t->snapshot, training.main, 2), 0);
	held = hold;
	fake.fake_cuda_hold(held);
	CHECK_EQ(sfr_snapshot_start(t->snapshot), 0);
}

/* Ends a save or snapshot, except for its notice. */
static void end(struct taken *t)
{
	wait_copied(t);
	if (t->snapshot && t->wanted) {
		CHECK(is_full_of(t->snapshot, t->value));
		sfr_snapshot_remove_view(t->snapshot);
	}
	if (t->save)
		CHECK_EQ(sfr_save_wait(t->save, SFR_WAIT_ENDED, SFR_FOREVER), 0);
}

/* Takes the notices of all ends. */
static void take_notices(void)
{
	for (unsigned nr = 0; nr < NR_SAVES;) {
		unsigned what = saving_notice();

		if (what == SFR_NOTICE_ENDED || what == SFR_NOTICE_SNAPSHOT)
			nr++;
	}
}

/* Places the storages and sets up the devices. */
static void begin_schedule(uint64_t seed, bool roomy)
{
	struct training *tr = &training;

	fake.fake_cuda_delay(fake_rng(3) ? 1 + fake_rng(30000) : 0, seed);
	fake.fake_cuda_delay_one_in(1 + fake_rng(8));
	fake.fake_cuda_first((int)fake_rng(3));
	/* The thread that stops the devices must not wait for room on a stream. */
	fake.fake_cuda_depth(roomy || fake_rng(2) ? 0 : 3 + fake_rng(30));
	fake.fake_cuda_segments(fake_rng(3) ? 0 : 512u << fake_rng(6));
	sfr__cuda_set_portion_limits(256u << fake_rng(7), 1 + fake_rng(4));
	saving_fill(&tr->state, 0);
	tr->nr_work = 0;
	tr->first = fake_rng(2);
	tr->split = fake_rng(2) ? SAVING_NR : 1 + fake_rng(SAVING_NR - 1);
	fake_put_on_device(&tr->state, tr->first, tr->split, 0);
	fake_put_on_device(&tr->state, tr->split, SAVING_NR, 1);
}

static void one_schedule(uint64_t seed)
{
	struct training *tr = &training;
	struct sfr_engine *engine;
	uint64_t nr_blocks;
	bool roomy;

	memset(taken, 0, sizeof(taken));
	fake__random = seed * 2654435761u + 1;
	/* Room for everything: then everything can be queued while the devices are stopped. */
	roomy = fake_rng(4) == 0;
	if (roomy)
		nr_blocks = ROOMY;
	else if (fake_rng(2))
		nr_blocks = 1 + fake_rng(7);
	else
		nr_blocks = FITS + fake_rng(8);
	begin_schedule(seed, roomy);
	engine = fake_engine(nr_blocks, 1 + fake_rng(2));
	for (unsigned i = 0; i < NR_SAVES; i++) {
		enum step kind = (enum step)fake_rng(NR_STEPS);
		struct taken *t = &taken[i];

		t->value = (unsigned char)(1 + fake_rng(200));
		memset(tr->state.bytes[0], t->value, tr->first ? SAVING_LEN : 0);
		launch(tr->main, tr->first, SAVING_NR, t->value);
		if (nr_blocks >= FITS && fake_rng(3) == 0)
			take_snapshot(engine, roomy && kind <= THREAD, t);
		else
			take_save(engine, i, roomy && kind <= THREAD, t);
		if (t->snapshot != NULL)
			nr_snapshots++;
		memset(tr->state.bytes[0], FAKE_GARBAGE, tr->first ? SAVING_LEN : 0);
		launch(tr->main, tr->first, FAKE_FIRST_DEFERRED, FAKE_GARBAGE);
		t->wanted = step(t, kind);
		if (t->save)
			(void)sfr_save_give_verdict(t->save, -1);
		held = false;
		fake.fake_cuda_hold(0);
		if (t->snapshot) /* later ones need its memory */
			end(t);
	}
	for (unsigned i = 0; i < NR_SAVES; i++)
		wait_copied(&taken[i]);
	fake_freed(&training.state, 0);
	for (unsigned i = 0; i < NR_SAVES; i++) {
		if (taken[i].save) {
			(void)sfr_save_give_verdict(taken[i].save, -1);
			end(&taken[i]);
			check_file(i, &taken[i]);
		}
	}
	take_notices();
	for (unsigned i = 0; i < NR_SAVES; i++) {
		sfr_ticket_put(taken[i].save);
		sfr_snapshot_put(taken[i].snapshot);
	}
	drain(tr->side); /* they write to the state and read the work */
	drain(tr->main);
	fake_end(engine);
}

static char repeat_hint[128]; /* the command that repeats this schedule */

static void hangs(int number)
{
	static const char text[] = "\n  a schedule does not end; ";

	(void)number;
	(void)!write(STDERR_FILENO, text, sizeof(text) - 1);
	(void)!write(STDERR_FILENO, repeat_hint, strlen(repeat_hint));
	_exit(EXIT_FAILURE);
}

TEST(random_schedules_give_consistent_copies)
{
	uint64_t first = check_number("STILLFRAME_FIRST_SCHEDULE", 1);
	uint64_t nr = check_number("STILLFRAME_SCHEDULES", 300);
	bool shows_progress = getenv("STILLFRAME_SCHEDULES") || isatty(STDERR_FILENO);
	time_t start = time(NULL), shown = start;
	unsigned nr_failed = 0;
	uint64_t seed;

	for (unsigned device = 0; device < 2; device++) {
		training.main[device] = (struct sfr_device_stream){
			.handle = (uintptr_t)fake.fake_cuda_stream((int)device), .device = device
		};
		training.side[device] = (struct sfr_device_stream){
			.handle = (uintptr_t)fake.fake_cuda_stream((int)device), .device = device
		};
	}
	(void)signal(SIGALRM, hangs);
	for (seed = first; seed - first < nr && nr_failed < ENOUGH_FAILED; seed++) {
		int before = check__nr_failed;

		(void)snprintf(repeat_hint, sizeof(repeat_hint),
			       "STILLFRAME_FIRST_SCHEDULE=%llu STILLFRAME_SCHEDULES=1 repeats it\n",
			       (unsigned long long)seed);
		(void)alarm(HANGS_S);
		fake.fake_cuda_reset();
		one_schedule(seed);
		if (check__nr_failed != before) {
			nr_failed++;
			(void)fprintf(stderr, "  in one schedule; %s", repeat_hint);
		}
		if (shows_progress && time(NULL) - shown >= SAY_EVERY_S) {
			shown = time(NULL);
			(void)fprintf(stderr,
				      "  %llu of %llu schedules, the last %llu; %u failed\n",
				      (unsigned long long)(seed - first + 1),
				      (unsigned long long)nr, (unsigned long long)seed, nr_failed);
		}
	}
	CHECK(nr_snapshots > 0 || nr < 100);
	for (int kind = 0; kind < NR_STEPS; kind++) {
		CHECK(nr_steps[kind] > 0 || nr < 100);
		if (shows_progress)
			(void)fprintf(stderr, "  %8llu saves or snapshots: %s\n",
				      (unsigned long long)nr_steps[kind], step_names[kind]);
	}
	if (shows_progress)
		(void)fprintf(stderr, "  %llu of all were snapshots\n",
			      (unsigned long long)nr_snapshots);
	if (shows_progress)
		(void)fprintf(stderr, "  %llu schedules in %lld s, %u failed\n",
			      (unsigned long long)(seed - first), (long long)(time(NULL) - start),
			      nr_failed);
	CHECK_EQ(dir_count(dir, TEMPORARIES, NULL), 0);
}

BEGIN
{
	if (!fake_load())
		return false;
	dir = saving_dir();
	return true;
}
