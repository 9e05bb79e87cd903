/* A snapshot's states, those who copy, those who use its memory, and when it goes back: see
 * snapshot.c. */
#include "snapshot/snapshot.h"

static atomic_uint arrows[SFR__NR_SNAPSHOT_STATES][SFR__NR_SNAPSHOT_STATES];

unsigned sfr__snapshot_arrows(enum sfr__snapshot_state from, enum sfr__snapshot_state to)
{
	return atomic_load_explicit(&arrows[from][to], memory_order_relaxed);
}

void sfr__snapshot_set_state_locked(struct sfr_snapshot *s, enum sfr__snapshot_state state)
{
	atomic_fetch_add_explicit(&arrows[s->state][state], 1, memory_order_relaxed);
	s->state = state;
	pthread_cond_broadcast(&s->engine->cv_state);
}

void sfr__snapshot_give_back(struct sfr_snapshot *s, struct sfr__lease *lease)
{
	/* Where the system refuses (a process has a limited number of mappings), later children
	 * have these pages too: that costs them memory, and harms nobody. */
	if (s->shared)
		(void)sfr__pool_share(s->engine->pool, lease, false);
	sfr__pool_unplace(s->engine->pool, lease);
	sfr__engine_snapshot_gone(s->engine);
}

/* Asks whether the memory goes back, and lets go of the lock. */
static void settle_and_unlock(struct sfr_snapshot *s)
{
	struct sfr__lease lease = { 0 };

	/* Before it is known that nobody has it any more: who waits for memory has to see that this
	 * comes back. The pool's lock stands in the order after the engine's. */
	if (s->nr_views == 0 && s->lease.runs)
		sfr__pool_hold(s->engine->pool, &s->lease, false);
	if (s->nr_views == 0 && s->nr_holds == 0) {
		s->abandoned = true;
		if (s->state != SFR__SNAPSHOT_COPYING) {
			lease = s->lease;
			s->lease = (struct sfr__lease){ 0 };
		}
	}
	sfr__unlock(&s->engine->mu);
	if (lease.runs)
		sfr__snapshot_give_back(s, &lease);
}

void sfr__snapshot_out(struct sfr_snapshot *s)
{
	sfr__lock(&s->engine->mu);
	s->nr_out++;
	sfr__unlock(&s->engine->mu);
}

void sfr__snapshot_lost(struct sfr_snapshot *s)
{
	sfr__lock(&s->engine->mu);
	s->lease.retired = true;
	sfr__unlock(&s->engine->mu);
}

void sfr__snapshot_in(struct sfr_snapshot *s, int64_t torn, const struct sfr_err *err)
{
	struct sfr_engine *engine = s->engine;

	sfr__lock(&engine->mu);
	if (s->torn < 0)
		s->torn = torn;
	if (err && err->code && !s->err.code)
		s->err = *err;
	if (--s->nr_out > 0) {
		sfr__unlock(&engine->mu);
		return;
	}
	engine->nr_copying--;
	sfr__snapshot_set_state_locked(s, SFR__SNAPSHOT_COPIED);
	settle_and_unlock(s);
	sfr__notice_post(&s->notice); /* with the reference of those who copy */
}

/* ---- who uses the memory ---- */

static int use(struct sfr_snapshot *s, uint32_t *count)
{
	int rc = 0;

	if (sfr__snapshot_is_foreign(s))
		return SFR_EFORK;
	sfr__lock(&s->engine->mu);
	if (s->lease.runs)
		++*count;
	else
		rc = SFR_ESTATE;
	sfr__unlock(&s->engine->mu);
	return rc;
}

static void unuse(struct sfr_snapshot *s, uint32_t *count)
{
	if (sfr__snapshot_is_foreign(s))
		return;
	sfr__lock(&s->engine->mu);
	--*count;
	settle_and_unlock(s);
}

int sfr_snapshot_view(struct sfr_snapshot *s)
{
	return use(s, &s->nr_views);
}

void sfr_snapshot_unview(struct sfr_snapshot *s)
{
	unuse(s, &s->nr_views);
}

void sfr_snapshot_will_return(struct sfr_snapshot *s, int yes)
{
	if (sfr__snapshot_is_foreign(s))
		return;
	sfr__lock(&s->engine->mu);
	if (s->lease.runs)
		sfr__pool_hold(s->engine->pool, &s->lease, !yes && s->nr_views > 0);
	sfr__unlock(&s->engine->mu);
}

int sfr_snapshot_hold(struct sfr_snapshot *s)
{
	return use(s, &s->nr_holds);
}

void sfr_snapshot_unhold(struct sfr_snapshot *s)
{
	unuse(s, &s->nr_holds);
}

int sfr_snapshot_file(struct sfr_snapshot *s, int *fd, uint64_t *off)
{
	*fd = -1;
	if (sfr__snapshot_is_foreign(s))
		return SFR_EFORK;
	sfr__lock(&s->engine->mu);
	if (s->lease.runs && s->base)
		*fd = sfr__pool_file(s->engine->pool, s->base, off);
	sfr__unlock(&s->engine->mu);
	return *fd < 0 ? SFR_ESTATE : 0;
}

int sfr_snapshot_leased(struct sfr_snapshot *s)
{
	int leased;

	if (sfr__snapshot_is_foreign(s))
		return SFR_EFORK;
	sfr__lock(&s->engine->mu);
	leased = s->lease.runs != NULL;
	sfr__unlock(&s->engine->mu);
	return leased;
}
