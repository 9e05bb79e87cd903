/* The table of the storages and tensors that an observer watches.
 *
 * When the optimizer's tensors may have changed, enrol() makes a new table from a walk over the
 * optimizer. It moves the watches of storages that the optimizer still has to the new table, and
 * frees the others with the old table. */
#include "observer/observer.h"

#include <string.h>

/* Makes an empty table with room for `nr` tensors and as many storages. Call table_fini also after
 * a failure. */
static int table_init(struct sfr_py_watch_table *t, size_t nr)
{
	memset(t, 0, sizeof(*t));
	t->watches = PyMem_Calloc(nr + 1, sizeof(*t->watches)); /* + 1: never empty */
	t->tensors = PyMem_Calloc(nr + 1, sizeof(*t->tensors));
	if (!t->watches || !t->tensors)
		return sfr_py_set_memory_error();
	if (sfr_py_map_reserve(&t->by_storage, nr) || sfr_py_map_reserve(&t->by_tensor, nr))
		return -1;
	return 0;
}

/* Stops watching a storage: drops torch's weak reference. Also drops this observer's entry in
 * `owners`, unless the current table watches the storage. */
static void watch_fini(struct sfr_py_observer *self, struct sfr_py_watched_storage *watch)
{
	PyObject *owner, *answer;

	if (!watch->weak_ref) /* the watch has moved to another table */
		return;
	owner = PyDict_GetItemWithError(self->owners, watch->weak_ref);
	if (owner == self->serial && !sfr_py_map_find(&self->table.by_storage, watch->cdata))
		(void)PyDict_DelItem(self->owners, watch->weak_ref); /* cannot fail */
	answer = PyObject_CallFunctionObjArgs(sfr_py_torch.free_weak, watch->weak_ref, NULL);
	Py_XDECREF(answer);
	PyErr_Clear();
	Py_CLEAR(watch->weak_ref);
}

/* Frees a table that is not the current one. Keeps an exception that is set. */
static void table_fini(struct sfr_py_observer *self, struct sfr_py_watch_table *t)
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

void sfr_py_observer_drop_table(struct sfr_py_observer *self)
{
	struct sfr_py_watch_table old = self->table;

	memset(&self->table, 0, sizeof(self->table));
	self->nr_to_compare = self->nr_undecided = 0;
	sfr_py_probes_reset(self);
	table_fini(self, &old);
}

struct sfr_py_watched_tensor *sfr_py_find_watched_tensor(const struct sfr_py_watch_table *t,
							 PyObject *tensor)
{
	const uint64_t *index = sfr_py_map_find(&t->by_tensor, (uintptr_t)tensor);

	/* A new tensor may have the address of a freed one. */
	if (!index || sfr_py_referent(t->tensors[*index].ref) != tensor)
		return NULL;
	return &t->tensors[*index];
}

/* Adds a tensor over the storage with index `watch`. */
static int table_add_tensor(struct sfr_py_watch_table *t, PyObject *tensor, uint32_t watch)
{
	struct sfr_py_watched_tensor *entry = &t->tensors[t->nr_tensors];
	uint64_t impl = 0;

	entry->ref = PyWeakref_NewRef(tensor, NULL);
	if (!entry->ref || sfr_py_map_add(&t->by_tensor, (uintptr_t)tensor, t->nr_tensors)) {
		Py_CLEAR(entry->ref);
		return -1;
	}
	entry->tensor = (uintptr_t)tensor;
	if (sfr_py_read_u64(&sfr_py_torch.impl, tensor, &impl))
		PyErr_Clear(); /* the address only serves to prefetch */
	entry->impl = (uintptr_t)impl;
	entry->watch = watch;
	entry->next = t->watches[watch].first_tensor;
	t->watches[watch].first_tensor = t->nr_tensors++;
	t->watches[watch].nr_tensors++;
	return 0;
}

/* Sets watch->device_plus_1. Returns 0, or nonzero if the storage can never be deferred: it is
 * small, shared between processes, or on a device that is not CUDA's. Then an exception may be set.
 */
static int set_device(struct sfr_py_watched_storage *watch, PyObject *tensor, PyObject *storage)
{
	const struct sfr_py_torch *torch = &sfr_py_torch;
	PyObject *memory = sfr_py_unwrap_tensor(tensor), *device = NULL;
	int on_host = memory ? sfr_py_read_flag(&torch->is_cpu, memory) : -1;
	long number = -1;

	if (on_host == 0)
		device = sfr_py_read_attribute(&torch->device, memory);
	if (device)
		number = PyLong_AsLong(device);
	Py_XDECREF(device);
	Py_XDECREF(memory);
	if (on_host < 0)
		return -1;
	/* is_shared is only read for host memory, because it is true for every CUDA storage. If
	 * reading it fails, the storage counts as shared. */
	if (on_host)
		return watch->nbytes <= SFR_PY_HOST_MIN_NBYTES ||
		       sfr_py_read_flag(&torch->is_shared, storage) != 0;
	watch->device_plus_1 = (uint32_t)(number + 1);
	return number < 0 || watch->nbytes <= SFR_PY_DEVICE_MIN_NBYTES;
}

/* Adds a storage to the new table, as its last watch. Returns 1; 0 if the storage can never be
 * deferred; -1 with an exception set. If another observer watches the storage too, both must
 * capture the storage, because each optimizer's step may write to it. In this case appends (serial
 * of that observer, storage) to `clashes`. */
static int table_add_storage(struct sfr_py_observer *self, struct sfr_py_watch_table *t,
			     PyObject *tensor, PyObject *storage, uint64_t cdata, PyObject *clashes)
{
	const struct sfr_py_torch *torch = &sfr_py_torch;
	struct sfr_py_watched_storage *watch = &t->watches[t->nr_watches];
	PyObject *owner, *pair;
	int ret;

	memset(watch, 0, sizeof(*watch));
	if (sfr_py_read_u64(&torch->nbytes, storage, &watch->nbytes) ||
	    set_device(watch, tensor, storage) != 0 ||
	    sfr_py_read_u64(&torch->data_ptr, storage, &watch->addr) || !watch->addr) {
		PyErr_Clear(); /* an error of torch; a small storage sets none */
		return 0;
	}
	watch->cdata = cdata;
	watch->storage_object = (uintptr_t)storage;
	watch->first_tensor = SFR_PY_NONE;
	watch->verdict = SFR_PY_UNDECIDED;
	watch->weak_ref = sfr_py_read_attribute(&torch->weak_ref, storage);
	if (!watch->weak_ref)
		return -1;
	if (sfr_py_map_add(&t->by_storage, cdata, t->nr_watches++))
		return -1;
	owner = PyDict_GetItemWithError(self->owners, watch->weak_ref);
	if (!owner) {
		if (PyErr_Occurred() || PyDict_SetItem(self->owners, watch->weak_ref, self->serial))
			return -1;
		return 1;
	}
	if (owner == self->serial)
		return 1; /* the old table watches the storage */
	/* another observer watches the storage too, so neither may defer it */
	watch->verdict = SFR_PY_CAPTURED;
	pair = PyTuple_Pack(2, owner, watch->weak_ref);
	ret = pair ? PyList_Append(clashes, pair) : -1;
	Py_XDECREF(pair);
	return ret ? -1 : 1;
}

/* Moves a watch from the old table to the end of `t`, but without its tensors. Returns 1, or -1
 * with an exception set. */
static int table_move_storage(struct sfr_py_watch_table *t, struct sfr_py_watched_storage *old)
{
	struct sfr_py_watched_storage *watch = &t->watches[t->nr_watches];

	if (sfr_py_map_add(&t->by_storage, old->cdata, t->nr_watches))
		return -1;
	t->nr_watches++;
	*watch = *old;
	watch->first_tensor = SFR_PY_NONE;
	watch->nr_tensors = 0;
	watch->last_walk = watch->nr_owned = 0;
	old->weak_ref = NULL; /* the reference has moved too */
	return 1;
}

/* Returns 1 if a storage still has the memory that was observed, else 0. (resize_ and share_memory_
 * replace the memory.) Leaves no exception set. */
static int has_same_memory(const struct sfr_py_watched_storage *watch, PyObject *storage)
{
	uint64_t addr, nbytes;
	int failed = sfr_py_read_u64(&sfr_py_torch.data_ptr, storage, &addr) ||
		     sfr_py_read_u64(&sfr_py_torch.nbytes, storage, &nbytes);

	PyErr_Clear();
	return !failed && addr == watch->addr && nbytes == watch->nbytes;
}

/* Returns 1 if the tensor has a gradient now, else 0. Leaves no exception set. */
static int has_gradient(PyObject *tensor)
{
	PyObject *grad = sfr_py_read_attribute(&sfr_py_torch.grad, tensor);
	int yes = grad && grad != Py_None;

	PyErr_Clear();
	Py_XDECREF(grad);
	return yes;
}

/* Adds a tensor to the new table `t`, with its storage if that is not in `t` yet. A tensor that can
 * never be deferred is only counted in nr_excluded. `stateless`: Optimizer.state is empty. */
static int add_candidate(struct sfr_py_observer *self, struct sfr_py_watch_table *t,
			 PyObject *tensor, int stateless, PyObject *clashes)
{
	/* the tensor's entry and watch in the old table, or NULL */
	struct sfr_py_watched_tensor *known = sfr_py_find_watched_tensor(&self->table, tensor);
	struct sfr_py_watched_storage *old_watch = NULL;
	PyObject *storage;
	const uint64_t *index;
	uint64_t cdata;
	uint32_t watch;
	int ret = 0;

	if (sfr_py_map_find(&t->by_tensor, (uintptr_t)tensor))
		return 0; /* added before: the tensor is in the state of two parameters */
	/* In an optimizer without state, only a gradient shows that a parameter is trained. */
	if (stateless && !known && !has_gradient(tensor))
		return 0;
	storage = sfr_py_storage_of(tensor);
	if (!storage || sfr_py_read_u64(&sfr_py_torch.cdata, storage, &cdata)) {
		PyErr_Clear(); /* sparse tensors, for example, have no storage */
		self->nr_excluded++;
		goto out;
	}
	if (known && self->table.watches[known->watch].cdata != cdata)
		known = NULL; /* the tensor has moved to another storage */
	if (known)
		old_watch = &self->table.watches[known->watch];
	index = sfr_py_map_find(&t->by_storage, cdata);
	if (index) {
		watch = (uint32_t)*index;
		/* The storage was observed without this tensor, so observation starts again. */
		if (!known && t->watches[watch].verdict == SFR_PY_DEFERRABLE)
			t->watches[watch].verdict = SFR_PY_UNDECIDED;
		if (!known)
			t->watches[watch].nr_cycles = 0;
	} else {
		/* `t` needs a watch of the storage: the old one, unless it was moved before */
		if (old_watch && old_watch->weak_ref && has_same_memory(old_watch, storage))
			ret = table_move_storage(t, old_watch);
		else
			ret = table_add_storage(self, t, tensor, storage, cdata, clashes);
		if (ret == 0) /* the storage can never be deferred */
			self->nr_excluded++;
		if (ret <= 0)
			goto out;
		watch = t->nr_watches - 1;
	}
	ret = table_add_tensor(t, tensor, watch);
out:
	Py_XDECREF(storage);
	return ret;
}

/* Captures the storage of a tensor that is in a group but not trained, if the storage is watched:
 * code other than a step may write to it. */
static void mark_storage_captured(struct sfr_py_watch_table *t, PyObject *tensor)
{
	uint64_t cdata = sfr_py_storage_cdata_of(tensor);
	const uint64_t *index = cdata ? sfr_py_map_find(&t->by_storage, cdata) : NULL;

	if (index)
		t->watches[*index].verdict = SFR_PY_CAPTURED;
}

/* Allocates memory for the samples of all storages, and counts the undecided storages. */
static int prepare_recording(struct sfr_py_observer *self, const struct sfr_py_watch_table *t)
{
	uint32_t i;

	PyMem_Free(self->samples);
	PyMem_Free(self->to_compare);
	self->samples = NULL;
	self->to_compare = NULL;
	self->nr_to_compare = self->cursor = self->nr_undecided = 0;
	sfr_py_probes_reset(self);
	for (i = 0; i < t->nr_watches; i++)
		if (t->watches[i].verdict == SFR_PY_UNDECIDED)
			self->nr_undecided++;
	/* + 1: never empty */
	self->samples = PyMem_Malloc((t->nr_watches + (size_t)1) * sizeof(*self->samples));
	self->to_compare = PyMem_Malloc((t->nr_watches + (size_t)1) * sizeof(*self->to_compare));
	if (self->samples && self->to_compare)
		return 0;
	return sfr_py_set_memory_error();
}

int sfr_py_observer_rebuild_table(struct sfr_py_observer *self, PyObject *groups, PyObject *state,
				  PyObject *clashes)
{
	struct sfr_py_watch_table fresh = { 0 }, old;
	struct sfr_py_walk walk = { 0 };
	size_t i;
	int ret = -1;

	if (self->must_forget)
		sfr_py_observer_drop_table(self);
	self->must_forget = self->table_is_stale = 0;
	self->nr_excluded = 0;
	self->fingerprint = sfr_py_optimizer_fingerprint(groups, state);
	if (sfr_py_walk(groups, state, &walk) || table_init(&fresh, walk.found.nr))
		goto out;
	for (i = 0; i < walk.found.nr; i++) {
		if (add_candidate(self, &fresh, walk.found.items[i], walk.stateless, clashes))
			goto out;
	}
	for (i = 0; i < walk.others.nr; i++)
		mark_storage_captured(&fresh, walk.others.items[i]);
	ret = prepare_recording(self, &fresh);
out:
	/* Replace the table before freeing the old one: watch_fini looks at the current table. */
	old = self->table;
	self->table = fresh;
	table_fini(self, &old);
	if (ret)
		sfr_py_observer_drop_table(self);
	sfr_py_walk_fini(&walk);
	return ret;
}
