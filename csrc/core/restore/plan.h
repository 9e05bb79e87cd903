/* A restore from the inside: what restore.c, plan.c, source.c and piece.c share. */
#ifndef SFR_PLAN_H
#define SFR_PLAN_H

#include <pthread.h>
#include <stdatomic.h>

#include "check/records.h"
#include "restore/restore.h"
#include "base/base.h"

#define SFR__RESTORE_PIECE (1u << 20) /* read at a time: fits a core's own cache */
#define SFR__RESTORE_SCRATCH (128u << 10)
_Static_assert(SFR__UNZIP_LOCAL + SFR__UNZIP_NAME_MAX + 0xffffu <= SFR__RESTORE_SCRATCH,
	       "a local header fits the scratch memory");
#define SFR__RESTORE_THREADS 4u

struct sfr__target {
	uint64_t data_off; /* constant */
	char *mem;         /* or NULL; constant once the record may be read */
	uint64_t
		left; /* bytes still to come, its header and its descriptor one each; guarded by mu */
	uint32_t crc;     /* of what has come, each part moved to its place; guarded by mu */
	atomic_bool good; /* all there, and what it should be */
};

/* Where the bytes of a file are taken from; source.c. */
struct sfr__source {
	int fd, direct_fd; /* the latter negative: there is none */
	bool tells;        /* the kernel says what is in the page cache */
};

struct sfr_restore {
	struct sfr_check *check;
	const struct sfr__place *places; /* the check's, as is nr */
	struct sfr__target *targets;
	uint64_t nr, end; /* records; where their bytes end */
	unsigned flags;
	struct sfr__source source;
	uint64_t fork_generation;
	struct sfr__mutex mu; /* a leaf: nothing is called under it */
	pthread_cond_t work, news;
	/* guarded by mu */
	uint64_t next_off, next_rec; /* the next piece, and a record at or before its first */
	uint64_t upto;               /* records that may be read */
	uint64_t nr_good, awaited;
	uint64_t done; /* bytes read */
	bool stop;
	struct sfr_restore_failure failure; /* constant once its code is not 0 */
	pthread_t threads[SFR__RESTORE_THREADS];
	char *bounce
		[SFR__RESTORE_THREADS]; /* a piece, page aligned, and scratch memory behind it */
	unsigned nr_threads;
};

/* Where record `i` must have ended: at the next one, or at the directory. */
static inline uint64_t sfr__restore_limit(const struct sfr_restore *r, uint64_t i)
{
	return i + 1 < r->nr ? r->places[i + 1].hdr_off : r->end;
}

static inline uint64_t sfr__restore_data_end(const struct sfr_restore *r, uint64_t i)
{
	return r->targets[i].data_off + r->places[i].len;
}

/* plan.c: fills targets[].data_off. 0, -EOPNOTSUPP, -errno. */
int sfr__restore_plan(struct sfr_restore *r);

/* source.c. -errno; SFR_ECORRUPT: the file ends before. `buf` and `off` as for sfr__direct_read. */
void sfr__source_open(struct sfr__source *s, int fd);
void sfr__source_close(struct sfr__source *s);
int sfr__source_read(const struct sfr__source *s, char *buf, size_t len, uint64_t off);

/* piece.c: looks at [off, off + len) of the file, which is at `buf`, and hands it out: records
 * [first, last). `scratch`: memory for a header that reaches beyond. */
void sfr__restore_piece(struct sfr_restore *r, const char *buf, uint64_t off, size_t len,
			uint64_t first, uint64_t last, char *scratch);

/* restore.c: the first failure counts, and ends the reading. */
void sfr__restore_fail(struct sfr_restore *r, int code, uint64_t index, uint64_t off,
		       const char *reason);
/* So much more of a record has come. */
void sfr__restore_got(struct sfr_restore *r, uint64_t index, uint64_t units, uint32_t crc);

#endif
