/* Walks param_groups and state to find what an optimizer owns.
 *
 * The walk happens inside saves and steps, over thousands of tensors. So it avoids the interpreter
 * and reads containers through the C API. It takes a strong reference to everything it finds before
 * anything can run Python code. */
#include "observer/observer.h"

#include <string.h>

/* No optimizer of torch has deeper state. The limit also ends cycles. */
#define WALK_DEPTH 8

static int refs_push(struct sfr_py_refs *refs, PyObject *object)
{
	if (refs->nr == refs->cap) {
		size_t cap = refs->cap ? refs->cap * 2 : 64;
		PyObject **items = PyMem_Realloc(refs->items, cap * sizeof(*items));

		if (!items)
			return sfr_py_set_memory_error();
		refs->items = items;
		refs->cap = cap;
	}
	refs->items[refs->nr++] = Py_NewRef(object);
	return 0;
}

static void refs_fini(struct sfr_py_refs *refs)
{
	size_t i;

	for (i = 0; i < refs->nr; i++)
		Py_DECREF(refs->items[i]);
	PyMem_Free(refs->items);
	memset(refs, 0, sizeof(*refs));
}

/* Returns the list of group `i`'s parameters, borrowed. Returns NULL, perhaps with an exception
 * set, if the group is not built as torch builds it. */
static PyObject *group_params(PyObject *groups, Py_ssize_t i)
{
	PyObject *group = PyList_GetItem(groups, i), *params;

	if (!group || !PyDict_Check(group))
		return NULL;
	params = PyDict_GetItemWithError(group, sfr_py_torch.str_params);
	return params && PyList_Check(params) ? params : NULL;
}

static int collect_state_tensors(PyObject *value, struct sfr_py_refs *found, int depth);

/* Walks the attributes of a subclass of Tensor. Such a tensor may wrap other tensors, as a
 * quantized optimizer state does. */
static int collect_wrapped_tensors(PyObject *tensor, struct sfr_py_refs *found, int depth)
{
	PyObject *attributes = PyObject_GenericGetDict(tensor, NULL);
	int ret;

	if (!attributes) { /* the type gives its instances no __dict__ */
		PyErr_Clear();
		return 0;
	}
	ret = collect_state_tensors(attributes, found, depth);
	Py_DECREF(attributes);
	return ret;
}

/* Appends every tensor with memory in `value` to `found`. `value` is a parameter's state or an
 * object in it, inside `depth` containers. Skips containers other than dict, list and tuple. */
static int collect_state_tensors(PyObject *value, struct sfr_py_refs *found, int depth)
{
	PyObject *key, *item;
	Py_ssize_t i, pos = 0;

	if (sfr_py_has_memory(value))
		return refs_push(found, value);
	if (depth == WALK_DEPTH)
		return 0;
	if (PyType_IsSubtype(Py_TYPE(value), sfr_py_torch.tensor))
		return collect_wrapped_tensors(value, found, depth + 1);
	if (PyDict_Check(value)) {
		while (PyDict_Next(value, &pos, &key, &item)) {
			if (collect_state_tensors(item, found, depth + 1))
				return -1;
		}
	} else if (PyList_Check(value)) {
		for (i = 0; i < PyList_Size(value); i++) {
			if (collect_state_tensors(PyList_GetItem(value, i), found, depth + 1))
				return -1;
		}
	} else if (PyTuple_Check(value)) {
		for (i = 0; i < PyTuple_Size(value); i++) {
			if (collect_state_tensors(PyTuple_GetItem(value, i), found, depth + 1))
				return -1;
		}
	}
	return 0;
}

/* Appends every parameter of the groups to `params`, in order. */
static int collect_group_parameters(PyObject *groups, struct sfr_py_refs *params)
{
	Py_ssize_t i, j;

	for (i = 0; i < PyList_Size(groups); i++) {
		PyObject *list = group_params(groups, i);

		for (j = 0; list && j < PyList_Size(list); j++) {
			if (refs_push(params, PyList_GetItem(list, j)))
				return -1;
		}
	}
	PyErr_Clear(); /* groups that are not built as torch builds them are left out */
	return 0;
}

int sfr_py_walk(PyObject *groups, PyObject *state, struct sfr_py_walk *walk)
{
	struct sfr_py_refs params = { 0 };
	struct sfr_py_map trained = { 0 }; /* trained parameter -> whether it has state */
	PyObject *key, *value;
	Py_ssize_t pos = 0;
	size_t i;
	int ret = -1;

	memset(walk, 0, sizeof(*walk));
	if (!PyList_Check(groups) || !PyDict_Check(state))
		return 0; /* an unusual optimizer: it has no candidates */
	walk->stateless = PyDict_Size(state) == 0;
	if (collect_group_parameters(groups, &params) || sfr_py_map_reserve(&trained, params.nr))
		goto out;
	/* Trained parameters are those that require a gradient. */
	for (i = 0; i < params.nr; i++) {
		PyObject *param = params.items[i];
		int is_trained = 0;

		if (sfr_py_has_memory(param))
			is_trained = sfr_py_read_flag(&sfr_py_torch.requires_grad, param) > 0;
		PyErr_Clear(); /* a tensor that cannot be read counts as not trained */
		if (!is_trained || sfr_py_map_find(&trained, (uintptr_t)param))
			continue;
		if (sfr_py_map_add(&trained, (uintptr_t)param, 0)) /* 0: no state found yet */
			goto out;
	}
	while (!walk->stateless && PyDict_Next(state, &pos, &key, &value)) {
		uint64_t *has_state = sfr_py_map_find(&trained, (uintptr_t)key);

		if (!has_state)
			continue;
		*has_state = 1;
		if (refs_push(&walk->found, key) || collect_state_tensors(value, &walk->found, 0))
			goto out;
	}
	/* A parameter without state is a candidate if it is trained and no parameter has state. */
	for (i = 0; i < params.nr; i++) {
		uint64_t *has_state = sfr_py_map_find(&trained, (uintptr_t)params.items[i]);
		int is_trained = has_state != NULL;
		struct sfr_py_refs *list = &walk->others;

		if (is_trained && *has_state)
			continue; /* in walk->found already */
		if (is_trained && walk->stateless)
			list = &walk->found;
		if (refs_push(list, params.items[i]))
			goto out;
	}
	ret = 0;
out:
	refs_fini(&params);
	sfr_py_map_fini(&trained);
	return ret;
}

void sfr_py_walk_fini(struct sfr_py_walk *walk)
{
	refs_fini(&walk->found);
	refs_fini(&walk->others);
}

uint64_t sfr_py_optimizer_fingerprint(PyObject *groups, PyObject *state)
{
	uint64_t params = 0;
	Py_ssize_t i;

	if (!PyList_Check(groups) || !PyDict_Check(state))
		return 0;
	for (i = 0; i < PyList_Size(groups); i++) {
		PyObject *list = group_params(groups, i);

		/* The group's index is a weight, so a move between groups changes the sum. */
		if (list)
			params += (uint64_t)PyList_Size(list) * (uint64_t)(2 * i + 1);
	}
	PyErr_Clear();
	/* The lowest bit is set, because 0 means that the observer has no table yet. */
	return (params << 24) ^ ((uint64_t)PyDict_Size(state) << 1) ^ 1;
}
