/* The ticket: the state of one save.
 *
 *   NEW ─admit▶ CAPTURING ─launch▶ STAGING ─▶ STAGED ─▶ WRITING ─▶ READY ─▶ COMMITTING ─▶ DURABLE
 *                   │                 │          │         │         │          │
 *                   │ abandon, error  └──────────┴─ error, cancel ───┘          │ error
 *                   ▼                            │                              ▼
 *                ENDING ◀────────────────────────┘                           FAILED
 *                   │ nothing of the save is queued, copied or written any more
 *                   ├──▶ FAILED
 *                   └──▶ CANCELLED
 *
 *   arrow                  taken by                          when
 *   NEW -> CAPTURING       sfr_save_admit                    it has a slot
 *   NEW -> CANCELLED       sfr_save_abandon                  its call raises before that
 *   CAPTURING -> STAGING   sfr_save_launch                   captured, and appended to the log
 *   CAPTURING..READY       sfr__ticket_fail_locked           there is an error, or a cancel
 *     -> ENDING
 *   STAGING -> STAGED      sfr__ticket_advance_state_locked  copied, and checked for torn copies
 *   STAGED -> WRITING      sfr__ticket_advance_state_locked  every block is written
 *   WRITING -> READY       sfr__ticket_advance_state_locked  tail written, file synced
 *   READY -> COMMITTING    sfr__ticket_begin_commit          at the head of the log, or unordered
 *   COMMITTING -> DURABLE  sfr__ticket_finish                renamed, directory synced
 *   COMMITTING -> FAILED   sfr__ticket_finish                the rename or the sync failed
 *   ENDING -> CANCELLED    sfr__ticket_finish                CLEAN has run; cancelled or abandoned
 *   ENDING -> FAILED       sfr__ticket_finish                CLEAN has run; any other error
 *
 * Invariants
 *   1. The first error is kept, and changes the state to ENDING. If the state is NEW, it changes
 *      when the save is admitted.
 *   2. Only the thread that has a block gives it back, after its copy and its write. So a failed
 *      save gives memory back only after a running copy into it has ended.
 *   3. Writing the tail and the sync do not wait for the check for torn copies
 *      (sfr_save_give_verdict). The rename waits for it: READY comes after STAGED, and STAGED needs
 *      the check.
 *   4. From CAPTURING to the end the engine counts the save as in flight and holds a reference to
 *      the ticket. The reference then passes to the notice that reports the end.
 *   5. A save ends only when no job of it is queued or running. So jobs need no reference. A job
 *      counts as running until its writer has used the ticket for the last time.
 *   6. Memory that only the work needs (image, jobs, samples) is freed at the end. */
#include <string.h>

#include "save/jobs.h"
#include "trace/trace.h"

/* How often saves went from one state to another; for tests. */
static atomic_uint nr_transitions[SFR_NR_STATES][SFR_NR_STATES];

unsigned sfr__ticket_nr_transitions(enum sfr_state from, enum sfr_state to)
{
	return atomic_load_explicit(&nr_transitions[from][to], memory_order_relaxed);
}

void sfr__ticket_set_state_locked(struct sfr_ticket *t, enum sfr_state state)
{
	atomic_fetch_add_explicit(&nr_transitions[t->state][state], 1, memory_order_relaxed);
	t->state = state;
	if (state >= SFR_DURABLE)
		atomic_store_explicit(&t->over, true, memory_order_release);
	pthread_cond_broadcast(&t->engine->cv_state);
}

static bool has_ended(const struct sfr_ticket *t)
{
	return t->state >= SFR_DURABLE; /* the final states are the last of the enum */
}

/* ---- references and memory ---- */

/* Frees memory that only the work on the save needs. The image's lengths stay, for the report. */
static void free_work_memory(struct sfr_ticket *t)
{
	if (t->plan.edges) /* munmap of a whole mapping cannot fail */
		(void)sfr_sys.munmap(t->plan.edges, (size_t)t->plan.img.nr_edges * SFR_PAGE);
	t->plan.edges = NULL;
	sfr__image_fini(&t->plan.img);
	sfr_sys.free(t->plan.jobs);
	sfr__samples_free(&t->staging.samples);
	sfr_sys.free(t->staging.check_crcs);
	t->plan.jobs = NULL;
	t->staging.check_crcs = NULL;
}

void sfr__ticket_free(struct sfr_ticket *t)
{
	struct sfr_engine *engine = t->engine;

	sfr__file_fini(&t->file);
	sfr_sys.free(t->staging.devices); /* their transfers are over */
	free_work_memory(t);
	sfr_sys.free(t->log.key);
	sfr_sys.free(t);
	sfr_engine_put(engine);
}

void sfr_ticket_get(struct sfr_ticket *t)
{
	atomic_fetch_add_explicit(&t->refs, 1, memory_order_relaxed);
}

void sfr_ticket_put(struct sfr_ticket *t)
{
	if (!t || sfr__ticket_is_inherited(t))
		return;
	if (atomic_fetch_sub_explicit(&t->refs, 1, memory_order_acq_rel) == 1)
		sfr__ticket_free(t);
}

uint64_t sfr_ticket_number(const struct sfr_ticket *t)
{
	return t->number;
}

/* ---- the state machine ---- */

void sfr__ticket_fail_locked(struct sfr_ticket *t, const struct sfr_err *err)
{
	if (t->err.code == 0) {
		t->err = *err;
		sfr__requeue_streamed_locked(t); /* the caller takes no more from the stream */
	}
	sfr__jobs_unpark_locked(t); /* writers release these blocks without writing them */
	if (t->state >= SFR_CAPTURING && t->state < SFR_COMMITTING)
		sfr__ticket_set_state_locked(t, SFR_ENDING);
}

void sfr__ticket_fail(struct sfr_ticket *t, const struct sfr_err *err)
{
	sfr__lock(&t->engine->mu);
	sfr__ticket_fail_locked(t, err);
	sfr__unlock(&t->engine->mu);
}

bool sfr__ticket_is_failing(struct sfr_ticket *t)
{
	return sfr__under(&t->engine->mu, sfr__ticket_is_failing_locked(t));
}

void sfr__ticket_put_block(struct sfr_ticket *t, struct sfr__block *block)
{
	/* The count must drop before another save can lease the block. */
	sfr__lock(&t->engine->mu);
	t->flight.blocks_held--;
	sfr__unlock(&t->engine->mu);
	sfr__pool_put(t->engine->pool, block);
}

/* Tells the pool that the save needs no more blocks. This must happen before the save waits in the
 * log, because an earlier entry there may wait for a block. */
static void leave_pool_locked(struct sfr_ticket *t)
{
	if (t->work.joined_pool)
		sfr__pool_remove_save(t->engine->pool, t->plan.nr_whole);
	t->work.joined_pool = false;
}

void sfr__ticket_advance_state_locked(struct sfr_ticket *t)
{
	const bool all_written = t->facts.blocks_written == t->plan.nr_blocks;

	if (t->state == SFR_ENDING) {
		const bool is_call_over = t->facts.launched || t->facts.abandoned;
		const bool is_copying = t->work.host_copying || t->work.nr_transfers != 0;

		/* Queued only once, because nr_jobs is not 0 from then on. */
		if (is_call_over && !is_copying && t->work.nr_jobs == 0)
			sfr__job_push_locked(sfr__ticket_job(t, SFR__JOB_CLEAN));
		return;
	}
	if (t->facts.launched && all_written && !t->facts.tail_queued) {
		t->facts.tail_queued = true;
		if (t->plan.in_place) /* no lane copies, so no lane sets this */
			t->facts.copied = true;
		leave_pool_locked(t);
		sfr__job_push_locked(sfr__ticket_job(t, SFR__JOB_TAIL));
	}
	if (t->state == SFR_STAGING && t->facts.copied && t->facts.torn_check_done) {
		t->report.staged_ns = sfr__now_ns();
		sfr__ticket_set_state_locked(t, SFR_STAGED);
	}
	if (t->state == SFR_STAGED && all_written)
		sfr__ticket_set_state_locked(t, SFR_WRITING);
	if (t->state == SFR_WRITING && t->facts.synced && t->work.nr_jobs == 0) {
		sfr__ticket_set_state_locked(t, SFR_READY);
		if (sfr__ticket_is_ordered(t))
			sfr__log_mark_ready(&t->log);
		else
			sfr__job_push_locked(sfr__ticket_job(t, SFR__JOB_RENAME));
	}
}

void sfr__ticket_set_copied_if_done_locked(struct sfr_ticket *t)
{
	if (t->work.host_copying || t->work.nr_transfers != 0)
		return;
	if (!sfr__ticket_is_failing_locked(t))
		t->facts.copied = true;
	/* A failed save also reports that its sources may be used again. */
	pthread_cond_broadcast(&t->engine->cv_state);
	sfr_ticket_get(t); /* the notice's reference */
	sfr__notice_post(&t->notice_copied);
}

bool sfr__ticket_begin_commit(struct sfr_ticket *t)
{
	bool may_commit;

	sfr__lock(&t->engine->mu);
	may_commit = t->state == SFR_READY;
	if (may_commit)
		sfr__ticket_set_state_locked(t, SFR_COMMITTING);
	sfr__unlock(&t->engine->mu);
	return may_commit;
}

void sfr__ticket_finish(struct sfr_ticket *t, const struct sfr_err *err)
{
	struct sfr_engine *engine = t->engine;
	enum sfr_state state = SFR_DURABLE;
	const char *file_name;
	bool succeeded;

	free_work_memory(t);
	sfr__lock(&engine->mu);
	if (err && err->code && t->err.code == 0)
		t->err = *err;
	succeeded = t->err.code == 0;
	memcpy(t->report.fallback[SFR_FALLBACK_UNSYNCED], t->file.why_unsynced,
	       sizeof(t->file.why_unsynced));
	t->report.ended_ns = sfr__now_ns();
	leave_pool_locked(t); /* a failed save may not have queued its tail */
	sfr__engine_remove_save_locked(engine, &t->flight);
	/* The state is set before the log reports the end: a thread that has waited for the log
	 * reads the state without a lock. */
	if (!succeeded)
		state = t->err.code == SFR_ECANCELLED ? SFR_CANCELLED : SFR_FAILED;
	sfr__ticket_set_state_locked(t, state);
	if (t->facts.launched && sfr__ticket_is_ordered(t))
		sfr__log_mark_ended(&t->log, succeeded);
	file_name = strrchr(t->log.key, '/') + 1;
	sfr__trace_save(t->number, t->report.created_ns, t->report.ended_ns, t->plan.img.len,
			t->state, file_name);
	sfr__unlock(&engine->mu);
	sfr__notice_post(&t->notice_ended); /* takes over the engine's reference to the ticket */
}

/* ---- what has been reached, confirm, cancel, report ---- */

bool sfr__ticket_has_reached_locked(const struct sfr_ticket *t, enum sfr_wait_for what)
{
	if (has_ended(t))
		return true;
	switch (what) {
	case SFR_WAIT_COPIED:
		if (t->facts.copied)
			return true;
		/* The sources of a failed save are free once no lane copies them. But with in_place
		 * the writers read the sources, until the save has ended. */
		return t->state == SFR_ENDING && t->facts.launched && !t->plan.in_place &&
		       !t->work.host_copying && t->work.nr_transfers == 0;
	case SFR_WAIT_STAGED:
		return t->state >= SFR_STAGED && t->state != SFR_ENDING;
	case SFR_WAIT_ENDED:
		break; /* has_ended was false */
	}
	return false;
}

bool sfr__ticket_gate_is_open_locked(const struct sfr_ticket *t)
{
	if (sfr__ticket_has_reached_locked(t, SFR_WAIT_COPIED) || sfr__ticket_is_failing_locked(t))
		return true;
	/* Copies that a device still runs are queued, so a stream can wait for them. */
	return t->facts.launched && !t->work.host_copying && t->work.nr_queueing == 0;
}

int sfr_save_give_verdict(struct sfr_ticket *t, int64_t torn_index)
{
	struct sfr_err err = { .index = -1 };
	int rc = 0;

	if (sfr__ticket_is_inherited(t))
		return SFR_EFORK;
	sfr__lock(&t->engine->mu);
	if (t->facts.torn_check_done || !sfr__ticket_gate_is_open_locked(t) ||
	    t->state != SFR_STAGING) {
		rc = SFR_ESTATE;
	} else {
		t->facts.torn_check_done = true;
		if (torn_index >= 0) {
			sfr__err_set_if_unset(&err, SFR_ETORN, SFR_PHASE_STAGE, "version");
			err.index = torn_index;
			sfr__ticket_fail_locked(t, &err);
		}
		sfr__ticket_advance_state_locked(t);
	}
	sfr__unlock(&t->engine->mu);
	return rc;
}

int sfr_save_cancel(struct sfr_ticket *t)
{
	struct sfr_err err = { .index = -1 };
	int is_cancelled;

	if (sfr__ticket_is_inherited(t))
		return SFR_EFORK;
	sfr__err_set_if_unset(&err, SFR_ECANCELLED, SFR_PHASE_NONE, NULL);
	sfr__lock(&t->engine->mu);
	if (t->state < SFR_COMMITTING) {
		sfr__ticket_fail_locked(t, &err);
		sfr__ticket_advance_state_locked(t);
	}
	is_cancelled = t->err.code == SFR_ECANCELLED; /* also by an earlier call */
	sfr__unlock(&t->engine->mu);
	return is_cancelled;
}

int sfr_save_state(const struct sfr_ticket *t, enum sfr_state *state, int *staged)
{
	if (sfr__ticket_is_inherited(t))
		return SFR_EFORK;
	*state = t->state;
	/* ENDING is before DURABLE in the enum, but its saves have failed. */
	*staged = *state >= SFR_STAGED && *state <= SFR_DURABLE && *state != SFR_ENDING;
	return 0;
}

int sfr_save_progress(const struct sfr_ticket *t, uint64_t *written_nbytes, uint64_t *nbytes)
{
	if (sfr__ticket_is_inherited(t))
		return SFR_EFORK;
	*written_nbytes = t->facts.written_nbytes;
	*nbytes = t->plan.img.len; /* constant */
	return 0;
}

int sfr_save_report(struct sfr_ticket *t, struct sfr_report *out)
{
	bool needs_lock;

	memset(out, 0, sizeof(*out));
	if (sfr__ticket_is_inherited(t))
		return SFR_EFORK;
	/* Once the save is over, nothing changes any more. */
	needs_lock = !atomic_load_explicit(&t->over, memory_order_acquire);
	if (needs_lock)
		sfr__lock(&t->engine->mu);
	*out = t->report;
	out->state = t->state;
	out->err = t->err;
	/* t->report counts only the waits for blocks of copies from devices */
	out->block_wait_ns += t->staging.captured.copy.wait_ns;
	if (needs_lock)
		sfr__unlock(&t->engine->mu);
	return 0;
}
