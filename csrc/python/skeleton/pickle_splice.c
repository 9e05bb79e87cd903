/* Writes the plain tensors into the finished pickle.
 *
 * The pickler has written a marker in place of each plain tensor (pickle_scan.c). This file copies
 * the bytes between the markers, and replaces each marker by the opcodes that rebuild the tensor.
 * Constants (functions, storage classes, location tags) and tensors that occur more than once are
 * stored in the pickle's memo, in slots after the pickler's.
 *
 * Only opcodes of protocol 2 are written, because torch's weights_only unpickler knows no others.
 * Room is reserved for a whole tensor at a time; its opcodes are then written without checks. */
#include <string.h>

#include "skeleton/pickle.h"

/* The output buffer: `len` bytes are written, and there is memory for `room`. */
struct out {
	unsigned char *mem;
	size_t len, room;
};

/* A string in UTF-8, borrowed from a Python str. */
struct text {
	const char *chars;
	size_t len;
};

enum {
	TENSOR_ROOM = 320,     /* most bytes of a tensor's opcodes, without sizes, strides, names */
	INT_ROOM = 10,         /* most bytes of an int's opcodes */
	USUAL_TENSOR_LEN = 96, /* a tensor's opcodes usually take no more bytes */
};

/* The memo slots of constants and tensors. 0: not stored yet. */
struct memo {
	uint32_t next_slot; /* the next free slot */
	uint32_t rebuild_tensor_slot, rebuild_parameter_slot, ordered_dict_slot;
	uint32_t storage_slot; /* of the str "storage" */
	uint32_t storage_class_slot[SFR_PY_MAX_DTYPES];
	struct {
		PyObject *location;
		uint32_t slot;
	} location[16]; /* any further location tag is written in full each time */
	uint32_t nr_locations;
	uint32_t *tensor_slot; /* by number of the found tensor */
};

/* Makes room for `len` more bytes. */
static int reserve(struct out *out, size_t len)
{
	size_t new_room = out->room;
	unsigned char *grown;

	if (len <= out->room - out->len)
		return 0;
	while (len > new_room - out->len)
		new_room += new_room / 2 + 4096;
	grown = PyMem_Realloc(out->mem, new_room);
	if (grown == NULL)
		return sfr_py_set_memory_error();
	out->mem = grown;
	out->room = new_room;
	return 0;
}

/* The functions put_* append to the output, where reserve() has made room. */
static void put_bytes(struct out *out, const void *bytes, size_t len)
{
	memcpy(out->mem + out->len, bytes, len);
	out->len += len;
}

static inline void put_op(struct out *out, unsigned char op)
{
	out->mem[out->len++] = op;
}

/* Writes an opcode with an argument of `len` bytes, little-endian. */
static inline void put_arg(struct out *out, unsigned char op, uint64_t arg, size_t len)
{
	unsigned char *to = out->mem + out->len; /* a local variable, so that it is loaded once */
	size_t i;

	to[0] = op;
	for (i = 0; i < len; i++)
		to[1 + i] = (unsigned char)(arg >> (8 * i));
	out->len += 1 + len;
}

static void put_int(struct out *out, int64_t value)
{
	if (value >= 0 && value < 0x100) {
		put_arg(out, OP_BININT1, (uint64_t)value, 1);
	} else if (value >= 0 && value < 0x10000) {
		put_arg(out, OP_BININT2, (uint64_t)value, 2);
	} else if (value >= INT32_MIN && value <= INT32_MAX) {
		put_arg(out, OP_BININT, (uint64_t)value, 4);
	} else {
		const unsigned char nr_bytes = sizeof(value);

		put_op(out, OP_LONG1); /* followed by the length in one byte, and the value */
		put_arg(out, nr_bytes, (uint64_t)value, nr_bytes);
	}
}

static void put_str(struct out *out, const char *text, size_t len)
{
	put_arg(out, OP_BINUNICODE, len, 4);
	put_bytes(out, text, len);
}

/* Writes a tuple of ints. */
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
	/* OP_TUPLE1, OP_TUPLE2 and OP_TUPLE3 are consecutive */
	put_op(out, len > 3 ? OP_TUPLE : (unsigned char)(OP_TUPLE1 + len - 1));
}

static void put_bool(struct out *out, bool value)
{
	put_op(out, value ? OP_NEWTRUE : OP_NEWFALSE);
}

/* Writes the opcode that gets the object in a memo slot. */
static void put_memo_get(struct out *out, uint32_t slot)
{
	if (slot < 0x100)
		put_arg(out, OP_BINGET, slot, 1);
	else
		put_arg(out, OP_LONG_BINGET, slot, 4);
}

/* Takes a new memo slot, and writes the opcode that stores the last object there. Returns the
 * slot. */
static uint32_t put_memoize(struct out *out, struct memo *memo)
{
	uint32_t slot = memo->next_slot++;

	if (slot < 0x100)
		put_arg(out, OP_BINPUT, slot, 1);
	else
		put_arg(out, OP_LONG_BINPUT, slot, 4);
	return slot;
}

/* Writes a global: an object that the unpickler imports by its module and name. It is stored in a
 * new memo slot, *slot. */
static void write_global(struct out *out, struct memo *memo, uint32_t *slot, const char *module,
			 const char *name)
{
	put_op(out, OP_GLOBAL);
	put_bytes(out, module, strlen(module));
	put_op(out, '\n');
	put_bytes(out, name, strlen(name));
	put_op(out, '\n');
	*slot = put_memoize(out, memo);
}

/* Writes a global in full at its first use, when *slot is 0, and then gets it from the memo. */
static inline void put_global(struct out *out, struct memo *memo, uint32_t *slot,
			      const char *module, const char *name)
{
	if (*slot != 0)
		put_memo_get(out, *slot);
	else
		write_global(out, memo, slot, module, name);
}

/* Writes the tensor's hooks: an empty OrderedDict, because a plain tensor has none. */
static void put_empty_hooks(struct out *out, struct memo *memo)
{
	put_global(out, memo, &memo->ordered_dict_slot, "collections", "OrderedDict");
	put_op(out, OP_EMPTY_TUPLE);
	put_op(out, OP_REDUCE);
}

/* Writes a location tag, or gets it from the memo. */
static void put_location(struct out *out, struct memo *memo, PyObject *location,
			 const struct text *tag)
{
	uint32_t i;

	for (i = 0; i < memo->nr_locations; i++) {
		if (memo->location[i].location == location) {
			put_memo_get(out, memo->location[i].slot);
			return;
		}
	}
	put_str(out, tag->chars, tag->len);
	if (i < sizeof(memo->location) / sizeof(memo->location[0])) { /* there is room */
		memo->location[i].location = location;
		memo->location[i].slot = put_memoize(out, memo);
		memo->nr_locations++;
	}
}

/* Writes the reference to a tensor's storage: for example ('storage', torch.FloatStorage, '17',
 * 'cpu', 1024) BINPERSID. '17' is the storage's number, 1024 its number of elements. */
static void put_storage(struct out *out, struct memo *memo, const struct sfr_py_splice *job,
			const struct sfr_py_found_tensor *tensor, const struct text *tag)
{
	const struct sfr_py_storage *storage = &job->storages[tensor->storage];
	const struct sfr_py_dtype *dtype = &job->torch->dtype[tensor->dtype];
	uint32_t number = tensor->storage;
	char key[10]; /* room for the number's digits, which begin at key[i] */
	size_t i = sizeof(key);

	put_op(out, OP_MARK);
	if (memo->storage_slot != 0) {
		put_memo_get(out, memo->storage_slot);
	} else {
		put_str(out, "storage", 7);
		memo->storage_slot = put_memoize(out, memo);
	}
	put_global(out, memo, &memo->storage_class_slot[tensor->dtype], "torch", dtype->name);
	do {
		key[--i] = (char)('0' + number % 10);
		number /= 10;
	} while (number != 0);
	put_str(out, key + i, sizeof(key) - i);
	put_location(out, memo, storage->location, tag);
	put_int(out, (int64_t)(storage->nbytes / dtype->itemsize));
	put_op(out, OP_TUPLE);
	put_op(out, OP_BINPERSID);
}

/* Makes room for one tensor, and sets *tag to its storage's location tag. */
static int reserve_tensor(struct out *out, const struct sfr_py_splice *job,
			  const struct sfr_py_found_tensor *tensor, struct text *tag)
{
	const struct sfr_py_dtype *dtype = &job->torch->dtype[tensor->dtype];
	PyObject *location = job->storages[tensor->storage].location;
	const size_t ints_room = 2 * INT_ROOM * (size_t)tensor->row[SFR_ROW_NDIM];
	Py_ssize_t tag_len;

	tag->chars = PyUnicode_AsUTF8AndSize(location, &tag_len);
	if (tag->chars == NULL)
		return -1;
	tag->len = (size_t)tag_len;
	return reserve(out, TENSOR_ROOM + ints_room + tag->len + dtype->name_len);
}

/* Makes room for one tensor and writes the opcodes that rebuild it. */
static int put_tensor(struct out *out, struct memo *memo, const struct sfr_py_splice *job,
		      const struct sfr_py_found_tensor *tensor)
{
	const int64_t ndim = tensor->row[SFR_ROW_NDIM];
	const int64_t *sizes = tensor->row + SFR_ROW_HEADER, *strides = sizes + ndim;
	struct text tag;

	if (reserve_tensor(out, job, tensor, &tag) != 0)
		return -1;
	if (tensor->parameter) /* the arguments follow: a tensor, requires_grad, hooks */
		put_global(out, memo, &memo->rebuild_parameter_slot, "torch._utils",
			   "_rebuild_parameter");
	put_global(out, memo, &memo->rebuild_tensor_slot, "torch._utils", "_rebuild_tensor_v2");
	put_op(out, OP_MARK);
	put_storage(out, memo, job, tensor, &tag);
	put_int(out, tensor->row[SFR_ROW_OFFSET]);
	put_tuple(out, sizes, ndim);
	put_tuple(out, strides, ndim);
	/* Inside a Parameter torch writes its `.data`, which requires no gradient. */
	put_bool(out, tensor->requires_grad && !tensor->parameter);
	put_empty_hooks(out, memo);
	put_op(out, OP_TUPLE);
	put_op(out, OP_REDUCE);
	if (tensor->parameter) {
		put_bool(out, tensor->requires_grad);
		put_empty_hooks(out, memo);
		put_op(out, OP_TUPLE3);
		put_op(out, OP_REDUCE);
	}
	return 0;
}

PyObject *sfr_py_splice(const struct sfr_py_splice *job)
{
	struct sfr_py_scan scan = { 0 };
	struct out out = { NULL, 0, 0 };
	struct memo memo = { 0 };
	PyObject *result = NULL;
	size_t i, at = 0; /* `at`: bytes of the pickle that are copied or replaced */

	memo.tensor_slot = PyMem_Calloc(job->nr_found + 1, sizeof(*memo.tensor_slot));
	if (memo.tensor_slot == NULL)
		return PyErr_NoMemory();
	if (sfr_py_scan(job, &scan) != 0)
		goto end;
	memo.next_slot = scan.next_slot;
	if (reserve(&out, job->len + USUAL_TENSOR_LEN * scan.nr_markers + TENSOR_ROOM) != 0)
		goto end;
	for (i = 0; i < scan.nr_markers; i++) {
		const struct sfr_py_marker *marker = &scan.markers[i];
		uint32_t *slot = &memo.tensor_slot[marker->tensor];

		if (reserve(&out, marker->at - at + INT_ROOM) !=
		    0) /* enough for put_memo_get, too */
			goto end;
		put_bytes(&out, job->in + at, marker->at - at);
		at = marker->at + marker->len;
		if (*slot != 0) {
			put_memo_get(&out, *slot);
			continue;
		}
		if (put_tensor(&out, &memo, job, &job->found[marker->tensor]) != 0)
			goto end;
		if (scan.counts[marker->tensor] > 1)
			*slot = put_memoize(&out, &memo);
	}
	if (reserve(&out, job->len - at) != 0)
		goto end;
	put_bytes(&out, job->in + at, job->len - at);
	result = PyBytes_FromStringAndSize((const char *)out.mem, (Py_ssize_t)out.len);
end:
	sfr_py_scan_fini(&scan);
	PyMem_Free(out.mem);
	PyMem_Free(memo.tensor_slot);
	return result;
}
