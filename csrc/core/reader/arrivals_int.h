/* The files whose bytes are on their way, shared by arriving.c, where they are read, and by
 * arrivals.c, where they are fetched. */
#ifndef SFR_ARRIVALS_INT_H
#define SFR_ARRIVALS_INT_H

#include <pthread.h>

#include "reader/arrivals.h"
#include "base/base.h"

#define SFR__NO_CHUNK UINT32_MAX

enum sfr__chunk_state { SFR__ABSENT, SFR__WANTED, SFR__ASKED, SFR__HERE, SFR__LEAVING };

struct sfr__chunk {
	uint32_t next; /* the index of the next WANTED chunk */
	uint16_t pins;
	uint8_t state;
	bool done; /* HERE, and read completely by all who have begun to */
};

struct sfr__arriving {
	/* constant */
	uint64_t number, len, chunk, nr;
	int fd;
	uint64_t fork_generation;
	/* guarded by mu */
	struct sfr__arriving *next;
	struct sfr_arrivals *group;   /* NULL: it is closed */
	unsigned refs;                /* of the group, of sources, and of calls in progress */
	uint64_t nr_here, first_here; /* HERE chunks; the first of them is at or after first_here */
	uint32_t first, last;         /* WANTED chunks, the oldest first */
	bool failed;                  /* its bytes cannot be fetched */
	bool keep;                    /* its chunks are not given back */
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
	pthread_cond_t wanted, news; /* for the threads that fetch; for those that read */
};
extern struct sfr__arrivals_table sfr__arrivals;

/* Whether a group or a file was made before a fork that created this process. */
static inline bool sfr__arrivals_are_foreign(uint64_t fork_generation)
{
	return fork_generation != sfr_fork_generation();
}

static inline uint64_t sfr__chunk_len(const struct sfr__arriving *f, uint64_t chunk)
{
	const uint64_t off = chunk * f->chunk;

	return f->len - off < f->chunk ? f->len - off : f->chunk;
}

/* Drops a reference. The last one closes the file, without the lock. */
void sfr__arriving_drop(struct sfr__arriving *f);

#endif
