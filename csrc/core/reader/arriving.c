/* The side of arriving files that readers use; arrivals.c explains these files. */
#include <errno.h>
#include <fcntl.h>

#include "reader/arrivals_int.h"

struct sfr__arrivals_table sfr__arrivals = { .mu = SFR__MUTEX(SFR__LOCK_ARRIVALS) };

static void forget(void)
{
	/* The parent's files are not freed: a source may still read a file's fork generation. */
	sfr__arrivals = (struct sfr__arrivals_table){ .mu = SFR__MUTEX(SFR__LOCK_ARRIVALS) };
}
SFR__AT_FORK(forget)

void sfr__arriving_drop(struct sfr__arriving *f)
{
	if (sfr__under(&sfr__arrivals.mu, --f->refs) != 0)
		return;
	(void)sfr__fd_close(f->fd); /* memory only */
	sfr_sys.free(f);
}

struct sfr__arriving *sfr__arriving_get(int fd)
{
	struct sfr__arriving *f;

	sfr__lock(&sfr__arrivals.mu);
	f = sfr__arrivals.files;
	while (f != NULL && f->fd != fd)
		f = f->next;
	if (f != NULL)
		f->refs++;
	sfr__unlock(&sfr__arrivals.mu);
	return f;
}

void sfr__arriving_put(struct sfr__arriving *f)
{
	if (f != NULL && !sfr__arrivals_are_foreign(f->fork_generation))
		sfr__arriving_drop(f);
}

static void want_locked(struct sfr__arriving *f, uint64_t index)
{
	struct sfr__chunk *c = &f->chunks[index];

	if (c->state != SFR__ABSENT || f->failed)
		return;
	c->state = SFR__WANTED;
	c->next = SFR__NO_CHUNK;
	if (f->first_wanted == SFR__NO_CHUNK)
		f->first_wanted = (uint32_t)index;
	else
		f->chunks[f->last_wanted].next = (uint32_t)index;
	f->last_wanted = (uint32_t)index;
	/* a broadcast: threads of several groups wait */
	(void)pthread_cond_broadcast(&sfr__arrivals.wanted);
}

/* Finds the chunks [*first, returned index) of a range. Bytes after the end of the file have
 * none. */
static uint64_t find_chunks(const struct sfr__arriving *f, uint64_t off, uint64_t len,
			    uint64_t *first)
{
	uint64_t end;

	*first = off / f->chunk_bytes;
	if (off >= f->len || len == 0)
		return *first;
	end = len < f->len - off ? off + len : f->len;
	return (end - 1) / f->chunk_bytes + 1;
}

/* Pins chunks [first, end). Clears `done` of chunks that this reader has not read completely,
 * because another reader may have set it. */
static void pin_locked(struct sfr__arriving *f, const uint32_t *counts, uint64_t first,
		       uint64_t end)
{
	for (uint64_t i = first; i < end; i++) {
		f->chunks[i].pins++;
		if (counts != NULL && counts[i] != sfr__chunk_len(f, i))
			f->chunks[i].done = false;
	}
}

/* Makes absent chunks in [first, end) wanted. Returns whether all chunks are here. */
static bool want_all_locked(struct sfr__arriving *f, uint64_t first, uint64_t end)
{
	bool here = true;

	for (uint64_t i = first; i < end; i++) {
		want_locked(f, i);
		here = here && f->chunks[i].state == SFR__HERE;
	}
	return here;
}

/* Pins chunks [first, end) if all are here. Returns SFR_EAGAIN if not, or -EBADF or -EIO. */
static int try_pin_locked(struct sfr__arriving *f, const uint32_t *counts, uint64_t first,
			  uint64_t end)
{
	if (f->group == NULL)
		return -EBADF;
	if (f->failed)
		return -EIO;
	if (!want_all_locked(f, first, end))
		return SFR_EAGAIN;
	pin_locked(f, counts, first, end);
	return 0;
}

int sfr__arriving_pin(struct sfr__arriving *f, const uint32_t *counts, uint64_t off, uint64_t len,
		      uint64_t slice_ns)
{
	const uint64_t deadline = sfr__deadline(slice_ns);
	uint64_t first, end;
	bool late = false;
	int rc;

	if (sfr__arrivals_are_foreign(f->fork_generation))
		return SFR_EFORK;
	end = find_chunks(f, off, len, &first);
	sfr__lock(&sfr__arrivals.mu);
	while ((rc = try_pin_locked(f, counts, first, end)) == SFR_EAGAIN && !late)
		late = sfr__cond_wait(&sfr__arrivals.news, &sfr__arrivals.mu, deadline) != 0;
	sfr__unlock(&sfr__arrivals.mu);
	return rc;
}

void sfr__arriving_unpin(struct sfr__arriving *f, uint64_t off, uint64_t len)
{
	uint64_t first, end = find_chunks(f, off, len, &first);

	sfr__lock(&sfr__arrivals.mu);
	for (uint64_t i = first; i < end; i++)
		f->chunks[i].pins--;
	sfr__unlock(&sfr__arrivals.mu);
}

void sfr__arriving_ahead(struct sfr__arriving *f, const uint32_t *counts, uint64_t off,
			 uint64_t end)
{
	uint64_t i, last;

	if (sfr__arrivals_are_foreign(f->fork_generation) || end <= off)
		return;
	last = find_chunks(f, off, end - off, &i);
	if (last > i + SFR_ARRIVALS_WINDOW)
		last = i + SFR_ARRIVALS_WINDOW;
	sfr__lock(&sfr__arrivals.mu);
	for (; f->group != NULL && i < last; i++)
		/* not those that are read completely */
		if (counts == NULL || counts[i] != sfr__chunk_len(f, i))
			want_locked(f, i);
	sfr__unlock(&sfr__arrivals.mu);
}

uint32_t *sfr__arriving_counts(const struct sfr__arriving *f)
{
	return sfr_sys.calloc(f->nr_chunks, sizeof(uint32_t));
}

/* Adds the bytes of a range to the counts of its chunks, and sets `done`. */
static void count_locked(struct sfr__arriving *f, uint32_t *counts, uint64_t off, uint64_t len)
{
	uint64_t first, end = find_chunks(f, off, len, &first);

	for (uint64_t i = first; i < end; i++) {
		const uint64_t from = i * f->chunk_bytes, to = from + sfr__chunk_len(f, i);
		const uint64_t read_from = off > from ? off : from;
		const uint64_t read_to = off + len < to ? off + len : to;

		counts[i] += (uint32_t)(read_to - read_from);
		f->chunks[i].done = counts[i] == to - from && f->chunks[i].state == SFR__HERE;
	}
}

/* Chooses a chunk that may lose its memory. Returns false if there is none, or if few are here. */
static bool take_done_locked(struct sfr__arriving *f, uint64_t *index)
{
	if (f->nr_here <= SFR_ARRIVALS_WINDOW || f->keep)
		return false;
	while (f->first_here < f->nr_chunks && f->chunks[f->first_here].state != SFR__HERE)
		f->first_here++;
	for (uint64_t i = f->first_here, left = f->nr_here; left != 0; i++) {
		if (f->chunks[i].state == SFR__HERE)
			left--;
		if (f->chunks[i].done && f->chunks[i].pins == 0) {
			f->chunks[i].state = SFR__LEAVING;
			f->chunks[i].done = false;
			f->nr_here--;
			*index = i;
			return true;
		}
	}
	return false;
}

void sfr__arriving_done(struct sfr__arriving *f, uint32_t *counts, uint64_t off, uint64_t len)
{
	uint64_t index;

	if (sfr__arrivals_are_foreign(f->fork_generation) || counts == NULL)
		return;
	sfr__lock(&sfr__arrivals.mu);
	count_locked(f, counts, off, len);
	while (take_done_locked(f, &index)) {
		sfr__unlock(&sfr__arrivals.mu);
		/* The last chunk's range may go past the file's end. If this is refused, the memory
		 * stays. */
		(void)sfr_sys.fallocate(f->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
					(off_t)(index * f->chunk_bytes), (off_t)f->chunk_bytes);
		sfr__lock(&sfr__arrivals.mu);
		f->chunks[index].state = SFR__ABSENT;
		/* a waiting reader makes it wanted again */
		(void)pthread_cond_broadcast(&sfr__arrivals.news);
	}
	sfr__unlock(&sfr__arrivals.mu);
}

int sfr_arrivals_fill(int fd, uint64_t slice_ns)
{
	const uint64_t deadline = sfr__deadline(slice_ns);
	struct sfr__arriving *f = sfr__arriving_get(fd);
	int rc = 0;

	if (f == NULL)
		return 0;
	sfr__lock(&sfr__arrivals.mu);
	f->keep = true;
	sfr__unlock(&sfr__arrivals.mu);
	for (uint64_t off = 0; off < f->len && rc == 0; off += f->chunk_bytes) {
		sfr__arriving_ahead(f, NULL, off, f->len);
		rc = sfr__arriving_pin(f, NULL, off, 1, sfr__time_left(deadline));
		if (rc == 0)
			sfr__arriving_unpin(f, off, 1);
	}
	sfr__arriving_put(f);
	return rc;
}
