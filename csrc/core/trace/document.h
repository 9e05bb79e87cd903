/* A JSON document in a file that is complete after every write. document.c implements it. */
#ifndef SFR_DOCUMENT_H
#define SFR_DOCUMENT_H

#include "base/base.h"

struct sfr__document {
	int fd;
	uint64_t off;     /* offset of the document's end, which the next write replaces */
	uint64_t end_len; /* bytes of that end */
	uint64_t started_unix_ns;
	uint64_t nr_events, nr_dropped;
	uint64_t nr_unwritten; /* events in the text buffer */
	int error;             /* the first error of the file; later events are dropped */
	char *text;
	size_t len; /* bytes in the text buffer */
};

/* Creates or truncates the file and writes a document without events. 0 or -errno; the caller must
 * call sfr__document_close in either case. */
int sfr__document_open(struct sfr__document *doc, const char *path);
void sfr__document_close(struct sfr__document *doc);
/* Called before a group of at most 16 calls of sfr__document_add that belong together: the
 * document's end is only ever written between groups. */
void sfr__document_begin(struct sfr__document *doc);
__attribute__((format(printf, 2, 3))) void sfr__document_add(struct sfr__document *doc,
							     const char *format, ...);
/* Writes the added text, and the document's end with its counts. */
void sfr__document_flush(struct sfr__document *doc);
/* Escapes a string for JSON, without quotes. Bytes that are not valid UTF-8 become '?'. `out` has
 * room for 6 bytes per byte and the final zero. */
void sfr__document_escape(const char *in, size_t max, char *out);

#endif
