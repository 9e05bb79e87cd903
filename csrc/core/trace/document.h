/* A JSON document in a file that is whole after every write. See document.c. */
#ifndef SFR_DOCUMENT_H
#define SFR_DOCUMENT_H

#include "base/base.h"

struct sfr__document {
	int fd;
	uint64_t off; /* of the document's end */
	uint64_t end_len, started_unix_ns;
	uint64_t nr_events, nr_dropped;
	uint64_t nr_unwritten; /* events of the text not yet written */
	int error;             /* the first one of the file; events are dropped from then on */
	char *text;
	size_t len; /* of the text not yet written */
};

/* Makes (or empties) the file and writes a document without events. 0 or -errno; closed by
 * sfr__document_close in either case. */
int sfr__document_open(struct sfr__document *doc, const char *path);
void sfr__document_close(struct sfr__document *doc);
/* Before what belongs together, at most 16 calls of sfr__document_add: only whole events are
 * followed by the document's end. */
void sfr__document_begin(struct sfr__document *doc);
__attribute__((format(printf, 2, 3))) void sfr__document_add(struct sfr__document *doc,
							     const char *format, ...);
/* Writes what has been added, and the document's end with its counts. */
void sfr__document_flush(struct sfr__document *doc);
/* A string as JSON wants it, without its quotes: what is not whole UTF-8 becomes '?'. `out` has
 * room for 6 bytes a byte and the final zero. */
void sfr__document_escape(const char *in, size_t max, char *out);

#endif
