/* The reader: what is a whole checkpoint, what is not, and that nothing in a file can make it
 * crash, hang, read elsewhere or take more memory than the file is worth. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../../csrc/core/load.h"
#include "../../csrc/core/sfr_internal.h"
#include "archive.h"
#include "check.h"

/* ---- helpers ------------------------------------------------------------- */

static uint64_t rng_state = 0x2545f4914f6cdd1du;

static uint64_t rng(void)
{
	rng_state ^= rng_state << 13;
	rng_state ^= rng_state >> 7;
	rng_state ^= rng_state << 17;
	return rng_state;
}

static int file_of(const void *bytes, size_t len)
{
	int fd = memfd_create("archive", MFD_CLOEXEC);

	if (fd < 0 || pwrite(fd, bytes, len, 0) != (ssize_t)len)
		abort();
	return fd;
}

/* A copy of a result's plain part, with the first bad record's name. */
struct verdict {
	int rc;
	bool ok;
	enum sfr_format format;
	uint64_t nbytes, nr_records, nr_unchecked, nr_bad;
	uint32_t nr_listed;
	char error[512], bad[1100];
	const char *reason;
};

static struct verdict check_fd(int fd, unsigned flags)
{
	struct verdict v = {.rc = 0};
	struct sfr_check *check;

	v.rc = sfr_check_new(fd, flags, &check);
	if (v.rc != 0)
		return v;
	v.rc = sfr_check_run(check, SFR_FOREVER);
	if (v.rc == 0) {
		const struct sfr_check_result *r = sfr_check_result(check);

		v.ok = r->ok;
		v.format = r->format;
		v.nbytes = r->nbytes;
		v.nr_records = r->nr_records;
		v.nr_unchecked = r->nr_unchecked;
		v.nr_bad = r->nr_bad;
		v.nr_listed = r->nr_listed;
		memcpy(v.error, r->error, sizeof(v.error));
		if (r->nr_listed != 0) {
			(void)snprintf(v.bad, sizeof(v.bad), "%s", r->bad[0].name);
			v.reason = r->bad[0].reason;
		}
		/* Good files have no error, bad ones have one that fits. */
		CHECK(r->ok == (r->error[0] == '\0'));
		CHECK(!r->ok || r->nr_bad == 0);
		CHECK(r->nr_listed <= r->nr_bad);
		CHECK(!r->ok || sfr_check_done(check) == r->nbytes);
	}
	sfr_check_free(check);
	return v;
}

static struct verdict check_bytes(const void *bytes, size_t len, unsigned flags)
{
	int fd = file_of(bytes, len);
	struct verdict v = check_fd(fd, flags);

	(void)close(fd);
	return v;
}

static struct verdict check_archive(const struct archive *a, unsigned flags)
{
	return check_bytes(a->buf, a->len, flags);
}

/* Both ways of checking refuse it, with words that contain `words`. */
static void refuse(struct archive *a, const char *words)
{
	for (unsigned flags = 0; flags <= SFR_CHECK_BYTES; flags++) {
		struct verdict v = check_archive(a, flags);

		check__that(v.rc == 0 && !v.ok && strstr(v.error, words) != NULL, __FILE__, __LINE__,
			    "\"%s\" in the message \"%s\" (code %d)", words, v.error, v.rc);
	}
}

static void accept(struct archive *a, uint64_t nr_records)
{
	for (unsigned flags = 0; flags <= SFR_CHECK_BYTES; flags++) {
		struct verdict v = check_archive(a, flags);

		check__that(v.rc == 0 && v.ok, __FILE__, __LINE__, "accepted, not \"%s\" (code %d)",
			    v.error, v.rc);
		CHECK_EQ(v.nbytes, a->len);
		CHECK_EQ(v.nr_records, nr_records);
		CHECK_EQ(v.format, SFR_FORMAT_ARCHIVE);
	}
}

/* A small checkpoint with everything: an empty storage, gaps, one storage of some length. */
static struct archive sample(void)
{
	struct archive a = archive_torch();
	unsigned char data[700];

	for (size_t i = 0; i < sizeof(data); i++)
		data[i] = (unsigned char)rng();
	archive_add(&a, "archive/data/0", data, 100);
	archive_gap(&a, 33);
	archive_add(&a, "archive/data/1", data, 0);
	archive_add(&a, "archive/data/2", data, sizeof(data));
	archive_gap(&a, 7);
	archive_add(&a, "archive/.data/serialization_id", data, 40);
	archive_finish(&a);
	return a;
}

/* ---- what is good ---------------------------------------------------------- */

static void what_torch_writes_is_good(void)
{
	struct archive a = sample();
	struct verdict v = check_archive(&a, SFR_CHECK_BYTES);

	accept(&a, 9);
	CHECK_EQ(v.nr_unchecked, 0);
	archive_free(&a);
}

static void what_other_zip_writers_write_is_good(void)
{
	struct archive a = {.described = false};

	archive_add(&a, "some name/", "", 0); /* zip -r has directories, too */
	archive_add(&a, "some name/data.pkl", ".", 1);
	archive_add(&a, "some name/version", "3\n", 2);
	archive_add(&a, "some name/data/0", "0123456789", 10);
	archive_finish(&a);
	accept(&a, 4);
	archive_free(&a);
}

static void records_without_a_crc_are_unchecked_and_good(void)
{
	struct archive a = {.described = true, .zip64 = true, .no_crc = true};

	archive_add(&a, "x/data.pkl", ".", 1);
	archive_add(&a, "x/version", "3\n", 2);
	archive_add(&a, "x/data/0", "", 0);
	archive_finish(&a);
	accept(&a, 3);
	CHECK_EQ(check_archive(&a, 0).nr_unchecked, 2);
	CHECK_EQ(check_archive(&a, SFR_CHECK_BYTES).nr_unchecked, 2);
	archive_free(&a);
}

static void a_record_whose_crc_is_truly_zero_is_checked(void)
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

static void deflated_code_of_torchscript_is_unchecked_and_good(void)
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

static void a_deflated_storage_is_bad(void)
{
	struct archive a = archive_torch();

	a.method = 8;
	archive_add(&a, "archive/data/0", "\x03\x00", 2);
	archive_finish(&a);
	refuse(&a, "record archive/data/0: it is compressed");
	archive_free(&a);
}

static void the_legacy_format_is_recognised_in_every_protocol(void)
{
	static const char magic[] = "\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";
	static const char *const heads[] = {"\x80\x02", "\x80\x03", "\x80\x04\x95\x0d\0\0\0\0\0\0\0",
					    "\x80\x05\x95\x0d\0\0\0\0\0\0\0"};
	static const size_t lens[] = {2, 2, 11, 11};
	static const char text[] = "L119547037146038801333356L\n.rest";
	struct verdict v = check_bytes(text, sizeof(text), SFR_CHECK_BYTES);

	CHECK(v.ok);
	CHECK_EQ(v.format, SFR_FORMAT_LEGACY);
	for (size_t i = 0; i < 4; i++) {
		char file[64] = {0};

		memcpy(file, heads[i], lens[i]);
		memcpy(file + lens[i], magic, sizeof(magic) - 1);
		v = check_bytes(file, sizeof(file), 0);
		CHECK(v.ok);
		CHECK_EQ(v.format, SFR_FORMAT_LEGACY);
		CHECK_EQ(v.nr_records, 0);
		/* One byte less and it is none. */
		v = check_bytes(file, lens[i] + sizeof(magic) - 2, 0);
		CHECK(!v.ok);
		CHECK_EQ(v.format, SFR_FORMAT_FOREIGN);
	}
}

/* Our own image, made by the code that makes every checkpoint. */
static void what_stillframe_writes_is_good(void)
{
	static char storages[4][40000];
	struct sfr_source sources[4] = {
		{(uintptr_t)storages[0], 40000, SFR_CAPTURED, 0},
		{(uintptr_t)storages[1], 39999, SFR_LANE_HOST, 0},
		{0, 0, SFR_CAPTURED, 0},
		{(uintptr_t)storages[3], 1, SFR_LANE_HOST, 0},
	};
	struct sfr_save_desc desc = {.dir = "/", .name = "x", .skeleton = ".", .skeleton_len = 1,
				     .sources = sources, .nr_sources = 4};
	struct sfr__image img;
	unsigned char *file;
	struct verdict v;

	for (size_t i = 0; i < sizeof(storages); i++)
		((char *)storages)[i] = (char)rng();
	if (!CHECK_EQ(sfr__image_init(&img, &desc, 8192), 0))
		return;
	file = calloc(1, img.len);
	for (uint32_t i = 0; i < img.nr_entries; i++)
		img.entries[i].crc = sfr_crc32_portable(0, img.entries[i].src, img.entries[i].nbytes);
	for (uint32_t i = 0; i < img.nr_runs; i++)
		for (uint32_t blk = 0; blk < img.runs[i].nr_blocks; blk++) {
			unsigned char *block = file + sfr__image_block_off(&img, &img.runs[i], blk);
			struct sfr__seg_iter it;
			struct sfr__seg seg;

			sfr__seg_iter_init(&it, &img, &img.runs[i], blk);
			while (sfr__seg_next(&it, &seg)) {
				unsigned char *at = block + seg.pos;

				if (seg.kind == SFR__SEG_HEADER)
					sfr__image_put_header(&img, seg.entry, seg.off, seg.len, at);
				else if (seg.kind == SFR__SEG_DATA)
					memcpy(at, img.entries[seg.entry].src + seg.off, seg.len);
				else if (seg.kind == SFR__SEG_DESC)
					sfr__image_put_desc(&img, seg.entry, seg.off, seg.len, at);
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

/* Pieces of torch's dialect that only long files show: a zip64 field with {size, 0} or with the
 * offset alone, and long descriptors. The long record is a hole. */
static void records_past_4_gib_are_good(void)
{
	const uint64_t len = UINT64_C(0x100000008);
	static unsigned char local[] = {'P', 'K', 3, 4, 0, 0, 8, 8};
	struct archive a = archive_torch(), b = {.described = true, .zip64 = true};
	struct archive_record *big, *far;
	uint64_t base;
	struct verdict v;
	int fd;

	big = &a.records[a.nr++];
	*big = (struct archive_record){.name = "archive/data/0", .name_len = 14, .len = len,
				       .flags = 0x0808, .hdr_off = a.len};
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

	memcpy(b.records, a.records, sizeof(b.records));
	b.nr = a.nr;
	archive_num(&b, 0x08074b50, 4, 0);
	archive_num(&b, 0, 4, 0);
	archive_num(&b, len, 8, 0);
	archive_num(&b, len, 8, 0);
	far = &b.records[b.nr++];
	*far = (struct archive_record){.name = "archive/data/1", .name_len = 14, .len = 3,
				       .flags = 0x0808, .crc = sfr_crc32_portable(0, "abc", 3),
				       .hdr_off = base + b.len};
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
	/* The long size, the far offset, the long descriptor: each is looked at. */
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

/* ---- damage: every byte, every length --------------------------------------- */

/* A size of zero in a local header says nothing. One flip may make it the true size. */
static bool became_true(const struct archive *a, size_t at)
{
	for (size_t i = 0; i < a->nr; i++)
		for (size_t field = 18; field <= 22; field += 4)
			if (at >= a->records[i].hdr_off + field &&
			    at < a->records[i].hdr_off + field + 4) {
				uint32_t said;

				memcpy(&said, a->buf + a->records[i].hdr_off + field, 4);
				return said == a->records[i].len;
			}
	return false;
}

static void flip_every_bit(struct archive *a)
{
	int fd = file_of(a->buf, a->len);
	size_t seen = 0, blind = 0;

	for (size_t at = 0; at < a->len; at++) {
		for (int bit = 0; bit < 8; bit++) {
			unsigned char was = a->buf[at];
			struct verdict v;

			a->buf[at] ^= (unsigned char)(1u << bit);
			if (pwrite(fd, a->buf + at, 1, (off_t)at) != 1)
				abort();
			v = check_fd(fd, SFR_CHECK_BYTES);
			/* Exactly what is marked is not looked at, no more and no less. */
			check__that(v.rc == 0 && v.ok == (became_true(a, at) ||
							  (a->blind[at] != 0 && a->blind[at] != 'd')),
				    __FILE__, __LINE__, "bit %d of byte %zu: %s (mark '%c')", bit, at,
				    v.ok ? "accepted" : v.error, a->blind[at] ? a->blind[at] : '-');
			blind += v.ok;
			seen += !v.ok;
			/* Structure alone never finds more than structure and CRCs do. */
			if (v.ok || a->blind[at] == 'd')
				CHECK(check_fd(fd, 0).ok);
			a->buf[at] = was;
			if (pwrite(fd, a->buf + at, 1, (off_t)at) != 1)
				abort();
		}
	}
	(void)printf(" (%zu bits seen, %zu not looked at)", seen, blind);
	(void)close(fd);
}

static void every_flipped_bit_of_a_torch_file_is_seen_where_it_matters(void)
{
	struct archive a = sample();

	flip_every_bit(&a);
	archive_free(&a);
}

static void every_flipped_bit_of_a_plain_zip_is_seen_where_it_matters(void)
{
	struct archive a = {.described = false};

	archive_add(&a, "x/data.pkl", ".", 1);
	archive_add(&a, "x/version", "3\n", 2);
	archive_add(&a, "x/data/0", "0123456789", 10);
	archive_finish(&a);
	flip_every_bit(&a);
	archive_free(&a);
}

static void no_truncation_is_good(void)
{
	struct archive a = sample();

	for (size_t len = 0; len < a.len; len++)
		for (unsigned flags = 0; flags <= SFR_CHECK_BYTES; flags++) {
			struct verdict v = check_bytes(a.buf, len, flags);

			CHECK(v.rc == 0 && !v.ok);
		}
	CHECK(strstr(check_bytes(a.buf, 0, 0).error, "it is empty") != NULL);
	CHECK(strstr(check_bytes(a.buf, a.len - 1, 0).error, "it is truncated") != NULL);
	CHECK(strstr(check_bytes(a.buf, a.len / 2, 0).error, "it is truncated") != NULL);
	archive_free(&a);
}

/* As a disk does it: a page that never arrived. */
static void no_zeroed_stretch_is_good(void)
{
	struct archive a = sample();
	unsigned char *bytes = malloc(a.len);

	for (size_t from = 0; from < a.len; from += 16) {
		size_t len = a.len - from < 512 ? a.len - from : 512;

		memcpy(bytes, a.buf, a.len);
		memset(bytes + from, 0, len);
		if (memcmp(bytes, a.buf, a.len) != 0)
			CHECK(!check_bytes(bytes, a.len, SFR_CHECK_BYTES).ok);
	}
	memset(bytes, 0, a.len);
	CHECK(strstr(check_bytes(bytes, a.len, 0).error, "begins with zeros") != NULL);
	free(bytes);
	archive_free(&a);
}

static void every_damaged_record_is_named(void)
{
	struct archive a = sample();
	struct verdict v;

	a.buf[a.records[7].data_off + 3] ^= 1;
	a.buf[a.records[5].hdr_off] ^= 1;
	v = check_archive(&a, SFR_CHECK_BYTES);
	CHECK(!v.ok);
	CHECK_EQ(v.nr_bad, 2);
	CHECK_EQ(v.nr_listed, 2);
	CHECK(strcmp(v.bad, "archive/data/0") == 0);
	CHECK(strcmp(v.error, "record archive/data/0: its local header is missing") == 0);
	a.buf[a.records[5].hdr_off] ^= 1;
	v = check_archive(&a, SFR_CHECK_BYTES);
	CHECK(strcmp(v.error, "record archive/data/2: its bytes do not match their CRC") == 0);
	CHECK(check_archive(&a, 0).ok);
	archive_free(&a);
}

static void only_so_many_bad_records_are_listed(void)
{
	enum { NR = 1500 };
	struct archive a = archive_torch();
	struct verdict v;

	/* The same local header serves all: every one but the first overlaps. */
	archive_add(&a, "archive/data/0", "", 0);
	a.dir_off = a.len;
	for (size_t i = 0; i < NR; i++)
		archive_central(&a, &a.records[i < 6 ? i : 5]);
	archive_num(&a, 0x06054b50, 4, 0);
	archive_num(&a, 0, 4, 0);
	archive_num(&a, NR, 2, 0);
	archive_num(&a, NR, 2, 0);
	archive_num(&a, a.len - 12 - a.dir_off, 4, 0);
	archive_num(&a, a.dir_off, 4, 0);
	archive_num(&a, 0, 2, 0);
	v = check_archive(&a, SFR_CHECK_BYTES);
	CHECK(strcmp(v.bad, "archive/data/0") == 0);
	CHECK_EQ(v.nr_records, NR);
	CHECK_EQ(v.nr_bad, 2 * (NR - 6)); /* each overlaps, and has a name that was there */
	CHECK_EQ(v.nr_listed, SFR_CHECK_MAX_LISTED);
	archive_free(&a);
}

/* ---- hostile --------------------------------------------------------------- */

static void foreign_files_are_refused(void)
{
	struct archive a = {.zip64 = false};

	CHECK(strstr(check_bytes("hello, world", 12, 0).error, "not a torch.save file") != NULL);
	CHECK(strstr(check_bytes("P", 1, 0).error, "truncated") != NULL);
	CHECK(strstr(check_bytes("PK\5\6\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 22, 0).error,
		     "not a torch.save file") != NULL);
	archive_add(&a, "word/document.xml", "<x/>", 4);
	archive_finish(&a);
	refuse(&a, "has no record data.pkl");
	archive_free(&a);
	archive_add(&a, "x/data.pkl", ".", 1);
	archive_finish(&a);
	refuse(&a, "has no record version");
	archive_free(&a);
	archive_add(&a, "data.pkl", ".", 1);
	archive_add(&a, "version", "3\n", 2);
	archive_finish(&a);
	refuse(&a, "not inside a directory");
	archive_free(&a);
	archive_add(&a, "x/data.pkl", ".", 1);
	archive_add(&a, "y/version", "3\n", 2);
	archive_finish(&a);
	refuse(&a, "record y/version: it is not in the same directory");
	archive_free(&a);
}

static void names_that_occur_twice_are_refused(void)
{
	struct archive a = archive_torch();

	archive_add(&a, "archive/data/0", "a", 1);
	archive_add(&a, "archive/data/1", "b", 1);
	archive_add(&a, "archive/data/0", "c", 1);
	archive_finish(&a);
	refuse(&a, "record archive/data/0: its name occurs twice");
	CHECK_EQ(check_archive(&a, SFR_CHECK_BYTES).nr_bad, 1);
	archive_free(&a);
}

static void strange_names_are_refused_and_shown_harmlessly(void)
{
	struct archive a = archive_torch();
	static char name[1200] = "archive/data/";

	archive_add_name(&a, "archive/a\0b", 11);
	archive_finish(&a);
	refuse(&a, "record archive/a?b: its name holds a zero byte");
	archive_free(&a);

	a = archive_torch();
	archive_add_name(&a, "other/\x1b[31m\nred", 15);
	archive_finish(&a);
	refuse(&a, "record other/?[31m?red: it is not in the same directory");
	archive_free(&a);

	memset(name + 13, 'n', sizeof(name) - 13);
	a = archive_torch();
	archive_add_name(&a, name, 1024);
	archive_finish(&a);
	accept(&a, 6);
	archive_free(&a);
	a = archive_torch();
	archive_add_name(&a, name, 1025);
	archive_finish(&a);
	refuse(&a, "a name of impossible length");
	archive_free(&a);
}

static void overlaps_and_disorder_are_refused(void)
{
	struct archive a = sample();
	struct archive_record swap = a.records[5];

	/* Two directory records point at one local header. */
	archive_poke(&a, a.records[7].central + 42, a.records[5].hdr_off, 4);
	refuse(&a, "record archive/data/2: it overlaps another record");
	archive_free(&a);

	a = sample();
	a.len = a.dir_off;
	a.records[5] = a.records[7];
	a.records[7] = swap;
	archive_finish(&a);
	refuse(&a, "out of order");
	archive_free(&a);

	/* A record inside another one's data, both well-formed. */
	a = sample();
	archive_poke(&a, a.records[0].central + 42, 7, 4);
	refuse(&a, "record archive/data.pkl: it overlaps another record or is out of order");
	archive_free(&a);
}

static void impossible_numbers_are_refused(void)
{
	static const uint64_t values[] = {0, 1, 0x7fff, 0xffff, 0x10000, 0x7fffffff, 0x80000000,
					  0xfffffffe, 0xffffffff, UINT64_C(1) << 32,
					  UINT64_C(0x7fffffffffffffff), UINT64_C(0x8000000000000000),
					  UINT64_MAX - 97, UINT64_MAX - 1, UINT64_MAX};
	/* Where in its record a number of how many bytes stands. */
	static const struct {
		char where; /* e(nd), z(ip64 end), l(ocator), c(entral), h(eader), d(escriptor) */
		unsigned char off, len;
	} fields[] = {
		{'e', 4, 2}, {'e', 6, 2}, {'e', 8, 2}, {'e', 10, 2}, {'e', 12, 4}, {'e', 16, 4},
		{'e', 20, 2}, {'l', 4, 4}, {'l', 8, 8}, {'l', 16, 4}, {'z', 4, 8}, {'z', 16, 4},
		{'z', 20, 4}, {'z', 24, 8}, {'z', 32, 8}, {'z', 40, 8}, {'z', 48, 8}, {'c', 8, 2},
		{'c', 10, 2}, {'c', 16, 4}, {'c', 20, 4}, {'c', 24, 4}, {'c', 28, 2}, {'c', 30, 2},
		{'c', 32, 2}, {'c', 34, 2}, {'c', 42, 4}, {'h', 6, 2}, {'h', 8, 2}, {'h', 14, 4},
		{'h', 18, 4}, {'h', 22, 4}, {'h', 26, 2}, {'h', 28, 2}, {'d', 4, 4}, {'d', 8, 4},
		{'d', 12, 4},
	};

	for (size_t f = 0; f < sizeof(fields) / sizeof(fields[0]); f++)
		for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
			struct archive a = sample();
			const struct archive_record *r = &a.records[7];
			size_t at = fields[f].off + (fields[f].where == 'e'   ? a.end
						     : fields[f].where == 'z' ? a.end64
						     : fields[f].where == 'l' ? a.locator
						     : fields[f].where == 'c' ? r->central
						     : fields[f].where == 'h' ? r->hdr_off
									      : r->data_off + r->len);
			unsigned char was[8], now[8];
			struct verdict v;

			memcpy(was, a.buf + at, fields[f].len);
			archive_poke(&a, at, values[i], fields[f].len);
			memcpy(now, a.buf + at, fields[f].len);
			v = check_archive(&a, SFR_CHECK_BYTES);
			/* 0xffff... in the old end record leaves the number to zip64; zeros in the
			 * local header leave it to the descriptor, 0xffffffff there to nobody. */
			if (memcmp(was, now, fields[f].len) == 0 ||
			    (fields[f].where == 'e' && fields[f].off >= 12 && fields[f].off <= 16 &&
			     (uint32_t)values[i] == UINT32_MAX))
				CHECK(v.ok);
			else
				check__that(!v.ok, __FILE__, __LINE__, "%c+%d = %llx is refused",
					    fields[f].where, fields[f].off,
					    (unsigned long long)values[i]);
			archive_free(&a);
		}
}

/* Counts and limits what a check asks of the system. */
static uint64_t nr_preads, most_memory, held_memory;
static ssize_t counting_pread(int fd, void *buf, size_t len, off_t off)
{
	nr_preads++;
	return pread(fd, buf, len, off);
}

static void *counting_malloc(size_t len)
{
	held_memory += len;
	most_memory = held_memory > most_memory ? held_memory : most_memory;
	return malloc(len);
}

static void *counting_realloc(void *old, size_t len)
{
	most_memory = held_memory + len > most_memory ? held_memory + len : most_memory;
	return realloc(old, len);
}

static void random_damage_never_costs_more_than_the_file(void)
{
	const struct sfr_sys plain = sfr_sys;
	struct archive a = sample();
	unsigned char *bytes = malloc(a.len + 64);
	size_t nr_ok = 0;

	sfr_sys.pread = counting_pread;
	sfr_sys.malloc = counting_malloc;
	sfr_sys.realloc = counting_realloc;
	for (int round = 0; round < 20000; round++) {
		size_t len = a.len;
		struct verdict v;

		memcpy(bytes, a.buf, a.len);
		for (uint64_t i = rng() % 6 + 1; i != 0; i--) {
			size_t at = rng() % 3 != 0 ? a.dir_off + rng() % (a.len - a.dir_off)
						   : rng() % a.len;
			size_t run = rng() % 8 + 1, from = rng() % a.len;
			uint64_t how = rng() % 4;

			for (size_t k = 0; k < run && at + k < a.len; k++)
				bytes[at + k] = how == 0   ? 0xff
						: how == 1 ? 0
						: how == 2 ? (unsigned char)rng()
							   : a.buf[(from + k) % a.len];
		}
		if (rng() % 8 == 0)
			len = rng() % a.len;
		nr_preads = most_memory = held_memory = 0;
		v = check_bytes(bytes, len, (unsigned)(rng() % 2));
		CHECK_EQ(v.rc, 0);
		CHECK(nr_preads < 100);
		CHECK(most_memory < (2u << 20));
		nr_ok += v.ok;
	}
	sfr_sys = plain;
	/* Most of it hits something; if nothing or all of it did, the test would test nothing. */
	CHECK(nr_ok > 0 && nr_ok < 10000);
	(void)printf(" (%zu of 20000 hit nothing)", nr_ok);
	free(bytes);
	archive_free(&a);
}

static void a_file_that_only_claims_to_be_huge_costs_nothing(void)
{
	const struct sfr_sys plain = sfr_sys;
	const uint64_t size = UINT64_C(1) << 42;
	struct archive a = {.zip64 = true};
	struct verdict v;
	int fd;

	/* 4 TiB of hole, all of it claimed to be a directory with as many records as fit. */
	archive_finish(&a);
	archive_poke(&a, a.end64 + 24, (size - 128) / 46, 8);
	archive_poke(&a, a.end64 + 32, (size - 128) / 46, 8);
	archive_poke(&a, a.end64 + 40, size - 98 - 30, 8);
	archive_poke(&a, a.end64 + 48, 30, 8);
	archive_poke(&a, a.locator + 8, size - 98, 8);
	archive_poke(&a, a.end + 8, UINT32_MAX, 4);
	archive_poke(&a, a.end + 12, UINT64_MAX, 8);
	fd = file_of("PK\3\4", 4);
	if (ftruncate(fd, (off_t)(size - 98)) != 0 ||
	    pwrite(fd, a.buf, a.len, (off_t)(size - 98)) != (ssize_t)a.len) {
		check_skip("no file of 4 TiB here");
	} else {
		sfr_sys.pread = counting_pread;
		sfr_sys.malloc = counting_malloc;
		sfr_sys.realloc = counting_realloc;
		nr_preads = most_memory = held_memory = 0;
		v = check_fd(fd, SFR_CHECK_BYTES);
		CHECK_EQ(v.rc, 0);
		CHECK(strstr(v.error, "record of its directory is damaged") != NULL);
		CHECK_EQ(v.nbytes, size);
		CHECK(nr_preads < 10 && most_memory < (2u << 20));
		sfr_sys = plain;
	}
	(void)close(fd);
	archive_free(&a);
}

/* ---- the system ------------------------------------------------------------- */

static void directories_pipes_and_closed_descriptors_are_told_apart(void)
{
	int ends[2], fd = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	struct verdict v;

	CHECK_EQ(check_fd(fd, 0).rc, -EISDIR);
	(void)close(fd);
	CHECK_EQ(check_fd(fd, 0).rc, -EBADF);
	CHECK_EQ(pipe(ends), 0);
	v = check_fd(ends[0], 0);
	CHECK(v.rc == 0 && !v.ok && strstr(v.error, "not a regular file") != NULL);
	(void)close(ends[0]);
	(void)close(ends[1]);
}

static void a_check_runs_in_slices(void)
{
	struct archive a = archive_torch();
	size_t len = 5u << 20;
	unsigned char *data = calloc(1, len);
	struct sfr_check *check;
	uint64_t done = 0;
	int fd, rc, slices = 0;

	archive_add(&a, "archive/data/0", data, len);
	archive_finish(&a);
	fd = file_of(a.buf, a.len);
	CHECK_EQ(sfr_check_new(fd, SFR_CHECK_BYTES, &check), 0);
	while ((rc = sfr_check_run(check, 0)) == SFR_EAGAIN && slices++ < 1000) {
		CHECK(sfr_check_done(check) >= done && sfr_check_done(check) <= a.len);
		done = sfr_check_done(check);
		CHECK(!sfr_check_result(check)->ok);
	}
	CHECK_EQ(rc, 0);
	CHECK(sfr_check_result(check)->ok);
	CHECK_EQ(sfr_check_run(check, 0), 0); /* asked again, it says the same */
	CHECK_EQ(sfr_check_done(check), a.len);
	/* A step a record and direction, and one a piece: an interruption never waits long. */
	CHECK(slices > 15 && slices < 40);
	sfr_check_free(check);

	/* Given up in the middle, nothing is left behind (ASAN watches). */
	CHECK_EQ(sfr_check_new(fd, SFR_CHECK_BYTES, &check), 0);
	CHECK_EQ(sfr_check_run(check, 0), SFR_EAGAIN);
	CHECK_EQ(sfr_check_run(check, 0), SFR_EAGAIN);
	sfr_check_free(check);
	sfr_check_free(NULL);
	(void)close(fd);
	free(data);
	archive_free(&a);
}

static void every_failure_of_the_system_is_reported_and_leaks_nothing(void)
{
	struct archive a = sample();
	int fd;

	a.buf[a.records[7].data_off] ^= 1; /* so that the list of bad records is made, too */
	fd = file_of(a.buf, a.len);
	FOR_EVERY_FAILURE(run, "*", EIO) {
		struct verdict v = check_fd(fd, SFR_CHECK_BYTES);

		if (check_acted(&run))
			CHECK(v.rc == -EIO || v.rc == -ENOMEM || (v.rc == 0 && v.nr_bad == 1));
		else
			CHECK(v.rc == 0 && v.nr_bad == 1);
		check_heal(&run);
		v = check_fd(fd, SFR_CHECK_BYTES);
		CHECK(v.rc == 0 && v.nr_bad == 1);
	}
	(void)close(fd);
	archive_free(&a);
}

static void an_error_of_reading_stays(void)
{
	struct sfr_fault fault = {.call = "pread", .nth = 2, .err = EIO, .limit = -1};
	struct archive a = sample();
	int fd = file_of(a.buf, a.len);
	struct sfr_check *check;

	CHECK_EQ(sfr_check_new(fd, SFR_CHECK_BYTES, &check), 0);
	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr_inject_set(&fault), 0);
	CHECK_EQ(sfr_check_run(check, SFR_FOREVER), -EIO);
	sfr_inject_clear();
	CHECK_EQ(sfr_check_run(check, SFR_FOREVER), -EIO);
	CHECK(!sfr_check_result(check)->ok);
	sfr_check_free(check);
	(void)close(fd);
	archive_free(&a);
}

static void short_reads_and_interruptions_are_gone_on_with(void)
{
	static const int64_t limits[] = {1, 7, -2, -3};
	struct archive a = sample();
	int fd = file_of(a.buf, a.len);

	CHECK_EQ(sfr_inject_install(), 0);
	for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
		struct sfr_fault fault = {.call = "pread", .nth = 1, .sticky = limits[i] > 0,
					  .limit = limits[i]};

		sfr_inject_clear();
		CHECK_EQ(sfr_inject_set(&fault), 0);
		CHECK(check_fd(fd, SFR_CHECK_BYTES).ok);
		CHECK(sfr_inject_hits() > 0);
	}
	for (uint64_t nth = 1; nth <= 2; nth++) {
		struct sfr_fault fault = {.call = "pread", .nth = nth, .err = EINTR, .limit = -1};

		sfr_inject_clear();
		CHECK_EQ(sfr_inject_set(&fault), 0);
		CHECK(check_fd(fd, SFR_CHECK_BYTES).ok);
		CHECK_EQ(sfr_inject_hits(), 1);
	}
	sfr_inject_remove();
	(void)close(fd);
	archive_free(&a);
}

static int shrinking_fd;
static ssize_t shrinking_pread(int fd, void *buf, size_t len, off_t off)
{
	if (fd == shrinking_fd && --nr_preads == 0 && ftruncate(fd, 200) != 0)
		abort();
	return pread(fd, buf, len, off);
}

static void a_file_that_shrinks_meanwhile_is_damaged(void)
{
	const struct sfr_sys plain = sfr_sys;
	struct archive a = archive_torch();
	size_t len = 3u << 20;
	unsigned char *data = calloc(1, len);

	archive_add(&a, "archive/data/0", data, len);
	archive_finish(&a);
	for (uint64_t nth = 2; nth <= 4; nth++) {
		int fd = file_of(a.buf, a.len);
		struct verdict v;

		shrinking_fd = fd;
		nr_preads = nth;
		sfr_sys.pread = shrinking_pread;
		v = check_fd(fd, SFR_CHECK_BYTES);
		sfr_sys = plain;
		CHECK(v.rc == 0 && !v.ok && strstr(v.error, "changed while it was read") != NULL);
		(void)close(fd);
	}
	free(data);
	archive_free(&a);
}

int main(void)
{
	RUN(what_torch_writes_is_good);
	RUN(what_other_zip_writers_write_is_good);
	RUN(records_without_a_crc_are_unchecked_and_good);
	RUN(a_record_whose_crc_is_truly_zero_is_checked);
	RUN(deflated_code_of_torchscript_is_unchecked_and_good);
	RUN(a_deflated_storage_is_bad);
	RUN(the_legacy_format_is_recognised_in_every_protocol);
	RUN(what_stillframe_writes_is_good);
	RUN(records_past_4_gib_are_good);
	RUN(every_flipped_bit_of_a_torch_file_is_seen_where_it_matters);
	RUN(every_flipped_bit_of_a_plain_zip_is_seen_where_it_matters);
	RUN(no_truncation_is_good);
	RUN(no_zeroed_stretch_is_good);
	RUN(every_damaged_record_is_named);
	RUN(only_so_many_bad_records_are_listed);
	RUN(foreign_files_are_refused);
	RUN(names_that_occur_twice_are_refused);
	RUN(strange_names_are_refused_and_shown_harmlessly);
	RUN(overlaps_and_disorder_are_refused);
	RUN(impossible_numbers_are_refused);
	RUN(random_damage_never_costs_more_than_the_file);
	RUN(a_file_that_only_claims_to_be_huge_costs_nothing);
	RUN(directories_pipes_and_closed_descriptors_are_told_apart);
	RUN(a_check_runs_in_slices);
	RUN(every_failure_of_the_system_is_reported_and_leaks_nothing);
	RUN(an_error_of_reading_stays);
	RUN(short_reads_and_interruptions_are_gone_on_with);
	RUN(a_file_that_shrinks_meanwhile_is_damaged);
	return check_done();
}
