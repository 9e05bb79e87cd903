/* The engine's threads: a lane for shared work, writers for tasks, and copiers that help with
 * shared work while a thread waits for it. All run the same loop, `serve`. */
#include <errno.h>
#include <stdio.h> /* snprintf */

#include "engine/engine.h"

void sfr__task_push_locked(struct sfr_engine *engine, struct sfr__task *task)
{
	sfr__queue_push(&engine->tasks, task);
	pthread_cond_signal(&engine->cv_writer);
}

/* ---- shared work -------------------------------------------------------------------- */

/* Returns the first work in which the lane takes part, or NULL. */
static struct sfr__shared_work *find_work_for_lane_locked(const struct sfr_engine *engine)
{
	struct sfr__shared_work *work = engine->shared;

	while (work && work->rank == SFR__RANK_IN_CALL)
		work = work->next;
	return work;
}

/* Returns the first work if some thread waits for shared work, else NULL. */
static struct sfr__shared_work *find_copier_work_locked(const struct sfr_engine *engine)
{
	struct sfr__shared_work *first = engine->shared;

	if (first && first->rank == SFR__RANK_IN_CALL) /* its call waits */
		return first;
	return engine->nr_waiters > 0 ? first : NULL;
}

void sfr__shared_work_wake_locked(struct sfr_engine *engine)
{
	if (find_work_for_lane_locked(engine))
		pthread_cond_signal(&engine->cv_lane);
	if (find_copier_work_locked(engine))
		pthread_cond_broadcast(&engine->cv_copier);
	if (engine->nr_waiters != 0)
		pthread_cond_broadcast(&engine->cv_state);
}

void sfr__shared_work_push_locked(struct sfr_engine *engine, struct sfr__shared_work *work)
{
	struct sfr__shared_work **at = &engine->shared;

	while (*at && (*at)->rank <= work->rank)
		at = &(*at)->next;
	work->next = *at;
	*at = work;
	sfr__shared_work_wake_locked(engine);
}

void sfr__shared_work_remove_locked(struct sfr_engine *engine, const struct sfr__shared_work *work)
{
	struct sfr__shared_work **at = &engine->shared;

	while (*at && *at != work)
		at = &(*at)->next;
	if (*at)
		*at = work->next;
}

/* ---- threads ------------------------------------------------------------------------ */

enum thread_kind {
	WRITER, /* serves tasks */
	LANE,   /* serves shared work, and may wait for blocks */
	COPIER, /* serves shared work that a thread waits for */
};

struct worker {
	struct sfr_engine *engine;
	enum thread_kind kind;
	pthread_cond_t *cv; /* wakes threads of this kind */
};

/* Returns the shared work that this thread should do next, or NULL. */
static struct sfr__shared_work *next_work_locked(const struct worker *worker)
{
	switch (worker->kind) {
	case LANE:
		return find_work_for_lane_locked(worker->engine);
	case COPIER:
		return find_copier_work_locked(worker->engine);
	default:
		return NULL;
	}
}

/* Returns whether this thread has no task and need not end. */
static bool is_idle_locked(const struct worker *worker)
{
	const bool has_task = worker->kind == WRITER && worker->engine->tasks.head;

	return !has_task && !worker->engine->stopping;
}

/* Does tasks or shared work until the engine stops. */
static void run_worker(struct worker *worker)
{
	struct sfr_engine *engine = worker->engine;
	const bool may_wait = worker->kind == LANE; /* for blocks */

	sfr__lock(&engine->mu);
	for (;;) {
		struct sfr__task *task = NULL;
		struct sfr__shared_work *work;

		if (worker->kind == WRITER)
			task = sfr__queue_pop(&engine->tasks);
		if (task) {
			sfr__unlock(&engine->mu);
			task->run(task);
			sfr__lock(&engine->mu);
			continue;
		}
		work = next_work_locked(worker);
		if (work && work->step_locked(work, may_wait))
			continue;
		/* There is no work, or its step could do nothing now. Copiers may leave work
		 * undone, because the thread that waits for it does it, too. */
		if (engine->stopping && (!work || worker->kind == COPIER))
			break;
		/* The step has released the mutex. If other work is the first now, try that. */
		if (is_idle_locked(worker) && next_work_locked(worker) == work)
			(void)sfr__cond_wait(worker->cv, &engine->mu, SFR_FOREVER);
	}
	sfr__unlock(&engine->mu);
}

static void *lane_main(void *arg)
{
	struct sfr_engine *engine = arg;

	run_worker(&(struct worker){ engine, LANE, &engine->cv_lane });
	return NULL;
}

static void *writer_main(void *arg)
{
	struct sfr_engine *engine = arg;

	run_worker(&(struct worker){ engine, WRITER, &engine->cv_writer });
	return NULL;
}

static void *copier_main(void *arg)
{
	struct sfr_engine *engine = arg;

	run_worker(&(struct worker){ engine, COPIER, &engine->cv_copier });
	return NULL;
}

void sfr__copiers_start_locked(struct sfr_engine *engine)
{
	char name[32];

	while (!engine->stopping && engine->nr_copiers < engine->opts.nr_copiers) {
		const uint32_t i = engine->nr_copiers;

		(void)snprintf(name, sizeof(name), "sfr-copier%u", i);
		if (sfr__thread_start(&engine->copiers[i], name, SFR__AWAITED, copier_main,
				      engine) < 0)
			return; /* fewer copiers only make large copies slower */
		engine->nr_copiers++;
	}
}

int sfr__engine_start_locked(struct sfr_engine *engine)
{
	char name[32];
	int rc;

	if (engine->started)
		return 0;
	if (!engine->writers) {
		engine->writers = sfr_sys.calloc(engine->opts.nr_writers, sizeof(*engine->writers));
		if (!engine->writers)
			return -ENOMEM;
	}
	/* If a thread cannot be started, the others stay, and the next save starts the rest. */
	while (engine->nr_writers < engine->opts.nr_writers) {
		const uint32_t i = engine->nr_writers;

		(void)snprintf(name, sizeof(name), "sfr-writer%u", i);
		rc = sfr__thread_start(&engine->writers[i], name, SFR__BACKGROUND, writer_main,
				       engine);
		if (rc < 0)
			return rc;
		engine->nr_writers++;
	}
	rc = sfr__thread_start(&engine->lane, "sfr-lane0", SFR__BACKGROUND, lane_main, engine);
	if (rc < 0)
		return rc;
	engine->started = true;
	return 0;
}

void sfr__workers_stop(struct sfr_engine *engine)
{
	bool has_lane;

	sfr__lock(&engine->mu);
	engine->stopping = true;
	has_lane = engine->started;
	pthread_cond_broadcast(&engine->cv_lane);
	pthread_cond_broadcast(&engine->cv_writer);
	pthread_cond_broadcast(&engine->cv_copier);
	sfr__unlock(&engine->mu);
	/* cannot fail: each thread was started here and is joined once */
	if (has_lane)
		(void)sfr_sys.thread_join(engine->lane, NULL);
	for (uint32_t i = 0; i < engine->nr_writers; i++)
		(void)sfr_sys.thread_join(engine->writers[i], NULL);
	for (uint32_t i = 0; i < engine->nr_copiers; i++)
		(void)sfr_sys.thread_join(engine->copiers[i], NULL);
	engine->nr_writers = engine->nr_copiers = 0;
	engine->started = false;
}
