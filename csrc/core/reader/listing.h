/* The list of an archive's records, made from its directory. */
#ifndef SFR_LISTING_H
#define SFR_LISTING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "archive/read.h"

/* A record as the directory lists it. */
struct sfr__listed_record {
	uint64_t hdr_off;   /* offset of the local header */
	uint64_t len;       /* bytes of data */
	uint64_t entry_off; /* offset in the file of its entry in the directory */
	uint32_t crc, timestamp;
	uint32_t name_off; /* offset of its name in listing->names */
	uint16_t name_len;
	uint16_t flags; /* of the zip format, such as SFR__UNZIP_HAS_DESC */
};

/* All zero is an empty list. */
struct sfr__listing {
	struct sfr__listed_record *records; /* in the order of the file */
	char *names;                 /* complete names in a row, without zeros between them */
	uint64_t nr, cap;            /* length of `records`, and how many there is memory for */
	size_t names_len, names_cap; /* bytes in `names`, and how many there is memory for */
	size_t prefix_len;           /* bytes of "name/", with which every name begins */
	bool incomplete; /* a record is missing: it is compressed, or there are too many */
};

/* Adds a record whose entry in the directory is at `entry_off`. If the record is compressed, or the
 * list is too long, marks the list as incomplete instead. Returns 0 or -ENOMEM. */
int sfr__listing_add(struct sfr__listing *listing, const struct sfr__unzip_record *rec,
		     const char *name, uint64_t entry_off);
/* Returns the index of the record whose entry is at `entry_off`, or listing->nr if there is
 * none. */
uint64_t sfr__listing_find(const struct sfr__listing *listing, uint64_t entry_off);
void sfr__listing_fini(struct sfr__listing *listing);

#endif
