/* Reads the records of an archive on threads, compares their CRCs, and hands the bytes to a client.
 * See reader.c.
 *
 *     sfr__reader_new(&spec, &reader);
 *     sfr_reader_allow(reader, i);                     the first i records may be read
 *     while ((rc = sfr_reader_wait(reader, index, slice_ns)) == SFR_EAGAIN)
 *             ...;
 *     sfr__reader_free(reader);
 *
 * One thread at a time uses a reader. After a fork the child may only free it. */
#ifndef SFR_READER_H
#define SFR_READER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "reader/listing.h"
#include "reader/source.h"

#define SFR__READER_CHUNK_MAX (1u << 20) /* fits a core's own cache; sfr_limits may ask for less */
#define SFR__READER_THREADS 4u
/* buffers of each thread if the client lends memory: one is filled while the client sends the
 * other */
#define SFR__READER_BUFFERS 2u
#define SFR__READER_SHORTER "the file became shorter while it was read"

#define SFR__READER_SUMS 1u /* compare the CRC of every record */
#define SFR__READER_LIST 2u /* go on after damage to a record; sfr__reader_damage returns it */
#define SFR__READER_BARE 4u /* records have only data, no headers: hdr_off is the data's offset */

struct sfr_reader;

/* Units of a record that were read. Each byte of its data is a unit, and so are its header and its
 * descriptor. A record is complete when all its units are counted. */
struct sfr__record_units {
	uint64_t index; /* index of the record */
	uint64_t nr;    /* number of units */
	uint32_t crc;   /* CRC of the bytes, shifted by the length after them in the record */
};

/* Memory that one chunk is read into. */
struct sfr__buffer {
	char *mem;       /* page aligned; NULL: the client has kept the memory */
	unsigned number; /* below SFR__READER_THREADS * SFR__READER_BUFFERS */
	/* units to count when the client has finished with the buffer, and room for more */
	struct sfr__record_units *kept;
	size_t nr_kept, room;
};

/* The result of `put` if the client still needs the bytes in the buffer after the call. */
#define SFR__READER_LATER 1

/* Receives what the reader reads. Its functions run on the reader's threads. Before a function
 * returns -1, it calls sfr__reader_fail. */
struct sfr__reader_client {
	/* Takes `len` bytes that begin `at` bytes into record `index`. Sets *crc to their CRC
	 * unless `crc` is NULL. Returns 0, SFR__READER_LATER, or -1 on failure. */
	int (*put)(void *self, struct sfr__buffer *buffer, uint64_t index, uint64_t at,
		   const char *bytes, size_t len, uint32_t *crc);
	/* `lend` returns page-aligned memory of `len` bytes to read into, or NULL if there is none.
	 * `take_back` gets that memory back. All functions except `put` are NULL if no put returns
	 * SFR__READER_LATER. They must be set before the first sfr_reader_allow. */
	char *(*lend)(void *self, size_t len);
	void (*take_back)(void *self, struct sfr__buffer *buffer);
	/* Called after the last put of a chunk, so that the client begins to send the bytes for
	 * which `put` has returned SFR__READER_LATER. Returns 0 or -1. */
	int (*send)(void *self, struct sfr__buffer *buffer);
	/* Waits until the client no longer needs the bytes in the buffer. Returns 0 or -1. */
	int (*finish)(void *self, struct sfr__buffer *buffer);
};

struct sfr__reader_spec {
	const struct sfr__listing *listing; /* stays the caller's, and constant */
	int fd;                             /* stays the caller's and must stay open */
	uint64_t base;                      /* as for sfr__source_open */
	uint64_t end;                       /* the offset where the records end */
	enum sfr__way way;
	unsigned flags;
	const struct sfr__reader_client *client; /* NULL: the bytes are only checked */
	void *self;                              /* the client's first argument */
};

/* The first failure. */
struct sfr_reader_failure {
	/* 0: none; SFR_ECORRUPT; -EOPNOTSUPP: the archive cannot be read in this way; -errno of the
	 * file; -EIO with a reason: the client failed */
	int code;
	uint64_t index; /* index of the record */
	uint64_t off;   /* offset in the file */
	/* worded to follow the record's name, constant while the reader lives; or NULL */
	const char *reason;
};

/* Makes a reader, and computes the offsets of its records. Returns 0; -ENOMEM; -errno of reading;
 * SFR_EAGAIN if bytes that it needs are still on their way, so call again; -EINVAL if bare records
 * overlap. Returns -EOPNOTSUPP if the listing is empty or incomplete, or the records are not
 * where torch and stillframe put them; the file may be good nevertheless. */
int sfr__reader_new(const struct sfr__reader_spec *spec, struct sfr_reader **out);
/* Returns how many records sfr_reader_allow must allow so that record `index` can be read
 * completely: all records up to this one, and those that begin in the chunk with its end. */
uint64_t sfr_reader_reach(const struct sfr_reader *r, uint64_t index);
/* Allows the first `upto` records to be read. A lower number than before has no effect. The first
 * call starts the threads. Returns 0, SFR_EFORK, or -ENOMEM or another -errno if no thread could be
 * started. */
int sfr_reader_allow(struct sfr_reader *r, uint64_t upto);
/* Limits the reading: the threads read no chunk after the last one that this record needs, until
 * the next call sets another limit. */
void sfr_reader_until(struct sfr_reader *r, uint64_t index);
/* Returns whether sfr_reader_allow has started threads. */
bool sfr__reader_runs(const struct sfr_reader *r);
/* Waits until record `index` is read and good, or until all records are, if `index` is the number
 * of records. Returns 0; SFR_EAGAIN when the slice has passed; SFR_EFORK; else the code of the
 * failure. Returns SFR_EUNPLACED at once if the threads may not read that far: sfr_reader_allow has
 * allowed fewer records than sfr_reader_reach returns (or fewer than all), or the limit of
 * sfr_reader_until is before the record's end. With SFR__READER_LIST a record with damage counts as
 * good. */
int sfr_reader_wait(struct sfr_reader *r, uint64_t index, uint64_t slice_ns);
/* Records a failure, which ends the reading. Only the first is kept. */
void sfr__reader_fail(struct sfr_reader *r, int code, uint64_t index, uint64_t off,
		      const char *reason);
/* Returns the first failure, which the reader owns. The caller may read it after sfr_reader_wait
 * has returned the failure's code. */
const struct sfr_reader_failure *sfr_reader_failure(const struct sfr_reader *r);
/* Returns a sentence about the damage of record `index`, or NULL. Called after a wait for all
 * records. Sets *unchecked to whether the archive states no CRC of the record, so that its bytes
 * could not be checked. */
const char *sfr__reader_damage(const struct sfr_reader *r, uint64_t index, bool *unchecked);
/* Returns the offset of a record's data. */
uint64_t sfr__reader_data_off(const struct sfr_reader *r, uint64_t index);
/* Returns how many bytes of the file were read. */
uint64_t sfr_reader_done(struct sfr_reader *r);
/* Waits for the reads in flight, at most one a thread, ends the threads and frees the reader.
 * Afterwards nothing uses the client's memory. Accepts NULL. */
void sfr__reader_free(struct sfr_reader *r);

#endif
