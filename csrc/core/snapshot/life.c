/* The state of a snapshot, the users of its memory, and the return of the memory. snapshot.c
 * explains them. */
#include "snapshot/snapshot.h"

/* How often snapshots went from one state to another; for tests. */
static atomic_uint nr_transitions[SFR__NR_SNAPSHOT_STATES][SFR__NR_SNAPSHOT_STATES];

unsigned sfr__snapshot_nr_transitions(enum sfr__snapshot_state from, enum sfr__snapshot_state to)
{
	return atomic_load_explicit(&nr_transitions[from][to], memory_order_relaxed);
}

void sfr__snapshot_set_state_locked(struct sfr_snapshot *s, enum sfr__snapshot_state state)
{
	atomic_fetch_add_explicit(&nr_transitions[s->state][state], 1, memory_order_relaxed);
	s->state = state;
	pthread_cond_broadcast(&s->engine->cv_state);
}

/* Gives the memory back if it has no users and no copy is running. Unlocks the engine's mutex,
 * which the caller holds. */
static void return_memory_if_unused_and_unlock(struct sfr_snapshot *s)
{
	struct sfr__lot *lot = NULL;
	bool gives_back = false;

	/* No view keeps the memory any more. Copies and holds end by themselves. */
	if (s->nr_views == 0 && s->lot)
		sfr__lot_set_view_held_locked(s, false);
	if (s->nr_views == 0 && s->nr_holds == 0) {
		s->abandoned = true; /* a running copy stops */
		gives_back = s->state != SFR__SNAPSHOT_COPYING && s->lot;
		if (gives_back)
			lot = sfr__lot_remove_user_locked(s);
	}
	sfr__unlock(&s->engine->mu);
	sfr__lot_free(s, lot);
	if (gives_back)
		sfr__engine_drop_pool_user(s->engine);
}

void sfr__snapshot_note_copy_begin(struct sfr_snapshot *s)
{
	sfr__lock(&s->engine->mu);
	s->nr_copying++;
	sfr__unlock(&s->engine->mu);
}

void sfr__snapshot_retire_memory(struct sfr_snapshot *s)
{
	sfr__lock(&s->engine->mu);
	sfr__lot_retire_locked(s);
	sfr__unlock(&s->engine->mu);
}

void sfr__snapshot_note_copy_end(struct sfr_snapshot *s, int64_t torn_source,
				 const struct sfr_err *err)
{
	struct sfr_engine *engine = s->engine;

	sfr__lock(&engine->mu);
	if (s->torn_source < 0) /* the first torn source counts */
		s->torn_source = torn_source;
	if (err && err->code && !s->err.code)
		s->err = *err;
	s->nr_copying--;
	if (s->nr_copying > 0) {
		sfr__unlock(&engine->mu);
		return;
	}
	engine->nr_copying_snapshots--;
	sfr__snapshot_set_state_locked(s, SFR__SNAPSHOT_COPIED);
	return_memory_if_unused_and_unlock(s);
	sfr__notice_post(&s->notice); /* takes over the reference of the copying threads */
}

/* ---- users of the memory ---- */

/* Adds 1 to *count, which is nr_views or nr_holds. Returns 0, SFR_EFORK, or SFR_ESTATE if the
 * memory has been given back. */
static int add_user(struct sfr_snapshot *s, uint32_t *count)
{
	int rc = 0;

	if (sfr__snapshot_is_inherited(s))
		return SFR_EFORK;
	sfr__lock(&s->engine->mu);
	if (s->lot)
		++*count;
	else
		rc = SFR_ESTATE;
	sfr__unlock(&s->engine->mu);
	return rc;
}

/* Subtracts 1 from *count. Gives the memory back after the last user. */
static void remove_user(struct sfr_snapshot *s, uint32_t *count)
{
	if (sfr__snapshot_is_inherited(s))
		return;
	sfr__lock(&s->engine->mu);
	--*count;
	return_memory_if_unused_and_unlock(s);
}

int sfr_snapshot_add_view(struct sfr_snapshot *s)
{
	return add_user(s, &s->nr_views);
}

void sfr_snapshot_remove_view(struct sfr_snapshot *s)
{
	remove_user(s, &s->nr_views);
}

void sfr_snapshot_set_will_return(struct sfr_snapshot *s, int yes)
{
	if (sfr__snapshot_is_inherited(s))
		return;
	sfr__lock(&s->engine->mu);
	if (s->lot) /* `yes`: the views will end without the help of a user */
		sfr__lot_set_view_held_locked(s, !yes && s->nr_views > 0);
	sfr__unlock(&s->engine->mu);
}

int sfr_snapshot_add_hold(struct sfr_snapshot *s)
{
	return add_user(s, &s->nr_holds);
}

void sfr_snapshot_remove_hold(struct sfr_snapshot *s)
{
	remove_user(s, &s->nr_holds);
}

int sfr_snapshot_locate_in_file(struct sfr_snapshot *s, int *fd, uint64_t *off)
{
	*fd = -1;
	if (sfr__snapshot_is_inherited(s))
		return SFR_EFORK;
	sfr__lock(&s->engine->mu);
	if (s->lot && s->base)
		*fd = sfr__pool_get_file_and_offset(s->engine->pool, s->base, off);
	sfr__unlock(&s->engine->mu);
	return *fd < 0 ? SFR_ESTATE : 0;
}

int sfr_snapshot_is_leased(struct sfr_snapshot *s)
{
	int leased;

	if (sfr__snapshot_is_inherited(s))
		return SFR_EFORK;
	sfr__lock(&s->engine->mu);
	leased = s->lot != NULL;
	sfr__unlock(&s->engine->mu);
	return leased;
}
