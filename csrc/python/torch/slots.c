/* The C functions behind attributes of torch's types.
 *
 * A type made in C has tables of its getters and methods. A direct call of such a function takes 15
 * to 30 ns, an attribute look-up by the interpreter 50 to 100. */
#include "torch/slots.h"

#include <string.h>

const PyGetSetDef *sfr_py_getter_of(PyTypeObject *type, const char *name)
{
	const PyGetSetDef *def = PyType_GetSlot(type, Py_tp_getset);

	while (def && def->name && strcmp(def->name, name) != 0)
		def++;
	PyErr_Clear(); /* a type without that slot has no table */
	return def && def->name ? def : NULL;
}

PyCFunction sfr_py_method_of(PyTypeObject *type, const char *name)
{
	const PyMethodDef *def = PyType_GetSlot(type, Py_tp_methods);

	while (def && def->ml_name && strcmp(def->ml_name, name) != 0)
		def++;
	PyErr_Clear(); /* a type without that slot has no table */
	return def && def->ml_name && def->ml_flags == METH_NOARGS ? def->ml_meth : NULL;
}
