/* _core.Numbers: a map from the addresses of StorageImpls to the numbers of a save's storages.
 *
 * The collector of a save's storages fills the map. Observers and the gate use it to find out
 * whether a storage is in the save. A Python dict would need two int objects for each storage. */
#include "torch/numbers.h"

/* The type Numbers, once for the process, because torch supports only one interpreter. */
static PyTypeObject *numbers_type;

struct sfr_py_storage_numbers *sfr_py_storage_numbers_new(void)
{
	return (struct sfr_py_storage_numbers *)sfr_py_alloc(numbers_type); /* zeroed */
}

struct sfr_py_storage_numbers *sfr_py_cast_to_storage_numbers(PyObject *object)
{
	if (Py_TYPE(object) == numbers_type)
		return (struct sfr_py_storage_numbers *)object;
	PyErr_SetString(PyExc_TypeError, "a Numbers object is needed");
	return NULL;
}

/* Numbers(addresses): the storage with the StorageImpl addresses[i] has the number i. */
static PyObject *numbers_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	struct sfr_py_storage_numbers *self = NULL;
	PyObject *addresses;

	if (kwargs != NULL || !PyArg_ParseTuple(args, "O!:Numbers", &PyList_Type, &addresses)) {
		if (!PyErr_Occurred())
			PyErr_SetString(PyExc_TypeError, "Numbers() takes a list");
		return NULL;
	}
	self = sfr_py_storage_numbers_new();
	for (Py_ssize_t i = 0; self != NULL && i < PyList_Size(addresses); i++) {
		uint64_t address = PyLong_AsUnsignedLongLong(PyList_GetItem(addresses, i));

		if (PyErr_Occurred() || sfr_py_map_add(&self->map, address, (uint64_t)i) != 0)
			Py_CLEAR(self);
	}
	return (PyObject *)self;
}

static void numbers_dealloc(PyObject *self)
{
	sfr_py_map_fini(&((struct sfr_py_storage_numbers *)self)->map);
	sfr_py_free(self);
}

static PyObject *numbers_get(PyObject *self, PyObject *address)
{
	uint64_t key = PyLong_AsUnsignedLongLong(address);
	const uint64_t *number;

	if (PyErr_Occurred())
		return NULL;
	number = sfr_py_map_find(&((struct sfr_py_storage_numbers *)self)->map, key);
	if (number == NULL)
		Py_RETURN_NONE;
	return PyLong_FromUnsignedLongLong(*number);
}

static Py_ssize_t numbers_len(PyObject *self)
{
	return (Py_ssize_t)((struct sfr_py_storage_numbers *)self)->map.used;
}

static PyMethodDef numbers_methods[] = {
	{ "get", numbers_get, METH_O,
	  "get(address) -> the number of the storage at this address, or None if it has none." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot numbers_slots[] = {
	{ Py_tp_doc,
	  (void *)"Numbers(addresses): the numbers of storages, by the addresses of their StorageImpls" },
	{ Py_tp_new, (void *)numbers_new },
	{ Py_tp_dealloc, (void *)numbers_dealloc },
	{ Py_tp_methods, numbers_methods },
	{ Py_mp_length, (void *)numbers_len },
	{ 0, NULL },
};

SFR_PY_TYPE(numbers_spec, "Numbers", struct sfr_py_storage_numbers, 0, numbers_slots);

int sfr_py_add_numbers(PyObject *module)
{
	return sfr_py_add_type(module, &numbers_spec, &numbers_type);
}
