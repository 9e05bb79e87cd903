/* Waits for saves. A thread that waits for copies of host memory helps to make them. */
#include "save/ticket.h"

static bool is_copied(const void *ticket)
{
	return sfr__ticket_has_reached_locked(ticket, SFR_WAIT_COPIED);
}

int sfr_save_has_reached(const struct sfr_ticket *t, enum sfr_wait_for what)
{
	enum sfr_state state = t->state;

	if (sfr__ticket_is_inherited(t))
		return 0;
	if (atomic_load_explicit(&t->over, memory_order_acquire))
		return 1;
	if (what == SFR_WAIT_COPIED)
		return t->facts.copied;
	if (what == SFR_WAIT_STAGED) /* ENDING, before DURABLE in the enum: the save has failed */
		return state >= SFR_STAGED && state < SFR_DURABLE && state != SFR_ENDING;
	return 0; /* SFR_WAIT_ENDED: it is not over */
}

int sfr__ticket_wait(struct sfr_ticket *t, enum sfr_wait_for what, uint64_t deadline_ns)
{
	int rc = 0;

	sfr__lock(&t->engine->mu);
	/* Helps to copy. The result does not matter: the loop waits for what is left. */
	if (what == SFR_WAIT_COPIED && deadline_ns != 0)
		(void)sfr__host_help_and_wait_locked(&t->staging.deferred.copy, deadline_ns,
						     is_copied, t);
	while (!sfr__ticket_has_reached_locked(t, what) && rc == 0)
		rc = sfr__cond_wait(&t->engine->cv_state, &t->engine->mu, deadline_ns);
	rc = sfr__ticket_has_reached_locked(t, what) ? 0 : SFR_EAGAIN;
	sfr__unlock(&t->engine->mu);
	return rc;
}

int sfr_save_wait(struct sfr_ticket *t, enum sfr_wait_for what, uint64_t slice_ns)
{
	if (sfr__ticket_is_inherited(t))
		return SFR_EFORK;
	if (sfr_save_has_reached(t, what))
		return 0;
	if (what == SFR_WAIT_ENDED && slice_ns == 0)
		return SFR_EAGAIN; /* sfr_save_has_reached is exact here, so no lock is needed */
	return sfr__ticket_wait(t, what, slice_ns != 0 ? sfr__deadline(slice_ns) : 0);
}
