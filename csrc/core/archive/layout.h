/* The image of a file: the offset of everything, and the bytes between the tensors. layout.c
 * implements it for torch's format, parts.c for files of parts, flat.c for flat files. */
#ifndef SFR_LAYOUT_H
#define SFR_LAYOUT_H

#include "sfr/parts.h"
#include "sfr/save.h"
#include "base/base.h"

/* The layout of one file: torch's zip format, stored entries with data descriptors.
 *
 *   extent 0 (captured): data.pkl, .format_version "0", .storage_alignment "64", byteorder,
 *                     version "3\n", then captured storages
 *   extent 1.. (one a device, then one a lane): captured storages of the device, deferred
 *                     storages of the lane
 *   tail: padding, .data/serialization_id, central directory, zip64 end record and its
 *         locator, end record; the file's length is a multiple of 4096
 *
 * Every extent (struct sfr__extent) starts at a multiple of 4096, in a block of its own, and its
 * length is a multiple of 4096. So no block has two producers, and every block is one aligned
 * write. Sizes are known before a byte moves; only descriptors and the tail need CRCs. */
struct sfr__entry {
	const char *src; /* the source's bytes */
	uint64_t nbytes;
	uint64_t hdr_off;  /* of its local header, in the file */
	uint64_t data_off; /* a multiple of SFR_ALIGN */
	int64_t source;    /* index in sfr_save_desc.sources, or -1 */
	uint32_t crc;      /* of the first crc_len bytes; guarded by the engine's mutex */
	uint32_t desc_len; /* 16, or 24 with zip64 */
	uint64_t crc_len;
	char name[32];    /* "archive/data/4294967295" at the longest */
	uint64_t glue_at; /* for parts: offset, in the glue, of the bytes before the data */
};

struct sfr__extent {
	uint64_t off, len;
	uint32_t lane, device; /* as in struct sfr_source */
	uint32_t first_entry, nr_entries;
	uint32_t first_block, nr_blocks; /* index among the blocks of the image */
	/* The entries and blocks of this extent and of later ones with the same lane and
	 * device, which only a flat file has. Their blocks are numbered consecutively. */
	uint32_t all_entries, all_blocks;
	/* parts: memory that equals this extent, written in place */
	const char *direct;
};

/* For parts: four bytes of the file that hold an entry's CRC. */
struct sfr__crc_field {
	uint64_t off;
	uint32_t entry;
};

struct sfr__image {
	struct sfr__entry *entries;
	struct sfr__extent *extents;
	uint32_t nr_entries, nr_extents;
	uint64_t block_bytes;
	uint64_t tail_off, tail_len, len;
	/* for parts, see parts.c: no tail, and entries without descriptors and names */
	char *glue; /* the bytes between the sources; NULL: torch's format, as above */
	struct sfr__crc_field *fields; /* ascending */
	uint32_t nr_fields;
	/* for flat files, see flat.c: offsets of the pages that two extents share */
	uint64_t *edges;
	uint32_t nr_edges;
	bool has_crcs;                             /* the file contains the CRCs of its entries */
	uint64_t captured_nbytes, deferred_nbytes; /* storages and skeleton; storages */
};

/* Lays the image out. -ENOMEM; -EINVAL: a null source with bytes, or a bad block size; -EFBIG: more
 * than any file can hold (2^62 bytes, 2^32 blocks an extent). Extents without entries are left out,
 * except extent 0. */
int sfr__image_init(struct sfr__image *img, const struct sfr_save_desc *desc, uint64_t block_bytes);
/* Makes the image of parts, which are empty afterwards. Returns an error that the parts keep; or
 * -ENOMEM, -EFBIG, and the parts are unchanged. */
int sfr__image_init_parts(struct sfr__image *img, struct sfr_parts *parts, uint64_t block_bytes);
/* Makes the image of a flat file. Errors as sfr__image_init; -EINVAL also for an empty header, and
 * for a member without bytes or beyond its source. */
int sfr__image_init_flat(struct sfr__image *img, const struct sfr_save_desc *desc,
			 uint64_t block_bytes);
/* Checks block size, skeleton and sources, as sfr__image_init does. */
int sfr__image_check_desc(const struct sfr_save_desc *desc, uint64_t block_bytes);
/* Returns what distinguishes sources of different extents, in the order of the extents. */
static inline uint64_t sfr__extent_key(const struct sfr_source *source)
{
	return (uint64_t)source->lane << 32 | source->device;
}
/* Frees the tables and keeps the sizes. Idempotent. */
void sfr__image_fini(struct sfr__image *img);
/* Returns the first extent of these sources, or NULL. */
const struct sfr__extent *sfr__image_extent(const struct sfr__image *img, uint32_t lane,
					    uint32_t device);
/* Returns the bytes of block `blk` of an extent that belong to the file: block_bytes, or less for
 * the last. */
size_t sfr__image_block_len(const struct sfr__image *img, const struct sfr__extent *extent,
			    uint32_t blk);
uint64_t sfr__image_block_off(const struct sfr__image *img, const struct sfr__extent *extent,
			      uint32_t blk);

/* Returns whether the page at `off` is an edge page. */
bool sfr__image_is_edge(const struct sfr__image *img, uint64_t off);
/* Sets [*from, *to) to the pages of a block in which no other extent has bytes: all of them, or all
 * but the first or the last. Those are edge pages, which are put together and written apart. */
void sfr__image_own_pages(const struct sfr__image *img, const struct sfr__extent *extent,
			  uint32_t blk, uint64_t *from, uint64_t *to);

/* Returns how many of the bytes [from, to) are in the file: the last page may extend beyond its
 * end. */
static inline uint64_t sfr__image_in_file(const struct sfr__image *img, uint64_t from, uint64_t to)
{
	to = to < img->len ? to : img->len;
	return from < to ? to - from : 0;
}

/* A block is a sequence of segments. Each is a range of an entry's local header, data or
 * descriptor, or padding. */
enum sfr__seg_kind { SFR__SEG_HEADER, SFR__SEG_DATA, SFR__SEG_DESC, SFR__SEG_PAD };
struct sfr__seg {
	enum sfr__seg_kind kind;
	uint32_t entry; /* the entry of this header, data or descriptor; unused for PAD */
	uint64_t off;   /* offset of the segment in the whole header, data or descriptor */
	size_t pos;     /* offset in the block */
	size_t len;     /* > 0 */
};
/* The state of a walk over a block's segments. */
struct sfr__seg_iter {
	const struct sfr__image *img;
	const struct sfr__extent *extent;
	uint64_t off, end; /* in the file */
	uint32_t entry;
};
void sfr__seg_iter_init(struct sfr__seg_iter *it, const struct sfr__image *img,
			const struct sfr__extent *extent, uint32_t blk);
/* Gives the next segment, in ascending order. Returns false at the end. */
bool sfr__seg_next(struct sfr__seg_iter *it, struct sfr__seg *seg);
/* Write bytes [off, off + len) of an entry's local header, or of its descriptor (entry->crc must be
 * final). */
void sfr__image_put_header(const struct sfr__image *img, uint32_t entry, uint64_t off, size_t len,
			   void *dst);
void sfr__image_put_desc(const struct sfr__image *img, uint32_t entry, uint64_t off, size_t len,
			 void *dst);
/* For files of parts, with the lock of the CRCs held: returns whether every CRC with a field in the
 * range [off, off + len) of the file is known. */
bool sfr__image_fields_known(const struct sfr__image *img, uint64_t off, size_t len);
/* Writes the bytes of those fields that are in the range to `dst`, which has the range's bytes. */
void sfr__image_put_fields(const struct sfr__image *img, uint64_t off, size_t len, char *dst);
/* Writes the whole tail, img->tail_len bytes, once every entry's crc is final. */
void sfr__image_put_tail(const struct sfr__image *img, void *dst);

#endif
