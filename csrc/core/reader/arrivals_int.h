/* Arriving files, for arriving.c (reading) and arrivals.c (fetching). */
#ifndef SFR_ARRIVALS_INT_H
#define SFR_ARRIVALS_INT_H

#include <pthread.h>

#include "reader/arrivals.h"
#include "base/base.h"

#define SFR__NO_CHUNK UINT32_MAX

enum sfr__arriving_chunk_state {
	SFR__ABSENT,    /* not in memory */
	SFR__REQUESTED, /* in the list of chunks to fetch */
	SFR__FETCHING,  /* a thread fetches it */
	SFR__PRESENT,   /* in memory */
	SFR__FREEING,   /* its memory is being given back to the system */
};

struct sfr__arriving_chunk {
	uint32_t next;   /* if REQUESTED: index of the next requested chunk */
	uint16_t pins;   /* reads in progress, which keep it PRESENT */
	uint8_t state;   /* enum sfr__arriving_chunk_state */
	bool read_fully; /* by the reader that used it last: its memory may be freed */
};

struct sfr__arriving_file {
	/* constant; `number` identifies the file to its group */
	uint64_t number, len, chunk_bytes, nr_chunks;
	int fd;
	uint64_t fork_generation;
	/* guarded by mu */
	struct sfr__arriving_file *next;
	struct sfr_arrivals *group; /* NULL: it is closed */
	unsigned refs;              /* references by the group, sources and calls in progress */
	uint64_t nr_present;        /* number of PRESENT chunks */
	uint64_t first_present;     /* no chunk before this index is PRESENT */
	uint32_t first_requested;   /* head of the list of REQUESTED chunks, or SFR__NO_CHUNK */
	uint32_t last_requested;    /* tail of this list */
	bool failed;                /* its bytes cannot be fetched */
	bool keep_all; /* no chunk loses its memory (sfr_arrivals_wait_for_whole_file) */
	struct sfr__arriving_chunk chunks[];
};

/* A group of files that the same threads fetch. */
struct sfr_arrivals {
	uint64_t fork_generation; /* constant */
	bool ended;               /* guarded by mu */
};

/* The arriving files of the process. */
struct sfr__arrivals_table {
	struct sfr__mutex mu;
	/* guarded by mu */
	struct sfr__arriving_file *files; /* of all groups, the oldest first */
	uint64_t last_number;             /* `number` of the newest file */
	bool has_conds;                   /* the conditions are initialised */
	pthread_cond_t has_requests;      /* wakes threads that fetch */
	pthread_cond_t progress;          /* wakes threads that wait for bytes */
};
extern struct sfr__arrivals_table sfr__arrivals;

/* Returns whether a group or file of this generation belongs to a parent process. */
static inline bool sfr__arrivals_are_inherited(uint64_t fork_generation)
{
	return fork_generation != sfr_fork_generation();
}

static inline uint64_t sfr__chunk_len(const struct sfr__arriving_file *f, uint64_t index)
{
	const uint64_t off = index * f->chunk_bytes;

	return f->len - off < f->chunk_bytes ? f->len - off : f->chunk_bytes;
}

/* Drops a reference, and frees the file if it was the last one. Takes the lock. */
void sfr__arriving_drop(struct sfr__arriving_file *f);

#endif
