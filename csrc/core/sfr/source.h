/* What is saved or copied, and the streams it is worked on. */
#ifndef SFR_SOURCE_PUBLIC_H
#define SFR_SOURCE_PUBLIC_H

#include <stdint.h>

/* One storage: record data/<index> of the file. */
struct sfr_source {
	uint64_t addr; /* address of its bytes where they live; may be 0 when nbytes is 0 */
	uint64_t nbytes;
	uint32_t lane;   /* SFR_CAPTURED, or that a lane copies it later */
	uint32_t device; /* 0 = host memory; n = CUDA device n - 1 */
};
#define SFR_CAPTURED 0u
#define SFR_LANE_HOST 1u /* of the host for device 0, else of that device */

/* The caller's current stream on a device that sources live on. */
struct sfr_stream {
	uint64_t handle; /* CUstream */
	uint32_t device; /* the driver's number */
	uint32_t reserved;
};

#endif
