/* Queues copies from or to a device in few calls.
 *
 * A call costs about 2 us for one copy and hardly more for a batch. So copies are queued in
 * batches:
 *
 *   small, large   in separate batches: some drivers treat a batch like its largest copy
 *   rows           stretches of memory at equal distances: the samples of a source. One copy
 *                  gathers all rows of a source; such copies have batches of their own
 *   unpinned       one by one; each call returns only when its copy has run
 *
 * If the driver refuses a batch, its copies are queued one by one. Unless the driver has no batches
 * at all, the next batch is tried as usual.
 *
 * Batches ask for the copy engines (PREFER_OVERLAP_WITH_COMPUTE), so that kernels run meanwhile. */
#include <errno.h>
#include <stdio.h>

#include "base/base.h"
#include "device/lane.h"

/* the most copies of rows in one call, whose descriptions are on the stack */
enum { ROWS_AT_A_TIME = 128 };

/* Returns whether the driver refused a batch with `rc`: then its copies are queued one by one.
 * Counts the refusal and logs the lane's first. Sets *unsupported if the driver never supports such
 * batches. */
static bool detect_batch_refusal(struct sfr__cuda_lane *lane, CUresult rc, bool *unsupported)
{
	bool first;

	if (rc != CUDA_ERROR_NOT_SUPPORTED && rc != CUDA_ERROR_INVALID_VALUE)
		return false;
	sfr__lock(&lane->mu);
	first = lane->nr_refused == 0;
	if (rc == CUDA_ERROR_NOT_SUPPORTED)
		*unsupported = true;
	lane->nr_refused++;
	sfr__unlock(&lane->mu);
	if (first)
		sfr__notice_post_text("Device %u refuses %s: its copies are made one by one.",
				      lane->device,
				      rc == CUDA_ERROR_NOT_SUPPORTED ? "batched copies" :
								       "a batch of copies");
	return true;
}

void sfr__cuda_describe_refusals(struct sfr__cuda_lane *lane, char *text, size_t len)
{
	sfr__lock(&lane->mu);
	if (lane->no_batches)
		(void)snprintf(text, len,
			       "Device %u refuses batched copies: small tensors are copied one "
			       "by one.",
			       lane->device);
	else if (lane->nr_refused)
		(void)snprintf(text, len,
			       "Device %u has refused %u batches of copies: those were copied one "
			       "by one.",
			       lane->device, lane->nr_refused);
	sfr__unlock(&lane->mu);
}

/* Returns whether to try batches. `unsupported`: &lane->no_batches or &lane->no_row_batches. */
static bool can_batch(struct sfr__cuda_lane *lane, const bool *unsupported)
{
	return sfr__under(&lane->mu, !*unsupported);
}

/* ---- contiguous copies -------------------------------------------------------- */

/* Queues all copies with one call. Returns false if the driver has no such call or refuses it: the
 * copies must then be queued one by one. Returns true otherwise, with *err set after a failure. */
static bool try_queue_batch(struct sfr__cuda_lane *lane, CUdeviceptr *dst, CUdeviceptr *src,
			    size_t *len, size_t nr, struct sfr_err *err)
{
	struct sfr__cu_copy_attributes attrs = { .src_access_order = SFR__CU_ORDER_STREAM,
						 .flags = SFR__CU_PREFER_OVERLAP };
	const struct sfr__cuda_api *cu = lane->cu;
	size_t attrs_from = 0; /* the attributes are those of all copies from index 0 on */
	size_t failed = 0;
	CUresult rc;

	if (cu->batch_v2)
		rc = cu->batch_v2(dst, src, len, nr, &attrs, &attrs_from, 1, lane->stream);
	else if (cu->batch_v1)
		rc = cu->batch_v1(dst, src, len, nr, &attrs, &attrs_from, 1, &failed, lane->stream);
	else
		return false;
	if (rc == CUDA_SUCCESS)
		return true;
	/* Some of the copies may be queued already. Queueing them again is harmless. */
	if (detect_batch_refusal(lane, rc, &lane->no_batches))
		return false; /* the caller queues them one by one */
	(void)sfr__cuda_handle_failure(lane, "cuMemcpyBatchAsync", rc, err);
	return true;
}

/* Queues copies that are all small or all large. `batched`: tries to queue them with one call. */
static void queue_copy_group(struct sfr__cuda_lane *lane, CUdeviceptr *dst, CUdeviceptr *src,
			     size_t *len, size_t nr, bool batched, struct sfr_err *err)
{
	const char *call =
		lane->direction == SFR__CUDA_OUT ? "cuMemcpyDtoHAsync" : "cuMemcpyHtoDAsync";
	CUresult rc = CUDA_SUCCESS;

	if (nr > 1 && batched && try_queue_batch(lane, dst, src, len, nr, err))
		return;
	for (size_t i = 0; i < nr && rc == CUDA_SUCCESS; i++) {
		void *host;

		if (lane->direction == SFR__CUDA_OUT) {
			host = (void *)(uintptr_t)dst[i];
			rc = lane->cu->copy(host, src[i], len[i], lane->stream);
		} else {
			host = (void *)(uintptr_t)src[i];
			rc = lane->cu->copy_to(dst[i], host, len[i], lane->stream);
		}
	}
	if (rc != CUDA_SUCCESS)
		(void)sfr__cuda_handle_failure(lane, call, rc, err);
}

static void swap_copies(struct sfr__cuda_batch *batch, size_t i, size_t j)
{
	const CUdeviceptr dst = batch->dst[i], src = batch->src[i];
	const size_t len = batch->len[i];

	batch->dst[i] = batch->dst[j];
	batch->src[i] = batch->src[j];
	batch->len[i] = batch->len[j];
	batch->dst[j] = dst;
	batch->src[j] = src;
	batch->len[j] = len;
}

/* Moves small copies before large ones and returns how many are small. */
static size_t partition_by_size(struct sfr__cuda_batch *batch)
{
	size_t nr_small = 0;

	for (size_t i = 0; i < batch->nr; i++)
		if (batch->len[i] < SFR__CUDA_SMALL)
			swap_copies(batch, i, nr_small++);
	return nr_small;
}

int sfr__cuda_batch_add(struct sfr__cuda_batch *batch, uint64_t dst, uint64_t src, size_t len)
{
	/* `capacity` changes last, when all three arrays have grown */
	if (batch->nr == batch->capacity) {
		size_t new_capacity = batch->capacity ? batch->capacity * 2 : 64;
		CUdeviceptr *dsts = sfr_sys.realloc(batch->dst, new_capacity * sizeof(*dsts));
		CUdeviceptr *srcs;
		size_t *lens;

		if (!dsts)
			return -ENOMEM;
		batch->dst = dsts;
		srcs = sfr_sys.realloc(batch->src, new_capacity * sizeof(*srcs));
		if (!srcs)
			return -ENOMEM;
		batch->src = srcs;
		lens = sfr_sys.realloc(batch->len, new_capacity * sizeof(*lens));
		if (!lens)
			return -ENOMEM;
		batch->len = lens;
		batch->capacity = new_capacity;
	}
	batch->dst[batch->nr] = dst;
	batch->src[batch->nr] = src;
	batch->len[batch->nr++] = len;
	return 0;
}

void sfr__cuda_batch_free(struct sfr__cuda_batch *batch)
{
	sfr_sys.free(batch->dst);
	sfr_sys.free(batch->src);
	sfr_sys.free(batch->len);
}

void sfr__cuda_queue_batch(struct sfr__cuda_lane *lane, struct sfr__cuda_batch *batch, bool pinned,
			   struct sfr_err *err)
{
	const size_t nr_small = partition_by_size(batch);
	const bool batched = pinned && can_batch(lane, &lane->no_batches);

	if (batch->nr == 0)
		return;
	queue_copy_group(lane, batch->dst, batch->src, batch->len, nr_small, batched, err);
	if (!err->code)
		queue_copy_group(lane, batch->dst + nr_small, batch->src + nr_small,
				 batch->len + nr_small, batch->nr - nr_small, batched, err);
	batch->nr = 0;
}

/* ---- rows ----------------------------------------------------------------------- */

static bool can_batch_rows(const struct sfr__cuda_api *cu, size_t nr)
{
	return cu->batch_3d && nr > 1;
}

/* Queues the copies, up to ROWS_AT_A_TIME with one call. After an error some may be queued. */
static CUresult queue_rows_in_batches(const struct sfr__cuda_api *cu, CUstream stream,
				      const struct sfr__cuda_rows *rows, size_t nr,
				      size_t dst_pitch)
{
	struct sfr__cu_copy_3d copies[ROWS_AT_A_TIME];
	CUresult rc = CUDA_SUCCESS;

	for (size_t at = 0, step; at < nr && rc == CUDA_SUCCESS; at += step) {
		step = nr - at < ROWS_AT_A_TIME ? nr - at : ROWS_AT_A_TIME;
		for (size_t i = 0; i < step; i++) {
			const struct sfr__cuda_rows *from = &rows[at + i];

			copies[i] = (struct sfr__cu_copy_3d){
				.src = { .type = SFR__CU_OPERAND_POINTER,
					 .ptr = from->src,
					 .row_len = from->pitch },
				.dst = { .type = SFR__CU_OPERAND_POINTER,
					 .ptr = (CUdeviceptr)(uintptr_t)from->dst,
					 .row_len = dst_pitch },
				.width = from->width,
				.height = from->nr,
				.depth = 1,
				.src_access_order = SFR__CU_ORDER_STREAM,
				.flags = SFR__CU_PREFER_OVERLAP,
			};
		}
		rc = cu->batch_3d(step, copies, 0, stream);
	}
	return rc;
}

CUresult sfr__cuda_queue_rows(const struct sfr__cuda_api *cu, CUstream stream,
			      const struct sfr__cuda_rows *rows, size_t nr, size_t dst_pitch,
			      bool batched)
{
	CUresult rc = CUDA_SUCCESS;

	if (batched && can_batch_rows(cu, nr))
		return queue_rows_in_batches(cu, stream, rows, nr, dst_pitch);
	for (size_t i = 0; i < nr && rc == CUDA_SUCCESS; i++) {
		const CUDA_MEMCPY2D copy = { .srcMemoryType = CU_MEMORYTYPE_DEVICE,
					     .srcDevice = rows[i].src,
					     .srcPitch = rows[i].pitch,
					     .dstMemoryType = CU_MEMORYTYPE_HOST,
					     .dstHost = rows[i].dst,
					     .dstPitch = dst_pitch,
					     .WidthInBytes = rows[i].width,
					     .Height = rows[i].nr };

		rc = cu->copy_2d(&copy, stream);
	}
	return rc;
}

void sfr__cuda_lane_queue_rows(struct sfr__cuda_lane *lane, const struct sfr__cuda_rows *rows,
			       size_t nr, size_t dst_pitch, bool pinned, struct sfr_err *err)
{
	bool batched =
		pinned && can_batch_rows(lane->cu, nr) && can_batch(lane, &lane->no_row_batches);
	CUresult rc = sfr__cuda_queue_rows(lane->cu, lane->stream, rows, nr, dst_pitch, batched);

	if (batched && detect_batch_refusal(lane, rc, &lane->no_row_batches)) {
		batched = false;
		rc = sfr__cuda_queue_rows(lane->cu, lane->stream, rows, nr, dst_pitch, false);
	}
	if (rc != CUDA_SUCCESS)
		(void)sfr__cuda_handle_failure(lane,
					       batched ? "cuMemcpy3DBatchAsync" : "cuMemcpy2DAsync",
					       rc, err);
}
