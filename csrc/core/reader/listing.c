/* Keeps a list of the records of an archive, made from its directory.
 *
 * The list has 40 bytes and the name of each record, in the order of the file. It has a limit that
 * every real checkpoint stays below. Beyond it the list is marked incomplete, and the caller has to
 * work without it. */
#include <errno.h>
#include <string.h>

#include "reader/listing.h"
#include "base/base.h"

#define MOST_RECORDS (1u << 20) /* records that are kept */
#define MOST_NAMES (64u << 20)  /* bytes of names that are kept */

/* Makes room in *v for `need` items of `unit` bytes; *cap is the room in items. Returns 0, or
 * -ENOMEM with the array unchanged. */
static int grow_array(void **v, size_t unit, uint64_t *cap, uint64_t need)
{
	uint64_t more = *cap == 0 ? 256 : *cap;
	void *grown;

	while (more < need)
		more *= 2;
	if (more == *cap)
		return 0;
	grown = sfr_sys.realloc(*v, more * unit);
	if (grown == NULL)
		return -ENOMEM;
	*v = grown;
	*cap = more;
	return 0;
}

int sfr__listing_add(struct sfr__listing *listing, const struct sfr__unzip_record *rec,
		     const char *name, uint64_t central)
{
	uint64_t names_cap = listing->names_cap;
	void *v = listing->v, *names = listing->names;
	int rc;

	if (rec->method != SFR__UNZIP_STORED || listing->nr == MOST_RECORDS ||
	    listing->names_len + rec->name_len > MOST_NAMES) {
		listing->incomplete = true;
		return 0;
	}
	rc = grow_array(&v, sizeof(*listing->v), &listing->cap, listing->nr + 1);
	listing->v = v;
	if (rc != 0)
		return rc;
	rc = grow_array(&names, 1, &names_cap, listing->names_len + rec->name_len);
	listing->names = names;
	listing->names_cap = (size_t)names_cap;
	if (rc != 0)
		return rc;
	memcpy(listing->names + listing->names_len, name, rec->name_len);
	listing->v[listing->nr++] = (struct sfr__listed){
		.hdr_off = rec->hdr_off,
		.len = rec->clen,
		.central = central,
		.crc = rec->crc,
		.timestamp = rec->timestamp,
		.name_at = (uint32_t)listing->names_len,
		.name_len = rec->name_len,
		.flags = rec->flags,
	};
	listing->names_len += rec->name_len;
	return 0;
}

uint64_t sfr__listing_find(const struct sfr__listing *listing, uint64_t central)
{
	uint64_t at = sfr__lower_bound(i, 0, listing->nr, listing->v[i].central < central);

	return at < listing->nr && listing->v[at].central == central ? at : listing->nr;
}

void sfr__listing_fini(struct sfr__listing *listing)
{
	sfr_sys.free(listing->v);
	sfr_sys.free(listing->names);
	*listing = (struct sfr__listing){ 0 };
}
