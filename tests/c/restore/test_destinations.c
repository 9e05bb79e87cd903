/* Destinations of a restore's records: waits that only the owner of the memory could end,
 * headers that disagree with the directory, and chunks of any size. */
#include <errno.h>

#include "restore/open.h"
#include "sfr/limits.h"

#define SMALL_CHUNK 4096u
#define NR_DATA 12u

/* Makes records that begin and end anywhere in chunks of one page. */
static struct archive with_shared_chunks(void)
{
	static char names[NR_DATA][24];
	static unsigned char data[NR_DATA * 1777];
	struct archive a = archive_torch();

	for (size_t i = 0; i < sizeof(data); i++)
		data[i] = (unsigned char)check_random();
	for (size_t i = 0; i < NR_DATA; i++) {
		(void)snprintf(names[i], sizeof(names[i]), "archive/data/%zu", i);
		archive_add(&a, names[i], data + i, 1777 * i + 1);
	}
	archive_finish(&a);
	return a;
}

static void use_small_chunks(void)
{
	struct sfr_limits limits = sfr_limits;

	limits.reader_chunk_bytes = SMALL_CHUNK;
	CHECK_EQ(sfr_limits_set(&limits), 0);
}

TEST(wait_for_a_record_whose_neighbours_have_no_memory_is_refused)
{
	struct archive a = with_shared_chunks();
	int fd = file_of(a.buf, a.len), rc;
	unsigned nr_refused = 0;

	use_small_chunks();
	for (uint64_t upto = 0; upto < a.nr; upto++) {
		struct sfr_restore *r = open_restore(fd, SFR_RESTORE_VERIFY, &rc);

		CHECK_EQ(sfr_reader_allow_records(r->reader, upto), 0);
		for (uint64_t i = 0; i < a.nr; i++) {
			bool can = sfr_reader_count_records_to_allow(r->reader, i) <= upto;

			CHECK_EQ(sfr_reader_wait(r->reader, i, SFR_FOREVER),
				 can ? 0 : SFR_EUNPLACED);
			if (i < upto && !can)
				nr_refused++;
		}
		CHECK_EQ(sfr_reader_wait(r->reader, a.nr, SFR_FOREVER), SFR_EUNPLACED);
		CHECK_EQ(sfr_reader_failure(r->reader)->code, 0);
		CHECK_EQ(sfr_reader_allow_records(r->reader, a.nr),
			 0); /* the refused wait has changed nothing */
		CHECK_EQ(sfr_reader_allow_records(r->reader, upto),
			 0); /* what was allowed stays allowed */
		CHECK_EQ(sfr_reader_wait(r->reader, a.nr, SFR_FOREVER), 0);
		sfr_restore_free(r);
	}
	CHECK(nr_refused > 0); /* records that had memory themselves */
	sfr_limits_reset();
	(void)close(fd);
	archive_free(&a);
}

/* Gives each record, and all before it, memory only when the record is requested. */
static void ask_in_order(const struct archive *a, int fd, const uint64_t *order)
{
	char *mem = malloc(a->len);
	int rc;
	struct sfr_restore *r = open_restore(fd, SFR_RESTORE_VERIFY, &rc);
	uint64_t placed = 0;

	for (uint64_t k = 0; k < a->nr; k++) {
		const uint64_t reach = sfr_reader_count_records_to_allow(r->reader, order[k]);

		for (; placed < reach; placed++)
			sfr_restore_set_destination(r, placed, mem + a->records[placed].data_off);
		CHECK_EQ(sfr_reader_allow_records(r->reader, reach), 0);
		CHECK_EQ(sfr_reader_wait(r->reader, order[k], SFR_FOREVER), 0);
		CHECK(memcmp(mem + a->records[order[k]].data_off,
			     a->buf + a->records[order[k]].data_off,
			     a->records[order[k]].len) == 0);
	}
	CHECK_EQ(sfr_reader_wait(r->reader, a->nr, SFR_FOREVER), 0);
	sfr_restore_free(r);
	free(mem);
}

TEST(records_can_be_requested_in_any_order)
{
	struct archive a = with_shared_chunks();
	uint64_t *order = calloc(a.nr, sizeof(*order));
	int fd = file_of(a.buf, a.len);

	use_small_chunks();
	for (uint64_t i = 0; i < a.nr; i++)
		order[i] = i;
	ask_in_order(&a, fd, order);
	for (uint64_t i = 0; i < a.nr; i++)
		order[i] = a.nr - 1 - i;
	ask_in_order(&a, fd, order);
	for (unsigned run = 0; run < 20; run++) {
		for (uint64_t i = a.nr - 1; i > 0; i--) {
			const uint64_t other = check_random() % (i + 1), here = order[i];

			order[i] = order[other];
			order[other] = here;
		}
		ask_in_order(&a, fd, order);
	}
	sfr_limits_reset();
	free(order);
	(void)close(fd);
	archive_free(&a);
}

/* The last record's header gives its own length. 65,535 bytes of name and of extra fields exceed
 * any header that the directory allows. */
TEST(header_whose_name_is_longer_than_in_the_directory_is_refused)
{
	static const char padding[1];
	struct archive a = archive_torch();
	const struct archive_record *last;
	int fd, rc;

	archive_add(&a, "archive/data/0", padding, 0);
	archive_gap(&a, SFR__READER_CHUNK_MAX - 10 - a.len); /* it crosses the end of a chunk */
	archive_add(&a, "archive/data/1", "x", 1);
	archive_gap(&a, 3 * 0xffffu);
	archive_finish(&a);
	last = &a.records[a.nr - 1];
	fd = file_of(a.buf, a.len);
	CHECK(check_fd(fd, SFR_CHECK_BYTES).ok);
	(void)close(fd);
	for (unsigned name_len = 0xffff; name_len > 0; name_len /= 2) {
		archive_poke(&a, last->hdr_off + 26, name_len, 2);
		archive_poke(&a, last->hdr_off + 28, 0xffff, 2);
		fd = file_of(a.buf, a.len);
		CHECK(open_restore(fd, 0, &rc) == NULL);
		CHECK_EQ(rc, -EOPNOTSUPP);
		refuse(&a, "its local header and the directory disagree");
		(void)close(fd);
	}
	archive_free(&a);
}

/* The longest header fits into the scratch memory, wherever it crosses the end of a chunk. */
TEST(longest_header_is_read_across_two_chunks)
{
	enum { MOST = SFR__UNZIP_NAME_MAX };
	static char name[MOST + 1] = "archive/";
	struct archive a = archive_torch();
	struct sfr_restore *r;
	uint64_t at;
	int fd, rc;

	memset(name + 8, 'n', MOST - 8);
	archive_gap(&a, SFR__READER_CHUNK_MAX - 10 - a.len);
	a.align = 0;
	at = a.len;
	archive_add(&a, name, "", 0);
	archive_poke(&a, at + 28, 0xffff, 2);
	archive_put(&a, "FB", 2, 'x');
	archive_num(&a, 0xffff - 4, 2, 0);
	archive_gap(&a, 0xffff - 4);
	archive_finish(&a);
	fd = file_of(a.buf, a.len);
	r = open_restore(fd, SFR_RESTORE_VERIFY, &rc);
	if (CHECK(r != NULL)) {
		CHECK_EQ(r->reader->records[a.nr - 1].data_off - at, SFR__READER_HEADER_MAX);
		CHECK_EQ(sfr_reader_allow_records(r->reader, a.nr), 0);
		CHECK_EQ(sfr_reader_wait(r->reader, a.nr, SFR_FOREVER), 0);
	}
	sfr_restore_free(r);
	(void)close(fd);
	archive_free(&a);
}

/* One thread may reach a long record's end before another has read its header. */
TEST(archive_of_another_program_is_never_called_damaged)
{
	static const char data[20 * SMALL_CHUNK];
	struct archive a = { .zip64 = true, .described = true };
	int fd, rc;

	archive_add(&a, "archive/data.pkl", "\x80\x02}q\x00.", 6);
	archive_gap(&a, 100);
	archive_add(&a, "archive/version", "3\n", 2);
	archive_gap(&a, SMALL_CHUNK - a.len);
	/* with an alignment of 64 the data would begin later */
	archive_add(&a, "archive/data/0", data, sizeof(data));
	archive_gap(&a, 100);
	archive_add(&a, "archive/data/1", data, 8);
	archive_finish(&a);
	accept(&a, 4);
	fd = file_of(a.buf, a.len);
	CHECK_EQ(sfr_inject_install(), 0);
	use_small_chunks();
	for (uint64_t nth = 1; nth <= 4; nth++) {
		const struct sfr_fault late = {
			.call = "pread", .nth = nth, .limit = -1, .delay_ns = 50000000
		};
		struct sfr_restore *r = open_restore(fd, SFR_RESTORE_VERIFY, &rc);

		CHECK(r != NULL);
		/* The records before it are as torch writes them; their headers are not the late
		 * ones. */
		r->reader->next_off = SMALL_CHUNK;
		r->reader->next_rec = 2;
		sfr_inject_clear();
		CHECK_EQ(sfr_inject_add_fault(&late), 0);
		CHECK_EQ(sfr_reader_allow_records(r->reader, a.nr), 0);
		CHECK_EQ(sfr_reader_wait(r->reader, a.nr, SFR_FOREVER), -EOPNOTSUPP);
		sfr_restore_free(r);
	}
	sfr_inject_uninstall();
	sfr_limits_reset();
	(void)close(fd);
	archive_free(&a);
}
