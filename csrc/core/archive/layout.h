/* The image of a file: the offset of everything, and the bytes between the tensors. layout.c
 * implements it for torch's format, parts.c for files of parts, flat.c for flat files. */
#ifndef SFR_LAYOUT_H
#define SFR_LAYOUT_H

#include "sfr/parts.h"
#include "sfr/save.h"
#include "base/base.h"

/* The layout of one file: torch's zip format, stored entries with data descriptors.
 *
 *   extent 0:         data.pkl, .format_version "0", .storage_alignment "64", byteorder,
 *                     version "3\n", then the captured storages of host memory
 *   one extent for each device:  its captured storages
 *   one extent for each lane:    its deferred storages
 *   tail: padding, .data/serialization_id, central directory, zip64 end record and its
 *         locator, end record; the file's length is a multiple of 4096
 *
 * Every extent (struct sfr__extent) starts at a multiple of 4096, in a block of its own, and its
 * length is a multiple of 4096. So each block is filled by one producer (the caller or one lane)
 * and written with one aligned call. All sizes are known before any byte is copied. Descriptors and
 * the tail contain CRCs, so they are written later. */

/* One record of the file: a local header, data, a descriptor. In a file of parts an entry consists
 * of glue (the bytes before a source, see parts.c) and data, in a flat file of data alone. */
struct sfr__entry {
	const char *src;   /* the data, in the memory that is saved */
	uint64_t nbytes;   /* length of the data */
	uint64_t hdr_off;  /* offset of the local header in the file */
	uint64_t data_off; /* offset of the data; in torch's format a multiple of SFR_ALIGN */
	int64_t source;    /* index in sfr_save_desc.sources, or -1 */
	/* CRC-32 of the first crc_len bytes of the data; both are guarded by the engine's mutex */
	uint32_t crc;
	uint32_t desc_len; /* length of the descriptor: 16, or 24 with zip64 */
	uint64_t crc_len;  /* equals nbytes when crc is final */
	char name[32];     /* "archive/data/4294967295" at the longest */
	uint64_t glue_at;  /* for parts: offset in image.glue of the bytes before the data */
};

/* A range of the file that one producer fills. */
struct sfr__extent {
	uint64_t off, len;                /* the range of the file; multiples of 4096 */
	uint32_t lane, device;            /* as in struct sfr_source */
	uint32_t first_entry, nr_entries; /* its entries: index of the first in image.entries */
	uint32_t first_block, nr_blocks;  /* its blocks, numbered through the whole image */
	/* Numbers of entries and blocks of this extent and of all later extents of the same lane
	 * and device together. Only flat files have such later extents. Block numbers continue from
	 * one extent to the next. */
	uint32_t all_entries, all_blocks;
	/* for parts: the source's memory that holds this extent's bytes and is written without a
	 * copy; else NULL */
	const char *direct;
};

/* For parts: the four bytes at `off` of the file that hold the CRC of an entry. */
struct sfr__crc_field {
	uint64_t off;
	uint32_t entry; /* index in image.entries */
};

struct sfr__image {
	struct sfr__entry *entries;
	struct sfr__extent *extents;
	uint32_t nr_entries, nr_extents;
	uint64_t block_bytes;        /* length of one block of the pool */
	uint64_t tail_off, tail_len; /* without a tail: the file's length, and 0 */
	uint64_t len;                /* length of the file */
	/* for parts, see parts.c: no tail, and entries without descriptors and names */
	char *glue; /* the bytes between the sources; NULL: torch's format, as above */
	struct sfr__crc_field *fields; /* in ascending order of `off` */
	uint32_t nr_fields;
	/* for flat files, see flat.c: offsets of the pages that two extents share */
	uint64_t *edges;
	uint32_t nr_edges;
	bool has_crcs;            /* the file contains the CRCs of its entries */
	uint64_t captured_nbytes; /* bytes of captured storages and of the skeleton */
	uint64_t deferred_nbytes; /* bytes of deferred storages */
};

/* Makes the image of a file in torch's format; the caller frees it with sfr__image_fini. It refers
 * to the memory of the sources and the skeleton. Returns 0, -ENOMEM or one of:
 * -EINVAL: a source has bytes but no address, or block_bytes is not a multiple of 4096;
 * -EFBIG: the file would have more than 2^62 bytes, or an extent 2^32 blocks or more.
 * Extents without entries are left out, except extent 0. */
int sfr__image_init(struct sfr__image *img, const struct sfr_save_desc *desc, uint64_t block_bytes);
/* Makes the image of a file of parts. On success the image has taken the contents of `parts`, which
 * the caller can then only free. Returns 0, the error that the parts already have, -ENOMEM or
 * -EFBIG. */
int sfr__image_init_parts(struct sfr__image *img, struct sfr_parts *parts, uint64_t block_bytes);
/* Makes the image of a flat file. Errors as sfr__image_init; -EINVAL also for an empty header, and
 * for a member without bytes or beyond its source. */
int sfr__image_init_flat(struct sfr__image *img, const struct sfr_save_desc *desc,
			 uint64_t block_bytes);
/* Checks block size, skeleton and sources, and returns the error that sfr__image_init would return
 * for them, or 0. */
int sfr__image_check_desc(const struct sfr_save_desc *desc, uint64_t block_bytes);
/* Returns the key by which sources are sorted into extents: the lane in the upper 32 bits, the
 * device in the lower. Sources of one extent have the same key, and the extents are in ascending
 * order of their keys. */
static inline uint64_t sfr__extent_key(const struct sfr_source *source)
{
	return (uint64_t)source->lane << 32 | source->device;
}
/* Frees the arrays; lengths and tail_off stay valid. Idempotent. */
void sfr__image_fini(struct sfr__image *img);
/* Returns the first extent of this lane and device, or NULL. */
const struct sfr__extent *sfr__image_extent(const struct sfr__image *img, uint32_t lane,
					    uint32_t device);
/* Return the length in bytes of block `blk` of an extent (block_bytes, or less for the last block),
 * and its offset in the file. `blk` is below extent->all_blocks, so the block may belong to a later
 * extent of the same lane and device. */
size_t sfr__image_block_len(const struct sfr__image *img, const struct sfr__extent *extent,
			    uint32_t blk);
uint64_t sfr__image_block_off(const struct sfr__image *img, const struct sfr__extent *extent,
			      uint32_t blk);

/* Returns whether the page at `off` is an edge page, which two extents share (flat.c). */
bool sfr__image_is_edge(const struct sfr__image *img, uint64_t off);
/* Sets [*from, *to), offsets in the file, to the pages of a block in which no other extent has
 * bytes. These are all pages, except that the first and the last may be edge pages, which are
 * written with the tail. */
void sfr__image_own_pages(const struct sfr__image *img, const struct sfr__extent *extent,
			  uint32_t blk, uint64_t *from, uint64_t *to);

/* Returns how many of the bytes [from, to) are in the file. The image's last page may extend beyond
 * the end of the file. */
static inline uint64_t sfr__image_in_file(const struct sfr__image *img, uint64_t from, uint64_t to)
{
	to = to < img->len ? to : img->len;
	return from < to ? to - from : 0;
}

/* A block is a sequence of segments. A segment is padding, or a range of one entry's local header,
 * data or descriptor. */
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
	uint64_t off, end; /* the range of the file that the rest of the block fills */
	uint32_t entry;    /* index of the entry at `off` */
};
/* Begins a walk over block `blk` of an extent; `blk` is below extent->all_blocks. */
void sfr__seg_iter_init(struct sfr__seg_iter *it, const struct sfr__image *img,
			const struct sfr__extent *extent, uint32_t blk);
/* Sets *seg to the next segment, in the order of the file. Returns false at the end. */
bool sfr__seg_next(struct sfr__seg_iter *it, struct sfr__seg *seg);
/* Write bytes [off, off + len) of an entry's local header (or of the glue in its place), or of its
 * descriptor, to `dst`. For the descriptor entry->crc must be final. */
void sfr__image_put_header(const struct sfr__image *img, uint32_t entry, uint64_t off, size_t len,
			   void *dst);
void sfr__image_put_desc(const struct sfr__image *img, uint32_t entry, uint64_t off, size_t len,
			 void *dst);
/* For files of parts: returns whether every CRC that has a field in the range [off, off + len) of
 * the file is final. The caller holds the engine's mutex. */
bool sfr__image_fields_known(const struct sfr__image *img, uint64_t off, size_t len);
/* Writes the CRCs of these fields into `dst`, a buffer with the range's `len` bytes. If a field is
 * only partly in the range, only that part of its CRC is written. */
void sfr__image_put_fields(const struct sfr__image *img, uint64_t off, size_t len, char *dst);
/* Writes the whole tail, img->tail_len bytes, to `dst`. Every entry's crc must be final. */
void sfr__image_put_tail(const struct sfr__image *img, void *dst);

#endif
