/* Lots: memory of the pool that one snapshot has, or several small ones share.
 *
 * What leaves a device takes whole blocks, which a driver can be told of. Of the many small things
 * that leave, such as activations, each would take one: so those that need a quarter of a block or
 * less are cut out of a common one, one behind the other, until the next finds no room.
 *
 *     lot    | one   | two       | three |  room         |      one block, pinned once
 *     users    gone    a snapshot  gone                         goes back with the last of them
 *
 * What is cut out is never given out again before the whole block is: so there is one count of users
 * for it, and nothing is moved or searched. At worst a lot lives for the sake of one small snapshot,
 * which then has the block that it would have had to itself.
 *
 * A lot is held, as far as the pool is concerned, while any of its users is; it is retired when a copy
 * for any of them may never end, and nobody else gets in from then on.
 */
#include <errno.h>

#include "snapshot/snapshot.h"

enum { SMALL_PARTS = 4 /* of a block, that a small snapshot needs one of at most */ };

struct sfr__lot {
	struct sfr__lease lease; /* constant, but for `retired` */
	char *base;              /* of a common one; constant, as the next */
	uint64_t len;            /* 0: it is one snapshot's */
	atomic_bool pinning;     /* some thread is about to pin it, or has done so; atomic */

	/* guarded by engine->mu */
	uint64_t used;
	uint32_t nr_users;
	uint32_t nr_held; /* of them, that only their callers can end */
};

static uint64_t sum(const uint64_t *lens, uint32_t nr)
{
	uint64_t total = 0;

	for (uint32_t i = 0; i < nr; i++) {
		if (lens[i] > UINT64_MAX / 4 || total > UINT64_MAX / 4)
			return UINT64_MAX;
		total += lens[i];
	}
	return total;
}

static bool is_small(const struct sfr_snapshot *s, uint64_t total)
{
	return s->leaves && total > 0 && total <= s->engine->opts.block_bytes / SMALL_PARTS;
}

/* ---- getting one ---- */

static void use_locked(struct sfr_snapshot *s, struct sfr__lot *lot)
{
	s->lot = lot;
	lot->nr_users++;
	sfr__lot_hold_locked(s, true);
}

static bool cut_locked(struct sfr_snapshot *s, const uint64_t *lens, uint64_t total,
		       struct sfr__lot *lot)
{
	if (!lot || lot->lease.retired || lot->len - lot->used < total)
		return false;
	for (uint32_t i = 0; i < s->nr_sources; i++) {
		s->copies[i] = lens[i] ? lot->base + lot->used : NULL;
		lot->used += lens[i];
	}
	use_locked(s, lot);
	return true;
}

/* A lot with memory, and no users yet. */
static int make(struct sfr_snapshot *s, const uint64_t *lens, bool common, uint32_t nr_own,
		uint64_t slice_ns, struct sfr__lot **out)
{
	struct sfr__pool *pool = s->engine->pool;
	const uint64_t block_bytes = s->engine->opts.block_bytes;
	const bool whole = s->nr_parts || s->leaves; /* small ones leave, too */
	struct sfr__lot *lot = sfr_sys.calloc(1, sizeof(*lot));
	int rc;

	if (!lot)
		return -ENOMEM;
	lot->len = common ? block_bytes : 0;
	rc = sfr__pool_place(pool, common ? &block_bytes : lens, common ? 1 : s->nr_sources, whole,
			     nr_own, slice_ns, common ? &lot->base : s->copies, &lot->lease);
	if (rc == 0 && s->shared) {
		rc = sfr__pool_share(pool, &lot->lease, true);
		if (rc < 0) {
			(void)sfr__pool_share(pool, &lot->lease, false); /* what it can */
			sfr__pool_unplace(pool, &lot->lease);
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
	const uint64_t total = sum(lens, s->nr_sources);
	const bool small = is_small(s, total);
	struct sfr__lot *lot;
	bool found;
	int rc;

	sfr__lock(&engine->mu);
	found = small && cut_locked(s, lens, total, engine->common_lot);
	sfr__unlock(&engine->mu);
	if (found)
		return 0;
	rc = make(s, lens, small, nr_own, slice_ns, &lot);
	if (rc < 0)
		return rc;
	sfr__lock(&engine->mu);
	if (small) {
		(void)cut_locked(s, lens, total, lot); /* always has room */
		engine->common_lot = lot;
	} else {
		use_locked(s, lot);
	}
	sfr__unlock(&engine->mu);
	return 0;
}

/* ---- as long as it lasts ---- */

void sfr__lot_hold_locked(struct sfr_snapshot *s, bool held)
{
	struct sfr__lot *lot = s->lot;

	if (s->held == held)
		return;
	s->held = held;
	lot->nr_held += held;
	lot->nr_held -= !held;
	if (lot->nr_held == (uint32_t)held) /* the first of them, or none is left */
		sfr__pool_hold(s->engine->pool, &lot->lease, held);
}

void sfr__lot_retire_locked(struct sfr_snapshot *s)
{
	s->lot->lease.retired = true;
}

void sfr__lot_pin(const struct sfr_snapshot *s)
{
	struct sfr__lot *lot = s->lot;

	/* Who comes second copies meanwhile to or from what may not be pinned yet. */
	if (atomic_exchange_explicit(&lot->pinning, true, memory_order_acq_rel))
		return;
	if (!sfr__pool_pin_lease(s->engine->pool, &lot->lease))
		atomic_store_explicit(&lot->pinning, false, memory_order_release);
}

struct sfr__lot *sfr__lot_drop_locked(struct sfr_snapshot *s)
{
	struct sfr__lot *lot = s->lot;

	sfr__lot_hold_locked(s, false);
	s->lot = NULL;
	if (--lot->nr_users > 0)
		return NULL;
	if (s->engine->common_lot == lot)
		s->engine->common_lot = NULL;
	return lot;
}

void sfr__lot_free(struct sfr_snapshot *s, struct sfr__lot *lot)
{
	if (!lot)
		return;
	/* Where the system refuses (a process has a limited number of mappings), later children
	 * have these pages too: that costs them memory, and harms nobody. */
	if (s->shared)
		(void)sfr__pool_share(s->engine->pool, &lot->lease, false);
	sfr__pool_unplace(s->engine->pool, &lot->lease);
	sfr_sys.free(lot);
}
