/* Converts the core's report of a save to a dict. */
#include "module.h"
#include "core/objects.h"

/* Returns the nanoseconds from the ticket's creation to the time `then_ns`; -1 if `then_ns` is 0,
 * which means that the event has not happened. */
static long long ns_after_creation(const struct sfr_report *report, uint64_t then_ns)
{
	return then_ns ? (long long)(then_ns - report->created_ns) : -1;
}

/* Returns a list of the report's sentences about fallbacks. */
static PyObject *fallbacks(const struct sfr_report *report)
{
	PyObject *list = PyList_New(0);

	for (size_t i = 0; list && i < SFR_NR_FALLBACKS; i++) {
		PyObject *text;

		if (!report->fallback[i][0])
			continue;
		text = sfr_py_decode_text(report->fallback[i]);
		if (!text || PyList_Append(list, text) < 0)
			Py_CLEAR(list);
		Py_XDECREF(text);
	}
	return list;
}

PyObject *sfr_py_report_as_dict(const struct sfr_report *r)
{
	static const char *const io_modes[] = { "", "direct", "buffered" }; /* "": not known */
	PyObject *sentences = fallbacks(r);

	if (!sentences)
		return NULL;
	return Py_BuildValue("{ss si ss sL ss sK sK sK sK sK sK sL sL sL ss sN sN}", "state",
			     sfr_state_name(r->state), "code", r->err.code, "phase",
			     sfr_phase_name(r->err.phase), "index", (long long)r->err.index, "note",
			     r->err.note, "nbytes", (unsigned long long)r->nbytes,
			     "captured_nbytes", (unsigned long long)r->captured_nbytes,
			     "deferred_nbytes", (unsigned long long)r->deferred_nbytes,
			     "peak_pool_bytes", (unsigned long long)r->peak_pool_bytes,
			     "slot_wait_ns", (unsigned long long)r->slot_wait_ns, "block_wait_ns",
			     (unsigned long long)r->block_wait_ns, "launched_after_ns",
			     ns_after_creation(r, r->launched_ns), "staged_after_ns",
			     ns_after_creation(r, r->staged_ns), "ended_after_ns",
			     ns_after_creation(r, r->ended_ns), "io_mode",
			     io_modes[r->io_mode <= SFR_IO_BUFFERED ? r->io_mode : 0], "over_slots",
			     PyBool_FromLong((long)r->over_slots), "fallbacks", sentences);
}
