/* Events that one thread has recorded, between that thread and their reader. ring.c implements
 * it. */
#ifndef SFR_RING_H
#define SFR_RING_H

#include "trace/trace.h"

struct sfr__trace_event {
	uint64_t start_ns, end_ns;
	uint64_t save;   /* number of its ticket, or 0 */
	uint64_t number; /* see SFR_TRACE_LIST */
	uint16_t kind;   /* enum sfr_trace_kind */
	uint16_t state;  /* SAVE: enum sfr_state */
	char name[28];   /* SAVE: file name, UTF-8, shortened */
};

enum { SFR__RING_EVENTS = 8192 };

/* The ring of one thread: events that were recorded and not yet read. */
struct sfr__ring {
	struct sfr__ring *next;   /* guarded by the registry's mutex */
	uint64_t tid;             /* the thread's number in the kernel */
	char name[16];            /* the thread's name in the kernel */
	atomic_bool dead;         /* its thread has ended */
	_Atomic uint64_t head;    /* index of the next event to write; the thread's */
	_Atomic uint64_t tail;    /* index of the next event to read; the reader's */
	_Atomic uint64_t dropped; /* events of the current trace for which the ring was full */
	/* the reader's */
	uint32_t named_in, steps_named_in; /* the last traces in which its two rows were named */
	uint64_t dropped_seen;             /* how many dropped events the document reports */
	/* the thread's own */
	uint64_t save; /* number of the save of the innermost open span that names a save */
	/* `nr_steps` optimizer steps in progress, the outermost first; they belong to the trace
	 * with the number steps_in */
	struct {
		uint64_t optimizer, start_ns;
	} steps[8];
	uint32_t steps_in, nr_steps;
	uint64_t step_number, last_step_ns; /* steps that have ended; the end of the last one */
	struct sfr__trace_event events[SFR__RING_EVENTS];
};

/* Begins trace `number`: drops events that are left of earlier traces, and turns recording on. */
void sfr__rings_begin(uint32_t number);
/* Calls `read` for every ring, without a lock. One reader at a time. */
void sfr__rings_each(void (*read)(struct sfr__ring *ring, void *arg), void *arg);
/* Frees the rings of ended threads whose events are read. With `last` it frees the rings of all
 * ended threads, because no reader follows. */
void sfr__rings_sweep(bool last);
/* Returns how many events were lost since sfr__rings_begin because there was no memory for a
 * ring. */
uint64_t sfr__rings_lost(void);
/* Returns the next unread event, or NULL. It is valid until sfr__ring_pop. */
const struct sfr__trace_event *sfr__ring_peek(struct sfr__ring *ring);
void sfr__ring_pop(struct sfr__ring *ring);

#endif
