/* What crosses files inside the core. Public names are in sfr.h.
 *
 * Locks, in the order in which they may be taken (never the other way round, and no system
 * call but the condition waits is made under any of them):
 *
 *   1. engine->mu   every ticket of the engine, its queues, its slots
 *   2. proc->mu     the process's ordered log and its notices
 *      lane->mu     a device's stream and what is in flight on it; alone, or below engine->mu
 *   3. pool->mu     free blocks, waiters, figures
 *
 * fork_mu (fork.c) stands alone: it is held across open() plus the entry of the descriptor
 * into the table of descriptors, and by the fork handlers, so that no child inherits a
 * descriptor that is not in the table.
 */
#ifndef SFR_INTERNAL_H
#define SFR_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "sfr.h"
#include "base/sys.h"

#define SFR_PAGE 4096u
#define SFR_ALIGN 64u /* of every storage in the file */

static inline uint64_t sfr__round_up(uint64_t value, uint64_t to)
{
	return (value + to - 1) / to * to;
}

/* ---- copy.c -------------------------------------------------------------- */

/* memcpy with stores that pass by the caches, for bytes that only a disk will read. */
void sfr__copy(void *dst, const void *src, size_t len);
/* Before copies are shown to another thread: such stores are in no order with others. */
void sfr__copy_fence(void);

/* ---- sys.c: small helpers over the table -------------------------------- */

/* How often an interrupted call is tried again without any progress. No handler
 * interrupts our threads, so a call interrupted that often is broken, and a hang would hide it. */
#define SFR__EINTR_TRIES 64

uint64_t sfr__now_ns(void);
/* pthread_cond_init with CLOCK_MONOTONIC. 0 or -errno. */
int sfr__cond_init(pthread_cond_t *cond);
/* Waits on `cond` until woken or `deadline_ns` (SFR_FOREVER: no bound). 0 or SFR_EAGAIN, at once and
 * with the mutex held throughout where that moment has passed. */
int sfr__cond_wait(pthread_cond_t *cond, pthread_mutex_t *mu, uint64_t deadline_ns);
/* now + slice, SFR_FOREVER kept. */
uint64_t sfr__deadline(uint64_t slice_ns);
/* Starts a named thread at nice 10, with every signal blocked but those that it would bring on
 * itself. 0 or -errno. */
int sfr__thread_start(pthread_t *thread, const char *name, void *(*main)(void *), void *arg);
/* The same at the caller's priority, for one whose maker does nothing but wait for it. */
int sfr__thread_start_awaited(pthread_t *thread, const char *name, void *(*main)(void *),
			      void *arg);

/* ---- err.c -------------------------------------------------------------- */

/* Sets *err unless it holds an error already (first error wins). `note` may be NULL. */
void sfr__err_set(struct sfr_err *err, int code, enum sfr_phase phase, const char *note);

/* ---- fork.c ------------------------------------------------------------- */

/* open() that enters the descriptor into the table of descriptors the fork handler closes in
 * a child (closing, never unlocking: flock belongs to the open file, which the parent keeps).
 * O_CLOEXEC is added. Returns the descriptor or -errno. */
int sfr__fd_open(const char *path, int flags, mode_t mode);
/* Takes it out of the table and closes it. -errno of close. */
int sfr__fd_close(int fd);
/* fork.c calls these in the child: tmp.c, log.c and notice.c forget the parent's state without
 * touching its locks. */
void sfr__tmp_forked(void);
void sfr__log_forked(void);
void sfr__notice_forked(void);

/* ---- pool.c --------------------------------------------------------------- */

/* A persistent pool of equal blocks cut from one reserved address range.
 *
 * Address space for pool_bytes is reserved at once (PROT_NONE); a block gets memory when it
 * is first handed out, and only as much of it as was asked for (rounded up to 2 MiB, at most
 * the block). Memory stays until trim or free. Pages are MADV_DONTFORK, MADV_HUGEPAGE where
 * the kernel gives them, and present (MADV_POPULATE_WRITE, or touched) on return. */
struct sfr__pool;

/* States of a block; pool.c has the diagram. */
enum sfr__block_state {
	SFR__BLOCK_RESERVED, /* address space, no memory */
	SFR__BLOCK_FREE,     /* has memory */
	SFR__BLOCK_GROWING,  /* in the hands of a thread that gives it memory */
	SFR__BLOCK_LEASED,
	SFR__BLOCK_SHRINKING, /* in the hands of a thread that takes its memory */
	SFR__BLOCK_RETIRED,   /* a copy into it may never end: nobody's for good */
	SFR__NR_BLOCK_STATES
};

struct sfr__block {
	char *mem;                /* page aligned, pool's block_bytes of address space */
	struct sfr__block *next;  /* owner's use while leased */
	struct sfr__piece *piece; /* how the CUDA driver knows it, NULL = not at all; owner's */
	size_t committed;         /* bytes that have memory, from mem on; written under pool->mu */
	size_t want;              /* what it is to have, for sfr__pool_grow_all */
	uint32_t index;
	enum sfr__block_state state; /* guarded by pool->mu, as is the next */
	bool held; /* part of a run that only a caller can give back: see sfr__pool_let_go */
};

struct sfr__pool_stats {
	uint64_t pool_bytes, block_bytes, committed_bytes, leased_bytes, retired_bytes;
	uint32_t nr_waiters; /* threads that wait for a block */
};

/* pool_bytes is rounded down to whole blocks; -EINVAL when that is none. */
int sfr__pool_new(uint64_t pool_bytes, uint64_t block_bytes, struct sfr__pool **out);
/* No block may be leased. NULL is fine. */
void sfr__pool_free(struct sfr__pool *pool);
/* Leases a block with at least `need` bytes of memory (need <= block_bytes). Waiters are served
 * lowest `seq` (oldest save) first; a caller never overtakes a waiter with a lower seq. Prefers
 * a free block that has memory already. SFR_EAGAIN when `slice_ns` passes (0: no wait),
 * -ENOMEM when the system has no memory and no block with memory is free or leased,
 * SFR_EEXHAUSTED when snapshots hold every block. */
int sfr__pool_get(struct sfr__pool *pool, uint64_t seq, size_t need, uint64_t slice_ns,
		  struct sfr__block **out);
void sfr__pool_put(struct sfr__pool *pool, struct sfr__block *block);
/* Instead of put, for a block into which a copy may be running that nobody will hear of again (a
 * dead device): it and its memory are never used again. */
void sfr__pool_retire(struct sfr__pool *pool, struct sfr__block *block);
/* A save that takes blocks begins, and has ended. */
void sfr__pool_join(struct sfr__pool *pool);
void sfr__pool_leave(struct sfr__pool *pool);
/* pin.c's part of the pool. */
struct sfr__pin *sfr__pool_pin(struct sfr__pool *pool);
/* Gives memory to the first blocks, nbytes in all (clipped to the cap), on up to four threads. */
int sfr__pool_warm_up(struct sfr__pool *pool, uint64_t nbytes);
/* Gives the memory of free blocks back to the system. */
int sfr__pool_trim(struct sfr__pool *pool);
void sfr__pool_stats(struct sfr__pool *pool, struct sfr__pool_stats *out);

/* ---- runs.c --------------------------------------------------------------- */

/* Contiguous memory for several items, in whole blocks of the pool: one run of blocks, or a few
 * where free blocks lie apart. */
struct sfr__run_of_blocks {
	uint32_t first;
	uint64_t len; /* bytes in use, from the first block's start on */
};
struct sfr__lease {
	struct sfr__run_of_blocks *runs; /* NULL: nothing is leased */
	uint32_t nr_runs;
	uint32_t nr_blocks;
	bool whole;   /* its blocks have all their memory */
	bool retired; /* a copy into it may never end: its blocks are nobody's again */
};

/* Leases memory for `nr` items of `lens` bytes, each contiguous and aligned to SFR_ALIGN, all or
 * nothing; addrs[i] gets its address (NULL for no bytes). Behind every waiter of sfr__pool_get. One
 * block at least is left as long as there are saves (sfr__pool_join) but the `nr_own` that the
 * caller itself holds up. SFR_EAGAIN when `slice_ns` passes (0: no wait); SFR_EEXHAUSTED when the
 * items do not fit beside what is held, so that only a holder could end the wait; -ENOMEM. On
 * success the lease is held. */
int sfr__pool_place(struct sfr__pool *pool, const uint64_t *lens, uint32_t nr, uint32_t nr_own,
		    uint64_t slice_ns, char **addrs, struct sfr__lease *out);
/* The same in blocks that have all their memory, which a driver can be told of. */
int sfr__pool_place_whole(struct sfr__pool *pool, const uint64_t *lens, uint32_t nr,
			  uint32_t nr_own, uint64_t slice_ns, char **addrs, struct sfr__lease *out);
/* Pins the blocks of such a lease where they are, as far as the system lets us: what stays
 * pageable is noted. Needs a context. */
void sfr__pool_pin_lease(struct sfr__pool *pool, const struct sfr__lease *lease);
/* How many of the `len` bytes at `mem`, in a lease, one copy of a device may go to, and whether
 * they are pinned. */
size_t sfr__pool_span(const struct sfr__pool *pool, const char *mem, size_t len, bool *pinned);
/* The lease will come back by itself from now on: those who wait may wait for it. Idempotent. */
void sfr__pool_let_go(struct sfr__pool *pool, const struct sfr__lease *lease);
/* Gives the lease back, or retires its blocks, and empties it. */
void sfr__pool_unplace(struct sfr__pool *pool, struct sfr__lease *lease);
/* Whether children of fork have the lease's memory (false is how the pool has it). 0 or -errno. */
int sfr__pool_share(struct sfr__pool *pool, const struct sfr__lease *lease, bool shared);

/* How often blocks of the pool went from one state to another; for tests. */
uint64_t sfr__pool_moves(struct sfr__pool *pool, enum sfr__block_state from,
			 enum sfr__block_state to);

/* ---- budget.c ------------------------------------------------------------- */

/* sfr_default_pool_bytes, taken out of the budget that default caps share: for an engine that
 * was given no pool_bytes. It gives the same number back when its pool is gone. */
uint64_t sfr__budget_take(uint64_t block_bytes);
void sfr__budget_give(uint64_t bytes);
/* pool.c: all pools together have that much more memory (less, if negative). */
void sfr__budget_hold(int64_t bytes);

/* ---- image.c -------------------------------------------------------------- */

/* The layout of one file: torch's zip format, stored entries with data descriptors.
 *
 *   run 0 (captured): data.pkl, .format_version "0", .storage_alignment "64", byteorder,
 *                     version "3\n", then captured storages
 *   run 1.. (one a device, then one a lane): captured storages of the device, deferred
 *                     storages of the lane
 *   tail: padding, .data/serialization_id, central directory, zip64 end record and its
 *         locator, end record; the file's length is a multiple of 4096
 *
 * Every run starts on a 4096 boundary in a block of its own and its length is a multiple of
 * 4096, so no block has two producers and every block is one aligned write. Sizes are known
 * before a byte moves; only descriptors and the tail need CRCs. */
struct sfr__entry {
	const char *src; /* its bytes */
	uint64_t nbytes;
	uint64_t hdr_off;  /* of its local header in the file */
	uint64_t data_off; /* a multiple of SFR_ALIGN */
	int64_t source;    /* index in sfr_save_desc.sources, or -1 */
	uint32_t crc;      /* of the first crc_len bytes; guarded by the engine's mutex */
	uint32_t desc_len; /* 16, or 24 with zip64 */
	uint64_t crc_len;
	char name[32]; /* "archive/data/4294967295" at the longest */
};

struct sfr__run {
	uint64_t off, len;
	uint32_t lane, device; /* of struct sfr_source */
	uint32_t first_entry, nr_entries;
	uint32_t nr_blocks;
};

struct sfr__image {
	struct sfr__entry *entries;
	struct sfr__run *runs;
	uint32_t nr_entries, nr_runs;
	uint64_t block_bytes;
	uint64_t tail_off, tail_len, len;
	uint64_t captured_nbytes, deferred_nbytes; /* of storages and skeleton; of storages */
};

/* Lays the image out. -ENOMEM; -EINVAL for a null source with bytes or a bad block size; -EFBIG
 * for what no file can hold (2^62 bytes, 2^32 blocks a run). Runs without entries are
 * left out, but run 0 is always there. */
int sfr__image_init(struct sfr__image *img, const struct sfr_save_desc *desc, uint64_t block_bytes);
void sfr__image_fini(struct sfr__image *img);
/* The run of these sources, NULL when there is none. */
const struct sfr__run *sfr__image_run(const struct sfr__image *img, uint32_t lane, uint32_t device);
/* Bytes of block `blk` of a run that belong to the file: block_bytes, less for the last. */
size_t sfr__image_block_len(const struct sfr__image *img, const struct sfr__run *run, uint32_t blk);
uint64_t sfr__image_block_off(const struct sfr__image *img, const struct sfr__run *run,
			      uint32_t blk);

/* A block is a sequence of segments, each a part of one of these. */
enum sfr__seg_kind { SFR__SEG_HEADER, SFR__SEG_DATA, SFR__SEG_DESC, SFR__SEG_PAD };
struct sfr__seg {
	enum sfr__seg_kind kind;
	uint32_t entry; /* whose header, data or descriptor; not for PAD */
	uint64_t off;   /* of this part in the whole header, data or descriptor */
	size_t pos;     /* where it stands in the block */
	size_t len;     /* > 0 */
};
/* Walks a block's segments in ascending order: start with *it zeroed. Returns false at the end. */
struct sfr__seg_iter {
	const struct sfr__image *img;
	const struct sfr__run *run;
	uint64_t off, end; /* in the file */
	uint32_t entry;
};
void sfr__seg_iter_init(struct sfr__seg_iter *it, const struct sfr__image *img,
			const struct sfr__run *run, uint32_t blk);
bool sfr__seg_next(struct sfr__seg_iter *it, struct sfr__seg *seg);
/* Bytes [off, off + len) of an entry's local header, or of its descriptor (entry->crc final). */
void sfr__image_put_header(const struct sfr__image *img, uint32_t entry, uint64_t off, size_t len,
			   void *dst);
void sfr__image_put_desc(const struct sfr__image *img, uint32_t entry, uint64_t off, size_t len,
			 void *dst);
/* The whole tail, img->tail_len bytes, once every entry's crc is final. */
void sfr__image_put_tail(const struct sfr__image *img, void *dst);

/* ---- tmp.c ---------------------------------------------------------------- */

/* A temporary's entry in the list of this process's live ones; part of its file. */
struct sfr__tmp {
	struct sfr__tmp *next;
	uint64_t serial; /* of this process; part of the name. 0 = not in the list */
};

/* "dir/name", malloc'ed, or NULL. */
char *sfr__path_join(const char *dir, const char *name);
/* Makes and locks a new temporary in `dir`: 0, *path_out (malloc) and *fd_out, and `tmp` is in the
 * list of live ones until sfr__tmp_forget. `err` gets phase and code, which are returned. */
int sfr__tmp_make(const char *dir, struct sfr__tmp *tmp, char **path_out, int *fd_out,
		  struct sfr_err *err);
/* Takes it out of the list: from now on others may clear it away. Call it when the name is gone,
 * and before the descriptor is closed. Twice is fine. */
void sfr__tmp_forget(struct sfr__tmp *tmp);
/* Unlinks what dead writers of this boot left in `dir`; names those of other boots in a notice,
 * once a process. Never fails: what cannot be cleared today is there tomorrow. */
void sfr__tmp_clean(const char *dir);
/* Is `path`, whose last component is `name`, a temporary whose writer lives (in this process, or
 * holding the lock in another)? */
bool sfr__tmp_is_live(const char *path, const char *name);

/* ---- file.c, remove.c ------------------------------------------------------- */

/* How far a file is; file.c has the diagram. */
enum sfr__file_state {
	SFR__FILE_NONE, /* all zero, or after fini */
	SFR__FILE_NAMED,
	SFR__FILE_OPEN,
	SFR__FILE_SYNCED,
	SFR__FILE_RENAMED, /* the new file is there; its directory's sync failed */
	SFR__FILE_DONE,
	SFR__FILE_BROKEN, /* a step other than a write failed: only fini may follow */
};

/* One file's life: temporary in the same directory -> data -> fdatasync -> rename ->
 * fsync(directory). Every step is called at most once (SFR_ESTATE otherwise), but for writes,
 * which may come from several threads at a time. */
struct sfr__file {
	char *dir, *name, *tmp; /* tmp is the temporary's full path, NULL before open */
	int fd;                 /* -1 = none */
	uint64_t len;
	uint32_t io_mode; /* SFR_IO_* */
	bool durable, renamed;
	char fallback[2][160]; /* why buffered; why the directory was not synced; "" = unused */
	enum sfr__file_state state;
	uint64_t fork_generation;
	struct sfr__tmp live; /* the file may not be moved in memory between open and fini */
};

/* Copies the names. -ENOMEM. */
int sfr__file_init(struct sfr__file *f, const char *dir, const char *name, uint64_t len,
		   bool durable);
/* Clears dead temporaries of this boot out of the directory, makes and locks the temporary,
 * probes O_DIRECT with a real write of one page, preallocates. `err` gets phase and code. */
int sfr__file_open(struct sfr__file *f, struct sfr_err *err);
/* Writes all of it or fails; short writes and EINTR are gone on with. With O_DIRECT buf, len and
 * off are multiples of 4096. */
int sfr__file_write(struct sfr__file *f, const void *buf, size_t len, uint64_t off,
		    struct sfr_err *err);
/* fdatasync, unless not durable. A failure is final: never called again on this descriptor. */
int sfr__file_sync(struct sfr__file *f, struct sfr_err *err);
/* rename, then fsync of the directory unless not durable. After a failure of the latter
 * f->renamed is true: the new file is there but not known durable. What is at the path and is
 * neither a regular file nor a link is refused (-EISDIR, -EINVAL), in the log's order. */
int sfr__file_commit(struct sfr__file *f, struct sfr_err *err);
/* Unlinks the temporary if there is one and it was not renamed, closes, frees. Any state, twice
 * as well. In a forked child it only frees. */
void sfr__file_fini(struct sfr__file *f);
/* Removes a file, link or directory tree; a missing name is no error. Temporaries whose writers
 * live, of this process or another on this machine, are left alone (their saves were submitted
 * later), and with them the directories that hold them. What cannot be removed does not keep the
 * rest from going; the first error is returned. Not synced: remove.c says why. */
int sfr__file_remove(const char *path, struct sfr_err *err);

/* ---- notice.c --------------------------------------------------------------- */

/* A ticket carries its two notices, a snapshot its one, so posting one cannot fail. Each posted
 * notice of either holds a reference. */
struct sfr__notice {
	struct sfr__notice *next;
	struct sfr_ticket *ticket;
	struct sfr_snapshot *snapshot; /* COPIED of a snapshot */
	unsigned what;
	char *text; /* TEXT only; freed by the taker */
};
void sfr__notice_post(struct sfr__notice *notice);
/* Formats and posts a TEXT; silently dropped when memory is short. */
void sfr__notice_text(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- the rest: ticket.h (engine, ticket, lane, writer, log among themselves) ---- */

#endif
