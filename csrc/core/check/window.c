/* Keeps a part of a file in memory.
 *
 * A reader that goes through a file front to back asks for a few bytes here and a megabyte there.
 * The window answers from memory, or reads one chunk that begins on a page. So the file is read
 * once, in calls of one size:
 *
 *     file     |-------|-------|-------|-------|-------|    pages
 *     window           [buf         ^off ..... len   ]      off may be anywhere in it
 *
 * Asking backwards works and costs another read. With a read-ahead (ahead.c), forward requests are
 * answered from that. The memory is fixed at the start, so a file cannot make it grow. */
#include <errno.h>

#include "check/ahead.h"
#include "check/window.h"
#include "base/base.h"

int sfr__window_init(struct sfr__window *w, int fd, size_t cap, size_t piece)
{
	*w = (struct sfr__window){ .fd = fd, .cap = cap, .piece = piece };
	w->mem = sfr_sys.malloc(cap + SFR_PAGE);
	if (w->mem == NULL)
		return -ENOMEM;
	w->buf = w->mem + (SFR_PAGE - (uintptr_t)w->mem % SFR_PAGE) % SFR_PAGE;
	return 0;
}

void sfr__window_fini(struct sfr__window *w)
{
	sfr__ahead_stop(w->ahead);
	w->ahead = NULL;
	sfr_sys.free(w->mem);
	w->mem = NULL;
}

/* Reads [w->off, w->off + want), continuing after short reads and EINTR. */
static int refill(struct sfr__window *w, size_t want)
{
	w->len = 0;
	while (w->len < want) {
		ssize_t n = sfr_sys.pread(w->fd, w->buf + w->len, want - w->len,
					  (off_t)(w->off + w->len));

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		if (n == 0)
			return SFR_ECORRUPT;
		w->len += (size_t)n;
	}
	return 0;
}

int sfr__window_get(struct sfr__window *w, uint64_t off, size_t len, uint64_t limit,
		    const unsigned char **out, size_t *got)
{
	if (w->ahead != NULL && sfr__ahead_can(w->ahead, off, limit))
		return sfr__ahead_get(w->ahead, off, len, out, got);
	if (off < w->off || off - w->off > w->len || len > w->len - (size_t)(off - w->off)) {
		size_t lead = (size_t)(off % SFR_PAGE);
		size_t want = lead + len > w->piece ? lead + len : w->piece;
		int rc;

		if (off > limit || len > limit - off)
			return SFR_ECORRUPT; /* impossible: callers compare first */
		w->off = off - lead;
		if (want > limit - w->off)
			want = (size_t)(limit - w->off);
		if (want > w->cap)
			/* impossible too; a wrong verdict is better than a wild write */
			return SFR_ECORRUPT;
		rc = refill(w, want);
		if (rc != 0) {
			w->len = 0;
			return rc;
		}
	}
	*out = w->buf + (off - w->off);
	if (got != NULL)
		*got = w->len - (size_t)(off - w->off);
	return 0;
}
