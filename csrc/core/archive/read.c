/* Checks the bytes of a zip file that are not data: end records, directory, headers, descriptors.
 *
 * The caller reads the bytes; nothing here reads, waits or allocates. The bytes may be hostile. So
 * before numbers are added, each is compared with a bound that rules out an overflow.
 *
 * A zip file stores most facts twice: in the directory, and in the local header before the data or
 * the descriptor after the data. Everything stored twice is compared, including timestamps, because
 * damage makes the two differ. Different programs write:
 *
 *   torch     flag bit 3 (sizes and CRC are zero in the local header, true in the descriptor),
 *             but no descriptor and no bit 3 for an empty record. There are always zip64 end
 *             records, and the old end record repeats the numbers that fit into it. Past 4 GiB the
 *             local header has a zip64 field with {size, 0}, with {offset} alone, or with all
 *             three, and the descriptor is the long one. Code of TorchScript is deflated, all else
 *             is stored.
 *   stillframe  the same with {size, size} in the zip64 field, with descriptors after empty
 *             records too, and with gaps between records.
 *   others    (zip -0, Python's zipfile) no bit 3, true numbers in the local header, a zip64
 *             field with {size, size} where it is 0xffffffff, no zip64 end records.
 *
 * The files of all these programs are accepted. After the end record there may be a comment, or
 * padding of any bytes. Like torch's reader, this code takes the last end record that begins within
 * SFR__UNZIP_END_REACH of the file's end. The bytes after that record are counted, not checked.
 *
 * Fields that are stored once and that no reader uses are not checked: versions, attributes except
 * for the directory bit, extra fields other than zip64's, comments, bytes in the gaps. */
#include <stdbool.h>
#include <string.h>

#include "archive/read.h"

/* The largest value of a 16-bit or 32-bit field: the number is in the zip64 field or record. */
#define MAX16 0xffffu
#define MAX32 UINT32_C(0xffffffff)

/* the four bytes with which each kind of record begins */
#define SIG_LOCAL UINT32_C(0x04034b50)
#define SIG_CENTRAL UINT32_C(0x02014b50)
#define SIG_DESC UINT32_C(0x08074b50)
#define SIG_END UINT32_C(0x06054b50)
#define SIG_END64 UINT32_C(0x06064b50)
#define SIG_LOCATOR UINT32_C(0x07064b50)

#define END_LEN 22u       /* bytes of the end record, without its comment */
#define LOCATOR_LEN 20u   /* bytes of the zip64 locator, which has the zip64 end record's offset */
#define END64_LEN 56u     /* bytes of the zip64 end record */
#define EXTRA_HEAD_LEN 4u /* bytes of an extra field before its contents: tag and length */
#define TAG_ZIP64 1u
/* The attribute of a directory. torch's reader copies no data of a record that has it. */
#define DOS_DIRECTORY 0x10u
/* The flags that are accepted. Bit 3: a descriptor follows. Bit 11: names are UTF-8. Bits 1 and 2:
 * the level of compression. */
#define FLAGS_KNOWN 0x080eu

static uint16_t le16(const unsigned char *p)
{
	return (uint16_t)(p[0] | p[1] << 8);
}

static uint32_t le32(const unsigned char *p)
{
	return le16(p) | (uint32_t)le16(p + 2) << 16;
}

static uint64_t le64(const unsigned char *p)
{
	return le32(p) | (uint64_t)le32(p + 4) << 32;
}

/* ---- end of the file ------------------------------------------------------- */

size_t sfr__unzip_trailing_bytes(const unsigned char *tail, size_t len)
{
	const size_t search_len = len < SFR__UNZIP_END_REACH ? len : SFR__UNZIP_END_REACH;

	for (size_t from_end = END_LEN; from_end <= search_len; from_end++)
		if (le32(tail + len - from_end) == SIG_END)
			return from_end - END_LEN;
	return SIZE_MAX;
}

/* Return whether a field of the old end record agrees with the zip64 end record: it has the same
 * value, or the largest value, which means that only the zip64 end record has the value. */
static bool equals_or_is_max16(uint16_t old, uint64_t value)
{
	return old == value || old == MAX16;
}

static bool equals_or_is_max32(uint32_t old, uint64_t value)
{
	return old == value || old == MAX32;
}

/* Checks the zip64 end record at `end64` and the locator after it. Fills *end with the number of
 * records and the directory's offset and length. */
static const char *read_end64(const unsigned char *end64, struct sfr__unzip_end *end)
{
	static const char damaged[] = "its zip64 end record is damaged";
	const unsigned char *locator = end64 + END64_LEN;
	const uint64_t end64_off = le64(locator + 8);
	const uint64_t rest_len = le64(end64 + 4); /* without the record's first 12 bytes */
	/* each number of a disk is 0, and there is one disk in all: the file is not split */
	const bool one_disk = le32(locator + 4) == 0 && le32(locator + 16) == 1 &&
			      le32(end64 + 16) == 0 && le32(end64 + 20) == 0;

	if (le32(end64) != SIG_END64 || !one_disk || end64_off != end->len - SFR__UNZIP_TAIL_LEN ||
	    rest_len != END64_LEN - 12)
		return damaged;
	if (le64(end64 + 24) != le64(end64 + 32)) /* records on this disk, and in all */
		return damaged;
	end->nr_records = le64(end64 + 24);
	end->dir_len = le64(end64 + 40);
	end->dir_off = le64(end64 + 48);
	return NULL;
}

const char *sfr__unzip_end(const unsigned char *tail, size_t len, uint64_t file_len,
			   struct sfr__unzip_end *end)
{
	static const char damaged[] = "its end record is damaged";
	const size_t nr_trailing = sfr__unzip_trailing_bytes(tail, len); /* after the end record */
	const unsigned char *old_end; /* the end record that is not zip64's */
	uint16_t nr_records, comment_len, this_disk, dir_disk;
	uint32_t dir_len, dir_off;
	uint64_t dir_end;

	if (nr_trailing == SIZE_MAX)
		return "it is truncated: it does not end in a zip end record";
	len -= nr_trailing;
	old_end = tail + len - END_LEN;
	end->len = file_len - nr_trailing;
	this_disk = le16(old_end + 4);
	dir_disk = le16(old_end + 6);
	comment_len = le16(old_end + 20);
	/* A comment that would end after the end of the file shows that the file is truncated. But
	 * bytes after the comment are accepted, because torch's reader accepts them. */
	if (comment_len > nr_trailing || this_disk != 0 || dir_disk != 0)
		return damaged;
	if (le16(old_end + 8) != le16(old_end + 10)) /* records on this disk, and in all */
		return damaged;
	nr_records = le16(old_end + 10);
	dir_len = le32(old_end + 12);
	dir_off = le32(old_end + 16);

	if (len >= SFR__UNZIP_TAIL_LEN && le32(old_end - LOCATOR_LEN) == SIG_LOCATOR) {
		const char *wrong = read_end64(tail + len - SFR__UNZIP_TAIL_LEN, end);

		if (wrong != NULL)
			return wrong;
		if (!equals_or_is_max16(nr_records, end->nr_records) ||
		    !equals_or_is_max32(dir_len, end->dir_len) ||
		    !equals_or_is_max32(dir_off, end->dir_off))
			return "its two end records disagree";
		dir_end = end->len - SFR__UNZIP_TAIL_LEN;
	} else {
		if (nr_records == MAX16 || dir_len == MAX32 || dir_off == MAX32)
			return "its zip64 end record is missing";
		end->nr_records = nr_records;
		end->dir_len = dir_len;
		end->dir_off = dir_off;
		dir_end = end->len - END_LEN;
	}
	if (end->dir_off > dir_end || end->dir_len != dir_end - end->dir_off)
		return "its directory is not where its end record says";
	if (end->nr_records > end->dir_len / SFR__UNZIP_CENTRAL_LEN)
		return "its directory is too short for its number of records";
	return NULL;
}

/* ---- directory --------------------------------------------------------------- */

const char *sfr__unzip_parse_central(const unsigned char *fixed, struct sfr__unzip_record *rec)
{
	if (le32(fixed) != SIG_CENTRAL)
		return "a record of its directory is damaged";
	rec->flags = le16(fixed + 8);
	rec->method = le16(fixed + 10);
	rec->timestamp = le32(fixed + 12);
	rec->crc = le32(fixed + 16);
	rec->packed_len = le32(fixed + 20);
	rec->unpacked_len = le32(fixed + 24);
	rec->name_len = le16(fixed + 28);
	rec->extra_len = le16(fixed + 30);
	rec->comment_len = le16(fixed + 32);
	rec->hdr_off = le32(fixed + 42);
	rec->is_dir = (le32(fixed + 38) & DOS_DIRECTORY) != 0;
	if (le16(fixed + 34) != 0)
		return "a record of its directory claims to be in another file";
	if (rec->name_len == 0 || rec->name_len > SFR__UNZIP_NAME_MAX)
		return "a record of its directory has a name of impossible length";
	return NULL;
}

/* Finds the zip64 field in `len` bytes of extra fields. Sets *field to its contents, or to NULL if
 * there is none. Returns false if there are two, or if the fields do not fill the bytes exactly. */
static bool find_zip64(const unsigned char *extra, size_t len, const unsigned char **field,
		       size_t *field_len)
{
	*field = NULL;
	*field_len = 0;
	while (len != 0) {
		size_t contents_len;

		if (len < EXTRA_HEAD_LEN)
			return false;
		contents_len = le16(extra + 2);
		if (contents_len > len - EXTRA_HEAD_LEN)
			return false;
		if (le16(extra) == TAG_ZIP64) {
			if (*field != NULL)
				return false;
			*field = extra + EXTRA_HEAD_LEN;
			*field_len = contents_len;
		}
		extra += EXTRA_HEAD_LEN + contents_len;
		len -= EXTRA_HEAD_LEN + contents_len;
	}
	return true;
}

/* If *value is 0xffffffff, replaces it by the number at *field, and moves *field to the next number
 * of the zip64 field. *left counts the bytes left in the field. Returns false if there are none. */
static bool widen_from_zip64(uint64_t *value, const unsigned char **field, size_t *left)
{
	if (*value != MAX32)
		return true;
	if (*left < 8)
		return false;
	*value = le64(*field);
	*field += 8;
	*left -= 8;
	return true;
}

const char *sfr__unzip_parse_central_extra(const unsigned char *extra,
					   struct sfr__unzip_record *rec,
					   const struct sfr__unzip_end *end)
{
	const unsigned char *field;
	size_t left;

	if (!find_zip64(extra, rec->extra_len, &field, &left))
		return "its extra fields in the directory are damaged";
	/* the zip64 field has these numbers in this order */
	if (!widen_from_zip64(&rec->unpacked_len, &field, &left) ||
	    !widen_from_zip64(&rec->packed_len, &field, &left) ||
	    !widen_from_zip64(&rec->hdr_off, &field, &left) || left != 0)
		return "its zip64 sizes in the directory are damaged";
	if ((rec->flags & ~FLAGS_KNOWN) != 0 ||
	    (rec->method != SFR__UNZIP_STORED && rec->method != SFR__UNZIP_DEFLATED))
		return "it is packed in a way that no checkpoint is";
	if (rec->method == SFR__UNZIP_STORED && rec->packed_len != rec->unpacked_len)
		return "its two sizes in the directory disagree";
	if (rec->hdr_off > end->dir_off || end->dir_off - rec->hdr_off < SFR__UNZIP_LOCAL_LEN ||
	    rec->packed_len > end->dir_off - rec->hdr_off - SFR__UNZIP_LOCAL_LEN)
		return "it reaches beyond the data of the file";
	return NULL;
}

const char *sfr__unzip_check_name(const unsigned char *name, const struct sfr__unzip_record *rec)
{
	if (memchr(name, 0, rec->name_len) != NULL)
		return "its name holds a zero byte";
	/* zip -r writes records for directories; they have no data */
	if (name[rec->name_len - 1] == '/' && rec->unpacked_len != 0)
		return "it is a directory and yet has data";
	if (name[rec->name_len - 1] != '/' && rec->is_dir)
		return "it is marked as a directory";
	return NULL;
}

/* ---- local header and descriptor --------------------------------------------- */

/* Returns whether a size in the local header agrees with the directory. The header may have 0 if a
 * descriptor follows, and 0xffffffff if the zip64 field has the size. */
static bool sizes_agree(uint32_t in_header, uint64_t in_dir, const struct sfr__unzip_record *rec)
{
	return in_header == in_dir || in_header == MAX32 ||
	       (in_header == 0 && (rec->flags & SFR__UNZIP_HAS_DESC) != 0);
}

const char *sfr__unzip_check_local(const unsigned char *fixed, const struct sfr__unzip_record *rec,
				   size_t *extra_len)
{
	const bool has_desc = (rec->flags & SFR__UNZIP_HAS_DESC) != 0;
	uint32_t crc = le32(fixed + 14);

	*extra_len = le16(fixed + 28);
	if (le32(fixed) != SIG_LOCAL)
		return "its local header is missing";
	if (le16(fixed + 6) != rec->flags || le16(fixed + 8) != rec->method ||
	    le32(fixed + 10) != rec->timestamp || le16(fixed + 26) != rec->name_len)
		return "its local header and the directory disagree";
	/* the CRC may be 0 if the descriptor has it */
	if (crc != rec->crc && (crc != 0 || !has_desc))
		return "its CRC in the local header is not the directory's";
	if (!sizes_agree(le32(fixed + 18), rec->packed_len, rec) ||
	    !sizes_agree(le32(fixed + 22), rec->unpacked_len, rec))
		return "its sizes in the local header are not the directory's";
	return NULL;
}

const char *sfr__unzip_check_local_extra(const unsigned char *fixed, const unsigned char *extra,
					 size_t extra_len, const struct sfr__unzip_record *rec)
{
	static const char mismatch[] =
		"its zip64 sizes in the local header are not the directory's";
	const bool has_desc = (rec->flags & SFR__UNZIP_HAS_DESC) != 0;
	const uint64_t dir_numbers[3] = { rec->unpacked_len, rec->packed_len, rec->hdr_off };
	const uint64_t *expected = dir_numbers; /* what the number at `field` must be */
	const uint32_t packed_len = le32(fixed + 18), unpacked_len = le32(fixed + 22);
	const unsigned char *field;
	size_t len;

	if (!find_zip64(extra, extra_len, &field, &len))
		return "its extra fields in the local header are damaged";
	/* A size of 0xffffffff means that both sizes are in the zip64 field (16 bytes), unless the
	 * record really has this size. */
	if (len < 16 && ((packed_len == MAX32 && rec->packed_len != MAX32) ||
			 (unpacked_len == MAX32 && rec->unpacked_len != MAX32)))
		return mismatch;
	if (field == NULL)
		return NULL;
	if (len == 8) /* torch writes only the offset if both sizes are below 4 GiB */
		expected = &dir_numbers[2]; /* the offset */
	else if (len != 16 && len != 24)
		return mismatch;
	/* each number equals the directory's, or is 0 because the descriptor has it */
	for (; len != 0; field += 8, len -= 8, expected++)
		if (le64(field) != *expected && (le64(field) != 0 || !has_desc))
			return mismatch;
	return NULL;
}

const char *sfr__unzip_check_desc(const unsigned char *bytes, size_t len,
				  const struct sfr__unzip_record *rec, size_t *desc_len)
{
	*desc_len = 0;
	if ((rec->flags & SFR__UNZIP_HAS_DESC) == 0)
		return NULL;
	if (len < 16 || le32(bytes) != SIG_DESC)
		return "the descriptor after its data is missing";
	if (le32(bytes + 4) != rec->crc)
		return "its CRC in the descriptor is not the directory's";
	/* the sizes tell whether the descriptor is the short or the long one */
	if (le32(bytes + 8) == rec->packed_len && le32(bytes + 12) == rec->unpacked_len)
		*desc_len = 16;
	else if (len >= 24 && le64(bytes + 8) == rec->packed_len &&
		 le64(bytes + 16) == rec->unpacked_len)
		*desc_len = 24;
	else
		return "its sizes in the descriptor are not the directory's";
	return NULL;
}
