/* Checks whether a file is a complete checkpoint, in slices:
 *
 *     sfr_check_new(fd, SFR_CHECK_BYTES, &check);
 *     while ((rc = sfr_check_run(check, slice_ns)) == SFR_EAGAIN)
 *             ...;
 *     if (rc == 0)
 *             use(sfr_check_result(check));
 *     sfr_check_free(check);
 *
 * Only one thread at a time may use a check. To check the bytes of a long file, a check starts
 * threads that read; sfr_check_free ends them. After a fork the child can use the check too. The
 * descriptor's file position is neither used nor moved. If the file is changed meanwhile, the check
 * may report damage. */
#ifndef SFR_CHECK_H
#define SFR_CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SFR_CHECK_BYTES 1u     /* read every record and compare its CRC */
#define SFR_CHECK_DIRECT 2u    /* with BYTES: read past the page cache, if the file system can */
#define SFR_CHECK_DIRECTORY 4u /* without BYTES: read only the directory, no record's own header */
#define SFR_CHECK_LATER 8u     /* without BYTES: if the records are long, like DIRECTORY */
#define SFR_CHECK_KEEP 16u     /* with DIRECTORY: keep the records, for sfr_restore_new */

enum sfr_format {
	SFR_FORMAT_FOREIGN, /* not a torch.save file */
	SFR_FORMAT_ARCHIVE,
	/* torch before 1.6: has no sizes or checksums to compare, so the result is always `ok` */
	SFR_FORMAT_LEGACY
};

#define SFR_CHECK_MAX_LISTED 1000u /* damaged records whose names a result lists */
#define SFR_CHECK_WHOLE UINT64_MAX /* as a `len`: up to the end of the file */

struct sfr_bad_record {
	char *name;         /* as in the archive, with '?' for control characters */
	const char *reason; /* a constant text, worded to follow the name */
};

struct sfr_check_result {
	bool ok;
	enum sfr_format format;
	uint64_t nbytes;     /* length of the file, or of the part that is checked */
	uint64_t nr_records; /* records in the directory; 0 if the directory cannot be found */
	/* records without a CRC, or deflated: only their structure was checked */
	uint64_t nr_unchecked;
	uint64_t nr_compressed; /* deflated records, which nr_unchecked includes */
	uint64_t nr_trailing;   /* bytes after the archive's end record, which are not checked */
	bool headers;           /* the records' own headers were checked too */
	uint64_t nr_bad;        /* damaged records */
	const struct sfr_bad_record *bad; /* the first nr_listed damaged records */
	uint32_t nr_listed;               /* at most SFR_CHECK_MAX_LISTED */
	char error[512]; /* damage of the file or of its first bad record; "" if ok */
};

struct sfr_check;

/* Makes a check of the file `fd`, which the caller keeps open until the check is freed. Returns 0,
 * -ENOMEM, or -EINVAL for flags that exclude each other. */
int sfr_check_new(int fd, unsigned flags, struct sfr_check **out);
/* Does the same for an archive of `len` bytes that begins at `off` in the file. */
int sfr_check_new_part(int fd, uint64_t off, uint64_t len, unsigned flags, struct sfr_check **out);
/* Continues the check for about `slice_ns`. Returns:
 *   0           the result is final
 *   SFR_EAGAIN  call again
 *   -errno      no memory, or the file could not be read (-EISDIR for a directory); later calls
 *               return the same error */
int sfr_check_run(struct sfr_check *check, uint64_t slice_ns);
/* Returns whether a run failed because the operating system refused to read the file. */
bool sfr_check_has_os_error(const struct sfr_check *check);
/* Returns how many of the result's `nbytes` are checked. */
uint64_t sfr_check_bytes_done(const struct sfr_check *check);
/* Returns the result. It is final once sfr_check_run has returned 0, and lives as long as the
 * check. */
const struct sfr_check_result *sfr_check_result(const struct sfr_check *check);
void sfr_check_free(struct sfr_check *check); /* NULL is allowed */

#endif
