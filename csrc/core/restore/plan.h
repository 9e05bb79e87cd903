/* The state of a restore, shared by restore.c, plan.c, source.c, piece.c and device.c. */
#ifndef SFR_PLAN_H
#define SFR_PLAN_H

#include <pthread.h>
#include <stdatomic.h>

#include "check/records.h"
#include "cuda/driver.h"
#include "restore/restore.h"
#include "base/base.h"

#define SFR__RESTORE_PIECE_MAX (1u << 20) /* fits a core's own cache; sfr_limits may ask for less */
/* The longest local header that a plan accepts, and the most that is read into the scratch memory
 * at a time. */
#define SFR__RESTORE_HEADER_MAX (SFR__UNZIP_LOCAL + SFR__UNZIP_NAME_MAX + 0xffffu)
#define SFR__RESTORE_SHORTER "the file became shorter while it was read"
#define SFR__RESTORE_THREADS 4u
#define SFR__RESTORE_DEVICES 16u
/* buffers of a thread: one is read into while the other is being sent */
#define SFR__RESTORE_BUFFERS 2u

struct sfr__target {
	uint64_t data_off; /* constant */
	char *mem;         /* or NULL; constant once the record may be read, like the next */
	const struct sfr__restore_device *device; /* the device of `mem`; NULL: host memory */
	uint64_t
		left; /* bytes still missing; header and descriptor count one each; guarded by mu */
	/* of the bytes so far, each stretch shifted to its position; guarded by mu */
	uint32_t crc;
	atomic_bool good; /* complete and correct */
};

/* The way to the bytes of a file; source.c. */
struct sfr__source {
	int fd, direct_fd; /* direct_fd is negative if there is none */
	void *map;         /* the whole file, for mincore; MAP_FAILED if that is not available */
	size_t map_len;
};

/* A device that receives records, and the restore's stream on it; device.c. */
struct sfr__restore_device {
	uint32_t device;
	CUcontext context;
	CUstream stream;
};

/* Bytes of a record that count when the copies after them have completed. */
struct sfr__part {
	uint64_t index, units;
	uint32_t crc;
};

struct sfr__buffer {
	char *mem; /* one chunk, page aligned */
	/* for the chunk in it, while that is being sent */
	CUevent landed[SFR__RESTORE_DEVICES]; /* events after its copies; NULL: none */
	uint32_t devices;                     /* a bit for each device that it has copies to */
	struct sfr__part *parts;
	size_t nr_parts, room;
};

/* A thread that reads. */
struct sfr__reader {
	struct sfr_restore *r;
	pthread_t thread;
	char *mem; /* the first buffer and the scratch memory; with a device, only the latter */
	/* SFR__RESTORE_HEADER_MAX bytes, for headers that cross the end of a chunk */
	char *scratch;
	struct sfr__buffer buffers[SFR__RESTORE_BUFFERS];
	unsigned turn; /* index of the next buffer */
};

struct sfr_restore {
	struct sfr_check *check;
	const struct sfr__place *places; /* the check's, like nr */
	struct sfr__target *targets;
	uint64_t nr, end; /* number of records; end of their bytes */
	unsigned flags;
	size_t piece; /* bytes read at a time; constant */
	struct sfr__source source;
	uint64_t fork_generation;
	struct sfr__mutex mu;            /* a leaf: no other lock is taken under it */
	pthread_cond_t work, news, asks; /* asks is never signalled: for timed sleeps */
	/* guarded by mu */
	uint64_t next_off, next_rec; /* the next chunk, and a record at or before its first */
	uint64_t upto;               /* records before it may be read */
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
	/* the error of a device; written once, by the thread that sets `failure` to it */
	char why[160];
};

/* Returns the offset where record `i` must have ended: at the next one, or at the directory. */
static inline uint64_t sfr__restore_limit(const struct sfr_restore *r, uint64_t i)
{
	return i + 1 < r->nr ? r->places[i + 1].hdr_off : r->end;
}

static inline uint64_t sfr__restore_data_end(const struct sfr_restore *r, uint64_t i)
{
	return r->targets[i].data_off + r->places[i].len;
}

/* plan.c: sets targets[].data_off. 0, -EOPNOTSUPP or -errno. */
int sfr__restore_plan(struct sfr_restore *r);

/* source.c: read returns -errno, or SFR_ECORRUPT if the file ends before. `buf` and `off` as for
 * sfr__direct_read. */
void sfr__source_open(struct sfr__source *s, int fd, bool shared);
void sfr__source_close(struct sfr__source *s);
void sfr__source_unmap(struct sfr__source *s);
int sfr__source_read(const struct sfr__source *s, char *buf, size_t len, uint64_t off);

/* piece.c: checks [off, off + len) of the file, which is in the reader's buffer, and distributes
 * records [first, last). */
void sfr__restore_piece(struct sfr__reader *reader, struct sfr__buffer *buffer, uint64_t off,
			size_t len, uint64_t first, uint64_t last);

/* device.c; without devices all but the first function do nothing. */
/* Gets a reader memory that devices can copy from; it must be unpinned in any case. -ENOMEM. */
int sfr__restore_pin(struct sfr__reader *reader);
void sfr__restore_unpin(struct sfr__reader *reader);
/* Enters the devices' context for all that a reader does. */
void sfr__restore_enter(const struct sfr_restore *r, struct sfr__cuda_scope *scope);
/* Sends bytes of the buffer to `to` in record `index`. False: a failure was recorded. */
bool sfr__restore_send(struct sfr_restore *r, struct sfr__buffer *buffer, uint64_t index, char *to,
		       const char *from, size_t len);
/* Keeps bytes of a record, to count when the buffer's copies have completed. -ENOMEM. */
int sfr__restore_later(struct sfr__buffer *buffer, const struct sfr__part *part);
/* Records an event after the copies from the buffer. */
void sfr__restore_fly(struct sfr_restore *r, struct sfr__buffer *buffer);
/* Waits until the copies from the buffer have completed, and counts their bytes. */
void sfr__restore_land(struct sfr_restore *r, struct sfr__buffer *buffer);
void sfr__restore_leave_devices(struct sfr_restore *r);

/* verdict.c: records a failure. The first one is kept, and ends the reading. */
void sfr__restore_fail(struct sfr_restore *r, int code, uint64_t index, uint64_t off,
		       const char *reason);
/* Counts more bytes of a record. */
void sfr__restore_got(struct sfr_restore *r, uint64_t index, uint64_t units, uint32_t crc);

#endif
