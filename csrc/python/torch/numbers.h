/* _core.Numbers. See numbers.c. */
#ifndef SFR_PY_TORCH_NUMBERS_H
#define SFR_PY_TORCH_NUMBERS_H

#include "torch/map.h"

struct sfr_py_numbers {
	PyObject_HEAD
	struct sfr_py_map map; /* address of a StorageImpl -> number, from 0 on */
};

/* A new object without storages, or NULL with an exception set. */
struct sfr_py_numbers *sfr_py_numbers_make(void);
/* The object itself, borrowed; NULL with an exception set where it is something else. */
struct sfr_py_numbers *sfr_py_numbers_from(PyObject *object);
int sfr_py_add_numbers(PyObject *module);

#endif
