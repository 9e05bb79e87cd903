/* The engine: a pool, a lane, writers, and the saves in flight (slots.c bounds them).
 *
 *   made ──first save──▶ started ──close──▶ closing ──last save has ended──▶ closed
 *
 * Threads start with the first save. The caller of sfr_engine_new, tickets and snapshots hold
 * references to the engine. The thread that drops the last reference joins the engine's threads, so
 * it must not be one of them. Therefore an ended save passes its reference to the notice of its
 * end. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "commit/log.h"
#include "engine/engine.h"
#include "memory/pin.h"

/* Frees the pool, unless snapshots or onloads still use it, or it is freed already. */
static void free_pool_if_unused(struct sfr_engine *engine)
{
	struct sfr__pool *pool = NULL;

	sfr__lock(&engine->mu);
	if (engine->nr_pool_users == 0) {
		pool = engine->pool;
		engine->pool = NULL;
	}
	sfr__unlock(&engine->mu);
	if (pool && engine->cap_is_default)
		sfr__budget_give_back(engine->pool_bytes);
	sfr__pool_free(pool);
}

void sfr__engine_drop_pool_user(struct sfr_engine *engine)
{
	bool last;

	sfr__lock(&engine->mu);
	engine->nr_pool_users--;
	last = engine->nr_pool_users == 0 && engine->closed;
	sfr__unlock(&engine->mu);
	if (last)
		free_pool_if_unused(engine);
}

/* Returns whether this process inherited the engine by a fork. It must then not be touched. */
static bool is_inherited(const struct sfr_engine *engine)
{
	return engine->fork_generation != sfr_fork_generation();
}

/* Makes the pool. While the system refuses a default cap, tries with half of it. Returns 0 or
 * -errno. */
static int make_pool(struct sfr_engine *engine)
{
	const uint64_t block_bytes = engine->opts.block_bytes;
	bool is_too_large;
	int rc;

	for (;;) {
		uint64_t half_blocks = engine->pool_bytes / 2 / block_bytes;
		uint64_t half = half_blocks * block_bytes;

		rc = sfr__pool_new(engine->pool_bytes, block_bytes, engine->opts.shared_memory != 0,
				   &engine->pool);
		is_too_large = rc == -ENOMEM || rc == -EFBIG;
		if (!is_too_large || !engine->cap_is_default || half == 0)
			return rc;
		sfr__budget_give_back(engine->pool_bytes - half);
		engine->pool_bytes = half;
	}
}

static bool are_opts_valid(const struct sfr_engine_opts *opts)
{
	const bool has_cap = opts->pool_bytes != 0;

	if (opts->block_bytes == 0 || opts->block_bytes % SFR_PAGE)
		return false;
	if (has_cap && opts->pool_bytes < opts->block_bytes)
		return false;
	return opts->nr_writers > 0 && opts->max_in_flight > 0 &&
	       opts->nr_copiers <= SFR__MAX_COPIERS;
}

int sfr_engine_new(const struct sfr_engine_opts *opts, struct sfr_engine **out)
{
	struct sfr_engine *engine;
	int rc;

	*out = NULL;
	if (!are_opts_valid(opts))
		return -EINVAL;
	rc = sfr_fork_init();
	if (rc < 0)
		return rc;
	engine = sfr_sys.calloc(1, sizeof(*engine));
	if (!engine)
		return -ENOMEM;
	atomic_init(&engine->refs, 1);
	engine->fork_generation = sfr_fork_generation();
	engine->opts = *opts;
	sfr__mutex_init(&engine->mu, SFR__LOCK_ENGINE);
	sfr__cuda_lanes_init(&engine->cuda_lanes);
	rc = sfr__cond_init(&engine->cv_lane);
	if (rc == 0)
		rc = sfr__cond_init(&engine->cv_writer);
	if (rc == 0)
		rc = sfr__cond_init(&engine->cv_copier);
	if (rc == 0)
		rc = sfr__cond_init(&engine->cv_state);
	if (rc < 0)
		goto fail;
	engine->cap_is_default = opts->pool_bytes == 0;
	engine->pool_bytes =
		engine->cap_is_default ? sfr__budget_take_default_cap(opts) : opts->pool_bytes;
	rc = make_pool(engine);
	if (rc < 0)
		goto fail;
	*out = engine;
	return 0;
fail:
	if (engine->cap_is_default)
		sfr__budget_give_back(engine->pool_bytes);
	sfr_sys.free(engine);
	return rc;
}

/* Stops all threads of the engine. Does nothing if they are stopped already. */
static void stop_threads(struct sfr_engine *engine)
{
	sfr__workers_stop(engine);
	sfr__cuda_lanes_stop(&engine->cuda_lanes);
}

void sfr__engine_get(struct sfr_engine *engine)
{
	atomic_fetch_add_explicit(&engine->refs, 1, memory_order_relaxed);
}

void sfr_engine_put(struct sfr_engine *engine)
{
	if (!engine || is_inherited(engine))
		return;
	if (atomic_fetch_sub_explicit(&engine->refs, 1, memory_order_acq_rel) != 1)
		return;
	stop_threads(engine);
	free_pool_if_unused(engine);
	sfr__cuda_lanes_free(&engine->cuda_lanes);
	(void)pthread_cond_destroy(&engine->cv_lane); /* nobody waits any more */
	(void)pthread_cond_destroy(&engine->cv_writer);
	(void)pthread_cond_destroy(&engine->cv_copier);
	(void)pthread_cond_destroy(&engine->cv_state);
	sfr__mutex_fini(&engine->mu);
	sfr_sys.free(engine->writers);
	sfr_sys.free(engine);
}

/* Returns whether sfr_engine_close must wait. It does not wait for saves that the calling thread
 * has not launched: the thread would wait for itself. */
static bool must_close_wait_locked(const struct sfr_engine *engine)
{
	return engine->nr_pool_calls > 0 || engine->nr_copying_snapshots > 0 ||
	       engine->nr_in_flight > sfr__engine_count_own_unlaunched_locked(engine, false);
}

int sfr_engine_close(struct sfr_engine *engine, uint64_t slice_ns)
{
	uint64_t deadline = sfr__deadline(slice_ns);
	bool stop;
	int rc = 0;

	if (is_inherited(engine))
		return SFR_EFORK;
	sfr__lock(&engine->mu);
	engine->closing = true;
	pthread_cond_broadcast(&engine->cv_state); /* saves that wait for a slot now fail */
	while (must_close_wait_locked(engine) && rc == 0)
		rc = sfr__cond_wait(&engine->cv_state, &engine->mu, deadline);
	if (!must_close_wait_locked(engine))
		rc = 0; /* even if the last save has ended just at the deadline */
	if (rc == 0 && engine->close_seq == 0)
		engine->close_seq = sfr__log_seq_awaited_by_close();
	sfr__unlock(&engine->mu);
	if (rc < 0)
		return rc;
	if (engine->close_seq) {
		rc = sfr_log_drain(&engine->close_seq, sfr__time_left(deadline));
		if (rc < 0)
			return rc;
	}
	sfr__lock(&engine->mu);
	/* The saves left are those that the calling thread has not launched. They still need the
	 * threads and the pool. */
	stop = engine->nr_in_flight == 0 && !engine->closed;
	if (stop)
		engine->closed = true;
	sfr__unlock(&engine->mu);
	if (stop) {
		stop_threads(engine);
		free_pool_if_unused(engine);
	}
	return 0;
}

int sfr_engine_stats(struct sfr_engine *engine, struct sfr_stats *out)
{
	struct sfr__pool_stats pool = { 0 };
	uint64_t nr_save_blocks = 0;

	memset(out, 0, sizeof(*out));
	if (is_inherited(engine))
		return SFR_EFORK;
	sfr__lock(&engine->mu);
	if (engine->pool)
		sfr__pool_stats(engine->pool, &pool);
	for (const struct sfr__save_in_flight *flight = engine->flights; flight;
	     flight = flight->next) {
		nr_save_blocks += flight->blocks_held;
		if (!flight->excluded_from_stats)
			out->saves_in_flight++;
	}
	out->saves_total = engine->nr_saves;
	sfr__unlock(&engine->mu);
	out->pool_bytes = engine->pool_bytes;
	out->block_bytes = engine->opts.block_bytes;
	out->committed_bytes = pool.committed_bytes;
	out->leased_bytes = pool.leased_bytes;
	out->save_bytes = nr_save_blocks * engine->opts.block_bytes;
	out->retired_bytes = pool.retired_bytes;
	return 0;
}

/* Keeps the pool alive until end_pool_call, because close waits for that. Returns 0, SFR_EFORK or
 * SFR_ECLOSED. */
static int begin_pool_call(struct sfr_engine *engine)
{
	int rc;

	if (is_inherited(engine))
		return SFR_EFORK;
	sfr__lock(&engine->mu);
	rc = engine->closing ? SFR_ECLOSED : 0;
	if (rc == 0)
		engine->nr_pool_calls++;
	sfr__unlock(&engine->mu);
	return rc;
}

static void end_pool_call(struct sfr_engine *engine)
{
	sfr__lock(&engine->mu);
	engine->nr_pool_calls--;
	pthread_cond_broadcast(&engine->cv_state); /* close may wait for this */
	sfr__unlock(&engine->mu);
}

int sfr_engine_warm_up(struct sfr_engine *engine, uint64_t nbytes)
{
	int rc = begin_pool_call(engine);

	if (rc < 0)
		return rc;
	rc = sfr__pool_warm_up(engine->pool, nbytes);
	end_pool_call(engine);
	return rc;
}

int sfr_engine_trim(struct sfr_engine *engine)
{
	int rc = begin_pool_call(engine);

	if (rc < 0)
		return rc;
	rc = sfr__pool_trim(engine->pool);
	end_pool_call(engine);
	return rc;
}

int sfr_engine_use_device(struct sfr_engine *engine, uint32_t device, char *why, size_t why_len)
{
	struct sfr__cuda_lane *lane;
	int rc = begin_pool_call(engine);

	why[0] = '\0';
	if (rc < 0)
		return rc;
	rc = sfr__cuda_lane_get(&engine->cuda_lanes, device, SFR__CUDA_OUT, &lane, why, why_len);
	if (rc == 0)
		rc = sfr__pin_turn_on(sfr__pool_get_pin(engine->pool), lane->cu, device, why,
				      why_len);
	end_pool_call(engine);
	return rc;
}

int sfr_engine_describe_driver(struct sfr_engine *engine, char *text, size_t len)
{
	if (is_inherited(engine))
		return SFR_EFORK;
	sfr__cuda_describe_driver(text, len);
	sfr__cuda_lanes_report_dead(&engine->cuda_lanes, text, len);
	return 0;
}

/* ---- slots of saves that the core does not write ---- */

struct sfr_slot {
	struct sfr_engine *engine;
	struct sfr__save_in_flight flight;
	bool over; /* the slot was given back */
};

int sfr_slot_take(struct sfr_engine *engine, uint32_t flags, uint64_t slice_ns,
		  struct sfr_slot **out)
{
	uint64_t deadline_ns = sfr__deadline(slice_ns);
	struct sfr_slot *slot;
	bool over_limit; /* not used */
	int rc;

	*out = NULL;
	if (is_inherited(engine))
		return SFR_EFORK;
	slot = sfr_sys.calloc(1, sizeof(*slot));
	if (!slot)
		return -ENOMEM;
	sfr__lock(&engine->mu);
	/* false: the save counts against max_in_flight */
	rc = sfr__engine_wait_for_slot_locked(engine, false, flags, deadline_ns, &over_limit);
	if (rc == 0)
		sfr__engine_add_save_locked(engine, &slot->flight);
	sfr__unlock(&engine->mu);
	if (rc < 0) {
		sfr_sys.free(slot);
		return rc;
	}
	sfr__engine_get(engine);
	slot->engine = engine;
	*out = slot;
	return 0;
}

void sfr_slot_mark_launched(struct sfr_slot *slot)
{
	if (is_inherited(slot->engine))
		return;
	sfr__lock(&slot->engine->mu);
	slot->flight.in_call = false;
	sfr__unlock(&slot->engine->mu);
}

void sfr_slot_give_back(struct sfr_slot *slot)
{
	struct sfr_engine *engine = slot->engine;

	if (is_inherited(engine))
		return;
	sfr__lock(&engine->mu);
	if (!slot->over)
		sfr__engine_remove_save_locked(engine, &slot->flight);
	slot->over = true;
	pthread_cond_broadcast(&engine->cv_state); /* close or a save may wait for this */
	sfr__unlock(&engine->mu);
}

bool sfr_slot_is_given_back(struct sfr_slot *slot)
{
	bool over;

	if (is_inherited(slot->engine))
		return true;
	sfr__lock(&slot->engine->mu);
	over = slot->over;
	sfr__unlock(&slot->engine->mu);
	return over;
}

void sfr_slot_free(struct sfr_slot *slot)
{
	if (!slot)
		return;
	sfr_slot_give_back(slot);
	sfr_engine_put(slot->engine);
	sfr_sys.free(slot);
}
