/* Chooses the sampled cache lines of a source, and compares a copy with them. See samples.h. */
#include <errno.h>
#include <string.h>

#include "stage/samples.h"

/* how many lines ahead to prefetch: each line is a cache miss, and the misses then overlap */
enum { PREFETCH_AHEAD = 64 };

/* A linear congruential generator with Knuth's constants. Its upper bits are the random ones. */
static uint64_t next_random(uint64_t *random)
{
	*random = *random * 6364136223846793005u + 1442695040888963407u;
	return *random >> 33;
}

/* ---- in host memory ---- */

/* Returns which line is the i-th of n samples, in a source of nr_lines lines. The first line, the
 * last and (if n is odd) the middle one are sampled. The source is divided into n stretches. Each
 * other sample is a random line of its stretch, so that writes at regular distances are found. */
static uint64_t choose_sample_line(uint64_t i, uint64_t n, uint64_t nr_lines, uint64_t *random)
{
	const uint64_t middle = nr_lines / 2;
	uint64_t from, to;

	if (n >= nr_lines) /* all lines are sampled */
		return i;
	if (n == 1)
		return middle;
	if (i == 0)
		return 0;
	if (i == n - 1)
		return nr_lines - 1;
	if (n % 2 == 1 && i == n / 2)
		return middle;
	from = nr_lines * i / n;
	to = nr_lines * (i + 1) / n;
	return from + next_random(random) % (to > from ? to - from : 1);
}

/* Half of the samples are divided equally, so that small sources get some too. The other half are
 * divided by bytes, so that the samples of a large source are not far apart. */
uint64_t sfr__samples_share_of_source(uint64_t nbytes, uint32_t nr_sources, uint64_t total,
				      uint64_t most)
{
	const uint64_t half = most / 2;
	uint64_t equal_part = nr_sources ? half / nr_sources : 0, part_by_bytes = 0;

	if (nr_sources < half && total != 0) /* else each source just gets one sample */
		part_by_bytes = (uint64_t)((double)half * ((double)nbytes / (double)total));
	return equal_part + part_by_bytes > 1 ? equal_part + part_by_bytes : 1;
}

static uint64_t total_bytes_of(const struct sfr__source_to_sample *sources, uint32_t nr)
{
	uint64_t total = 0;

	for (uint32_t i = 0; i < nr; i++)
		total += sources[i].nbytes;
	return total;
}

/* Returns the most samples that these sources in host memory can have. */
static uint64_t most_samples_of(const struct sfr__source_to_sample *sources, uint32_t nr,
				uint64_t total)
{
	uint64_t nr_samples = 0;

	for (uint32_t i = 0; i < nr; i++)
		nr_samples += sfr__samples_share_of_source(sources[i].nbytes, nr, total,
							   SFR__MAX_SAMPLES);
	return nr_samples;
}

uint32_t sfr__samples_choose_lines(struct sfr__sample *items,
				   const struct sfr__source_to_sample *source, uint64_t most,
				   uint64_t *random)
{
	uint64_t nr_lines = (source->nbytes + SFR__SAMPLE_LEN - 1) / SFR__SAMPLE_LEN;
	uint64_t n = nr_lines < most ? nr_lines : most, last = 0;
	uint32_t nr = 0;

	for (uint64_t j = 0; j < n; j++) {
		uint64_t line = choose_sample_line(j, n, nr_lines, random), off, left;

		if (j > 0 && line <= last)
			line = last + 1; /* not the same line twice */
		if (line >= nr_lines)
			break; /* all lines up to the end are sampled */
		last = line;
		off = line * SFR__SAMPLE_LEN;
		left = source->nbytes - off;
		items[nr].entry = source->entry;
		items[nr].off = off;
		items[nr].len = (uint32_t)(left < SFR__SAMPLE_LEN ? left : SFR__SAMPLE_LEN);
		nr++;
	}
	return nr;
}

/* Returns the address of a sample's line, and moves *source forward to the sample's source. */
static const char *line_address(const struct sfr__sample *sample,
				const struct sfr__source_to_sample **source)
{
	while ((*source)->entry != sample->entry)
		++*source;
	return (const char *)(uintptr_t)((*source)->addr + sample->off);
}

int sfr__samples_take(struct sfr__samples *samples, const struct sfr__source_to_sample *sources,
		      uint32_t nr, uint64_t seed)
{
	const struct sfr__source_to_sample *source = sources; /* of the line that is copied */
	const struct sfr__source_to_sample *ahead = sources;  /* of the line that is prefetched */
	const uint64_t total = total_bytes_of(sources, nr);

	samples->nr = 0;
	samples->items = sfr_sys.malloc((size_t)most_samples_of(sources, nr, total) *
					sizeof(*samples->items));
	if (!samples->items)
		return -ENOMEM;
	for (uint32_t i = 0; i < nr; i++) {
		uint64_t most = sfr__samples_share_of_source(sources[i].nbytes, nr, total,
							     SFR__MAX_SAMPLES);

		samples->nr += sfr__samples_choose_lines(samples->items + samples->nr, &sources[i],
							 most, &seed);
	}
	for (uint32_t k = 0; k < samples->nr; k++) {
		struct sfr__sample *item = &samples->items[k];

		if (k + PREFETCH_AHEAD < samples->nr)
			__builtin_prefetch(line_address(item + PREFETCH_AHEAD, &ahead));
		memcpy(item->bytes, line_address(item, &source), item->len);
	}
	return 0;
}

void sfr__samples_free(struct sfr__samples *samples)
{
	sfr_sys.free(samples->items);
	*samples = (struct sfr__samples){ 0 };
}

bool sfr__samples_agree(const struct sfr__samples *samples, uint32_t entry, uint64_t off,
			const char *staged, size_t len)
{
	const struct sfr__sample *items = samples->items, *items_end = items + samples->nr;
	const uint64_t off_end = off + len;
	/* binary search: skip the samples that end before the range begins */
	const struct sfr__sample *s =
		items +
		sfr__lower_bound(k, 0, samples->nr,
				 items[k].entry < entry || (items[k].entry == entry &&
							    items[k].off + items[k].len <= off));

	for (; s < items_end && s->entry == entry && s->off < off_end; s++) {
		/* the bytes [from, to) of the source are in the range and in the sample */
		const uint64_t sample_end = s->off + s->len;
		uint64_t from = s->off > off ? s->off : off;
		uint64_t to = sample_end < off_end ? sample_end : off_end;

		if (memcmp(staged + (from - off), s->bytes + (from - s->off), to - from))
			return false;
	}
	return true;
}

/* ---- on a device ---- */

/* the largest distance between two rows, in bytes; devices allow twice as much */
#define MOST_PITCH ((uint64_t)1 << 30)

/* Returns how many rows a source needs so that their distance is at most MOST_PITCH. */
static uint64_t least_rows_of(uint64_t nbytes)
{
	return nbytes / MOST_PITCH + 2; /* the gaps, rounded up, and one row more than gaps */
}

uint64_t sfr__samples_most_rows_of(uint64_t nbytes, uint64_t share)
{
	uint64_t least = least_rows_of(nbytes);

	return share > least ? share : least;
}

/* Returns how many rows of a source to sample: `share` or fewer. The number is reduced at random:
 * rows then vary from save to save, and no regular writes are missed every time. It is made odd, so
 * that one row is in the middle. Only a source longer than MOST_PITCH may get more than `share`. */
static uint64_t choose_nr_sample_rows(uint64_t nbytes, uint64_t share, uint64_t *random)
{
	const uint64_t nr_lines = nbytes / SFR__SAMPLE_LEN, nr_rows_min = least_rows_of(nbytes);
	const uint64_t random_number = next_random(random);
	uint64_t n = share < nr_lines ? share : nr_lines;

	if (n > 8)
		n -= random_number % (n / 4); /* up to a quarter less */
	if (nbytes > MOST_PITCH)
		n = n > nr_rows_min ? n : nr_rows_min;
	else if (n > 2 && n % 2 == 0)
		n--;
	return n > 1 ? n : 1;
}

uint32_t sfr__samples_choose_rows_of(struct sfr__sample *items,
				     const struct sfr__source_to_sample *source, uint64_t share,
				     uint64_t *random, uint64_t *pitch)
{
	const uint64_t nbytes = source->nbytes;
	uint64_t len = nbytes < SFR__SAMPLE_LEN ? nbytes : SFR__SAMPLE_LEN;
	uint64_t n = choose_nr_sample_rows(nbytes, share, random);
	uint64_t first_off = 0; /* offset of the first row */

	*pitch = 0;
	if (nbytes == 0)
		return 0;
	if (n == 1) /* one row at a random offset; choose_nr_sample_rows has advanced *random */
		first_off = (*random >> 33) % (nbytes - len + 1);
	else
		*pitch = (nbytes - len) / (n - 1);
	for (uint64_t i = 0; i < n; i++)
		items[i] = (struct sfr__sample){ .entry = source->entry,
						 .len = (uint32_t)len,
						 .off = first_off + i * *pitch };
	return (uint32_t)n;
}

size_t sfr__samples_most_rows(const struct sfr__source_to_sample *sources, uint32_t nr)
{
	const uint64_t total = total_bytes_of(sources, nr);
	uint64_t most = 0;

	for (uint32_t i = 0; i < nr; i++)
		most += sfr__samples_most_rows_of(sources[i].nbytes,
						  sfr__samples_share_of_source(sources[i].nbytes,
									       nr, total,
									       SFR__MAX_ROWS));
	return (size_t)most;
}

size_t sfr__samples_choose_rows(struct sfr__samples *samples,
				const struct sfr__source_to_sample *sources, uint32_t nr,
				uint64_t seed, struct sfr__cuda_rows *rows)
{
	const uint64_t total = total_bytes_of(sources, nr);
	size_t nr_rows = 0;

	samples->nr = 0;
	for (uint32_t i = 0; i < nr; i++) {
		struct sfr__sample *first = samples->items + samples->nr;
		uint64_t share =
			sfr__samples_share_of_source(sources[i].nbytes, nr, total, SFR__MAX_ROWS);
		uint64_t pitch;
		uint32_t n = sfr__samples_choose_rows_of(first, &sources[i], share, &seed, &pitch);

		if (n == 0) /* the source is empty */
			continue;
		/* one copy of n rows */
		rows[nr_rows++] = (struct sfr__cuda_rows){ .dst = first->bytes,
							   .src = sources[i].addr + first->off,
							   .width = first->len,
							   .nr = n,
							   .pitch = pitch };
		samples->nr += n;
	}
	return nr_rows;
}
