/* Puts the plain tensors into the finished pickle.
 *
 * The pickler has written `number BINPERSID` wherever it met a plain tensor (skeleton.c). Two
 * passes turn that into the file's data.pkl:
 *
 *   scan   walks over the opcodes and notes where the markers stand, how often each tensor
 *          occurs, and the pickler's highest memo slot. Opcodes are parsed, never searched
 *          for: the bytes of a marker may occur inside any string. A number directly before
 *          BINPERSID is always a marker, since the general road's ids are tuples.
 *   write  copies what lies between the markers and writes, in place of each, the opcodes
 *          that rebuild the tensor. The slots after the pickler's last one keep what is
 *          wanted again: a tensor that occurs more than once, and each of the constants
 *          (functions, storage classes, location tags), at its first use.
 *
 * Only opcodes of protocol 2 are written, as torch's weights_only unpickler knows no others.
 * No Python object is touched but the strings, so nothing here runs foreign code.
 */
#include <string.h>

#include "skeleton.h"

enum {
	OP_MARK = '(', OP_STOP = '.', OP_BINGET = 'h', OP_LONG_BINGET = 'j', OP_BINPUT = 'q',
	OP_LONG_BINPUT = 'r', OP_BININT = 'J', OP_BININT1 = 'K', OP_BININT2 = 'M',
	OP_BINUNICODE = 'X', OP_GLOBAL = 'c', OP_REDUCE = 'R', OP_TUPLE = 't',
	OP_EMPTY_TUPLE = ')', OP_BINPERSID = 'Q', OP_TUPLE1 = 0x85, OP_NEWTRUE = 0x88,
	OP_NEWFALSE = 0x89, OP_LONG1 = 0x8a,
};

/* The length of an opcode's argument, by opcode: a number of bytes, or one of these. */
enum {
	ARG_LINE = -1,   /* up to a newline */
	ARG_2LINES = -2, /* up to the second newline */
	ARG_LEN1 = -3,   /* a length in 1 byte, then as many bytes */
	ARG_LEN4 = -4,   /* a length in 4 bytes, then as many bytes */
	ARG_BAD = -5,    /* no opcode of protocol 2 */
};

struct marker {
	size_t at, len; /* in the pickle */
	uint32_t tensor;
};

/* Opcodes written, in memory of our own. A failed allocation is kept until the end. */
struct out {
	unsigned char *mem;
	size_t len, room;
	bool failed;
};

/* Memo slots of constants; 0 = not written yet (the slot before is the pickler's or PROTO's). */
struct memo {
	uint32_t next;
	uint32_t rebuild_tensor, rebuild_parameter, ordered_dict, storage;
	uint32_t storage_class[SFR_PY_MAX_DTYPES];
	struct {
		PyObject *location;
		uint32_t slot;
	} location[16]; /* more than these are written out each time */
	uint32_t nr_locations;
	struct {
		uint32_t count; /* how often it occurs */
		uint32_t slot;
	} *tensor; /* by number */
};

static int arg_of(unsigned char op)
{
	switch (op) {
	case '(': case '.': case '0': case '1': case '2': case 'N': case 'Q': case 'R':
	case 'a': case 'b': case 'd': case '}': case 'e': case 'l': case ']': case 's':
	case 't': case ')': case 'u': case 0x81: case 0x85: case 0x86: case 0x87: case 0x88:
	case 0x89:
		return 0;
	case 'K': case 'h': case 'q': case 0x80: case 0x82:
		return 1;
	case 'M': case 0x83:
		return 2;
	case 'J': case 'j': case 'r': case 0x84:
		return 4;
	case 'G':
		return 8;
	case 'F': case 'I': case 'L': case 'P': case 'S': case 'V': case 'g': case 'p':
		return ARG_LINE;
	case 'c': case 'i':
		return ARG_2LINES;
	case 'U': case 0x8a:
		return ARG_LEN1;
	case 'X': case 'T': case 0x8b:
		return ARG_LEN4;
	default:
		return ARG_BAD;
	}
}

static uint32_t load32(const unsigned char *p)
{
	return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* Bytes up to and with the next newline, 0 if there is none. */
static size_t line_len(const unsigned char *p, size_t left)
{
	const unsigned char *end = left == 0 ? NULL : memchr(p, '\n', left);

	return end == NULL ? 0 : (size_t)(end - p) + 1;
}

/* The length of the opcode at `p` with its argument, 0 if it is none or cut short. */
static size_t op_len(const unsigned char *p, size_t left)
{
	int arg = arg_of(p[0]);
	size_t len, second;

	switch (arg) {
	case ARG_BAD:
		return 0;
	case ARG_LINE:
		len = line_len(p + 1, left - 1);
		return len == 0 ? 0 : 1 + len;
	case ARG_2LINES:
		len = line_len(p + 1, left - 1);
		if (len == 0)
			return 0;
		second = line_len(p + 1 + len, left - 1 - len);
		return second == 0 ? 0 : 1 + len + second;
	case ARG_LEN1:
		if (left < 2)
			return 0;
		len = 2 + (size_t)p[1];
		break;
	case ARG_LEN4:
		if (left < 5)
			return 0;
		len = 5 + (size_t)load32(p + 1);
		break;
	default:
		len = 1 + (size_t)arg;
		break;
	}
	return len > left ? 0 : len;
}

/* The number that a BININT opcode pushes, UINT32_MAX for another opcode. */
static uint32_t number_of(const unsigned char *p)
{
	switch (p[0]) {
	case OP_BININT1:
		return p[1];
	case OP_BININT2:
		return (uint32_t)p[1] | (uint32_t)p[2] << 8;
	case OP_BININT:
		return load32(p + 1);
	default:
		return UINT32_MAX;
	}
}

/* ---- scan ----------------------------------------------------------------- */

static int add_marker(struct marker **markers, size_t *nr, size_t *room, struct marker one)
{
	if (*nr == *room) {
		size_t wanted = *room == 0 ? 256 : 2 * *room;
		struct marker *grown = PyMem_Realloc(*markers, wanted * sizeof(*grown));

		if (grown == NULL) {
			(void)PyErr_NoMemory(); /* always NULL */
			return -1;
		}
		*markers = grown;
		*room = wanted;
	}
	(*markers)[(*nr)++] = one;
	return 0;
}

/* Fills markers, the counts of memo->tensor and memo->next. 0, or -1 with an exception set;
 * *markers is the caller's to free either way. */
static int scan(const struct sfr_py_splice *job, struct marker **markers, size_t *nr,
		struct memo *memo)
{
	size_t at = 0, last = 0, room = 0;
	uint32_t top = 0;

	while (at < job->len) {
		const unsigned char *p = job->in + at;
		size_t len = op_len(p, job->len - at);

		if (len == 0)
			break;
		if (p[0] == OP_BINPUT && (uint32_t)p[1] + 1 > top)
			top = (uint32_t)p[1] + 1;
		else if (p[0] == OP_LONG_BINPUT && load32(p + 1) + 1 > top)
			top = load32(p + 1) + 1;
		else if (p[0] == OP_BINPERSID) {
			struct marker one = {last, at + 1 - last, number_of(job->in + last)};

			if (one.tensor != UINT32_MAX) {
				if (one.tensor >= job->nr_found || job->found[one.tensor].row == NULL)
					break;
				memo->tensor[one.tensor].count++;
				if (add_marker(markers, nr, &room, one) != 0)
					return -1;
			}
		} else if (p[0] == OP_STOP) {
			if (at + 1 != job->len)
				break;
			memo->next = top == 0 ? 1 : top; /* 0 stands for "no slot" */
			return 0;
		}
		last = at;
		at += len;
	}
	PyErr_Format(PyExc_SystemError, "the pickle cannot be parsed at byte %zd", (Py_ssize_t)at);
	return -1;
}

/* ---- write ---------------------------------------------------------------- */

/* Makes room for `len` more bytes; false if there is no memory. */
static bool reserve(struct out *out, size_t len)
{
	size_t wanted = out->room;
	unsigned char *grown;

	if (out->failed)
		return false;
	if (len <= out->room - out->len)
		return true;
	while (len > wanted - out->len)
		wanted += wanted / 2 + 4096;
	grown = PyMem_Realloc(out->mem, wanted);
	if (grown == NULL) {
		out->failed = true;
		return false;
	}
	out->mem = grown;
	out->room = wanted;
	return true;
}

static void put_bytes(struct out *out, const void *bytes, size_t len)
{
	if (len == 0 || !reserve(out, len))
		return;
	memcpy(out->mem + out->len, bytes, len);
	out->len += len;
}

static void put_op(struct out *out, unsigned char op)
{
	put_bytes(out, &op, 1);
}

/* An opcode with an argument of `len` bytes, little-endian. */
static void put_arg(struct out *out, unsigned char op, uint64_t arg, size_t len)
{
	unsigned char bytes[9];
	size_t i;

	bytes[0] = op;
	for (i = 0; i < len; i++)
		bytes[1 + i] = (unsigned char)(arg >> (8 * i));
	put_bytes(out, bytes, 1 + len);
}

static void put_int(struct out *out, int64_t value)
{
	unsigned char bytes[10] = {OP_LONG1, 8};
	size_t i;

	if (value >= 0 && value < 0x100) {
		put_arg(out, OP_BININT1, (uint64_t)value, 1);
	} else if (value >= 0 && value < 0x10000) {
		put_arg(out, OP_BININT2, (uint64_t)value, 2);
	} else if (value >= INT32_MIN && value <= INT32_MAX) {
		put_arg(out, OP_BININT, (uint64_t)value, 4);
	} else {
		for (i = 0; i < 8; i++)
			bytes[2 + i] = (unsigned char)((uint64_t)value >> (8 * i));
		put_bytes(out, bytes, sizeof(bytes));
	}
}

static void put_str(struct out *out, const char *text, size_t len)
{
	put_arg(out, OP_BINUNICODE, len, 4);
	put_bytes(out, text, len);
}

static void put_tuple(struct out *out, const int64_t *values, int64_t len)
{
	int64_t i;

	if (len == 0) {
		put_op(out, OP_EMPTY_TUPLE);
		return;
	}
	if (len > 3)
		put_op(out, OP_MARK);
	for (i = 0; i < len; i++)
		put_int(out, values[i]);
	put_op(out, len > 3 ? OP_TUPLE : (unsigned char)(OP_TUPLE1 + len - 1));
}

static void put_bool(struct out *out, bool value)
{
	put_op(out, value ? OP_NEWTRUE : OP_NEWFALSE);
}

static void put_get(struct out *out, uint32_t slot)
{
	if (slot < 0x100)
		put_arg(out, OP_BINGET, slot, 1);
	else
		put_arg(out, OP_LONG_BINGET, slot, 4);
}

/* Keeps what was pushed last in a new slot. */
static uint32_t put_keep(struct out *out, struct memo *memo)
{
	uint32_t slot = memo->next++;

	if (slot < 0x100)
		put_arg(out, OP_BINPUT, slot, 1);
	else
		put_arg(out, OP_LONG_BINPUT, slot, 4);
	return slot;
}

/* A global, written out at its first use and got back from *slot later. */
static void put_global(struct out *out, struct memo *memo, uint32_t *slot, const char *module,
		       const char *name)
{
	if (*slot != 0) {
		put_get(out, *slot);
		return;
	}
	put_op(out, OP_GLOBAL);
	put_bytes(out, module, strlen(module));
	put_op(out, '\n');
	put_bytes(out, name, strlen(name));
	put_op(out, '\n');
	*slot = put_keep(out, memo);
}

/* An empty OrderedDict of its own: a tensor's hooks. */
static void put_hooks(struct out *out, struct memo *memo)
{
	put_global(out, memo, &memo->ordered_dict, "collections", "OrderedDict");
	put_op(out, OP_EMPTY_TUPLE);
	put_op(out, OP_REDUCE);
}

/* A location tag. 0, or -1 with an exception set (a tag that UTF-8 cannot hold). */
static int put_location(struct out *out, struct memo *memo, PyObject *location)
{
	const char *text;
	Py_ssize_t len;
	uint32_t i;

	for (i = 0; i < memo->nr_locations; i++) {
		if (memo->location[i].location == location) {
			put_get(out, memo->location[i].slot);
			return 0;
		}
	}
	text = PyUnicode_AsUTF8AndSize(location, &len);
	if (text == NULL)
		return -1;
	put_str(out, text, (size_t)len);
	if (i < sizeof(memo->location) / sizeof(memo->location[0])) {
		memo->location[i].location = location;
		memo->location[i].slot = put_keep(out, memo);
		memo->nr_locations++;
	}
	return 0;
}

/* ('storage', torch.FloatStorage, '17', 'cpu', 1024) BINPERSID. 0 or -1. */
static int put_storage(struct out *out, struct memo *memo, const struct sfr_py_splice *job,
		       const struct sfr_py_found *tensor)
{
	const struct sfr_py_storage *storage = &job->storages[tensor->storage];
	const struct sfr_py_dtype *dtype = &job->kinds->dtype[tensor->dtype];
	uint32_t number = tensor->storage;
	char key[10];
	size_t i = sizeof(key);

	put_op(out, OP_MARK);
	if (memo->storage != 0) {
		put_get(out, memo->storage);
	} else {
		put_str(out, "storage", 7);
		memo->storage = put_keep(out, memo);
	}
	put_global(out, memo, &memo->storage_class[tensor->dtype], "torch", dtype->name);
	do {
		key[--i] = (char)('0' + number % 10);
		number /= 10;
	} while (number != 0);
	put_str(out, key + i, sizeof(key) - i);
	if (put_location(out, memo, storage->location) != 0)
		return -1;
	put_int(out, (int64_t)(storage->nbytes / dtype->itemsize));
	put_op(out, OP_TUPLE);
	put_op(out, OP_BINPERSID);
	return 0;
}

/* The opcodes that rebuild one tensor. 0 or -1. */
static int put_tensor(struct out *out, struct memo *memo, const struct sfr_py_splice *job,
		      const struct sfr_py_found *tensor)
{
	const int64_t *row = tensor->row;

	if (tensor->parameter) {
		put_global(out, memo, &memo->rebuild_parameter, "torch._utils",
			   "_rebuild_parameter");
		/* then its arguments: a tensor, requires_grad, hooks */
	}
	put_global(out, memo, &memo->rebuild_tensor, "torch._utils", "_rebuild_tensor_v2");
	put_op(out, OP_MARK);
	if (put_storage(out, memo, job, tensor) != 0)
		return -1;
	put_int(out, row[1]);
	put_tuple(out, row + 4, row[3]);
	put_tuple(out, row + 4 + row[3], row[3]);
	put_bool(out, tensor->requires_grad && !tensor->parameter);
	put_hooks(out, memo);
	put_op(out, OP_TUPLE);
	put_op(out, OP_REDUCE);
	if (tensor->parameter) {
		put_bool(out, tensor->requires_grad);
		put_hooks(out, memo);
		put_op(out, OP_TUPLE1 + 2);
		put_op(out, OP_REDUCE);
	}
	return 0;
}

PyObject *sfr_py_splice(const struct sfr_py_splice *job)
{
	struct marker *markers = NULL;
	struct out out = {NULL, 0, 0, false};
	struct memo memo = {0};
	PyObject *result = NULL;
	size_t nr = 0, i, at = 0;

	memo.tensor = PyMem_Calloc(job->nr_found + 1, sizeof(*memo.tensor));
	if (memo.tensor == NULL)
		return PyErr_NoMemory();
	if (scan(job, &markers, &nr, &memo) != 0)
		goto fail;
	(void)reserve(&out, job->len + 96 * nr + 256); /* a first guess; a failure is kept */
	for (i = 0; i < nr; i++) {
		const struct marker *marker = &markers[i];
		uint32_t *slot = &memo.tensor[marker->tensor].slot;

		put_bytes(&out, job->in + at, marker->at - at);
		at = marker->at + marker->len;
		if (*slot != 0) {
			put_get(&out, *slot);
			continue;
		}
		if (put_tensor(&out, &memo, job, &job->found[marker->tensor]) != 0)
			goto fail;
		if (memo.tensor[marker->tensor].count > 1)
			*slot = put_keep(&out, &memo);
	}
	put_bytes(&out, job->in + at, job->len - at);
	if (out.failed)
		(void)PyErr_NoMemory(); /* always NULL */
	else
		result = PyBytes_FromStringAndSize((const char *)out.mem, (Py_ssize_t)out.len);
fail:
	PyMem_Free(out.mem);
	PyMem_Free(markers);
	PyMem_Free(memo.tensor);
	return result;
}
