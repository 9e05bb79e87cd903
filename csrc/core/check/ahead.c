/* Reads a file front to back on threads of its own, ahead of the caller that uses the bytes.
 *
 * One thread that reads a chunk and then compares its CRC leaves the disk idle meanwhile. If the
 * kernel reads ahead too little, the thread waits for the disk as well. Here two threads read
 * chunks in turn, into a ring of slots, and the caller uses only bytes that are there:
 *
 *     file     | piece 0 | piece 1 | piece 2 | piece 3 | piece 4 | ...
 *     slots      [view]    filled    reading   reading              piece i is in slot i % NR_SLOTS
 *
 *     FREE --next piece--> READING --read--> FILLED --take--> VIEW --take of the next--> FREE
 *
 * A header may span two chunks. So each slot has room in front of it. When the view moves on, the
 * bytes of the old chunk that are still needed are copied there, which makes the requested range
 * contiguous. Nothing else is copied.
 *
 * With `direct` the threads read past the page cache where they can (direct.c).
 *
 * After a fork the child has no such threads; there the window reads by itself (window.c).
 *
 * verify uses this to read past the page cache: it then reports what the disk holds, and leaves the
 * page cache to the training. */
#include <errno.h>
#include <string.h>

#include "check/ahead.h"
#include "check/direct.h"
#include "sfr/limits.h"
#include "base/base.h"

#define NR_THREADS 2u
#define NR_SLOTS 5u /* the view, one that each thread reads, and as many filled */
#define STRIDE ((size_t)SFR__AHEAD_MOST + SFR__AHEAD_PIECE_MAX)
_Static_assert(SFR__AHEAD_MOST % SFR_PAGE == 0, "pieces begin on pages, for O_DIRECT");

struct slot {
	bool filled; /* guarded by mu */
	int code;    /* 0, or the error of reading the chunk; constant once filled */
	size_t len;
};

struct sfr__ahead {
	int fd, direct_fd; /* constant; direct_fd is negative if there is none */
	uint64_t end, nr_pieces, fork_generation;
	size_t piece; /* bytes read at a time; constant */
	unsigned char *mem, *slots_at;
	struct sfr__mutex mu; /* a leaf: no other lock is taken under it */
	pthread_cond_t filled, freed;
	struct slot slots[NR_SLOTS];
	uint64_t next;     /* next chunk to read; guarded by mu */
	uint64_t freed_to; /* chunks before it are no longer used; guarded by mu */
	bool stop;         /* guarded by mu */
	pthread_t threads[NR_THREADS];
	unsigned nr_threads;
	/* used only by the caller */
	uint64_t taken; /* chunks taken so far */
	const unsigned char *view;
	uint64_t view_off;
	size_t view_len;
};

static unsigned char *piece_at(const struct sfr__ahead *a, uint64_t piece)
{
	return a->slots_at + (size_t)(piece % NR_SLOTS) * STRIDE + SFR__AHEAD_MOST;
}

static void *reader_main(void *arg)
{
	struct sfr__ahead *a = arg;

	sfr__lock(&a->mu);
	for (;;) {
		uint64_t piece, off;
		struct slot *slot;

		while (!a->stop && a->next < a->nr_pieces && a->next >= a->freed_to + NR_SLOTS)
			(void)sfr__cond_wait(&a->freed, &a->mu, SFR_FOREVER); /* always 0 */
		if (a->stop || a->next >= a->nr_pieces)
			break;
		piece = a->next++;
		sfr__unlock(&a->mu);

		off = piece * a->piece;
		slot = &a->slots[piece % NR_SLOTS];
		slot->len = a->end - off < a->piece ? (size_t)(a->end - off) : a->piece;
		slot->code = sfr__direct_read(a->fd, a->direct_fd, (char *)piece_at(a, piece),
					      slot->len, off);

		sfr__lock(&a->mu);
		slot->filled = true;
		(void)pthread_cond_signal(&a->filled); /* there is only one waiter */
	}
	sfr__unlock(&a->mu);
	return NULL;
}

static void end_threads(struct sfr__ahead *a)
{
	sfr__lock(&a->mu);
	a->stop = true;
	(void)pthread_cond_broadcast(&a->freed);
	sfr__unlock(&a->mu);
	for (unsigned i = 0; i < a->nr_threads; i++)
		(void)sfr_sys.thread_join(a->threads[i], NULL); /* our own thread, joined once */
	if (a->direct_fd >= 0)
		(void)sfr__fd_close(a->direct_fd); /* nothing was written to it */
	(void)pthread_cond_destroy(&a->freed);
	(void)pthread_cond_destroy(&a->filled);
	sfr__mutex_fini(&a->mu);
}

int sfr__ahead_start(int fd, uint64_t end, bool direct, struct sfr__ahead **out)
{
	struct sfr__ahead *a;
	int rc = sfr_fork_init();

	*out = NULL;
	if (rc < 0)
		return rc;
	a = sfr_sys.calloc(1, sizeof(*a));
	if (a == NULL)
		return -ENOMEM;
	a->mem = sfr_sys.malloc(NR_SLOTS * STRIDE + SFR_PAGE);
	if (a->mem == NULL) {
		sfr_sys.free(a);
		return -ENOMEM;
	}
	a->slots_at = a->mem + (SFR_PAGE - (uintptr_t)a->mem % SFR_PAGE) % SFR_PAGE;
	a->fd = fd;
	a->direct_fd = -1;
	a->end = end;
	a->piece = (size_t)sfr_limits.ahead_piece_bytes;
	a->nr_pieces = (end + a->piece - 1) / a->piece;
	a->fork_generation = sfr_fork_generation();
	sfr__mutex_init(&a->mu, SFR__LOCK_AHEAD);
	(void)sfr__cond_init(&a->filled);
	(void)sfr__cond_init(&a->freed);
	if (direct)
		a->direct_fd = sfr__direct_open(fd);
	for (; a->nr_threads < NR_THREADS; a->nr_threads++) {
		rc = sfr__thread_start(&a->threads[a->nr_threads], "sfr-reader", SFR__AWAITED,
				       reader_main, a);
		if (rc < 0)
			break;
	}
	if (a->nr_threads == 0) {
		sfr__ahead_stop(a);
		return rc;
	}
	*out = a;
	return 0;
}

bool sfr__ahead_can(const struct sfr__ahead *a, uint64_t off, uint64_t limit)
{
	return off >= a->view_off && limit == a->end && a->fork_generation == sfr_fork_generation();
}

/* Makes the next chunk the view, with the rest of the old one from `off` on in front of it. */
static int take(struct sfr__ahead *a, uint64_t off)
{
	const uint64_t view_end = a->view_off + a->view_len;
	const size_t left = off < view_end ? (size_t)(view_end - off) : 0;
	struct slot *slot = &a->slots[a->taken % NR_SLOTS];
	unsigned char *data = piece_at(a, a->taken);

	if (a->taken == a->nr_pieces || left > SFR__AHEAD_MOST)
		return SFR_ECORRUPT; /* impossible; a wrong verdict is better than a wild write */
	sfr__lock(&a->mu);
	while (!slot->filled)
		(void)sfr__cond_wait(&a->filled, &a->mu, SFR_FOREVER); /* always 0 */
	sfr__unlock(&a->mu);
	if (slot->code != 0)
		return slot->code; /* the same for every later call */
	if (left != 0)
		memcpy(data - left, a->view + (off - a->view_off), left);
	a->view = data - left;
	a->view_off = a->taken * a->piece - left;
	a->view_len = left + slot->len;

	sfr__lock(&a->mu);
	slot->filled = false;     /* for the chunk that uses this slot next */
	a->freed_to = a->taken++; /* all chunks before the view */
	(void)pthread_cond_broadcast(&a->freed);
	sfr__unlock(&a->mu);
	return 0;
}

int sfr__ahead_get(struct sfr__ahead *a, uint64_t off, size_t len, const unsigned char **out,
		   size_t *got)
{
	if (off > a->end || len > a->end - off || len > SFR__AHEAD_MOST)
		return SFR_ECORRUPT; /* impossible: callers compare first */
	while (off + len > a->view_off + a->view_len) {
		int rc = take(a, off);

		if (rc != 0)
			return rc;
	}
	*out = a->view + (off - a->view_off);
	if (got != NULL)
		*got = a->view_len - (size_t)(off - a->view_off);
	return 0;
}

void sfr__ahead_stop(struct sfr__ahead *a)
{
	if (a == NULL)
		return;
	/* A child has no such threads, and the fork handler has closed the descriptor. */
	if (a->fork_generation == sfr_fork_generation())
		end_threads(a);
	sfr_sys.free(a->mem);
	sfr_sys.free(a);
}
