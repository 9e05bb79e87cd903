/* Files whose bytes are on their way: the structures that arriving.c (reading) and arrivals.c
 * (fetching) share. */
#ifndef SFR_ARRIVALS_INT_H
#define SFR_ARRIVALS_INT_H

#include <pthread.h>

#include "reader/arrivals.h"
#include "base/base.h"

#define SFR__NO_CHUNK UINT32_MAX

enum sfr__chunk_state {
	SFR__ABSENT,   /* not in memory */
	SFR__WANTED,   /* in the list of chunks to fetch */
	SFR__FETCHING, /* a thread fetches it */
	SFR__HERE,     /* in memory */
	SFR__LEAVING,  /* its memory is being given back to the system */
};

struct sfr__chunk {
	uint32_t next; /* if WANTED: the index of the next in the list */
	uint16_t pins; /* reads in progress, which keep it HERE */
	uint8_t state;
	bool done; /* HERE, and the reader that used it last has read all of it */
};

struct sfr__arriving {
	/* constant; `number` identifies the file to its group */
	uint64_t number, len, chunk_bytes, nr_chunks;
	int fd;
	uint64_t fork_generation;
	/* guarded by mu */
	struct sfr__arriving *next;
	struct sfr_arrivals *group;   /* NULL: it is closed */
	unsigned refs;                /* references by the group, sources and calls in progress */
	uint64_t nr_here, first_here; /* HERE chunks; the first of them is at or after first_here */
	/* indices of the first and last in the list of WANTED chunks; SFR__NO_CHUNK: it is empty */
	uint32_t first_wanted, last_wanted;
	bool failed; /* its bytes cannot be fetched */
	bool keep;   /* no chunk's memory is given back (sfr_arrivals_fill) */
	struct sfr__chunk chunks[];
};

/* A group of files that the same threads fetch. The table below has its files. */
struct sfr_arrivals {
	uint64_t fork_generation; /* constant */
	bool ended;               /* guarded by mu */
};

/* The files of the process. */
struct sfr__arrivals_table {
	struct sfr__mutex mu;
	/* guarded by mu */
	struct sfr__arriving *files; /* the files of all groups, the oldest first */
	uint64_t last_number;
	bool has_conds;        /* the two conditions below are initialised */
	pthread_cond_t wanted; /* wakes threads that fetch */
	pthread_cond_t news;   /* wakes threads that wait for bytes */
};
extern struct sfr__arrivals_table sfr__arrivals;

/* Returns whether a group or file belongs to a parent, which made it before it forked this
 * process. */
static inline bool sfr__arrivals_are_foreign(uint64_t fork_generation)
{
	return fork_generation != sfr_fork_generation();
}

/* Returns the length of a chunk. The last chunk of a file may be shorter than the others. */
static inline uint64_t sfr__chunk_len(const struct sfr__arriving *f, uint64_t index)
{
	const uint64_t off = index * f->chunk_bytes;

	return f->len - off < f->chunk_bytes ? f->len - off : f->chunk_bytes;
}

/* Drops a reference. If it was the last one, closes and frees the file. Takes the lock. */
void sfr__arriving_drop(struct sfr__arriving *f);

#endif
