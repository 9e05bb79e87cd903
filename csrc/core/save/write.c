/* Writers: threads that take jobs from the engine's queue, first come first served.
 *
 *   OPEN    make the temporary, probe, preallocate                 (once a save, first)
 *   BLOCK   CRC of its pieces if the lane has not made them,
 *           descriptors, one aligned pwrite                        (any order of completion)
 *   TAIL    central directory, fdatasync                           (when every block is written)
 *   CLEAN   remove the temporary of a failed save, end it          (last)
 *
 * A data descriptor holds the CRC of a whole entry, whose earlier pieces may be with another
 * writer. Pieces are published in the order of the entry: a writer waits for the CRC (not the
 * write) of the pieces before its own. It always ends: blocks of an entry are queued in
 * ascending order, so the writer of the lowest piece not yet published waits for nobody.
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

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
	memcpy(t->fallback[0], t->file.fallback[0], sizeof(t->fallback[0]));
	pthread_cond_broadcast(&t->engine->cv_state);
	sfr__unlock(&t->engine->mu);
}

/* Waits until the first `off` bytes of an entry are in its CRC. False when the save is failing. */
static bool wait_crc_locked(struct sfr_ticket *t, const struct sfr__entry *entry, uint64_t off)
{
	while (entry->crc_len != off && !sfr__ticket_failing_locked(t))
		(void)sfr__cond_wait(&t->engine->cv_state, &t->engine->mu, SFR_FOREVER);
	return !sfr__ticket_failing_locked(t);
}

/* Adds a piece's CRC to its entry's. False when the save is failing. */
static bool publish(struct sfr_ticket *t, const struct sfr__seg *seg, uint32_t crc)
{
	struct sfr_engine *engine = t->engine;
	struct sfr__entry *entry = &t->img.entries[seg->entry];
	bool ok;

	sfr__lock(&engine->mu);
	ok = wait_crc_locked(t, entry, seg->off);
	if (ok) {
		entry->crc = sfr_crc32_combine(entry->crc, crc, seg->len);
		entry->crc_len += seg->len;
		pthread_cond_broadcast(&engine->cv_state); /* the next block's writer may wait */
	}
	sfr__unlock(&engine->mu);
	return ok;
}

static bool crc_is_final(struct sfr_ticket *t, const struct sfr__entry *entry)
{
	bool ok;

	sfr__lock(&t->engine->mu);
	ok = wait_crc_locked(t, entry, entry->nbytes);
	sfr__unlock(&t->engine->mu);
	return ok;
}

/* CRCs of the block's pieces, and the descriptors that stand in it. An entry that lies in the
 * block with its whole descriptor is nobody else's business and needs no lock; nor do those of a
 * summed block, which were final when it was pushed. */
static bool complete_block(struct sfr_ticket *t, const struct sfr__job *job)
{
	uint64_t from = sfr__image_block_off(&t->img, job->run, job->blk);
	uint64_t to = from + sfr__image_block_len(&t->img, job->run, job->blk);
	char *mem = job->block->mem;
	struct sfr__seg_iter it;
	struct sfr__seg seg;

	SFR__TRACE(SFR_TRACE_CHECKSUM, t->number, to - from);
	sfr__seg_iter_init(&it, &t->img, job->run, job->blk);
	while (sfr__seg_next(&it, &seg)) {
		struct sfr__entry *entry = &t->img.entries[seg.entry];
		bool own;

		if (seg.kind != SFR__SEG_DATA && seg.kind != SFR__SEG_DESC)
			continue;
		if (job->summed && seg.kind == SFR__SEG_DATA)
			continue;
		own = job->summed || (entry->data_off >= from &&
				      entry->data_off + entry->nbytes + entry->desc_len <= to);
		if (seg.kind == SFR__SEG_DATA) {
			uint32_t crc = sfr_crc32(0, mem + seg.pos, seg.len);

			if (own) {
				entry->crc = crc;
				entry->crc_len = seg.len;
			} else if (!publish(t, &seg, crc)) {
				return false;
			}
		} else {
			if (!own && !crc_is_final(t, entry))
				return false;
			sfr__image_put_desc(&t->img, seg.entry, seg.off, seg.len, mem + seg.pos);
		}
	}
	return true;
}

static void do_block(struct sfr_ticket *t, struct sfr__job *job, struct sfr_err *err)
{
	struct sfr_engine *engine = t->engine;
	size_t len = sfr__image_block_len(&t->img, job->run, job->blk);
	uint64_t off = sfr__image_block_off(&t->img, job->run, job->blk);
	SFR__TRACE(SFR_TRACE_BLOCK, t->number, len);
	bool written = !sfr__ticket_failing(t) && complete_block(t, job) && wait_opened(t) &&
		       sfr__file_write(&t->file, job->block->mem, len, off, err) == 0;

	/* Not counted any more before it can be leased again; counted as written only when the
	 * pool has it back, since from then on the save may end and the pool go. */
	sfr__lock(&engine->mu);
	t->flight.blocks_held--;
	sfr__unlock(&engine->mu);
	sfr__pool_put(engine->pool, job->block);
	job->block = NULL;
	sfr__lock(&engine->mu);
	if (written) {
		t->blocks_written++;
		t->written_nbytes += len;
	}
	sfr__unlock(&engine->mu);
}

static void do_tail(struct sfr_ticket *t, struct sfr_err *err)
{
	size_t len = t->img.tail_len;
	void *tail;

	if (sfr__ticket_failing(t))
		return;
	SFR__TRACE(SFR_TRACE_TAIL, t->number, len);
	tail = sfr_sys.mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (tail == MAP_FAILED) {
		sfr__err_set(err, -ENOMEM, SFR_PHASE_WRITE, "no memory for the directory");
		return;
	}
	sfr__image_put_tail(&t->img, tail);
	(void)sfr__file_write(&t->file, tail, len, t->img.tail_off, err); /* err holds it */
	(void)sfr_sys.munmap(tail, len); /* cannot fail for a mapping of our own */
	if (err->code == 0)
		(void)sfr__file_sync(&t->file, err);
	if (err->code == 0) {
		sfr__lock(&t->engine->mu);
		t->synced = true;
		t->written_nbytes += len;
		sfr__unlock(&t->engine->mu);
	}
}

static void run(struct sfr__task *task)
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
		do_block(t, job, &err);
		break;
	case SFR__JOB_TAIL:
		do_tail(t, &err);
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

void sfr__job_push_locked(struct sfr__job *job)
{
	job->task.run = run;
	job->ticket->jobs_out++;
	sfr__task_push_locked(job->ticket->engine, SFR__WRITERS, &job->task);
}
