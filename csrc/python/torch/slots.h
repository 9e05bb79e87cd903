/* The C functions behind attributes of torch's types. slots.c implements it. */
#ifndef SFR_PY_SLOTS_H
#define SFR_PY_SLOTS_H

#include "module.h"

/* Returns the getter of the attribute `name`. Searches the type itself, but not its bases. Returns
 * NULL without an exception if the type has no such getter. */
const PyGetSetDef *sfr_py_getter_of(PyTypeObject *type, const char *name);
/* The same for the C function of the method `name`, which takes no arguments. */
PyCFunction sfr_py_method_of(PyTypeObject *type, const char *name);

#endif
