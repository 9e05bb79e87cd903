/* One piece of the file: what is in it, and whether it is right.
 *
 *     the piece   |..data of 3 | desc | header of 4 | data of 4 | desc | gap | header of 5 | data..|
 *                   |                                 |                                      |
 *                   v copied, and its CRC made on the way                                    v
 *     memory      record 3's                        record 4's                             record 5's
 *
 * A record may begin and end in pieces that different threads look at, in any order. CRCs do not
 * mind: that of a whole is the sum of its parts' CRCs, each moved by what stands behind it
 * (sfr_crc32_combine with nothing). A header or descriptor that lies across the end of the piece is
 * read once more, from its beginning: few bytes, and seldom.
 */
#include <errno.h>
#include <string.h>

#include "restore/plan.h"
#include "base/base.h"

void sfr__restore_fail(struct sfr_restore *r, int code, uint64_t index, uint64_t off,
		       const char *reason)
{
	sfr__lock(&r->mu);
	if (r->failure.code == 0)
		r->failure = (struct sfr_restore_failure){ code, index, off, reason };
	r->stop = true;
	(void)pthread_cond_broadcast(&r->work);
	(void)pthread_cond_broadcast(&r->news);
	sfr__unlock(&r->mu);
}

void sfr__restore_got(struct sfr_restore *r, uint64_t index, uint64_t units, uint32_t crc)
{
	struct sfr__target *t = &r->targets[index];
	const struct sfr__place *p = &r->places[index];
	bool whole, wrong = false;

	sfr__lock(&r->mu);
	t->left -= units;
	t->crc ^= crc;
	whole = t->left == 0;
	/* With torch's compute_crc32=False all CRCs are zero: nothing is known of such bytes. */
	if (whole && (r->flags & SFR_RESTORE_VERIFY) != 0)
		wrong = t->crc != p->crc && p->crc != 0;
	if (whole && !wrong) {
		atomic_store(&t->good, true);
		r->nr_good++;
		if (index == r->awaited || r->nr_good == r->nr)
			(void)pthread_cond_broadcast(&r->news);
	}
	sfr__unlock(&r->mu);
	if (wrong)
		sfr__restore_fail(r, SFR_ECORRUPT, index, t->data_off,
				  "its bytes do not match their CRC");
}

#define WORTH_POPULATING (256u << 10) /* bytes: below, the memory is mostly not new */

struct piece {
	struct sfr_restore *r;
	const char *buf;
	uint64_t off, end;
	char *scratch;
};

static bool covers(const struct piece *p, uint64_t off)
{
	return off >= p->off && off < p->end;
}

/* [off, off + len), which begins in the piece. NULL: it could not be read. */
static const unsigned char *bytes_at(const struct piece *p, uint64_t off, size_t len,
				     uint64_t index)
{
	int64_t got;

	if (len <= p->end - off)
		return (const unsigned char *)p->buf + (off - p->off);
	got = sfr_fill(p->r->source.fd, p->scratch, len, off);
	if (got == (int64_t)len)
		return (const unsigned char *)p->scratch;
	sfr__restore_fail(p->r, got < 0 ? (int)got : SFR_ECORRUPT, index, off,
			  "the file became shorter while it was read");
	return NULL;
}

/* What the directory says of a record. */
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

/* Compares the local header with the directory, and with where the data were taken to be. False:
 * a failure was noted. */
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
	if (wrong != NULL)
		sfr__restore_fail(p->r, SFR_ECORRUPT, i, off, wrong);
	return wrong == NULL;
}

/* Hands out the record's data that are in the piece: how many, and their CRC's part. */
static uint64_t hand_out(const struct piece *p, uint64_t i, uint32_t *crc)
{
	const uint64_t from = p->r->targets[i].data_off, to = sfr__restore_data_end(p->r, i);
	const uint64_t a = from > p->off ? from : p->off, b = to < p->end ? to : p->end;
	const char *src = p->buf + (a - p->off);
	char *mem = p->r->targets[i].mem;
	size_t len;

	*crc = 0;
	if (a >= b)
		return 0;
	len = (size_t)(b - a);
	if (mem != NULL) {
		mem += a - from;
		if (len >= WORTH_POPULATING)
			sfr__populate(mem, len);
	}
	if ((p->r->flags & SFR_RESTORE_VERIFY) == 0) {
		if (mem != NULL)
			memcpy(mem, src, len);
		return len;
	}
	*crc = mem != NULL ? sfr_crc32_copy(0, mem, src, len) : sfr_crc32(0, src, len);
	*crc = sfr_crc32_combine(*crc, 0, to - b);
	return len;
}

void sfr__restore_piece(struct sfr_restore *r, const char *buf, uint64_t off, size_t len,
			uint64_t first, uint64_t last, char *scratch)
{
	const struct piece p = { r, buf, off, off + len, scratch };

	for (uint64_t i = first; i < last; i++) {
		const bool described = (r->places[i].flags & SFR__UNZIP_DESCRIBED) != 0;
		uint64_t units = 0;
		uint32_t crc;

		if (covers(&p, r->places[i].hdr_off)) {
			if (!header_is_right(&p, i))
				return;
			units++;
		}
		units += hand_out(&p, i, &crc);
		if (described && covers(&p, sfr__restore_data_end(r, i))) {
			if (!descriptor_is_right(&p, i))
				return;
			units++;
		}
		if (units != 0)
			sfr__restore_got(r, i, units, crc);
	}
}
