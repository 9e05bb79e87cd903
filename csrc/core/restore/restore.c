/* Copies a checkpoint's records to tensors. A restore is the client of a reader (reader/reader.c),
 * and knows the destination of each record's bytes.
 *
 *     bytes of a record --put--> host memory: copied there, which also computes their CRC
 *                         |
 *                         +----> a device's memory: sent (device.c), and counted when they arrive
 *                         |
 *                         +----> nowhere: only their CRC is computed
 *
 * The records are listed by a check, which the restore keeps. For a file of another format the
 * caller lists stretches instead. They are read as *bare* records, without headers, names and
 * CRCs. */
#include <errno.h>
#include <string.h>

#include "sfr/crc.h"
#include "check/records.h"
#include "restore/restore_int.h"
#include "base/base.h"

/* Destinations of at least this many bytes are mostly memory that nobody has touched yet. There
 * sfr__prefault_pages saves page faults. */
#define POPULATE_BYTES_MIN (256u << 10)

/* The reader's client function `put` (struct sfr__reader_client): takes `len` bytes, which are at
 * offset `off` of the record. `crc` is NULL if no CRC is wanted. */
static int put(void *self, struct sfr__reader_buffer *buffer, uint64_t index, uint64_t off,
	       const char *bytes, size_t len, uint32_t *crc)
{
	struct sfr_restore *r = self;
	const struct sfr__destination *dest = &r->destinations[index];
	char *to = dest->mem == NULL ? NULL : dest->mem + off;

	if (to == NULL || dest->device != 0) { /* 0 is host memory */
		if (crc != NULL)
			*crc = sfr_crc32(0, bytes, len);
		if (to == NULL) /* no destination: the bytes are only checked */
			return 0;
		if (!sfr__restore_add_copy(r, buffer, index, to, bytes, len))
			return -1;
		return SFR__READER_NEEDS_BUFFER; /* the device copies from it later */
	}
	if (len >= POPULATE_BYTES_MIN)
		sfr__prefault_pages(to, len);
	if (crc != NULL)
		*crc = sfr_crc32_copy(0, to, bytes, len);
	else
		memcpy(to, bytes, len);
	return 0;
}

static struct sfr_restore *new_restore(void)
{
	struct sfr_restore *r = sfr_sys.calloc(1, sizeof(*r));

	if (r == NULL)
		return NULL;
	r->client.put = put;
	sfr__cuda_lanes_init(&r->lanes);
	r->fork_generation = sfr_fork_generation();
	return r;
}

/* Makes the reader and the destinations, which have no memory yet. The records end at offset `end`.
 * Returns 0, -ENOMEM or an error of sfr__reader_new. */
static int make_reader(struct sfr_restore *r, int fd, uint64_t end, unsigned flags)
{
	struct sfr__reader_spec spec = {
		.listing = r->listing,
		.fd = fd,
		.end = end,
		/* CACHE: only the page cache. EITHER: the disk for bytes that it does not have. */
		.way = (flags & SFR_RESTORE_SHARED) != 0 ? SFR__WAY_CACHE : SFR__WAY_EITHER,
		.client = &r->client,
		.self = r,
	};
	int rc;

	if (r->check == NULL)
		spec.flags = SFR__READER_BARE;
	else if ((flags & SFR_RESTORE_VERIFY) != 0)
		spec.flags = SFR__READER_CRCS;
	rc = sfr__reader_new(&spec, &r->reader);
	if (rc < 0)
		return rc;
	r->destinations = sfr_sys.calloc(r->listing->nr, sizeof(*r->destinations));
	return r->destinations == NULL ? -ENOMEM : 0;
}

int sfr_restore_new(struct sfr_check *check, int fd, unsigned flags, struct sfr_restore **out)
{
	struct sfr_restore *r;
	int rc = check->result.ok ? 0 : -EOPNOTSUPP;

	*out = NULL;
	r = rc == 0 ? new_restore() : NULL;
	if (r == NULL) {
		sfr_check_free(check);
		return rc < 0 ? rc : -ENOMEM;
	}
	r->check = check;
	r->listing = &check->listing;
	rc = make_reader(r, fd, check->end.dir_off, flags);
	if (rc == SFR_EAGAIN)
		r->check = NULL; /* the caller keeps the check and calls again */
	if (rc < 0)
		sfr_restore_free(r);
	else
		*out = r;
	return rc;
}

int sfr_restore_new_bare(const struct sfr_file_range *v, uint64_t nr, uint64_t end, int fd,
			 unsigned flags, struct sfr_restore **out)
{
	struct sfr_restore *r;
	int rc = -ENOMEM;

	*out = NULL;
	if (nr == 0)
		return -EINVAL;
	r = new_restore();
	if (r == NULL)
		return -ENOMEM;
	r->listing = &r->bare;
	r->bare.records = sfr_sys.calloc(nr, sizeof(*r->bare.records));
	if (r->bare.records != NULL) {
		r->bare.nr = nr;
		for (uint64_t i = 0; i < nr; i++) {
			r->bare.records[i].hdr_off = v[i].off;
			r->bare.records[i].len = v[i].len;
		}
		rc = make_reader(r, fd, end, flags);
	}
	if (rc < 0)
		sfr_restore_free(r);
	else
		*out = r;
	return rc;
}

uint64_t sfr_restore_nr_records(const struct sfr_restore *r)
{
	return r->listing->nr;
}

uint64_t sfr_restore_nbytes(const struct sfr_restore *r, uint64_t index)
{
	return r->listing->records[index].len;
}

const char *sfr_restore_name(const struct sfr_restore *r, uint64_t index, size_t *len)
{
	*len = r->listing->records[index].name_len - r->listing->prefix_len;
	if (r->check == NULL) /* a bare record has no name, and *len is 0 */
		return "";
	return r->listing->names + r->listing->records[index].name_off + r->listing->prefix_len;
}

uint64_t sfr_restore_find(const struct sfr_restore *r, const char *name, size_t len)
{
	return r->check == NULL ? r->listing->nr : sfr__check_find_record(r->check, name, len);
}

void sfr_restore_set_destination(struct sfr_restore *r, uint64_t index, void *mem)
{
	r->destinations[index].mem = mem;
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
	/* A forked child has no threads to wait for. */
	if (r->fork_generation == sfr_fork_generation()) {
		sfr__cuda_lanes_stop(&r->lanes);
		sfr__cuda_lanes_free(&r->lanes);
	}
	sfr_sys.free(r->destinations);
	sfr__listing_fini(&r->bare);
	sfr_check_free(r->check);
	sfr_sys.free(r);
}
