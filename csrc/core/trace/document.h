/* A JSON document in a file that is complete after every write. document.c implements it. */
#ifndef SFR_DOCUMENT_H
#define SFR_DOCUMENT_H

#include "base/base.h"

struct sfr__document {
	int fd;                   /* -1: closed */
	uint64_t off;             /* offset of the document's end, which the next write replaces */
	uint64_t end_len;         /* length of the document's end */
	uint64_t started_unix_ns; /* the time of sfr__document_open */
	/* counted by the caller; sfr__document_flush corrects them after a failure */
	uint64_t nr_events;    /* events that were added */
	uint64_t nr_dropped;   /* events that were lost */
	uint64_t nr_unwritten; /* events in `text` */
	int error;  /* the first error of the file: 0 or -errno; later events are dropped */
	char *text; /* what was added and not written yet */
	size_t len; /* bytes in `text` */
};

/* Creates or truncates the file and writes a document without events. 0 or -errno; the caller must
 * call sfr__document_close in either case. */
int sfr__document_open(struct sfr__document *doc, const char *path);
void sfr__document_close(struct sfr__document *doc);
/* Begins a group of at most 16 calls of sfr__document_add, which are written together: the
 * document's end never comes between them. */
void sfr__document_begin(struct sfr__document *doc);
/* Appends formatted text of less than 768 bytes to `text`. */
__attribute__((format(printf, 2, 3))) void sfr__document_add(struct sfr__document *doc,
							     const char *format, ...);
/* Writes the added text, and the document's end with its counts. */
void sfr__document_flush(struct sfr__document *doc);
/* Escapes a string of at most `max` bytes for JSON and writes it to `out`, without quotes. Bytes
 * that are not valid UTF-8 become '?'. `out` has room for 6 bytes for each byte of `in`, and for
 * the final zero. */
void sfr__document_escape(const char *in, size_t max, char *out);

#endif
