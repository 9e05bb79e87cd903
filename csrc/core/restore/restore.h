/* Reads a checkpoint's records back, each to its own destination, and checks them on the way. See
 * restore.c.
 *
 *     sfr_check_new(fd, SFR_CHECK_DIRECTORY | SFR_CHECK_KEEP, &check);
 *     ...                                              run the check; go on if the file is good
 *     sfr_restore_new(check, fd, SFR_RESTORE_VERIFY, &restore);
 *     for (i = 0; i < sfr_restore_nr_records(restore); i++)
 *             sfr_restore_set_destination(restore, i, memory of sfr_restore_nbytes(restore, i)
 *                                                     bytes);
 *     sfr_reader_allow_records(sfr_restore_reader(restore), i); all `i` records may be read now
 *     while ((rc = sfr_reader_wait(sfr_restore_reader(restore), index, slice_ns)) == SFR_EAGAIN)
 *             ...;
 *     sfr_restore_free(restore);
 *
 * A restore has threads that read. Only one thread at a time may call these functions. After a fork
 * the child may only free the restore. */
#ifndef SFR_RESTORE_H
#define SFR_RESTORE_H

#include <stddef.h>
#include <stdint.h>

#include "reader/reader.h"

struct sfr_check;
struct sfr_restore;

#define SFR_RESTORE_VERIFY 1u /* compare the CRC of every record */
/* other processes read the file, too: use the page cache, so that it is read from the disk once */
#define SFR_RESTORE_SHARED 2u

/* Makes a restore of a file that was checked with SFR_CHECK_KEEP. The restore owns the check from
 * then on. A failure frees the check, except SFR_EAGAIN. `fd` stays the caller's and must stay
 * open. Returns 0, or:
 *
 *   SFR_EAGAIN        bytes of the file are still on their way: call again with the same check
 *   -EOPNOTSUPP       the check found damage, the list of records is incomplete (listing.h), or
 *                     the records are not where torch and stillframe put them
 *   -ENOMEM, -errno   of reading */
int sfr_restore_new(struct sfr_check *check, int fd, unsigned flags, struct sfr_restore **out);
/* A stretch of a file. */
struct sfr_file_range {
	uint64_t off, len;
};
/* Makes a restore of a file of another format, whose records are the `nr` stretches in `v`, in the
 * order of the file and below offset `end`. They have no names and no CRCs. `v` stays the caller's.
 * Returns as sfr_restore_new; -EINVAL: the stretches overlap, or there is none. */
int sfr_restore_new_bare(const struct sfr_file_range *v, uint64_t nr, uint64_t end, int fd,
			 unsigned flags, struct sfr_restore **out);
/* Return the number of records, and a record's length. Indices are in the order of the file. */
uint64_t sfr_restore_nr_records(const struct sfr_restore *r);
uint64_t sfr_restore_nbytes(const struct sfr_restore *r, uint64_t index);
/* Returns a record's name, without the archive's own directory and without a final zero byte. Sets
 * *len to its length: 0 for a bare record. */
const char *sfr_restore_name(const struct sfr_restore *r, uint64_t index, size_t *len);
/* Returns the index of the record of that name, or sfr_restore_nr_records if there is none. */
uint64_t sfr_restore_find(const struct sfr_restore *r, const char *name, size_t len);
/* Sets the destination of a record's bytes. Without a destination they are only checked. The memory
 * stays the caller's. The restore may write to it until a wait for the record has returned 0, or
 * the restore is freed. */
void sfr_restore_set_destination(struct sfr_restore *r, uint64_t index, void *mem);
/* Prepares a device for destinations. The first call for a device comes before the first
 * sfr_reader_allow_records; more calls for it may come at any time. `stream` is the caller's
 * current stream on the device. Copies to destinations that are set after the call wait until the
 * stream's present work has ended. Returns 0, or:
 *
 *   -EOPNOTSUPP       too many devices, or a new device after sfr_reader_allow_records
 *   -ENODEV, -EIO     `why` gets a sentence
 *   SFR_EFORK, SFR_ECAPTURING */
int sfr_restore_prepare_device(struct sfr_restore *r, uint32_t device, uint64_t stream, char *why,
			       size_t why_len);
/* Does the same as sfr_restore_set_destination, with memory of a device that was prepared. */
void sfr_restore_set_device_destination(struct sfr_restore *r, uint64_t index, uint32_t device,
					uint64_t mem);
/* Returns the reader, which lives as long as the restore. When a record has its destination, the
 * caller allows it to be read with sfr_reader_allow_records. */
struct sfr_reader *sfr_restore_reader(struct sfr_restore *r);
/* Ends the reading and frees the restore. Waits for the reads in flight. Accepts NULL. */
void sfr_restore_free(struct sfr_restore *r);

#endif
