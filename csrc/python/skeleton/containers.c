/* A snapshot's containers: walks into them, and rebuilds them around the copies.
 *
 * The training waits for this, so plain dicts, lists and (for walking) tuples are handled here, and
 * everything else in Python. copies.c finds and makes the tensors.
 *
 * Python code that is called from here may change a container while a loop visits its entries. So
 * each loop visits a copied list of them. */
#include "skeleton/skeleton.h"

/* ---- walking -------------------------------------------------------------------- */

/* Returns the values of a plain container as a list; NULL without an exception for any other
 * object. */
static PyObject *list_container_values(PyObject *node)
{
	if (PyDict_CheckExact(node))
		return PyDict_Values(node);
	if (PyList_CheckExact(node) || PyTuple_CheckExact(node))
		return PySequence_List(node);
	return NULL;
}

/* Adds a container's id to the set `seen`. Returns 1 if the id was in the set before, 0 if not, -1
 * with an exception set. */
static int mark_seen(PyObject *seen, PyObject *node)
{
	PyObject *key = PyLong_FromVoidPtr(node);
	int rc = key ? PySet_Contains(seen, key) : -1;

	if (rc == 0 && PySet_Add(seen, key) < 0)
		rc = -1;
	Py_XDECREF(key);
	return rc;
}

/* Gives the plain tensors in `nodes` to the collector, walks into plain containers, and appends all
 * other nodes to the list `out`, except those that contain no tensor. `seen` is the set of ids of
 * the containers that were met. */
static int walk_nodes(PyObject *collector, PyObject *nodes, PyObject *seen, PyObject *out);

/* Walks into a node that is a plain container. Appends any other node to `out`. */
static int walk_node(PyObject *collector, PyObject *node, PyObject *seen, PyObject *out)
{
	PyObject *values = list_container_values(node);
	int rc;

	if (!values)
		return PyErr_Occurred() ? -1 : PyList_Append(out, node);
	rc = mark_seen(seen, node);
	if (rc == 0) /* met for the first time */
		rc = walk_nodes(collector, values, seen, out);
	Py_DECREF(values);
	return rc < 0 ? -1 : 0;
}

static int walk_nodes(PyObject *collector, PyObject *nodes, PyObject *seen, PyObject *out)
{
	PyObject *others; /* the nodes that are neither plain tensors nor without tensors */
	int rc = 0;

	if (Py_EnterRecursiveCall(" while a tree is walked") != 0)
		return -1;
	others = sfr_py_collector_collect_tensors(collector, nodes);
	if (!others)
		rc = -1;
	for (Py_ssize_t i = 0; rc == 0 && i < PyList_Size(others); i++)
		rc = walk_node(collector, PyList_GetItem(others, i), seen, out);
	Py_XDECREF(others);
	Py_LeaveRecursiveCall();
	return rc;
}

PyObject *sfr_py_collector_walk_containers(PyObject *self, PyObject *args)
{
	PyObject *nodes, *seen, *out;

	if (!PyArg_ParseTuple(args, "OO:walk", &nodes, &seen))
		return NULL;
	out = PyList_New(0);
	if (out && walk_nodes(self, nodes, seen, out) < 0)
		Py_CLEAR(out);
	return out;
}

/* ---- rebuilding -------------------------------------------------------------------- */

/* The arguments of one call from Python, borrowed. */
struct job {
	PyObject *memo;          /* dict: id of a node -> its replacement */
	PyObject *rebuild_other; /* function: node -> its replacement, for nodes not rebuilt here */
};

/* Returns a new reference to the replacement of a node. */
static PyObject *rebuild_node(const struct job *job, PyObject *node);

/* fill_dict and fill_list fill the new container `made` with the replacements of the entries of the
 * old container, `node`. */
static int fill_dict(const struct job *job, PyObject *made, PyObject *node)
{
	PyObject *items = PyDict_Items(node);
	Py_ssize_t nr = items ? PyList_Size(items) : 0;
	int rc = items ? 0 : -1;

	for (Py_ssize_t i = 0; i < nr && rc == 0; i++) {
		PyObject *item = PyList_GetItem(items, i);
		PyObject *value = rebuild_node(job, PyTuple_GetItem(item, 1));

		rc = value ? PyDict_SetItem(made, PyTuple_GetItem(item, 0), value) : -1;
		Py_XDECREF(value);
	}
	Py_XDECREF(items);
	return rc;
}

static int fill_list(const struct job *job, PyObject *made, PyObject *node)
{
	PyObject *items = PySequence_List(node);
	Py_ssize_t nr = items ? PyList_Size(items) : 0;
	int rc = items ? 0 : -1;

	for (Py_ssize_t i = 0; i < nr && rc == 0; i++) {
		PyObject *value = rebuild_node(job, PyList_GetItem(items, i));

		rc = value ? PyList_Append(made, value) : -1;
		Py_XDECREF(value);
	}
	Py_XDECREF(items);
	return rc;
}

/* Returns a new dict or list with the replacements of the entries of `node`. Stores the new
 * container in the memo, at `key`, before it is filled, because a container may contain itself. */
static PyObject *rebuild_container(const struct job *job, PyObject *node, PyObject *key)
{
	bool is_dict = PyDict_CheckExact(node);
	PyObject *made = is_dict ? PyDict_New() : PyList_New(0);
	int rc;

	if (!made || PyDict_SetItem(job->memo, key, made) < 0 ||
	    Py_EnterRecursiveCall(" while a tree is made again") != 0) {
		Py_XDECREF(made);
		return NULL;
	}
	rc = is_dict ? fill_dict(job, made, node) : fill_list(job, made, node);
	if (rc < 0)
		Py_CLEAR(made);
	Py_LeaveRecursiveCall();
	return made;
}

static PyObject *rebuild_node(const struct job *job, PyObject *node)
{
	PyObject *key, *made;

	if (node == Py_None || PyUnicode_CheckExact(node) || PyLong_CheckExact(node) ||
	    PyFloat_CheckExact(node) || PyBool_Check(node))
		return Py_NewRef(node); /* immutable, without tensors */
	key = PyLong_FromVoidPtr(node);
	if (!key)
		return NULL;
	made = PyDict_GetItemWithError(job->memo, key); /* borrowed */
	if (made)
		Py_INCREF(made);
	else if (PyErr_Occurred())
		made = NULL;
	else if (PyDict_CheckExact(node) || PyList_CheckExact(node))
		made = rebuild_container(job, node, key);
	else
		made = PyObject_CallFunctionObjArgs(job->rebuild_other, node, NULL);
	Py_DECREF(key);
	return made;
}

/* The Python function rebuilt(node, memo, other) -> the node's replacement. */
static PyObject *rebuild(PyObject *module, PyObject *args)
{
	struct job job;
	PyObject *node;

	if (!PyArg_ParseTuple(args, "OO!O:rebuilt", &node, &PyDict_Type, &job.memo,
			      &job.rebuild_other))
		return NULL;
	return rebuild_node(&job, node);
}

static PyMethodDef functions[] = {
	{ "rebuilt", rebuild, METH_VARARGS,
	  "rebuilt(node, memo, other) -> the replacement of a node: memo[id(node)], or a new "
	  "plain dict or list, or else other(node)." },
	{ NULL, NULL, 0, NULL },
};

int sfr_py_add_containers(PyObject *module)
{
	return PyModule_AddFunctions(module, functions);
}
