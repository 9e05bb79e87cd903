/* Restores records into a device's memory.
 *
 *   reader 0   read into buffer A | send A | read into B | send B | wait for A's copies | ...
 *   reader 1        read into C | send C | read into D | ...
 *   stream     E    copies from A   copies from C   copies from B ...
 *
 * "reader 0" and "reader 1" are threads of the restore's reader, and A to D are their buffers. Each
 * thread has two buffers of 1 MiB: it reads into one while the other is being sent. The buffers are
 * pinned, and are the only host memory needed. CRCs are computed in them.
 *
 * Each buffer has a transfer (stage/transfer.h) to each device, for one chunk at a time. The lanes
 * are the restore's own, so it waits for no save. A lane first waits for the event E of the
 * caller's stream: torch may hand out memory that work on that stream still uses. A record counts
 * as read only when its copies have completed, so any stream may use it then.
 *
 * After a device has died, its copies may still run. So their buffers are never used again, nor
 * freed. */
#include <errno.h>
#include <stdio.h>

#include "restore/restore_int.h"
#include "base/base.h"

/* no callback: `finish` waits for the copies instead */
static const struct sfr__transfer_ops ops = { .portion_done = NULL };

/* Ends the reading with a device's error. The error belongs to no record, so the failure names the
 * first record. */
static void report_device_failure(struct sfr_restore *r, const char *why)
{
	if (atomic_exchange(&r->has_why, true))
		return; /* a failure was reported already */
	(void)snprintf(r->why, sizeof(r->why), "%s", why);
	sfr__reader_fail(r->reader, -EIO, 0, sfr__reader_data_off(r->reader, 0), r->why);
}

/* ---- for the reader ----------------------------------------------------------- */

/* Enters the context of the first device, in which pinned memory is allocated and freed. */
static void enter_first_context(struct sfr_restore *r, struct sfr__cuda_scope *scope)
{
	*scope = (struct sfr__cuda_scope){ 0 };
	/* if this fails, so does the next call of the driver */
	(void)sfr__cuda_enter(scope, r->lane->cu, r->lane->context);
}

/* lend, free_lent_memory, send_chunk and finish are functions of struct sfr__reader_client. */
static char *lend_pinned_memory(void *self, size_t len)
{
	struct sfr_restore *r = self;
	struct sfr__cuda_scope scope;
	void *mem = NULL;

	enter_first_context(r, &scope);
	if (r->lane->cu->host_alloc(&mem, len, CU_MEMHOSTALLOC_PORTABLE) != CUDA_SUCCESS)
		mem = NULL;
	sfr__cuda_leave(&scope);
	return mem;
}

static void free_lent_memory(void *self, struct sfr__reader_buffer *buffer)
{
	struct sfr_restore *r = self;
	struct sfr__cuda_scope scope;

	enter_first_context(r, &scope);
	if (buffer->mem != NULL)
		(void)r->lane->cu->host_free(buffer->mem); /* at worst the memory is leaked */
	buffer->mem = NULL;
	sfr__cuda_leave(&scope);
}

bool sfr__restore_add_copy(struct sfr_restore *r, struct sfr__reader_buffer *buffer, uint64_t index,
			   char *to, const char *from, size_t len)
{
	const unsigned k = r->destinations[index].device - 1; /* index in r->devices */
	struct sfr__transfer *tr = &r->transfers[buffer->number].to[k];

	/* The first copy from a chunk begins a new transfer. This cannot fail: the lane exists. */
	if (sfr__transfer_is_over(tr)) {
		*tr = (struct sfr__transfer){ .ops = &ops };
		(void)sfr__transfer_open(tr, &r->lanes, r->devices[k], SFR__CUDA_IN);
	}
	/* true: the buffer is pinned */
	sfr__transfer_add_copy(tr, (uint64_t)(uintptr_t)to, (uint64_t)(uintptr_t)from, len, true);
	if (tr->err.code == 0)
		return true;
	sfr__reader_fail(r->reader, tr->err.code, index, sfr__reader_data_off(r->reader, index),
			 NULL);
	return false;
}

static int send_chunk(void *self, struct sfr__reader_buffer *buffer)
{
	struct sfr_restore *r = self;
	int rc = 0;

	for (unsigned k = 0; k < r->nr_devices; k++) {
		struct sfr__transfer *tr = &r->transfers[buffer->number].to[k];

		if (sfr__transfer_is_over(tr)) /* the chunk has no bytes for this device */
			continue;
		if (sfr__transfer_enter_context(tr))
			sfr__transfer_send_portion(tr);
		if (tr->err.code != 0) {
			report_device_failure(r, tr->err.note);
			rc = -1;
		}
		sfr__transfer_end_queueing(tr);
	}
	return rc;
}

/* Waits for the copies from a buffer. A device that has died may still read the buffer: then the
 * buffer's memory is never used again, nor freed. */
static int wait_for_buffer_copies(void *self, struct sfr__reader_buffer *buffer)
{
	struct sfr_restore *r = self;
	bool lost = false;

	for (unsigned k = 0; k < r->nr_devices; k++) {
		struct sfr__transfer *tr = &r->transfers[buffer->number].to[k];

		if (!tr->lane)
			continue; /* this buffer was never copied to this device */
		(void)sfr__transfer_wait(tr, SFR_FOREVER); /* always 0 */
		if (tr->device_died)
			report_device_failure(r,
					      tr->lane->why); /* constant once the lane is dead */
		lost = lost || tr->device_died;
	}
	if (lost)
		buffer->mem = NULL;
	return lost ? -1 : 0;
}

/* ---- for the caller ----------------------------------------------------------- */

/* Returns the device's index in r->devices, or nr_devices if it was not prepared. */
static unsigned find_device(const struct sfr_restore *r, uint32_t device)
{
	unsigned k = 0;

	while (k < r->nr_devices && r->devices[k] != device)
		k++;
	return k;
}

int sfr_restore_prepare_device(struct sfr_restore *r, uint32_t device, uint64_t stream, char *why,
			       size_t why_len)
{
	struct sfr__transfer tr = { .ops = &ops };
	const unsigned index = find_device(r, device);
	int rc;

	if (r->fork_generation != sfr_fork_generation())
		return SFR_EFORK;
	if (index == SFR__RESTORE_DEVICES)
		return -EOPNOTSUPP; /* too many devices */
	if (index == r->nr_devices && sfr__reader_has_started(r->reader))
		return -EOPNOTSUPP; /* a new device, but the reader already has its buffers */
	/* This transfer only makes the lane wait for the caller's stream (E). */
	rc = sfr__transfer_begin_after_stream(&tr, &r->lanes, device, SFR__CUDA_IN,
					      (CUstream)(uintptr_t)stream);
	if (tr.lane)
		sfr__transfer_end_queueing(&tr);
	(void)snprintf(why, why_len, "%s", tr.err.note);
	if (rc == 0)
		rc = tr.err.code;
	if (rc < 0 || index < r->nr_devices) /* an error, or a device that was prepared before */
		return rc;
	if (index == 0)
		r->lane = tr.lane; /* the first device's lane, for enter_first_context */
	r->devices[r->nr_devices++] = device;
	r->client.lend = lend_pinned_memory;
	r->client.take_back = free_lent_memory;
	r->client.send = send_chunk;
	r->client.finish = wait_for_buffer_copies;
	return 0;
}

void sfr_restore_set_device_destination(struct sfr_restore *r, uint64_t index, uint32_t device,
					uint64_t mem)
{
	r->destinations[index].mem = (char *)(uintptr_t)mem;
	r->destinations[index].device = find_device(r, device) + 1; /* 0 is host memory */
}
