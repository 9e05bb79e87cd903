/* Observes storages on devices, whose memory the host cannot read.
 *
 *   IDLE -- a step has ended: recorded --> DUE -- look() --> LOOKED -- gate --> DUE_AGAIN
 *     ^                                                                            | look()
 *     +------------- landed: verdicts ---------------------------- IN_FLIGHT <-----+
 *
 * The host reads and compares versions, at the step's end and at the gate. The core compares the
 * bytes with probes: it copies three lines of each storage at both moments. The caller's stream
 * waits for the copies, the host does not. So a verdict comes when both copies have completed: a
 * step later, or several if the host runs far ahead. Until then no other probe of that device
 * starts.
 *
 * Two whole cycles from a step's end to the next gate are probed: with one cycle, a buffer that is
 * written every other step would pass. Each cycle has to complete before the next one begins. So a
 * storage has its verdict after step 4 if the host waits for the device at every step. Each step
 * that the host runs ahead adds two.
 *
 * If a probe fails or is impossible (a graph capture, a probe by another thread), its storages stay
 * undecided, and so captured.
 *
 * The budget is time of the device: a probe of a storage is one small copy, for which the
 * training's stream waits. An enrolment adds an allowance once, because deferring gains many times
 * as much at the first save. */
#include "observer/observer.h"
#include "sfr/glance.h"

#define LOOK_NS 2000u /* time of the device for one storage */
#define NR_LOOKS 2u   /* probes in a cycle */

/* Returns the eye of a device, a new one if needed; NULL if there is no room. */
static struct sfr_py_eye *eye_of(struct sfr_py_observer *self, uint32_t device)
{
	struct sfr_py_eye *eye = self->eyes;

	while (eye < self->eyes + self->nr_eyes && eye->device != device)
		eye++;
	if (eye < self->eyes + self->nr_eyes)
		return eye;
	if (self->nr_eyes == SFR_PY_MAX_EYES)
		return NULL;
	self->nr_eyes++;
	*eye = (struct sfr_py_eye){ .device = device };
	if (sfr_glance_new(device - 1, &eye->look) < 0)
		eye->state = SFR_PY_BLIND;
	return eye;
}

static int make_room(const struct sfr_py_observer *self, struct sfr_py_eye *eye)
{
	uint32_t room = self->table.nr_watches;
	struct sfr_glance_at *at;
	uint32_t *asked;

	if (eye->room >= room)
		return 0;
	at = PyMem_Realloc(eye->at, room * sizeof(*at));
	if (!at)
		return -1;
	eye->at = at;
	asked = PyMem_Realloc(eye->asked, room * sizeof(*asked));
	if (!asked)
		return -1;
	eye->asked = asked;
	eye->room = room;
	return 0;
}

void sfr_py_eyes_record(struct sfr_py_observer *self, uint32_t number)
{
	const struct sfr_py_watch *watch = &self->table.watches[number];
	struct sfr_py_eye *eye = eye_of(self, watch->device);

	if (!eye || eye->state != SFR_PY_IDLE || self->device_credit_ns < NR_LOOKS * LOOK_NS ||
	    make_room(self, eye))
		return;
	self->device_credit_ns -= NR_LOOKS * LOOK_NS;
	eye->asked[eye->nr_asked] = number;
	eye->at[eye->nr_asked++] =
		(struct sfr_glance_at){ .addr = watch->addr, .nbytes = watch->nbytes };
}

void sfr_py_eyes_recorded(struct sfr_py_observer *self)
{
	for (uint32_t k = 0; k < self->nr_eyes; k++)
		if (self->eyes[k].state == SFR_PY_IDLE && self->eyes[k].nr_asked > 0)
			self->eyes[k].state = SFR_PY_DUE;
}

void sfr_py_eyes_compare(struct sfr_py_observer *self,
			 int (*is_same)(struct sfr_py_observer *self, uint32_t number))
{
	for (uint32_t k = 0; k < self->nr_eyes; k++) {
		struct sfr_py_eye *eye = &self->eyes[k];

		if (eye->state != SFR_PY_LOOKED)
			continue;
		eye->state = SFR_PY_DUE_AGAIN;
		for (uint32_t i = 0; i < eye->nr_asked; i++)
			if (!is_same(self, eye->asked[i]))
				eye->at[i].nbytes = 0;
	}
}

static void go_idle(struct sfr_py_eye *eye)
{
	eye->state = SFR_PY_IDLE;
	eye->nr_asked = 0;
}

static void give_verdicts(struct sfr_py_observer *self, struct sfr_py_eye *eye)
{
	for (uint32_t i = 0; i < eye->nr_asked; i++) {
		struct sfr_py_watch *watch = &self->table.watches[eye->asked[i]];

		if (eye->at[i].nbytes == 0 || watch->verdict != SFR_PY_UNDECIDED)
			continue;
		if (!sfr_glance_same(eye->look, i))
			sfr_py_observer_decide(self, watch, SFR_PY_CAPTURED);
		else if (++watch->nr_cycles == SFR_PY_NR_CYCLES)
			sfr_py_observer_decide(self, watch, SFR_PY_DEFERRABLE);
	}
	go_idle(eye);
}

void sfr_py_eyes_harvest(struct sfr_py_observer *self)
{
	for (uint32_t k = 0; k < self->nr_eyes; k++) {
		struct sfr_py_eye *eye = &self->eyes[k];
		int landed;

		if (eye->state != SFR_PY_IN_FLIGHT)
			continue;
		landed = sfr_py_unlocked(sfr_glance_landed(eye->look));
		if (landed > 0)
			give_verdicts(self, eye);
		else if (landed < 0)
			eye->state = SFR_PY_BLIND;
	}
}

int sfr_py_eyes_rest(const struct sfr_py_observer *self)
{
	for (uint32_t k = 0; k < self->nr_eyes; k++)
		if (self->eyes[k].state != SFR_PY_IDLE && self->eyes[k].state != SFR_PY_BLIND)
			return 0;
	return 1;
}

void sfr_py_eyes_reset(struct sfr_py_observer *self)
{
	for (uint32_t k = 0; k < self->nr_eyes; k++)
		if (self->eyes[k].state != SFR_PY_BLIND)
			go_idle(&self->eyes[k]);
}

static int is_due(const struct sfr_py_eye *eye)
{
	return eye->state == SFR_PY_DUE || eye->state == SFR_PY_DUE_AGAIN;
}

PyObject *sfr_py_eyes_due(struct sfr_py_observer *self)
{
	PyObject *list = PyList_New(0), *number, *tuple;

	for (uint32_t k = 0; list && k < self->nr_eyes; k++) {
		if (!is_due(&self->eyes[k]))
			continue;
		number = PyLong_FromUnsignedLong(self->eyes[k].device - 1);
		if (!number || PyList_Append(list, number))
			Py_CLEAR(list);
		Py_XDECREF(number);
	}
	tuple = list ? PyList_AsTuple(list) : NULL;
	Py_XDECREF(list);
	return tuple;
}

/* Calls the driver: another thread may have the interpreter lock meanwhile. */
static void look(struct sfr_py_eye *eye, uint64_t stream)
{
	int again = eye->state == SFR_PY_DUE_AGAIN, rc;

	rc = sfr_py_unlocked(sfr_glance_take(eye->look, stream, eye->at, eye->nr_asked, again));
	if (rc == 0)
		eye->state = again ? SFR_PY_IN_FLIGHT : SFR_PY_LOOKED;
	else if (rc == SFR_EBUSY || rc == SFR_ECAPTURING)
		go_idle(eye);
	else
		eye->state = SFR_PY_BLIND;
}

int sfr_py_eyes_look(struct sfr_py_observer *self, PyObject *streams)
{
	for (Py_ssize_t i = 0; i < PyTuple_Size(streams); i++) {
		unsigned long long stream;
		unsigned int device;

		if (!PyArg_ParseTuple(PyTuple_GetItem(streams, i), "IK:look", &device, &stream))
			return -1;
		for (uint32_t k = 0; k < self->nr_eyes; k++)
			if (self->eyes[k].device == device + 1 && is_due(&self->eyes[k]))
				look(&self->eyes[k], stream);
	}
	return PyErr_Occurred() ? -1 : 0;
}

void sfr_py_eyes_fini(struct sfr_py_observer *self)
{
	for (uint32_t k = 0; k < self->nr_eyes; k++) {
		sfr_glance_free(self->eyes[k].look);
		PyMem_Free(self->eyes[k].at);
		PyMem_Free(self->eyes[k].asked);
	}
	self->nr_eyes = 0;
}
