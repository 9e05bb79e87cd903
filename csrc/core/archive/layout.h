/* The image of a file: the offset of everything, and the bytes between the tensors. There are three
 * kinds of files: in torch's format (layout.c), files of parts (parts.c), flat files (flat.c).
 *
 * A file consists of extents, each filled by one producer (the caller or one lane), and a tail.
 * Offset and length of every extent are multiples of 4096, and every extent starts in a block of
 * its own. So each block is written with one aligned call. */
#ifndef SFR_LAYOUT_H
#define SFR_LAYOUT_H

#include "sfr/parts.h"
#include "sfr/save.h"
#include "base/base.h"

/* The longest file in bytes. The sum of two such lengths cannot overflow. */
#define SFR__IMAGE_LEN_MAX (UINT64_C(1) << 62)

/* One record of the file. It consists of:
 *   torch's format  a local header, data, a descriptor
 *   file of parts   glue, which is the bytes before a source, and data
 *   flat file       data */
struct sfr__image_entry {
	const char *src;   /* the data, in the memory that is saved */
	uint64_t nbytes;   /* length of the data */
	uint64_t hdr_off;  /* offset of the local header in the file */
	uint64_t data_off; /* offset of the data; in torch's format a multiple of SFR_ALIGN */
	int64_t source;    /* index in sfr_save_desc.sources; -1: not from a source */
	uint32_t crc;      /* CRC-32 of the first crc_len bytes; guarded by the engine's mutex */
	uint32_t desc_len; /* length of the descriptor: 16, or 24 with zip64 */
	uint64_t crc_len;  /* equals nbytes when crc is final; guarded by the engine's mutex */
	char name[32];     /* "archive/data/4294967295" at the longest */
	uint64_t glue_at;  /* for parts: offset in image.glue of the bytes before the data */
};

/* A range of the file that one producer fills. */
struct sfr__extent {
	uint64_t off, len;                /* the range of the file; multiples of 4096 */
	uint32_t lane, device;            /* as in struct sfr_source */
	uint32_t first_entry, nr_entries; /* its entries in image.entries */
	uint32_t first_block, nr_blocks;  /* its blocks, numbered through the whole image */
	/* counts of this extent and all later extents of its lane and device; only in flat files a
	 * lane and device may have several extents */
	uint32_t nr_lane_entries, nr_lane_blocks;
	/* for parts: the source's memory from which this extent is written in place; else NULL */
	const char *direct_src;
};

/* For parts: four bytes of the file that hold the CRC of an entry. */
struct sfr__crc_field {
	uint64_t off;
	uint32_t entry; /* index in image.entries */
};

struct sfr__image {
	struct sfr__image_entry *entries;
	struct sfr__extent *extents;
	uint32_t nr_entries, nr_extents;
	uint64_t block_bytes;        /* length of one block of the pool */
	uint64_t tail_off, tail_len; /* in a file without a tail: the file's length, and 0 */
	uint64_t len;                /* length of the file */
	/* The bytes before the data of each entry. NULL in torch's format, which has headers there.
	 * In a file of parts the bytes between the sources; in a flat file a page of zeros. */
	char *glue;
	struct sfr__crc_field *crc_fields; /* in ascending order of `off` */
	uint32_t nr_crc_fields;
	uint64_t *edges; /* for flat files: offsets of the pages that two extents share (flat.c) */
	uint32_t nr_edges;
	bool has_crcs;            /* the file contains the CRCs of its entries */
	uint64_t captured_nbytes; /* bytes of captured storages and of the skeleton */
	uint64_t deferred_nbytes; /* bytes of deferred storages */
};

/* Makes the image of a file in torch's format. The image refers to the memory of the sources and
 * the skeleton. The caller frees the image with sfr__image_fini. Returns 0, or:
 *   -EINVAL  a source has bytes but no address, or block_bytes is not a multiple of 4096
 *   -EFBIG   the file would have more than 2^62 bytes, or an extent 2^32 blocks or more
 *   -ENOMEM */
int sfr__image_init(struct sfr__image *img, const struct sfr_save_desc *desc, uint64_t block_bytes);
/* Makes the image of a file of parts. On success the image owns the contents of `parts`, and the
 * caller can only free `parts`. Returns 0, an earlier error of the parts, -ENOMEM or -EFBIG. */
int sfr__image_init_parts(struct sfr__image *img, struct sfr_parts *parts, uint64_t block_bytes);
/* Makes the image of a flat file. Returns errors like sfr__image_init. It returns -EINVAL also for
 * an empty header, and for a member that has no bytes or is beyond its source. */
int sfr__image_init_flat(struct sfr__image *img, const struct sfr_save_desc *desc,
			 uint64_t block_bytes);
/* Checks the block size, the skeleton and the sources. Returns 0, or -EINVAL or -EFBIG like
 * sfr__image_init. */
int sfr__image_check_save_desc(const struct sfr_save_desc *desc, uint64_t block_bytes);
/* Returns a source's extent key: the lane in the upper 32 bits, the device in the lower. Sources of
 * one extent have the same key. Extents are in ascending order of their keys. */
static inline uint64_t sfr__extent_key(const struct sfr_source *source)
{
	return (uint64_t)source->lane << 32 | source->device;
}
/* Sets *key to the next higher extent key of a source. Returns false if there is none. */
bool sfr__next_extent_key(const struct sfr_save_desc *desc, uint64_t *key);
/* Frees the arrays; lengths and tail_off stay valid. Idempotent. */
void sfr__image_fini(struct sfr__image *img);
/* Returns the first extent of this lane and device, or NULL. */
const struct sfr__extent *sfr__image_find_extent(const struct sfr__image *img, uint32_t lane,
						 uint32_t device);
/* Return the length of a block in bytes, and its offset in the file. `blk` counts from the start of
 * `extent` and is below extent->nr_lane_blocks, so the block may be in a later extent. */
size_t sfr__image_block_len(const struct sfr__image *img, const struct sfr__extent *extent,
			    uint32_t blk);
uint64_t sfr__image_block_off(const struct sfr__image *img, const struct sfr__extent *extent,
			      uint32_t blk);

/* Returns whether the page at `off` is an edge page (flat.c). */
bool sfr__image_is_edge_page(const struct sfr__image *img, uint64_t off);
/* Sets [*from, *to) to a block's range of the file, without edge pages. Only the first and the last
 * page of a block can be edge pages. */
void sfr__image_block_unshared_range(const struct sfr__image *img, const struct sfr__extent *extent,
				     uint32_t blk, uint64_t *from, uint64_t *to);

/* Returns how many bytes of the range [from, to) are before the end of the file. */
static inline uint64_t sfr__image_bytes_in_file(const struct sfr__image *img, uint64_t from,
						uint64_t to)
{
	to = to < img->len ? to : img->len;
	return from < to ? to - from : 0;
}

/* A block is a sequence of segments: padding, or a range of one entry's header, data or
 * descriptor. */
enum sfr__seg_kind { SFR__SEG_HEADER, SFR__SEG_DATA, SFR__SEG_DESC, SFR__SEG_PAD };
struct sfr__seg {
	enum sfr__seg_kind kind;
	uint32_t entry; /* the entry of this header, data or descriptor; unused for PAD */
	uint64_t off;   /* offset of the segment in the whole header, data or descriptor */
	size_t pos;     /* offset in the block */
	size_t len;     /* > 0 */
};
struct sfr__seg_iter {
	const struct sfr__image *img;
	const struct sfr__extent *extent;
	uint64_t off, end; /* the range of the file that the rest of the block fills */
	uint32_t entry;    /* index of the entry at `off` */
};
/* Begins a walk over block `blk` of an extent. `blk` is below extent->nr_lane_blocks. */
void sfr__seg_iter_init(struct sfr__seg_iter *it, const struct sfr__image *img,
			const struct sfr__extent *extent, uint32_t blk);
/* Sets *seg to the next segment, in the order of the file. Returns false at the end. */
bool sfr__seg_next(struct sfr__seg_iter *it, struct sfr__seg *seg);
/* Write bytes [off, off + len) of an entry's header, or of its descriptor, to `dst`. In an image
 * with glue, the entry's glue is its header. For the descriptor entry->crc must be final. */
void sfr__image_put_header(const struct sfr__image *img, uint32_t entry, uint64_t off, size_t len,
			   void *dst);
void sfr__image_put_descriptor(const struct sfr__image *img, uint32_t entry, uint64_t off,
			       size_t len, void *dst);
/* For files of parts: returns whether all CRCs whose fields are in [off, off + len) of the file are
 * final. The caller holds the engine's mutex. */
bool sfr__image_crc_fields_known(const struct sfr__image *img, uint64_t off, size_t len);
/* Writes the CRC fields in [off, off + len) of the file into `dst`, which holds the bytes of that
 * range. Of a field that is partly in the range, only that part is written. */
void sfr__image_put_crc_fields(const struct sfr__image *img, uint64_t off, size_t len, char *dst);
/* Writes the whole tail, img->tail_len bytes, to `dst`. Every entry's crc must be final. */
void sfr__image_put_tail(const struct sfr__image *img, void *dst);

#endif
