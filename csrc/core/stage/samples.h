/* Samples of deferred sources: cache lines kept in the call and compared with the staged copy.
 *
 * A difference means that the source changed between the call and the copy. The copy is then a
 * state that the training was never in, and the save or snapshot fails. */
#ifndef SFR_STAGE_SAMPLES_H
#define SFR_STAGE_SAMPLES_H

#include "base/base.h"
#include "device/lane.h"

/* The most samples of one save: in host memory (SAMPLES), and on each device (ROWS). Each source
 * gets at least one, so there may be a few more.
 *
 * Taking 8,192 in host memory lasts 0.20 ms with huge pages and 0.35 ms with small ones; 4,096 last
 * 0.12 and 0.20 ms (AMD EPYC, 1 GB, each sample a cache miss). On a device each takes up to 2 us of
 * the copy engine. benchmarks/odds.py shows which writes the samples detect. */
#define SFR__MAX_SAMPLES 8192
#define SFR__MAX_ROWS 4096
#define SFR__SAMPLE_LEN 64 /* bytes of a sample: a cache line */

/* One cache line as it was at the call. */
struct sfr__sample {
	uint32_t entry; /* the index of the source */
	uint32_t len;   /* bytes; fewer than a line only at the end of a source */
	uint64_t off;   /* offset in the source */
	unsigned char bytes[SFR__SAMPLE_LEN]; /* a device's copy engine writes here */
};

/* The samples of several sources, sorted by entry, then by off. */
struct sfr__samples {
	struct sfr__sample *items;
	uint32_t nr;
};

/* A source to sample. Lists are sorted by entry. */
struct sfr__source_to_sample {
	uint32_t entry; /* the index of the source */
	uint64_t addr, nbytes;
};

/* Takes samples of sources in host memory, which the caller frees with sfr__samples_free. `seed`
 * decides which lines are chosen. Returns 0 or -ENOMEM. */
int sfr__samples_take(struct sfr__samples *samples, const struct sfr__source_to_sample *sources,
		      uint32_t nr, uint64_t seed);
void sfr__samples_free(struct sfr__samples *samples);

/* Returns the most samples that these sources on a device can have. On a device the samples of a
 * source are rows at equal distances, which one copy gathers. */
size_t sfr__samples_most_rows(const struct sfr__source_to_sample *sources, uint32_t nr);
/* Chooses the samples of sources on a device. Fills in samples->items, which has room for
 * sfr__samples_most_rows, without their bytes. Fills in `rows`: the copies that will fetch the
 * bytes, at most one copy for each source. Returns the number of copies. */
size_t sfr__samples_choose_rows(struct sfr__samples *samples,
				const struct sfr__source_to_sample *sources, uint32_t nr,
				uint64_t seed, struct sfr__cuda_rows *rows);

/* Returns whether the staged bytes [off, off + len) of a source agree with its samples. */
bool sfr__samples_agree(const struct sfr__samples *samples, uint32_t entry, uint64_t off,
			const char *staged, size_t len);

/* ---- for tests ---- */

/* Returns how many of `most` samples a source of `nbytes` bytes gets, at least one. `total`: the
 * bytes of all nr_sources sources. */
uint64_t sfr__samples_share_of_source(uint64_t nbytes, uint32_t nr_sources, uint64_t total,
				      uint64_t most);
/* Chooses at most `most` samples of one source in host memory. Fills in `items` without their
 * bytes. Advances the random number *random. Returns the number of items. */
uint32_t sfr__samples_choose_lines(struct sfr__sample *items,
				   const struct sfr__source_to_sample *source, uint64_t most,
				   uint64_t *random);
/* Does the same for a source on a device, whose samples are rows. `share`: how many rows
 * sfr__samples_share_of_source gives the source. Sets *pitch to the bytes from one row to the
 * next. */
uint32_t sfr__samples_choose_rows_of(struct sfr__sample *items,
				     const struct sfr__source_to_sample *source, uint64_t share,
				     uint64_t *random, uint64_t *pitch);
/* Returns the most rows that sfr__samples_choose_rows_of can choose. */
uint64_t sfr__samples_most_rows_of(uint64_t nbytes, uint64_t share);

#endif
