/* Finds the markers of plain tensors in a finished pickle.
 *
 * A marker is `number BINPERSID`, which the pickler has written in place of a plain tensor. The
 * scan parses all opcodes, because the bytes of a marker may also occur in a string. A number
 * directly before BINPERSID is always a marker, because ids from torch's own path are tuples. */
#include <limits.h>
#include <string.h>

#include "skeleton/pickle.h"

/* The length of each opcode up to protocol 2, argument included: a number of bytes, or one of these
 * constants. 0: there is no such opcode. */
enum {
	LINE = -1,   /* up to a newline */
	LINES = -2,  /* up to the second newline */
	COUNT1 = -3, /* a 1-byte length, then that many bytes */
	COUNT4 = -4, /* a 4-byte length, then that many bytes */
};
static const signed char op_lens[UCHAR_MAX + 1] = {
	['('] = 1,      ['.'] = 1,       ['0'] = 1,      ['1'] = 1,       ['2'] = 1,
	['N'] = 1,      ['Q'] = 1,       ['R'] = 1,      ['a'] = 1,       ['b'] = 1,
	['d'] = 1,      ['}'] = 1,       ['e'] = 1,      ['l'] = 1,       [']'] = 1,
	['s'] = 1,      ['t'] = 1,       [')'] = 1,      ['u'] = 1,       [0x81] = 1,
	[0x85] = 1,     [0x86] = 1,      [0x87] = 1,     [0x88] = 1,      [0x89] = 1,
	['K'] = 2,      ['h'] = 2,       ['q'] = 2,      [0x80] = 2,      [0x82] = 2,
	['M'] = 3,      [0x83] = 3,      ['J'] = 5,      ['j'] = 5,       ['r'] = 5,
	[0x84] = 5,     ['G'] = 9,       ['F'] = LINE,   ['I'] = LINE,    ['L'] = LINE,
	['P'] = LINE,   ['S'] = LINE,    ['V'] = LINE,   ['g'] = LINE,    ['p'] = LINE,
	['c'] = LINES,  ['i'] = LINES,   ['U'] = COUNT1, [0x8a] = COUNT1, ['X'] = COUNT4,
	['T'] = COUNT4, [0x8b] = COUNT4,
};

static uint32_t load_le32(const unsigned char *p)
{
	return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* Returns the length of the line at `p`, with its newline; 0 if there is none in `left` bytes. */
static size_t line_len(const unsigned char *p, size_t left)
{
	const unsigned char *end = left == 0 ? NULL : memchr(p, '\n', left);

	return end == NULL ? 0 : (size_t)(end - p) + 1;
}

/* Returns the length of the opcode at `p` with its argument; 0 if there is no such opcode, or if it
 * is longer than `left` bytes. */
static size_t op_len(const unsigned char *p, size_t left)
{
	size_t len, second;

	switch (op_lens[p[0]]) {
	case LINE:
		len = line_len(p + 1, left - 1);
		return len == 0 ? 0 : 1 + len;
	case LINES:
		len = line_len(p + 1, left - 1);
		if (len == 0)
			return 0;
		second = line_len(p + 1 + len, left - 1 - len);
		return second == 0 ? 0 : 1 + len + second;
	case COUNT1:
		if (left < 2)
			return 0;
		len = 2 + (size_t)p[1];
		break;
	case COUNT4:
		if (left < 5)
			return 0;
		len = 5 + (size_t)load_le32(p + 1);
		break;
	default:
		len = (size_t)op_lens[p[0]];
		break;
	}
	return len > left ? 0 : len;
}

#define NOT_AN_INT UINT32_MAX

/* Returns the int that an opcode BININT, BININT1 or BININT2 pushes; NOT_AN_INT for any other
 * opcode. */
static uint32_t pushed_int(const unsigned char *p)
{
	switch (p[0]) {
	case OP_BININT1:
		return p[1];
	case OP_BININT2:
		return (uint32_t)p[1] | (uint32_t)p[2] << 8;
	case OP_BININT:
		return load_le32(p + 1);
	default:
		return NOT_AN_INT;
	}
}

/* Appends a marker and counts its tensor. */
static int add_marker(struct sfr_py_scan *scan, struct sfr_py_marker marker)
{
	if (scan->nr_markers == scan->room) {
		size_t new_room = scan->room == 0 ? 256 : 2 * scan->room;
		struct sfr_py_marker *grown =
			PyMem_Realloc(scan->markers, new_room * sizeof(*grown));

		if (grown == NULL)
			return sfr_py_set_memory_error();
		scan->markers = grown;
		scan->room = new_room;
	}
	scan->markers[scan->nr_markers++] = marker;
	scan->counts[marker.tensor]++;
	return 0;
}

int sfr_py_scan(const struct sfr_py_splice *job, struct sfr_py_scan *scan)
{
	size_t at = 0, previous_at = 0; /* offsets of the current opcode and of the one before it */
	uint32_t nr_memo_slots = 0;     /* one more than the highest memo slot so far */

	scan->counts = PyMem_Calloc(job->nr_found + 1, sizeof(*scan->counts));
	if (scan->counts == NULL)
		return sfr_py_set_memory_error();
	while (at < job->len) {
		const unsigned char *p = job->in + at;
		size_t len = op_len(p, job->len - at);

		if (len == 0)
			break; /* the error below: no opcode, or cut off */
		if (p[0] == OP_BINPUT || p[0] == OP_LONG_BINPUT) {
			uint32_t slot = p[0] == OP_BINPUT ? p[1] : load_le32(p + 1);

			if (slot + 1 > nr_memo_slots)
				nr_memo_slots = slot + 1;
		} else if (p[0] == OP_BINPERSID &&
			   pushed_int(job->in + previous_at) != NOT_AN_INT) {
			struct sfr_py_marker marker = { .at = previous_at,
							.len = at + len - previous_at,
							.tensor =
								pushed_int(job->in + previous_at) };

			if (marker.tensor >= job->nr_found || job->found[marker.tensor].row == NULL)
				break; /* the error below: not the number of a plain tensor */
			if (add_marker(scan, marker) != 0)
				return -1;
		} else if (p[0] == OP_STOP) {
			if (at + 1 != job->len)
				break; /* the error below: bytes follow */
			/* not slot 0, which means "no slot" in the splice's memo */
			scan->next_slot = nr_memo_slots == 0 ? 1 : nr_memo_slots;
			return 0;
		}
		previous_at = at;
		at += len;
	}
	PyErr_Format(PyExc_SystemError, "the pickle cannot be parsed at byte %zd", (Py_ssize_t)at);
	return -1;
}

void sfr_py_scan_fini(struct sfr_py_scan *scan)
{
	PyMem_Free(scan->markers);
	PyMem_Free(scan->counts);
}
