/* Keeps files whose bytes are still on their way, such as objects of a store.
 *
 * All that reads checkpoints reads an open file. So a remote object becomes one: a file in memory,
 * of the object's length, that consists of holes. A reader waits until the bytes that it needs are
 * there. Other threads fetch what is waited for, and what will be read next.
 *
 *     readers --pin, ahead--> wanted --next--> threads that fetch (Python's, with a store's client)
 *        ^                                        |
 *        +------------- file in memory <---put----+
 *
 * A chunk of the file:
 *
 *     ABSENT --pin, ahead--> WANTED --next--> ASKED --put--> HERE --done--> LEAVING --> ABSENT
 *
 * A reader that goes through the file once says what it has read (sfr__arriving_done). Chunks that
 * it has read completely are given back to the system once more than a window of chunks is here. So
 * a load takes the memory of its tensors and a window, not that of the file. Giving back is safe at
 * any time: a chunk that is read again is fetched again. A pinned chunk stays.
 *
 * A check or a restore knows only the descriptor, by which a source finds the file here. One lock
 * guards all files of the process: there are few, and it is taken once or twice a piece. Bytes are
 * copied and given back without it. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "reader/arrivals.h"
#include "base/base.h"

#define NONE UINT32_MAX

enum state { ABSENT, WANTED, ASKED, HERE, LEAVING };

struct chunk {
	uint32_t next; /* of those that are WANTED */
	uint16_t pins;
	uint8_t state;
	bool done; /* HERE, and read completely by all who have begun to */
};

struct sfr__arriving {
	/* constant */
	uint64_t number, len, chunk, nr;
	int fd;
	uint64_t fork_generation;
	/* guarded by mu */
	struct sfr__arriving *next;
	struct sfr_arrivals *group; /* NULL: it is closed */
	unsigned refs;              /* of the group, of sources, and of calls in progress */
	uint64_t nr_here, behind;   /* no chunk before `behind` is HERE */
	uint32_t first, last;       /* WANTED chunks, the oldest first */
	bool failed, keep;
	struct chunk chunks[];
};

struct sfr_arrivals {
	uint64_t fork_generation; /* constant */
	bool ended;               /* guarded by mu */
};

static struct sfr__mutex mu = SFR__MUTEX(SFR__LOCK_ARRIVALS);
/* guarded by mu */
static struct sfr__arriving *files; /* of all groups, the oldest first */
static uint64_t last_number;
static bool has_conds;
static pthread_cond_t wanted, news; /* for the threads that fetch; for those that read */

static void forget(void)
{
	files = NULL; /* the parent's; sources of them still find the generation there */
	has_conds = false;
	sfr__mutex_init(&mu, SFR__LOCK_ARRIVALS);
}
SFR__AT_FORK(forget)

static bool is_parents(uint64_t fork_generation)
{
	return fork_generation != sfr_fork_generation();
}

/* ---- files -------------------------------------------------------------------- */

static uint64_t len_of(const struct sfr__arriving *f, uint64_t chunk)
{
	const uint64_t off = chunk * f->chunk;

	return f->len - off < f->chunk ? f->len - off : f->chunk;
}

/* Drops a reference. The last one closes the file, without the lock. */
static void drop(struct sfr__arriving *f)
{
	if (sfr__under(&mu, --f->refs) != 0)
		return;
	(void)sfr__fd_close(f->fd); /* memory only */
	sfr_sys.free(f);
}

/* Returns an open file of the group, with a reference, or NULL. */
static struct sfr__arriving *get_locked(const struct sfr_arrivals *group, uint64_t number)
{
	struct sfr__arriving *f = files;

	while (f != NULL && (f->group != group || f->number != number))
		f = f->next;
	if (f != NULL)
		f->refs++;
	return f;
}

struct sfr__arriving *sfr__arriving_get(int fd)
{
	struct sfr__arriving *f;

	sfr__lock(&mu);
	f = files;
	while (f != NULL && f->fd != fd)
		f = f->next;
	if (f != NULL)
		f->refs++;
	sfr__unlock(&mu);
	return f;
}

void sfr__arriving_put(struct sfr__arriving *f)
{
	if (f != NULL && !is_parents(f->fork_generation))
		drop(f);
}

/* ---- those who read ------------------------------------------------------------- */

static void want_locked(struct sfr__arriving *f, uint64_t index)
{
	struct chunk *c = &f->chunks[index];

	if (c->state != ABSENT || f->failed)
		return;
	c->state = WANTED;
	c->next = NONE;
	if (f->first == NONE)
		f->first = (uint32_t)index;
	else
		f->chunks[f->last].next = (uint32_t)index;
	f->last = (uint32_t)index;
	(void)pthread_cond_broadcast(&wanted); /* threads of several groups wait on it */
}

/* Returns the index after the last chunk of a range, or `first` if it is behind the file. */
static uint64_t end_of(const struct sfr__arriving *f, uint64_t off, uint64_t len, uint64_t *first)
{
	const uint64_t end = len < f->len - off ? off + len : f->len;

	*first = off / f->chunk;
	return off >= f->len || len == 0 ? *first : (end - 1) / f->chunk + 1;
}

static void pin_locked(struct sfr__arriving *f, const uint32_t *counts, uint64_t first,
		       uint64_t end)
{
	for (uint64_t i = first; i < end; i++) {
		f->chunks[i].pins++;
		if (counts != NULL && counts[i] != len_of(f, i))
			f->chunks[i].done = false;
	}
}

/* Whether all of them are here. Wants those that are not. */
static bool are_here_locked(struct sfr__arriving *f, uint64_t first, uint64_t end)
{
	bool here = true;

	for (uint64_t i = first; i < end; i++) {
		want_locked(f, i);
		here = here && f->chunks[i].state == HERE;
	}
	return here;
}

int sfr__arriving_pin(struct sfr__arriving *f, const uint32_t *counts, uint64_t off, uint64_t len,
		      uint64_t slice_ns)
{
	const uint64_t deadline = sfr__deadline(slice_ns);
	uint64_t first, end;
	int rc = 0;

	if (is_parents(f->fork_generation))
		return SFR_EFORK;
	end = end_of(f, off, len, &first);
	sfr__lock(&mu);
	for (;;) {
		if (f->group == NULL) {
			rc = -EBADF;
		} else if (f->failed) {
			rc = -EIO;
		} else if (are_here_locked(f, first, end)) {
			pin_locked(f, counts, first, end);
			rc = 0;
		} else if (rc == 0) {
			rc = sfr__cond_wait(&news, &mu, deadline);
			continue;
		}
		break;
	}
	sfr__unlock(&mu);
	return rc;
}

void sfr__arriving_unpin(struct sfr__arriving *f, uint64_t off, uint64_t len)
{
	uint64_t first, end = end_of(f, off, len, &first);

	sfr__lock(&mu);
	for (uint64_t i = first; i < end; i++)
		f->chunks[i].pins--;
	sfr__unlock(&mu);
}

void sfr__arriving_ahead(struct sfr__arriving *f, const uint32_t *counts, uint64_t off,
			 uint64_t end)
{
	uint64_t i, last;

	if (is_parents(f->fork_generation) || end <= off)
		return;
	last = end_of(f, off, end - off, &i);
	if (last > i + SFR_ARRIVALS_WINDOW)
		last = i + SFR_ARRIVALS_WINDOW;
	sfr__lock(&mu);
	for (; f->group != NULL && i < last; i++)
		if (counts == NULL || counts[i] != len_of(f, i)) /* another thread may be further */
			want_locked(f, i);
	sfr__unlock(&mu);
}

uint32_t *sfr__arriving_counts(const struct sfr__arriving *f)
{
	return sfr_sys.calloc(f->nr, sizeof(uint32_t));
}

/* Counts bytes that were read. */
static void count_locked(struct sfr__arriving *f, uint32_t *counts, uint64_t off, uint64_t len)
{
	uint64_t first, end = end_of(f, off, len, &first);

	for (uint64_t i = first; i < end; i++) {
		const uint64_t from = i * f->chunk, to = from + len_of(f, i);
		const uint64_t a = off > from ? off : from;
		const uint64_t b = off + len < to ? off + len : to;

		counts[i] += (uint32_t)(b - a);
		f->chunks[i].done = counts[i] == to - from && f->chunks[i].state == HERE;
	}
}

/* Takes a chunk that may go, if there is one. */
static bool take_done_locked(struct sfr__arriving *f, uint64_t *index)
{
	if (f->nr_here <= SFR_ARRIVALS_WINDOW || f->keep)
		return false;
	while (f->behind < f->nr && f->chunks[f->behind].state != HERE)
		f->behind++;
	for (uint64_t i = f->behind, left = f->nr_here; left != 0; i++) {
		left -= f->chunks[i].state == HERE;
		if (f->chunks[i].done && f->chunks[i].pins == 0) {
			f->chunks[i].state = LEAVING;
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

	if (is_parents(f->fork_generation) || counts == NULL)
		return;
	sfr__lock(&mu);
	count_locked(f, counts, off, len);
	while (take_done_locked(f, &index)) {
		sfr__unlock(&mu);
		/* Whole pages, also at the end of the file. If the system refuses, its bytes are
		 * written over when they come again. */
		(void)sfr_sys.fallocate(f->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
					(off_t)(index * f->chunk), (off_t)f->chunk);
		sfr__lock(&mu);
		f->chunks[index].state = ABSENT;
		(void)pthread_cond_broadcast(&news); /* somebody may want it again */
	}
	sfr__unlock(&mu);
}

int sfr_arrivals_fill(int fd, uint64_t slice_ns)
{
	const uint64_t deadline = sfr__deadline(slice_ns);
	struct sfr__arriving *f = sfr__arriving_get(fd);
	int rc = 0;

	if (f == NULL)
		return 0;
	(void)sfr__under(&mu, f->keep = true);
	for (uint64_t off = 0; off < f->len && rc == 0; off += f->chunk) {
		sfr__arriving_ahead(f, NULL, off, f->len);
		rc = sfr__arriving_pin(f, NULL, off, 1, sfr__time_left(deadline));
		if (rc == 0)
			sfr__arriving_unpin(f, off, 1);
	}
	sfr__arriving_put(f);
	return rc;
}

/* ---- those who fetch ------------------------------------------------------------ */

int sfr_arrivals_new(struct sfr_arrivals **out)
{
	int rc = sfr_fork_init();

	*out = rc < 0 ? NULL : sfr_sys.calloc(1, sizeof(**out));
	if (*out == NULL)
		return rc < 0 ? rc : -ENOMEM;
	(*out)->fork_generation = sfr_fork_generation();
	sfr__lock(&mu);
	if (!has_conds) {
		(void)sfr__cond_init(&wanted); /* cannot fail on Linux */
		(void)sfr__cond_init(&news);
	}
	has_conds = true;
	sfr__unlock(&mu);
	return 0;
}

/* Returns the descriptor or -errno. */
static int open_file(struct sfr__arriving *f)
{
	struct rlimit limit;

	f->fd = -1;
	/* The system would send a signal. */
	if (sfr_sys.get_limit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < f->len)
		return -EFBIG;
	f->fd = sfr__fd_memory("stillframe-remote");
	if (f->fd < 0 || sfr_sys.ftruncate(f->fd, (off_t)f->len) == 0)
		return f->fd;
	return -errno;
}

int sfr_arrivals_open(struct sfr_arrivals *group, uint64_t len, uint64_t chunk, uint64_t *number)
{
	struct sfr__arriving *f, **end;
	uint64_t nr;
	int rc;

	if (is_parents(group->fork_generation))
		return SFR_EFORK;
	if (chunk == 0 || chunk % SFR_PAGE != 0 || len > INT64_MAX || len / chunk >= NONE)
		return -EINVAL;
	nr = (len + chunk - 1) / chunk;
	f = sfr_sys.calloc(1, sizeof(*f) + nr * sizeof(f->chunks[0]));
	if (f == NULL)
		return -ENOMEM;
	f->len = len;
	f->chunk = chunk;
	f->nr = nr;
	f->first = NONE;
	f->refs = 1;
	f->fork_generation = group->fork_generation;
	rc = open_file(f);
	sfr__lock(&mu);
	if (rc >= 0 && group->ended)
		rc = SFR_ECLOSED;
	if (rc >= 0) {
		for (end = &files; *end != NULL;)
			end = &(*end)->next;
		*end = f;
		f->group = group;
		*number = f->number = ++last_number;
	}
	sfr__unlock(&mu);
	if (rc >= 0)
		return rc;
	if (f->fd >= 0)
		(void)sfr__fd_close(f->fd); /* it is empty */
	sfr_sys.free(f);
	return rc;
}

/* Takes the chunk of the group that is wanted longest. */
static bool take_wanted_locked(const struct sfr_arrivals *group, struct sfr_wanted *out)
{
	struct sfr__arriving *f = files;
	uint32_t index;

	while (f != NULL && (f->group != group || f->first == NONE))
		f = f->next;
	if (f == NULL)
		return false;
	index = f->first;
	f->first = f->chunks[index].next;
	f->chunks[index].state = ASKED;
	*out = (struct sfr_wanted){ f->number, index * f->chunk, len_of(f, index) };
	return true;
}

int sfr_arrivals_next(struct sfr_arrivals *group, uint64_t slice_ns, struct sfr_wanted *out)
{
	const uint64_t deadline = sfr__deadline(slice_ns);
	int rc = 0;

	if (is_parents(group->fork_generation))
		return SFR_EFORK;
	sfr__lock(&mu);
	for (;;) {
		if (group->ended)
			rc = SFR_ECLOSED;
		else if (take_wanted_locked(group, out))
			rc = 0;
		else if (rc == 0) {
			rc = sfr__cond_wait(&wanted, &mu, deadline);
			continue;
		}
		break;
	}
	sfr__unlock(&mu);
	return rc;
}

static void fail_locked(struct sfr__arriving *f)
{
	f->failed = true;
	f->first = NONE;
	(void)pthread_cond_broadcast(&news);
}

static bool was_asked_locked(const struct sfr__arriving *f, uint64_t off, size_t len)
{
	const uint64_t index = off / f->chunk;

	return off < f->len && off % f->chunk == 0 && len == len_of(f, index) &&
	       f->chunks[index].state == ASKED;
}

static void arrived_locked(struct sfr__arriving *f, uint64_t index)
{
	f->chunks[index].state = HERE;
	f->nr_here++;
	if (index < f->behind)
		f->behind = index;
	(void)pthread_cond_broadcast(&news);
}

int sfr_arrivals_put(struct sfr_arrivals *group, uint64_t number, uint64_t off, const void *bytes,
		     size_t len)
{
	struct sfr__arriving *f;
	size_t done;
	int rc;

	if (is_parents(group->fork_generation))
		return SFR_EFORK;
	sfr__lock(&mu);
	f = get_locked(group, number);
	rc = f == NULL ? SFR_ECLOSED : was_asked_locked(f, off, len) ? 0 : -EINVAL;
	sfr__unlock(&mu);
	if (f == NULL)
		return rc;
	if (rc == 0)
		rc = sfr__write_all(f->fd, bytes, len, off, &done);
	sfr__lock(&mu);
	if (rc < 0)
		fail_locked(f);
	else
		arrived_locked(f, off / f->chunk);
	sfr__unlock(&mu);
	drop(f);
	return rc;
}

void sfr_arrivals_fail(struct sfr_arrivals *group, uint64_t number)
{
	struct sfr__arriving *f;

	if (is_parents(group->fork_generation))
		return;
	sfr__lock(&mu);
	f = get_locked(group, number);
	if (f != NULL) {
		fail_locked(f);
		f->refs--; /* the group has one */
	}
	sfr__unlock(&mu);
}

/* Takes a file of the group out of the list. Its reference is the caller's then. */
static struct sfr__arriving *take_out_locked(const struct sfr_arrivals *group, uint64_t number)
{
	struct sfr__arriving **link = &files, *f;

	while (*link != NULL && ((*link)->group != group || ((*link)->number != number && number)))
		link = &(*link)->next;
	f = *link;
	if (f != NULL) {
		*link = f->next;
		f->group = NULL;
		(void)pthread_cond_broadcast(&news);
	}
	return f;
}

void sfr_arrivals_close(struct sfr_arrivals *group, uint64_t number)
{
	struct sfr__arriving *f;

	if (is_parents(group->fork_generation))
		return;
	f = sfr__under(&mu, take_out_locked(group, number));
	if (f != NULL)
		drop(f);
}

void sfr_arrivals_end(struct sfr_arrivals *group)
{
	struct sfr__arriving *f;

	if (is_parents(group->fork_generation))
		return;
	sfr__lock(&mu);
	group->ended = true;
	(void)pthread_cond_broadcast(&wanted);
	sfr__unlock(&mu);
	while ((f = sfr__under(&mu, take_out_locked(group, 0))) != NULL) /* 0: any file */
		drop(f);
}

void sfr_arrivals_free(struct sfr_arrivals *group)
{
	if (group == NULL)
		return;
	sfr_arrivals_end(group);
	sfr_sys.free(group);
}
