/* Checks the bytes of a long file on threads: the step SUMS of a check (check.c).
 *
 * A second check, of the directory alone, finds the records. Then the reader (reader/reader.c)
 * reads them and compares their CRCs:
 *
 *     check of the directory --> reader: headers, bytes and descriptors, on threads --> result
 *        |                         |
 *        +--anything is wrong------+--the archive is laid out in another way--> the walk (RECORD)
 *                                     no memory, no thread, a forked child
 *
 * The walk is the check in one thread, from front to back (check.c). It reports damage to the
 * directory, and it can read archives that other programs laid out. */
#include <errno.h>
#include <string.h>

#include "check/records.h"
#include "base/base.h"

int sfr__check_start_reader(struct sfr_check *c)
{
	const struct sfr__reader_spec spec = {
		.listing = &c->dir_check->listing,
		.fd = c->fd,
		.base = c->base,
		.end = c->end.dir_off,
		.way = (c->flags & SFR_CHECK_DIRECT) != 0 ? SFR__WAY_DISK : SFR__WAY_CACHE,
		.flags = SFR__READER_CRCS | SFR__READER_LIST_DAMAGE,
	};
	int rc = sfr__reader_new(&spec, &c->reader);

	if (rc == 0)
		rc = sfr_reader_allow_records(c->reader, spec.listing->nr); /* all records */
	return rc;
}

/* Copies the reader's result to the check's, and ends the check. Returns 0 or -ENOMEM. */
static int copy_reader_result(struct sfr_check *c)
{
	const struct sfr__listing *listing = &c->dir_check->listing;
	struct sfr_check_result *r = &c->result;

	*r = c->dir_check->result;
	r->headers = true;
	r->nr_unchecked = 0; /* counted again below, now that the CRCs of the bytes are known */
	for (uint64_t i = 0; i < listing->nr; i++) {
		const struct sfr__listed_record *listed = &listing->records[i];
		bool unchecked;
		const char *wrong = sfr__reader_damage(c->reader, i, &unchecked);
		int rc = 0;

		if (unchecked)
			r->nr_unchecked++;
		if (wrong == NULL)
			continue;
		/* sfr__check_add_bad_record takes the name from the current record */
		c->rec.name_len = listed->name_len;
		memcpy(c->name, listing->names + listed->name_off, listed->name_len);
		rc = sfr__check_add_bad_record(c, wrong);
		if (rc != 0)
			return rc;
	}
	r->ok = r->nr_bad == 0;
	c->body_pos = r->nbytes;
	c->state = SFR__CHECK_DONE;
	return 0;
}

int sfr__check_await_reader(struct sfr_check *c)
{
	int rc = sfr_reader_wait(c->reader, c->dir_check->listing.nr,
				 sfr__time_left(c->deadline_ns));

	if (rc == 0)
		return copy_reader_result(c);
	if (rc == SFR_EAGAIN)
		c->body_pos = sfr_reader_bytes_read(c->reader); /* the progress */
	if (rc == SFR_EAGAIN || rc == -EOPNOTSUPP || rc == SFR_EFORK)
		return rc;
	return sfr__check_handle_read_error(c, rc);
}
