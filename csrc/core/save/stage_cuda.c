/* A save's part in a device: from the caller's stream to blocks in the host's memory.
 *
 *     caller's stream   ... work  E   |              waits C |  ... forward, backward   waits S | step
 *     lane's stream               waits E | captured, samples, C |  deferred, in pieces      S |
 *
 *   begin     E is recorded on the caller's current stream and the lane's stream waits for it, in
 *             one go, before anything else of the call: what is copied is what was there then
 *   capture   captured sources and samples of the others are queued, then C
 *   end       the caller's stream waits for C, and for nothing more
 *   launch    the lane's thread queues deferred sources, in pieces, then S
 *   gate      everything left is queued, and the stream of the step waits for S
 *
 * A wait for an event that was never recorded is a silent nothing: so C and S are recorded before
 * the waits are put in, and the gate waits on the host until the lane has come that far.
 *
 * Nothing here waits for the device. Sources are held by the save's maker until the ticket says
 * that they are copied, which is when the events of all pieces have completed.
 */
#include <errno.h>

#include "save/parts.h"

static void stage(struct sfr__task *task);

/* ---- life -------------------------------------------------------------------- */

int sfr__cuda_parts_new(struct sfr_ticket *t)
{
	uint32_t nr = 0;

	for (uint32_t r = 0; r < t->img.nr_runs; r++)
		nr += t->img.runs[r].device != 0;
	if (nr == 0)
		return 0;
	t->parts = sfr_sys.calloc(nr, sizeof(*t->parts));
	if (!t->parts)
		return -ENOMEM;
	for (uint32_t r = 0; r < t->img.nr_runs; r++) {
		const struct sfr__run *run = &t->img.runs[r];
		struct sfr__cuda_part *part = t->parts;

		if (run->device == 0)
			continue;
		while (part < t->parts + t->nr_parts && part->device != run->device - 1)
			part++;
		if (part == t->parts + t->nr_parts)
			t->nr_parts++;
		part->landing.fn = sfr__cuda_part_landed;
		part->staging.run = stage;
		part->ticket = t;
		part->device = run->device - 1;
		if (run->lane == SFR_CAPTURED)
			part->captured = run;
		else
			part->deferred = run;
	}
	return 0;
}

/* ---- begin: E ------------------------------------------------------------------ */

static int begin_part(struct sfr__cuda_part *part, CUstream stream, struct sfr_err *err)
{
	struct sfr__cuda_lane *lane;
	struct sfr__cuda_scope scope;
	char why[160] = "";
	CUresult rc;
	int ret = sfr__cuda_lane_get(&part->ticket->engine->cuda_lanes, part->device, &lane, why,
				     sizeof(why));

	if (ret == SFR_ECLOSED)
		return ret;
	if (ret < 0) {
		sfr__err_set(err, ret, SFR_PHASE_STAGE, why);
		return 0;
	}
	part->lane = lane;
	part->stream = stream;
	rc = sfr__cuda_enter(&scope, lane->cu, lane->context);
	if (rc == CUDA_SUCCESS && sfr__cuda_is_capturing(lane->cu, stream)) {
		sfr__cuda_leave(&scope);
		return SFR_ECAPTURING;
	}
	sfr__lock(&lane->mu);
	if (lane->dead) {
		sfr__cuda_refuse_locked(lane, err);
	} else if (rc != CUDA_SUCCESS) {
		(void)sfr__cuda_failed_locked(lane, "cuCtxPushCurrent", rc, err);
	} else {
		sfr__cuda_mark_locked(lane, stream, err);
	}
	sfr__unlock(&lane->mu);
	sfr__cuda_leave(&scope);
	return 0;
}

int sfr_save_begin(struct sfr_ticket *t, const struct sfr_stream *streams, uint32_t nr_streams)
{
	struct sfr_err err = { .index = -1 };

	if (sfr__ticket_foreign(t))
		return SFR_EFORK;
	for (uint32_t i = 0; i < t->nr_parts; i++) {
		const struct sfr_stream *stream =
			sfr__stream_of(streams, nr_streams, t->parts[i].device);
		int rc;

		if (!stream)
			return SFR_ESTATE;
		rc = begin_part(&t->parts[i], (CUstream)(uintptr_t)stream->handle, &err);
		if (rc < 0)
			return rc;
	}
	sfr__lock(&t->engine->mu);
	for (uint32_t i = 0; i < t->nr_parts; i++) {
		t->cuda_out += t->parts[i].lane != NULL;
		t->cuda_unsubmitted += t->parts[i].lane != NULL;
	}
	if (err.code)
		t->err = err; /* a NEW save's; it takes effect when it is admitted */
	sfr__unlock(&t->engine->mu);
	return 0;
}

/* ---- capture ------------------------------------------------------------------------ */

/* Leases a block with memory that the device can write to. */
static int lease(struct sfr__cuda_part *part, uint64_t slice_ns, struct sfr__block **block)
{
	struct sfr_ticket *t = part->ticket;
	struct sfr_engine *engine = t->engine;
	struct sfr__pin *pin = sfr__pool_pin(engine->pool);
	char why[160];
	int rc = sfr__pool_get(engine->pool, t->seq, engine->opts.block_bytes, slice_ns, block);

	if (rc < 0)
		return rc;
	if (sfr__pin_on(pin, part->lane->cu, part->device, why, sizeof(why)) == 0)
		sfr__pin_block(pin, *block, engine->opts.block_bytes);
	else
		sfr__pin_failed(pin, why);
	sfr__lock(&engine->mu);
	if (++t->flight.blocks_held > t->peak_blocks)
		t->peak_blocks = t->flight.blocks_held;
	sfr__unlock(&engine->mu);
	return 0;
}

/* C: recorded behind everything that the caller's stream has to wait for. */
static void close_capture(struct sfr__cuda_part *part)
{
	struct sfr_err err = { .index = -1 };

	sfr__lock(&part->lane->mu);
	part->captured_event = sfr__cuda_record_locked(part->lane, part->lane->stream, &err);
	sfr__unlock(&part->lane->mu);
	if (err.code)
		sfr__ticket_fail(part->ticket, &err);
}

static int capture_part(struct sfr__cuda_part *part, uint64_t deadline)
{
	struct sfr_ticket *t = part->ticket;

	while (part->captured && part->capture_blk < part->captured->nr_blocks &&
	       !sfr__ticket_failing(t)) {
		uint64_t start = sfr__now_ns();
		uint64_t slice = deadline == SFR_FOREVER ? SFR_FOREVER :
				 deadline > start        ? deadline - start :
							   0;
		struct sfr_err err = { .index = -1 };
		struct sfr__block *block;
		int rc = lease(part, slice, &block);

		sfr__lock(&t->engine->mu);
		t->block_wait_ns += sfr__now_ns() - start;
		sfr__unlock(&t->engine->mu);
		if (rc == SFR_EAGAIN || rc == SFR_EEXHAUSTED)
			return rc;
		if (rc < 0) {
			sfr__err_set(&err, rc, SFR_PHASE_STAGE, NULL);
			sfr__ticket_fail(t, &err);
			break;
		}
		sfr__cuda_stage_block(part, part->captured, part->capture_blk++, block, false);
	}
	if (!part->samples_taken && !sfr__ticket_failing(t)) {
		part->samples_taken = true;
		if (part->deferred && t->sums)
			sfr__cuda_sum(part);
		if (part->deferred && !sfr__ticket_failing(t))
			sfr__cuda_take_samples(part);
		if (part->captured || part->deferred)
			close_capture(part);
	}
	return 0;
}

int sfr__cuda_capture(struct sfr_ticket *t, uint64_t slice_ns)
{
	uint64_t deadline = sfr__deadline(slice_ns);

	if (t->nr_parts && sfr__ticket_failing(t)) {
		/* What begin said; the save has a state now in which it can fail. */
		sfr__lock(&t->engine->mu);
		sfr__ticket_fail_locked(t, &t->err);
		sfr__unlock(&t->engine->mu);
	}
	for (uint32_t i = 0; i < t->nr_parts && !sfr__ticket_failing(t); i++) {
		struct sfr__cuda_lane *lane = t->parts[i].lane;
		struct sfr__cuda_scope scope;
		struct sfr_err err = { .index = -1 };
		CUresult cu_rc = sfr__cuda_enter(&scope, lane->cu, lane->context);
		int rc;

		if (cu_rc != CUDA_SUCCESS) {
			sfr__lock(&lane->mu);
			(void)sfr__cuda_failed_locked(lane, "cuCtxPushCurrent", cu_rc, &err);
			sfr__unlock(&lane->mu);
			sfr__ticket_fail(t, &err);
			break;
		}
		rc = capture_part(&t->parts[i], deadline);
		sfr__cuda_leave(&scope);
		if (rc < 0)
			return rc;
	}
	return 0;
}

void sfr__cuda_capture_end(struct sfr_ticket *t)
{
	for (uint32_t i = 0; i < t->nr_parts; i++) {
		struct sfr__cuda_part *part = &t->parts[i];
		struct sfr_err err = { .index = -1 };

		sfr__cuda_wait_captured(part->lane, part->stream, &part->captured_event, &err);
		if (err.code)
			sfr__ticket_fail(t, &err);
	}
}

/* ---- launch, and the lane's side ------------------------------------------------------ */

/* The part has nothing to queue any more: the gate may look at S. */
static void submitted(struct sfr__cuda_part *part)
{
	struct sfr_ticket *t = part->ticket;
	struct sfr__cuda_lane *lane = part->lane;
	bool over;

	sfr__lock(&t->engine->mu);
	t->cuda_unsubmitted--;
	pthread_cond_broadcast(&t->engine->cv_state);
	sfr__unlock(&t->engine->mu);
	sfr__lock(&lane->mu);
	part->submitted = true;
	over = sfr__cuda_part_over_locked(part);
	sfr__unlock(&lane->mu); /* the ticket may be gone from here on */
	if (over)
		sfr__cuda_part_settle(part);
}

void sfr__cuda_launch(struct sfr_ticket *t)
{
	bool go = !sfr__ticket_failing(t);

	for (uint32_t i = 0; i < t->nr_parts; i++) {
		struct sfr__cuda_part *part = &t->parts[i];
		struct sfr__cuda_lane *lane = part->lane;
		bool queued = false;

		if (!lane)
			continue;
		sfr__lock(&lane->mu);
		part->called = true;
		if (go && part->deferred && !lane->dead) {
			queued = true;
			sfr__cuda_push_locked(lane, &part->staging);
		}
		sfr__unlock(&lane->mu);
		if (!queued)
			submitted(part);
	}
}

static void stage(struct sfr__task *task)
{
	struct sfr__cuda_part *part = sfr__container(task, struct sfr__cuda_part, staging);
	struct sfr__cuda_lane *lane = part->lane;
	struct sfr_ticket *t = part->ticket;
	const struct sfr__run *run = part->deferred;
	CUevent staged;

	for (uint32_t blk = 0; blk < run->nr_blocks && !sfr__ticket_failing(t);) {
		struct sfr_err err = { .index = -1 };
		struct sfr__block *block;
		bool idle;
		int rc;

		sfr__cuda_throttle(part);
		sfr__lock(&lane->mu);
		idle = lane->flying.head == NULL;
		if (lane->dead)
			sfr__err_set(&err, -EIO, SFR_PHASE_STAGE, lane->why);
		sfr__unlock(&lane->mu);
		if (err.code) {
			sfr__ticket_fail(t, &err);
			break;
		}
		/* A block of our own in flight may be the one to wait for. */
		rc = lease(part, idle ? 50 * 1000 * 1000 : 100 * 1000, &block);
		if (rc == 0) {
			sfr__cuda_stage_block(part, run, blk++, block, true);
		} else if (rc != SFR_EAGAIN) {
			sfr__err_set(&err, rc, SFR_PHASE_STAGE, NULL);
			sfr__ticket_fail(t, &err);
		}
	}
	sfr__lock(&lane->mu);
	staged = lane->dead ? NULL : sfr__cuda_event_get_locked(lane);
	if (staged && lane->cu->event_record(staged, lane->stream) != CUDA_SUCCESS) {
		/* The gate waits on the host instead. */
		sfr__cuda_event_put_locked(lane, staged);
		staged = NULL;
	}
	part->staged = staged;
	sfr__unlock(&lane->mu);
	submitted(part);
}
