/* Converts recorded events into events of the JSON document. events.c implements it. */
#ifndef SFR_EVENTS_H
#define SFR_EVENTS_H

#include "trace/document.h"
#include "trace/ring.h"

/* The trace that is being written. */
struct sfr__timeline {
	struct sfr__document *doc;
	uint32_t number;   /* the trace's number in this process */
	uint64_t start_ns; /* time 0 in the document */
};

/* Moves a ring's events into the document. `timeline` is a struct sfr__timeline. */
void sfr__trace_drain_ring(struct sfr__ring *ring, void *timeline);
/* Names the row `tid`. Rows are shown in ascending `order`; -1 does not change the order. */
void sfr__trace_name_row(struct sfr__document *doc, uint64_t tid, const char *name, int order);

#endif
