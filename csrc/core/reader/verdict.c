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
	(void)pthread_cond_broadcast(&r->work);
	(void)pthread_cond_broadcast(&r->news);
	sfr__unlock(&r->mu);
}

bool sfr__reader_damaged(struct sfr_reader *r, uint64_t i, uint64_t off, const char *wrong)
{
	if ((r->flags & SFR__READER_LIST) == 0) {
		sfr__reader_fail(r, SFR_ECORRUPT, i, off, wrong);
		return false;
	}
	sfr__lock(&r->mu);
	if (r->records[i].wrong == NULL)
		r->records[i].wrong = wrong;
	sfr__unlock(&r->mu);
	return true;
}

void sfr__reader_count_units(struct sfr_reader *r, const struct sfr__record_units *units)
{
	static const char wrong_bytes[] = "its bytes do not match their CRC";
	struct sfr__reader_record *record = &r->records[units->index];
	const uint32_t crc = r->listed[units->index].crc;
	bool wrong;

	sfr__lock(&r->mu);
	record->left -= units->nr;
	record->crc ^= units->crc;
	/* With torch's compute_crc32=False all CRCs are zero, and bytes cannot be checked. */
	wrong = record->left == 0 && (r->flags & SFR__READER_SUMS) != 0 && record->crc != crc &&
		crc != 0;
	if (wrong && (r->flags & SFR__READER_LIST) == 0) {
		sfr__unlock(&r->mu);
		sfr__reader_fail(r, SFR_ECORRUPT, units->index, record->data_off, wrong_bytes);
		return;
	}
	if (wrong && record->wrong == NULL)
		record->wrong = wrong_bytes;
	if (record->left == 0) {
		atomic_store(&record->good, true);
		r->nr_good++;
		if (units->index == r->awaited || r->nr_good == r->nr)
			(void)pthread_cond_broadcast(&r->news);
	}
	sfr__unlock(&r->mu);
}

void sfr__reader_count_buffer(struct sfr_reader *r, struct sfr__buffer *buffer)
{
	for (size_t i = 0; i < buffer->nr_kept; i++)
		sfr__reader_count_units(r, &buffer->kept[i]);
	buffer->nr_kept = 0;
}

int sfr__reader_keep_units(struct sfr__buffer *buffer, const struct sfr__record_units *units)
{
	if (buffer->nr_kept == buffer->room) {
		const size_t room = buffer->room == 0 ? 64 : 2 * buffer->room;
		struct sfr__record_units *kept =
			sfr_sys.realloc(buffer->kept, room * sizeof(*buffer->kept));

		if (kept == NULL)
			return -ENOMEM;
		buffer->kept = kept;
		buffer->room = room;
	}
	buffer->kept[buffer->nr_kept++] = *units;
	return 0;
}
