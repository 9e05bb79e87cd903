/* Reading a checkpoint's records back, each straight to where it belongs, checked on the way. See
 * restore.c.
 *
 *     sfr_check_new(fd, SFR_CHECK_DIRECTORY | SFR_CHECK_KEEP, &check);    run it; it is ok
 *     sfr_restore_new(check, fd, SFR_RESTORE_VERIFY, &restore);
 *     for (i = 0; i < sfr_restore_nr(restore); i++)
 *             sfr_restore_into(restore, i, memory of sfr_restore_nbytes(restore, i) bytes);
 *     sfr_restore_go(restore, i);
 *     while ((rc = sfr_restore_wait(restore, index, slice_ns)) == SFR_EAGAIN)
 *             ...;
 *     sfr_restore_free(restore);
 *
 * One thread at a time uses a restore; threads of its own read. A fork leaves the child nothing
 * but the right to free it.
 */
#ifndef SFR_RESTORE_H
#define SFR_RESTORE_H

#include <stddef.h>
#include <stdint.h>

struct sfr_check;
struct sfr_restore;

#define SFR_RESTORE_VERIFY 1u /* compare the CRC of every record */
#define SFR_RESTORE_SHARED                                                                         \
	2u /* other processes read the file now: through the page cache, once for all */

/* What went wrong first. */
struct sfr_restore_failure {
	/* 0; SFR_ECORRUPT; -EOPNOTSUPP: no archive that can be read so; -errno of the file; -EIO with a
	 * reason: of a device */
	int code;
	uint64_t index;     /* the record */
	uint64_t off;       /* in the file */
	const char *reason; /* words to go behind the record's name; the restore's. Or NULL */
};

/* The check is the restore's from now on, and freed here if there is none. `fd` stays the caller's
 * and must stay open. -EOPNOTSUPP: the records of this archive are not where torch and stillframe
 * put them, or not as they are in memory; the file may be good. -ENOMEM, -errno of reading. */
int sfr_restore_new(struct sfr_check *check, int fd, unsigned flags, struct sfr_restore **out);
/* Records, counted in the order of the file. */
uint64_t sfr_restore_nr(const struct sfr_restore *r);
uint64_t sfr_restore_nbytes(const struct sfr_restore *r, uint64_t index);
/* Without the archive's own directory, not ended by a zero byte. */
const char *sfr_restore_name(const struct sfr_restore *r, uint64_t index, size_t *len);
/* The record of that name, or sfr_restore_nr. */
uint64_t sfr_restore_find(const struct sfr_restore *r, const char *name, size_t len);
/* Where a record's bytes go; without it they are only checked. The memory stays the caller's, and
 * is written to until the record was waited for or the restore is freed. */
void sfr_restore_into(struct sfr_restore *r, uint64_t index, void *mem);
/* The same for memory of a device. `stream` is the caller's on it: what is on that now comes before
 * all that is written to memory given from here on, until the next call that names the device
 * (sfr_restore_device; it has to come before the first `go`, and before the record may be read).
 * -EOPNOTSUPP: too many devices; -ENODEV, -EIO with `why`. */
int sfr_restore_device(struct sfr_restore *r, uint32_t device, uint64_t stream, char *why,
		       size_t why_len);
void sfr_restore_into_device(struct sfr_restore *r, uint64_t index, uint32_t device, uint64_t mem);
/* How many records have to be given a place before this one can be read whole: it and those which
 * share its last bytes' piece of the file. */
uint64_t sfr_restore_reach(const struct sfr_restore *r, uint64_t index);
/* The first `upto` records have their places: they may be read. A lower number than before changes
 * nothing. The first call starts the threads. -ENOMEM, -errno: none could be started. */
int sfr_restore_go(struct sfr_restore *r, uint64_t upto);
/* 0: the record (sfr_restore_nr: each of them) is there and good. SFR_EAGAIN: call again. The code
 * of the failure otherwise; SFR_EFORK. SFR_EUNPLACED, at once: the readers cannot get there, since
 * sfr_restore_go has not allowed as many records as sfr_restore_reach says (all, for all). */
int sfr_restore_wait(struct sfr_restore *r, uint64_t index, uint64_t slice_ns);
const struct sfr_restore_failure *sfr_restore_failure(const struct sfr_restore *r);
/* Bytes of the file that need no further look. */
uint64_t sfr_restore_done(struct sfr_restore *r);
/* Waits for the reads under way, one a thread at most. NULL is fine. */
void sfr_restore_free(struct sfr_restore *r);

#endif
