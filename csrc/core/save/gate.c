/* The gate: before a step changes what a save copies, everything left is queued, and the stream of the
 * step waits for S. See stage_cuda.c for the events.
 *
 * A wait for an event that was never recorded is a silent nothing. So the gate has the lane queue all
 * that is left, waits on the host until S is recorded, and only then inserts the wait; where no stream
 * can wait, the host does until the copies have ended.
 */
#include "save/parts.h"

static void rush(struct sfr_ticket *t)
{
	for (uint32_t i = 0; i < t->nr_parts; i++) {
		struct sfr__cuda_lane *lane = t->parts[i].lane;

		if (!lane)
			continue;
		sfr__lock(&lane->mu);
		if (lane->rush_seq < t->seq)
			lane->rush_seq = t->seq;
		pthread_cond_signal(&lane->cv);
		sfr__unlock(&lane->mu);
	}
}

/* Has one stream wait for what is still being copied. False when the host has to do it. */
static bool wait_on_stream(struct sfr__cuda_part *part, const struct sfr_stream *stream)
{
	struct sfr__cuda_lane *lane = part->lane;
	bool done;

	/* Under the lock S is the part's own, and the device's stream exists. */
	sfr__lock(&lane->mu);
	done = part->over || lane->dead || !part->deferred ||
	       sfr__cuda_wait_staged_locked(lane, stream, part->staged);
	sfr__unlock(&lane->mu);
	return done;
}

int sfr_save_gate(struct sfr_ticket *t, const struct sfr_stream *streams, uint32_t nr_streams,
		  uint64_t slice_ns)
{
	struct sfr_engine *engine = t->engine;
	uint64_t deadline = sfr__deadline(slice_ns), now;
	bool on_host = false, over;
	int rc = 0;

	if (sfr__ticket_foreign(t))
		return SFR_EFORK;
	if (t->nr_parts == 0)
		return sfr_save_wait(t, SFR_WAIT_COPIED, slice_ns);
	sfr__lock(&engine->mu);
	over = sfr__ticket_is_open_locked(t) && (t->copied || sfr__ticket_failing_locked(t));
	sfr__unlock(&engine->mu);
	if (over)
		return 0; /* copied, or discarded */
	rush(t);
	sfr__lock(&engine->mu);
	rc = sfr__ticket_help_locked(t, deadline, sfr__ticket_is_open_locked);
	if (sfr__ticket_is_open_locked(t))
		rc = 0;
	over = sfr__ticket_failing_locked(t);
	sfr__unlock(&engine->mu);
	if (rc < 0 || over)
		return rc;
	for (uint32_t i = 0; i < t->nr_parts; i++)
		if (!wait_on_stream(&t->parts[i],
				    sfr__stream_of(streams, nr_streams, t->parts[i].device)))
			on_host = true;
	if (!on_host)
		return 0;
	now = sfr__now_ns();
	return sfr_save_wait(t, SFR_WAIT_COPIED,
			     deadline == SFR_FOREVER ? SFR_FOREVER :
			     deadline > now          ? deadline - now :
						       0);
}
