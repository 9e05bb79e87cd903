/* Samples of a snapshot: lines of each deferred source, kept in the call and compared with the copy.
 *
 * The copy stands in one piece, so the comparison is one pass at its end, over each kind of memory
 * by whoever copied from it.
 */
#include <errno.h>
#include <string.h>

#include "snapshot/snapshot.h"

static bool is_deferred(const struct sfr_source *source)
{
	return source->lane != SFR_CAPTURED && source->nbytes != 0;
}

/* In one kind of memory (sfr_source.device). */
static bool is_deferred_on(const struct sfr_source *source, uint32_t device)
{
	return is_deferred(source) && source->device == device;
}

uint32_t sfr__snapshot_nr_deferred(const struct sfr_snapshot *s, uint32_t device)
{
	uint32_t nr = 0;

	for (uint32_t i = 0; i < s->nr_sources; i++)
		nr += is_deferred_on(&s->sources[i], device);
	return nr;
}

/* Lines of each deferred source, at most. */
static uint64_t samples_per_source(const struct sfr_snapshot *s)
{
	uint32_t nr = 0;

	for (uint32_t i = 0; i < s->nr_sources; i++)
		nr += is_deferred(&s->sources[i]);
	return sfr__samples_each(nr);
}

size_t sfr__snapshot_rows_most(const struct sfr_snapshot *s, uint32_t device)
{
	uint64_t per_source = samples_per_source(s), most = 0;

	for (uint32_t i = 0; i < s->nr_sources; i++)
		if (is_deferred_on(&s->sources[i], device))
			most += sfr__samples_rows_most(s->sources[i].nbytes, per_source);
	return (size_t)most;
}

uint32_t sfr__snapshot_place_rows(const struct sfr_snapshot *s, uint32_t device,
				  struct sfr__sample *samples, struct sfr__cuda_rows *rows,
				  size_t *nr_rows)
{
	uint64_t per_source = samples_per_source(s), random = sfr__now_ns(), pitch;
	uint32_t nr = 0;

	*nr_rows = 0;
	for (uint32_t i = 0; i < s->nr_sources; i++) {
		const struct sfr_source *source = &s->sources[i];
		struct sfr__sample *first = samples + nr;
		uint32_t n;

		if (!is_deferred_on(source, device))
			continue;
		n = sfr__samples_rows(first, i, source->nbytes, per_source, &random, &pitch);
		rows[(*nr_rows)++] = (struct sfr__cuda_rows){ .dst = first->bytes,
							      .src = source->addr + first->off,
							      .width = first->len,
							      .nr = n,
							      .pitch = pitch };
		nr += n;
	}
	return nr;
}

int sfr__snapshot_take_samples(struct sfr_snapshot *s)
{
	uint64_t each = samples_per_source(s), random = sfr__now_ns();

	s->samples = sfr_sys.malloc((size_t)(sfr__snapshot_nr_deferred(s, 0) * each) *
				    sizeof(*s->samples));
	if (!s->samples)
		return -ENOMEM;
	for (uint32_t i = 0; i < s->nr_sources; i++) {
		const struct sfr_source *source = &s->sources[i];

		if (is_deferred_on(source, 0))
			s->nr_samples += sfr__samples_place(s->samples + s->nr_samples, i,
							    source->nbytes, each, &random);
	}
	for (uint32_t k = 0; k < s->nr_samples; k++) {
		struct sfr__sample *sample = &s->samples[k];

		memcpy(sample->bytes, sfr__bytes_of(&s->sources[sample->entry]) + sample->off,
		       sample->len);
	}
	return 0;
}

int64_t sfr__snapshot_compare(const struct sfr_snapshot *s, const struct sfr__sample *samples,
			      uint32_t nr)
{
	for (uint32_t k = 0; k < nr; k++) {
		const struct sfr__sample *sample = &samples[k];

		if (memcmp(s->copies[sample->entry] + sample->off, sample->bytes, sample->len))
			return sample->entry;
	}
	return -1;
}
