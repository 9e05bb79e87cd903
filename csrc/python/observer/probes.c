/* Observes storages on devices, whose memory the host cannot read.
 *
 *   IDLE -- a step has ended: recorded --> DUE -- take() --> TAKEN -- gate --> DUE_AGAIN
 *     ^                                                                            | take()
 *     +------------- done: verdicts ------------------------------ IN_FLIGHT <-----+
 *
 * The host reads the versions at the step's end and compares them at the gate. At both moments a
 * probe copies three cache lines of each storage. The caller's stream waits for the copies, but the
 * host does not. The verdicts come when both probes have completed. Until then no other probe of
 * that device starts.
 *
 * Two cycles are probed: with one cycle, a buffer that is written every other step would pass. If
 * the host waits for the device at every step, a storage has its verdict after step 4. Each step
 * that the host runs ahead of the device delays the verdict by two steps.
 *
 * If a probe fails or is impossible (a CUDA graph is captured, or another thread probes), its
 * storages stay undecided, so saves capture them.
 *
 * The budget is device time, because the training's stream waits for the copies. */
#include "observer/observer.h"
#include "sfr/probe.h"

#define PROBE_NS 2000u /* device time for one storage in one probe */
#define NR_PROBES 2u   /* probes in a cycle */

/* Returns the probe of a device, and makes it at the first call. Returns NULL if there are too many
 * devices. */
static struct sfr_py_probe *probe_of(struct sfr_py_observer *self, uint32_t device)
{
	struct sfr_py_probe *probe;

	for (uint32_t k = 0; k < self->nr_probes; k++)
		if (self->probes[k].device == device)
			return &self->probes[k];
	if (self->nr_probes == SFR_PY_MAX_PROBES)
		return NULL;
	probe = &self->probes[self->nr_probes++];
	*probe = (struct sfr_py_probe){ .device = device };
	if (sfr_probe_new(device - 1, &probe->core) < 0) /* torch's number of the device */
		probe->state = SFR_PY_BLIND;
	return probe;
}

/* Makes the arrays of a probe long enough for all storages. Sets no exception if it fails. */
static int make_room(const struct sfr_py_observer *self, struct sfr_py_probe *probe)
{
	uint32_t room = self->table.nr_watches;
	struct sfr_probe_range *ranges;
	uint32_t *probed;

	if (probe->room >= room)
		return 0;
	ranges = PyMem_Realloc(probe->ranges, room * sizeof(*ranges));
	if (!ranges)
		return -1;
	probe->ranges = ranges;
	probed = PyMem_Realloc(probe->probed, room * sizeof(*probed));
	if (!probed)
		return -1;
	probe->probed = probed;
	probe->room = room;
	return 0;
}

void sfr_py_probes_record(struct sfr_py_observer *self, uint32_t number)
{
	const uint64_t cost_ns = NR_PROBES * PROBE_NS;
	const struct sfr_py_watch *watch = &self->table.watches[number];
	struct sfr_py_probe *probe = probe_of(self, watch->device);

	if (!probe || probe->state != SFR_PY_IDLE) /* too many devices, or a probe is under way */
		return;
	if (self->device_credit_ns < cost_ns || make_room(self, probe))
		return;
	self->device_credit_ns -= cost_ns;
	probe->probed[probe->nr_probed] = number;
	probe->ranges[probe->nr_probed++] =
		(struct sfr_probe_range){ .addr = watch->addr, .nbytes = watch->nbytes };
}

void sfr_py_probes_end_step(struct sfr_py_observer *self)
{
	for (uint32_t k = 0; k < self->nr_probes; k++)
		if (self->probes[k].state == SFR_PY_IDLE && self->probes[k].nr_probed > 0)
			self->probes[k].state = SFR_PY_DUE;
}

void sfr_py_probes_reach_gate(struct sfr_py_observer *self,
			      int (*check_unchanged)(struct sfr_py_observer *self, uint32_t number))
{
	for (uint32_t k = 0; k < self->nr_probes; k++) {
		struct sfr_py_probe *probe = &self->probes[k];

		if (probe->state != SFR_PY_TAKEN)
			continue;
		probe->state = SFR_PY_DUE_AGAIN;
		for (uint32_t i = 0; i < probe->nr_probed; i++)
			if (!check_unchanged(self, probe->probed[i]))
				probe->ranges[i].nbytes = 0; /* the second probe skips it */
	}
}

static void go_idle(struct sfr_py_probe *probe)
{
	probe->state = SFR_PY_IDLE;
	probe->nr_probed = 0;
}

/* Compares the copies of a completed cycle, and gives verdicts. */
static void give_verdicts(struct sfr_py_observer *self, struct sfr_py_probe *probe)
{
	for (uint32_t i = 0; i < probe->nr_probed; i++) {
		struct sfr_py_watch *watch = &self->table.watches[probe->probed[i]];

		if (probe->ranges[i].nbytes == 0 || watch->verdict != SFR_PY_UNDECIDED)
			continue; /* it has a verdict already */
		if (!sfr_probe_same(probe->core, i))
			sfr_py_observer_decide(self, watch, SFR_PY_CAPTURED);
		else if (++watch->nr_cycles == SFR_PY_NR_CYCLES)
			sfr_py_observer_decide(self, watch, SFR_PY_DEFERRABLE);
	}
	go_idle(probe);
}

void sfr_py_probes_poll(struct sfr_py_observer *self)
{
	for (uint32_t k = 0; k < self->nr_probes; k++) {
		struct sfr_py_probe *probe = &self->probes[k];
		int done;

		if (probe->state != SFR_PY_IN_FLIGHT)
			continue;
		/* 1: the copies have completed; 0: not yet; negative: they never will */
		done = sfr_py_unlocked(sfr_probe_done(probe->core));
		if (done > 0)
			give_verdicts(self, probe);
		else if (done < 0)
			probe->state = SFR_PY_BLIND;
	}
}

int sfr_py_probes_are_idle(const struct sfr_py_observer *self)
{
	for (uint32_t k = 0; k < self->nr_probes; k++)
		if (self->probes[k].state != SFR_PY_IDLE && self->probes[k].state != SFR_PY_BLIND)
			return 0;
	return 1;
}

void sfr_py_probes_reset(struct sfr_py_observer *self)
{
	for (uint32_t k = 0; k < self->nr_probes; k++)
		if (self->probes[k].state != SFR_PY_BLIND)
			go_idle(&self->probes[k]);
}

static int is_due(const struct sfr_py_probe *probe)
{
	return probe->state == SFR_PY_DUE || probe->state == SFR_PY_DUE_AGAIN;
}

PyObject *sfr_py_probes_due(struct sfr_py_observer *self)
{
	PyObject *list = PyList_New(0), *number, *tuple;

	for (uint32_t k = 0; list && k < self->nr_probes; k++) {
		if (!is_due(&self->probes[k]))
			continue;
		number = PyLong_FromUnsignedLong(self->probes[k].device - 1);
		if (!number || PyList_Append(list, number))
			Py_CLEAR(list);
		Py_XDECREF(number);
	}
	tuple = list ? PyList_AsTuple(list) : NULL;
	Py_XDECREF(list);
	return tuple;
}

/* Takes the probe that is due, the first or second of a cycle, on a stream of its device. If the
 * probe is impossible now, drops the cycle. Releases the interpreter lock. */
static void take_probe(struct sfr_py_probe *probe, uint64_t stream)
{
	int is_second = probe->state == SFR_PY_DUE_AGAIN, rc;

	rc = sfr_py_unlocked(sfr_probe_copy(probe->core, stream, probe->ranges, probe->nr_probed,
					    is_second));
	if (rc == 0)
		probe->state = is_second ? SFR_PY_IN_FLIGHT : SFR_PY_TAKEN;
	else if (rc == SFR_EBUSY || rc == SFR_ECAPTURING)
		go_idle(probe);
	else /* the device has failed */
		probe->state = SFR_PY_BLIND;
}

int sfr_py_probes_take(struct sfr_py_observer *self, PyObject *streams)
{
	for (Py_ssize_t i = 0; i < PyTuple_Size(streams); i++) {
		unsigned long long stream;
		unsigned int device;

		if (!PyArg_ParseTuple(PyTuple_GetItem(streams, i), "IK:probe", &device, &stream))
			return -1;
		for (uint32_t k = 0; k < self->nr_probes; k++) {
			struct sfr_py_probe *probe = &self->probes[k];

			if (probe->device - 1 == device && is_due(probe))
				take_probe(probe, stream);
		}
	}
	return PyErr_Occurred() ? -1 : 0;
}

void sfr_py_probes_fini(struct sfr_py_observer *self)
{
	for (uint32_t k = 0; k < self->nr_probes; k++) {
		sfr_probe_free(self->probes[k].core);
		PyMem_Free(self->probes[k].ranges);
		PyMem_Free(self->probes[k].probed);
	}
	self->nr_probes = 0;
}
