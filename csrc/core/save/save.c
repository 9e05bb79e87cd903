/* The first half of a save, on the caller's thread: lay out, take a slot, capture, launch.
 *
 *   sfr_save_new              lays out the image; takes no slot and no block yet
 *   sfr_save_begin_transfers  records an event on the caller's stream of each device, for which
 *                             copies wait
 *   sfr_save_admit            takes a slot; a writer begins to open the file
 *   sfr_save_capture          copies captured sources and samples deferred ones
 *   sfr_save_launch           gives the save to the log and the lane; the call may return
 *
 * After SFR_EAGAIN the caller calls the same function again, and it resumes. Between two calls the
 * caller holds no block and no lock, so a signal handler may make another whole save there. An
 * error after admit is recorded in the ticket. The caller still launches the save, which then ends
 * like any failed save.
 *
 * A save enters the log at launch. So a signal handler in the middle of another save's call can
 * wait for its own save, because the interrupted save is not before it in the log. If no slot is
 * free, the handler's save takes one beyond max_in_flight, and its report says so. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "save/stage.h"
#include "save/stream.h"
#include "save/write.h"
#include "trace/trace.h"

/* Makes a ticket without image and target. Returns 0, -ENOMEM or SFR_EFORK. */
static int ticket_new(struct sfr_engine *engine, const struct sfr_save_desc *desc,
		      struct sfr_ticket **out)
{
	static _Atomic uint64_t nr_saves;
	struct sfr_ticket *t;

	if (engine->fork_generation != sfr_fork_generation())
		return SFR_EFORK;
	t = sfr_sys.calloc(1, sizeof(*t));
	if (!t)
		return -ENOMEM;
	atomic_init(&t->refs, 1);
	t->fork_generation = engine->fork_generation;
	t->engine = engine;
	/* Another thread may wait for this copy before sfr_save_admit sets it up. */
	t->staging.deferred.copy.engine = engine;
	sfr__engine_get(engine);
	t->flags = desc->flags;
	if (sfr__ticket_is_stream(t))
		t->flags |= SFR_SAVE_UNORDERED; /* it has no rename that the log could order */
	t->flight.unordered = !sfr__ticket_is_ordered(t);
	t->log.fs = desc->fs;
	t->number = atomic_fetch_add_explicit(&nr_saves, 1, memory_order_relaxed) + 1;
	t->err.index = -1;
	t->report.created_ns = sfr__now_ns();
	t->file.fd = -1;
	t->notice_copied =
		(struct sfr__notice){ .ticket = t, .number = t->number, .what = SFR_NOTICE_COPIED };
	t->notice_ended =
		(struct sfr__notice){ .ticket = t, .number = t->number, .what = SFR_NOTICE_ENDED };
	t->log.ops = &sfr__save_log_ops;
	t->plan.run_job = sfr__job_run;
	*out = t;
	return 0;
}

/* Sets what depends on the image and the target file: jobs, the log's key, the file. Returns 0 or
 * -errno. */
static int ticket_set_target(struct sfr_ticket *t, const struct sfr_save_desc *desc)
{
	const char *dir = desc->dir, *name = desc->name;
	size_t dir_len = strlen(dir), key_len = dir_len + 1 + strlen(name) + 1;

	for (uint32_t i = 0; i < t->plan.img.nr_extents; i++)
		t->plan.nr_blocks += t->plan.img.extents[i].nr_blocks;
	t->report.nbytes = t->plan.img.len;
	t->report.captured_nbytes = t->plan.img.captured_nbytes;
	t->report.deferred_nbytes = t->plan.img.deferred_nbytes;
	if (sfr__jobs_new(t) < 0)
		return -ENOMEM;
	t->log.key = sfr_sys.malloc(key_len);
	if (!t->log.key)
		return -ENOMEM;
	/* The root directory is "/": its slash must not be doubled. */
	(void)snprintf(t->log.key, key_len, "%s/%s", dir_len == 1 ? "" : dir, name);
	return sfr__file_init(&t->file, dir, name, t->plan.img.len,
			      (t->flags & SFR_SAVE_DURABLE) != 0);
}

/* Allocates the edge pages. Uses mmap, because O_DIRECT needs aligned memory. Returns 0 or
 * -ENOMEM. */
static int edges_new(struct sfr_ticket *t)
{
	size_t len = (size_t)t->plan.img.nr_edges * SFR_PAGE;
	void *edges;

	if (len == 0)
		return 0;
	edges = sfr_sys.mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (edges == MAP_FAILED)
		return -ENOMEM;
	t->plan.edges = edges;
	return 0;
}

/* Lays out the image: a file of parts, or if `parts` is NULL an archive or a flat file. Allocates
 * what the copies into the image need. Returns 0 or -errno. */
static int lay_out_image(struct sfr_ticket *t, const struct sfr_save_desc *desc,
			 struct sfr_parts *parts)
{
	int rc;

	t->plan.in_place = parts != NULL;
	t->flight.uses_pool = parts == NULL;
	/* A larger save of several unordered files counts once: as its file of parts. */
	t->flight.excluded_from_stats = t->flight.unordered && parts == NULL;
	if (parts != NULL)
		return sfr__image_init_parts(&t->plan.img, parts,
					     sfr__in_place_block_bytes(t->engine));
	if (desc->members != NULL)
		rc = sfr__image_init_flat(&t->plan.img, desc, t->engine->opts.block_bytes);
	else
		rc = sfr__image_init(&t->plan.img, desc, t->engine->opts.block_bytes);
	if (rc == 0 && sfr__ticket_is_stream(t) && !sfr__stream_is_possible(&t->plan.img))
		rc = -EINVAL; /* the caller has not ordered the members as a stream needs it */
	if (rc == 0)
		rc = edges_new(t);
	if (rc == 0)
		rc = sfr__device_states_new(t);
	if (rc == 0 && (desc->flags & SFR_SAVE_CHECK_BYTES)) {
		size_t nr_crcs = (size_t)t->plan.img.nr_entries * 2; /* at the call, of the copy */

		t->staging.check_crcs = sfr_sys.calloc(nr_crcs, sizeof(*t->staging.check_crcs));
		rc = t->staging.check_crcs ? 0 : -ENOMEM;
	}
	return rc;
}

int sfr_save_new_parts(struct sfr_engine *engine, const struct sfr_save_desc *desc,
		       struct sfr_parts *parts, struct sfr_ticket **out)
{
	struct sfr_ticket *t;
	int rc;

	*out = NULL;
	rc = ticket_new(engine, desc, &t);
	if (rc < 0)
		return rc;
	rc = lay_out_image(t, desc, parts);
	if (rc == 0)
		rc = ticket_set_target(t, desc);
	if (rc < 0)
		sfr__ticket_free(t);
	else
		*out = t;
	return rc;
}

int sfr_save_new(struct sfr_engine *engine, const struct sfr_save_desc *desc,
		 struct sfr_ticket **out)
{
	return sfr_save_new_parts(engine, desc, NULL, out);
}

/* Counts the blocks that need all the memory of a pool block. Only the last block of an extent in
 * host memory may need less. */
static uint32_t count_whole_blocks(const struct sfr_ticket *t)
{
	uint32_t nr = t->plan.nr_blocks;

	for (uint32_t i = 0; i < t->plan.img.nr_extents; i++) {
		const struct sfr__extent *extent = &t->plan.img.extents[i];
		size_t last_len;

		if (extent->device != 0 || extent->nr_blocks == 0)
			continue;
		last_len = sfr__image_block_len(&t->plan.img, extent, extent->nr_blocks - 1);
		if (!sfr__pool_fills_block(t->engine->pool, last_len))
			nr--; /* the last block needs less */
	}
	return nr;
}

/* Returns whether the save is admitted, and neither launched nor abandoned yet. */
static bool is_admitted_not_launched_locked(const struct sfr_ticket *t)
{
	/* An error in the call has changed the state to ENDING. */
	return (t->state == SFR_CAPTURING || t->state == SFR_ENDING) && !t->facts.launched &&
	       !t->facts.abandoned;
}

int sfr_save_admit(struct sfr_ticket *t, uint64_t slice_ns)
{
	struct sfr_engine *engine = t->engine;
	uint64_t start = sfr__now_ns(), deadline = sfr__deadline(slice_ns);
	bool over_limit = false;
	int rc;

	if (sfr__ticket_is_inherited(t))
		return SFR_EFORK;
	SFR__TRACE(SFR_TRACE_ADMIT, t->number, 0);
	sfr__lock(&engine->mu);
	rc = t->state == SFR_NEW ? 0 : SFR_ESTATE;
	if (rc == 0)
		rc = sfr__engine_wait_for_slot_locked(engine, t->flight.unordered, t->flags,
						      deadline, &over_limit);
	if (rc == 0)
		rc = sfr__engine_start_locked(engine);
	if (rc == 0 && sfr__ticket_is_ordered(t))
		rc = sfr__log_reserve(); /* sfr_save_launch uses it, sfr_save_abandon gives it up */
	if (rc == 0) {
		if (!t->plan.in_place) {
			t->plan.nr_whole = count_whole_blocks(t);
			t->work.joined_pool = true;
			sfr__pool_add_save(engine->pool, t->plan.nr_whole);
		}
		sfr__engine_add_save_locked(engine, &t->flight);
		engine->last_seq++;
		t->seq = engine->last_seq;
		t->report.over_slots = over_limit;
		sfr__host_copies_init(t);
		sfr_ticket_get(t); /* the engine's reference */
		sfr__ticket_set_state_locked(t, SFR_CAPTURING);
		sfr__job_push_locked(sfr__ticket_job(t, SFR__JOB_OPEN));
		/* The save may have failed or been cancelled while it was NEW. Its state changes to
		 * ENDING now. */
		if (sfr__ticket_is_failing_locked(t))
			sfr__ticket_fail_locked(t, &t->err);
	}
	t->report.slot_wait_ns += sfr__now_ns() - start;
	sfr__unlock(&engine->mu);
	return rc;
}

int sfr_save_capture(struct sfr_ticket *t, uint64_t slice_ns)
{
	const bool is_stream = sfr__ticket_is_stream(t);
	uint64_t deadline = sfr__deadline(slice_ns);
	struct sfr_err err = { .index = -1 };
	int rc = 0;

	if (sfr__ticket_is_inherited(t))
		return SFR_EFORK;
	sfr__lock(&t->engine->mu);
	if (!is_admitted_not_launched_locked(t))
		rc = SFR_ESTATE;
	sfr__unlock(&t->engine->mu);
	if (rc < 0)
		return rc;
	SFR__TRACE(SFR_TRACE_CAPTURE, t->number, t->plan.img.captured_nbytes);
	/* Devices come first: they copy while the host copies. In a stream the host comes first,
	 * because its blocks come first in the file, and are leased in that order. */
	if (is_stream)
		rc = sfr__host_copy_now(&t->staging.captured.copy, deadline);
	if (rc == 0 && !t->staging.capture_done)
		rc = sfr__device_states_capture(t, slice_ns);
	if (rc == 0 && !is_stream) /* a stream has copied them above */
		rc = sfr__host_copy_now(&t->staging.captured.copy, deadline);
	if (rc == SFR_EAGAIN || rc == SFR_EEXHAUSTED)
		return rc; /* any other error is recorded in the ticket */
	if (!t->staging.capture_done && !sfr__ticket_is_failing(t)) {
		rc = sfr__take_samples(t);
		if (rc < 0) {
			sfr__err_set_if_unset(&err, rc, SFR_PHASE_STAGE, NULL);
			sfr__ticket_fail(t, &err);
		}
	}
	t->staging.capture_done = true;
	return 0;
}

int sfr_save_launch(struct sfr_ticket *t)
{
	struct sfr_engine *engine = t->engine;
	int rc = 0;

	if (sfr__ticket_is_inherited(t))
		return SFR_EFORK;
	sfr__lock(&engine->mu);
	if (!is_admitted_not_launched_locked(t) || !t->staging.capture_done) {
		rc = SFR_ESTATE;
	} else {
		t->facts.launched = true;
		t->flight.in_call = false;
		t->report.launched_ns = sfr__now_ns();
		if (sfr__ticket_is_ordered(t)) {
			sfr_ticket_get(t); /* the log's reference */
			(void)sfr__log_append(&t->log);
		}
		if (t->state == SFR_CAPTURING)
			sfr__ticket_set_state_locked(t, SFR_STAGING);
		if (t->staging.deferred.extent && !sfr__ticket_is_failing_locked(t)) {
			t->work.host_copying = true;
			/* false: its blocks are not leased yet */
			sfr__host_begin_deferred_locked(&t->staging.deferred.copy, false);
		}
		if (t->plan.img.extents[t->plan.img.nr_extents - 1].lane == SFR_CAPTURED) {
			/* Deferred extents come last, so here nothing is deferred. Then no copy can
			 * be torn, and nobody calls sfr_save_give_verdict. */
			t->facts.torn_check_done = true;
			/* Devices may still copy, and with in_place writers read the sources. */
			t->facts.copied = t->staging.nr_devices == 0 && !t->plan.in_place;
		}
		if (t->plan.in_place)
			sfr__in_place_queue_first_blocks_locked(t);
		sfr__ticket_advance_state_locked(t);
	}
	sfr__unlock(&engine->mu);
	if (rc == 0)
		sfr__device_states_queue_deferred(t);
	return rc;
}

void sfr_save_abandon(struct sfr_ticket *t)
{
	struct sfr_err err = { .index = -1 };
	bool in_call;

	if (sfr__ticket_is_inherited(t))
		return;
	sfr__err_set_if_unset(&err, SFR_ECANCELLED, SFR_PHASE_NONE, "abandoned in the call");
	sfr__lock(&t->engine->mu);
	in_call = is_admitted_not_launched_locked(t);
	if (in_call) {
		t->facts.abandoned = true;
		t->flight.in_call = false;
		if (sfr__ticket_is_ordered(t))
			sfr__log_unreserve();
		sfr__ticket_fail_locked(t, &err);
		sfr__ticket_advance_state_locked(t);
	} else if (t->state == SFR_NEW) { /* no thread works on the save */
		t->err = err;
		t->report.ended_ns = sfr__now_ns();
		sfr__ticket_set_state_locked(t, SFR_CANCELLED);
	}
	sfr__unlock(&t->engine->mu);
	if (in_call)
		sfr__device_states_queue_deferred(t); /* only releases them: the save is failing */
}
