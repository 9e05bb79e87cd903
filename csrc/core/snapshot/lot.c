/* Lots: memory of the pool that belongs to one snapshot, or that several small ones share.
 *
 * Snapshots of an Offloader take whole blocks, which can be registered with a driver. There may be
 * many small ones, such as activations, and each would take a block. So a snapshot that needs a
 * quarter of a block or less gets a range of a common block, after the ranges of others, until the
 * next does not fit.
 *
 *     lot    | one   | two       | three |  room         |      one block, pinned once
 *     users    gone    a snapshot  gone                         given back after the last user
 *
 * A range is not used again before the whole block is free, so one count of users is enough, and
 * nothing is moved or searched. At worst one small snapshot keeps a lot alive, which is the block
 * that it would have had to itself.
 *
 * While at least one user of a lot is held (sfr__lot_set_held_locked), so is the lot's lease in the
 * pool: only a caller can make it free. A lot is retired if a copy for any user may never end; then
 * it gets no more users. */
#include <errno.h>

#include "snapshot/snapshot.h"

enum { SMALL_PER_BLOCK = 4 /* a small snapshot needs at most a quarter of a block */ };

struct sfr__lot {
	struct sfr__lease lease; /* constant, except for `retired` */
	char *base;              /* of a common lot, else NULL; constant, like the next */
	uint64_t len;            /* of a common lot, else 0 */
	atomic_bool pinning;     /* a thread is pinning the lot, or has pinned it */

	/* guarded by engine->mu */
	uint64_t used;     /* bytes of a common lot that were given to snapshots */
	uint32_t nr_users; /* snapshots */
	uint32_t nr_held;  /* users with `held` set, see sfr__lot_set_held_locked */
};

/* Returns the sum of the lengths, or UINT64_MAX if it would overflow. */
static uint64_t sum_of(const uint64_t *lens, uint32_t nr)
{
	uint64_t total = 0;

	for (uint32_t i = 0; i < nr; i++) {
		if (lens[i] > UINT64_MAX / 4 || total > UINT64_MAX / 4)
			return UINT64_MAX;
		total += lens[i];
	}
	return total;
}

/* Returns whether a snapshot of `total` bytes shares a block with others. Only small ones with
 * SFR_SNAPSHOT_LEAVES do. */
static bool is_small(const struct sfr_snapshot *s, uint64_t total)
{
	return s->leaves && total > 0 && total <= s->engine->opts.block_bytes / SMALL_PER_BLOCK;
}

/* ---- getting a lot ---- */

/* Makes the snapshot a user of the lot. */
static void add_user_locked(struct sfr_snapshot *s, struct sfr__lot *lot)
{
	s->lot = lot;
	lot->nr_users++;
	sfr__lot_set_held_locked(s, true);
}

/* Gives the snapshot the next `total` bytes of a common lot, lens[i] of them for source i, and
 * makes it a user of the lot. Returns false if `lot` is NULL or retired, or has no room. */
static bool take_range_locked(struct sfr_snapshot *s, const uint64_t *lens, uint64_t total,
			      struct sfr__lot *lot)
{
	if (!lot || lot->lease.retired || lot->len - lot->used < total)
		return false;
	for (uint32_t i = 0; i < s->nr_sources; i++) {
		s->copies[i] = lens[i] ? lot->base + lot->used : NULL;
		lot->used += lens[i];
	}
	add_user_locked(s, lot);
	return true;
}

/* Makes a lot with memory and without users: one block that small snapshots share (`common`), or
 * memory for this snapshot's sources. Waits and fails as sfr__pool_lease. */
static int make_lot(struct sfr_snapshot *s, const uint64_t *lens, bool common, uint32_t nr_own,
		    uint64_t slice_ns, struct sfr__lot **out)
{
	struct sfr__pool *pool = s->engine->pool;
	const uint64_t block_bytes = s->engine->opts.block_bytes;
	/* Blocks need all their memory to be pinned for a device. */
	const bool whole = s->nr_devices || s->leaves;
	struct sfr__lot *lot = sfr_sys.calloc(1, sizeof(*lot));
	int rc;

	if (!lot)
		return -ENOMEM;
	lot->len = common ? block_bytes : 0;
	if (common)
		rc = sfr__pool_lease(pool, &block_bytes, 1, whole, nr_own, slice_ns, &lot->base,
				     &lot->lease);
	else
		rc = sfr__pool_lease(pool, lens, s->nr_sources, whole, nr_own, slice_ns, s->copies,
				     &lot->lease);
	if (rc == 0 && s->shared) {
		rc = sfr__pool_share(pool, &lot->lease, true);
		if (rc < 0) {
			/* undoes the sharing; a failure is harmless */
			(void)sfr__pool_share(pool, &lot->lease, false);
			sfr__pool_unlease(pool, &lot->lease);
		}
	}
	if (rc < 0) {
		sfr_sys.free(lot);
		return rc;
	}
	atomic_init(&lot->pinning, false);
	*out = lot;
	return 0;
}

int sfr__lot_get(struct sfr_snapshot *s, const uint64_t *lens, uint32_t nr_own, uint64_t slice_ns)
{
	struct sfr_engine *engine = s->engine;
	const uint64_t total = sum_of(lens, s->nr_sources);
	const bool small = is_small(s, total);
	struct sfr__lot *lot;
	bool found;
	int rc;

	sfr__lock(&engine->mu);
	found = small && take_range_locked(s, lens, total, engine->common_lot);
	sfr__unlock(&engine->mu);
	if (found)
		return 0;
	rc = make_lot(s, lens, small, nr_own, slice_ns, &lot);
	if (rc < 0)
		return rc;
	sfr__lock(&engine->mu);
	if (small) {
		(void)take_range_locked(s, lens, total, lot); /* always has room */
		engine->common_lot = lot; /* the one before keeps its users, and gets no more */
	} else {
		add_user_locked(s, lot);
	}
	sfr__unlock(&engine->mu);
	return 0;
}

/* ---- using a lot ---- */

void sfr__lot_set_held_locked(struct sfr_snapshot *s, bool held)
{
	struct sfr__lot *lot = s->lot;

	if (s->held == held)
		return;
	s->held = held;
	if (held) {
		lot->nr_held++;
		if (lot->nr_held == 1)
			sfr__pool_hold(s->engine->pool, &lot->lease, true);
	} else {
		lot->nr_held--;
		if (lot->nr_held == 0)
			sfr__pool_hold(s->engine->pool, &lot->lease, false);
	}
}

void sfr__lot_retire_locked(struct sfr_snapshot *s)
{
	s->lot->lease.retired = true;
}

void sfr__lot_pin(const struct sfr_snapshot *s)
{
	struct sfr__lot *lot = s->lot;

	/* A second caller does not wait for the first: its copies work without pinned memory too,
	 * only more slowly. */
	if (atomic_exchange_explicit(&lot->pinning, true, memory_order_acq_rel))
		return;
	if (!sfr__pool_pin_lease(s->engine->pool, &lot->lease))
		atomic_store_explicit(&lot->pinning, false, memory_order_release);
}

struct sfr__lot *sfr__lot_drop_locked(struct sfr_snapshot *s)
{
	struct sfr__lot *lot = s->lot;

	sfr__lot_set_held_locked(s, false);
	s->lot = NULL;
	lot->nr_users--;
	if (lot->nr_users > 0)
		return NULL;
	if (s->engine->common_lot == lot)
		s->engine->common_lot = NULL;
	return lot;
}

void sfr__lot_free(struct sfr_snapshot *s, struct sfr__lot *lot)
{
	if (!lot)
		return;
	/* The system may refuse, because a process has a limited number of mappings. Then later
	 * children have these pages too, which only costs them memory. */
	if (s->shared)
		(void)sfr__pool_share(s->engine->pool, &lot->lease, false);
	sfr__pool_unlease(s->engine->pool, &lot->lease);
	sfr_sys.free(lot);
}
