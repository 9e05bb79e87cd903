/* Reads a checkpoint's records back, each directly to its destination, and checks them on the way.
 *
 * A loader needs its tensors in the order of the pickle, one by one. A disk is fastest when read
 * front to back, in large chunks, several at a time. So threads read the file in its own order,
 * ahead of the loader:
 *
 *   the file    | chunk | chunk | chunk | chunk | chunk | ...   1 MiB each; a thread takes the next
 *                   |       |
 *                   v       v              into the thread's bounce buffer, in a core's own cache,
 *   memory      | record 0 | record 1 | record 2 | ...            and from there to the records;
 *                                                                 that copy computes their CRC
 *
 * The chunks are not read directly into the records' memory. A tensor's memory comes from torch, so
 * that it can be resized and freed like any other, and is not aligned to the file's sectors. The
 * copy costs a twentieth of the disk's time, and is made while other threads wait for the disk.
 *
 * Header, data and descriptor of a record may come in any order and from several threads:
 *
 *     TO COME --got: its last unit, CRC right--> GOOD
 *        |
 *        +--header, descriptor, CRC wrong; reading failed--> the restore has failed, for good
 *
 * The caller says up to which record memory is available (`upto`); threads stop at the first chunk
 * that has bytes of a later record. A chunk belongs to all records in it, so the caller must
 * provide memory for more than the record it wants (sfr_restore_reach). A wait that only the caller
 * could end is refused. The caller waits for single records and uses none before it is GOOD, so no
 * code ever sees unchecked bytes. The first failure ends the reading. */
#include <errno.h>

#include "restore/plan.h"
#include "sfr/limits.h"
#include "base/base.h"

/* ---- the threads ------------------------------------------------------------ */

struct piece {
	uint64_t off, first, last;
	size_t len;
};

/* Finds the next chunk with records in it. False at the end. */
static bool find_piece_locked(struct sfr_restore *r, struct piece *piece)
{
	for (;;) {
		uint64_t to;

		while (r->next_rec < r->nr && sfr__restore_limit(r, r->next_rec) <= r->next_off)
			r->next_rec++;
		if (r->next_rec == r->nr)
			return false;
		to = r->next_off + r->piece;
		if (to > r->end)
			to = r->end;
		/* Only a gap follows the record here. It may be made long by a hostile file, so it
		 * is skipped. */
		if (sfr__restore_data_end(r, r->next_rec) + SFR__UNZIP_DESC <= r->next_off &&
		    sfr__restore_limit(r, r->next_rec) >= to) {
			r->next_off = sfr__restore_limit(r, r->next_rec) / r->piece * r->piece;
			if (r->next_off < to)
				r->next_off = to;
			continue;
		}
		piece->off = r->next_off;
		piece->len = (size_t)(to - r->next_off);
		piece->first = piece->last = r->next_rec;
		while (piece->last < r->nr && r->places[piece->last].hdr_off < to)
			piece->last++;
		return true;
	}
}

static void land_all(struct sfr__reader *reader)
{
	/* The buffer whose turn is next was sent first. */
	for (unsigned i = 0; i < SFR__RESTORE_BUFFERS && reader->r->nr_devices != 0; i++)
		sfr__restore_land(reader->r,
				  &reader->buffers[(reader->turn + i) % SFR__RESTORE_BUFFERS]);
}

/* Waits until the next chunk may be read, and takes it. Before a wait that may be long, counts what
 * has been copied from the reader's buffers. */
static bool take_piece(struct sfr__reader *reader, struct piece *piece)
{
	struct sfr_restore *r = reader->r;
	bool found, counted = false;

	sfr__lock(&r->mu);
	while ((found = !r->stop && find_piece_locked(r, piece)) && piece->last > r->upto) {
		if (counted) {
			(void)sfr__cond_wait(&r->work, &r->mu, SFR_FOREVER); /* always 0 */
			continue;
		}
		sfr__unlock(&r->mu);
		land_all(reader);
		counted = true;
		sfr__lock(&r->mu);
	}
	if (found)
		r->next_off = piece->off + piece->len;
	sfr__unlock(&r->mu);
	return found;
}

/* Returns the record whose bytes are at `off`. */
static uint64_t whose(const struct sfr_restore *r, const struct piece *piece, uint64_t off)
{
	uint64_t i = piece->first;

	while (i + 1 < piece->last && sfr__restore_limit(r, i) <= off)
		i++;
	return i;
}

/* Returns the next buffer, after waiting for the copies from it. */
static struct sfr__buffer *next_buffer(struct sfr__reader *reader)
{
	struct sfr__buffer *buffer = &reader->buffers[reader->turn];

	if (reader->r->nr_devices == 0)
		return buffer; /* the only one */
	sfr__restore_land(reader->r, buffer);
	reader->turn = (reader->turn + 1) % SFR__RESTORE_BUFFERS;
	return buffer->mem == NULL ? NULL : buffer;
}

static bool read_piece(struct sfr__reader *reader, const struct piece *piece)
{
	struct sfr_restore *r = reader->r;
	struct sfr__buffer *buffer = next_buffer(reader);
	int rc;

	if (buffer == NULL)
		return false; /* its device has failed */
	rc = sfr__source_read(&r->source, buffer->mem, piece->len, piece->off);
	if (rc != 0) {
		sfr__restore_fail(r, rc, whose(r, piece, piece->off), piece->off,
				  rc == SFR_ECORRUPT ? SFR__RESTORE_SHORTER : NULL);
		return false;
	}
	sfr__restore_piece(reader, buffer, piece->off, piece->len, piece->first, piece->last);
	sfr__restore_fly(r, buffer);
	sfr__lock(&r->mu);
	r->done += piece->len;
	sfr__unlock(&r->mu);
	return true;
}

static void *restore_main(void *arg)
{
	struct sfr__reader *reader = arg;
	struct sfr__cuda_scope scope;
	struct piece piece;

	sfr__restore_enter(reader->r, &scope);
	while (take_piece(reader, &piece) && read_piece(reader, &piece))
		;
	land_all(reader);
	sfr__cuda_leave(&scope);
	return NULL;
}

static void free_reader(struct sfr__reader *reader)
{
	sfr__restore_unpin(reader);
	sfr_sys.free(reader->mem);
	reader->mem = NULL;
}

static int start_thread(struct sfr_restore *r)
{
	const size_t piece = r->nr_devices != 0 ? 0 : r->piece;
	struct sfr__reader *reader = &r->readers[r->nr_threads];
	int rc = 0;

	reader->r = r;
	reader->mem = sfr_sys.malloc(piece + SFR__RESTORE_HEADER_MAX + SFR_PAGE);
	if (reader->mem == NULL)
		return -ENOMEM;
	reader->buffers[0].mem =
		reader->mem + (SFR_PAGE - (uintptr_t)reader->mem % SFR_PAGE) % SFR_PAGE;
	reader->scratch = reader->buffers[0].mem + piece;
	if (r->nr_devices != 0)
		rc = sfr__restore_pin(reader);
	if (rc == 0)
		rc = sfr__thread_start(&reader->thread, "sfr-restore", SFR__AWAITED, restore_main,
				       reader);
	if (rc < 0)
		free_reader(reader);
	else
		r->nr_threads++;
	return rc;
}

/* ---- public ----------------------------------------------------------------- */

int sfr_restore_new(struct sfr_check *check, int fd, unsigned flags, struct sfr_restore **out)
{
	struct sfr_restore *r = NULL;
	int rc = sfr_fork_init();

	*out = NULL;
	if (rc == 0 && (!check->result.ok || check->places.incomplete || check->places.nr == 0))
		rc = -EOPNOTSUPP;
	if (rc == 0) {
		r = sfr_sys.calloc(1, sizeof(*r));
		rc = r == NULL ? -ENOMEM : 0;
	}
	if (rc < 0) {
		sfr_check_free(check);
		return rc;
	}
	r->check = check;
	r->places = check->places.v;
	r->nr = check->places.nr;
	r->end = check->end.dir_off;
	r->flags = flags;
	r->piece = (size_t)sfr_limits.restore_piece_bytes;
	r->awaited = r->nr;
	r->fork_generation = sfr_fork_generation();
	sfr__mutex_init(&r->mu, SFR__LOCK_RESTORE);
	(void)sfr__cond_init(&r->work);
	(void)sfr__cond_init(&r->news);
	(void)sfr__cond_init(&r->asks);
	sfr__source_open(&r->source, fd, (flags & SFR_RESTORE_SHARED) != 0);
	r->targets = sfr_sys.calloc(r->nr, sizeof(*r->targets));
	rc = r->targets == NULL ? -ENOMEM : sfr__restore_plan(r);
	if (rc < 0) {
		sfr_restore_free(r);
		return rc;
	}
	*out = r;
	return 0;
}

uint64_t sfr_restore_nr(const struct sfr_restore *r)
{
	return r->nr;
}

uint64_t sfr_restore_nbytes(const struct sfr_restore *r, uint64_t index)
{
	return r->places[index].len;
}

const char *sfr_restore_name(const struct sfr_restore *r, uint64_t index, size_t *len)
{
	*len = r->places[index].name_len - r->check->prefix_len;
	return r->check->places.names + r->places[index].name_at + r->check->prefix_len;
}

uint64_t sfr_restore_find(const struct sfr_restore *r, const char *name, size_t len)
{
	return sfr__check_find(r->check, name, len);
}

void sfr_restore_into(struct sfr_restore *r, uint64_t index, void *mem)
{
	r->targets[index].mem = mem;
}

uint64_t sfr_restore_reach(const struct sfr_restore *r, uint64_t index)
{
	/* The descriptor's first byte is in the last chunk that the record needs. */
	const uint64_t to = sfr__round_up(sfr__restore_data_end(r, index) + 1, r->piece);

	return sfr__lower_bound(i, index + 1, r->nr, r->places[i].hdr_off < to);
}

int sfr_restore_go(struct sfr_restore *r, uint64_t upto)
{
	const uint64_t nr_pieces = r->end / r->piece + 1;
	int rc = 0;

	if (r->fork_generation != sfr_fork_generation())
		return SFR_EFORK;
	sfr__lock(&r->mu);
	if (upto > r->upto)
		r->upto = upto;
	(void)pthread_cond_broadcast(&r->work);
	sfr__unlock(&r->mu);
	if (r->nr_threads != 0)
		return 0;
	while (r->nr_threads < SFR__RESTORE_THREADS && r->nr_threads < nr_pieces && rc == 0)
		rc = start_thread(r);
	return r->nr_threads == 0 ? rc : 0; /* fewer threads are only slower */
}

/* Whether the readers may read the record completely. Only the caller extends `upto`, so a wait for
 * any other record would never end. */
static bool is_within_reach(const struct sfr_restore *r, uint64_t index)
{
	return (index < r->nr ? sfr_restore_reach(r, index) : r->nr) <= r->upto;
}

int sfr_restore_wait(struct sfr_restore *r, uint64_t index, uint64_t slice_ns)
{
	const uint64_t deadline = sfr__deadline(slice_ns);
	int rc = 0;

	if (index < r->nr && atomic_load(&r->targets[index].good))
		return 0;
	if (r->fork_generation != sfr_fork_generation())
		return SFR_EFORK;
	sfr__lock(&r->mu);
	r->awaited = index;
	for (;;) {
		if (index < r->nr ? atomic_load(&r->targets[index].good) : r->nr_good == r->nr)
			rc = 0;
		else if (r->failure.code != 0)
			rc = r->failure.code;
		else if (!is_within_reach(r, index))
			rc = SFR_EUNPLACED;
		else if (rc == 0) {
			rc = sfr__cond_wait(&r->news, &r->mu, deadline);
			continue;
		}
		break;
	}
	sfr__unlock(&r->mu);
	return rc;
}

const struct sfr_restore_failure *sfr_restore_failure(const struct sfr_restore *r)
{
	return &r->failure;
}

uint64_t sfr_restore_done(struct sfr_restore *r)
{
	return sfr__under(&r->mu, r->done);
}

static void end_threads(struct sfr_restore *r)
{
	sfr__lock(&r->mu);
	r->stop = true;
	(void)pthread_cond_broadcast(&r->work);
	sfr__unlock(&r->mu);
	for (unsigned i = 0; i < r->nr_threads; i++)
		/* our own thread, joined once */
		(void)sfr_sys.thread_join(r->readers[i].thread, NULL);
	for (unsigned i = 0; i < r->nr_threads; i++)
		sfr__restore_unpin(&r->readers[i]);
	sfr__restore_leave_devices(r);
	sfr__source_close(&r->source);
	(void)pthread_cond_destroy(&r->asks);
	(void)pthread_cond_destroy(&r->news);
	(void)pthread_cond_destroy(&r->work);
	sfr__mutex_fini(&r->mu);
}

void sfr_restore_free(struct sfr_restore *r)
{
	if (r == NULL)
		return;
	/* A child has no such threads, and the fork handler has closed the descriptor. */
	if (r->fork_generation == sfr_fork_generation())
		end_threads(r);
	sfr__source_unmap(&r->source);
	for (unsigned i = 0; i < r->nr_threads; i++)
		sfr_sys.free(r->readers[i].mem);
	sfr_sys.free(r->targets);
	sfr_check_free(r->check);
	sfr_sys.free(r);
}
