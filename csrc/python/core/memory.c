/* _core.SnapshotMemory: the memory of a snapshot.
 *
 * The object exports the memory as a buffer. torch.frombuffer releases the buffer at once, although
 * its tensors use the memory, and keeps a reference to the object. So the view of the memory ends
 * when the object is freed, not when its buffer is released. */
#include "module.h"
#include "core/objects.h"
#include "sfr/snapshot.h"

#include <stddef.h>
#include <structmember.h>

struct sfr_py_snapshot_memory {
	PyObject_HEAD
	/* with a reference, and a view that keeps the memory leased */
	struct sfr_snapshot *snapshot;
	char *base;
	Py_ssize_t len;
	PyObject *weak_references;
};

static int memory_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
	struct sfr_py_snapshot_memory *self = (struct sfr_py_snapshot_memory *)object;
	const int readonly = 0;

	return PyBuffer_FillInfo(view, object, self->base, self->len, readonly, flags);
}

static void memory_dealloc(PyObject *object)
{
	struct sfr_snapshot *snapshot = ((struct sfr_py_snapshot_memory *)object)->snapshot;

	PyObject_ClearWeakRefs(object);
	if (snapshot) {
		Py_BEGIN_ALLOW_THREADS
		sfr_snapshot_remove_view(snapshot);
		sfr_snapshot_put(snapshot);
		Py_END_ALLOW_THREADS
	}
	sfr_py_free(object);
}

static Py_ssize_t memory_length(PyObject *object)
{
	return ((struct sfr_py_snapshot_memory *)object)->len;
}

static PyMemberDef memory_members[] = {
	{ "__weaklistoffset__", T_PYSSIZET,
	  offsetof(struct sfr_py_snapshot_memory, weak_references), READONLY, NULL },
	{ NULL, 0, 0, 0, NULL },
};

static PyType_Slot memory_slots[] = {
	{ Py_tp_members, memory_members },
	{ Py_tp_dealloc, memory_dealloc },
	{ Py_bf_getbuffer, memory_getbuffer },
	{ Py_sq_length, memory_length },
	{ Py_tp_doc, "The bytes of a snapshot, valid as long as this object lives" },
	{ 0, NULL },
};

SFR_PY_TYPE(memory_spec, "SnapshotMemory", struct sfr_py_snapshot_memory,
	    Py_TPFLAGS_DISALLOW_INSTANTIATION, memory_slots);

PyObject *sfr_py_snapshot_memory_new(struct sfr_py_state *state, struct sfr_snapshot *snapshot)
{
	struct sfr_py_snapshot_memory *self =
		(struct sfr_py_snapshot_memory *)sfr_py_alloc(state->memory_type);
	uint64_t len;

	if (!self) {
		sfr_snapshot_remove_view(snapshot);
		return NULL;
	}
	sfr_snapshot_memory(snapshot, &self->base, &len);
	self->len = (Py_ssize_t)len;
	sfr_snapshot_get(snapshot);
	self->snapshot = snapshot;
	return (PyObject *)self;
}

int sfr_py_add_memory(PyObject *module)
{
	return sfr_py_add_type(module, &memory_spec, &sfr_py_state(module)->memory_type);
}
