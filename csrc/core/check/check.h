/* Reading back: whether a file is a whole checkpoint. See check.c.
 *
 * A check is an object that runs in slices, so that its owner can answer signals in between:
 *
 *     sfr_check_new(fd, SFR_CHECK_BYTES, &check);
 *     while ((rc = sfr_check_run(check, slice_ns)) == SFR_EAGAIN)
 *             ...;
 *     if (rc == 0)
 *             use(sfr_check_result(check));
 *     sfr_check_free(check);
 *
 * A check belongs to one thread at a time. One of the bytes of a long file has two threads of its
 * own that read ahead; freeing it ends them. A fork leaves it usable, by itself, in the child. The file's own position is not used. A file that is
 * changed meanwhile is found damaged at worst.
 */
#ifndef SFR_CHECK_H
#define SFR_CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SFR_CHECK_BYTES 1u     /* read every record and compare its CRC */
#define SFR_CHECK_DIRECT 2u    /* and that past the page cache, where the file system can */
#define SFR_CHECK_DIRECTORY 4u /* without BYTES: no record's own header, only the directory */
#define SFR_CHECK_KEEP 16u     /* with DIRECTORY: remember the records, for sfr_restore_new */
#define SFR_CHECK_LATER 8u /* without BYTES: as DIRECTORY where records are long, see the result */

/* What a file is. Only an archive has records to look at: torch's legacy format (before 1.6, or
 * _use_new_zipfile_serialization=False) has neither sizes nor checksums, so it is `ok` as it is. */
enum sfr_format { SFR_FORMAT_FOREIGN, SFR_FORMAT_ARCHIVE, SFR_FORMAT_LEGACY };

#define SFR_CHECK_MAX_LISTED 1000u

struct sfr_bad_record {
	char *name;         /* as in the archive; control characters are shown as '?' */
	const char *reason; /* words to go behind the name, a constant */
};

struct sfr_check_result {
	bool ok;
	enum sfr_format format;
	uint64_t nbytes;     /* length of the file */
	uint64_t nr_records; /* that the directory names; 0 when it cannot be found */
	uint64_t
		nr_unchecked; /* written without a CRC, or deflated: only their structure is known */
	uint64_t nr_compressed; /* of these: deflated, with a CRC that nobody compared */
	uint64_t nr_behind;     /* bytes behind the archive's end record, which nobody looked at */
	uint64_t nr_bad;        /* records with damage of their own; the first ones are listed */
	bool headers;           /* of the records were looked at, too */
	uint32_t nr_listed;     /* at most SFR_CHECK_MAX_LISTED */
	const struct sfr_bad_record *bad;
	char error[512]; /* "" when ok; otherwise what is wrong, said of the file ("it is
				  truncated: ..."), or of its first bad record */
};

struct sfr_check;

/* `fd` stays the caller's and must stay open. -ENOMEM. */
int sfr_check_new(int fd, unsigned flags, struct sfr_check **out);
/* 0: the verdict is there. SFR_EAGAIN: call again. -errno: the file could not be read (-EISDIR
 * for a directory) or memory ran out; the check then has no verdict and keeps saying so. */
int sfr_check_run(struct sfr_check *check, uint64_t slice_ns);
/* Whether a failed run failed because the operating system refused to read the file, rather than
 * for want of memory here. */
bool sfr_check_os_error(const struct sfr_check *check);
/* Bytes of the file that need no further look, of `nbytes` in the result. */
uint64_t sfr_check_done(const struct sfr_check *check);
/* Valid until the check is freed; final once run has returned 0. */
const struct sfr_check_result *sfr_check_result(const struct sfr_check *check);
void sfr_check_free(struct sfr_check *check); /* NULL is fine */

/* Reads [off, off + len) of a file into memory that is new, and so mostly without pages yet
 * (read_into.c). The bytes read, fewer than `len` only at the file's end, or -errno. */
int64_t sfr_fill(int fd, void *buf, size_t len, uint64_t off);
/* Gives the whole pages of new memory in [buf, buf + len) their faults in one call. */
void sfr__populate(char *buf, size_t len);

#endif
