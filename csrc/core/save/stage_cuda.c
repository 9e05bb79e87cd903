/* Stages the part of a save on one device: from the caller's stream to blocks in host memory.
 *
 *   caller's stream   ... work  E   |              waits C | forward, backward   waits S | step
 *   lane's stream               waits E | captured, samples, C | deferred              S |
 *
 *   begin     E is recorded on the caller's current stream, and the lane's stream waits for it,
 *             before anything else of the call: the copies see the state at E
 *   capture   captured sources and samples of deferred ones are queued, then C
 *   end       the caller's stream waits for C, and for nothing more
 *   launch    the lane's thread queues deferred sources in small transfers, then S
 *   gate      everything left is queued, and the stream of the step waits for S
 *
 * Waiting for an event that was never recorded silently does nothing. So C and S are recorded
 * before the waits are inserted, and the gate waits on the host until the lane has recorded S.
 *
 * Nothing here waits for the device. The caller holds the sources until the ticket reports that
 * they are copied, which is when the events of all transfers have completed. */
#include <errno.h>

#include "save/parts.h"

static void stage(struct sfr__task *task);

/* ---- life -------------------------------------------------------------------- */

int sfr__cuda_parts_new(struct sfr_ticket *t)
{
	uint32_t nr = 0;

	for (uint32_t r = 0; r < t->plan.img.nr_runs; r++)
		nr += t->plan.img.runs[r].device != 0;
	if (nr == 0)
		return 0;
	t->staging.parts = sfr_sys.calloc(nr, sizeof(*t->staging.parts));
	if (!t->staging.parts)
		return -ENOMEM;
	for (uint32_t r = 0; r < t->plan.img.nr_runs; r++) {
		const struct sfr__run *run = &t->plan.img.runs[r];
		struct sfr__cuda_part *part = t->staging.parts;

		if (run->device == 0)
			continue;
		while (part < t->staging.parts + t->staging.nr_parts &&
		       part->device != run->device - 1)
			part++;
		if (part == t->staging.parts + t->staging.nr_parts)
			t->staging.nr_parts++;
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
	int ret = sfr__cuda_lane_get(&part->ticket->engine->cuda_lanes, part->device, SFR__CUDA_OUT,
				     &lane, why, sizeof(why));

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
	if (rc != CUDA_SUCCESS) {
		(void)sfr__cuda_failed(lane, "cuCtxPushCurrent", rc, err);
	} else if (!sfr__cuda_refuses(lane, err)) {
		sfr__cuda_turn_begin(lane);
		sfr__cuda_mark(lane, stream, err);
		sfr__cuda_turn_end(lane);
	}
	sfr__cuda_leave(&scope);
	return 0;
}

int sfr_save_begin(struct sfr_ticket *t, const struct sfr_stream *streams, uint32_t nr_streams)
{
	struct sfr_err err = { .index = -1 };

	if (sfr__ticket_foreign(t))
		return SFR_EFORK;
	for (uint32_t i = 0; i < t->staging.nr_parts; i++) {
		const struct sfr_stream *stream =
			sfr__stream_of(streams, nr_streams, t->staging.parts[i].device);
		int rc;

		if (!stream)
			return SFR_ESTATE;
		rc = begin_part(&t->staging.parts[i], (CUstream)(uintptr_t)stream->handle, &err);
		if (rc < 0)
			return rc;
	}
	sfr__lock(&t->engine->mu);
	for (uint32_t i = 0; i < t->staging.nr_parts; i++) {
		t->sharing.cuda_out += t->staging.parts[i].lane != NULL;
		t->sharing.cuda_unsubmitted += t->staging.parts[i].lane != NULL;
	}
	if (err.code)
		t->err = err; /* takes effect when the NEW save is admitted */
	sfr__unlock(&t->engine->mu);
	return 0;
}

/* ---- capture ------------------------------------------------------------------------ */

/* Leases a block that the device can write to. If the pool is not registered with the driver, this
 * registers it block by block, for captured bytes inside the call. That is paid once. Copies to
 * pageable memory would delay the call as long at every save: the driver stages them, and returns
 * when they have run. warm_up() takes the registration out of the call. */
static int lease(struct sfr__cuda_part *part, uint64_t slice_ns, struct sfr__block **block)
{
	struct sfr_ticket *t = part->ticket;
	struct sfr_engine *engine = t->engine;
	struct sfr__pin *pin = sfr__pool_pin(engine->pool);
	char why[160];
	int rc = sfr__pool_get(engine->pool, t->seq, engine->opts.block_bytes, slice_ns, block);

	if (rc < 0)
		return rc;
	if (sfr__pin_on(pin, part->lane->cu, part->device, why, sizeof(why)) < 0)
		sfr__pin_failed(pin, why);
	else if ((*block)->piece == NULL)
		sfr__pool_pin_blocks(engine->pool, block, 1);
	sfr__lock(&engine->mu);
	sfr__ticket_take_block_locked(t);
	sfr__unlock(&engine->mu);
	return 0;
}

/* Leases and fills the next block of a run. Before waiting for a block it sends everything filled
 * so far, because those blocks may be the ones to wait for. SFR_EAGAIN if there was none within the
 * slice. */
static int fill_next(struct sfr__cuda_fill *fill, uint32_t *blk, uint64_t slice_ns)
{
	struct sfr_ticket *t = fill->part->ticket;
	struct sfr__block *block;
	uint64_t start;
	int rc = lease(fill->part, 0, &block);

	if (rc == SFR_EAGAIN) {
		sfr__cuda_fill_end(fill);
		start = sfr__now_ns();
		rc = lease(fill->part, slice_ns, &block);
		sfr__lock(&t->engine->mu);
		if (fill->run == fill->part->captured) /* a lane's wait is part of the gate's */
			t->report.block_wait_ns += sfr__now_ns() - start;
		sfr__unlock(&t->engine->mu);
	}
	if (rc == 0)
		sfr__cuda_fill_block(fill, (*blk)++, block);
	else if (rc != SFR_EAGAIN && rc != SFR_EEXHAUSTED)
		sfr__err_set(&fill->err, rc, SFR_PHASE_STAGE, NULL);
	return rc;
}

/* Records C after everything that the caller's stream has to wait for. */
static void close_capture(struct sfr__cuda_part *part)
{
	struct sfr_err err = { .index = -1 };

	sfr__cuda_turn_begin(part->lane);
	part->captured_event = sfr__cuda_record(part->lane, part->lane->stream, &err);
	sfr__cuda_turn_end(part->lane);
	if (err.code)
		sfr__ticket_fail(part->ticket, &err);
}

static int capture_blocks(struct sfr__cuda_part *part, uint64_t deadline)
{
	struct sfr__cuda_fill fill;
	int rc = 0;

	sfr__cuda_fill_begin(&fill, part, part->captured);
	while (part->capture_blk < part->captured->nr_blocks && rc == 0 &&
	       !sfr__ticket_failing(part->ticket))
		rc = fill_next(&fill, &part->capture_blk, sfr__time_left(deadline));
	sfr__cuda_fill_end(&fill); /* reports an error to the ticket */
	return rc == SFR_EAGAIN || rc == SFR_EEXHAUSTED ? rc : 0;
}

static int capture_part(struct sfr__cuda_part *part, uint64_t deadline)
{
	struct sfr_ticket *t = part->ticket;
	int rc = part->captured ? capture_blocks(part, deadline) : 0;

	if (rc < 0 || part->samples_taken || sfr__ticket_failing(t))
		return rc;
	part->samples_taken = true;
	if (part->deferred && t->staging.sums)
		sfr__cuda_sum(part);
	if (part->deferred && !sfr__ticket_failing(t))
		sfr__cuda_take_samples(part);
	close_capture(part);
	return 0;
}

int sfr__cuda_capture(struct sfr_ticket *t, uint64_t slice_ns)
{
	uint64_t deadline = sfr__deadline(slice_ns);

	if (t->staging.nr_parts && sfr__ticket_failing(t)) {
		/* An error of begin: only now has the save a state in which it can fail. */
		sfr__lock(&t->engine->mu);
		sfr__ticket_fail_locked(t, &t->err);
		sfr__unlock(&t->engine->mu);
	}
	for (uint32_t i = 0; i < t->staging.nr_parts && !sfr__ticket_failing(t); i++) {
		struct sfr__cuda_lane *lane = t->staging.parts[i].lane;
		struct sfr__cuda_scope scope;
		struct sfr_err err = { .index = -1 };
		CUresult cu_rc = sfr__cuda_enter(&scope, lane->cu, lane->context);
		int rc;

		if (cu_rc != CUDA_SUCCESS) {
			(void)sfr__cuda_failed(lane, "cuCtxPushCurrent", cu_rc, &err);
			sfr__ticket_fail(t, &err);
			break;
		}
		rc = capture_part(&t->staging.parts[i], deadline);
		sfr__cuda_leave(&scope);
		if (rc < 0)
			return rc;
	}
	return 0;
}

void sfr__cuda_capture_end(struct sfr_ticket *t)
{
	for (uint32_t i = 0; i < t->staging.nr_parts; i++) {
		struct sfr__cuda_part *part = &t->staging.parts[i];
		struct sfr_err err = { .index = -1 };

		sfr__cuda_wait_captured(part->lane, part->stream, &part->captured_event, &err);
		if (err.code)
			sfr__ticket_fail(t, &err);
	}
}

/* ---- launch, and the lane's side ------------------------------------------------------ */

void sfr__cuda_launch(struct sfr_ticket *t)
{
	bool go = !sfr__ticket_failing(t);

	for (uint32_t i = 0; i < t->staging.nr_parts; i++) {
		struct sfr__cuda_part *part = &t->staging.parts[i];

		if (!part->lane)
			continue;
		sfr__cuda_part_called(part);
		if (go && part->deferred && !sfr__cuda_is_dead(part->lane))
			sfr__cuda_push(part->lane, &part->staging);
		else
			sfr__cuda_part_submitted(part);
	}
}

/* On the lane's thread: queues the deferred blocks, few at a time until a thread waits for them. */
static void stage_blocks(struct sfr__cuda_part *part)
{
	struct sfr__cuda_lane *lane = part->lane;
	struct sfr_ticket *t = part->ticket;
	struct sfr__cuda_fill fill;
	uint32_t blk = 0;
	int rc = 0;

	sfr__cuda_fill_begin(&fill, part, part->deferred);
	while (blk < part->deferred->nr_blocks && (rc == 0 || rc == SFR_EAGAIN) &&
	       !sfr__ticket_failing(t) && !fill.err.code) {
		fill.slowly = !sfr__cuda_is_rushed(lane, t->seq);
		if (fill.slowly)
			sfr__cuda_throttle(lane, t->seq);
		else
			sfr__cuda_poll(lane);
		if (sfr__cuda_is_dead(lane)) {
			sfr__err_set(&fill.err, -EIO, SFR_PHASE_STAGE, lane->why);
			break;
		}
		/* A block of this save in flight may be the one to wait for, so the wait is short
		 * and the loop polls. */
		rc = fill_next(&fill, &blk, 100 * 1000);
	}
	if (rc == SFR_EEXHAUSTED)
		sfr__err_set(&fill.err, rc, SFR_PHASE_STAGE, NULL);
	sfr__cuda_fill_end(&fill);
}

static void stage(struct sfr__task *task)
{
	struct sfr__cuda_part *part = sfr__container(task, struct sfr__cuda_part, staging);
	struct sfr__cuda_lane *lane = part->lane;
	struct sfr_err err = { .index = -1 };
	CUevent event;

	stage_blocks(part);
	sfr__cuda_turn_begin(lane);
	/* Without an event the gate waits on the host. */
	event = sfr__cuda_is_dead(lane) ? NULL : sfr__cuda_record(lane, lane->stream, &err);
	sfr__cuda_turn_end(lane);
	sfr__lock(&lane->mu);
	part->staged.event = event;
	sfr__unlock(&lane->mu);
	sfr__cuda_part_submitted(part);
}
