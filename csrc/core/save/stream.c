/* A stream hands the bytes of a save, in the order of the file, to a caller that sends them to an
 * object store. There is no temporary, no sync and no rename: the caller makes the object visible.
 *
 *   writers   make a block final (checksums, descriptors), and put it into the stream in place of
 *             writing it; the tail likewise
 *   caller    sfr_stream_next takes the next piece, sfr_stream_give_back returns its memory
 *
 *     0        given back       taken       put, not taken   not put yet
 *     |--------------------|-----------|-----------------|-------------|
 *                          ^ pieces of the caller        ^ next_blk waits here
 *
 * Blocks are leased in the order of the file. So the blocks that a save has are adjacent, and the
 * first of them can always be filled and taken. If blocks were leased in any order, two lanes could
 * fill the pool with later blocks while an earlier one has no memory. A pool of one block is
 * enough, if the caller gives back what it has before it waits for more.
 *
 * A block in the stream still counts as a job of the save, so the save does not end while the
 * caller has it. It succeeds only after the caller has taken and given back the end, which is an
 * empty piece. If the save fails, blocks that were not taken go back to the writers, who release
 * them.
 *
 * This file is the caller's side; stream_put.c is that of lanes and writers. */
#include "save/stream.h"
#include "save/write.h"

/* Takes the edge page at `sent`, the offset that the stream has reached. */
static void take_edge_locked(struct sfr_ticket *t, struct sfr_piece *piece)
{
	const struct sfr__image *img = &t->plan.img;
	uint32_t i = 0;

	/* There is one: callers know that an edge page begins at `sent`. */
	while (img->edges[i] != t->stream.sent)
		i++;
	*piece = (struct sfr_piece){
		.mem = t->plan.edges + (size_t)i * SFR_PAGE,
		.len = (size_t)sfr__image_in_file(img, t->stream.sent, t->stream.sent + SFR_PAGE),
		.off = t->stream.sent,
		.owner = t, /* the page lives as long as the save */
	};
	t->sharing.nr_jobs++;
}

/* Takes the end, an empty piece. The save may end when the caller has given it back. */
static void take_end_locked(struct sfr_ticket *t, struct sfr_piece *piece)
{
	*piece = (struct sfr_piece){ .off = t->plan.img.len, .owner = t };
	t->stream.ended = true;
	t->facts.synced = true;
	t->sharing.nr_jobs++;
}

/* Takes the bytes of a job: `len` bytes at `mem`, which are at `off` in the file. */
static void take_job_locked(struct sfr__job *job, uint64_t off, const char *mem, size_t len,
			    struct sfr_piece *piece)
{
	*piece = (struct sfr_piece){ .mem = mem, .len = len, .off = off, .owner = job };
	job->untaken = false;
}

/* Takes the piece at `sent`, the offset that the stream has reached. Returns false if its bytes are
 * not final yet. */
static bool take_locked(struct sfr_ticket *t, struct sfr_piece *piece)
{
	const struct sfr__image *img = &t->plan.img;
	struct sfr__job *job;
	uint64_t from, to;

	if (t->stream.ended) { /* the save may have ended, which frees the jobs */
		*piece = (struct sfr_piece){ .off = img->len };
		return true;
	}
	for (; t->stream.next_blk < t->plan.nr_blocks; t->stream.next_blk++) {
		job = &t->plan.jobs[t->stream.next_blk];
		if (!job->was_put)
			return false;
		sfr__stream_own_bytes(t, job, &from, &to);
		/* A block without bytes of its own is all in edge pages. */
		if (from >= to)
			continue;
		/* An edge page comes before the block's own bytes. */
		if (t->stream.sent < from) {
			take_edge_locked(t, piece);
			return true;
		}
		t->stream.next_blk++;
		take_job_locked(job, from,
				job->mem +
					(from - sfr__image_block_off(img, job->extent, job->blk)),
				(size_t)(to - from), piece);
		return true;
	}
	/* The last page of a flat file, which has no tail, may be an edge page. */
	if (t->stream.sent < img->len && img->tail_len == 0) {
		take_edge_locked(t, piece);
		return true;
	}
	job = sfr__ticket_job(t, SFR__JOB_TAIL);
	if (!job->was_put)
		return false;
	if (t->stream.sent < img->len)
		take_job_locked(job, img->tail_off, job->mem, img->tail_len, piece);
	else
		take_end_locked(t, piece);
	return true;
}

int sfr_stream_next(struct sfr_ticket *t, uint64_t slice_ns, struct sfr_piece *piece)
{
	uint64_t deadline = sfr__deadline(slice_ns);
	int rc = 0;

	if (sfr__ticket_is_foreign(t))
		return SFR_EFORK;
	sfr__lock(&t->engine->mu);
	while (rc == 0) {
		if (!sfr__ticket_is_stream(t) || sfr__ticket_failing_locked(t))
			rc = SFR_ESTATE;
		else if (t->state >= SFR_CAPTURING && take_locked(t, piece))
			break;
		else
			rc = sfr__cond_wait(&t->engine->cv_state, &t->engine->mu, deadline);
	}
	if (rc == 0)
		t->stream.sent += piece->len;
	sfr__unlock(&t->engine->mu);
	return rc;
}

void sfr_stream_give_back(struct sfr_ticket *t, struct sfr_piece *piece)
{
	/* The owner of a piece is a job. For an edge page and for the end, it is the ticket. */
	struct sfr__job *job = piece->owner != t ? piece->owner : NULL;

	if (piece->owner == NULL || sfr__ticket_is_foreign(t))
		return;
	if (job != NULL)
		sfr__release_block(t, job);
	sfr__lock(&t->engine->mu);
	t->facts.written_nbytes += piece->len;
	if (job != NULL && t->plan.in_place)
		sfr__in_place_next_locked(t);
	t->sharing.nr_jobs--;
	sfr__ticket_step_locked(t);
	sfr__unlock(&t->engine->mu);
	piece->owner = NULL;
}
