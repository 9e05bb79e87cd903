/* Arriving files: files in memory whose bytes are still on their way, such as objects of a store.
 *
 * All code that reads checkpoints reads open files. So a remote object becomes an open file in
 * memory, as long as the object and empty at first. A reader waits until the bytes that it needs
 * are there. Other threads fetch what readers wait for and what will be read next. In the diagrams,
 * pin, request and discard are sfr__arriving_wait_and_pin, sfr__arriving_request_range and
 * sfr__arriving_discard_read_range; next and put are sfr_arrivals_*.
 *
 *     readers --pin, request--> requests --next--> threads that fetch (Python's)
 *        ^                                            |
 *        +------------- file in memory <-----put------+
 *
 * States of a chunk of the file:
 *
 *     ABSENT --pin, request--> REQUESTED --next--> FETCHING --put--> PRESENT
 *        ^                                                              |
 *        +----------------------- FREEING <-----------discard-----------+
 *
 * A reader that goes through the file once discards what it has read. When more than
 * SFR_ARRIVALS_WINDOW chunks are present, chunks that are read completely lose their memory. So a
 * load needs memory for its tensors and for that many chunks, not for the whole file. A chunk that
 * is read again is fetched again. A chunk is pinned while it is read, and a pinned chunk stays.
 *
 * One lock guards all files of the process. It is not held while bytes are copied or memory is
 * given back. This file has the functions for threads that fetch; arriving.c has those for
 * readers. */
#include <errno.h>
#include <sys/resource.h>

#include "reader/arrivals_int.h"

/* Returns the group's file with this number, or NULL. The caller gets a reference, which it drops
 * with sfr__arriving_drop. */
static struct sfr__arriving_file *get_file_locked(const struct sfr_arrivals *group, uint64_t number)
{
	struct sfr__arriving_file *f = sfr__arrivals.files;

	while (f != NULL && (f->group != group || f->number != number))
		f = f->next;
	if (f != NULL)
		f->refs++;
	return f;
}

int sfr_arrivals_new(struct sfr_arrivals **out)
{
	int rc = sfr_fork_init();

	*out = NULL;
	if (rc < 0)
		return rc;
	*out = sfr_sys.calloc(1, sizeof(**out));
	if (*out == NULL)
		return -ENOMEM;
	(*out)->fork_generation = sfr_fork_generation();
	sfr__lock(&sfr__arrivals.mu);
	if (!sfr__arrivals.has_conds) {
		(void)sfr__cond_init(&sfr__arrivals.has_requests); /* cannot fail on Linux */
		(void)sfr__cond_init(&sfr__arrivals.progress);
	}
	sfr__arrivals.has_conds = true;
	sfr__unlock(&sfr__arrivals.mu);
	return 0;
}

/* Returns the descriptor, or -errno. After an error the caller closes f->fd if it is open. */
static int make_memory_file(struct sfr__arriving_file *f)
{
	struct rlimit limit;

	f->fd = -1;
	/* A longer file would raise SIGXFSZ. */
	if (sfr_sys.get_limit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < f->len)
		return -EFBIG;
	f->fd = sfr__fd_open_memory("stillframe-remote");
	if (f->fd < 0)
		return f->fd; /* -errno */
	if (sfr_sys.ftruncate(f->fd, (off_t)f->len) != 0)
		return -errno;
	return f->fd;
}

int sfr_arrivals_open(struct sfr_arrivals *group, uint64_t len, uint64_t chunk, uint64_t *number)
{
	struct sfr__arriving_file *f, **end;
	uint64_t nr;
	int rc;

	if (sfr__arrivals_are_inherited(group->fork_generation))
		return SFR_EFORK;
	if (chunk == 0 || chunk % SFR_PAGE != 0 || len > INT64_MAX || len / chunk >= SFR__NO_CHUNK)
		return -EINVAL;
	nr = (len + chunk - 1) / chunk;
	f = sfr_sys.calloc(1, sizeof(*f) + nr * sizeof(f->chunks[0]));
	if (f == NULL)
		return -ENOMEM;
	f->len = len;
	f->chunk_bytes = chunk;
	f->nr_chunks = nr;
	f->first_requested = SFR__NO_CHUNK;
	f->refs = 1; /* the group's */
	f->fork_generation = group->fork_generation;
	rc = make_memory_file(f); /* a descriptor, which the call returns */
	sfr__lock(&sfr__arrivals.mu);
	if (rc >= 0 && group->ended)
		rc = SFR_ECLOSED;
	if (rc >= 0) {
		end = &sfr__arrivals.files;
		while (*end != NULL)
			end = &(*end)->next;
		*end = f;
		f->group = group;
		*number = f->number = ++sfr__arrivals.last_number;
	}
	sfr__unlock(&sfr__arrivals.mu);
	if (rc >= 0)
		return rc;
	if (f->fd >= 0)
		(void)sfr__fd_close(f->fd); /* it is empty */
	sfr_sys.free(f);
	return rc;
}

/* Takes the first requested chunk of the group's oldest file that has any, and makes it FETCHING.
 * Returns 0, SFR_EAGAIN if there is none, or SFR_ECLOSED. */
static int take_requested_chunk_locked(const struct sfr_arrivals *group,
				       struct sfr_arrivals_wanted_range *out)
{
	struct sfr__arriving_file *f = sfr__arrivals.files;
	uint32_t index;

	if (group->ended)
		return SFR_ECLOSED;
	while (f != NULL && (f->group != group || f->first_requested == SFR__NO_CHUNK))
		f = f->next;
	if (f == NULL)
		return SFR_EAGAIN;
	index = f->first_requested;
	f->first_requested = f->chunks[index].next;
	f->chunks[index].state = SFR__FETCHING;
	*out = (struct sfr_arrivals_wanted_range){ f->number, index * f->chunk_bytes,
						   sfr__chunk_len(f, index) };
	return 0;
}

int sfr_arrivals_next(struct sfr_arrivals *group, uint64_t slice_ns,
		      struct sfr_arrivals_wanted_range *out)
{
	const uint64_t deadline = sfr__deadline(slice_ns);
	bool timed_out = false;
	int rc;

	if (sfr__arrivals_are_inherited(group->fork_generation))
		return SFR_EFORK;
	sfr__lock(&sfr__arrivals.mu);
	while ((rc = take_requested_chunk_locked(group, out)) == SFR_EAGAIN && !timed_out)
		timed_out = sfr__cond_wait(&sfr__arrivals.has_requests, &sfr__arrivals.mu,
					   deadline) != 0;
	sfr__unlock(&sfr__arrivals.mu);
	return rc;
}

/* Makes all waits for bytes of the file fail. */
static void fail_arriving_locked(struct sfr__arriving_file *f)
{
	f->failed = true;
	f->first_requested = SFR__NO_CHUNK; /* no more chunks are fetched */
	(void)pthread_cond_broadcast(&sfr__arrivals.progress);
}

/* Returns whether this range is a chunk that sfr_arrivals_next has given to a thread. */
static bool is_being_fetched_locked(const struct sfr__arriving_file *f, uint64_t off, size_t len)
{
	const uint64_t index = off / f->chunk_bytes;

	return off < f->len && off % f->chunk_bytes == 0 && len == sfr__chunk_len(f, index) &&
	       f->chunks[index].state == SFR__FETCHING;
}

/* Makes a chunk that was fetched PRESENT. */
static void mark_present_locked(struct sfr__arriving_file *f, uint64_t index)
{
	f->chunks[index].state = SFR__PRESENT;
	f->nr_present++;
	if (index < f->first_present)
		f->first_present = index;
	(void)pthread_cond_broadcast(&sfr__arrivals.progress);
}

int sfr_arrivals_put(struct sfr_arrivals *group, uint64_t number, uint64_t off, const void *bytes,
		     size_t len)
{
	struct sfr__arriving_file *f;
	size_t written; /* not used: after a failure the whole file has failed */
	int rc;

	if (sfr__arrivals_are_inherited(group->fork_generation))
		return SFR_EFORK;
	sfr__lock(&sfr__arrivals.mu);
	f = get_file_locked(group, number);
	if (f == NULL)
		rc = SFR_ECLOSED;
	else
		rc = is_being_fetched_locked(f, off, len) ? 0 : -EINVAL;
	sfr__unlock(&sfr__arrivals.mu);
	if (f == NULL)
		return rc;
	if (rc == 0)
		rc = sfr__write_all(f->fd, bytes, len, off, &written);
	sfr__lock(&sfr__arrivals.mu);
	if (rc < 0) /* also after -EINVAL: the bytes that readers wait for would never come */
		fail_arriving_locked(f);
	else
		mark_present_locked(f, off / f->chunk_bytes);
	sfr__unlock(&sfr__arrivals.mu);
	sfr__arriving_drop(f);
	return rc;
}

void sfr_arrivals_fail(struct sfr_arrivals *group, uint64_t number)
{
	struct sfr__arriving_file *f;

	if (sfr__arrivals_are_inherited(group->fork_generation))
		return;
	sfr__lock(&sfr__arrivals.mu);
	f = get_file_locked(group, number);
	if (f != NULL) {
		fail_arriving_locked(f);
		f->refs--; /* not the last one: the group has a reference */
	}
	sfr__unlock(&sfr__arrivals.mu);
}

/* Removes the group's file with this number, or any file of the group if the number is 0. Returns
 * the file, or NULL if there is none. The caller gets the group's reference. */
static struct sfr__arriving_file *take_file_out_locked(const struct sfr_arrivals *group,
						       uint64_t number)
{
	struct sfr__arriving_file **link = &sfr__arrivals.files, *f;

	while (*link != NULL) {
		if ((*link)->group == group && (number == 0 || (*link)->number == number))
			break;
		link = &(*link)->next;
	}
	f = *link;
	if (f != NULL) {
		*link = f->next;
		f->group = NULL;
		(void)pthread_cond_broadcast(&sfr__arrivals.progress);
	}
	return f;
}

void sfr_arrivals_close(struct sfr_arrivals *group, uint64_t number)
{
	struct sfr__arriving_file *f;

	if (sfr__arrivals_are_inherited(group->fork_generation))
		return;
	f = sfr__under(&sfr__arrivals.mu, take_file_out_locked(group, number));
	if (f != NULL)
		sfr__arriving_drop(f);
}

void sfr_arrivals_end(struct sfr_arrivals *group)
{
	struct sfr__arriving_file *f;

	if (sfr__arrivals_are_inherited(group->fork_generation))
		return;
	sfr__lock(&sfr__arrivals.mu);
	group->ended = true;
	(void)pthread_cond_broadcast(&sfr__arrivals.has_requests);
	sfr__unlock(&sfr__arrivals.mu);
	/* 0: any file of the group */
	while ((f = sfr__under(&sfr__arrivals.mu, take_file_out_locked(group, 0))) != NULL)
		sfr__arriving_drop(f);
}

void sfr_arrivals_free(struct sfr_arrivals *group)
{
	if (group == NULL)
		return;
	sfr_arrivals_end(group);
	sfr_sys.free(group);
}
