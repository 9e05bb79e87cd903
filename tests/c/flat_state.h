/* Random flat files for tests: sources, members, and the bytes that the file must have. */
#ifndef FLAT_STATE_H
#define FLAT_STATE_H

#include <stdlib.h>
#include <string.h>

#include "sfr.h"

enum {
	FLAT_SOURCES = 7,
	FLAT_SOURCE_LEN = 30000,
	FLAT_MEMBERS = 40,
	FLAT_HEADER = 20000,
	FLAT_MAX = FLAT_HEADER + FLAT_MEMBERS * FLAT_SOURCE_LEN,
};

struct flat_state {
	unsigned char bytes[FLAT_SOURCES][FLAT_SOURCE_LEN];
	unsigned char header[FLAT_HEADER];
	struct sfr_source sources[FLAT_SOURCES];
	struct sfr_member members[FLAT_MEMBERS];
	struct sfr_save_desc desc;
	unsigned char expected[FLAT_MAX];
	uint64_t len;
};

static inline uint64_t flat_below(uint64_t bound)
{
	return check_random() % bound;
}

/* The bytes that the file must have, for the state's sources, members and header. */
static inline void flat_expect(struct flat_state *s)
{
	s->len = s->desc.skeleton_len;
	memcpy(s->expected, s->header, s->len);
	for (uint32_t i = 0; i < s->desc.nr_members; i++) {
		const struct sfr_member *member = &s->members[i];

		memcpy(s->expected + s->len, s->bytes[member->source] + member->off,
		       member->nbytes);
		s->len += member->nbytes;
	}
}

/* Makes a state with a random header, and members of any length of sources in lanes 0 and 1. Each
 * source is in host memory or, by chance, on one of `nr_devices` devices. */
static inline void flat_make(struct flat_state *s, uint32_t nr_devices)
{
	static const uint64_t most[] = { 30, 700, 5000, FLAT_SOURCE_LEN };

	for (size_t i = 0; i < sizeof(s->header); i++)
		s->header[i] = (unsigned char)flat_below(256);
	for (uint32_t i = 0; i < FLAT_SOURCES; i++) {
		for (size_t k = 0; k < FLAT_SOURCE_LEN; k++)
			s->bytes[i][k] = (unsigned char)flat_below(256);
		s->sources[i] = (struct sfr_source){ (uintptr_t)s->bytes[i], FLAT_SOURCE_LEN,
						     (uint32_t)flat_below(2),
						     (uint32_t)flat_below(nr_devices + 1) };
	}
	s->desc = (struct sfr_save_desc){
		.skeleton = s->header,
		.skeleton_len = flat_below(4) ? 1 + flat_below(FLAT_HEADER) : SFR_PAGE,
		.sources = s->sources,
		.nr_sources = FLAT_SOURCES,
		.members = s->members,
		.nr_members = (uint32_t)flat_below(FLAT_MEMBERS + 1),
	};
	for (uint32_t i = 0; i < s->desc.nr_members; i++) {
		uint64_t nbytes = 1 + flat_below(most[flat_below(4)]);

		s->members[i] =
			(struct sfr_member){ .off = flat_below(FLAT_SOURCE_LEN - nbytes + 1),
					     .nbytes = nbytes,
					     .source = (uint32_t)flat_below(FLAT_SOURCES) };
	}
	flat_expect(s);
}

#endif
