/* The state of a reader, shared by reader.c, plan.c and chunk.c. */
#ifndef SFR_READER_INT_H
#define SFR_READER_INT_H

#include <pthread.h>
#include <stdatomic.h>

#include "reader/reader.h"
#include "base/base.h"

/* The longest local header that is accepted, and the size of the scratch memory. */
#define SFR__READER_HEADER_MAX (SFR__UNZIP_LOCAL + SFR__UNZIP_NAME_MAX + 0xffffu)

struct sfr__reader_record {
	uint64_t data_off; /* constant */
	uint64_t left;     /* units that are not counted yet; guarded by mu */
	uint32_t crc;      /* of the counted bytes; guarded by mu */
	atomic_bool good;  /* complete, and without SFR__READER_LIST also correct */
	const char *wrong; /* the first damage, with SFR__READER_LIST; guarded by mu */
};

struct sfr__reader_thread {
	struct sfr_reader *r;
	pthread_t id;
	char *mem;     /* the scratch memory, and the buffer if it is the reader's own */
	char *scratch; /* SFR__READER_HEADER_MAX bytes, for headers that cross the end of a chunk */
	struct sfr__buffer buffers[SFR__READER_BUFFERS];
	unsigned next_buffer; /* index of the buffer to use next */
};

struct sfr_reader {
	/* constant */
	const struct sfr__listed *listed; /* the records of the listing */
	const struct sfr__listing *listing;
	uint64_t nr, end;    /* number of records; the offset where they end */
	unsigned flags;      /* SFR__READER_* */
	unsigned nr_buffers; /* of each thread; 1: the reader's own */
	size_t chunk_bytes;  /* bytes read at a time */
	const struct sfr__reader_client *client;
	void *self;
	struct sfr__source source;
	uint64_t fork_generation;

	struct sfr__reader_record *records;
	struct sfr__mutex mu; /* a leaf: no other lock is taken under it */
	pthread_cond_t work;  /* wakes the threads */
	pthread_cond_t news;  /* wakes the caller in sfr_reader_wait */
	/* guarded by mu */
	uint64_t next_off; /* offset of the next chunk */
	uint64_t next_rec; /* index of a record at or before the first in that chunk */
	uint64_t upto;     /* only records with a lower index may be read */
	uint64_t until;    /* no chunk from this offset on may be read */
	uint64_t nr_good;  /* number of good records */
	uint64_t awaited;  /* index of the record for which the caller waits */
	uint64_t done;     /* bytes read */
	bool stop;
	struct sfr_reader_failure failure; /* constant once its code is not 0 */

	struct sfr__reader_thread threads[SFR__READER_THREADS];
	unsigned nr_threads;
};

/* Returns whether to repeat a read that returned `rc`: its bytes are still on their way, and the
 * reading has not ended. */
static inline bool sfr__reader_again(struct sfr_reader *r, int64_t rc)
{
	return rc == SFR_EAGAIN && !sfr__under(&r->mu, r->stop);
}

/* Returns where record `i` must have ended: the start of the next record, or of the directory. */
static inline uint64_t sfr__reader_limit(const struct sfr_reader *r, uint64_t i)
{
	return i + 1 < r->nr ? r->listed[i + 1].hdr_off : r->end;
}

static inline uint64_t sfr__reader_data_end(const struct sfr_reader *r, uint64_t i)
{
	return r->records[i].data_off + r->listed[i].len;
}

/* plan.c: sets `data_off` and `left` of all records. Returns 0 or an error of sfr__reader_new. */
int sfr__reader_plan(struct sfr_reader *r);

/* chunk.c: checks the bytes [off, off + len) of the file, which are in the buffer, and hands out
 * those of records [first, last). Stops at the first record that ends the reading. */
void sfr__reader_read_chunk(struct sfr__reader_thread *thread, struct sfr__buffer *buffer,
			    uint64_t off, size_t len, uint64_t first, uint64_t last);
/* ---- verdict.c, with sfr__reader_fail ---- */

/* Records damage to record `i` at offset `off`. Returns whether the reading goes on
 * (SFR__READER_LIST). */
bool sfr__reader_damaged(struct sfr_reader *r, uint64_t i, uint64_t off, const char *wrong);
/* Subtracts units from their record's `left`. If none is left, the record becomes good, or the
 * reader fails if the CRC is wrong. */
void sfr__reader_count_units(struct sfr_reader *r, const struct sfr__record_units *units);
/* Keeps units with the buffer until the client has finished with it. Returns 0 or -ENOMEM. */
int sfr__reader_keep_units(struct sfr__buffer *buffer, const struct sfr__record_units *units);
/* Counts a buffer's kept units, and forgets them. */
void sfr__reader_count_buffer(struct sfr_reader *r, struct sfr__buffer *buffer);

#endif
