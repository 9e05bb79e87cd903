/* The bridge: what has to be asked of many tensors, or made many times, in one call.
 *
 * Reading offset, sizes and strides of a tensor from Python makes two tuples and an int for
 * each; reading them here costs about a tenth of a microsecond a tensor, and a tensor over given
 * memory costs half a microsecond in place of three. The file is the only C++ of the project. It
 * uses the C shim of torch's stable ABI alone (of torch 2.10, and one function of 2.11 where it is
 * there), so one binary serves every torch from 2.10 on. It knows nothing of the core and the
 * core nothing of it: the two meet in bridge.h, which says what the functions do.
 *
 * They are no operators of torch's. The dispatcher lets go of the interpreter lock around an
 * operator, and a tensor whose last reference but Python's goes away meanwhile takes the lock back
 * to tell Python (torch 2.13: c10/util/intrusive_ptr.h, "PyObject preservation"). Beside a Python
 * thread that computes, each such moment may cost a switch interval. Called directly, with the
 * lock held, nothing gives it away. Nor does anybody materialise a conjugated or negated tensor.
 */
#include <Python.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>

#include "bridge.h"

/* Of torch 2.11; without it the address is null. */
extern "C" __attribute__((weak)) AOTITorchError
torch_from_blob(void *data, int64_t ndim, const int64_t *sizes, const int64_t *strides,
		int64_t storage_offset, int32_t dtype, int32_t device_type, int32_t device_index,
		AtenTensorHandle *ret, int32_t layout, const uint8_t *opaque_metadata,
		int64_t opaque_metadata_size, void (*deleter)(void *data, void *ctx),
		void *deleter_ctx);

namespace
{

AtenTensorHandle handle_of(void *tensor)
{
	return static_cast<AtenTensorHandle>(tensor);
}

void drop(void *const *tensors, size_t nr)
{
	for (size_t i = 0; i < nr; i++)
		(void)aoti_torch_delete_tensor_object(
			handle_of(tensors[i])); /* nothing can be done about a failure */
}

/* ---- describe --------------------------------------------------------------------- */

/* Writes one tensor's row at `out` if `room` words suffice; returns the words it needs, or -1. */
int64_t describe_one(AtenTensorHandle tensor, int64_t *out, int64_t room)
{
	int64_t ndim = 0;
	if (aoti_torch_get_dim(tensor, &ndim))
		return -1;
	const int64_t words = SFR_ROW_HEADER + 2 * ndim;
	if (words > room)
		return words;

	int32_t dtype = 0;
	int64_t *sizes = nullptr;
	int64_t *strides = nullptr;
	if (aoti_torch_get_storage_offset(tensor, &out[SFR_ROW_OFFSET]) ||
	    aoti_torch_get_storage_size(tensor, &out[SFR_ROW_NBYTES]) ||
	    aoti_torch_get_dtype(tensor, &dtype) || aoti_torch_get_sizes(tensor, &sizes) ||
	    aoti_torch_get_strides(tensor, &strides))
		return -1;
	out[SFR_ROW_DTYPE] = dtype;
	out[SFR_ROW_NDIM] = ndim;
	for (int64_t i = 0; i < ndim; i++) {
		out[SFR_ROW_HEADER + i] = sizes[i];
		out[SFR_ROW_HEADER + ndim + i] = strides[i];
	}
	return words;
}

int64_t describe(void *const *tensors, size_t nr, int64_t *rows, int64_t room)
{
	int64_t used = 0;

	for (size_t i = 0; i < nr; i++) {
		const int64_t left = used < room ? room - used : 0;
		const int64_t words =
			describe_one(handle_of(tensors[i]), rows + (left != 0 ? used : 0), left);

		if (words < 0)
			return -1;
		used += words;
	}
	return used;
}

/* ---- make ------------------------------------------------------------------------- */

void put_hold(void * /* data */, void *hold)
{
	sfr_hold_put(static_cast<struct sfr_hold *>(hold));
}

/* A tensor with a storage of its own, or null. If this fails the hold stays: whether torch has
 * called the deleter is not known, and memory that is never given back harms less than memory that
 * is. */
AtenTensorHandle make_storage(const int64_t *row, int64_t ndim, const int64_t *sizes,
			      const int64_t *strides, int64_t offset, struct sfr_hold *hold)
{
	AtenTensorHandle made = nullptr;

	__atomic_add_fetch(&hold->count, 1, __ATOMIC_RELAXED);
	if (torch_from_blob(reinterpret_cast<void *>(static_cast<uintptr_t>(row[SFR_NEW_BASE])),
			    ndim, sizes, strides, offset, static_cast<int32_t>(row[SFR_NEW_DTYPE]),
			    aoti_torch_device_type_cpu(), -1, &made, aoti_torch_layout_strided(),
			    nullptr, 0, put_hold, hold))
		return nullptr;
	return made;
}

/* A tensor over the storage of another, or null. */
AtenTensorHandle make_over(AtenTensorHandle other, const int64_t *row)
{
	const int64_t ndim = row[SFR_NEW_NDIM];
	AtenTensorHandle made = nullptr;
	int64_t from = 0;

	if (aoti_torch_get_storage_offset(other, &from) ||
	    aoti_torch__reinterpret_tensor(other, ndim, row + SFR_NEW_HEADER,
					   row + SFR_NEW_HEADER + ndim, row[SFR_NEW_OFFSET] - from,
					   &made))
		return nullptr;
	return made;
}

/* Elements of the storage up to the tensor's last one. */
int64_t reach_of(const int64_t *row)
{
	const int64_t ndim = row[SFR_NEW_NDIM];
	const int64_t *sizes = row + SFR_NEW_HEADER, *strides = sizes + ndim;
	int64_t reach = row[SFR_NEW_OFFSET] + 1;

	for (int64_t i = 0; i < ndim; i++) {
		if (sizes[i] == 0)
			return 0;
		reach += (sizes[i] - 1) * strides[i];
	}
	return reach;
}

AtenTensorHandle make_one(const int64_t *row, struct sfr_hold *hold)
{
	const int64_t ndim = row[SFR_NEW_NDIM];
	const size_t itemsize =
		aoti_torch_dtype_element_size(static_cast<int32_t>(row[SFR_NEW_DTYPE]));
	const int64_t length = row[SFR_NEW_NBYTES] / static_cast<int64_t>(itemsize);

	/* torch makes the storage as long as the tensor reaches. */
	if (reach_of(row) == length)
		return make_storage(row, ndim, row + SFR_NEW_HEADER, row + SFR_NEW_HEADER + ndim,
				    row[SFR_NEW_OFFSET], hold);
	const int64_t stride = 1;
	void *whole = make_storage(row, 1, &length, &stride, 0, hold);
	if (!whole)
		return nullptr;
	AtenTensorHandle made = make_over(handle_of(whole), row);
	drop(&whole, 1);
	return made;
}

int make(const int64_t *row, size_t nr, struct sfr_hold *hold, void **tensors)
{
	for (size_t i = 0; i < nr; i++) {
		const int64_t over = row[SFR_NEW_OVER];

		tensors[i] =
			over < 0 ? make_one(row, hold) : make_over(handle_of(tensors[over]), row);
		if (!tensors[i]) {
			drop(tensors, i);
			return -1;
		}
		row += SFR_NEW_HEADER + 2 * row[SFR_NEW_NDIM];
	}
	return 0;
}

/* ---- the module ------------------------------------------------------------------- */

PyModuleDef definition = {
	PyModuleDef_HEAD_INIT,
	"stillframe._bridge",
	"What stillframe asks of many tensors in one call; for its other extension.",
	0,
	nullptr,
	nullptr,
	nullptr,
	nullptr,
	nullptr,
};

} // namespace

PyMODINIT_FUNC PyInit__bridge(void)
{
	static struct sfr_bridge functions = { describe, make, drop };
	PyObject *module = PyModule_Create(&definition);
	PyObject *capsule = PyCapsule_New(&functions, SFR_BRIDGE_CAPSULE, nullptr);

	if (!torch_from_blob)
		functions.make = nullptr;
	if (module && capsule && PyModule_AddObjectRef(module, "functions", capsule) < 0)
		Py_CLEAR(module);
	if (!capsule)
		Py_CLEAR(module);
	Py_XDECREF(capsule);
	return module;
}
