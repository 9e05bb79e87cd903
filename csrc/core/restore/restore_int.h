/* The state of a restore, shared by restore.c and device.c. */
#ifndef SFR_RESTORE_INT_H
#define SFR_RESTORE_INT_H

#include <stdatomic.h>

#include "reader/reader.h"
#include "restore/restore.h"
#include "stage/transfer.h"

#define SFR__RESTORE_DEVICES 16u /* the most devices of one restore */

/* Where a record's bytes go; constant once the record may be read. */
struct sfr__destination {
	char *mem;       /* NULL: the bytes are only checked */
	unsigned device; /* 0: host memory; n: devices[n - 1] of the restore */
};

/* The copies from one buffer of the reader: to[k] is the transfer to devices[k] of the restore. */
struct sfr__buffer_transfers {
	struct sfr__transfer to[SFR__RESTORE_DEVICES];
};

struct sfr_restore {
	struct sfr_check *check;            /* NULL for bare records */
	const struct sfr__listing *listing; /* the check's, or `bare` */
	struct sfr__listing bare;           /* made by sfr_restore_new_bare */
	struct sfr_reader *reader;
	struct sfr__reader_client client;      /* the functions that the reader calls */
	struct sfr__destination *destinations; /* one for each record */
	uint64_t fork_generation;

	/* constant once the reader runs */
	uint32_t devices[SFR__RESTORE_DEVICES]; /* the driver's numbers */
	unsigned nr_devices;
	struct sfr__cuda_lane *lane; /* the lane of devices[0] */

	struct sfr__cuda_lanes lanes; /* has a lock of its own */
	/* one for each buffer of the reader; used only by the thread that has the buffer */
	struct sfr__buffer_transfers transfers[SFR__READER_THREADS * SFR__READER_BUFFERS];
	atomic_bool has_why; /* set by the thread that writes `why` */
	char why[160];       /* the first error of a device */
};

/* ---- device.c ---- */

/* Adds a copy from the buffer (`from`) to the device memory of a record (`to`). The reader's `send`
 * begins it. Returns false after a failure, which sfr__reader_fail has recorded. */
bool sfr__restore_add_copy(struct sfr_restore *r, struct sfr__reader_buffer *buffer, uint64_t index,
			   char *to, const char *from, size_t len);

#endif
