/* flat.c: the image of a header and tensors without a gap. tests/c/save/test_flat_save.c writes
 * such files, and tests/unit/save/test_safetensors.py reads them with the safetensors library. */
#include <errno.h>

#include "archive/layout.h"
#include "check.h"
#include "flat_state.h"

#define PAGE UINT64_C(4096)
#define HUGE_LEN (UINT64_C(1) << 45)

static struct flat_state state;
static unsigned char nr_filled[FLAT_MAX + SFR_PAGE];      /* how often each byte is filled */
static unsigned char nr_written[FLAT_MAX / SFR_PAGE + 2]; /* how often each page is written */

/* Checks one block: its data segments have the file's bytes at their offsets. Its other segments
 * are only in pages that it shares with another block, or after the end of the file. */
static void check_block(const struct sfr__image *img, const struct sfr__extent *extent,
			uint32_t blk)
{
	uint64_t off = sfr__image_block_off(img, extent, blk), from, to;
	uint64_t end = off + sfr__image_block_len(img, extent, blk), at = off;
	struct sfr__seg_iter it;
	struct sfr__seg seg;

	CHECK_EQ(off % PAGE, 0);
	CHECK_EQ(end % PAGE, 0);
	CHECK(end > off && end - off <= img->block_bytes);
	sfr__image_block_unshared_range(img, extent, blk, &from, &to);
	for (uint64_t page = from; page < to; page += PAGE)
		nr_written[page / PAGE]++;
	sfr__seg_iter_init(&it, img, extent, blk);
	while (sfr__seg_next(&it, &seg)) {
		CHECK_EQ(off + seg.pos, at);
		at += seg.len;
		if (seg.kind == SFR__SEG_DATA) {
			const struct sfr__image_entry *entry = &img->entries[seg.entry];
			const char *src = entry->src + seg.off;

			CHECK(memcmp(state.expected + off + seg.pos, src, seg.len) == 0);
			for (uint64_t i = 0; i < seg.len; i++)
				nr_filled[off + seg.pos + i]++;
			continue;
		}
		CHECK(seg.kind != SFR__SEG_DESC);
		for (uint64_t i = off + seg.pos; i < off + seg.pos + seg.len; i++)
			CHECK(i >= img->len || i < from || i >= to);
	}
	CHECK_EQ(at, end);
}

static void check_image(const struct sfr__image *img)
{
	memset(nr_filled, 0, sizeof(nr_filled));
	memset(nr_written, 0, sizeof(nr_written));
	CHECK_EQ(img->len, state.len);
	CHECK_EQ(img->tail_off, img->len);
	CHECK_EQ(img->tail_len, 0);
	CHECK(!img->has_crcs);
	for (uint32_t r = 0; r < img->nr_extents; r++)
		for (uint32_t blk = 0; blk < img->extents[r].nr_blocks; blk++)
			check_block(img, &img->extents[r], blk);
	for (uint32_t i = 0; i < img->nr_edges; i++)
		nr_written[img->edges[i] / PAGE]++;
	for (uint64_t i = 0; i < img->len; i++)
		if (!CHECK_EQ(nr_filled[i], 1))
			return;
	for (uint64_t page = 0; page * PAGE < img->len; page++)
		CHECK_EQ(nr_written[page], 1);
}

/* The blocks of each producer are numbered through its extents. */
static void check_producers(const struct sfr__image *img)
{
	uint32_t block = 0, entry = 0;

	for (uint32_t r = 0; r < img->nr_extents; r++) {
		const struct sfr__extent *extent = &img->extents[r];
		const struct sfr__extent *first =
			sfr__image_find_extent(img, extent->lane, extent->device);
		uint32_t blk = extent->first_block - first->first_block;

		CHECK_EQ(extent->first_block, block);
		CHECK_EQ(extent->first_entry, entry);
		block += extent->nr_blocks;
		entry += extent->nr_entries;
		CHECK(blk < first->nr_lane_blocks);
		CHECK_EQ(sfr__image_block_off(img, first, blk), extent->off);
		CHECK_EQ(sfr__image_block_off(img, first, blk + extent->nr_blocks - 1) +
				 sfr__image_block_len(img, first, blk + extent->nr_blocks - 1),
			 extent->off + extent->len);
		if (r + 1 == img->nr_extents || extent[1].lane != extent->lane ||
		    extent[1].device != extent->device) {
			CHECK_EQ(first->first_block + first->nr_lane_blocks, block);
			CHECK_EQ(first->first_entry + first->nr_lane_entries, entry);
		}
	}
	CHECK_EQ(entry, img->nr_entries);
}

TEST(each_byte_of_a_flat_file_is_filled_once_and_each_page_written_once)
{
	static const uint64_t blocks[] = { PAGE, 2 * PAGE, 3 * PAGE, 16 * PAGE, 4096 * PAGE };
	uint32_t nr_edges = 0, nr_continued = 0;

	for (int round = 0; round < 150; round++) {
		struct sfr__image img;
		uint64_t nbytes = 0;

		flat_make(&state, (uint32_t)round % 3);
		if (!CHECK_EQ(sfr__image_init_flat(&img, &state.desc, blocks[round % 5]), 0))
			return;
		check_image(&img);
		check_producers(&img);
		for (uint32_t i = 0; i < img.nr_entries; i++)
			nbytes += img.entries[i].nbytes;
		CHECK_EQ(img.captured_nbytes + img.deferred_nbytes, nbytes);
		nr_edges += img.nr_edges;
		for (uint32_t r = 0; r < img.nr_extents; r++)
			if (img.extents[r].nr_lane_blocks != img.extents[r].nr_blocks)
				nr_continued++;
		sfr__image_fini(&img);
		sfr__image_fini(&img); /* twice is fine */
	}
	CHECK(nr_edges > 100 && nr_continued > 100); /* or the cases are too easy */
}

TEST(a_file_without_tensors_is_its_header)
{
	struct sfr__image img;

	flat_make(&state, 0);
	state.desc.nr_members = 0;
	flat_expect(&state);
	if (!CHECK_EQ(sfr__image_init_flat(&img, &state.desc, PAGE), 0))
		return;
	CHECK_EQ(img.nr_extents, 1);
	CHECK_EQ(img.nr_edges, 0);
	check_image(&img);
	sfr__image_fini(&img);
}

TEST(adjacent_extents_that_end_at_a_page_have_no_edge_page)
{
	struct sfr__image img;

	flat_make(&state, 0);
	state.desc.skeleton_len = PAGE;
	state.desc.nr_members = 2;
	state.sources[0].lane = SFR_CAPTURED;
	state.sources[1].lane = SFR_LANE_HOST;
	state.members[0] = (struct sfr_member){ .nbytes = 3 * PAGE, .source = 0 };
	state.members[1] = (struct sfr_member){ .nbytes = 100, .source = 1 };
	flat_expect(&state);
	if (!CHECK_EQ(sfr__image_init_flat(&img, &state.desc, 2 * PAGE), 0))
		return;
	CHECK_EQ(img.nr_extents, 2);
	CHECK_EQ(img.nr_edges, 0);
	check_image(&img);
	sfr__image_fini(&img);
}

TEST(terabytes_are_laid_out_and_too_many_blocks_are_refused)
{
	struct sfr__image img;

	flat_make(&state, 0);
	state.desc.nr_members = 1;
	state.sources[0].nbytes = HUGE_LEN;
	state.members[0] = (struct sfr_member){ .nbytes = HUGE_LEN, .source = 0 };
	CHECK_EQ(sfr__image_init_flat(&img, &state.desc, 16 << 20), 0);
	CHECK_EQ(img.len, state.desc.skeleton_len + HUGE_LEN);
	sfr__image_fini(&img);
	CHECK_EQ(sfr__image_init_flat(&img, &state.desc, PAGE), -EFBIG);
	CHECK(img.entries == NULL && img.extents == NULL && img.edges == NULL);
}

TEST(members_outside_their_sources_are_refused)
{
	struct sfr__image img;

	for (int kind = 0; kind < 6; kind++) {
		flat_make(&state, 0);
		state.desc.nr_members = 3;
		if (kind == 0)
			state.members[2].source = FLAT_SOURCES;
		if (kind == 1)
			state.members[1].nbytes = 0;
		if (kind == 2)
			state.members[1] =
				(struct sfr_member){ .off = 1, .nbytes = FLAT_SOURCE_LEN };
		if (kind == 3)
			state.members[1].off = UINT64_MAX;
		if (kind == 4)
			state.desc.skeleton_len = 0;
		if (kind == 5)
			state.desc.sources = NULL;
		CHECK_EQ(sfr__image_init_flat(&img, &state.desc, PAGE), -EINVAL);
		CHECK(img.entries == NULL);
	}
	/* Each fits into its source, and together they are longer than any file. */
	flat_make(&state, 0);
	state.desc.nr_members = 3;
	state.sources[0].nbytes = UINT64_C(1) << 61;
	for (uint32_t i = 0; i < 3; i++)
		state.members[i] = (struct sfr_member){ .nbytes = UINT64_C(1) << 61 };
	CHECK_EQ(sfr__image_init_flat(&img, &state.desc, 16 << 20), -EFBIG);
}

TEST(failed_allocation_makes_no_image_and_leaks_nothing)
{
	flat_make(&state, 1);
	FOR_EVERY_FAILURE(run, "*", ENOMEM)
	{
		struct sfr__image img;
		int rc = sfr__image_init_flat(&img, &state.desc, PAGE);

		CHECK_EQ(rc, check_acted(&run) ? -ENOMEM : 0);
		sfr__image_fini(&img);
	}
}
