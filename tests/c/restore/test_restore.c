/* A restore: every record's bytes reach their destination, or the record is not called good. */
#include <errno.h>

#include "restore/open.h"

#define PIECE SFR__READER_CHUNK_MAX

/* The result of a restore of a file: the code that ended it, and the records. */
struct restored {
	int rc;
	uint64_t nr, failed_off;
	const char *reason;
	char **mem;
	uint64_t *len;
};

static void forget(struct restored *found)
{
	for (uint64_t i = 0; i < found->nr && found->mem != NULL; i++)
		free(found->mem[i]);
	free(found->mem);
	free(found->len);
}

/* Gives records their memory `step` at a time, and waits for each as soon as it can be read. A
 * record that is read before it has memory goes nowhere. */
static void read_all(struct sfr_restore *r, struct restored *found, uint64_t step)
{
	uint64_t upto = 0;

	for (uint64_t i = 0; i < found->nr && found->rc == 0; i++) {
		uint64_t need = sfr_reader_count_records_to_allow(r->reader, i);

		CHECK(need > i && need <= found->nr);
		if (need > upto) {
			need = need + step < found->nr ? need + step : found->nr;
			for (; upto < need; upto++)
				sfr_restore_set_destination(r, upto, found->mem[upto]);
			found->rc = sfr_reader_allow_records(r->reader, upto);
		}
		if (found->rc == 0)
			found->rc = sfr_reader_wait(r->reader, i, SFR_FOREVER);
	}
	if (found->rc == 0)
		found->rc = sfr_reader_wait(r->reader, found->nr, SFR_FOREVER);
}

static struct restored restore_fd(int fd, unsigned flags, uint64_t step)
{
	struct restored found = { 0 };
	struct sfr_restore *r = open_restore(fd, flags, &found.rc);

	if (r == NULL)
		return found;
	found.nr = sfr_restore_nr_records(r);
	found.mem = calloc(found.nr, sizeof(*found.mem));
	found.len = calloc(found.nr, sizeof(*found.len));
	for (uint64_t i = 0; i < found.nr; i++) {
		found.len[i] = sfr_restore_nbytes(r, i);
		found.mem[i] = malloc(found.len[i] + 1); /* ASAN detects one byte too many */
	}
	read_all(r, &found, step);
	found.failed_off = sfr_reader_failure(r->reader)->off;
	found.reason = sfr_reader_failure(r->reader)->reason;
	sfr_restore_free(r);
	return found;
}

/* Checks that the bytes of good records equal the archive's. */
static void compare(const struct restored *found, const struct archive *a)
{
	CHECK_EQ(found->nr, a->nr);
	for (size_t i = 0; i < a->nr && i < found->nr; i++) {
		CHECK_EQ(found->len[i], a->records[i].len);
		CHECK(memcmp(found->mem[i], a->buf + a->records[i].data_off, found->len[i]) == 0);
	}
}

/* Makes records of all lengths around pages and chunks, with gaps between some. */
static struct archive large(void)
{
	static const size_t lens[] = {
		0,     1,         4095,      4096,          100, 3 * PIECE + 17,
		PIECE, PIECE - 1, 2 * PIECE, PIECE / 2 + 3, 64,  777777
	};
	static char names[12][24];
	struct archive a = archive_torch();
	unsigned char *data = malloc(4 * PIECE);

	for (size_t i = 0; i < 4 * PIECE; i++)
		data[i] = (unsigned char)check_random();
	for (size_t i = 0; i < sizeof(lens) / sizeof(lens[0]); i++) {
		(void)snprintf(names[i], sizeof(names[i]), "archive/data/%zu", i);
		archive_add(&a, names[i], data + i, lens[i]);
		if (i % 3 == 0)
			archive_gap(&a, 5 * i);
	}
	a.align = 0; /* the last record, as in stillframe's files */
	archive_add(&a, "archive/.data/serialization_id", data, 40);
	archive_finish(&a);
	free(data);
	return a;
}

/* Makes an archive with another alignment. A header crosses the end of the first chunk. The data
 * of its record end `left` bytes before the end of the second chunk, which the descriptor
 * crosses. */
static struct archive crossing(size_t left)
{
	struct archive a = { .described = true, .zip64 = true, .align = 4096 };
	unsigned char *data = malloc(PIECE);

	for (size_t i = 0; i < PIECE; i++)
		data[i] = (unsigned char)check_random();
	archive_add(&a, "archive/data.pkl", "\x80\x02}q\x00.", 6);
	archive_add(&a, "archive/.storage_alignment", "4096", 4);
	archive_add(&a, "archive/version", "3\n", 2);
	archive_gap(&a, PIECE - 10 - a.len);
	archive_add(&a, "archive/data/0", data, 100);
	archive_add(&a, "archive/data/1", data, PIECE - 2 * 4096 - left);
	CHECK_EQ(a.records[4].data_off + a.records[4].len, 2 * PIECE - left);
	archive_add(&a, "archive/data/2", data, 7);
	archive_finish(&a);
	free(data);
	return a;
}

TEST(every_record_reaches_its_destination)
{
	struct archive archives[] = { sample(), large(), crossing(5) };

	for (size_t k = 0; k < sizeof(archives) / sizeof(archives[0]); k++) {
		int fd = file_of(archives[k].buf, archives[k].len);

		for (unsigned flags = 0; flags <= SFR_RESTORE_VERIFY; flags++)
			for (uint64_t step = 0; step < 20; step += 3) {
				struct restored found = restore_fd(fd, flags, step);

				CHECK_EQ(found.rc, 0);
				compare(&found, &archives[k]);
				forget(&found);
			}
		(void)close(fd);
		archive_free(&archives[k]);
	}
}

/* Fills new memory with a value that no record has, to detect bytes that were never written,
 * such as the one after a chunk. */
static void *filled_malloc(size_t len)
{
	void *mem = malloc(len);

	return mem ? memset(mem, 0xa5, len) : NULL;
}

TEST(descriptor_may_cross_the_end_of_a_chunk_anywhere)
{
	const struct sfr_sys plain = sfr_sys;

	sfr_sys.malloc = filled_malloc;
	for (size_t left = 0; left <= 17; left++) {
		struct archive a = crossing(left);
		int fd = file_of(a.buf, a.len);
		struct restored found = restore_fd(fd, SFR_RESTORE_VERIFY, 20);

		CHECK_EQ(found.rc, 0);
		compare(&found, &a);
		forget(&found);
		(void)close(fd);
		archive_free(&a);
	}
	sfr_sys = plain;
}

TEST(every_flipped_bit_is_found_or_changes_no_record)
{
	struct archive a = sample();
	int fd = file_of(a.buf, a.len);
	size_t nr_found = 0;

	for (size_t at = 0; at < a.len; at++) {
		const unsigned char flipped = a.buf[at] ^ (unsigned char)(1u << at % 8);
		struct restored found;

		CHECK_EQ(pwrite(fd, &flipped, 1, (off_t)at), 1);
		found = restore_fd(fd, SFR_RESTORE_VERIFY, 0);
		if (found.rc == 0)
			compare(&found, &a);
		else
			nr_found++;
		/* A check and a restore accept the same files. */
		CHECK((found.rc == 0) == (check_fd(fd, SFR_CHECK_BYTES).ok));
		forget(&found);
		CHECK_EQ(pwrite(fd, a.buf + at, 1, (off_t)at), 1);
	}
	CHECK(nr_found > a.len / 3);
	(void)close(fd);
	archive_free(&a);
}

TEST(damaged_record_is_reported_with_name_and_offset)
{
	struct archive a = large();
	struct restored found;
	int fd;

	a.buf[a.records[10].data_off + 2 * PIECE] ^= 1;
	fd = file_of(a.buf, a.len);
	found = restore_fd(fd, SFR_RESTORE_VERIFY, 0);
	CHECK_EQ(found.rc, SFR_ECORRUPT);
	CHECK_EQ(found.failed_off, a.records[10].data_off);
	CHECK(strcmp(found.reason, "its bytes do not match their CRC") == 0);
	forget(&found);
	found = restore_fd(fd, 0, 0); /* CRCs are not compared */
	CHECK_EQ(found.rc, 0);
	forget(&found);
	(void)close(fd);
	archive_free(&a);
}

/* With gaps, the data fit at the computed offsets; only the headers show the real ones. */
TEST(archive_of_another_program_is_not_reported_as_damaged)
{
	for (size_t gap = 0; gap <= 100; gap += 100) {
		struct archive a = { .zip64 = true }; /* no alignment, as zip -0 writes it */
		struct restored found;
		int fd;

		archive_add(&a, "archive/data.pkl", "\x80\x02}q\x00.", 6);
		archive_gap(&a, gap);
		archive_add(&a, "archive/version", "3\n", 2);
		archive_gap(&a, gap);
		archive_add(&a, "archive/data/0", "abcdefgh", 8);
		archive_gap(&a, gap);
		archive_add(&a, "archive/data/1", "abcdefgh", 8);
		archive_finish(&a);
		accept(&a, 4);
		fd = file_of(a.buf, a.len);
		found = restore_fd(fd, SFR_RESTORE_VERIFY, 0);
		CHECK_EQ(found.rc, -EOPNOTSUPP);
		forget(&found);
		(void)close(fd);
		archive_free(&a);
	}
}

/* According to its header, the record extends into the directory. The load is refused at once. */
TEST(a_record_without_room_for_its_bytes_is_refused_at_once)
{
	for (uint64_t room = 0; room < 40; room += 39) {
		struct archive a = sample();
		const struct archive_record *last = &a.records[a.nr - 1];
		size_t extra = a.dir_off - room - last->hdr_off - 30 - last->name_len;
		int fd, rc;

		CHECK_EQ(last->len, 40);
		archive_poke(&a, last->hdr_off + 28, room != 0 ? extra : extra + 1, 2);
		fd = file_of(a.buf, a.len);
		CHECK(open_restore(fd, SFR_RESTORE_VERIFY, &rc) == NULL);
		CHECK_EQ(rc, -EOPNOTSUPP);
		(void)close(fd);
		archive_free(&a);
	}
}

TEST(gaps_between_records_are_not_read)
{
	enum { GAP = 64 * PIECE };
	struct archive a = archive_torch();
	struct restored found;
	uint64_t nr_reads;
	int fd;

	archive_add(&a, "archive/data/0", "abcdefgh", 8);
	archive_gap(&a, GAP - a.len);
	archive_add(&a, "archive/data/1", "ijklmnop", 8);
	archive_gap(&a, 3 * PIECE + 1); /* and nothing after the last one */
	archive_finish(&a);
	fd = file_of(a.buf, a.len);
	(void)sfr_inject_install();
	sfr_inject_clear();
	found = restore_fd(fd, SFR_RESTORE_VERIFY, 0);
	nr_reads = sfr_inject_count_calls("pread");
	CHECK_EQ(found.rc, 0);
	compare(&found, &a);
	CHECK(nr_reads < 16);
	forget(&found);
	(void)close(fd);
	archive_free(&a);
}

TEST(file_that_shrinks_during_a_load_is_detected)
{
	struct archive a = large();
	int fd = file_of(a.buf, a.len), rc;
	struct sfr_restore *r = open_restore(fd, SFR_RESTORE_VERIFY, &rc);

	CHECK_EQ(ftruncate(fd, (off_t)a.records[10].data_off + 5), 0);
	CHECK_EQ(sfr_reader_allow_records(r->reader, sfr_restore_nr_records(r)), 0);
	CHECK_EQ(sfr_reader_wait(r->reader, sfr_restore_nr_records(r), SFR_FOREVER), SFR_ECORRUPT);
	CHECK(strstr(sfr_reader_failure(r->reader)->reason, "shorter") != NULL);
	sfr_restore_free(r);
	(void)close(fd);
	archive_free(&a);
}

/* Whatever call fails: missing bytes are an error, and bytes that are there are right. */
TEST(failing_calls_never_make_a_restore_return_wrong_bytes)
{
	static const struct {
		const char *call;
		int err;
	} faults[] = { { "pread", EIO },           { "malloc", ENOMEM },  { "calloc", ENOMEM },
		       { "realloc", ENOMEM },      { "open", EINVAL },    { "fstat", EIO },
		       { "mmap", ENOMEM },         { "mincore", ENOSYS }, { "madvise", EINVAL },
		       { "thread_create", EAGAIN } };
	struct archive a = large();
	char path[] = "/tmp/sfr-restore-XXXXXX"; /* possibly a file system with O_DIRECT */
	int fd = mkstemp(path);

	CHECK(fd >= 0 && write(fd, a.buf, a.len) == (ssize_t)a.len);
	for (size_t k = 0; k < sizeof(faults) / sizeof(faults[0]); k++) {
		FOR_EVERY_FAILURE(run, faults[k].call, faults[k].err)
		{
			struct restored found = restore_fd(fd, SFR_RESTORE_VERIFY, 0);

			CHECK(found.rc == 0 || check_acted(&run));
			if (found.rc == 0)
				compare(&found, &a);
			else
				CHECK_EQ(found.rc, -faults[k].err);
			forget(&found);
		}
	}
	(void)close(fd);
	(void)unlink(path);
	archive_free(&a);
}

/* mmap and munmap would wait for threads that fill new memory, and delay them. */
TEST(reading_records_makes_no_mapping)
{
	struct archive a = large();
	char path[] = "/tmp/sfr-restore-XXXXXX"; /* possibly a file system with O_DIRECT */
	int fd = mkstemp(path), rc;
	uint64_t nr_maps;
	struct sfr_restore *r;

	CHECK(fd >= 0 && write(fd, a.buf, a.len) == (ssize_t)a.len);
	(void)sfr_inject_install();
	sfr_inject_clear();
	r = open_restore(fd, SFR_RESTORE_VERIFY, &rc);
	nr_maps = sfr_inject_count_calls("mmap");
	CHECK(nr_maps <= 1);
	CHECK_EQ(sfr_reader_allow_records(r->reader, sfr_restore_nr_records(r)), 0);
	CHECK_EQ(sfr_reader_wait(r->reader, sfr_restore_nr_records(r), SFR_FOREVER), 0);
	CHECK_EQ(sfr_inject_count_calls("mmap"), nr_maps);
	CHECK_EQ(sfr_inject_count_calls("munmap"), 0);
	sfr_restore_free(r);
	CHECK_EQ(sfr_inject_count_calls("munmap"), nr_maps);
	(void)close(fd);
	(void)unlink(path);
	archive_free(&a);
}

TEST(readers_stop_when_everything_is_read)
{
	struct archive a = large();
	int fd = file_of(a.buf, a.len), rc;
	struct sfr_restore *r = open_restore(fd, SFR_RESTORE_VERIFY, &rc);
	bool over = false;

	CHECK_EQ(sfr_reader_allow_records(r->reader, sfr_restore_nr_records(r)), 0);
	CHECK_EQ(sfr_reader_wait(r->reader, sfr_restore_nr_records(r), SFR_FOREVER), 0);
	for (int ms = 0; !over && ms < 10000; ms++) {
		(void)usleep(1000);
		sfr__lock(&r->reader->mu);
		over = r->reader->next_rec == r->reader->nr;
		sfr__unlock(&r->reader->mu);
	}
	CHECK(over);
	sfr_restore_free(r);
	(void)close(fd);
	archive_free(&a);
}

TEST(restore_can_be_freed_at_any_moment)
{
	struct archive a = large();
	int fd = file_of(a.buf, a.len), rc;

	for (uint64_t upto = 0; upto <= a.nr; upto++) {
		struct sfr_restore *r = open_restore(fd, SFR_RESTORE_VERIFY, &rc);

		CHECK_EQ(sfr_reader_allow_records(r->reader, upto), 0);
		if (upto % 2 == 0)
			(void)sfr_reader_wait(r->reader, upto / 2, upto * 1000);
		sfr_restore_free(r);
	}
	(void)close(fd);
	archive_free(&a);
}

TEST(records_are_found_by_name)
{
	struct archive a = large();
	int fd = file_of(a.buf, a.len), rc;
	struct sfr_restore *r = open_restore(fd, 0, &rc);
	size_t len;

	CHECK_EQ(sfr_restore_find(r, "data/7", 6), 12);
	CHECK_EQ(sfr_restore_find(r, "data.pkl", 8), 0);
	CHECK_EQ(sfr_restore_find(r, "data/99", 7), sfr_restore_nr_records(r));
	CHECK_EQ(sfr_restore_find(r, "", 0), sfr_restore_nr_records(r));
	CHECK(memcmp(sfr_restore_name(r, 12, &len), "data/7", 6) == 0 && len == 6);
	sfr_restore_free(r);
	(void)close(fd);
	archive_free(&a);
}

TEST(longest_possible_name_is_found)
{
	enum { PREFIX = sizeof("archive/") - 1, MOST = SFR__UNZIP_NAME_MAX };
	static char name[MOST + 2] = "archive/";
	struct archive a = archive_torch();
	struct sfr_restore *r;
	int fd, rc;

	memset(name + PREFIX, 'n', MOST + 1 - PREFIX);
	archive_add_name(&a, name, MOST);
	archive_finish(&a);
	fd = file_of(a.buf, a.len);
	r = open_restore(fd, 0, &rc);
	CHECK_EQ(sfr_restore_find(r, name + PREFIX, MOST - PREFIX), a.nr - 1);
	CHECK_EQ(sfr_restore_find(r, name + PREFIX, MOST - PREFIX + 1), a.nr);
	sfr_restore_free(r);
	(void)close(fd);
	archive_free(&a);
}

/* ---- files of another format ------------------------------------------------- */

#define NR_BARE 9u

/* Stretches of a file of random bytes: empty ones, one of several chunks, gaps between some. */
static size_t bare_stretches(struct sfr_file_range v[NR_BARE])
{
	static const uint64_t lens[NR_BARE] = { 0, 1, 4096, 0, 3 * PIECE + 7, 5, PIECE, 12345, 0 };
	uint64_t off = 13;

	for (unsigned i = 0; i < NR_BARE; i++) {
		v[i] = (struct sfr_file_range){ off, lens[i] };
		off += lens[i] + (i % 3 == 1 ? 2 * PIECE : 0);
	}
	return (size_t)off;
}

TEST(bare_records_arrive_where_they_were_wanted)
{
	struct sfr_file_range v[NR_BARE];
	const size_t len = bare_stretches(v);
	char *bytes = malloc(len), *mem[NR_BARE];
	uint64_t lens[NR_BARE];
	uint32_t x = 1;
	int fd;

	for (size_t i = 0; i < len; i++)
		bytes[i] = (char)((x = x * 1664525u + 1013904223u) >> 24);
	fd = file_of(bytes, len);
	for (uint64_t step = 0; step < NR_BARE; step += 4) {
		struct restored found = { .nr = NR_BARE, .mem = mem, .len = lens };
		struct sfr_restore *r;

		CHECK_EQ(sfr_restore_new_bare(v, NR_BARE, len, fd, SFR_RESTORE_VERIFY, &r), 0);
		CHECK_EQ(sfr_restore_nr_records(r), NR_BARE);
		CHECK_EQ(sfr_restore_find(r, "w", 1), NR_BARE);
		for (unsigned i = 0; i < NR_BARE; i++) {
			CHECK_EQ(sfr_restore_nbytes(r, i), v[i].len);
			mem[i] = malloc(v[i].len + 1);
		}
		read_all(r, &found, step);
		CHECK_EQ(found.rc, 0);
		sfr_restore_free(r);
		for (unsigned i = 0; i < NR_BARE; i++) {
			CHECK(memcmp(mem[i], bytes + v[i].off, v[i].len) == 0);
			free(mem[i]);
		}
	}
	(void)close(fd);
	free(bytes);
}

TEST(bare_records_that_overlap_or_pass_the_end_are_refused)
{
	struct sfr_file_range v[NR_BARE];
	const size_t len = bare_stretches(v);
	const char byte = 0;
	struct sfr_restore *r;
	const int fd = file_of(&byte, 1);

	CHECK_EQ(sfr_restore_new_bare(v, 0, len, fd, 0, &r), -EINVAL);
	CHECK_EQ(sfr_restore_new_bare(v, NR_BARE, len - 1, fd, 0, &r), -EINVAL);
	v[2].len = UINT64_MAX;
	CHECK_EQ(sfr_restore_new_bare(v, NR_BARE, len, fd, 0, &r), -EINVAL);
	CHECK(r == NULL);
	(void)bare_stretches(v);
	v[4].off -= 1;
	CHECK_EQ(sfr_restore_new_bare(v, NR_BARE, len, fd, 0, &r), -EINVAL);
	(void)close(fd);
}

TEST(bare_records_of_a_file_that_became_shorter_are_damaged)
{
	const struct sfr_file_range v = { 8, 100 };
	const char bytes[64] = { 0 };
	const int fd = file_of(bytes, sizeof(bytes));
	struct sfr_restore *r;
	size_t len;

	CHECK_EQ(sfr_restore_new_bare(&v, 1, 108, fd, 0, &r), 0);
	CHECK_EQ(sfr_reader_allow_records(r->reader, 1), 0);
	CHECK_EQ(sfr_reader_wait(r->reader, 0, SFR_FOREVER), SFR_ECORRUPT);
	CHECK(sfr_restore_name(r, 0, &len) != NULL);
	CHECK_EQ(len, 0);
	sfr_restore_free(r);
	(void)close(fd);
}
