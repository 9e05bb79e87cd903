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
/* buffers of a thread whose client lends memory: one is read into while the other is being sent */
#define SFR__READER_BUFFERS 2u
#define SFR__READER_SHORTER "the file became shorter while it was read"

#define SFR__READER_SUMS 1u /* compare the CRC of every record */
#define SFR__READER_LIST 2u /* go on after damage to a record, and keep it for reader_damage */
#define SFR__READER_BARE 4u /* records are only bytes, without headers: hdr_off is their offset */

struct sfr_reader;

/* Units of a record that were read: bytes of its data, and one each for header and descriptor. */
struct sfr__record_units {
	uint64_t index; /* of the record */
	uint64_t nr;
	uint32_t crc; /* of the bytes, shifted by the length after them in the record */
};

/* Memory that one chunk is read into. */
struct sfr__buffer {
	char *mem;                      /* page aligned; NULL: the client has kept it */
	unsigned number;                /* below SFR__READER_THREADS * SFR__READER_BUFFERS */
	struct sfr__record_units *kept; /* count when the client has finished with the buffer */
	size_t nr_kept, room;
};

/* The result of `put` for bytes that its client still needs in the buffer. */
#define SFR__READER_LATER 1

/* Receives what the reader reads. Its functions run on the reader's threads. A function that fails
 * has called sfr__reader_fail. */
struct sfr__reader_client {
	/* Takes `len` bytes that begin `at` bytes into record `index`. Sets *crc to their CRC
	 * unless that is NULL. Returns 0, SFR__READER_LATER, or -1 on failure. */
	int (*put)(void *self, struct sfr__buffer *buffer, uint64_t index, uint64_t at,
		   const char *bytes, size_t len, uint32_t *crc);
	/* Lends memory to read into, and takes it back. These and the next two are NULL if no put
	 * returns SFR__READER_LATER. They must be set before the first sfr_reader_allow. */
	char *(*lend)(void *self, size_t len);
	void (*take_back)(void *self, struct sfr__buffer *buffer);
	/* Called after the last put of a chunk, so that the client begins to send its bytes. 0 or
	 * -1. */
	int (*sent)(void *self, struct sfr__buffer *buffer);
	/* Waits until the client needs the buffer no longer. 0 or -1. */
	int (*finish)(void *self, struct sfr__buffer *buffer);
};

struct sfr__reader_spec {
	const struct sfr__listing *listing; /* stay the caller's, and constant */
	int fd;                             /* stays the caller's and must stay open */
	uint64_t base, end;                 /* as for sfr__source_open; where the records end */
	enum sfr__way way;
	unsigned flags;
	const struct sfr__reader_client *client; /* NULL: the bytes are only checked */
	void *self;                              /* the client's first argument */
};

/* The first failure. */
struct sfr_reader_failure {
	/* 0; SFR_ECORRUPT; -EOPNOTSUPP: the archive cannot be read in this way; -errno of the file;
	 * -EIO with a reason: the client failed */
	int code;
	uint64_t index; /* index of the record */
	uint64_t off;   /* offset in the file */
	/* words to show after the record's name, constant while the reader lives; or NULL */
	const char *reason;
};

/* Makes a reader, and computes the offsets of its records. -EOPNOTSUPP: the records of this archive
 * are not where torch and stillframe put them, or not stored as in memory; the file may be good.
 * -ENOMEM, -errno of reading. SFR_EAGAIN: bytes that it needs are still on their way, so call
 * again. */
int sfr__reader_new(const struct sfr__reader_spec *spec, struct sfr_reader **out);
/* Returns how many records may have to be read before this one is read completely: all up to it,
 * and those that share the chunk with its last bytes. */
uint64_t sfr_reader_reach(const struct sfr_reader *r, uint64_t index);
/* Allows the first `upto` records to be read. A lower number than before has no effect. The first
 * call starts the threads. -ENOMEM, -errno: none could be started. SFR_EFORK. */
int sfr_reader_allow(struct sfr_reader *r, uint64_t upto);
/* Limits the reading: the threads read no chunk after the last one that this record needs, until
 * the next call sets another limit. */
void sfr_reader_until(struct sfr_reader *r, uint64_t index);
/* Whether sfr_reader_allow has started threads. */
bool sfr__reader_runs(const struct sfr_reader *r);
/* Waits until a record is read and good; if `index` is the number of records, until all are. 0;
 * SFR_EAGAIN: call again. SFR_EUNPLACED, at once: the threads cannot get there, because
 * sfr_reader_allow has allowed fewer records than sfr_reader_reach returns (or fewer than all), or
 * sfr_reader_until ends before. SFR_EFORK; else the code of the failure. With SFR__READER_LIST a
 * record with damage counts as good. */
int sfr_reader_wait(struct sfr_reader *r, uint64_t index, uint64_t slice_ns);
/* Records a failure, which ends the reading. Only the first is kept. */
void sfr__reader_fail(struct sfr_reader *r, int code, uint64_t index, uint64_t off,
		      const char *reason);
const struct sfr_reader_failure *sfr_reader_failure(const struct sfr_reader *r);
/* Returns a sentence about the damage of a record, or NULL. Called after a wait for all records.
 * *unchecked: the archive does not state the CRC of its bytes. */
const char *sfr__reader_damage(const struct sfr_reader *r, uint64_t index, bool *unchecked);
/* Returns the offset of a record's data. */
uint64_t sfr__reader_data_off(const struct sfr_reader *r, uint64_t index);
/* Returns how many bytes of the file were read. */
uint64_t sfr_reader_done(struct sfr_reader *r);
/* Ends the threads, after the reads in flight, at most one a thread. The reader no longer
 * uses memory of the client. NULL is allowed. */
void sfr__reader_free(struct sfr_reader *r);

#endif
