/* A snapshot's samples, which show whether a copy is torn (stage/samples.h). */
#include "snapshot/snapshot.h"

/* `device` is 0 for host memory, and n for device n - 1. */
static bool is_deferred_on(const struct sfr_source *source, uint32_t device)
{
	return source->lane != SFR_CAPTURED && source->nbytes != 0 && source->device == device;
}

uint32_t sfr__snapshot_nr_deferred(const struct sfr_snapshot *s, uint32_t device)
{
	uint32_t nr = 0;

	for (uint32_t i = 0; i < s->nr_sources; i++)
		if (is_deferred_on(&s->sources[i], device))
			nr++;
	return nr;
}

struct sfr__source_to_sample *sfr__snapshot_list_deferred_sources(const struct sfr_snapshot *s,
								  uint32_t device, uint32_t *nr)
{
	/* + 1, because an allocation of no bytes may return NULL */
	struct sfr__source_to_sample *sampled =
		sfr_sys.malloc(((size_t)s->nr_sources + 1) * sizeof(*sampled));

	*nr = 0;
	if (!sampled)
		return NULL;
	for (uint32_t i = 0; i < s->nr_sources; i++)
		if (is_deferred_on(&s->sources[i], device))
			sampled[(*nr)++] =
				(struct sfr__source_to_sample){ .entry = i,
								.addr = s->sources[i].addr,
								.nbytes = s->sources[i].nbytes };
	return sampled;
}

int64_t sfr__snapshot_find_torn_source(const struct sfr_snapshot *s, uint32_t device,
				       const struct sfr__samples *samples)
{
	for (uint32_t i = 0; i < s->nr_sources; i++)
		if (is_deferred_on(&s->sources[i], device) &&
		    !sfr__samples_agree(samples, i, 0, s->copies[i], s->sources[i].nbytes))
			return i;
	return -1;
}
