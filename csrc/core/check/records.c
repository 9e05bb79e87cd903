/* Checks one record of a checkpoint's archive: two of the steps of a check (check.c).
 *
 *     directory record --> local header --> [data, chunk by chunk] --> descriptor --> next
 *       (1)                  (2)              (3)                        (4)
 *
 * (1) read_next_dir_record, (2) check_local_header, (3) record_bytes, (4) check_data_descriptor.
 * With SFR_CHECK_DIRECTORY, (2) is find_end_by_directory, and there is nothing after it.
 *
 * The functions set *wrong to the first damage of the record. The record is then put on the list of
 * bad records and not checked further. They return 0, SFR_EAGAIN or -errno, as a step does.
 *
 * The bytes of a long file are read on threads instead (sums.c). */
#include <string.h>

#include "sfr/crc.h"
#include "check/records.h"
#include "base/base.h"

/* Copies the record's name to c->name and checks the name. The first name sets the prefix that all
 * others must have. Sets c->has_pickle if the record is data.pkl, and c->has_version if it is the
 * version. Returns NULL, or the damage. */
static const char *store_and_check_name(struct sfr_check *c, const unsigned char *name)
{
	size_t len = c->rec.name_len;
	const char *wrong = sfr__unzip_check_name(name, &c->rec);
	const char *short_name;

	memcpy(c->name, name, len);
	c->name[len] = '\0';
	if (wrong != NULL)
		return wrong;

	if (c->prefix_len == 0) {
		const unsigned char *slash = memchr(name, '/', len);

		if (slash == NULL || slash == name)
			return "it is not inside a directory of the archive, as torch has them";
		c->prefix_len = (size_t)(slash - name) + 1;
		memcpy(c->prefix, name, c->prefix_len);
	}
	if (len < c->prefix_len || memcmp(name, c->prefix, c->prefix_len) != 0)
		return "it is not in the same directory of the archive as the first record";

	/* sfr__unzip_check_name has found no zero byte, so the name can be used as a string */
	short_name = c->name + c->prefix_len;
	if (strcmp(short_name, "data.pkl") == 0)
		c->has_pickle = true;
	if (strcmp(short_name, "version") == 0 || strcmp(short_name, ".data/version") == 0)
		c->has_version = true;
	return NULL;
}

/* Reads the next directory record into c->rec and c->name. *wrong receives damage of this record.
 * If the rest of the directory is unreadable, ends the check (c->state is DONE). */
static int read_next_dir_record(struct sfr_check *c, const char **wrong)
{
	static const char short_dir[] = "its directory ends in the middle of a record";
	const unsigned char *entry, *name;
	uint64_t left = sfr__check_get_dir_end_off(c) - c->dir_pos;
	const char *damage;
	size_t len;
	int rc;

	if (left < SFR__UNZIP_CENTRAL_LEN)
		return sfr__check_end_with_damage(c, short_dir);
	rc = sfr__window_get(&c->dir_window, c->dir_pos, SFR__UNZIP_CENTRAL_LEN,
			     sfr__check_get_dir_end_off(c), &entry, NULL);
	if (rc != 0)
		return sfr__check_handle_read_error(c, rc);
	damage = sfr__unzip_parse_central(entry, &c->rec);
	if (damage != NULL)
		return sfr__check_end_with_damage(c, damage);
	len = (size_t)SFR__UNZIP_CENTRAL_LEN + c->rec.name_len + c->rec.extra_len +
	      c->rec.comment_len;
	if (len > left)
		return sfr__check_end_with_damage(c, short_dir);
	/* again, now with its name, extra fields and comment */
	rc = sfr__window_get(&c->dir_window, c->dir_pos, len, sfr__check_get_dir_end_off(c), &entry,
			     NULL);
	if (rc != 0)
		return sfr__check_handle_read_error(c, rc);
	name = entry + SFR__UNZIP_CENTRAL_LEN;
	rc = sfr__names_add(&c->names, name, c->rec.name_len, c->dir_pos);
	if (rc != 0)
		return rc;
	c->dir_pos += len;
	damage = sfr__unzip_parse_central_extra(name + c->rec.name_len, &c->rec, &c->end);
	*wrong = store_and_check_name(c, name);
	if (*wrong == NULL) /* damage of the name is reported first */
		*wrong = damage;
	return 0;
}

static const char overlaps[] = "it overlaps another record or is out of order";
static const char reaches_beyond[] = "it reaches beyond the data of the file";

/* Returns whether the current record overlaps an earlier one, or is the first (c->names has only
 * its name) and does not begin at the start of the archive. */
static bool is_out_of_order(const struct sfr_check *c)
{
	return c->rec.hdr_off < c->body_pos || (c->names.nr == 1 && c->rec.hdr_off != 0);
}

/* Checks, without reading the local header, that the record ends before the directory. Sets
 * c->rec_end to the end that the record has if its local header has no extra fields. */
static void find_end_by_directory(struct sfr_check *c, const char **wrong)
{
	/* The record's end if its name were empty. sfr__unzip_parse_central_extra has checked that
	 * it is not after the directory's start. */
	const uint64_t end = c->rec.hdr_off + SFR__UNZIP_LOCAL_LEN + c->rec.packed_len;

	if (is_out_of_order(c))
		*wrong = overlaps;
	else if (c->rec.name_len > c->end.dir_off - end)
		*wrong = reaches_beyond;
	else
		c->rec_end = end + c->rec.name_len;
}

/* Compares the local header with the directory, and sets c->data_off. */
static int check_local_header(struct sfr_check *c, const char **wrong)
{
	const uint64_t limit = c->end.dir_off; /* data ends where the directory begins */
	const struct sfr__unzip_record *rec = &c->rec;
	const unsigned char *header, *name;
	size_t extra_len, len;
	int rc;

	if (is_out_of_order(c)) {
		*wrong = overlaps;
		return 0;
	}
	rc = sfr__window_get(&c->body_window, rec->hdr_off, SFR__UNZIP_LOCAL_LEN, limit, &header,
			     NULL);
	if (rc != 0)
		return sfr__check_handle_read_error(c, rc);
	/* even if this header is damaged, the next record cannot begin before its end */
	c->body_pos = rec->hdr_off + SFR__UNZIP_LOCAL_LEN;
	*wrong = sfr__unzip_check_local(header, rec, &extra_len);
	if (*wrong != NULL)
		return 0;
	len = SFR__UNZIP_LOCAL_LEN + rec->name_len + extra_len;
	if (len > limit - rec->hdr_off || rec->packed_len > limit - rec->hdr_off - len) {
		*wrong = reaches_beyond;
		return 0;
	}
	/* now the header with its name and extra fields */
	rc = sfr__window_get(&c->body_window, rec->hdr_off, len, limit, &header, NULL);
	if (rc != 0)
		return sfr__check_handle_read_error(c, rc);
	name = header + SFR__UNZIP_LOCAL_LEN;
	if (memcmp(name, c->name, rec->name_len) != 0) {
		*wrong = "its name in the local header is another one";
		return 0;
	}
	*wrong = sfr__unzip_check_local_extra(header, name + rec->name_len, extra_len, rec);
	c->data_off = rec->hdr_off + len;
	return 0;
}

/* Checks the descriptor if there is one. Sets c->rec_end. */
static int check_data_descriptor(struct sfr_check *c, const char **wrong)
{
	uint64_t off = c->data_off + c->rec.packed_len, left = c->end.dir_off - off;
	size_t len = left < SFR__UNZIP_DESC_MAX ? (size_t)left : SFR__UNZIP_DESC_MAX;
	const unsigned char *bytes;
	int rc;

	if ((c->rec.flags & SFR__UNZIP_HAS_DESC) == 0) {
		c->rec_end = off;
		return 0;
	}
	rc = sfr__window_get(&c->body_window, off, len, c->end.dir_off, &bytes, NULL);
	if (rc != 0)
		return sfr__check_handle_read_error(c, rc);
	*wrong = sfr__unzip_check_desc(bytes, len, &c->rec, &len);
	c->rec_end = off + len;
	return 0;
}

/* Returns whether the check of the current record goes on: there was no error (`rc`), no damage of
 * the record (`wrong`), and no damage that ended the check (c->state would be DONE). */
static bool can_continue_record_check(const struct sfr_check *c, int rc, const char *wrong)
{
	return rc == 0 && c->state == SFR__CHECK_RECORD && wrong == NULL;
}

/* Checks the next record. With SFR_CHECK_BYTES, leaves its data and descriptor to the step
 * BYTES. */
static int check_directory_record(struct sfr_check *c)
{
	const bool reads_headers = (c->flags & SFR_CHECK_DIRECTORY) == 0;
	const uint64_t entry_off = c->dir_pos;
	const char *wrong = NULL;
	int rc = read_next_dir_record(c, &wrong);

	if (can_continue_record_check(c, rc, wrong) && !reads_headers)
		find_end_by_directory(c, &wrong);
	if (can_continue_record_check(c, rc, wrong) && reads_headers)
		rc = check_local_header(c, &wrong);
	if (can_continue_record_check(c, rc, wrong) && (c->flags & SFR_CHECK_BYTES) != 0 &&
	    c->rec.method == SFR__UNZIP_STORED) {
		c->data_done = 0;
		c->crc = 0;
		c->state = SFR__CHECK_BYTES; /* the next step */
		return 0;
	}
	if (can_continue_record_check(c, rc, wrong) && reads_headers)
		rc = check_data_descriptor(c, &wrong);
	if (rc != 0 || c->state != SFR__CHECK_RECORD) /* an error, or the check has ended */
		return rc;
	if (wrong != NULL)
		return sfr__check_add_bad_record(c, wrong);
	if ((c->flags & SFR_CHECK_KEEP) != 0) {
		c->listing.prefix_len = c->prefix_len;
		rc = sfr__listing_add(&c->listing, &c->rec, c->name, entry_off);
		if (rc != 0)
			return rc;
	}
	c->body_pos = c->rec_end;
	/* deflated data, and data without a CRC, cannot be checked */
	if (c->rec.method != SFR__UNZIP_STORED)
		c->result.nr_compressed++;
	if (c->rec.method != SFR__UNZIP_STORED || (c->rec.crc == 0 && c->rec.packed_len != 0))
		c->result.nr_unchecked++;
	return 0;
}

int sfr__check_next_record(struct sfr_check *c)
{
	const uint64_t nr = c->names.nr, dir_pos = c->dir_pos, body_pos = c->body_pos;
	int rc;

	if (nr == c->end.nr_records) { /* all records are checked */
		if (c->dir_pos != sfr__check_get_dir_end_off(c))
			return sfr__check_end_with_damage(
				c, "its directory is longer than its records");
		c->state = SFR__CHECK_SORT;
		return 0;
	}
	rc = check_directory_record(c);
	if (rc == SFR_EAGAIN) { /* undo this step, which is tried again */
		c->names.nr = nr;
		c->dir_pos = dir_pos;
		c->body_pos = body_pos;
	}
	return rc;
}

/* ---- BYTES ------------------------------------------------------------------- */

int sfr__check_record_bytes(struct sfr_check *c)
{
	uint64_t left = c->rec.packed_len - c->data_done;
	const unsigned char *bytes;
	const char *wrong = NULL;
	size_t avail;
	int rc;

	if (left != 0) { /* one chunk in each step */
		sfr__source_announce_read(&c->body_window.source, c->body_pos, c->end.dir_off);
		/* one byte is enough; `avail` becomes how many the window has */
		rc = sfr__window_get(&c->body_window, c->data_off + c->data_done, 1, c->end.dir_off,
				     &bytes, &avail);
		if (rc != 0)
			return sfr__check_handle_read_error(c, rc);
		if (avail > left)
			avail = (size_t)left;
		c->crc = sfr_crc32(c->crc, bytes, avail);
		c->data_done += avail;
		c->body_pos = c->data_off + c->data_done;
		sfr__source_discard_read_range(&c->body_window.source, c->reported_pos,
					       c->body_pos - c->reported_pos);
		c->reported_pos = c->body_pos;
		return 0;
	}
	/* all data are read: check the descriptor and the CRC */
	rc = check_data_descriptor(c, &wrong);
	if (rc != 0 || c->state != SFR__CHECK_BYTES) /* an error, or the check has ended */
		return rc;
	c->state = SFR__CHECK_RECORD;
	/* With torch's compute_crc32=False all stated CRCs are 0, and the bytes cannot be
	 * checked. */
	if (c->crc != c->rec.crc && c->rec.crc == 0 && wrong == NULL)
		c->result.nr_unchecked++;
	else if (c->crc != c->rec.crc && wrong == NULL)
		wrong = "its bytes do not match their CRC";
	if (wrong != NULL)
		return sfr__check_add_bad_record(c, wrong);
	c->body_pos = c->rec_end;
	return 0;
}
