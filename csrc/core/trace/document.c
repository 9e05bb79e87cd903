/* A JSON document in a file that is complete after every write, even if the process dies.
 *
 * Each write adds events and, after them, the closing text that makes the JSON complete. The next
 * write begins where the closing text began:
 *
 *     {"displayTimeUnit":"ms","traceEvents":[ ... events ...],"otherData":{...}}
 *                                                           ^ off: the closing text
 *
 * When a write fails, the closing text is written again at its old offset. Spaces, which JSON
 * allows, then overwrite new events that were written in part. All later events are lost. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "trace/document.h"

enum {
	TEXT_BYTES = 256 << 10, /* length of the text buffer */
	LINE_BYTES = 768,       /* the most that one call of sfr__document_add adds */
	EVENT_LINES = 16,       /* the most calls in a group (sfr__document_make_room) */
	END_BYTES = 256,        /* room for the closing text */
};

/* Writes the document's closing text to `text`. Returns its length. */
static size_t format_closing_text(const struct sfr__document *doc, char *text)
{
	return (size_t)snprintf(text, END_BYTES,
				"\n],\"otherData\":{\"producer\":\"stillframe\","
				"\"started_unix_ns\":\"%" PRIu64 "\",\"dropped_events\":\"%" PRIu64
				"\"}}\n",
				doc->started_unix_ns, doc->nr_dropped);
}

void sfr__document_flush(struct sfr__document *doc)
{
	size_t end_len, written, write_len;
	uint64_t file_end = doc->off + doc->end_len;
	int rc;

	if (doc->error)
		goto out;
	/* sfr__document_make_room has left room for the closing text. */
	end_len = format_closing_text(doc, doc->text + doc->len);
	write_len = doc->len + end_len;
	rc = sfr__write_all(doc->fd, doc->text, write_len, doc->off, &written);
	if (rc == 0) {
		doc->off += doc->len; /* the next write replaces the closing text */
		doc->end_len = end_len;
		goto out;
	}
	doc->error = rc; /* the events in `text` are lost */
	doc->nr_events -= doc->nr_unwritten;
	doc->nr_dropped += doc->nr_unwritten;
	if (doc->off == 0)
		goto out; /* not even the head was written */
	/* Write the closing text again, and spaces over the rest of the failed write. Only existing
	 * bytes are overwritten, so this works on a full disk. */
	end_len = format_closing_text(doc, doc->text);
	if (doc->off + written > file_end)
		file_end = doc->off + written; /* the failed write has made the file longer */
	while (doc->off + end_len < file_end && end_len < TEXT_BYTES)
		doc->text[end_len++] = ' ';
	/* the result is not needed, because doc->error is set already */
	(void)sfr__write_all(doc->fd, doc->text, end_len, doc->off, &written);
out:
	doc->len = 0;
	doc->nr_unwritten = 0;
}

void sfr__document_add(struct sfr__document *doc, const char *format, ...)
{
	va_list args;
	int len;

	va_start(args, format);
	len = vsnprintf(doc->text + doc->len, LINE_BYTES, format, args);
	va_end(args);
	if (len > 0)
		doc->len += (size_t)len < LINE_BYTES ? (size_t)len : LINE_BYTES - 1;
}

void sfr__document_make_room(struct sfr__document *doc)
{
	if (doc->len > TEXT_BYTES - EVENT_LINES * LINE_BYTES - END_BYTES)
		sfr__document_flush(doc);
}

/* Returns the length of the UTF-8 sequence that begins at `s`, or 0 if it is not valid. */
static size_t utf8_sequence_len(const unsigned char *s, const unsigned char *end)
{
	size_t len = 1;

	if (*s >= 0xf0)
		len = 4;
	else if (*s >= 0xe0)
		len = 3;
	else if (*s >= 0x80)
		len = 2;
	if ((*s >= 0x80 && *s < 0xc2) || *s > 0xf4)
		return 0; /* no sequence begins with this byte */
	if ((size_t)(end - s) < len)
		return 0;
	for (size_t i = 1; i < len; i++)
		if ((s[i] & 0xc0) != 0x80)
			return 0;
	if ((*s == 0xe0 && s[1] < 0xa0) || (*s == 0xf0 && s[1] < 0x90))
		return 0; /* overlong */
	if (*s == 0xed && s[1] >= 0xa0)
		return 0; /* a surrogate */
	if (*s == 0xf4 && s[1] >= 0x90)
		return 0; /* above U+10FFFF */
	return len;
}

void sfr__document_escape(const char *in, size_t max, char *out)
{
	const unsigned char *s = (const unsigned char *)in, *end = s + strnlen(in, max);

	while (s < end) {
		size_t len = utf8_sequence_len(s, end);

		if (len == 0) {
			*out++ = '?';
			s++;
		} else if (*s == '"' || *s == '\\') {
			*out++ = '\\';
			*out++ = (char)*s++;
		} else if (*s < 0x20 || *s == 0x7f) {
			out += snprintf(out, 7, "\\u%04x", *s++); /* 6 bytes and a final zero */
		} else {
			memcpy(out, s, len);
			out += len;
			s += len;
		}
	}
	*out = '\0';
}

int sfr__document_open(struct sfr__document *doc, const char *path)
{
	struct timespec now = { 0, 0 };
	struct stat st;

	*doc = (struct sfr__document){ .fd = -1, .text = sfr_sys.malloc(TEXT_BYTES) };
	if (!doc->text)
		return -ENOMEM;
	/* O_NONBLOCK, because a pipe without a reader must not block the caller */
	doc->fd = sfr__fd_open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK | O_NOCTTY, 0666);
	if (doc->fd < 0)
		return doc->fd;
	if (sfr_sys.fstat(doc->fd, &st) < 0)
		return -errno;
	if (!S_ISREG(st.st_mode))
		return -EINVAL;
	(void)sfr_sys.clock_gettime(CLOCK_REALTIME, &now); /* the clock always exists on Linux */
	doc->started_unix_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
	sfr__document_add(doc,
			  "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n"
			  "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,"
			  "\"args\":{\"name\":\"stillframe\"}}",
			  (int)getpid());
	sfr__document_flush(doc);
	return doc->error;
}

void sfr__document_close(struct sfr__document *doc)
{
	if (doc->fd >= 0)
		(void)sfr__fd_close(doc->fd); /* no error matters: the events are written */
	doc->fd = -1;
	sfr_sys.free(doc->text);
	doc->text = NULL;
}
