/* Observer: finds the memory of an optimizer that only its steps change.
 *
 * An Observer watches the storages of one optimizer: those of its trained parameters and of the
 * tensors in their state. A save may defer a storage if only the next step writes to it. To find
 * out, the observer compares the contents at the end of a step with those at the gate of the next
 * step, just before that step begins. The time between the two is a *cycle*.
 *
 *        enrol               record            compare: same, twice
 *   (new) ----> UNDECIDED --> (recorded) ---------------------------> DEFERRABLE
 *                   ^             |  same, once      |  changed, gone, or two owners
 *                   +-------------+                  +---------------> CAPTURED
 *
 * DEFERRABLE and CAPTURED are final, until forget() starts again (after load_state_dict). An
 * observation compares the `_version` of each tensor over the storage. It also compares three cache
 * lines of the bytes, because fused kernels and `.data` do not count versions. A budget of CPU time
 * bounds the work in a step. The next step continues where this step stopped.
 *
 * The observer keeps no memory alive. It refers to tensors by weak references, and to storages by
 * torch's own kind of weak reference. While such a reference exists, no other StorageImpl gets the
 * same address (`_cdata`), although the bytes may be freed. So equal addresses mean the same
 * storage.
 *
 * Everything but the driver calls runs under the interpreter lock, with the garbage collector off.
 * So no other Python code runs meanwhile, except destructors. If a destructor calls the same
 * observer, the call returns at once, because `busy` is set.
 *
 *   observer.c  the type
 *   read.c      reads torch's tensors
 *   walk.c      finds the tensors that an optimizer owns
 *   table.c     stores these tensors and their storages
 *   observe.c   observes host memory
 *   probes.c    observes device memory
 *   defer.c     marks a save's storages */
#include "observer/observer.h"

/* Makes other calls of this observer do nothing until leave(). Turns the garbage collector off, so
 * that allocations run no Python code. */
static void enter(struct sfr_py_observer *self)
{
	self->busy = 1;
	self->gc_was_on = PyGC_Disable();
}

static void leave(struct sfr_py_observer *self)
{
	if (self->gc_was_on)
		(void)PyGC_Enable();
	self->busy = 0;
}

void sfr_py_observer_set_verdict(struct sfr_py_observer *self, struct sfr_py_watched_storage *watch,
				 enum sfr_py_verdict verdict)
{
	if (watch->verdict == SFR_PY_UNDECIDED && verdict != SFR_PY_UNDECIDED)
		self->nr_undecided--;
	watch->verdict = (uint8_t)verdict;
}

/* ---- between steps ------------------------------------------------------ */

PyDoc_STRVAR(observer_enrol_doc,
"enrol(param_groups, state, /)\n--\n\n"
"Makes a new table of the storages that the optimizer owns now, and records samples of them. Call it\n"
"after a step. Known storages keep their state. Returns a list of (serial, storage), one for each\n"
"storage that another observer, with this serial, watches too. This observer captures such a storage;\n"
"the caller has to call capture() of the other one. After an exception nothing is watched.");

static PyObject *observer_enrol(struct sfr_py_observer *self, PyObject *args)
{
	PyObject *groups, *state, *clashes;

	if (!PyArg_ParseTuple(args, "OO:enrol", &groups, &state))
		return NULL;
	clashes = PyList_New(0);
	if (!clashes || self->busy)
		return clashes;
	enter(self);
	if (sfr_py_observer_rebuild_table(self, groups, state, clashes))
		Py_CLEAR(clashes);
	else
		sfr_py_observer_record_all_samples(self);
	leave(self);
	return clashes;
}

/* Reads no tensor, so it is fast enough for every step. */
static int must_rebuild_table(const struct sfr_py_observer *self, PyObject *groups, PyObject *state)
{
	return self->table_is_stale || self->must_forget ||
	       self->fingerprint != sfr_py_optimizer_fingerprint(groups, state);
}

PyDoc_STRVAR(observer_is_idle_doc,
"is_idle(param_groups, state, /)\n--\n\n"
"Returns whether stepped() and the next compare() have nothing to do. Call it after a step.");

static PyObject *observer_is_idle(struct sfr_py_observer *self, PyObject *args)
{
	PyObject *groups, *state;
	int all_decided = self->nr_undecided == 0 && sfr_py_probes_are_idle(self);

	if (!PyArg_ParseTuple(args, "OO:is_idle", &groups, &state))
		return NULL;
	return PyBool_FromLong(all_decided && !self->busy &&
			       !must_rebuild_table(self, groups, state));
}

PyDoc_STRVAR(observer_stepped_doc,
"stepped(param_groups, state, /)\n--\n\n"
"Records samples of the undecided storages, within the budget. Call it after a step. Returns True,\n"
"and records nothing, if the caller must call enrol(): at first, after forget(), and when the\n"
"optimizer's tensors may have changed.");

static PyObject *observer_stepped(struct sfr_py_observer *self, PyObject *args)
{
	PyObject *groups, *state;

	if (!PyArg_ParseTuple(args, "OO:stepped", &groups, &state))
		return NULL;
	if (self->busy)
		Py_RETURN_FALSE;
	/* The step has changed the memory, so samples that the last gate left are dropped. */
	self->nr_to_compare = 0;
	/* not enter(), because other threads run meanwhile and need the garbage collector */
	self->busy = 1;
	sfr_py_probes_poll(self);
	self->busy = 0;
	if (must_rebuild_table(self, groups, state))
		Py_RETURN_TRUE;
	if (self->nr_undecided) {
		enter(self);
		sfr_py_observer_record_samples(self);
		leave(self);
	}
	Py_RETURN_FALSE;
}

PyDoc_STRVAR(observer_compare_doc,
"compare()\n--\n\n"
"Compares the recorded samples with the memory. Call it at the next step's gate. Storages for which\n"
"the budget is too small stay undecided, and the next stepped() begins with them.");

static PyObject *observer_compare(struct sfr_py_observer *self, PyObject *none)
{
	int has_work = self->nr_to_compare || self->nr_probes;

	if (has_work && !self->busy && !self->must_forget) {
		enter(self);
		sfr_py_observer_compare_samples(self);
		leave(self);
	}
	Py_RETURN_NONE;
}

PyDoc_STRVAR(observer_due_doc,
"due()\n--\n\n"
"Returns a tuple with the numbers of the devices that need a probe(). Call it after stepped(),\n"
"enrol() and compare().");

static PyObject *observer_due(struct sfr_py_observer *self, PyObject *none)
{
	return self->busy ? PyTuple_New(0) : sfr_py_probes_due_devices(self);
}

PyDoc_STRVAR(observer_probe_doc,
"probe(streams, /)\n--\n\n"
"Queues copies of a few cache lines of the watched device storages. They run after the work that is\n"
"on the streams now. Later work on the streams waits for the copies, but the host does not.\n"
"`streams`: a tuple of (device, handle of its current stream).");

static PyObject *observer_probe(struct sfr_py_observer *self, PyObject *streams)
{
	int ret;

	if (!PyTuple_Check(streams)) {
		PyErr_SetString(PyExc_TypeError, "streams is a tuple");
		return NULL;
	}
	if (self->busy)
		Py_RETURN_NONE;
	/* not enter(), because other threads run meanwhile and need the garbage collector */
	self->busy = 1;
	ret = sfr_py_probes_take_due(self, streams);
	self->busy = 0;
	if (ret)
		return NULL;
	Py_RETURN_NONE;
}

PyDoc_STRVAR(observer_present_doc,
"present(name, function, /)\n--\n\n"
"For tests in which host memory counts as a device's: makes observers call `function(object)`\n"
"instead of reading an attribute of torch. The attribute is \"is_cpu\" or \"device_index\" of tensors,\n"
"or \"is_shared\" or \"data_ptr\" of storages. None restores torch's own attribute.");

static PyObject *observer_present(PyObject *type, PyObject *args)
{
	PyObject *name, *function;

	if (!PyArg_ParseTuple(args, "UO:present", &name, &function) || sfr_py_torch_init() ||
	    sfr_py_torch_override(name, function))
		return NULL;
	Py_RETURN_NONE;
}

PyDoc_STRVAR(observer_see_through_doc,
"see_through(type, name, /)\n--\n\n"
"Declares a type of tensors that only wrap an inner tensor: their attribute `name`. The inner tensor\n"
"has the memory, so all observers then read it instead. A second type replaces the first.");

static PyObject *observer_see_through(PyObject *type, PyObject *args)
{
	PyObject *wrapper, *name;

	if (!PyArg_ParseTuple(args, "O!U:see_through", &PyType_Type, &wrapper, &name) ||
	    sfr_py_torch_init() || sfr_py_declare_wrapper((PyTypeObject *)wrapper, name))
		return NULL;
	Py_RETURN_NONE;
}

/* ---- deferring ---------------------------------------------------------- */

PyDoc_STRVAR(observer_defer_doc,
"defer(param_groups, state, marks, /)\n--\n\n"
"Marks the storages of a save that may be copied after the call: the optimizer still owns them, and\n"
"only its steps change them. `marks`: a `memory_owners.Marks`.");

/* Sets *m to the fields of a memory_owners.Marks, borrowed. */
static int read_marks(PyObject *tuple, struct sfr_py_deferral_marks *m)
{
	PyObject *numbers;

	if (!PyArg_ParseTuple(tuple, "OO!O!O!O!O!:marks", &numbers, &PyByteArray_Type, &m->rows,
			      &PyList_Type, &m->indices, &PyList_Type, &m->storage_numbers,
			      &PyList_Type, &m->tensors, &PyList_Type, &m->versions))
		return -1;
	m->numbers = sfr_py_cast_to_storage_numbers(numbers);
	return m->numbers != NULL ? 0 : -1;
}

static PyObject *observer_defer(struct sfr_py_observer *self, PyObject *args)
{
	PyObject *groups, *state, *tuple;
	struct sfr_py_deferral_marks marks;
	int ret;

	if (!PyArg_ParseTuple(args, "OOO!:defer", &groups, &state, &PyTuple_Type, &tuple) ||
	    read_marks(tuple, &marks))
		return NULL;
	if (self->busy || self->must_forget || !self->table.nr_watches)
		Py_RETURN_NONE;
	enter(self);
	sfr_py_probes_poll(self);
	ret = sfr_py_observer_mark_deferred(self, groups, state, &marks);
	leave(self);
	if (ret)
		return NULL;
	Py_RETURN_NONE;
}

PyDoc_STRVAR(observer_defer_memory_owner_doc,
"defer_memory_owner(tensors, marks, /)\n--\n\n"
"Marks the large storages of these tensors as deferred, if they are in the save. The caller is a\n"
"memory owner (memory_owners.py), which knows that only a step replaces this memory.");

static PyObject *observer_defer_memory_owner(PyObject *type, PyObject *args)
{
	PyObject *tensors, *tuple;
	struct sfr_py_deferral_marks marks;

	if (!PyArg_ParseTuple(args, "O!O!:defer_memory_owner", &PyList_Type, &tensors,
			      &PyTuple_Type, &tuple) ||
	    read_marks(tuple, &marks) || sfr_py_torch_init() ||
	    sfr_py_mark_memory_owner_deferred(tensors, &marks))
		return NULL;
	Py_RETURN_NONE;
}

PyDoc_STRVAR(observer_changed_doc,
"changed(tensors, versions, /)\n--\n\n"
"Returns the index of the first tensor whose `_version` differs from the number in `versions`, or -1.\n"
"Does not release the interpreter lock.");

static PyObject *observer_changed(PyObject *type, PyObject *args)
{
	PyObject *tensors, *versions, *version;
	Py_ssize_t i, nr;

	if (!PyArg_ParseTuple(args, "OO:changed", &tensors, &versions) || sfr_py_torch_init())
		return NULL;
	nr = PyList_Size(tensors);
	if (nr < 0 || PyList_Size(versions) != nr) {
		PyErr_SetString(PyExc_ValueError, "two lists of one length are needed");
		return NULL;
	}
	for (i = 0; i < nr; i++) {
		uint64_t current = 0, expected = 0;
		int failed;

		version = PyList_GetItem(versions, i);
		expected = version ? PyLong_AsUnsignedLongLong(version) : 0;
		failed = sfr_py_version_of(PyList_GetItem(tensors, i), &current);
		if (failed || current != expected || PyErr_Occurred()) {
			PyErr_Clear(); /* without a version the tensor counts as changed */
			return PyLong_FromSsize_t(i);
		}
	}
	return PyLong_FromLong(-1);
}

/* ---- the type ----------------------------------------------------------- */

PyDoc_STRVAR(observer_capture_doc,
"capture(storage, /)\n--\n\n"
"Makes saves capture a storage from now on. `storage` is its StorageImpl's address.");

static PyObject *observer_capture(struct sfr_py_observer *self, PyObject *arg)
{
	uint64_t cdata = PyLong_AsUnsignedLongLong(arg);
	const uint64_t *index;

	if (PyErr_Occurred())
		return NULL;
	index = sfr_py_map_find(&self->table.by_storage, cdata);
	if (index)
		sfr_py_observer_set_verdict(self, &self->table.watches[*index], SFR_PY_CAPTURED);
	Py_RETURN_NONE;
}

PyDoc_STRVAR(observer_forget_doc,
"forget()\n--\n\n"
"Stops watching everything. The observer refers to no tensor until the next enrol(), and defers\n"
"nothing until two cycles after it.");

static PyObject *observer_forget(struct sfr_py_observer *self, PyObject *none)
{
	self->must_forget = 1; /* if the observer is busy, enrol() drops the table */
	if (!self->busy)
		sfr_py_observer_drop_table(self);
	Py_RETURN_NONE;
}

PyDoc_STRVAR(observer_counts_doc,
"counts()\n--\n\n"
"Returns (undecided, deferrable, captured): the number of storages in each state.");

static PyObject *observer_counts(struct sfr_py_observer *self, PyObject *none)
{
	unsigned counts[3] = { 0, 0, 0 };
	uint32_t i;

	for (i = 0; i < self->table.nr_watches; i++)
		counts[self->table.watches[i].verdict]++;
	return Py_BuildValue("III", counts[SFR_PY_UNDECIDED], counts[SFR_PY_DEFERRABLE],
			     counts[SFR_PY_CAPTURED]);
}

static PyObject *observer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	PyObject *owned, *serial;
	struct sfr_py_observer *self;

	if (kwargs && PyDict_Size(kwargs) > 0) {
		PyErr_SetString(PyExc_TypeError, "Observer takes no keywords");
		return NULL;
	}
	if (!PyArg_ParseTuple(args, "O!O:Observer", &PyDict_Type, &owned, &serial) ||
	    sfr_py_torch_init())
		return NULL;
	self = (struct sfr_py_observer *)sfr_py_alloc(type);
	if (!self)
		return NULL;
	self->owners = Py_NewRef(owned);
	self->serial = Py_NewRef(serial);
	self->last_step_ns = sfr_py_clock_ns(CLOCK_MONOTONIC);
	return (PyObject *)self;
}

static void observer_dealloc(struct sfr_py_observer *self)
{
	sfr_py_observer_drop_table(self);
	sfr_py_probes_fini(self);
	PyMem_Free(self->samples);
	PyMem_Free(self->to_compare);
	Py_XDECREF(self->owners);
	Py_XDECREF(self->serial);
	sfr_py_free((PyObject *)self);
}

#define METHOD(name, flags)                                                                        \
	{ #name, (PyCFunction)(void (*)(void))observer_##name, flags, observer_##name##_doc }
static PyMethodDef observer_methods[] = {
	METHOD(enrol, METH_VARARGS),
	METHOD(stepped, METH_VARARGS),
	METHOD(is_idle, METH_VARARGS),
	METHOD(compare, METH_NOARGS),
	METHOD(due, METH_NOARGS),
	METHOD(probe, METH_O),
	METHOD(present, METH_VARARGS | METH_STATIC),
	METHOD(defer, METH_VARARGS),
	METHOD(defer_memory_owner, METH_VARARGS | METH_STATIC),
	METHOD(changed, METH_VARARGS | METH_STATIC),
	METHOD(capture, METH_O),
	METHOD(forget, METH_NOARGS),
	METHOD(counts, METH_NOARGS),
	METHOD(see_through, METH_VARARGS | METH_STATIC),
	{ NULL, NULL, 0, NULL },
};

PyDoc_STRVAR(observer_doc,
"Observer(owned, serial, /)\n--\n\n"
"Watches the storages of one optimizer. `owned` is a dict shared by all observers: storage ->\n"
"serial of the observer that watched it first. `serial` is an int that no other observer has.");

static PyType_Slot observer_slots[] = {
	{ Py_tp_doc, (void *)observer_doc },
	{ Py_tp_new, (void *)observer_new },
	{ Py_tp_dealloc, (void *)observer_dealloc },
	{ Py_tp_methods, observer_methods },
	{ 0, NULL },
};

static PyType_Spec observer_spec = {
	.name = "stillframe._core.Observer",
	.basicsize = sizeof(struct sfr_py_observer),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = observer_slots,
};

int sfr_py_add_observer(PyObject *module)
{
	return sfr_py_add_type(module, &observer_spec, &sfr_py_state(module)->observer_type);
}
