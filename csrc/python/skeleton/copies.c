/* Snapshots: finds plain tensors without a pickler, and rebuilds them over copies of their
 * storages.
 *
 * collect() gets the contents of a tree's containers and keeps the plain tensors (torch_types.c).
 * When the storages have been copied, copies() makes a new tensor for each of them through the
 * bridge (torch/bridge.c). The new tensor has the same dtype, sizes, strides and offset. Python
 * makes the tensors and storages that the bridge cannot make:
 *
 *   - all of them with torch 2.10, which has no function that makes tensors,
 *   - tensors that view a storage as another dtype than the first tensor over it,
 *   - storages that are empty or not a whole number of elements long.
 *
 * The new storages together have one reference to the object that owns the memory. The thread that
 * frees the last storage drops this reference. */
#include <string.h>

#include "skeleton/skeleton.h"

/* Keeps a Python object alive while storages use its memory. */
struct owner_keepalive {
	struct sfr_keepalive keepalive;
	PyObject *owner;
};

/* Called on any thread, without the interpreter lock, when the last storage is freed. */
static void drop_owner(struct sfr_keepalive *keepalive)
{
	struct owner_keepalive *self = (struct owner_keepalive *)keepalive;
	PyGILState_STATE gil;

	if (!Py_IsInitialized())
		return; /* the process is ending */
	gil = PyGILState_Ensure();
	Py_DECREF(self->owner);
	PyMem_Free(self);
	PyGILState_Release(gil);
}

/* Makes a keepalive with a reference to `owner`. The count is 1, for the caller. */
static struct sfr_keepalive *make_owner_keepalive(PyObject *owner)
{
	struct owner_keepalive *self = PyMem_Malloc(sizeof(*self));

	if (self == NULL) {
		(void)PyErr_NoMemory(); /* always NULL */
		return NULL;
	}
	self->keepalive.count = 1;
	self->keepalive.last = drop_owner;
	self->owner = Py_NewRef(owner);
	return &self->keepalive;
}

/* ---- collecting ---------------------------------------------------------------- */

/* Returns whether the object is of a frequent type whose objects contain no tensor. */
static bool is_atom(PyObject *node)
{
	PyTypeObject *type = Py_TYPE(node);

	return node == Py_None || type == &PyUnicode_Type || type == &PyLong_Type ||
	       type == &PyFloat_Type || type == &PyBool_Type || type == &PyBytes_Type;
}

/* Adds a tensor to the collector, unless it is there. Returns whether the tensor is plain: 1, 0, or
 * -1 with an exception set. */
static int collect_tensor(struct sfr_py_collector *c, PyObject *tensor)
{
	const uint64_t *known = sfr_py_map_find(&c->index_by_tensor, (uintptr_t)tensor);
	size_t number;

	if (known)
		number = (size_t)*known;
	else if (sfr_py_collector_add_tensor(c, tensor, true, &number) != 0)
		return -1;
	return c->found[number].plain;
}

PyObject *sfr_py_collector_collect_tensors(PyObject *self, PyObject *nodes)
{
	struct sfr_py_collector *c = (struct sfr_py_collector *)self;
	PyObject *const *item = c->torch->item;
	PyObject *others = PyList_New(0), *fast = PySequence_Fast(nodes, "nodes are a sequence");
	Py_ssize_t i;

	if (others == NULL || fast == NULL)
		goto fail;
	/* The size may change, because asking tensors may run Python code. */
	for (i = 0; i < PySequence_Size(fast); i++) {
		PyObject *node = PySequence_GetItem(fast, i);
		bool exact;
		int rc; /* 1: nothing is left to do for the node; 0: it is one of the others */

		if (node == NULL)
			goto fail;
		exact = (PyObject *)Py_TYPE(node) == item[SFR_PY_TENSOR] ||
			(PyObject *)Py_TYPE(node) == item[SFR_PY_PARAMETER];
		rc = exact ? collect_tensor(c, node) : is_atom(node);
		if (rc == 0)
			rc = PyList_Append(others, node);
		Py_DECREF(node); /* the sequence holds a reference */
		if (rc < 0)
			goto fail;
	}
	Py_DECREF(fast);
	return others;
fail:
	Py_XDECREF(others);
	Py_XDECREF(fast);
	return NULL;
}

/* ---- making -------------------------------------------------------------------- */

/* One call of copies(). */
struct make_copies_job {
	struct sfr_py_collector *c;
	char *base; /* memory of the copies, `len` bytes */
	Py_ssize_t len;
	PyObject *offsets;       /* list, by number of the storage: offset of its copy */
	int64_t *rows;           /* rows for the bridge (torch/bridge.h) */
	int64_t *end;            /* the end of these rows */
	size_t nr_rows;          /* their number */
	uint32_t *tensor_of_row; /* by number of the row: index of the found tensor */
	/* by number of the storage: 1 + the index of the first row over it; 0: none yet */
	uint32_t *first_row_plus_1;
};

/* Allocates the arrays of a job. Call make_copies_job_fini also after a failure. */
static int make_copies_job_init(struct make_copies_job *job)
{
	const struct sfr_py_collector *c = job->c;
	size_t words = 0, i;

	for (i = 0; i < c->nr_found; i++)
		if (c->found[i].row != NULL)
			words += SFR_NEW_HEADER + 2 * (size_t)c->found[i].row[SFR_ROW_NDIM];
	/* + 1 in each array: never empty */
	job->rows = PyMem_Malloc((words + 1) * sizeof(*job->rows));
	job->tensor_of_row = PyMem_Malloc((c->nr_found + 1) * sizeof(*job->tensor_of_row));
	job->first_row_plus_1 = PyMem_Calloc(c->nr_storages + 1, sizeof(*job->first_row_plus_1));
	if (job->rows == NULL || job->tensor_of_row == NULL || job->first_row_plus_1 == NULL)
		return sfr_py_set_memory_error();
	job->end = job->rows;
	return 0;
}

static void make_copies_job_fini(struct make_copies_job *job)
{
	PyMem_Free(job->rows);
	PyMem_Free(job->tensor_of_row);
	PyMem_Free(job->first_row_plus_1);
}

/* Returns whether all elements of a row's tensor are within its storage. They may not be if the
 * user has resized the storage. */
static bool is_within_storage(const int64_t *row, uint64_t itemsize)
{
	const int64_t *sizes = row + SFR_ROW_HEADER, *strides = sizes + row[SFR_ROW_NDIM];
	uint64_t reach = (uint64_t)row[SFR_ROW_OFFSET] + 1; /* elements, up to the tensor's last */
	uint64_t product;
	int64_t i;

	for (i = 0; i < row[SFR_ROW_NDIM]; i++) {
		if (sizes[i] == 0)
			return true; /* the tensor has no elements */
		if (__builtin_mul_overflow((uint64_t)sizes[i] - 1, (uint64_t)strides[i],
					   &product) ||
		    __builtin_add_overflow(reach, product, &reach))
			return false;
	}
	/* from here on `reach` is in bytes */
	return !__builtin_mul_overflow(reach, itemsize, &reach) &&
	       reach <= (uint64_t)row[SFR_ROW_NBYTES];
}

/* Returns whether the bridge can make a copy of the tensor. `first_plus_1` is the entry of its
 * storage in job->first_row_plus_1. */
static bool can_add_row(const struct make_copies_job *job, const struct sfr_py_found_tensor *found,
			uint32_t first_plus_1)
{
	const uint64_t nbytes = job->c->storages[found->storage].nbytes;
	const uint64_t itemsize = job->c->torch->dtype[found->dtype].itemsize;

	if (nbytes == 0 || nbytes % itemsize != 0)
		return false;
	if ((uint64_t)found->row[SFR_ROW_NBYTES] != nbytes) /* the storage was resized */
		return false;
	if (!is_within_storage(found->row, itemsize))
		return false;
	if (first_plus_1 == 0) /* no earlier row has the storage */
		return true;
	return job->c->found[job->tensor_of_row[first_plus_1 - 1]].dtype == found->dtype;
}

/* Appends the row from which the bridge makes a copy of found[index]. Returns 1; 0 if the tensor is
 * left to Python; -1 with an exception set. */
static int add_row(struct make_copies_job *job, uint32_t index)
{
	const struct sfr_py_found_tensor *found = &job->c->found[index];
	const uint64_t nbytes = job->c->storages[found->storage].nbytes;
	const uint32_t first_plus_1 = job->first_row_plus_1[found->storage];
	const bool shares = first_plus_1 != 0; /* an earlier row has this storage */
	const int64_t *row = found->row;
	Py_ssize_t offset;
	int64_t *out = job->end;

	if (!can_add_row(job, found, first_plus_1))
		return 0;
	offset = PyLong_AsSsize_t(PyList_GetItem(job->offsets, (Py_ssize_t)found->storage));
	if (offset == -1 && PyErr_Occurred())
		return -1;
	if (offset < 0 || offset > job->len || nbytes > (uint64_t)(job->len - offset)) {
		PyErr_SetString(PyExc_ValueError, "a storage's copy is not within the memory");
		return -1;
	}
	out[SFR_NEW_OVER] = (int64_t)first_plus_1 - 1; /* -1: no earlier row has the storage */
	out[SFR_NEW_BASE] = shares ? 0 : (int64_t)(uintptr_t)(job->base + offset);
	out[SFR_NEW_NBYTES] = shares ? 0 : (int64_t)nbytes;
	out[SFR_NEW_OFFSET] = row[SFR_ROW_OFFSET];
	out[SFR_NEW_DTYPE] = row[SFR_ROW_DTYPE];
	out[SFR_NEW_NDIM] = row[SFR_ROW_NDIM];
	memcpy(out + SFR_NEW_HEADER, row + SFR_ROW_HEADER,
	       2 * (size_t)row[SFR_ROW_NDIM] * sizeof(*row));
	job->end += SFR_NEW_HEADER + 2 * row[SFR_ROW_NDIM];
	job->tensor_of_row[job->nr_rows++] = index;
	if (!shares)
		job->first_row_plus_1[found->storage] = (uint32_t)job->nr_rows;
	return 1;
}

/* Appends (tensor, number of its storage) to the list of tensors left to Python. */
static int leave_to_python(PyObject *list, const struct sfr_py_found_tensor *found)
{
	PyObject *pair = Py_BuildValue("(OI)", found->object, (unsigned int)found->storage);
	int rc = pair == NULL ? -1 : PyList_Append(list, pair);

	Py_XDECREF(pair);
	return rc;
}

/* Makes the new tensor a Parameter if the old one is, and copies requires_grad. Assigns __class__,
 * as torch does with lazy parameters. Parameter(tensor) would free a tensor, for which torch
 * releases the interpreter lock, and each release may cost a switch interval. */
static int set_class_and_requires_grad(const struct sfr_py_torch_types *torch,
				       const struct sfr_py_found_tensor *found, PyObject *tensor)
{
	if (found->parameter &&
	    PyObject_SetAttrString(tensor, "__class__", torch->item[SFR_PY_PARAMETER]) != 0)
		return -1;
	return found->requires_grad ? PyObject_SetAttrString(tensor, "requires_grad", Py_True) : 0;
}

/* Gives each of the bridge's `tensors`, a list in the order of the rows, the class of its old
 * tensor. Adds it to the dict `new_tensors` under the old tensor's id. */
static int add_new_tensors(const struct make_copies_job *job, PyObject *tensors,
			   PyObject *new_tensors)
{
	size_t i;

	for (i = 0; i < job->nr_rows; i++) {
		const struct sfr_py_found_tensor *found = &job->c->found[job->tensor_of_row[i]];
		PyObject *key = PyLong_FromVoidPtr(found->object); /* equals id() */
		PyObject *new_tensor = PyList_GetItem(tensors, (Py_ssize_t)i);
		int rc = -1;

		if (key != NULL &&
		    set_class_and_requires_grad(job->c->torch, found, new_tensor) == 0)
			rc = PyDict_SetItem(new_tensors, key, new_tensor);
		Py_XDECREF(key);
		if (rc != 0)
			return -1;
	}
	return 0;
}

/* Returns a list that has, for each storage, the first new tensor over its copy, or None. */
static PyObject *list_first_tensors(const struct make_copies_job *job, PyObject *tensors)
{
	PyObject *list = PyList_New((Py_ssize_t)job->c->nr_storages);
	size_t i;

	for (i = 0; list != NULL && i < job->c->nr_storages; i++) {
		PyObject *tensor = Py_None;

		if (job->first_row_plus_1[i] != 0)
			tensor = PyList_GetItem(tensors, (Py_ssize_t)job->first_row_plus_1[i] - 1);
		Py_XINCREF(tensor);
		if (tensor == NULL || PyList_SetItem(list, (Py_ssize_t)i, tensor) != 0)
			Py_CLEAR(list); /* SetItem has taken the reference */
	}
	return list;
}

/* Makes a list of Python tensors of the bridge's handles. The caller must not use the handles
 * afterwards, even after a failure. */
static PyObject *wrap_handles(const struct sfr_py_torch_types *torch, void *const *handles,
			      size_t nr)
{
	PyObject *capsules = PyList_New((Py_ssize_t)nr), *tensors = NULL;
	size_t i;

	for (i = 0; capsules != NULL && i < nr; i++) {
		PyObject *capsule = PyCapsule_New(handles[i], NULL, NULL);

		if (capsule == NULL || PyList_SetItem(capsules, (Py_ssize_t)i, capsule) != 0)
			Py_CLEAR(capsules); /* SetItem has taken the reference */
	}
	if (capsules == NULL) {
		sfr_py_bridge_release_handles(handles, nr);
		return NULL;
	}
	/* If this fails, it is unknown which handles torch has taken over, so the others leak. */
	tensors = PyObject_CallFunctionObjArgs(torch->item[SFR_PY_FROM_HANDLES], capsules, NULL);
	Py_DECREF(capsules);
	if (tensors != NULL && (!PyList_Check(tensors) || (size_t)PyList_Size(tensors) != nr)) {
		PyErr_SetString(PyExc_SystemError, "torch made something else of the handles");
		Py_CLEAR(tensors);
	}
	return tensors;
}

/* Makes a list of the tensors of all rows through the bridge, over memory of `owner`. */
static PyObject *make_tensors(const struct make_copies_job *job, PyObject *owner)
{
	const struct sfr_py_torch_types *torch = job->c->torch;
	void **handles = PyMem_Malloc((job->nr_rows + 1) * sizeof(*handles));
	struct sfr_keepalive *keepalive;
	PyObject *tensors = NULL;

	if (handles == NULL)
		return PyErr_NoMemory();
	keepalive = make_owner_keepalive(owner);
	if (keepalive == NULL)
		goto end;
	if (sfr_py_bridge_make_tensors(job->rows, job->nr_rows, keepalive, handles) == 0)
		tensors = wrap_handles(torch, handles, job->nr_rows);
	else
		PyErr_SetString(PyExc_RuntimeError, "torch could not make a tensor");
	sfr_keepalive_put(keepalive);
end:
	PyMem_Free(handles);
	return tensors;
}

/* copies(memory, offsets, with_bridge) -> (new_tensors, firsts, left_to_python). Called after
 * finish().
 *   memory          owns the copies and exports them as a buffer
 *   offsets         list, by number of the storage: offset of its copy in the buffer
 *   with_bridge     if false, all tensors are left to Python
 *   new_tensors     dict: id of an old tensor -> the new tensor
 *   firsts          list, by number of the storage: the first new tensor over its copy, or None
 *   left_to_python  list of (tensor, number of its storage): tensors that Python has to make */
PyObject *sfr_py_collector_make_copies(PyObject *self, PyObject *args)
{
	struct make_copies_job job = { .c = (struct sfr_py_collector *)self };
	PyObject *owner, *tensors = NULL, *new_tensors = NULL, *firsts = NULL, *result = NULL;
	PyObject *left_to_python = PyList_New(0);
	Py_buffer view = { 0 };
	int with_bridge;
	uint32_t i;

	if (left_to_python == NULL || !PyArg_ParseTuple(args, "OO!p:copies", &owner, &PyList_Type,
							&job.offsets, &with_bridge))
		goto end;
	if (!job.c->finished) {
		PyErr_SetString(PyExc_ValueError, "copies() comes after finish()");
		goto end;
	}
	with_bridge = with_bridge && sfr_py_bridge_can_make_tensors();
	if ((size_t)PyList_Size(job.offsets) != job.c->nr_storages) {
		PyErr_SetString(PyExc_ValueError, "there is an offset for each storage");
		goto end;
	}
	if (PyObject_GetBuffer(owner, &view, PyBUF_WRITABLE) < 0)
		goto end;
	/* The owner's memory does not move while the owner lives. */
	job.base = view.buf;
	job.len = view.len;
	PyBuffer_Release(&view);
	if (make_copies_job_init(&job) != 0)
		goto end;
	for (i = 0; i < job.c->nr_found; i++) {
		int rc = 0;

		if (job.c->found[i].row == NULL)
			continue; /* not plain: collect() has left the tensor to Python */
		if (with_bridge)
			rc = add_row(&job, i);
		if (rc == 0)
			rc = leave_to_python(left_to_python, &job.c->found[i]);
		if (rc < 0)
			goto end;
	}
	tensors = job.nr_rows != 0 ? make_tensors(&job, owner) : PyList_New(0);
	new_tensors = tensors != NULL ? PyDict_New() : NULL;
	if (new_tensors == NULL || add_new_tensors(&job, tensors, new_tensors) != 0)
		goto end;
	firsts = list_first_tensors(&job, tensors);
	if (firsts != NULL)
		result = Py_BuildValue("OOO", new_tensors, firsts, left_to_python);
end:
	Py_XDECREF(left_to_python);
	Py_XDECREF(tensors);
	Py_XDECREF(new_tensors);
	Py_XDECREF(firsts);
	make_copies_job_fini(&job);
	return result;
}
