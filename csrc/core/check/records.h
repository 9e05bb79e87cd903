/* A check in hand: what check.c and records.c share. */
#ifndef SFR_RECORDS_H
#define SFR_RECORDS_H

#include "check/check.h"
#include "check/names.h"
#include "check/places.h"
#include "archive/read.h"
#include "check/window.h"

enum sfr__check_state {
	SFR__CHECK_START,
	SFR__CHECK_RECORD,
	SFR__CHECK_BYTES,
	SFR__CHECK_SORT,
	SFR__CHECK_NAMES,
	SFR__CHECK_DONE
};

struct sfr_check {
	int fd;
	unsigned flags;
	enum sfr__check_state state;
	int code; /* 0, or why reading failed */
	struct sfr_check_result result;
	struct sfr_bad_record *bad;
	struct sfr__window dir, body;
	struct sfr__unzip_end end;
	uint64_t dir_pos;  /* of the next directory record */
	uint64_t body_pos; /* up to here the file is accounted for */
	bool has_pickle, has_version;
	struct sfr__names names;   /* a place is the record's offset in the file */
	struct sfr__places places; /* with SFR_CHECK_KEEP */
	uint64_t names_at;         /* how far they have been compared */
	unsigned nr_alike;         /* names that differ and have one hash */
	bool os_error;             /* `code` is what the operating system said of the file */
	/* the record in hand */
	struct sfr__unzip_record rec;
	uint64_t data_off, data_done, rec_end;
	uint32_t crc;
	char prefix[SFR__UNZIP_NAME_MAX]; /* of every name: "archive/" */
	size_t prefix_len;
	char name[SFR__UNZIP_NAME_MAX + 1]; /* as it is in the file, and a zero byte */
};

static inline uint64_t sfr__check_dir_end(const struct sfr_check *c)
{
	return c->end.dir_off + c->end.dir_len;
}

/* ---- check.c: verdicts. Each returns 0 or -errno, as every step does. ---- */

/* Ends the check: the file as a whole is damaged. */
int sfr__check_fatal(struct sfr_check *c, const char *wrong);
/* What a failed sfr__window_get means: a changed file is a verdict, all else an error. */
int sfr__check_unreadable(struct sfr_check *c, int rc);
/* Puts the record in hand on the list of bad ones. -ENOMEM. */
int sfr__check_bad_record(struct sfr_check *c, const char *reason);

/* The kept record of this name, which comes without the archive's directory: its index, or
 * places.nr. Only when the check is done. */
uint64_t sfr__check_find(const struct sfr_check *c, const char *bare, size_t len);

/* ---- records.c: two of the steps ---- */

int sfr__check_next_record(struct sfr_check *c);
int sfr__check_record_bytes(struct sfr_check *c);

#endif
