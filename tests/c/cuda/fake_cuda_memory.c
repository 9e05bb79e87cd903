/* The fake driver's memory: what is registered, what is copied to it, and what must not be. */
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

static bool overlaps(const char *mem, size_t len, const char *with, size_t with_len)
{
	return mem < with + with_len && with < mem + len;
}

/* Whether a copy that is still to land reads from the memory, or writes to it. */
bool fake__in_use(const char *mem, size_t len)
{
	for (const struct CUstream_st *s = fk.streams; s; s = s->next) {
		if (fk.dead_of[s->device])
			continue;
		for (int i = 0; i < 2; i++)
			for (const struct op *op = i ? s->head : s->queued; op; op = op->next)
				if (op->kind == COPY && (overlaps(mem, len, op->dst, op->len) ||
							 overlaps(mem, len, op->src, op->len)))
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

/* Takes one out; a copy into it that is still to land is a violation. */
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
	BEGIN("cuMemHostRegister_v2", true)
	if (!code && !(flags & CU_MEMHOSTREGISTER_PORTABLE))
		fake__violated("memory is registered for one device only");
	if (!code && len > (size_t)1 << 30)
		fake__violated("a registration of more than 1 GiB");
	for (struct registration *r = fk.registrations; r && !code; r = r->next)
		if (overlaps(mem, len, r->mem, r->len))
			code = ALREADY_REGISTERED;
	if (!code) {
		((volatile char *)mem)[0] = 0; /* pages that nobody may write are refused */
		((volatile char *)mem)[len - 1] = 0;
		add_registration(mem, len, false);
	}
	END
}

EXPORT CUresult cuMemHostUnregister(void *mem);
EXPORT CUresult cuMemHostUnregister(void *mem)
{
	BEGIN("cuMemHostUnregister", true)
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
	BEGIN("cuMemHostAlloc", true)
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
	BEGIN("cuMemFreeHost", true)
	if (!code || fake__loses_context(code)) {
		if (drop_registration(mem, true))
			fake__violated("memory is freed that was not allocated");
		else
			free(mem);
	}
	END
}

/* ---- copies ----------------------------------------------------------------------- */

static int copy(void *dst, CUdeviceptr src, size_t len, CUstream stream, const char *call)
{
	bool straddles, pinned;
	struct op op = { .kind = COPY,
			 .dst = dst,
			 .src = (const char *)(uintptr_t)src, /* NOLINT: a device pointer */
			 .len = len };

	if (!fake__usable_stream(stream, call))
		return INVALID_HANDLE;
	if (is_host(stream)) {
		fake__violated("%s on a caller's stream", call);
		return CUDA_ERROR_INVALID_VALUE;
	}
	pinned = fake__registration_of(dst, len, &straddles) != NULL;
	if (straddles && !pinned) {
		fake__violated("a copy across two registrations, or over the edge of one");
		return CUDA_ERROR_INVALID_VALUE;
	}
	if (!pinned && !fk.pageable_allowed)
		fake__violated("a copy to memory that is not registered");
	if (!stream->knows_caller)
		fake__violated("a copy on a stream that has waited for nothing of its caller");
	op.pageable = !pinned;
	memset(dst, RUBBISH, len);
	fake__push_op(stream, &op);
	if (!pinned) {
		/* The driver copies through memory of its own, and the caller waits. */
		struct CUevent_st done = { .alive = true, .device = stream->device, .recorded = 1 };

		fake__push_op(stream, &(struct op){ .kind = RECORD, .event = &done, .gen = 1 });
		while (done.completed < 1 && !fk.dead_of[stream->device])
			pthread_cond_wait(&fk.cv, &fk.mu);
		while (done.completed < 1 && (stream->head || stream->busy))
			pthread_cond_wait(&fk.cv, &fk.mu); /* it is on this stack */
	}
	return 0;
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t len, CUstream stream);
EXPORT CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t len, CUstream stream)
{
	BEGIN("cuMemcpyDtoHAsync_v2", true)
	if (!code)
		code = copy(dst, src, len, stream, "cuMemcpyDtoHAsync");
	END
}

static int batch(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *lens, size_t nr,
		 const struct sfr__cu_copy_attributes *attrs, const size_t *attr_at,
		 size_t nr_attrs, CUstream stream)
{
	int code = 0;

	if (nr == 0 || nr_attrs != 1 || attr_at[0] != 0)
		return CUDA_ERROR_INVALID_VALUE;
	if (attrs[0].src_access_order != SFR__CU_ORDER_STREAM)
		fake__violated("a batch that may read before its turn");
	for (size_t i = 0; i < nr && !code; i++)
		code = copy((void *)(uintptr_t)dsts[i], srcs[i], lens[i], stream, /* NOLINT */
			    "cuMemcpyBatchAsync");
	return code;
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

/* ---- what waits: the core has no use for these, and a test counts them -------------- */

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
