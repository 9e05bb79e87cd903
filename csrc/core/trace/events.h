/* Converts what threads recorded into the events of a document. events.c implements it. */
#ifndef SFR_EVENTS_H
#define SFR_EVENTS_H

#include "trace/document.h"
#include "trace/ring.h"

/* One trace; its time starts at start_ns. */
struct sfr__timeline {
	struct sfr__document *doc;
	uint32_t number;
	uint64_t start_ns;
};

/* For sfr__rings_each, with a timeline: moves a ring's events into the document. */
void sfr__trace_read_ring(struct sfr__ring *ring, void *timeline);
/* Names the row of a thread; an order of -1 leaves the row's position unchanged. */
void sfr__trace_row(struct sfr__document *doc, uint64_t tid, const char *name, int order);

#endif
