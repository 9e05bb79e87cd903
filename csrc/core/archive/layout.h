/* The image of a file: where everything stands, and the bytes between the tensors. See layout.c. */
#ifndef SFR_LAYOUT_H
#define SFR_LAYOUT_H

#include "sfr/parts.h"
#include "sfr/save.h"
#include "base/base.h"

/* The layout of one file: torch's zip format, stored entries with data descriptors.
 *
 *   run 0 (captured): data.pkl, .format_version "0", .storage_alignment "64", byteorder,
 *                     version "3\n", then captured storages
 *   run 1.. (one a device, then one a lane): captured storages of the device, deferred
 *                     storages of the lane
 *   tail: padding, .data/serialization_id, central directory, zip64 end record and its
 *         locator, end record; the file's length is a multiple of 4096
 *
 * Every run starts on a 4096 boundary in a block of its own and its length is a multiple of
 * 4096, so no block has two producers and every block is one aligned write. Sizes are known
 * before a byte moves; only descriptors and the tail need CRCs. */
struct sfr__entry {
	const char *src; /* its bytes */
	uint64_t nbytes;
	uint64_t hdr_off;  /* of its local header in the file */
	uint64_t data_off; /* a multiple of SFR_ALIGN */
	int64_t source;    /* index in sfr_save_desc.sources, or -1 */
	uint32_t crc;      /* of the first crc_len bytes; guarded by the engine's mutex */
	uint32_t desc_len; /* 16, or 24 with zip64 */
	uint64_t crc_len;
	char name[32];    /* "archive/data/4294967295" at the longest */
	uint64_t glue_at; /* of parts: where in the glue is what stands before the data */
};

struct sfr__run {
	uint64_t off, len;
	uint32_t lane, device; /* of struct sfr_source */
	uint32_t first_entry, nr_entries;
	uint32_t first_block, nr_blocks; /* among the blocks of the image */
	const char *direct;              /* of parts: it is in memory as it is in the file, here */
};

/* Of parts: four bytes of the file that hold an entry's CRC. */
struct sfr__crc_field {
	uint64_t off;
	uint32_t entry;
};

struct sfr__image {
	struct sfr__entry *entries;
	struct sfr__run *runs;
	uint32_t nr_entries, nr_runs;
	uint64_t block_bytes;
	uint64_t tail_off, tail_len, len;
	/* of parts, see parts.c: no tail, entries without descriptors and names */
	char *glue; /* the bytes between the sources; NULL: torch's file, as above */
	struct sfr__crc_field *fields; /* ascending */
	uint32_t nr_fields;
	uint64_t captured_nbytes, deferred_nbytes; /* of storages and skeleton; of storages */
};

/* Lays the image out. -ENOMEM; -EINVAL for a null source with bytes or a bad block size; -EFBIG
 * for what no file can hold (2^62 bytes, 2^32 blocks a run). Runs without entries are
 * left out, but run 0 is always there. */
int sfr__image_init(struct sfr__image *img, const struct sfr_save_desc *desc, uint64_t block_bytes);
/* The image of parts, which are empty afterwards, and its own. What stands in them that failed;
 * -ENOMEM, -EFBIG: the parts are as they were. */
int sfr__image_init_parts(struct sfr__image *img, struct sfr_parts *parts, uint64_t block_bytes);
/* Frees the tables; the figures stay. Twice is fine. */
void sfr__image_fini(struct sfr__image *img);
/* The run of these sources, NULL when there is none. */
const struct sfr__run *sfr__image_run(const struct sfr__image *img, uint32_t lane, uint32_t device);
/* Bytes of block `blk` of a run that belong to the file: block_bytes, less for the last. */
size_t sfr__image_block_len(const struct sfr__image *img, const struct sfr__run *run, uint32_t blk);
uint64_t sfr__image_block_off(const struct sfr__image *img, const struct sfr__run *run,
			      uint32_t blk);

/* A block is a sequence of segments, each a part of one of these. */
enum sfr__seg_kind { SFR__SEG_HEADER, SFR__SEG_DATA, SFR__SEG_DESC, SFR__SEG_PAD };
struct sfr__seg {
	enum sfr__seg_kind kind;
	uint32_t entry; /* whose header, data or descriptor; not for PAD */
	uint64_t off;   /* of this part in the whole header, data or descriptor */
	size_t pos;     /* where it stands in the block */
	size_t len;     /* > 0 */
};
/* Walks a block's segments in ascending order: start with *it zeroed. Returns false at the end. */
struct sfr__seg_iter {
	const struct sfr__image *img;
	const struct sfr__run *run;
	uint64_t off, end; /* in the file */
	uint32_t entry;
};
void sfr__seg_iter_init(struct sfr__seg_iter *it, const struct sfr__image *img,
			const struct sfr__run *run, uint32_t blk);
bool sfr__seg_next(struct sfr__seg_iter *it, struct sfr__seg *seg);
/* Bytes [off, off + len) of an entry's local header, or of its descriptor (entry->crc final). */
void sfr__image_put_header(const struct sfr__image *img, uint32_t entry, uint64_t off, size_t len,
			   void *dst);
void sfr__image_put_desc(const struct sfr__image *img, uint32_t entry, uint64_t off, size_t len,
			 void *dst);
/* Of parts: whether every CRC is known that has a field in [off, off + len) (the CRCs' lock held); and
 * those fields, whose parts in the range go to `dst`, where `off` stands. */
bool sfr__image_fields_known(const struct sfr__image *img, uint64_t off, size_t len);
void sfr__image_put_fields(const struct sfr__image *img, uint64_t off, size_t len, char *dst);
/* The whole tail, img->tail_len bytes, once every entry's crc is final. */
void sfr__image_put_tail(const struct sfr__image *img, void *dst);

#endif
