/* Files whose bytes are on their way: what is wanted of whom, what is kept and given back, and that
 * checks and restores cannot tell them from other files. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>

#include "base/base.h"
#include "check/verdict.h"
#include "reader/arrivals.h"
#include "reader/source.h"
#include "restore/restore.h"
#include "sfr/limits.h"

enum { NR = 64, LEN = NR * SFR_PAGE - 1000, WINDOW = SFR_ARRIVALS_WINDOW, NR_FETCHERS = 3 };
#define MOMENT 0 /* of a wait that must not last */

static unsigned char content[LEN];

/* An arriving file, and those who fetch it. */
struct arriving {
	struct sfr_arrivals *group;
	uint64_t number;
	int fd;
	const unsigned char *bytes;
	pthread_t fetchers[NR_FETCHERS];
	atomic_uint nr_fetched;
};

static void make_content(void)
{
	for (size_t i = 0; i < LEN; i++)
		content[i] = (unsigned char)check_random();
}

static struct arriving in_chunks(const unsigned char *bytes, size_t len, uint64_t chunk)
{
	struct arriving a = { .bytes = bytes };

	CHECK_EQ(sfr_arrivals_new(&a.group), 0);
	a.fd = sfr_arrivals_open(a.group, len, chunk, &a.number);
	if (!CHECK(a.fd >= 0))
		exit(1);
	return a;
}

static struct arriving arriving_of(const unsigned char *bytes, size_t len)
{
	return in_chunks(bytes, len, SFR_PAGE);
}

/* Fetches what is wanted longest. False: nothing is. */
static bool fetch_one(struct arriving *a, struct sfr_arrivals_wanted_range *w)
{
	if (sfr_arrivals_next(a->group, MOMENT, w) != 0)
		return false;
	CHECK_EQ(w->number, a->number);
	CHECK_EQ(sfr_arrivals_put(a->group, w->number, w->off, a->bytes + w->off, w->len), 0);
	return true;
}

static unsigned fetch_all(struct arriving *a)
{
	struct sfr_arrivals_wanted_range w;
	unsigned nr = 0;

	while (fetch_one(a, &w))
		nr++;
	return nr;
}

static void *fetch(void *arg)
{
	struct arriving *a = arg;
	struct sfr_arrivals_wanted_range w;
	int rc;

	while ((rc = sfr_arrivals_next(a->group, SFR_FOREVER, &w)) == 0) {
		(void)atomic_fetch_add(&a->nr_fetched, 1);
		CHECK_EQ(sfr_arrivals_put(a->group, w.number, w.off, a->bytes + w.off, w.len), 0);
	}
	CHECK_EQ(rc, SFR_ECLOSED);
	return NULL;
}

static void start_fetchers(struct arriving *a)
{
	for (int i = 0; i < NR_FETCHERS; i++)
		CHECK_EQ(pthread_create(&a->fetchers[i], NULL, fetch, a), 0);
}

static void end_fetchers(struct arriving *a)
{
	sfr_arrivals_end(a->group);
	for (int i = 0; i < NR_FETCHERS; i++)
		CHECK_EQ(pthread_join(a->fetchers[i], NULL), 0);
	sfr_arrivals_free(a->group);
}

static bool is_open(int fd)
{
	return fcntl(fd, F_GETFD) >= 0;
}

static uint64_t memory_of(int fd)
{
	struct stat st = { 0 };

	CHECK_EQ(fstat(fd, &st), 0);
	return (uint64_t)st.st_blocks * 512;
}

static void read_all(const struct sfr__source *s, size_t len, uint64_t off)
{
	char buf[LEN];

	CHECK_EQ(sfr__source_read(s, buf, len, off), 0);
	CHECK(memcmp(buf, content + off, len) == 0);
}

/* ---- what is wanted ------------------------------------------------------------ */

TEST(file_has_its_length_and_nothing_is_wanted_before_it_is_read)
{
	struct arriving a = arriving_of(content, LEN);
	struct stat st;
	struct sfr_arrivals_wanted_range w;

	CHECK_EQ(fstat(a.fd, &st), 0);
	CHECK_EQ(st.st_size, LEN);
	CHECK_EQ(st.st_blocks, 0);
	CHECK(fcntl(a.fd, F_GETFD) & FD_CLOEXEC);
	CHECK_EQ(sfr_arrivals_next(a.group, MOMENT, &w), SFR_EAGAIN);
	sfr_arrivals_free(a.group);
	CHECK(!is_open(a.fd));
}

TEST(read_waits_for_the_chunks_that_it_needs_and_no_others)
{
	struct arriving a = arriving_of(content, LEN);
	struct sfr_arrivals_wanted_range w[3];
	struct sfr__source s;
	char buf[2 * SFR_PAGE];

	sfr__source_open(&s, a.fd, 0, SFR__WAY_EITHER);
	CHECK_EQ(s.direct_fd, -1);
	CHECK_EQ(sfr__source_read(&s, buf, 2 * SFR_PAGE, 3 * SFR_PAGE + 1), SFR_EAGAIN);
	CHECK_EQ(sfr__source_read_some(&s, buf, 2 * SFR_PAGE, 3 * SFR_PAGE + 1), SFR_EAGAIN);
	for (uint64_t i = 0; i < 3; i++) { /* each once, in order */
		CHECK_EQ(sfr_arrivals_next(a.group, MOMENT, &w[i]), 0);
		CHECK_EQ(w[i].off, (3 + i) * SFR_PAGE);
		CHECK_EQ(w[i].len, SFR_PAGE);
	}
	CHECK_EQ(sfr_arrivals_next(a.group, MOMENT, &w[0]), SFR_EAGAIN);
	for (int i = 2; i >= 0; i--) {
		CHECK_EQ(sfr__source_read(&s, buf, 2 * SFR_PAGE, 3 * SFR_PAGE + 1), SFR_EAGAIN);
		w[i].off = (3 + (uint64_t)i) * SFR_PAGE;
		CHECK_EQ(sfr_arrivals_put(a.group, a.number, w[i].off, content + w[i].off,
					  SFR_PAGE),
			 0);
	}
	read_all(&s, 2 * SFR_PAGE, 3 * SFR_PAGE + 1);
	sfr__source_close(&s);
	sfr_arrivals_free(a.group);
}

TEST(end_of_the_file_is_fetched_and_bytes_after_it_are_not)
{
	struct arriving a = arriving_of(content, LEN);
	struct sfr__source s;
	struct sfr_arrivals_wanted_range w;
	char buf[SFR_PAGE];

	sfr__source_open(&s, a.fd, 0, SFR__WAY_CACHE);
	CHECK_EQ(sfr__source_read_some(&s, buf, SFR_PAGE, LEN), 0);
	CHECK_EQ(sfr__source_read_some(&s, buf, SFR_PAGE, LEN + 10 * SFR_PAGE), 0);
	CHECK_EQ(sfr__source_read_some(&s, buf, SFR_PAGE, LEN - 5), SFR_EAGAIN);
	CHECK(fetch_one(&a, &w));
	CHECK_EQ(w.off + w.len, LEN);
	CHECK_EQ(w.off % SFR_PAGE, 0);
	CHECK_EQ(sfr__source_read_some(&s, buf, SFR_PAGE, LEN - 5), 5);
	CHECK(memcmp(buf, content + LEN - 5, 5) == 0);
	CHECK_EQ(sfr__source_read(&s, buf, SFR_PAGE, LEN - 5), SFR_ECORRUPT);
	sfr__source_close(&s);
	sfr_arrivals_free(a.group);
}

TEST(chunks_ahead_are_a_window_and_wanted_once)
{
	struct arriving a = arriving_of(content, LEN);
	struct sfr__source s;
	struct sfr_arrivals_wanted_range w;

	sfr__source_open(&s, a.fd, 0, SFR__WAY_CACHE);
	for (int again = 0; again < 2; again++)
		sfr__source_announce_read(&s, SFR_PAGE, LEN);
	for (uint64_t i = 1; i <= WINDOW; i++) {
		CHECK_EQ(sfr_arrivals_next(a.group, MOMENT, &w), 0);
		CHECK_EQ(w.off, i * SFR_PAGE);
	}
	sfr__source_announce_read(&s, SFR_PAGE, LEN);
	CHECK_EQ(fetch_all(&a), 0);
	sfr__source_announce_read(&s, 20 * SFR_PAGE, 21 * SFR_PAGE + 1);
	CHECK_EQ(fetch_all(&a), 2);
	sfr__source_announce_read(&s, 30 * SFR_PAGE, 30 * SFR_PAGE);
	sfr__source_announce_read(&s, LEN, LEN + 1);
	CHECK_EQ(fetch_all(&a), 0);
	sfr__source_close(&s);
	sfr_arrivals_free(a.group);
}

TEST(files_of_a_group_are_fetched_by_its_own_threads)
{
	struct arriving a = arriving_of(content, LEN), b = arriving_of(content, LEN);
	struct sfr__source s;
	struct sfr_arrivals_wanted_range w;

	CHECK(a.fd != b.fd && a.number != b.number);
	sfr__source_open(&s, b.fd, 0, SFR__WAY_CACHE);
	sfr__source_announce_read(&s, 0, SFR_PAGE);
	CHECK_EQ(sfr_arrivals_next(a.group, MOMENT, &w), SFR_EAGAIN);
	CHECK_EQ(sfr_arrivals_put(a.group, b.number, 0, content, SFR_PAGE), SFR_ECLOSED);
	CHECK(fetch_one(&b, &w));
	read_all(&s, SFR_PAGE, 0);
	sfr__source_close(&s);
	sfr_arrivals_free(a.group);
	CHECK(is_open(b.fd));
	sfr_arrivals_free(b.group);
}

TEST(chunks_are_whole_pages_of_the_size_that_was_asked_for)
{
	struct sfr_arrivals *group;
	struct sfr__source s;
	struct sfr_arrivals_wanted_range w;
	uint64_t number;
	int fd;

	CHECK_EQ(sfr_arrivals_new(&group), 0);
	for (uint64_t chunk = SFR_PAGE; chunk <= 4 * SFR_PAGE; chunk += SFR_PAGE) {
		fd = sfr_arrivals_open(group, LEN, chunk, &number);
		sfr__source_open(&s, fd, 0, SFR__WAY_CACHE);
		sfr__source_announce_read(&s, chunk + 1, chunk + 2);
		CHECK_EQ(sfr_arrivals_next(group, MOMENT, &w), 0);
		CHECK_EQ(w.off, chunk);
		CHECK_EQ(w.len, chunk);
		sfr__source_close(&s);
		sfr_arrivals_close(group, number);
		CHECK(!is_open(fd));
	}
	CHECK_EQ(sfr_arrivals_open(group, LEN, 0, &number), -EINVAL);
	CHECK_EQ(sfr_arrivals_open(group, LEN, SFR_PAGE + 1, &number), -EINVAL);
	CHECK_EQ(sfr_arrivals_open(group, UINT64_MAX, SFR_PAGE, &number), -EINVAL);
	fd = sfr_arrivals_open(group, 0, SFR_PAGE, &number);
	CHECK(fd >= 0); /* an empty file */
	CHECK_EQ(sfr_arrivals_wait_for_whole_file(fd, MOMENT), 0);
	sfr_arrivals_free(group);
}

/* ---- what is kept ---------------------------------------------------------------- */

/* Reads the whole file as a reader does, in pieces of half a chunk. Returns the most memory. */
static uint64_t read_once(struct arriving *a, const struct sfr__source *s, bool says_done)
{
	uint64_t most = 0;

	for (uint64_t off = 0; off < LEN; off += SFR_PAGE / 2) {
		const size_t len = LEN - off < SFR_PAGE / 2 ? LEN - off : SFR_PAGE / 2;

		sfr__source_announce_read(s, off, LEN);
		a->nr_fetched += fetch_all(a);
		read_all(s, len, off);
		if (memory_of(a->fd) > most)
			most = memory_of(a->fd);
		if (says_done)
			sfr__source_discard_read_range(s, off, len);
	}
	return most;
}

TEST(chunks_that_were_read_once_are_given_back_beyond_a_window)
{
	struct arriving a = arriving_of(content, LEN);
	struct sfr__source s, again;

	sfr__source_open(&s, a.fd, 0, SFR__WAY_CACHE);
	CHECK(read_once(&a, &s, true) <= (WINDOW + 1) * SFR_PAGE);
	CHECK_EQ(a.nr_fetched, NR);
	CHECK_EQ(memory_of(a.fd), WINDOW * SFR_PAGE);
	sfr__source_announce_read(&s, 0, LEN); /* as a thread that is late may say */
	CHECK_EQ(fetch_all(&a), 0);
	/* A reader with counts of its own fetches again what is gone. */
	sfr__source_open(&again, a.fd, 0, SFR__WAY_CACHE);
	CHECK(read_once(&a, &again, true) <= 2 * WINDOW * SFR_PAGE);
	CHECK(a.nr_fetched >= 2 * NR - WINDOW && a.nr_fetched <= 2 * NR);
	sfr__source_close(&again);
	sfr__source_close(&s);
	sfr_arrivals_free(a.group);
}

TEST(chunks_that_nobody_has_read_completely_stay)
{
	struct arriving a = arriving_of(content, LEN);
	struct sfr__source s;

	sfr__source_open(&s, a.fd, 0, SFR__WAY_CACHE);
	CHECK_EQ(read_once(&a, &s, false), NR * SFR_PAGE);
	for (uint64_t i = 0; i < NR; i++) /* all but a byte of each */
		sfr__source_discard_read_range(&s, i * SFR_PAGE, SFR_PAGE - 1);
	CHECK_EQ(memory_of(a.fd), (NR - 1) * SFR_PAGE); /* the last one is shorter */
	sfr__source_discard_read_range(&s, SFR_PAGE - 1, 1);
	CHECK_EQ(memory_of(a.fd), (NR - 2) * SFR_PAGE);
	sfr__source_close(&s);
	sfr_arrivals_free(a.group);
}

TEST(pinned_chunk_stays_until_it_is_unpinned)
{
	struct arriving a = arriving_of(content, LEN);
	struct sfr__arriving_file *f = sfr__arriving_get(a.fd);
	struct sfr__source s;

	sfr__source_open(&s, a.fd, 0, SFR__WAY_CACHE);
	CHECK_EQ(read_once(&a, &s, false), NR * SFR_PAGE);
	CHECK_EQ(sfr__arriving_wait_and_pin(f, NULL, 5 * SFR_PAGE, 1, MOMENT), 0);
	sfr__source_discard_read_range(&s, 0, 10 * SFR_PAGE);
	CHECK_EQ(memory_of(a.fd), (NR - 9) * SFR_PAGE);
	CHECK_EQ(sfr__arriving_wait_and_pin(f, NULL, 5 * SFR_PAGE, 1, MOMENT), 0);
	sfr__arriving_unpin(f, 5 * SFR_PAGE, 1);
	sfr__arriving_unpin(f, 5 * SFR_PAGE, 1);
	sfr__source_discard_read_range(&s, 10 * SFR_PAGE, 1);
	CHECK_EQ(memory_of(a.fd), (NR - 10) * SFR_PAGE);
	sfr__source_close(&s);
	sfr__arriving_put(f);
	sfr_arrivals_free(a.group);
}

/* A reader that has begun a chunk after another one was through with it still finds it. */
TEST(chunk_stays_for_a_reader_that_is_in_the_middle_of_it)
{
	struct arriving a = arriving_of(content, LEN);
	struct sfr__source first, second;

	sfr__source_open(&first, a.fd, 0, SFR__WAY_CACHE);
	sfr__source_open(&second, a.fd, 0, SFR__WAY_CACHE);
	sfr__source_announce_read(&first, 0, LEN);
	CHECK_EQ(fetch_all(&a), WINDOW);
	sfr__source_discard_read_range(&first, 0, SFR_PAGE);
	read_all(&second, 10, 0);
	for (uint64_t i = WINDOW; i < NR; i += WINDOW)
		sfr__source_announce_read(&first, i * SFR_PAGE, LEN);
	CHECK_EQ(fetch_all(&a), NR - WINDOW);
	sfr__source_discard_read_range(&first, SFR_PAGE, LEN - SFR_PAGE);
	CHECK_EQ(memory_of(a.fd), WINDOW * SFR_PAGE);
	read_all(&second, 10, 10);
	CHECK_EQ(fetch_all(&a), 0);
	sfr__source_close(&second);
	sfr__source_close(&first);
	sfr_arrivals_free(a.group);
}

TEST(filled_file_is_complete_and_stays_so)
{
	struct arriving a = arriving_of(content, LEN);
	struct sfr__source s;
	char buf[LEN];

	CHECK_EQ(sfr_arrivals_wait_for_whole_file(a.fd, MOMENT), SFR_EAGAIN);
	while (sfr_arrivals_wait_for_whole_file(a.fd, MOMENT) == SFR_EAGAIN)
		CHECK(fetch_all(&a) <= WINDOW);
	CHECK_EQ(pread(a.fd, buf, LEN, 0), LEN);
	CHECK(memcmp(buf, content, LEN) == 0);
	sfr__source_open(&s, a.fd, 0, SFR__WAY_CACHE);
	sfr__source_discard_read_range(&s, 0, LEN);
	CHECK_EQ(memory_of(a.fd), NR * SFR_PAGE);
	CHECK_EQ(sfr_arrivals_wait_for_whole_file(a.fd, MOMENT), 0);
	sfr__source_close(&s);
	sfr_arrivals_free(a.group);
	CHECK_EQ(sfr_arrivals_wait_for_whole_file(STDIN_FILENO, MOMENT),
		 0); /* not an arriving file */
}

/* ---- failures and ends -------------------------------------------------------------- */

TEST(failure_ends_every_later_read)
{
	struct arriving a = arriving_of(content, LEN);
	struct sfr__source s;
	struct sfr_arrivals_wanted_range w;
	char buf[SFR_PAGE];

	sfr__source_open(&s, a.fd, 0, SFR__WAY_CACHE);
	sfr__source_announce_read(&s, 0, LEN);
	CHECK(fetch_one(&a, &w));
	sfr_arrivals_fail(a.group, a.number);
	sfr_arrivals_fail(a.group, a.number + 1);
	CHECK_EQ(sfr__source_read(&s, buf, SFR_PAGE, 0), -EIO);
	CHECK_EQ(sfr__source_read_some(&s, buf, SFR_PAGE, SFR_PAGE), -EIO);
	CHECK_EQ(sfr_arrivals_wait_for_whole_file(a.fd, SFR_FOREVER), -EIO);
	CHECK_EQ(fetch_all(&a), 0); /* nobody needs the rest */
	sfr__source_announce_read(&s, 30 * SFR_PAGE, LEN);
	CHECK_EQ(fetch_all(&a), 0);
	sfr__source_close(&s);
	sfr_arrivals_free(a.group);
}

struct waiting {
	int fd, rc;
};

static void *read_first(void *arg)
{
	struct waiting *waiting = arg;
	struct sfr__arriving_file *f = sfr__arriving_get(waiting->fd);

	waiting->rc = sfr__arriving_wait_and_pin(f, NULL, 0, 1, SFR_FOREVER);
	sfr__arriving_put(f);
	return NULL;
}

TEST(failure_wakes_a_waiting_reader)
{
	struct arriving a = arriving_of(content, LEN);
	struct waiting waiting = { .fd = a.fd };
	struct sfr_arrivals_wanted_range w;
	pthread_t reader;

	CHECK_EQ(pthread_create(&reader, NULL, read_first, &waiting), 0);
	CHECK_EQ(sfr_arrivals_next(a.group, SFR_FOREVER, &w), 0); /* it waits */
	sfr_arrivals_fail(a.group, a.number);
	CHECK_EQ(pthread_join(reader, NULL), 0);
	CHECK_EQ(waiting.rc, -EIO);
	sfr_arrivals_free(a.group);
}

TEST(bytes_that_nobody_asked_for_are_refused)
{
	static const struct {
		uint64_t off;
		size_t len;
	} wrong[] = {
		{ 0, SFR_PAGE - 1 },    { 0, SFR_PAGE + 1 },         { 1, SFR_PAGE },
		{ SFR_PAGE, SFR_PAGE }, { NR * SFR_PAGE, SFR_PAGE },
	};
	struct sfr__source s;
	struct sfr_arrivals_wanted_range w;

	for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
		struct arriving a = arriving_of(content, LEN);

		sfr__source_open(&s, a.fd, 0, SFR__WAY_CACHE);
		sfr__source_announce_read(&s, 0, 2 * SFR_PAGE);
		CHECK_EQ(sfr_arrivals_next(a.group, MOMENT, &w), 0);
		CHECK_EQ(sfr_arrivals_put(a.group, a.number, wrong[i].off, content, wrong[i].len),
			 -EINVAL);
		CHECK_EQ(sfr_arrivals_wait_for_whole_file(a.fd, MOMENT), -EIO);
		sfr__source_close(&s);
		sfr_arrivals_free(a.group);
	}
}

TEST(full_memory_fails_the_file)
{
	struct arriving a = arriving_of(content, LEN);
	const struct sfr_fault fault = { .call = "pwrite", .nth = 1, .err = ENOSPC, .limit = -1 };
	struct sfr__source s;
	struct sfr_arrivals_wanted_range w;

	CHECK_EQ(sfr_inject_install(), 0);
	sfr_inject_clear();
	sfr__source_open(&s, a.fd, 0, SFR__WAY_CACHE);
	sfr__source_announce_read(&s, 0, LEN);
	CHECK_EQ(sfr_arrivals_next(a.group, MOMENT, &w), 0);
	CHECK_EQ(sfr_inject_add_fault(&fault), 0);
	CHECK_EQ(sfr_arrivals_put(a.group, a.number, 0, content, SFR_PAGE), -ENOSPC);
	sfr_inject_clear();
	CHECK_EQ(sfr_arrivals_wait_for_whole_file(a.fd, MOMENT), -EIO);
	sfr__source_close(&s);
	sfr_arrivals_free(a.group);
}

TEST(closed_file_stays_open_for_its_sources_and_gives_them_no_bytes)
{
	struct arriving a = arriving_of(content, LEN);
	struct sfr__source s;
	struct sfr_arrivals_wanted_range w;
	char buf[SFR_PAGE];

	sfr__source_open(&s, a.fd, 0, SFR__WAY_CACHE);
	sfr__source_announce_read(&s, 0, SFR_PAGE);
	CHECK_EQ(sfr_arrivals_next(a.group, MOMENT, &w), 0);
	sfr_arrivals_close(a.group, a.number);
	sfr_arrivals_close(a.group, a.number);
	CHECK(is_open(a.fd));
	CHECK_EQ(sfr__source_read(&s, buf, SFR_PAGE, 0), -EBADF);
	sfr__source_announce_read(&s, 0, LEN);
	CHECK_EQ(fetch_all(&a), 0);
	CHECK_EQ(sfr_arrivals_put(a.group, a.number, 0, content, SFR_PAGE), SFR_ECLOSED);
	CHECK(sfr__arriving_get(a.fd) == NULL);
	sfr__source_close(&s);
	CHECK(!is_open(a.fd));
	sfr_arrivals_free(a.group);
}

TEST(end_of_a_group_ends_all_waits)
{
	struct arriving a = arriving_of(content, LEN);
	struct waiting waiting = { .fd = a.fd };
	struct sfr_arrivals_wanted_range w;
	pthread_t reader;
	uint64_t number;

	CHECK_EQ(pthread_create(&reader, NULL, read_first, &waiting), 0);
	CHECK_EQ(sfr_arrivals_next(a.group, SFR_FOREVER, &w), 0); /* it waits */
	start_fetchers(&a);
	end_fetchers(&a);
	CHECK_EQ(pthread_join(reader, NULL), 0);
	CHECK_EQ(waiting.rc, -EBADF);
	CHECK(!is_open(a.fd));
	a = arriving_of(content, LEN);
	sfr_arrivals_end(a.group);
	CHECK_EQ(sfr_arrivals_open(a.group, LEN, SFR_PAGE, &number), SFR_ECLOSED);
	CHECK_EQ(sfr_arrivals_next(a.group, SFR_FOREVER, &w), SFR_ECLOSED);
	sfr_arrivals_free(a.group);
	sfr_arrivals_free(NULL);
}

TEST(lack_of_memory_and_of_descriptors_is_reported)
{
	static const int errors[] = { ENOMEM, EMFILE };

	for (size_t i = 0; i < 2; i++)
		FOR_EVERY_FAILURE(run, "*", errors[i])
		{
			struct sfr_arrivals *group = NULL;
			uint64_t number;
			int rc = sfr_arrivals_new(&group);

			if (rc == 0)
				rc = sfr_arrivals_open(group, LEN, SFR_PAGE, &number);
			CHECK(rc >= 0 || check_acted(&run));
			CHECK(rc >= 0 || rc == -ENOMEM || rc == -errors[i]);
			check_end_fault(&run);
			sfr_arrivals_free(group);
			CHECK(rc < 0 || !is_open(rc));
		}
}

static int small_limit(int resource, struct rlimit *limit)
{
	CHECK_EQ(resource, RLIMIT_FSIZE);
	limit->rlim_cur = LEN - 1;
	return 0;
}

TEST(limit_on_file_sizes_is_an_error_and_no_signal)
{
	const struct sfr_sys plain = sfr_sys;
	struct sfr_arrivals *group;
	uint64_t number;

	CHECK_EQ(sfr_arrivals_new(&group), 0);
	sfr_sys.get_limit = small_limit;
	CHECK_EQ(sfr_arrivals_open(group, LEN, SFR_PAGE, &number), -EFBIG);
	sfr_sys = plain;
	sfr_arrivals_free(group);
}

TEST(forked_child_cannot_use_its_parents_arriving_files)
{
	struct arriving a = arriving_of(content, LEN);
	const int failed = check__nr_failed;
	struct sfr__source s;
	struct sfr_arrivals_wanted_range w;
	int status = -1;
	pid_t pid;

	sfr__source_open(&s, a.fd, 0, SFR__WAY_CACHE);
	sfr__source_announce_read(&s, 0, SFR_PAGE);
	pid = fork();
	if (pid == 0) {
		char buf[SFR_PAGE];
		uint64_t number;

		(void)alarm(60);
		CHECK(!is_open(a.fd));
		CHECK_EQ(sfr__source_read(&s, buf, SFR_PAGE, 0), SFR_EFORK);
		sfr__source_announce_read(&s, 0, LEN);
		sfr__source_discard_read_range(&s, 0, LEN);
		CHECK_EQ(sfr_arrivals_next(a.group, SFR_FOREVER, &w), SFR_EFORK);
		CHECK_EQ(sfr_arrivals_put(a.group, a.number, 0, content, SFR_PAGE), SFR_EFORK);
		CHECK_EQ(sfr_arrivals_open(a.group, LEN, SFR_PAGE, &number), SFR_EFORK);
		CHECK(sfr__arriving_get(a.fd) == NULL);
		sfr_arrivals_fail(a.group, a.number);
		sfr__source_close(&s);
		sfr_arrivals_close(a.group, a.number);
		sfr_arrivals_free(a.group);
		a = arriving_of(content, LEN); /* its own work */
		CHECK_EQ(sfr_arrivals_wait_for_whole_file(a.fd, MOMENT), SFR_EAGAIN);
		_exit(check__nr_failed != failed);
	}
	CHECK_EQ(waitpid(pid, &status, 0), pid);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	CHECK(fetch_one(&a, &w));
	read_all(&s, SFR_PAGE, 0);
	sfr__source_close(&s);
	sfr_arrivals_free(a.group);
}

/* ---- checks and restores ------------------------------------------------------------- */

static struct archive an_archive(void)
{
	struct archive a = archive_torch();

	archive_add(&a, "archive/data/0", content, 100);
	archive_add(&a, "archive/data/1", content, 8 * SFR_PAGE + 77);
	archive_add(&a, "archive/data/2", content + 9, SFR_PAGE);
	archive_add(&a, "archive/data/3", content, 50 * SFR_PAGE + 5);
	archive_finish(&a);
	return a;
}

/* Checks a file of which a chunk comes only when the check has given up waiting, so that each step
 * is tried again. */
static void check_slowly(const struct archive *archive, unsigned flags, bool in_a_row)
{
	struct arriving a = in_chunks(archive->buf, archive->len, 2 * SFR_PAGE);
	const struct verdict plain = check_archive(archive, flags);
	const struct sfr_check_result *r;
	struct sfr_check *check;
	struct sfr_arrivals_wanted_range w;
	int rc;

	CHECK_EQ(sfr_check_new(a.fd, flags, &check), 0);
	while ((rc = sfr_check_run(check, MOMENT)) == SFR_EAGAIN)
		for (bool more = true; more; more = more && in_a_row)
			more = fetch_one(&a, &w);
	r = sfr_check_result(check);
	CHECK_EQ(rc, plain.rc);
	CHECK_EQ(r->ok, plain.ok);
	CHECK_EQ(r->nbytes, plain.nbytes);
	CHECK_EQ(r->nr_records, plain.nr_records);
	CHECK_EQ(r->nr_unchecked, plain.nr_unchecked);
	CHECK_EQ(r->nr_bad, plain.nr_bad);
	CHECK(strcmp(r->error, plain.error) == 0);
	if (in_a_row &&
	    (flags & SFR_CHECK_BYTES) != 0) /* chunks that the walk has passed are gone */
		CHECK(memory_of(a.fd) <= (WINDOW + 2) * 2 * SFR_PAGE);
	sfr_check_free(check);
	sfr_arrivals_free(a.group);
}

TEST(each_step_of_a_check_waits_for_its_bytes)
{
	struct archive a = an_archive();
	struct sfr_limits limits = sfr_limits;

	limits.check_chunk_bytes = SFR_PAGE;
	CHECK_EQ(sfr_limits_set(&limits), 0);
	check_slowly(&a, SFR_CHECK_DIRECTORY | SFR_CHECK_KEEP, false);
	check_slowly(&a, 0, false);
	check_slowly(&a, SFR_CHECK_BYTES, true);
	a.buf[a.records[a.nr - 1].data_off + 5] ^= 1;
	check_slowly(&a, SFR_CHECK_BYTES, true);
	a.buf[a.records[a.nr - 2].hdr_off] ^= 1;
	check_slowly(&a, 0, true);
	a.buf[a.end] ^= 1;
	check_slowly(&a, 0, true);
	sfr_limits_reset();
	archive_free(&a);
}

TEST(threads_of_a_check_wait_for_their_bytes)
{
	struct archive archive = an_archive();
	struct sfr_limits limits = sfr_limits;

	limits.reader_chunk_bytes = SFR_PAGE;
	limits.ahead_bytes = 1;
	CHECK_EQ(sfr_limits_set(&limits), 0);
	for (int damaged = 0; damaged < 2; damaged++) {
		struct arriving a = arriving_of(archive.buf, archive.len);
		struct verdict v;

		start_fetchers(&a);
		v = check_fd(a.fd, SFR_CHECK_BYTES | SFR_CHECK_DIRECT);
		CHECK_EQ(v.ok, !damaged);
		CHECK_EQ(v.nr_bad, damaged);
		CHECK(memory_of(a.fd) <= (WINDOW + 8) * SFR_PAGE);
		end_fetchers(&a);
		archive.buf[archive.records[archive.nr - 1].data_off + 5] ^= 1;
	}
	sfr_limits_reset();
	archive_free(&archive);
}

/* Restores an archive, of which nothing comes before the restore has been opened. */
TEST(restore_gets_the_bytes_as_they_arrive)
{
	struct archive archive = an_archive();
	struct arriving a = arriving_of(archive.buf, archive.len);
	struct sfr_limits limits = sfr_limits;
	struct sfr_restore *r = NULL;
	struct sfr_check *check;
	char *memory[16] = { NULL };
	struct sfr_arrivals_wanted_range w;
	int rc;

	limits.reader_chunk_bytes = SFR_PAGE;
	CHECK_EQ(sfr_limits_set(&limits), 0);
	CHECK_EQ(sfr_check_new(a.fd, SFR_CHECK_DIRECTORY | SFR_CHECK_KEEP, &check), 0);
	while ((rc = sfr_check_run(check, MOMENT)) == SFR_EAGAIN)
		(void)fetch_one(&a, &w);
	CHECK_EQ(rc, 0);
	while ((rc = sfr_restore_new(check, a.fd, SFR_RESTORE_VERIFY, &r)) == SFR_EAGAIN)
		CHECK(fetch_one(&a, &w));
	CHECK_EQ(rc, 0);
	start_fetchers(&a);
	for (uint64_t i = 0; i < archive.nr; i++) {
		memory[i] = malloc(archive.records[i].len + 1);
		sfr_restore_set_destination(r, i, memory[i]);
	}
	CHECK_EQ(sfr_reader_allow_records(sfr_restore_reader(r), archive.nr), 0);
	CHECK_EQ(sfr_reader_wait(sfr_restore_reader(r), archive.nr, SFR_FOREVER), 0);
	sfr_restore_free(r);
	end_fetchers(&a);
	for (uint64_t i = 0; i < archive.nr; i++) {
		CHECK(memcmp(memory[i], archive.buf + archive.records[i].data_off,
			     archive.records[i].len) == 0);
		free(memory[i]);
	}
	sfr_limits_reset();
	archive_free(&archive);
}

TEST(restore_can_be_freed_or_fail_while_it_waits_for_bytes)
{
	struct archive archive = an_archive();
	const struct sfr_file_range all = { 0, archive.len };
	struct arriving a = arriving_of(archive.buf, archive.len);
	struct sfr_restore *r = NULL;
	struct sfr_arrivals_wanted_range w;

	CHECK_EQ(sfr_restore_new_bare(&all, 1, archive.len, a.fd, 0, &r), 0);
	CHECK_EQ(sfr_reader_allow_records(sfr_restore_reader(r), 1), 0);
	CHECK_EQ(sfr_arrivals_next(a.group, SFR_FOREVER, &w), 0); /* its threads wait */
	CHECK_EQ(sfr_reader_wait(sfr_restore_reader(r), 0, MOMENT), SFR_EAGAIN);
	sfr_restore_free(r);
	CHECK_EQ(sfr_restore_new_bare(&all, 1, archive.len, a.fd, 0, &r), 0);
	CHECK_EQ(sfr_reader_allow_records(sfr_restore_reader(r), 1), 0);
	sfr_arrivals_fail(a.group, a.number);
	CHECK_EQ(sfr_reader_wait(sfr_restore_reader(r), 0, SFR_FOREVER), -EIO);
	CHECK_EQ(sfr_reader_failure(sfr_restore_reader(r))->code, -EIO);
	sfr_restore_free(r);
	sfr_arrivals_free(a.group);
	archive_free(&archive);
}

/* ---- several at a time ------------------------------------------------------------- */

static void *read_here_and_there(void *arg)
{
	struct arriving *a = arg;
	struct sfr__source s;
	unsigned seed = (unsigned)(uintptr_t)&s;
	char buf[3 * SFR_PAGE];

	sfr__source_open(&s, a->fd, 0, SFR__WAY_CACHE);
	for (int i = 0; i < 500; i++) {
		const uint64_t off = (uint64_t)rand_r(&seed) % LEN;
		const size_t len = (size_t)rand_r(&seed) % sizeof(buf);
		int64_t got;

		while ((got = sfr__source_read_some(&s, buf, len, off)) == SFR_EAGAIN)
			;
		CHECK(got >= 0 && memcmp(buf, content + off, (size_t)got) == 0);
		sfr__source_discard_read_range(&s, off / SFR_PAGE * SFR_PAGE, SFR_PAGE);
		sfr__source_announce_read(&s, off, off + 2 * SFR_PAGE);
	}
	sfr__source_close(&s);
	return NULL;
}

TEST(bytes_are_right_while_others_give_chunks_back)
{
	struct arriving a = arriving_of(content, LEN);
	pthread_t readers[3];

	start_fetchers(&a);
	for (int i = 0; i < 3; i++)
		CHECK_EQ(pthread_create(&readers[i], NULL, read_here_and_there, &a), 0);
	for (int i = 0; i < 3; i++)
		CHECK_EQ(pthread_join(readers[i], NULL), 0);
	CHECK(atomic_load(&a.nr_fetched) > NR); /* some were */
	end_fetchers(&a);
}

BEGIN
{
	make_content();
	return true;
}
