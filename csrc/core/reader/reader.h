/* Reads the records of an archive on threads, compares their CRCs, and hands the bytes to a client.
 *
 *     sfr__reader_new(&spec, &reader);
 *     sfr_reader_allow_records(reader, i);                     the first i records may be read
 *     while ((rc = sfr_reader_wait(reader, index, slice_ns)) == SFR_EAGAIN)
 *             ...;
 *     sfr__reader_free(reader);
 *
 * Only one thread at a time may use a reader. After a fork the child may only free it. */
#ifndef SFR_READER_H
#define SFR_READER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "reader/listing.h"
#include "reader/source.h"

#define SFR__READER_CHUNK_MAX (1u << 20) /* fits a core's own cache */
#define SFR__READER_THREADS 4u
/* buffers of each thread if the client lends them: one is filled while the other is sent */
#define SFR__READER_BUFFERS 2u
#define SFR__READER_SHORTER "the file became shorter while it was read"

#define SFR__READER_CRCS 1u        /* compare the CRC of every record */
#define SFR__READER_LIST_DAMAGE 2u /* go on after damage; see sfr__reader_damage */
#define SFR__READER_BARE 4u        /* records have no headers: hdr_off is the data's offset */

struct sfr_reader;

/* The fragment of a record that is in one chunk. A record is complete when its data, its header and
 * its descriptor are read. */
struct sfr__record_fragment {
	uint64_t index;   /* index of the record */
	uint64_t nr_read; /* bytes of data, plus 1 for the header, and 1 for the descriptor */
	uint32_t crc;     /* of these bytes of data and of zeros for the record's later bytes */
};

/* Memory for one chunk of the file. */
struct sfr__reader_buffer {
	char *mem;       /* page aligned; NULL: lost, because a dead device may still use it */
	unsigned number; /* below SFR__READER_THREADS * SFR__READER_BUFFERS */
	/* fragments in the buffer, to be counted when the client has finished with the buffer */
	struct sfr__record_fragment *pending;
	size_t nr_pending, pending_cap;
};

/* Returned by `put` if the client still needs the bytes in the buffer after the call. */
#define SFR__READER_NEEDS_BUFFER 1

/* Receives what the reader reads, on the reader's threads. A function that returns -1 has called
 * sfr__reader_fail. */
struct sfr__reader_client {
	/* Takes `len` bytes from offset `at` in record `index`. Sets *crc to their CRC unless `crc`
	 * is NULL. Returns 0, SFR__READER_NEEDS_BUFFER, or -1 on failure. */
	int (*put)(void *self, struct sfr__reader_buffer *buffer, uint64_t index, uint64_t at,
		   const char *bytes, size_t len, uint32_t *crc);
	/* The functions below are NULL if no put returns SFR__READER_NEEDS_BUFFER. They are set
	 * before the first sfr_reader_allow_records.
	 *
	 * `lend` returns `len` bytes of page-aligned memory to read into, or NULL. The reader gives
	 * the memory back with `take_back`. */
	char *(*lend)(void *self, size_t len);
	void (*take_back)(void *self, struct sfr__reader_buffer *buffer);
	/* Sends the bytes for which `put` returned SFR__READER_NEEDS_BUFFER. Called after the last
	 * put of a chunk. Returns 0 or -1. */
	int (*send)(void *self, struct sfr__reader_buffer *buffer);
	/* Waits until the client no longer needs the buffer's bytes. Returns 0 or -1. */
	int (*finish)(void *self, struct sfr__reader_buffer *buffer);
};

struct sfr__reader_spec {
	const struct sfr__listing *listing; /* the caller's; does not change */
	int fd;                             /* the caller's; stays open */
	uint64_t base;                      /* offset in the file from which all others count */
	uint64_t end;                       /* offset where the last record ends */
	enum sfr__read_way way;
	unsigned flags;                          /* SFR__READER_* */
	const struct sfr__reader_client *client; /* NULL: only check the bytes */
	void *self;                              /* the client's first argument */
};

/* The first failure of a reader. */
struct sfr_reader_failure {
	/* 0: no failure; -EOPNOTSUPP: the archive cannot be read in this way; -EIO with a reason:
	 * the client failed; otherwise SFR_ECORRUPT, or the -errno of reading the file */
	int code;
	uint64_t index; /* index of the record */
	uint64_t off;   /* offset in the file */
	/* worded to follow the record's name in a message; or NULL. Lives as long as the reader. */
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
/* Returns how many records sfr_reader_allow_records must allow so that record `index` can be read:
 * all records up to this one, and those that begin in the chunk in which it ends. */
uint64_t sfr_reader_count_records_to_allow(const struct sfr_reader *r, uint64_t index);
/* Allows the first `nr` records to be read; never allows fewer than before. The first call starts
 * the threads. Returns 0, SFR_EFORK, or -errno if no thread could be started. */
int sfr_reader_allow_records(struct sfr_reader *r, uint64_t nr);
/* Stops the threads after the last chunk that record `index` needs. The next call replaces this
 * limit. */
void sfr_reader_stop_after(struct sfr_reader *r, uint64_t index);
/* Returns whether sfr_reader_allow_records has started threads. */
bool sfr__reader_has_started(const struct sfr_reader *r);
/* Waits until record `index` is read and good, or all records if `index` is their number. With
 * SFR__READER_LIST_DAMAGE a damaged record counts as good. Returns 0, the code of the reader's
 * failure, or:
 *     SFR_EAGAIN     the slice has passed
 *     SFR_EFORK      the reader belongs to a parent process
 *     SFR_EUNPLACED  sfr_reader_allow_records or sfr_reader_stop_after keeps the threads from
 *                    reading so far */
int sfr_reader_wait(struct sfr_reader *r, uint64_t index, uint64_t slice_ns);
/* Records a failure, which ends the reading. Only the first is kept. */
void sfr__reader_fail(struct sfr_reader *r, int code, uint64_t index, uint64_t off,
		      const char *reason);
/* Returns the first failure, which the reader owns. The caller may read it after sfr_reader_wait
 * has returned its code. */
const struct sfr_reader_failure *sfr_reader_failure(const struct sfr_reader *r);
/* Returns what is wrong with record `index`, or NULL. Called after a wait for all records. Sets
 * *unchecked if the archive states no CRC of the record, so its bytes were not checked. */
const char *sfr__reader_damage(const struct sfr_reader *r, uint64_t index, bool *unchecked);
uint64_t sfr__reader_data_off(const struct sfr_reader *r, uint64_t index);
/* Returns how many bytes of the file were read. */
uint64_t sfr_reader_bytes_read(struct sfr_reader *r);
/* Waits for the reads in flight, ends the threads and frees the reader. Afterwards nothing uses the
 * client's memory. Accepts NULL. */
void sfr__reader_free(struct sfr_reader *r);

#endif
