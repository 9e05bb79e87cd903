/* Queues a save's copies from a device: blocks, samples and checksums.
 *
 * Headers and padding of a block are written at once. Its tensor bytes are copied by the device,
 * with one queued copy for each extent of a tensor. In the call, and while a gate waits, a transfer
 * holds a few blocks: one or two batches of copies and one event. Otherwise a transfer holds a few
 * MiB, and few are in flight. The transfer that owns the blocks is allocated before anything is
 * queued, so that no copy can be in flight without a transfer that reports its end.
 *
 * Samples are gathered from each deferred source as rows, directly into the array that the staged
 * bytes are compared with later.
 *
 * If a call to the device fails, the save fails; copies that were queued before are still
 * watched. */
#include <errno.h>

#include "sfr/crc.h"
#include "save/parts.h"

enum { BLOCKS_A_PIECE = 4 };

/* ---- transfers --------------------------------------------------------------------- */

void sfr__cuda_fill_begin(struct sfr__cuda_fill *fill, struct sfr__cuda_part *part,
			  const struct sfr__run *run)
{
	*fill = (struct sfr__cuda_fill){ .part = part, .run = run, .err.index = -1 };
}

/* Sends a transfer after the queued copies. The caller is between turn_begin and turn_end. */
static void fly(struct sfr__cuda_part *part, struct sfr__cuda_piece *piece, struct sfr_err *err)
{
	piece->landing = &part->landing;
	sfr__lock(&part->lane->mu);
	part->nr_out++;
	sfr__unlock(&part->lane->mu);
	sfr__cuda_fly(part->lane, piece, err);
}

/* Queues the copies in the arrays. The caller is between turn_begin and turn_end. */
static void queue(struct sfr__cuda_fill *fill)
{
	if (fill->nr > 0 && !fill->err.code && !sfr__cuda_is_dead(fill->part->lane)) {
		fill->touched = true; /* a failed call may have queued some copies */
		sfr__cuda_copy(fill->part->lane, fill->dst, fill->src, fill->len, fill->nr,
			       fill->pinned, &fill->err);
	}
	fill->nr = 0;
}

/* Queues the copies in the arrays, with a transfer of their own if wanted and if there is memory
 * for it. Without one, the event of the transfer that owns the blocks covers these copies too. */
static void send(struct sfr__cuda_fill *fill, bool with_event)
{
	struct sfr__cuda_lane *lane = fill->part->lane;
	struct sfr__cuda_piece *piece = with_event ? sfr__cuda_piece_get(lane) : NULL;

	sfr__cuda_turn_begin(lane);
	queue(fill);
	if (piece) {
		fly(fill->part, piece, &fill->err);
		fill->bytes = 0;
	}
	sfr__cuda_turn_end(lane);
}

/* Returns blocks of which nothing was queued on a dead device: no copy can be running. */
static void give_back(struct sfr__cuda_fill *fill)
{
	struct sfr__block *block = fill->piece->blocks, *next;

	for (; block; block = next) {
		next = block->next;
		sfr__ticket_put_block(fill->part->ticket, block);
	}
	sfr__cuda_piece_put(fill->part->lane, fill->piece);
}

/* Sends the transfer that owns the blocks. */
static void send_blocks(struct sfr__cuda_fill *fill)
{
	struct sfr__cuda_lane *lane = fill->part->lane;
	bool unused;

	sfr__cuda_turn_begin(lane);
	queue(fill);
	unused = !fill->touched && sfr__cuda_refuses(lane, &fill->err);
	if (!unused)
		fly(fill->part, fill->piece, &fill->err);
	sfr__cuda_turn_end(lane);
	if (unused)
		give_back(fill);
	fill->piece = NULL;
	fill->last = NULL;
	fill->nr_blocks = 0;
	fill->touched = false;
	fill->bytes = 0;
}

/* ---- one block ------------------------------------------------------------------------ */

static void add_copy(struct sfr__cuda_fill *fill, char *dst, const char *src, size_t len)
{
	if (fill->nr == sizeof(fill->len) / sizeof(fill->len[0]))
		send(fill, false);
	fill->dst[fill->nr] = (CUdeviceptr)(uintptr_t)dst;
	fill->src[fill->nr] = (CUdeviceptr)(uintptr_t)src;
	fill->len[fill->nr++] = len;
	fill->bytes += len;
	if (fill->slowly && fill->bytes >= sfr__cuda_piece_bytes) {
		send(fill, true);
		sfr__cuda_throttle(fill->part->lane, fill->part->ticket->seq);
	}
}

/* Queues an extent of a tensor: as one copy, or as several if transfers must be small. */
static void add_extent(struct sfr__cuda_fill *fill, char *dst, const char *src, size_t nbytes)
{
	for (size_t done = 0, len; done < nbytes && !fill->err.code; done += len) {
		uint64_t room = sfr__cuda_piece_bytes > fill->bytes ?
					sfr__cuda_piece_bytes - fill->bytes :
					sfr__cuda_piece_bytes;

		len = nbytes - done;
		if (fill->slowly && len > room)
			len = (size_t)room;
		add_copy(fill, dst + done, src + done, len);
	}
}

/* Adds the block to the next transfer. False if there is no memory for a transfer. */
static bool add_to_piece(struct sfr__cuda_fill *fill, uint32_t blk, struct sfr__block *block)
{
	bool pinned = sfr__pin_is_pinned(block);

	if (fill->nr > 0 && fill->pinned != pinned)
		send(fill, false);
	fill->pinned = pinned;
	if (!fill->piece) {
		fill->piece = sfr__cuda_piece_get(fill->part->lane);
		if (!fill->piece)
			return false;
		fill->piece->run = fill->run;
		fill->piece->first_blk = blk;
	}
	block->next = NULL;
	if (fill->last)
		fill->last->next = block;
	else
		fill->piece->blocks = block;
	fill->last = block;
	fill->nr_blocks++;
	return true;
}

void sfr__cuda_fill_block(struct sfr__cuda_fill *fill, uint32_t blk, struct sfr__block *block)
{
	struct sfr_ticket *t = fill->part->ticket;
	struct sfr__seg_iter it;
	struct sfr__seg seg;

	if (!add_to_piece(fill, blk, block)) {
		sfr__err_set(&fill->err, -ENOMEM, SFR_PHASE_STAGE, NULL);
		sfr__ticket_put_block(t, block);
		return;
	}
	sfr__seg_iter_init(&it, &t->plan.img, fill->run, blk);
	while (sfr__seg_next(&it, &seg))
		if (seg.kind == SFR__SEG_DATA)
			add_extent(fill, block->mem + seg.pos,
				   t->plan.img.entries[seg.entry].src + seg.off, seg.len);
		else
			sfr__stage_rest(t, &seg, block->mem + seg.pos);
	if (fill->slowly || fill->nr_blocks == BLOCKS_A_PIECE || fill->err.code)
		send_blocks(fill);
}

void sfr__cuda_fill_end(struct sfr__cuda_fill *fill)
{
	if (fill->piece)
		send_blocks(fill);
	if (fill->err.code)
		sfr__ticket_fail(fill->part->ticket, &fill->err);
}

/* ---- samples ---------------------------------------------------------------------- */

/* Gets memory for the samples of the deferred sources, unless the part has some. 0 or -errno. */
static int store_get(struct sfr__cuda_part *part, const struct sfr__sampled *sources)
{
	const uint32_t nr = part->deferred->nr_entries;

	if (part->store.mem)
		return 0;
	return sfr__cuda_store_get(part->lane,
				   sfr__samples_most_rows(sources, nr) *
					   sizeof(*part->samples.items),
				   &part->store);
}

/* Queues the copies that gather the samples into the store, and a transfer after them. */
static void queue_rows(struct sfr__cuda_part *part, const struct sfr__cuda_rows *rows, size_t nr,
		       struct sfr__cuda_piece *piece, struct sfr_err *err)
{
	sfr__cuda_turn_begin(part->lane);
	sfr__cuda_copy_rows(part->lane, rows, nr, sizeof(*part->samples.items), part->store.pinned,
			    err);
	fly(part, piece, err);
	sfr__cuda_turn_end(part->lane);
}

void sfr__cuda_take_samples(struct sfr__cuda_part *part)
{
	struct sfr_ticket *t = part->ticket;
	const uint32_t nr = part->deferred->nr_entries;
	struct sfr_err err = { .index = -1 };
	struct sfr__sampled *sources = sfr__run_sources(t, part->deferred);
	struct sfr__cuda_rows *rows = sfr_sys.malloc(nr * sizeof(*rows));
	struct sfr__cuda_piece *piece = sfr__cuda_piece_get(part->lane);
	int rc = sources && rows && piece ? store_get(part, sources) : -ENOMEM;

	if (rc == 0) {
		size_t nr_rows;

		part->samples.items = part->store.mem;
		nr_rows = sfr__samples_place_rows(&part->samples, sources, nr,
						  t->seq + t->report.created_ns, rows);
		queue_rows(part, rows, nr_rows, piece, &err);
	} else {
		sfr__err_set(&err, rc, SFR_PHASE_STAGE, NULL);
		if (piece)
			sfr__cuda_piece_put(part->lane, piece);
	}
	sfr_sys.free(rows);
	sfr_sys.free(sources);
	if (err.code)
		sfr__ticket_fail(t, &err);
}

/* ---- checksums ------------------------------------------------------------------ */

/* Waits 50 us, for a thread that polls the device. */
static void pause_a_little(struct sfr__cuda_lane *lane, pthread_cond_t *never)
{
	sfr__lock(&lane->mu);
	(void)sfr__cond_wait(never, &lane->mu, sfr__deadline(50 * 1000));
	sfr__unlock(&lane->mu);
}

/* Waits until nothing runs on the stream any more, or the device is dead. The caller gives memory
 * back afterwards. */
static void drain(struct sfr__cuda_lane *lane, pthread_cond_t *never)
{
	uint32_t failed = 0;

	while (!sfr__cuda_is_dead(lane) &&
	       !sfr__cuda_is_through(lane, "cuStreamQuery", lane->cu->stream_query(lane->stream),
				     &failed))
		pause_a_little(lane, never);
}

/* Copies one chunk and waits for it by polling, as the lane does. */
static int fetch(struct sfr__cuda_part *part, const char *src, size_t len, pthread_cond_t *never,
		 struct sfr_err *err)
{
	struct sfr__cuda_lane *lane = part->lane;
	const char *call = "cuMemcpyDtoHAsync";
	CUevent event = NULL;
	CUresult rc;

	sfr__cuda_turn_begin(lane);
	rc = lane->cu->copy(part->store.mem, (CUdeviceptr)(uintptr_t)src, len, lane->stream);
	if (rc == CUDA_SUCCESS) {
		event = sfr__cuda_record(lane, lane->stream, err);
		call = "cuEventQuery";
	}
	sfr__cuda_turn_end(lane);
	while (event && (rc = lane->cu->event_query(event)) == CUDA_ERROR_NOT_READY &&
	       !sfr__cuda_is_dead(lane))
		pause_a_little(lane, never);
	if (rc != CUDA_SUCCESS)
		(void)sfr__cuda_failed(lane, call, rc, err);
	if (err->code)
		drain(lane, never);
	if (event)
		sfr__cuda_event_put(lane, event);
	return err->code;
}

void sfr__cuda_sum(struct sfr__cuda_part *part)
{
	struct sfr_ticket *t = part->ticket;
	const struct sfr__run *run = part->deferred;
	struct sfr_err err = { .index = -1 };
	struct sfr__sampled *sources = sfr__run_sources(t, run);
	pthread_cond_t never;
	int rc = sources ? store_get(part, sources) : -ENOMEM;

	sfr_sys.free(sources);
	if (rc == 0)
		rc = sfr__cond_init(&never);
	if (rc < 0) {
		sfr__err_set(&err, rc, SFR_PHASE_STAGE, NULL);
		sfr__ticket_fail(t, &err);
		return;
	}
	for (uint32_t i = run->first_entry; i < run->first_entry + run->nr_entries; i++) {
		const struct sfr__entry *entry = &t->plan.img.entries[i];

		for (uint64_t off = 0, len; off < entry->nbytes && !err.code; off += len) {
			len = entry->nbytes - off < part->store.len ? entry->nbytes - off :
								      part->store.len;
			if (fetch(part, entry->src + off, (size_t)len, &never, &err) == 0)
				t->staging.sums[i] =
					sfr_crc32(t->staging.sums[i], part->store.mem, (size_t)len);
		}
	}
	(void)pthread_cond_destroy(&never); /* no thread waits on it */
	if (err.code)
		sfr__ticket_fail(t, &err);
}
