/* The side of a stream that fills it: when a lane may lease a block, and how a writer puts final
 * bytes into it. */
#include "save/stream.h"

bool sfr__stream_is_possible(const struct sfr__image *img)
{
	for (uint32_t i = 1; i < img->nr_extents; i++)
		if (img->extents[i].off < img->extents[i - 1].off)
			return false;
	return true;
}

bool sfr__stream_may_lease_locked(const struct sfr_ticket *t, const struct sfr__extent *extent,
				  uint32_t blk)
{
	return !sfr__ticket_is_stream(t) || t->work.blocks_leased == extent->first_block + blk;
}

int sfr__stream_wait_until_may_lease(struct sfr_ticket *t, const struct sfr__extent *extent,
				     uint32_t blk, uint64_t slice_ns)
{
	uint64_t deadline = sfr__deadline(slice_ns);
	int rc = 0;

	if (!sfr__ticket_is_stream(t))
		return 0;
	sfr__lock(&t->engine->mu);
	while (!sfr__stream_may_lease_locked(t, extent, blk) && rc == 0) {
		if (sfr__ticket_is_failing_locked(t))
			rc = SFR_EAGAIN; /* the caller then sees that the save is failing */
		else
			rc = sfr__cond_wait(&t->engine->cv_state, &t->engine->mu, deadline);
	}
	sfr__unlock(&t->engine->mu);
	return rc;
}

void sfr__stream_unshared_range(const struct sfr_ticket *t, const struct sfr__job *job,
				uint64_t *from, uint64_t *to)
{
	sfr__image_block_unshared_range(&t->plan.img, job->extent, job->blk, from, to);
	if (*to > t->plan.img.len)
		*to = t->plan.img.len; /* the block ends with padding, which is not in the file */
}

bool sfr__stream_put_job(struct sfr_ticket *t, struct sfr__job *job)
{
	uint64_t from = 0, to;
	bool is_failing;

	if (job->kind == SFR__JOB_BLOCK)
		sfr__stream_unshared_range(t, job, &from, &to);
	else
		to = t->plan.img.tail_len;
	sfr__lock(&t->engine->mu);
	is_failing = sfr__ticket_is_failing_locked(t);
	if (!is_failing) {
		job->was_put = true;
		job->in_stream = from < to; /* false: the stream needs no bytes of it */
		if (job->kind == SFR__JOB_BLOCK)
			t->facts.blocks_written++;
		pthread_cond_broadcast(&t->engine->cv_state);
		sfr__ticket_advance_state_locked(t);
	}
	sfr__unlock(&t->engine->mu);
	return !is_failing && from < to; /* not job->in_stream: the job may be freed by now */
}
