/* Observer: the storages of a save that may be copied behind its call.
 *
 * A storage is deferred when its verdict says so and the optimizer still owns it as it did at the
 * enrolment: each of the tensors over it is met by a walk of now, and its memory is where it was.
 */
#include "observer/observer.h"
#include "sfr/source.h"

/* Marks the claims that the optimizer still has over the storages it had; notes that an enrolment
 * is wanted where it has others. */
static void defer_mark(struct sfr_py_observer *self, const struct sfr_py_walk *walk)
{
	const struct sfr_py_torch *torch = &sfr_py_torch;
	struct sfr_py_table *t = &self->table;
	size_t i, nr_unknown = 0;

	self->epoch++;
	for (i = 0; i < walk->found.nr; i++) {
		PyObject *tensor = walk->found.items[i], *storage;
		struct sfr_py_claim *claim = sfr_py_find_claim(t, tensor);
		struct sfr_py_watch *watch;
		uint64_t cdata = 0;

		if (!claim) {
			nr_unknown++;
			continue;
		}
		if (claim->epoch == self->epoch)
			continue;
		claim->epoch = self->epoch;
		watch = &t->watches[claim->watch];
		storage = sfr_py_storage_of(tensor);
		if (storage)
			(void)sfr_py_read_u64(&torch->cdata, storage, &cdata);
		PyErr_Clear();
		Py_XDECREF(storage);
		if (cdata != watch->cdata) {
			self->wanted = 1;
			continue;
		}
		if (watch->epoch != self->epoch) {
			watch->epoch = self->epoch;
			watch->nr_marked = 0;
		}
		watch->nr_marked++;
	}
	if (nr_unknown > self->nr_passed_over)
		self->wanted = 1;
}

/* Defers one storage of the save: writes its lane and appends to the four lists. 0 or -1. */
static int defer_one(struct sfr_py_table *t, const struct sfr_py_watch *watch,
		     struct sfr_source *row, PyObject *index, PyObject *const lists[4])
{
	PyObject *tensor, *version;
	Py_ssize_t start = PyList_Size(lists[1]);
	uint64_t count = 0;
	uint32_t i;
	int ret = 0;

	for (i = watch->first_claim; i != SFR_PY_NONE && !ret; i = t->claims[i].next) {
		tensor = sfr_py_referent(t->claims[i].ref);
		if (!tensor)
			return -1;
		Py_INCREF(tensor);
		version = sfr_py_version_of(tensor, &count) ? NULL :
							      PyLong_FromUnsignedLongLong(count);
		if (!version || PyList_Append(lists[1], index) || PyList_Append(lists[2], tensor) ||
		    PyList_Append(lists[3], version))
			ret = -1;
		Py_XDECREF(version);
		Py_DECREF(tensor);
	}
	if (!ret && !PyList_Append(lists[0], index)) {
		row->lane = SFR_LANE_HOST;
		return 0;
	}
	/* What stands in the lists without a lane is only looked at in vain. */
	for (i = 1; i < 4; i++) {
		PyObject *type, *value, *trace;

		PyErr_Fetch(&type, &value, &trace);
		(void)PyList_SetSlice(lists[i], start, PyList_Size(lists[i]), NULL);
		PyErr_Restore(type, value, trace);
	}
	return -1;
}

/* The number that a storage has in the save; `nr_rows` where it is in none. 0, or -1 with an
 * exception set. */
static int number_of(const struct sfr_py_watch *watch, PyObject *numbers, size_t nr_rows,
		     PyObject **index, size_t *number)
{
	*number = nr_rows;
	*index = PyDict_GetItemWithError(numbers, watch->ident);
	if (!*index)
		return PyErr_Occurred() ? -1 : 0;
	*number = PyLong_AsSize_t(*index);
	if (*number < nr_rows)
		return 0;
	if (!PyErr_Occurred())
		PyErr_SetString(PyExc_IndexError, "a storage's number lies beyond the rows");
	return -1;
}

/* Whether a save that has this row for the storage may copy it late. */
static int is_deferred(struct sfr_py_observer *self, const struct sfr_py_watch *watch,
		       const struct sfr_source *row)
{
	if (row->addr != watch->addr || row->nbytes != watch->nbytes) {
		self->wanted = 1; /* resized, or moved to shared memory */
		return 0;
	}
	/* Small ones on a device are captured whoever owns them, as small ones of the host are. */
	return row->device == 0 || watch->nbytes > SFR_PY_DEVICE_MIN_NBYTES;
}

static int defer_all(struct sfr_py_observer *self, PyObject *numbers, PyObject *rows,
		     PyObject *const lists[4])
{
	const size_t nr_rows = (size_t)PyByteArray_Size(rows) / sizeof(struct sfr_source);
	struct sfr_py_table *t = &self->table;
	PyObject *index;
	size_t number;
	uint32_t i;

	for (i = 0; i < t->nr_watches; i++) {
		const struct sfr_py_watch *watch = &t->watches[i];
		struct sfr_source *row;

		if (watch->verdict != SFR_PY_DEFERRABLE || watch->epoch != self->epoch ||
		    watch->nr_marked != watch->nr_claims)
			continue;
		if (number_of(watch, numbers, nr_rows, &index, &number))
			return -1;
		if (number == nr_rows)
			continue;
		/* Anew each time: what the lists let go of may run code that resizes the array. */
		row = (struct sfr_source *)(void *)PyByteArray_AsString(rows) + number;
		if (is_deferred(self, watch, row) && defer_one(t, watch, row, index, lists))
			return -1;
	}
	return 0;
}

int sfr_py_observer_defer(struct sfr_py_observer *self, PyObject *groups, PyObject *state,
			  PyObject *numbers, PyObject *rows, PyObject *const lists[4])
{
	struct sfr_py_walk walk = { 0 };
	int ret = sfr_py_walk(groups, state, &walk);

	if (!ret) {
		defer_mark(self, &walk);
		ret = defer_all(self, numbers, rows, lists);
	}
	sfr_py_walk_fini(&walk);
	return ret;
}
