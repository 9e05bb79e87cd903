/* A check and damage: every bit of a file flipped, every length cut, every stretch zeroed. The
 * damaged record is named. */
#include <errno.h>

#include "verdict.h"

/* ---- damage: every byte, every length --------------------------------------- */

/* Returns whether a flip has made a size true. A size of zero in a local header is not checked. */
static bool flip_makes_size_right(const struct archive *a, size_t at)
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
			bool is_blind = a->blind[at] != 0 && a->blind[at] != 'd' &&
					(a->blind[at] != 'A' || bit != 4);
			struct verdict v;

			a->buf[at] ^= (unsigned char)(1u << bit);
			if (pwrite(fd, a->buf + at, 1, (off_t)at) != 1)
				abort();
			v = check_fd(fd, SFR_CHECK_BYTES);
			/* Exactly the bytes that are not marked are checked. */
			check__that(v.rc == 0 && v.ok == (is_blind || flip_makes_size_right(a, at)),
				    __FILE__, __LINE__, "bit %d of byte %zu: %s (mark '%c')", bit,
				    at, v.ok ? "accepted" : v.error,
				    a->blind[at] ? a->blind[at] : '-');
			blind += v.ok;
			if (!v.ok)
				seen++;
			/* A check of the structure alone never finds more than one that also
			 * compares CRCs. */
			if (v.ok || a->blind[at] == 'd')
				CHECK(check_fd(fd, 0).ok);
			/* A check of the directory alone never finds more than that, and reads
			 * nothing of the data part but the beginning of the file. */
			if (check_fd(fd, 0).ok || (at >= 64 && at < a->dir_off))
				CHECK(check_fd(fd, SFR_CHECK_DIRECTORY).ok);
			a->buf[at] = was;
			if (pwrite(fd, a->buf + at, 1, (off_t)at) != 1)
				abort();
		}
	}
	(void)printf(" (%zu bits seen, %zu not looked at)", seen, blind);
	(void)close(fd);
}

TEST(every_flipped_bit_that_matters_is_found_in_a_torch_file)
{
	struct archive a = sample();

	flip_every_bit(&a);
	archive_free(&a);
}

TEST(every_flipped_bit_that_matters_is_found_in_a_plain_zip)
{
	struct archive a = { .described = false };

	archive_add(&a, "x/data.pkl", ".", 1);
	archive_add(&a, "x/version", "3\n", 2);
	archive_add(&a, "x/data/0", "0123456789", 10);
	archive_finish(&a);
	flip_every_bit(&a);
	archive_free(&a);
}

TEST(flag_later_skips_the_headers_of_long_records)
{
	static char bytes[200 << 10];
	struct archive a = sample();
	struct verdict v;

	archive_poke(&a, a.records[5].hdr_off + 8, 8, 2); /* another method of compression */
	CHECK(!check_archive(&a, SFR_CHECK_LATER).ok);
	CHECK(check_archive(&a, SFR_CHECK_LATER).headers);
	CHECK(check_archive(&a, SFR_CHECK_DIRECTORY).ok);
	archive_free(&a);

	a = (struct archive){ .described = true };
	archive_add(&a, "x/data.pkl", ".", 1);
	archive_add(&a, "x/version", "3\n", 2);
	archive_add(&a, "x/data/0", bytes, sizeof(bytes));
	archive_finish(&a);
	v = check_archive(&a, SFR_CHECK_LATER);
	CHECK(v.ok && !v.headers);
	archive_poke(&a, a.records[2].hdr_off + 8, 8, 2);
	v = check_archive(&a, SFR_CHECK_LATER);
	CHECK(v.ok && !v.headers);
	v = check_archive(&a, 0);
	CHECK(!v.ok && v.headers);
	CHECK_EQ(check_archive(&a, SFR_CHECK_BYTES | SFR_CHECK_LATER).rc, -EINVAL);
	archive_free(&a);
}

TEST(every_truncated_file_is_reported_as_damaged)
{
	struct archive a = sample();

	for (size_t len = 0; len < a.len; len++)
		for (unsigned flags = 0; flags <= SFR_CHECK_BYTES; flags++) {
			struct verdict v = check_bytes(a.buf, len, flags);

			CHECK(v.rc == 0 && !v.ok);
			CHECK(!check_bytes(a.buf, len, SFR_CHECK_DIRECTORY).ok);
		}
	CHECK(strstr(check_bytes(a.buf, 0, 0).error, "it is empty") != NULL);
	CHECK(strstr(check_bytes(a.buf, a.len - 1, 0).error, "it is truncated") != NULL);
	CHECK(strstr(check_bytes(a.buf, a.len / 2, 0).error, "it is truncated") != NULL);
	archive_free(&a);
}

/* A page that never reached the disk. */
TEST(every_zeroed_range_is_reported_as_damage)
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

TEST(every_damaged_record_is_named)
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

TEST(listed_bad_records_are_bounded)
{
	enum { NR = 1500 };
	struct archive a = archive_torch();
	struct verdict v;

	/* All records point to the same local header, so every one but the first overlaps. */
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
	CHECK_EQ(v.nr_bad, NR - 6 + 1); /* each overlaps, and one name occurs twice */
	CHECK_EQ(v.nr_listed, SFR_CHECK_MAX_LISTED);
	archive_free(&a);
}
