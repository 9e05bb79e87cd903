/* Helpers that every other folder of the core uses. Public names are in sfr/. */
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

#define SFR_PAGE 4096u /* bytes of a page of memory; direct writes consist of whole pages */
#define SFR_ALIGN 64u  /* alignment of every storage in the file */

/* Returns the smallest multiple of `to` that is not below `value`. */
static inline uint64_t sfr__round_up(uint64_t value, uint64_t to)
{
	return (value + to - 1) / to * to;
}

/* Binary search. Returns the first number in [from, to) for which the expression `is_before` is
 * false, or `to` if there is none. `is_before` uses the variable `number`, which the caller names.
 * It must be true up to some number and false from there on. */
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

/* Returns the struct of which *ptr is the member `member`. */
#define sfr__container(ptr, type, member) ((type *)(void *)((char *)(ptr) - offsetof(type, member)))

/* ---- copy.c ---- */

/* Copies like memcpy, with stores that bypass the caches, for bytes that only a disk will read. */
void sfr__copy_bypassing_caches(void *dst, const void *src, size_t len);
/* Called between sfr__copy_bypassing_caches and the moment when another thread may read the copy:
 * the streaming stores of sfr__copy_bypassing_caches are not ordered before other stores. */
void sfr__copy_fence(void);

/* ---- sys.c: helpers over the system-call table ---- */

/* How often an interrupted call is retried without progress. No signal handler runs on the core's
 * threads, so more interruptions mean that the call is broken. */
#define SFR__EINTR_TRIES 64

uint64_t sfr__now_ns(void); /* the current time of CLOCK_MONOTONIC */
/* pthread_cond_init with CLOCK_MONOTONIC. Returns 0 or -errno. */
int sfr__cond_init(pthread_cond_t *cond);
/* Waits on `cond` until `deadline_ns` at the latest (SFR_FOREVER: no limit). The caller holds `mu`
 * and no other lock. Returns 0, possibly without a wake-up, or SFR_EAGAIN after the deadline. If
 * the deadline is in the past, the mutex is not released. */
int sfr__cond_wait(pthread_cond_t *cond, struct sfr__mutex *mu, uint64_t deadline_ns);
/* Converts a slice (nanoseconds from now) to a deadline (a time of sfr__now_ns). SFR_FOREVER stays
 * SFR_FOREVER, here and in sfr__time_left. */
uint64_t sfr__deadline(uint64_t slice_ns);
/* Returns the nanoseconds until the deadline, or 0 if it is in the past. */
uint64_t sfr__time_left(uint64_t deadline_ns);
/* Writes `len` bytes at offset `off` of the file; retries short writes and EINTR. *done receives
 * the number of bytes written, also after an error. Returns 0 or -errno. */
int sfr__write_all(int fd, const char *bytes, size_t len, uint64_t off, size_t *done);
/* Returns a copy of a string, to be freed with sfr_sys.free, or NULL if there is no memory. */
char *sfr__text_copy(const char *text);

/* ---- thread.c ---- */

enum sfr__thread_kind {
	SFR__BACKGROUND, /* runs at nice 10; the other kinds keep the caller's priority */
	SFR__AWAITED,    /* a caller waits idly until the thread has done its work */
	SFR__PROMPT,     /* an optimizer step may wait for it: its short sleeps must not end late */
};
/* Starts a named thread. Every signal is blocked on it, except those that a thread raises itself,
 * such as SIGSEGV. Returns 0 or -errno. */
int sfr__thread_start(pthread_t *thread, const char *name, enum sfr__thread_kind kind,
		      void *(*main)(void *), void *arg);

/* ---- cpus.c ---- */

/* Moves the calling thread to the CPUs that were given to sfr_cpus_set_for_new_threads, if any. */
void sfr__cpus_apply_to_this_thread(void);

/* ---- err.c ---- */

/* Sets *err, unless it already has an error: the first error wins. `code` is not 0. `note` may be
 * NULL and is cut to fit. Takes no lock: the caller protects *err. */
void sfr__err_set_if_unset(struct sfr_err *err, int code, enum sfr_phase phase, const char *note);

/* ---- fork.c ---- */

/* Opens a file like open(2), with O_CLOEXEC. Registers the descriptor, so that a forked child
 * closes it. Returns the descriptor or -errno; -EMFILE also when the register is full (fork.c). */
int sfr__fd_open(const char *path, int flags, mode_t mode);
/* Does the same for a name in an open directory. */
int sfr__fd_openat(int dir, const char *path, int flags, mode_t mode);
/* Does the same for a new file in memory (memfd_create). */
int sfr__fd_open_memory(const char *name);
/* Unregisters and closes the descriptor. Returns 0 or -errno; Linux closes it in both cases. */
int sfr__fd_close(int fd);
/* A function that resets the static variables of one source file in a forked child. The child calls
 * these functions in no particular order. They allocate nothing and take no lock. SFR__AT_FORK
 * registers a function when the library is loaded. */
struct sfr__fork_hook {
	struct sfr__fork_hook *next;
	void (*reset)(void);
};
void sfr__fork_hook_add(struct sfr__fork_hook *hook);
#define SFR__AT_FORK(function)                                                                     \
	static struct sfr__fork_hook sfr__fork_hook = { .reset = function };                       \
	__attribute__((constructor)) static void sfr__link_fork_hook(void)                         \
	{                                                                                          \
		sfr__fork_hook_add(&sfr__fork_hook);                                               \
	}

/* ---- notice.c ---- */

/* A message for sfr_notice_wait. Tickets and snapshots embed their notices, so posting needs no
 * memory and cannot fail. A posted notice holds a reference on its ticket or snapshot. */
struct sfr__notice {
	struct sfr__notice *next;
	uint64_t number; /* the number of the ticket or snapshot */
	struct sfr_ticket *ticket;
	struct sfr_snapshot *snapshot; /* for SFR_NOTICE_SNAPSHOT */
	unsigned what;                 /* SFR_NOTICE_* */
	char *text; /* for SFR_NOTICE_TEXT; sfr_notice_wait copies and frees it */
};
/* Adds the notice to the queue that sfr_notice_wait empties. Callable from any thread. */
void sfr__notice_post(struct sfr__notice *notice);
/* Formats and posts a notice of text. If there is no memory, the notice is dropped silently. */
void sfr__notice_post_text(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
