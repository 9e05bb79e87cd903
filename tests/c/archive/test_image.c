/* layout.c and archive/write.c: the offsets of everything in a file, the headers and the
 * directory. tests/unit/save/test_image.py shows that real readers agree. The sizes here are too
 * large for any test to write. */
#include "image_checks.h"

#define GIB (UINT64_C(1) << 30)

static const char skeleton[] = "a pickle, as far as the image knows";

static struct sfr_save_desc describe(const struct sfr_source *sources, uint32_t nr)
{
	return (struct sfr_save_desc){ .skeleton = skeleton,
				       .skeleton_len = sizeof(skeleton),
				       .sources = sources,
				       .nr_sources = nr };
}

TEST(image_without_storages_has_one_extent_and_torchs_records)
{
	static const char *const names[] = { "archive/data.pkl", "archive/.format_version",
					     "archive/.storage_alignment", "archive/byteorder",
					     "archive/version" };
	static const char *const data[] = { skeleton, "0", "64", "little", "3\n" };
	struct sfr_save_desc desc = describe(NULL, 0);
	struct sfr__image img;

	if (!CHECK_EQ(sfr__image_init(&img, &desc, PAGE), 0))
		return;
	CHECK_EQ(img.nr_extents, 1);
	CHECK_EQ(img.nr_entries, 5);
	for (uint32_t i = 0; i < 5; i++) {
		CHECK(strcmp(img.entries[i].name, names[i]) == 0);
		CHECK_EQ(img.entries[i].source, -1);
		CHECK_EQ(img.entries[i].nbytes, i == 0 ? sizeof(skeleton) : strlen(data[i]));
		CHECK(memcmp(img.entries[i].src, data[i], (size_t)img.entries[i].nbytes) == 0);
	}
	CHECK_EQ(img.captured_nbytes, sizeof(skeleton));
	CHECK_EQ(img.deferred_nbytes, 0);
	check_image(&img, 100);
	sfr__image_fini(&img);
	sfr__image_fini(&img); /* may be called twice */
}

TEST(each_lane_has_its_own_extent_in_ascending_order)
{
	struct sfr_source sources[] = {
		{ HOLE, 100, 7, 0 }, { HOLE, 200, 0, 0 }, { HOLE, 300, 3, 0 },
		{ 0, 0, 7, 0 },      { HOLE, 50, 0, 0 },  { HOLE, 1, UINT32_MAX, 0 },
	};
	static const int64_t order[] = { 1, 4, 2, 0, 3, 5 };
	static const uint32_t lanes[] = { 0, 3, 7, UINT32_MAX };
	struct sfr_save_desc desc = describe(sources, 6);
	struct sfr__image img;

	if (!CHECK_EQ(sfr__image_init(&img, &desc, 2 * PAGE), 0))
		return;
	CHECK_EQ(img.nr_extents, 4);
	for (uint32_t i = 0; i < 4; i++)
		CHECK_EQ(img.extents[i].lane, lanes[i]);
	for (uint32_t i = 0; i < 6; i++)
		CHECK_EQ(img.entries[5 + i].source, order[i]);
	CHECK(strcmp(img.entries[7].name, "archive/data/2") == 0);
	CHECK_EQ(img.captured_nbytes, sizeof(skeleton) + 250);
	CHECK_EQ(img.deferred_nbytes, 401);
	check_image(&img, 100);
	sfr__image_fini(&img);
}

TEST(random_layouts_are_consistent_for_every_block_size)
{
	static const uint64_t block_sizes[] = { PAGE, 2 * PAGE, 3 * PAGE, 16 * PAGE, 4096 * PAGE };
	struct sfr_source sources[60];

	for (int round = 0; round < 300; round++) {
		uint32_t nr = (uint32_t)(check_random() % 60);
		struct sfr_save_desc desc = describe(sources, nr);
		struct sfr__image img;

		for (uint32_t i = 0; i < nr; i++)
			sources[i] = (struct sfr_source){
				HOLE, check_random() % (UINT64_C(1) << check_random() % 16),
				(uint32_t)(check_random() % 3), 0
			};
		desc.skeleton_len = check_random() % sizeof(skeleton);
		if (!CHECK_EQ(sfr__image_init(&img, &desc, block_sizes[check_random() % 5]), 0))
			return;
		for (uint32_t i = 0; i < img.nr_entries; i++)
			img.entries[i].crc = (uint32_t)check_random();
		check_image(&img, 8);
		sfr__image_fini(&img);
	}
}

TEST(extent_may_end_anywhere_in_its_page)
{
	bool exactly = false;

	for (uint64_t nbytes = 0; nbytes <= 2 * PAGE; nbytes++) {
		struct sfr_source sources[] = { { HOLE, nbytes, 0, 0 }, { HOLE, nbytes, 1, 0 } };
		struct sfr_save_desc desc = describe(sources, 2);
		const struct sfr__image_entry *last;
		struct sfr__image img;

		if (!CHECK_EQ(sfr__image_init(&img, &desc, PAGE), 0))
			return;
		last = &img.entries[5];
		exactly |= last->data_off + nbytes + last->desc_len == img.extents[1].off;
		check_image(&img, 4);
		sfr__image_fini(&img);
	}
	CHECK(exactly); /* then there is no page of zeros */
}

/* Several threads fill blocks in any order, so a block's contents must not depend on the order. */
TEST(blocks_filled_in_any_order_give_the_same_file)
{
	static char bytes[60000];
	struct sfr_source sources[9];
	struct sfr_save_desc desc = describe(sources, 9);
	char *files[3] = { NULL, NULL, NULL };

	for (uint32_t i = 0; i < 9; i++)
		sources[i] =
			(struct sfr_source){ (uintptr_t)(bytes + i % 3 * 20000),
					     1 + check_random() % 20000, (uint32_t)(i % 2), 0 };
	for (size_t i = 0; i < sizeof(bytes); i++)
		bytes[i] = (char)check_random();
	for (int way = 0; way < 3; way++) {
		struct sfr__image img;

		if (!CHECK_EQ(sfr__image_init(&img, &desc, way < 2 ? PAGE : 64 * PAGE), 0))
			return;
		for (uint32_t i = 0; i < img.nr_entries; i++)
			img.entries[i].crc =
				sfr_crc32(0, img.entries[i].src, (size_t)img.entries[i].nbytes);
		files[way] = malloc(img.len);
		if (!CHECK(files[way] != NULL))
			return;
		memset(files[way], 0xdb, img.len);
		sfr__image_put_tail(&img, files[way] + img.tail_off);
		for (uint32_t r = 0; r < img.nr_extents; r++) {
			const struct sfr__extent *extent = &img.extents[r];

			for (uint32_t i = 0; i < extent->nr_blocks; i++) {
				uint32_t blk = way == 1 ? extent->nr_blocks - 1 - i : i;
				struct sfr__seg_iter it;
				struct sfr__seg seg;

				sfr__seg_iter_init(&it, &img, extent, blk);
				while (sfr__seg_next(&it, &seg))
					fill_segment(&img, &seg,
						     files[way] + sfr__image_block_off(&img, extent,
										       blk),
						     false);
			}
		}
		if (way > 0)
			CHECK(memcmp(files[0], files[way], img.len) == 0);
		sfr__image_fini(&img);
	}
	for (int way = 0; way < 3; way++)
		free(files[way]);
}

TEST(partial_header_or_descriptor_equals_that_part_of_the_whole)
{
	struct sfr_source sources[] = { { HOLE, 5 * GIB, 0, 0 }, { HOLE, 77, 0, 0 } };
	struct sfr_save_desc desc = describe(sources, 2);
	char whole[256], part[256];
	struct sfr__image img;

	if (!CHECK_EQ(sfr__image_init(&img, &desc, PAGE), 0))
		return;
	for (uint32_t i = 0; i < img.nr_entries; i++) {
		size_t len = (size_t)(img.entries[i].data_off - img.entries[i].hdr_off);

		img.entries[i].crc = (uint32_t)check_random();
		sfr__image_put_header(&img, i, 0, len, whole);
		for (size_t cut = 0; cut <= len; cut++) {
			sfr__image_put_header(&img, i, 0, cut, part);
			sfr__image_put_header(&img, i, cut, len - cut, part + cut);
			CHECK(memcmp(whole, part, len) == 0);
		}
		len = img.entries[i].desc_len;
		sfr__image_put_descriptor(&img, i, 0, len, whole);
		for (size_t cut = 0; cut <= len; cut++) {
			sfr__image_put_descriptor(&img, i, 0, cut, part);
			sfr__image_put_descriptor(&img, i, cut, len - cut, part + cut);
			CHECK(memcmp(whole, part, len) == 0);
		}
	}
	sfr__image_fini(&img);
}

TEST(sizes_around_4_gib_take_the_long_form_from_ffffffff_on)
{
	for (uint64_t nbytes = UINT32_MAX - UINT64_C(70); nbytes <= UINT32_MAX + UINT64_C(70);
	     nbytes++) {
		struct sfr_source sources[] = { { HOLE, nbytes, 0, 0 },
						{ HOLE, 9, 0, 0 },
						{ HOLE, 9, 1, 0 } };
		struct sfr_save_desc desc = describe(sources, 3);
		struct sfr__image img;

		if (!CHECK_EQ(sfr__image_init(&img, &desc, 16 << 20), 0))
			return;
		CHECK_EQ(img.entries[5].desc_len, nbytes < UINT32_MAX ? 16 : 24);
		CHECK_EQ(img.entries[7].desc_len, 24); /* the header offset is past 4 GiB */
		check_image(&img, 3);
		sfr__image_fini(&img);
	}
}

/* Puts the second storage's header, and with other sizes the tail, at every offset around 4 GiB. */
TEST(offsets_around_4_gib_take_the_long_form_from_ffffffff_on)
{
	bool shorter = false, longer = false;

	for (uint64_t nbytes = 4 * GIB - 2000; nbytes <= 4 * GIB - 400; nbytes++) {
		struct sfr_source sources[] = { { HOLE, nbytes, 0, 0 }, { HOLE, 9, 0, 0 } };
		struct sfr_save_desc desc = describe(sources, 2);
		struct sfr__image img;

		if (!CHECK_EQ(sfr__image_init(&img, &desc, 16 << 20), 0))
			return;
		shorter |= img.entries[6].hdr_off < UINT32_MAX;
		longer |= img.entries[6].hdr_off >= UINT32_MAX;
		CHECK_EQ(img.entries[6].desc_len, img.entries[6].hdr_off < UINT32_MAX ? 16 : 24);
		check_image(&img, 2);
		sfr__image_fini(&img);
	}
	CHECK(shorter && longer);
	for (uint64_t nbytes = 4 * GIB - 5 * PAGE; nbytes <= 4 * GIB + 2 * PAGE; nbytes += 512) {
		struct sfr_source sources[] = { { HOLE, nbytes / 2, 0, 0 },
						{ HOLE, nbytes / 2, 1, 0 } };
		struct sfr_save_desc desc = describe(sources, 2);
		struct sfr__image img;

		if (!CHECK_EQ(sfr__image_init(&img, &desc, 16 << 20), 0))
			return;
		check_image(&img, 2);
		sfr__image_fini(&img);
	}
}

TEST(terabytes_are_laid_out_without_being_touched)
{
	struct sfr_source sources[] = { { HOLE, UINT64_C(3) << 40, 0, 0 },
					{ HOLE, UINT64_C(5) << 40, 1, 0 },
					{ HOLE, 3, 1, 0 } };
	struct sfr_save_desc desc = describe(sources, 3);
	struct sfr__image img;

	if (!CHECK_EQ(sfr__image_init(&img, &desc, 16 << 20), 0))
		return;
	CHECK(img.len > UINT64_C(8) << 40);
	check_image(&img, 100);
	sfr__image_fini(&img);
	/* More blocks than an extent can count. */
	sources[1].nbytes = UINT64_C(1) << 45;
	CHECK_EQ(sfr__image_init(&img, &desc, PAGE), -EFBIG);
	CHECK(img.entries == NULL && img.extents == NULL);
}

TEST(more_than_65535_storages_have_their_directory)
{
	static const uint32_t counts[] = { 65535 - 7, 65535 - 6, 65535 - 5, 65536, 200000 };
	struct sfr_source *sources = calloc(200000, sizeof(*sources));

	if (!CHECK(sources != NULL))
		return;
	for (uint32_t i = 0; i < 200000; i++)
		sources[i] = (struct sfr_source){ HOLE, check_random() % 300,
						  (uint32_t)(check_random() % 2), 0 };
	for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
		struct sfr_save_desc desc = describe(sources, counts[i]);
		struct sfr__image img;

		if (!CHECK_EQ(sfr__image_init(&img, &desc, PAGE), 0))
			break;
		CHECK_EQ(img.nr_entries, counts[i] + 5);
		check_image(&img, 2000);
		sfr__image_fini(&img);
	}
	free(sources);
}

TEST(id_depends_on_names_and_bytes)
{
	struct sfr_source sources[] = { { HOLE, 10, 0, 0 }, { HOLE, 10, 0, 0 } };
	char tail[PAGE], ids[5][40];

	for (int i = 0; i < 5; i++) {
		struct sfr_save_desc desc = describe(sources, i != 4 ? 2 : 1);
		struct sfr__image img;
		char *header;

		if (!CHECK_EQ(sfr__image_init(&img, &desc, PAGE), 0))
			return;
		img.entries[5].crc = i == 2; /* a bit of the first storage */
		img.entries[0].crc = i == 3; /* a bit of the pickle */
		CHECK_EQ(img.tail_len, PAGE);
		sfr__image_put_tail(&img, tail);
		header = memmem(tail, PAGE, "archive/.data/serialization_id", 30);
		if (CHECK(header != NULL))
			memcpy(ids[i], header + 34, 40);
		sfr__image_fini(&img);
	}
	CHECK(memcmp(ids[0], ids[1], 40) == 0);
	for (int i = 2; i < 5; i++)
		CHECK(memcmp(ids[0], ids[i], 40) != 0);
	CHECK(memcmp(ids[2], ids[3], 40) != 0);
	CHECK(memcmp(ids[0], ids[4], 20) != 0); /* the names' half */
}

TEST(impossible_layouts_are_refused)
{
	struct sfr_source sources[] = { { HOLE, 10, 0, 0 }, { 0, 1, 0, 0 } };
	struct sfr_save_desc desc = describe(sources, 2);
	struct sfr__image img;

	CHECK_EQ(sfr__image_init(&img, &desc, PAGE), -EINVAL); /* a null source that has bytes */
	sources[1] = (struct sfr_source){ 0, 0, 0, 0 };
	CHECK_EQ(sfr__image_init(&img, &desc, 0), -EINVAL);
	CHECK_EQ(sfr__image_init(&img, &desc, PAGE + 64), -EINVAL);
	desc.skeleton = NULL;
	CHECK_EQ(sfr__image_init(&img, &desc, PAGE), -EINVAL);
	desc.skeleton = skeleton;
	desc.sources = NULL;
	CHECK_EQ(sfr__image_init(&img, &desc, PAGE), -EINVAL);
	desc.sources = sources;
	sources[0].nbytes = UINT64_MAX;
	CHECK_EQ(sfr__image_init(&img, &desc, PAGE), -EFBIG);
	sources[0].nbytes = UINT64_C(1) << 62;
	CHECK_EQ(sfr__image_init(&img, &desc, PAGE), -EFBIG);
	desc.skeleton_len = UINT64_MAX;
	CHECK_EQ(sfr__image_init(&img, &desc, PAGE), -EFBIG);
	sfr__image_fini(&img); /* allowed after a failure */
}

TEST(failed_allocation_makes_no_image_and_leaks_nothing)
{
	struct sfr_source sources[] = { { HOLE, 10, 0, 0 }, { HOLE, 10, 1, 0 } };
	struct sfr_save_desc desc = describe(sources, 2);

	FOR_EVERY_FAILURE(run, "*", ENOMEM)
	{
		struct sfr__image img;
		int rc = sfr__image_init(&img, &desc, PAGE);

		CHECK_EQ(rc, check_acted(&run) ? -ENOMEM : 0);
		sfr__image_fini(&img);
	}
}
