/* _core.Slot: a slot of an engine, for a save whose bytes the engine does not write
 * (sfr/engine.h). */
#include "module.h"
#include "core/objects.h"

struct sfr_py_slot {
	PyObject_HEAD
	struct sfr_slot *slot;
};

static PyObject *slot_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = { "engine", "flags", NULL };
	struct sfr_py_state *state = PyType_GetModuleState(type);
	struct sfr_py_wait_state w = sfr_py_wait_state(NULL);
	struct sfr_py_engine *engine;
	struct sfr_py_slot *self;
	unsigned int flags;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!I:Slot", names, state->engine_type,
					 &engine, &flags))
		return NULL;
	/* allocated before a slot is taken, so that a failure here cannot lose the slot */
	self = (struct sfr_py_slot *)sfr_py_alloc(type);
	if (!self)
		return NULL;
	while (sfr_py_begin_next_slice(&w))
		w.rc = sfr_py_unlocked(sfr_slot_take(engine->engine, flags, w.slice_ns,
						     &self->slot));
	if (w.rc == 0)
		return (PyObject *)self;
	Py_DECREF(self);
	return sfr_py_raise(state, w.rc);
}

static struct sfr_slot *slot_of(PyObject *object)
{
	return ((struct sfr_py_slot *)object)->slot;
}

static void slot_dealloc(PyObject *object)
{
	/* If this drops the engine's last reference, the call waits for its threads to end. */
	sfr_py_unlocked_void(sfr_slot_free(slot_of(object)));
	sfr_py_free(object);
}

static PyObject *slot_mark_launched(PyObject *object, PyObject *unused)
{
	sfr_py_unlocked_void(sfr_slot_mark_launched(slot_of(object)));
	Py_RETURN_NONE;
}

static PyObject *slot_give_back(PyObject *object, PyObject *unused)
{
	sfr_py_unlocked_void(sfr_slot_give_back(slot_of(object)));
	Py_RETURN_NONE;
}

static PyObject *slot_is_over(PyObject *object, PyObject *unused)
{
	return PyBool_FromLong(sfr_py_unlocked(sfr_slot_is_given_back(slot_of(object))));
}

static PyMethodDef methods[] = {
	{ "launched", slot_mark_launched, METH_NOARGS,
	  "launched(): records that the call which took the slot is over. Until then close() of the "
	  "engine on this thread does not wait for the slot." },
	{ "give_back", slot_give_back, METH_NOARGS,
	  "give_back(): gives the slot back, because the save has ended." },
	{ "is_over", slot_is_over, METH_NOARGS,
	  "is_over() -> bool: whether the slot was given back." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot slots[] = {
	{ Py_tp_new, slot_new },
	{ Py_tp_dealloc, slot_dealloc },
	{ Py_tp_methods, methods },
	{ Py_tp_doc,
	  "Slot(engine, flags): takes a slot of the engine. Waits for it unless `flags` has "
	  "SAVE_NO_WAIT or SAVE_NESTED." },
	{ 0, NULL },
};

SFR_PY_TYPE(spec, "Slot", struct sfr_py_slot, 0, slots);

int sfr_py_add_slot(PyObject *module)
{
	return sfr_py_add_type(module, &spec, &sfr_py_state(module)->slot_type);
}
