/* Which cache lines of a source are sampled.
 *
 * Lines of every deferred source are kept in the call and compared with the staged copy: a
 * difference means that somebody wrote in between. Saves (save/stage.c, save/fill_cuda.c) and
 * snapshots look at the same lines; how they keep and compare them is their own business.
 */
#include "base/base.h"

/* The i-th of n sampled lines of a source with nr_lines lines: the first, the last, and one at
 * a place of its own in each stratum between them, so that no stride goes unseen for ever. */
static uint64_t line_of(uint64_t i, uint64_t n, uint64_t nr_lines, uint64_t *random)
{
	uint64_t from, to;

	if (n >= nr_lines)
		return i;
	if (n == 1)
		return nr_lines / 2;
	if (i == 0)
		return 0;
	if (i == n - 1)
		return nr_lines - 1;
	if (n % 2 == 1 && i == n / 2)
		return nr_lines / 2;
	from = nr_lines * i / n;
	to = nr_lines * (i + 1) / n;
	*random = *random * 6364136223846793005u + 1442695040888963407u;
	return from + (*random >> 33) % (to > from ? to - from : 1);
}

uint64_t sfr__samples_each(uint32_t nr_sources)
{
	return nr_sources == 0 || nr_sources > SFR__MAX_SAMPLES ? 1 : SFR__MAX_SAMPLES / nr_sources;
}

uint32_t sfr__samples_place(struct sfr__sample *items, uint32_t entry, uint64_t nbytes,
			    uint64_t each, uint64_t *random)
{
	uint64_t nr_lines = (nbytes + SFR__SAMPLE_LEN - 1) / SFR__SAMPLE_LEN;
	uint64_t n = nr_lines < each ? nr_lines : each, last = 0;
	uint32_t nr = 0;

	for (uint64_t j = 0; j < n; j++) {
		uint64_t line = line_of(j, n, nr_lines, random), off, left;

		if (j > 0 && line <= last)
			line = last + 1; /* strictly ascending */
		if (line >= nr_lines)
			break;
		last = line;
		off = line * SFR__SAMPLE_LEN;
		left = nbytes - off;
		items[nr].entry = entry;
		items[nr].off = off;
		items[nr].len = (uint32_t)(left < SFR__SAMPLE_LEN ? left : SFR__SAMPLE_LEN);
		nr++;
	}
	return nr;
}

/* ---- on a device ---- */

#define MOST_PITCH ((uint64_t)1 << 30) /* devices take twice as much */

uint64_t sfr__samples_rows_most(uint64_t nbytes, uint64_t each)
{
	uint64_t least = nbytes / MOST_PITCH + 2;

	return each > least ? each : least;
}

/* How many rows there can be: odd, so that one of them is in the middle; fewer at random, so that
 * their distance changes and no stride goes unseen for ever. */
static uint64_t nr_rows(uint64_t nbytes, uint64_t each, uint64_t *random)
{
	uint64_t most = nbytes / SFR__SAMPLE_LEN, n = each < most ? each : most;

	*random = *random * 6364136223846793005u + 1442695040888963407u;
	if (n > 8)
		n -= (*random >> 33) % (n / 4);
	if (nbytes > MOST_PITCH)
		n = n > nbytes / MOST_PITCH + 2 ? n : nbytes / MOST_PITCH + 2;
	else if (n > 2 && n % 2 == 0)
		n--;
	return n > 1 ? n : 1;
}

uint32_t sfr__samples_rows(struct sfr__sample *items, uint32_t entry, uint64_t nbytes,
			   uint64_t each, uint64_t *random, uint64_t *pitch)
{
	uint64_t len = nbytes < SFR__SAMPLE_LEN ? nbytes : SFR__SAMPLE_LEN;
	uint64_t n = nr_rows(nbytes, each, random), off = 0;

	*pitch = 0;
	if (nbytes == 0)
		return 0;
	if (n == 1)
		off = (*random >> 33) % (nbytes - len + 1);
	else
		*pitch = (nbytes - len) / (n - 1);
	for (uint64_t i = 0; i < n; i++)
		items[i] = (struct sfr__sample){ .entry = entry,
						 .len = (uint32_t)len,
						 .off = off + i * *pitch };
	return (uint32_t)n;
}
