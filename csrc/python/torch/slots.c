/* The C functions behind the attributes of torch's types.
 *
 * A type made in C publishes its getters and methods in its slots. A call of one of them is 15 to 30 ns,
 * where asking the interpreter for the attribute is 50 to 100, and each tensor of a save is asked a dozen
 * questions.
 */
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
	PyErr_Clear(); /* as above */
	return def && def->ml_name && def->ml_flags == METH_NOARGS ? def->ml_meth : NULL;
}
