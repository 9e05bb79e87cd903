/* Restores records into a device's memory.
 *
 *   reader 0   read into buffer A | send A, event | read into B | send B, event | A completed? ...
 *   reader 1        read into C | send C, event | read into D | ...
 *   stream     E    copies from A, event   copies from C, event   copies from B ...
 *
 * A chunk is read into memory that the driver has pinned, its CRCs are computed there, and its data
 * are sent from there to their destinations. The processor copies nothing. The only host memory
 * needed is the readers' buffers (two of a MiB for each thread), however large the model is. A
 * reader continues with its other buffer meanwhile, and queries the first one's event when it needs
 * that buffer again.
 *
 * The stream is the restore's own. It waits for an event (E) that was recorded on the caller's
 * stream, because torch may hand out memory that work on that stream still uses. Nothing waits in
 * the other direction: bytes of a record count only when the event after their copies has
 * completed, so a caller that has waited for the record may use it on any stream.
 *
 * The driver's own waits are not used, because they spin, or hold locks that others need: an event
 * is queried every 50 us. After a device has failed, nobody knows whether its copies still run, so
 * the buffers that they read are retired. */
#include <errno.h>

#include "restore/restore_int.h"
#include "base/base.h"

#define POLL_NS UINT64_C(50000)

static void device_failed(struct sfr_restore *r, const struct sfr__restore_device *device,
			  const char *call, CUresult rc, uint64_t index)
{
	if (atomic_exchange(&r->has_why, true))
		return; /* another thread tells of a failure */
	sfr__cuda_explain(r->cu, device->device, call, rc, r->why, sizeof(r->why));
	sfr__reader_fail(r->reader, -EIO, index, sfr__reader_data_off(r->reader, index), r->why);
}

/* ---- for the reader ----------------------------------------------------------- */

static void enter(const struct sfr_restore *r, struct sfr__cuda_scope *scope)
{
	*scope = (struct sfr__cuda_scope){ 0 };
	(void)sfr__cuda_enter(scope, r->cu,
			      r->devices[0].context); /* the next call shows an error */
}

static char *lend(void *self, size_t len)
{
	struct sfr_restore *r = self;
	struct sfr__cuda_scope scope;
	void *mem = NULL;

	enter(r, &scope);
	if (r->cu->host_alloc(&mem, len, CU_MEMHOSTALLOC_PORTABLE) != CUDA_SUCCESS)
		mem = NULL;
	sfr__cuda_leave(&scope);
	return mem;
}

static void take_back(void *self, struct sfr__buffer *buffer)
{
	struct sfr_restore *r = self;
	struct sfr__restore_flight *flight = &r->flights[buffer->number];
	struct sfr__cuda_scope scope;

	enter(r, &scope);
	for (unsigned k = 0; k < r->nr_devices; k++)
		if (flight->landed[k] != NULL)
			(void)r->cu->event_free(flight->landed[k]); /* is leaked at worst */
	*flight = (struct sfr__restore_flight){ 0 };
	if (buffer->mem != NULL)
		(void)r->cu->host_free(buffer->mem);
	buffer->mem = NULL;
	sfr__cuda_leave(&scope);
}

bool sfr__restore_send(struct sfr_restore *r, struct sfr__buffer *buffer, uint64_t index, char *to,
		       const char *from, size_t len)
{
	const struct sfr__restore_device *device = r->targets[index].device;
	struct sfr__cuda_scope scope;
	const char *call = "cuCtxPushCurrent";
	CUresult rc = sfr__cuda_enter(&scope, r->cu, device->context);

	SFR__CUDA_THEN(rc, call, "cuMemcpyHtoDAsync",
		       r->cu->copy_to((CUdeviceptr)(uintptr_t)to, from, len, device->stream));
	sfr__cuda_leave(&scope);
	if (rc != CUDA_SUCCESS)
		device_failed(r, device, call, rc, index);
	else
		r->flights[buffer->number].devices |= 1u << (device - r->devices);
	return rc == CUDA_SUCCESS;
}

/* Records an event of the flight after the work on the device's stream. `call` receives the call
 * that failed. */
static CUresult record(const struct sfr_restore *r, unsigned k, struct sfr__restore_flight *flight,
		       const char **call)
{
	const struct sfr__restore_device *device = &r->devices[k];
	struct sfr__cuda_scope scope;
	CUresult rc = sfr__cuda_enter(&scope, r->cu, device->context);

	*call = "cuCtxPushCurrent";
	if (flight->landed[k] == NULL)
		SFR__CUDA_THEN(rc, *call, "cuEventCreate",
			       r->cu->event_new(&flight->landed[k], CU_EVENT_DISABLE_TIMING));
	SFR__CUDA_THEN(rc, *call, "cuEventRecord",
		       r->cu->event_record(flight->landed[k], device->stream));
	sfr__cuda_leave(&scope);
	return rc;
}

static void sleep_a_little(struct sfr_restore *r)
{
	sfr__reader_sleep(r->reader, sfr__deadline(POLL_NS));
}

/* Without an event for the copies from the buffer, queries the streams as a whole. If these fail
 * too, nobody knows whether a copy still runs, and the memory is retired. */
static void give_up(struct sfr_restore *r, struct sfr__buffer *buffer)
{
	struct sfr__restore_flight *flight = &r->flights[buffer->number];
	CUresult rc = CUDA_SUCCESS;

	for (unsigned k = 0; k < r->nr_devices && rc == CUDA_SUCCESS; k++)
		while ((flight->devices & 1u << k) != 0 &&
		       (rc = r->cu->stream_query(r->devices[k].stream)) == CUDA_ERROR_NOT_READY)
			sleep_a_little(r);
	if (rc != CUDA_SUCCESS)
		buffer->mem = NULL;
	flight->devices = 0;
}

static int sent(void *self, struct sfr__buffer *buffer)
{
	struct sfr_restore *r = self;
	struct sfr__restore_flight *flight = &r->flights[buffer->number];

	for (unsigned k = 0; k < r->nr_devices; k++) {
		CUresult rc = CUDA_SUCCESS;
		const char *call;

		if ((flight->devices & 1u << k) != 0)
			rc = record(r, k, flight, &call);
		if (rc == CUDA_SUCCESS)
			continue;
		device_failed(r, &r->devices[k], call, rc, 0);
		give_up(r, buffer);
		return -1;
	}
	return 0;
}

static int land_all(struct sfr_restore *r, struct sfr__buffer *buffer)
{
	struct sfr__restore_flight *flight = &r->flights[buffer->number];

	for (unsigned k = 0; k < r->nr_devices; k++) {
		CUresult rc = CUDA_SUCCESS;

		while ((flight->devices & 1u << k) != 0 &&
		       (rc = r->cu->event_query(flight->landed[k])) == CUDA_ERROR_NOT_READY)
			sleep_a_little(r);
		if (rc == CUDA_SUCCESS)
			continue;
		device_failed(r, &r->devices[k], "cuEventQuery", rc, 0);
		give_up(r, buffer);
		return -1;
	}
	flight->devices = 0;
	return 0;
}

static int land(void *self, struct sfr__buffer *buffer)
{
	struct sfr__cuda_scope scope;
	int rc;

	enter(self, &scope);
	rc = land_all(self, buffer);
	sfr__cuda_leave(&scope);
	return rc;
}

/* ---- for the caller ----------------------------------------------------------- */

static struct sfr__restore_device *find(struct sfr_restore *r, uint32_t device)
{
	for (unsigned i = 0; i < r->nr_devices; i++)
		if (r->devices[i].device == device)
			return &r->devices[i];
	return NULL;
}

/* Returns the device with a stream of the restore's. Its context stays retained until the restore
 * is freed. */
static int open_device(struct sfr_restore *r, uint32_t number, char *why, size_t why_len)
{
	struct sfr__restore_device device = { .device = number };
	int ret;

	if (r->nr_devices == SFR__RESTORE_DEVICES || sfr__reader_runs(r->reader))
		return -EOPNOTSUPP;
	r->cu = sfr__cuda_get(why, why_len);
	ret = r->cu == NULL ?
		      -ENODEV :
		      sfr__cuda_open(r->cu, number, &device.context, &device.stream, why, why_len);
	if (ret < 0)
		return ret;
	r->devices[r->nr_devices++] = device;
	r->client.lend = lend;
	r->client.take_back = take_back;
	r->client.sent = sent;
	r->client.land = land;
	return 0;
}

/* Event E: makes our stream wait for the work on the caller's. `call` receives the call that
 * failed. */
static CUresult follow(const struct sfr__cuda *cu, const struct sfr__restore_device *device,
		       CUstream stream, const char **call)
{
	struct sfr__cuda_scope scope;
	CUevent event = NULL;
	CUresult rc = sfr__cuda_enter(&scope, cu, device->context);

	*call = "cuCtxPushCurrent";
	SFR__CUDA_THEN(rc, *call, "cuEventCreate", cu->event_new(&event, CU_EVENT_DISABLE_TIMING));
	SFR__CUDA_THEN(rc, *call, "cuEventRecord", cu->event_record(event, stream));
	SFR__CUDA_THEN(rc, *call, "cuStreamWaitEvent", cu->stream_wait(device->stream, event, 0));
	if (event != NULL)
		(void)cu->event_free(event); /* the wait refers to the event as it was recorded */
	sfr__cuda_leave(&scope);
	return rc;
}

int sfr_restore_device(struct sfr_restore *r, uint32_t number, uint64_t stream, char *why,
		       size_t why_len)
{
	struct sfr__restore_device *device = find(r, number);
	const char *call;
	CUresult rc;

	if (r->fork_generation != sfr_fork_generation())
		return SFR_EFORK;
	if (device == NULL) {
		int ret = open_device(r, number, why, why_len);

		if (ret < 0)
			return ret;
		device = find(r, number);
	}
	rc = follow(r->cu, device, (CUstream)(uintptr_t)stream, &call);
	if (rc == CUDA_SUCCESS)
		return 0;
	sfr__cuda_explain(r->cu, number, call, rc, why, why_len);
	return -EIO;
}

void sfr_restore_into_device(struct sfr_restore *r, uint64_t index, uint32_t device, uint64_t mem)
{
	r->targets[index].mem = (char *)(uintptr_t)mem;
	r->targets[index].device = find(r, device);
}

void sfr__restore_leave_devices(struct sfr_restore *r)
{
	for (unsigned i = 0; i < r->nr_devices; i++) {
		struct sfr__cuda_scope scope;

		if (sfr__cuda_enter(&scope, r->cu, r->devices[i].context) == CUDA_SUCCESS)
			/* all its work has completed */
			(void)r->cu->stream_free(r->devices[i].stream);
		sfr__cuda_leave(&scope);
		sfr__cuda_release(r->cu, r->devices[i].device);
	}
	r->nr_devices = 0;
}
