/* Onloads: copies from host memory to a device while the device computes.
 *
 *     caller's stream   memory is free E │  layer l          waits S │ layer l-1
 *     inward lane                waits E │  copies of layer l-1    S │
 *
 * The event E comes first: earlier work on the caller's stream may still use the destinations,
 * which a stream-ordered allocator has already reused. The event S follows all copies
 * (stage/transfer.h). If the sources are still being copied from the device, the lane's stream
 * waits for those copies, so the host need not.
 *
 * The snapshot's memory is held until the lane's thread sees the copies complete. A thread of the
 * engine must never drop the last reference to the engine. So sfr_onload_put waits for copies that
 * still run, and the caller drops all references. */
#include <errno.h>
#include <stddef.h>

#include "offload/offload.h"
#include "snapshot/snapshot.h"
#include "stage/transfer.h"

struct sfr_onload {
	struct sfr__transfer transfer; /* without a lane if the device had failed before */
	struct sfr_engine *engine;     /* a reference */
	uint64_t fork_generation;
	struct sfr_snapshot *from; /* a reference, and a hold until the copies end; or NULL */

	/* used only by the caller */
	bool ordered;                   /* a stream was made to wait for the copies */
	struct sfr__cuda_timer waiting; /* measures the first such wait */
};

static bool is_foreign(const struct sfr_onload *onload)
{
	return onload->fork_generation != sfr_fork_generation();
}

/* Returns the copy at index *i and advances *i. If all sources are in one lease (`leased`), merges
 * the copy with those after it that are adjacent in both memories. The padding between them is
 * copied too; it belongs to the same tensors in both memories. */
static struct sfr_onload_copy merge(const struct sfr_onload_copy *copies, uint32_t nr, bool leased,
				    uint32_t *i)
{
	struct sfr_onload_copy merged = copies[*i];

	for (++*i; leased && *i < nr; ++*i) {
		const struct sfr_onload_copy *next = &copies[*i];
		const uint64_t distance = next->src - merged.src;

		if (next->dst - merged.dst != distance ||
		    distance != sfr__round_up(merged.nbytes, SFR_COPY_ALIGN))
			break;
		merged.nbytes = distance + next->nbytes;
	}
	return merged;
}

/* ---- start ------------------------------------------------------------------------- */

/* The copies have completed or, if !ok, the device has died. */
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

/* Makes the lane's stream wait for copies into the sources. Returns false if it cannot. */
static bool wait_for_sources(struct sfr_onload *onload)
{
	const struct sfr__cuda_lane *lane = onload->transfer.lane;
	const struct sfr_stream stream = { .handle = (uint64_t)(uintptr_t)lane->stream,
					   .device = lane->device };

	return !onload->from || sfr_snapshot_gate(onload->from, &stream, 1, 0) == 0;
}

/* Returns 0, -ENOMEM or SFR_EAGAIN. A device's error stays in the transfer. */
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

/* Queues the copies between the events E and S. Returns as sfr_onload_start. */
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

	/* A closed engine has released the device's context, with the events. */
	if (onload->waiting.begin && !engine->closed) {
		/* on failure only the events are lost */
		(void)sfr__cuda_enter(&scope, lane->cu, lane->context);
		sfr__cuda_timer_drop(lane, &onload->waiting);
		sfr__cuda_leave(&scope);
	}

	sfr_snapshot_put(onload->from);
	sfr__engine_drop_pool_user(engine);
	sfr_sys.free(onload);
	sfr_engine_put(engine);
}

/* Makes an onload, which keeps the engine's pool and holds the snapshot's memory. */
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
		engine->nr_pool_users++;
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

/* Makes the stream wait for the copies, and measures the first wait. Returns false if it cannot. */
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
		if (sfr__cuda_enter(&scope, lane->cu, lane->context) == CUDA_SUCCESS)
			known = sfr__cuda_timer_read(lane, &onload->waiting);
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
		/* needs no lock: `why` is constant once the lane is dead */
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
