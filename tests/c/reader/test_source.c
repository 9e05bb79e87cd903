/* source.c returns the file's bytes, from the page cache where enough of it is cached, and
 * otherwise from the disk. */
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

#include "base/base.h"
#include "check.h"
#include "reader/source.h"

enum { NR = 64, LEN = NR * SFR_PAGE - 1000, WORTH = 16 };

static char *file_bytes, *buf;
static unsigned char cached[NR]; /* the answer of mincore */
static char by_disk[NR], by_cache[NR];
static int file_fd, direct_fd;

static int fake_mincore(void *addr, size_t len, unsigned char *there)
{
	(void)addr;
	memcpy(there, cached, (len + SFR_PAGE - 1) / SFR_PAGE);
	return 0;
}

static ssize_t watched_pread(int fd, void *to, size_t len, off_t off)
{
	ssize_t got = pread(file_fd, to, len, off);

	CHECK(fd == file_fd || fd == direct_fd);
	for (size_t at = (size_t)off / SFR_PAGE; got > 0 && at * SFR_PAGE < (size_t)(off + got);
	     at++)
		(fd == direct_fd ? by_disk : by_cache)[at]++;
	return got;
}

static int open_without_direct(int dir, const char *name, int flags, mode_t mode)
{
	CHECK((flags & O_DIRECT) != 0);
	return openat(dir, name, flags & ~O_DIRECT, mode);
}

static void make_file(void)
{
	file_fd = memfd_create("source", MFD_CLOEXEC);
	file_bytes = malloc(LEN);
	buf = aligned_alloc(SFR_PAGE, NR * SFR_PAGE);
	if (!CHECK(file_fd >= 0 && file_bytes && buf))
		exit(1);
	for (size_t i = 0; i < LEN; i++)
		file_bytes[i] = (char)(i / SFR_PAGE * 31 + i);
	CHECK_EQ(write(file_fd, file_bytes, LEN), LEN);
}

/* Returns the length of the cached run around a page. */
static size_t run_around(size_t page)
{
	size_t from = page, to = page;

	while (from > 0 && cached[from - 1])
		from--;
	while (to < NR && cached[to])
		to++;
	return to - from;
}

static void read_all_of(const struct sfr__source *s)
{
	memset(by_disk, 0, sizeof(by_disk));
	memset(by_cache, 0, sizeof(by_cache));
	memset(buf, 0x55, NR * SFR_PAGE);
	CHECK_EQ(sfr__source_read(s, buf, LEN, 0), 0);
	CHECK(memcmp(buf, file_bytes, LEN) == 0);
	for (size_t i = 0; i < NR; i++) {
		CHECK_EQ(by_disk[i] + by_cache[i], 1);
		if (!cached[i])
			CHECK_EQ(by_disk[i], 1);
		else if (run_around(i) >= WORTH)
			CHECK_EQ(by_cache[i], 1);
	}
}

TEST(cached_pages_are_read_from_the_cache_and_others_from_the_disk)
{
	static const size_t turns[][5] = {
		{ 0, NR, NR, NR, NR },  { NR, NR, NR, NR, NR },    { 20, NR, NR, NR, NR },
		{ 0, 40, NR, NR, NR },  { 0, NR - 3, NR, NR, NR }, { 16, 17, 33, 34, NR },
		{ 15, 16, 32, 40, 60 }, { 1, 2, 3, 4, 5 },         { 0, 1, NR - 1, NR, NR },
	}; /* where it changes, beginning with cached */
	const struct sfr_sys plain = sfr_sys;
	struct sfr__source s;

	sfr_sys.open = open_without_direct;
	sfr__source_open(&s, file_fd, 0, SFR__WAY_EITHER);
	direct_fd = s.direct_fd;
	CHECK(direct_fd >= 0 && direct_fd != file_fd);
	sfr_sys.mincore = fake_mincore;
	sfr_sys.pread = watched_pread;
	for (size_t k = 0; k < sizeof(turns) / sizeof(turns[0]); k++) {
		for (size_t i = 0; i < NR; i++) {
			size_t nr_turns = 0;

			while (nr_turns < 5 && turns[k][nr_turns] <= i)
				nr_turns++;
			cached[i] = nr_turns % 2 == 0;
		}
		read_all_of(&s);
	}
	sfr_sys = plain;
	sfr__source_close(&s);
	CHECK_EQ(s.direct_fd, -1);
	CHECK_EQ(fcntl(direct_fd, F_GETFD), -1); /* it was closed */
}

TEST(shared_reads_go_through_the_page_cache)
{
	struct sfr__source s;

	sfr__source_open(&s, file_fd, 0, SFR__WAY_CACHE);
	CHECK_EQ(s.direct_fd, -1);
	sfr__source_close(&s);
}

BEGIN
{
	make_file();
	return true;
}
