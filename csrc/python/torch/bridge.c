/* The bridge: describes and makes tensors without the help of Python objects, which is faster.
 *
 * It describes a tensor in about 0.1 us, and makes one over given memory in 0.5 us instead of 3. It
 * uses the C shim of torch's stable ABI (shim.h). It looks the functions up in the libtorch_cpu.so
 * that `import torch` has loaded. So a build needs no torch, and one binary serves every torch from
 * 2.10 on.
 *
 * torch's dispatcher releases the interpreter lock around an operator, and each release may cost a
 * switch interval while another Python thread computes. These functions are not operators, so they
 * keep the lock. They also do not materialise conjugated or negated tensors. */
#include <Python.h>
#include <dlfcn.h>

#include "torch/bridge.h"
#include "torch/shim.h"

#define LIBRARY "libtorch_cpu.so"

/* Pointers to torch's functions. They stay valid, because torch is never unloaded. */
#define POINTER(result, name, arguments) result(*name) arguments;
static struct {
	bool loaded;
	SFR_TORCH_FUNCTIONS(POINTER, POINTER)
} torch;
#undef POINTER

/* Returns the address of a function, or NULL if the library lacks it. If the function is `needed`,
 * also sets an ImportError. */
static void *look_up_torch_function(void *library, const char *name, bool needed)
{
	void *found = dlsym(library, name);

	if (found == NULL && needed)
		PyErr_Format(PyExc_ImportError,
			     "stillframe needs torch 2.10 or later, and this one has no %s", name);
	return found;
}

int sfr_py_bridge_load(void)
{
	void *library;

	if (torch.loaded)
		return 0;
	library = dlopen(LIBRARY, RTLD_LAZY | RTLD_NOLOAD);
	if (library == NULL) {
		PyErr_Format(PyExc_ImportError, "stillframe needs torch, and " LIBRARY
						" is not loaded; import torch first");
		return -1;
	}
	/* `library` is never closed: torch stays loaded anyway. */
#define NEEDED(result, name, arguments)                                                            \
	*(void **)&torch.name = look_up_torch_function(library, #name, true);                      \
	if (torch.name == NULL)                                                                    \
		return -1;
#define OPTIONAL(result, name, arguments)                                                          \
	*(void **)&torch.name = look_up_torch_function(library, #name, false);
	SFR_TORCH_FUNCTIONS(NEEDED, OPTIONAL)
#undef NEEDED
#undef OPTIONAL
	torch.loaded = true;
	return 0;
}

bool sfr_py_bridge_can_make_tensors(void)
{
	return torch.torch_from_blob != NULL;
}

void sfr_py_bridge_release_handles(void *const *tensors, size_t nr)
{
	for (size_t i = 0; i < nr; i++)
		/* nothing could be done about a failure */
		(void)torch.aoti_torch_delete_tensor_object(tensors[i]);
}

/* ---- describe --------------------------------------------------------------------- */

int64_t sfr_py_bridge_describe_tensor(struct AtenTensorOpaque *tensor, int64_t *row, int64_t room)
{
	int64_t ndim = 0;
	if (torch.aoti_torch_get_dim(tensor, &ndim))
		return -1;
	const int64_t words = SFR_ROW_HEADER + 2 * ndim;
	if (words > room) /* the caller tries again with more room */
		return words;

	int32_t dtype = 0;
	int64_t *sizes = NULL;
	int64_t *strides = NULL;
	if (torch.aoti_torch_get_storage_offset(tensor, &row[SFR_ROW_OFFSET]) ||
	    torch.aoti_torch_get_storage_size(tensor, &row[SFR_ROW_NBYTES]) ||
	    torch.aoti_torch_get_dtype(tensor, &dtype) ||
	    torch.aoti_torch_get_sizes(tensor, &sizes) ||
	    torch.aoti_torch_get_strides(tensor, &strides))
		return -1;
	row[SFR_ROW_DTYPE] = dtype;
	row[SFR_ROW_NDIM] = ndim;
	for (int64_t i = 0; i < ndim; i++) {
		row[SFR_ROW_HEADER + i] = sizes[i];
		row[SFR_ROW_HEADER + ndim + i] = strides[i];
	}
	return words;
}

uint64_t sfr_py_bridge_storage_address(struct AtenTensorOpaque *tensor, uint64_t offset)
{
	void *data = NULL;

	if (torch.aoti_torch_get_data_ptr(tensor, &data) || !data)
		return 0;
	return (uint64_t)(uintptr_t)data - offset; /* `data` is the first element's address */
}

/* ---- make ------------------------------------------------------------------------- */

/* The deleter of the storages made below: torch calls it when it frees one. */
static void put_keepalive(void *data, void *keepalive)
{
	(void)data;
	sfr_keepalive_put(keepalive);
}

/* Makes a tensor with its own storage over the row's memory, and adds 1 to the count of
 * `keepalive`. `sizes`, `strides` and `offset` replace those of the row. Returns NULL if torch
 * refuses. Then the count is not reduced, because torch may have called the deleter: the memory
 * may leak, but is never freed too early. */
static struct AtenTensorOpaque *make_tensor_over_new_storage(const int64_t *row, int64_t ndim,
							     const int64_t *sizes,
							     const int64_t *strides, int64_t offset,
							     struct sfr_keepalive *keepalive)
{
	const int32_t any_device_index = -1;
	struct AtenTensorOpaque *made = NULL;

	__atomic_add_fetch(&keepalive->count, 1, __ATOMIC_RELAXED);
	if (torch.torch_from_blob((void *)(uintptr_t)row[SFR_NEW_BASE], ndim, sizes, strides,
				  offset, (int32_t)row[SFR_NEW_DTYPE],
				  torch.aoti_torch_device_type_cpu(), any_device_index, &made,
				  torch.aoti_torch_layout_strided(), NULL, 0 /* no metadata */,
				  put_keepalive, keepalive))
		return NULL;
	return made;
}

/* Makes the row's tensor over the storage of the tensor `other`. Returns NULL if torch refuses. */
static struct AtenTensorOpaque *make_tensor_over_storage(struct AtenTensorOpaque *other,
							 const int64_t *row)
{
	const int64_t ndim = row[SFR_NEW_NDIM];
	const int64_t *sizes = row + SFR_NEW_HEADER, *strides = sizes + ndim;
	struct AtenTensorOpaque *made = NULL;
	int64_t other_offset = 0;

	/* torch takes an offset from the first element of `other`, not of its storage. */
	if (torch.aoti_torch_get_storage_offset(other, &other_offset) ||
	    torch.aoti_torch__reinterpret_tensor(other, ndim, sizes, strides,
						 row[SFR_NEW_OFFSET] - other_offset, &made))
		return NULL;
	return made;
}

/* Returns how long a storage the tensor needs, in elements; 0 if the tensor has no element. */
static int64_t storage_length_needed(const int64_t *row)
{
	const int64_t ndim = row[SFR_NEW_NDIM];
	const int64_t *sizes = row + SFR_NEW_HEADER, *strides = sizes + ndim;
	int64_t last = row[SFR_NEW_OFFSET]; /* offset of the last element */

	for (int64_t i = 0; i < ndim; i++) {
		if (sizes[i] == 0)
			return 0;
		last += (sizes[i] - 1) * strides[i];
	}
	return last + 1;
}

/* Makes the tensor of a row with its own storage. Returns NULL if torch refuses. torch makes a
 * storage just long enough for the tensor. If the row's storage is longer, a tensor over all of it
 * is made first, then the row's tensor over the same storage. */
static struct AtenTensorOpaque *make_tensor_of_row(const int64_t *row,
						   struct sfr_keepalive *keepalive)
{
	const int64_t ndim = row[SFR_NEW_NDIM];
	const size_t itemsize = torch.aoti_torch_dtype_element_size((int32_t)row[SFR_NEW_DTYPE]);
	const int64_t length = row[SFR_NEW_NBYTES] / (int64_t)itemsize;

	if (storage_length_needed(row) == length)
		return make_tensor_over_new_storage(row, ndim, row + SFR_NEW_HEADER,
						    row + SFR_NEW_HEADER + ndim,
						    row[SFR_NEW_OFFSET], keepalive);
	const int64_t stride = 1;
	void *whole = make_tensor_over_new_storage(row, 1, &length, &stride, 0, keepalive);
	if (!whole)
		return NULL;
	struct AtenTensorOpaque *made = make_tensor_over_storage(whole, row);
	sfr_py_bridge_release_handles(&whole, 1);
	return made;
}

int sfr_py_bridge_make_tensors(const int64_t *row, size_t nr, struct sfr_keepalive *keepalive,
			       void **tensors)
{
	for (size_t i = 0; i < nr; i++) {
		/* index of an earlier row with the same storage; -1: none */
		const int64_t shared = row[SFR_NEW_OVER];

		if (shared < 0)
			tensors[i] = make_tensor_of_row(row, keepalive);
		else
			tensors[i] = make_tensor_over_storage(tensors[shared], row);
		if (!tensors[i]) {
			sfr_py_bridge_release_handles(tensors, i);
			return -1;
		}
		row += SFR_NEW_HEADER + 2 * row[SFR_NEW_NDIM];
	}
	return 0;
}
