/* Checks whether a file is a complete checkpoint. See check.c.
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
 * Only one thread at a time may use a check. A check of the bytes of a long file starts threads
 * that read; sfr_check_free ends them. After a fork the child can use the check, which then reads
 * in sfr_check_run. A check does not use or move the descriptor's file position. If the file is
 * changed meanwhile, the worst result is a verdict of damage. */
#ifndef SFR_CHECK_H
#define SFR_CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SFR_CHECK_BYTES 1u     /* read every record and compare its CRC */
#define SFR_CHECK_DIRECT 2u    /* with BYTES: read past the page cache, if the file system can */
#define SFR_CHECK_DIRECTORY 4u /* without BYTES: read only the directory, no record's own header */
#define SFR_CHECK_KEEP 16u     /* with DIRECTORY: keep the records, for sfr_restore_new */
#define SFR_CHECK_LATER 8u     /* without BYTES: DIRECTORY if records are long; see check.c */

/* The formats of a file. FOREIGN: no torch.save file. Only an ARCHIVE can be checked. LEGACY is the
 * format of torch before 1.6, and with _use_new_zipfile_serialization=False. It has neither sizes
 * nor checksums, so the result is always `ok`. */
enum sfr_format { SFR_FORMAT_FOREIGN, SFR_FORMAT_ARCHIVE, SFR_FORMAT_LEGACY };

#define SFR_CHECK_MAX_LISTED 1000u
#define SFR_CHECK_WHOLE UINT64_MAX /* as the `len` of a part: up to the end of the file */

struct sfr_bad_record {
	char *name;         /* as in the archive, with '?' for control characters */
	const char *reason; /* the damage, worded to follow the name; a constant */
};

struct sfr_check_result {
	bool ok;
	enum sfr_format format;
	uint64_t nbytes;     /* length of the file, or of the part that is checked */
	uint64_t nr_records; /* records in the directory; 0 if the directory cannot be found */
	/* records written without a CRC, or deflated: only their structure was checked */
	uint64_t nr_unchecked;
	uint64_t nr_compressed; /* deflated records, which nr_unchecked includes */
	uint64_t nr_trailing;   /* bytes after the archive's end record, which are not checked */
	uint64_t nr_bad;        /* damaged records, of which the first are listed in `bad` */
	bool headers;           /* the records' own headers were checked too */
	uint32_t nr_listed;     /* at most SFR_CHECK_MAX_LISTED */
	const struct sfr_bad_record *bad;
	/* "" if ok; otherwise the damage of the file ("it is truncated: ...") or of its first bad
	 * record */
	char error[512];
};

struct sfr_check;

/* Makes a check of the file `fd`, which stays the caller's and must stay open. Returns 0, -ENOMEM,
 * or -EINVAL for flags that exclude each other. */
int sfr_check_new(int fd, unsigned flags, struct sfr_check **out);
/* Does the same for an archive of `len` bytes that begins at `off` in the file. */
int sfr_check_new_part(int fd, uint64_t off, uint64_t len, unsigned flags, struct sfr_check **out);
/* Goes on with the check for about `slice_ns`. Returns 0 when the verdict exists; SFR_EAGAIN: call
 * again; -errno: the file could not be read (-EISDIR for a directory) or there was no memory. Then
 * there is no verdict, and later calls return the same error. */
int sfr_check_run(struct sfr_check *check, uint64_t slice_ns);
/* Returns whether a run failed because the operating system refused to read the file, rather than
 * for lack of memory. */
bool sfr_check_os_error(const struct sfr_check *check);
/* Returns how many of the result's `nbytes` are checked. */
uint64_t sfr_check_done(const struct sfr_check *check);
/* Returns the result, which is final once sfr_check_run has returned 0 and valid until the check is
 * freed. */
const struct sfr_check_result *sfr_check_result(const struct sfr_check *check);
void sfr_check_free(struct sfr_check *check); /* NULL is allowed */

#endif
