/* Copies a snapshot's sources on devices into the leased memory. All copies are queued in the call.
 * stage/transfer.h explains the events C and S.
 *
 * The driver gets all captured sources in one call, and all deferred ones in another. A save queues
 * small portions instead, so that copies of other streams need not wait long. Here that would not
 * help, because the caller of a snapshot mostly waits for it at once.
 *
 * With SFR_SNAPSHOT_LEAVES (is_offload) everything is captured. But the caller's stream does not
 * wait for the copies, so the event C is not recorded. Before a stream writes to the sources again,
 * it has to wait for the event S, which is recorded after all copies. */
#include <errno.h>
#include <stddef.h>

#include "memory/pin.h"
#include "snapshot/snapshot.h"
#include "stage/transfer.h"

/* A snapshot's copies from one device. */
struct sfr__snapshot_device_state {
	struct sfr__transfer transfer;
	struct sfr_snapshot *snapshot; /* constant */
	uint32_t device;               /* constant; the driver's number, from 0 on */
	CUstream stream;               /* the caller's current stream */
	int64_t torn_source;           /* index of a torn source, or -1; used by the lane only */
};

static struct sfr__snapshot_device_state *snapshot_device_of(struct sfr__transfer *tr)
{
	return sfr__container(tr, struct sfr__snapshot_device_state, transfer);
}

/* ---- start ------------------------------------------------------------------------- */

/* Adds the copies of the device's captured sources, or of its deferred ones. */
static void add_source_copies(struct sfr__snapshot_device_state *dev, bool captured)
{
	const struct sfr_snapshot *s = dev->snapshot;

	for (uint32_t i = 0; i < s->nr_sources; i++) {
		const struct sfr_source *source = &s->sources[i];

		/* source->device is 0 for host memory, n for device n - 1 */
		if (source->device == dev->device + 1 && (source->lane == SFR_CAPTURED) == captured)
			sfr__transfer_add_pooled_copy(&dev->transfer, s->engine->pool,
						      (uint64_t)(uintptr_t)s->copies[i],
						      source->addr, source->nbytes);
	}
}

/* Queues the copies in this order: captured sources, samples, deferred sources. */
static void queue_copies(struct sfr__snapshot_device_state *dev)
{
	struct sfr__transfer *tr = &dev->transfer;
	struct sfr_snapshot *s = dev->snapshot;
	struct sfr__source_to_sample *sampled; /* the deferred sources; NULL: no memory */
	uint32_t nr_sampled;

	if (sfr__transfer_prepare_pin(tr, s->engine->pool))
		sfr__lot_pin(s);
	tr->timed = s->is_offload; /* for sfr_snapshot_copying_ns */
	add_source_copies(dev, true);
	sampled = sfr__snapshot_list_deferred_sources(s, dev->device + 1, &nr_sampled);
	/* Frees `sampled`. The time is the seed that decides which cache lines are sampled. */
	sfr__transfer_queue_sample_copies(tr, sampled, nr_sampled, sfr__now_ns());
	if (!s->is_offload)
		sfr__transfer_make_stream_wait(tr);
	add_source_copies(dev, false);
}

/* Queues all copies of one device. Returns as sfr__snapshot_start_device_copies. */
static int start_device_copies(struct sfr__snapshot_device_state *dev, struct sfr_err *err)
{
	struct sfr__transfer *tr = &dev->transfer;
	struct sfr_snapshot *s = dev->snapshot;
	int rc = sfr__transfer_begin_after_stream(tr, &s->engine->cuda_lanes, dev->device,
						  SFR__CUDA_OUT, dev->stream);

	if (tr->lane) { /* else nothing was begun: `rc` or tr->err says why */
		sfr__snapshot_note_copy_begin(s);
		if (!tr->err.code)
			queue_copies(dev);
		if (!tr->err.code)
			sfr__transfer_send_and_record_staged(tr);
		sfr__transfer_end_queueing(tr);
	}
	*err = tr->err;
	return rc;
}

int sfr__snapshot_start_device_copies(struct sfr_snapshot *s, struct sfr_err *err)
{
	int rc = 0;

	for (uint32_t i = 0; i < s->nr_devices && !err->code && rc == 0; i++)
		rc = start_device_copies(&s->devices[i], err);
	return rc;
}

/* ---- after the call -------------------------------------------------------------------- */

/* Called when the copies have completed (ok) or the device has died (!ok). */
static void portion_done(struct sfr__transfer *tr, struct sfr__cuda_portion *portion, bool ok)
{
	struct sfr__snapshot_device_state *dev = snapshot_device_of(tr);

	(void)portion; /* a snapshot's transfer has only one */
	if (ok)
		dev->torn_source = sfr__snapshot_find_torn_source(dev->snapshot, dev->device + 1,
								  &tr->samples);
	else
		sfr__snapshot_retire_memory(dev->snapshot);
}

static void transfer_over(struct sfr__transfer *tr)
{
	struct sfr__snapshot_device_state *dev = snapshot_device_of(tr);
	struct sfr_snapshot *s = dev->snapshot;
	struct sfr_err err = { .index = -1 };

	if (tr->device_died)
		/* `why` needs no lock: it is constant once the lane is dead */
		sfr__err_set_if_unset(&err, -EIO, SFR_PHASE_STAGE, tr->lane->why);
	atomic_fetch_add_explicit(&s->copying_ns, tr->copying.ns, memory_order_relaxed);
	sfr__snapshot_note_copy_end(s, dev->torn_source, &err); /* may free the snapshot */
}

static const struct sfr__transfer_ops ops = { .portion_done = portion_done, .over = transfer_over };

bool sfr__snapshot_gate_streams(struct sfr_snapshot *s, const struct sfr_device_stream *streams,
				uint32_t nr)
{
	bool all_will_wait = true; /* every stream waits for the copies of its device */

	for (uint32_t i = 0; i < s->nr_devices; i++)
		if (!sfr__transfer_gate_stream(&s->devices[i].transfer,
					       sfr__find_stream(streams, nr, s->devices[i].device)))
			all_will_wait = false;
	return all_will_wait;
}

void sfr__snapshot_pin(struct sfr_snapshot *s)
{
	struct sfr__pin *pin = sfr__pool_get_pin(s->engine->pool);
	struct sfr__cuda_scope scope;

	if (!sfr__pin_is_on(pin))
		return;
	if (sfr__cuda_enter(&scope, pin->cu, pin->context) == CUDA_SUCCESS)
		sfr__lot_pin(s);
	sfr__cuda_leave(&scope); /* needed after a failure, too */
}

int sfr__snapshot_devices_new(struct sfr_snapshot *s)
{
	uint32_t nr = 0;

	for (uint32_t i = 0; i < s->nr_sources; i++) {
		uint32_t device = s->sources[i].device, k = 0;

		if (device == 0 || s->sources[i].nbytes == 0)
			continue; /* in host memory (0; n is device n - 1), or empty */
		while (k < nr && s->devices[k].device != device - 1)
			k++;
		if (k < nr)
			continue; /* the device is in the array already */
		struct sfr__snapshot_device_state *more =
			sfr_sys.realloc(s->devices, (nr + 1) * sizeof(*more));
		if (!more)
			return -ENOMEM;
		s->devices = more;
		s->devices[nr++] = (struct sfr__snapshot_device_state){
			.transfer.ops = &ops, .snapshot = s, .device = device - 1, .torn_source = -1
		};
	}
	s->nr_devices = nr;
	return 0;
}

int sfr__snapshot_devices_set_streams(struct sfr_snapshot *s,
				      const struct sfr_device_stream *streams, uint32_t nr)
{
	for (uint32_t i = 0; i < s->nr_devices; i++) {
		const struct sfr_device_stream *stream =
			sfr__find_stream(streams, nr, s->devices[i].device);

		if (!stream)
			return SFR_ESTATE;
		s->devices[i].stream = (CUstream)(uintptr_t)stream->handle;
	}
	return 0;
}
