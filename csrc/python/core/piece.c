/* _core.Piece: a piece (sfr/stream.h) of a save that is sent to an object store.
 *
 * A Piece exports its bytes as a buffer to the client of the store. Each buffer has a reference to
 * the Piece. When the last reference is dropped, the save gets the memory back. */
#include "module.h"
#include "core/objects.h"
#include "sfr/stream.h"

#include <string.h>

struct sfr_py_piece {
	PyObject_HEAD
	struct sfr_ticket *ticket; /* a reference */
	struct sfr_file_piece piece;
};

static int piece_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
	struct sfr_py_piece *self = (struct sfr_py_piece *)object;
	const int readonly = 1;

	return PyBuffer_FillInfo(view, object, (void *)(uintptr_t)self->piece.mem,
				 (Py_ssize_t)self->piece.len, readonly, flags);
}

static void piece_dealloc(PyObject *object)
{
	struct sfr_py_piece *self = (struct sfr_py_piece *)object;

	if (self->ticket) { /* NULL: no piece was received */
		Py_BEGIN_ALLOW_THREADS
		sfr_stream_give_back(self->ticket, &self->piece);
		sfr_ticket_put(self->ticket);
		Py_END_ALLOW_THREADS
	}
	sfr_py_free(object);
}

static Py_ssize_t piece_length(PyObject *object)
{
	return (Py_ssize_t)((struct sfr_py_piece *)object)->piece.len;
}

static PyObject *piece_offset(PyObject *object, void *closure)
{
	return PyLong_FromUnsignedLongLong(((struct sfr_py_piece *)object)->piece.off);
}

static PyObject *piece_copy_to_bytes(PyObject *object, PyObject *args)
{
	const struct sfr_file_piece *piece = &((struct sfr_py_piece *)object)->piece;
	Py_ssize_t from, to;
	PyObject *copy;

	if (!PyArg_ParseTuple(args, "nn:copy", &from, &to))
		return NULL;
	if (from < 0 || to < from || (size_t)to > piece->len) {
		PyErr_SetString(PyExc_ValueError, "no such bytes");
		return NULL;
	}
	copy = PyBytes_FromStringAndSize(NULL, to - from);
	if (copy && to > from) { /* the last piece is empty and has no memory */
		char *bytes = PyBytes_AsString(copy);

		Py_BEGIN_ALLOW_THREADS
		memcpy(bytes, piece->mem + from, (size_t)(to - from));
		Py_END_ALLOW_THREADS
	}
	return copy;
}

static PyMethodDef methods[] = {
	{ "copy", piece_copy_to_bytes, METH_VARARGS,
	  "copy(from, to) -> bytes: a copy of the bytes [from, to) of the piece." },
	{ NULL, NULL, 0, NULL },
};

static PyGetSetDef getset[] = {
	{ "offset", piece_offset, NULL, "the offset of the piece's first byte in the file", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot slots[] = {
	{ Py_tp_dealloc, piece_dealloc },
	{ Py_tp_getset, getset },
	{ Py_tp_methods, methods },
	{ Py_bf_getbuffer, piece_getbuffer },
	{ Py_sq_length, piece_length },
	{ Py_tp_doc,
	  "Bytes of a save, made by Ticket.next_piece. The save gets the memory back when this object "
	  "is freed." },
	{ 0, NULL },
};

SFR_PY_TYPE(spec, "Piece", struct sfr_py_piece, Py_TPFLAGS_DISALLOW_INSTANTIATION, slots);

PyObject *sfr_py_next_piece(struct sfr_py_state *state, struct sfr_ticket *ticket,
			    PyObject *timeout)
{
	struct sfr_py_piece *self = (struct sfr_py_piece *)sfr_py_alloc(state->piece_type);
	struct sfr_py_wait_state w;

	if (!self)
		return NULL;
	w = sfr_py_wait_state(timeout);
	while (sfr_py_begin_next_slice(&w))
		w.rc = sfr_py_unlocked(sfr_stream_take_next_piece(ticket, w.slice_ns,
								  &self->piece));
	if (w.rc == 0) {
		sfr_ticket_get(ticket);
		self->ticket = ticket;
		return (PyObject *)self;
	}
	Py_DECREF(self);
	if (w.rc == SFR_EAGAIN)
		Py_RETURN_NONE;
	return sfr_py_raise(state, w.rc);
}

int sfr_py_add_piece(PyObject *module)
{
	return sfr_py_add_type(module, &spec, &sfr_py_state(module)->piece_type);
}
