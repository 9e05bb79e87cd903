/* Marks the storages of a save that may be deferred.
 *
 * A storage of an optimizer is deferred if its verdict is DEFERRABLE and the optimizer still owns
 * the storage: a new walk finds the same tensors over it, and the memory has not moved.
 *
 * A memory owner (memory_owners.py) has memory that only an optimizer step replaces, but that no
 * optimizer owns. Its storages are deferred without observation. */
#include "observer/observer.h"
#include "sfr/source.h"

/* Counts, for each watched storage, the tensors over it that the optimizer still has (nr_owned).
 * Marks the table as stale if the optimizer has tensors that are not in it. */
static void count_tensors_still_owned(struct sfr_py_observer *self, const struct sfr_py_walk *walk)
{
	struct sfr_py_watch_table *t = &self->table;
	size_t i, nr_not_in_table = 0;

	self->walk_number++;
	for (i = 0; i < walk->found.nr; i++) {
		PyObject *tensor = walk->found.items[i];
		struct sfr_py_watched_tensor *entry = sfr_py_find_watched_tensor(t, tensor);
		struct sfr_py_watched_storage *watch;

		if (!entry) {
			nr_not_in_table++;
			continue;
		}
		if (entry->last_walk == self->walk_number)
			continue; /* this walk has found the tensor before */
		entry->last_walk = self->walk_number;
		watch = &t->watches[entry->watch];
		if (sfr_py_storage_cdata_of(tensor) !=
		    watch->cdata) { /* the storage was replaced */
			self->table_is_stale = 1;
			continue;
		}
		if (watch->last_walk != self->walk_number) {
			watch->last_walk = self->walk_number;
			watch->nr_owned = 0;
		}
		watch->nr_owned++;
	}
	if (nr_not_in_table > self->nr_excluded)
		self->table_is_stale = 1; /* some were not there when the table was built */
}

/* Appends a tensor to the lists of tensors whose versions are checked after the copy. `index`, a
 * Python int, is the number of its storage. After a failure the lists may differ in length. */
static int add_tensor_to_marks(const struct sfr_py_deferral_marks *marks, PyObject *index,
			       PyObject *tensor)
{
	PyObject *version;
	uint64_t count = 0;
	int ret = 0;

	if (sfr_py_version_of(tensor, &count))
		return -1;
	version = PyLong_FromUnsignedLongLong(count);
	if (!version)
		return -1;
	if (PyList_Append(marks->storage_numbers, index) || PyList_Append(marks->tensors, tensor) ||
	    PyList_Append(marks->versions, version))
		ret = -1;
	Py_DECREF(version);
	return ret;
}

/* Marks storage number `index` as deferred, after add_tensor_to_marks was called for each of its
 * tensors. `failed`: one of these calls failed. `start`: the length of the three lists before these
 * calls. After a failure, here or before, removes the tensors from the lists: the storage stays
 * captured. */
static int complete_or_undo_deferral(const struct sfr_py_deferral_marks *marks, PyObject *index,
				     struct sfr_source *row, Py_ssize_t start, int failed)
{
	PyObject *const lists[] = { marks->storage_numbers, marks->tensors, marks->versions };

	if (!failed && PyList_Append(marks->indices, index) == 0) {
		row->lane = SFR_LANE_HOST; /* instead of SFR_CAPTURED: copied after the call */
		return 0;
	}
	for (int i = 0; i < 3; i++) { /* takes the storage's tensors off the three lists again */
		PyObject *type, *value, *trace;

		PyErr_Fetch(&type, &value, &trace); /* keeps the exception that is set */
		(void)PyList_SetSlice(lists[i], start, PyList_Size(lists[i]), NULL);
		PyErr_Restore(type, value, trace);
	}
	return -1;
}

/* Defers a watched storage with all tensors over it. */
static int defer_watch(struct sfr_py_watch_table *t, const struct sfr_py_watched_storage *watch,
		       struct sfr_source *row, PyObject *index,
		       const struct sfr_py_deferral_marks *marks)
{
	Py_ssize_t start = PyList_Size(marks->storage_numbers);
	PyObject *tensor;
	uint32_t i;
	int ret = 0;

	for (i = watch->first_tensor; i != SFR_PY_NONE && !ret; i = t->tensors[i].next) {
		tensor = sfr_py_referent(
			t->tensors[i].ref); /* alive: count_tensors_still_owned has found it */
		if (!tensor)
			return -1;
		Py_INCREF(tensor);
		ret = add_tensor_to_marks(marks, index, tensor);
		Py_DECREF(tensor);
	}
	return complete_or_undo_deferral(marks, index, row, start, ret);
}

/* Finds a storage in the save by its StorageImpl's address. Sets both results to NULL if the save
 * does not have the storage. Returns 0, or -1 with an exception set.
 *   *index  the storage's number, a new reference
 *   *row    the storage's row: valid until Python code runs, which may resize the bytearray */
static int find_storage_row(const struct sfr_py_deferral_marks *marks, uint64_t cdata,
			    PyObject **index, struct sfr_source **row)
{
	const size_t nr_rows = (size_t)PyByteArray_Size(marks->rows) / sizeof(**row);
	const uint64_t *number = sfr_py_map_find(&marks->numbers->map, cdata);

	*row = NULL;
	*index = NULL;
	if (!number)
		return 0;
	if (*number >= nr_rows) {
		PyErr_SetString(PyExc_IndexError, "a storage's number lies beyond the rows");
		return -1;
	}
	*row = (struct sfr_source *)(void *)PyByteArray_AsString(marks->rows) + *number;
	*index = PyLong_FromUnsignedLongLong(*number); /* the number as a Python int */
	return *index ? 0 : -1;
}

/* Returns 1 if the save has the memory that was observed. */
static int has_observed_memory(const struct sfr_py_watched_storage *watch,
			       const struct sfr_source *row)
{
	return row->addr == watch->addr && row->nbytes == watch->nbytes;
}

/* Returns 1 if the optimizer still has every tensor over the storage. Call
 * count_tensors_still_owned before. */
static int is_still_owned(const struct sfr_py_observer *self,
			  const struct sfr_py_watched_storage *watch)
{
	return watch->last_walk == self->walk_number && watch->nr_owned == watch->nr_tensors;
}

/* Defers each storage of the save that is DEFERRABLE and still owned by the optimizer. */
static int defer_owned_storages(struct sfr_py_observer *self,
				const struct sfr_py_deferral_marks *marks)
{
	struct sfr_py_watch_table *t = &self->table;
	PyObject *index;
	uint32_t i;

	for (i = 0; i < t->nr_watches; i++) {
		const struct sfr_py_watched_storage *watch = &t->watches[i];
		struct sfr_source *row;
		int ret = 0;

		if (watch->verdict != SFR_PY_DEFERRABLE || !is_still_owned(self, watch))
			continue;
		if (find_storage_row(marks, watch->cdata, &index, &row))
			return -1;
		if (row && has_observed_memory(watch, row))
			ret = defer_watch(t, watch, row, index, marks);
		else if (row) /* the storage was resized, or moved to shared memory */
			self->table_is_stale = 1;
		Py_XDECREF(index);
		if (ret)
			return -1;
	}
	return 0;
}

int sfr_py_observer_mark_deferred(struct sfr_py_observer *self, PyObject *groups, PyObject *state,
				  const struct sfr_py_deferral_marks *marks)
{
	struct sfr_py_walk walk = { 0 };
	int ret = sfr_py_walk(groups, state, &walk);

	if (!ret) {
		count_tensors_still_owned(self, &walk);
		ret = defer_owned_storages(self, marks);
	}
	sfr_py_walk_fini(&walk);
	return ret;
}

int sfr_py_mark_memory_owner_deferred(PyObject *tensors, const struct sfr_py_deferral_marks *marks)
{
	for (Py_ssize_t i = 0; i < PyList_Size(tensors); i++) {
		PyObject *tensor = PyList_GetItem(tensors, i), *index = NULL;
		Py_ssize_t start = PyList_Size(marks->storage_numbers);
		struct sfr_source *row = NULL;
		int ret = find_storage_row(marks, sfr_py_storage_cdata_of(tensor), &index, &row);
		int is_candidate = row && row->lane == SFR_CAPTURED &&
				   row->nbytes > SFR_PY_MEMORY_OWNER_MIN_NBYTES;

		if (!ret && is_candidate) {
			ret = add_tensor_to_marks(marks, index, tensor);
			ret = complete_or_undo_deferral(marks, index, row, start, ret);
		}
		Py_XDECREF(index);
		if (ret)
			return -1;
	}
	return 0;
}
