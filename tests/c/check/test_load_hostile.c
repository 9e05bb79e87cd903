/* A check of files that were made to harm it. No file can make it crash, hang, read beyond its
 * memory, or take more memory than the file's length justifies. */
#include <errno.h>

#include "verdict.h"

#define NR_NAMES 2400u

/* ---- hostile --------------------------------------------------------------- */

TEST(files_that_are_no_checkpoints_are_refused)
{
	struct archive a = { .zip64 = false };

	CHECK(strstr(check_bytes("hello, world", 12, 0).error, "not a torch.save file") != NULL);
	CHECK(strstr(check_bytes("\0\0\0", 3, 0).error, "begins with zeros") != NULL);
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
	archive_add(&a, "/data.pkl", ".", 1);
	archive_add(&a, "/version", "3\n", 2);
	archive_finish(&a);
	refuse(&a, "not inside a directory");
	archive_free(&a);
}

TEST(names_that_occur_twice_are_refused)
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

/* Makes a directory of the shortest records, all with one name. Millions of them fit into a file
 * that looks small. */
static struct archive with_names(unsigned nr, void (*name)(unsigned i, char *to))
{
	struct archive a = archive_torch();
	static char names[NR_NAMES][20];

	for (unsigned i = 0; i < nr; i++) {
		name(i, names[i]);
		archive_add(&a, names[i], "", 0);
	}
	archive_finish(&a);
	return a;
}

static void always_the_same(unsigned i, char *to)
{
	(void)i;
	strcpy(to, "archive/data/0");
}

TEST(first_repeated_name_ends_the_comparison)
{
	struct archive a = with_names(NR_NAMES, always_the_same);
	int fd = file_of(a.buf, a.len);
	struct verdict v;
	uint64_t nr_reads;

	sfr_inject_clear();
	v = check_fd(fd, SFR_CHECK_DIRECTORY);
	nr_reads = sfr_inject_count_calls("pread");
	CHECK(v.rc == 0 && !v.ok && strstr(v.error, "occurs twice") != NULL);
	CHECK_EQ(v.nr_bad, 1);
	CHECK(nr_reads < 20); /* not two reads for each pair */
	(void)close(fd);
	archive_free(&a);
}

TEST(a_check_is_interrupted_while_it_sorts_and_compares_names)
{
	struct archive a = with_names(NR_NAMES, always_the_same);
	int fd = file_of(a.buf, a.len);
	struct sfr_check *check;
	unsigned nr_slices = 0;

	CHECK_EQ(sfr_check_new(fd, SFR_CHECK_DIRECTORY, &check), 0);
	while (sfr_check_run(check, 0) == SFR_EAGAIN) /* a slice of zero does one step */
		nr_slices++;
	/* One step for each record and one for its end; the others sort and compare. */
	CHECK(nr_slices > NR_NAMES + 5 + 6);
	sfr_check_free(check);
	(void)close(fd);
	archive_free(&a);
}

TEST(unusual_names_are_refused_and_shown_safely)
{
	struct archive a = archive_torch();
	static char name[1200] = "archive/data/";

	archive_add_name(&a, "archive/a\0b", 11);
	archive_finish(&a);
	refuse(&a, "record archive/a?b: its name holds a zero byte");
	archive_free(&a);

	a = archive_torch();
	archive_add_name(&a, "other/\x1b[31m\n \x7fred", 17);
	archive_finish(&a);
	refuse(&a, "record other/?[31m? ?red: it is not in the same directory");
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

/* Every kind of check refuses it, because the damage is in the directory. */
static void refuse_by_directory(struct archive *a, const char *words)
{
	struct verdict v = check_archive(a, SFR_CHECK_DIRECTORY);

	CHECK(v.rc == 0 && !v.ok && strstr(v.error, words) != NULL);
	refuse(a, words);
}

TEST(overlaps_and_disorder_are_refused)
{
	struct archive a = sample();
	struct archive_record swap = a.records[5];

	/* Two directory records point to one local header. */
	archive_poke(&a, a.records[7].central + 42, a.records[5].hdr_off, 4);
	refuse_by_directory(&a, "record archive/data/2: it overlaps another record");
	archive_free(&a);

	a = sample();
	a.len = a.dir_off;
	a.records[5] = a.records[7];
	a.records[7] = swap;
	archive_finish(&a);
	refuse_by_directory(&a, "out of order");
	archive_free(&a);

	/* A record inside another one's data; each alone is correct. */
	a = sample();
	archive_poke(&a, a.records[0].central + 42, 7, 4);
	refuse_by_directory(
		&a, "record archive/data.pkl: it overlaps another record or is out of order");
	archive_free(&a);
}

TEST(record_beyond_the_data_is_refused)
{
	struct archive a = sample();
	const struct archive_record *last = &a.records[a.nr - 1];

	archive_poke(&a, last->central + 42, a.dir_off - 20, 4); /* half a header before it */
	refuse_by_directory(&a, "it reaches beyond the data of the file");
	archive_free(&a);

	a = sample();
	last = &a.records[a.nr - 1];
	archive_poke(&a, last->central + 42, a.dir_off + 5, 4); /* after it */
	refuse_by_directory(&a, "it reaches beyond the data of the file");
	archive_free(&a);

	a = sample();
	last = &a.records[a.nr - 1];
	archive_poke(&a, last->central + 42, a.dir_off - 30 - last->len - last->name_len + 1, 4);
	CHECK(strstr(check_archive(&a, SFR_CHECK_DIRECTORY).error, "beyond the data") != NULL);
	CHECK(!check_archive(&a, 0).ok);
	archive_free(&a);

	a = sample();
	last = &a.records[a.nr - 1];
	archive_poke(&a, last->central + 20, a.dir_off, 4); /* both lengths */
	archive_poke(&a, last->central + 24, a.dir_off, 4);
	CHECK(strstr(check_archive(&a, SFR_CHECK_DIRECTORY).error, "beyond the data") != NULL);
	CHECK(!check_archive(&a, 0).ok);
	archive_free(&a);
}

TEST(check_of_bytes_and_of_the_directory_alone_exclude_each_other)
{
	struct archive a = sample();

	CHECK_EQ(check_archive(&a, SFR_CHECK_BYTES | SFR_CHECK_DIRECTORY).rc, -EINVAL);
	archive_free(&a);
}

/* Returns where a structure begins: the e(nd record), z(ip64 end record), zip64 l(ocator), or the
 * c(entral entry), h(eader) or d(escriptor) of record `r`. */
static size_t structure_at(const struct archive *a, const struct archive_record *r, char which)
{
	switch (which) {
	case 'e':
		return a->end;
	case 'z':
		return a->end64;
	case 'l':
		return a->locator;
	case 'c':
		return r->central;
	case 'h':
		return r->hdr_off;
	default:
		return r->data_off + r->len;
	}
}

TEST(impossible_numbers_are_refused)
{
	static const uint64_t values[] = { 0,
					   1,
					   0x7fff,
					   0xffff,
					   0x10000,
					   0x7fffffff,
					   0x80000000,
					   0xfffffffe,
					   0xffffffff,
					   UINT64_C(1) << 32,
					   UINT64_C(0x7fffffffffffffff),
					   UINT64_C(0x8000000000000000),
					   UINT64_MAX - 97,
					   UINT64_MAX - 1,
					   UINT64_MAX };
	/* The offset of each number in its record, and its length in bytes. */
	static const struct {
		char where; /* as in structure_at */
		unsigned char off, len;
	} fields[] = {
		{ 'e', 4, 2 },  { 'e', 6, 2 },  { 'e', 8, 2 },  { 'e', 10, 2 }, { 'e', 12, 4 },
		{ 'e', 16, 4 }, { 'e', 20, 2 }, { 'l', 4, 4 },  { 'l', 8, 8 },  { 'l', 16, 4 },
		{ 'z', 4, 8 },  { 'z', 16, 4 }, { 'z', 20, 4 }, { 'z', 24, 8 }, { 'z', 32, 8 },
		{ 'z', 40, 8 }, { 'z', 48, 8 }, { 'c', 8, 2 },  { 'c', 10, 2 }, { 'c', 16, 4 },
		{ 'c', 20, 4 }, { 'c', 24, 4 }, { 'c', 28, 2 }, { 'c', 30, 2 }, { 'c', 32, 2 },
		{ 'c', 34, 2 }, { 'c', 42, 4 }, { 'h', 6, 2 },  { 'h', 8, 2 },  { 'h', 14, 4 },
		{ 'h', 18, 4 }, { 'h', 22, 4 }, { 'h', 26, 2 }, { 'h', 28, 2 }, { 'd', 4, 4 },
		{ 'd', 8, 4 },  { 'd', 12, 4 },
	};

	for (size_t f = 0; f < sizeof(fields) / sizeof(fields[0]); f++)
		for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
			struct archive a = sample();
			const struct archive_record *r = &a.records[7];
			size_t at = structure_at(&a, r, fields[f].where) + fields[f].off;
			unsigned char was[8], now[8];
			struct verdict v;

			memcpy(was, a.buf + at, fields[f].len);
			archive_poke(&a, at, values[i], fields[f].len);
			memcpy(now, a.buf + at, fields[f].len);
			v = check_archive(&a, SFR_CHECK_BYTES);
			if (v.ok) /* a check of the directory alone never finds more */
				CHECK(check_archive(&a, SFR_CHECK_DIRECTORY).ok);
			/* 0xffff... in the old end record leaves the number to zip64. Zeros in
			 * the local header leave it to the descriptor; 0xffffffff there leaves
			 * it to nothing. */
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

TEST(a_directory_that_is_too_short_or_too_long_is_refused)
{
	struct archive a = sample();
	size_t last;

	/* One record more than the file has. */
	*archive_record(&a) = a.records[0];
	a.len = a.dir_off;
	archive_finish(&a);
	last = a.records[a.nr - 1].central;
	archive_poke(&a, last + 32, 1, 2); /* its comment would be one byte of the end record */
	refuse(&a, "its directory ends in the middle of a record");
	archive_free(&a);

	a = sample();
	archive_poke(&a, a.end64 + 24, 10, 8);
	archive_poke(&a, a.end64 + 32, 10, 8);
	archive_poke(&a, a.end + 8, 0x000a000a, 4);
	refuse(&a, "its directory ends in the middle of a record");
	archive_poke(&a, a.end64 + 24, 8, 8);
	archive_poke(&a, a.end64 + 32, 8, 8);
	archive_poke(&a, a.end + 8, 0x00080008, 4);
	refuse(&a, "its directory is longer than its records");
	archive_poke(&a, a.end64 + 24, 9, 8);
	archive_poke(&a, a.end64 + 32, 9, 8);
	archive_poke(&a, a.end + 8, 0x00090009, 4);
	accept(&a, 9);

	/* A local header that extends into the directory. */
	archive_poke(&a, a.records[8].hdr_off + 28, 0xff00, 2);
	refuse(&a, "record archive/.data/serialization_id: it reaches beyond the data of the file");
	archive_free(&a);
}

/* Count and limit what a check requests from the system. */
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

/* Returns what a damaged byte becomes, in one of four ways. */
static unsigned char damage(uint64_t how, unsigned char copied)
{
	if (how == 0)
		return 0xff;
	if (how == 1)
		return 0;
	return how == 2 ? (unsigned char)check_random() : copied;
}

TEST(memory_for_a_damaged_file_is_bounded_by_its_length)
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
		for (uint64_t i = check_random() % 6 + 1; i != 0; i--) {
			size_t at = check_random() % 3 != 0 ?
					    a.dir_off + check_random() % (a.len - a.dir_off) :
					    check_random() % a.len;
			size_t run = check_random() % 8 + 1, from = check_random() % a.len;
			uint64_t how = check_random() % 4;

			for (size_t k = 0; k < run && at + k < a.len; k++)
				bytes[at + k] = damage(how, a.buf[(from + k) % a.len]);
		}
		if (check_random() % 8 == 0)
			len = check_random() % a.len;
		nr_preads = most_memory = held_memory = 0;
		v = check_bytes(bytes, len, (unsigned)(check_random() % 2));
		CHECK_EQ(v.rc, 0);
		CHECK(nr_preads < 100);
		CHECK(most_memory < (2u << 20));
		if (v.ok)
			nr_ok++;
	}
	sfr_sys = plain;
	/* Most changes damage something. If all or none did, the test would test nothing. */
	CHECK(nr_ok > 0 && nr_ok < 10000);
	(void)printf(" (%zu of 20000 hit nothing)", nr_ok);
	free(bytes);
	archive_free(&a);
}

TEST(huge_sparse_file_costs_no_memory)
{
	const struct sfr_sys plain = sfr_sys;
	const uint64_t size = UINT64_C(1) << 42;
	struct archive a = { .zip64 = true };
	struct verdict v;
	int fd;

	/* A hole of 4 TiB, all of it claimed as a directory with as many records as fit. */
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
