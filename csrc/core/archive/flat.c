/* The image of a flat file: a header, then the bytes of tensors, without a gap. That is the format
 * safetensors. Python makes the header, which names each tensor's offset, and the order of members.
 *
 *     0            4096           8192           12288          16384
 *     |--------------|--------------|--------------|--------------|--
 *      header, captured   | deferred                   | captured ...      extents
 *                    |~~~~~~~~~~~~~~|              |~~~~~~~~~~~~~~|        edge pages
 *
 * Members follow each other in the given order. A new extent begins where a member is copied at
 * another time, or from another device, than the one before. One producer may so have several
 * extents; they are adjacent in img->runs, and its blocks count through them.
 *
 * An extent begins at the page that contains its first byte, because blocks are written in whole
 * pages. So two extents may share a page: an edge page. Neither block writes it. Writers put its
 * bytes together in memory of the ticket, and it is written with the tail (save/write.c). A page
 * that a run has alone is padded with zeros; only the last one of the file is, and it is cut off.
 *
 * Such a file has no checksums. */
#include <errno.h>

#include "archive/layout.h"

#define LEN_MAX (UINT64_C(1) << 62) /* as in layout.c */

static uint64_t key_of(const struct sfr_save_desc *desc, uint32_t member)
{
	return sfr__run_key(&desc->sources[desc->members[member].source]);
}

static int check_members(const struct sfr_save_desc *desc)
{
	uint64_t total = desc->skeleton_len;

	if (total == 0 || desc->nr_members == UINT32_MAX)
		return -EINVAL;
	for (uint32_t i = 0; i < desc->nr_members; i++) {
		const struct sfr_member *member = &desc->members[i];

		if (member->source >= desc->nr_sources || member->nbytes == 0 ||
		    member->off > desc->sources[member->source].nbytes ||
		    member->nbytes > desc->sources[member->source].nbytes - member->off)
			return -EINVAL;
		if (member->nbytes > LEN_MAX - total)
			return -EFBIG;
		total += member->nbytes;
	}
	return 0;
}

/* Returns the number of extents. The header has the key of captured host memory, which is 0. */
static uint32_t count_runs(const struct sfr_save_desc *desc)
{
	uint64_t last = 0;
	uint32_t nr = 1;

	for (uint32_t i = 0; i < desc->nr_members; i++) {
		nr += key_of(desc, i) != last;
		last = key_of(desc, i);
	}
	return nr;
}

/* Returns the lowest key above `key` that has a member, or `key` itself. */
static uint64_t next_key(const struct sfr_save_desc *desc, uint64_t key)
{
	uint64_t next = key;

	for (uint32_t i = 0; i < desc->nr_members; i++) {
		uint64_t its = key_of(desc, i);

		if (its > key && (next == key || its < next))
			next = its;
	}
	return next;
}

static void open_run(struct sfr__image *img, uint64_t key)
{
	img->runs[img->nr_runs++] = (struct sfr__run){ .lane = (uint32_t)(key >> 32),
						       .device = (uint32_t)key,
						       .first_entry = img->nr_entries };
}

/* Adds an entry to the last extent. */
static void add(struct sfr__image *img, const char *src, uint64_t nbytes, uint64_t off,
		int64_t source)
{
	img->entries[img->nr_entries++] = (struct sfr__entry){
		.src = src, .nbytes = nbytes, .hdr_off = off, .data_off = off, .source = source
	};
	img->runs[img->nr_runs - 1].nr_entries++;
}

/* Adds the extents of one key. */
static void add_runs(struct sfr__image *img, const struct sfr_save_desc *desc, uint64_t key)
{
	uint64_t *nbytes =
		key >> 32 == SFR_CAPTURED ? &img->captured_nbytes : &img->deferred_nbytes;
	uint64_t off = desc->skeleton_len, last = 0, its;

	if (key == 0) {
		open_run(img, 0);
		add(img, desc->skeleton, desc->skeleton_len, 0, -1);
		*nbytes = desc->skeleton_len;
	}
	for (uint32_t i = 0; i < desc->nr_members; i++, last = its) {
		const struct sfr_member *member = &desc->members[i];

		its = key_of(desc, i);
		if (its == key && last != key)
			open_run(img, key);
		if (its == key) {
			const struct sfr_source *source = &desc->sources[member->source];

			add(img, (const char *)(uintptr_t)(source->addr + member->off),
			    member->nbytes, off, member->source);
			*nbytes += member->nbytes;
		}
		off += member->nbytes;
		if (img->len < off)
			img->len = off;
	}
}

/* Sets the bounds of an extent whose entries are known, and notes its first page if it shares it.
 * -EFBIG. */
static int end_run(struct sfr__image *img, struct sfr__run *run)
{
	struct sfr__entry *first = &img->entries[run->first_entry];
	const struct sfr__entry *last = first + run->nr_entries - 1;
	uint64_t nr_blocks;

	run->off = first->data_off / SFR_PAGE * SFR_PAGE;
	run->len = sfr__round_up(last->data_off + last->nbytes, SFR_PAGE) - run->off;
	first->hdr_off = run->off; /* the bytes of others in the page, as glue */
	run->first_block = run == img->runs ? 0 : run[-1].first_block + run[-1].nr_blocks;
	nr_blocks = sfr__round_up(run->len, img->block_bytes) / img->block_bytes;
	if (nr_blocks > UINT32_MAX - run->first_block)
		return -EFBIG;
	run->nr_blocks = (uint32_t)nr_blocks;
	if (first->data_off != run->off && !sfr__image_is_edge(img, run->off))
		img->edges[img->nr_edges++] = run->off;
	return 0;
}

/* Counts what each producer has from an extent on. */
static void count_all(struct sfr__image *img)
{
	for (uint32_t r = img->nr_runs; r-- > 0;) {
		struct sfr__run *run = &img->runs[r];
		bool more = r + 1 < img->nr_runs && run[1].lane == run->lane &&
			    run[1].device == run->device;

		run->all_entries = run->nr_entries + (more ? run[1].all_entries : 0);
		run->all_blocks = run->nr_blocks + (more ? run[1].all_blocks : 0);
	}
}

int sfr__image_init_flat(struct sfr__image *img, const struct sfr_save_desc *desc,
			 uint64_t block_bytes)
{
	uint32_t nr_runs;
	int rc;

	*img = (struct sfr__image){ .block_bytes = block_bytes };
	rc = sfr__image_check_desc(desc, block_bytes);
	if (rc == 0)
		rc = check_members(desc);
	if (rc != 0)
		return rc;
	nr_runs = count_runs(desc);
	img->entries = sfr_sys.calloc((size_t)desc->nr_members + 1, sizeof(*img->entries));
	img->runs = sfr_sys.calloc(nr_runs, sizeof(*img->runs));
	img->edges = sfr_sys.calloc(nr_runs, sizeof(*img->edges));
	img->glue = sfr_sys.calloc(1, SFR_PAGE);
	if (img->entries == NULL || img->runs == NULL || img->edges == NULL || img->glue == NULL) {
		rc = -ENOMEM;
		goto fail;
	}
	img->len = desc->skeleton_len;
	for (uint64_t key = 0, last = UINT64_MAX; key != last; key = next_key(desc, key)) {
		add_runs(img, desc, key);
		last = key;
	}
	for (uint32_t r = 0; rc == 0 && r < img->nr_runs; r++)
		rc = end_run(img, &img->runs[r]);
	if (rc != 0)
		goto fail;
	count_all(img);
	img->tail_off = img->len;
	return 0;
fail:
	sfr__image_fini(img);
	return rc;
}
