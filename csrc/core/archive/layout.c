/* The layout of a file in torch's format, made before any byte of the file is copied.
 *
 * A file is a zip archive like those of torch.save: stored entries, each with
 *
 *     local header | name | extra field | data | descriptor
 *
 * then a central directory that repeats names, sizes, CRCs and offsets, and the end records.
 * Everything but the CRCs follows from the sizes. So sfr__image_init gives each entry its final
 * offset. A copy goes directly to that offset in a block, and no byte is copied twice.
 *
 *     0        extent 0         extent 1             tail
 *     |--------------------|----------------|------------------------------------|
 *      data.pkl, .format_   storages of       zeros | .data/serialization_id |
 *      version, ..., and    the first lane    central directory | end records
 *      captured storages
 *     |------|------|------|------|------|--|   blocks: each extent has its own
 *
 * Sources are grouped into extents (struct sfr__extent) in this order: captured sources of the
 * host, captured sources of each device, deferred sources of the host, deferred sources of each
 * device.
 *
 * Extents and the file are padded with zeros to multiples of 4096. The zeros of the tail come
 * first, because the end records must be at the end of the file. The data of every record start at
 * a multiple of 64, except those of the last record, .data/serialization_id.
 *
 * The record .format_version must stay 0. From 1 on, torch's reader computes the offsets of
 * storages from their order in the pickle, which is not their order in our files.
 *
 * Code that fills or completes a block visits its segments in turn (sfr__seg_next). A header or
 * descriptor that spans two blocks is a segment of each.
 *
 * Threads: one thread calls init and fini. In between only entry->crc and entry->crc_len change. */
#include <errno.h>
#include <string.h>

#include "archive/write.h"

static const struct {
	const char *name, *data;
} records[] = {
	{ "archive/.format_version", "0" },
	{ "archive/.storage_alignment", "64" },
	{ "archive/byteorder", "little" },
	{ "archive/version", "3\n" },
};
#define NR_RECORDS (sizeof(records) / sizeof(records[0]))

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "storages are written as they are");
_Static_assert(SFR_ALIGN == 64, "the record .storage_alignment says 64");

/* Sets the offsets of an entry that begins at `off`. Returns the offset of its end. */
static uint64_t lay_out_entry(struct sfr__image_entry *e, uint64_t off)
{
	e->hdr_off = off;
	e->data_off = sfr__round_up(off + sfr__zip_header_len(e), SFR_ALIGN);
	e->desc_len = sfr__zip_desc_len(e);
	return e->data_off + e->nbytes + e->desc_len;
}

/* ---- layout -------------------------------------------------------------- */

/* Writes "archive/data/INDEX" to `name`. */
static void write_storage_name(char *name, uint32_t index)
{
	static const char prefix[] = "archive/data/";
	char digits[10];
	size_t nr = 0;

	do {
		digits[nr++] = (char)('0' + index % 10); /* the last digit comes first */
		index /= 10;
	} while (index != 0);
	memcpy(name, prefix, sizeof(prefix) - 1);
	name += sizeof(prefix) - 1;
	while (nr != 0)
		*name++ = digits[--nr];
	*name = '\0';
}

static void add_entry(struct sfr__image *img, const char *name, const char *src, uint64_t nbytes,
		      int64_t source)
{
	struct sfr__image_entry *e = &img->entries[img->nr_entries++];

	e->src = src;
	e->nbytes = nbytes;
	e->source = source;
	memcpy(e->name, name, strlen(name) + 1);
}

/* Adds an entry for each source with this extent key, in the order of desc->sources. */
static void add_storages(struct sfr__image *img, const struct sfr_save_desc *desc, uint64_t key)
{
	for (uint32_t i = 0; i < desc->nr_sources; i++) {
		const struct sfr_source *source = &desc->sources[i];
		char name[sizeof(img->entries->name)];

		if (sfr__extent_key(source) != key)
			continue;
		write_storage_name(name, i);
		add_entry(img, name, (const char *)(uintptr_t)source->addr, source->nbytes, i);
		if (source->lane == SFR_CAPTURED)
			img->captured_nbytes += source->nbytes;
		else
			img->deferred_nbytes += source->nbytes;
	}
}

bool sfr__next_extent_key(const struct sfr_save_desc *desc, uint64_t *key)
{
	uint64_t next = 0;
	bool found = false;

	for (uint32_t i = 0; i < desc->nr_sources; i++) {
		uint64_t candidate = sfr__extent_key(&desc->sources[i]);

		if (candidate > *key && (!found || candidate < next)) {
			next = candidate;
			found = true;
		}
	}
	if (found)
		*key = next;
	return found;
}

/* Ends the extent with the last entry added so far. Sets the offsets of its entries and adds the
 * extent to the image. Returns 0 or -EFBIG. */
static int end_extent(struct sfr__image *img, struct sfr__extent *extent)
{
	uint64_t off = extent->off, nr_blocks;

	extent->nr_entries = img->nr_entries - extent->first_entry;
	for (uint32_t i = 0; i < extent->nr_entries; i++)
		off = lay_out_entry(&img->entries[extent->first_entry + i], off);
	extent->len = sfr__round_up(off, SFR_PAGE) - extent->off;
	nr_blocks = sfr__round_up(extent->len, img->block_bytes) / img->block_bytes;
	if (nr_blocks > UINT32_MAX)
		return -EFBIG;
	extent->nr_blocks = (uint32_t)nr_blocks;
	/* in this format each lane and device has only one extent */
	extent->nr_lane_blocks = extent->nr_blocks;
	extent->nr_lane_entries = extent->nr_entries;
	if (extent != img->extents)
		extent->first_block = extent[-1].first_block + extent[-1].nr_blocks;
	img->nr_extents++;
	img->len = extent->off + extent->len;
	return 0;
}

int sfr__image_check_save_desc(const struct sfr_save_desc *desc, uint64_t block_bytes)
{
	uint64_t total = desc->skeleton_len;

	if (block_bytes == 0 || block_bytes % SFR_PAGE != 0)
		return -EINVAL;
	if ((desc->skeleton == NULL && desc->skeleton_len != 0) ||
	    (desc->sources == NULL && desc->nr_sources != 0) ||
	    desc->nr_sources > UINT32_MAX - 1 - NR_RECORDS) /* nr_entries would overflow */
		return -EINVAL;
	if (total > SFR__IMAGE_LEN_MAX)
		return -EFBIG;
	for (uint32_t i = 0; i < desc->nr_sources; i++) {
		if (desc->sources[i].addr == 0 && desc->sources[i].nbytes != 0)
			return -EINVAL;
		if (desc->sources[i].nbytes > SFR__IMAGE_LEN_MAX - total)
			return -EFBIG;
		total += desc->sources[i].nbytes;
	}
	return 0;
}

int sfr__image_init(struct sfr__image *img, const struct sfr_save_desc *desc, uint64_t block_bytes)
{
	uint64_t nr_entries = UINT64_C(1) + NR_RECORDS + desc->nr_sources; /* 1: data.pkl */
	uint64_t key = 0; /* the key of captured sources of the host, which come first */
	uint32_t nr_extents = 1;
	int rc;

	*img = (struct sfr__image){ .block_bytes = block_bytes, .has_crcs = true };
	rc = sfr__image_check_save_desc(desc, block_bytes);
	if (rc != 0)
		return rc;
	while (sfr__next_extent_key(desc, &key))
		nr_extents++;
	img->entries = sfr_sys.calloc(nr_entries, sizeof(*img->entries));
	img->extents = sfr_sys.calloc(nr_extents, sizeof(*img->extents));
	if (img->entries == NULL || img->extents == NULL) {
		rc = -ENOMEM;
		goto fail;
	}

	/* the entries get their offsets in end_extent */
	add_entry(img, "archive/data.pkl", desc->skeleton, desc->skeleton_len, -1);
	img->captured_nbytes = desc->skeleton_len;
	for (size_t i = 0; i < NR_RECORDS; i++)
		add_entry(img, records[i].name, records[i].data, strlen(records[i].data), -1);
	key = 0;
	do {
		struct sfr__extent *extent = &img->extents[img->nr_extents];

		extent->off = img->len;
		extent->lane = (uint32_t)(key >> 32); /* see sfr__extent_key */
		extent->device = (uint32_t)key;
		if (key != 0) /* the extent of key 0 begins with the records added above */
			extent->first_entry = img->nr_entries;
		add_storages(img, desc, key);
		rc = end_extent(img, extent);
		if (rc != 0)
			goto fail;
	} while (sfr__next_extent_key(desc, &key));
	img->tail_off = img->len;
	img->tail_len = sfr__zip_tail_len(img);
	img->len += img->tail_len;
	return 0;
fail:
	sfr__image_fini(img);
	return rc;
}

void sfr__image_fini(struct sfr__image *img)
{
	sfr_sys.free(img->entries);
	sfr_sys.free(img->extents);
	sfr_sys.free(img->glue);
	sfr_sys.free(img->crc_fields);
	sfr_sys.free(img->edges);
	img->entries = NULL;
	img->extents = NULL;
	img->glue = NULL;
	img->crc_fields = NULL;
	img->edges = NULL;
	img->nr_edges = 0;
}

const struct sfr__extent *sfr__image_find_extent(const struct sfr__image *img, uint32_t lane,
						 uint32_t device)
{
	for (uint32_t r = 0; r < img->nr_extents; r++)
		if (img->extents[r].lane == lane && img->extents[r].device == device)
			return &img->extents[r];
	return NULL;
}

/* ---- blocks and segments ------------------------------------------------- */

/* Returns the extent that contains block *blk, which is counted from the start of `first`. *blk
 * becomes the block's number in the returned extent. */
static const struct sfr__extent *extent_of_block(const struct sfr__extent *first, uint32_t *blk)
{
	while (*blk >= first->nr_blocks) {
		*blk -= first->nr_blocks;
		first++;
	}
	return first;
}

uint64_t sfr__image_block_off(const struct sfr__image *img, const struct sfr__extent *extent,
			      uint32_t blk)
{
	extent = extent_of_block(extent, &blk); /* from here on, blk counts in this extent */
	return extent->off + blk * img->block_bytes;
}

size_t sfr__image_block_len(const struct sfr__image *img, const struct sfr__extent *extent,
			    uint32_t blk)
{
	uint64_t left;

	extent = extent_of_block(extent, &blk); /* from here on, blk counts in this extent */
	left = extent->len - blk * img->block_bytes;
	return (size_t)(left < img->block_bytes ? left : img->block_bytes);
}

bool sfr__image_is_edge_page(const struct sfr__image *img, uint64_t off)
{
	for (uint32_t i = 0; i < img->nr_edges; i++)
		if (img->edges[i] == off)
			return true;
	return false;
}

void sfr__image_block_unshared_range(const struct sfr__image *img, const struct sfr__extent *extent,
				     uint32_t blk, uint64_t *from, uint64_t *to)
{
	*from = sfr__image_block_off(img, extent, blk);
	*to = *from + sfr__image_block_len(img, extent, blk);
	if (sfr__image_is_edge_page(img, *from)) /* shared with the extent before it in the file */
		*from += SFR_PAGE;
	if (*from < *to && sfr__image_is_edge_page(img, *to - SFR_PAGE))
		*to -= SFR_PAGE;
}

/* Returns the index of the extent's last entry that begins at or before `off`. */
static uint32_t entry_at(const struct sfr__image *img, const struct sfr__extent *extent,
			 uint64_t off)
{
	const uint32_t first = extent->first_entry;
	/* the first entry that begins after `off` */
	const uint64_t next = sfr__lower_bound(i, first + 1, first + extent->nr_entries,
					       img->entries[i].hdr_off <= off);

	return (uint32_t)next - 1;
}

void sfr__seg_iter_init(struct sfr__seg_iter *it, const struct sfr__image *img,
			const struct sfr__extent *extent, uint32_t blk)
{
	extent = extent_of_block(extent, &blk);
	it->img = img;
	it->extent = extent;
	it->off = sfr__image_block_off(img, extent, blk);
	it->end = it->off + sfr__image_block_len(img, extent, blk);
	it->entry = entry_at(img, extent, it->off);
}

/* Finds which of an entry's header, data and descriptor contains offset `off` of the file. Sets the
 * kind and [*begin, *end), its range of the file. Returns false if `off` is after all three. */
static bool find_in_entry(const struct sfr__image_entry *e, uint64_t off, enum sfr__seg_kind *kind,
			  uint64_t *begin, uint64_t *end)
{
	const uint64_t data_end = e->data_off + e->nbytes;

	if (off < e->data_off) {
		*kind = SFR__SEG_HEADER;
		*begin = e->hdr_off;
		*end = e->data_off;
	} else if (off < data_end) {
		*kind = SFR__SEG_DATA;
		*begin = e->data_off;
		*end = data_end;
	} else {
		*kind = SFR__SEG_DESC;
		*begin = data_end;
		*end = data_end + e->desc_len;
	}
	return off < *end;
}

bool sfr__seg_next(struct sfr__seg_iter *it, struct sfr__seg *seg)
{
	const struct sfr__extent *extent = it->extent;
	const uint32_t end_entry = extent->first_entry + extent->nr_entries;
	/* range of the header, data, descriptor or padding in the file */
	uint64_t begin, end;

	if (it->off >= it->end)
		return false;
	while (it->entry != end_entry &&
	       !find_in_entry(&it->img->entries[it->entry], it->off, &seg->kind, &begin, &end))
		it->entry++;
	if (it->entry == end_entry) { /* after the last entry there is padding */
		seg->kind = SFR__SEG_PAD;
		begin = it->off;
		end = extent->off + extent->len;
	}
	if (end > it->end)
		end = it->end; /* the next block has the rest */
	seg->entry = it->entry;
	seg->off = it->off - begin; /* above 0 if an earlier block has the beginning */
	seg->pos = (size_t)((it->off - extent->off) % it->img->block_bytes);
	seg->len = (size_t)(end - it->off);
	it->off = end;
	return true;
}
