/* Writes an image to a file as lanes and writers do, but on one thread: block by block, each
 * filled from its segments alone. test_image.c and tests/unit/save/test_image.py share it.
 *
 * A source at HOLE stands for zeros that are neither read nor written: the file stays sparse
 * there, so entries of many gigabytes cost nothing. */
#ifndef IMAGE_WRITER_H
#define IMAGE_WRITER_H

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sfr.h"
#include "archive/layout.h"

#define HOLE UINT64_C(1)

/* Returns `crc` extended by `len` zero bytes. */
static inline uint32_t crc_of_zeros(uint32_t crc, uint64_t len)
{
	static const unsigned char zero;
	uint32_t power = sfr_crc32(0, &zero, 1);

	for (uint64_t run = 1; len != 0; len >>= 1, run <<= 1) {
		if (len & 1)
			crc = sfr_crc32_combine(crc, power, run);
		power = sfr_crc32_combine(power, power, run);
	}
	return crc;
}

/* Fills one segment of a block; `crcs` says whether data is added to its entry's CRC. */
static inline void fill_segment(struct sfr__image *img, const struct sfr__seg *seg, char *block,
				bool crcs)
{
	char *dst = block + seg->pos;
	struct sfr__image_entry *e;

	if (seg->kind == SFR__SEG_PAD) {
		memset(dst, 0, seg->len);
		return;
	}
	e = &img->entries[seg->entry];
	if (seg->kind == SFR__SEG_HEADER) {
		sfr__image_put_header(img, seg->entry, seg->off, seg->len, dst);
	} else if (seg->kind == SFR__SEG_DESC) {
		sfr__image_put_descriptor(img, seg->entry, seg->off, seg->len, dst);
	} else if ((uintptr_t)e->src == HOLE) {
		memset(dst, 0, seg->len);
		e->crc = crcs ? crc_of_zeros(e->crc, seg->len) : e->crc;
	} else {
		memcpy(dst, e->src + seg->off, seg->len);
		e->crc = crcs ? sfr_crc32(e->crc, dst, seg->len) : e->crc;
	}
}

/* Returns whether the block is inside a hole and contains nothing else. */
static inline bool is_hole(struct sfr__image *img, const struct sfr__extent *extent, uint32_t blk)
{
	struct sfr__seg_iter it;
	struct sfr__seg seg;

	sfr__seg_iter_init(&it, img, extent, blk);
	if (!sfr__seg_next(&it, &seg) || seg.kind != SFR__SEG_DATA ||
	    (uintptr_t)img->entries[seg.entry].src != HOLE ||
	    seg.len != sfr__image_block_len(img, extent, blk))
		return false;
	img->entries[seg.entry].crc = crc_of_zeros(img->entries[seg.entry].crc, seg.len);
	return true;
}

static inline int write_extents(struct sfr__image *img, int fd)
{
	char *block = malloc(img->block_bytes);
	int rc = block != NULL ? 0 : -ENOMEM;

	for (uint32_t r = 0; rc == 0 && r < img->nr_extents; r++) {
		const struct sfr__extent *extent = &img->extents[r];

		for (uint32_t blk = 0; rc == 0 && blk < extent->nr_blocks; blk++) {
			size_t len = sfr__image_block_len(img, extent, blk);
			struct sfr__seg_iter it;
			struct sfr__seg seg;

			if (is_hole(img, extent, blk))
				continue;
			/* so that bytes that no segment fills are detected */
			memset(block, 0xdb, len);
			sfr__seg_iter_init(&it, img, extent, blk);
			while (sfr__seg_next(&it, &seg))
				fill_segment(img, &seg, block, true);
			sfr__image_put_crc_fields(img, sfr__image_block_off(img, extent, blk), len,
						  block);
			if (pwrite(fd, block, len, (off_t)sfr__image_block_off(img, extent, blk)) !=
			    (ssize_t)len)
				rc = -EIO;
		}
	}
	free(block);
	return rc;
}

static inline int write_tail(struct sfr__image *img, int fd)
{
	char *tail = malloc(img->tail_len);
	int rc = tail != NULL ? 0 : -ENOMEM;

	if (rc == 0) {
		memset(tail, 0xdb, img->tail_len);
		sfr__image_put_tail(img, tail);
		if (pwrite(fd, tail, img->tail_len, (off_t)img->tail_off) != (ssize_t)img->tail_len)
			rc = -EIO;
	}
	free(tail);
	return rc;
}

/* Writes a file: one byte, then the archive of a tensor of `nbytes` zeros. Returns the file's
 * length, or -errno. */
static inline int64_t write_tensor(const char *path, uint64_t nbytes, uint64_t block_bytes)
{
	const int64_t size = (int64_t)nbytes, stride = 1;
	const struct sfr_tensor tensor = { .storage = "ByteStorage",
					   .addr = HOLE,
					   .nbytes = nbytes,
					   .numel = nbytes,
					   .ndim = 1,
					   .sizes = &size,
					   .strides = &stride };
	struct sfr_parts *parts = NULL;
	struct sfr__image img;
	int fd, rc = sfr_parts_new(&parts);
	int64_t len;

	if (rc == 0)
		rc = sfr_parts_add_bytes(parts, "-", 1);
	if (rc == 0)
		rc = sfr_parts_add_tensor(parts, &tensor);
	if (rc == 0)
		rc = sfr__image_init_parts(&img, parts, block_bytes);
	sfr_parts_free(parts);
	if (rc != 0)
		return rc;
	len = (int64_t)img.len;
	fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
	rc = fd < 0 ? -errno : write_extents(&img, fd);
	if (fd >= 0)
		(void)close(fd);
	sfr__image_fini(&img);
	return rc != 0 ? rc : len;
}

/* Writes the whole file. Returns its length, or -errno. */
static inline int64_t write_image(const char *path, const struct sfr_save_desc *desc,
				  uint64_t block_bytes)
{
	struct sfr__image img;
	int fd = -1, rc;
	int64_t len;

	rc = sfr__image_init(&img, desc, block_bytes);
	if (rc != 0)
		return rc;
	len = (int64_t)img.len;
	fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
	if (fd < 0)
		rc = -errno;
	if (rc == 0)
		rc = write_extents(&img, fd);
	if (rc == 0)
		rc = write_tail(&img, fd);
	if (fd >= 0)
		(void)close(fd);
	sfr__image_fini(&img);
	return rc != 0 ? rc : len;
}

#endif
