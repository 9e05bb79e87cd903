/* Functions that check the records of a zip file in memory. See archive/read.c; the callers in
 * check/ and reader/ read the bytes. */
#ifndef SFR_READ_H
#define SFR_READ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SFR__UNZIP_TAIL_LEN 98u /* bytes of the zip64 end record, its locator and the end record */
/* How far from the file's end torch's reader (miniz) searches for the end record: it reads 17
 * buffers of 4096 bytes, each beginning 4093 bytes before the previous one. */
#define SFR__UNZIP_END_REACH (4096u + 16u * 4093u)
#define SFR__UNZIP_TAIL_MAX (SFR__UNZIP_END_REACH + SFR__UNZIP_TAIL_LEN)
#define SFR__UNZIP_CENTRAL_LEN 46u /* fixed part of a directory record */
#define SFR__UNZIP_LOCAL_LEN 30u   /* fixed part of a local header */
#define SFR__UNZIP_DESC_MAX 24u    /* longest descriptor */
#define SFR__UNZIP_NAME_MAX 1024u

#define SFR__UNZIP_HAS_DESC 0x0008u /* flag: a descriptor follows the data */
#define SFR__UNZIP_STORED 0u
#define SFR__UNZIP_DEFLATED 8u

/* Functions that return `const char *` return NULL if they find no damage, else a text to be put
 * after the name of the file or record, such as "its local header is missing". */

struct sfr__unzip_end {
	uint64_t len; /* length of the archive: the file without the bytes after the end record */
	uint64_t nr_records;
	uint64_t dir_off, dir_len; /* the directory, which ends where the end records begin */
};

/* One record, as the directory describes it. */
struct sfr__unzip_record {
	uint64_t hdr_off;      /* offset of the local header; below dir_off */
	uint64_t packed_len;   /* length of the data in the file */
	uint64_t unpacked_len; /* equals packed_len if the record is stored */
	uint32_t crc;
	uint32_t timestamp; /* time and date, only to be compared */
	uint16_t flags, method;
	bool is_dir; /* has the attribute of a directory */
	/* lengths of the fields that follow in the directory, in this order */
	uint16_t name_len, extra_len, comment_len;
};

/* Returns how many bytes follow the last end record of a file, or SIZE_MAX if there is no end
 * record where torch's reader searches. `tail` has the file's last `len` bytes. */
size_t sfr__unzip_trailing_bytes(const unsigned char *tail, size_t len);
/* Checks the end of a file and fills *end. `tail` has the file's last `len` bytes: at least
 * SFR__UNZIP_TAIL_LEN and the bytes after the end record, or the whole file if that is shorter. */
const char *sfr__unzip_end(const unsigned char *tail, size_t len, uint64_t file_len,
			   struct sfr__unzip_end *end);
/* Check a record of the central directory and fill *rec. Return NULL, or a text about the damage.
 * The first function gets the record's fixed part, SFR__UNZIP_CENTRAL_LEN bytes; the second gets
 * its extra fields, rec->extra_len bytes. Lengths and hdr_off are final only after the second. */
const char *sfr__unzip_parse_central(const unsigned char *fixed, struct sfr__unzip_record *rec);
const char *sfr__unzip_parse_central_extra(const unsigned char *extra,
					   struct sfr__unzip_record *rec,
					   const struct sfr__unzip_end *end);
/* Checks a record's name, of rec->name_len bytes. rec->unpacked_len must be final. */
const char *sfr__unzip_check_name(const unsigned char *name, const struct sfr__unzip_record *rec);
/* Compares the fixed part of a local header, SFR__UNZIP_LOCAL_LEN bytes, with the directory. After
 * it the file has rec->name_len bytes of name, then *extra_len bytes of extra fields. Returns NULL,
 * or a text about the damage, like the other functions. */
const char *sfr__unzip_check_local(const unsigned char *fixed, const struct sfr__unzip_record *rec,
				   size_t *extra_len);
/* Compares the zip64 sizes in a local header's extra fields with the directory. */
const char *sfr__unzip_check_local_extra(const unsigned char *fixed, const unsigned char *extra,
					 size_t extra_len, const struct sfr__unzip_record *rec);
/* Checks the descriptor of a record, if the record has one. `bytes` are the `len` bytes after the
 * data, at most SFR__UNZIP_DESC_MAX. *desc_len receives the descriptor's length, or 0. */
const char *sfr__unzip_check_desc(const unsigned char *bytes, size_t len,
				  const struct sfr__unzip_record *rec, size_t *desc_len);

#endif
