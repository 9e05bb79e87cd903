/* names.c suspects exactly the names that occur twice, in lists of every length. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "check/names.h"
#include "reader/listing.h"
#include "check.h"

#define MAX 700 /* past two doublings of the list */

static int add(struct sfr__names *names, unsigned number, uint64_t offset)
{
	char name[32];

	(void)snprintf(name, sizeof(name), "archive/data/%u", number);
	return sfr__names_add(names, (unsigned char *)name, strlen(name), offset);
}

/* Tests every length, so that the list is also exactly full; ASAN detects a read beyond its end. */
TEST(different_names_are_not_reported_as_repeated)
{
	for (unsigned nr = 0; nr < MAX; nr++) {
		struct sfr__names names = { 0 };
		uint64_t it = 0, first, second;
		unsigned nr_steps = 0;

		for (unsigned i = 0; i < nr; i++)
			CHECK_EQ(add(&names, i * 7919 % MAX, i), 0);
		while (!sfr__names_continue_sort(&names, nr % 7 + 1))
			CHECK(nr_steps++ < 2 * MAX); /* each step does something */
		CHECK(!sfr__names_next_same_hash(&names, &it, &first, &second));
		for (unsigned i = 1; i < nr; i++)
			CHECK(names.entries[i - 1].hash < names.entries[i].hash);
		sfr__names_fini(&names);
		sfr__names_fini(&names); /* may be called twice */
	}
}

TEST(repeated_names_are_reported_in_file_order)
{
	for (int round = 0; round < 300; round++) {
		unsigned nr = (unsigned)(check_random() % MAX) + 2,
			 range = (unsigned)(check_random() % nr) + 1;
		static uint64_t last[MAX + 2];
		uint64_t expected = 0, found = 0, it = 0, first, second;
		static unsigned number[MAX + 2];
		struct sfr__names names = { 0 };

		memset(last, 0xff, sizeof(last));
		for (unsigned i = 0; i < nr; i++) {
			number[i] = (unsigned)(check_random() % range);
			if (last[number[i]] != UINT64_MAX)
				expected++;
			last[number[i]] = i;
			CHECK_EQ(add(&names, number[i], i), 0);
		}
		CHECK(sfr__names_continue_sort(&names, UINT64_MAX));
		while (sfr__names_next_same_hash(&names, &it, &first, &second)) {
			CHECK(first < second && number[first] == number[second]);
			/* No offset of the same name is between the two. */
			for (uint64_t i = first + 1; i < second; i++)
				CHECK(number[i] != number[first]);
			found++;
		}
		CHECK_EQ(found, expected);
		sfr__names_fini(&names);
	}
}

TEST(failed_allocation_is_reported_and_keeps_the_list)
{
	FOR_EVERY_FAILURE(run, "realloc", ENOMEM)
	{
		struct sfr__names names = { 0 };
		unsigned i = 0;
		int rc = 0;

		while (i < MAX && (rc = add(&names, i, i)) == 0)
			i++;
		CHECK(rc == 0 || (rc == -ENOMEM && check_acted(&run)));
		CHECK_EQ(names.nr, i);
		CHECK(sfr__names_continue_sort(&names, UINT64_MAX));
		sfr__names_fini(&names);
	}
}

/* Tests lists of every length, full and not; ASAN detects a read beyond the end. */
TEST(a_name_is_found_if_it_is_there)
{
	for (unsigned nr = 0; nr < MAX; nr += nr == 255 || nr == 511 ? 1 : 17) {
		struct sfr__names names = { 0 };
		char name[32];

		for (unsigned i = 0; i < nr; i++)
			CHECK_EQ(add(&names, i, i), 0);
		CHECK(sfr__names_continue_sort(&names, UINT64_MAX));
		for (unsigned i = 0; i < nr + 20; i++) {
			uint64_t it = 0, offset = UINT64_MAX;
			int len = snprintf(name, sizeof(name), "archive/data/%u", i);

			CHECK_EQ(sfr__names_find_hash_match(&names, name, (size_t)len, &it,
							    &offset),
				 i < nr);
			if (i < nr)
				CHECK_EQ(offset, i);
			CHECK(!sfr__names_find_hash_match(&names, name, (size_t)len, &it,
							  &offset) ||
			      i < nr);
		}
		sfr__names_fini(&names);
	}
}

TEST(every_added_record_is_found_by_its_offset)
{
	struct sfr__listing listing = { 0 };

	for (unsigned i = 0; i < MAX; i++) {
		const struct sfr__unzip_record rec = { .hdr_off = i, .name_len = 3 };

		CHECK_EQ(sfr__listing_add(&listing, &rec, "abc", 10 * i), 0);
	}
	for (unsigned i = 0; i < MAX; i++) {
		CHECK_EQ(sfr__listing_find(&listing, 10 * i), i);
		CHECK_EQ(listing.records[i].hdr_off, i);
		CHECK_EQ(sfr__listing_find(&listing, 10 * i + 1), MAX);
	}
	sfr__listing_fini(&listing);
	CHECK(listing.records == NULL && listing.names == NULL && listing.nr == 0);
}
