/* Stages the sources of a save that are on devices: copies them to blocks in host memory.
 * stage/transfer.h explains the order of streams. Its events are E (the state at the call), C (the
 * captured bytes are copied) and S (all bytes are copied).
 *
 *   begin     records E, before anything else in the call
 *   capture   queues copies of captured sources, and samples of deferred ones; then records C, and
 *             makes the caller's stream wait for it
 *   launch    the lane's thread queues copies of deferred sources slowly, and then records S
 *   gate      the lane's thread queues the rest at once; the step's stream waits for S (gate.c)
 *
 * Headers and padding of a block are written at once. The device copies the tensor bytes, with one
 * queued copy for each tensor's share of a block. Copies are sent in portions, each followed by an
 * event. In the call, and while a gate waits, a portion has a few blocks. Otherwise a block
 * consists of several portions. When the copies of a block have completed, deferred bytes are
 * compared with the samples, and the block goes to the writers.
 *
 * Nothing here waits for the device, except with SFR_SAVE_CHECK_BYTES. The caller keeps the sources
 * alive until the ticket reports that they are copied. If a call to the driver fails, the save
 * fails, but copies that were queued before are still waited for. After a device has died, its
 * blocks are retired, because a copy may still write to them. */
#include <errno.h>
#include <string.h>

#include "sfr/crc.h"
#include "memory/pin.h"
#include "save/device_state.h"
#include "save/stream.h"

enum {
	MAX_BLOCKS_PER_PORTION = 4, /* in the call, and while a gate waits */
	POLL_NS = 100 * 1000,       /* how often the lane polls while it waits for a block */
};

static struct sfr__device_state *device_state_of(struct sfr__transfer *tr)
{
	return sfr__container(tr, struct sfr__device_state, transfer);
}

/* Makes the save fail if the transfer has an error. */
static void fail_save_on_error(struct sfr__device_state *dev)
{
	if (dev->transfer.err.code)
		sfr__ticket_fail(dev->ticket, &dev->transfer.err);
}

/* ---- completed copies ---------------------------------------------------------------- */

/* Compares the deferred bytes in a copied block with the samples, and with the CRCs if there are
 * any. Returns the index of a torn source, or -1. */
static int64_t find_torn_in_block(struct sfr__device_state *dev, const struct sfr__extent *extent,
				  uint32_t blk, const struct sfr__block *block)
{
	struct sfr_ticket *t = dev->ticket;
	struct sfr__seg_iter it;
	struct sfr__seg seg;
	int64_t torn_source = -1;

	sfr__seg_iter_init(&it, &t->plan.img, extent, blk);
	while (torn_source < 0 && sfr__seg_next(&it, &seg)) {
		const char *staged = block->mem + seg.pos;

		if (seg.kind != SFR__SEG_DATA)
			continue;
		torn_source = sfr__find_torn_source(t, &dev->transfer.samples, seg.entry, seg.off,
						    staged, seg.len);
		if (torn_source < 0 && t->staging.check_crcs)
			torn_source = sfr__find_torn_by_crc(t, seg.entry, seg.off, staged, seg.len);
	}
	return torn_source;
}

/* Called when a block is copied (ok), or when the device has died before (!ok). */
static void pass_on_or_retire_block(struct sfr__device_state *dev, const struct sfr__extent *extent,
				    uint32_t blk, struct sfr__block *block, bool ok)
{
	struct sfr_ticket *t = dev->ticket;
	struct sfr_err err = { .index = -1 };
	int64_t torn_source = -1;

	if (ok && extent == dev->deferred)
		torn_source = find_torn_in_block(dev, extent, blk, block);
	if (torn_source >= 0) {
		sfr__err_set_if_unset(&err, SFR_ETORN, SFR_PHASE_STAGE, "samples");
		err.index = torn_source;
	}
	sfr__lock(&t->engine->mu);
	if (torn_source >= 0)
		sfr__ticket_fail_locked(t, &err);
	if (ok)
		sfr__push_block_locked(t, extent, blk, block, false); /* without CRCs */
	else
		t->flight.blocks_held--;
	sfr__unlock(&t->engine->mu);
	/* The dead device may still write to the block. Retire it after the save's error is set: a
	 * thread that finds no usable block then also finds the error. */
	if (!ok)
		sfr__pool_retire(t->engine->pool, block);
}

/* Called when the copies of a portion have completed (ok), or when the device has died (!ok). The
 * portion's memory is a list of blocks. */
static void portion_done(struct sfr__transfer *tr, struct sfr__cuda_portion *portion, bool ok)
{
	struct sfr__device_state *dev = device_state_of(tr);
	struct sfr__block *block = portion->memory, *next;
	struct sfr_err err = { .index = -1 };
	uint32_t blk = portion->first_blk;

	if (!ok) {
		/* `why` needs no lock: it is constant once the lane is dead */
		sfr__err_set_if_unset(&err, -EIO, SFR_PHASE_STAGE, tr->lane->why);
		sfr__ticket_fail(dev->ticket, &err);
	}
	for (; block; block = next, blk++) {
		next = block->next;
		pass_on_or_retire_block(dev, portion->extent, blk, block, ok);
	}
}

/* Gives back the blocks of a portion that is not sent. */
static void drop_portion(struct sfr__transfer *tr, struct sfr__cuda_portion *portion)
{
	struct sfr__block *block = portion->memory, *next;

	for (; block; block = next) {
		next = block->next;
		sfr__ticket_put_block(device_state_of(tr)->ticket, block);
	}
}

static void transfer_over(struct sfr__transfer *tr)
{
	struct sfr_ticket *t = device_state_of(tr)->ticket;
	/* a sentence if the driver has refused batches of copies, else "" */
	char copies_note[sizeof(t->report.fallback[0])] = "";

	sfr__cuda_describe_refusals(tr->lane, copies_note, sizeof(copies_note));
	sfr__lock(&t->engine->mu);
	t->work.nr_transfers--;
	sfr__pin_get_fallback_note(sfr__pool_get_pin(t->engine->pool),
				   t->report.fallback[SFR_FALLBACK_PAGEABLE],
				   sizeof(t->report.fallback[0]));
	if (copies_note[0])
		memcpy(t->report.fallback[SFR_FALLBACK_COPIES], copies_note, sizeof(copies_note));
	sfr__ticket_set_copied_if_done_locked(t);
	sfr__ticket_advance_state_locked(t);
	sfr__unlock(&t->engine->mu);
}

static const struct sfr__transfer_ops ops = { .portion_done = portion_done,
					      .portion_dropped = drop_portion,
					      .over = transfer_over };

/* ---- blocks ------------------------------------------------------------------------------ */

/* Leases a block for the device to write to, and registers it with the driver if possible. Returns
 * as sfr__pool_get. The registration takes time, also in the call, but only at a block's first use.
 * A copy to an unregistered block would stop the calling thread until the copy has run. */
static int lease_and_pin_block(struct sfr__device_state *dev, const struct sfr__extent *extent,
			       uint32_t blk, uint64_t slice_ns, struct sfr__block **block)
{
	struct sfr_ticket *t = dev->ticket;
	struct sfr_engine *engine = t->engine;
	int rc = sfr__stream_wait_until_may_lease(t, extent, blk, slice_ns);

	if (rc == 0)
		rc = sfr__pool_get(engine->pool, t->seq, engine->opts.block_bytes, slice_ns, block);
	if (rc < 0)
		return rc;
	if (sfr__transfer_prepare_pin(&dev->transfer, engine->pool) && (*block)->region == NULL)
		sfr__pool_pin_blocks(engine->pool, block, 1);
	sfr__lock(&engine->mu);
	sfr__ticket_count_block_locked(t);
	sfr__unlock(&engine->mu);
	return 0;
}

/* Fills a leased block: writes headers and padding, and adds copies of tensor bytes to the next
 * portions. The block belongs to the portion with the last of these copies. */
static void fill_block(struct sfr__device_state *dev, const struct sfr__extent *extent,
		       uint32_t blk, struct sfr__block *block)
{
	struct sfr__transfer *tr = &dev->transfer;
	const bool pinned = sfr__pin_is_pinned(block);
	struct sfr_ticket *t = dev->ticket;
	struct sfr__block **end;
	struct sfr__seg_iter it;
	struct sfr__seg seg;
	unsigned nr_blocks = 1; /* in the portion, with this block */

	if (!sfr__transfer_get_or_make_portion(
		    tr)) { /* no memory for a portion: the error is in tr->err */
		sfr__ticket_put_block(t, block);
		return;
	}
	sfr__seg_iter_init(&it, &t->plan.img, extent, blk);
	while (sfr__seg_next(&it, &seg)) {
		char *dst = block->mem + seg.pos;
		const char *src;

		if (seg.kind != SFR__SEG_DATA) {
			sfr__stage_non_data(t, &seg, dst);
			continue;
		}
		/* Not read before the check, because padding has no entry. */
		src = t->plan.img.entries[seg.entry].src;
		sfr__transfer_add_copy(tr, (uint64_t)(uintptr_t)dst,
				       (uint64_t)(uintptr_t)src + seg.off, seg.len, pinned);
	}
	if (!tr->portion->memory) {
		tr->portion->extent = extent;
		tr->portion->first_blk = blk;
	}
	/* Append the block to the portion's list. */
	for (end = (struct sfr__block **)&tr->portion->memory; *end; end = &(*end)->next)
		nr_blocks++;
	*end = block;
	block->next = NULL;
	/* A throttled transfer sends small portions: at most one block's copies. */
	if (tr->throttled || nr_blocks == MAX_BLOCKS_PER_PORTION || tr->err.code)
		sfr__transfer_send_portion(tr);
}

/* Leases and fills block *blk of an extent, and increments *blk. Returns as sfr__pool_get. Sets
 * transfer.err for errors other than SFR_EAGAIN and SFR_EEXHAUSTED. */
static int lease_and_fill_next_block(struct sfr__device_state *dev,
				     const struct sfr__extent *extent, uint32_t *blk,
				     uint64_t slice_ns)
{
	struct sfr_ticket *t = dev->ticket;
	struct sfr__block *block;
	uint64_t start;
	int rc = lease_and_pin_block(dev, extent, *blk, 0, &block); /* 0: does not wait */

	if (rc == SFR_EAGAIN) {
		/* No block is free. Send the copies: blocks may become free only when they are
		 * done. */
		sfr__transfer_send_portion(&dev->transfer);
		start = sfr__now_ns();
		rc = lease_and_pin_block(dev, extent, *blk, slice_ns, &block);
		sfr__lock(&t->engine->mu);
		if (extent == dev->captured) /* block_wait_ns counts only waits in the call */
			t->report.block_wait_ns += sfr__now_ns() - start;
		sfr__unlock(&t->engine->mu);
	}
	if (rc == 0) {
		fill_block(dev, extent, *blk, block);
		++*blk;
	} else if (rc != SFR_EAGAIN && rc != SFR_EEXHAUSTED) {
		sfr__err_set_if_unset(&dev->transfer.err, rc, SFR_PHASE_STAGE, NULL);
	}
	return rc;
}

/* Computes check_crcs of the deferred sources at the call. Fetches the sources in pieces to the
 * host memory for samples (tr->store), and waits for each piece. An error is in tr->err. */
static void compute_check_crcs(struct sfr__device_state *dev)
{
	const struct sfr__extent *extent = dev->deferred;
	struct sfr__transfer *tr = &dev->transfer;
	struct sfr_ticket *t = dev->ticket;
	struct sfr__source_to_sample *sources = sfr__extent_list_sources(t, extent);
	/* false if there is no memory, also for `sources` */
	bool ok = sfr__transfer_get_sample_store(tr, sources, extent->nr_lane_entries);
	uint64_t len;

	sfr_sys.free(sources);
	for (uint32_t i = extent->first_entry; i < extent->first_entry + extent->nr_lane_entries;
	     i++) {
		const struct sfr__image_entry *entry = &t->plan.img.entries[i];

		for (uint64_t off = 0; ok && off < entry->nbytes; off += len) {
			const uint64_t left = entry->nbytes - off;

			len = left < tr->store.len ? left : tr->store.len;
			ok = sfr__transfer_fetch_to_store(tr, (uint64_t)(uintptr_t)entry->src + off,
							  (size_t)len);
			if (ok)
				t->staging.check_crcs[i] = sfr_crc32(t->staging.check_crcs[i],
								     tr->store.mem, (size_t)len);
		}
	}
}

/* ---- in the call --------------------------------------------------------------------------- */

static void stage_deferred(struct sfr__task *task);

int sfr__device_states_new(struct sfr_ticket *t)
{
	uint32_t max_devices = 0; /* the number of extents on devices */

	for (uint32_t i = 0; i < t->plan.img.nr_extents; i++)
		if (t->plan.img.extents[i].device != 0)
			max_devices++;
	if (max_devices == 0)
		return 0;
	t->staging.devices = sfr_sys.calloc(max_devices, sizeof(*t->staging.devices));
	if (!t->staging.devices)
		return -ENOMEM;
	for (uint32_t i = 0; i < t->plan.img.nr_extents; i++) {
		const struct sfr__extent *extent = &t->plan.img.extents[i];
		struct sfr__device_state *dev = t->staging.devices;

		if (extent->device == 0)
			continue; /* in host memory; n means device n - 1 */
		/* find the state of this device, or the first free one */
		while (dev < t->staging.devices + t->staging.nr_devices &&
		       dev->device != extent->device - 1)
			dev++;
		if (dev == t->staging.devices + t->staging.nr_devices)
			t->staging.nr_devices++;
		dev->transfer.ops = &ops;
		dev->task.run = stage_deferred;
		dev->ticket = t;
		dev->device = extent->device - 1;
		/* The device's first extent of each kind is enough: its nr_lane_blocks counts the
		 * blocks of later extents too. */
		if (extent->lane == SFR_CAPTURED && !dev->captured)
			dev->captured = extent;
		if (extent->lane != SFR_CAPTURED && !dev->deferred)
			dev->deferred = extent;
	}
	return 0;
}

int sfr_save_begin_transfers(struct sfr_ticket *t, const struct sfr_device_stream *streams,
			     uint32_t nr_streams)
{
	struct sfr_err err = { .index = -1 };
	uint32_t nr_begun = 0; /* transfers */

	if (sfr__ticket_is_inherited(t))
		return SFR_EFORK;
	for (uint32_t i = 0; i < t->staging.nr_devices; i++) {
		struct sfr__transfer *tr = &t->staging.devices[i].transfer;
		const struct sfr_device_stream *stream =
			sfr__find_stream(streams, nr_streams, t->staging.devices[i].device);
		int rc;

		if (!stream)
			return SFR_ESTATE;
		rc = sfr__transfer_begin_after_stream(tr, &t->engine->cuda_lanes,
						      t->staging.devices[i].device, SFR__CUDA_OUT,
						      (CUstream)(uintptr_t)stream->handle);
		if (rc < 0)
			return rc;
		sfr__transfer_leave_context(tr);
		if (!err.code)
			err = tr->err; /* the first error counts */
		/* without a lane the device cannot be used, and tr->err says why */
		if (tr->lane != NULL)
			nr_begun++;
	}
	sfr__lock(&t->engine->mu);
	t->work.nr_transfers = t->work.nr_queueing = nr_begun;
	if (err.code)
		sfr__ticket_fail_locked(t, &err); /* the state stays NEW until admission */
	sfr__unlock(&t->engine->mu);
	return 0;
}

/* Queues copies of one device's captured sources, then of its samples. Then records the event C,
 * for which the caller's stream waits. After SFR_EAGAIN or SFR_EEXHAUSTED it can be called again,
 * and resumes. Otherwise returns 0: any other error is recorded in the ticket. */
static int capture_on_device(struct sfr__device_state *dev, uint64_t deadline)
{
	struct sfr__transfer *tr = &dev->transfer;
	const struct sfr__extent *extent = dev->captured;
	struct sfr_ticket *t = dev->ticket;
	int rc = 0;

	while (extent && dev->capture_blk < extent->nr_lane_blocks) {
		if (rc != 0 || tr->err.code || sfr__ticket_is_failing(t))
			break;
		rc = lease_and_fill_next_block(dev, extent, &dev->capture_blk,
					       sfr__time_left(deadline));
	}
	sfr__transfer_send_portion(tr);
	fail_save_on_error(dev);
	if (rc == SFR_EAGAIN || rc == SFR_EEXHAUSTED)
		return rc;
	if (dev->samples_taken || sfr__ticket_is_failing(t))
		return 0;
	dev->samples_taken = true;
	if (dev->deferred && t->staging.check_crcs)
		compute_check_crcs(dev);
	if (dev->deferred && !tr->err.code) /* the sum is a seed: other lines each time */
		sfr__transfer_queue_sample_copies(tr, sfr__extent_list_sources(t, dev->deferred),
						  dev->deferred->nr_lane_entries,
						  t->seq + t->report.created_ns);
	sfr__transfer_make_stream_wait(tr);
	sfr__transfer_send_portion(tr); /* the samples */
	fail_save_on_error(dev);
	return 0;
}

int sfr__device_states_capture(struct sfr_ticket *t, uint64_t slice_ns)
{
	uint64_t deadline = sfr__deadline(slice_ns);

	for (uint32_t i = 0; i < t->staging.nr_devices && !sfr__ticket_is_failing(t); i++) {
		struct sfr__device_state *dev = &t->staging.devices[i];
		int rc = 0;

		if (sfr__transfer_enter_context(&dev->transfer)) {
			rc = capture_on_device(dev, deadline);
			sfr__transfer_leave_context(&dev->transfer);
		}
		fail_save_on_error(dev);
		if (rc < 0)
			return rc;
	}
	return 0;
}

/* ---- after the call ----------------------------------------------------------------------- */

/* Called when nothing more will be queued on the device. The ticket may be freed afterwards. */
static void end_queueing(struct sfr__device_state *dev)
{
	struct sfr_engine *engine = dev->ticket->engine;

	sfr__lock(&engine->mu);
	dev->ticket->work.nr_queueing--;
	pthread_cond_broadcast(&engine->cv_state); /* the gate waits for nr_queueing == 0 */
	sfr__unlock(&engine->mu);
	sfr__transfer_end_queueing(&dev->transfer);
}

void sfr__device_states_queue_deferred(struct sfr_ticket *t)
{
	bool is_failing = sfr__ticket_is_failing(t);

	for (uint32_t i = 0; i < t->staging.nr_devices; i++) {
		struct sfr__device_state *dev = &t->staging.devices[i];

		if (!dev->transfer.lane)
			continue; /* sfr_save_begin_transfers has begun no transfer */
		if (!is_failing && dev->deferred && !sfr__cuda_is_dead(dev->transfer.lane))
			sfr__cuda_push_task(dev->transfer.lane, &dev->task);
		else
			end_queueing(dev);
	}
}

/* Queues the copies of deferred sources. Runs on the lane's thread. Has only few copies in flight
 * until a thread waits for them. */
static void stage_deferred(struct sfr__task *task)
{
	struct sfr__device_state *dev = sfr__container(task, struct sfr__device_state, task);
	struct sfr__transfer *tr = &dev->transfer;
	struct sfr__cuda_lane *lane = tr->lane;
	struct sfr_ticket *t = dev->ticket;
	uint32_t blk = 0;
	int rc = 0;

	tr->seq = t->seq;
	while (blk < dev->deferred->nr_lane_blocks) {
		const bool failed = rc != 0 && rc != SFR_EAGAIN;

		if (failed || sfr__ticket_is_failing(t) || tr->err.code)
			break;
		tr->throttled = !sfr__cuda_is_rushed(lane, t->seq);
		if (tr->throttled)
			sfr__cuda_wait_while_throttled(
				lane, t->seq); /* waits until few copies are in flight */
		else
			sfr__cuda_poll(lane); /* frees blocks of completed copies */
		/* The wait for a block is short, because this thread must poll: that makes the
		 * blocks of completed copies free. */
		if (!sfr__transfer_fail_if_device_dead(tr))
			rc = lease_and_fill_next_block(dev, dev->deferred, &blk, POLL_NS);
	}
	if (rc == SFR_EEXHAUSTED) /* unlike in the call, nobody can try again: the save fails */
		sfr__err_set_if_unset(&tr->err, rc, SFR_PHASE_STAGE, NULL);
	sfr__transfer_send_and_record_staged(tr); /* records S, before the gate uses it */
	fail_save_on_error(dev);
	end_queueing(dev);
}
