/* Onloads: copies from host memory to a device while the device computes.
 *
 *     caller's stream   memory is free E │  layer l          waits S │ layer l-1
 *     inward lane                waits E │  copies of layer l-1    S │
 *
 * The lane waits for the event E, because earlier work on the caller's stream may still use the
 * destinations: a stream-ordered allocator reuses memory before that work has run. The event S
 * follows all copies (stage/transfer.h). If the sources are still being copied from the device, the
 * lane's stream waits for those copies, so the host does not have to.
 *
 * The snapshot's memory is held until the lane's thread sees that the copies have completed. A
 * thread of the engine must never drop the last reference to the engine. So
 * sfr_onload_wait_and_free waits for copies that still run, and the caller's thread drops all
 * references. */
#include <errno.h>
#include <stddef.h>

#include "offload/offload.h"
#include "snapshot/snapshot.h"
#include "stage/transfer.h"

struct sfr_onload {
	struct sfr__transfer transfer; /* without a lane if the device had failed before */
	struct sfr_engine *engine;     /* a reference */
	uint64_t fork_generation;
	struct sfr_snapshot *snapshot; /* a reference, and a hold until the copies end; or NULL */

	/* used only by the caller's thread */
	bool ordered;                   /* a stream was made to wait for the copies */
	struct sfr__cuda_timer waiting; /* measures the first such wait */
};

/* Returns whether the onload belongs to a parent process. */
static bool belongs_to_parent_process(const struct sfr_onload *onload)
{
	return onload->fork_generation != sfr_fork_generation();
}

/* Returns the copy at index *i and advances *i. If all sources are in one lease (`leased`), merges
 * this copy with those after it that are adjacent in both memories. The padding between them is
 * copied too: in both memories it belongs to these tensors. */
static struct sfr_onload_copy next_merged_copy(const struct sfr_onload_copy *copies, uint32_t nr,
					       bool leased, uint32_t *i)
{
	struct sfr_onload_copy merged = copies[*i];

	for (++*i; leased && *i < nr; ++*i) {
		const struct sfr_onload_copy *next = &copies[*i];
		const uint64_t distance = next->src - merged.src;

		/* adjacent: the same distance in both memories, with nothing but padding between */
		if (next->dst - merged.dst != distance ||
		    distance != sfr__round_up(merged.nbytes, SFR_COPY_ALIGN))
			break;
		merged.nbytes = distance + next->nbytes;
	}
	return merged;
}

/* ---- start ------------------------------------------------------------------------- */

/* Called by the lane when the copies have completed (`ok`) or the device has died. */
static void portion_done(struct sfr__transfer *tr, struct sfr__cuda_portion *portion, bool ok)
{
	struct sfr_onload *onload = sfr__container(tr, struct sfr_onload, transfer);

	(void)portion; /* an onload has only one */
	if (!onload->snapshot)
		return;
	if (!ok) /* the dead device may still read the memory */
		sfr__snapshot_retire_memory(onload->snapshot);
	sfr_snapshot_remove_hold(onload->snapshot);
}

static const struct sfr__transfer_ops ops = { .portion_done = portion_done };

/* Makes the lane's stream wait for copies into the sources. Returns false if it cannot. */
static bool queue_wait_for_sources(struct sfr_onload *onload)
{
	const struct sfr__cuda_lane *lane = onload->transfer.lane;
	const struct sfr_device_stream stream = { .handle = (uint64_t)(uintptr_t)lane->stream,
						  .device = lane->device };

	if (!onload->snapshot)
		return true;
	return sfr_snapshot_gate(onload->snapshot, &stream, 1, 0) == 0; /* one stream, no wait */
}

/* Returns 0, -ENOMEM or SFR_EAGAIN. A device's error stays in the transfer. */
static int queue_copies(struct sfr_onload *onload, const struct sfr_onload_copy *copies,
			uint32_t nr)
{
	struct sfr__transfer *tr = &onload->transfer;
	struct sfr__pool *pool = onload->engine->pool;

	if (tr->err.code)
		return 0;
	if (!queue_wait_for_sources(onload))
		return SFR_EAGAIN;
	if (sfr__transfer_prepare_pin(tr, pool) && onload->snapshot)
		sfr__lot_pin(onload->snapshot); /* the hold keeps the memory in place */
	tr->timed = true;
	for (uint32_t i = 0; i < nr;) {
		struct sfr_onload_copy merged =
			next_merged_copy(copies, nr, onload->snapshot != NULL, &i);

		sfr__transfer_add_pooled_copy(tr, pool, merged.dst, merged.src, merged.nbytes);
	}
	return tr->err.code; /* -ENOMEM or 0 */
}

/* Queues the copies between the events E and S. Returns as sfr_onload_start. */
static int start_copies(struct sfr_onload *onload, uint32_t device, CUstream stream,
			const struct sfr_onload_copy *copies, uint32_t nr)
{
	struct sfr__transfer *tr = &onload->transfer;
	int rc = sfr__transfer_begin_after_stream(tr, &onload->engine->cuda_lanes, device,
						  SFR__CUDA_IN, stream);

	if (tr->lane) {
		rc = queue_copies(onload, copies, nr);
		if (!tr->err.code)
			sfr__transfer_send_and_record_staged(tr);
		sfr__transfer_end_queueing(tr);
	}
	if (onload->snapshot && !tr->launched)
		sfr_snapshot_remove_hold(onload->snapshot); /* portion_done will not be called */
	return rc;
}

static void free_onload(struct sfr_onload *onload)
{
	struct sfr__cuda_lane *lane = onload->transfer.lane;
	struct sfr_engine *engine = onload->engine;
	struct sfr__cuda_scope scope;

	/* When an engine closes, it releases the device's context, and the events with it. */
	if (onload->waiting.begin && !engine->closed) {
		/* on failure only the events are lost */
		(void)sfr__cuda_enter(&scope, lane->cu, lane->context);
		sfr__cuda_timer_free_events(lane, &onload->waiting);
		sfr__cuda_leave(&scope);
	}

	sfr_snapshot_put(onload->snapshot);
	sfr__engine_drop_pool_user(engine);
	sfr_sys.free(onload);
	sfr_engine_put(engine);
}

/* Makes an onload, which keeps the engine's pool alive and holds the snapshot's memory. Returns 0,
 * -ENOMEM, SFR_ECLOSED or an error of sfr_snapshot_add_hold. */
static int make_onload(struct sfr_engine *engine, struct sfr_snapshot *snapshot,
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
	rc = snapshot ? sfr_snapshot_add_hold(snapshot) : 0;
	if (rc < 0) {
		free_onload(onload);
		return rc;
	}
	if (snapshot)
		sfr_snapshot_get(snapshot);
	onload->snapshot = snapshot;
	*out = onload;
	return 0;
}

int sfr_onload_start(struct sfr_engine *engine, uint32_t device, uint64_t stream,
		     const struct sfr_onload_copy *copies, uint32_t nr,
		     struct sfr_snapshot *snapshot, struct sfr_onload **out)
{
	struct sfr_onload *onload;
	int rc;

	*out = NULL;
	if (engine->fork_generation != sfr_fork_generation())
		return SFR_EFORK;
	rc = make_onload(engine, snapshot, &onload);
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

/* Makes the stream wait for the copies, and measures the first wait. Returns false if the stream
 * cannot wait. */
static bool make_stream_wait_for_copies(struct sfr_onload *onload,
					const struct sfr_device_stream *stream)
{
	struct sfr__cuda_lane *lane = onload->transfer.lane;
	CUstream cu_stream = (CUstream)(uintptr_t)stream->handle;
	struct sfr__cuda_scope scope;
	bool entered, timed, will_wait;

	if (sfr__transfer_is_over(&onload->transfer)) /* always so without a lane */
		return true;
	entered = sfr__cuda_enter(&scope, lane->cu, lane->context) == CUDA_SUCCESS;
	/* Measure the first wait. While a stream captures a graph, no time can be measured. */
	timed = entered && !onload->ordered && !sfr__cuda_is_capturing(lane->cu, cu_stream);
	if (timed)
		sfr__cuda_timer_begin(lane, &onload->waiting, cu_stream);
	will_wait = sfr__transfer_gate_stream(&onload->transfer, stream);
	if (timed)
		sfr__cuda_timer_end(lane, &onload->waiting, cu_stream);
	onload->ordered = true;
	sfr__cuda_leave(&scope);
	return will_wait;
}

int sfr_onload_make_stream_wait(struct sfr_onload *onload, uint64_t stream)
{
	const struct sfr_device_stream waiting = { .handle = stream };

	if (belongs_to_parent_process(onload))
		return SFR_EFORK;
	return make_stream_wait_for_copies(onload, &waiting) ? 0 : SFR_EAGAIN;
}

int sfr_onload_times(struct sfr_onload *onload, uint64_t *copying_ns, uint64_t *waited_ns)
{
	struct sfr__cuda_lane *lane = onload->transfer.lane;
	struct sfr__cuda_scope scope;
	bool known = true;

	*copying_ns = *waited_ns = 0;
	if (belongs_to_parent_process(onload))
		return SFR_EFORK;
	if (!sfr__transfer_is_over(&onload->transfer))
		return SFR_EAGAIN;
	/* else no wait was measured, or the events are gone with the engine's context */
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
	if (belongs_to_parent_process(onload))
		return SFR_EFORK;
	if (slice_ns == 0)
		return sfr__transfer_is_over(&onload->transfer) ? 0 : SFR_EAGAIN;
	return sfr__transfer_wait(&onload->transfer, sfr__deadline(slice_ns));
}

void sfr_onload_error(struct sfr_onload *onload, struct sfr_err *out)
{
	*out = (struct sfr_err){ .index = -1 };
	if (belongs_to_parent_process(onload))
		return;
	*out = onload->transfer.err;
	if (sfr__transfer_is_over(&onload->transfer) && onload->transfer.device_died)
		/* needs no lock: `why` is constant once the lane is dead */
		sfr__err_set_if_unset(out, -EIO, SFR_PHASE_STAGE, onload->transfer.lane->why);
}

void sfr_onload_wait_and_free(struct sfr_onload *onload)
{
	if (!onload || belongs_to_parent_process(onload))
		return;
	(void)sfr_onload_wait(onload, SFR_FOREVER); /* always 0 */
	free_onload(onload);
}

int sfr_engine_is_addr_pinned(struct sfr_engine *engine, uint64_t addr)
{
	const char *mem = (const char *)(uintptr_t)addr;
	bool pinned;

	if (engine->fork_generation != sfr_fork_generation() || !engine->pool)
		return 0;
	if (!sfr__pool_has(engine->pool, mem))
		return 0;
	(void)sfr__pool_len_for_one_copy(engine->pool, mem, 1, &pinned); /* for `pinned` */
	return pinned;
}
