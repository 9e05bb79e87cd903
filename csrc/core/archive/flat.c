/* The image of a flat file: a header, then the bytes of tensors, without a gap. That is the format
 * safetensors. Python makes the header, which names each tensor's offset, and decides the order of
 * the members, which are the tensors' bytes (struct sfr_member).
 *
 *     0            4096           8192           12288          16384
 *     |--------------|--------------|--------------|--------------|--
 *      header, captured   | deferred                   | captured ...      extents
 *                    |~~~~~~~~~~~~~~|              |~~~~~~~~~~~~~~|        edge pages
 *
 * Members follow each other in the given order. A new extent begins at each member that has another
 * lane or device than the member before it. So a producer (the caller or one lane) may have several
 * extents. They are adjacent in img->extents, and their blocks are numbered consecutively.
 *
 * An extent begins at the page that contains its first byte, because blocks are written in whole
 * pages. So two extents may share a page, which is called an edge page. Edge pages are not written
 * with the blocks. Writers collect their bytes in memory of the ticket, and write them with the
 * tail (save/write.c). Only the last page of the file is padded, with zeros beyond the end of the
 * file, which are cut off.
 *
 * Such a file has no checksums. */
#include <errno.h>

#include "archive/layout.h"

#define LEN_MAX (UINT64_C(1) << 62) /* as in layout.c */

/* Returns the key of a member's source (sfr__extent_key). `member` is the member's number. */
static uint64_t key_of(const struct sfr_save_desc *desc, uint32_t member)
{
	return sfr__extent_key(&desc->sources[desc->members[member].source]);
}

/* Checks that the header is not empty, that each member is within its source, and that the file is
 * not too long. Returns 0, -EINVAL or -EFBIG. */
static int check_members(const struct sfr_save_desc *desc)
{
	uint64_t total = desc->skeleton_len;

	if (total == 0 || desc->nr_members == UINT32_MAX)
		return -EINVAL;
	for (uint32_t i = 0; i < desc->nr_members; i++) {
		const struct sfr_member *member = &desc->members[i];

		if (member->source >= desc->nr_sources || member->nbytes == 0 ||
		    member->off > desc->sources[member->source].nbytes ||
		    member->nbytes > desc->sources[member->source].nbytes - member->off)
			return -EINVAL;
		if (member->nbytes > LEN_MAX - total)
			return -EFBIG;
		total += member->nbytes;
	}
	return 0;
}

/* Returns the number of extents. The header has the key of captured host memory, which is 0. */
static uint32_t count_extents(const struct sfr_save_desc *desc)
{
	uint64_t last = 0;
	uint32_t nr = 1;

	for (uint32_t i = 0; i < desc->nr_members; i++) {
		if (key_of(desc, i) != last)
			nr++;
		last = key_of(desc, i);
	}
	return nr;
}

/* Returns the lowest key above `key` that has a member, or `key` itself if there is none. */
static uint64_t next_key(const struct sfr_save_desc *desc, uint64_t key)
{
	uint64_t next = key;

	for (uint32_t i = 0; i < desc->nr_members; i++) {
		uint64_t candidate = key_of(desc, i);

		if (candidate > key && (next == key || candidate < next))
			next = candidate;
	}
	return next;
}

/* Appends an extent without entries. */
static void open_extent(struct sfr__image *img, uint64_t key)
{
	img->extents[img->nr_extents++] = (struct sfr__extent){ .lane = (uint32_t)(key >> 32),
								.device = (uint32_t)key,
								.first_entry = img->nr_entries };
}

/* Adds an entry to the last extent. */
static void add_entry(struct sfr__image *img, const char *src, uint64_t nbytes, uint64_t off,
		      int64_t source)
{
	img->entries[img->nr_entries++] = (struct sfr__entry){
		.src = src, .nbytes = nbytes, .hdr_off = off, .data_off = off, .source = source
	};
	img->extents[img->nr_extents - 1].nr_entries++;
}

/* Adds the extents of one key, one for each unbroken series of members with that key. Also sets
 * img->len to the end of the last member. */
static void add_extents(struct sfr__image *img, const struct sfr_save_desc *desc, uint64_t key)
{
	uint64_t *total = key >> 32 == SFR_CAPTURED ? &img->captured_nbytes : &img->deferred_nbytes;
	uint64_t off = desc->skeleton_len;
	uint64_t previous = 0, current; /* keys of the previous member and of the current one */

	if (key == 0) { /* the header begins the first extent */
		open_extent(img, 0);
		add_entry(img, desc->skeleton, desc->skeleton_len, 0, -1);
		*total = desc->skeleton_len;
	}
	for (uint32_t i = 0; i < desc->nr_members; i++, previous = current) {
		const struct sfr_member *member = &desc->members[i];

		current = key_of(desc, i);
		if (current == key && previous != key)
			open_extent(img, key);
		if (current == key) {
			const struct sfr_source *source = &desc->sources[member->source];

			add_entry(img, (const char *)(uintptr_t)(source->addr + member->off),
				  member->nbytes, off, member->source);
			*total += member->nbytes;
		}
		off += member->nbytes;
		if (img->len < off)
			img->len = off;
	}
}

/* Sets the bounds of an extent whose entries are known, and lists its first page as an edge page if
 * it is one. Returns 0 or -EFBIG. */
static int end_extent(struct sfr__image *img, struct sfr__extent *extent)
{
	struct sfr__entry *first = &img->entries[extent->first_entry];
	const struct sfr__entry *last = first + extent->nr_entries - 1;
	uint64_t nr_blocks;

	extent->off = first->data_off / SFR_PAGE * SFR_PAGE;
	extent->len = sfr__round_up(last->data_off + last->nbytes, SFR_PAGE) - extent->off;
	/* The bytes of the first page before the first member belong to another extent. Here they
	 * become the header of the first entry, which is copied from the zeros in img->glue. */
	first->hdr_off = extent->off;
	extent->first_block =
		extent == img->extents ? 0 : extent[-1].first_block + extent[-1].nr_blocks;
	nr_blocks = sfr__round_up(extent->len, img->block_bytes) / img->block_bytes;
	if (nr_blocks > UINT32_MAX - extent->first_block)
		return -EFBIG;
	extent->nr_blocks = (uint32_t)nr_blocks;
	if (first->data_off != extent->off && !sfr__image_is_edge(img, extent->off))
		img->edges[img->nr_edges++] = extent->off;
	return 0;
}

/* Sets all_entries and all_blocks of each extent. They also count the entries and blocks of the
 * later extents with the same lane and device, which directly follow it in the array. */
static void count_with_later(struct sfr__image *img)
{
	for (uint32_t r = img->nr_extents; r-- > 0;) {
		struct sfr__extent *extent = &img->extents[r];
		bool more = r + 1 < img->nr_extents && extent[1].lane == extent->lane &&
			    extent[1].device == extent->device;

		extent->all_entries = extent->nr_entries + (more ? extent[1].all_entries : 0);
		extent->all_blocks = extent->nr_blocks + (more ? extent[1].all_blocks : 0);
	}
}

int sfr__image_init_flat(struct sfr__image *img, const struct sfr_save_desc *desc,
			 uint64_t block_bytes)
{
	uint32_t nr_extents;
	int rc;

	*img = (struct sfr__image){ .block_bytes = block_bytes };
	rc = sfr__image_check_desc(desc, block_bytes);
	if (rc == 0)
		rc = check_members(desc);
	if (rc != 0)
		return rc;
	nr_extents = count_extents(desc);
	img->entries = sfr_sys.calloc((size_t)desc->nr_members + 1, sizeof(*img->entries));
	img->extents = sfr_sys.calloc(nr_extents, sizeof(*img->extents));
	img->edges = sfr_sys.calloc(nr_extents, sizeof(*img->edges));
	img->glue = sfr_sys.calloc(1, SFR_PAGE); /* zeros, see end_extent */
	if (img->entries == NULL || img->extents == NULL || img->edges == NULL ||
	    img->glue == NULL) {
		rc = -ENOMEM;
		goto fail;
	}
	img->len = desc->skeleton_len;
	/* all keys in ascending order; next_key returns the last key again at the end */
	for (uint64_t key = 0, last = UINT64_MAX; key != last; key = next_key(desc, key)) {
		add_extents(img, desc, key);
		last = key;
	}
	for (uint32_t r = 0; rc == 0 && r < img->nr_extents; r++)
		rc = end_extent(img, &img->extents[r]);
	if (rc != 0)
		goto fail;
	count_with_later(img);
	img->tail_off = img->len;
	return 0;
fail:
	sfr__image_fini(img);
	return rc;
}
