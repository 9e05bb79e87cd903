/* Makes zip files in memory as torch, stillframe and other programs write them, intact or damaged
 * on purpose. For the tests of the reader; only the CRC is shared with the code under test.
 *
 * `blind` marks each byte that no reader checks with a letter for the reason:
 *   'v' a version (needed, or made by): every reader here knows all of zip
 *   'a' attributes: permissions and the like
 *   'A' attributes again, but bit 4 is checked: it makes the record a directory
 *   'x' the inside of an extra field that is padding, and that field's tag
 *   'g' gaps between records
 *   'd' data: checked only when CRCs are compared */
#ifndef ARCHIVE_H
#define ARCHIVE_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "sfr.h"
#include "check.h"

#define ARCHIVE_MAX 2600 /* records */

struct archive_record {
	const char *name;
	size_t name_len;
	const void *data;
	uint64_t len;
	uint16_t flags, method;
	uint32_t crc;
	uint64_t hdr_off, data_off;
	size_t central; /* offset of its directory record in the buffer */
};

struct archive {
	unsigned char *buf;
	char *blind;
	size_t len, cap;
	struct archive_record *records; /* ARCHIVE_MAX of them */
	size_t nr, dir_off, end64, locator, end;
	/* how it is written */
	bool described; /* flag bit 3 and a descriptor */
	bool zip64;     /* zip64 end records */
	bool no_crc;    /* zeros for CRCs */
	uint16_t method;
	size_t align;    /* of the data, by padding; 0 = none */
	size_t name_len; /* of the next name; 0 = strlen */
};

static inline void archive_put(struct archive *a, const void *bytes, size_t len, char blind)
{
	if (a->len + len > a->cap) {
		a->cap = 2 * (a->len + len) + 4096;
		a->buf = realloc(a->buf, a->cap);
		a->blind = realloc(a->blind, a->cap);
		if (a->buf == NULL || a->blind == NULL)
			abort();
	}
	if (len != 0)
		memcpy(a->buf + a->len, bytes, len);
	memset(a->blind + a->len, blind, len);
	a->len += len;
}

/* A little-endian number of `len` bytes. */
static inline void archive_num(struct archive *a, uint64_t value, size_t len, char blind)
{
	unsigned char bytes[8];

	for (size_t i = 0; i < 8; i++)
		bytes[i] = (unsigned char)(value >> 8 * i);
	archive_put(a, bytes, len, blind);
}

static inline void archive_poke(struct archive *a, size_t at, uint64_t value, size_t len)
{
	for (size_t i = 0; i < len; i++)
		a->buf[at + i] = (unsigned char)(value >> 8 * i);
}

static inline void archive_gap(struct archive *a, size_t len)
{
	while (len-- != 0)
		archive_num(a, 0, 1, 'g');
}

/* Returns the next free record. */
static inline struct archive_record *archive_record(struct archive *a)
{
	if (a->records == NULL)
		a->records = calloc(ARCHIVE_MAX, sizeof(*a->records));
	if (a->records == NULL || a->nr == ARCHIVE_MAX)
		abort();
	return &a->records[a->nr++];
}

static inline void archive_add(struct archive *a, const char *name, const void *data, size_t len)
{
	/* torch writes no descriptor after an empty record. */
	const bool described = a->described && len != 0;
	struct archive_record *r = archive_record(a);
	size_t name_len = a->name_len != 0 ? a->name_len : strlen(name);
	size_t extra = 0;

	r->name = name;
	r->name_len = name_len;
	r->len = len;
	r->flags = described ? 0x0808 : 0x0800;
	r->method = a->method;
	r->crc = a->no_crc ? 0 : sfr_crc32_portable(0, data, len);
	r->hdr_off = a->len;
	if (a->align != 0) {
		extra = a->len + 30 + name_len + 4;
		extra = 4 + (extra + a->align - 1) / a->align * a->align - extra;
	}
	archive_num(a, 0x04034b50, 4, 0);
	archive_num(a, 0, 2, 'v');
	archive_num(a, r->flags, 2, 0);
	archive_num(a, r->method, 2, 0);
	archive_num(a, 0x5a210000, 4, 0);
	archive_num(a, described ? 0 : r->crc, 4, 0);
	archive_num(a, described ? 0 : len, 4, 0);
	archive_num(a, described ? 0 : len, 4, 0);
	archive_num(a, name_len, 2, 0);
	archive_num(a, extra, 2, 0);
	archive_put(a, name, name_len, 0);
	if (extra != 0) {
		archive_put(a, "FB", 2, 'x');
		archive_num(a, extra - 4, 2, 0);
		for (size_t i = 4; i < extra; i++)
			archive_put(a, "Z", 1, 'x');
	}
	r->data_off = a->len;
	archive_put(a, data, len, 'd');
	if (described) {
		archive_num(a, 0x08074b50, 4, 0);
		archive_num(a, r->crc, 4, 0);
		archive_num(a, len, 4, 0);
		archive_num(a, len, 4, 0);
	}
}

/* Adds a record whose name may contain any bytes, such as zeros. */
static inline void archive_add_name(struct archive *a, const char *name, size_t name_len)
{
	a->name_len = name_len;
	archive_add(a, name, "x", 1);
	a->name_len = 0;
}

/* One directory record; lengths and offsets past 32 bits go to a zip64 field. */
static inline void archive_central(struct archive *a, struct archive_record *r)
{
	size_t extra = (r->len >= UINT32_MAX ? 16u : 0) + (r->hdr_off >= UINT32_MAX ? 8u : 0);
	uint64_t len = r->len < UINT32_MAX ? r->len : UINT32_MAX;

	r->central = a->len;
	archive_num(a, 0x02014b50, 4, 0);
	archive_num(a, 0, 4, 'v');
	archive_num(a, r->flags, 2, 0);
	archive_num(a, r->method, 2, 0);
	archive_num(a, 0x5a210000, 4, 0);
	archive_num(a, r->crc, 4, 0);
	archive_num(a, len, 4, 0);
	archive_num(a, len, 4, 0);
	archive_num(a, r->name_len, 2, 0);
	archive_num(a, extra != 0 ? 4 + extra : 0, 2, 0);
	archive_num(a, 0, 4, 0); /* comment, disk */
	archive_num(a, 0, 2, 'a');
	archive_num(a, 0, 1, 'A');
	archive_num(a, 0, 3, 'a');
	archive_num(a, r->hdr_off < UINT32_MAX ? r->hdr_off : UINT32_MAX, 4, 0);
	archive_put(a, r->name, r->name_len, 0);
	if (extra != 0) {
		archive_num(a, 1, 2, 0);
		archive_num(a, extra, 2, 0);
		if (r->len >= UINT32_MAX) {
			archive_num(a, r->len, 8, 0);
			archive_num(a, r->len, 8, 0);
		}
		if (r->hdr_off >= UINT32_MAX)
			archive_num(a, r->hdr_off, 8, 0);
	}
}

/* Directory and end records of a file in which `a->buf` begins at offset `base`. */
static inline void archive_finish_at(struct archive *a, uint64_t base)
{
	uint64_t dir_off, dir_len, end64;

	a->dir_off = a->len;
	dir_off = base + a->len;
	for (size_t i = 0; i < a->nr; i++)
		archive_central(a, &a->records[i]);
	dir_len = base + a->len - dir_off;
	end64 = base + a->len;
	a->end64 = a->len;
	if (a->zip64) {
		archive_num(a, 0x06064b50, 4, 0);
		archive_num(a, 44, 8, 0);
		archive_num(a, 0x002d031e, 4, 'v');
		archive_num(a, 0, 8, 0);
		archive_num(a, a->nr, 8, 0);
		archive_num(a, a->nr, 8, 0);
		archive_num(a, dir_len, 8, 0);
		archive_num(a, dir_off, 8, 0);
		a->locator = a->len;
		archive_num(a, 0x07064b50, 4, 0);
		archive_num(a, 0, 4, 0);
		archive_num(a, end64, 8, 0);
		archive_num(a, 1, 4, 0);
	}
	a->end = a->len;
	archive_num(a, 0x06054b50, 4, 0);
	archive_num(a, 0, 4, 0);
	archive_num(a, a->nr, 2, 0);
	archive_num(a, a->nr, 2, 0);
	archive_num(a, dir_len, 4, 0);
	archive_num(a, dir_off < UINT32_MAX ? dir_off : UINT32_MAX, 4, 0);
	archive_num(a, 0, 2, 0);
}

static inline void archive_finish(struct archive *a)
{
	archive_finish_at(a, 0);
}

static inline void archive_free(struct archive *a)
{
	free(a->buf);
	free(a->blind);
	free(a->records);
	memset(a, 0, sizeof(*a));
}

/* Returns an archive as torch.save writes it, up to the storages. */
static inline struct archive archive_torch(void)
{
	struct archive a = { .described = true, .zip64 = true, .align = 64 };

	archive_add(&a, "archive/data.pkl", "\x80\x02}q\x00.", 6);
	archive_add(&a, "archive/.format_version", "0", 1);
	archive_add(&a, "archive/.storage_alignment", "64", 2);
	archive_add(&a, "archive/byteorder", "little", 6);
	archive_add(&a, "archive/version", "3\n", 2);
	return a;
}

#endif
