/* The CUDA driver as a table of functions that is loaded at run time.
 *
 * One build serves machines with and without a GPU, because nothing links to CUDA. The library is
 * libcuda.so.1, or the one that STILLFRAME_LIBCUDA names, such as the tests' fake driver.
 *
 *     absent ──load──▶ loaded ──init──▶ ready        either step may fail; `why` then says why
 *
 * Children that are forked after cuInit can never use CUDA. So cuInit is called only when a caller
 * passes device memory; torch has called it already then.
 *
 * The table is written once under `mu` and read-only afterwards. Drivers cannot be unloaded safely,
 * so the table lives as long as the process. A failed load is retried only when the variable names
 * another library. If a device is needed and there is no driver, the reason is logged once.
 *
 * The core never makes a primary context, which would take hundreds of megabytes of device
 * memory. */
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/driver.h"

#define DEFAULT_LIBRARY "libcuda.so.1"
#define LIBRARY_VARIABLE "STILLFRAME_LIBCUDA" /* of the environment */
/* driver versions: 12080 is CUDA 12.8 */
#define OLDEST_VERSION 11000
#define BATCH_VERSION 12080    /* the first with batched copies */
#define BATCH_V2_VERSION 13000 /* the first with the second version of batched copies */

#ifdef SFR_HAVE_CUDA_H
/* Compare the declarations of types.h and driver.h with those of cuda.h. */
#define X(name, value) _Static_assert((int)(name) == (value), #name);
SFR__CUDA_VALUES(X)
#undef X
#define X(member, name, symbol, params)                                                            \
	_Static_assert(__builtin_types_compatible_p(__typeof__(((struct sfr__cuda_api *)NULL)      \
								       ->member),                  \
						    __typeof__(&name)),                            \
		       symbol);
SFR__CUDA_CALLS(X)
#undef X
#if CUDA_VERSION >= 12080
_Static_assert(sizeof(CUmemcpyAttributes) == sizeof(struct sfr__cu_copy_attributes) &&
		       offsetof(CUmemcpyAttributes, flags) ==
			       offsetof(struct sfr__cu_copy_attributes, flags) &&
		       (int)CU_MEMCPY_SRC_ACCESS_ORDER_STREAM == SFR__CU_ORDER_STREAM,
	       "CUmemcpyAttributes");
_Static_assert((int)CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE == SFR__CU_PREFER_OVERLAP, "flags");
#endif
#if CUDA_VERSION >= 13000 && __has_include(<cudaTypedefs.h>)
#include <cudaTypedefs.h>
/* Checks two things: cuda.h declares the function as expected, and our member is the same but for
 * the type of the attributes, which types.h declares. */
#define SAME(member, type, ...)                                                                    \
	_Static_assert(__builtin_types_compatible_p(type,                                          \
						    CUresult (*)(CUdeviceptr *, CUdeviceptr *,     \
								 size_t *, size_t,                 \
								 CUmemcpyAttributes *, size_t *,   \
								 __VA_ARGS__)) &&                  \
			       __builtin_types_compatible_p(                                       \
				       __typeof__(((struct sfr__cuda_api *)NULL)->member),         \
				       CUresult (*)(CUdeviceptr *, CUdeviceptr *, size_t *,        \
						    size_t, struct sfr__cu_copy_attributes *,      \
						    size_t *, __VA_ARGS__)),                       \
		       #member)
SAME(batch_v2, PFN_cuMemcpyBatchAsync_v13000, size_t, CUstream);
SAME(batch_v1, PFN_cuMemcpyBatchAsync_v12080, size_t, size_t *, CUstream);
#undef SAME
/* The same for the batched copy of rows; its structs have the same layout. */
_Static_assert(__builtin_types_compatible_p(PFN_cuMemcpy3DBatchAsync_v13000,
					    CUresult (*)(size_t, CUDA_MEMCPY3D_BATCH_OP *,
							 unsigned long long, CUstream)) &&
		       sizeof(CUDA_MEMCPY3D_BATCH_OP) == sizeof(struct sfr__cu_copy_3d) &&
		       offsetof(CUDA_MEMCPY3D_BATCH_OP, src.op.ptr.rowLength) ==
			       offsetof(struct sfr__cu_copy_3d, src.row_len) &&
		       offsetof(CUDA_MEMCPY3D_BATCH_OP, dst.op.ptr.ptr) ==
			       offsetof(struct sfr__cu_copy_3d, dst.ptr) &&
		       offsetof(CUDA_MEMCPY3D_BATCH_OP, extent.width) ==
			       offsetof(struct sfr__cu_copy_3d, width) &&
		       offsetof(CUDA_MEMCPY3D_BATCH_OP, flags) ==
			       offsetof(struct sfr__cu_copy_3d, flags) &&
		       (int)CU_MEMCPY_OPERAND_TYPE_POINTER == SFR__CU_OPERAND_POINTER,
	       "CUDA_MEMCPY3D_BATCH_OP");
#define X(name, value) _Static_assert((int)CUDA_ERROR_##name == (value), #name);
SFR__CUDA_LATER_VALUES(X)
#undef X
#endif
#endif

static struct {
	struct sfr__mutex mu;
	bool tried, loaded; /* a load was tried; a load succeeded */
	bool ready;         /* the driver is initialised */
	bool reported;      /* a failure was logged */
	CUresult init_rc;
	char name[192]; /* name of the library that was tried */
	char why[512];  /* why the driver cannot be used; "" if it can */
	struct sfr__cuda_api table;
} driver = { .mu = SFR__MUTEX(SFR__LOCK_DRIVER) };

/* Stores dlsym's result as a function pointer. ISO C does not define a cast for this. */
#define TAKE(slot, handle, symbol)                                                                 \
	do {                                                                                       \
		void *found = dlsym(handle, symbol);                                               \
		memcpy(&(slot), &found, sizeof(found));                                            \
	} while (0)

/* Loads the library and fills the table, unless that has succeeded before, or failed with the same
 * library. After a failure driver.why is set. */
static void load_driver_locked(void)
{
	const char *name = getenv(LIBRARY_VARIABLE);
	struct sfr__cuda_api *table = &driver.table;
	const char *missing = NULL;
	void *handle;

	if (!name || !*name)
		name = DEFAULT_LIBRARY;
	if (driver.loaded || (driver.tried && strcmp(name, driver.name) == 0))
		return;
	driver.tried = true;
	driver.why[0] = '\0';
	memset(table, 0, sizeof(*table));
	(void)snprintf(driver.name, sizeof(driver.name), "%s", name);
	handle = dlopen(driver.name, RTLD_NOW | RTLD_LOCAL);
	if (!handle) {
		const char *text = dlerror();

		(void)snprintf(driver.why, sizeof(driver.why), "no CUDA driver: %s",
			       text ? text : driver.name);
		return;
	}
#define X(member, name, symbol, params)                                                            \
	TAKE(table->member, handle, symbol);                                                       \
	if (!table->member && !missing)                                                            \
		missing = symbol;
	SFR__CUDA_CALLS(X)
#undef X
	if (missing) {
		(void)snprintf(driver.why, sizeof(driver.why),
			       "the CUDA driver %s is too old or no CUDA driver: it lacks %s",
			       driver.name, missing);
		return;
	}
	if (table->driver_version(&table->version) != CUDA_SUCCESS ||
	    table->version < OLDEST_VERSION) {
		(void)snprintf(driver.why, sizeof(driver.why),
			       "the CUDA driver %s is too old: it serves CUDA %d.%d", driver.name,
			       table->version / 1000, table->version % 1000 / 10);
		return;
	}
	/* a driver may have a symbol that it does not support yet */
	if (table->version >= BATCH_V2_VERSION) {
		TAKE(table->batch_v2, handle, "cuMemcpyBatchAsync_v2");
		TAKE(table->batch_3d, handle, "cuMemcpy3DBatchAsync_v2");
	}
	if (table->version >= BATCH_VERSION && !table->batch_v2)
		TAKE(table->batch_v1, handle, "cuMemcpyBatchAsync");
	driver.loaded = true;
}

/* Initialises the loaded driver. After a failure driver.why is set. */
static void init_driver_locked(void)
{
	driver.init_rc = driver.table.init(0);
	if (driver.init_rc != CUDA_SUCCESS) {
		const char *name = NULL;

		/* if this fails, `name` stays NULL */
		(void)driver.table.error_name(driver.init_rc, &name);
		(void)snprintf(driver.why, sizeof(driver.why),
			       "the CUDA driver %s cannot be initialised: %s (%d)", driver.name,
			       name ? name : "error", (int)driver.init_rc);
		return; /* retried at the next call: torch may succeed in between */
	}
	driver.why[0] = '\0';
	driver.ready = true;
}

/* Runs in a forked child. */
static void forget_driver_in_child(void)
{
	sfr__mutex_init(&driver.mu, SFR__LOCK_DRIVER); /* a thread of the parent may have held it */
	if (!driver.ready)
		return;
	/* an initialised driver cannot be used in a child */
	driver.ready = driver.loaded = false;
	(void)snprintf(driver.why, sizeof(driver.why),
		       "CUDA was initialised before this process was forked; the start method "
		       "\"spawn\" makes processes that can use it");
}
SFR__AT_FORK(forget_driver_in_child)

const struct sfr__cuda_api *sfr__cuda_get_or_init_driver(char *why, size_t why_len)
{
	const struct sfr__cuda_api *cu;
	char text[sizeof(driver.why)] = ""; /* for a notice, which is posted without the lock */

	sfr__lock(&driver.mu);
	load_driver_locked();
	if (driver.loaded && !driver.ready)
		init_driver_locked();
	cu = driver.ready ? &driver.table : NULL;
	if (!cu && why)
		(void)snprintf(why, why_len, "%s", driver.why);
	if (!cu && !driver.reported) {
		(void)snprintf(text, sizeof(text), "%s", driver.why);
		driver.reported = true;
	}
	sfr__unlock(&driver.mu);
	if (text[0])
		sfr__notice_post_text("CUDA tensors cannot be saved or loaded: %s", text);
	return cu;
}

void sfr__cuda_describe_driver(char *text, size_t len)
{
	sfr__lock(&driver.mu);
	load_driver_locked();
	if (driver.why[0])
		(void)snprintf(text, len, "CUDA tensors cannot be saved or loaded: %s.",
			       driver.why);
	else
		(void)snprintf(text, len, "CUDA driver %s, CUDA %d.%d, %s copies of small tensors.",
			       driver.name, driver.table.version / 1000,
			       driver.table.version % 1000 / 10,
			       driver.table.batch_v2 || driver.table.batch_v1 ? "batched" :
										"single");
	sfr__unlock(&driver.mu);
}

/* ---- contexts ------------------------------------------------------------- */

/* Retains a device's primary context. The driver may allocate memory, which may be forbidden while
 * a thread captures a graph. So this and the release run in the relaxed capture mode, which allows
 * everything. */
static CUresult retain_primary_context(const struct sfr__cuda_api *cu, CUcontext *context,
				       CUdevice dev)
{
	CUstreamCaptureMode mode = (CUstreamCaptureMode)CU_STREAM_CAPTURE_MODE_RELAXED;
	CUresult rc = cu->exchange_mode(&mode);

	if (rc != CUDA_SUCCESS)
		return rc;
	rc = cu->primary_retain(context, dev);
	(void)cu->exchange_mode(&mode); /* cannot fail: the same call worked a moment ago */
	return rc;
}

int sfr__cuda_retain_primary_context(const struct sfr__cuda_api *cu, uint32_t device,
				     CUcontext *context, char *why, size_t why_len)
{
	unsigned int flags = 0;
	int active = 0;
	CUdevice dev = 0;
	CUresult rc = cu->device_get(&dev, (int)device);

	*context = NULL;
	if (rc != CUDA_SUCCESS) {
		sfr__cuda_format_error(cu, device, "cuDeviceGet", rc, why, why_len);
		return -ENODEV;
	}
	rc = cu->primary_state(dev, &flags, &active);
	if (rc == CUDA_SUCCESS && !active) {
		(void)snprintf(why, why_len, "device %u has no active context", device);
		return -ENODEV;
	}
	if (rc == CUDA_SUCCESS)
		rc = retain_primary_context(cu, context, dev);
	if (rc != CUDA_SUCCESS) {
		sfr__cuda_format_error(cu, device, "cuDevicePrimaryCtxRetain", rc, why, why_len);
		*context = NULL;
		return -EIO;
	}
	return 0;
}

void sfr__cuda_release_primary_context(const struct sfr__cuda_api *cu, uint32_t device)
{
	CUstreamCaptureMode mode = (CUstreamCaptureMode)CU_STREAM_CAPTURE_MODE_RELAXED;
	CUdevice dev = 0;
	bool relaxed;

	if (cu->device_get(&dev, (int)device) != CUDA_SUCCESS)
		return;
	relaxed = cu->exchange_mode(&mode) == CUDA_SUCCESS;
	(void)cu->primary_release(dev); /* after a failure nothing can be done */
	if (relaxed)
		(void)cu->exchange_mode(&mode);
}

CUresult sfr__cuda_enter(struct sfr__cuda_scope *scope, const struct sfr__cuda_api *cu,
			 CUcontext context)
{
	CUresult rc;

	*scope = (struct sfr__cuda_scope){ .cu = cu };
	rc = cu->push(context);
	if (rc != CUDA_SUCCESS)
		return rc;
	scope->pushed = true;
	scope->mode = (CUstreamCaptureMode)CU_STREAM_CAPTURE_MODE_RELAXED;
	rc = cu->exchange_mode(&scope->mode);
	if (rc != CUDA_SUCCESS) {
		CUcontext popped;

		(void)cu->pop(&popped); /* pops the context pushed above */
		scope->pushed = false;
	}
	return rc;
}

void sfr__cuda_leave(struct sfr__cuda_scope *scope)
{
	CUcontext popped;

	if (!scope->pushed)
		return;
	/* These undo calls that worked, so they fail only while the driver is shutting down. */
	(void)scope->cu->exchange_mode(&scope->mode);
	(void)scope->cu->pop(&popped);
	scope->pushed = false;
}

int sfr__cuda_open_context_and_stream(const struct sfr__cuda_api *cu, uint32_t device,
				      CUcontext *context, CUstream *stream, char *why,
				      size_t why_len)
{
	const char *call = "cuCtxPushCurrent";
	struct sfr__cuda_scope scope;
	CUresult rc;
	int ret;

	*context = NULL;
	*stream = NULL;
	ret = sfr__cuda_retain_primary_context(cu, device, context, why, why_len);
	if (ret < 0)
		return ret;
	rc = sfr__cuda_enter(&scope, cu, *context);
	SFR__CUDA_THEN(rc, call, "cuStreamCreate", cu->stream_new(stream, CU_STREAM_NON_BLOCKING));
	sfr__cuda_leave(&scope);
	if (rc == CUDA_SUCCESS)
		return 0;
	sfr__cuda_format_error(cu, device, call, rc, why, why_len);
	sfr__cuda_release_primary_context(cu, device);
	*context = NULL;
	*stream = NULL;
	return -EIO;
}

/* ---- errors --------------------------------------------------------------- */

void sfr__cuda_format_error(const struct sfr__cuda_api *cu, uint32_t device, const char *call,
			    CUresult rc, char *text, size_t len)
{
	const char *name = NULL;

	(void)cu->error_name(rc, &name); /* NULL stays for an unknown number */
	(void)snprintf(text, len, "device %u: %s: %s (%d)", device, call,
		       name ? name : "unknown error", (int)rc);
}

bool sfr__cuda_is_sticky(CUresult rc)
{
	switch ((int)rc) {
	case CUDA_ERROR_DEINITIALIZED:
	case CUDA_ERROR_ECC_UNCORRECTABLE:
	case CUDA_ERROR_ILLEGAL_ADDRESS:
	case CUDA_ERROR_CONTEXT_IS_DESTROYED:
	case CUDA_ERROR_ASSERT:
	case CUDA_ERROR_HARDWARE_STACK_ERROR:
	case CUDA_ERROR_ILLEGAL_INSTRUCTION:
	case CUDA_ERROR_MISALIGNED_ADDRESS:
	case CUDA_ERROR_INVALID_ADDRESS_SPACE:
	case CUDA_ERROR_INVALID_PC:
	case CUDA_ERROR_LAUNCH_FAILED:
	case CUDA_ERROR_LAUNCH_TIMEOUT:
	case SFR__CUDA_ERROR_CONTAINED:
	case SFR__CUDA_ERROR_TENSOR_MEMORY_LEAK:
	case SFR__CUDA_ERROR_MPS_CLIENT_TERMINATED:
	case SFR__CUDA_ERROR_EXTERNAL_DEVICE:
		return true;
	default:
		return false;
	}
}
