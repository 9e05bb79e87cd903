/* Object layouts shared by the files of the binding. */
#ifndef SFR_PY_OBJECTS_H
#define SFR_PY_OBJECTS_H

#include "module.h"
#include "sfr/engine.h"
#include "sfr/save.h"

struct sfr_py_engine {
	PyObject_HEAD
	struct sfr_engine *engine;
};

struct sfr_py_parts {
	PyObject_HEAD
	struct sfr_parts *parts;
};

struct sfr_py_snapshot {
	PyObject_HEAD
	struct sfr_snapshot *snapshot;
	uint32_t nr_sources;
};

/* memory.c: makes an object that takes over the caller's view of a snapshot. NULL with an exception
 * set. */
PyObject *sfr_py_memory_new(struct sfr_py_state *state, struct sfr_snapshot *snapshot);

/* piece.c: waits for the next piece of a stream. None when the timeout passed, NULL with an
 * exception set. */
PyObject *sfr_py_next_piece(struct sfr_py_state *state, struct sfr_ticket *ticket,
			    PyObject *timeout);

#define SFR_PY_MAX_STREAMS 64

/* Reads a tuple of (device, handle of its current stream). Returns their number, or -1. */
int sfr_py_read_streams(PyObject *tuple, struct sfr_stream streams[SFR_PY_MAX_STREAMS]);

/* Makes a dict of a report; NULL with an exception set. */
PyObject *sfr_py_report_dict(const struct sfr_report *report);

#endif
