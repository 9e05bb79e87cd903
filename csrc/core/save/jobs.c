/* The jobs of a save: work for the writers. */
#include <errno.h>

#include "sfr/crc.h"
#include "save/jobs.h"

void sfr__job_push_locked(struct sfr__job *job)
{
	job->task.run = job->ticket->plan.run_job;
	job->ticket->work.nr_jobs++;
	sfr__task_push_locked(job->ticket->engine, &job->task);
}

int sfr__jobs_new(struct sfr_ticket *t)
{
	static const enum sfr__job_kind kinds[] = { SFR__JOB_OPEN, SFR__JOB_TAIL, SFR__JOB_RENAME,
						    SFR__JOB_CLEAN };
	const uint32_t nr_kinds = sizeof(kinds) / sizeof(kinds[0]);

	t->plan.jobs = sfr_sys.calloc((size_t)t->plan.nr_blocks + nr_kinds, sizeof(*t->plan.jobs));
	if (!t->plan.jobs)
		return -ENOMEM;
	for (uint32_t i = 0; i < nr_kinds; i++) {
		struct sfr__job *job = sfr__ticket_job(t, kinds[i]);

		job->ticket = t;
		job->kind = kinds[i];
	}
	return 0;
}

struct sfr__job *sfr__ticket_job(struct sfr_ticket *t, enum sfr__job_kind kind)
{
	/* indices, counted from the end of the BLOCK jobs */
	static const uint32_t index[] = { [SFR__JOB_OPEN] = 0,
					  [SFR__JOB_TAIL] = 1,
					  [SFR__JOB_RENAME] = 2,
					  [SFR__JOB_CLEAN] = 3 };

	return &t->plan.jobs[t->plan.nr_blocks + index[kind]];
}

struct sfr__job *sfr__block_job(struct sfr_ticket *t, const struct sfr__extent *extent,
				uint32_t blk)
{
	return &t->plan.jobs[extent->first_block + blk];
}

void sfr__push_block_locked(struct sfr_ticket *t, const struct sfr__extent *extent, uint32_t blk,
			    struct sfr__block *block, bool crc_done)
{
	struct sfr__job *job = sfr__block_job(t, extent, blk);

	*job = (struct sfr__job){
		.ticket = t,
		.kind = SFR__JOB_BLOCK,
		.block = block,
		.mem = block->mem,
		.extent = extent,
		.blk = blk,
		.crc_done = crc_done,
	};
	sfr__job_push_locked(job);
}

void sfr__jobs_unpark_locked(struct sfr_ticket *t)
{
	struct sfr__job *job;

	while (t->work.parked != NULL) {
		job = t->work.parked;
		t->work.parked = job->next_parked;
		/* not sfr__job_push_locked: a parked job is still counted in nr_jobs */
		sfr__task_push_locked(t->engine, &job->task);
	}
}

void sfr__requeue_streamed_locked(struct sfr_ticket *t)
{
	struct sfr__job *const tail = sfr__ticket_job(t, SFR__JOB_TAIL);

	if (!sfr__ticket_is_stream(t))
		return;
	/* Only BLOCK jobs and the TAIL job, which follows them, can be in the stream. */
	for (struct sfr__job *job = t->plan.jobs; job <= tail; job++) {
		if (!job->in_stream)
			continue;
		job->in_stream = false;
		/* The writer sees that the save is failing, and only releases the memory. */
		sfr__task_push_locked(t->engine, &job->task);
	}
}

/* crc(A followed by B) = shift(crc(A), length of B) XOR crc(B). So the CRC of each segment is
 * shifted by the number of bytes after the segment, and XORed to the others in any order. */
bool sfr__add_crc(struct sfr_ticket *t, const struct sfr__seg *seg, uint32_t crc)
{
	struct sfr__image_entry *entry = &t->plan.img.entries[seg->entry];
	uint64_t nbytes_after = entry->nbytes - seg->off - seg->len;
	bool is_complete;

	/* Shift the CRC to the segment's position in the entry: shifted CRCs can be XORed. */
	crc = sfr_crc32_combine(crc, 0, nbytes_after);
	sfr__lock(&t->engine->mu);
	entry->crc ^= crc;
	entry->crc_len += seg->len;
	is_complete = entry->crc_len == entry->nbytes;
	if (is_complete)
		sfr__jobs_unpark_locked(t);
	sfr__unlock(&t->engine->mu);
	return is_complete;
}
