/* Snapshots to test: sources whose bytes differ. For test_snapshot.c and test_lease.c. */
#ifndef SNAPSHOT_HELPERS_H
#define SNAPSHOT_HELPERS_H

#include <string.h>

#include "snapshot/snapshot.h"
#include "pool_helpers.h"

enum { NR = 5, LEN = 30000, BLOCK = 16384, NR_BLOCKS = 16 };

static unsigned char bytes[NR][LEN];

static inline void fill(unsigned char value)
{
	for (int i = 0; i < NR; i++)
		memset(bytes[i], value + i, LEN);
}

/* Describes sources: the first two are captured, the others are deferred if `lane`. The fourth
 * is empty. */
static inline void describe(struct sfr_source *sources, bool lane)
{
	for (unsigned i = 0; i < NR; i++)
		sources[i] = (struct sfr_source){
			.addr = (uint64_t)(uintptr_t)bytes[i],
			.nbytes = i == 3 ? 0 : LEN - 100 * i - 1,
			.lane = lane && i >= 2 ? SFR_LANE_HOST : SFR_CAPTURED,
		};
}

static inline struct sfr_engine *make_engine(uint64_t nr_blocks)
{
	const struct sfr_engine_opts opts = {
		.pool_bytes = nr_blocks * BLOCK,
		.block_bytes = BLOCK,
		.nr_writers = 1,
		.max_in_flight = 1,
	};
	struct sfr_engine *engine = NULL;

	CHECK_EQ(sfr_engine_new(&opts, &engine), 0);
	return engine;
}

static inline uint64_t leased(struct sfr_engine *engine)
{
	struct sfr_stats out;

	CHECK_EQ(sfr_engine_stats(engine, &out), 0);
	return out.leased_bytes;
}

static inline uint64_t committed(struct sfr_engine *engine)
{
	struct sfr_stats out;

	CHECK_EQ(sfr_engine_stats(engine, &out), 0);
	return out.committed_bytes;
}

static inline int take(struct sfr_engine *engine, const struct sfr_source *sources, uint32_t nr,
		       uint32_t flags, struct sfr_snapshot **out)
{
	int rc = sfr_snapshot_new(engine, sources, nr, flags, out);

	if (rc == 0)
		rc = sfr_snapshot_lease(*out, SFR_FOREVER);
	if (rc == 0)
		rc = sfr_snapshot_start(*out);
	return rc;
}

/* Takes a snapshot of one captured source of `nbytes`. Without an address its bytes are never
 * read. */
static inline int take_nbytes(struct sfr_engine *engine, uint64_t nbytes, struct sfr_snapshot **out)
{
	const struct sfr_source source = { .nbytes = nbytes };
	int rc = sfr_snapshot_new(engine, &source, 1, 0, out);

	return rc == 0 ? sfr_snapshot_lease(*out, 0) : rc;
}

static inline void drop(struct sfr_snapshot *s)
{
	sfr_snapshot_remove_view(s);
	sfr_snapshot_put(s);
}

static inline void take_notice(struct sfr_snapshot *expected)
{
	struct sfr_notice notice;

	CHECK_EQ(sfr_notice_wait(&notice, SFR_FOREVER), 0);
	CHECK_EQ(notice.what, SFR_NOTICE_SNAPSHOT);
	CHECK(notice.ticket == NULL && notice.text[0] == 0);
	CHECK(expected == NULL || notice.snapshot == expected);
	CHECK(notice.number == sfr_snapshot_number(notice.snapshot));
	sfr_snapshot_put(notice.snapshot);
}

static inline bool holds(const struct sfr_snapshot *s, const struct sfr_source *sources,
			 unsigned char value)
{
	char *base;
	uint64_t len;
	bool same = true;

	sfr_snapshot_memory(s, &base, &len);
	for (unsigned i = 0; i < NR; i++) {
		uint64_t off = sfr_snapshot_offset(s, i);

		same &= off % SFR_ALIGN == 0 && off + sources[i].nbytes <= len;
		for (uint64_t k = 0; same && k < sources[i].nbytes; k++)
			same = (unsigned char)base[off + k] == (unsigned char)(value + i);
	}
	return same;
}

#endif
