/* Traces. A trace is a file with a timeline: what the threads of saves did, and when.
 *
 * A trace point is one line at the start of a scope. It records a span that ends with the scope:
 *
 *     SFR__TRACE(SFR_TRACE_WRITE, 0, len);
 *
 * While no trace is written, a trace point costs one relaxed load. Otherwise it costs two clock
 * readings and a store into the thread's own ring, without a lock or system call (ring.c). A full
 * ring drops events and counts them. Another thread writes the rings to the file (session.c). */
#ifndef SFR_TRACE_H
#define SFR_TRACE_H

#include <stdatomic.h>

#include "sfr/state.h"
#include "base/base.h"

/* The kinds of spans: X(constant, name in the timeline, category, unit: what `number` counts). */
#define SFR_TRACE_LIST(X)                                                                          \
	X(SFR_TRACE_SAVE, "save", "save", "bytes")         /* from the call to the save's end */   \
	X(SFR_TRACE_STEP, "step", "train", "number")       /* from one step's end to the next */   \
	X(SFR_TRACE_OPTIMIZER, "optimizer", "train", NULL) /* one step, the gate included */       \
	X(SFR_TRACE_CALL, "async_save", "call", "tensors") /* the whole call */                    \
	X(SFR_TRACE_PLAN, "plan", "call", "tensors")       /* path, pickle, owners, layout */      \
	X(SFR_TRACE_ADMIT, "admit", "call", NULL)          /* the wait for a slot */               \
	X(SFR_TRACE_CAPTURE, "capture", "call", "bytes")   /* what is copied in the call */        \
	X(SFR_TRACE_SAMPLES, "samples", "call", NULL)      /* taking samples */                    \
	X(SFR_TRACE_GATE, "gate", "gate", NULL)            /* a step waits for the copies */       \
	X(SFR_TRACE_POOL_WAIT, "wait for block", "copy", NULL)                                     \
	X(SFR_TRACE_COPY, "copy", "copy", "bytes")            /* one block is filled */            \
	X(SFR_TRACE_STORAGE, "copy storage", "copy", "bytes") /* if at least 64 KiB */             \
	X(SFR_TRACE_OPEN, "open", "write", NULL)                                                   \
	X(SFR_TRACE_BLOCK, "block", "write", "bytes") /* its checksum and writes */                \
	X(SFR_TRACE_CHECKSUM, "checksum", "write", "bytes")                                        \
	X(SFR_TRACE_WRITE, "write", "write", "bytes") /* one system call */                        \
	X(SFR_TRACE_TAIL, "tail", "write", "bytes")   /* directory of the file, sync */            \
	X(SFR_TRACE_SYNC, "sync", "commit", NULL)                                                  \
	X(SFR_TRACE_COMMIT, "commit", "commit", NULL) /* rename and sync of the directory */       \
	X(SFR_TRACE_SYNC_DIR, "sync directory", "commit", NULL)                                    \
	X(SFR_TRACE_REMOVE, "remove", "commit", NULL)

enum sfr_trace_kind {
#define X(kind, name, category, unit) kind,
	SFR_TRACE_LIST(X)
#undef X
		SFR_NR_TRACE_KINDS
};

/* ---- one trace per process (session.c) ---- */

struct sfr_trace_result {
	uint64_t nr_events;  /* written events */
	uint64_t nr_dropped; /* lost events: a ring was full, memory was short, the file failed */
	int error;           /* the file's first error: 0 or -errno */
};

/* Creates or truncates the file and starts recording. The file is written every 100 ms. It is valid
 * JSON after each write. Returns 0, or:
 *   -errno     of open
 *   -EINVAL    not a regular file
 *   SFR_EBUSY  another trace is being written */
int sfr_trace_start(const char *path);
/* Stops recording, writes the remaining events and closes the file. Spans that have not ended are
 * not in the file. Callable from any thread. Returns 0, or SFR_ESTATE if no trace is being
 * written. */
int sfr_trace_stop(struct sfr_trace_result *out);
/* Names the timeline's row of the thread with the kernel's number `tid`. Does nothing when no trace
 * is being written. */
void sfr_trace_name_thread(uint64_t tid, const char *name);

/* ---- recording (ring.c) ---- */

/* Returns the time for sfr_trace_record_span, or 0 when no trace is being written. */
uint64_t sfr_trace_get_start_ns(void);
/* Records a span of the calling thread from `start_ns` until now, or nothing if start_ns is 0.
 * `save` is a ticket's number, or 0. SFR_TRACE_LIST says what `number` counts. */
void sfr_trace_record_span(enum sfr_trace_kind kind, uint64_t start_ns, uint64_t save,
			   uint64_t number);
/* Records that an optimizer's step begins or has ended on the calling thread. `optimizer` is any
 * number that identifies the optimizer. Steps may be nested. A step that raised an exception is
 * dropped when the optimizer's next step begins or an enclosing step ends. */
void sfr_trace_step(uint64_t optimizer, bool ended);
/* Records that a save ended in `state`. `name` is the file's name, or NULL. */
void sfr__trace_save(uint64_t save, uint64_t start_ns, uint64_t end_ns, uint64_t nbytes,
		     enum sfr_state state, const char *name);

/* 0, or the number of the trace that is being written. */
extern _Atomic uint32_t sfr__trace_on;

/* A stretch of time on one thread. */
struct sfr__span {
	uint64_t start_ns;   /* 0: not recorded */
	uint64_t save;       /* number of the save */
	uint64_t outer_save; /* number of the enclosing span's save */
	uint64_t number;     /* a count, of bytes for example: see SFR_TRACE_LIST */
	enum sfr_trace_kind kind;
};
struct sfr__span sfr__span_begin_recording(enum sfr_trace_kind kind, uint64_t save,
					   uint64_t number);
void sfr__span_record(struct sfr__span *span);

/* While no trace is being written, returns a span that is not recorded. */
static inline struct sfr__span sfr__span_begin(enum sfr_trace_kind kind, uint64_t save,
					       uint64_t number)
{
	if (__builtin_expect(atomic_load_explicit(&sfr__trace_on, memory_order_relaxed) != 0, 0))
		return sfr__span_begin_recording(kind, save, number);
	return (struct sfr__span){ .start_ns = 0 };
}

static inline void sfr__span_end(struct sfr__span *span)
{
	if (__builtin_expect(span->start_ns != 0, 0))
		sfr__span_record(span);
}

/* Records a span from here to the end of the scope. `save` is the ticket's number, or 0 for the
 * save of the enclosing span; SFR_TRACE_LIST says what `number` counts. Must not be used in a scope
 * that a goto enters. */
#define SFR__TRACE(kind, save, number) SFR__TRACE_AT(kind, save, number, __LINE__)
#define SFR__TRACE_AT(kind, save, number, line) SFR__TRACE_AS(kind, save, number, line)
#define SFR__TRACE_AS(kind, save, number, line)                                                    \
	struct sfr__span sfr__span_##line __attribute__((cleanup(sfr__span_end), unused)) =        \
		sfr__span_begin(kind, save, number)

#endif
