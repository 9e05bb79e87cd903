/* Brings a checkpoint's records to tensors: the client of a reader (reader/reader.c) that knows
 * where the bytes go.
 *
 *     bytes of a record --put--> host memory: copied there, which also computes their CRC
 *                         |
 *                         +----> a device's memory: sent (device.c); they count when they are there
 *                         |
 *                         +----> nowhere: only their CRC is computed
 *
 * The check that found the records stays with the restore, which finds records by their names. */
#include <errno.h>
#include <string.h>

#include "sfr/crc.h"
#include "check/records.h"
#include "restore/restore_int.h"
#include "base/base.h"

#define WORTH_POPULATING (256u << 10) /* bytes; smaller memory is mostly not new */

static int put(void *self, struct sfr__buffer *buffer, uint64_t index, uint64_t at,
	       const char *bytes, size_t len, uint32_t *crc)
{
	struct sfr_restore *r = self;
	const struct sfr__target *target = &r->targets[index];
	char *to = target->mem == NULL ? NULL : target->mem + at;

	if (to == NULL || target->device != 0) {
		if (crc != NULL)
			*crc = sfr_crc32(0, bytes, len);
		if (to == NULL)
			return 0;
		return sfr__restore_send(r, buffer, index, to, bytes, len) ? SFR__READER_LATER : -1;
	}
	if (len >= WORTH_POPULATING)
		sfr__populate(to, len);
	if (crc != NULL)
		*crc = sfr_crc32_copy(0, to, bytes, len);
	else
		memcpy(to, bytes, len);
	return 0;
}

int sfr_restore_new(struct sfr_check *check, int fd, unsigned flags, struct sfr_restore **out)
{
	struct sfr__reader_spec spec = {
		.places = &check->places,
		.fd = fd,
		.end = check->end.dir_off,
		.way = (flags & SFR_RESTORE_SHARED) != 0 ? SFR__WAY_CACHE : SFR__WAY_EITHER,
		.flags = (flags & SFR_RESTORE_VERIFY) != 0 ? SFR__READER_SUMS : 0,
	};
	struct sfr_restore *r;
	int rc = check->result.ok ? 0 : -EOPNOTSUPP;

	*out = NULL;
	r = rc == 0 ? sfr_sys.calloc(1, sizeof(*r)) : NULL;
	if (r == NULL) {
		sfr_check_free(check);
		return rc < 0 ? rc : -ENOMEM;
	}
	r->check = check;
	r->places = &check->places;
	r->client.put = put;
	sfr__cuda_lanes_init(&r->lanes);
	r->fork_generation = sfr_fork_generation();
	spec.client = &r->client;
	spec.self = r;
	rc = sfr__reader_new(&spec, &r->reader);
	if (rc == 0) {
		r->targets = sfr_sys.calloc(r->places->nr, sizeof(*r->targets));
		rc = r->targets == NULL ? -ENOMEM : 0;
	}
	if (rc < 0)
		sfr_restore_free(r);
	else
		*out = r;
	return rc;
}

uint64_t sfr_restore_nr(const struct sfr_restore *r)
{
	return r->places->nr;
}

uint64_t sfr_restore_nbytes(const struct sfr_restore *r, uint64_t index)
{
	return r->places->v[index].len;
}

const char *sfr_restore_name(const struct sfr_restore *r, uint64_t index, size_t *len)
{
	*len = r->places->v[index].name_len - r->places->prefix_len;
	return r->places->names + r->places->v[index].name_at + r->places->prefix_len;
}

uint64_t sfr_restore_find(const struct sfr_restore *r, const char *name, size_t len)
{
	return sfr__check_find(r->check, name, len);
}

void sfr_restore_into(struct sfr_restore *r, uint64_t index, void *mem)
{
	r->targets[index].mem = mem;
}

struct sfr_reader *sfr_restore_reader(struct sfr_restore *r)
{
	return r->reader;
}

void sfr_restore_free(struct sfr_restore *r)
{
	if (r == NULL)
		return;
	sfr__reader_free(r->reader);
	/* A child has no such threads. */
	if (r->fork_generation == sfr_fork_generation()) {
		sfr__cuda_lanes_stop(&r->lanes);
		sfr__cuda_lanes_free(&r->lanes);
	}
	sfr_sys.free(r->targets);
	sfr_check_free(r->check);
	sfr_sys.free(r);
}
