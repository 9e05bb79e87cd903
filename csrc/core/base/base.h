/* What everything else in the core stands on. Public names are in sfr/. */
#ifndef SFR_BASE_H
#define SFR_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "sfr/err.h"
#include "sfr/fork.h"
#include "sfr/notice.h"
#include "base/lock.h"
#include "base/sys.h"

#define SFR_PAGE 4096u
#define SFR_ALIGN 64u /* of every storage in the file */

static inline uint64_t sfr__round_up(uint64_t value, uint64_t to)
{
	return (value + to - 1) / to * to;
}

/* The first number of [from, to), `to` if there is none, that `is_before` is not true of, which it is
 * of all in front of it. */
#define sfr__lower_bound(number, from, to, is_before)                                              \
	__extension__({                                                                            \
		uint64_t sfr__low = (from), sfr__high = (to);                                      \
		while (sfr__low < sfr__high) {                                                     \
			const uint64_t number = sfr__low + (sfr__high - sfr__low) / 2;             \
			if (is_before)                                                             \
				sfr__low = number + 1;                                             \
			else                                                                       \
				sfr__high = number;                                                \
		}                                                                                  \
		sfr__low;                                                                          \
	})

/* The struct of which *ptr is this member. */
#define sfr__container(ptr, type, member) ((type *)(void *)((char *)(ptr) - offsetof(type, member)))

/* ---- copy.c ---- */

/* memcpy with stores that pass by the caches, for bytes that only a disk will read. */
void sfr__copy(void *dst, const void *src, size_t len);
/* Before copies are shown to another thread: such stores are in no order with others. */
void sfr__copy_fence(void);

/* ---- sys.c: small helpers over the table ---- */

/* How often an interrupted call is tried again without any progress. No handler
 * interrupts our threads, so a call interrupted that often is broken, and a hang would hide it. */
#define SFR__EINTR_TRIES 64

uint64_t sfr__now_ns(void);
/* pthread_cond_init with CLOCK_MONOTONIC. 0 or -errno. */
int sfr__cond_init(pthread_cond_t *cond);
/* Waits on `cond` until woken or `deadline_ns` (SFR_FOREVER: no bound). 0 or SFR_EAGAIN, at once and
 * with the mutex held throughout where that moment has passed. */
int sfr__cond_wait(pthread_cond_t *cond, struct sfr__mutex *mu, uint64_t deadline_ns);
/* now + slice, SFR_FOREVER kept; and back: 0 once that moment has passed. */
uint64_t sfr__deadline(uint64_t slice_ns);
uint64_t sfr__time_left(uint64_t deadline_ns);
/* Writes all of it, short writes and EINTR gone on with; `done` bytes are written. 0 or -errno. */
int sfr__write_all(int fd, const char *bytes, size_t len, uint64_t off, size_t *done);
enum sfr__thread_kind {
	SFR__BACKGROUND, /* at nice 10; the others have the caller's priority */
	SFR__AWAITED,    /* its maker does nothing but wait for it */
	SFR__PROMPT,     /* a step may have to wait for it: it wakes up in time from short sleeps */
};
/* Starts a named thread with every signal blocked but those that it would bring on itself. 0 or
 * -errno. */
int sfr__thread_start(pthread_t *thread, const char *name, enum sfr__thread_kind kind,
		      void *(*main)(void *), void *arg);

/* ---- cpus.c ---- */

void sfr__cpus_take(void);

/* ---- err.c ---- */

/* Sets *err unless it holds an error already (first error wins). `note` may be NULL. */
void sfr__err_set(struct sfr_err *err, int code, enum sfr_phase phase, const char *note);

/* ---- fork.c ---- */

/* open() that enters the descriptor into the table of descriptors the fork handler closes in
 * a child (closing, never unlocking: flock belongs to the open file, which the parent keeps).
 * O_CLOEXEC is added. Returns the descriptor or -errno. */
int sfr__fd_open(const char *path, int flags, mode_t mode);
/* The same of a name in an open directory. */
int sfr__fd_openat(int dir, const char *path, int flags, mode_t mode);
/* Takes it out of the table and closes it. -errno of close. */
int sfr__fd_close(int fd);
/* What a file has to forget in a child of fork: threads, waiters and holders of locks are the
 * parent's and do not exist there. The function is called in the child, in no order with others';
 * it allocates nothing and takes no lock. Linked before main, so that there is no moment at which a
 * fork is not heard of. */
struct sfr__fork_hook {
	struct sfr__fork_hook *next;
	void (*forget)(void);
};
void sfr__fork_watch(struct sfr__fork_hook *hook);
#define SFR__AT_FORK(function)                                                                     \
	static struct sfr__fork_hook sfr__fork_hook = { .forget = function };                      \
	__attribute__((constructor)) static void sfr__link_fork_hook(void)                         \
	{                                                                                          \
		sfr__fork_watch(&sfr__fork_hook);                                                  \
	}

/* ---- notice.c ---- */

/* A ticket carries its two notices, a snapshot its one, so posting one cannot fail. Each posted
 * notice of either holds a reference. */
struct sfr__notice {
	struct sfr__notice *next;
	uint64_t number; /* of the ticket or snapshot */
	struct sfr_ticket *ticket;
	struct sfr_snapshot *snapshot; /* COPIED of a snapshot */
	unsigned what;
	char *text; /* TEXT only; freed by the taker */
};
void sfr__notice_post(struct sfr__notice *notice);
/* Formats and posts a TEXT; silently dropped when memory is short. */
void sfr__notice_text(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- samples.c: which cache lines of a source are kept and compared ---- */

#define SFR__MAX_SAMPLES 4096 /* of one save or snapshot */
#define SFR__SAMPLE_LEN 64    /* bytes of one: a cache line */

/* One cache line of a deferred source as it was at the call. */
struct sfr__sample {
	uint32_t entry; /* ascending, then off ascending: the order in which the lane copies */
	uint32_t len;
	uint64_t off;
	unsigned char bytes[SFR__SAMPLE_LEN];
};
/* How many lines of each source are sampled, at most, where there are so many. */
uint64_t sfr__samples_each(uint32_t nr_sources);
/* Says which lines of a source are: fills all but the bytes of at most `each` items, and returns
 * of how many. *random goes on. */
uint32_t sfr__samples_place(struct sfr__sample *items, uint32_t entry, uint64_t nbytes,
			    uint64_t each, uint64_t *random);
/* The same for sources on a device, where what is sampled is rows that lie equally far apart: fills
 * all but the bytes of the items, and returns of how many; *pitch: from row to row. At most
 * sfr__samples_rows_most. */
uint32_t sfr__samples_rows(struct sfr__sample *items, uint32_t entry, uint64_t nbytes,
			   uint64_t each, uint64_t *random, uint64_t *pitch);
uint64_t sfr__samples_rows_most(uint64_t nbytes, uint64_t each);

#endif
