/* Opcodes of a pickle, with their names in Python's pickle module, and the positions of plain
 * tensors in a pickle. */
#ifndef SFR_PY_PICKLE_H
#define SFR_PY_PICKLE_H

#include "skeleton/skeleton.h"

enum {
	OP_MARK = '(',
	OP_STOP = '.',
	OP_BINGET = 'h',
	OP_LONG_BINGET = 'j',
	OP_BINPUT = 'q',
	OP_LONG_BINPUT = 'r',
	OP_BININT = 'J',
	OP_BININT1 = 'K',
	OP_BININT2 = 'M',
	OP_BINUNICODE = 'X',
	OP_GLOBAL = 'c',
	OP_REDUCE = 'R',
	OP_TUPLE = 't',
	OP_EMPTY_TUPLE = ')',
	OP_BINPERSID = 'Q',
	OP_TUPLE1 = 0x85,
	OP_TUPLE3 = 0x87,
	OP_NEWTRUE = 0x88,
	OP_NEWFALSE = 0x89,
	OP_LONG1 = 0x8a,
};

/* The opcodes `number BINPERSID` that the pickler has written in place of a plain tensor. */
struct sfr_py_marker {
	size_t at, len;  /* offset and length in the pickle */
	uint32_t tensor; /* the number: the index of the found tensor */
};

struct sfr_py_scan {
	struct sfr_py_marker *markers;
	size_t nr_markers, room;
	uint32_t *counts;   /* by number of the tensor: how often it occurs */
	uint32_t next_slot; /* the first memo slot after those that the pickler uses; never 0 */
};
/* Finds all markers. *scan is zeroed before. Call sfr_py_scan_fini also after a failure. */
int sfr_py_scan(const struct sfr_py_splice *job, struct sfr_py_scan *scan);
void sfr_py_scan_fini(struct sfr_py_scan *scan);

#endif
