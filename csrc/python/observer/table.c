/* The storages and tensors that an observer watches, and their update at an enrolment.
 *
 * An enrolment builds a new table from a walk over the optimizer, and moves into it the watches of
 * storages that the optimizer still has. The others are freed with the old table, so storages and
 * tensors that the optimizer dropped need no book-keeping of their own. */
#include "observer/observer.h"

#include <string.h>

#define MIN_NBYTES 4096 /* host storages up to this size are always captured */

/* Makes an empty table with room for `nr` tensors and as many storages. 0, or -1 with an exception
 * set; call table_fini in either case. */
static int table_init(struct sfr_py_table *t, size_t nr)
{
	memset(t, 0, sizeof(*t));
	t->watches = PyMem_Calloc(nr + 1, sizeof(*t->watches));
	t->tensors = PyMem_Calloc(nr + 1, sizeof(*t->tensors));
	if (!t->watches || !t->tensors) {
		PyErr_NoMemory();
		return -1;
	}
	if (sfr_py_map_reserve(&t->by_storage, nr) || sfr_py_map_reserve(&t->by_tensor, nr))
		return -1;
	return 0;
}

/* Stops watching a storage: drops torch's weak reference to it. Also removes this observer's entry
 * for it in `owned`, unless the current table still watches the storage. A watch without an ident
 * was moved to another table, so nothing is done for it. */
static void watch_fini(struct sfr_py_observer *self, struct sfr_py_watch *watch)
{
	PyObject *holder, *answer;

	if (!watch->ident)
		return;
	holder = PyDict_GetItemWithError(self->owned, watch->ident);
	if (holder == self->serial && !sfr_py_map_find(&self->table.by_storage, watch->cdata))
		(void)PyDict_DelItem(self->owned, watch->ident); /* can only fail when absent */
	answer = PyObject_CallFunctionObjArgs(sfr_py_torch.free_weak, watch->ident, NULL);
	Py_XDECREF(answer);
	PyErr_Clear();
	Py_CLEAR(watch->ident);
}

/* Frees a table that is no longer the current one. Accepts a half-built table, and keeps the
 * exception that is set. */
static void table_fini(struct sfr_py_observer *self, struct sfr_py_table *t)
{
	PyObject *type, *value, *trace;
	uint32_t i;

	PyErr_Fetch(&type, &value, &trace);
	for (i = 0; i < t->nr_watches; i++)
		watch_fini(self, &t->watches[i]);
	for (i = 0; i < t->nr_tensors; i++)
		Py_XDECREF(t->tensors[i].ref);
	PyMem_Free(t->watches);
	PyMem_Free(t->tensors);
	sfr_py_map_fini(&t->by_storage);
	sfr_py_map_fini(&t->by_tensor);
	memset(t, 0, sizeof(*t));
	PyErr_Restore(type, value, trace);
}

void sfr_py_observer_drop(struct sfr_py_observer *self)
{
	struct sfr_py_table old = self->table;

	memset(&self->table, 0, sizeof(self->table));
	self->nr_recorded = self->nr_undecided = 0;
	sfr_py_probes_reset(self);
	table_fini(self, &old);
}

/* Returns the entry of this tensor, or NULL. The address alone does not identify a tensor, because
 * a new one may be at the address of one that was freed. */
struct sfr_py_tensor *sfr_py_find_tensor(const struct sfr_py_table *t, PyObject *tensor)
{
	const uint64_t *index = sfr_py_map_find(&t->by_tensor, (uintptr_t)tensor);

	if (!index || sfr_py_referent(t->tensors[*index].ref) != tensor)
		return NULL;
	return &t->tensors[*index];
}

/* Adds a tensor over the storage with index `watch`. 0, or -1 with an exception set. */
static int tensor_add(struct sfr_py_table *t, PyObject *tensor, uint32_t watch)
{
	struct sfr_py_tensor *entry = &t->tensors[t->nr_tensors];
	uint64_t impl = 0;

	entry->ref = PyWeakref_NewRef(tensor, NULL);
	if (!entry->ref || sfr_py_map_add(&t->by_tensor, (uintptr_t)tensor, t->nr_tensors)) {
		Py_CLEAR(entry->ref);
		return -1;
	}
	entry->tensor = (uintptr_t)tensor;
	if (sfr_py_read_u64(&sfr_py_torch.impl, tensor, &impl))
		PyErr_Clear();
	entry->impl = (uintptr_t)impl;
	entry->watch = watch;
	entry->next = t->watches[watch].first_tensor;
	t->watches[watch].first_tensor = t->nr_tensors++;
	t->watches[watch].nr_tensors++;
	return 0;
}

/* Sets watch->device. Returns nonzero, perhaps with an exception set, if the storage can never be
 * deferred: it is small, shared with other processes, or on a device that is not CUDA's. */
static int set_device(struct sfr_py_watch *watch, PyObject *tensor, PyObject *storage)
{
	const struct sfr_py_torch *torch = &sfr_py_torch;
	PyObject *memory = sfr_py_memory_of(tensor), *device = NULL;
	int on_host = memory ? sfr_py_read_flag(&torch->is_cpu, memory) : -1;
	long number = -1;

	if (on_host == 0)
		device = sfr_py_read(&torch->device, memory);
	if (device)
		number = PyLong_AsLong(device);
	Py_XDECREF(device);
	Py_XDECREF(memory);
	if (on_host < 0)
		return -1;
	if (on_host) /* torch reports every CUDA storage as shared */
		return watch->nbytes <= MIN_NBYTES ||
		       sfr_py_read_flag(&torch->is_shared, storage) != 0;
	watch->device = (uint32_t)(number + 1);
	return number < 0 || watch->nbytes <= SFR_PY_DEVICE_MIN_NBYTES;
}

/* Starts to watch a storage that is not in the table. Returns 1 if it was added, as the table's
 * last watch; 0 if it can never be deferred; -1 with an exception set. If another observer watches
 * the storage too, both must capture it, because a step of either may write to it. Then (that
 * observer's serial, storage) is appended to `clashes`. */
static int watch_add(struct sfr_py_observer *self, struct sfr_py_table *t, PyObject *tensor,
		     PyObject *storage, uint64_t cdata, PyObject *clashes)
{
	const struct sfr_py_torch *torch = &sfr_py_torch;
	struct sfr_py_watch *watch = &t->watches[t->nr_watches];
	PyObject *holder, *pair;
	int ret;

	memset(watch, 0, sizeof(*watch));
	if (sfr_py_read_u64(&torch->nbytes, storage, &watch->nbytes) ||
	    set_device(watch, tensor, storage) != 0 ||
	    sfr_py_read_u64(&torch->data_ptr, storage, &watch->addr) || !watch->addr) {
		PyErr_Clear();
		return 0;
	}
	watch->cdata = cdata;
	watch->storage_object = (uintptr_t)storage;
	watch->first_tensor = SFR_PY_NONE;
	watch->verdict = SFR_PY_UNDECIDED;
	watch->ident = sfr_py_read(&torch->weak_ref, storage);
	if (!watch->ident)
		return -1;
	if (sfr_py_map_add(&t->by_storage, cdata, t->nr_watches++))
		return -1;
	holder = PyDict_GetItemWithError(self->owned, watch->ident);
	if (!holder) {
		if (PyErr_Occurred() || PyDict_SetItem(self->owned, watch->ident, self->serial))
			return -1;
		return 1;
	}
	if (holder == self->serial)
		return 1; /* the table that this one replaces still has it */
	watch->verdict = SFR_PY_CAPTURED;
	pair = PyTuple_Pack(2, holder, watch->ident);
	ret = pair ? PyList_Append(clashes, pair) : -1;
	Py_XDECREF(pair);
	return ret ? -1 : 1;
}

/* Moves the watch of a storage from the old table to `t`, as its last one, with what was observed
 * so far. Its tensors are added again by the caller. Returns 1, or -1 with an exception set. */
static int watch_move(struct sfr_py_table *t, struct sfr_py_watch *old)
{
	struct sfr_py_watch *watch = &t->watches[t->nr_watches];

	if (sfr_py_map_add(&t->by_storage, old->cdata, t->nr_watches))
		return -1;
	t->nr_watches++;
	*watch = *old;
	watch->first_tensor = SFR_PY_NONE;
	watch->nr_tensors = 0;
	watch->epoch = watch->nr_owned = 0;
	old->ident = NULL;
	return 1;
}

/* Returns 1 if a storage still has the memory that was observed, else 0: resize_ and share_memory_
 * give it other memory. Leaves no exception set. */
static int has_same_memory(const struct sfr_py_watch *watch, PyObject *storage)
{
	uint64_t addr, nbytes;
	int yes = !sfr_py_read_u64(&sfr_py_torch.data_ptr, storage, &addr) &&
		  !sfr_py_read_u64(&sfr_py_torch.nbytes, storage, &nbytes) && addr == watch->addr &&
		  nbytes == watch->nbytes;

	PyErr_Clear();
	return yes;
}

/* Adds a tensor to the new table `t`, and its storage if `t` does not have the storage yet. A
 * tensor that can never be deferred is only counted (nr_passed_over). `stateless`: Optimizer.state
 * is empty. 0, or -1 with an exception set. */
static int enrol_one(struct sfr_py_observer *self, struct sfr_py_table *t, PyObject *tensor,
		     int stateless, PyObject *clashes)
{
	const struct sfr_py_torch *torch = &sfr_py_torch;
	struct sfr_py_tensor *known = sfr_py_find_tensor(&self->table, tensor);
	struct sfr_py_watch *old = NULL;
	PyObject *storage, *grad;
	const uint64_t *index;
	uint64_t cdata;
	uint32_t watch;
	int ret = 0;

	if (sfr_py_map_find(&t->by_tensor, (uintptr_t)tensor))
		return 0; /* it is part of two parameters' state, and is in the table already */
	if (stateless && !known) {
		/* Without state, a gradient at a step shows that a parameter is trained. */
		grad = sfr_py_read(&torch->grad, tensor);
		PyErr_Clear();
		Py_XDECREF(grad);
		if (!grad || grad == Py_None)
			return 0;
	}
	storage = sfr_py_storage_of(tensor);
	if (!storage || sfr_py_read_u64(&torch->cdata, storage, &cdata)) {
		PyErr_Clear(); /* sparse tensors, for example, have no storage */
		self->nr_passed_over++;
		goto out;
	}
	if (known && self->table.watches[known->watch].cdata != cdata)
		known = NULL; /* the tensor has moved to another storage */
	if (known)
		old = &self->table.watches[known->watch];
	index = sfr_py_map_find(&t->by_storage, cdata);
	if (index) {
		watch = (uint32_t)*index;
		/* It was observed without this tensor, so its observation starts again. */
		if (!known && t->watches[watch].verdict == SFR_PY_DEFERRABLE)
			t->watches[watch].verdict = SFR_PY_UNDECIDED;
		if (!known)
			t->watches[watch].nr_cycles = 0;
	} else {
		/* watch_move clears the ident of the old watch, so none is moved twice. */
		if (old && old->ident && has_same_memory(old, storage))
			ret = watch_move(t, old);
		else
			ret = watch_add(self, t, tensor, storage, cdata, clashes);
		if (ret == 0)
			self->nr_passed_over++;
		if (ret <= 0)
			goto out;
		watch = t->nr_watches - 1;
	}
	ret = tensor_add(t, tensor, watch);
out:
	Py_XDECREF(storage);
	return ret;
}

/* Captures the storage of a tensor that is in a group but not trained, because any code may write
 * to it at any time. */
static void enrol_other(struct sfr_py_table *t, PyObject *tensor)
{
	uint64_t identity = sfr_py_identity_of(tensor);
	const uint64_t *index = identity ? sfr_py_map_find(&t->by_storage, identity) : NULL;

	if (index)
		t->watches[*index].verdict = SFR_PY_CAPTURED;
}

/* Allocates memory for the recordings of all storages, and counts the undecided ones. 0, or -1 with
 * an exception set. */
static int prepare_recording(struct sfr_py_observer *self, const struct sfr_py_table *t)
{
	uint32_t i;

	PyMem_Free(self->lines);
	PyMem_Free(self->recorded);
	self->lines = NULL;
	self->recorded = NULL;
	self->nr_recorded = self->cursor = self->nr_undecided = 0;
	sfr_py_probes_reset(self);
	for (i = 0; i < t->nr_watches; i++)
		if (t->watches[i].verdict == SFR_PY_UNDECIDED)
			self->nr_undecided++;
	self->lines = PyMem_Malloc((t->nr_watches + (size_t)1) * sizeof(*self->lines));
	self->recorded = PyMem_Malloc((t->nr_watches + (size_t)1) * sizeof(*self->recorded));
	if (self->lines && self->recorded)
		return 0;
	PyErr_NoMemory();
	return -1;
}

int sfr_py_observer_enrol(struct sfr_py_observer *self, PyObject *groups, PyObject *state,
			  PyObject *clashes)
{
	struct sfr_py_table fresh = { 0 }, old;
	struct sfr_py_walk walk = { 0 };
	size_t i;
	int ret = -1;

	if (self->forget)
		sfr_py_observer_drop(self);
	self->forget = self->wanted = 0;
	self->nr_passed_over = 0;
	self->fingerprint = sfr_py_walk_fingerprint(groups, state);
	if (sfr_py_walk(groups, state, &walk) || table_init(&fresh, walk.found.nr))
		goto out;
	for (i = 0; i < walk.found.nr; i++) {
		if (enrol_one(self, &fresh, walk.found.items[i], walk.stateless, clashes))
			goto out;
	}
	for (i = 0; i < walk.others.nr; i++)
		enrol_other(&fresh, walk.others.items[i]);
	ret = prepare_recording(self, &fresh);
out:
	/* The new table is installed first, because freeing the old one keeps those entries in
	 * `owned` whose storages the current table watches. */
	old = self->table;
	self->table = fresh;
	table_fini(self, &old);
	if (ret)
		sfr_py_observer_drop(self);
	sfr_py_walk_fini(&walk);
	return ret;
}
