/* Lots: memory of the pool that belongs to one snapshot, or that several small ones share.
 *
 * Snapshots with SFR_SNAPSHOT_LEAVES take whole blocks, which can be registered with a driver. Many
 * of them are small, such as activations. So a snapshot that needs at most a quarter of a block
 * gets the next range of a common lot, which is one block.
 *
 *     lot    | range 1 | range 2     | range 3 | not given yet  |   one block, pinned once
 *     user     ended     a snapshot    ended                        free after the last user
 *
 * A range is not used again before the whole block is free, so one count of users is enough.
 *
 * While a view holds the memory of a snapshot in the lot (sfr__lot_set_view_held_locked), the lot's
 * lease in the pool is held, too. A lot is retired if a copy for one of its users may never end. A
 * retired lot gets no new users. */
#include <errno.h>

#include "snapshot/snapshot.h"

enum { SMALL_PER_BLOCK = 4 /* a small snapshot needs at most 1/4 of a block */ };

struct sfr__lot {
	struct sfr__lease lease; /* constant, except for `retired` */
	char *base;              /* constant; start of a common lot, else NULL */
	uint64_t len;            /* constant; bytes of a common lot, else 0 */
	atomic_bool pinning;     /* a thread is pinning the lot, or has pinned it */

	/* guarded by engine->mu */
	uint64_t used;         /* bytes of a common lot that were given to snapshots so far */
	uint32_t nr_users;     /* snapshots with memory in the lot */
	uint32_t nr_view_held; /* how many of them have `view_held` set */
};

/* Returns the sum of the lengths, or UINT64_MAX if it is larger than any memory. */
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

/* Returns whether a snapshot of `total` bytes gets a range of a common lot. */
static bool uses_common_lot(const struct sfr_snapshot *s, uint64_t total)
{
	return s->is_offload && total > 0 && total <= s->engine->opts.block_bytes / SMALL_PER_BLOCK;
}

/* ---- getting a lot ---- */

static void add_user_locked(struct sfr_snapshot *s, struct sfr__lot *lot)
{
	s->lot = lot;
	lot->nr_users++;
	sfr__lot_set_view_held_locked(s, true);
}

/* Gives the snapshot the next `total` bytes of the common lot `lot`: lens[i] bytes for source i.
 * Gives nothing and returns false if `lot` is NULL or retired, or has no room. */
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

/* Makes a lot without users: a common lot, or one for this snapshot alone. Waits for memory, and
 * returns errors, like sfr__pool_lease. */
static int make_lot(struct sfr_snapshot *s, const uint64_t *lens, bool is_common,
		    uint32_t nr_blocked_saves, uint64_t slice_ns, struct sfr__lot **out)
{
	struct sfr__pool *pool = s->engine->pool;
	const uint64_t block_bytes = s->engine->opts.block_bytes;
	/* Only whole blocks can be pinned for a device. */
	const bool whole = s->nr_devices || s->is_offload;
	struct sfr__lot *lot = sfr_sys.calloc(1, sizeof(*lot));
	int rc;

	if (!lot)
		return -ENOMEM;
	lot->len = is_common ? block_bytes : 0;
	if (is_common)
		rc = sfr__pool_lease(pool, &block_bytes, 1, whole, nr_blocked_saves, slice_ns,
				     &lot->base, &lot->lease);
	else
		rc = sfr__pool_lease(pool, lens, s->nr_sources, whole, nr_blocked_saves, slice_ns,
				     s->copies, &lot->lease);
	if (rc == 0 && s->shared) {
		rc = sfr__pool_set_inheritable(pool, &lot->lease, true);
		if (rc < 0) {
			/* Some blocks may be shared already: stop sharing them. If that fails,
			 * children inherit these blocks, which only costs memory. */
			(void)sfr__pool_set_inheritable(pool, &lot->lease, false);
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

int sfr__lot_lease_memory(struct sfr_snapshot *s, const uint64_t *lens, uint32_t nr_blocked_saves,
			  uint64_t slice_ns)
{
	struct sfr_engine *engine = s->engine;
	const uint64_t total = sum_of(lens, s->nr_sources);
	const bool small = uses_common_lot(s, total);
	struct sfr__lot *lot;
	bool got_range;
	int rc;

	sfr__lock(&engine->mu);
	got_range = small && take_range_locked(s, lens, total, engine->common_lot);
	sfr__unlock(&engine->mu);
	if (got_range)
		return 0;
	rc = make_lot(s, lens, small, nr_blocked_saves, slice_ns, &lot);
	if (rc < 0)
		return rc;
	sfr__lock(&engine->mu);
	if (small) {
		(void)take_range_locked(s, lens, total, lot); /* true: a new lot has room */
		engine->common_lot = lot; /* the previous lot gets no more users */
	} else {
		add_user_locked(s, lot);
	}
	sfr__unlock(&engine->mu);
	return 0;
}

/* ---- using a lot ---- */

/* The lot's lease is held in the pool while any snapshot in the lot is held by a view. */
void sfr__lot_set_view_held_locked(struct sfr_snapshot *s, bool view_held)
{
	struct sfr__lot *lot = s->lot;

	if (s->view_held == view_held)
		return;
	s->view_held = view_held;
	if (view_held) {
		lot->nr_view_held++;
		if (lot->nr_view_held == 1)
			sfr__pool_set_user_held(s->engine->pool, &lot->lease, true);
	} else {
		lot->nr_view_held--;
		if (lot->nr_view_held == 0)
			sfr__pool_set_user_held(s->engine->pool, &lot->lease, false);
	}
}

void sfr__lot_retire_locked(struct sfr_snapshot *s)
{
	s->lot->lease.retired = true;
}

void sfr__lot_pin(const struct sfr_snapshot *s)
{
	struct sfr__lot *lot = s->lot;

	/* Returns if another thread is pinning the lot, or has pinned it. Waiting for that thread
	 * is not necessary: copies to memory that is not pinned are only slower. */
	if (atomic_exchange_explicit(&lot->pinning, true, memory_order_acq_rel))
		return;
	if (!sfr__pool_pin_lease(s->engine->pool, &lot->lease)) /* a later call tries again */
		atomic_store_explicit(&lot->pinning, false, memory_order_release);
}

/* Returns the lot, which the caller frees, if it has no users left; else NULL. */
struct sfr__lot *sfr__lot_remove_user_locked(struct sfr_snapshot *s)
{
	struct sfr__lot *lot = s->lot;

	sfr__lot_set_view_held_locked(s, false);
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
	/* If the system refuses, children inherit these pages, which only costs memory. */
	if (s->shared)
		(void)sfr__pool_set_inheritable(s->engine->pool, &lot->lease, false);
	sfr__pool_unlease(s->engine->pool, &lot->lease);
	sfr_sys.free(lot);
}
