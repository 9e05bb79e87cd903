/* The functions of torch's C shim that the bridge calls, as torch 2.10 declares them in
 * torch/csrc/inductor/aoti_torch/c/shim.h and 2.11 in torch/csrc/stable/c/shim.h. They are part of
 * its stable ABI: torch promises to keep each as it is. Declared here, they cost no build a torch;
 * a test compares every line with the headers of the torch that is there.
 *
 * A handle counts one reference. Whatever returns an int32_t but for the two constants returns 0
 * when it has done what it was asked for. OPTIONAL ones may be missing.
 */
#ifndef SFR_PY_TORCH_SHIM_H
#define SFR_PY_TORCH_SHIM_H

#include <stddef.h>
#include <stdint.h>

struct AtenTensorOpaque;

#define SFR_TORCH_FUNCTIONS(NEEDED, OPTIONAL)                                                      \
	NEEDED(int32_t, aoti_torch_device_type_cpu, (void))                                        \
	NEEDED(int32_t, aoti_torch_layout_strided, (void))                                         \
	NEEDED(size_t, aoti_torch_dtype_element_size, (int32_t dtype))                             \
	NEEDED(int32_t, aoti_torch_delete_tensor_object, (struct AtenTensorOpaque * tensor))       \
	NEEDED(int32_t, aoti_torch_get_dim, (struct AtenTensorOpaque * tensor, int64_t *ndim))     \
	NEEDED(int32_t, aoti_torch_get_dtype, (struct AtenTensorOpaque * tensor, int32_t *dtype))  \
	NEEDED(int32_t, aoti_torch_get_sizes,                                                      \
	       (struct AtenTensorOpaque * tensor, int64_t **borrowed))                             \
	NEEDED(int32_t, aoti_torch_get_strides,                                                    \
	       (struct AtenTensorOpaque * tensor, int64_t **borrowed))                             \
	NEEDED(int32_t, aoti_torch_get_storage_offset,                                             \
	       (struct AtenTensorOpaque * tensor, int64_t *offset))                                \
	NEEDED(int32_t, aoti_torch_get_data_ptr, (struct AtenTensorOpaque * tensor, void **data))  \
	NEEDED(int32_t, aoti_torch_get_storage_size,                                               \
	       (struct AtenTensorOpaque * tensor, int64_t *nbytes))                                \
	NEEDED(int32_t, aoti_torch__reinterpret_tensor,                                            \
	       (struct AtenTensorOpaque * self, int64_t ndim, const int64_t *sizes,                \
		const int64_t *strides, int64_t offset, struct AtenTensorOpaque **made))           \
	/* Of torch 2.11. */                                                                       \
	OPTIONAL(int32_t, torch_from_blob,                                                         \
		 (void *data, int64_t ndim, const int64_t *sizes, const int64_t *strides,          \
		  int64_t offset, int32_t dtype, int32_t device_type, int32_t device_index,        \
		  struct AtenTensorOpaque **made, int32_t layout, const uint8_t *metadata,         \
		  int64_t metadata_size, void (*deleter)(void *data, void *context),               \
		  void *context))

#endif
