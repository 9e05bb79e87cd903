/* The functions of torch's C shim that the bridge calls, as declared by torch 2.10 in
 * torch/csrc/inductor/aoti_torch/c/shim.h and by 2.11 in torch/csrc/stable/c/shim.h. They are part
 * of torch's stable ABI, which promises not to change them. Declaring them here lets us build
 * without torch; a test compares every line with the installed torch's headers.
 *
 * A handle that a function makes holds one reference to its tensor. The first two functions return
 * a constant of torch. The others that return int32_t return 0 on success. An OPTIONAL function may
 * be missing. */
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
	/* From torch 2.11. */                                                                     \
	OPTIONAL(int32_t, torch_from_blob,                                                         \
		 (void *data, int64_t ndim, const int64_t *sizes, const int64_t *strides,          \
		  int64_t offset, int32_t dtype, int32_t device_type, int32_t device_index,        \
		  struct AtenTensorOpaque **made, int32_t layout, const uint8_t *metadata,         \
		  int64_t metadata_size, void (*deleter)(void *data, void *context),               \
		  void *context))

#endif
