/* The bridge: what has to be asked of many tensors, or made many times, in one call.
 *
 * Reading offset, sizes and strides of a tensor from Python makes two tuples and an int for
 * each; reading them here costs about a fifth of a microsecond a tensor, and a tensor over given
 * memory costs half a microsecond in place of three. The file is the only C++ of the project. It
 * uses torch's stable ABI alone (the C shim of torch 2.10 and its list functions, and one function
 * of 2.11 where it is there), so one binary serves every torch from 2.10 on. It knows nothing of
 * the core and the core nothing of it: the two meet in the rows of bridge.h.
 *
 *   stillframe::describe(Tensor[] tensors, int rows, int room) -> int
 *
 * writes the tensors' rows one after another to the address `rows`, where there is room for
 * `room` int64 words, and returns the number of words that all rows together need. When that
 * is more than `room`, the caller makes room and calls again; nothing past `room` is touched.
 * Asking for the data pointer makes a copy-on-write tensor own its memory, as torch.save does too.
 *
 *   stillframe::make(int rows, int nr, int hold) -> Tensor[]
 *
 * makes a tensor in host memory for each of `nr` rows at the address `rows`; the storages among
 * them keep the struct sfr_hold at `hold`. None requires a gradient. Where torch has no function
 * for it, stillframe::can_make() is false and make() raises.
 *
 * All are registered under CompositeImplicitAutograd: with any other key the dispatcher would
 * hand over a materialised copy of a conjugated or negated tensor, at another address.
 */
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <cstdint>
#include <vector>

#include "bridge.h"

/* Of torch 2.11; without it the address is null. */
extern "C" __attribute__((weak)) AOTITorchError
torch_from_blob(void *data, int64_t ndim, const int64_t *sizes, const int64_t *strides,
		int64_t storage_offset, int32_t dtype, int32_t device_type, int32_t device_index,
		AtenTensorHandle *ret, int32_t layout, const uint8_t *opaque_metadata,
		int64_t opaque_metadata_size, void (*deleter)(void *data, void *ctx),
		void *deleter_ctx);

/* Throws when a function of the shim has failed: torch 2.11 has another name for it than 2.13. */
#ifdef STABLE_TORCH_ERROR_CODE_CHECK
#define CHECK_SHIM(call) STABLE_TORCH_ERROR_CODE_CHECK(call)
#else
#define CHECK_SHIM(call) TORCH_ERROR_CODE_CHECK(call)
#endif

namespace
{

/* Owns a list of the dispatcher's. */
class List
{
      public:
	explicit List(StableListHandle handle) : handle_(handle) {}
	~List()
	{
		(void)torch_delete_list(handle_); /* nothing can be done about a failure */
	}
	List(const List &) = delete;
	List &operator=(const List &) = delete;

	size_t size() const
	{
		size_t size = 0;
		CHECK_SHIM(torch_list_size(handle_, &size));
		return size;
	}

	AtenTensorHandle take(size_t i) const
	{
		StableIValue value = 0;
		CHECK_SHIM(torch_list_get_item(handle_, i, &value));
		return torch::stable::detail::to<AtenTensorHandle>(value);
	}

      private:
	StableListHandle handle_;
};

/* Owns one reference to a tensor. */
class Handle
{
      public:
	explicit Handle(AtenTensorHandle handle) : handle_(handle) {}
	Handle(Handle &&other) noexcept : handle_(other.release()) {}
	~Handle()
	{
		if (handle_)
			(void)aoti_torch_delete_tensor_object(handle_); /* as above */
	}
	Handle(const Handle &) = delete;
	Handle &operator=(const Handle &) = delete;

	AtenTensorHandle get() const
	{
		return handle_;
	}

	AtenTensorHandle release()
	{
		AtenTensorHandle handle = handle_;
		handle_ = nullptr;
		return handle;
	}

      private:
	AtenTensorHandle handle_;
};

template <typename T> T *at_address(StableIValue value)
{
	const int64_t address = torch::stable::detail::to<int64_t>(value);
	return reinterpret_cast<T *>(static_cast<uintptr_t>(address));
}

/* ---- describe --------------------------------------------------------------------- */

/* Writes one tensor's row at `out` if `room` words suffice; returns the words it needs. */
int64_t describe_one(AtenTensorHandle tensor, int64_t *out, int64_t room)
{
	int64_t ndim = 0;
	CHECK_SHIM(aoti_torch_get_dim(tensor, &ndim));
	const int64_t words = SFR_ROW_HEADER + 2 * ndim;
	if (words > room)
		return words;

	void *data = nullptr;
	int32_t dtype = 0;
	int64_t *sizes = nullptr;
	int64_t *strides = nullptr;
	CHECK_SHIM(aoti_torch_get_data_ptr(tensor, &data));
	CHECK_SHIM(aoti_torch_get_storage_offset(tensor, &out[SFR_ROW_OFFSET]));
	CHECK_SHIM(aoti_torch_get_storage_size(tensor, &out[SFR_ROW_NBYTES]));
	CHECK_SHIM(aoti_torch_get_dtype(tensor, &dtype));
	CHECK_SHIM(aoti_torch_get_sizes(tensor, &sizes));
	CHECK_SHIM(aoti_torch_get_strides(tensor, &strides));
	out[SFR_ROW_DATA] = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data));
	out[SFR_ROW_DTYPE] = dtype;
	out[SFR_ROW_NDIM] = ndim;
	for (int64_t i = 0; i < ndim; i++) {
		out[SFR_ROW_HEADER + i] = sizes[i];
		out[SFR_ROW_HEADER + ndim + i] = strides[i];
	}
	return words;
}

/* The operators come in the dispatcher's boxed form: arguments come and the result goes through
 * `stack`. An error of the shim becomes a C++ exception, which torch turns into RuntimeError. */
void describe(StableIValue *stack, uint64_t /* num_args */, uint64_t /* num_outputs */)
{
	const List tensors(torch::stable::detail::to<StableListHandle>(stack[0]));
	int64_t *const rows = at_address<int64_t>(stack[1]);
	const int64_t room = torch::stable::detail::to<int64_t>(stack[2]);
	const size_t nr_tensors = tensors.size();
	int64_t used = 0;

	for (size_t i = 0; i < nr_tensors; i++) {
		const Handle tensor(tensors.take(i));
		const int64_t left = used < room ? room - used : 0;

		used += describe_one(tensor.get(), rows + (left != 0 ? used : 0), left);
	}
	stack[0] = torch::stable::detail::from(used);
}

/* ---- make ------------------------------------------------------------------------- */

void put_hold(void * /* data */, void *hold)
{
	sfr_hold_put(static_cast<struct sfr_hold *>(hold));
}

/* A tensor with a storage of its own. If this fails the hold stays: whether torch has called the
 * deleter is not known, and memory that is never given back harms less than memory that is. */
AtenTensorHandle make_storage(const int64_t *row, int64_t ndim, const int64_t *sizes,
			      const int64_t *strides, int64_t offset, struct sfr_hold *hold)
{
	AtenTensorHandle made = nullptr;

	__atomic_add_fetch(&hold->count, 1, __ATOMIC_RELAXED);
	CHECK_SHIM(torch_from_blob(
		reinterpret_cast<void *>(static_cast<uintptr_t>(row[SFR_NEW_BASE])), ndim, sizes,
		strides, offset, static_cast<int32_t>(row[SFR_NEW_DTYPE]),
		aoti_torch_device_type_cpu(), -1, &made, aoti_torch_layout_strided(), nullptr, 0,
		put_hold, hold));
	return made;
}

/* A tensor over the storage of another. */
AtenTensorHandle make_over(AtenTensorHandle other, const int64_t *row)
{
	const int64_t ndim = row[SFR_NEW_NDIM];
	AtenTensorHandle made = nullptr;
	int64_t from = 0;

	CHECK_SHIM(aoti_torch_get_storage_offset(other, &from));
	CHECK_SHIM(aoti_torch__reinterpret_tensor(other, ndim, row + SFR_NEW_HEADER,
						  row + SFR_NEW_HEADER + ndim,
						  row[SFR_NEW_OFFSET] - from, &made));
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
	const Handle whole(make_storage(row, 1, &length, &stride, 0, hold));
	return make_over(whole.get(), row);
}

void make(StableIValue *stack, uint64_t /* num_args */, uint64_t /* num_outputs */)
{
	const int64_t *row = at_address<const int64_t>(stack[0]);
	const int64_t nr = torch::stable::detail::to<int64_t>(stack[1]);
	struct sfr_hold *const hold = at_address<struct sfr_hold>(stack[2]);
	std::vector<Handle> made;
	StableListHandle list = nullptr;

	if (!torch_from_blob)
		throw std::runtime_error("this torch cannot make tensors over given memory");
	made.reserve(static_cast<size_t>(nr));
	for (int64_t i = 0; i < nr; i++) {
		const int64_t over = row[SFR_NEW_OVER];

		made.emplace_back(over < 0 ? make_one(row, hold) :
					     make_over(made[static_cast<size_t>(over)].get(), row));
		row += SFR_NEW_HEADER + 2 * row[SFR_NEW_NDIM];
	}
	/* There is room: from here on nothing fails that would leave a tensor to nobody. */
	CHECK_SHIM(torch_new_list_reserve_size(made.size(), &list));
	for (Handle &each : made)
		CHECK_SHIM(torch_list_push_back(list, torch::stable::detail::from(each.release())));
	stack[0] = torch::stable::detail::from(list);
}

void can_make(StableIValue *stack, uint64_t /* num_args */, uint64_t /* num_outputs */)
{
	stack[0] = torch::stable::detail::from(torch_from_blob != nullptr);
}

} // namespace

STABLE_TORCH_LIBRARY(stillframe, m)
{
	m.def("describe(Tensor[] tensors, int rows, int room) -> int");
	m.def("make(int rows, int nr, int hold) -> Tensor[]");
	m.def("can_make() -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(stillframe, CompositeImplicitAutograd, m)
{
	m.impl("describe", &describe);
	m.impl("make", &make);
	m.impl("can_make", &can_make);
}
