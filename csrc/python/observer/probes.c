/* Observes storages on devices, whose memory the host cannot read.
 *
 *   IDLE -- a step has ended --> FIRST_DUE -- take() --> FIRST_TAKEN -- gate --> SECOND_DUE
 *     ^                                                                               | take()
 *     +---------- copies have completed: verdicts ------------------- SECOND_TAKEN <--+
 *
 * The host reads the versions at the step's end and compares them at the gate. At both moments a
 * probe copies three cache lines of each storage. The caller's stream waits for the copies, but the
 * host does not. The verdicts come when both probes have completed. Until then no other probe of
 * that device starts.
 *
 * A storage is deferrable after two cycles without a change. One cycle is not enough, because a
 * buffer may be written only after every other step. If the host waits for the device at every
 * step, a storage has its verdict after step 4. Each step that the host runs ahead of the device
 * delays the verdict by two steps.
 *
 * If a probe fails or is impossible (a CUDA graph is captured, or another thread probes), its
 * storages stay undecided, so saves capture them.
 *
 * The budget is device time, because the training's stream waits for the copies. */
#include "observer/observer.h"
#include "sfr/probe.h"

#define NS_PER_STORAGE 2000u /* device time that one probe spends on one storage */
#define PROBES_PER_CYCLE 2u

/* Returns the probe of a device, and makes it at the first call. Returns NULL if there are too many
 * devices. */
static struct sfr_py_probe *get_or_make_probe(struct sfr_py_observer *self, uint32_t device_plus_1)
{
	struct sfr_py_probe *probe;

	for (uint32_t k = 0; k < self->nr_probes; k++)
		if (self->probes[k].device_plus_1 == device_plus_1)
			return &self->probes[k];
	if (self->nr_probes == SFR_PY_MAX_PROBES)
		return NULL;
	probe = &self->probes[self->nr_probes++];
	*probe = (struct sfr_py_probe){ .device_plus_1 = device_plus_1 };
	if (sfr_probe_new(device_plus_1 - 1, &probe->core) < 0)
		probe->state = SFR_PY_CANNOT_PROBE;
	return probe;
}

/* Makes the two arrays of a probe long enough for all watches. Returns 0, or -1 without an
 * exception. */
static int make_room(const struct sfr_py_observer *self, struct sfr_py_probe *probe)
{
	uint32_t room = self->table.nr_watches;
	struct sfr_probe_range *longer_ranges;
	uint32_t *longer_watches;

	if (probe->room >= room)
		return 0;
	longer_ranges = PyMem_Realloc(probe->probed_ranges, room * sizeof(*longer_ranges));
	if (!longer_ranges)
		return -1;
	probe->probed_ranges = longer_ranges;
	longer_watches = PyMem_Realloc(probe->probed_watches, room * sizeof(*longer_watches));
	if (!longer_watches)
		return -1;
	probe->probed_watches = longer_watches;
	probe->room = room;
	return 0;
}

void sfr_py_probes_add_watch(struct sfr_py_observer *self, uint32_t watch_index)
{
	const uint64_t cost_ns = PROBES_PER_CYCLE * NS_PER_STORAGE;
	const struct sfr_py_watched_storage *watch = &self->table.watches[watch_index];
	struct sfr_py_probe *probe = get_or_make_probe(self, watch->device_plus_1);

	if (!probe || probe->state != SFR_PY_IDLE) /* too many devices, or a probe is under way */
		return;
	if (self->device_credit_ns < cost_ns || make_room(self, probe) < 0)
		return;
	self->device_credit_ns -= cost_ns;
	probe->probed_watches[probe->nr_probed] = watch_index;
	probe->probed_ranges[probe->nr_probed++] =
		(struct sfr_probe_range){ .addr = watch->addr, .nbytes = watch->nbytes };
}

void sfr_py_probes_make_first_due(struct sfr_py_observer *self)
{
	for (uint32_t k = 0; k < self->nr_probes; k++)
		if (self->probes[k].state == SFR_PY_IDLE && self->probes[k].nr_probed > 0)
			self->probes[k].state = SFR_PY_FIRST_DUE;
}

void sfr_py_probes_make_second_due(struct sfr_py_observer *self,
				   int (*check_unchanged)(struct sfr_py_observer *self,
							  uint32_t watch_index))
{
	for (uint32_t k = 0; k < self->nr_probes; k++) {
		struct sfr_py_probe *probe = &self->probes[k];

		if (probe->state != SFR_PY_FIRST_TAKEN)
			continue;
		probe->state = SFR_PY_SECOND_DUE;
		for (uint32_t i = 0; i < probe->nr_probed; i++)
			if (!check_unchanged(self, probe->probed_watches[i]))
				probe->probed_ranges[i].nbytes = 0; /* the second probe skips it */
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
		struct sfr_py_watched_storage *watch =
			&self->table.watches[probe->probed_watches[i]];

		if (probe->probed_ranges[i].nbytes == 0 || watch->verdict != SFR_PY_UNDECIDED)
			continue; /* the storage has a verdict already */
		if (!sfr_probe_is_unchanged(probe->core, i))
			sfr_py_observer_set_verdict(self, watch, SFR_PY_CAPTURED);
		else if (++watch->nr_cycles == SFR_PY_NR_CYCLES)
			sfr_py_observer_set_verdict(self, watch, SFR_PY_DEFERRABLE);
	}
	go_idle(probe);
}

void sfr_py_probes_poll(struct sfr_py_observer *self)
{
	for (uint32_t k = 0; k < self->nr_probes; k++) {
		struct sfr_py_probe *probe = &self->probes[k];
		int done;

		if (probe->state != SFR_PY_SECOND_TAKEN)
			continue;
		/* 1: the copies have completed; 0: not yet; negative: they never will */
		done = sfr_py_unlocked(sfr_probe_is_done(probe->core));
		if (done > 0)
			give_verdicts(self, probe);
		else if (done < 0)
			probe->state = SFR_PY_CANNOT_PROBE;
	}
}

int sfr_py_probes_are_idle(const struct sfr_py_observer *self)
{
	for (uint32_t k = 0; k < self->nr_probes; k++)
		if (self->probes[k].state != SFR_PY_IDLE &&
		    self->probes[k].state != SFR_PY_CANNOT_PROBE)
			return 0;
	return 1;
}

void sfr_py_probes_reset(struct sfr_py_observer *self)
{
	for (uint32_t k = 0; k < self->nr_probes; k++)
		if (self->probes[k].state != SFR_PY_CANNOT_PROBE)
			go_idle(&self->probes[k]);
}

static int is_due(const struct sfr_py_probe *probe)
{
	return probe->state == SFR_PY_FIRST_DUE || probe->state == SFR_PY_SECOND_DUE;
}

PyObject *sfr_py_probes_due_devices(struct sfr_py_observer *self)
{
	PyObject *list = PyList_New(0), *device, *tuple;

	for (uint32_t k = 0; list && k < self->nr_probes; k++) {
		if (!is_due(&self->probes[k]))
			continue;
		device = PyLong_FromUnsignedLong(self->probes[k].device_plus_1 - 1);
		if (!device || PyList_Append(list, device))
			Py_CLEAR(list);
		Py_XDECREF(device);
	}
	tuple = list ? PyList_AsTuple(list) : NULL;
	Py_XDECREF(list);
	return tuple;
}

/* Takes the probe that is due, the first or second of a cycle, on a stream of its device. Ends the
 * cycle without verdicts if the probe is impossible now. Releases the interpreter lock. */
static void take_probe(struct sfr_py_probe *probe, uint64_t stream)
{
	int is_second = probe->state == SFR_PY_SECOND_DUE, rc;

	rc = sfr_py_unlocked(sfr_probe_queue_copies(probe->core, stream, probe->probed_ranges,
						    probe->nr_probed, is_second));
	if (rc == 0)
		probe->state = is_second ? SFR_PY_SECOND_TAKEN : SFR_PY_FIRST_TAKEN;
	else if (rc == SFR_EBUSY || rc == SFR_ECAPTURING)
		go_idle(probe);
	else /* the device has failed */
		probe->state = SFR_PY_CANNOT_PROBE;
}

int sfr_py_probes_take_due(struct sfr_py_observer *self, PyObject *streams)
{
	for (Py_ssize_t i = 0; i < PyTuple_Size(streams); i++) {
		unsigned long long stream;
		unsigned int device;

		if (!PyArg_ParseTuple(PyTuple_GetItem(streams, i), "IK:probe", &device, &stream))
			return -1;
		for (uint32_t k = 0; k < self->nr_probes; k++) {
			struct sfr_py_probe *probe = &self->probes[k];

			if (probe->device_plus_1 - 1 == device && is_due(probe))
				take_probe(probe, stream);
		}
	}
	return PyErr_Occurred() ? -1 : 0;
}

void sfr_py_probes_fini(struct sfr_py_observer *self)
{
	for (uint32_t k = 0; k < self->nr_probes; k++) {
		sfr_probe_free(self->probes[k].core);
		PyMem_Free(self->probes[k].probed_ranges);
		PyMem_Free(self->probes[k].probed_watches);
	}
	self->nr_probes = 0;
}
