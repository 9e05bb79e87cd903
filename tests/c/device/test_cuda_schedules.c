/* Random schedules of a training that saves from devices, over the fake driver.
 *
 * Every step is queued without waiting for anything and overwrites what was saved as early as the
 * order between the streams lets it; each file has to be the one step at which it was saved, and
 * no rule of the driver may be broken. A seed decides on delays, sizes, who goes first, where the
 * storages live, and which kind of step follows each save.
 *
 *     STILLFRAME_SCHEDULES=10000        how many, 300 otherwise; says how far it is
 *     STILLFRAME_FIRST_SCHEDULE=4711    the first one's seed, to see one again
 */
#include <pthread.h>
#include <signal.h>
#include <time.h>

#include "cuda/fake.h"

enum { NR_SAVES = 3, ROOMY = 64, SAY_EVERY_S = 5, HANGS_S = 100, ENOUGH_FAILED = 5 };

/* What comes between a save and the next change of its deferred storages. */
#define STEPS(X)                                                                                   \
	X(SAME, "gated on the save's stream")                                                      \
	X(SIDE, "gated on a side stream")                                                          \
	X(TWO, "two optimizers, each gated on its own stream")                                     \
	X(THREAD, "gated by another thread")                                                       \
	X(CAPTURED, "gated while its graph is captured")                                           \
	X(NO_STREAM, "gated with no stream")                                                       \
	X(LATE, "gated when all before it has run")                                                \
	X(WAITED, "no gate, a wait")                                                               \
	X(CANCELLED, "the save is given up")
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
static uint64_t nr_steps[NR_STEPS];

/* A training's storages, and where work on them is queued: for each device its stream. */
static struct training {
	struct saving_state state;
	struct sfr_stream main[2], side[2];
	struct fake_fill work[64];
	unsigned nr_work;
	unsigned first; /* storages below it live in host memory */
	unsigned split; /* and from it on on the second device */
} training;

/* ---- queueing work -------------------------------------------------------------- */

static void *handle(const struct sfr_stream *stream)
{
	return (void *)(uintptr_t)stream->handle;
}

/* Queues work that fills storages [from, to), each on its device's stream. */
static void launch(const struct sfr_stream *streams, unsigned from, unsigned to,
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

static void follow(const struct sfr_stream *streams, const struct sfr_stream *others)
{
	for (unsigned device = 0; device < 2; device++)
		fake.fake_cuda_follow(handle(&streams[device]), handle(&others[device]));
}

static void capture(const struct sfr_stream *streams, int yes)
{
	for (unsigned device = 0; device < 2; device++)
		fake.fake_cuda_capture(handle(&streams[device]), yes);
}

static void drain(const struct sfr_stream *streams)
{
	for (unsigned device = 0; device < 2; device++)
		fake.fake_cuda_drain(handle(&streams[device]));
}

/* ---- steps ------------------------------------------------------------------------ */

static bool held; /* nothing on the devices goes on, and so nobody may wait for them */

static int gate(struct sfr_ticket *t, const struct sfr_stream *streams, uint32_t nr)
{
	int rc = sfr_save_gate(t, streams, nr, held ? 0 : SFR_FOREVER);

	if (rc == SFR_EAGAIN && held) {
		fake.fake_cuda_settle();
		rc = sfr_save_gate(t, streams, nr, 0);
	}
	return rc;
}

static void *gate_and_step(void *arg)
{
	CHECK_EQ(gate(arg, training.side, 2), 0);
	launch(training.side, FAKE_FIRST_DEFERRED, SAVING_NR, FAKE_GARBAGE);
	return NULL;
}

/* A step: changes the deferred storages as soon as it may. False when the save was given up. */
static bool step(struct sfr_ticket *t, enum step kind)
{
	const struct sfr_stream *on = training.main, *side = training.side;
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
		capture(on, 0); /* a replay comes with no gate at all */
		fake_freed(&training.state,
			   from); /* the others were the save's stream's to wait for */
		break;
	case NO_STREAM:
		CHECK_EQ(gate(t, NULL, 0), 0);
		fake_freed(&training.state, from);
		break;
	case WAITED:
		CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
		fake_freed(&training.state, 0);
		break;
	case CANCELLED:
		given_up = sfr_save_cancel(t) == 1;
#ifdef __SANITIZE_THREAD__ /* the step races with copies that nobody looks at */
		CHECK_EQ(sfr_save_wait(t, SFR_WAIT_COPIED, SFR_FOREVER), 0);
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

/* The file of a save that has ended: the one step, or none. */
static void look(unsigned number, unsigned char value, bool wanted)
{
	char path[PATH_MAX], name[8];

	(void)snprintf(name, sizeof(name), "s%u", number);
	CHECK_EQ(saving_look_as(dir, name, &training.state), wanted ? value : -1);
	if (CHECK(snprintf(path, sizeof(path), "%s/%s", dir, name) < PATH_MAX))
		(void)unlink(path);
}

static void one_schedule(uint64_t seed)
{
	struct training *tr = &training;
	struct sfr_ticket *t[NR_SAVES];
	unsigned char value[NR_SAVES];
	bool wanted[NR_SAVES], roomy;
	struct sfr_engine *engine;
	enum step kind;
	char name[8];

	fake__random = seed * 2654435761u + 1;
	fake.fake_cuda_delay(fake_rng(3) ? 1 + fake_rng(30000) : 0, seed);
	fake.fake_cuda_delay_one_in(1 + fake_rng(8));
	fake.fake_cuda_first((int)fake_rng(3));
	sfr_cuda_tune(256u << fake_rng(7), 1 + fake_rng(4));
	/* Room for all: then nothing on the devices has to go on before everything is queued. */
	roomy = fake_rng(4) == 0;
	engine = fake_engine(roomy ? ROOMY : 1 + fake_rng(7), 1 + fake_rng(2));
	saving_fill(&tr->state, 0);
	tr->nr_work = 0;
	tr->first = fake_rng(2);
	tr->split = fake_rng(2) ? SAVING_NR : 1 + fake_rng(SAVING_NR - 1);
	fake_place(&tr->state, tr->first, tr->split, 0);
	fake_place(&tr->state, tr->split, SAVING_NR, 1);
	for (unsigned i = 0; i < NR_SAVES; i++) {
		kind = (enum step)fake_rng(NR_STEPS);
		value[i] = (unsigned char)(1 + fake_rng(200));
		memset(tr->state.bytes[0], value[i], tr->first ? SAVING_LEN : 0);
		launch(tr->main, tr->first, SAVING_NR, value[i]);
		(void)snprintf(name, sizeof(name), "s%u", i);
		CHECK_EQ(saving_new(engine, dir, name, &tr->state, 0, &t[i]), 0);
		CHECK_EQ(sfr_save_begin(t[i], tr->main, 2), 0);
		CHECK_EQ(sfr_save_admit(t[i], SFR_FOREVER), 0); /* needs others to end */
		held = roomy && kind <= THREAD;
		fake.fake_cuda_hold(held);
		CHECK_EQ(sfr_save_capture(t[i], SFR_FOREVER), 0);
		CHECK_EQ(sfr_save_launch(t[i]), 0);
		memset(tr->state.bytes[0], FAKE_GARBAGE, tr->first ? SAVING_LEN : 0);
		launch(tr->main, tr->first, FAKE_FIRST_DEFERRED, FAKE_GARBAGE);
		wanted[i] = step(t[i], kind);
		(void)sfr_save_confirm(t[i], -1);
		held = false;
		fake.fake_cuda_hold(0);
	}
	for (unsigned i = 0; i < NR_SAVES; i++)
		CHECK_EQ(sfr_save_wait(t[i], SFR_WAIT_COPIED, SFR_FOREVER), 0);
	fake_freed(&training.state, 0);
	for (unsigned i = 0; i < NR_SAVES; i++) {
		saving_finish(t[i]);
		sfr_ticket_put(t[i]);
		look(i, value[i], wanted[i]);
	}
	drain(tr->side); /* they write to the state, and read the work */
	drain(tr->main);
	fake_end(engine);
}

static uint64_t number_from(const char *variable, uint64_t otherwise)
{
	const char *text = getenv(variable);

	return text ? strtoull(text, NULL, 10) : otherwise;
}

static char again[128]; /* how to see this schedule again */

static void hangs(int number)
{
	static const char text[] = "\n  a schedule does not end; ";

	(void)number;
	(void)!write(STDERR_FILENO, text, sizeof(text) - 1);
	(void)!write(STDERR_FILENO, again, strlen(again));
	_exit(EXIT_FAILURE);
}

static void random_schedules_tear_nothing(void)
{
	uint64_t first = number_from("STILLFRAME_FIRST_SCHEDULE", 1);
	uint64_t nr = number_from("STILLFRAME_SCHEDULES", 300);
	bool say = getenv("STILLFRAME_SCHEDULES") || isatty(STDERR_FILENO);
	time_t start = time(NULL), said = start;
	unsigned nr_failed = 0;
	uint64_t seed;

	for (unsigned device = 0; device < 2; device++) {
		training.main[device] = (struct sfr_stream){
			.handle = (uintptr_t)fake.fake_cuda_stream((int)device), .device = device
		};
		training.side[device] = (struct sfr_stream){
			.handle = (uintptr_t)fake.fake_cuda_stream((int)device), .device = device
		};
	}
	(void)signal(SIGALRM, hangs);
	for (seed = first; seed - first < nr && nr_failed < ENOUGH_FAILED; seed++) {
		int before = check__nr_failed;

		(void)snprintf(again, sizeof(again),
			       "STILLFRAME_FIRST_SCHEDULE=%llu STILLFRAME_SCHEDULES=1 repeats it\n",
			       (unsigned long long)seed);
		(void)alarm(HANGS_S);
		fake.fake_cuda_reset();
		one_schedule(seed);
		if (check__nr_failed != before) {
			nr_failed++;
			(void)fprintf(stderr, "  in one schedule; %s", again);
		}
		if (say && time(NULL) - said >= SAY_EVERY_S) {
			said = time(NULL);
			(void)fprintf(stderr,
				      "  %llu of %llu schedules, the last %llu; %u failed\n",
				      (unsigned long long)(seed - first + 1),
				      (unsigned long long)nr, (unsigned long long)seed, nr_failed);
		}
	}
	for (int kind = 0; kind < NR_STEPS; kind++) {
		CHECK(nr_steps[kind] > 0 || nr < 100);
		if (say)
			(void)fprintf(stderr, "  %8llu saves: %s\n",
				      (unsigned long long)nr_steps[kind], step_names[kind]);
	}
	if (say)
		(void)fprintf(stderr, "  %llu schedules in %lld s, %u failed\n",
			      (unsigned long long)(seed - first), (long long)(time(NULL) - start),
			      nr_failed);
	CHECK_EQ(saving_nr_temporaries(dir), 0);
}

int main(void)
{
	if (!fake_load())
		return CHECK_SKIPPED;
	dir = saving_dir();
	RUN(random_schedules_tear_nothing);
	saving_rmdir(dir);
	return check_done();
}
