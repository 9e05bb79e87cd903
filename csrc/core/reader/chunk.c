/* Checks one chunk of the file, and hands its bytes to the client.
 *
 *   the chunk   |..data of 3 | desc | header of 4 | data of 4 | desc | gap | header of 5 | data..|
 *                 |                                 |                                      |
 *                 v put, CRC computed on the way                                           v
 *   client      record 3's                        record 4's                             record 5's
 *
 * Different threads may handle the chunks of a record, in any order. So the CRC of each part of the
 * record is computed alone, and then combined with a CRC of 0 for the record's bytes after this
 * part (sfr_crc32_combine). The XOR of all these is the CRC of the record. A header or descriptor
 * that crosses the end of the chunk is read again as a whole.
 *
 * The offsets of data and descriptors are computed (plan.c), and valid only if the record's header
 * agrees with them. So a descriptor is reported as wrong only after its header was checked.
 * Otherwise the result for a file packed by another program would depend on the order of the
 * threads. */
#include <errno.h>
#include <string.h>

#include "sfr/crc.h"
#include "reader/reader_int.h"

/* The chunk that a thread handles. */
struct chunk {
	struct sfr_reader *r;
	struct sfr__reader_buffer *buffer; /* contains the bytes [off, end) of the file */
	uint64_t off, end;
	char *scratch; /* the thread's memory for headers and descriptors that cross `end` */
};

/* ---- headers and descriptors ---------------------------------------------------- */

/* Returns whether the byte at offset `off` of the file is in the chunk. */
static bool contains(const struct chunk *chunk, uint64_t off)
{
	return off >= chunk->off && off < chunk->end;
}

/* Returns the bytes [off, off + len) of the file: in the chunk, or read into the scratch memory.
 * `len` is at most SFR__READER_HEADER_MAX. Returns NULL if the reader was stopped, or if the bytes
 * cannot be read; then the reader fails at record `index`. */
static const unsigned char *get_or_read_bytes(const struct chunk *chunk, uint64_t off, size_t len,
					      uint64_t index)
{
	int64_t read;

	if (contains(chunk, off) && len <= chunk->end - off)
		return (const unsigned char *)chunk->buffer->mem + (off - chunk->off);
	do
		read = sfr__source_read_some(&chunk->r->source, chunk->scratch, len, off);
	while (sfr__reader_should_retry(chunk->r, read));
	if (read == (int64_t)len)
		return (const unsigned char *)chunk->scratch;
	if (read == SFR_EAGAIN)
		return NULL; /* the reader was stopped */
	if (read < 0)
		sfr__reader_fail(chunk->r, (int)read, index, off, NULL);
	else
		sfr__reader_fail(chunk->r, SFR_ECORRUPT, index, off, SFR__READER_SHORTER);
	return NULL;
}

/* Returns what the functions sfr__unzip_* compare headers with. */
static struct sfr__unzip_record unzip_record_of(const struct sfr__listed_record *listed)
{
	return (struct sfr__unzip_record){
		.hdr_off = listed->hdr_off,
		.packed_len = listed->len,
		.unpacked_len = listed->len,
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
 *      1  it is damaged, and the reading goes on (SFR__READER_LIST_DAMAGE)
 *     -1  the reading ends */
static int check_header(const struct chunk *chunk, uint64_t i)
{
	const struct sfr__listed_record *listed = &chunk->r->listed[i];
	const struct sfr__unzip_record rec = unzip_record_of(listed);
	const size_t len = (size_t)(chunk->r->records[i].data_off - listed->hdr_off);
	const char *name = chunk->r->listing->names + listed->name_off;
	const unsigned char *header = get_or_read_bytes(chunk, listed->hdr_off, len, i);
	/* the extra fields follow the name */
	const size_t extra_off = SFR__UNZIP_LOCAL_LEN + (size_t)listed->name_len;
	const char *wrong;
	size_t extra_len;

	if (header == NULL)
		return -1;
	wrong = sfr__unzip_check_local(header, &rec, &extra_len);
	if (wrong == NULL && extra_off + extra_len != len) { /* the data are at another offset */
		sfr__reader_fail(chunk->r, -EOPNOTSUPP, i, listed->hdr_off, NULL);
		return -1;
	}
	if (wrong == NULL && memcmp(header + SFR__UNZIP_LOCAL_LEN, name, listed->name_len) != 0)
		wrong = "its name in the local header is another one";
	if (wrong == NULL)
		wrong = sfr__unzip_check_local_extra(header, header + extra_off, extra_len, &rec);
	if (wrong == NULL)
		return 0;
	return sfr__reader_report_damage(chunk->r, i, listed->hdr_off, wrong) ? 1 : -1;
}

/* Checks the descriptor of record `i`. Returns false if the reading ends. */
static bool check_descriptor(const struct chunk *chunk, uint64_t i)
{
	const struct sfr__unzip_record rec = unzip_record_of(&chunk->r->listed[i]);
	const uint64_t off = sfr__reader_data_end(chunk->r, i);
	const uint64_t left = sfr__reader_next_start(chunk->r, i) - off;
	size_t len = left < SFR__UNZIP_DESC_MAX ? (size_t)left : SFR__UNZIP_DESC_MAX;
	const unsigned char *bytes = get_or_read_bytes(chunk, off, len, i);
	const char *wrong;
	int header_rc;

	if (bytes == NULL)
		return false;
	wrong = sfr__unzip_check_desc(bytes, len, &rec, &len);
	if (wrong == NULL)
		return true;
	/* The header tells where the descriptor is, but another thread may not have checked the
	 * header yet. If the header is wrong, that is reported instead. */
	header_rc = check_header(chunk, i);
	if (header_rc != 0) /* 1: the damage is listed, and the reading goes on */
		return header_rc == 1;
	return sfr__reader_report_damage(chunk->r, i, off, wrong);
}

/* ---- the bytes ------------------------------------------------------------------ */

/* Hands the bytes of record fragment->index that are in the chunk to the client, and adds their
 * number and CRC to the fragment. Returns as the client's `put` does. */
static int hand_to_client(const struct chunk *chunk, struct sfr__record_fragment *fragment)
{
	const struct sfr_reader *r = chunk->r;
	const uint64_t data_off = r->records[fragment->index].data_off;
	const uint64_t data_end = sfr__reader_data_end(r, fragment->index);
	/* the record's bytes in the chunk are [from, to) of the file */
	const uint64_t from = data_off > chunk->off ? data_off : chunk->off;
	const uint64_t to = data_end < chunk->end ? data_end : chunk->end;
	const bool needs_crc = (r->flags & SFR__READER_CRCS) != 0;
	const char *bytes = chunk->buffer->mem + (from - chunk->off);
	int rc = 0;

	if (from >= to)
		return 0;
	if (r->client != NULL)
		rc = r->client->put(r->self, chunk->buffer, fragment->index, from - data_off, bytes,
				    (size_t)(to - from), needs_crc ? &fragment->crc : NULL);
	else if (needs_crc)
		fragment->crc = sfr_crc32(0, bytes, (size_t)(to - from));
	fragment->nr_read += to - from;
	/* The CRC as if zeros followed, up to the end of the record. The XOR of such CRCs is the
	 * record's CRC. */
	fragment->crc = sfr_crc32_combine(fragment->crc, 0, data_end - to);
	return rc;
}

/* Checks the header and the descriptor of record `i` if they begin in the chunk, and hands its
 * bytes to the client. If the client still needs the buffer, the fragment is counted later. Returns
 * false if the reading ends. */
static bool check_and_hand_over_record(const struct chunk *chunk, uint64_t i)
{
	const bool has_descriptor = (chunk->r->listed[i].flags & SFR__UNZIP_HAS_DESC) != 0;
	const bool bare = (chunk->r->flags & SFR__READER_BARE) != 0;
	struct sfr__record_fragment fragment = { .index = i };
	int rc;

	if (!bare && contains(chunk, chunk->r->listed[i].hdr_off)) {
		if (check_header(chunk, i) < 0)
			return false;
		fragment.nr_read++; /* the header counts as one byte */
	}
	rc = hand_to_client(chunk, &fragment);
	if (rc < 0)
		return false;
	if (has_descriptor && contains(chunk, sfr__reader_data_end(chunk->r, i))) {
		if (!check_descriptor(chunk, i))
			return false;
		fragment.nr_read++; /* so does the descriptor */
	}
	if (rc == SFR__READER_NEEDS_BUFFER) {
		rc = sfr__reader_add_pending_fragment(chunk->buffer, &fragment);
		if (rc < 0)
			sfr__reader_fail(chunk->r, rc, i, chunk->off, NULL);
	} else if (fragment.nr_read != 0) {
		sfr__reader_apply_fragment(chunk->r, &fragment);
	}
	return rc >= 0;
}

void sfr__reader_process_chunk(struct sfr__reader_thread *thread, struct sfr__reader_buffer *buffer,
			       uint64_t off, size_t len, uint64_t first, uint64_t end)
{
	const struct chunk chunk = { thread->r, buffer, off, off + len, thread->scratch };

	for (uint64_t i = first; i < end; i++)
		if (!check_and_hand_over_record(&chunk, i))
			return;
}
