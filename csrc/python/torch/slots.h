/* The C functions behind attributes of torch's types. slots.c implements it. */
#ifndef SFR_PY_SLOTS_H
#define SFR_PY_SLOTS_H

#include "module.h"

/* Return the getter of an attribute, and the C function of a method without arguments. Only the
 * type itself is searched, not its bases. NULL if it has no such C function; sets no exception. */
const PyGetSetDef *sfr_py_getter_of(PyTypeObject *type, const char *name);
PyCFunction sfr_py_method_of(PyTypeObject *type, const char *name);

#endif
