/* Keeps one range of a file in memory, the window.
 *
 * A reader that goes through a file front to back asks for a few bytes here and a megabyte there.
 * The window answers from memory, or reads one chunk that begins on a page:
 *
 *     file     |-------|-------|-------|-------|-------|    pages
 *     window           [w->buf         ^               ]    w->len bytes; the bytes that are
 *                                      off                  asked for may be anywhere in it
 *
 * Asking for bytes before the window costs another read. The memory is allocated at the start, so
 * the contents of a file cannot make it grow. */
#include <errno.h>

#include "reader/window.h"
#include "base/base.h"

int sfr__window_init(struct sfr__window *w, int fd, uint64_t base, enum sfr__read_way way,
		     size_t cap, size_t chunk_bytes)
{
	*w = (struct sfr__window){ .cap = cap, .chunk_bytes = chunk_bytes };
	/* A direct read may write to the rest of the last page. */
	w->mem = sfr_sys.malloc((size_t)sfr__round_up(cap, SFR_PAGE) + SFR_PAGE);
	if (w->mem == NULL)
		return -ENOMEM;
	w->buf = sfr__round_up_to_page(w->mem);
	sfr__source_open(&w->source, fd, base, way);
	return 0;
}

void sfr__window_fini(struct sfr__window *w)
{
	if (w->mem != NULL)
		sfr__source_close(&w->source);
	sfr_sys.free(w->mem);
	w->mem = NULL;
}

static bool has_range(const struct sfr__window *w, uint64_t off, size_t len)
{
	if (off < w->off || off - w->off > w->len)
		return false;
	return len <= w->len - (size_t)(off - w->off);
}

int sfr__window_get(struct sfr__window *w, uint64_t off, size_t len, uint64_t limit,
		    const unsigned char **out, size_t *avail)
{
	if (!has_range(w, off, len)) {
		size_t lead = (size_t)(off % SFR_PAGE); /* bytes before `off` in its page */
		size_t nbytes = lead + len > w->chunk_bytes ? lead + len : w->chunk_bytes;
		int rc;

		if (off > limit || len > limit - off)
			return SFR_ECORRUPT; /* cannot happen: callers compare with `limit` first */
		w->off = off - lead;
		if (nbytes > limit - w->off)
			nbytes = (size_t)(limit - w->off);
		if (nbytes > w->cap) /* must not happen, but never write beyond the memory */
			return SFR_ECORRUPT;
		w->len = 0; /* if the read fails, the window is empty */
		rc = sfr__source_read(&w->source, w->buf, nbytes, w->off);
		if (rc != 0)
			return rc;
		w->len = nbytes;
	}
	*out = (const unsigned char *)w->buf + (off - w->off);
	if (avail != NULL)
		*avail = w->len - (size_t)(off - w->off);
	return 0;
}
