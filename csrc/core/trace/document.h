/* A JSON document in a file that is complete after every write. document.c implements it. */
#ifndef SFR_DOCUMENT_H
#define SFR_DOCUMENT_H

#include "base/base.h"

struct sfr__document {
	int fd;                   /* -1: closed */
	uint64_t off;             /* offset of the closing text, which the next write replaces */
	uint64_t end_len;         /* length of the closing text */
	uint64_t started_unix_ns; /* the time of sfr__document_open */
	/* counted by the caller; sfr__document_flush corrects the counts after a failure */
	uint64_t nr_events;    /* added events */
	uint64_t nr_dropped;   /* lost events */
	uint64_t nr_unwritten; /* events in `text` */
	int error;             /* the file's first error: 0 or -errno; later events are lost */
	char *text;            /* buffer for text that is not written yet */
	size_t len;            /* bytes in `text` */
};

/* Creates or truncates the file and writes a document without events. Returns 0 or -errno. The
 * caller must call sfr__document_close in either case. */
int sfr__document_open(struct sfr__document *doc, const char *path);
void sfr__document_close(struct sfr__document *doc);
/* Begins a group of at most 16 calls of sfr__document_add. Their text is written together. */
void sfr__document_make_room(struct sfr__document *doc);
/* Appends formatted text of less than 768 bytes to `text`. */
__attribute__((format(printf, 2, 3))) void sfr__document_add(struct sfr__document *doc,
							     const char *format, ...);
/* Writes the added text and, after it, the closing text of the document. */
void sfr__document_flush(struct sfr__document *doc);
/* Escapes a string of at most `max` bytes for JSON, without quotes. A byte that is not valid UTF-8
 * becomes '?'. `out` has room for 6 * max + 1 bytes. */
void sfr__document_escape(const char *in, size_t max, char *out);

#endif
