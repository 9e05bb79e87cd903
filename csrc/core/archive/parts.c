/* A file made of a list of parts: bytes, sources, and fields that hold a source's CRC.
 *
 *     glue     source 0   glue    source 1   glue
 *     |------|----------|------|-----------|------|
 *     entry 0            entry 1             entry 2
 *
 * The bytes and fields between two sources are glue. Each entry of the image consists of glue, in
 * place of a header, and a source. The last entry has only glue. The caller leaves the sources
 * unchanged until the save has ended, so they are not copied in advance. A writer copies a source
 * through its buffer, or writes it in place (directly from the source's memory).
 *
 *     extent 0 extent 1        extent 2 extent 3         buffered, direct, ...
 *     |-------|-----------------|-------|-----------|
 *             ^ 4096 in the file and in memory
 *
 * If a source has the same offset modulo 4096 in the file and in memory, its whole pages become an
 * extent of their own, which is written in place. If they have fewer than DIRECT_MIN bytes, they go
 * through a buffer like all other bytes. Extents start and end at multiples of 4096. The last
 * extent is padded with zeros, which are cut off the file. */
#include <errno.h>
#include <string.h>

#include "archive/layout.h"
#include "archive/parts.h"

/* Every source of 1 MiB has at least this many bytes in whole pages. */
#define DIRECT_MIN ((UINT64_C(1) << 20) - 2 * SFR_PAGE)

struct sfr_parts {
	struct sfr__image_entry *entries; /* the next glue and source are added to the last entry */
	size_t nr_entries, entries_capacity;
	struct sfr__crc_field *crc_fields;
	size_t nr_crc_fields, crc_fields_capacity;
	char *glue; /* all glue of the file, without the sources */
	size_t glue_len, glue_capacity;
	uint64_t len; /* length of the file so far */
	int rc;       /* the first error */
};

/* Makes room for `nr_more` items after the first `nr_items` of an array. *capacity counts items.
 * Returns the array, possibly moved. Returns NULL without memory; `items` then stays valid. */
static void *grow_items(void *items, size_t nr_items, size_t *capacity, size_t nr_more,
			size_t item_size)
{
	size_t new_capacity = *capacity == 0 ? 64 : *capacity;
	void *larger;

	if (items != NULL && nr_items + nr_more <= *capacity)
		return items;
	while (new_capacity < nr_items + nr_more)
		new_capacity *= 2;
	larger = sfr_sys.realloc(items, new_capacity * item_size);
	if (larger != NULL)
		*capacity = new_capacity;
	return larger;
}

int sfr__parts_fail(struct sfr_parts *p, int rc)
{
	if (p->rc == 0)
		p->rc = rc;
	return p->rc;
}

/* Appends an empty entry, for the next glue and source. Returns 0, or the parts' first error. */
static int append_entry(struct sfr_parts *p)
{
	struct sfr__image_entry *entries =
		grow_items(p->entries, p->nr_entries, &p->entries_capacity, 1, sizeof(*entries));

	if (entries == NULL)
		return sfr__parts_fail(p, -ENOMEM);
	p->entries = entries;
	/* the entry's glue will begin here; it has no source yet (-1) */
	p->entries[p->nr_entries++] = (struct sfr__image_entry){
		.hdr_off = p->len, .data_off = p->len, .source = -1, .glue_at = p->glue_len
	};
	return 0;
}

int sfr_parts_new(struct sfr_parts **out)
{
	struct sfr_parts *p = sfr_sys.calloc(1, sizeof(*p));

	*out = NULL;
	if (p == NULL)
		return -ENOMEM;
	if (append_entry(p) != 0) {
		sfr_parts_free(p);
		return -ENOMEM;
	}
	*out = p;
	return 0;
}

void sfr_parts_free(struct sfr_parts *p)
{
	if (p == NULL)
		return;
	sfr_sys.free(p->entries);
	sfr_sys.free(p->crc_fields);
	sfr_sys.free(p->glue);
	sfr_sys.free(p);
}

uint64_t sfr_parts_file_len(const struct sfr_parts *p)
{
	return p->len;
}

uint32_t sfr__parts_nr_sources(const struct sfr_parts *p)
{
	return (uint32_t)p->nr_entries - 1; /* the last entry has no source yet */
}

/* Adds `len` bytes to the glue of the last entry (the bytes before its source). Returns the address
 * to which the caller must write them, or NULL after an error, which is in p->rc. */
static char *reserve_glue_bytes(struct sfr_parts *p, size_t len)
{
	char *glue, *at;

	if (p->rc != 0)
		return NULL;
	if (len > SFR__IMAGE_LEN_MAX - p->len) {
		(void)sfr__parts_fail(p, -EFBIG);
		return NULL;
	}
	glue = grow_items(p->glue, p->glue_len, &p->glue_capacity, len,
			  1); /* an item is one byte */
	if (glue == NULL) {
		(void)sfr__parts_fail(p, -ENOMEM);
		return NULL;
	}
	p->glue = glue;
	at = glue + p->glue_len;
	p->glue_len += len;
	p->len += len;
	p->entries[p->nr_entries - 1].data_off = p->len;
	return at;
}

int sfr_parts_add_bytes(struct sfr_parts *p, const void *bytes, size_t len)
{
	char *at = reserve_glue_bytes(p, len);

	if (at != NULL && len != 0)
		memcpy(at, bytes, len);
	return p->rc;
}

int sfr_parts_add_source(struct sfr_parts *p, uint64_t addr, uint64_t nbytes)
{
	struct sfr__image_entry *entry;

	if (p->rc != 0)
		return p->rc;
	if (addr == 0 && nbytes != 0)
		return sfr__parts_fail(p, -EINVAL);
	if (nbytes > SFR__IMAGE_LEN_MAX - p->len || p->nr_entries == UINT32_MAX)
		return sfr__parts_fail(p, -EFBIG);
	entry = &p->entries[p->nr_entries - 1];
	entry->src = (const char *)(uintptr_t)addr;
	entry->nbytes = nbytes;
	entry->source = (int64_t)p->nr_entries - 1;
	p->len += nbytes;
	return append_entry(p);
}

int sfr__parts_add_crc_field(struct sfr_parts *p, uint64_t off, uint32_t source)
{
	struct sfr__crc_field *fields;

	if (p->rc != 0)
		return p->rc;
	if (source >= sfr__parts_nr_sources(p))
		return sfr__parts_fail(p, -EINVAL);
	if (p->nr_crc_fields == UINT32_MAX)
		return sfr__parts_fail(p, -EFBIG);
	fields = grow_items(p->crc_fields, p->nr_crc_fields, &p->crc_fields_capacity, 1,
			    sizeof(*fields));
	if (fields == NULL)
		return sfr__parts_fail(p, -ENOMEM);
	p->crc_fields = fields;
	p->crc_fields[p->nr_crc_fields++] = (struct sfr__crc_field){ .off = off, .entry = source };
	return 0;
}

int sfr_parts_add_crc(struct sfr_parts *p, uint32_t source)
{
	static const char zeros[SFR__CRC_FIELD_LEN]; /* replaced by the CRC later */
	uint64_t off = p->len;

	if (sfr__parts_add_crc_field(p, off, source) == 0)
		(void)sfr_parts_add_bytes(p, zeros, sizeof(zeros)); /* an error is in p->rc */
	return p->rc;
}

/* ---- the image ------------------------------------------------------------ */

/* Returns whether an entry's data are written in place. Sets [*from, *to) to the whole pages of the
 * file that the data fill. */
static bool find_direct_range(const struct sfr__image_entry *e, uint64_t *from, uint64_t *to)
{
	const uint64_t data_end = e->data_off + e->nbytes;
	const bool same_offset = (e->data_off - (uint64_t)(uintptr_t)e->src) % SFR_PAGE == 0;

	*from = sfr__round_up(e->data_off, SFR_PAGE);
	*to = data_end / SFR_PAGE * SFR_PAGE;
	return same_offset && *from < *to && *to - *from >= DIRECT_MIN;
}

/* Adds an extent from the end of the previous extent to the offset `end`. The extent has bytes of
 * the entries `first` to `last`. It is written from the memory at `direct_src`, or through a
 * buffer if that is NULL. Returns 0 or -EFBIG. */
static int add_extent(struct sfr__image *img, uint64_t end, uint32_t first, uint32_t last,
		      const char *direct_src)
{
	static const struct sfr__extent before_first; /* an empty extent at offset 0 */
	struct sfr__extent *extent = &img->extents[img->nr_extents];
	const struct sfr__extent *previous = img->nr_extents == 0 ? &before_first : extent - 1;
	uint64_t off = previous->off + previous->len;
	uint64_t nr_blocks = sfr__round_up(end - off, img->block_bytes) / img->block_bytes;

	if (nr_blocks > UINT32_MAX - previous->first_block)
		return -EFBIG;
	*extent = (struct sfr__extent){
		.off = off,
		.len = end - off,
		.first_entry = first,
		.nr_entries = last - first + 1,
		.first_block = previous->first_block + previous->nr_blocks,
		.nr_blocks = (uint32_t)nr_blocks,
		.nr_lane_entries = last - first + 1,
		.nr_lane_blocks = (uint32_t)nr_blocks,
		.direct_src = direct_src,
	};
	img->nr_extents++;
	return 0;
}

/* Adds an extent for each source that is written in place, and for the bytes before and after it.
 * Returns 0 or -EFBIG. */
static int add_extents(struct sfr__image *img)
{
	uint64_t off = 0, from, to;
	uint32_t first = 0; /* the entry that contains `off` */
	int rc = 0;

	for (uint32_t i = 0; rc == 0 && i < img->nr_entries; i++) {
		const struct sfr__image_entry *e = &img->entries[i];

		if (!find_direct_range(e, &from, &to))
			continue;
		if (off < from) /* the bytes before it, through a buffer (NULL) */
			rc = add_extent(img, from, first, i, NULL);
		if (rc == 0) /* its whole pages, in place */
			rc = add_extent(img, to, i, i, e->src + (from - e->data_off));
		off = to;
		first = i;
	}
	/* the rest of the file; an empty file has an extent, too */
	if (rc == 0 && (off < img->len || img->nr_extents == 0))
		rc = add_extent(img, sfr__round_up(img->len, SFR_PAGE), first, img->nr_entries - 1,
				NULL);
	return rc;
}

int sfr__image_init_parts(struct sfr__image *img, struct sfr_parts *p, uint64_t block_bytes)
{
	uint32_t nr_extents = 1;
	uint64_t from, to;
	int rc = p->rc;

	*img = (struct sfr__image){ .block_bytes = block_bytes, .has_crcs = true };
	/* If p->glue stayed NULL, the image would count as one in torch's format. So a byte of glue
	 * is added, which allocates p->glue, and is removed again below. */
	if (rc == 0 && reserve_glue_bytes(p, 1) == NULL)
		rc = p->rc;
	if (rc != 0)
		return rc;
	p->glue_len--; /* removes the byte that reserve_glue_bytes has added */
	p->len--;
	p->entries[p->nr_entries - 1].data_off = p->len;
	/* one extent for each source in place, one for the bytes before it, and one for the end */
	for (size_t i = 0; i < p->nr_entries; i++)
		if (find_direct_range(&p->entries[i], &from, &to))
			nr_extents += 2;
	img->extents = sfr_sys.calloc(nr_extents, sizeof(*img->extents));
	if (img->extents == NULL)
		return -ENOMEM;
	img->entries = p->entries;
	img->nr_entries = (uint32_t)p->nr_entries;
	img->len = img->tail_off = p->len;
	rc = add_extents(img);
	if (rc != 0) {
		sfr_sys.free(img->extents);
		*img = (struct sfr__image){ 0 };
		return rc;
	}
	img->glue = p->glue;
	img->crc_fields = p->crc_fields;
	img->nr_crc_fields = (uint32_t)p->nr_crc_fields;
	*p = (struct sfr_parts){ .rc = -EINVAL }; /* the image owns the arrays now */
	return 0;
}

/* ---- CRC fields ------------------------------------------------------------ */

/* Returns the index of the first CRC field that ends after offset `off` of the file. */
static uint32_t first_field_after(const struct sfr__image *img, uint64_t off)
{
	return (uint32_t)sfr__lower_bound(i, 0, img->nr_crc_fields,
					  img->crc_fields[i].off + SFR__CRC_FIELD_LEN <= off);
}

bool sfr__image_crc_fields_known(const struct sfr__image *img, uint64_t off, size_t len)
{
	for (uint32_t i = first_field_after(img, off); i < img->nr_crc_fields; i++) {
		const struct sfr__image_entry *e = &img->entries[img->crc_fields[i].entry];

		if (img->crc_fields[i].off >= off + len)
			break; /* the fields are in ascending order */
		if (e->crc_len != e->nbytes)
			return false; /* the CRC is not final */
	}
	return true;
}

void sfr__image_put_crc_fields(const struct sfr__image *img, uint64_t off, size_t len, char *dst)
{
	for (uint32_t i = first_field_after(img, off); i < img->nr_crc_fields; i++) {
		uint64_t field_off = img->crc_fields[i].off;
		const char *crc = (const char *)&img->entries[img->crc_fields[i].entry].crc;

		if (field_off >= off + len)
			break; /* the fields are in ascending order */
		for (unsigned byte = 0; byte < SFR__CRC_FIELD_LEN; byte++)
			if (field_off + byte >= off && field_off + byte < off + len)
				dst[field_off + byte - off] = crc[byte];
	}
}
