/* Slots bound how many saves of an engine are in flight.
 *
 *   wait for a slot ──▶ in the call ──launched──▶ in the background ──ended──▶ slot is free
 *
 * A save is *launched* when its caller hands it to other threads, which finish it. The slot is a
 * struct sfr__save_in_flight in the save's ticket. A save that the core does not write has a struct
 * sfr_slot instead (engine.c). Both count against max_in_flight, and close waits for both.
 *
 * Unordered saves are the files of a larger save, such as a directory. They do not count against
 * max_in_flight: the larger save may have the slot that its files would wait for. They have slots
 * of their own, SFR__MAX_UNORDERED, which bound their file descriptors. An unordered save ends
 * without further calls of its caller, so a thread may wait for its own unordered saves.
 *
 * A thread may have a slot for longer than one call: while it fills a directory. Another save of
 * that thread would wait for this slot forever, so it exceeds max_in_flight, as a nested save
 * does. */
#include "engine/engine.h"
#include "sfr/save.h"

void sfr__engine_add_save_locked(struct sfr_engine *engine, struct sfr__save_in_flight *flight)
{
	engine->nr_in_flight++;
	if (flight->unordered)
		engine->nr_unordered++;
	if (!flight->excluded_from_stats)
		engine->nr_saves++;
	flight->caller = pthread_self();
	flight->in_call = true;
	flight->next = engine->flights;
	if (flight->next)
		flight->next->prev = flight;
	engine->flights = flight;
}

void sfr__engine_remove_save_locked(struct sfr_engine *engine, struct sfr__save_in_flight *flight)
{
	engine->nr_in_flight--;
	if (flight->unordered)
		engine->nr_unordered--;
	if (flight->prev)
		flight->prev->next = flight->next;
	else
		engine->flights = flight->next;
	if (flight->next)
		flight->next->prev = flight->prev;
}

uint32_t sfr__engine_count_own_unlaunched_locked(const struct sfr_engine *engine,
						 bool only_pool_users)
{
	uint32_t nr = 0;

	for (const struct sfr__save_in_flight *flight = engine->flights; flight;
	     flight = flight->next) {
		const bool is_own = pthread_equal(flight->caller, pthread_self());

		if (is_own && flight->in_call && (flight->uses_pool || !only_pool_users))
			nr++;
	}
	return nr;
}

static bool is_slot_free_locked(const struct sfr_engine *engine, bool unordered)
{
	if (unordered)
		return engine->nr_unordered < SFR__MAX_UNORDERED;
	return engine->nr_in_flight - engine->nr_unordered < engine->opts.max_in_flight;
}

int sfr__engine_wait_for_slot_locked(struct sfr_engine *engine, bool unordered, uint32_t flags,
				     uint64_t deadline_ns, bool *over_limit)
{
	bool would_deadlock;
	int rc = 0;

	*over_limit = false;
	while (rc == 0) {
		if (engine->closing)
			return SFR_ECLOSED;
		if (is_slot_free_locked(engine, unordered))
			return 0;
		/* This thread has a slot of its own, which stays taken while the thread waits. So
		 * it would perhaps wait forever. */
		would_deadlock =
			!unordered && sfr__engine_count_own_unlaunched_locked(engine, false) > 0;
		*over_limit = would_deadlock || (flags & SFR_SAVE_NESTED) != 0;
		if (*over_limit)
			return 0; /* admits the save beyond max_in_flight */
		if (flags & SFR_SAVE_NO_WAIT)
			return SFR_EBUSY;
		rc = sfr__cond_wait(&engine->cv_state, &engine->mu, deadline_ns);
	}
	return rc;
}
