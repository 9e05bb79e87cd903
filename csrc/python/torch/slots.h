/* The C functions behind attributes of torch's types. slots.c implements it. */
#ifndef SFR_PY_SLOTS_H
#define SFR_PY_SLOTS_H

#include "module.h"

/* Return the getter of the attribute `name`, and the C function of the method `name` without
 * arguments. They search only the type itself, not its bases. They return NULL if the type has no
 * such C function, without an exception. */
const PyGetSetDef *sfr_py_getter_of(PyTypeObject *type, const char *name);
PyCFunction sfr_py_method_of(PyTypeObject *type, const char *name);

#endif
