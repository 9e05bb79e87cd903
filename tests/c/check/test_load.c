/* A check accepts the files of every writer. test_load_system.c tests failing system calls,
 * test_load_damage.c damage, and test_load_hostile.c hostile files. */
#include "archive/layout.h"
#include "verdict.h"

/* ---- what is good ---------------------------------------------------------- */

TEST(files_written_by_torch_pass_the_check)
{
	struct archive a = sample();
	struct verdict v = check_archive(&a, SFR_CHECK_BYTES);

	accept(&a, 9);
	CHECK_EQ(v.nr_unchecked, 0);
	archive_free(&a);
}

TEST(files_of_other_zip_writers_pass_the_check)
{
	struct archive a = { .described = false };

	archive_add(&a, "some name/", "", 0); /* zip -r writes directories too */
	archive_add(&a, "some name/data.pkl", ".", 1);
	archive_add(&a, "some name/version", "3\n", 2);
	archive_add(&a, "some name/data/0", "0123456789", 10);
	archive_finish(&a);
	accept(&a, 4);
	archive_free(&a);
}

TEST(records_without_a_crc_pass_unchecked)
{
	struct archive a = { .described = true, .zip64 = true, .no_crc = true };

	archive_add(&a, "x/data.pkl", ".", 1);
	archive_add(&a, "x/version", "3\n", 2);
	archive_add(&a, "x/data/0", "", 0);
	archive_finish(&a);
	accept(&a, 3);
	CHECK_EQ(check_archive(&a, 0).nr_unchecked, 2);
	CHECK_EQ(check_archive(&a, SFR_CHECK_BYTES).nr_unchecked, 2);
	archive_free(&a);
}

TEST(record_with_a_true_crc_of_zero_is_checked)
{
	struct archive a = archive_torch();
	struct verdict v;

	archive_add(&a, "archive/data/0", "\x9d\x0a\xd9\x6d", 4);
	archive_finish(&a);
	CHECK_EQ(a.records[5].crc, 0);
	v = check_archive(&a, SFR_CHECK_BYTES);
	CHECK(v.ok);
	CHECK_EQ(v.nr_unchecked, 0);
	archive_free(&a);
}

TEST(deflated_code_of_torchscript_passes_unchecked)
{
	struct archive a = archive_torch();

	a.method = 8;
	archive_add(&a, "archive/code/__torch__.py", "\x03\x00", 2);
	a.method = 0;
	archive_add(&a, "archive/constants.pkl", ".", 1);
	archive_finish(&a);
	accept(&a, 7);
	CHECK_EQ(check_archive(&a, SFR_CHECK_BYTES).nr_unchecked, 1);
	archive_free(&a);
}

/* zip -r compresses every record and torch reads them. They are counted as unchecked. */
TEST(deflated_records_are_counted_as_unchecked)
{
	static const char *const names[] = { "archive/data.pkl", "archive/version",
					     "archive/byteorder", "archive/data/7",
					     "archive/.data/serialization_id" };
	struct archive a = { .described = true, .method = 8 };

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		archive_add(&a, names[i], "\x03\x00", 2);
	archive_finish(&a);
	accept(&a, 5);
	CHECK_EQ(check_archive(&a, SFR_CHECK_BYTES).nr_unchecked, 5);
	CHECK_EQ(check_archive(&a, SFR_CHECK_BYTES).nr_compressed, 5);
	archive_free(&a);
}

/* Any bytes may follow the archive, as far as torch's reader searches for the end record. */
TEST(bytes_after_the_archive_are_counted)
{
	static const size_t lens[] = { 1, 21, 22, 75, 76, 77, 98, 4096, 65535, 69562 };

	for (size_t i = 0; i < sizeof(lens) / sizeof(lens[0]); i++)
		for (unsigned with_comment = 0; with_comment < 2; with_comment++) {
			struct archive a = sample();

			if (with_comment)
				archive_poke(&a, a.end + 20, lens[i] < 0xffff ? lens[i] : 0xffff,
					     2);
			for (size_t k = 0; k < lens[i]; k++)
				archive_put(&a, &"PK\5\6"[k % 3], 1, 'g');
			accept(&a, 9);
			CHECK_EQ(check_archive(&a, 0).nr_trailing, lens[i]);
			archive_num(&a, 0, 1, 'g');
			if (lens[i] == 69562)
				refuse(&a, "it is truncated");
			archive_free(&a);
		}
}

/* The comment would reach beyond the file. So the file is truncated, although torch's reader
 * does not notice. */
TEST(truncated_comment_is_reported_as_damage)
{
	struct archive a = sample();

	archive_poke(&a, a.end + 20, 5, 2);
	for (unsigned k = 0; k < 5; k++) {
		refuse(&a, "its end record is damaged");
		archive_num(&a, 'c', 1, 'g');
	}
	accept(&a, 9);
	archive_free(&a);
}

TEST(the_legacy_format_is_recognised_in_every_protocol)
{
	static const char magic[] = "\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";
	static const char *const heads[] = { "\x80\x02", "\x80\x03",
					     "\x80\x04\x95\x0d\0\0\0\0\0\0\0",
					     "\x80\x05\x95\x0d\0\0\0\0\0\0\0" };
	static const size_t lens[] = { 2, 2, 11, 11 };
	static const char text[] = "L119547037146038801333356L\n.rest";
	struct verdict v = check_bytes(text, sizeof(text), SFR_CHECK_BYTES);

	CHECK(v.ok);
	CHECK_EQ(v.format, SFR_FORMAT_LEGACY);
	CHECK(check_bytes(text, 28, 0).ok); /* the magic number alone */
	CHECK(!check_bytes(text, 27, 0).ok);
	CHECK(!check_bytes("\x80", 1, 0).ok);
	for (size_t i = 0; i < 4; i++) {
		char file[64] = { 0 };

		memcpy(file, heads[i], lens[i]);
		memcpy(file + lens[i], magic, sizeof(magic) - 1);
		v = check_bytes(file, sizeof(file), 0);
		CHECK(v.ok);
		CHECK_EQ(v.format, SFR_FORMAT_LEGACY);
		CHECK_EQ(v.nr_records, 0);
		CHECK(check_bytes(file, lens[i] + sizeof(magic) - 1, 0).ok);
		/* One byte less is not enough. */
		v = check_bytes(file, lens[i] + sizeof(magic) - 2, 0);
		CHECK(!v.ok);
		CHECK_EQ(v.format, SFR_FORMAT_FOREIGN);
	}
}

/* An image made by the code that makes every checkpoint. */
TEST(files_written_by_stillframe_pass_the_check)
{
	static char storages[4][40000];
	struct sfr_source sources[4] = {
		{ (uintptr_t)storages[0], 40000, SFR_CAPTURED, 0 },
		{ (uintptr_t)storages[1], 39999, SFR_LANE_HOST, 0 },
		{ 0, 0, SFR_CAPTURED, 0 },
		{ (uintptr_t)storages[3], 1, SFR_LANE_HOST, 0 },
	};
	struct sfr_save_desc desc = { .dir = "/",
				      .name = "x",
				      .skeleton = ".",
				      .skeleton_len = 1,
				      .sources = sources,
				      .nr_sources = 4 };
	struct sfr__image img;
	unsigned char *file;
	struct verdict v;

	for (size_t i = 0; i < sizeof(storages); i++)
		((char *)storages)[i] = (char)check_random();
	if (!CHECK_EQ(sfr__image_init(&img, &desc, 8192), 0))
		return;
	file = calloc(1, img.len);
	for (uint32_t i = 0; i < img.nr_entries; i++)
		img.entries[i].crc =
			sfr_crc32_portable(0, img.entries[i].src, img.entries[i].nbytes);
	for (uint32_t i = 0; i < img.nr_extents; i++)
		for (uint32_t blk = 0; blk < img.extents[i].nr_blocks; blk++) {
			unsigned char *block =
				file + sfr__image_block_off(&img, &img.extents[i], blk);
			struct sfr__seg_iter it;
			struct sfr__seg seg;

			sfr__seg_iter_init(&it, &img, &img.extents[i], blk);
			while (sfr__seg_next(&it, &seg)) {
				unsigned char *at = block + seg.pos;

				if (seg.kind == SFR__SEG_HEADER)
					sfr__image_put_header(&img, seg.entry, seg.off, seg.len,
							      at);
				else if (seg.kind == SFR__SEG_DATA)
					memcpy(at, img.entries[seg.entry].src + seg.off, seg.len);
				else if (seg.kind == SFR__SEG_DESC)
					sfr__image_put_descriptor(&img, seg.entry, seg.off, seg.len,
								  at);
			}
		}
	sfr__image_put_tail(&img, file + img.tail_off);
	for (unsigned flags = 0; flags <= SFR_CHECK_BYTES; flags++) {
		v = check_bytes(file, img.len, flags);
		check__that(v.ok, __FILE__, __LINE__, "ours is good, not \"%s\"", v.error);
		CHECK_EQ(v.nr_records, img.nr_entries + 1);
		CHECK_EQ(v.nr_unchecked, 0);
	}
	for (uint32_t i = 0; i < img.nr_entries; i++) {
		if (img.entries[i].nbytes == 0)
			continue;
		file[img.entries[i].data_off + img.entries[i].nbytes / 2] ^= 4;
		v = check_bytes(file, img.len, SFR_CHECK_BYTES);
		CHECK_EQ(v.nr_bad, 1);
		CHECK(strcmp(v.bad, img.entries[i].name) == 0);
		file[img.entries[i].data_off + img.entries[i].nbytes / 2] ^= 4;
	}
	free(file);
	sfr__image_fini(&img);
}

/* ---- past 4 GiB --------------------------------------------------------------- */

/* Parts of torch's dialect that only long files have: a zip64 field with {size, 0} or with the
 * offset alone, and long descriptors. The long record is a hole. */
TEST(records_past_4_gib_pass_the_check)
{
	const uint64_t len = UINT64_C(0x100000008);
	static unsigned char local[] = { 'P', 'K', 3, 4, 0, 0, 8, 8 };
	struct archive a = archive_torch(), b = { .described = true, .zip64 = true };
	struct archive_record *big, *far;
	uint64_t base;
	struct verdict v;
	int fd;

	big = archive_record(&a);
	*big = (struct archive_record){ .name = "archive/data/0",
					.name_len = 14,
					.len = len,
					.flags = 0x0808,
					.hdr_off = a.len };
	archive_put(&a, local, sizeof(local), 0);
	archive_num(&a, 0, 2, 0);
	archive_num(&a, 0x5a210000, 4, 0);
	archive_num(&a, 0, 8, 0);
	archive_num(&a, 0, 4, 0);
	archive_num(&a, 14, 2, 0);
	archive_num(&a, 20, 2, 0);
	archive_put(&a, big->name, 14, 0);
	archive_num(&a, 1, 2, 0);
	archive_num(&a, 16, 2, 0);
	archive_num(&a, len, 8, 0);
	archive_num(&a, 0, 8, 0);
	base = a.len + len;

	for (size_t i = 0; i < a.nr; i++)
		*archive_record(&b) = a.records[i];
	archive_num(&b, 0x08074b50, 4, 0);
	archive_num(&b, 0, 4, 0);
	archive_num(&b, len, 8, 0);
	archive_num(&b, len, 8, 0);
	far = archive_record(&b);
	*far = (struct archive_record){ .name = "archive/data/1",
					.name_len = 14,
					.len = 3,
					.flags = 0x0808,
					.crc = sfr_crc32_portable(0, "abc", 3),
					.hdr_off = base + b.len };
	archive_put(&b, local, sizeof(local), 0);
	archive_num(&b, 0, 2, 0);
	archive_num(&b, 0x5a210000, 4, 0);
	archive_num(&b, 0, 8, 0);
	archive_num(&b, 0, 4, 0);
	archive_num(&b, 14, 2, 0);
	archive_num(&b, 12, 2, 0);
	archive_put(&b, far->name, 14, 0);
	archive_num(&b, 1, 2, 0);
	archive_num(&b, 8, 2, 0);
	archive_num(&b, far->hdr_off, 8, 0);
	archive_put(&b, "abc", 3, 0);
	archive_num(&b, 0x08074b50, 4, 0);
	archive_num(&b, far->crc, 4, 0);
	archive_num(&b, 3, 8, 0);
	archive_num(&b, 3, 8, 0);
	archive_finish_at(&b, base);

	fd = file_of(a.buf, a.len);
	CHECK_EQ(pwrite(fd, b.buf, b.len, (off_t)base), b.len);
	v = check_fd(fd, 0);
	check__that(v.ok, __FILE__, __LINE__, "good, not \"%s\"", v.error);
	CHECK_EQ(v.nr_records, 7);
	CHECK_EQ(v.nr_unchecked, 1);
	/* The long size, the far offset and the long descriptor are all checked. */
	CHECK_EQ(pwrite(fd, "\x07", 1, (off_t)(base + 8)), 1);
	v = check_fd(fd, 0);
	CHECK(!v.ok && strstr(v.error, "sizes in the descriptor") != NULL);
	CHECK_EQ(pwrite(fd, "\x08", 1, (off_t)(base + 8)), 1);
	CHECK_EQ(pwrite(fd, "\x07", 1, (off_t)(a.len - 16)), 1);
	v = check_fd(fd, 0);
	CHECK(!v.ok && strstr(v.error, "zip64 sizes in the local header") != NULL);
	CHECK_EQ(pwrite(fd, "\x08", 1, (off_t)(a.len - 16)), 1);
	CHECK_EQ(pwrite(fd, "\xff", 1, (off_t)(far->hdr_off + 48)), 1);
	v = check_fd(fd, 0);
	CHECK(!v.ok && strcmp(v.bad, "archive/data/1") == 0);
	(void)close(fd);
	archive_free(&a);
	archive_free(&b);
}
