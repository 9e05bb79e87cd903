/* Types and values of the CUDA driver's interface.
 *
 * If the build finds the toolkit's cuda.h, the types come from that header, and cuda/driver.c
 * compares the values with it at compile time. Otherwise this file declares the few types and
 * values that the core needs. They are part of the driver's binary interface and cannot change. */
#ifndef SFR_CUDA_TYPES_H
#define SFR_CUDA_TYPES_H

#include <stddef.h>
#include <stdint.h>

#if defined(__has_include)
#if __has_include(<cuda.h>) && !defined(SFR_NO_CUDA_H)
#define SFR_HAVE_CUDA_H 1
#endif
#endif

#ifdef SFR_HAVE_CUDA_H
#include <cuda.h>
#else
typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef int CUstreamCaptureMode;
typedef int CUstreamCaptureStatus;
typedef struct {
	size_t srcXInBytes, srcY;
	int srcMemoryType;
	const void *srcHost;
	CUdeviceptr srcDevice;
	void *srcArray;
	size_t srcPitch;
	size_t dstXInBytes, dstY;
	int dstMemoryType;
	void *dstHost;
	CUdeviceptr dstDevice;
	void *dstArray;
	size_t dstPitch;
	size_t WidthInBytes, Height;
} CUDA_MEMCPY2D;
#endif

/* X(name, value) */
#define SFR__CUDA_VALUES(X)                                                                        \
	X(CUDA_SUCCESS, 0)                                                                         \
	X(CUDA_ERROR_INVALID_VALUE, 1)                                                             \
	X(CUDA_ERROR_OUT_OF_MEMORY, 2)                                                             \
	X(CUDA_ERROR_NOT_INITIALIZED, 3)                                                           \
	X(CUDA_ERROR_DEINITIALIZED, 4)                                                             \
	X(CUDA_ERROR_ECC_UNCORRECTABLE, 214)                                                       \
	X(CUDA_ERROR_INVALID_HANDLE, 400)                                                          \
	X(CUDA_ERROR_LAUNCH_TIMEOUT, 702)                                                          \
	X(CUDA_ERROR_CONTEXT_IS_DESTROYED, 709)                                                    \
	X(CUDA_ERROR_HARDWARE_STACK_ERROR, 714)                                                    \
	X(CUDA_ERROR_ILLEGAL_INSTRUCTION, 715)                                                     \
	X(CUDA_ERROR_MISALIGNED_ADDRESS, 716)                                                      \
	X(CUDA_ERROR_INVALID_ADDRESS_SPACE, 717)                                                   \
	X(CUDA_ERROR_INVALID_PC, 718)                                                              \
	X(CUDA_ERROR_ILLEGAL_ADDRESS, 700)                                                         \
	X(CUDA_ERROR_LAUNCH_FAILED, 719)                                                           \
	X(CUDA_ERROR_ASSERT, 710)                                                                  \
	X(CUDA_ERROR_NOT_READY, 600)                                                               \
	X(CUDA_ERROR_NOT_SUPPORTED, 801)                                                           \
	X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900)                                              \
	X(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, 906)                                                 \
	X(CU_MEMORYTYPE_HOST, 1)                                                                   \
	X(CU_MEMORYTYPE_DEVICE, 2)                                                                 \
	X(CU_STREAM_NON_BLOCKING, 1)                                                               \
	X(CU_EVENT_DEFAULT, 0)                                                                     \
	X(CU_EVENT_DISABLE_TIMING, 2)                                                              \
	X(CU_MEMHOSTREGISTER_PORTABLE, 1)                                                          \
	X(CU_MEMHOSTALLOC_PORTABLE, 1)                                                             \
	X(CU_STREAM_CAPTURE_STATUS_NONE, 0)                                                        \
	X(CU_STREAM_CAPTURE_MODE_RELAXED, 2)

#ifndef SFR_HAVE_CUDA_H
enum {
#define X(name, value) name = value,
	SFR__CUDA_VALUES(X)
#undef X
};
#endif

/* Attributes of a batched copy. The types from here on are always declared, because cuda.h has them
 * only since CUDA 12.8. */
struct sfr__cu_location {
	int type, id;
};
struct sfr__cu_copy_attributes {
	int src_access_order; /* SFR__CU_ORDER_STREAM */
	struct sfr__cu_location src_hint, dst_hint;
	unsigned int flags;
};

/* Errors that older headers do not name: X(name, value). */
#define SFR__CUDA_LATER_VALUES(X)                                                                  \
	X(CONTAINED, 226)                                                                          \
	X(TENSOR_MEMORY_LEAK, 721)                                                                 \
	X(MPS_CLIENT_TERMINATED, 810)                                                              \
	X(EXTERNAL_DEVICE, 911)
enum {
#define X(name, value) SFR__CUDA_ERROR_##name = value,
	SFR__CUDA_LATER_VALUES(X)
#undef X
};

/* One side of a copy of rows. */
struct sfr__cu_operand {
	int type; /* SFR__CU_OPERAND_POINTER */
	CUdeviceptr ptr;
	size_t row_len;      /* bytes from row to row */
	size_t layer_height; /* not used */
	struct sfr__cu_location hint;
};
/* One copy of rows between two addresses, in a batch of such copies. */
struct sfr__cu_copy_3d {
	struct sfr__cu_operand src, dst;
	size_t width, height, depth; /* bytes of a row, rows, layers */
	int src_access_order;
	unsigned int flags;
};
#define SFR__CU_OPERAND_POINTER 1
#define SFR__CU_ORDER_STREAM 1    /* sources are read in stream order */
#define SFR__CU_PREFER_OVERLAP 1u /* a flag: use copy engines rather than multiprocessors */

#endif
