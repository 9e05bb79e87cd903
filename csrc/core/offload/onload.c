/* Copies from host memory to a device while the device computes.
 *
 *     caller's stream   memory is free E │  layer l          waits D │ layer l-1
 *     lane inward                waits E │  copies of layer l-1    D │
 *
 * E is recorded on the caller's stream before anything is queued: earlier work on that stream may
 * still use the destinations, which a stream-ordered allocator has already reused. D is recorded
 * behind the copies, and a stream that needs the bytes waits for it. If the sources are still being
 * copied from the device (a snapshot's memory), the lane's stream also waits for that event. So
 * bytes can come back without a wait of the host.
 *
 * The copies of one group are queued together. Ranges adjacent on both sides become one copy, and a
 * copy is split where regions of the pool meet, because a driver refuses one across two
 * registrations.
 *
 *     QUEUED ──the piece behind the copies has landed──▶ LANDED
 *
 * The snapshot's memory is held from the start until the lane's thread sees the copies complete.
 * Only the caller drops references, so a thread of the engine never drops the last one of an
 * engine. An onload that is released early is therefore waited for. */
#include <errno.h>
#include <stddef.h>

#include "memory/pin.h"
#include "offload/offload.h"
#include "snapshot/snapshot.h"

struct sfr_onload {
	struct sfr__cuda_landing landing; /* first: the lane finds the onload by it */
	struct sfr_engine *engine;        /* a reference; constant, like the next three */
	uint64_t fork_generation;
	struct sfr__cuda_lane *lane; /* NULL: nothing was queued because the device had failed */
	/* a reference, and a hold until the copies have completed; NULL: none */
	struct sfr_snapshot *from;

	bool ordered;           /* some stream waits; used by callers only */
	bool flew;              /* something was queued; constant after the start, like refused */
	struct sfr_err refused; /* the error of the start */

	atomic_bool landed;
	struct sfr__cuda_timer copying; /* constant once landed, like err */
	struct sfr_err err;             /* the error of the copies */

	pthread_cond_t cv;              /* signals landed; guarded by lane->mu, like staged */
	struct sfr__cuda_staged staged; /* D */
	struct sfr__cuda_timer waiting; /* of the first stream that waits; used by callers only */
};

static bool has_landed(const struct sfr_onload *onload)
{
	return atomic_load_explicit(&onload->landed, memory_order_acquire);
}

static bool foreign(const struct sfr_onload *onload)
{
	return onload->fork_generation != sfr_fork_generation();
}

/* ---- cutting the copies -------------------------------------------------------------- */

/* Returns whether the memory starts in the engine's pool. */
static bool in_pool(const struct sfr_engine *engine, uint64_t addr)
{
	return sfr__pool_has(engine->pool, (const char *)(uintptr_t)addr);
}

/* Returns how many bytes from `src` one driver copy may have, and whether they are pinned. The
 * caller guarantees that memory outside the pool is pinned. */
static uint64_t span(const struct sfr_engine *engine, uint64_t src, uint64_t nbytes, bool *pinned)
{
	*pinned = true;
	if (!in_pool(engine, src))
		return nbytes;
	return sfr__pool_span(engine->pool, (const char *)(uintptr_t)src, nbytes, pinned);
}

/* Merges the copies from index *i on that are adjacent on both sides in one lease. The padding
 * between them belongs to the same group. */
static struct sfr_onload_copy merge(const struct sfr_onload_copy *copies, uint32_t nr, bool leased,
				    uint32_t *i)
{
	struct sfr_onload_copy one = copies[(*i)++];

	while (leased && *i < nr && copies[*i].src - one.src == copies[*i].dst - one.dst &&
	       copies[*i].src - one.src == sfr__round_up(one.nbytes, SFR_APART)) {
		one.nbytes = copies[*i].src - one.src + copies[*i].nbytes;
		++*i;
	}
	return one;
}

/* Splits the copies into ones that a driver accepts, pinned and pageable. */
static int collect(const struct sfr_onload *onload, const struct sfr_onload_copy *copies,
		   uint32_t nr, struct sfr__cuda_batch *pinned, struct sfr__cuda_batch *pageable)
{
	int rc = 0;

	for (uint32_t i = 0; i < nr;) {
		struct sfr_onload_copy one = merge(copies, nr, onload->from, &i);

		for (uint64_t off = 0, len; off < one.nbytes && rc == 0; off += len) {
			bool good;

			len = span(onload->engine, one.src + off, one.nbytes - off, &good);
			rc = sfr__cuda_batch_add(good ? pinned : pageable, one.dst + off,
						 one.src + off, len);
		}
	}
	return rc;
}

/* ---- start ------------------------------------------------------------------------- */

/* Runs on the lane's thread when the transfer behind all copies is off the list. */
static void landed(struct sfr__cuda_landing *landing, struct sfr__cuda_piece *piece, bool ok)
{
	struct sfr_onload *onload = sfr__container(landing, struct sfr_onload, landing);
	struct sfr__cuda_lane *lane = onload->lane;

	(void)piece; /* it has no blocks */
	/* the copies have ended, so the time is known */
	(void)sfr__cuda_timer_read(lane, &onload->copying);
	if (onload->from && !ok)
		sfr__snapshot_lost(onload->from);
	if (onload->from)
		sfr_snapshot_unhold(onload->from);
	sfr__lock(&lane->mu);
	if (!ok)
		sfr__err_set(&onload->err, -EIO, SFR_PHASE_STAGE, lane->why);
	sfr__cuda_staged_over_locked(lane, &onload->staged);
	atomic_store_explicit(&onload->landed, true, memory_order_release);
	pthread_cond_broadcast(&onload->cv);
	sfr__unlock(&lane->mu); /* after this the onload may be freed */
}

/* Makes the lane's stream wait for copies into the sources. False: it cannot. */
static bool follow(struct sfr_onload *onload)
{
	const struct sfr_stream stream = { .handle = (uint64_t)(uintptr_t)onload->lane->stream,
					   .device = onload->lane->device };

	return !onload->from || sfr_snapshot_gate(onload->from, &stream, 1, 0) == 0;
}

/* In a turn: queues everything between E and D. A call that fails may still have queued something,
 * so from the first copy on the transfer is always put in flight. */
static void queue(struct sfr_onload *onload, struct sfr__cuda_piece *piece,
		  struct sfr__cuda_batch *pinned, struct sfr__cuda_batch *pageable,
		  struct sfr_err *err)
{
	struct sfr__cuda_lane *lane = onload->lane;
	CUevent event;

	sfr__cuda_timer_begin(lane, &onload->copying, lane->stream);
	sfr__cuda_batch_copy(lane, pinned, true, err);
	sfr__cuda_batch_copy(lane, pageable, false, err);
	sfr__cuda_timer_end(lane, &onload->copying, lane->stream);
	event = sfr__cuda_record(lane, lane->stream, err);
	sfr__lock(&lane->mu);
	onload->staged.event = event;
	onload->staged.over = false;
	sfr__unlock(&lane->mu);
	/* nobody reads it yet */
	atomic_store_explicit(&onload->landed, false, memory_order_relaxed);
	onload->flew = true;
	piece->landing = &onload->landing;
	sfr__cuda_fly(lane, piece, err);
}

/* Pins as much of the sources' blocks as possible. */
static void pin(struct sfr_onload *onload)
{
	struct sfr__pool *pool = onload->engine->pool;
	struct sfr__pin *with = sfr__pool_pin(pool);
	char why[160] = "";

	if (sfr__pin_on(with, onload->lane->cu, onload->lane->device, why, sizeof(why)) < 0)
		sfr__pin_failed(with, why);
	else if (onload->from)
		sfr__lot_pin(onload->from); /* the hold keeps the memory in place */
}

/* Queues everything, in the device's context. 0, or a code if nothing is queued; device errors are
 * in *err. */
static int start_here(struct sfr_onload *onload, CUstream stream,
		      const struct sfr_onload_copy *copies, uint32_t nr, struct sfr_err *err)
{
	struct sfr__cuda_lane *lane = onload->lane;
	struct sfr__cuda_batch pinned = { 0 }, pageable = { 0 };
	struct sfr__cuda_piece *piece;
	int rc = 0;

	if (sfr__cuda_is_capturing(lane->cu, stream))
		return SFR_ECAPTURING;
	piece = sfr__cuda_piece_get(lane);
	sfr__cuda_turn_begin(lane);
	pin(onload);
	rc = piece ? collect(onload, copies, nr, &pinned, &pageable) : -ENOMEM;
	if (rc == 0 && !sfr__cuda_refuses(lane, err))
		sfr__cuda_mark(lane, stream, err);
	if (rc == 0 && !err->code && !follow(onload))
		rc = SFR_EAGAIN;
	if (rc == 0 && !err->code) {
		queue(onload, piece, &pinned, &pageable, err);
		piece = NULL;
	}
	sfr__cuda_turn_end(lane);
	if (piece)
		sfr__cuda_piece_put(lane, piece);
	sfr__cuda_batch_free(&pinned);
	sfr__cuda_batch_free(&pageable);
	return rc;
}

static int start(struct sfr_onload *onload, uint32_t device, CUstream stream,
		 const struct sfr_onload_copy *copies, uint32_t nr, struct sfr_err *err)
{
	struct sfr__cuda_scope scope;
	char why[160] = "";
	CUresult code;
	int rc = sfr__cuda_lane_get(&onload->engine->cuda_lanes, device, SFR__CUDA_IN,
				    &onload->lane, why, sizeof(why));

	if (rc == SFR_ECLOSED)
		return rc;
	if (rc < 0) {
		sfr__err_set(err, rc, SFR_PHASE_STAGE, why);
		return 0;
	}
	code = sfr__cuda_enter(&scope, onload->lane->cu, onload->lane->context);
	if (code == CUDA_SUCCESS)
		rc = start_here(onload, stream, copies, nr, err);
	else
		(void)sfr__cuda_failed(onload->lane, "cuCtxPushCurrent", code, err);
	sfr__cuda_leave(&scope);
	return rc;
}

static void free_onload(struct sfr_onload *onload)
{
	struct sfr_engine *engine = onload->engine;
	struct sfr__cuda_scope scope;

	if (onload->waiting.begin && !engine->closed) {
		(void)sfr__cuda_enter(&scope, onload->lane->cu, onload->lane->context);
		/* on failure it is only lost */
		sfr__cuda_timer_drop(onload->lane, &onload->waiting);
		sfr__cuda_leave(&scope);
	}

	sfr_snapshot_put(onload->from);
	sfr__engine_snapshot_gone(engine);
	(void)pthread_cond_destroy(&onload->cv);
	sfr_sys.free(onload);
	sfr_engine_put(engine);
}

/* Makes an onload, which keeps the pool and holds the snapshot's memory. */
static int make(struct sfr_engine *engine, struct sfr_snapshot *from, struct sfr_onload **out)
{
	struct sfr_onload *onload = sfr_sys.calloc(1, sizeof(*onload));
	int rc;

	if (!onload)
		return -ENOMEM;
	rc = sfr__cond_init(&onload->cv);
	if (rc == 0) {
		sfr__lock(&engine->mu);
		rc = engine->closing ? SFR_ECLOSED : 0;
		engine->nr_snapshots += rc == 0; /* keeps the pool */
		sfr__unlock(&engine->mu);
		if (rc < 0)
			(void)pthread_cond_destroy(&onload->cv);
	}
	if (rc < 0) {
		sfr_sys.free(onload);
		return rc;
	}
	sfr__engine_get(engine);
	*onload = (struct sfr_onload){ .landing.fn = landed,
				       .engine = engine,
				       .fork_generation = engine->fork_generation,
				       .cv = onload->cv,
				       .staged.over = true,
				       .refused.index = -1,
				       .err.index = -1 };
	atomic_init(&onload->landed, true);
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
	struct sfr_err err = { .index = -1 };
	struct sfr_onload *onload;
	int rc;

	*out = NULL;
	if (engine->fork_generation != sfr_fork_generation())
		return SFR_EFORK;
	rc = make(engine, from, &onload);
	if (rc < 0)
		return rc;
	rc = start(onload, device, (CUstream)(uintptr_t)stream, copies, nr, &err);
	if (from && !onload->flew)
		sfr_snapshot_unhold(from); /* the landing will not do it */
	if (rc < 0) {
		free_onload(onload);
		return rc;
	}
	onload->refused = err;
	*out = onload;
	return 0;
}

/* ---- waiting --------------------------------------------------------------------------- */

/* Measures the wait as well: nothing else runs on the stream meanwhile. Only the first wait is
 * measured. */
static bool order(struct sfr_onload *onload, const struct sfr_stream *stream)
{
	struct sfr__cuda_lane *lane = onload->lane;
	CUstream of = (CUstream)(uintptr_t)stream->handle;
	struct sfr__cuda_scope scope;
	bool timed, done;

	if (has_landed(onload)) /* also if there is no lane and nothing was queued */
		return true;
	timed = sfr__cuda_enter(&scope, lane->cu, lane->context) == CUDA_SUCCESS &&
		!onload->ordered && !sfr__cuda_is_capturing(lane->cu, of);
	if (timed)
		sfr__cuda_timer_begin(lane, &onload->waiting, of);
	done = sfr__cuda_wait_staged(lane, &onload->staged, stream);
	if (timed)
		sfr__cuda_timer_end(lane, &onload->waiting, of);
	onload->ordered = true;
	sfr__cuda_leave(&scope);
	return done;
}

int sfr_onload_order(struct sfr_onload *onload, uint64_t stream)
{
	const struct sfr_stream of = { .handle = stream };

	if (foreign(onload))
		return SFR_EFORK;
	return order(onload, &of) ? 0 : SFR_EAGAIN;
}

int sfr_onload_times(struct sfr_onload *onload, uint64_t *copying_ns, uint64_t *waited_ns)
{
	struct sfr__cuda_scope scope;
	bool known = true;

	*copying_ns = *waited_ns = 0;
	if (foreign(onload))
		return SFR_EFORK;
	if (!has_landed(onload))
		return SFR_EAGAIN;
	if (onload->waiting.begin && !onload->engine->closed) {
		known = sfr__cuda_enter(&scope, onload->lane->cu, onload->lane->context) !=
				CUDA_SUCCESS ||
			sfr__cuda_timer_read(onload->lane, &onload->waiting);
		sfr__cuda_leave(&scope);
	}
	*copying_ns = onload->copying.ns;
	*waited_ns = onload->waiting.ns;
	return known ? 0 : SFR_EAGAIN;
}

int sfr_onload_wait(struct sfr_onload *onload, uint64_t slice_ns)
{
	uint64_t deadline = sfr__deadline(slice_ns);
	int rc = 0;

	if (foreign(onload))
		return SFR_EFORK;
	if (has_landed(onload) || slice_ns == 0)
		return has_landed(onload) ? 0 : SFR_EAGAIN;
	sfr__lock(&onload->lane->mu);
	while (!has_landed(onload) && rc == 0)
		rc = sfr__cond_wait(&onload->cv, &onload->lane->mu, deadline);
	sfr__unlock(&onload->lane->mu);
	return has_landed(onload) ? 0 : rc;
}

void sfr_onload_error(struct sfr_onload *onload, struct sfr_err *out)
{
	*out = (struct sfr_err){ .index = -1 };
	if (foreign(onload))
		return;
	*out = onload->refused;
	if (!out->code && has_landed(onload))
		*out = onload->err;
}

void sfr_onload_put(struct sfr_onload *onload)
{
	if (!onload || foreign(onload))
		return;
	(void)sfr_onload_wait(onload, SFR_FOREVER); /* cannot return anything but 0 */
	/* waits for the lane's thread to leave landed() */
	if (onload->lane) {
		sfr__lock(&onload->lane->mu);
		sfr__unlock(&onload->lane->mu);
	}
	free_onload(onload);
}

int sfr_engine_has_pinned(struct sfr_engine *engine, uint64_t addr)
{
	bool pinned = false;

	if (engine->fork_generation != sfr_fork_generation() || !engine->pool)
		return 0;
	return in_pool(engine, addr) &&
	       sfr__pool_span(engine->pool, (const char *)(uintptr_t)addr, 1, &pinned) && pinned;
}
