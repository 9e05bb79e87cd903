/* Checks one chunk of the file, and hands it out.
 *
 *   the chunk   |..data of 3 | desc | header of 4 | data of 4 | desc | gap | header of 5 | data..|
 *                 |                                 |                                      |
 *                 v put, CRC computed on the way                                           v
 *   client      record 3's                        record 4's                             record 5's
 *
 * A record may begin and end in chunks that different threads handle, in any order. So each chunk
 * computes the CRC of its part of the record. It shifts this CRC by the number of the record's
 * bytes after the chunk (sfr_crc32_combine with a second CRC of 0). The XOR of all these is the CRC
 * of the record. A header or descriptor that crosses the end of the chunk is read again as a whole.
 *
 * The offsets of data and descriptors are computed (plan.c), and valid only if the record's header
 * confirms them. So a descriptor is called wrong only after its header was checked. Otherwise the
 * result for a file packed by another program would depend on the order of the threads. */
#include <errno.h>
#include <string.h>

#include "sfr/crc.h"
#include "reader/reader_int.h"

struct chunk {
	struct sfr_reader *r;
	struct sfr__buffer *buffer; /* contains the bytes [off, end) of the file */
	uint64_t off, end;
	char *scratch; /* the thread's memory for headers and descriptors that cross `end` */
};

/* ---- headers and descriptors ---------------------------------------------------- */

static bool covers(const struct chunk *chunk, uint64_t off)
{
	return off >= chunk->off && off < chunk->end;
}

/* Returns the bytes [off, off + len) of the file: in the chunk, or read into the scratch memory.
 * `len` is at most SFR__READER_HEADER_MAX. Returns NULL if the reading has ended, or if the bytes
 * cannot be read, which is recorded as a failure of record `index`. */
static const unsigned char *bytes_at(const struct chunk *chunk, uint64_t off, size_t len,
				     uint64_t index)
{
	int64_t read;

	if (covers(chunk, off) && len <= chunk->end - off)
		return (const unsigned char *)chunk->buffer->mem + (off - chunk->off);
	do
		read = sfr__source_read_some(&chunk->r->source, chunk->scratch, len, off);
	while (sfr__reader_again(chunk->r, read));
	if (read == (int64_t)len)
		return (const unsigned char *)chunk->scratch;
	if (read == SFR_EAGAIN)
		return NULL;
	sfr__reader_fail(chunk->r, read < 0 ? (int)read : SFR_ECORRUPT, index, off,
			 read < 0 ? NULL : SFR__READER_SHORTER);
	return NULL;
}

static struct sfr__unzip_record as_unzipped(const struct sfr__listed *listed)
{
	return (struct sfr__unzip_record){
		.hdr_off = listed->hdr_off,
		.clen = listed->len,
		.ulen = listed->len,
		.crc = listed->crc,
		.timestamp = listed->timestamp,
		.flags = listed->flags,
		.method = SFR__UNZIP_STORED,
		.name_len = listed->name_len,
	};
}

/* Compares the local header of record `i` with the directory, and with the computed offset of the
 * data. Returns:
 *      0  the header is right
 *      1  it is damaged, and the reading goes on (SFR__READER_LIST)
 *     -1  the reading ends */
static int check_header(const struct chunk *chunk, uint64_t i)
{
	const struct sfr__listed *listed = &chunk->r->listed[i];
	const struct sfr__unzip_record rec = as_unzipped(listed);
	const size_t len = (size_t)(chunk->r->records[i].data_off - listed->hdr_off);
	const char *name = chunk->r->listing->names + listed->name_at, *wrong;
	const unsigned char *header = bytes_at(chunk, listed->hdr_off, len, i);
	size_t extra_len, at = SFR__UNZIP_LOCAL + (size_t)listed->name_len;

	if (header == NULL)
		return -1;
	wrong = sfr__unzip_local(header, &rec, &extra_len);
	if (wrong == NULL && at + extra_len != len) {
		sfr__reader_fail(chunk->r, -EOPNOTSUPP, i, listed->hdr_off, NULL);
		return -1;
	}
	if (wrong == NULL && memcmp(header + SFR__UNZIP_LOCAL, name, listed->name_len) != 0)
		wrong = "its name in the local header is another one";
	if (wrong == NULL)
		wrong = sfr__unzip_local_extra(header, header + at, extra_len, &rec);
	if (wrong == NULL)
		return 0;
	return sfr__reader_damaged(chunk->r, i, listed->hdr_off, wrong) ? 1 : -1;
}

/* Checks the descriptor of record `i`. Returns false if the reading ends. */
static bool check_descriptor(const struct chunk *chunk, uint64_t i)
{
	const struct sfr__unzip_record rec = as_unzipped(&chunk->r->listed[i]);
	const uint64_t off = sfr__reader_data_end(chunk->r, i);
	const uint64_t left = sfr__reader_limit(chunk->r, i) - off;
	size_t len = left < SFR__UNZIP_DESC ? (size_t)left : SFR__UNZIP_DESC;
	const unsigned char *bytes = bytes_at(chunk, off, len, i);
	const char *wrong;
	int header;

	if (bytes == NULL)
		return false;
	wrong = sfr__unzip_desc(bytes, len, &rec, &len);
	if (wrong == NULL)
		return true;
	/* Only the header tells whether there is a descriptor. Another thread may check it
	 * later. */
	header = check_header(chunk, i);
	if (header != 0)
		return header > 0; /* the damage is the header's */
	return sfr__reader_damaged(chunk->r, i, off, wrong);
}

/* ---- the bytes ------------------------------------------------------------------ */

/* Hands out the bytes of record units->index, and adds their number and CRC to `units`. Returns
 * what the client's `put` does. */
static int hand_out(const struct chunk *chunk, struct sfr__record_units *units)
{
	const struct sfr_reader *r = chunk->r;
	const uint64_t data_off = r->records[units->index].data_off;
	const uint64_t data_end = sfr__reader_data_end(r, units->index);
	/* the record's bytes in the chunk are [from, to) of the file */
	const uint64_t from = data_off > chunk->off ? data_off : chunk->off;
	const uint64_t to = data_end < chunk->end ? data_end : chunk->end;
	const bool sums = (r->flags & SFR__READER_SUMS) != 0;
	const char *bytes = chunk->buffer->mem + (from - chunk->off);
	int rc = 0;

	if (from >= to)
		return 0;
	if (r->client != NULL)
		rc = r->client->put(r->self, chunk->buffer, units->index, from - data_off, bytes,
				    (size_t)(to - from), sums ? &units->crc : NULL);
	else if (sums)
		units->crc = sfr_crc32(0, bytes, (size_t)(to - from));
	units->nr += to - from;
	/* shifted by the record's bytes after the chunk */
	units->crc = sfr_crc32_combine(units->crc, 0, data_end - to);
	return rc;
}

/* Checks the header and the descriptor that begin in the chunk, and hands out the record's bytes.
 * If the client still needs the buffer, the units are counted later. */
static bool check_and_hand_out(const struct chunk *chunk, uint64_t i)
{
	const bool described = (chunk->r->listed[i].flags & SFR__UNZIP_DESCRIBED) != 0;
	const bool bare = (chunk->r->flags & SFR__READER_BARE) != 0;
	struct sfr__record_units units = { .index = i };
	int rc;

	if (!bare && covers(chunk, chunk->r->listed[i].hdr_off)) {
		if (check_header(chunk, i) < 0)
			return false;
		units.nr++;
	}
	rc = hand_out(chunk, &units);
	if (rc < 0)
		return false;
	if (described && covers(chunk, sfr__reader_data_end(chunk->r, i))) {
		if (!check_descriptor(chunk, i))
			return false;
		units.nr++;
	}
	if (rc == SFR__READER_LATER) {
		rc = sfr__reader_keep_units(chunk->buffer, &units);
		if (rc < 0)
			sfr__reader_fail(chunk->r, rc, i, chunk->off, NULL);
	} else if (units.nr != 0) {
		sfr__reader_count_units(chunk->r, &units);
	}
	return rc >= 0;
}

void sfr__reader_read_chunk(struct sfr__reader_thread *thread, struct sfr__buffer *buffer,
			    uint64_t off, size_t len, uint64_t first, uint64_t last)
{
	const struct chunk chunk = { thread->r, buffer, off, off + len, thread->scratch };

	for (uint64_t i = first; i < last; i++)
		if (!check_and_hand_out(&chunk, i))
			return;
}
