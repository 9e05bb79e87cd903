/* The gate: before a step changes the sources of a save, all remaining copies are queued, and the
 * step's stream waits for the event S, which is recorded after them (stage/transfer.h).
 *
 * In CUDA, waiting for an event that was never recorded does nothing. So the host waits until the
 * lane has recorded S, and only then makes the stream wait. If no stream can wait for S, the host
 * waits until the copies have completed. Sources in host memory have no event: the gate helps to
 * copy them, and returns when they are copied. */
#include "save/device_state.h"

static bool is_gate_open(const void *ticket)
{
	return sfr__ticket_gate_is_open_locked(ticket);
}

int sfr_save_gate(struct sfr_ticket *t, const struct sfr_device_stream *streams,
		  uint32_t nr_streams, uint64_t slice_ns)
{
	struct sfr_engine *engine = t->engine;
	uint64_t deadline = sfr__deadline(slice_ns);
	bool host_must_wait = false, failing;
	int rc;

	if (sfr__ticket_is_inherited(t))
		return SFR_EFORK;
	if (t->staging.nr_devices == 0)
		return sfr_save_wait(t, SFR_WAIT_COPIED, slice_ns);
	if (sfr__under(&engine->mu, t->facts.copied || sfr__ticket_is_failing_locked(t)))
		return 0;
	/* Make the lanes queue all remaining copies at once. */
	for (uint32_t i = 0; i < t->staging.nr_devices; i++)
		if (t->staging.devices[i].transfer.lane)
			sfr__cuda_rush_saves_up_to(t->staging.devices[i].transfer.lane, t->seq);
	sfr__lock(&engine->mu);
	rc = sfr__host_help_and_wait_locked(&t->staging.deferred.copy, deadline, is_gate_open, t);
	failing = sfr__ticket_is_failing_locked(t);
	sfr__unlock(&engine->mu);
	if (rc < 0 || failing) /* the step need not wait for a failing save: its rc is 0 */
		return rc;
	for (uint32_t i = 0; i < t->staging.nr_devices; i++) {
		struct sfr__device_state *dev = &t->staging.devices[i];
		const struct sfr_device_stream *stream;

		if (!dev->deferred)
			continue; /* the capture made the stream wait for the captured copies */
		stream = sfr__find_stream(streams, nr_streams, dev->device);
		if (!sfr__transfer_gate_stream(&dev->transfer, stream))
			host_must_wait = true;
	}
	return host_must_wait ? sfr__ticket_wait(t, SFR_WAIT_COPIED, deadline) : 0;
}
