/* Writers: threads that take jobs from the engine's queue, first come first served.
 *
 *   OPEN    make the temporary, probe, preallocate                 (once a save, first)
 *   BLOCK   CRC of its pieces if the lane has not made them,
 *           descriptors, one aligned pwrite                        (any order of completion)
 *   TAIL    central directory if there is one, fdatasync           (when every block is written)
 *   PLACE   rename, sync the directory                         (of what is not in the log)
 *   CLEAN   remove the temporary of a failed save, end it          (last)
 *
 * A data descriptor holds the CRC of a whole entry, whose earlier parts may be with another writer,
 * or with somebody who still copies. Nobody waits for them: such a block is parked at its ticket,
 * and whoever adds the last part to an entry's CRC puts what is parked back into the queue.
 *
 * The temporary is opened here and not in the call: probing and preallocating are I/O. The call
 * itself checks only what it can say without writing (parent, directory, special file).
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "sfr/crc.h"
#include "save/save.h"
#include "trace/trace.h"

/* Waits for the OPEN job. False when the save is failing. */
static bool wait_opened(struct sfr_ticket *t)
{
	struct sfr_engine *engine = t->engine;
	bool ok;

	sfr__lock(&engine->mu);
	while (!t->opened && !sfr__ticket_failing_locked(t))
		(void)sfr__cond_wait(&engine->cv_state, &engine->mu, SFR_FOREVER);
	ok = t->opened && !sfr__ticket_failing_locked(t);
	sfr__unlock(&engine->mu);
	return ok;
}

static void do_open(struct sfr_ticket *t, struct sfr_err *err)
{
	if (sfr__ticket_failing(t))
		return;
	SFR__TRACE(SFR_TRACE_OPEN, t->number, 0);
	if (sfr__file_open(&t->file, err) < 0)
		return;
	sfr__lock(&t->engine->mu);
	t->opened = true;
	t->io_mode = t->file.io_mode;
	memcpy(t->fallback[SFR_FALLBACK_BUFFERED], t->file.why_buffered,
	       sizeof(t->file.why_buffered));
	pthread_cond_broadcast(&t->engine->cv_state);
	sfr__unlock(&t->engine->mu);
}

/* CRCs of the block's pieces. An entry that lies in the block with its whole descriptor is nobody
 * else's business and needs no lock. */
static void sum_block(struct sfr_ticket *t, struct sfr__job *job)
{
	uint64_t from = sfr__image_block_off(&t->img, job->run, job->blk);
	uint64_t to = from + sfr__image_block_len(&t->img, job->run, job->blk);
	struct sfr__seg_iter it;
	struct sfr__seg seg;

	SFR__TRACE(SFR_TRACE_CHECKSUM, t->number, to - from);
	sfr__seg_iter_init(&it, &t->img, job->run, job->blk);
	while (sfr__seg_next(&it, &seg)) {
		struct sfr__entry *entry = &t->img.entries[seg.entry];
		uint32_t crc;

		if (seg.kind != SFR__SEG_DATA)
			continue;
		crc = sfr_crc32(0, job->mem + seg.pos, seg.len);
		/* Of parts the CRC stands anywhere behind, and its block may be parked. */
		if (t->in_place || entry->data_off < from ||
		    entry->data_off + entry->nbytes + entry->desc_len > to) {
			(void)sfr__add_crc(t, &seg, crc);
			continue;
		}
		entry->crc = crc;
		entry->crc_len = seg.len;
	}
	job->summed = true;
}

/* Whether every CRC is known that stands in a block of torch's file. Only the first entry may have a
 * part elsewhere that is not. */
static bool is_described_locked(const struct sfr_ticket *t, const struct sfr__job *job)
{
	const struct sfr__entry *entry;
	struct sfr__seg_iter it;

	sfr__seg_iter_init(&it, &t->img, job->run, job->blk);
	if (it.entry == job->run->first_entry + job->run->nr_entries)
		return true; /* padding alone */
	entry = &t->img.entries[it.entry];
	if (entry->data_off + entry->nbytes >= it.end)
		return true; /* its descriptor stands in a later block */
	return entry->crc_len == entry->nbytes;
}

/* Whether every CRC is known that stands in the block; otherwise it is parked. */
static bool is_known(struct sfr_ticket *t, struct sfr__job *job)
{
	size_t len = sfr__image_block_len(&t->img, job->run, job->blk);
	uint64_t off = sfr__image_block_off(&t->img, job->run, job->blk);
	bool known;

	sfr__lock(&t->engine->mu);
	known = sfr__ticket_failing_locked(t) ||
		(t->in_place ? sfr__image_fields_known(&t->img, off, len) :
			       is_described_locked(t, job));
	if (!known) {
		job->parked = t->parked;
		t->parked = job;
	}
	sfr__unlock(&t->engine->mu);
	return known;
}

static void describe_block(struct sfr_ticket *t, const struct sfr__job *job)
{
	struct sfr__seg_iter it;
	struct sfr__seg seg;

	if (t->in_place) {
		sfr__image_put_fields(&t->img, sfr__image_block_off(&t->img, job->run, job->blk),
				      sfr__image_block_len(&t->img, job->run, job->blk), job->mem);
		return;
	}
	sfr__seg_iter_init(&it, &t->img, job->run, job->blk);
	while (sfr__seg_next(&it, &seg))
		if (seg.kind == SFR__SEG_DESC)
			sfr__image_put_desc(&t->img, seg.entry, seg.off, seg.len,
					    job->mem + seg.pos);
}

/* The CRCs of the block's pieces, and of parts the memory to write. False: it is parked, and somebody
 * else's by now. */
static bool prepare_block(struct sfr_ticket *t, struct sfr__job *job, struct sfr_err *err)
{
	if (sfr__ticket_failing(t))
		return true;
	if (t->in_place && job->mem == NULL && sfr__in_place_prepare(t, job, err) < 0)
		return true;
	if (!job->summed)
		sum_block(t, job);
	return is_known(t, job);
}

static bool is_wanted(void *ticket)
{
	return !sfr__ticket_failing(ticket);
}

static void release_block(struct sfr_ticket *t, struct sfr__job *job)
{
	struct sfr_engine *engine = t->engine;
	uint32_t nr_left;

	/* Not counted any more before it can be leased again; counted as written only when the
	 * pool has it back, since from then on the save may end and the pool go. */
	if (job->block != NULL) {
		sfr__lock(&engine->mu);
		t->flight.blocks_held--;
		nr_left = t->nr_blocks - ++t->blocks_back;
		sfr__unlock(&engine->mu);
		sfr__pool_put(engine->pool, job->block);
		sfr__pool_keep_pace(engine->pool, nr_left, t->nr_whole, is_wanted, t);
	} else {
		sfr__in_place_release(job);
	}
}

/* False: it is parked. */
static bool do_block(struct sfr_ticket *t, struct sfr__job *job, struct sfr_err *err)
{
	struct sfr_engine *engine = t->engine;
	size_t len = sfr__image_block_len(&t->img, job->run, job->blk);
	uint64_t off = sfr__image_block_off(&t->img, job->run, job->blk);
	struct sfr__span span __attribute__((cleanup(sfr__span_end))) =
		sfr__span_begin(SFR_TRACE_BLOCK, t->number, len);
	bool written;

	if (!prepare_block(t, job, err)) {
		span.number = 0; /* its bytes count when it is taken up again */
		return false;
	}
	written = err->code == 0 && wait_opened(t); /* and it has not failed */
	if (written) {
		describe_block(t, job);
		written = sfr__file_write(&t->file, job->mem, len, off, err) == 0;
	}
	release_block(t, job);
	sfr__lock(&engine->mu);
	if (written) {
		t->blocks_written++;
		t->written_nbytes += off + len > t->img.len && t->in_place ? t->img.len - off : len;
	}
	if (t->in_place && err->code == 0)
		sfr__in_place_next_locked(t);
	sfr__unlock(&engine->mu);
	return true;
}

/* 0, or -1 and `err` says why. */
static int write_tail(struct sfr_ticket *t, struct sfr_err *err)
{
	size_t len = t->img.tail_len;
	void *tail;

	if (len == 0)
		return 0;
	tail = sfr_sys.mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (tail == MAP_FAILED) {
		sfr__err_set(err, -ENOMEM, SFR_PHASE_WRITE, "no memory for the directory");
		return -1;
	}
	sfr__image_put_tail(&t->img, tail);
	(void)sfr__file_write(&t->file, tail, len, t->img.tail_off, err); /* err holds it */
	(void)sfr_sys.munmap(tail, len); /* cannot fail for a mapping of our own */
	return err->code == 0 ? 0 : -1;
}

static void do_tail(struct sfr_ticket *t, struct sfr_err *err)
{
	size_t len = t->img.tail_len;

	if (!wait_opened(t)) /* nobody has where there are no blocks */
		return;
	SFR__TRACE(SFR_TRACE_TAIL, t->number, len);
	if (write_tail(t, err) == 0)
		(void)sfr__file_sync(&t->file, err); /* err holds it */
	if (err->code == 0) {
		sfr__lock(&t->engine->mu);
		t->synced = true;
		t->written_nbytes += len;
		sfr__unlock(&t->engine->mu);
	}
}

void sfr__job_run(struct sfr__task *task)
{
	struct sfr__job *job = sfr__container(task, struct sfr__job, task);
	struct sfr_ticket *t = job->ticket;
	struct sfr_engine *engine = t->engine;
	struct sfr_err err = { .index = -1 };

	switch (job->kind) {
	case SFR__JOB_OPEN:
		do_open(t, &err);
		break;
	case SFR__JOB_BLOCK:
		if (!do_block(t, job, &err))
			return;
		break;
	case SFR__JOB_TAIL:
		do_tail(t, &err);
		break;
	case SFR__JOB_PLACE:
		if (sfr__save_commit(t))
			return; /* the ticket may be gone */
		break;
	case SFR__JOB_CLEAN:
		sfr__file_fini(&t->file);
		sfr__ticket_finish(t, NULL);
		return; /* the ticket may be gone */
	}
	sfr__lock(&engine->mu);
	t->jobs_out--;
	if (err.code)
		sfr__ticket_fail_locked(t, &err);
	sfr__ticket_step_locked(t);
	sfr__unlock(&engine->mu);
}
