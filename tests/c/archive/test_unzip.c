/* archive/read.c: each rule alone, on bytes in memory of exactly the right length, so that ASAN
 * notices a read beyond them. test_load.c tests the rules on whole files. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "archive/read.h"
#include "archive.h"
#include "check.h"

#define SAYS(wrong, words)                                                                         \
	__extension__({                                                                            \
		const char *says = (wrong);                                                        \
		check__that(says != NULL && strstr(says, words) != NULL, __FILE__, __LINE__,       \
			    "\"%s\" says \"%s\"", says == NULL ? "nothing" : says, words);         \
	})
#define GOOD(wrong)                                                                                \
	__extension__({                                                                            \
		const char *says = (wrong);                                                        \
		check__that(says == NULL, __FILE__, __LINE__, "good, not \"%s\"", says);           \
	})

/* ---- end of the file ------------------------------------------------------- */

static const char *end_of(const struct archive *a, struct sfr__unzip_end *end)
{
	size_t len = a->len < SFR__UNZIP_TAIL_LEN ? a->len : SFR__UNZIP_TAIL_LEN;
	unsigned char *tail = malloc(len);
	const char *wrong;

	memcpy(tail, a->buf + a->len - len, len);
	wrong = sfr__unzip_end(tail, len, a->len, end);
	free(tail);
	return wrong;
}

static struct archive two_records(bool zip64)
{
	struct archive a = { .zip64 = zip64 };

	archive_add(&a, "x/data.pkl", "abc", 3);
	archive_add(&a, "x/version", "3\n", 2);
	archive_finish(&a);
	return a;
}

TEST(end_record_gives_the_directorys_offset)
{
	for (int zip64 = 0; zip64 < 2; zip64++) {
		struct archive a = two_records(zip64);
		struct sfr__unzip_end end;

		GOOD(end_of(&a, &end));
		CHECK_EQ(end.nr_records, 2);
		CHECK_EQ(end.dir_off, a.dir_off);
		CHECK_EQ(end.dir_len, a.end64 - a.dir_off);
		archive_free(&a);
	}
}

/* Changes one number in an end record of a good archive, and checks the message about it.
 * `where`: e the end record, l the zip64 locator, z the zip64 end record; `off` counts from it. */
static void poke_end(bool zip64, char where, size_t off, uint64_t value, size_t len,
		     const char *words)
{
	struct archive a = two_records(zip64);
	size_t at = a.end64;
	struct sfr__unzip_end end;

	if (where == 'e')
		at = a.end;
	else if (where == 'l')
		at = a.locator;
	archive_poke(&a, at + off, value, len);
	SAYS(end_of(&a, &end), words);
	archive_free(&a);
}

TEST(every_wrong_field_of_the_end_records_has_a_message)
{
	struct archive a = two_records(false);
	struct sfr__unzip_end end;

	poke_end(false, 'e', 0, 0, 1, "truncated");
	poke_end(false, 'e', 4, 1, 2, "end record is damaged");
	poke_end(false, 'e', 6, 1, 2, "end record is damaged");
	poke_end(false, 'e', 8, 3, 2, "end record is damaged");
	poke_end(false, 'e', 20, 1, 2, "end record is damaged");
	poke_end(false, 'e', 8, 0xffffffff, 4, "zip64 end record is missing");
	poke_end(false, 'e', 12, 0xffffffff, 4, "zip64 end record is missing");
	poke_end(false, 'e', 16, 0xffffffff, 4, "zip64 end record is missing");
	poke_end(false, 'e', 12, 3, 4, "not where its end record says");
	poke_end(false, 'e', 16, 0x7fffffff, 4, "not where its end record says");
	poke_end(false, 'e', 8, 0x10001 * 3, 4, "too short for its number of records");
	poke_end(true, 'l', 4, 1, 4, "zip64 end record is damaged");
	poke_end(true, 'l', 8, 1, 8, "zip64 end record is damaged");
	poke_end(true, 'l', 16, 2, 4, "zip64 end record is damaged");
	poke_end(true, 'z', 0, 0, 1, "zip64 end record is damaged");
	poke_end(true, 'z', 4, 45, 8, "zip64 end record is damaged");
	poke_end(true, 'z', 16, 1, 4, "zip64 end record is damaged");
	poke_end(true, 'z', 20, 1, 4, "zip64 end record is damaged");
	poke_end(true, 'z', 24, 3, 8, "zip64 end record is damaged");
	poke_end(true, 'z', 40, 3, 8, "two end records disagree");
	poke_end(true, 'z', 48, 3, 8, "two end records disagree");
	poke_end(true, 'e', 8, 0x00030003, 4, "two end records disagree");
	/* The locator is missing: the old record has the numbers, but not the directory's end. */
	poke_end(true, 'l', 0, 0, 4, "not where its end record says");

	/* The shortest possible tails. */
	for (size_t len = 0; len < 22; len++) {
		a.len = len;
		SAYS(end_of(&a, &end), "truncated");
	}
	archive_free(&a);
	archive_finish(&a); /* an empty archive is 22 bytes and nothing else */
	GOOD(end_of(&a, &end));
	CHECK_EQ(end.nr_records, 0);
	archive_free(&a);
}

TEST(an_old_end_record_may_leave_every_number_to_zip64)
{
	struct archive a = two_records(true);
	struct sfr__unzip_end end;

	archive_poke(&a, a.end + 8, UINT64_MAX, 8);
	archive_poke(&a, a.end + 16, UINT64_MAX, 4);
	GOOD(end_of(&a, &end));
	CHECK_EQ(end.nr_records, 2);
	CHECK_EQ(end.dir_off, a.dir_off);
	archive_free(&a);
}

TEST(directories_that_wrap_around_are_refused)
{
	struct archive a = two_records(true);
	struct sfr__unzip_end end;

	archive_poke(&a, a.end + 8, UINT64_MAX, 8);
	archive_poke(&a, a.end + 16, UINT64_MAX, 4);
	/* offset + length is right, modulo 2^64. */
	archive_poke(&a, a.end64 + 48, UINT64_MAX - 9, 8);
	archive_poke(&a, a.end64 + 40, a.end64 + 10, 8);
	SAYS(end_of(&a, &end), "not where its end record says");
	archive_free(&a);
}

/* ---- directory --------------------------------------------------------------- */

static const struct sfr__unzip_end roomy = { .nr_records = 1, .dir_off = UINT64_C(1) << 40 };

static struct sfr__unzip_record record(uint64_t unpacked_len, uint64_t packed_len, uint64_t hdr_off)
{
	return (struct sfr__unzip_record){ .hdr_off = hdr_off,
					   .packed_len = packed_len,
					   .unpacked_len = unpacked_len,
					   .flags = 0x0808 };
}

/* Writes up to `nr` numbers as a field with tag `tag`, after another field of `pad` bytes. */
static size_t field(unsigned char *out, uint16_t tag, size_t nr, const uint64_t *numbers)
{
	out[0] = (unsigned char)tag;
	out[1] = (unsigned char)(tag >> 8);
	out[2] = (unsigned char)(8 * nr);
	out[3] = 0;
	memcpy(out + 4, numbers, 8 * nr);
	return 4 + 8 * nr;
}

static const char *central_extra(const unsigned char *extra, size_t len,
				 struct sfr__unzip_record *rec)
{
	unsigned char *exact = malloc(len + (len == 0));
	const char *wrong;

	if (len != 0)
		memcpy(exact, extra, len);
	rec->extra_len = (uint16_t)len;
	wrong = sfr__unzip_parse_central_extra(exact, rec, &roomy);
	free(exact);
	return wrong;
}

TEST(zip64_numbers_of_the_directory_replace_what_did_not_fit)
{
	const uint64_t numbers[3] = { UINT64_C(5) << 32, UINT64_C(5) << 32, UINT64_C(7) << 32 };
	const uint64_t max = UINT32_MAX;
	unsigned char extra[64] = { 0 };
	struct sfr__unzip_record rec = record(max, max, max);

	GOOD(central_extra(extra, field(extra, 1, 3, numbers), &rec));
	CHECK(rec.unpacked_len == numbers[0] && rec.packed_len == numbers[1] &&
	      rec.hdr_off == numbers[2]);
	rec = record(max, max, 64);
	GOOD(central_extra(extra, field(extra, 1, 2, numbers), &rec));
	CHECK(rec.unpacked_len == numbers[0] && rec.hdr_off == 64);
	rec = record(10, 10, max);
	GOOD(central_extra(extra, field(extra, 1, 1, numbers + 2), &rec));
	CHECK(rec.unpacked_len == 10 && rec.hdr_off == numbers[2]);

	/* One number too few, one too many, none at all. */
	rec = record(max, max, max);
	SAYS(central_extra(extra, field(extra, 1, 2, numbers), &rec),
	     "zip64 sizes in the directory");
	rec = record(max, max, 64);
	SAYS(central_extra(extra, field(extra, 1, 3, numbers), &rec),
	     "zip64 sizes in the directory");
	rec = record(max, max, 64);
	SAYS(central_extra(extra, field(extra, 1, 1, numbers), &rec),
	     "zip64 sizes in the directory");
	rec = record(max, max, 64);
	SAYS(central_extra(extra, 0, &rec), "zip64 sizes in the directory");
	rec = record(10, 10, 64);
	SAYS(central_extra(extra, field(extra, 1, 1, numbers), &rec),
	     "zip64 sizes in the directory");
}

TEST(extra_fields_must_fill_their_space)
{
	const uint64_t numbers[3] = { UINT64_C(5) << 32, UINT64_C(5) << 32, 0 };
	unsigned char extra[128] = { 0 };
	size_t len = field(extra, 0x4246, 2, numbers);
	struct sfr__unzip_record rec = record(10, 10, 64);

	GOOD(central_extra(extra, len, &rec));
	GOOD(central_extra(extra, len + field(extra + len, 0x5455, 0, numbers), &rec));
	for (size_t cut = 1; cut < len; cut++)
		SAYS(central_extra(extra, len - cut, &rec), "extra fields in the directory");
	/* A zip64 field after another field is found; two zip64 fields are not accepted. */
	rec = record(UINT32_MAX, UINT32_MAX, 64);
	len += field(extra + len, 1, 2, numbers);
	GOOD(central_extra(extra, len, &rec));
	CHECK_EQ(rec.packed_len, numbers[0]);
	rec = record(UINT32_MAX, UINT32_MAX, 64);
	len += field(extra + len, 1, 2, numbers);
	SAYS(central_extra(extra, len, &rec), "extra fields in the directory");
}

TEST(records_end_before_the_directory)
{
	const uint64_t dir = roomy.dir_off;
	struct sfr__unzip_record rec = record(0, 0, dir - 30);

	GOOD(central_extra(NULL, 0, &rec));
	rec = record(0, 0, dir - 29);
	SAYS(central_extra(NULL, 0, &rec), "beyond the data");
	rec = record(0, 0, dir);
	SAYS(central_extra(NULL, 0, &rec), "beyond the data");
	rec = record(0, 0, dir + 1);
	SAYS(central_extra(NULL, 0, &rec), "beyond the data");
	rec = record(1000, 1000, dir - 1030);
	GOOD(central_extra(NULL, 0, &rec));
	rec = record(1001, 1001, dir - 1030);
	SAYS(central_extra(NULL, 0, &rec), "beyond the data");
	rec = record(UINT64_MAX, UINT64_MAX, 64);
	SAYS(central_extra(NULL, 0, &rec), "beyond the data");
}

TEST(unusual_records_are_refused)
{
	for (unsigned method = 0; method < 100; method++) {
		struct sfr__unzip_record rec = record(10, 10, 0);
		const char *wrong;

		rec.method = (uint16_t)method;
		wrong = central_extra(NULL, 0, &rec);
		CHECK((wrong == NULL) == (method == 0 || method == 8));
	}
	for (unsigned bit = 0; bit < 16; bit++) {
		struct sfr__unzip_record rec = record(10, 10, 0);
		const char *wrong;

		rec.flags = (uint16_t)(1u << bit);
		wrong = central_extra(NULL, 0, &rec);
		CHECK((wrong == NULL) == (bit == 1 || bit == 2 || bit == 3 || bit == 11));
		if (wrong != NULL)
			SAYS(wrong, "packed in a way");
	}
	for (int method = 0; method <= 8; method += 8) {
		struct sfr__unzip_record rec = record(10, 9, 0);

		rec.method = (uint16_t)method;
		if (method == 0)
			SAYS(central_extra(NULL, 0, &rec), "two sizes in the directory disagree");
		else
			GOOD(central_extra(NULL, 0, &rec));
	}
}

TEST(directory_records_are_valid_only_without_data)
{
	struct sfr__unzip_record rec = record(0, 0, 0);

	rec.name_len = 2;
	GOOD(sfr__unzip_check_name((const unsigned char *)"a/", &rec));
	rec.is_dir = true;
	GOOD(sfr__unzip_check_name((const unsigned char *)"a/", &rec));
	SAYS(sfr__unzip_check_name((const unsigned char *)"ab", &rec), "marked as a directory");
	rec.unpacked_len = 1;
	SAYS(sfr__unzip_check_name((const unsigned char *)"a/", &rec),
	     "directory and yet has data");
	rec.is_dir = false;
	SAYS(sfr__unzip_check_name((const unsigned char *)"a/", &rec),
	     "directory and yet has data");
	SAYS(sfr__unzip_check_name((const unsigned char *)"a\0", &rec), "zero byte");
	GOOD(sfr__unzip_check_name((const unsigned char *)"ab", &rec));
}

/* ---- local header and descriptor --------------------------------------------- */

static const char *local_extra(uint32_t clen32, uint32_t ulen32, const unsigned char *extra,
			       size_t len, const struct sfr__unzip_record *rec)
{
	unsigned char fixed[SFR__UNZIP_LOCAL_LEN] = { 0 }, *exact = malloc(len + (len == 0));
	const char *wrong;

	if (len != 0)
		memcpy(exact, extra, len);
	memcpy(fixed + 18, &clen32, 4);
	memcpy(fixed + 22, &ulen32, 4);
	wrong = sfr__unzip_check_local_extra(fixed, exact, len, rec);
	free(exact);
	return wrong;
}

TEST(zip64_sizes_of_header_and_directory_must_agree)
{
	const uint64_t len = UINT64_C(5) << 32, off = UINT64_C(7) << 32;
	const uint64_t all[4] = { len, len, off, 0 }, none[3] = { 0, 0, 0 }, half[2] = { len, 0 };
	const uint64_t wrong[3] = { len, len + 1, off + 1 };
	struct sfr__unzip_record rec = record(len, len, off);
	unsigned char extra[64] = { 0 };

	/* With a descriptor: both sizes, torch's {size, 0}, the offset alone, all three. */
	GOOD(local_extra(0, 0, extra, 0, &rec));
	GOOD(local_extra(0, 0, extra, field(extra, 1, 2, all), &rec));
	GOOD(local_extra(0, 0, extra, field(extra, 1, 2, half), &rec));
	GOOD(local_extra(0, 0, extra, field(extra, 1, 1, &off), &rec));
	GOOD(local_extra(0, 0, extra, field(extra, 1, 3, all), &rec));
	GOOD(local_extra(0, 0, extra, field(extra, 1, 3, none), &rec));
	SAYS(local_extra(0, 0, extra, field(extra, 1, 2, wrong), &rec), "zip64 sizes in the local");
	SAYS(local_extra(0, 0, extra, field(extra, 1, 3, wrong), &rec), "zip64 sizes in the local");
	SAYS(local_extra(0, 0, extra, field(extra, 1, 1, wrong + 2), &rec), "zip64 sizes in the");
	SAYS(local_extra(0, 0, extra, field(extra, 1, 4, all), &rec), "zip64 sizes in the local");
	SAYS(local_extra(0, 0, extra, field(extra, 1, 0, all), &rec), "zip64 sizes in the local");
	field(extra, 1, 2, all);
	extra[2] = 12;
	SAYS(local_extra(0, 0, extra, 16, &rec), "zip64 sizes in the local");
	SAYS(local_extra(0, 0, extra, 15, &rec), "extra fields in the local header");

	/* 0xffffffff means that the zip64 field must have the number. */
	SAYS(local_extra(UINT32_MAX, 0, extra, 0, &rec), "zip64 sizes in the local");
	SAYS(local_extra(0, UINT32_MAX, extra, 0, &rec), "zip64 sizes in the local");
	SAYS(local_extra(UINT32_MAX, 0, extra, field(extra, 1, 1, &off), &rec),
	     "zip64 sizes in the");
	GOOD(local_extra(UINT32_MAX, UINT32_MAX, extra, field(extra, 1, 2, all), &rec));

	/* Without a descriptor, nothing else has the sizes. */
	rec.flags = 0;
	GOOD(local_extra(UINT32_MAX, UINT32_MAX, extra, field(extra, 1, 2, all), &rec));
	SAYS(local_extra(UINT32_MAX, UINT32_MAX, extra, field(extra, 1, 2, half), &rec),
	     "zip64 sizes in the local");
	rec = record(UINT32_MAX, UINT32_MAX, 0);
	GOOD(local_extra(UINT32_MAX, UINT32_MAX, extra, 0, &rec));
}

static const char *desc(const unsigned char *bytes, size_t len, const struct sfr__unzip_record *rec,
			size_t *desc_len)
{
	unsigned char *exact = malloc(len + (len == 0));
	const char *wrong;

	if (len != 0)
		memcpy(exact, bytes, len);
	wrong = sfr__unzip_check_desc(exact, len, rec, desc_len);
	free(exact);
	return wrong;
}

TEST(data_descriptor_may_have_sizes_of_4_or_8_bytes)
{
	struct archive a = { 0 };
	struct sfr__unzip_record rec = record(7, 7, 0);
	size_t len;

	rec.crc = 0x12345678;
	archive_num(&a, 0x08074b50, 4, 0);
	archive_num(&a, rec.crc, 4, 0);
	archive_num(&a, 7, 4, 0);
	archive_num(&a, 7, 4, 0);
	archive_num(&a, 0, 8, 0);
	GOOD(desc(a.buf, 24, &rec, &len));
	CHECK_EQ(len, 16);
	GOOD(desc(a.buf, 16, &rec, &len));
	CHECK_EQ(len, 16);
	SAYS(desc(a.buf, 15, &rec, &len), "descriptor after its data is missing");
	SAYS(desc(a.buf, 0, &rec, &len), "descriptor after its data is missing");
	archive_poke(&a, 8, 7, 8);
	archive_poke(&a, 16, 7, 8);
	GOOD(desc(a.buf, 24, &rec, &len));
	CHECK_EQ(len, 24);
	SAYS(desc(a.buf, 23, &rec, &len), "sizes in the descriptor");
	archive_poke(&a, 20, 1, 4);
	SAYS(desc(a.buf, 24, &rec, &len), "sizes in the descriptor");
	rec.crc++;
	SAYS(desc(a.buf, 24, &rec, &len), "CRC in the descriptor");
	rec.crc--;
	a.buf[0]++;
	SAYS(desc(a.buf, 24, &rec, &len), "descriptor after its data is missing");
	/* Without its flag, no descriptor is expected. */
	rec.flags = 0;
	GOOD(desc(a.buf, 0, &rec, &len));
	CHECK_EQ(len, 0);
	archive_free(&a);
}
