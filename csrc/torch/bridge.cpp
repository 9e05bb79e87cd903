/* The bridge: what the skeleton has to know of many tensors, in one call.
 *
 * Reading offset, sizes and strides of a tensor from Python makes two tuples and an int for
 * each; reading them here costs about a fifth of a microsecond a tensor. The file is the only
 * C++ of the project. It uses torch's stable ABI alone (the C shim of torch 2.10 and its list
 * functions), so one binary serves every torch from 2.10 on. It knows nothing of the core and
 * the core nothing of it: the two meet in the rows of int64 described below.
 *
 *   stillframe::describe(Tensor[] tensors, int rows, int room) -> int
 *
 * writes the tensors' rows one after another to the address `rows`, where there is room for
 * `room` int64 words, and returns the number of words that all rows together need. When that
 * is more than `room`, the caller makes room and calls again; nothing past `room` is touched.
 * One row is
 *
 *   data pointer, storage offset (elements), storage length (bytes), ndim, sizes.., strides..
 *
 * The data pointer is that of the tensor's first element, 0 for a tensor without elements.
 * Asking for it makes a copy-on-write tensor own its memory, as torch.save does too.
 *
 * It is registered under CompositeImplicitAutograd: with any other key the dispatcher would
 * hand over a materialised copy of a conjugated or negated tensor, at another address.
 */
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <cstdint>

namespace
{

constexpr int64_t kHeader = 4; /* words of a row before its sizes */

/* Owns the list that the dispatcher passed in. */
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
		STABLE_TORCH_ERROR_CODE_CHECK(torch_list_size(handle_, &size));
		return size;
	}

	AtenTensorHandle take(size_t i) const
	{
		StableIValue value = 0;
		STABLE_TORCH_ERROR_CODE_CHECK(torch_list_get_item(handle_, i, &value));
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
	~Handle()
	{
		(void)aoti_torch_delete_tensor_object(handle_); /* as above */
	}
	Handle(const Handle &) = delete;
	Handle &operator=(const Handle &) = delete;

	AtenTensorHandle get() const
	{
		return handle_;
	}

      private:
	AtenTensorHandle handle_;
};

/* Writes one tensor's row at `out` if `room` words suffice; returns the words it needs. */
int64_t describe_one(AtenTensorHandle tensor, int64_t *out, int64_t room)
{
	int64_t ndim = 0;
	STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &ndim));
	const int64_t words = kHeader + 2 * ndim;
	if (words > room)
		return words;

	void *data = nullptr;
	int64_t *sizes = nullptr;
	int64_t *strides = nullptr;
	STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &data));
	STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(tensor, &out[1]));
	STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor, &out[2]));
	STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
	STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
	out[0] = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data));
	out[3] = ndim;
	for (int64_t i = 0; i < ndim; i++) {
		out[kHeader + i] = sizes[i];
		out[kHeader + ndim + i] = strides[i];
	}
	return words;
}

/* The operator, in the dispatcher's boxed form: arguments come and the result goes through
 * `stack`. An error of the shim becomes a C++ exception, which torch turns into RuntimeError. */
void describe(StableIValue *stack, uint64_t /* num_args */, uint64_t /* num_outputs */)
{
	const List tensors(torch::stable::detail::to<StableListHandle>(stack[0]));
	const int64_t address = torch::stable::detail::to<int64_t>(stack[1]);
	const int64_t room = torch::stable::detail::to<int64_t>(stack[2]);
	int64_t *const rows = reinterpret_cast<int64_t *>(static_cast<uintptr_t>(address));
	const size_t nr_tensors = tensors.size();
	int64_t used = 0;

	for (size_t i = 0; i < nr_tensors; i++) {
		const Handle tensor(tensors.take(i));
		const int64_t left = used < room ? room - used : 0;

		used += describe_one(tensor.get(), rows + (left != 0 ? used : 0), left);
	}
	stack[0] = torch::stable::detail::from(used);
}

} // namespace

STABLE_TORCH_LIBRARY(stillframe, m)
{
	m.def("describe(Tensor[] tensors, int rows, int room) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(stillframe, CompositeImplicitAutograd, m)
{
	m.impl("describe", &describe);
}
