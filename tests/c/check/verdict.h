/* Checks a file for the tests of the reader, and returns the verdict as a plain struct. */
#ifndef VERDICT_H
#define VERDICT_H

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check/check.h"
#include "check/records.h"
#include "archive.h"
#include "check.h"

static inline int file_of(const void *bytes, size_t len)
{
	int fd = memfd_create("archive", MFD_CLOEXEC);

	if (fd < 0 || pwrite(fd, bytes, len, 0) != (ssize_t)len)
		abort();
	return fd;
}

/* A copy of the plain fields of a result, with the first bad record's name. */
struct verdict {
	int rc;
	bool ok, headers;
	enum sfr_format format;
	uint64_t nbytes, nr_records, nr_unchecked, nr_compressed, nr_trailing, nr_bad;
	uint32_t nr_listed;
	char error[512], bad[1100];
	const char *reason;
};

static inline struct verdict check_fd(int fd, unsigned flags)
{
	struct verdict v = { .rc = 0 };
	struct sfr_check *check;

	v.rc = sfr_check_new(fd, flags, &check);
	if (v.rc != 0)
		return v;
	v.rc = sfr_check_run(check, SFR_FOREVER);
	if (v.rc == 0) {
		const struct sfr_check_result *r = sfr_check_result(check);

		v.ok = r->ok;
		v.headers = r->headers;
		v.format = r->format;
		v.nbytes = r->nbytes;
		v.nr_records = r->nr_records;
		v.nr_unchecked = r->nr_unchecked;
		v.nr_compressed = r->nr_compressed;
		v.nr_trailing = r->nr_trailing;
		v.nr_bad = r->nr_bad;
		v.nr_listed = r->nr_listed;
		memcpy(v.error, r->error, sizeof(v.error));
		if (r->nr_listed != 0) {
			(void)snprintf(v.bad, sizeof(v.bad), "%s", r->bad[0].name);
			v.reason = r->bad[0].reason;
		}
		/* Good files have no error message; bad ones have one. */
		CHECK(r->ok == (r->error[0] == '\0'));
		CHECK(!r->ok || r->nr_bad == 0);
		CHECK(r->nr_listed <= r->nr_bad);
		CHECK(!r->ok || sfr_check_bytes_done(check) == r->nbytes);
	}
	sfr_check_free(check);
	return v;
}

static inline struct verdict check_bytes(const void *bytes, size_t len, unsigned flags)
{
	int fd = file_of(bytes, len);
	struct verdict v = check_fd(fd, flags);

	(void)close(fd);
	return v;
}

static inline struct verdict check_archive(const struct archive *a, unsigned flags)
{
	return check_bytes(a->buf, a->len, flags);
}

/* Checks that every kind of check refuses it with a message that contains `words`. */
static inline void refuse(struct archive *a, const char *words)
{
	for (unsigned flags = 0; flags <= SFR_CHECK_BYTES; flags++) {
		struct verdict v = check_archive(a, flags);

		check__that(v.rc == 0 && !v.ok && strstr(v.error, words) != NULL, __FILE__,
			    __LINE__, "\"%s\" in the message \"%s\" (code %d)", words, v.error,
			    v.rc);
	}
}

static inline void accept(struct archive *a, uint64_t nr_records)
{
	for (unsigned flags = 0; flags <= SFR_CHECK_BYTES; flags++) {
		struct verdict v = check_archive(a, flags);

		check__that(v.rc == 0 && v.ok, __FILE__, __LINE__, "accepted, not \"%s\" (code %d)",
			    v.error, v.rc);
		CHECK_EQ(v.nbytes, a->len);
		CHECK_EQ(v.nr_records, nr_records);
		CHECK_EQ(v.format, SFR_FORMAT_ARCHIVE);
	}
}

/* Makes a small checkpoint with all features: an empty storage, gaps, one longer storage. */
static inline struct archive sample(void)
{
	struct archive a = archive_torch();
	unsigned char data[700];

	for (size_t i = 0; i < sizeof(data); i++)
		data[i] = (unsigned char)check_random();
	archive_add(&a, "archive/data/0", data, 100);
	archive_gap(&a, 33);
	archive_add(&a, "archive/data/1", data, 0);
	archive_add(&a, "archive/data/2", data, sizeof(data));
	archive_gap(&a, 7);
	archive_add(&a, "archive/.data/serialization_id", data, 40);
	archive_finish(&a);
	return a;
}

#endif
