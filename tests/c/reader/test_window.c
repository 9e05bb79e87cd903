/* window.c: the window returns the file's bytes for any request in any order, and reads no more
 * often than necessary. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "reader/window.h"
#include "base/base.h"
#include "check.h"

#define LEN 100003u /* a multiple of nothing */

static unsigned char content[LEN];
static int file_of_content(void)
{
	int fd = memfd_create("content", MFD_CLOEXEC);

	for (size_t i = 0; i < LEN; i++)
		content[i] = (unsigned char)check_random();
	if (fd < 0 || pwrite(fd, content, LEN, 0) != (ssize_t)LEN)
		abort();
	return fd;
}

TEST(window_returns_the_files_bytes_for_any_request)
{
	int fd = file_of_content();

	for (int round = 0; round < 40; round++) {
		size_t cap = SFR_PAGE * (2 + check_random() % 8),
		       chunk_bytes = 1 + check_random() % cap;
		struct sfr__window w;

		if (!CHECK_EQ(sfr__window_init(&w, fd, 0, SFR__WAY_CACHE, cap, chunk_bytes), 0))
			continue;
		CHECK((uintptr_t)w.buf % SFR_PAGE == 0);
		for (int i = 0; i < 500; i++) {
			uint64_t off = check_random() % LEN,
				 limit = off + check_random() % (LEN - off + 1);
			size_t len = check_random() % (cap - SFR_PAGE), got;
			const unsigned char *bytes;

			if (len > limit - off)
				len = (size_t)(limit - off);
			CHECK_EQ(sfr__window_get(&w, off, len, limit, &bytes, &got), 0);
			CHECK(got >= len && off + got <= LEN);
			CHECK(memcmp(bytes, content + off, got) == 0);
		}
		sfr__window_fini(&w);
		sfr__window_fini(&w); /* may be called twice */
	}
	(void)close(fd);
}

TEST(sequential_walk_reads_every_chunk_once)
{
	int fd = file_of_content();
	struct sfr__window w;

	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr__window_init(&w, fd, 0, SFR__WAY_CACHE, 4 * SFR_PAGE, 4 * SFR_PAGE), 0);
	for (uint64_t off = 0; off < LEN; off++) {
		const unsigned char *bytes;

		CHECK_EQ(sfr__window_get(&w, off, 1, LEN, &bytes, NULL), 0);
		CHECK(*bytes == content[off]);
	}
	CHECK_EQ(sfr_inject_count_calls("pread"), (LEN + 4 * SFR_PAGE - 1) / (4 * SFR_PAGE));
	sfr_inject_uninstall();
	sfr__window_fini(&w);
	(void)close(fd);
}

TEST(window_refuses_requests_out_of_bounds)
{
	int fd = file_of_content();
	const unsigned char *bytes;
	struct sfr__window w;

	CHECK_EQ(sfr_inject_install(), 0);
	CHECK_EQ(sfr__window_init(&w, fd, 0, SFR__WAY_CACHE, 2 * SFR_PAGE, SFR_PAGE), 0);
	CHECK_EQ(sfr__window_get(&w, 5000, 1, 4999, &bytes, NULL), SFR_ECORRUPT);
	CHECK_EQ(sfr__window_get(&w, 5000, 2, 5001, &bytes, NULL), SFR_ECORRUPT);
	CHECK_EQ(sfr__window_get(&w, UINT64_MAX, 1, LEN, &bytes, NULL), SFR_ECORRUPT);
	CHECK_EQ(sfr__window_get(&w, 0, SIZE_MAX, LEN, &bytes, NULL), SFR_ECORRUPT);
	CHECK_EQ(sfr__window_get(&w, 1, 2 * SFR_PAGE, LEN, &bytes, NULL), SFR_ECORRUPT);
	CHECK_EQ(sfr_inject_count_calls("pread"), 0);
	/* Up to the last byte of its memory and of the limit, a request is valid. */
	CHECK_EQ(sfr__window_get(&w, 1, 2 * SFR_PAGE - 1, LEN, &bytes, NULL), 0);
	CHECK(memcmp(bytes, content + 1, 2 * SFR_PAGE - 1) == 0);
	CHECK_EQ(sfr__window_get(&w, 5000, 1, 5001, &bytes, NULL), 0);
	CHECK_EQ(sfr__window_get(&w, LEN, 0, LEN, &bytes, NULL), 0);
	/* The file ends before the length that the caller was given. */
	CHECK_EQ(sfr__window_get(&w, LEN - 1, 2, LEN + 10, &bytes, NULL), SFR_ECORRUPT);
	sfr_inject_uninstall();
	sfr__window_fini(&w);
	(void)close(fd);
}

static char *advised_from, *advised_to;
static int (*real_madvise)(void *mem, size_t len, int advice);

static int note_madvise(void *mem, size_t len, int advice)
{
	if (!advised_from || (char *)mem < advised_from)
		advised_from = mem;
	if ((char *)mem + len > advised_to)
		advised_to = (char *)mem + len;
	return real_madvise(mem, len, advice);
}

/* Memory is populated before it is read into, but never beyond the caller's own. */
TEST(reading_populates_only_the_callers_pages)
{
	const size_t len = 5 * LEN + 1234, before = 3 * SFR_PAGE + 100;
	char *mem = mmap(NULL, 4 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *buf = mem + before;
	int fd = memfd_create("long", MFD_CLOEXEC);

	if (!CHECK(mem != MAP_FAILED) || !CHECK(fd >= 0 && ftruncate(fd, 4 << 20) == 0))
		return;
	real_madvise = sfr_sys.madvise;
	sfr_sys.madvise = note_madvise;
	for (size_t i = 1; i <= 4; i++) {
		advised_from = advised_to = NULL;
		CHECK_EQ(sfr_fill_from_file(fd, buf, i * len, 0), i * len);
		CHECK(advised_from >= buf && advised_to <= buf + i * len);
		CHECK(advised_to > buf + i * len - SFR_PAGE);
	}
	sfr_sys.madvise = real_madvise;
	CHECK_EQ(munmap(mem, 4 << 20), 0);
	(void)close(fd);
}
