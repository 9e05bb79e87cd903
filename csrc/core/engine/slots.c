/* Slots bound how many saves of an engine are in flight.
 *
 *   wanted ──a slot is free, or the save is nested──▶ in the call ──launched──▶ in flight ──▶ left
 *
 * A save is *launched* when its caller hands it to other threads, which finish it. A ticket embeds
 * its slot (struct sfr__flight). A save without a ticket (by another CheckpointIO, on a Python
 * thread) takes a struct sfr_slot (engine.c). Both count towards max_in_flight, and close waits for
 * both.
 *
 * Unordered saves are the files of a larger save, such as a directory. The larger save has an
 * ordinary slot or is bounded by its maker, so max_in_flight does not count its files. The files
 * have slots of their own, SFR__MOST_UNORDERED, which bound their file descriptors. So a file never
 * waits for the slot of an ordinary save, which may itself wait for the file. Statistics count the
 * larger save once: by its slot, or by its file of parts. An unordered save ends without further
 * calls of its caller, so a thread may always wait for its own unordered saves to end.
 *
 * A thread may have a slot for longer than one call: while it fills a directory. Another save of
 * that thread would wait forever for this slot. So that save exceeds max_in_flight instead, as a
 * nested save does.
 */
#include "engine/engine.h"
#include "sfr/save.h"

void sfr__engine_enter_locked(struct sfr_engine *engine, struct sfr__flight *flight)
{
	engine->nr_in_flight++;
	if (flight->unordered)
		engine->nr_unordered++;
	if (!flight->uncounted)
		engine->nr_saves++;
	flight->caller = pthread_self();
	flight->in_call = true;
	flight->next = engine->flights;
	if (flight->next)
		flight->next->prev = flight;
	engine->flights = flight;
}

void sfr__engine_leave_locked(struct sfr_engine *engine, struct sfr__flight *flight)
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

uint32_t sfr__engine_nr_own_locked(const struct sfr_engine *engine, bool in_pool)
{
	uint32_t nr = 0;

	for (const struct sfr__flight *each = engine->flights; each; each = each->next)
		if (each->in_call && (each->in_pool || !in_pool) &&
		    pthread_equal(each->caller, pthread_self()))
			nr++;
	return nr;
}

/* Returns whether a slot is free for a save of this kind. */
static bool is_slot_free_locked(const struct sfr_engine *engine, bool unordered)
{
	if (unordered)
		return engine->nr_unordered < SFR__MOST_UNORDERED;
	return engine->nr_in_flight - engine->nr_unordered < engine->opts.max_in_flight;
}

int sfr__engine_admit_locked(struct sfr_engine *engine, bool unordered, uint32_t flags,
			     uint64_t deadline_ns, bool *beyond)
{
	int rc = 0;

	*beyond = false;
	while (rc == 0) {
		if (engine->closing)
			return SFR_ECLOSED;
		if (is_slot_free_locked(engine, unordered))
			return 0;
		*beyond = (flags & SFR_SAVE_NESTED) != 0 ||
			  (!unordered && sfr__engine_nr_own_locked(engine, false) > 0);
		if (*beyond)
			return 0;
		if (flags & SFR_SAVE_NO_WAIT)
			return SFR_EBUSY;
		rc = sfr__cond_wait(&engine->cv_state, &engine->mu, deadline_ns);
	}
	return rc;
}
