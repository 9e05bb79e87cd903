/* Records what a reader's threads find: units that were read, damage, and the first failure. */
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

bool sfr__reader_damaged(struct sfr_reader *r, uint64_t i, uint64_t off, const char *wrong)
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

void sfr__reader_count_units(struct sfr_reader *r, const struct sfr__record_units *units)
{
	static const char wrong_bytes[] = "its bytes do not match their CRC";
	struct sfr__reader_record *record = &r->records[units->index];
	const uint32_t crc = r->listed[units->index].crc;
	/* With torch's compute_crc32=False all stated CRCs are 0, and bytes cannot be checked. */
	const bool can_check = (r->flags & SFR__READER_CRCS) != 0 && crc != 0;
	bool wrong;

	sfr__lock(&r->mu);
	record->units_left -= units->nr_units;
	record->crc ^= units->crc;
	wrong = can_check && record->crc != crc && record->units_left == 0;
	if (wrong && (r->flags & SFR__READER_LIST_DAMAGE) == 0) {
		sfr__unlock(&r->mu);
		sfr__reader_fail(r, SFR_ECORRUPT, units->index, record->data_off, wrong_bytes);
		return;
	}
	if (wrong && record->damage == NULL)
		record->damage = wrong_bytes;
	if (record->units_left == 0) {
		atomic_store(&record->good, true);
		r->nr_good++;
		if (units->index == r->awaited_index || r->nr_good == r->nr) /* the caller waits */
			(void)pthread_cond_broadcast(&r->progress);
	}
	sfr__unlock(&r->mu);
}

void sfr__reader_count_pending(struct sfr_reader *r, struct sfr__buffer *buffer)
{
	for (size_t i = 0; i < buffer->nr_pending; i++)
		sfr__reader_count_units(r, &buffer->pending[i]);
	buffer->nr_pending = 0;
}

int sfr__reader_defer_units(struct sfr__buffer *buffer, const struct sfr__record_units *units)
{
	if (buffer->nr_pending == buffer->pending_cap) {
		const size_t cap = buffer->pending_cap == 0 ? 64 : 2 * buffer->pending_cap;
		struct sfr__record_units *pending =
			sfr_sys.realloc(buffer->pending, cap * sizeof(*buffer->pending));

		if (pending == NULL)
			return -ENOMEM;
		buffer->pending = pending;
		buffer->pending_cap = cap;
	}
	buffer->pending[buffer->nr_pending++] = *units;
	return 0;
}
