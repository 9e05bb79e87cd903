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
 * The two programs differ in the zip64 field. stillframe writes both sizes into it if a size or the
 * offset needs more than 32 bits; torch writes only the numbers that do. The first header whose
 * length differs between the two tells which program wrote the archive. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "archive/write.h"
#include "reader/reader_int.h"
#include "base/base.h"

#define TORCH_LONG UINT32_C(0xffffffff) /* torch puts numbers from here on into the zip64 field */
#define TORCH_PADDING 4u                /* tag and length of the extra field that has the padding */
#define ALIGN_MAX 32768u                /* the largest alignment that is accepted */

/* The program that wrote an archive. */
enum producer { BY_STILLFRAME, BY_TORCH };

/* Returns the length of torch's local header, without the bytes that align the data. */
static uint64_t torch_local_len(const struct sfr__listed_record *listed)
{
	const bool is_long = listed->len >= TORCH_LONG, is_far = listed->hdr_off >= TORCH_LONG;
	unsigned zip64_len = 0;

	if (is_long || is_far)
		zip64_len += 4; /* tag and length */
	if (is_long)
		zip64_len += 16; /* both sizes */
	if (is_far)
		zip64_len += 8; /* the offset */
	return SFR__UNZIP_LOCAL_LEN + listed->name_len + zip64_len + TORCH_PADDING;
}

/* Returns the offset of a record's data in an archive by this producer. */
static uint64_t data_off_by_producer(const struct sfr__listed_record *listed, uint64_t align,
				     enum producer producer)
{
	uint64_t len;

	if (producer == BY_TORCH)
		len = torch_local_len(listed);
	else
		len = sfr__zip_local_header_len(listed->name_len, listed->len, listed->hdr_off);
	return sfr__round_up(listed->hdr_off + len, align);
}

/* Reads a record's header and returns the offset of the record's data. Returns a negative error:
 *     -errno       the file cannot be read
 *     SFR_EAGAIN   the bytes are still on their way
 *     -EOPNOTSUPP  the header does not fit the listing */
static int64_t read_data_off(const struct sfr_reader *r, const struct sfr__listed_record *listed)
{
	unsigned char header[SFR__UNZIP_LOCAL_LEN];
	int64_t got = sfr__source_read_some(&r->source, header, sizeof(header), listed->hdr_off);
	int name_len, extra_len;

	if (got < 0)
		return got;
	if (got != sizeof(header))
		return -EOPNOTSUPP;
	/* the two lengths of a local header, in little-endian order */
	name_len = header[26] | header[27] << 8;
	extra_len = header[28] | header[29] << 8;
	if (name_len != listed->name_len)
		return -EOPNOTSUPP; /* a check of the headers reports the damage */
	return (int64_t)(listed->hdr_off + sizeof(header) + listed->name_len + (uint64_t)extra_len);
}

/* Returns the index of a record, or r->nr if there is none. `name` is without the archive's prefix,
 * such as "archive/". */
static uint64_t find_record(const struct sfr_reader *r, const char *name)
{
	const size_t len = strlen(name), prefix_len = r->listing->prefix_len;

	for (uint64_t i = 0; i < r->nr; i++) {
		const char *listed_name = r->listing->names + r->listed[i].name_off + prefix_len;

		if (r->listed[i].name_len == prefix_len + len &&
		    memcmp(listed_name, name, len) == 0)
			return i;
	}
	return r->nr;
}

/* Returns the alignment of the archive's data, -EOPNOTSUPP, or another error of read_data_off. */
static int64_t read_archive_alignment(const struct sfr_reader *r)
{
	const uint64_t index = find_record(r, ".storage_alignment");
	const struct sfr__listed_record *listed = &r->listed[index];
	char digits[8] = ""; /* every valid number is shorter */
	long align;
	int64_t off, got;

	if (index == r->nr)
		return SFR_ALIGN; /* an archive of an older version of torch */
	if (listed->len >= sizeof(digits))
		return -EOPNOTSUPP;
	off = read_data_off(r, listed);
	if (off < 0)
		return off;
	got = sfr__source_read_some(&r->source, digits, (size_t)listed->len, (uint64_t)off);
	if (got < 0)
		return got;
	align = strtol(digits, NULL, 10);
	return align >= 1 && align <= ALIGN_MAX ? align : -EOPNOTSUPP;
}

/* Finds the producer by the first record whose data the two would put at different offsets. If
 * there is none, either answer is right. Returns 0 or an error of read_data_off. */
static int find_producer(const struct sfr_reader *r, uint64_t align, enum producer *producer)
{
	*producer = BY_TORCH;
	for (uint64_t i = 0; i < r->nr; i++) {
		const struct sfr__listed_record *listed = &r->listed[i];
		const uint64_t by_stillframe = data_off_by_producer(listed, align, BY_STILLFRAME);
		int64_t data_off;

		if (data_off_by_producer(listed, align, BY_TORCH) == by_stillframe)
			continue;
		data_off = read_data_off(r, listed);
		if (data_off < 0)
			return (int)data_off;
		if ((uint64_t)data_off == by_stillframe)
			*producer = BY_STILLFRAME;
		return 0;
	}
	return 0;
}

/* Sets the offsets of records without headers, whose hdr_off is the offset of the data. Returns 0,
 * or -EINVAL if records overlap. */
static int set_bare_data_offsets(struct sfr_reader *r)
{
	for (uint64_t i = 0; i < r->nr; i++) {
		struct sfr__reader_record *record = &r->records[i];
		const struct sfr__listed_record *listed = &r->listed[i];
		const uint64_t next_start = sfr__reader_next_start(r, i);

		if (listed->hdr_off > next_start || listed->len > next_start - listed->hdr_off)
			return -EINVAL;
		record->data_off = listed->hdr_off; /* there is no header */
		record->nr_unread = listed->len;
		if (listed->len == 0) { /* there is nothing to read */
			atomic_store(&record->good, true);
			r->nr_good++; /* needs no lock: no thread runs yet */
		}
	}
	return 0;
}

/* Computes the offsets of an archive's data. Returns 0 or an error of read_data_off. Returns
 * -EOPNOTSUPP also if the data cannot be at the computed offsets. */
static int compute_data_offsets(struct sfr_reader *r)
{
	const int64_t align = read_archive_alignment(r);
	const int64_t last_data_off = read_data_off(r, &r->listed[r->nr - 1]);
	enum producer producer;
	int rc;

	if (align < 0)
		return (int)align;
	if (last_data_off < 0)
		return (int)last_data_off;
	rc = find_producer(r, (uint64_t)align, &producer);
	if (rc != 0)
		return rc;
	for (uint64_t i = 0; i < r->nr; i++) {
		struct sfr__reader_record *record = &r->records[i];
		const struct sfr__listed_record *listed = &r->listed[i];
		const uint64_t next_start = sfr__reader_next_start(r, i);

		if (i + 1 < r->nr)
			record->data_off = data_off_by_producer(listed, (uint64_t)align, producer);
		else
			record->data_off = (uint64_t)last_data_off;
		if (record->data_off < listed->hdr_off + SFR__UNZIP_LOCAL_LEN + listed->name_len)
			return -EOPNOTSUPP; /* the header is too short */
		if (record->data_off > next_start || listed->len > next_start - record->data_off)
			return -EOPNOTSUPP; /* the data do not fit */
		if (record->data_off - listed->hdr_off > SFR__READER_HEADER_MAX)
			return -EOPNOTSUPP; /* the header is too long */
		/* the header and the descriptor count as one byte each */
		record->nr_unread = listed->len + 1;
		if ((listed->flags & SFR__UNZIP_HAS_DESC) == 0)
			continue;
		record->nr_unread++;
		if (sfr__reader_data_end(r, i) == next_start)
			return -EOPNOTSUPP; /* no room for its descriptor */
	}
	return 0;
}

int sfr__reader_compute_data_offsets(struct sfr_reader *r)
{
	return (r->flags & SFR__READER_BARE) != 0 ? set_bare_data_offsets(r) :
						    compute_data_offsets(r);
}
