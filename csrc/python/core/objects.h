/* Objects of the binding that several files use. Each has a reference to an object of the core. The
 * methods release the interpreter lock where the core may wait. */
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

/* memory.c: makes a SnapshotMemory. Takes over the caller's view of the snapshot, even if it
 * fails. */
PyObject *sfr_py_snapshot_memory_new(struct sfr_py_state *state, struct sfr_snapshot *snapshot);

/* piece.c: waits for the next piece of a save with SFR_SAVE_STREAM (sfr/stream.h), at most
 * `timeout` seconds (None or NULL: without limit). Returns a Piece, or None after the timeout. */
PyObject *sfr_py_next_piece(struct sfr_py_state *state, struct sfr_ticket *ticket,
			    PyObject *timeout);

#define SFR_PY_MAX_STREAMS 64 /* most devices in one call */

/* streams.c: reads a tuple of (device, handle of its current stream) into `streams`. Returns their
 * number, or -1 with an exception set. */
int sfr_py_read_streams(PyObject *tuple, struct sfr_device_stream streams[SFR_PY_MAX_STREAMS]);

/* report.c: makes a dict of a save's report. */
PyObject *sfr_py_report_as_dict(const struct sfr_report *report);

#endif
