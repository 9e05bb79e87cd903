/* A restore from the inside: what restore.c, plan.c, source.c and piece.c share. */
#ifndef SFR_PLAN_H
#define SFR_PLAN_H

#include <pthread.h>
#include <stdatomic.h>

#include "check/records.h"
#include "cuda/driver.h"
#include "restore/restore.h"
#include "base/base.h"

#define SFR__RESTORE_PIECE_MAX (1u << 20) /* fits a core's own cache; sfr_limits may ask for less */
/* The longest local header that a plan accepts, which is the most that is read into the scratch
 * memory at a time. */
#define SFR__RESTORE_HEADER_MAX (SFR__UNZIP_LOCAL + SFR__UNZIP_NAME_MAX + 0xffffu)
#define SFR__RESTORE_SHORTER "the file became shorter while it was read"
#define SFR__RESTORE_THREADS 4u
#define SFR__RESTORE_DEVICES 16u
#define SFR__RESTORE_BUFFERS 2u /* of a thread: one is read into while the other's bytes fly */

struct sfr__target {
	uint64_t data_off; /* constant */
	char *mem;         /* or NULL; constant once the record may be read, as is the next */
	const struct sfr__restore_device *device; /* where `mem` is; NULL: in host memory */
	uint64_t
		left; /* bytes still to come, its header and its descriptor one each; guarded by mu */
	uint32_t crc;     /* of what has come, each part moved to its place; guarded by mu */
	atomic_bool good; /* all there, and what it should be */
};

/* Where the bytes of a file are taken from; source.c. */
struct sfr__source {
	int fd, direct_fd; /* the latter negative: there is none */
	void *map; /* the whole file, to ask what is in the page cache; MAP_FAILED: nobody tells */
	size_t map_len;
};

/* A device that records go to, and the stream of ours on it; device.c. */
struct sfr__restore_device {
	uint32_t device;
	CUcontext context;
	CUstream stream;
};

/* What has come of a record, and counts when the copies behind it have landed. */
struct sfr__part {
	uint64_t index, units;
	uint32_t crc;
};

struct sfr__buffer {
	char *mem; /* a piece, page aligned */
	/* of the piece that is in it, and flies or is about to */
	CUevent landed[SFR__RESTORE_DEVICES]; /* events behind its copies; NULL: none */
	uint32_t devices;                     /* bits: it has copies to them */
	struct sfr__part *parts;
	size_t nr_parts, room;
};

/* One thread that reads. */
struct sfr__reader {
	struct sfr_restore *r;
	pthread_t thread;
	char *mem;     /* the first buffer and the scratch memory; or, with a device, the latter */
	char *scratch; /* SFR__RESTORE_HEADER_MAX bytes, for headers that reach beyond a piece */
	struct sfr__buffer buffers[SFR__RESTORE_BUFFERS];
	unsigned turn; /* which is the next */
};

struct sfr_restore {
	struct sfr_check *check;
	const struct sfr__place *places; /* the check's, as is nr */
	struct sfr__target *targets;
	uint64_t nr, end; /* records; where their bytes end */
	unsigned flags;
	size_t piece; /* bytes read at a time; constant */
	struct sfr__source source;
	uint64_t fork_generation;
	struct sfr__mutex mu;            /* a leaf: nothing is called under it */
	pthread_cond_t work, news, asks; /* the last is never signalled: to sleep on */
	/* guarded by mu */
	uint64_t next_off, next_rec; /* the next piece, and a record at or before its first */
	uint64_t upto;               /* records that may be read */
	uint64_t nr_good, awaited;
	uint64_t done; /* bytes read */
	bool stop;
	struct sfr_restore_failure failure; /* constant once its code is not 0 */
	struct sfr__reader readers[SFR__RESTORE_THREADS];
	unsigned nr_threads;
	/* constant once the threads run */
	const struct sfr__cuda *cu;
	struct sfr__restore_device devices[SFR__RESTORE_DEVICES];
	unsigned nr_devices;
	char why[160]; /* what a device refused; written once, by who sets `failure` to it */
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
void sfr__source_open(struct sfr__source *s, int fd, bool shared);
void sfr__source_close(struct sfr__source *s);
void sfr__source_unmap(struct sfr__source *s);
int sfr__source_read(const struct sfr__source *s, char *buf, size_t len, uint64_t off);

/* piece.c: looks at [off, off + len) of the file, which is in the reader's buffer, and hands it out:
 * records [first, last). */
void sfr__restore_piece(struct sfr__reader *reader, struct sfr__buffer *buffer, uint64_t off,
			size_t len, uint64_t first, uint64_t last);

/* device.c; for a restore without devices all but the first do nothing. */
/* Memory that devices can be sent, for a reader, which has to be unpinned in any case. -ENOMEM. */
int sfr__restore_pin(struct sfr__reader *reader);
void sfr__restore_unpin(struct sfr__reader *reader);
/* Around all that a reader does: the devices' context is its own in between. */
void sfr__restore_enter(const struct sfr_restore *r, struct sfr__cuda_scope *scope);
/* Sends bytes of the buffer to where record `index` is. False: a failure was noted. */
bool sfr__restore_send(struct sfr_restore *r, struct sfr__buffer *buffer, uint64_t index, char *to,
		       const char *from, size_t len);
/* Notes what has come of a record, to count when the buffer's copies have landed. -ENOMEM. */
int sfr__restore_later(struct sfr__buffer *buffer, const struct sfr__part *part);
/* An event behind what was sent. */
void sfr__restore_fly(struct sfr_restore *r, struct sfr__buffer *buffer);
/* Waits until what was sent from the buffer has landed, and counts it. */
void sfr__restore_land(struct sfr_restore *r, struct sfr__buffer *buffer);
void sfr__restore_leave_devices(struct sfr_restore *r);

/* verdict.c: the first failure counts, and ends the reading. */
void sfr__restore_fail(struct sfr_restore *r, int code, uint64_t index, uint64_t off,
		       const char *reason);
/* So much more of a record has come. */
void sfr__restore_got(struct sfr_restore *r, uint64_t index, uint64_t units, uint32_t crc);

#endif
