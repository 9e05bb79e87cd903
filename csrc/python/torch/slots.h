/* The C functions behind the attributes of torch's types. See slots.c. */
#ifndef SFR_PY_SLOTS_H
#define SFR_PY_SLOTS_H

#include "module.h"

/* What a type's own table has under `name`; NULL where it is another thing, or none. */
const PyGetSetDef *sfr_py_getter_of(PyTypeObject *type, const char *name);
PyCFunction sfr_py_method_of(PyTypeObject *type, const char *name); /* without arguments */

#endif
