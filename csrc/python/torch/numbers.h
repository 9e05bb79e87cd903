/* _core.Numbers: the numbers of a save's storages. numbers.c implements it. */
#ifndef SFR_PY_TORCH_NUMBERS_H
#define SFR_PY_TORCH_NUMBERS_H

#include "torch/map.h"

struct sfr_py_storage_numbers {
	PyObject_HEAD
	struct sfr_py_map map; /* address of a StorageImpl -> number of the storage, from 0 on */
};

/* Makes an empty object. */
struct sfr_py_storage_numbers *sfr_py_storage_numbers_new(void);
/* Returns the object itself, borrowed, if it is a Numbers; else NULL with a TypeError. */
struct sfr_py_storage_numbers *sfr_py_cast_to_storage_numbers(PyObject *object);
int sfr_py_add_numbers(PyObject *module);

#endif
