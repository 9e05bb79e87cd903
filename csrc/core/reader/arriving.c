/* The functions of arriving files that readers use. arrivals.c explains these files. */
#include <errno.h>
#include <fcntl.h>

#include "reader/arrivals_int.h"

struct sfr__arrivals_table sfr__arrivals = { .mu = SFR__MUTEX(SFR__LOCK_ARRIVALS) };

/* Runs in a forked child. */
static void forget_parents_files(void)
{
	/* They are not freed: a source may still read a file's fork generation. */
	sfr__arrivals = (struct sfr__arrivals_table){ .mu = SFR__MUTEX(SFR__LOCK_ARRIVALS) };
}
SFR__AT_FORK(forget_parents_files)

void sfr__arriving_drop(struct sfr__arriving_file *f)
{
	if (sfr__under(&sfr__arrivals.mu, --f->refs) != 0)
		return;
	(void)sfr__fd_close(f->fd); /* a file in memory loses nothing if this fails */
	sfr_sys.free(f);
}

struct sfr__arriving_file *sfr__arriving_get(int fd)
{
	struct sfr__arriving_file *f;

	sfr__lock(&sfr__arrivals.mu);
	f = sfr__arrivals.files;
	while (f != NULL && f->fd != fd)
		f = f->next;
	if (f != NULL)
		f->refs++;
	sfr__unlock(&sfr__arrivals.mu);
	return f;
}

void sfr__arriving_put(struct sfr__arriving_file *f)
{
	if (f != NULL && !sfr__arrivals_are_inherited(f->fork_generation))
		sfr__arriving_drop(f);
}

/* Adds an absent chunk to the list of chunks to fetch. */
static void request_chunk_locked(struct sfr__arriving_file *f, uint64_t index)
{
	struct sfr__arriving_chunk *c = &f->chunks[index];

	if (c->state != SFR__ABSENT || f->failed)
		return;
	c->state = SFR__REQUESTED;
	c->next = SFR__NO_CHUNK;
	if (f->first_requested == SFR__NO_CHUNK)
		f->first_requested = (uint32_t)index;
	else
		f->chunks[f->last_requested].next = (uint32_t)index;
	f->last_requested = (uint32_t)index;
	/* a broadcast: threads of several groups wait */
	(void)pthread_cond_broadcast(&sfr__arrivals.has_requests);
}

/* Finds the chunks of a range: sets *first to the index of the first, and returns the index after
 * the last. Bytes after the end of the file are in no chunk. */
static uint64_t find_chunks(const struct sfr__arriving_file *f, uint64_t off, uint64_t len,
			    uint64_t *first)
{
	uint64_t end;

	*first = off / f->chunk_bytes;
	if (off >= f->len || len == 0)
		return *first;
	end = len < f->len - off ? off + len : f->len;
	return (end - 1) / f->chunk_bytes + 1;
}

/* Pins chunks [first, end). Clears `read_fully` of chunks that this reader has not read completely,
 * because another reader may have set it. */
static void pin_chunks_locked(struct sfr__arriving_file *f, const uint32_t *bytes_read,
			      uint64_t first, uint64_t end)
{
	for (uint64_t i = first; i < end; i++) {
		f->chunks[i].pins++;
		if (bytes_read != NULL && bytes_read[i] != sfr__chunk_len(f, i))
			f->chunks[i].read_fully = false;
	}
}

/* Requests the absent chunks in [first, end). Returns whether all chunks are present. */
static bool request_unless_all_present_locked(struct sfr__arriving_file *f, uint64_t first,
					      uint64_t end)
{
	bool all_present = true;

	for (uint64_t i = first; i < end; i++) {
		request_chunk_locked(f, i);
		all_present = all_present && f->chunks[i].state == SFR__PRESENT;
	}
	return all_present;
}

/* Pins chunks [first, end) if all are present, and returns 0. Otherwise requests the others and
 * returns SFR_EAGAIN. Returns -EBADF if the file is closed, -EIO if its bytes cannot be fetched. */
static int try_pin_locked(struct sfr__arriving_file *f, const uint32_t *bytes_read, uint64_t first,
			  uint64_t end)
{
	if (f->group == NULL)
		return -EBADF;
	if (f->failed)
		return -EIO;
	if (!request_unless_all_present_locked(f, first, end))
		return SFR_EAGAIN;
	pin_chunks_locked(f, bytes_read, first, end);
	return 0;
}

int sfr__arriving_wait_and_pin(struct sfr__arriving_file *f, const uint32_t *bytes_read,
			       uint64_t off, uint64_t len, uint64_t slice_ns)
{
	const uint64_t deadline = sfr__deadline(slice_ns);
	uint64_t first, end;
	bool timed_out = false;
	int rc;

	if (sfr__arrivals_are_inherited(f->fork_generation))
		return SFR_EFORK;
	end = find_chunks(f, off, len, &first);
	sfr__lock(&sfr__arrivals.mu);
	while ((rc = try_pin_locked(f, bytes_read, first, end)) == SFR_EAGAIN && !timed_out)
		timed_out =
			sfr__cond_wait(&sfr__arrivals.progress, &sfr__arrivals.mu, deadline) != 0;
	sfr__unlock(&sfr__arrivals.mu);
	return rc;
}

void sfr__arriving_unpin(struct sfr__arriving_file *f, uint64_t off, uint64_t len)
{
	uint64_t first, end = find_chunks(f, off, len, &first);

	sfr__lock(&sfr__arrivals.mu);
	for (uint64_t i = first; i < end; i++)
		f->chunks[i].pins--;
	sfr__unlock(&sfr__arrivals.mu);
}

void sfr__arriving_request_range(struct sfr__arriving_file *f, const uint32_t *bytes_read,
				 uint64_t off, uint64_t end)
{
	uint64_t i, chunks_end;

	if (sfr__arrivals_are_inherited(f->fork_generation) || end <= off)
		return;
	chunks_end = find_chunks(f, off, end - off, &i); /* chunks [i, chunks_end) */
	if (chunks_end > i + SFR_ARRIVALS_WINDOW)
		chunks_end = i + SFR_ARRIVALS_WINDOW;
	sfr__lock(&sfr__arrivals.mu);
	if (f->group == NULL) /* closed: request nothing */
		chunks_end = i;
	for (; i < chunks_end; i++)
		/* skip chunks that the reader has read completely */
		if (bytes_read == NULL || bytes_read[i] != sfr__chunk_len(f, i))
			request_chunk_locked(f, i);
	sfr__unlock(&sfr__arrivals.mu);
}

uint32_t *sfr__arriving_new_read_counts(const struct sfr__arriving_file *f)
{
	return sfr_sys.calloc(f->nr_chunks, sizeof(uint32_t));
}

/* Adds the bytes of a range to `bytes_read` of its chunks, and sets `read_fully`. */
static void count_read_bytes_locked(struct sfr__arriving_file *f, uint32_t *bytes_read,
				    uint64_t off, uint64_t len)
{
	uint64_t first, end = find_chunks(f, off, len, &first);

	for (uint64_t i = first; i < end; i++) {
		const uint64_t from = i * f->chunk_bytes, to = from + sfr__chunk_len(f, i);
		const uint64_t read_from = off > from ? off : from;
		const uint64_t read_to = off + len < to ? off + len : to;

		bytes_read[i] += (uint32_t)(read_to - read_from);
		f->chunks[i].read_fully =
			bytes_read[i] == to - from && f->chunks[i].state == SFR__PRESENT;
	}
}

/* Finds a chunk that was read completely, and makes it FREEING. Returns false if there is none, or
 * if so few chunks are present that none has to be freed. */
static bool take_chunk_to_free_locked(struct sfr__arriving_file *f, uint64_t *index)
{
	if (f->nr_present <= SFR_ARRIVALS_WINDOW || f->keep_all)
		return false;
	while (f->first_present < f->nr_chunks && f->chunks[f->first_present].state != SFR__PRESENT)
		f->first_present++;
	for (uint64_t i = f->first_present, left = f->nr_present; left != 0; i++) {
		if (f->chunks[i].state == SFR__PRESENT)
			left--;
		if (f->chunks[i].read_fully && f->chunks[i].pins == 0) {
			f->chunks[i].state = SFR__FREEING;
			f->chunks[i].read_fully = false;
			f->nr_present--;
			*index = i;
			return true;
		}
	}
	return false;
}

void sfr__arriving_discard_read_range(struct sfr__arriving_file *f, uint32_t *bytes_read,
				      uint64_t off, uint64_t len)
{
	uint64_t index;

	if (sfr__arrivals_are_inherited(f->fork_generation) || bytes_read == NULL)
		return;
	sfr__lock(&sfr__arrivals.mu);
	count_read_bytes_locked(f, bytes_read, off, len);
	while (take_chunk_to_free_locked(f, &index)) {
		sfr__unlock(&sfr__arrivals.mu);
		/* The range of the last chunk may go past the file's end. If the call fails, the
		 * memory stays. */
		(void)sfr_sys.fallocate(f->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
					(off_t)(index * f->chunk_bytes), (off_t)f->chunk_bytes);
		sfr__lock(&sfr__arrivals.mu);
		f->chunks[index].state = SFR__ABSENT;
		/* a waiting reader requests it again */
		(void)pthread_cond_broadcast(&sfr__arrivals.progress);
	}
	sfr__unlock(&sfr__arrivals.mu);
}

int sfr_arrivals_wait_for_whole_file(int fd, uint64_t slice_ns)
{
	const uint64_t deadline = sfr__deadline(slice_ns);
	struct sfr__arriving_file *f = sfr__arriving_get(fd);
	int rc = 0;

	if (f == NULL)
		return 0;
	sfr__lock(&sfr__arrivals.mu);
	f->keep_all = true;
	sfr__unlock(&sfr__arrivals.mu);
	for (uint64_t off = 0; off < f->len && rc == 0; off += f->chunk_bytes) {
		sfr__arriving_request_range(f, NULL, off, f->len);
		/* waiting for one byte is waiting for its chunk */
		rc = sfr__arriving_wait_and_pin(f, NULL, off, 1, sfr__time_left(deadline));
		if (rc == 0)
			sfr__arriving_unpin(f, off, 1); /* the chunk stays: f->keep_all is set */
	}
	sfr__arriving_put(f);
	return rc;
}
