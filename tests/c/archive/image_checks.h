/* Checks for every image, used by test_image.c: ranges follow one another, segments cover each
 * block, and an independent reader understands headers and directory. */
#ifndef IMAGE_CHECKS_H
#define IMAGE_CHECKS_H

#include "check.h"
#include "image_writer.h"

#define PAGE UINT64_C(4096)

static inline uint64_t get(const unsigned char *at, size_t len)
{
	uint64_t value = 0;

	while (len-- > 0)
		value = value << 8 | at[len];
	return value;
}

/* ---- what must hold for every image ---------------------------------------- */

static inline void check_entries(const struct sfr__image *img)
{
	for (uint32_t r = 0; r < img->nr_extents; r++) {
		const struct sfr__extent *extent = &img->extents[r];
		uint64_t off = extent->off;

		for (uint32_t i = 0; i < extent->nr_entries; i++) {
			const struct sfr__image_entry *e = &img->entries[extent->first_entry + i];
			bool zip64 = e->nbytes >= UINT32_MAX || e->hdr_off >= UINT32_MAX;

			CHECK_EQ(e->hdr_off, off);
			CHECK_EQ(e->data_off % SFR_ALIGN, 0);
			CHECK(e->data_off - e->hdr_off < 30 + 32 + 20 + 4 + SFR_ALIGN);
			CHECK_EQ(e->desc_len, zip64 ? 24 : 16);
			off = e->data_off + e->nbytes + e->desc_len;
		}
		CHECK(off <= extent->off + extent->len);
		CHECK(extent->off + extent->len - off < PAGE);
	}
}

static inline void check_extents(const struct sfr__image *img)
{
	uint64_t off = 0;
	uint32_t entry = 0;

	if (!CHECK(img->nr_extents >= 1))
		return;
	CHECK_EQ(img->extents[0].lane, SFR_CAPTURED);
	for (uint32_t r = 0; r < img->nr_extents; r++) {
		const struct sfr__extent *extent = &img->extents[r];

		CHECK(r == 0 || extent->lane > extent[-1].lane ||
		      (extent->lane == extent[-1].lane && extent->device > extent[-1].device));
		CHECK_EQ(extent->off, off);
		CHECK_EQ(extent->len % PAGE, 0);
		CHECK(extent->len > 0);
		CHECK_EQ(extent->first_entry, entry);
		CHECK(extent->nr_entries > 0);
		CHECK_EQ(extent->nr_blocks,
			 (extent->len + img->block_bytes - 1) / img->block_bytes);
		CHECK(extent->nr_blocks == 1 ||
		      sfr__image_block_len(img, extent, 0) == img->block_bytes);
		CHECK_EQ(sfr__image_block_off(img, extent, extent->nr_blocks - 1) +
				 sfr__image_block_len(img, extent, extent->nr_blocks - 1),
			 extent->off + extent->len);
		off += extent->len;
		entry += extent->nr_entries;
	}
	CHECK_EQ(entry, img->nr_entries);
	CHECK_EQ(img->tail_off, off);
	CHECK_EQ(img->tail_len % PAGE, 0);
	CHECK_EQ(img->len, off + img->tail_len);
}

/* Checks that a block's segments follow one another from its first byte to its last, and that
 * they give the file offset of each byte. */
static inline void check_block(const struct sfr__image *img, const struct sfr__extent *extent,
			       uint32_t blk)
{
	uint64_t block_off = sfr__image_block_off(img, extent, blk);
	size_t pos = 0;
	struct sfr__seg_iter it;
	struct sfr__seg seg;

	sfr__seg_iter_init(&it, img, extent, blk);
	while (sfr__seg_next(&it, &seg)) {
		uint64_t begin, len;

		CHECK_EQ(seg.pos, pos);
		CHECK(seg.len > 0);
		pos += seg.len;
		if (seg.kind == SFR__SEG_PAD) {
			CHECK_EQ(block_off + pos, extent->off + extent->len);
			continue;
		}
		const struct sfr__image_entry *e = &img->entries[seg.entry];

		CHECK(seg.entry >= extent->first_entry &&
		      seg.entry < extent->first_entry + extent->nr_entries);
		if (seg.kind == SFR__SEG_HEADER) {
			begin = e->hdr_off;
			len = e->data_off - e->hdr_off;
		} else if (seg.kind == SFR__SEG_DATA) {
			begin = e->data_off;
			len = e->nbytes;
		} else {
			begin = e->data_off + e->nbytes;
			len = e->desc_len;
		}
		CHECK_EQ(begin + seg.off, block_off + seg.pos);
		CHECK(seg.off + seg.len <= len);
	}
	CHECK_EQ(pos, sfr__image_block_len(img, extent, blk));
	CHECK(!sfr__seg_next(&it, &seg));
}

/* ---- an independent reader of headers and the tail ------------------------- */

/* Checks the header of a laid-out entry: CRC and sizes are left to the descriptor. */
static inline void check_header(const struct sfr__image *img, uint32_t entry)
{
	const struct sfr__image_entry *e = &img->entries[entry];
	unsigned char h[256], d[24];
	size_t len = (size_t)(e->data_off - e->hdr_off), name = strlen(e->name);
	const unsigned char *extra = h + 30 + name;
	bool zip64 = e->desc_len == 24;
	size_t half = e->desc_len == 24 ? 8 : 4;

	sfr__image_put_header(img, entry, 0, len, h);
	CHECK_EQ(get(h, 4), 0x04034b50);
	CHECK_EQ(get(h + 6, 2), 0x0808);
	CHECK_EQ(get(h + 8, 2), 0);
	for (size_t i = 10; i < 26; i++)
		CHECK_EQ(h[i], 0);
	CHECK_EQ(get(h + 26, 2), name);
	CHECK(memcmp(h + 30, e->name, name) == 0);
	CHECK_EQ(30 + name + get(h + 28, 2), len);
	if (zip64) {
		CHECK_EQ(get(extra, 2), 1);
		CHECK_EQ(get(extra + 2, 2), 16);
		CHECK_EQ(get(extra + 4, 8), e->nbytes);
		CHECK_EQ(get(extra + 12, 8), e->nbytes);
		extra += 20;
	}
	CHECK(memcmp(extra, "FB", 2) == 0);
	CHECK_EQ(extra + 4 + get(extra + 2, 2) - h, len);

	sfr__image_put_descriptor(img, entry, 0, e->desc_len, d);
	CHECK_EQ(get(d, 4), 0x08074b50);
	CHECK_EQ(get(d + 4, 4), e->crc);
	CHECK_EQ(get(d + 8, half), e->nbytes);
	CHECK_EQ(get(d + 8 + half, half), e->nbytes);
}

/* Checks one record of the directory. Returns the address after it. */
static inline const unsigned char *check_central(const unsigned char *c, const char *name,
						 uint32_t crc, uint64_t nbytes, uint64_t hdr_off)
{
	size_t name_len = strlen(name), extra_len = (size_t)get(c + 30, 2);
	const unsigned char *extra = c + 46 + name_len, *end = extra + extra_len;
	uint64_t sizes[2] = { get(c + 20, 4), get(c + 24, 4) }, off = get(c + 42, 4);

	CHECK_EQ(get(c, 4), 0x02014b50);
	CHECK_EQ(get(c + 8, 2), 0x0808);
	CHECK_EQ(get(c + 16, 4), crc);
	CHECK_EQ(get(c + 28, 2), name_len);
	CHECK(memcmp(c + 46, name, name_len) == 0);
	if (extra_len != 0) {
		CHECK_EQ(get(extra, 2), 1);
		CHECK_EQ(get(extra + 2, 2), extra_len - 4);
		extra += 4;
	}
	/* The compressed size comes after the size in the field, but before it in the record. */
	for (int i = 1; i >= 0; i--) {
		if (sizes[i] == UINT32_MAX) {
			sizes[i] = get(extra, 8);
			extra += 8;
		}
	}
	if (off == UINT32_MAX) {
		off = get(extra, 8);
		extra += 8;
	}
	CHECK_EQ(extra - end, 0);
	CHECK_EQ(sizes[0], nbytes);
	CHECK_EQ(sizes[1], nbytes);
	CHECK_EQ(off, hdr_off);
	return end;
}

static inline void check_tail(const struct sfr__image *img)
{
	unsigned char *tail = malloc(img->tail_len);
	const unsigned char *end, *end64, *locator, *c, *id;
	uint64_t nr = (uint64_t)img->nr_entries + 1, central_off, pad = 0;

	if (!CHECK(tail != NULL))
		return;
	memset(tail, 0xdb, img->tail_len);
	sfr__image_put_tail(img, tail);
	end = tail + img->tail_len - 22;
	CHECK_EQ(get(end, 4), 0x06054b50);
	CHECK_EQ(get(end + 8, 2), nr < 65535 ? nr : 65535);
	CHECK_EQ(get(end + 10, 2), nr < 65535 ? nr : 65535);
	CHECK_EQ(get(end + 20, 2), 0);
	locator = end - 20;
	CHECK_EQ(get(locator, 4), 0x07064b50);
	end64 = locator - 56;
	CHECK_EQ(get(locator + 8, 8), img->tail_off + (uint64_t)(end64 - tail));
	CHECK_EQ(get(end64, 4), 0x06064b50);
	CHECK_EQ(get(end64 + 4, 8), 44);
	CHECK_EQ(get(end64 + 24, 8), nr);
	CHECK_EQ(get(end64 + 32, 8), nr);
	central_off = get(end64 + 48, 8);
	CHECK_EQ(central_off + get(end64 + 40, 8), img->tail_off + (uint64_t)(end64 - tail));
	CHECK_EQ(get(end + 16, 4), central_off < UINT32_MAX ? central_off : UINT32_MAX);

	while (pad < img->tail_len && tail[pad] == 0)
		pad++;
	CHECK(pad < PAGE);
	id = tail + pad;
	CHECK_EQ(get(id, 4), 0x04034b50);
	id += 30 + get(id + 26, 2) + get(id + 28, 2);
	for (int i = 0; i < 40; i++)
		CHECK(id[i] >= '0' && id[i] <= '9');
	CHECK_EQ(get(id + 40, 4), 0x08074b50);
	CHECK_EQ(get(id + 44, 4), sfr_crc32(0, id, 40));
	CHECK_EQ(get(id + 48, 4), 40);

	c = tail + (central_off - img->tail_off);
	CHECK(c == id + 40 + 16 || c == id + 40 + 24);
	for (uint32_t i = 0; i < img->nr_entries; i++) {
		const struct sfr__image_entry *e = &img->entries[i];

		c = check_central(c, e->name, e->crc, e->nbytes, e->hdr_off);
	}
	c = check_central(c, "archive/.data/serialization_id", sfr_crc32(0, id, 40), 40,
			  img->tail_off + pad);
	CHECK(c == end64);
	free(tail);
}

/* Everything above, for at most `max_blocks` blocks of each extent and as many entries. */
static inline void check_image(const struct sfr__image *img, uint32_t max_blocks)
{
	check_extents(img);
	check_entries(img);
	for (uint32_t r = 0; r < img->nr_extents; r++) {
		const struct sfr__extent *extent = &img->extents[r];

		for (uint32_t i = 0; i < extent->nr_blocks && i < max_blocks; i++) {
			check_block(img, extent, i);
			check_block(img, extent, extent->nr_blocks - 1 - i);
			check_block(img, extent, (uint32_t)(check_random() % extent->nr_blocks));
		}
	}
	for (uint32_t i = 0; i < img->nr_entries && i < max_blocks; i++) {
		check_header(img, i);
		check_header(img, img->nr_entries - 1 - i);
	}
	check_tail(img);
}

#endif
