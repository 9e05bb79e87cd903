/* Computes the offset of each record's data before the record is read.
 *
 * The directory gives the offset of a record's local header. The data follow that header, and only
 * the header itself tells its own length. To read each header would cost a disk access for each
 * record of a file that is not cached. But both torch and stillframe fill the header so that the
 * data begin at the next multiple of the archive's alignment:
 *
 *     header   30 bytes, name, a zip64 field if there must be one, at least 4 bytes of padding
 *
 * and the archive states its alignment in the record .storage_alignment. (Archives of older
 * versions of torch have no such record; their alignment is 64.) So the offset is computed. It is
 * compared with the header when the chunk with the header is read (chunk.c). An archive that
 * another program has packed again fails there, at its first record. Then torch.load reads the
 * archive, and a check walks it from front to back.
 *
 * The last record of stillframe's files, their identification, is not aligned. Its header is next
 * to the directory, which was just read, so reading it costs nothing. Headers may be hostile: their
 * lengths are compared with the directory's before they are used in sums.
 *
 * The two programs differ in the zip64 field. stillframe writes both sizes into this field if one
 * of them or the offset needs more than 32 bits; torch writes only the numbers that do. The first
 * header in which the two differ tells which program wrote the archive. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "archive/write.h"
#include "reader/reader_int.h"
#include "base/base.h"

/* from this size or offset on, torch uses the zip64 field */
#define TORCH_LONG UINT32_C(0xffffffff)
#define TORCH_PADDING 4u  /* tag and length of the extra field that has the padding */
#define MOST_ALIGN 32768u /* the largest alignment that is accepted */

/* The program that wrote an archive. */
enum producer { BY_STILLFRAME, BY_TORCH };

/* Returns the length of a local header as torch writes it, without the bytes that align the
 * data. */
static uint64_t torch_local_len(const struct sfr__listed *p)
{
	const bool is_long = p->len >= TORCH_LONG, is_far = p->hdr_off >= TORCH_LONG;
	const unsigned zip64_len =
		(is_long || is_far ? 4u : 0u) + (is_long ? 16u : 0u) + (is_far ? 8u : 0u);

	return SFR__UNZIP_LOCAL + p->name_len + zip64_len + TORCH_PADDING;
}

/* Returns the offset at which `producer` puts a record's data. */
static uint64_t data_off_by(const struct sfr__listed *p, uint64_t align, enum producer producer)
{
	const uint64_t len = producer == BY_TORCH ?
				     torch_local_len(p) :
				     sfr__zip_local_len(p->name_len, p->len, p->hdr_off);

	return sfr__round_up(p->hdr_off + len, align);
}

/* Reads a record's header and returns the offset of the record's data. Returns -errno if the file
 * cannot be read, SFR_EAGAIN if the bytes are still on their way, and -EOPNOTSUPP if the header
 * does not fit the listing. */
static int64_t read_data_off(const struct sfr_reader *r, const struct sfr__listed *p)
{
	unsigned char header[SFR__UNZIP_LOCAL];
	int64_t got = sfr__source_read_some(&r->source, header, sizeof(header), p->hdr_off);

	if (got < 0)
		return got;
	/* at 26: the length of the name; at 28: the length of the extra fields */
	if (got != sizeof(header) || (header[26] | header[27] << 8) != p->name_len)
		return -EOPNOTSUPP; /* a check of the headers reports the damage */
	return (int64_t)(p->hdr_off + SFR__UNZIP_LOCAL + p->name_len +
			 (uint64_t)(header[28] | header[29] << 8));
}

/* Returns the index of the record with this name, or r->nr if there is none. `bare` is the name
 * without the archive's prefix. */
static uint64_t find_record(const struct sfr_reader *r, const char *bare)
{
	const size_t len = strlen(bare), prefix_len = r->listing->prefix_len;

	for (uint64_t i = 0; i < r->nr; i++)
		if (r->listed[i].name_len == prefix_len + len &&
		    memcmp(r->listing->names + r->listed[i].name_at + prefix_len, bare, len) == 0)
			return i;
	return r->nr;
}

/* Returns the alignment of the archive's data, which the archive may state in a record. Errors are
 * those of read_data_off; -EOPNOTSUPP also means that the record has no valid number. */
static int64_t find_align(const struct sfr_reader *r)
{
	const uint64_t index = find_record(r, ".storage_alignment");
	const struct sfr__listed *p = &r->listed[index];
	char digits[8] = ""; /* the record's text; every valid number is shorter */
	long align;
	int64_t at;

	if (index == r->nr)
		return SFR_ALIGN;
	if (p->len >= sizeof(digits))
		return -EOPNOTSUPP;
	at = read_data_off(r, p);
	if (at >= 0)
		at = sfr__source_read_some(&r->source, digits, (size_t)p->len, (uint64_t)at);
	if (at < 0)
		return at;
	align = strtol(digits, NULL, 10);
	return align >= 1 && align <= MOST_ALIGN ? align : -EOPNOTSUPP;
}

/* Finds out which of the two programs wrote the archive, by the first record whose data they would
 * put at different offsets. Without such a record either answer is right. Returns 0 or an error of
 * read_data_off. */
static int find_producer(const struct sfr_reader *r, uint64_t align, enum producer *producer)
{
	*producer = BY_TORCH;
	for (uint64_t i = 0; i < r->nr; i++) {
		const struct sfr__listed *p = &r->listed[i];
		int64_t at;

		if (data_off_by(p, align, BY_TORCH) == data_off_by(p, align, BY_STILLFRAME))
			continue;
		at = read_data_off(r, p);
		if (at < 0)
			return (int)at;
		if ((uint64_t)at == data_off_by(p, align, BY_STILLFRAME))
			*producer = BY_STILLFRAME;
		return 0;
	}
	return 0;
}

/* Sets the offset and the length of the data of bare records. These have no headers, so hdr_off in
 * the listing is the offset of the data. Empty records count as read at once. Returns 0, or -EINVAL
 * if records overlap. */
static int plan_bare(struct sfr_reader *r)
{
	for (uint64_t i = 0; i < r->nr; i++) {
		struct sfr__reader_record *t = &r->records[i];
		const struct sfr__listed *p = &r->listed[i];
		const uint64_t limit = sfr__reader_limit(r, i);

		if (p->hdr_off > limit || p->len > limit - p->hdr_off)
			return -EINVAL;
		t->data_off = p->hdr_off;
		t->left = p->len;
		if (p->len == 0) {
			atomic_store(&t->good, true);
			r->nr_good++; /* no thread runs yet */
		}
	}
	return 0;
}

/* Computes the offset of each record's data. Sets `left` to the number of the record's units
 * (struct sfr__record_units): one for each byte, one for the header, one for a descriptor. Returns
 * 0, -EOPNOTSUPP if the records are not where torch or stillframe puts them, or another error of
 * read_data_off. */
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
		struct sfr__reader_record *t = &r->records[i];
		const struct sfr__listed *p = &r->listed[i];
		const uint64_t limit = sfr__reader_limit(r, i);

		t->data_off =
			i + 1 < r->nr ? data_off_by(p, (uint64_t)align, producer) : (uint64_t)last;
		/* is the header long enough, do the data fit, and is the header short enough? */
		if (t->data_off < p->hdr_off + SFR__UNZIP_LOCAL + p->name_len)
			return -EOPNOTSUPP;
		if (t->data_off > limit || p->len > limit - t->data_off)
			return -EOPNOTSUPP;
		if (t->data_off - p->hdr_off > SFR__READER_HEADER_MAX)
			return -EOPNOTSUPP;
		t->left = p->len + 1;
		if ((p->flags & SFR__UNZIP_DESCRIBED) == 0)
			continue;
		t->left++;
		if (sfr__reader_data_end(r, i) == limit)
			return -EOPNOTSUPP; /* there is no room for its descriptor */
	}
	return 0;
}

int sfr__reader_plan(struct sfr_reader *r)
{
	return (r->flags & SFR__READER_BARE) != 0 ? plan_bare(r) : plan_archive(r);
}
