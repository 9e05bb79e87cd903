/* crc.c: every way to compute a CRC-32 agrees with division bit by bit, and with zlib if its
 * library is loaded. Lengths and alignments surround every width that the ways work in. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "base/crc.h"
#include "sfr.h"
#include "check.h"

static void fill(unsigned char *p, size_t len)
{
	for (size_t i = 0; i < len; i++)
		p[i] = (unsigned char)check_random();
}

/* Polynomial division as in a textbook. */
static uint32_t by_bits(uint32_t crc, const unsigned char *p, size_t len)
{
	crc = ~crc;
	for (size_t i = 0; i < len; i++) {
		crc ^= p[i];
		for (int bit = 0; bit < 8; bit++)
			crc = crc >> 1 ^ ((crc & 1) != 0 ? 0xedb88320u : 0);
	}
	return ~crc;
}

TEST(known_messages_have_their_known_crc)
{
	static const struct {
		const char *text;
		uint32_t crc;
	} known[] = {
		{ "", 0x00000000 },
		{ "a", 0xe8b7be43 },
		{ "123456789", 0xcbf43926 }, /* the check value of every CRC catalogue */
		{ "little", 0x19e33d85 },    /* torch writes it for the record byteorder */
		{ "3\n", 0x55679ed1 },       /* and for version */
		{ "The quick brown fox jumps over the lazy dog", 0x414fa339 },
	};
	const struct sfr__crc_impl *impl;

	for (size_t n = 0; (impl = sfr__crc_impl(n)) != NULL; n++)
		for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
			CHECK_EQ(impl->crc32(0, known[i].text, strlen(known[i].text)),
				 known[i].crc);
}

TEST(the_portable_implementation_is_the_first)
{
	const struct sfr__crc_impl *impl = sfr__crc_impl(0);
	size_t n = 1;

	if (!CHECK(impl != NULL))
		return;
	CHECK(impl->crc32 == sfr_crc32_portable);
	while (sfr__crc_impl(n) != NULL)
		impl = sfr__crc_impl(n++);
	CHECK(sfr__crc_impl(n + 1) == NULL && sfr__crc_impl(SIZE_MAX) == NULL);
	(void)printf(" (%zu ways, best %s)", n, impl->name);
}

TEST(every_implementation_gives_the_same_crc_at_every_length_and_alignment)
{
	/* The memory is exactly as long as the data, so that ASAN detects a read beyond it. */
	for (size_t len = 0; len <= 1400; len += len < 300 ? 1 : 1 + check_random() % 7) {
		for (size_t align = 0; align < 64;
		     align += len < 80 ? 1 : 1 + check_random() % 31) {
			unsigned char *mem = malloc(align + len + 1);
			uint32_t start = (uint32_t)check_random(), want;
			const struct sfr__crc_impl *impl;

			if (!CHECK(mem != NULL))
				return;
			fill(mem, align + len);
			want = by_bits(start, mem + align, len);
			mem = realloc(mem, align + len + (align + len == 0));
			for (size_t n = 0; (impl = sfr__crc_impl(n)) != NULL; n++)
				CHECK_EQ(impl->crc32(start, mem + align, len), want);
			CHECK_EQ(sfr_crc32(start, mem + align, len), want);
			free(mem);
		}
	}
}

/* The copy has the same bytes and CRC, and nothing is written before or after it; aligned or
 * not. */
TEST(every_implementation_copies_the_bytes_it_sums)
{
	for (size_t len = 0; len <= 6000;
	     len += len < 700 ? 1 + check_random() % 5 : 1 + check_random() % 97) {
		size_t off = len % 3 == 0 ? 0 : check_random() % 70,
		       align = len % 2 == 0 ? 0 : check_random() % 64;
		unsigned char *src = malloc(off + len + 1), *mem = NULL;
		uint32_t start = (uint32_t)check_random();
		const struct sfr__crc_impl *impl;

		if (!CHECK(src && posix_memalign((void **)&mem, 64, align + len + 128) == 0))
			return;
		fill(src, off + len);
		for (size_t n = 0; (impl = sfr__crc_impl(n)) != NULL; n++) {
			memset(mem, 0xa5, align + len + 128);
			CHECK_EQ(impl->copy(start, mem + align, src + off, len),
				 by_bits(start, src + off, len));
			CHECK(memcmp(mem + align, src + off, len) == 0);
			for (size_t i = 0; i < align; i++)
				CHECK_EQ(mem[i], 0xa5);
			for (size_t i = align + len; i < align + len + 128; i++)
				CHECK_EQ(mem[i], 0xa5);
		}
		free(src);
		free(mem);
	}
}

/* Some ways copy in chunks of 256 KiB. */
TEST(every_implementation_copies_more_than_one_chunk)
{
	enum { CHUNK = 256 << 10 };
	static const size_t lens[] = { CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 77 };
	static unsigned char src[3 * CHUNK], dst[3 * CHUNK];
	const struct sfr__crc_impl *impl;

	fill(src, sizeof(src));
	for (size_t n = 0; (impl = sfr__crc_impl(n)) != NULL; n++)
		for (size_t i = 0; i < sizeof(lens) / sizeof(lens[0]); i++) {
			memset(dst, 0xa5, sizeof(dst));
			CHECK_EQ(impl->copy(7, dst, src, lens[i]), impl->crc32(7, src, lens[i]));
			CHECK(memcmp(dst, src, lens[i]) == 0);
			CHECK_EQ(dst[lens[i]], 0xa5);
		}
}

TEST(streaming_copy_writes_only_its_bytes)
{
	for (size_t len = 0; len <= 20000; len += 1 + check_random() % (len < 5000 ? 40 : 900)) {
		size_t off = check_random() % 70, align = len % 2 == 0 ? 0 : check_random() % 64;
		unsigned char *src = malloc(off + len + 1), *mem = malloc(align + len + 128);

		if (!CHECK(src && mem))
			return;
		fill(src, off + len);
		memset(mem, 0xa5, align + len + 128);
		sfr__copy_bypassing_caches(mem + align, src + off, len);
		CHECK(memcmp(mem + align, src + off, len) == 0);
		for (size_t i = 0; i < align; i++)
			CHECK_EQ(mem[i], 0xa5);
		for (size_t i = align + len; i < align + len + 128; i++)
			CHECK_EQ(mem[i], 0xa5);
		free(src);
		free(mem);
	}
}

/* Random data of one length may not detect a wrong folding constant. A single set bit does,
 * because its CRC is one power of x. */
TEST(crc_of_a_single_bit_is_its_power_of_x)
{
	enum { LEN = 1024 };
	unsigned char buf[LEN];
	const struct sfr__crc_impl *impl;

	memset(buf, 0, sizeof(buf));
	for (size_t bit = 0; bit < 8 * LEN; bit += 3) {
		uint32_t want;

		buf[bit / 8] = (unsigned char)(1u << bit % 8);
		want = by_bits(0, buf, LEN);
		for (size_t n = 0; (impl = sfr__crc_impl(n)) != NULL; n++)
			CHECK_EQ(impl->crc32(0, buf, LEN), want);
		buf[bit / 8] = 0;
	}
}

TEST(combined_crcs_of_any_split_equal_the_whole)
{
	enum { LEN = 200 * 1000 };
	unsigned char *buf = malloc(LEN);

	if (!CHECK(buf != NULL))
		return;
	fill(buf, LEN);
	for (int round = 0; round < 200; round++) {
		size_t from = check_random() % 5000, to = from + check_random() % (LEN - from);
		uint32_t whole = sfr_crc32_portable(0, buf + from, to - from);
		uint32_t chained = 0, combined = 0;

		for (size_t at = from; at < to;) {
			size_t len = check_random() % (round % 2 == 0 ? 700 : 40000);

			if (len > to - at)
				len = to - at;
			chained = sfr_crc32(chained, buf + at, len);
			combined = sfr_crc32_combine(combined, sfr_crc32(0, buf + at, len), len);
			at += len;
		}
		CHECK_EQ(chained, whole);
		CHECK_EQ(combined, whole);
	}
	free(buf);
}

TEST(combining_with_an_empty_message_changes_nothing)
{
	for (int round = 0; round < 100; round++) {
		uint32_t crc = (uint32_t)check_random();

		CHECK_EQ(sfr_crc32_combine(crc, 0, 0), crc);
		CHECK_EQ(sfr_crc32_combine(0, crc, check_random()), crc);
	}
}

/* Lengths that no test can write: a run of 2^n zeros is the sum of two halves, up to the longest
 * run. */
TEST(combined_crc_is_right_for_lengths_up_to_64_bits)
{
	static const unsigned char zero;
	uint32_t run = sfr_crc32(0, &zero, 1);
	uint32_t head = sfr_crc32(0, "head", 4);

	for (int n = 0; n < 63; n++) {
		uint32_t half = run;
		uint64_t len = UINT64_C(1) << n;

		run = sfr_crc32_combine(half, half, len);
		/* (head + half) + half is head + (half + half). */
		CHECK_EQ(sfr_crc32_combine(sfr_crc32_combine(head, half, len), half, len),
			 sfr_crc32_combine(head, run, 2 * len));
	}
}

TEST(combined_crc_is_right_past_4_gib)
{
	/* Computed by Python's zlib: "head", 5 GiB of zeros, three more zeros. */
	const uint64_t len = UINT64_C(5) << 30;
	const uint32_t zeros = 0x193838c3;
	uint32_t long_crc = sfr_crc32_combine(sfr_crc32(0, "head", 4), zeros, len);

	CHECK_EQ(long_crc, 0x51a3f275);
	CHECK_EQ(sfr_crc32(long_crc, "\0\0\0", 3), 0xc42e0295);
	CHECK_EQ(sfr_crc32_combine(sfr_crc32(0, "head", 4), sfr_crc32(zeros, "\0\0\0", 3), len + 3),
		 0xc42e0295);
}

/* Compares with zlib's own functions, from the library that Python has usually loaded. */
TEST(crc_equals_zlibs)
{
	enum { LEN = 1 << 20 };
	unsigned long (*theirs)(unsigned long, const unsigned char *, unsigned) = NULL;
	void *zlib = dlopen("libz.so.1", RTLD_NOW | RTLD_LOCAL);
	void *found = zlib ? dlsym(zlib, "crc32") : NULL;
	unsigned char *buf;

	if (!found) {
		check_skip("no libz.so.1");
		return;
	}
	memcpy(&theirs, &found, sizeof(theirs));
	buf = malloc(LEN + 64);
	if (!CHECK(buf != NULL))
		return;
	fill(buf, LEN + 64);
	for (int round = 0; round < 100; round++) {
		size_t from = check_random() % 64, len = check_random() % LEN,
		       cut = len == 0 ? 0 : check_random() % len;
		uint32_t want = (uint32_t)theirs(0, buf + from, (unsigned)len);
		uint32_t a = (uint32_t)theirs(0, buf + from, (unsigned)cut);
		uint32_t b = (uint32_t)theirs(0, buf + from + cut, (unsigned)(len - cut));
		const struct sfr__crc_impl *impl;

		for (size_t n = 0; (impl = sfr__crc_impl(n)) != NULL; n++)
			CHECK_EQ(impl->crc32(0, buf + from, len), want);
		CHECK_EQ(sfr_crc32_combine(a, b, len - cut), want);
	}
	free(buf);
	(void)dlclose(zlib);
}
