/* The image of a flat file: a header, then the bytes of tensors without a gap, as in safetensors.
 * Python makes the header and decides the order of the tensors, which are called members.
 *
 *     0            4096           8192           12288          16384
 *     |--------------|--------------|--------------|--------------|--
 *      header, captured   | deferred                   | captured ...      extents
 *                    |~~~~~~~~~~~~~~|              |~~~~~~~~~~~~~~|        edge pages
 *
 * A new extent begins at each member that has another lane or device than the member before it.
 * Extents of the same lane and device are neighbours in img->extents, and their blocks are numbered
 * consecutively.
 *
 * Blocks are written in whole pages, so an extent begins at the page that contains its first byte.
 * A page that two extents share is an edge page. Edge pages are not written with the blocks: the
 * ticket collects their bytes, and they are written with the tail (save/write.c). The last page of
 * the file is padded with zeros, which are cut off the file.
 *
 * Such a file has no checksums. */
#include <errno.h>

#include "archive/layout.h"

static uint64_t member_extent_key(const struct sfr_save_desc *desc, uint32_t member)
{
	return sfr__extent_key(&desc->sources[desc->members[member].source]);
}

/* Returns 0; -EINVAL if the header is empty or a member is not within its source; or -EFBIG. */
static int check_members(const struct sfr_save_desc *desc)
{
	uint64_t total = desc->skeleton_len; /* of the header */

	if (total == 0 || desc->nr_members == UINT32_MAX) /* there is one entry more than members */
		return -EINVAL;
	for (uint32_t i = 0; i < desc->nr_members; i++) {
		const struct sfr_member *member = &desc->members[i];
		uint64_t source_len;

		if (member->source >= desc->nr_sources || member->nbytes == 0)
			return -EINVAL;
		source_len = desc->sources[member->source].nbytes;
		if (member->off > source_len || member->nbytes > source_len - member->off)
			return -EINVAL;
		if (member->nbytes > SFR__IMAGE_LEN_MAX - total)
			return -EFBIG;
		total += member->nbytes;
	}
	return 0;
}

static uint32_t count_extents(const struct sfr_save_desc *desc)
{
	uint64_t previous = 0; /* the header counts as captured host memory, whose key is 0 */
	uint32_t nr = 1;

	for (uint32_t i = 0; i < desc->nr_members; i++) {
		if (member_extent_key(desc, i) != previous)
			nr++;
		previous = member_extent_key(desc, i);
	}
	return nr;
}

static void begin_extent(struct sfr__image *img, uint64_t key)
{
	img->extents[img->nr_extents++] = (struct sfr__extent){ .lane = (uint32_t)(key >> 32),
								.device = (uint32_t)key,
								.first_entry = img->nr_entries };
}

/* Adds an entry to the last extent. */
static void add_entry(struct sfr__image *img, const char *src, uint64_t nbytes, uint64_t off,
		      int64_t source)
{
	img->entries[img->nr_entries++] = (struct sfr__image_entry){
		.src = src, .nbytes = nbytes, .hdr_off = off, .data_off = off, .source = source
	};
	img->extents[img->nr_extents - 1].nr_entries++;
}

/* Adds an extent for each unbroken series of members with this key. Sets img->len to the end of the
 * last member. */
static void add_extents(struct sfr__image *img, const struct sfr_save_desc *desc, uint64_t key)
{
	/* the upper half of a key is the lane (sfr__extent_key) */
	uint64_t *total = key >> 32 == SFR_CAPTURED ? &img->captured_nbytes : &img->deferred_nbytes;
	uint64_t off = desc->skeleton_len;
	/* keys of two adjacent members; the header, before the first member, has key 0 */
	uint64_t previous = 0, current;

	if (key == 0) { /* the header begins the first extent */
		begin_extent(img, 0);
		add_entry(img, desc->skeleton, desc->skeleton_len, 0, -1);
		*total = desc->skeleton_len;
	}
	for (uint32_t i = 0; i < desc->nr_members; i++, previous = current) {
		const struct sfr_member *member = &desc->members[i];

		current = member_extent_key(desc, i);
		if (current == key && previous != key)
			begin_extent(img, key);
		if (current == key) {
			const struct sfr_source *source = &desc->sources[member->source];

			add_entry(img, (const char *)(uintptr_t)(source->addr + member->off),
				  member->nbytes, off, member->source);
			*total += member->nbytes;
		}
		off += member->nbytes;
		if (img->len < off) /* a call for another key may have set it already */
			img->len = off;
	}
}

/* Sets offset, length and blocks of an extent whose entries are known. If another extent shares the
 * first page, adds the page to the list of edge pages. Returns 0 or -EFBIG. */
static int end_extent(struct sfr__image *img, struct sfr__extent *extent)
{
	struct sfr__image_entry *first = &img->entries[extent->first_entry];
	const struct sfr__image_entry *last = first + extent->nr_entries - 1;
	uint64_t nr_blocks;

	extent->off = first->data_off / SFR_PAGE * SFR_PAGE;
	extent->len = sfr__round_up(last->data_off + last->nbytes, SFR_PAGE) - extent->off;
	/* If the first page begins with bytes of another extent, this extent's block gets zeros
	 * instead: as the header of its first entry, copied from img->glue. */
	first->hdr_off = extent->off;
	extent->first_block =
		extent == img->extents ? 0 : extent[-1].first_block + extent[-1].nr_blocks;
	nr_blocks = sfr__round_up(extent->len, img->block_bytes) / img->block_bytes;
	if (nr_blocks > UINT32_MAX - extent->first_block)
		return -EFBIG;
	extent->nr_blocks = (uint32_t)nr_blocks;
	/* bytes of another extent precede; several short extents may share one page, listed once */
	if (first->data_off != extent->off && !sfr__image_is_edge_page(img, extent->off))
		img->edges[img->nr_edges++] = extent->off;
	return 0;
}

/* Sets nr_lane_entries and nr_lane_blocks. Goes backwards, because an extent adds the counts of the
 * next extent to its own. */
static void set_lane_counts(struct sfr__image *img)
{
	for (uint32_t r = img->nr_extents; r-- > 0;) {
		struct sfr__extent *extent = &img->extents[r];
		const struct sfr__extent *next = extent + 1;
		const bool has_next = r + 1 < img->nr_extents;

		extent->nr_lane_entries = extent->nr_entries;
		extent->nr_lane_blocks = extent->nr_blocks;
		if (has_next && next->lane == extent->lane && next->device == extent->device) {
			extent->nr_lane_entries += next->nr_lane_entries;
			extent->nr_lane_blocks += next->nr_lane_blocks;
		}
	}
}

int sfr__image_init_flat(struct sfr__image *img, const struct sfr_save_desc *desc,
			 uint64_t block_bytes)
{
	uint64_t key = 0;
	uint32_t nr_extents;
	int rc;

	*img = (struct sfr__image){ .block_bytes = block_bytes };
	rc = sfr__image_check_save_desc(desc, block_bytes);
	if (rc == 0)
		rc = check_members(desc);
	if (rc != 0)
		return rc;
	nr_extents = count_extents(desc);
	/* + 1: the header */
	img->entries = sfr_sys.calloc((size_t)desc->nr_members + 1, sizeof(*img->entries));
	img->extents = sfr_sys.calloc(nr_extents, sizeof(*img->extents));
	img->edges = sfr_sys.calloc(nr_extents, sizeof(*img->edges));
	img->glue = sfr_sys.calloc(1, SFR_PAGE); /* a page of zeros, used by end_extent */
	if (img->entries == NULL || img->extents == NULL || img->edges == NULL ||
	    img->glue == NULL) {
		rc = -ENOMEM;
		goto fail;
	}
	img->len = desc->skeleton_len;
	do
		add_extents(img, desc, key);
	while (sfr__next_extent_key(desc, &key));
	for (uint32_t r = 0; rc == 0 && r < img->nr_extents; r++)
		rc = end_extent(img, &img->extents[r]);
	if (rc != 0)
		goto fail;
	set_lane_counts(img);
	img->tail_off = img->len;
	return 0;
fail:
	sfr__image_fini(img);
	return rc;
}
