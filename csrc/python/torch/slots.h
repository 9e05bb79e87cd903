/* The C functions behind attributes of torch's types. slots.c implements it. */
#ifndef SFR_PY_SLOTS_H
#define SFR_PY_SLOTS_H

#include "module.h"

/* Return the getter of the attribute `name`, or the C function of the method `name`, which takes no
 * arguments. They search the type itself, but not its bases. NULL without an exception: the type
 * has no such C function. */
const PyGetSetDef *sfr_py_getter_of(PyTypeObject *type, const char *name);
PyCFunction sfr_py_method_of(PyTypeObject *type, const char *name);

#endif
