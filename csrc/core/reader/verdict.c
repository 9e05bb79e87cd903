/* Records the findings of a reader's threads: more bytes of a record, damage, the first failure. */
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

/* Keeps the first damage to a record. False: damage ends the reading. */
static bool note_locked(const struct sfr_reader *r, struct sfr__reader_record *record,
			const char *wrong)
{
	if ((r->flags & SFR__READER_LIST) != 0 && record->wrong == NULL)
		record->wrong = wrong;
	return (r->flags & SFR__READER_LIST) != 0;
}

bool sfr__reader_damaged(struct sfr_reader *r, uint64_t i, uint64_t off, const char *wrong)
{
	if (sfr__under(&r->mu, note_locked(r, &r->records[i], wrong)))
		return true;
	sfr__reader_fail(r, SFR_ECORRUPT, i, off, wrong);
	return false;
}

void sfr__reader_got(struct sfr_reader *r, const struct sfr__part *part)
{
	static const char other_bytes[] = "its bytes do not match their CRC";
	struct sfr__reader_record *record = &r->records[part->index];
	const uint32_t crc = r->listed[part->index].crc;
	bool wrong;

	sfr__lock(&r->mu);
	record->left -= part->units;
	record->crc ^= part->crc;
	/* With torch's compute_crc32=False all CRCs are zero, and the bytes cannot be checked. */
	wrong = record->left == 0 && (r->flags & SFR__READER_SUMS) != 0 && record->crc != crc &&
		crc != 0;
	if (wrong && !note_locked(r, record, other_bytes)) {
		sfr__unlock(&r->mu);
		sfr__reader_fail(r, SFR_ECORRUPT, part->index, record->data_off, other_bytes);
		return;
	}
	if (record->left == 0) {
		atomic_store(&record->good, true);
		r->nr_good++;
		if (part->index == r->awaited || r->nr_good == r->nr)
			(void)pthread_cond_broadcast(&r->news);
	}
	sfr__unlock(&r->mu);
}

void sfr__reader_count(struct sfr_reader *r, struct sfr__buffer *buffer)
{
	for (size_t i = 0; i < buffer->nr_parts; i++)
		sfr__reader_got(r, &buffer->parts[i]);
	buffer->nr_parts = 0;
}

int sfr__reader_keep(struct sfr__buffer *buffer, const struct sfr__part *part)
{
	if (buffer->nr_parts == buffer->room) {
		const size_t room = buffer->room == 0 ? 64 : 2 * buffer->room;
		struct sfr__part *parts =
			sfr_sys.realloc(buffer->parts, room * sizeof(*buffer->parts));

		if (parts == NULL)
			return -ENOMEM;
		buffer->parts = parts;
		buffer->room = room;
	}
	buffer->parts[buffer->nr_parts++] = *part;
	return 0;
}
