/* The state of a reader, shared by reader.c, plan.c and chunk.c. */
#ifndef SFR_READER_INT_H
#define SFR_READER_INT_H

#include <pthread.h>
#include <stdatomic.h>

#include "reader/reader.h"
#include "base/base.h"

/* The longest local header that a plan accepts, and the most that is read into the scratch memory
 * at a time. */
#define SFR__READER_HEADER_MAX (SFR__UNZIP_LOCAL + SFR__UNZIP_NAME_MAX + 0xffffu)

struct sfr__reader_record {
	uint64_t data_off; /* constant */
	/* units to come: bytes, and one each for header and descriptor; guarded by mu */
	uint64_t left;
	/* of the bytes so far, each stretch shifted by the length after it; guarded by mu */
	uint32_t crc;
	atomic_bool good;  /* complete, and correct without SFR__READER_LIST */
	const char *wrong; /* the first damage, with SFR__READER_LIST; guarded by mu */
};

struct sfr__reader_thread {
	struct sfr_reader *r;
	pthread_t id;
	char *mem; /* the only buffer, unless the client lends them, and the scratch memory */
	/* SFR__READER_HEADER_MAX bytes, for headers that cross the end of a chunk */
	char *scratch;
	struct sfr__buffer buffers[SFR__READER_BUFFERS];
	unsigned turn; /* index of the next buffer */
};

struct sfr_reader {
	/* constant */
	const struct sfr__listed *listed; /* the records of the listing */
	const struct sfr__listing *listing;
	uint64_t nr, end;           /* number of records; end of their bytes */
	unsigned flags, nr_buffers; /* buffers of a thread */
	size_t chunk_bytes;         /* bytes read at a time */
	const struct sfr__reader_client *client;
	void *self;
	struct sfr__source source;
	uint64_t fork_generation;

	struct sfr__reader_record *records;
	struct sfr__mutex mu; /* a leaf: no other lock is taken under it */
	pthread_cond_t work, news;
	/* guarded by mu */
	uint64_t next_off; /* of the next chunk */
	uint64_t next_rec; /* a record at or before the chunk's first */
	uint64_t upto;     /* records before it may be read */
	uint64_t until;    /* and no chunk from this offset on */
	uint64_t nr_good, awaited;
	uint64_t done; /* bytes read */
	bool stop;
	struct sfr_reader_failure failure; /* constant once its code is not 0 */

	struct sfr__reader_thread threads[SFR__READER_THREADS];
	unsigned nr_threads;
};

/* Whether a read that returned rc is to be repeated: the bytes are still on their way, and the
 * reading has not ended. */
static inline bool sfr__reader_again(struct sfr_reader *r, int64_t rc)
{
	return rc == SFR_EAGAIN && !sfr__under(&r->mu, r->stop);
}

/* Returns the offset where record `i` must have ended: at the next one, or at the directory. */
static inline uint64_t sfr__reader_limit(const struct sfr_reader *r, uint64_t i)
{
	return i + 1 < r->nr ? r->listed[i + 1].hdr_off : r->end;
}

static inline uint64_t sfr__reader_data_end(const struct sfr_reader *r, uint64_t i)
{
	return r->records[i].data_off + r->listed[i].len;
}

/* plan.c: sets data_off and left of all records. 0, -EOPNOTSUPP, -EINVAL for bare records that
 * overlap, or -errno. */
int sfr__reader_plan(struct sfr_reader *r);

/* chunk.c: checks [off, off + len) of the file, which is in the buffer, and hands out records
 * [first, last). */
void sfr__reader_read_chunk(struct sfr__reader_thread *thread, struct sfr__buffer *buffer,
			    uint64_t off, size_t len, uint64_t first, uint64_t last);
/* ---- verdict.c, with sfr__reader_fail ---- */

/* Records damage to a record. True: the reading goes on (SFR__READER_LIST); false: it has
 * failed. */
bool sfr__reader_damaged(struct sfr_reader *r, uint64_t i, uint64_t off, const char *wrong);
/* Counts more units of a record. */
void sfr__reader_count_units(struct sfr_reader *r, const struct sfr__record_units *units);
/* Keeps units of a record with the buffer, to count when the client has finished with it.
 * -ENOMEM. */
int sfr__reader_keep_units(struct sfr__buffer *buffer, const struct sfr__record_units *units);
/* Counts the units that were kept with a buffer, and forgets them. */
void sfr__reader_count_buffer(struct sfr_reader *r, struct sfr__buffer *buffer);

#endif
