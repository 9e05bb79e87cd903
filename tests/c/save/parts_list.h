/* Lists of parts for tests: the file that each describes, its save, and a check of the written
 * file. */
#ifndef PARTS_LIST_H
#define PARTS_LIST_H

#include "saving.h"

enum { KIB = 1024, MIB = 1 << 20, MEMORY = 4 * MIB, MAX_PARTS = 400 };

static const char *dir;
static unsigned char *memory; /* page aligned; the sources are ranges of it */
static unsigned char *expected, *got;
enum { FILE_MAX = 24 * MIB };

/* ---- a list of parts, and the file that it describes ---- */

struct list {
	struct sfr_parts *parts;
	uint64_t len;
	uint32_t nr_sources, crcs[MAX_PARTS];
	int rc;
};

static inline void add_bytes(struct list *l, const void *bytes, size_t len)
{
	memcpy(expected + l->len, bytes, len);
	l->len += len;
	if (l->rc == 0)
		l->rc = sfr_parts_add_bytes(l->parts, bytes, len);
}

static inline void add_source(struct list *l, const unsigned char *bytes, uint64_t len)
{
	memcpy(expected + l->len, bytes, len);
	l->len += len;
	l->crcs[l->nr_sources++] = sfr_crc32(0, bytes, len);
	if (l->rc == 0)
		l->rc = sfr_parts_add_source(l->parts, len ? (uint64_t)(uintptr_t)bytes : 0, len);
}

static inline void add_crc(struct list *l, uint32_t source)
{
	memcpy(expected + l->len, &l->crcs[source], 4);
	l->len += 4;
	if (l->rc == 0)
		l->rc = sfr_parts_add_crc(l->parts, source);
}

/* Aligns the next source in the file as it is aligned in memory. */
static inline void align(struct list *l, const unsigned char *bytes)
{
	static const char zeros[SFR_PAGE];

	add_bytes(l, zeros, ((uintptr_t)bytes - l->len) % SFR_PAGE);
}

static inline int new_save(struct sfr_engine *engine, struct sfr_parts *parts, uint32_t flags,
			   struct sfr_ticket **t)
{
	const struct sfr_save_desc desc = { .dir = dir, .name = "a", .flags = flags };

	return sfr_save_new_parts(engine, &desc, parts, t);
}

/* Saves the list, and frees it. Returns the save's code. */
static inline int save(struct sfr_engine *engine, struct list *l, uint32_t flags)
{
	struct sfr_report report;
	struct sfr_ticket *t = NULL;
	int rc = new_save(engine, l->parts, flags, &t);

	sfr_parts_free(l->parts);
	if (rc < 0)
		return rc;
	rc = saving_submit(t);
	if (rc == 0) {
		saving_finish(t);
		CHECK_EQ(sfr_save_report(t, &report), 0);
		CHECK_EQ(report.nbytes, l->len);
		rc = report.err.code;
		if (rc == 0)
			CHECK_EQ(t->facts.written_nbytes, l->len);
	}
	sfr_ticket_put(t);
	return rc;
}

static inline void check_file(const struct list *l)
{
	char path[PATH_MAX];
	FILE *file;
	size_t len;

	(void)snprintf(path, sizeof(path), "%s/a", dir);
	file = fopen(path, "rb");
	if (!CHECK(file != NULL))
		return;
	len = fread(got, 1, FILE_MAX, file);
	CHECK_EQ(len, l->len);
	CHECK(memcmp(got, expected, l->len) == 0);
	(void)fclose(file);
}

/* ---- the memory and the directory ---- */

static inline bool list_begin(void)
{
	dir = saving_dir();
	memory = aligned_alloc(SFR_PAGE, MEMORY);
	expected = malloc(FILE_MAX);
	got = malloc(FILE_MAX);
	if (!memory || !expected || !got)
		return false;
	for (uint64_t k = 0; k < MEMORY; k++)
		memory[k] = (unsigned char)(k * 2654435761u >> 13);
	return true;
}

#endif
