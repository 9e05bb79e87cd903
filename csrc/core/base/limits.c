/* The thresholds of sfr/limits.h: their defaults, and the ranges to which a test may set them. */
#include <errno.h>

#include "base/base.h"
#include "sfr/limits.h"

/* The largest values of a zip file's fields, which mean that the number is in a zip64 field. */
#define ZIP_MAX16 0xffffu
#define ZIP_MAX32 UINT32_C(0xffffffff)
#define MIB (UINT64_C(1) << 20)

#define DEFAULTS                                                                                   \
	{                                                                                          \
		.zip64_bytes = ZIP_MAX32,                                                          \
		.zip64_records = ZIP_MAX16,                                                        \
		.reader_chunk_bytes = MIB,                                                         \
		.check_chunk_bytes = MIB,                                                          \
		.ahead_bytes = 8 * MIB,                                                            \
	}

struct sfr_limits sfr_limits = DEFAULTS;

/* Returns whether the value is in [min, max] and a multiple of `unit`. */
static bool is_in_range(uint64_t value, uint64_t min, uint64_t max, uint64_t unit)
{
	return value >= min && value <= max && value % unit == 0;
}

int sfr_limits_set(const struct sfr_limits *limits)
{
	const struct sfr_limits *l = limits;

	if (!is_in_range(l->zip64_bytes, SFR_PAGE, ZIP_MAX32, 1) ||
	    !is_in_range(l->zip64_records, 1, ZIP_MAX16, 1) ||
	    !is_in_range(l->reader_chunk_bytes, SFR_PAGE, MIB, SFR_PAGE) ||
	    !is_in_range(l->check_chunk_bytes, SFR_PAGE, MIB, SFR_PAGE) ||
	    !is_in_range(l->ahead_bytes, 1, UINT64_MAX, 1))
		return -EINVAL;
	sfr_limits = *limits;
	return 0;
}

void sfr_limits_reset(void)
{
	sfr_limits = (struct sfr_limits)DEFAULTS;
}
