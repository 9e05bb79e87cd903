/* Copies the part of a snapshot on one device directly into the leased memory; all copies are
 * queued in the call.
 *
 *   caller's stream   ... work  E   |                    waits C | forward, backward waits S | step
 *   lane's stream               waits E | captured, samples, C | deferred, S
 *
 * A save's deferred bytes are queued in small transfers (stage_cuda.c), but a snapshot's are not:
 * all of its memory is leased already, and its caller mostly waits for it at once. So each group of
 * copies is one batch, given to the driver in one call. The price is that copies of other streams
 * queue behind it.
 *
 * One transfer follows all copies. It tells the lane's thread of the end, so that it compares the
 * samples, and the snapshot's memory goes back no earlier. If nothing was queued, there is no
 * transfer.
 *
 * For groups of an Offloader (SFR_SNAPSHOT_LEAVES) everything is captured and there is no C.
 * Before the sources are written to again, their writer has to wait for S.
 *
 * The driver refuses a copy into more than one registration, so sources are cut where regions of
 * the pool meet. Blocks that could not be pinned get copies of their own. */
#include <errno.h>
#include <stddef.h>

#include "device/lane.h"
#include "memory/pin.h"
#include "snapshot/snapshot.h"

struct sfr__snapshot_part {
	struct sfr__cuda_landing landing; /* first: the lane finds the part by it */
	struct sfr_snapshot *snapshot;    /* constant, like the next */
	uint32_t device;
	CUstream stream;             /* the caller's current stream */
	struct sfr__cuda_lane *lane; /* NULL before start */

	CUevent captured;             /* event C; used only by the caller's thread */
	struct sfr__cuda_store store; /* the caller's until the transfer is sent, then the lane's */
	struct sfr__samples samples;  /* items are in the store */

	/* event S; over: the copies have completed, or nothing was queued */
	struct sfr__cuda_staged staged;
	struct sfr__cuda_timer copying; /* times the copies of SFR_SNAPSHOT_LEAVES */
};

/* ---- choosing the copies ------------------------------------------------------------- */

/* Collects the copies of the part's captured or deferred sources, to pinned and to pageable
 * memory. */
static int collect(const struct sfr__snapshot_part *part, bool captured,
		   struct sfr__cuda_batch *pinned, struct sfr__cuda_batch *pageable)
{
	struct sfr_snapshot *s = part->snapshot;
	int rc = 0;

	for (uint32_t i = 0; i < s->nr_sources; i++) {
		const struct sfr_source *source = &s->sources[i];

		if (source->device != part->device + 1 ||
		    (source->lane == SFR_CAPTURED) != captured)
			continue;
		for (uint64_t off = 0, len; off < source->nbytes && rc == 0; off += len) {
			bool good;

			len = sfr__pool_span(s->engine->pool, s->copies[i] + off,
					     (size_t)(source->nbytes - off), &good);
			rc = sfr__cuda_batch_add(good ? pinned : pageable,
						 (uint64_t)(uintptr_t)(s->copies[i] + off),
						 source->addr + off, (size_t)len);
		}
	}
	return rc;
}

/* Places samples of the deferred sources in memory of the lane's. *rows receives the copies that
 * gather them, from malloc. */
static int sample(struct sfr__snapshot_part *part, struct sfr__cuda_rows **rows, size_t *nr_rows)
{
	uint32_t nr;
	struct sfr__sampled *sampled = sfr__snapshot_sampled(part->snapshot, part->device + 1, &nr);
	int rc = sampled ? 0 : -ENOMEM;

	*rows = NULL;
	*nr_rows = 0;
	if (rc == 0 && nr != 0) {
		*rows = sfr_sys.malloc(nr * sizeof(**rows));
		rc = *rows ? sfr__cuda_store_get(part->lane,
						 sfr__samples_most_rows(sampled, nr) *
							 sizeof(*part->samples.items),
						 &part->store) :
			     -ENOMEM;
	}
	if (rc == 0 && nr != 0) {
		part->samples.items = part->store.mem;
		*nr_rows =
			sfr__samples_place_rows(&part->samples, sampled, nr, sfr__now_ns(), *rows);
	}
	sfr_sys.free(sampled);
	return rc;
}

/* ---- start ------------------------------------------------------------------------- */

/* The copies to queue for one part. */
struct plan {
	struct sfr__cuda_batch captured, captured_pageable, deferred, deferred_pageable;
	struct sfr__cuda_rows *rows; /* gather the samples */
	size_t nr_rows;
	struct sfr__cuda_piece *piece; /* NULL once it is sent */
};

static void plan_free(struct sfr__snapshot_part *part, struct plan *plan)
{
	sfr__cuda_batch_free(&plan->captured);
	sfr__cuda_batch_free(&plan->captured_pageable);
	sfr_sys.free(plan->rows);
	sfr__cuda_batch_free(&plan->deferred);
	sfr__cuda_batch_free(&plan->deferred_pageable);
	if (plan->piece)
		sfr__cuda_piece_put(part->lane, plan->piece);
}

static int plan_make(struct sfr__snapshot_part *part, struct plan *plan)
{
	int rc;

	*plan = (struct plan){ .piece = sfr__cuda_piece_get(part->lane) };
	rc = plan->piece ? 0 : -ENOMEM;
	if (rc == 0)
		rc = collect(part, true, &plan->captured, &plan->captured_pageable);
	if (rc == 0)
		rc = collect(part, false, &plan->deferred, &plan->deferred_pageable);
	if (rc == 0)
		rc = sample(part, &plan->rows, &plan->nr_rows);
	return rc;
}

/* Queues the plan, between E and S. A failed call may have queued some copies, so from the first
 * copy on a transfer is sent in any case. */
static void queue(struct sfr__snapshot_part *part, struct plan *plan, struct sfr_err *err)
{
	struct sfr__cuda_lane *lane = part->lane;
	CUevent staged;

	if (sfr__cuda_refuses(lane, err))
		return;
	sfr__cuda_mark(lane, part->stream, err);
	if (err->code)
		return;
	sfr__lock(&lane->mu);
	part->staged.over = false; /* before the transfer can complete */
	sfr__unlock(&lane->mu);
	if (part->snapshot->leaves)
		sfr__cuda_timer_begin(lane, &part->copying, lane->stream);
	sfr__cuda_batch_copy(lane, &plan->captured, true, err);
	sfr__cuda_batch_copy(lane, &plan->captured_pageable, false, err);
	sfr__cuda_timer_end(lane, &part->copying, lane->stream);
	if (plan->nr_rows && !err->code)
		sfr__cuda_copy_rows(lane, plan->rows, plan->nr_rows, sizeof(*part->samples.items),
				    part->store.pinned, err);
	if (!part->snapshot->leaves)
		part->captured = sfr__cuda_record(lane, lane->stream, err);
	sfr__cuda_batch_copy(lane, &plan->deferred, true, err);
	sfr__cuda_batch_copy(lane, &plan->deferred_pageable, false, err);
	staged = sfr__cuda_record(lane, lane->stream, err);
	sfr__lock(&lane->mu);
	part->staged.event = staged;
	sfr__unlock(&lane->mu);
	plan->piece->landing = &part->landing;
	sfr__cuda_fly(lane, plan->piece, err);
	plan->piece = NULL;
}

/* 0; or a code with err->code == 0, if nothing is queued and the call is refused. */
static int start_part(struct sfr__snapshot_part *part, struct sfr_err *err)
{
	struct sfr_snapshot *s = part->snapshot;
	struct sfr__pin *pin = sfr__pool_pin(s->engine->pool);
	struct sfr__cuda_scope scope;
	struct plan plan;
	char why[160] = "";
	CUresult rc;
	int ret = sfr__cuda_lane_get(&s->engine->cuda_lanes, part->device, SFR__CUDA_OUT,
				     &part->lane, why, sizeof(why));

	if (ret == SFR_ECLOSED)
		return ret;
	if (ret < 0) {
		part->lane = NULL;
		sfr__err_set(err, ret, SFR_PHASE_STAGE, why);
		return 0;
	}
	rc = sfr__cuda_enter(&scope, part->lane->cu, part->lane->context);
	if (rc != CUDA_SUCCESS) {
		(void)sfr__cuda_failed(part->lane, "cuCtxPushCurrent", rc, err);
		return 0;
	}
	if (sfr__cuda_is_capturing(part->lane->cu, part->stream)) {
		sfr__cuda_leave(&scope);
		return SFR_ECAPTURING;
	}
	if (sfr__pin_on(pin, part->lane->cu, part->device, why, sizeof(why)) == 0)
		sfr__lot_pin(s);
	else
		sfr__pin_failed(pin, why);
	ret = plan_make(part, &plan);
	if (ret < 0) {
		sfr__err_set(err, ret, SFR_PHASE_STAGE, NULL);
	} else {
		sfr__snapshot_out(s); /* before the transfer can complete */
		sfr__cuda_turn_begin(part->lane);
		queue(part, &plan, err);
		sfr__cuda_turn_end(part->lane);
		if (plan.piece)
			sfr__snapshot_in(s, -1, NULL);
	}
	if (plan.piece)
		sfr__cuda_store_put(part->lane, &part->store);
	plan_free(part, &plan);
	sfr__cuda_leave(&scope);
	return 0;
}

int sfr__snapshot_parts_start(struct sfr_snapshot *s, struct sfr_err *err)
{
	for (uint32_t i = 0; i < s->nr_parts && !err->code; i++) {
		int rc = start_part(&s->parts[i], err);

		if (rc < 0)
			return rc;
	}
	return 0;
}

void sfr__snapshot_parts_captured(struct sfr_snapshot *s, struct sfr_err *err)
{
	for (uint32_t i = 0; i < s->nr_parts; i++)
		sfr__cuda_wait_captured(s->parts[i].lane, s->parts[i].stream, &s->parts[i].captured,
					err);
}

/* ---- after the call -------------------------------------------------------------------- */

/* Called on the lane's thread when the transfer after all copies has completed. */
static void landed(struct sfr__cuda_landing *landing, struct sfr__cuda_piece *piece, bool ok)
{
	struct sfr__snapshot_part *part =
		sfr__container(landing, struct sfr__snapshot_part, landing);
	struct sfr_snapshot *s = part->snapshot;
	struct sfr__cuda_lane *lane = part->lane;
	struct sfr_err err = { .index = -1 };
	int64_t torn = -1;

	(void)piece; /* has no blocks */
	if (ok)
		torn = sfr__snapshot_compare(s, part->device + 1, &part->samples);
	else
		/* constant once the lane is dead */
		sfr__err_set(&err, -EIO, SFR_PHASE_STAGE, lane->why);
	sfr__lock(&lane->mu);
	sfr__cuda_staged_over_locked(lane, &part->staged);
	sfr__unlock(&lane->mu);
	sfr__cuda_store_put(lane, &part->store);
	if (!ok)
		sfr__snapshot_lost(s);
	/* ready: the copies have ended */
	(void)sfr__cuda_timer_read(lane, &part->copying);
	atomic_fetch_add_explicit(&s->copying_ns, part->copying.ns, memory_order_relaxed);
	/* the snapshot may be freed from here on */
	sfr__snapshot_in(s, torn, err.code ? &err : NULL);
}

bool sfr__snapshot_parts_gate(struct sfr_snapshot *s, const struct sfr_stream *streams, uint32_t nr)
{
	bool all = true;

	for (uint32_t i = 0; i < s->nr_parts; i++) {
		struct sfr__snapshot_part *part = &s->parts[i];
		const struct sfr_stream *stream = sfr__stream_of(streams, nr, part->device);

		if (part->lane && !sfr__cuda_wait_staged(part->lane, &part->staged, stream))
			all = false;
	}
	return all;
}

void sfr__snapshot_pin(struct sfr_snapshot *s)
{
	const struct sfr__pin *pin = sfr__pool_pin(s->engine->pool);
	struct sfr__cuda_scope scope;

	if (!sfr__pin_is_on(sfr__pool_pin(s->engine->pool)))
		return;
	if (sfr__cuda_enter(&scope, pin->cu, pin->context) == CUDA_SUCCESS)
		sfr__lot_pin(s);
	sfr__cuda_leave(&scope);
}

int sfr__snapshot_parts_new(struct sfr_snapshot *s)
{
	uint32_t nr = 0;

	for (uint32_t i = 0; i < s->nr_sources; i++) {
		uint32_t device = s->sources[i].device, k = 0;

		if (device == 0 || s->sources[i].nbytes == 0)
			continue;
		while (k < nr && s->parts[k].device != device - 1)
			k++;
		if (k < nr)
			continue;
		/* There are few devices, mostly one. */
		struct sfr__snapshot_part *more =
			sfr_sys.realloc(s->parts, (nr + 1) * sizeof(*more));
		if (!more)
			return -ENOMEM;
		s->parts = more;
		s->parts[nr++] = (struct sfr__snapshot_part){ .landing.fn = landed,
							      .snapshot = s,
							      .device = device - 1,
							      .staged.over = true };
	}
	s->nr_parts = nr;
	return 0;
}

int sfr__snapshot_parts_streams(struct sfr_snapshot *s, const struct sfr_stream *streams,
				uint32_t nr)
{
	for (uint32_t i = 0; i < s->nr_parts; i++) {
		const struct sfr_stream *stream = sfr__stream_of(streams, nr, s->parts[i].device);

		if (!stream)
			return SFR_ESTATE;
		s->parts[i].stream = (CUstream)(uintptr_t)stream->handle;
	}
	return 0;
}
