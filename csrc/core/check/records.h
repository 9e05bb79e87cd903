/* The state of a check, shared by check.c, records.c, sums.c and verdict.c. */
#ifndef SFR_RECORDS_H
#define SFR_RECORDS_H

#include "check/check.h"
#include "check/names.h"
#include "archive/read.h"
#include "reader/reader.h"
#include "reader/window.h"

/* The next step of a check; check.c explains the steps. */
enum sfr__check_state {
	SFR__CHECK_START,
	SFR__CHECK_SUMS,
	SFR__CHECK_RECORD,
	SFR__CHECK_BYTES,
	SFR__CHECK_SORT,
	SFR__CHECK_NAMES,
	SFR__CHECK_DONE
};

/* All offsets but `base` count from the archive's first byte. */
struct sfr_check {
	int fd;         /* owned by the caller */
	uint64_t base;  /* offset of the archive in the file */
	unsigned flags; /* SFR_CHECK_* */
	enum sfr__check_state state;
	int code;             /* 0, or the -errno with which every run returns */
	uint64_t deadline_ns; /* end of the current slice, for steps that wait */
	struct sfr_check_result result;
	struct sfr_bad_record *bad;     /* result.bad, or NULL */
	struct sfr__window dir_window;  /* the bytes of the directory */
	struct sfr__window body_window; /* the bytes of the records */
	struct sfr__unzip_end end;      /* where the directory is */
	uint64_t dir_pos;               /* offset of the next directory record */
	uint64_t body_pos;              /* the file is checked up to this offset */
	uint64_t reported_pos; /* sfr__source_discard_read_range has got the bytes before this */
	bool has_pickle, has_version; /* there is a record data.pkl, and version */
	struct sfr__names names;      /* with the offsets of the directory records */
	struct sfr__listing listing;  /* the records, kept with SFR_CHECK_KEEP */
	uint64_t names_pos;           /* index in `names` up to which names are compared */
	unsigned nr_same_hash;        /* pairs of different names with the same hash */
	bool os_error;                /* `code` is the system's error of reading the file */
	/* used by the step SUMS, else NULL */
	struct sfr_check *dir_check; /* a check of the directory alone */
	struct sfr_reader *reader;   /* the threads that read */
	/* the current record */
	struct sfr__unzip_record rec;
	uint64_t data_off;                /* offset of its data */
	uint64_t rec_end;                 /* offset at which the record ends */
	uint64_t data_done;               /* how many bytes of its data were read so far */
	uint32_t crc;                     /* CRC of these bytes */
	char prefix[SFR__UNZIP_NAME_MAX]; /* the start of every name, such as "archive/" */
	size_t prefix_len;
	char name[SFR__UNZIP_NAME_MAX + 1]; /* as in the file, followed by a zero byte */
};

/* Returns the offset of the first byte after the directory. */
static inline uint64_t sfr__check_get_dir_end_off(const struct sfr_check *c)
{
	return c->end.dir_off + c->end.dir_len;
}

/* ---- verdict.c: each returns 0 or -errno, as every step does ---- */

/* Ends the check: the file as a whole is damaged. */
int sfr__check_end_with_damage(struct sfr_check *c, const char *wrong);
/* Handles the code `rc` of a read that failed. Returns:
 *   0           the file was changed meanwhile: the check has ended, with damage
 *   SFR_EAGAIN  the bytes have not arrived: the step is tried again
 *   -errno      the operating system's error */
int sfr__check_handle_read_error(struct sfr_check *c, int rc);
/* Puts the current record on the list of bad records. Returns 0 or -ENOMEM. */
int sfr__check_add_bad_record(struct sfr_check *c, const char *reason);

/* Returns the index in c->listing of the record with this name, or listing.nr if there is none.
 * `short_name` is the name without the archive's directory, of `len` bytes. The check must be
 * done. */
uint64_t sfr__check_find_record(const struct sfr_check *c, const char *short_name, size_t len);

/* ---- records.c: two of the steps ---- */

int sfr__check_next_record(struct sfr_check *c);
int sfr__check_record_bytes(struct sfr_check *c);

/* ---- sums.c: the reader's part of the step SUMS ---- */

/* Starts the reader, once the check of the directory has found no damage. Returns 0 or an error of
 * sfr__reader_new or sfr_reader_allow_records. */
int sfr__check_start_reader(struct sfr_check *c);
/* Waits for the reader and takes its result. Returns:
 *   0                       the check has ended
 *   SFR_EAGAIN              the slice is over
 *   -EOPNOTSUPP, SFR_EFORK  the file must be read in one thread instead (check.c)
 *   another -errno          the file cannot be read, or there is no memory */
int sfr__check_await_reader(struct sfr_check *c);

#endif
