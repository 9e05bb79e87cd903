/* Copies, and memory for small ones: samples, and bytes of which only a checksum is wanted.
 *
 * Pinning memory takes longer than all else that a call does, so a lane keeps some, from save to
 * save. A batch is one call where the driver has one for that; a driver that refuses it once is not
 * asked again.
 */
#include <errno.h>

#include "device/lane.h"

void sfr__cuda_copies_locked(struct sfr__cuda_lane *lane, CUdeviceptr *dst, CUdeviceptr *src,
			     size_t *len, size_t nr, bool pinned, struct sfr_err *err)
{
	struct sfr__cu_copy_attributes attrs = { .src_access_order = SFR__CU_ORDER_STREAM,
						 .flags = SFR__CU_PREFER_OVERLAP };
	const struct sfr__cuda *cu = lane->cu;
	CUresult rc = CUDA_SUCCESS;
	size_t at = 0, failed = 0;

	if (nr > 1 && pinned && !lane->single_copies && (cu->batch_v2 || cu->batch_v1)) {
		rc = cu->batch_v2 ?
			     cu->batch_v2(dst, src, len, nr, &attrs, &at, 1, lane->stream) :
			     cu->batch_v1(dst, src, len, nr, &attrs, &at, 1, &failed, lane->stream);
		if (rc == CUDA_SUCCESS)
			return;
		if (rc != CUDA_ERROR_NOT_SUPPORTED && rc != CUDA_ERROR_INVALID_VALUE) {
			(void)sfr__cuda_failed_locked(lane, "cuMemcpyBatchAsync", rc, err);
			return;
		}
		/* Whatever of it was queued is copied a second time, from and to the same place. */
		lane->single_copies = true;
		sfr__notice_text("Device %u refuses batched copies: small tensors are copied one "
				 "by one.",
				 lane->device);
	}
	for (size_t i = 0; i < nr; i++) {
		rc = cu->copy((void *)(uintptr_t)dst[i], src[i], len[i], lane->stream);
		if (rc != CUDA_SUCCESS) {
			(void)sfr__cuda_failed_locked(lane, "cuMemcpyDtoHAsync", rc, err);
			return;
		}
	}
}

void sfr__cuda_store_free(struct sfr__cuda_lane *lane, struct sfr__cuda_store *store)
{
	/* What the driver does not let go of stays mapped, as in pin.c: the address would be given
	 * to somebody else while the driver still takes it for this. */
	if (!store->pinned || lane->cu->host_unregister(store->range.base) == CUDA_SUCCESS)
		sfr__memory_release(&store->range);
	*store = (struct sfr__cuda_store){ 0 };
}

void sfr__cuda_store_put(struct sfr__cuda_lane *lane, struct sfr__cuda_store *store)
{
	struct sfr__cuda_scope scope;
	bool dead;

	if (!store->range.map)
		return;
	sfr__lock(&lane->mu);
	dead = lane->dead;
	for (size_t i = 0; i < SFR__CUDA_STORES_KEPT && store->range.map && !dead; i++) {
		if (lane->stores[i].range.map)
			continue;
		lane->stores[i] = *store;
		*store = (struct sfr__cuda_store){ 0 };
	}
	sfr__unlock(&lane->mu);
	/* On a dead device a copy may still be running: the memory stays for as long as the
	 * process. */
	if (!store->range.map || dead)
		return;
	(void)sfr__cuda_enter(&scope, lane->cu, lane->context); /* shows in the next call */
	sfr__cuda_store_free(lane, store);
	sfr__cuda_leave(&scope);
}

int sfr__cuda_store_get(struct sfr__cuda_lane *lane, size_t len, struct sfr__cuda_store *store)
{
	int rc;

	len = (size_t)sfr__round_up(len, SFR_PAGE);
	sfr__lock(&lane->mu);
	for (size_t i = 0; i < SFR__CUDA_STORES_KEPT && !store->range.map; i++) {
		if (lane->stores[i].len < len)
			continue;
		*store = lane->stores[i];
		lane->stores[i] = (struct sfr__cuda_store){ 0 };
	}
	sfr__unlock(&lane->mu);
	if (store->range.map)
		return 0;
	rc = sfr__memory_reserve(&store->range, len);
	if (rc == 0)
		rc = sfr__memory_commit(store->range.base, len);
	if (rc < 0) {
		sfr__memory_release(&store->range);
		return rc;
	}
	store->len = len;
	/* Where it cannot be, the driver copies through memory of its own. */
	store->pinned = lane->cu->host_register(store->range.base, len,
						CU_MEMHOSTREGISTER_PORTABLE) == CUDA_SUCCESS;
	return 0;
}

/* Waits until nothing of the stream runs any more, or the device is given up: whoever gives memory
 * back has to know. */
static void drain_locked(struct sfr__cuda_lane *lane, pthread_cond_t *never)
{
	struct sfr_err err = { .index = -1 };
	uint32_t failed = 0;
	CUresult rc;

	while (!lane->dead && (rc = lane->cu->stream_query(lane->stream)) != CUDA_SUCCESS) {
		failed = rc == CUDA_ERROR_NOT_READY ? 0 : failed + 1;
		if (failed == SFR__CUDA_QUERIES)
			sfr__cuda_die_locked(lane, "cuStreamQuery", rc);
		else if (failed)
			(void)sfr__cuda_failed_locked(lane, "cuStreamQuery", rc, &err);
		if (!lane->dead)
			(void)sfr__cond_wait(never, &lane->mu, sfr__deadline(50 * 1000));
	}
}

/* Copies one chunk and waits for it, asking like the lane does. */
static int fetch(struct sfr__cuda_lane *lane, struct sfr__cuda_store *store, const char *src,
		 size_t len, pthread_cond_t *never, struct sfr_err *err)
{
	CUevent event;
	CUresult rc;

	sfr__lock(&lane->mu);
	event = lane->dead ? NULL : sfr__cuda_event_get_locked(lane);
	rc = event ? lane->cu->copy(store->range.base, (CUdeviceptr)(uintptr_t)src, len,
				    lane->stream) :
		     CUDA_ERROR_OUT_OF_MEMORY;
	if (rc == CUDA_SUCCESS)
		rc = lane->cu->event_record(event, lane->stream);
	while (rc == CUDA_SUCCESS && (rc = lane->cu->event_query(event)) == CUDA_ERROR_NOT_READY) {
		(void)sfr__cond_wait(never, &lane->mu, sfr__deadline(50 * 1000));
		rc = lane->dead ? CUDA_ERROR_LAUNCH_FAILED : CUDA_SUCCESS;
	}
	if (rc != CUDA_SUCCESS) {
		(void)sfr__cuda_failed_locked(lane, "cuMemcpyDtoHAsync", rc, err);
		drain_locked(lane, never);
	}
	if (!lane->dead)
		sfr__cuda_event_put_locked(lane, event);
	sfr__unlock(&lane->mu);
	return err->code;
}

int sfr__cuda_sum_through(struct sfr__cuda_lane *lane, struct sfr__cuda_store *store,
			  const char *src, uint64_t nbytes, uint32_t *crc, struct sfr_err *err)
{
	pthread_cond_t never;
	int rc = sfr__cond_init(&never);

	if (rc < 0) {
		sfr__err_set(err, rc, SFR_PHASE_STAGE, NULL);
		return rc;
	}
	for (uint64_t off = 0, len; off < nbytes && !err->code; off += len) {
		len = nbytes - off < store->len ? nbytes - off : store->len;
		if (fetch(lane, store, src + off, (size_t)len, &never, err) == 0)
			*crc = sfr_crc32(*crc, store->range.base, (size_t)len);
	}
	(void)pthread_cond_destroy(&never); /* nobody waits */
	return err->code;
}
