/* The fake driver's memory: registrations, copies, and checks of both. */
#include <stdlib.h>
#include <string.h>

#include "fake_cuda_state.h"

#define RUBBISH 0xdb

/* ---- memory ----------------------------------------------------------------------- */

struct registration *fake__registration_of(const char *mem, size_t len, bool *straddles)
{
	*straddles = false;
	for (struct registration *r = fk.registrations; r; r = r->next) {
		if (mem >= r->mem && mem + len <= r->mem + r->len)
			return r;
		if (mem < r->mem + r->len && mem + len > r->mem)
			*straddles = true;
	}
	return NULL;
}

const char *fake__memory_of(CUdeviceptr ptr)
{
	if (ptr & FAKE_CUDA_DEVICE)
		return (const char *)(uintptr_t)(ptr & ~FAKE_CUDA_DEVICE); /* NOLINT */
	fake__violated("a copy from or to memory that is no device's");
	return NULL;
}

static bool overlaps(const char *mem, size_t len, const char *with, size_t with_len)
{
	return mem < with + with_len && with < mem + len;
}

/* Returns the bytes from the first row's beginning to the last row's end. */
static size_t extent(const struct op *op, size_t pitch)
{
	return (op->nr - 1) * pitch + op->len;
}

/* Returns whether a copy that has not completed reads or writes the memory. */
bool fake__in_use(const char *mem, size_t len)
{
	for (const struct CUstream_st *s = fk.streams; s; s = s->next) {
		if (fk.dead_of[s->device])
			continue;
		for (int i = 0; i < 2; i++)
			for (const struct op *op = i ? s->head : s->queued; op; op = op->next)
				if (op->kind == COPY &&
				    (overlaps(mem, len, op->dst, extent(op, op->dst_pitch)) ||
				     overlaps(mem, len, op->src, extent(op, op->src_pitch))))
					return true;
	}
	return false;
}

static void add_registration(void *mem, size_t len, bool allocated)
{
	struct registration *r = calloc(1, sizeof(*r));

	if (!r)
		abort();
	r->mem = mem;
	r->len = len;
	r->allocated = allocated;
	r->next = fk.registrations;
	fk.registrations = r;
}

/* Removes a registration. It is a violation if a copy into it has not completed. */
static int drop_registration(void *mem, bool allocated)
{
	for (struct registration **at = &fk.registrations; *at; at = &(*at)->next) {
		struct registration *r = *at;

		if (r->mem != mem || r->allocated != allocated)
			continue;
		if (fake__in_use(r->mem, r->len))
			fake__violated("memory is taken from under a copy");
		*at = r->next;
		free(r);
		return 0;
	}
	return NOT_REGISTERED;
}

EXPORT CUresult cuMemHostRegister_v2(void *mem, size_t len, unsigned int flags);
EXPORT CUresult cuMemHostRegister_v2(void *mem, size_t len, unsigned int flags)
{
	BEGIN_UNSAFE("cuMemHostRegister_v2", true)
	if (!code && !(flags & CU_MEMHOSTREGISTER_PORTABLE))
		fake__violated("memory is registered for one device only");
	if (!code && len > REGISTER_MAX)
		fake__violated("a registration of more than 128 MiB");
	for (struct registration *r = fk.registrations; r && !code; r = r->next)
		if (overlaps(mem, len, r->mem, r->len))
			code = ALREADY_REGISTERED;
	if (!code) {
		fake__spend((REGISTER_NS_MIN +
			     fake__random() % (REGISTER_NS_MAX - REGISTER_NS_MIN)) *
				    len >>
			    30);
		volatile char *first = mem, *last = first + len - 1;

		/* faults if the page is not writable, and changes nothing otherwise */
		*first = *first;
		*last = *last;
		add_registration(mem, len, false);
	}
	END
}

EXPORT CUresult cuMemHostUnregister(void *mem);
EXPORT CUresult cuMemHostUnregister(void *mem)
{
	BEGIN_UNSAFE("cuMemHostUnregister", true)
	if (!code || fake__loses_context(code)) {
		int rc = drop_registration(mem, false);

		if (!code)
			code = rc;
		if (rc)
			fake__violated("memory is unregistered that was not registered");
	}
	END
}

EXPORT CUresult cuMemHostAlloc(void **mem, size_t len, unsigned int flags);
EXPORT CUresult cuMemHostAlloc(void **mem, size_t len, unsigned int flags)
{
	BEGIN_UNSAFE("cuMemHostAlloc", true)
	(void)flags;
	if (!code) {
		*mem = aligned_alloc(4096, (len + 4095) / 4096 * 4096);
		if (!*mem)
			abort();
		add_registration(*mem, len, true);
	}
	END
}

EXPORT CUresult cuMemFreeHost(void *mem);
EXPORT CUresult cuMemFreeHost(void *mem)
{
	BEGIN_UNSAFE("cuMemFreeHost", true)
	if (!code || fake__loses_context(code)) {
		if (drop_registration(mem, true))
			fake__violated("memory is freed that was not allocated");
		else
			free(mem);
	}
	END
}

/* ---- copies ----------------------------------------------------------------------- */

/* Fills a copy's destination with garbage until an event after it completes: host memory when
 * the copy is queued, device memory when the stream reaches the copy, because earlier work may
 * still use it. */
void fake__spoil(const struct op *op)
{
	for (size_t i = 0; i < op->nr; i++)
		memset(op->dst + i * op->dst_pitch, RUBBISH, op->len);
}

/* Queues the copy of op->nr rows. */
static int queue_copy(struct op op, CUstream stream, const char *call)
{
	bool straddles, pinned;
	char *host;
	size_t len;

	op.kind = COPY;
	if (!fake__usable_stream(stream, call))
		return CUDA_ERROR_INVALID_HANDLE;
	if (is_host(stream)) {
		fake__violated("%s on a caller's stream", call);
		return CUDA_ERROR_INVALID_VALUE;
	}
	if (!op.src || !op.dst || op.nr == 0 || op.dst_pitch > MAX_PITCH ||
	    op.src_pitch > MAX_PITCH ||
	    (op.nr > 1 && (op.dst_pitch < op.len || op.src_pitch < op.len)))
		return CUDA_ERROR_INVALID_VALUE;
	host = op.to_device ? (char *)(uintptr_t)op.src : op.dst; /* NOLINT */
	len = extent(&op, op.to_device ? op.src_pitch : op.dst_pitch);
	pinned = fake__registration_of(host, len, &straddles) != NULL;
	if (straddles && !pinned) {
		fake__violated("a copy across two registrations, or over the edge of one");
		return CUDA_ERROR_INVALID_VALUE;
	}
	if (!pinned && !fk.pageable_allowed)
		fake__violated("a copy %s memory that is not registered",
			       op.to_device ? "from" : "to");
	if (!stream->knows_caller)
		fake__violated("a copy on a stream that has not waited for its caller");
	op.pageable = !pinned;
	if (!op.to_device)
		fake__spoil(&op);
	fake__queue_op(stream, &op, call);
	if (!pinned) {
		/* The driver copies through its own memory, and the caller waits. */
		struct CUevent_st done = { .alive = true, .device = stream->device, .recorded = 1 };

		fake__check_holder(call);
		fake__push_op(stream, &(struct op){ .kind = RECORD, .event = &done, .gen = 1 });
		while (done.completed < 1 && !fk.dead_of[stream->device])
			pthread_cond_wait(&fk.cv, &fk.mu);
		while (done.completed < 1 && (stream->head || stream->busy))
			pthread_cond_wait(&fk.cv, &fk.mu); /* `done` is on this stack */
	}
	return 0;
}

static int copy(struct op op, CUdeviceptr src, CUstream stream, const char *call)
{
	op.src = fake__memory_of(src);
	return queue_copy(op, stream, call);
}

static int copy_span(void *dst, CUdeviceptr src, size_t len, CUstream stream, const char *call)
{
	return copy((struct op){ .dst = dst, .len = len, .nr = 1 }, src, stream, call);
}

static int copy_to_device(CUdeviceptr dst, const void *src, size_t len, CUstream stream,
			  const char *call)
{
	return queue_copy((struct op){ .dst = (char *)(uintptr_t)fake__memory_of(dst), /* NOLINT */
				       .src = src,
				       .len = len,
				       .nr = 1,
				       .to_device = true },
			  stream, call);
}

/* Queues a copy of a batch in the direction that its addresses show. */
static int copy_any(CUdeviceptr dst, CUdeviceptr src, size_t len, CUstream stream, const char *call)
{
	if (dst & FAKE_CUDA_DEVICE)
		return copy_to_device(dst, (const void *)(uintptr_t)src, len, stream, /* NOLINT */
				      call);
	return copy_span((void *)(uintptr_t)dst, src, len, stream, call); /* NOLINT */
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t len, CUstream stream);
EXPORT CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t len, CUstream stream)
{
	BEGIN("cuMemcpyDtoHAsync_v2", true)
	if (!code)
		code = copy_span(dst, src, len, stream, "cuMemcpyDtoHAsync");
	END
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t len, CUstream stream);
EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t len, CUstream stream)
{
	BEGIN("cuMemcpyHtoDAsync_v2", true)
	if (!code)
		code = copy_to_device(dst, src, len, stream, "cuMemcpyHtoDAsync");
	END
}

EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *c, CUstream stream);
EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *c, CUstream stream)
{
	BEGIN("cuMemcpy2DAsync_v2", true)
	if (!code &&
	    (c->srcMemoryType != CU_MEMORYTYPE_DEVICE || c->dstMemoryType != CU_MEMORYTYPE_HOST ||
	     c->srcY || c->dstY || c->srcXInBytes || c->dstXInBytes || c->WidthInBytes == 0))
		code = CUDA_ERROR_INVALID_VALUE;
	if (!code)
		code = copy((struct op){ .dst = c->dstHost,
					 .len = c->WidthInBytes,
					 .nr = c->Height,
					 .dst_pitch = c->dstPitch,
					 .src_pitch = c->srcPitch },
			    c->srcDevice, stream, "cuMemcpy2DAsync");
	END
}

/* A range that a batch writes to. */
struct range {
	const char *at;
	size_t len;
};

static int by_address(const void *a, const void *b)
{
	const char *one = ((const struct range *)a)->at, *two = ((const struct range *)b)->at;

	return one < two ? -1 : one > two;
}

static bool any_overlap(struct range *ranges, size_t nr)
{
	qsort(ranges, nr, sizeof(*ranges), by_address);
	for (size_t i = 1; i < nr; i++)
		if (ranges[i].at < ranges[i - 1].at + ranges[i - 1].len)
			return true;
	return false;
}

/* Returns whether the device's memory consists of segments and this range crosses two. */
static bool crosses(CUdeviceptr ptr, size_t len)
{
	return fk.segment && ptr / fk.segment != (ptr + len - 1) / fk.segment;
}

/* Checks a whole batch, whose copies may run in any order and at the same time. */
static int check_batch(const CUdeviceptr *dsts, const CUdeviceptr *srcs, const size_t *lens,
		       size_t nr)
{
	struct range *ranges = calloc(nr, sizeof(*ranges));
	int code = 0;

	if (!ranges)
		abort();
	for (size_t i = 0; i < nr; i++) {
		ranges[i] =
			(struct range){ (const char *)(uintptr_t)dsts[i], lens[i] }; /* NOLINT */
		if (lens[i] == 0) {
			fake__violated("a batch with an empty copy");
			code = CUDA_ERROR_INVALID_VALUE;
		}
		if (crosses(dsts[i] & FAKE_CUDA_DEVICE ? dsts[i] : srcs[i], lens[i]))
			code = CUDA_ERROR_INVALID_VALUE;
	}
	if (any_overlap(ranges, nr)) {
		fake__violated("a batch with two copies to the same bytes");
		code = CUDA_ERROR_INVALID_VALUE;
	}
	free(ranges);
	return code;
}

static int batch(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *lens, size_t nr,
		 const struct sfr__cu_copy_attributes *attrs, const size_t *attr_at,
		 size_t nr_attrs, CUstream stream)
{
	int code;

	if (nr == 0 || nr_attrs != 1 || attr_at[0] != 0)
		return CUDA_ERROR_INVALID_VALUE;
	if (attrs[0].src_access_order != SFR__CU_ORDER_STREAM)
		fake__violated("a batch that may read before its turn");
	code = check_batch(dsts, srcs, lens, nr);
	for (size_t i = 0; i < nr && !code; i++)
		code = copy_any(dsts[i], srcs[i], lens[i], stream, "cuMemcpyBatchAsync");
	return code;
}

static int copy_rows(const struct sfr__cu_copy_3d *c, CUstream stream)
{
	if (c->src.type != SFR__CU_OPERAND_POINTER || c->dst.type != SFR__CU_OPERAND_POINTER ||
	    c->width == 0 || c->height == 0 || c->depth != 1 || c->src.layer_height ||
	    c->dst.layer_height || (c->src.row_len && c->src.row_len < c->width) ||
	    (c->dst.row_len && c->dst.row_len < c->width))
		return CUDA_ERROR_INVALID_VALUE;
	if (c->src_access_order != SFR__CU_ORDER_STREAM)
		fake__violated("a batch that may read before its turn");
	if (crosses(c->src.ptr, (c->height - 1) * c->src.row_len + c->width))
		return CUDA_ERROR_INVALID_VALUE;
	return copy((struct op){ .dst = (char *)(uintptr_t)c->dst.ptr, /* NOLINT */
				 .len = c->width,
				 .nr = c->height,
				 .dst_pitch = c->dst.row_len ? c->dst.row_len : c->width,
				 .src_pitch = c->src.row_len ? c->src.row_len : c->width },
		    c->src.ptr, stream, "cuMemcpy3DBatchAsync");
}

EXPORT CUresult cuMemcpy3DBatchAsync_v2(size_t nr, struct sfr__cu_copy_3d *copies,
					unsigned long long flags, CUstream stream);
EXPORT CUresult cuMemcpy3DBatchAsync_v2(size_t nr, struct sfr__cu_copy_3d *copies,
					unsigned long long flags, CUstream stream)
{
	BEGIN("cuMemcpy3DBatchAsync_v2", true)
	if (!code && (nr == 0 || flags))
		code = CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < nr && !code; i++)
		code = copy_rows(&copies[i], stream);
	END
}

EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *lens, size_t nr,
				      struct sfr__cu_copy_attributes *attrs, size_t *attr_at,
				      size_t nr_attrs, CUstream stream);
EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *lens, size_t nr,
				      struct sfr__cu_copy_attributes *attrs, size_t *attr_at,
				      size_t nr_attrs, CUstream stream)
{
	BEGIN("cuMemcpyBatchAsync_v2", true)
	if (!code)
		code = batch(dsts, srcs, lens, nr, attrs, attr_at, nr_attrs, stream);
	END
}

EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *lens, size_t nr,
				   struct sfr__cu_copy_attributes *attrs, size_t *attr_at,
				   size_t nr_attrs, size_t *failed, CUstream stream);
EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *lens, size_t nr,
				   struct sfr__cu_copy_attributes *attrs, size_t *attr_at,
				   size_t nr_attrs, size_t *failed, CUstream stream)
{
	BEGIN("cuMemcpyBatchAsync", true)
	*failed = SIZE_MAX;
	if (!code)
		code = batch(dsts, srcs, lens, nr, attrs, attr_at, nr_attrs, stream);
	END
}

/* ---- calls that wait: the core must not make any, so tests count them ---- */

#define WAITER(name, params)                                                                       \
	EXPORT CUresult name params;                                                               \
	EXPORT CUresult name params                                                                \
	{                                                                                          \
		BEGIN(#name, true)                                                                 \
		fk.nr_syncs++;                                                                     \
		END                                                                                \
	}
WAITER(cuStreamSynchronize, (CUstream stream __attribute__((unused))))
WAITER(cuEventSynchronize, (CUevent event __attribute__((unused))))
WAITER(cuCtxSynchronize, (void))
