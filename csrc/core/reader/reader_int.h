/* The state of a reader, shared by reader.c, plan.c and chunk.c. */
#ifndef SFR_READER_INT_H
#define SFR_READER_INT_H

#include <pthread.h>
#include <stdatomic.h>

#include "reader/reader.h"
#include "base/base.h"

/* The longest local header that is accepted, and the size of the scratch memory. */
#define SFR__READER_HEADER_MAX (SFR__UNZIP_LOCAL_LEN + SFR__UNZIP_NAME_MAX + 0xffffu)

/* A record, as the reader knows it. */
struct sfr__reader_record {
	uint64_t data_off; /* constant */
	/* bytes of data to read, plus 1 for the header, and 1 for the descriptor if there is one;
	 * guarded by mu */
	uint64_t nr_unread;
	uint32_t crc;       /* XOR of the CRCs of the fragments read so far; guarded by mu */
	atomic_bool good;   /* complete, and without SFR__READER_LIST_DAMAGE also correct */
	const char *damage; /* the first damage, with SFR__READER_LIST_DAMAGE; guarded by mu */
};

struct sfr__reader_thread {
	struct sfr_reader *r;
	pthread_t id;
	char *mem;     /* one allocation: `scratch`, and the buffer unless the client lends it */
	char *scratch; /* SFR__READER_HEADER_MAX bytes, for headers that cross the end of a chunk */
	struct sfr__reader_buffer buffers[SFR__READER_BUFFERS];
	unsigned next_buffer; /* index of the buffer to use next */
};

struct sfr_reader {
	/* constant */
	const struct sfr__listed_record *listed; /* the records of the listing */
	const struct sfr__listing *listing;
	uint64_t nr;         /* number of records */
	uint64_t end;        /* offset where the last record ends */
	unsigned flags;      /* SFR__READER_* */
	unsigned nr_buffers; /* of each thread; 1: the reader's own, more: lent by the client */
	size_t chunk_bytes;  /* bytes read at a time */
	const struct sfr__reader_client *client;
	void *self; /* the first argument of the client's functions */
	struct sfr__source source;
	uint64_t fork_generation;

	struct sfr__reader_record *records; /* one for each of `listed` */
	struct sfr__mutex mu;               /* a leaf: no other lock is taken under it */
	pthread_cond_t may_read;            /* wakes the threads */
	pthread_cond_t progress;            /* wakes the caller in sfr_reader_wait */
	/* guarded by mu */
	uint64_t next_off;      /* offset of the next chunk to read */
	uint64_t next_rec;      /* index of a record at or before the first in that chunk */
	uint64_t nr_allowed;    /* only records with a lower index may be read */
	uint64_t end_allowed;   /* no chunk from this offset on may be read */
	uint64_t nr_good;       /* number of good records */
	uint64_t awaited_index; /* the record for which the caller waits; nr: all records */
	uint64_t bytes_read;
	bool stop;
	struct sfr_reader_failure failure; /* constant once its code is not 0 */

	struct sfr__reader_thread threads[SFR__READER_THREADS];
	unsigned nr_threads;
};

/* Returns whether to repeat a read that returned `rc`, because its bytes are still on their way and
 * the reader has not been stopped. */
static inline bool sfr__reader_should_retry(struct sfr_reader *r, int64_t rc)
{
	return rc == SFR_EAGAIN && !sfr__under(&r->mu, r->stop);
}

/* Returns the offset before which record `i` must end: the start of the next record, or r->end. */
static inline uint64_t sfr__reader_next_start(const struct sfr_reader *r, uint64_t i)
{
	return i + 1 < r->nr ? r->listed[i + 1].hdr_off : r->end;
}

static inline uint64_t sfr__reader_data_end(const struct sfr_reader *r, uint64_t i)
{
	return r->records[i].data_off + r->listed[i].len;
}

/* plan.c: sets `data_off` and `nr_unread` of all records. Returns 0 or an error of
 * sfr__reader_new. */
int sfr__reader_compute_data_offsets(struct sfr_reader *r);

/* chunk.c: checks the bytes [off, off + len) of the file, which are in the buffer, and hands those
 * of records [first, end) to the client. Stops after a failure of the reader. */
void sfr__reader_process_chunk(struct sfr__reader_thread *thread, struct sfr__reader_buffer *buffer,
			       uint64_t off, size_t len, uint64_t first, uint64_t end);
/* ---- verdict.c, which also has sfr__reader_fail ---- */

/* Reports damage to record `i` at offset `off`. Returns true if the reading goes on, which it does
 * with SFR__READER_LIST_DAMAGE. Otherwise the reader fails. */
bool sfr__reader_report_damage(struct sfr_reader *r, uint64_t i, uint64_t off, const char *wrong);
/* Counts a fragment of a record as read. If all of the record is read, the record becomes good, or
 * the reader fails if the CRC is wrong. */
void sfr__reader_apply_fragment(struct sfr_reader *r, const struct sfr__record_fragment *fragment);
/* Adds a fragment to buffer->pending, to be counted when the client has finished with the buffer.
 * Returns 0 or -ENOMEM. */
int sfr__reader_add_pending_fragment(struct sfr__reader_buffer *buffer,
				     const struct sfr__record_fragment *fragment);
/* Counts the fragments in buffer->pending, and empties that list. */
void sfr__reader_apply_pending_fragments(struct sfr_reader *r, struct sfr__reader_buffer *buffer);

#endif
