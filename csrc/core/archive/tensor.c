/* One tensor as an archive of its own within a larger file: what torch.save(tensor) writes.
 *
 *     data.pkl | byteorder | version | header of data/0 | tensor's bytes | descriptor | directory
 *     ---------------------- glue ----------------------  --- source ---  -------- glue --------
 *
 * torch.distributed.checkpoint stores tensors this way, and loads each with torch.load from a
 * section of the file. Offsets in the archive's directory count from the archive's start. The
 * pickle must equal, byte for byte, what torch's pickler writes at protocol 2.
 *
 * Data of at least ALIGN_MIN bytes get the same offset modulo 4096 in the file as in memory, so
 * that they can be written in place. Shorter data start at a multiple of 64. */
#include <errno.h>
#include <string.h>

#include "sfr/crc.h"
#include "archive/parts.h"
#include "archive/write.h"

#define ALIGN_MIN (UINT64_C(1) << 20) /* bytes from which data are aligned for writing in place */
#define MAX_DIMS 64u                  /* more than torch supports */
#define STORAGE_MAX 64u               /* length of the name of a storage type */
/* No pickle has more bytes: size and stride of a dimension take at most 20. */
#define PICKLE_MAX (512u + 24u * MAX_DIMS)
#define DESC_MAX 24u /* bytes of the longest descriptor */

static const struct {
	const char *name, *data;
} records[] = {
	{ "archive/data.pkl", NULL }, /* the pickle is made for each tensor */
	{ "archive/byteorder", "little" },
	{ "archive/version", "3\n" },
};
#define NR_RECORDS (sizeof(records) / sizeof(records[0]))
#define DATA_NAME "archive/data/0"

/* ---- the pickle ------------------------------------------------------------- */

/* The opcodes have the names of Python's module pickletools, which explains them. */
enum opcode {
	PROTO = '\x80',
	MARK = '(',
	BINPUT = 'q',
	BINUNICODE = 'X',
	GLOBAL = 'c',
	BININT1 = 'K',
	BININT2 = 'M',
	BININT = 'J',
	LONG1 = '\x8a',
	NEWFALSE = '\x89',
	EMPTY_TUPLE = ')',
	TUPLE1 = '\x85',
	TUPLE2 = '\x86',
	TUPLE3 = '\x87',
	TUPLE = 't',
	BINPERSID = 'Q',
	REDUCE = 'R',
	STOP = '.',
};

/* A pickle that is being written. */
struct pickle {
	char *at;              /* where the next byte goes */
	unsigned char nr_memo; /* objects in the pickler's memo so far */
};

static void append_bytes(struct pickle *p, const void *bytes, size_t len)
{
	memcpy(p->at, bytes, len);
	p->at += len;
}

static void put_byte(struct pickle *p, int byte)
{
	*p->at++ = (char)byte;
}

/* Adds the last written object to the memo. Called wherever torch's pickler does so. */
static void memoize(struct pickle *p)
{
	put_byte(p, BINPUT);
	put_byte(p, p->nr_memo++);
}

static void put_text(struct pickle *p, const char *text)
{
	uint32_t len = (uint32_t)strlen(text);

	put_byte(p, BINUNICODE);
	append_bytes(p, &len, sizeof(len));
	append_bytes(p, text, len);
	memoize(p);
}

/* Writes a reference to a function or class of a module. */
static void put_global(struct pickle *p, const char *module, const char *name)
{
	put_byte(p, GLOBAL);
	append_bytes(p, module, strlen(module));
	put_byte(p, '\n');
	append_bytes(p, name, strlen(name));
	put_byte(p, '\n');
	memoize(p);
}

/* Writes an integer in its shortest form, as torch's pickler does. */
static void put_int(struct pickle *p, int64_t value)
{
	uint64_t bits = (uint64_t)value;
	char len = 8;

	if (value >= 0 && value < 256) {
		put_byte(p, BININT1);
		append_bytes(p, &bits, 1);
	} else if (value >= 0 && value < 65536) {
		put_byte(p, BININT2);
		append_bytes(p, &bits, 2);
	} else if (value >= INT32_MIN && value <= INT32_MAX) {
		put_byte(p, BININT);
		append_bytes(p, &bits, 4);
	} else {
		/* drop the highest byte while it only repeats the sign bit of the next byte */
		while (len > 1) {
			int64_t top_bits = value >> (8 * (len - 1) - 1);

			if (top_bits != 0 && top_bits != -1)
				break;
			len--;
		}
		put_byte(p, LONG1);
		put_byte(p, len);
		append_bytes(p, &bits, (size_t)len);
	}
}

static void put_tuple(struct pickle *p, const int64_t *values, uint32_t nr)
{
	/* by number of items; a longer tuple is between MARK and TUPLE */
	static const char short_tuples[] = { EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3 };

	if (nr > 3)
		put_byte(p, MARK);
	for (uint32_t i = 0; i < nr; i++)
		put_int(p, values[i]);
	put_byte(p, nr > 3 ? TUPLE : short_tuples[nr]);
	if (nr > 0) /* the pickler does not memoize the empty tuple */
		memoize(p);
}

/* Writes the pickle of _rebuild_tensor_v2(storage, 0, sizes, strides, False, OrderedDict()).
 * Returns its length. */
static size_t make_pickle(char *dst, const struct sfr_tensor *tensor)
{
	struct pickle p = { .at = dst };

	put_byte(&p, PROTO);
	put_byte(&p, 2);
	put_global(&p, "torch._utils", "_rebuild_tensor_v2");
	put_byte(&p, MARK); /* the arguments of _rebuild_tensor_v2 */
	put_byte(&p, MARK); /* the storage's persistent id, a tuple */
	put_text(&p, "storage");
	put_global(&p, "torch", tensor->storage);
	put_text(&p, "0");
	put_text(&p, "cpu");
	put_int(&p, (int64_t)tensor->numel);
	put_byte(&p, TUPLE);
	memoize(&p);
	put_byte(&p, BINPERSID);
	put_int(&p, 0); /* offset in the storage */
	put_tuple(&p, tensor->sizes, tensor->ndim);
	put_tuple(&p, tensor->strides, tensor->ndim);
	put_byte(&p, NEWFALSE); /* requires_grad */
	put_global(&p, "collections", "OrderedDict");
	put_byte(&p, EMPTY_TUPLE);
	put_byte(&p, REDUCE);
	memoize(&p);
	put_byte(&p, TUPLE);
	memoize(&p);
	put_byte(&p, REDUCE);
	memoize(&p);
	put_byte(&p, STOP);
	return (size_t)(p.at - dst);
}

/* ---- the archive ------------------------------------------------------------ */

#define TENSOR NR_RECORDS /* index of the tensor's own record */

/* The records of one archive; data[TENSOR] is not used. */
struct archive {
	char pickle[PICKLE_MAX];
	const char *data[NR_RECORDS + 1];
	uint64_t nbytes[NR_RECORDS + 1], hdr_off[NR_RECORDS + 1];
	uint32_t crc[NR_RECORDS + 1];
};

/* Writes record `i` to dst[used]. Returns the new number of used bytes. */
static size_t put_record(struct archive *a, char *dst, size_t used, uint32_t i)
{
	char *at = dst + used;

	a->hdr_off[i] = used;
	a->crc[i] = sfr_crc32(0, a->data[i], a->nbytes[i]);
	at += sfr__zip_put_local_header(at, records[i].name, a->nbytes[i], 0); /* 0: no padding */
	memcpy(at, a->data[i], a->nbytes[i]);
	at += a->nbytes[i];
	at += sfr__zip_put_desc(at, a->crc[i], a->nbytes[i]);
	return (size_t)(at - dst);
}

/* Returns the length of the padding before data that would begin at `off` of the file. */
static size_t padding_len(uint64_t off, const struct sfr_tensor *tensor)
{
	if (tensor->nbytes >= ALIGN_MIN)
		return (size_t)((tensor->addr - off) % SFR_PAGE); /* same offset as in memory */
	return (size_t)(sfr__round_up(off, SFR_ALIGN) - off);
}

/* Writes everything before the data to `dst`, and returns its length. `off` is the offset of the
 * archive in the file. */
static size_t write_head(struct archive *a, char *dst, uint64_t off,
			 const struct sfr_tensor *tensor)
{
	char unpadded[SFR__ZIP_LOCAL_MAX]; /* the tensor's header, made only for its length */
	size_t used = 0, len, pad;

	for (uint32_t i = 0; i < NR_RECORDS; i++)
		used = put_record(a, dst, used, i);
	a->hdr_off[TENSOR] = used;
	len = sfr__zip_put_local_header(unpadded, DATA_NAME, tensor->nbytes, 0);
	pad = padding_len(off + used + len, tensor);
	return used + sfr__zip_put_local_header(dst + used, DATA_NAME, tensor->nbytes, pad);
}

/* Adds everything after the data. `begin` is the offset of the archive in the file, `source` the
 * number of the tensor's source. The descriptor and the directory get the CRC 0, which the source's
 * CRC replaces later. Returns 0, or the parts' first error. */
static int add_tail(struct sfr_parts *parts, const struct archive *a, uint64_t begin,
		    uint32_t source)
{
	char tail[(NR_RECORDS + 1) * SFR__ZIP_CENTRAL_MAX + DESC_MAX + SFR__ZIP_END_LEN];
	uint64_t off = sfr_parts_file_len(parts); /* of the tail in the file */
	uint64_t dir_off;                         /* of the directory in the tail */
	size_t used = sfr__zip_put_desc(tail, 0, a->nbytes[TENSOR]);

	dir_off = used;
	for (uint32_t i = 0; i < NR_RECORDS; i++)
		used += sfr__zip_put_central(tail + used, records[i].name, a->crc[i], a->nbytes[i],
					     a->hdr_off[i]);
	/* errors of these two calls stay in `parts`, so sfr_parts_add_bytes below returns them */
	(void)sfr__parts_add_crc_field(parts, off + SFR__ZIP_DESC_CRC, source);
	(void)sfr__parts_add_crc_field(parts, off + used + SFR__ZIP_CENTRAL_CRC, source);
	used += sfr__zip_put_central(tail + used, DATA_NAME, 0, a->nbytes[TENSOR],
				     a->hdr_off[TENSOR]);
	/* the end record has the directory's offset in the archive */
	used += sfr__zip_put_end(tail + used, NR_RECORDS + 1, off + dir_off - begin,
				 used - dir_off);
	return sfr_parts_add_bytes(parts, tail, used);
}

int sfr_parts_add_tensor(struct sfr_parts *parts, const struct sfr_tensor *tensor)
{
	/* SFR_PAGE: the longest padding */
	char head[PICKLE_MAX + (NR_RECORDS + 1) * (SFR__ZIP_LOCAL_MAX + DESC_MAX) + SFR_PAGE];
	size_t head_len;
	uint64_t begin = sfr_parts_file_len(parts);
	uint32_t source = sfr__parts_nr_sources(parts);
	struct archive a = { .nbytes = { [TENSOR] = tensor->nbytes } };
	int rc;

	if (tensor->ndim > MAX_DIMS || strlen(tensor->storage) >= STORAGE_MAX)
		return sfr__parts_fail(parts, -EINVAL);
	a.data[0] = a.pickle;
	a.nbytes[0] = make_pickle(a.pickle, tensor);
	for (uint32_t i = 1; i < NR_RECORDS; i++) {
		a.data[i] = records[i].data;
		a.nbytes[i] = strlen(records[i].data);
	}
	head_len = write_head(&a, head, begin, tensor);
	rc = sfr_parts_add_bytes(parts, head, head_len);
	if (rc == 0)
		rc = sfr_parts_add_source(parts, tensor->addr, tensor->nbytes);
	if (rc == 0)
		rc = add_tail(parts, &a, begin, source);
	return rc;
}
