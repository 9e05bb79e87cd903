/* The public headers of the stillframe core, and the conventions that hold in all of them. A file
 * includes the header it needs, not this one.
 *
 * A save writes ranges of memory to one file while the program that owns the memory goes on. The
 * core is C11, knows neither Python nor torch, and never prints, exits or aborts. Data flows one
 * way:
 *
 *     plan (layout.c) -> stage (stage/host.c) -> write (write.c) -> commit (file.c, log.c)
 *
 * The state of a save is in one place, its ticket (ticket.c). Checking a file, restoring it,
 * loading to a device and tracing have headers in their own folders: check/check.h,
 * restore/restore.h, offload/offload.h, trace/trace.h.
 *
 * Conventions
 *   - A function returns 0 or a negative code: -errno from the operating system,
 *     SFR_E* from the core itself (err.c).
 *   - sfr_x is public, sfr__x crosses files inside the core, static is local. The caller of an
 *     x_locked holds the mutex of the object.
 *   - `_ns` are nanoseconds of CLOCK_MONOTONIC; `len`, `off`, `nbytes` are bytes;
 *     `nr_x` counts.
 *   - A call that may wait takes `slice_ns`: it waits at most that long and then
 *     returns SFR_EAGAIN; a further call resumes where this one stopped. Python's
 *     binding (csrc/python) answers signals between two such calls. SFR_FOREVER
 *     waits without bound.
 *   - After fork() every object made before belongs to the parent: in the child, a
 *     call on such an object returns SFR_EFORK and touches nothing. */
#ifndef SFR_H
#define SFR_H

#include "sfr/arrivals.h"
#include "sfr/cpus.h"
#include "sfr/crc.h"
#include "sfr/engine.h"
#include "sfr/err.h"
#include "sfr/fork.h"
#include "sfr/probe.h"
#include "sfr/limits.h"
#include "sfr/log.h"
#include "sfr/notice.h"
#include "sfr/parts.h"
#include "sfr/target.h"
#include "sfr/save.h"
#include "sfr/snapshot.h"
#include "sfr/source.h"
#include "sfr/state.h"
#include "sfr/stream.h"
#include "sfr/steps.h"

#endif
