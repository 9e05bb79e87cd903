/* Writes the bytes of a zip file that are not data: headers, descriptors, the tail.
 *
 * layout.c decides the offset of each entry. This file computes the length of each record before
 * anything is copied, and writes the record's bytes when the CRCs are known. The records are those
 * of torch's files:
 *
 *   - CRC and sizes in the local header are zero, and flag bit 3 means that a descriptor follows
 *     the data. If the CRC were in the header, an entry's first block could be written only after
 *     the entry's last byte was copied, and a small pool would hang.
 *   - Sizes and offsets of 0xffffffff and more (sfr_limits.zip64_bytes) go to a zip64 extra
 *     field. An entry with such a size or offset has the long descriptor of 24 bytes. Its local
 *     header has both sizes in the zip64 field, as the format requires; torch may omit one.
 *   - An extra field "FB", filled with 'Z', aligns the data.
 *   - There are always zip64 end records. A number that does not fit into the old end record is
 *     0xffff or 0xffffffff there.
 *   - .data/serialization_id is made from all names and CRCs, so it is the last entry and a part
 *     of the tail, which is written when everything else is known:
 *
 *         zeros | .data/serialization_id | central directory | end records
 *
 * A header or descriptor may span two blocks. So it is built whole on the stack, and the requested
 * range of its bytes is copied out. No function here waits, allocates or changes the image. */
#include <string.h>

#include "sfr/crc.h"
#include "archive/write.h"
#include "sfr/limits.h"

#define LOCAL_LEN 30u             /* fixed part of a local header */
#define EXTRA_HEAD_LEN 4u         /* tag and length of an extra field */
#define ZIP64_LEN 20u             /* local zip64 extra field: tag, length, two sizes */
#define DESC_LEN 16u              /* descriptor */
#define DESC64_LEN 24u            /* the same with zip64 */
#define CENTRAL_LEN 46u           /* fixed part of a directory record */
#define END_LEN (56u + 20u + 22u) /* zip64 end record, its locator, end record */
#define NAME_MAX_LEN sizeof(((struct sfr__image_entry *)0)->name)
#define HEADER_MAX (LOCAL_LEN + NAME_MAX_LEN + ZIP64_LEN + EXTRA_HEAD_LEN + SFR_ALIGN)

/* written instead of a number that is in the zip64 field or record */
#define MAX16 0xffffu
#define MAX32 UINT32_C(0xffffffff)
#define FLAGS 0x0808u /* bit 3: a descriptor follows; bit 11: names are UTF-8 */
#define ZIP64_TAG 0x0001u

#define ID_NAME "archive/.data/serialization_id"
#define ID_NAME_LEN 30u
#define ID_LEN 40u /* decimal digits */

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "zip's integers are stored as they are");

/* ---- sizes --------------------------------------------------------------- */

static bool needs_zip64(uint64_t value)
{
	return value >= sfr_limits.zip64_bytes;
}

static bool is_zip64(const struct sfr__image_entry *e)
{
	return needs_zip64(e->nbytes) || needs_zip64(e->hdr_off);
}

uint64_t sfr__zip_local_header_len(uint64_t name_len, uint64_t nbytes, uint64_t hdr_off)
{
	const bool zip64 = needs_zip64(nbytes) || needs_zip64(hdr_off);

	/* EXTRA_HEAD_LEN: the extra field "FB" without the bytes that align the data */
	return LOCAL_LEN + name_len + (zip64 ? ZIP64_LEN : 0) + EXTRA_HEAD_LEN;
}

uint64_t sfr__zip_header_len(const struct sfr__image_entry *e)
{
	return sfr__zip_local_header_len(strlen(e->name), e->nbytes, e->hdr_off);
}

uint32_t sfr__zip_desc_len(const struct sfr__image_entry *e)
{
	return is_zip64(e) ? DESC64_LEN : DESC_LEN;
}

/* Returns the length of a directory record's zip64 field: two sizes, then the offset. */
static uint64_t central_zip64_len(bool long_size, bool long_off)
{
	uint64_t numbers = (long_size ? 16u : 0) + (long_off ? 8u : 0);

	return numbers != 0 ? EXTRA_HEAD_LEN + numbers : 0;
}

/* Returns the length of an entry's record in the central directory. */
static uint64_t central_record_len(const struct sfr__image_entry *e)
{
	return CENTRAL_LEN + strlen(e->name) +
	       central_zip64_len(needs_zip64(e->nbytes), needs_zip64(e->hdr_off));
}

/* Returns whether .data/serialization_id has the long (zip64) form. Its exact offset is not known
 * yet, so the highest possible offset decides. The long form is valid for smaller offsets too. */
static bool tail_is_zip64(const struct sfr__image *img)
{
	return img->tail_off + SFR_PAGE > sfr_limits.zip64_bytes;
}

/* Returns the length of the tail without its zeros: the record .data/serialization_id (the id), the
 * central directory, and the end records. Sets *dir_len to the length of the directory. */
static uint64_t unpadded_tail_len(const struct sfr__image *img, uint64_t *dir_len)
{
	bool zip64 = tail_is_zip64(img);
	uint64_t id_header_len = LOCAL_LEN + ID_NAME_LEN + (zip64 ? ZIP64_LEN : 0) + EXTRA_HEAD_LEN;
	uint64_t id_desc_len = zip64 ? DESC64_LEN : DESC_LEN;

	/* the directory has a record of the id, too; false: the id's length fits into 32 bits */
	*dir_len = CENTRAL_LEN + ID_NAME_LEN + central_zip64_len(false, zip64);
	for (uint32_t i = 0; i < img->nr_entries; i++)
		*dir_len += central_record_len(&img->entries[i]);
	return id_header_len + ID_LEN + id_desc_len + *dir_len + END_LEN;
}

uint64_t sfr__zip_tail_len(const struct sfr__image *img)
{
	uint64_t dir_len;

	return sfr__round_up(unpadded_tail_len(img, &dir_len), SFR_PAGE);
}

/* ---- records ------------------------------------------------------------- */

/* A position in the output. The functions put_* write at `at` and move it past what they wrote. */
struct cursor {
	unsigned char *at;
};

static void put_raw_bytes(struct cursor *out, const void *src, size_t len)
{
	memcpy(out->at, src, len);
	out->at += len;
}

static void put16(struct cursor *out, uint64_t value)
{
	uint16_t v = (uint16_t)value;

	put_raw_bytes(out, &v, sizeof(v));
}

static void put32(struct cursor *out, uint64_t value)
{
	uint32_t v = (uint32_t)value;

	put_raw_bytes(out, &v, sizeof(v));
}

static void put64(struct cursor *out, uint64_t value)
{
	put_raw_bytes(out, &value, sizeof(value));
}

/* Writes a value in 32 bits; or 0xffffffff if the value is written to the zip64 field or record. */
static void put32_or_max(struct cursor *out, uint64_t value)
{
	put32(out, needs_zip64(value) ? MAX32 : value);
}

/* Writes a local header. Its last extra field, "FB", is `pad` bytes of padding for the data. */
static void put_local(struct cursor *out, const char *name, uint64_t nbytes, bool zip64, size_t pad)
{
	size_t name_len = strlen(name);

	put32(out, 0x04034b50); /* signature */
	put16(out, 0);          /* version needed: torch writes 0 */
	put16(out, FLAGS);
	put16(out, 0); /* stored */
	put32(out, 0); /* time and date */
	put32(out, 0); /* CRC: it is in the descriptor, like the sizes */
	put32(out, 0); /* packed size */
	put32(out, 0); /* size */
	put16(out, name_len);
	put16(out, (zip64 ? ZIP64_LEN : 0) + EXTRA_HEAD_LEN + pad);
	put_raw_bytes(out, name, name_len);
	if (zip64) {
		put16(out, ZIP64_TAG);
		put16(out, ZIP64_LEN - EXTRA_HEAD_LEN);
		put64(out, nbytes); /* size */
		put64(out, nbytes); /* packed size */
	}
	put_raw_bytes(out, "FB", 2); /* the tag of the padding */
	put16(out, pad);
	memset(out->at, 'Z', pad);
	out->at += pad;
}

static void put_descriptor(struct cursor *out, uint32_t crc, uint64_t nbytes, bool zip64)
{
	put32(out, 0x08074b50); /* signature */
	put32(out, crc);
	if (zip64) { /* packed size and size, which are equal */
		put64(out, nbytes);
		put64(out, nbytes);
	} else {
		put32(out, nbytes);
		put32(out, nbytes);
	}
}

/* Writes a directory record. With `long_off` the offset goes to the zip64 field. */
static void put_central_record(struct cursor *out, const char *name, uint32_t crc, uint64_t nbytes,
			       uint64_t hdr_off, bool long_off)
{
	bool long_size = needs_zip64(nbytes);
	size_t name_len = strlen(name), extra_len = (size_t)central_zip64_len(long_size, long_off);

	put32(out, 0x02014b50); /* signature */
	put16(out, 0);          /* version made by: torch writes 0 */
	put16(out, 0);          /* version needed: torch writes 0 */
	put16(out, FLAGS);
	put16(out, 0); /* stored */
	put32(out, 0); /* time and date */
	put32(out, crc);
	put32_or_max(out, nbytes); /* packed size */
	put32_or_max(out, nbytes); /* size */
	put16(out, name_len);
	put16(out, extra_len);
	put16(out, 0); /* length of the comment */
	put16(out, 0); /* disk */
	put16(out, 0); /* internal attributes */
	put32(out, 0); /* external attributes */
	put32(out, long_off ? MAX32 : hdr_off);
	put_raw_bytes(out, name, name_len);
	if (extra_len != 0) {
		put16(out, ZIP64_TAG);
		put16(out, extra_len - EXTRA_HEAD_LEN);
	}
	if (long_size) {
		put64(out, nbytes); /* size */
		put64(out, nbytes); /* packed size */
	}
	if (long_off)
		put64(out, hdr_off);
}

/* Writes the three end records: the zip64 end record, its locator, and the old end record. */
static void put_end(struct cursor *out, uint64_t nr_records, uint64_t dir_off, uint64_t dir_len)
{
	uint64_t end64_off = dir_off + dir_len; /* the zip64 end record follows the directory */
	uint64_t old_nr_records = nr_records < sfr_limits.zip64_records ? nr_records : MAX16;

	put32(out, 0x06064b50); /* zip64 end record */
	put64(out, 56 - 12);    /* length of this record without its first 12 bytes */
	put16(out, 0x031e);     /* version made by, as torch writes it */
	put16(out, 45);         /* version needed: 4.5 for zip64 */
	put32(out, 0);          /* this disk */
	put32(out, 0);          /* disk with the directory */
	put64(out, nr_records); /* on this disk */
	put64(out, nr_records); /* in all */
	put64(out, dir_len);
	put64(out, dir_off);

	put32(out, 0x07064b50); /* locator of the zip64 end record */
	put32(out, 0);          /* disk */
	put64(out, end64_off);
	put32(out, 1); /* number of disks */

	put32(out, 0x06054b50);     /* old end record */
	put16(out, 0);              /* this disk */
	put16(out, 0);              /* disk with the directory */
	put16(out, old_nr_records); /* on this disk */
	put16(out, old_nr_records); /* in all */
	put32_or_max(out, dir_len);
	put32_or_max(out, dir_off);
	put16(out, 0); /* length of the comment */
}

void sfr__image_put_header(const struct sfr__image *img, uint32_t entry, uint64_t off, size_t len,
			   void *dst)
{
	const struct sfr__image_entry *e = &img->entries[entry];
	unsigned char header[HEADER_MAX];
	struct cursor out = { header };
	size_t pad;

	if (img->glue != NULL) { /* not torch's format: the glue takes the header's place */
		memcpy(dst, img->glue + e->glue_at + off, len);
		return;
	}
	pad = (size_t)(e->data_off - e->hdr_off - sfr__zip_header_len(e));
	put_local(&out, e->name, e->nbytes, is_zip64(e), pad);
	memcpy(dst, header + off, len);
}

void sfr__image_put_descriptor(const struct sfr__image *img, uint32_t entry, uint64_t off,
			       size_t len, void *dst)
{
	const struct sfr__image_entry *e = &img->entries[entry];
	unsigned char desc[DESC64_LEN];
	struct cursor out = { desc };

	put_descriptor(&out, e->crc, e->nbytes, is_zip64(e));
	memcpy(dst, desc + off, len);
}

/* ---- archives within a file ----------------------------------------------- */

size_t sfr__zip_put_local_header(void *dst, const char *name, uint64_t nbytes, size_t pad)
{
	struct cursor out = { dst };

	put_local(&out, name, nbytes, needs_zip64(nbytes), pad);
	return (size_t)(out.at - (unsigned char *)dst);
}

size_t sfr__zip_put_desc(void *dst, uint32_t crc, uint64_t nbytes)
{
	struct cursor out = { dst };

	put_descriptor(&out, crc, nbytes, needs_zip64(nbytes));
	return (size_t)(out.at - (unsigned char *)dst);
}

size_t sfr__zip_put_central(void *dst, const char *name, uint32_t crc, uint64_t nbytes,
			    uint64_t hdr_off)
{
	struct cursor out = { dst };

	put_central_record(&out, name, crc, nbytes, hdr_off, needs_zip64(hdr_off));
	return (size_t)(out.at - (unsigned char *)dst);
}

size_t sfr__zip_put_end(void *dst, uint64_t nr_records, uint64_t dir_off, uint64_t dir_len)
{
	struct cursor out = { dst };

	put_end(&out, nr_records, dir_off, dir_len);
	return (size_t)(out.at - (unsigned char *)dst);
}

/* ---- tail ---------------------------------------------------------------- */

/* Extends `hash`, the FNV-1a hash of earlier bytes, by `len` bytes. Returns the new hash. */
static uint64_t fnv1a(uint64_t hash, const void *src, size_t len)
{
	const unsigned char *byte = src;

	for (size_t i = 0; i < len; i++)
		hash = (hash ^ byte[i]) * UINT64_C(0x100000001b3);
	return hash;
}

/* Writes a value as ID_LEN / 2 decimal digits. */
static void put_digits(char *digits, uint64_t value)
{
	for (size_t i = ID_LEN / 2; i-- > 0; value /= 10)
		digits[i] = (char)('0' + value % 10);
}

/* Makes the id of the file: one half from the names, the other from sizes and CRCs. Files with the
 * same contents have the same id. The id is not cryptographic. */
static void compute_serialization_id(const struct sfr__image *img, char id[ID_LEN])
{
	const uint64_t start = UINT64_C(0xcbf29ce484222325); /* of FNV-1a */
	uint64_t names = start, contents = start;

	for (uint32_t i = 0; i < img->nr_entries; i++) {
		const struct sfr__image_entry *e = &img->entries[i];

		names = fnv1a(names, e->name, strlen(e->name) + 1);
		contents = fnv1a(contents, &e->nbytes, sizeof(e->nbytes));
		contents = fnv1a(contents, &e->crc, sizeof(e->crc));
	}
	put_digits(id, names);
	put_digits(id + ID_LEN / 2, contents);
}

void sfr__image_put_tail(const struct sfr__image *img, void *dst)
{
	uint64_t dir_len, used = unpadded_tail_len(img, &dir_len);
	uint64_t pad = img->tail_len - used; /* zeros before the record of the id */
	bool zip64 = tail_is_zip64(img);
	struct cursor out = { (unsigned char *)dst + pad };
	char id[ID_LEN];
	uint32_t crc;

	memset(dst, 0, (size_t)pad);
	compute_serialization_id(img, id);
	crc = sfr_crc32(0, id, ID_LEN);
	put_local(&out, ID_NAME, ID_LEN, zip64, 0);
	put_raw_bytes(&out, id, ID_LEN);
	put_descriptor(&out, crc, ID_LEN, zip64);
	for (uint32_t i = 0; i < img->nr_entries; i++) {
		const struct sfr__image_entry *e = &img->entries[i];

		put_central_record(&out, e->name, e->crc, e->nbytes, e->hdr_off,
				   needs_zip64(e->hdr_off));
	}
	put_central_record(&out, ID_NAME, crc, ID_LEN, img->tail_off + pad, zip64);
	/* + 1: the record of the id is not in img->entries */
	put_end(&out, UINT64_C(1) + img->nr_entries, img->len - END_LEN - dir_len, dir_len);
}
