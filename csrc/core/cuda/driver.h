/* The CUDA driver as a table of functions that is loaded at run time. cuda/driver.c implements
 * it. */
#ifndef SFR_CUDA_DRIVER_H
#define SFR_CUDA_DRIVER_H

#include "cuda/types.h"
#include "base/base.h"

/* The functions of the table: X(member, name in cuda.h, symbol, parameters). A symbol includes its
 * version ("_v2"), because cuda.h may map the plain name to another version. Symbols that end in
 * "_ptsz" must not be used: they treat stream 0 as a stream of the calling thread. */
/* clang-format off */
#define SFR__CUDA_CALLS(X)                                                                         \
	X(init, cuInit, "cuInit", (unsigned int flags))                                            \
	X(driver_version, cuDriverGetVersion, "cuDriverGetVersion", (int *version))                \
	X(error_name, cuGetErrorName, "cuGetErrorName", (CUresult error, const char **text))       \
	X(device_count, cuDeviceGetCount, "cuDeviceGetCount", (int *count))                        \
	X(device_get, cuDeviceGet, "cuDeviceGet", (CUdevice *device, int ordinal))                 \
	X(primary_state, cuDevicePrimaryCtxGetState, "cuDevicePrimaryCtxGetState",                 \
	  (CUdevice device, unsigned int *flags, int *active))                                     \
	X(primary_retain, cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain",                    \
	  (CUcontext *context, CUdevice device))                                                   \
	X(primary_release, cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2",              \
	  (CUdevice device))                                                                       \
	X(push, cuCtxPushCurrent, "cuCtxPushCurrent_v2", (CUcontext context))                      \
	X(pop, cuCtxPopCurrent, "cuCtxPopCurrent_v2", (CUcontext *context))                        \
	X(exchange_mode, cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode",   \
	  (CUstreamCaptureMode *mode))                                                             \
	X(stream_new, cuStreamCreate, "cuStreamCreate", (CUstream *stream, unsigned int flags))    \
	X(stream_free, cuStreamDestroy, "cuStreamDestroy_v2", (CUstream stream))                   \
	X(stream_wait, cuStreamWaitEvent, "cuStreamWaitEvent",                                     \
	  (CUstream stream, CUevent event, unsigned int flags))                                    \
	X(stream_query, cuStreamQuery, "cuStreamQuery", (CUstream stream))                         \
	X(stream_capturing, cuStreamIsCapturing, "cuStreamIsCapturing",                            \
	  (CUstream stream, CUstreamCaptureStatus *status))                                        \
	X(event_new, cuEventCreate, "cuEventCreate", (CUevent *event, unsigned int flags))         \
	X(event_free, cuEventDestroy, "cuEventDestroy_v2", (CUevent event))                        \
	X(event_record, cuEventRecord, "cuEventRecord", (CUevent event, CUstream stream))          \
	X(event_query, cuEventQuery, "cuEventQuery", (CUevent event))                              \
	X(event_elapsed, cuEventElapsedTime, "cuEventElapsedTime",                                 \
	  (float *ms, CUevent begin, CUevent end))                                                 \
	X(host_register, cuMemHostRegister, "cuMemHostRegister_v2",                                \
	  (void *mem, size_t len, unsigned int flags))                                             \
	X(host_unregister, cuMemHostUnregister, "cuMemHostUnregister", (void *mem))                \
	X(host_alloc, cuMemHostAlloc, "cuMemHostAlloc",                                            \
	  (void **mem, size_t len, unsigned int flags))                                            \
	X(host_free, cuMemFreeHost, "cuMemFreeHost", (void *mem))                                  \
	X(copy, cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2",                                         \
	  (void *dst, CUdeviceptr src, size_t len, CUstream stream))                               \
	X(copy_to, cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2",                                      \
	  (CUdeviceptr dst, const void *src, size_t len, CUstream stream))                         \
	X(copy_2d, cuMemcpy2DAsync, "cuMemcpy2DAsync_v2",                                          \
	  (const CUDA_MEMCPY2D *copy, CUstream stream))
/* clang-format on */

struct sfr__cuda_api {
#define X(member, name, symbol, params) CUresult(*member) params;
	SFR__CUDA_CALLS(X)
#undef X
	/* The functions below are NULL if the driver does not have them. The first two make many
	 * copies. attrs[i] is for the copies from index attr_at[i] on. The older version, v1,
	 * also reports the index of the copy that failed. */
	CUresult (*batch_v2)(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *lens, size_t nr,
			     struct sfr__cu_copy_attributes *attrs, size_t *attr_at,
			     size_t nr_attrs, CUstream stream);
	CUresult (*batch_v1)(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *lens, size_t nr,
			     struct sfr__cu_copy_attributes *attrs, size_t *attr_at,
			     size_t nr_attrs, size_t *failed, CUstream stream);
	/* Makes many copies of rows. */
	CUresult (*batch_3d)(size_t nr, struct sfr__cu_copy_3d *copies, unsigned long long flags,
			     CUstream stream);
	int version; /* 12080 is CUDA 12.8 */
};

/* Returns the driver, which is loaded and initialised at the first call and lives as long as the
 * process. Returns NULL if no driver is usable, with the reason in `why` unless `why` is NULL.
 * Callable from any thread. A process that does not use CUDA must not call this function, because
 * cuInit makes CUDA unusable in forked children. */
const struct sfr__cuda_api *sfr__cuda_get_or_init_driver(char *why, size_t why_len);
/* Describes the driver, or what is missing, in one sentence. Loads the driver but does not
 * initialise it. */
void sfr__cuda_describe_driver(char *text, size_t len);

/* Retains the primary context of a device, which the caller releases with
 * sfr__cuda_release_primary_context. Never makes a context: other code, such as torch, must have
 * made the context active. Returns 0, or -ENODEV or -EIO with the reason in `why`. */
int sfr__cuda_retain_primary_context(const struct sfr__cuda_api *cu, uint32_t device,
				     CUcontext *context, char *why, size_t why_len);
void sfr__cuda_release_primary_context(const struct sfr__cuda_api *cu, uint32_t device);

/* sfr__cuda_enter makes a context current on the calling thread. It also makes the
 * thread's capture mode relaxed, so that its calls cannot break any thread's graph capture.
 * sfr__cuda_leave undoes both, and may be called after a failure too. */
struct sfr__cuda_scope {
	const struct sfr__cuda_api *cu;
	CUstreamCaptureMode mode; /* the former mode, to be restored */
	bool pushed;              /* the context is current */
};
CUresult sfr__cuda_enter(struct sfr__cuda_scope *scope, const struct sfr__cuda_api *cu,
			 CUcontext context);
void sfr__cuda_leave(struct sfr__cuda_scope *scope);

/* One of several driver calls in a row. Does nothing if an earlier one has failed. Otherwise makes
 * the call `made`, and stores its result in `rc` and its name in `call`. So in the end `call` is
 * the name of the call that failed. */
#define SFR__CUDA_THEN(rc, call, name, made)                                                       \
	do {                                                                                       \
		if ((rc) == CUDA_SUCCESS) {                                                        \
			(call) = (name);                                                           \
			(rc) = (made);                                                             \
		}                                                                                  \
	} while (0)

/* Retains a device's context and makes a stream in it. The caller frees both. Returns 0, or -ENODEV
 * or -EIO with the reason in `why`; then *context and *stream are NULL. */
int sfr__cuda_open_context_and_stream(const struct sfr__cuda_api *cu, uint32_t device,
				      CUcontext *context, CUstream *stream, char *why,
				      size_t why_len);

/* Writes a text such as "device 0: cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS (700)". */
void sfr__cuda_format_error(const struct sfr__cuda_api *cu, uint32_t device, const char *call,
			    CUresult rc, char *text, size_t len);
/* Returns whether every later call in the context will fail, too. */
bool sfr__cuda_is_sticky(CUresult rc);

#endif
