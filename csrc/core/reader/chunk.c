/* Checks one chunk of the file, and hands it out.
 *
 *   the chunk   |..data of 3 | desc | header of 4 | data of 4 | desc | gap | header of 5 | data..|
 *                 |                                 |                                      |
 *                 v put, CRC computed on the way                                           v
 *   client      record 3's                        record 4's                             record 5's
 *
 * A record may begin and end in chunks that different threads handle, in any order. CRCs allow
 * that. For each chunk, the CRC of the record's bytes in this chunk is shifted by the number of the
 * record's bytes after it (sfr_crc32_combine with a second CRC of 0). The XOR of these is the CRC
 * of the record. A header or descriptor that crosses the end of the chunk is read again as a whole,
 * which is rare and costs few bytes.
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

/* Returns whether the chunk contains this byte of the file. */
static bool covers(const struct chunk *p, uint64_t off)
{
	return off >= p->off && off < p->end;
}

/* Returns the bytes [off, off + len) of the file; `len` is at most SFR__READER_HEADER_MAX. The
 * result points into the chunk if the chunk has all these bytes. Otherwise they are read into the
 * scratch memory. Returns NULL if the reading has ended, or if the bytes cannot be read. The latter
 * failure is recorded, as one of record `index`. */
static const unsigned char *bytes_at(const struct chunk *p, uint64_t off, size_t len,
				     uint64_t index)
{
	int64_t read;

	if (covers(p, off) && len <= p->end - off)
		return (const unsigned char *)p->buffer->mem + (off - p->off);
	do
		read = sfr__source_read_some(&p->r->source, p->scratch, len, off);
	while (sfr__reader_again(p->r, read));
	if (read == (int64_t)len)
		return (const unsigned char *)p->scratch;
	if (read == SFR_EAGAIN)
		return NULL; /* the reading has ended */
	sfr__reader_fail(p->r, read < 0 ? (int)read : SFR_ECORRUPT, index, off,
			 read < 0 ? NULL : SFR__READER_SHORTER);
	return NULL;
}

/* Returns a record's description in the directory, in the form that sfr__unzip_local takes. */
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
 * data. Returns 0 if the header is right, 1 if it is damaged and the reading goes on
 * (SFR__READER_LIST), and -1 if the reading ends. */
static int check_header(const struct chunk *p, uint64_t i)
{
	const struct sfr__listed *listed = &p->r->listed[i];
	const struct sfr__unzip_record rec = as_unzipped(listed);
	const size_t len = (size_t)(p->r->records[i].data_off - listed->hdr_off);
	const char *name = p->r->listing->names + listed->name_at, *wrong;
	const unsigned char *header = bytes_at(p, listed->hdr_off, len, i);
	size_t extra_len, at = SFR__UNZIP_LOCAL + (size_t)listed->name_len;

	if (header == NULL)
		return -1;
	wrong = sfr__unzip_local(header, &rec, &extra_len);
	if (wrong == NULL && at + extra_len != len) {
		sfr__reader_fail(p->r, -EOPNOTSUPP, i, listed->hdr_off, NULL);
		return -1;
	}
	if (wrong == NULL && memcmp(header + SFR__UNZIP_LOCAL, name, listed->name_len) != 0)
		wrong = "its name in the local header is another one";
	if (wrong == NULL)
		wrong = sfr__unzip_local_extra(header, header + at, extra_len, &rec);
	if (wrong == NULL)
		return 0;
	return sfr__reader_damaged(p->r, i, listed->hdr_off, wrong) ? 1 : -1;
}

/* Checks the descriptor of record `i`. Returns false if the reading ends. */
static bool check_descriptor(const struct chunk *p, uint64_t i)
{
	const struct sfr__unzip_record rec = as_unzipped(&p->r->listed[i]);
	const uint64_t off = sfr__reader_data_end(p->r, i);
	const uint64_t left = sfr__reader_limit(p->r, i) - off;
	size_t len = left < SFR__UNZIP_DESC ? (size_t)left : SFR__UNZIP_DESC;
	const unsigned char *bytes = bytes_at(p, off, len, i);
	const char *wrong;
	int header;

	if (bytes == NULL)
		return false;
	wrong = sfr__unzip_desc(bytes, len, &rec, &len);
	if (wrong == NULL)
		return true;
	/* Only the header tells whether a descriptor is there at all, and another thread may not
	 * have checked it yet. */
	header = check_header(p, i);
	if (header != 0)
		return header > 0; /* the damage is the header's */
	return sfr__reader_damaged(p->r, i, off, wrong);
}

/* ---- the bytes ------------------------------------------------------------------ */

/* Hands the client the bytes that record units->index has in the chunk, and adds their number and
 * CRC to `units`. Returns 0, SFR__READER_LATER or -1, as the client's `put` does. */
static int hand_out(const struct chunk *p, struct sfr__record_units *units)
{
	const struct sfr_reader *r = p->r;
	const uint64_t data_off = r->records[units->index].data_off;
	const uint64_t to = sfr__reader_data_end(r, units->index);
	/* the record's bytes in the chunk are [a, b) of the file */
	const uint64_t a = data_off > p->off ? data_off : p->off;
	const uint64_t b = to < p->end ? to : p->end;
	const bool sums = (r->flags & SFR__READER_SUMS) != 0;
	const char *bytes = p->buffer->mem + (a - p->off);
	int rc = 0;

	if (a >= b)
		return 0;
	if (r->client != NULL)
		rc = r->client->put(r->self, p->buffer, units->index, a - data_off, bytes,
				    (size_t)(b - a), sums ? &units->crc : NULL);
	else if (sums)
		units->crc = sfr_crc32(0, bytes, (size_t)(b - a));
	units->nr += b - a;
	units->crc = sfr_crc32_combine(units->crc, 0, to - b); /* shifted by what follows */
	return rc;
}

/* Checks the header and the descriptor of a record, if they begin in the chunk, and hands out the
 * bytes that the record has in the chunk. Counts these units now, or leaves that until the client
 * has finished with the buffer. Returns false if the reading ends. */
static bool check_and_hand_out(const struct chunk *p, uint64_t i)
{
	const bool described = (p->r->listed[i].flags & SFR__UNZIP_DESCRIBED) != 0;
	const bool bare = (p->r->flags & SFR__READER_BARE) != 0;
	struct sfr__record_units units = { .index = i };
	int rc;

	if (!bare && covers(p, p->r->listed[i].hdr_off)) {
		if (check_header(p, i) < 0)
			return false;
		units.nr++;
	}
	rc = hand_out(p, &units);
	if (rc < 0)
		return false;
	if (described && covers(p, sfr__reader_data_end(p->r, i))) {
		if (!check_descriptor(p, i))
			return false;
		units.nr++;
	}
	if (rc == SFR__READER_LATER) {
		rc = sfr__reader_keep_units(p->buffer, &units);
		if (rc < 0)
			sfr__reader_fail(p->r, rc, i, p->off, NULL);
	} else if (units.nr != 0) {
		sfr__reader_count_units(p->r, &units);
	}
	return rc >= 0;
}

/* Stops at the first record whose check or put ends the reading. */
void sfr__reader_read_chunk(struct sfr__reader_thread *thread, struct sfr__buffer *buffer,
			    uint64_t off, size_t len, uint64_t first, uint64_t last)
{
	const struct chunk p = { thread->r, buffer, off, off + len, thread->scratch };

	for (uint64_t i = first; i < last; i++)
		if (!check_and_hand_out(&p, i))
			return;
}
