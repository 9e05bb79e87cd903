/* A snapshot, as snapshot.c and the lane know it. */
#ifndef SFR_SNAPSHOT_H
#define SFR_SNAPSHOT_H

#include "ticket.h"

enum sfr__snapshot_state {
	SFR__SNAPSHOT_NEW,
	SFR__SNAPSHOT_LEASED,
	SFR__SNAPSHOT_COPYING, /* queued at, or being copied by, the lane */
	SFR__SNAPSHOT_COPIED,  /* or failed, or given up: nobody writes into the memory any more */
	SFR__NR_SNAPSHOT_STATES
};

struct sfr_snapshot {
	struct sfr_engine *engine; /* a reference; constant, as the next five */
	atomic_uint refs;          /* atomic */
	uint64_t fork_generation;
	struct sfr_source *sources;
	uint32_t nr_sources;
	bool shared;
	char **copies; /* where each source goes; constant from LEASED on, as the next two */
	char *base;
	uint64_t len;

	/* the rest is guarded by engine->mu */
	enum sfr__snapshot_state state;
	struct sfr__lease lease; /* empty: not leased, or gone back */
	bool abandoned;          /* nobody can read the copy any more: the lane stops */
	uint32_t nr_views, nr_holds;
	int64_t torn;

	struct sfr__sample *samples; /* entry is a source; taken by start, read by the lane */
	uint32_t nr_samples;

	struct sfr__notice notice;
	struct sfr_snapshot *next; /* at the lane */
};

/* On the lane's thread, with engine->mu, which is given up meanwhile: copies the first snapshot in
 * the queue. */
void sfr__snapshot_copy_locked(struct sfr_engine *engine);
/* How often a state followed another, in the whole process; for tests. */
unsigned sfr__snapshot_arrows(enum sfr__snapshot_state from, enum sfr__snapshot_state to);

#endif
