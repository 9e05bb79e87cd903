/* Reads the records of an archive on threads, in chunks, and hands the bytes to a client.
 *
 * A disk is fastest when read front to back, in large chunks, several at a time. A loader needs its
 * tensors in the order of the pickle, one by one. So threads read the file in its own order, ahead
 * of the loader:
 *
 *   the file    | chunk | chunk | chunk | chunk | chunk | ...   1 MiB each; a thread takes the next
 *                   |       |
 *                   v       v              into the thread's buffer, in a core's own cache, and
 *   the client  | record 0 | record 1 | record 2 | ...            from there to the client
 *
 * There are two users. A check has no client: the reader only computes CRCs. A restore's client
 * copies the bytes to tensors, or has a device copy them. Chunks are not read directly into a
 * tensor's memory, because torch allocates this memory and does not align it to the file's sectors.
 * The copy takes a twentieth of the time that the disk takes.
 *
 * A thread:
 *
 *     WAIT --a chunk may be read--> READ --all of it--> PUT --> WAIT      reader.c, source.c,
 *       |                            |                   |                chunk.c
 *       +--stop, or no chunk left----+--failure----------+--> END
 *
 * The owner of a buffer that the client has lent. A device still reads from it after the put:
 *
 *     reader --put returned NEEDS_BUFFER, send--> client --finish--> reader
 *
 * A record. Its header, data and descriptor may come in any order and from several threads:
 *
 *     TO COME --all of it is read, CRC right--> GOOD
 *        |
 *        +--header, descriptor, CRC wrong; reading failed--> the reader has failed, for good
 *
 * With SFR__READER_LIST_DAMAGE, damage is noted in the record, the record becomes GOOD, and the
 * reading goes on.
 *
 * The caller says for how many records the client is ready (`nr_allowed`). Threads stop at the
 * first chunk that has bytes of a later record. So, to get a record, the caller must allow all
 * records of its chunks (sfr_reader_count_records_to_allow). A wait for a record beyond the allowed
 * ones would never end, and is refused. The caller uses no record before it is GOOD, so no code
 * sees unchecked bytes. */
#include <errno.h>

#include "reader/reader_int.h"
#include "sfr/limits.h"

/* ---- the threads ------------------------------------------------------------ */

/* A chunk of the file that a thread reads. */
struct chunk {
	uint64_t off;
	size_t len;
	uint64_t first_rec, end_rec; /* records [first_rec, end_rec) have bytes in the chunk */
	uint64_t announce_end;       /* bytes up to this offset will be read soon */
};

/* Finds the next chunk that has bytes of records, without taking it. Returns false at the end. */
static bool find_next_chunk_locked(struct sfr_reader *r, struct chunk *chunk)
{
	for (;;) {
		uint64_t to, data_end, next_start;

		/* skip the records before the chunk */
		while (r->next_rec < r->nr && sfr__reader_next_start(r, r->next_rec) <= r->next_off)
			r->next_rec++;
		if (r->next_rec == r->nr)
			return false;
		to = r->next_off + r->chunk_bytes;
		if (to > r->end)
			to = r->end;
		data_end = sfr__reader_data_end(r, r->next_rec);
		next_start = sfr__reader_next_start(r, r->next_rec);
		/* Skip the chunk if it has only bytes of the gap between two records. All chunks of
		 * a gap are skipped at once, because a hostile file may have a very long gap. */
		if (data_end + SFR__UNZIP_DESC_MAX <= r->next_off && next_start >= to) {
			r->next_off = next_start / r->chunk_bytes * r->chunk_bytes;
			if (r->next_off < to)
				r->next_off = to;
			continue;
		}
		chunk->off = r->next_off;
		chunk->len = (size_t)(to - r->next_off);
		chunk->first_rec = chunk->end_rec = r->next_rec;
		while (chunk->end_rec < r->nr && r->listed[chunk->end_rec].hdr_off < to)
			chunk->end_rec++;
		return true;
	}
}

/* Returns whether the client lends the buffers. Only such a buffer can be needed after a put. */
static bool buffers_are_lent(const struct sfr_reader *r)
{
	return r->nr_buffers > 1;
}

/* Waits until the client has finished with a buffer, and counts its pending fragments. */
static void wait_for_client_to_finish(struct sfr_reader *r, struct sfr__reader_buffer *buffer)
{
	if (!buffers_are_lent(r))
		return;
	if (r->client->finish(r->self, buffer) < 0)
		buffer->nr_pending = 0; /* the reader has failed: their records are never good */
	sfr__reader_apply_pending_fragments(r, buffer);
}

static void wait_for_client_to_finish_all(struct sfr__reader_thread *thread)
{
	/* in the order in which they were sent: the next buffer to use was sent first */
	for (unsigned i = 0; i < thread->r->nr_buffers; i++) {
		unsigned index = (thread->next_buffer + i) % thread->r->nr_buffers;

		wait_for_client_to_finish(thread->r, &thread->buffers[index]);
	}
}

/* Waits until the next chunk may be read, and takes it. Returns false if there is none. Before the
 * wait it finishes the thread's buffers, because the caller may be waiting for their records. */
static bool wait_and_take_next_chunk(struct sfr__reader_thread *thread, struct chunk *chunk)
{
	struct sfr_reader *r = thread->r;
	bool found, finished = false;

	sfr__lock(&r->mu);
	found = !r->stop && find_next_chunk_locked(r, chunk);
	while (found && (chunk->end_rec > r->nr_allowed || chunk->off >= r->end_allowed)) {
		if (finished) {
			/* cannot time out */
			(void)sfr__cond_wait(&r->may_read, &r->mu, SFR_FOREVER);
		} else {
			sfr__unlock(&r->mu);
			wait_for_client_to_finish_all(thread);
			finished = true;
			sfr__lock(&r->mu);
		}
		found = !r->stop && find_next_chunk_locked(r, chunk);
	}
	if (found) {
		r->next_off = chunk->off + chunk->len;
		/* announce all that may be read now: bytes of a remote file are then fetched */
		chunk->announce_end = r->end;
		if (r->nr_allowed < r->nr)
			chunk->announce_end = r->listed[r->nr_allowed].hdr_off;
		if (chunk->announce_end > r->end_allowed)
			chunk->announce_end = r->end_allowed;
	}
	sfr__unlock(&r->mu);
	return found;
}

/* Returns the record at the beginning of the chunk, to name it in a failure. */
static uint64_t first_record_of(const struct sfr_reader *r, const struct chunk *chunk)
{
	uint64_t i = chunk->first_rec;

	while (i + 1 < chunk->end_rec && sfr__reader_next_start(r, i) <= chunk->off)
		i++;
	return i;
}

/* Reads a chunk and hands it to the client. Returns false if the thread is to end. */
static bool read_and_hand_over_chunk(struct sfr__reader_thread *thread, const struct chunk *chunk)
{
	struct sfr_reader *r = thread->r;
	struct sfr__reader_buffer *buffer = &thread->buffers[thread->next_buffer];
	int rc;

	wait_for_client_to_finish(r, buffer);
	thread->next_buffer = (thread->next_buffer + 1) % r->nr_buffers;
	if (buffer->mem == NULL)
		return false; /* its memory is lost to a dead device; the reader has failed */
	sfr__source_announce_read(&r->source, chunk->off, chunk->announce_end);
	do
		rc = sfr__source_read(&r->source, buffer->mem, chunk->len, chunk->off);
	while (sfr__reader_should_retry(r, rc));
	if (rc == SFR_EAGAIN)
		return false; /* the reader was stopped */
	if (rc != 0) {
		sfr__reader_fail(r, rc, first_record_of(r, chunk), chunk->off,
				 rc == SFR_ECORRUPT ? SFR__READER_SHORTER : NULL);
		return false;
	}
	sfr__reader_process_chunk(thread, buffer, chunk->off, chunk->len, chunk->first_rec,
				  chunk->end_rec);
	if (buffers_are_lent(r) && r->client->send(r->self, buffer) < 0)
		buffer->nr_pending = 0; /* the reader has failed */
	sfr__lock(&r->mu);
	r->bytes_read += chunk->len;
	sfr__unlock(&r->mu);
	sfr__source_discard_read_range(&r->source, chunk->off, chunk->len);
	return true;
}

static void *reader_main(void *arg)
{
	struct sfr__reader_thread *thread = arg;
	struct chunk chunk;

	while (wait_and_take_next_chunk(thread, &chunk) && read_and_hand_over_chunk(thread, &chunk))
		;
	wait_for_client_to_finish_all(thread);
	return NULL;
}

static void free_thread_memory(struct sfr__reader_thread *thread, bool is_child)
{
	const struct sfr_reader *r = thread->r;

	/* A child leaves the buffers alone: the parent may have been changing them at the fork. */
	for (unsigned i = 0; i < r->nr_buffers && !is_child; i++) {
		if (buffers_are_lent(r))
			r->client->take_back(r->self, &thread->buffers[i]);
		sfr_sys.free(thread->buffers[i].pending);
	}
	sfr_sys.free(thread->mem);
}

/* Gives a thread its buffers and scratch memory. Returns 0 or -ENOMEM. After an error the caller
 * calls free_thread_memory. */
static int give_memory(struct sfr__reader_thread *thread)
{
	const struct sfr_reader *r = thread->r;
	const bool lent = buffers_are_lent(r);
	const size_t own_bytes = lent ? 0 : r->chunk_bytes; /* for the reader's own buffer */
	/* SFR_PAGE more, because the memory is used from its first whole page on */
	char *mem = sfr_sys.malloc(own_bytes + SFR__READER_HEADER_MAX + SFR_PAGE);

	thread->mem = mem;
	if (mem == NULL)
		return -ENOMEM;
	mem = sfr__round_up_to_page(mem);
	thread->scratch = mem + own_bytes;
	for (unsigned i = 0; i < r->nr_buffers; i++) {
		thread->buffers[i].mem = lent ? r->client->lend(r->self, r->chunk_bytes) : mem;
		if (thread->buffers[i].mem == NULL)
			return -ENOMEM;
	}
	return 0;
}

/* Starts a thread at the caller's priority (SFR__AWAITED). Returns 0 or -errno. */
static int start_thread(struct sfr_reader *r)
{
	struct sfr__reader_thread *thread = &r->threads[r->nr_threads];
	int rc;

	*thread = (struct sfr__reader_thread){ .r = r };
	for (unsigned i = 0; i < SFR__READER_BUFFERS; i++)
		thread->buffers[i].number = r->nr_threads * SFR__READER_BUFFERS + i;
	rc = give_memory(thread);
	if (rc == 0)
		rc = sfr__thread_start(&thread->id, "sfr-reader", SFR__AWAITED, reader_main,
				       thread);
	if (rc < 0)
		free_thread_memory(thread, false); /* this process is no child */
	else
		r->nr_threads++;
	return rc;
}

/* ---- for the caller ---------------------------------------------------------- */

int sfr__reader_new(const struct sfr__reader_spec *spec, struct sfr_reader **out)
{
	struct sfr_reader *r;
	int rc = sfr_fork_init();

	*out = NULL;
	if (rc == 0 && (spec->listing->incomplete || spec->listing->nr == 0))
		rc = -EOPNOTSUPP;
	if (rc < 0)
		return rc;
	r = sfr_sys.calloc(1, sizeof(*r));
	if (r == NULL)
		return -ENOMEM;
	r->listing = spec->listing;
	r->listed = spec->listing->records;
	r->nr = r->awaited_index = spec->listing->nr;
	r->end = spec->end;
	r->flags = spec->flags;
	r->client = spec->client;
	r->self = spec->self;
	r->nr_buffers = 1;
	r->end_allowed = UINT64_MAX; /* no limit */
	r->chunk_bytes = (size_t)sfr_limits.reader_chunk_bytes;
	r->fork_generation = sfr_fork_generation();
	sfr__mutex_init(&r->mu, SFR__LOCK_READER);
	(void)sfr__cond_init(&r->may_read);
	(void)sfr__cond_init(&r->progress);
	sfr__source_open(&r->source, spec->fd, spec->base, spec->way);
	r->records = sfr_sys.calloc(r->nr, sizeof(*r->records));
	rc = r->records == NULL ? -ENOMEM : sfr__reader_compute_data_offsets(r);
	if (rc < 0)
		sfr__reader_free(r);
	else
		*out = r;
	return rc;
}

/* Returns the end of the last chunk that the record needs: the one with the first byte after its
 * data, where the descriptor begins. */
static uint64_t last_needed_chunk_end(const struct sfr_reader *r, uint64_t index)
{
	return sfr__round_up(sfr__reader_data_end(r, index) + 1, r->chunk_bytes);
}

uint64_t sfr_reader_count_records_to_allow(const struct sfr_reader *r, uint64_t index)
{
	const uint64_t to = last_needed_chunk_end(r, index);

	return sfr__lower_bound(i, index + 1, r->nr, r->listed[i].hdr_off < to);
}

void sfr_reader_stop_after(struct sfr_reader *r, uint64_t index)
{
	sfr__lock(&r->mu);
	r->end_allowed = last_needed_chunk_end(r, index);
	(void)pthread_cond_broadcast(&r->may_read);
	sfr__unlock(&r->mu);
}

int sfr_reader_allow_records(struct sfr_reader *r, uint64_t nr)
{
	const uint64_t nr_chunks = r->end / r->chunk_bytes + 1;
	int rc = 0;

	if (r->fork_generation != sfr_fork_generation())
		return SFR_EFORK;
	sfr__lock(&r->mu);
	if (nr > r->nr_allowed)
		r->nr_allowed = nr;
	(void)pthread_cond_broadcast(&r->may_read);
	sfr__unlock(&r->mu);
	if (r->nr_threads != 0)
		return 0;
	if (r->client != NULL && r->client->lend != NULL) /* the client lends buffers */
		r->nr_buffers = SFR__READER_BUFFERS;
	while (r->nr_threads < SFR__READER_THREADS && r->nr_threads < nr_chunks && rc == 0)
		rc = start_thread(r);
	return r->nr_threads == 0 ? rc : 0; /* fewer threads are only slower */
}

bool sfr__reader_has_started(const struct sfr_reader *r)
{
	return r->nr_threads != 0;
}

/* Returns whether the threads are allowed to read all that record `index` needs. If `index` is
 * r->nr, returns whether they are allowed to read everything. */
static bool is_within_reach_locked(const struct sfr_reader *r, uint64_t index)
{
	if (index == r->nr)
		return r->nr_allowed == r->nr && r->end_allowed >= r->end;
	return sfr_reader_count_records_to_allow(r, index) <= r->nr_allowed &&
	       last_needed_chunk_end(r, index) <= r->end_allowed;
}

/* Returns the result of a wait for `index`, or SFR_EAGAIN if the caller has to wait. */
static int get_wait_result_locked(const struct sfr_reader *r, uint64_t index)
{
	if (index < r->nr && atomic_load(&r->records[index].good))
		return 0;
	if (index >= r->nr && r->nr_good == r->nr) /* a wait for all records */
		return 0;
	if (r->failure.code != 0)
		return r->failure.code;
	if (!is_within_reach_locked(r, index))
		return SFR_EUNPLACED; /* the wait would never end */
	return SFR_EAGAIN;
}

int sfr_reader_wait(struct sfr_reader *r, uint64_t index, uint64_t slice_ns)
{
	const uint64_t deadline = sfr__deadline(slice_ns);
	bool timed_out = false;
	int rc;

	if (index < r->nr && atomic_load(&r->records[index].good))
		return 0;
	if (r->fork_generation != sfr_fork_generation())
		return SFR_EFORK;
	sfr__lock(&r->mu);
	r->awaited_index = index;
	while ((rc = get_wait_result_locked(r, index)) == SFR_EAGAIN && !timed_out)
		timed_out = sfr__cond_wait(&r->progress, &r->mu, deadline) != 0;
	sfr__unlock(&r->mu);
	return rc;
}

const struct sfr_reader_failure *sfr_reader_failure(const struct sfr_reader *r)
{
	return &r->failure;
}

const char *sfr__reader_damage(const struct sfr_reader *r, uint64_t index, bool *unchecked)
{
	const struct sfr__reader_record *record = &r->records[index];

	/* If the CRCs differ without damage, the archive states none (0), and no bytes were
	 * compared. */
	*unchecked = record->damage == NULL && record->crc != r->listed[index].crc;
	return record->damage;
}

uint64_t sfr__reader_data_off(const struct sfr_reader *r, uint64_t index)
{
	return r->records[index].data_off;
}

uint64_t sfr_reader_bytes_read(struct sfr_reader *r)
{
	return sfr__under(&r->mu, r->bytes_read);
}

/* Not called in a forked child, which has no threads. */
static void end_threads(struct sfr_reader *r)
{
	sfr__lock(&r->mu);
	r->stop = true;
	(void)pthread_cond_broadcast(&r->may_read);
	sfr__unlock(&r->mu);
	for (unsigned i = 0; i < r->nr_threads; i++)
		(void)sfr_sys.thread_join(r->threads[i].id, NULL); /* each thread is joined once */
	(void)pthread_cond_destroy(&r->progress);
	(void)pthread_cond_destroy(&r->may_read);
	sfr__mutex_fini(&r->mu);
}

void sfr__reader_free(struct sfr_reader *r)
{
	bool is_child;

	if (r == NULL)
		return;
	is_child = r->fork_generation != sfr_fork_generation();
	if (!is_child)
		end_threads(r);
	for (unsigned i = 0; i < r->nr_threads; i++)
		free_thread_memory(&r->threads[i], is_child);
	sfr__source_close(&r->source);
	sfr_sys.free(r->records);
	sfr_sys.free(r);
}
