/* Sources of a save or snapshot, and the callers' streams. */
#ifndef SFR_SOURCE_PUBLIC_H
#define SFR_SOURCE_PUBLIC_H

#include <stdint.h>

/* One storage. A save in torch's format writes it as record data/<index> of the file. */
struct sfr_source {
	uint64_t addr; /* address in the memory of `device`; may be 0 when nbytes is 0 */
	uint64_t nbytes;
	uint32_t lane;   /* SFR_CAPTURED: copied in the call; else: copied later, by a lane */
	uint32_t device; /* 0: host memory; n: CUDA device n - 1 */
};
#define SFR_CAPTURED 0u
#define SFR_LANE_HOST 1u /* the host's lane when device is 0, else the device's */

/* The bytes of one tensor: a range of a source. A flat file consists of a header and members. */
struct sfr_member {
	uint64_t off; /* in the source */
	uint64_t nbytes;
	uint32_t source;   /* index of the source */
	uint32_t reserved; /* explicit padding */
};

/* The caller's current stream on a device that has sources. */
struct sfr_device_stream {
	uint64_t handle;   /* CUstream */
	uint32_t device;   /* the driver's ordinal */
	uint32_t reserved; /* explicit padding */
};

#endif
