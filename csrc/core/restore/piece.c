/* Checks and distributes one chunk of the file.
 *
 *   the chunk   |..data of 3 | desc | header of 4 | data of 4 | desc | gap | header of 5 | data..|
 *                 |                                 |                                      |
 *                 v copied, CRC computed on the way                                        v
 *   memory      record 3's                        record 4's                             record 5's
 *
 * A record may begin and end in chunks that different threads handle, in any order. CRCs allow
 * that: the CRC of a whole is the sum of the CRCs of its stretches, each shifted by the length
 * after it (sfr_crc32_combine with nothing). A header or descriptor that crosses the end of the
 * chunk is read once more from its beginning, which is rare and costs few bytes.
 *
 * The offsets of data and descriptors are computed (plan.c), and valid only if the record's header
 * confirms them. So a descriptor is called wrong only after its header was checked. Otherwise the
 * verdict on a file packed by another program would depend on the order of the threads. */
#include <errno.h>
#include <string.h>

#include "sfr/crc.h"
#include "restore/plan.h"
#include "base/base.h"

#define WORTH_POPULATING (256u << 10) /* bytes; smaller memory is mostly not new */

struct piece {
	struct sfr_restore *r;
	struct sfr__buffer *buffer;
	uint64_t off, end;
	char *scratch;
};

static bool covers(const struct piece *p, uint64_t off)
{
	return off >= p->off && off < p->end;
}

/* Returns [off, off + len) of the file, len at most SFR__RESTORE_HEADER_MAX: from the chunk if all
 * of it is there. NULL if it could not be read. */
static const unsigned char *bytes_at(const struct piece *p, uint64_t off, size_t len,
				     uint64_t index)
{
	int64_t got;

	if (covers(p, off) && len <= p->end - off)
		return (const unsigned char *)p->buffer->mem + (off - p->off);
	got = sfr_fill(p->r->source.fd, p->scratch, len, off);
	if (got == (int64_t)len)
		return (const unsigned char *)p->scratch;
	sfr__restore_fail(p->r, got < 0 ? (int)got : SFR_ECORRUPT, index, off,
			  got < 0 ? NULL : SFR__RESTORE_SHORTER);
	return NULL;
}

/* Returns a record as the directory describes it. */
static struct sfr__unzip_record as_unzipped(const struct sfr__place *place)
{
	return (struct sfr__unzip_record){
		.hdr_off = place->hdr_off,
		.clen = place->len,
		.ulen = place->len,
		.crc = place->crc,
		.stamp = place->stamp,
		.flags = place->flags,
		.method = SFR__UNZIP_STORED,
		.name_len = place->name_len,
	};
}

/* Compares the local header with the directory, and with the computed offset of the data. False: a
 * failure was recorded. */
static bool header_is_right(const struct piece *p, uint64_t i)
{
	const struct sfr__place *place = &p->r->places[i];
	const struct sfr__unzip_record rec = as_unzipped(place);
	const size_t len = (size_t)(p->r->targets[i].data_off - place->hdr_off);
	const char *name = p->r->check->places.names + place->name_at, *wrong;
	const unsigned char *header = bytes_at(p, place->hdr_off, len, i);
	size_t extra_len, at = SFR__UNZIP_LOCAL + (size_t)place->name_len;

	if (header == NULL)
		return false;
	wrong = sfr__unzip_local(header, &rec, &extra_len);
	if (wrong == NULL && memcmp(header + SFR__UNZIP_LOCAL, name, place->name_len) != 0)
		wrong = "its name in the local header is another one";
	if (wrong == NULL && at + extra_len != len) {
		sfr__restore_fail(p->r, -EOPNOTSUPP, i, place->hdr_off, NULL);
		return false;
	}
	if (wrong == NULL)
		wrong = sfr__unzip_local_extra(header, header + at, extra_len, &rec);
	if (wrong != NULL)
		sfr__restore_fail(p->r, SFR_ECORRUPT, i, place->hdr_off, wrong);
	return wrong == NULL;
}

static bool descriptor_is_right(const struct piece *p, uint64_t i)
{
	const struct sfr__unzip_record rec = as_unzipped(&p->r->places[i]);
	const uint64_t off = sfr__restore_data_end(p->r, i);
	const uint64_t left = sfr__restore_limit(p->r, i) - off;
	size_t len = left < SFR__UNZIP_DESC ? (size_t)left : SFR__UNZIP_DESC;
	const unsigned char *bytes = bytes_at(p, off, len, i);
	const char *wrong;

	if (bytes == NULL)
		return false;
	wrong = sfr__unzip_desc(bytes, len, &rec, &len);
	/* Only the header tells whether a descriptor is there at all, and another thread may not
	 * have checked it yet. */
	if (wrong != NULL && header_is_right(p, i))
		sfr__restore_fail(p->r, SFR_ECORRUPT, i, off, wrong);
	return wrong == NULL;
}

/* Copies bytes to their destination and computes their CRC on the way. False: a failure was
 * recorded. */
static bool put(const struct piece *p, uint64_t i, char *mem, const char *src, size_t len,
		uint32_t *crc)
{
	const bool verify = (p->r->flags & SFR_RESTORE_VERIFY) != 0;

	if (mem == NULL || p->r->targets[i].device != NULL) {
		*crc = verify ? sfr_crc32(0, src, len) : 0;
		return mem == NULL || sfr__restore_send(p->r, p->buffer, i, mem, src, len);
	}
	if (len >= WORTH_POPULATING)
		sfr__populate(mem, len);
	if (verify)
		*crc = sfr_crc32_copy(0, mem, src, len);
	else
		memcpy(mem, src, len);
	return true;
}

/* Distributes the record's data in the chunk; adds their number and CRC to `part`. */
static bool hand_out(const struct piece *p, struct sfr__part *part)
{
	const struct sfr__target *t = &p->r->targets[part->index];
	const uint64_t to = sfr__restore_data_end(p->r, part->index);
	const uint64_t a = t->data_off > p->off ? t->data_off : p->off;
	const uint64_t b = to < p->end ? to : p->end;
	char *mem = t->mem;

	if (a >= b)
		return true;
	if (mem != NULL)
		mem += a - t->data_off;
	if (!put(p, part->index, mem, p->buffer->mem + (a - p->off), (size_t)(b - a), &part->crc))
		return false;
	part->units += b - a;
	part->crc = sfr_crc32_combine(part->crc, 0, to - b);
	return true;
}

/* Counts the bytes of a record: at once, or when they are on their device. */
static bool count(const struct piece *p, const struct sfr__part *part)
{
	int rc = 0;

	if (p->r->targets[part->index].device != NULL)
		rc = sfr__restore_later(p->buffer, part);
	else
		sfr__restore_got(p->r, part->index, part->units, part->crc);
	if (rc < 0)
		sfr__restore_fail(p->r, rc, part->index, p->off, NULL);
	return rc == 0;
}

static bool look_at_record(const struct piece *p, uint64_t i)
{
	const bool described = (p->r->places[i].flags & SFR__UNZIP_DESCRIBED) != 0;
	struct sfr__part part = { .index = i };

	if (covers(p, p->r->places[i].hdr_off)) {
		if (!header_is_right(p, i))
			return false;
		part.units++;
	}
	if (!hand_out(p, &part))
		return false;
	if (described && covers(p, sfr__restore_data_end(p->r, i))) {
		if (!descriptor_is_right(p, i))
			return false;
		part.units++;
	}
	return part.units == 0 || count(p, &part);
}

void sfr__restore_piece(struct sfr__reader *reader, struct sfr__buffer *buffer, uint64_t off,
			size_t len, uint64_t first, uint64_t last)
{
	const struct piece p = { reader->r, buffer, off, off + len, reader->scratch };

	for (uint64_t i = first; i < last; i++)
		if (!look_at_record(&p, i))
			return;
}
