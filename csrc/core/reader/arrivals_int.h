/* Files whose bytes are on their way: the structures that arriving.c (reading) and arrivals.c
 * (fetching) share. */
#ifndef SFR_ARRIVALS_INT_H
#define SFR_ARRIVALS_INT_H

#include <pthread.h>

#include "reader/arrivals.h"
#include "base/base.h"

#define SFR__NO_CHUNK UINT32_MAX

enum sfr__chunk_state {
	SFR__ABSENT,  /* not in memory */
	SFR__WANTED,  /* in the list of chunks to fetch */
	SFR__ASKED,   /* a thread fetches it */
	SFR__HERE,    /* in memory */
	SFR__LEAVING, /* its memory is being given back to the system */
};

struct sfr__chunk {
	uint32_t next; /* if WANTED: the index of the next in the list */
	uint16_t pins; /* reads in progress, which keep it HERE */
	uint8_t state;
	bool done; /* HERE, and read completely by the reader that used it last */
};

struct sfr__arriving {
	/* constant; chunk: bytes of a chunk; nr: number of chunks */
	uint64_t number, len, chunk, nr;
	int fd;
	uint64_t fork_generation;
	/* guarded by mu */
	struct sfr__arriving *next;
	struct sfr_arrivals *group;   /* NULL: it is closed */
	unsigned refs;                /* of the group, of sources, and of calls in progress */
	uint64_t nr_here, first_here; /* HERE chunks; the first of them is at or after first_here */
	uint32_t first, last;         /* ends of the list of WANTED chunks; NO_CHUNK: empty */
	bool failed;                  /* its bytes cannot be fetched */
	bool keep;                    /* the memory of its chunks is not given back */
	struct sfr__chunk chunks[];
};

struct sfr_arrivals {
	uint64_t fork_generation; /* constant */
	bool ended;               /* guarded by mu */
};

/* The files of the process. */
struct sfr__arrivals_table {
	struct sfr__mutex mu;
	/* guarded by mu */
	struct sfr__arriving *files; /* of all groups, the oldest first */
	uint64_t last_number;
	bool has_conds;
	pthread_cond_t wanted, news; /* wake threads that fetch; threads that read */
};
extern struct sfr__arrivals_table sfr__arrivals;

/* Returns whether a group or file belongs to a parent, which made it before it forked this
 * process. */
static inline bool sfr__arrivals_are_foreign(uint64_t fork_generation)
{
	return fork_generation != sfr_fork_generation();
}

/* Returns the bytes of a chunk; the last chunk of a file may be shorter than the others. */
static inline uint64_t sfr__chunk_len(const struct sfr__arriving *f, uint64_t chunk)
{
	const uint64_t off = chunk * f->chunk;

	return f->len - off < f->chunk ? f->len - off : f->chunk;
}

/* Drops a reference. The last one closes the file, without the lock. */
void sfr__arriving_drop(struct sfr__arriving *f);

#endif
