/* Keeps a list of the records of an archive, made from its directory.
 *
 * The list takes 40 bytes a record, and the name. It has a limit, which no real checkpoint exceeds.
 * A longer list is marked incomplete, and the caller has to work without it. */
#include <errno.h>
#include <string.h>

#include "reader/listing.h"
#include "base/base.h"

#define RECORDS_MAX (1u << 20)      /* records that are kept */
#define NAMES_BYTES_MAX (64u << 20) /* bytes of names that are kept */

/* Reallocates the array *v, which has memory for *cap items, so that it has memory for `need` items
 * of `item_bytes` bytes. Returns 0, or -ENOMEM with the array unchanged. */
static int grow_array(void **v, size_t item_bytes, uint64_t *cap, uint64_t need)
{
	uint64_t new_cap = *cap == 0 ? 256 : *cap;
	void *grown;

	while (new_cap < need)
		new_cap *= 2;
	if (new_cap == *cap)
		return 0;
	grown = sfr_sys.realloc(*v, new_cap * item_bytes);
	if (grown == NULL)
		return -ENOMEM;
	*v = grown;
	*cap = new_cap;
	return 0;
}

int sfr__listing_add(struct sfr__listing *listing, const struct sfr__unzip_record *rec,
		     const char *name, uint64_t entry_off)
{
	uint64_t names_cap = listing->names_cap;
	void *records = listing->records, *names = listing->names;
	int rc;

	if (rec->method != SFR__UNZIP_STORED || listing->nr == RECORDS_MAX ||
	    listing->names_len + rec->name_len > NAMES_BYTES_MAX) {
		listing->incomplete = true; /* no error: the caller does without the list */
		return 0;
	}
	rc = grow_array(&records, sizeof(*listing->records), &listing->cap, listing->nr + 1);
	listing->records = records;
	if (rc != 0)
		return rc;
	rc = grow_array(&names, 1, &names_cap, listing->names_len + rec->name_len);
	listing->names = names;
	listing->names_cap = (size_t)names_cap;
	if (rc != 0)
		return rc;
	memcpy(listing->names + listing->names_len, name, rec->name_len);
	listing->records[listing->nr++] = (struct sfr__listed_record){
		.hdr_off = rec->hdr_off,
		.len = rec->packed_len,
		.entry_off = entry_off,
		.crc = rec->crc,
		.timestamp = rec->timestamp,
		.name_off = (uint32_t)listing->names_len,
		.name_len = rec->name_len,
		.flags = rec->flags,
	};
	listing->names_len += rec->name_len;
	return 0;
}

uint64_t sfr__listing_find(const struct sfr__listing *listing, uint64_t entry_off)
{
	uint64_t at =
		sfr__lower_bound(i, 0, listing->nr, listing->records[i].entry_off < entry_off);

	if (at < listing->nr && listing->records[at].entry_off == entry_off)
		return at;
	return listing->nr;
}

void sfr__listing_fini(struct sfr__listing *listing)
{
	sfr_sys.free(listing->records);
	sfr_sys.free(listing->names);
	*listing = (struct sfr__listing){ 0 };
}
