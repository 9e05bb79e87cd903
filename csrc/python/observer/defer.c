/* Marks the storages of a save that may be deferred.
 *
 * A storage of an optimizer is deferred if its verdict is DEFERRABLE and the optimizer still owns
 * the storage: a new walk finds the same tensors over it, and the memory has not moved.
 *
 * A memory owner (memory_owners.py) has memory that only an optimizer step replaces, but that no
 * optimizer owns. Its storages are deferred without observation. */
#include "observer/observer.h"
#include "sfr/source.h"

/* Sets nr_owned of each watched storage: the tensors over it that the optimizer still has. Sets
 * `wanted` if the optimizer has more unknown tensors than the last enrolment passed over. */
static void count_owned(struct sfr_py_observer *self, const struct sfr_py_walk *walk)
{
	struct sfr_py_table *t = &self->table;
	size_t i, nr_unknown = 0;

	self->epoch++;
	for (i = 0; i < walk->found.nr; i++) {
		PyObject *tensor = walk->found.items[i];
		struct sfr_py_tensor *entry = sfr_py_find_tensor(t, tensor);
		struct sfr_py_watch *watch;

		if (!entry) {
			nr_unknown++;
			continue;
		}
		if (entry->epoch == self->epoch)
			continue; /* this walk has found the tensor before */
		entry->epoch = self->epoch;
		watch = &t->watches[entry->watch];
		if (sfr_py_identity_of(tensor) != watch->cdata) { /* the storage was replaced */
			self->wanted = 1;
			continue;
		}
		if (watch->epoch != self->epoch) {
			watch->epoch = self->epoch;
			watch->nr_owned = 0;
		}
		watch->nr_owned++;
	}
	if (nr_unknown > self->nr_passed_over)
		self->wanted = 1;
}

/* Appends a tensor over storage number `index` (an int) to the lists of tensors whose versions are
 * checked after the copy. After a failure the lists may have different lengths. */
static int add_tensor(const struct sfr_py_marks *marks, PyObject *index, PyObject *tensor)
{
	PyObject *version;
	uint64_t count = 0;
	int ret = 0;

	version = sfr_py_version_of(tensor, &count) ? NULL : PyLong_FromUnsignedLongLong(count);
	if (!version || PyList_Append(marks->storage_numbers, index) ||
	    PyList_Append(marks->tensors, tensor) || PyList_Append(marks->versions, version))
		ret = -1;
	Py_XDECREF(version);
	return ret;
}

/* Defers storage number `index` after add_tensor was called for its tensors. `failed` says whether
 * one of these calls failed, and `start` is the length of the lists before them. After any failure
 * the storage stays captured, and its tensors are removed from the lists. */
static int finish_deferring(const struct sfr_py_marks *marks, PyObject *index,
			    struct sfr_source *row, Py_ssize_t start, int failed)
{
	PyObject *const lists[] = { marks->storage_numbers, marks->tensors, marks->versions };

	if (!failed && !PyList_Append(marks->indices, index)) {
		row->lane = SFR_LANE_HOST;
		return 0;
	}
	for (int i = 0; i < 3; i++) {
		PyObject *type, *value, *trace;

		PyErr_Fetch(&type, &value, &trace);
		(void)PyList_SetSlice(lists[i], start, PyList_Size(lists[i]), NULL);
		PyErr_Restore(type, value, trace);
	}
	return -1;
}

/* Defers a watched storage with all tensors over it. */
static int defer_watch(struct sfr_py_table *t, const struct sfr_py_watch *watch,
		       struct sfr_source *row, PyObject *index, const struct sfr_py_marks *marks)
{
	Py_ssize_t start = PyList_Size(marks->storage_numbers);
	PyObject *tensor;
	uint32_t i;
	int ret = 0;

	for (i = watch->first_tensor; i != SFR_PY_NONE && !ret; i = t->tensors[i].next) {
		tensor = sfr_py_referent(t->tensors[i].ref); /* alive: count_owned has found it */
		if (!tensor)
			return -1;
		Py_INCREF(tensor);
		ret = add_tensor(marks, index, tensor);
		Py_DECREF(tensor);
	}
	return finish_deferring(marks, index, row, start, ret);
}

/* Finds a storage in the save by its StorageImpl's address. If the save does not have the storage,
 * both results are NULL.
 *   *index  the storage's number, a new reference
 *   *row    the storage's row, until Python code runs, which may resize the bytearray */
static int find_row(const struct sfr_py_marks *marks, uint64_t identity, PyObject **index,
		    struct sfr_source **row)
{
	const size_t nr_rows = (size_t)PyByteArray_Size(marks->rows) / sizeof(**row);
	const uint64_t *number = sfr_py_map_find(&marks->numbers->map, identity);

	*row = NULL;
	*index = NULL;
	if (!number)
		return 0;
	if (*number >= nr_rows) {
		PyErr_SetString(PyExc_IndexError, "a storage's number lies beyond the rows");
		return -1;
	}
	*row = (struct sfr_source *)(void *)PyByteArray_AsString(marks->rows) + *number;
	*index = PyLong_FromUnsignedLongLong(*number);
	return *index ? 0 : -1;
}

/* Returns 1 if the save has the memory that was observed. */
static int has_observed_memory(const struct sfr_py_watch *watch, const struct sfr_source *row)
{
	return row->addr == watch->addr && row->nbytes == watch->nbytes;
}

/* Defers each storage of the save that is DEFERRABLE and whose tensors the optimizer still has. */
static int defer_all(struct sfr_py_observer *self, const struct sfr_py_marks *marks)
{
	struct sfr_py_table *t = &self->table;
	PyObject *index;
	uint32_t i;

	for (i = 0; i < t->nr_watches; i++) {
		const struct sfr_py_watch *watch = &t->watches[i];
		struct sfr_source *row;
		int ret = 0;

		if (watch->verdict != SFR_PY_DEFERRABLE || watch->epoch != self->epoch ||
		    watch->nr_owned != watch->nr_tensors)
			continue;
		if (find_row(marks, watch->cdata, &index, &row))
			return -1;
		if (row && has_observed_memory(watch, row))
			ret = defer_watch(t, watch, row, index, marks);
		else if (row)
			self->wanted = 1; /* the storage was resized, or moved to shared memory */
		Py_XDECREF(index);
		if (ret)
			return -1;
	}
	return 0;
}

int sfr_py_observer_defer(struct sfr_py_observer *self, PyObject *groups, PyObject *state,
			  const struct sfr_py_marks *marks)
{
	struct sfr_py_walk walk = { 0 };
	int ret = sfr_py_walk(groups, state, &walk);

	if (!ret) {
		count_owned(self, &walk);
		ret = defer_all(self, marks);
	}
	sfr_py_walk_fini(&walk);
	return ret;
}

int sfr_py_defer_memory_owner(PyObject *tensors, const struct sfr_py_marks *marks)
{
	for (Py_ssize_t i = 0; i < PyList_Size(tensors); i++) {
		PyObject *tensor = PyList_GetItem(tensors, i), *index = NULL;
		Py_ssize_t start = PyList_Size(marks->storage_numbers);
		struct sfr_source *row = NULL;
		int ret = find_row(marks, sfr_py_identity_of(tensor), &index, &row);

		if (!ret && row && row->lane == SFR_CAPTURED &&
		    row->nbytes > SFR_PY_MEMORY_OWNER_MIN_NBYTES) {
			ret = add_tensor(marks, index, tensor);
			ret = finish_deferring(marks, index, row, start, ret);
		}
		Py_XDECREF(index);
		if (ret)
			return -1;
	}
	return 0;
}
