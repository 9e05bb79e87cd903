/* Reads the records of an archive on threads, compares their CRCs, and hands the bytes to a client.
 *
 *     sfr__reader_new(&spec, &reader);
 *     sfr_reader_allow(reader, i);                     the first i records may be read
 *     while ((rc = sfr_reader_wait(reader, index, slice_ns)) == SFR_EAGAIN)
 *             ...;
 *     sfr__reader_free(reader);
 *
 * Only one thread at a time uses a reader. After a fork the child may only free it. */
#ifndef SFR_READER_H
#define SFR_READER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "reader/listing.h"
#include "reader/source.h"

#define SFR__READER_CHUNK_MAX (1u << 20) /* fits a core's own cache */
#define SFR__READER_THREADS 4u
/* for each thread, if the client lends memory: one is filled while the other is sent */
#define SFR__READER_BUFFERS 2u
#define SFR__READER_SHORTER "the file became shorter while it was read"

#define SFR__READER_SUMS 1u /* compare the CRC of every record */
#define SFR__READER_LIST 2u /* go on after damage to a record; sfr__reader_damage returns it */
#define SFR__READER_BARE 4u /* records have only data, no headers: hdr_off is the data's offset */

struct sfr_reader;

/* A part of a record that was read. Each byte of data is a unit, and so are the header and the
 * descriptor. A record is complete when all its units are counted. */
struct sfr__record_units {
	uint64_t index; /* index of the record */
	uint64_t nr;    /* number of units */
	uint32_t crc;   /* their CRC, shifted by the number of the record's bytes after them */
};

/* Memory for one chunk of the file. */
struct sfr__buffer {
	char *mem;       /* page aligned; NULL: the client has kept the memory */
	unsigned number; /* below SFR__READER_THREADS * SFR__READER_BUFFERS */
	/* units to count when the client has finished with the buffer */
	struct sfr__record_units *kept;
	size_t nr_kept, room;
};

/* Returned by `put` if the client needs the bytes in the buffer after the call. */
#define SFR__READER_LATER 1

/* Receives what the reader reads, on the reader's threads. A function that returns -1 has called
 * sfr__reader_fail. */
struct sfr__reader_client {
	/* Takes `len` bytes from offset `at` in record `index`. Sets *crc to their CRC unless `crc`
	 * is NULL. Returns 0, SFR__READER_LATER, or -1 on failure. */
	int (*put)(void *self, struct sfr__buffer *buffer, uint64_t index, uint64_t at,
		   const char *bytes, size_t len, uint32_t *crc);
	/* The functions below are NULL if no put returns SFR__READER_LATER. They are set before the
	 * first sfr_reader_allow.
	 *
	 * `lend` returns `len` bytes of page-aligned memory to read into, or NULL. `take_back` gets
	 * it back. */
	char *(*lend)(void *self, size_t len);
	void (*take_back)(void *self, struct sfr__buffer *buffer);
	/* Sends the bytes for which `put` returned SFR__READER_LATER. Called after the last put of
	 * a chunk. Returns 0 or -1. */
	int (*send)(void *self, struct sfr__buffer *buffer);
	/* Waits until the client no longer needs the buffer's bytes. Returns 0 or -1. */
	int (*finish)(void *self, struct sfr__buffer *buffer);
};

struct sfr__reader_spec {
	const struct sfr__listing *listing; /* the caller's; does not change */
	int fd;                             /* the caller's; stays open */
	uint64_t base;                      /* as for sfr__source_open */
	uint64_t end;                       /* where the records end */
	enum sfr__way way;
	unsigned flags;                          /* SFR__READER_* */
	const struct sfr__reader_client *client; /* NULL: only check the bytes */
	void *self;                              /* the client's first argument */
};

/* The first failure. */
struct sfr_reader_failure {
	/* 0: no failure. -EOPNOTSUPP: the archive cannot be read in this way. -EIO with a reason:
	 * the client failed. Otherwise SFR_ECORRUPT, or -errno of the file. */
	int code;
	uint64_t index; /* index of the record */
	uint64_t off;   /* offset in the file */
	/* follows the record's name in a message, or NULL; lives as long as the reader */
	const char *reason;
};

/* Makes a reader, and computes the offsets of its records. Returns 0, or:
 *     -ENOMEM
 *     -errno       the file cannot be read
 *     SFR_EAGAIN   needed bytes are still on their way: call again
 *     -EINVAL      bare records overlap
 *     -EOPNOTSUPP  the listing is empty or incomplete, or records are not where torch and
 *                  stillframe put them; the file may be good nevertheless */
int sfr__reader_new(const struct sfr__reader_spec *spec, struct sfr_reader **out);
/* Returns how many records sfr_reader_allow must allow so that record `index` can be read: all up
 * to this record, and those that begin in the chunk with its end. */
uint64_t sfr_reader_reach(const struct sfr_reader *r, uint64_t index);
/* Allows the first `upto` records to be read; never allows fewer than before. The first call starts
 * the threads. Returns 0, SFR_EFORK, or -errno if no thread could be started. */
int sfr_reader_allow(struct sfr_reader *r, uint64_t upto);
/* Lets the threads read no chunk after the last one that this record needs, until the next call
 * sets another limit. */
void sfr_reader_until(struct sfr_reader *r, uint64_t index);
/* Returns whether sfr_reader_allow has started threads. */
bool sfr__reader_runs(const struct sfr_reader *r);
/* Waits until record `index` is read and good, or all records if `index` is their number. With
 * SFR__READER_LIST a damaged record counts as good. Returns 0, the code of the reader's failure,
 * or:
 *     SFR_EAGAIN     the slice has passed
 *     SFR_EFORK      the reader belongs to a parent process
 *     SFR_EUNPLACED  sfr_reader_allow or sfr_reader_until keeps the threads from reading that
 * far */
int sfr_reader_wait(struct sfr_reader *r, uint64_t index, uint64_t slice_ns);
/* Records a failure, which ends the reading. Only the first is kept. */
void sfr__reader_fail(struct sfr_reader *r, int code, uint64_t index, uint64_t off,
		      const char *reason);
/* Returns the first failure, which the reader owns. May be read after sfr_reader_wait has returned
 * the failure's code. */
const struct sfr_reader_failure *sfr_reader_failure(const struct sfr_reader *r);
/* Returns what is wrong with record `index`, or NULL. Called after a wait for all records. Sets
 * *unchecked if the archive states no CRC of the record, so its bytes were not checked. */
const char *sfr__reader_damage(const struct sfr_reader *r, uint64_t index, bool *unchecked);
uint64_t sfr__reader_data_off(const struct sfr_reader *r, uint64_t index);
/* Returns how many bytes of the file were read. */
uint64_t sfr_reader_done(struct sfr_reader *r);
/* Waits for the reads in flight, ends the threads and frees the reader. Afterwards nothing uses the
 * client's memory. Accepts NULL. */
void sfr__reader_free(struct sfr_reader *r);

#endif
