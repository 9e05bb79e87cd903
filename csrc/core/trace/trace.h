/* A timeline of what the threads of a save do: recording it (ring.c), and
 * writing it (session.c, events.c, document.c).
 *
 * A trace point is one line at the head of a scope; its span ends with the scope:
 *
 *     SFR__TRACE(SFR_TRACE_WRITE, 0, len);
 *
 * While no trace is being written it costs one relaxed load. Otherwise two looks at the clock and
 * a store into a ring of the thread's own: no lock, no system call. A full ring drops events and
 * counts them. A thread of its own empties the rings into the file (session.c).
 */
#ifndef SFR_TRACE_H
#define SFR_TRACE_H

#include <stdatomic.h>

#include "sfr/state.h"
#include "base/base.h"

/* kind, name in the timeline, category, what its number counts (NULL: it has none) */
#define SFR_TRACE_LIST(X)                                                                          \
	X(SFR_TRACE_SAVE, "save", "save", "bytes")         /* from the call to its end */          \
	X(SFR_TRACE_STEP, "step", "train", "number")       /* between two steps' ends */           \
	X(SFR_TRACE_OPTIMIZER, "optimizer", "train", NULL) /* its step, the gate included */       \
	X(SFR_TRACE_CALL, "async_save", "call", "tensors") /* the whole call */                    \
	X(SFR_TRACE_PLAN, "plan", "call", "tensors")       /* path, pickle, owners, layout */      \
	X(SFR_TRACE_ADMIT, "admit", "call", NULL)          /* the wait for a slot */               \
	X(SFR_TRACE_CAPTURE, "capture", "call", "bytes")   /* what is copied in the call */        \
	X(SFR_TRACE_SAMPLES, "samples", "call", NULL)      /* lines of the deferred ones */        \
	X(SFR_TRACE_GATE, "gate", "gate", NULL)            /* a step waits for the copies */       \
	X(SFR_TRACE_POOL_WAIT, "wait for block", "copy", NULL)                                     \
	X(SFR_TRACE_COPY, "copy", "copy", "bytes")        /* one block is filled */                \
	X(SFR_TRACE_PIECE, "copy piece", "copy", "bytes") /* of a storage; not the small ones */   \
	X(SFR_TRACE_OPEN, "open", "write", NULL)                                                   \
	X(SFR_TRACE_BLOCK, "block", "write", "bytes") /* checksum and writes of one */             \
	X(SFR_TRACE_CHECKSUM, "checksum", "write", "bytes")                                        \
	X(SFR_TRACE_WRITE, "write", "write", "bytes") /* one system call */                        \
	X(SFR_TRACE_TAIL, "tail", "write", "bytes")   /* directory of the file, sync */            \
	X(SFR_TRACE_SYNC, "sync", "commit", NULL)                                                  \
	X(SFR_TRACE_COMMIT, "commit", "commit", NULL) /* rename and sync of the directory */       \
	X(SFR_TRACE_SYNC_DIR, "sync directory", "commit", NULL)                                    \
	X(SFR_TRACE_REMOVE, "remove", "commit", NULL)

enum sfr_trace_kind {
#define X(kind, name, category, number) kind,
	SFR_TRACE_LIST(X)
#undef X
		SFR_NR_TRACE_KINDS
};

/* ---- one trace a process (session.c) ---- */

struct sfr_trace_result {
	uint64_t nr_events; /* written, without those that name rows */
	uint64_t
		nr_dropped; /* a ring was full, memory was short, or the file could not be written */
	int error;          /* of the file: 0 or -errno, the first one */
};

/* Makes (or empties) the file and starts to record. `path` is opened here: a later change of the
 * working directory does not matter. After each 100 ms the file is complete, valid JSON.
 * -errno of open; -EINVAL when it is no regular file; SFR_EBUSY while another trace is written. */
int sfr_trace_start(const char *path);
/* Stops recording, writes what is left and closes the file. Spans that have not ended are not in
 * it. SFR_ESTATE when no trace of this process is being written. Any thread. */
int sfr_trace_stop(struct sfr_trace_result *out);
/* Names the row of a thread; the last name counts. Dropped when no trace is being written. */
void sfr_trace_name_thread(uint64_t tid, const char *name);

/* ---- recording (ring.c) ---- */

/* The present moment, or 0 when no trace is being written: what sfr_trace_end takes. */
uint64_t sfr_trace_begin(void);
/* A span of the calling thread from `start_ns` until now; nothing when that is 0. */
void sfr_trace_end(enum sfr_trace_kind kind, uint64_t start_ns, uint64_t save, uint64_t number);
/* An optimizer's step begins, or has ended, on the calling thread. They may be nested. A step that
 * raised is forgotten when the same optimizer's next one begins, or one around it ends. */
void sfr_trace_step(uint64_t optimizer, bool ended);
/* A save has ended as `state`; `name` is the file's, shortened to what an event holds. */
void sfr__trace_save(uint64_t save, uint64_t start_ns, uint64_t end_ns, uint64_t nbytes,
		     enum sfr_state state, const char *name);

/* 0, or the number of the trace that is being written. */
extern _Atomic uint32_t sfr__trace_on;

struct sfr__span {
	uint64_t start_ns; /* 0 = not recorded */
	uint64_t save, outer_save, number;
	enum sfr_trace_kind kind;
};
struct sfr__span sfr__span_start(enum sfr_trace_kind kind, uint64_t save, uint64_t number);
void sfr__span_record(struct sfr__span *span);

static inline struct sfr__span sfr__span_begin(enum sfr_trace_kind kind, uint64_t save,
					       uint64_t number)
{
	if (__builtin_expect(atomic_load_explicit(&sfr__trace_on, memory_order_relaxed) != 0, 0))
		return sfr__span_start(kind, save, number);
	return (struct sfr__span){ .start_ns = 0 };
}

static inline void sfr__span_end(struct sfr__span *span)
{
	if (__builtin_expect(span->start_ns != 0, 0))
		sfr__span_record(span);
}

/* A span from here to the end of the scope. `save` is the number of its ticket; 0 takes that of
 * the span around it. Not in a scope that a goto enters. */
#define SFR__TRACE(kind, save, number) SFR__TRACE_AT(kind, save, number, __LINE__)
#define SFR__TRACE_AT(kind, save, number, line) SFR__TRACE_AS(kind, save, number, line)
#define SFR__TRACE_AS(kind, save, number, line)                                                    \
	struct sfr__span sfr__span_##line __attribute__((cleanup(sfr__span_end), unused)) =        \
		sfr__span_begin(kind, save, number)

#endif
