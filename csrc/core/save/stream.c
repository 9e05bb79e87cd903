/* A stream hands the bytes of a save, in the order of the file, to a caller, which sends them to an
 * object store. There is no temporary file, no sync and no rename.
 *
 *   writers   make a block or the tail final (checksums, descriptors), and put it into the stream
 *   caller    takes the next piece (sfr_stream_take_next_piece) and gives its memory back
 *             (sfr_stream_give_back)
 *
 *     0       given back     taken by the caller    put, not taken     not put yet
 *     |--------------------|----------------------|-----------------|-------------|
 *                                                 ^ `sent`
 *
 * Blocks are leased in the order of the file. Otherwise two lanes could fill the pool with later
 * blocks while an earlier block has no memory. A pool of one block is enough, if the caller gives
 * back the pieces that it has before it waits for more.
 *
 * A block in the stream still counts as a job, so the save does not end while the caller has it.
 * The save succeeds only after the caller has taken and given back the end, which is an empty
 * piece. If the save fails, blocks that were not taken go back to the writers.
 *
 * The caller uses the functions in this file, lanes and writers those in stream_put.c. */
#include "save/stream.h"
#include "save/write.h"

/* Takes the edge page that begins at `sent`. */
static void take_edge_page_locked(struct sfr_ticket *t, struct sfr_file_piece *piece)
{
	const struct sfr__image *img = &t->plan.img;
	uint32_t i = 0;

	while (img->edges[i] != t->stream.sent)
		i++;
	*piece = (struct sfr_file_piece){
		.mem = t->plan.edges + (size_t)i * SFR_PAGE,
		.len = (size_t)sfr__image_bytes_in_file(img, t->stream.sent,
							t->stream.sent + SFR_PAGE),
		.off = t->stream.sent,
		.owner = t, /* and not a job: the page is freed when the save ends */
	};
	t->work.nr_jobs++;
}

/* Takes the end, an empty piece. When the caller gives it back, the save may end. */
static void take_end_marker_locked(struct sfr_ticket *t, struct sfr_file_piece *piece)
{
	*piece = (struct sfr_file_piece){ .off = t->plan.img.len, .owner = t };
	t->stream.ended = true;
	t->facts.synced = true; /* there is no file to sync */
	t->work.nr_jobs++;
}

/* Takes the `len` bytes at `mem`, which belong to a job and are at offset `off` of the file. */
static void take_job_as_piece_locked(struct sfr__job *job, uint64_t off, const char *mem,
				     size_t len, struct sfr_file_piece *piece)
{
	*piece = (struct sfr_file_piece){ .mem = mem, .len = len, .off = off, .owner = job };
	job->in_stream = false;
}

/* Takes the next piece, which begins at offset `sent` of the file. Returns false if a writer has
 * not put its bytes into the stream yet. */
static bool take_piece_locked(struct sfr_ticket *t, struct sfr_file_piece *piece)
{
	const struct sfr__image *img = &t->plan.img;
	struct sfr__job *job;
	uint64_t from, to, block_off;

	if (t->stream.ended) { /* the save may have ended and freed the jobs */
		*piece = (struct sfr_file_piece){ .off = img->len };
		return true;
	}
	for (; t->stream.next_blk < t->plan.nr_blocks; t->stream.next_blk++) {
		job = &t->plan.jobs[t->stream.next_blk];
		if (!job->was_put)
			return false;
		sfr__stream_unshared_range(t, job, &from, &to);
		if (from >= to)
			continue; /* all bytes of the block are in edge pages */
		if (t->stream.sent < from) {
			/* an edge page comes before the block's own bytes */
			take_edge_page_locked(t, piece);
			return true;
		}
		t->stream.next_blk++;
		block_off = sfr__image_block_off(img, job->extent, job->blk);
		take_job_as_piece_locked(job, from, job->mem + (from - block_off),
					 (size_t)(to - from), piece);
		return true;
	}
	/* A flat file has no tail, and its last page may be an edge page. */
	if (t->stream.sent < img->len && img->tail_len == 0) {
		take_edge_page_locked(t, piece);
		return true;
	}
	job = sfr__ticket_job(t, SFR__JOB_TAIL);
	if (!job->was_put)
		return false;
	if (t->stream.sent < img->len)
		take_job_as_piece_locked(job, img->tail_off, job->mem, img->tail_len, piece);
	else
		take_end_marker_locked(t, piece);
	return true;
}

int sfr_stream_take_next_piece(struct sfr_ticket *t, uint64_t slice_ns,
			       struct sfr_file_piece *piece)
{
	uint64_t deadline = sfr__deadline(slice_ns);
	int rc = 0;

	if (sfr__ticket_is_inherited(t))
		return SFR_EFORK;
	sfr__lock(&t->engine->mu);
	while (rc == 0) {
		if (!sfr__ticket_is_stream(t) || sfr__ticket_is_failing_locked(t))
			rc = SFR_ESTATE;
		else if (t->state >= SFR_CAPTURING && take_piece_locked(t, piece))
			break;
		else
			rc = sfr__cond_wait(&t->engine->cv_state, &t->engine->mu, deadline);
	}
	if (rc == 0)
		t->stream.sent += piece->len;
	sfr__unlock(&t->engine->mu);
	return rc;
}

void sfr_stream_give_back(struct sfr_ticket *t, struct sfr_file_piece *piece)
{
	/* The owner is the job whose memory it is. For an edge page, and for the empty piece at
	 * the end, it is the ticket. */
	struct sfr__job *job = piece->owner != t ? piece->owner : NULL;

	if (piece->owner == NULL || sfr__ticket_is_inherited(t))
		return;
	if (job != NULL)
		sfr__release_block(t, job);
	sfr__lock(&t->engine->mu);
	t->facts.written_nbytes += piece->len;
	if (job != NULL && t->plan.in_place)
		sfr__in_place_queue_more_blocks_locked(t);
	t->work.nr_jobs--;
	sfr__ticket_advance_state_locked(t);
	sfr__unlock(&t->engine->mu);
	piece->owner = NULL;
}
