/* Computes the offset of each record's data before the record is read.
 *
 * The directory gives the offset of a record's local header. The data follow that header, and only
 * the header tells its own length. Reading each header would cost a disk access for each record.
 * But torch and stillframe both fill the header so that the data begin at the next multiple of the
 * archive's alignment:
 *
 *     header   30 bytes, name, a zip64 field if there must be one, at least 4 bytes of padding
 *
 * The archive states its alignment in the record .storage_alignment; in archives of older versions
 * of torch it is 64. So the offset is computed, and compared with the header when that is read
 * (chunk.c). An archive that another program has packed fails there, at its first record.
 *
 * The last record of stillframe's files, their identification, is not aligned. Its header is next
 * to the directory, which was just read, so it is read here. Headers may be hostile: their lengths
 * are compared with the directory's before they are used in sums.
 *
 * The two programs differ in the zip64 field. stillframe writes both sizes into it if one of them
 * or the offset needs more than 32 bits; torch writes only the numbers that do. The first header in
 * which the two differ tells which program wrote the archive. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "archive/write.h"
#include "reader/reader_int.h"
#include "base/base.h"

#define TORCH_LONG UINT32_C(0xffffffff) /* from here on torch uses the zip64 field */
#define TORCH_PADDING 4u                /* tag and length of the extra field that has the padding */
#define MOST_ALIGN 32768u               /* the largest alignment that is accepted */

enum producer { BY_STILLFRAME, BY_TORCH };

/* Returns the length of torch's local header, without the bytes that align the data. */
static uint64_t torch_local_len(const struct sfr__listed *listed)
{
	const bool is_long = listed->len >= TORCH_LONG, is_far = listed->hdr_off >= TORCH_LONG;
	unsigned zip64_len = 0;

	if (is_long || is_far)
		zip64_len += 4; /* tag and length */
	if (is_long)
		zip64_len += 16; /* both sizes */
	if (is_far)
		zip64_len += 8; /* the offset */
	return SFR__UNZIP_LOCAL + listed->name_len + zip64_len + TORCH_PADDING;
}

static uint64_t data_off_by(const struct sfr__listed *listed, uint64_t align,
			    enum producer producer)
{
	uint64_t len;

	if (producer == BY_TORCH)
		len = torch_local_len(listed);
	else
		len = sfr__zip_local_len(listed->name_len, listed->len, listed->hdr_off);
	return sfr__round_up(listed->hdr_off + len, align);
}

/* Reads a record's header and returns the offset of the record's data. Returns a negative error:
 *     -errno       the file cannot be read
 *     SFR_EAGAIN   the bytes are still on their way
 *     -EOPNOTSUPP  the header does not fit the listing */
static int64_t read_data_off(const struct sfr_reader *r, const struct sfr__listed *listed)
{
	unsigned char header[SFR__UNZIP_LOCAL];
	int64_t got = sfr__source_read_some(&r->source, header, sizeof(header), listed->hdr_off);
	int name_len, extra_len;

	if (got < 0)
		return got;
	if (got != sizeof(header))
		return -EOPNOTSUPP;
	name_len = header[26] | header[27] << 8;
	extra_len = header[28] | header[29] << 8;
	if (name_len != listed->name_len)
		return -EOPNOTSUPP; /* a check of the headers reports the damage */
	return (int64_t)(listed->hdr_off + sizeof(header) + listed->name_len + (uint64_t)extra_len);
}

/* Returns the index of the record named `bare` after the archive's prefix, or r->nr. */
static uint64_t find_record(const struct sfr_reader *r, const char *bare)
{
	const size_t len = strlen(bare), prefix_len = r->listing->prefix_len;

	for (uint64_t i = 0; i < r->nr; i++)
		if (r->listed[i].name_len == prefix_len + len &&
		    memcmp(r->listing->names + r->listed[i].name_at + prefix_len, bare, len) == 0)
			return i;
	return r->nr;
}

/* Returns the alignment of the archive's data, -EOPNOTSUPP, or another error of read_data_off. */
static int64_t find_align(const struct sfr_reader *r)
{
	const uint64_t index = find_record(r, ".storage_alignment");
	const struct sfr__listed *listed = &r->listed[index];
	char digits[8] = ""; /* every valid number is shorter */
	long align;
	int64_t at;

	if (index == r->nr)
		return SFR_ALIGN;
	if (listed->len >= sizeof(digits))
		return -EOPNOTSUPP;
	at = read_data_off(r, listed);
	if (at >= 0)
		at = sfr__source_read_some(&r->source, digits, (size_t)listed->len, (uint64_t)at);
	if (at < 0)
		return at;
	align = strtol(digits, NULL, 10);
	return align >= 1 && align <= MOST_ALIGN ? align : -EOPNOTSUPP;
}

/* If the two agree on all records, either answer is right. Returns 0 or an error of
 * read_data_off. */
static int find_producer(const struct sfr_reader *r, uint64_t align, enum producer *producer)
{
	*producer = BY_TORCH;
	for (uint64_t i = 0; i < r->nr; i++) {
		const struct sfr__listed *listed = &r->listed[i];
		const uint64_t by_stillframe = data_off_by(listed, align, BY_STILLFRAME);
		int64_t at;

		if (data_off_by(listed, align, BY_TORCH) == by_stillframe)
			continue;
		at = read_data_off(r, listed);
		if (at < 0)
			return (int)at;
		if ((uint64_t)at == by_stillframe)
			*producer = BY_STILLFRAME;
		return 0;
	}
	return 0;
}

/* For bare records hdr_off is the offset of the data. Returns -EINVAL if they overlap. */
static int plan_bare(struct sfr_reader *r)
{
	for (uint64_t i = 0; i < r->nr; i++) {
		struct sfr__reader_record *record = &r->records[i];
		const struct sfr__listed *listed = &r->listed[i];
		const uint64_t limit = sfr__reader_limit(r, i);

		if (listed->hdr_off > limit || listed->len > limit - listed->hdr_off)
			return -EINVAL;
		record->data_off = listed->hdr_off;
		record->left = listed->len;
		if (listed->len == 0) {
			atomic_store(&record->good, true);
			r->nr_good++; /* no thread runs yet */
		}
	}
	return 0;
}

/* Returns 0 or an error of read_data_off, -EOPNOTSUPP also if the data cannot be at the computed
 * offsets. */
static int plan_archive(struct sfr_reader *r)
{
	const int64_t align = find_align(r), last = read_data_off(r, &r->listed[r->nr - 1]);
	enum producer producer;
	int rc;

	if (align < 0 || last < 0)
		return (int)(align < 0 ? align : last);
	rc = find_producer(r, (uint64_t)align, &producer);
	if (rc != 0)
		return rc;
	for (uint64_t i = 0; i < r->nr; i++) {
		struct sfr__reader_record *record = &r->records[i];
		const struct sfr__listed *listed = &r->listed[i];
		const uint64_t limit = sfr__reader_limit(r, i);

		record->data_off = (uint64_t)last;
		if (i + 1 < r->nr)
			record->data_off = data_off_by(listed, (uint64_t)align, producer);
		if (record->data_off < listed->hdr_off + SFR__UNZIP_LOCAL + listed->name_len)
			return -EOPNOTSUPP; /* the header is too short */
		if (record->data_off > limit || listed->len > limit - record->data_off)
			return -EOPNOTSUPP; /* the data do not fit */
		if (record->data_off - listed->hdr_off > SFR__READER_HEADER_MAX)
			return -EOPNOTSUPP; /* the header is too long */
		record->left = listed->len + 1;
		if ((listed->flags & SFR__UNZIP_DESCRIBED) == 0)
			continue;
		record->left++;
		if (sfr__reader_data_end(r, i) == limit)
			return -EOPNOTSUPP; /* no room for its descriptor */
	}
	return 0;
}

int sfr__reader_plan(struct sfr_reader *r)
{
	return (r->flags & SFR__READER_BARE) != 0 ? plan_bare(r) : plan_archive(r);
}
