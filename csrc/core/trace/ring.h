/* What one thread has recorded, between it and who reads it. See ring.c. */
#ifndef SFR_RING_H
#define SFR_RING_H

#include "trace/trace.h"

struct sfr__trace_event {
	uint64_t start_ns, end_ns, save, number;
	uint16_t kind;  /* enum sfr_trace_kind */
	uint16_t state; /* SAVE: enum sfr_state */
	char name[28];  /* SAVE: of the file, UTF-8, shortened */
};

enum { SFR__RING_EVENTS = 8192 };

/* What one thread has recorded and nobody has read yet. */
struct sfr__ring {
	struct sfr__ring *next; /* guarded by the registry's mutex */
	uint64_t tid;
	char name[16];            /* the kernel's name of the thread */
	atomic_bool dead;         /* its thread has ended */
	_Atomic uint64_t head;    /* next to be written, by the thread */
	_Atomic uint64_t tail;    /* next to be read, by the reader */
	_Atomic uint64_t dropped; /* in the present trace */
	/* the reader's */
	uint32_t named_in, steps_named_in; /* the trace in which its row has been named */
	uint64_t dropped_seen;
	/* the thread's own */
	uint64_t save; /* of the innermost span that named one */
	uint32_t steps_in, nr_steps;
	uint64_t step_number, last_step_ns;
	struct {
		uint64_t optimizer, start_ns;
	} steps[8];
	struct sfr__trace_event events[SFR__RING_EVENTS];
};

/* Begins the trace `number`: drops what is left of earlier ones. */
void sfr__rings_begin(uint32_t number);
/* Calls `read` for every ring. One reader at a time. */
void sfr__rings_each(void (*read)(struct sfr__ring *ring, void *arg), void *arg);
/* Frees the rings of ended threads that have been read; `last` says that no reader comes after. */
void sfr__rings_sweep(bool last);
/* Events that found no memory for a ring, since sfr__rings_begin. */
uint64_t sfr__rings_lost(void);
/* The next unread event, or NULL; it stays valid until sfr__ring_pop. */
const struct sfr__trace_event *sfr__ring_peek(struct sfr__ring *ring);
void sfr__ring_pop(struct sfr__ring *ring);

#endif
