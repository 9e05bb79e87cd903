/* Samples of deferred sources: cache lines kept in the call and compared with the staged copy.
 *
 * A difference means that something wrote between the call and the copy. The copy is then a state
 * that the training was never in, and the save or snapshot fails. */
#ifndef SFR_STAGE_SAMPLES_H
#define SFR_STAGE_SAMPLES_H

#include "base/base.h"
#include "device/lane.h"

/* About the most samples that all sources of a save or snapshot have together, in host memory
 * (SAMPLES) and on one device (ROWS). Each source gets at least one. Taking 8,192 in host memory
 * lasts 0.20 ms with huge pages and 0.35 ms with small ones; 4,096 last 0.12 and 0.20 ms (AMD EPYC,
 * 1 GB, each sample a cache miss). On a device each sample takes up to 2 us of the copy engine.
 * benchmarks/odds.py shows which writes they detect. */
#define SFR__MAX_SAMPLES 8192
#define SFR__MAX_ROWS 4096
#define SFR__SAMPLE_LEN 64 /* bytes of a sample: a cache line */

/* One cache line as it was at the call. Its bytes are in the struct, where a device writes them. */
struct sfr__sample {
	uint32_t entry; /* the index of the source */
	uint32_t len;   /* bytes in use; fewer than a line at the end of a source */
	uint64_t off;   /* offset in the source */
	unsigned char bytes[SFR__SAMPLE_LEN];
};

/* The samples of several sources: entry ascending, then off ascending. */
struct sfr__samples {
	struct sfr__sample *items;
	uint32_t nr;
};

/* A source to sample. A list of them has ascending entries. */
struct sfr__sampled {
	uint32_t entry;
	uint64_t addr, nbytes;
};

/* Takes samples of sources in host memory; the caller frees them with sfr__samples_free. The seed
 * decides which lines are chosen. 0 or -ENOMEM. */
int sfr__samples_take(struct sfr__samples *samples, const struct sfr__sampled *sources, uint32_t nr,
		      uint64_t seed);
void sfr__samples_free(struct sfr__samples *samples);

/* On a device, the samples of a source are rows at equal distances, which one copy can gather.
 * Returns the most samples that these sources can have together. */
size_t sfr__samples_most_rows(const struct sfr__sampled *sources, uint32_t nr);
/* Chooses the samples of sources on a device. Fills in samples->items, which has room for
 * sfr__samples_most_rows, except for their bytes. Fills in `rows`, at most one copy for each
 * source, which will fetch the bytes. Returns the number of copies. */
size_t sfr__samples_choose_rows(struct sfr__samples *samples, const struct sfr__sampled *sources,
				uint32_t nr, uint64_t seed, struct sfr__cuda_rows *rows);

/* Returns whether the staged bytes [off, off + len) of a source agree with its samples. */
bool sfr__samples_agree(const struct sfr__samples *samples, uint32_t entry, uint64_t off,
			const char *staged, size_t len);

/* ---- for tests ---- */

/* Returns the most samples of a source of nbytes, which is one of nr_sources with `total` bytes
 * together: its share of `most`, but at least one. */
uint64_t sfr__samples_share(uint64_t nbytes, uint32_t nr_sources, uint64_t total, uint64_t most);
/* Chooses at most `most` samples of one source in host memory. Fills in `items`, except for their
 * bytes, and advances the random number *random. Returns the number of items. */
uint32_t sfr__samples_choose_lines(struct sfr__sample *items, const struct sfr__sampled *source,
				   uint64_t most, uint64_t *random);
/* Does the same for one source on a device. `each` is the source's share of all rows. *pitch gets
 * the distance between rows, in bytes. The function below returns the most rows that this one can
 * choose. */
uint32_t sfr__samples_choose_rows_of(struct sfr__sample *items, const struct sfr__sampled *source,
				     uint64_t each, uint64_t *random, uint64_t *pitch);
uint64_t sfr__samples_most_rows_of(uint64_t nbytes, uint64_t each);

#endif
