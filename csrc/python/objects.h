/* What the binding's own files share: the objects' layouts. */
#ifndef SFR_PY_OBJECTS_H
#define SFR_PY_OBJECTS_H

#include "module.h"

struct sfr_py_engine {
	PyObject_HEAD
	struct sfr_engine *engine;
};

#endif
