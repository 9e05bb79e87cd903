/* The choice of sampled cache lines: every source has some, and a write is detected as often as
 * documented. */
#include <string.h>

#include "stage/samples.h"
#include "check.h"

enum { LINE = SFR__SAMPLE_LEN, MOST_ITEMS = SFR__MAX_SAMPLES + 8, RUNS = 200 };

static struct sfr__sample items[MOST_ITEMS];
static const uint64_t sizes[] = { 1,
				  63,
				  64,
				  65,
				  128,
				  640,
				  1000,
				  64 * 1000,
				  64 * 1000 + 1,
				  64 * 1001,
				  (uint64_t)1 << 20,
				  ((uint64_t)5 << 30) + 7 };
enum { NR_SIZES = sizeof(sizes) / sizeof(sizes[0]) };

static const struct sfr__source_to_sample *of(uint32_t entry, uint64_t nbytes)
{
	static struct sfr__source_to_sample source;

	source = (struct sfr__source_to_sample){ .entry = entry, .nbytes = nbytes };
	return &source;
}

static bool holds(uint32_t nr, uint64_t line)
{
	for (uint32_t i = 0; i < nr; i++)
		if (items[i].off / LINE == line)
			return true;
	return false;
}

TEST(every_source_has_its_share_and_one_line_at_least)
{
	const uint64_t most = 1000, large = (uint64_t)1 << 40;

	CHECK_EQ(sfr__samples_share_of_source(0, 0, 0, most), 1);
	CHECK_EQ(sfr__samples_share_of_source(7, 1, 7, most), most);
	CHECK_EQ(sfr__samples_share_of_source(large, 1, large, most), most);
	CHECK_EQ(sfr__samples_share_of_source(100, 4, 400, most), most / 4);
	/* A small source keeps its share of the half that is divided evenly; a large one gets
	 * the other half. */
	CHECK_EQ(sfr__samples_share_of_source(1, 2, large, most), most / 4);
	CHECK_EQ(sfr__samples_share_of_source(large - 1, 2, large, most), most / 4 + most / 2 - 1);
	/* With many sources, half of all samples are still divided by bytes. */
	CHECK_EQ(sfr__samples_share_of_source(large / 2, 400, large, most), 1 + most / 4);
	CHECK_EQ(sfr__samples_share_of_source(1, 400, large, most), 1);
	CHECK_EQ(sfr__samples_share_of_source(large, 500, large, most), 1);
	CHECK_EQ(sfr__samples_share_of_source(large, UINT32_MAX, large, most), 1);
}

/* As many lines as requested, or all there are: ascending, none twice, none beyond the end. */
TEST(sampled_lines_ascend_and_are_within_their_source)
{
	uint64_t random = 1;

	for (unsigned s = 0; s < NR_SIZES; s++)
		for (uint64_t each = 1; each <= SFR__MAX_SAMPLES; each = each * 3 / 2 + 1) {
			uint64_t nr_lines = (sizes[s] + LINE - 1) / LINE, end = 0;
			uint32_t nr =
				sfr__samples_choose_lines(items, of(7, sizes[s]), each, &random);

			CHECK_EQ(nr, each < nr_lines ? each : nr_lines);
			for (uint32_t i = 0; i < nr; i++) {
				CHECK_EQ(items[i].entry, 7);
				CHECK_EQ(items[i].off % LINE, 0);
				CHECK(items[i].off >= end);
				end = items[i].off + items[i].len;
				CHECK(items[i].len > 0 && end <= sizes[s]);
				CHECK(items[i].len == LINE || end == sizes[s]);
			}
		}
	CHECK_EQ(sfr__samples_choose_lines(items, of(0, 0), 9, &random), 0);
}

TEST(single_sample_is_the_middle_line)
{
	uint64_t random = 1;

	CHECK_EQ(sfr__samples_choose_lines(items, of(0, 1000 * LINE), 1, &random), 1);
	CHECK_EQ(items[0].off / LINE, 500);
}

TEST(the_first_and_the_last_line_are_among_two_or_more)
{
	uint64_t random = 1;

	for (uint64_t each = 2; each < 100; each++) {
		uint32_t nr =
			sfr__samples_choose_lines(items, of(0, 1000 * LINE + 8), each, &random);

		CHECK(holds(nr, 0));
		CHECK(holds(nr, 1000));
		CHECK_EQ(items[nr - 1].len, 8);
		CHECK(each % 2 == 0 || holds(nr, 500));
	}
}

/* Over many saves every line is sampled, except the neighbours of the first, the middle and the
 * last. */
TEST(sampled_lines_vary_between_saves)
{
	static bool seen[100];
	uint64_t random = 42;
	int nr_seen = 0;

	for (int run = 0; run < RUNS; run++) {
		uint32_t nr =
			sfr__samples_choose_lines(items, of(0, sizeof(seen) * LINE), 11, &random);

		for (uint32_t i = 0; i < nr; i++)
			seen[items[i].off / LINE] = true;
	}
	for (unsigned i = 0; i < sizeof(seen); i++)
		nr_seen += seen[i];
	CHECK(nr_seen >= 75); /* the strata of those three have 9 lines each */
}

TEST(each_random_line_is_in_its_own_stratum)
{
	uint64_t random = 3;

	for (int run = 0; run < RUNS; run++) {
		CHECK_EQ(sfr__samples_choose_lines(items, of(0, 1000 * LINE), 10, &random), 10);
		for (uint32_t i = 1; i < 9; i++)
			CHECK_EQ(items[i].off / LINE / 100, i);
	}
}

/* The odds of benchmarks/odds.py: a write that touches `part` of a stratum is missed. */
static double missed(double part)
{
	return part <= 1 ? 1 - part + part * part * part / 6 :
			   (2 - part) * (2 - part) * (2 - part) / 6;
}

TEST(a_write_is_noticed_as_often_as_documented)
{
	enum { EACH = 64, STRATUM = 1000, LINES = EACH * STRATUM, TRIALS = 20000 };
	static const uint64_t written[] = { 50, 250, 500, 1000, 1300, 1700, 2000 };
	uint64_t random = 99, written_random = 1;

	for (unsigned w = 0; w < sizeof(written) / sizeof(written[0]); w++) {
		int nr_missed = 0;
		double found, expected;

		for (int trial = 0; trial < TRIALS; trial++) {
			uint32_t nr =
				sfr__samples_choose_lines(items, of(0, (uint64_t)LINES * LINE),
							  EACH, &random);
			uint64_t from;
			bool seen = false;

			/* a random range of lines is written, by a generator of its own */
			written_random =
				written_random * 6364136223846793005u + 1442695040888963407u;
			from = (written_random >> 20) % (LINES - written[w] + 1);
			for (uint32_t i = 0; i < nr && !seen; i++)
				seen = items[i].off / LINE >= from &&
				       items[i].off / LINE < from + written[w];
			if (!seen)
				nr_missed++;
		}
		found = (double)nr_missed / TRIALS;
		expected = missed((double)written[w] / STRATUM);
		CHECK(found > expected - 0.02 && found < expected + 0.02);
		CHECK(written[w] < 2 * STRATUM || nr_missed == 0);
	}
}

/* ---- on a device: rows at equal distances ---- */

TEST(rows_cover_the_first_and_the_last_byte)
{
	uint64_t random = 1, pitch;

	for (unsigned s = 0; s < NR_SIZES; s++)
		for (uint64_t each = 1; each <= 600; each = each * 2 + 1) {
			uint64_t len = sizes[s] < LINE ? sizes[s] : LINE;
			uint32_t nr = sfr__samples_choose_rows_of(items, of(3, sizes[s]), each,
								  &random, &pitch);

			CHECK(nr >= 1 && nr <= sfr__samples_most_rows_of(sizes[s], each));
			for (uint32_t i = 0; i < nr; i++) {
				CHECK_EQ(items[i].entry, 3);
				CHECK_EQ(items[i].len, len);
				CHECK_EQ(items[i].off, items[0].off + i * pitch);
			}
			CHECK(items[nr - 1].off + len <= sizes[s]);
			CHECK(pitch <= (uint64_t)1 << 30);
			if (nr == 1)
				continue;
			CHECK_EQ(items[0].off, 0);
			CHECK(items[nr - 1].off + len + nr >
			      sizes[s]); /* except for the rounding of the pitch */
		}
	CHECK_EQ(sfr__samples_choose_rows_of(items, of(0, 0), 9, &random, &pitch), 0);
	CHECK_EQ(pitch, 0);
}

TEST(there_are_about_as_many_rows_as_asked_for_and_one_in_the_middle)
{
	const uint64_t nbytes = 1000 * LINE;
	uint64_t random = 1, pitch, least = UINT64_MAX, most = 0;

	for (int run = 0; run < RUNS; run++) {
		uint32_t nr =
			sfr__samples_choose_rows_of(items, of(0, nbytes), 100, &random, &pitch);

		CHECK_EQ(nr % 2, 1);
		CHECK(items[nr / 2].off <= nbytes / 2 &&
		      items[nr / 2].off + nr + LINE >= nbytes / 2);
		least = nr < least ? nr : least;
		most = nr > most ? nr : most;
	}
	CHECK(least >= 75 && most <= 100);
	CHECK(most - least >= 10); /* so that their distance changes */
	for (uint64_t each = 3; each < 8; each++)
		CHECK_EQ(sfr__samples_choose_rows_of(items, of(0, nbytes), each, &random, &pitch),
			 each - (each % 2 == 0));
	CHECK_EQ(sfr__samples_choose_rows_of(items, of(0, nbytes), 2, &random, &pitch), 2);
}

TEST(single_sampled_row_may_be_anywhere)
{
	uint64_t random = 1, pitch, least = UINT64_MAX, most = 0;

	for (int run = 0; run < RUNS; run++) {
		CHECK_EQ(sfr__samples_choose_rows_of(items, of(0, 1000), 1, &random, &pitch), 1);
		CHECK_EQ(pitch, 0);
		least = items[0].off < least ? items[0].off : least;
		most = items[0].off > most ? items[0].off : most;
	}
	CHECK(least < 50 && most > 1000 - LINE - 50 && most <= 1000 - LINE);
}
