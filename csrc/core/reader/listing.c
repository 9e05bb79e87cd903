/* Keeps a list of the records of an archive, made from its directory.
 *
 * A check forgets each record after checking it. A caller that reads the records afterwards makes
 * the check keep them in a list, in the order of the file: 40 bytes and the name of each record.
 * The list grows as records are read, up to a limit that every real checkpoint stays below. Beyond
 * it the list is marked incomplete, and the caller has to work without it. */
#include <errno.h>
#include <string.h>

#include "reader/listing.h"
#include "base/base.h"

#define MOST_RECORDS (1u << 20) /* records that are kept */
#define MOST_NAMES (64u << 20)  /* bytes of names that are kept */

/* Makes room in the array *v for at least `need` items of `unit` bytes; *cap is the room in items.
 * Returns 0, or -ENOMEM with the array unchanged. */
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

int sfr__listing_add(struct sfr__listing *p, const struct sfr__unzip_record *rec, const char *name,
		     uint64_t central)
{
	uint64_t names_cap = p->names_cap;
	void *v = p->v, *names = p->names;
	int rc;

	if (rec->method != SFR__UNZIP_STORED || p->nr == MOST_RECORDS ||
	    p->names_len + rec->name_len > MOST_NAMES) {
		p->incomplete = true;
		return 0;
	}
	rc = grow_array(&v, sizeof(*p->v), &p->cap, p->nr + 1);
	p->v = v;
	if (rc != 0)
		return rc;
	rc = grow_array(&names, 1, &names_cap, p->names_len + rec->name_len);
	p->names = names;
	p->names_cap = (size_t)names_cap;
	if (rc != 0)
		return rc;
	memcpy(p->names + p->names_len, name, rec->name_len);
	p->v[p->nr++] = (struct sfr__listed){
		.hdr_off = rec->hdr_off,
		.len = rec->clen,
		.central = central,
		.crc = rec->crc,
		.timestamp = rec->timestamp,
		.name_at = (uint32_t)p->names_len,
		.name_len = rec->name_len,
		.flags = rec->flags,
	};
	p->names_len += rec->name_len;
	return 0;
}

uint64_t sfr__listing_find(const struct sfr__listing *p, uint64_t central)
{
	uint64_t at = sfr__lower_bound(i, 0, p->nr, p->v[i].central < central);

	return at < p->nr && p->v[at].central == central ? at : p->nr;
}

void sfr__listing_fini(struct sfr__listing *p)
{
	sfr_sys.free(p->v);
	sfr_sys.free(p->names);
	*p = (struct sfr__listing){ 0 };
}
