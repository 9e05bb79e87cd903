/* Rings of recorded events, one for each thread. ring.c implements them. */
#ifndef SFR_RING_H
#define SFR_RING_H

#include "trace/trace.h"

struct sfr__trace_event {
	uint64_t start_ns, end_ns;
	uint64_t save;   /* number of the save's ticket, or 0 */
	uint64_t number; /* a count, of bytes for example: see SFR_TRACE_LIST */
	uint16_t kind;   /* enum sfr_trace_kind; only SFR_TRACE_SAVE uses the last two fields */
	uint16_t state;  /* enum sfr_state */
	char name[28];   /* the file's name in UTF-8, perhaps shortened */
};

enum {
	SFR__RING_EVENTS = 8192,
	SFR__MAX_STEPS = 8, /* nested optimizer steps that are recorded */
};

/* Events that a thread has recorded and the reader has not yet read. */
struct sfr__ring {
	struct sfr__ring *next;   /* guarded by the registry's mutex */
	uint64_t tid;             /* the thread's number in the kernel */
	char name[16];            /* the thread's name in the kernel */
	atomic_bool dead;         /* the thread has ended */
	_Atomic uint64_t head;    /* index of the next event to write; only the thread sets it */
	_Atomic uint64_t tail;    /* index of the next event to read; only the reader sets it */
	_Atomic uint64_t dropped; /* events that this trace lost because the ring was full */

	/* used only by the reader */
	uint32_t row_named_in;       /* number of the last trace that has named the thread's row */
	uint32_t steps_row_named_in; /* the same for the row of the thread's steps */
	uint64_t dropped_seen;       /* dropped events that the document reports */

	/* used only by the thread */
	uint64_t save; /* number of the save of the innermost open span that has one */
	struct {
		uint64_t optimizer, start_ns;
	} steps[SFR__MAX_STEPS]; /* optimizer steps in progress, the outermost first */
	uint32_t nr_steps;
	uint32_t steps_trace;  /* number of the trace to which the steps belong */
	uint64_t step_number;  /* how many training steps have ended */
	uint64_t last_step_ns; /* when the last one ended */

	struct sfr__trace_event events[SFR__RING_EVENTS];
};

/* Begins a trace: drops the events of earlier traces, and turns recording on. */
void sfr__rings_begin_trace(uint32_t trace_number);
/* Calls `read` for every ring, without a lock. One reader at a time. */
void sfr__rings_each(void (*read)(struct sfr__ring *ring, void *arg), void *arg);
/* Frees the rings of ended threads if all their events are read. With `last`, frees them also if
 * events are left. */
void sfr__rings_free_dead(bool last);
/* Returns how many events this trace lost because there was no memory for a ring. */
uint64_t sfr__rings_count_lost(void);
/* Returns the next unread event, which is valid until sfr__ring_pop; NULL if there is none. */
const struct sfr__trace_event *sfr__ring_peek(struct sfr__ring *ring);
void sfr__ring_pop(struct sfr__ring *ring);

#endif
