/* Onloads: copies from host memory to a device while the device computes.
 *
 *     caller's stream   memory is free E │  layer l          waits S │ layer l-1
 *     inward lane                waits E │  copies of layer l-1    S │
 *
 * The event S follows all copies (stage/transfer.h). E marks the caller's stream before anything is
 * queued: earlier work on it may still use the destinations, which a stream-ordered allocator has
 * already reused. If the sources are still being copied from the device (a snapshot's memory), the
 * lane's stream also waits for those copies. So bytes can come back without a wait of the host.
 *
 * The copies of one onload are queued together. Ranges that are adjacent both in host memory and on
 * the device become one copy.
 *
 * The snapshot's memory is held from the start until the lane's thread sees the copies complete.
 * Only the caller drops an onload's references, so that a thread of the engine never drops the last
 * reference to the engine. Therefore sfr_onload_put waits for copies that still run, and does not
 * leave the end to the lane's thread. */
#include <errno.h>
#include <stddef.h>

#include "offload/offload.h"
#include "snapshot/snapshot.h"
#include "stage/transfer.h"

struct sfr_onload {
	/* has no lane if the device had failed before: then nothing was queued */
	struct sfr__transfer transfer;
	struct sfr_engine *engine; /* a reference; constant, like the next */
	uint64_t fork_generation;
	/* a reference, and a hold until the copies have completed; NULL: none */
	struct sfr_snapshot *from;

	/* used only by the caller's threads */
	bool ordered;                   /* a stream was made to wait for the copies */
	struct sfr__cuda_timer waiting; /* measures the wait of the first such stream */
};

static bool is_foreign(const struct sfr_onload *onload)
{
	return onload->fork_generation != sfr_fork_generation();
}

/* Returns the copy at index *i and sets *i to the next copy. If all sources are in one lease
 * (`leased`), merges the copy with those after it that are adjacent in both memories. The padding
 * between them is copied along: in both memories it belongs to the same group of tensors. */
static struct sfr_onload_copy merge(const struct sfr_onload_copy *copies, uint32_t nr, bool leased,
				    uint32_t *i)
{
	struct sfr_onload_copy merged = copies[*i];

	for (++*i; leased && *i < nr; ++*i) {
		const uint64_t distance = copies[*i].src - merged.src;

		if (copies[*i].dst - merged.dst != distance ||
		    distance != sfr__round_up(merged.nbytes, SFR_COPY_ALIGN))
			break;
		merged.nbytes = distance + copies[*i].nbytes;
	}
	return merged;
}

/* ---- start ------------------------------------------------------------------------- */

/* Called when all copies have completed or, if !ok, when the device has died under them. */
static void portion_done(struct sfr__transfer *tr, struct sfr__cuda_portion *portion, bool ok)
{
	struct sfr_onload *onload = sfr__container(tr, struct sfr_onload, transfer);

	(void)portion; /* there is only one */
	if (!onload->from)
		return;
	if (!ok)
		sfr__snapshot_retire_memory(onload->from);
	sfr_snapshot_unhold(onload->from);
}

static const struct sfr__transfer_ops ops = { .portion_done = portion_done };

/* Makes the lane's stream wait for the copies that still run into the sources. Returns false if the
 * stream cannot wait for them. */
static bool wait_for_sources(struct sfr_onload *onload)
{
	const struct sfr__cuda_lane *lane = onload->transfer.lane;
	const struct sfr_stream stream = { .handle = (uint64_t)(uintptr_t)lane->stream,
					   .device = lane->device };

	return !onload->from || sfr_snapshot_gate(onload->from, &stream, 1, 0) == 0;
}

/* Adds all copies to the transfer. 0, or -ENOMEM or SFR_EAGAIN, and then nothing is queued. A
 * device's error stays in the transfer, and 0 is returned. */
static int queue_copies(struct sfr_onload *onload, const struct sfr_onload_copy *copies,
			uint32_t nr)
{
	struct sfr__transfer *tr = &onload->transfer;
	struct sfr__pool *pool = onload->engine->pool;

	if (tr->err.code)
		return 0;
	if (!wait_for_sources(onload))
		return SFR_EAGAIN;
	if (sfr__transfer_prepare_pin(tr, pool) && onload->from)
		sfr__lot_pin(onload->from); /* the hold keeps the memory in place */
	tr->timed = true;
	for (uint32_t i = 0; i < nr;) {
		struct sfr_onload_copy merged = merge(copies, nr, onload->from != NULL, &i);

		sfr__transfer_add_pooled(tr, pool, merged.dst, merged.src, merged.nbytes);
	}
	return tr->err.code; /* -ENOMEM or 0 */
}

/* Queues the copies between the events E and S. Results as sfr_onload_start. */
static int start_copies(struct sfr_onload *onload, uint32_t device, CUstream stream,
			const struct sfr_onload_copy *copies, uint32_t nr)
{
	struct sfr__transfer *tr = &onload->transfer;
	int rc = sfr__transfer_begin(tr, &onload->engine->cuda_lanes, device, SFR__CUDA_IN, stream);

	if (tr->lane) {
		rc = queue_copies(onload, copies, nr);
		if (!tr->err.code)
			sfr__transfer_mark_staged(tr);
		sfr__transfer_end(tr);
	}
	if (onload->from && !tr->launched)
		sfr_snapshot_unhold(onload->from); /* `portion_done` is not called */
	return rc;
}

static void free_onload(struct sfr_onload *onload)
{
	struct sfr__cuda_lane *lane = onload->transfer.lane;
	struct sfr_engine *engine = onload->engine;
	struct sfr__cuda_scope scope;

	/* A closed engine has released the device's context, so the events cannot be freed. */
	if (onload->waiting.begin && !engine->closed) {
		(void)sfr__cuda_enter(&scope, lane->cu, lane->context);
		/* if the driver refuses the context, only the timer's events are lost */
		sfr__cuda_timer_drop(lane, &onload->waiting);
		sfr__cuda_leave(&scope);
	}

	sfr_snapshot_put(onload->from);
	sfr__engine_drop_pool_user(engine);
	sfr_sys.free(onload);
	sfr_engine_put(engine);
}

/* Makes an onload, which keeps the engine's pool and holds the snapshot's memory. 0, SFR_ECLOSED,
 * -ENOMEM, or an error of sfr_snapshot_hold. */
static int make_onload(struct sfr_engine *engine, struct sfr_snapshot *from,
		       struct sfr_onload **out)
{
	struct sfr_onload *onload = sfr_sys.calloc(1, sizeof(*onload));
	int rc;

	if (!onload)
		return -ENOMEM;
	sfr__lock(&engine->mu);
	rc = engine->closing ? SFR_ECLOSED : 0;
	if (rc == 0)
		engine->nr_pool_users++; /* keeps the pool until the onload is freed */
	sfr__unlock(&engine->mu);
	if (rc < 0) {
		sfr_sys.free(onload);
		return rc;
	}
	sfr__engine_get(engine);
	onload->transfer.ops = &ops;
	onload->engine = engine;
	onload->fork_generation = engine->fork_generation;
	rc = from ? sfr_snapshot_hold(from) : 0;
	if (rc < 0) {
		free_onload(onload);
		return rc;
	}
	if (from)
		sfr_snapshot_get(from);
	onload->from = from;
	*out = onload;
	return 0;
}

int sfr_onload_start(struct sfr_engine *engine, uint32_t device, uint64_t stream,
		     const struct sfr_onload_copy *copies, uint32_t nr, struct sfr_snapshot *from,
		     struct sfr_onload **out)
{
	struct sfr_onload *onload;
	int rc;

	*out = NULL;
	if (engine->fork_generation != sfr_fork_generation())
		return SFR_EFORK;
	rc = make_onload(engine, from, &onload);
	if (rc < 0)
		return rc;
	rc = start_copies(onload, device, (CUstream)(uintptr_t)stream, copies, nr);
	if (rc < 0)
		free_onload(onload);
	else
		*out = onload;
	return rc;
}

/* ---- waiting --------------------------------------------------------------------------- */

/* Makes a stream wait for the copies. Returns false if the stream cannot wait. The first time, also
 * measures the wait with events before and after it; nothing else runs on the stream meanwhile. */
static bool order_stream(struct sfr_onload *onload, const struct sfr_stream *stream)
{
	struct sfr__cuda_lane *lane = onload->transfer.lane;
	CUstream cu_stream = (CUstream)(uintptr_t)stream->handle;
	struct sfr__cuda_scope scope;
	bool entered, timed, done;

	if (sfr__transfer_is_over(&onload->transfer)) /* also without a lane */
		return true;
	entered = sfr__cuda_enter(&scope, lane->cu, lane->context) == CUDA_SUCCESS;
	timed = entered && !onload->ordered && !sfr__cuda_is_capturing(lane->cu, cu_stream);
	if (timed)
		sfr__cuda_timer_begin(lane, &onload->waiting, cu_stream);
	done = sfr__transfer_gate(&onload->transfer, stream);
	if (timed)
		sfr__cuda_timer_end(lane, &onload->waiting, cu_stream);
	onload->ordered = true;
	sfr__cuda_leave(&scope);
	return done;
}

int sfr_onload_order(struct sfr_onload *onload, uint64_t stream)
{
	const struct sfr_stream waiting = { .handle = stream };

	if (is_foreign(onload))
		return SFR_EFORK;
	return order_stream(onload, &waiting) ? 0 : SFR_EAGAIN;
}

int sfr_onload_times(struct sfr_onload *onload, uint64_t *copying_ns, uint64_t *waited_ns)
{
	struct sfr__cuda_lane *lane = onload->transfer.lane;
	struct sfr__cuda_scope scope;
	bool known = true;

	*copying_ns = *waited_ns = 0;
	if (is_foreign(onload))
		return SFR_EFORK;
	if (!sfr__transfer_is_over(&onload->transfer))
		return SFR_EAGAIN;
	if (onload->waiting.begin && !onload->engine->closed) {
		known = sfr__cuda_enter(&scope, lane->cu, lane->context) != CUDA_SUCCESS ||
			sfr__cuda_timer_read(lane, &onload->waiting);
		sfr__cuda_leave(&scope);
	}
	*copying_ns = onload->transfer.copying.ns;
	*waited_ns = onload->waiting.ns;
	return known ? 0 : SFR_EAGAIN;
}

int sfr_onload_wait(struct sfr_onload *onload, uint64_t slice_ns)
{
	if (is_foreign(onload))
		return SFR_EFORK;
	if (slice_ns == 0)
		return sfr__transfer_is_over(&onload->transfer) ? 0 : SFR_EAGAIN;
	return sfr__transfer_wait(&onload->transfer, sfr__deadline(slice_ns));
}

void sfr_onload_error(struct sfr_onload *onload, struct sfr_err *out)
{
	*out = (struct sfr_err){ .index = -1 };
	if (is_foreign(onload))
		return;
	*out = onload->transfer.err;
	if (sfr__transfer_is_over(&onload->transfer) && onload->transfer.lost)
		/* `why` is read without a lock: it is constant once the lane is dead */
		sfr__err_set(out, -EIO, SFR_PHASE_STAGE, onload->transfer.lane->why);
}

void sfr_onload_put(struct sfr_onload *onload)
{
	if (!onload || is_foreign(onload))
		return;
	(void)sfr_onload_wait(onload, SFR_FOREVER); /* always 0 */
	free_onload(onload);
}

int sfr_engine_has_pinned(struct sfr_engine *engine, uint64_t addr)
{
	bool pinned = false;

	if (engine->fork_generation != sfr_fork_generation() || !engine->pool)
		return 0;
	return sfr__pool_has(engine->pool, (const char *)(uintptr_t)addr) &&
	       sfr__pool_span(engine->pool, (const char *)(uintptr_t)addr, 1, &pinned) && pinned;
}
