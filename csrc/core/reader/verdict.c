/* Records what a reader's threads find: bytes that were read, damage, and the first failure. */
#include <errno.h>

#include "reader/reader_int.h"

void sfr__reader_fail(struct sfr_reader *r, int code, uint64_t index, uint64_t off,
		      const char *reason)
{
	sfr__lock(&r->mu);
	if (r->failure.code == 0)
		r->failure = (struct sfr_reader_failure){ code, index, off, reason };
	r->stop = true;
	(void)pthread_cond_broadcast(&r->may_read);
	(void)pthread_cond_broadcast(&r->progress);
	sfr__unlock(&r->mu);
}

bool sfr__reader_report_damage(struct sfr_reader *r, uint64_t i, uint64_t off, const char *wrong)
{
	if ((r->flags & SFR__READER_LIST_DAMAGE) == 0) {
		sfr__reader_fail(r, SFR_ECORRUPT, i, off, wrong);
		return false;
	}
	sfr__lock(&r->mu);
	if (r->records[i].damage == NULL)
		r->records[i].damage = wrong;
	sfr__unlock(&r->mu);
	return true;
}

void sfr__reader_apply_fragment(struct sfr_reader *r, const struct sfr__record_fragment *fragment)
{
	static const char wrong_bytes[] = "its bytes do not match their CRC";
	struct sfr__reader_record *record = &r->records[fragment->index];
	const uint32_t crc = r->listed[fragment->index].crc;
	/* With torch's compute_crc32=False all stated CRCs are 0, and bytes cannot be checked. */
	const bool can_check = (r->flags & SFR__READER_CRCS) != 0 && crc != 0;
	bool wrong;

	sfr__lock(&r->mu);
	record->nr_unread -= fragment->nr_read;
	record->crc ^= fragment->crc; /* the CRC of the whole record, once all is read */
	wrong = can_check && record->crc != crc && record->nr_unread == 0;
	if (wrong && (r->flags & SFR__READER_LIST_DAMAGE) == 0) {
		sfr__unlock(&r->mu);
		sfr__reader_fail(r, SFR_ECORRUPT, fragment->index, record->data_off, wrong_bytes);
		return;
	}
	if (wrong && record->damage == NULL)
		record->damage = wrong_bytes;
	if (record->nr_unread == 0) {
		atomic_store(&record->good, true);
		r->nr_good++;
		/* wake the caller, which waits for one record or for all */
		if (fragment->index == r->awaited_index || r->nr_good == r->nr)
			(void)pthread_cond_broadcast(&r->progress);
	}
	sfr__unlock(&r->mu);
}

void sfr__reader_apply_pending_fragments(struct sfr_reader *r, struct sfr__reader_buffer *buffer)
{
	for (size_t i = 0; i < buffer->nr_pending; i++)
		sfr__reader_apply_fragment(r, &buffer->pending[i]);
	buffer->nr_pending = 0;
}

int sfr__reader_add_pending_fragment(struct sfr__reader_buffer *buffer,
				     const struct sfr__record_fragment *fragment)
{
	if (buffer->nr_pending == buffer->pending_cap) {
		const size_t cap = buffer->pending_cap == 0 ? 64 : 2 * buffer->pending_cap;
		struct sfr__record_fragment *pending =
			sfr_sys.realloc(buffer->pending, cap * sizeof(*buffer->pending));

		if (pending == NULL)
			return -ENOMEM;
		buffer->pending = pending;
		buffer->pending_cap = cap;
	}
	buffer->pending[buffer->nr_pending++] = *fragment;
	return 0;
}
