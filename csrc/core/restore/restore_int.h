/* The state of a restore, shared by restore.c and device.c. */
#ifndef SFR_RESTORE_INT_H
#define SFR_RESTORE_INT_H

#include <stdatomic.h>

#include "cuda/driver.h"
#include "reader/reader.h"
#include "restore/restore.h"

#define SFR__RESTORE_DEVICES 16u

/* Where a record's bytes go; constant once the record may be read. */
struct sfr__target {
	char *mem;                                /* or NULL */
	const struct sfr__restore_device *device; /* the device of `mem`; NULL: host memory */
};

/* A device that receives records, and the restore's stream on it; device.c. */
struct sfr__restore_device {
	uint32_t device;
	CUcontext context;
	CUstream stream;
};

/* The copies that read from one buffer of the reader. */
struct sfr__restore_flight {
	CUevent landed[SFR__RESTORE_DEVICES]; /* events after its copies; NULL: none */
	uint32_t devices;                     /* a bit for each device that it has copies to */
};

struct sfr_restore {
	struct sfr_check *check;
	const struct sfr__places *places; /* the check's */
	struct sfr_reader *reader;
	struct sfr__reader_client client;
	struct sfr__target *targets;
	uint64_t fork_generation;
	/* constant once the reader runs */
	const struct sfr__cuda *cu;
	struct sfr__restore_device devices[SFR__RESTORE_DEVICES];
	unsigned nr_devices;
	/* each used by the thread that owns the buffer of the same number */
	struct sfr__restore_flight flights[SFR__READER_THREADS * SFR__READER_BUFFERS];
	/* the error of a device, written by the first that has one */
	atomic_bool has_why;
	char why[160];
};

/* ---- device.c ---- */

/* Sends bytes in the buffer to `to` in record `index`. False: a failure was recorded. */
bool sfr__restore_send(struct sfr_restore *r, struct sfr__buffer *buffer, uint64_t index, char *to,
		       const char *from, size_t len);
/* Leaves the devices, when the reader's threads have ended. */
void sfr__restore_leave_devices(struct sfr_restore *r);

#endif
