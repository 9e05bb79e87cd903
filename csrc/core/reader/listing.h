/* The list of an archive's records, made from its directory. A reader uses it to find the records
 * in the file. See listing.c. */
#ifndef SFR_LISTING_H
#define SFR_LISTING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "archive/read.h"

/* A record as the directory lists it. */
struct sfr__listed {
	uint64_t hdr_off, len; /* offset of the local header; bytes of data */
	uint64_t central;      /* offset in the file of its entry in the directory */
	uint32_t crc, timestamp;
	uint32_t name_at; /* offset of its name in the listing's `names` */
	uint16_t name_len, flags;
};

struct sfr__listing {          /* a zeroed one is an empty list */
	struct sfr__listed *v; /* in the order of the file */
	char *names;           /* complete names, one after the other, without zeros between */
	uint64_t nr, cap;
	size_t names_len, names_cap;
	size_t prefix_len; /* bytes of "name/", with which every name in an archive begins */
	bool incomplete;   /* a record was left out: it is compressed, or there are too many */
};

/* Adds a record, whose entry in the directory is at offset `central`, or marks the list as
 * incomplete. Returns 0 or -ENOMEM. */
int sfr__listing_add(struct sfr__listing *p, const struct sfr__unzip_record *rec, const char *name,
		     uint64_t central);
/* Returns the index of the record whose entry in the directory is at offset `central`, or p->nr if
 * there is none. */
uint64_t sfr__listing_find(const struct sfr__listing *p, uint64_t central);
void sfr__listing_fini(struct sfr__listing *p);

#endif
