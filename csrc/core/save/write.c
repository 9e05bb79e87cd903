/* Writer threads take jobs from the engine's queue in the order of arrival.
 *
 *   OPEN    make the temporary file, try O_DIRECT, preallocate     (the first job of each save)
 *   BLOCK   compute the CRC of its bytes unless the copy did,
 *           fill in descriptors, write it with one pwrite          (blocks end in any order)
 *   TAIL    write central directory or edge pages, fdatasync       (when every block is written)
 *   RENAME  rename, sync the directory                             (only unordered saves)
 *   CLEAN   remove the temporary file, end the save                (the last job of a failed save)
 *
 * A data descriptor contains the CRC of a whole entry. But another writer may still have earlier
 * bytes of the entry, or they are not copied yet. No thread waits for them: the block is parked in
 * a list of its ticket. The thread that completes the entry's CRC queues the parked blocks again.
 *
 * A save with SFR_SAVE_STREAM has no file: blocks and tail go into its stream (stream.c). */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "sfr/crc.h"
#include "save/stream.h"
#include "save/write.h"
#include "trace/trace.h"

/* Waits until the OPEN job has run. Returns false if the save is failing. */
static bool wait_until_opened(struct sfr_ticket *t)
{
	struct sfr_engine *engine = t->engine;
	bool ok;

	sfr__lock(&engine->mu);
	while (!t->facts.opened && !sfr__ticket_is_failing_locked(t))
		(void)sfr__cond_wait(&engine->cv_state, &engine->mu, SFR_FOREVER);
	ok = t->facts.opened && !sfr__ticket_is_failing_locked(t);
	sfr__unlock(&engine->mu);
	return ok;
}

static void open_save_file(struct sfr_ticket *t, struct sfr_err *err)
{
	if (sfr__ticket_is_failing(t))
		return;
	SFR__TRACE(SFR_TRACE_OPEN, t->number, 0);
	if (!sfr__ticket_is_stream(t) && sfr__file_open(&t->file, err) < 0)
		return;
	sfr__lock(&t->engine->mu);
	t->facts.opened = true;
	t->report.io_mode = t->file.io_mode;
	memcpy(t->report.fallback[SFR_FALLBACK_BUFFERED], t->file.why_buffered,
	       sizeof(t->file.why_buffered));
	pthread_cond_broadcast(&t->engine->cv_state);
	sfr__unlock(&t->engine->mu);
}

/* Computes the CRCs of the block's bytes, and adds them to the CRCs of the entries. An entry that
 * is wholly inside the block, with its descriptor, needs no lock: no other thread uses it. */
static void add_block_crcs(struct sfr_ticket *t, struct sfr__job *job)
{
	uint64_t from = sfr__image_block_off(&t->plan.img, job->extent, job->blk);
	uint64_t to = from + sfr__image_block_len(&t->plan.img, job->extent, job->blk);
	struct sfr__seg_iter it;
	struct sfr__seg seg;

	SFR__TRACE(SFR_TRACE_CHECKSUM, t->number, to - from);
	sfr__seg_iter_init(&it, &t->plan.img, job->extent, job->blk);
	while (sfr__seg_next(&it, &seg)) {
		struct sfr__image_entry *entry = &t->plan.img.entries[seg.entry];
		uint32_t crc;
		bool is_inside;

		if (seg.kind != SFR__SEG_DATA)
			continue;
		crc = sfr_crc32(0, job->mem + seg.pos, seg.len);
		is_inside = entry->data_off >= from &&
			    entry->data_off + entry->nbytes + entry->desc_len <= to;
		/* In a file of parts, another block may be parked until this CRC is known. Only
		 * sfr__add_crc queues that block again. */
		if (is_inside && !t->plan.in_place) {
			entry->crc = crc;
			entry->crc_len = seg.len;
		} else {
			(void)sfr__add_crc(t, &seg, crc);
		}
	}
	job->crc_done = true;
}

/* Returns whether the CRCs of all descriptors in a block are complete. Checks only the first entry,
 * which may have begun in an earlier block. The CRCs of the others were computed with this block,
 * because they begin in it. */
static bool are_descriptor_crcs_known_locked(const struct sfr_ticket *t, const struct sfr__job *job)
{
	const struct sfr__image_entry *entry;
	struct sfr__seg_iter it;

	sfr__seg_iter_init(&it, &t->plan.img, job->extent, job->blk);
	if (it.entry == job->extent->first_entry + job->extent->nr_entries)
		return true; /* only padding */
	entry = &t->plan.img.entries[it.entry];
	if (entry->data_off + entry->nbytes >= it.end)
		return true; /* the descriptor is in a later block */
	return entry->crc_len == entry->nbytes;
}

/* Returns true if all CRCs that the block contains are known, or if the save is failing. Otherwise
 * parks the block and returns false. */
static bool park_block_unless_crcs_known(struct sfr_ticket *t, struct sfr__job *job)
{
	size_t len = sfr__image_block_len(&t->plan.img, job->extent, job->blk);
	uint64_t off = sfr__image_block_off(&t->plan.img, job->extent, job->blk);
	bool known;

	sfr__lock(&t->engine->mu);
	if (sfr__ticket_is_failing_locked(t))
		known = true;
	else if (t->plan.in_place)
		known = sfr__image_crc_fields_known(&t->plan.img, off, len);
	else
		known = are_descriptor_crcs_known_locked(t, job);
	if (!known) {
		job->next_parked = t->work.parked;
		t->work.parked = job;
	}
	sfr__unlock(&t->engine->mu);
	return known;
}

/* Writes the CRCs that the block contains into its memory. */
static void put_crcs_into_block(struct sfr_ticket *t, const struct sfr__job *job)
{
	struct sfr__seg_iter it;
	struct sfr__seg seg;

	if (t->plan.in_place) {
		sfr__image_put_crc_fields(&t->plan.img,
					  sfr__image_block_off(&t->plan.img, job->extent, job->blk),
					  sfr__image_block_len(&t->plan.img, job->extent, job->blk),
					  job->mem);
		return;
	}
	sfr__seg_iter_init(&it, &t->plan.img, job->extent, job->blk);
	while (sfr__seg_next(&it, &seg))
		if (seg.kind == SFR__SEG_DESC)
			sfr__image_put_descriptor(&t->plan.img, seg.entry, seg.off, seg.len,
						  job->mem + seg.pos);
}

/* Makes the block's bytes final, except for the CRCs in it. Returns false if the block is parked:
 * then another thread may have it already. Returns true otherwise, also after a failure, with *err
 * set. */
static bool finalise_or_park_block(struct sfr_ticket *t, struct sfr__job *job, struct sfr_err *err)
{
	if (!t->plan.img.has_crcs || sfr__ticket_is_failing(t))
		return true;
	/* job->mem is set already if the block was parked before */
	if (t->plan.in_place && job->mem == NULL && sfr__in_place_prepare_block(t, job, err) < 0)
		return true; /* not parked; *err is set */
	if (!job->crc_done)
		add_block_crcs(t, job);
	return park_block_unless_crcs_known(t, job);
}

void sfr__release_block(struct sfr_ticket *t, struct sfr__job *job)
{
	struct sfr_engine *engine = t->engine;
	uint32_t nr_left;

	/* blocks_held drops before another save can lease the block. The caller counts the block as
	 * written only after this function: the save may then end, and the pool may be freed. */
	if (job->block != NULL) {
		sfr__lock(&engine->mu);
		t->flight.blocks_held--;
		t->work.blocks_returned++;
		nr_left = t->plan.nr_blocks - t->work.blocks_returned;
		sfr__unlock(&engine->mu);
		sfr__pool_put(engine->pool, job->block);
		if (!sfr__ticket_is_failing(t)) /* may make memory for the blocks to come */
			sfr__pool_make_whole_blocks(engine->pool, nr_left);
	} else {
		sfr__in_place_unmap(job);
	}
}

/* Copies those bytes of the block that are in the edge page at offset `page` of the file to `edge`.
 * Other writers may copy other bytes of the page at the same time. */
static void copy_to_edge_page(struct sfr_ticket *t, const struct sfr__job *job, uint64_t page,
			      char *edge)
{
	uint64_t block_off = sfr__image_block_off(&t->plan.img, job->extent, job->blk);
	struct sfr__seg_iter it;
	struct sfr__seg seg;

	sfr__seg_iter_init(&it, &t->plan.img, job->extent, job->blk);
	it.off = page; /* walk only over the segments in the page, not in the whole block */
	it.end = page + SFR_PAGE;
	while (sfr__seg_next(&it, &seg))
		if (seg.kind == SFR__SEG_DATA)
			memcpy(edge + (block_off + seg.pos - page), job->mem + seg.pos, seg.len);
}

/* Copies the block's bytes to all edge pages that it contains. */
static void copy_to_edge_pages(struct sfr_ticket *t, const struct sfr__job *job)
{
	const struct sfr__image *img = &t->plan.img;
	uint64_t off = sfr__image_block_off(img, job->extent, job->blk);
	uint64_t end = off + sfr__image_block_len(img, job->extent, job->blk);

	for (uint32_t i = 0; i < img->nr_edges; i++)
		if (img->edges[i] >= off && img->edges[i] < end)
			copy_to_edge_page(t, job, img->edges[i],
					  t->plan.edges + (size_t)i * SFR_PAGE);
}

/* Writes the block without its edge pages. Adds the number of written bytes, without padding behind
 * the end of the file, to *nbytes. Returns 0, or -1 with the reason in *err. */
static int write_block(struct sfr_ticket *t, const struct sfr__job *job, uint64_t *nbytes,
		       struct sfr_err *err)
{
	const struct sfr__image *img = &t->plan.img;
	uint64_t off = sfr__image_block_off(img, job->extent, job->blk), from, to;

	sfr__image_block_unshared_range(img, job->extent, job->blk, &from, &to);
	if (from < to &&
	    sfr__file_write(&t->file, job->mem + (from - off), (size_t)(to - from), from, err) != 0)
		return -1;
	*nbytes += sfr__image_bytes_in_file(img, from, to);
	return 0;
}

/* Writes the block and gives it back; after a failure *err is set. Returns false if the block was
 * not given back, because it is parked or in the stream. */
static bool write_and_release_block(struct sfr_ticket *t, struct sfr__job *job, struct sfr_err *err)
{
	struct sfr_engine *engine = t->engine;
	size_t len = sfr__image_block_len(&t->plan.img, job->extent, job->blk);
	uint64_t nbytes = 0;
	struct sfr__span span __attribute__((cleanup(sfr__span_end))) =
		sfr__span_begin(SFR_TRACE_BLOCK, t->number, len);
	bool written = false;

	if (!finalise_or_park_block(t, job, err)) {
		span.number = 0; /* drops the span: the block gets one when it is resumed */
		return false;
	}
	if (err->code == 0 && wait_until_opened(t)) {
		put_crcs_into_block(t, job);
		copy_to_edge_pages(t, job);
		if (!sfr__ticket_is_stream(t))
			written = write_block(t, job, &nbytes, err) == 0;
		else if (sfr__stream_put_job(t, job))
			return false; /* the stream owns the block, and counts it as written */
	}
	sfr__release_block(t, job);
	sfr__lock(&engine->mu);
	if (written) {
		t->facts.blocks_written++;
		t->facts.written_nbytes += nbytes;
	}
	if (t->plan.in_place && err->code == 0)
		sfr__in_place_queue_more_blocks_locked(t);
	sfr__unlock(&engine->mu);
	return true;
}

/* Writes the edge pages. Adds the number of written bytes to *nbytes. Returns 0, or -1 with the
 * reason in *err. */
static int write_edges(struct sfr_ticket *t, uint64_t *nbytes, struct sfr_err *err)
{
	const struct sfr__image *img = &t->plan.img;

	for (uint32_t i = 0; i < img->nr_edges; i++) {
		if (sfr__file_write(&t->file, t->plan.edges + (size_t)i * SFR_PAGE, SFR_PAGE,
				    img->edges[i], err) != 0)
			return -1;
		*nbytes += sfr__image_bytes_in_file(img, img->edges[i], img->edges[i] + SFR_PAGE);
	}
	return 0;
}

/* Makes the bytes of the tail in memory that the job owns. Returns 0, or -1 with the reason in
 * *err. */
static int make_tail(struct sfr_ticket *t, struct sfr__job *job, struct sfr_err *err)
{
	size_t len = t->plan.img.tail_len;
	void *tail;

	if (len == 0)
		return 0;
	tail = sfr_sys.mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (tail == MAP_FAILED) {
		sfr__err_set_if_unset(err, -ENOMEM, SFR_PHASE_WRITE, "no memory for the directory");
		return -1;
	}
	job->mem = tail;
	job->mapped_len = len;
	sfr__image_put_tail(&t->plan.img, tail);
	return 0;
}

static void write_tail(struct sfr_ticket *t, const struct sfr__job *job, struct sfr_err *err)
{
	uint64_t nbytes = t->plan.img.tail_len;

	if (nbytes == 0) /* a flat file: it may have edge pages instead of a tail */
		(void)write_edges(t, &nbytes, err); /* an error is also in *err, as below */
	else
		(void)sfr__file_write(&t->file, job->mem, (size_t)nbytes, t->plan.img.tail_off,
				      err);
	if (err->code == 0)
		(void)sfr__file_sync(&t->file, err);
	if (err->code == 0) {
		sfr__lock(&t->engine->mu);
		t->facts.synced = true;
		t->facts.written_nbytes += nbytes;
		sfr__unlock(&t->engine->mu);
	}
}

/* Writes the tail, or puts it into the stream. Returns false if the stream owns the tail now. */
static bool write_or_stream_tail(struct sfr_ticket *t, struct sfr__job *job, struct sfr_err *err)
{
	/* The file may not be open yet if the save has no block that has waited for it. */
	if (wait_until_opened(t)) {
		SFR__TRACE(SFR_TRACE_TAIL, t->number, t->plan.img.tail_len);
		if (make_tail(t, job, err) == 0) {
			if (sfr__ticket_is_stream(t) && sfr__stream_put_job(t, job))
				return false;
			if (!sfr__ticket_is_stream(t))
				write_tail(t, job, err);
		}
	}
	sfr__in_place_unmap(job);
	return true;
}

void sfr__job_run(struct sfr__task *task)
{
	struct sfr__job *job = sfr__container(task, struct sfr__job, task);
	struct sfr_ticket *t = job->ticket;
	struct sfr_engine *engine = t->engine;
	struct sfr_err err = { .index = -1 };

	switch (job->kind) {
	case SFR__JOB_OPEN:
		open_save_file(t, &err);
		break;
	case SFR__JOB_BLOCK:
		if (!write_and_release_block(t, job, &err))
			return; /* parked or in the stream: nr_jobs still counts the job */
		break;
	case SFR__JOB_TAIL:
		if (!write_or_stream_tail(t, job, &err))
			return; /* in the stream: nr_jobs still counts the job */
		break;
	case SFR__JOB_RENAME:
		if (sfr__save_commit(t))
			return; /* the save has ended: the ticket may be freed */
		break;          /* the save was cancelled */
	case SFR__JOB_CLEAN:
		sfr__file_fini(&t->file);
		sfr__ticket_finish(t, NULL);
		return; /* the ticket may be freed */
	}
	sfr__lock(&engine->mu);
	t->work.nr_jobs--;
	if (err.code)
		sfr__ticket_fail_locked(t, &err);
	sfr__ticket_advance_state_locked(t);
	sfr__unlock(&engine->mu);
}
