/* Stages the sources of a save that are on devices: has them copied to blocks in host memory.
 * stage/transfer.h explains the order of streams. Its events are E (the state at the call), C (the
 * captured bytes are copied) and S (all bytes are copied).
 *
 *   begin     the transfer begins (E), before anything else of the call
 *   capture   captured sources and samples of deferred ones are queued; the caller's stream waits
 *             for them (C), and for nothing more
 *   launch    the lane's thread queues deferred sources slowly, then S
 *   gate      everything left is queued, and the stream of the step waits for S (gate.c)
 *
 * Headers and padding of a block are written at once. The device copies the tensor bytes, with one
 * queued copy for each tensor's share of a block. Copies are sent in portions, each followed by an
 * event. In the call, and while a gate waits, a portion holds a few blocks; otherwise a block is
 * several portions. When the copies of a block have completed, deferred bytes are compared with the
 * samples, and the block goes to the writers.
 *
 * Nothing here waits for the device, except with SFR_SAVE_CHECK_BYTES. The caller holds the sources
 * until the ticket reports that they are copied. If a call to the device fails, the save fails;
 * copies that were queued before are still watched. After a device has died, the contents of its
 * blocks are unknown: they are retired. */
#include <errno.h>
#include <string.h>

#include "sfr/crc.h"
#include "memory/pin.h"
#include "save/device_state.h"
#include "save/stream.h"

enum { BLOCKS_PER_PORTION = 4 }; /* in the call, and while a gate waits */

static struct sfr__device_state *state_of(struct sfr__transfer *tr)
{
	return sfr__container(tr, struct sfr__device_state, transfer);
}

static void report_error(struct sfr__device_state *dev)
{
	if (dev->transfer.err.code)
		sfr__ticket_fail(dev->ticket, &dev->transfer.err);
}

/* ---- copies that have completed ------------------------------------------------------ */

/* Returns the index of a torn source, or -1. */
static int64_t check_block(struct sfr__device_state *dev, const struct sfr__extent *extent,
			   uint32_t blk, const struct sfr__block *block)
{
	struct sfr_ticket *t = dev->ticket;
	struct sfr__seg_iter it;
	struct sfr__seg seg;
	int64_t torn = -1;

	sfr__seg_iter_init(&it, &t->plan.img, extent, blk);
	while (torn < 0 && sfr__seg_next(&it, &seg)) {
		const char *staged = block->mem + seg.pos;

		if (seg.kind != SFR__SEG_DATA)
			continue;
		torn = sfr__check_copied(t, &dev->transfer.samples, seg.entry, seg.off, staged,
					 seg.len);
		if (torn < 0 && t->staging.sums)
			torn = sfr__check_sum(t, seg.entry, seg.off, staged, seg.len);
	}
	return torn;
}

/* Called for a copied block, or if !ok for a block under which the device has died. */
static void end_block(struct sfr__device_state *dev, const struct sfr__extent *extent, uint32_t blk,
		      struct sfr__block *block, bool ok)
{
	struct sfr_ticket *t = dev->ticket;
	struct sfr_err err = { .index = -1 };
	int64_t torn = ok && extent == dev->deferred ? check_block(dev, extent, blk, block) : -1;

	if (torn >= 0) {
		sfr__err_set(&err, SFR_ETORN, SFR_PHASE_STAGE, "samples");
		err.index = torn;
	}
	sfr__lock(&t->engine->mu);
	if (torn >= 0)
		sfr__ticket_fail_locked(t, &err);
	if (ok)
		sfr__push_block_locked(t, extent, blk, block, false);
	else
		t->flight.blocks_held--;
	sfr__unlock(&t->engine->mu);
	/* Retired last: a thread that finds no block left then looks for the save's error. */
	if (!ok)
		sfr__pool_retire(t->engine->pool, block);
}

/* The portion's memory is a list of blocks. If !ok, the device has died. */
static void portion_done(struct sfr__transfer *tr, struct sfr__cuda_portion *portion, bool ok)
{
	struct sfr__device_state *dev = state_of(tr);
	struct sfr__block *block = portion->memory, *next;
	struct sfr_err err = { .index = -1 };
	uint32_t blk = portion->first_blk;

	if (!ok) {
		/* no lock: `why` is constant once the lane is dead */
		sfr__err_set(&err, -EIO, SFR_PHASE_STAGE, tr->lane->why);
		sfr__ticket_fail(dev->ticket, &err);
	}
	for (; block; block = next, blk++) {
		next = block->next;
		end_block(dev, portion->extent, blk, block, ok);
	}
}

static void put_unused(struct sfr__transfer *tr, struct sfr__cuda_portion *portion)
{
	struct sfr__block *block = portion->memory, *next;

	for (; block; block = next) {
		next = block->next;
		sfr__ticket_put_block(state_of(tr)->ticket, block);
	}
}

static void transfer_over(struct sfr__transfer *tr)
{
	struct sfr_ticket *t = state_of(tr)->ticket;
	char note[sizeof(t->report.fallback[0])] = "";

	sfr__cuda_copies_note(tr->lane, note, sizeof(note));
	sfr__lock(&t->engine->mu);
	t->sharing.nr_transfers--;
	sfr__pin_note(sfr__pool_pin(t->engine->pool), t->report.fallback[SFR_FALLBACK_PAGEABLE],
		      sizeof(t->report.fallback[0]));
	if (note[0])
		memcpy(t->report.fallback[SFR_FALLBACK_COPIES], note, sizeof(note));
	sfr__ticket_copies_ended_locked(t);
	sfr__ticket_step_locked(t);
	sfr__unlock(&t->engine->mu);
}

static const struct sfr__transfer_ops ops = { .portion_done = portion_done,
					      .unused = put_unused,
					      .over = transfer_over };

/* ---- blocks ------------------------------------------------------------------------------ */

/* Leases a block for the device to write to, and registers it with the driver. Fails as
 * sfr__pool_get. Even in the call it waits for the registration, once for each block: the driver
 * returns from copies to unregistered memory only when they have run. */
static int lease_block(struct sfr__device_state *dev, const struct sfr__extent *extent,
		       uint32_t blk, uint64_t slice_ns, struct sfr__block **block)
{
	struct sfr_ticket *t = dev->ticket;
	struct sfr_engine *engine = t->engine;
	int rc = sfr__stream_await_lease(t, extent, blk, slice_ns);

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
 * portions. The portion with the last of these copies owns the block. */
static void fill_block(struct sfr__device_state *dev, const struct sfr__extent *extent,
		       uint32_t blk, struct sfr__block *block)
{
	struct sfr__transfer *tr = &dev->transfer;
	const bool pinned = sfr__pin_is_pinned(block);
	struct sfr_ticket *t = dev->ticket;
	struct sfr__block **end;
	struct sfr__seg_iter it;
	struct sfr__seg seg;
	unsigned nr_blocks = 1; /* of the portion, with this block */

	if (!sfr__transfer_portion(tr)) { /* no memory; the transfer keeps the error */
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
		src = t->plan.img.entries[seg.entry].src; /* padding has no entry */
		sfr__transfer_add(tr, (uint64_t)(uintptr_t)dst, (uint64_t)(uintptr_t)src + seg.off,
				  seg.len, pinned);
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
	if (tr->throttled || nr_blocks == BLOCKS_PER_PORTION || tr->err.code)
		sfr__transfer_send(tr);
}

/* Leases and fills block *blk of an extent, and advances *blk. Fails as sfr__pool_get; the transfer
 * keeps errors other than SFR_EAGAIN and SFR_EEXHAUSTED. */
static int fill_next(struct sfr__device_state *dev, const struct sfr__extent *extent, uint32_t *blk,
		     uint64_t slice_ns)
{
	struct sfr_ticket *t = dev->ticket;
	struct sfr__block *block;
	uint64_t start;
	int rc = lease_block(dev, extent, *blk, 0, &block);

	if (rc == SFR_EAGAIN) {
		/* a block may become free only when these copies have completed */
		sfr__transfer_send(&dev->transfer);
		start = sfr__now_ns();
		rc = lease_block(dev, extent, *blk, slice_ns, &block);
		sfr__lock(&t->engine->mu);
		if (extent == dev->captured) /* the report has only waits in the call */
			t->report.block_wait_ns += sfr__now_ns() - start;
		sfr__unlock(&t->engine->mu);
	}
	if (rc == 0) {
		fill_block(dev, extent, *blk, block);
		++*blk;
	} else if (rc != SFR_EAGAIN && rc != SFR_EEXHAUSTED) {
		sfr__err_set(&dev->transfer.err, rc, SFR_PHASE_STAGE, NULL);
	}
	return rc;
}

/* Fetches the deferred sources to the memory for samples, piece by piece, and waits for them. */
static void sum_deferred(struct sfr__device_state *dev)
{
	const struct sfr__extent *extent = dev->deferred;
	struct sfr__transfer *tr = &dev->transfer;
	struct sfr_ticket *t = dev->ticket;
	struct sfr__sampled *sources = sfr__extent_sources(t, extent);
	bool ok = sfr__transfer_get_store(tr, sources, extent->all_entries);

	sfr_sys.free(sources);
	for (uint32_t i = extent->first_entry; i < extent->first_entry + extent->all_entries; i++) {
		const struct sfr__entry *entry = &t->plan.img.entries[i];

		for (uint64_t off = 0, len; off < entry->nbytes && ok; off += len) {
			const uint64_t left = entry->nbytes - off;

			len = left < tr->store.len ? left : tr->store.len;
			ok = sfr__transfer_fetch(tr, (uint64_t)(uintptr_t)entry->src + off,
						 (size_t)len);
			if (ok)
				t->staging.sums[i] =
					sfr_crc32(t->staging.sums[i], tr->store.mem, (size_t)len);
		}
	}
}

/* ---- in the call --------------------------------------------------------------------------- */

static void stage_deferred(struct sfr__task *task);

int sfr__device_states_new(struct sfr_ticket *t)
{
	uint32_t most = 0; /* extents on devices, so at least the number of devices */

	for (uint32_t i = 0; i < t->plan.img.nr_extents; i++)
		if (t->plan.img.extents[i].device != 0)
			most++;
	if (most == 0)
		return 0;
	t->staging.devices = sfr_sys.calloc(most, sizeof(*t->staging.devices));
	if (!t->staging.devices)
		return -ENOMEM;
	for (uint32_t i = 0; i < t->plan.img.nr_extents; i++) {
		const struct sfr__extent *extent = &t->plan.img.extents[i];
		struct sfr__device_state *dev = t->staging.devices;

		if (extent->device == 0)
			continue;
		/* the state of this device, or the next unused one */
		while (dev < t->staging.devices + t->staging.nr_devices &&
		       dev->device != extent->device - 1)
			dev++;
		if (dev == t->staging.devices + t->staging.nr_devices)
			t->staging.nr_devices++;
		dev->transfer.ops = &ops;
		dev->task.run = stage_deferred;
		dev->ticket = t;
		dev->device = extent->device - 1;
		/* The first extent of each kind stands for all: its all_blocks counts the blocks of
		 * later extents too. */
		if (extent->lane == SFR_CAPTURED && !dev->captured)
			dev->captured = extent;
		if (extent->lane != SFR_CAPTURED && !dev->deferred)
			dev->deferred = extent;
	}
	return 0;
}

int sfr_save_begin(struct sfr_ticket *t, const struct sfr_stream *streams, uint32_t nr_streams)
{
	struct sfr_err err = { .index = -1 };
	uint32_t nr_begun = 0;

	if (sfr__ticket_is_foreign(t))
		return SFR_EFORK;
	for (uint32_t i = 0; i < t->staging.nr_devices; i++) {
		struct sfr__transfer *tr = &t->staging.devices[i].transfer;
		const struct sfr_stream *stream =
			sfr__stream_of(streams, nr_streams, t->staging.devices[i].device);
		int rc;

		if (!stream)
			return SFR_ESTATE;
		rc = sfr__transfer_begin(tr, &t->engine->cuda_lanes, t->staging.devices[i].device,
					 SFR__CUDA_OUT, (CUstream)(uintptr_t)stream->handle);
		if (rc < 0)
			return rc;
		sfr__transfer_leave(tr);
		if (!err.code)
			err = tr->err;
		if (tr->lane != NULL)
			nr_begun++;
	}
	sfr__lock(&t->engine->mu);
	t->sharing.nr_transfers = t->sharing.nr_queueing = nr_begun;
	if (err.code)
		sfr__ticket_fail_locked(t, &err); /* takes effect at admission */
	sfr__unlock(&t->engine->mu);
	return 0;
}

/* Queues one device's captured sources and then its samples, and records C. Resumes after
 * SFR_EAGAIN or SFR_EEXHAUSTED. Otherwise returns 0: the ticket keeps any other failure. */
static int capture_on_device(struct sfr__device_state *dev, uint64_t deadline)
{
	struct sfr__transfer *tr = &dev->transfer;
	const struct sfr__extent *extent = dev->captured;
	struct sfr_ticket *t = dev->ticket;
	int rc = 0;

	while (extent && dev->capture_blk < extent->all_blocks && rc == 0 && !tr->err.code &&
	       !sfr__ticket_failing(t))
		rc = fill_next(dev, extent, &dev->capture_blk, sfr__time_left(deadline));
	sfr__transfer_send(tr);
	report_error(dev);
	if (rc == SFR_EAGAIN || rc == SFR_EEXHAUSTED)
		return rc;
	if (dev->samples_taken || sfr__ticket_failing(t))
		return 0;
	dev->samples_taken = true;
	if (dev->deferred && t->staging.sums)
		sum_deferred(dev);
	if (dev->deferred && !tr->err.code)
		sfr__transfer_sample(tr, sfr__extent_sources(t, dev->deferred),
				     dev->deferred->all_entries, t->seq + t->report.created_ns);
	sfr__transfer_mark_captured(tr);
	sfr__transfer_send(tr); /* the samples */
	report_error(dev);
	return 0;
}

int sfr__device_states_capture(struct sfr_ticket *t, uint64_t slice_ns)
{
	uint64_t deadline = sfr__deadline(slice_ns);

	for (uint32_t i = 0; i < t->staging.nr_devices && !sfr__ticket_failing(t); i++) {
		struct sfr__device_state *dev = &t->staging.devices[i];
		int rc = 0;

		if (sfr__transfer_enter(&dev->transfer)) {
			rc = capture_on_device(dev, deadline);
			sfr__transfer_leave(&dev->transfer);
		}
		report_error(dev);
		if (rc < 0)
			return rc;
	}
	return 0;
}

/* ---- after the call ----------------------------------------------------------------------- */

/* Nothing more will be queued on the device. The ticket may be freed afterwards. */
static void end_queueing(struct sfr__device_state *dev)
{
	struct sfr_engine *engine = dev->ticket->engine;

	sfr__lock(&engine->mu);
	dev->ticket->sharing.nr_queueing--;
	pthread_cond_broadcast(&engine->cv_state); /* the gate may now use S */
	sfr__unlock(&engine->mu);
	sfr__transfer_end(&dev->transfer);
}

void sfr__device_states_launch(struct sfr_ticket *t)
{
	bool go = !sfr__ticket_failing(t);

	for (uint32_t i = 0; i < t->staging.nr_devices; i++) {
		struct sfr__device_state *dev = &t->staging.devices[i];

		if (!dev->transfer.lane)
			continue;
		if (go && dev->deferred && !sfr__cuda_is_dead(dev->transfer.lane))
			sfr__cuda_push_task(dev->transfer.lane, &dev->task);
		else
			end_queueing(dev);
	}
}

/* Queues the deferred blocks, on the lane's thread: few at a time until a thread waits for them. */
static void stage_deferred(struct sfr__task *task)
{
	struct sfr__device_state *dev = sfr__container(task, struct sfr__device_state, task);
	struct sfr__transfer *tr = &dev->transfer;
	struct sfr__cuda_lane *lane = tr->lane;
	struct sfr_ticket *t = dev->ticket;
	uint32_t blk = 0;
	int rc = 0;

	tr->seq = t->seq;
	while (blk < dev->deferred->all_blocks && (rc == 0 || rc == SFR_EAGAIN) &&
	       !sfr__ticket_failing(t) && !tr->err.code) {
		tr->throttled = !sfr__cuda_is_rushed(lane, t->seq);
		if (tr->throttled)
			sfr__cuda_throttle(lane, t->seq);
		else
			sfr__cuda_poll(lane);
		/* If the block to wait for is in flight, only this thread can see that its copies
		 * have completed. So it waits at most 100 us, and then polls again. */
		if (!sfr__transfer_died(tr))
			rc = fill_next(dev, dev->deferred, &blk, 100 * 1000);
	}
	if (rc == SFR_EEXHAUSTED) /* nobody can try again, so the save fails */
		sfr__err_set(&tr->err, rc, SFR_PHASE_STAGE, NULL);
	sfr__transfer_mark_staged(tr); /* records S, before the gate uses it */
	report_error(dev);
	end_queueing(dev);
}
